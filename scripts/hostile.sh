#!/bin/sh
# Runs each hostile example into its limit and shows how the report tells it.
set -u
cd "$(dirname "$0")/.."
report=$(mktemp)
trap 'rm -f "$report"' EXIT
show() { # show PROGRAM FLAG...
	program=$1
	shift
	echo "\$ jail script $* --report report.json $program"
	./bin/jail script "$@" --report "$report" "$program" 2>&1
	echo "exit code $?"
	/usr/bin/python3 - "$report" <<-'PY'
		import json, sys
		r = json.load(open(sys.argv[1]))
		for key in "cause", "class", "wall_ns", "memory", "pids", "leftovers":
		    print("  %-10s %s" % (key, json.dumps(r[key])))
	PY
	echo
}
show examples/hostile/hog.py --memory 64MiB
show examples/hostile/loop.py --wall 1s
show examples/hostile/forkbomb.py --wall 1s --pids 20
