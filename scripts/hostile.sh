#!/bin/sh
# Runs each hostile example into its limit and shows how the report tells it.
set -u
cd "$(dirname "$0")/.."
show() { # show PROGRAM FLAG...
	program=$1
	shift
	echo "\$ jail script $* --report - $program"
	./bin/jail script "$@" --report - "$program" | cut -c1-320
	echo
}
show examples/hostile/hog.py --memory 64MiB
show examples/hostile/loop.py --wall 1s
show examples/hostile/forkbomb.py --wall 1s --pids 20
