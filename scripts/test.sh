#!/bin/sh
# Runs every test with the race detector on this host, then those that depend on
# cgroups in a machine that has cgroup v2 only. Prints what failed, what was
# skipped, and which budget item was proven on which cgroup hierarchy.
#
# Usage: test.sh TIMEOUT [PACKAGE...]
#   PACKAGE   run these only, and not in the machine
#
# Environment: JAIL_NO_VM  1 does without the machine, and does not test cgroup v2
set -u
timeout=$1
shift
[ $# -gt 0 ] || set -- ./...
dir=${JAIL_VM_DIR:-build/vm}
log=$(mktemp)
trap 'rm -f "$log"' EXIT

# Not an older run's.
rm -f "$dir/all.log"

# Why there is no machine, if there is none. What it needs is had first: that it
# cannot be had is told now and not after minutes.
without=""
if [ "$*" != "./..." ]; then
	without="only $* is tested"
elif [ "$(stat -f -c %T /sys/fs/cgroup)" = cgroup2fs ]; then
	without="this host has cgroup v2 itself; v1 is not tested"
elif [ "${JAIL_NO_VM:-}" = 1 ]; then
	without="JAIL_NO_VM=1"
elif ! ./scripts/integration.sh setup; then
	cat >&2 <<-'END'

		test.sh: the machine for cgroup v2 cannot be had, see above. It needs root, Debian's
		packages and QEMU. JAIL_NO_VM=1 tests without it: then NOTHING IS TESTED ON CGROUP V2.
	END
	exit 1
fi

echo "go test -race $* (at most $timeout a package)"
# The race detector would sleep for a second at the end of every process.
export GORACE="atexit_sleep_ms=0${GORACE:+ $GORACE}"
# One package at a time: their leak checks look at the whole machine.
go test -tags runc_nocriu -race -p 1 -count=1 -timeout "$timeout" -v "$@" >"$log" 2>&1
code=$?
if [ "$*" = "./..." ]; then
	# Launchers that are killed at every step, in a build with fault points.
	go test -tags runc_nocriu,faults -race -count=1 -timeout "$timeout" -v -run '^TestFault' ./jail >>"$log" 2>&1 || code=1
fi

grep -E '^(ok|FAIL|---|panic:|\?)' "$log" | grep -E '^(ok|FAIL)' || true
if [ $code != 0 ]; then
	echo
	echo "failures:"
	# What was printed between a failing test's start and its verdict.
	awk '/^=== RUN/ {buf=""} {buf=buf $0 "\n"} /^ *--- FAIL/ {printf "%s", buf; buf=""} /^--- PASS/ {buf=""}' "$log" | tail -n 300
	grep -nE -A3 '^(panic|fatal error|WARNING: DATA RACE|left behind|helper .* not used)' "$log" | cut -c 1-400 | head -40
fi
if grep -qE '^ *--- SKIP' "$log"; then
	echo
	echo "skipped:"
	grep -E '^ *--- SKIP' -A1 "$log"
fi

echo
if [ -z "$without" ]; then
	./scripts/integration.sh quick || code=1
	# Empty if it broke off: then nothing is proven there.
	: >>"$dir/all.log"
else
	echo "no machine with cgroup v2: $without"
fi

if [ "$*" = "./..." ]; then
	echo
	# With the machine's column there are two.
	./scripts/proven.py "$log" $([ -n "$without" ] || echo "$dir/all.log") || code=1
fi

count() { grep -cE "^ *--- $1" "$2"; }
echo
echo "$(count PASS "$log") passed, $(count FAIL "$log") failed, $(count SKIP "$log") skipped on this host"
[ -n "$without" ] || echo "$(count PASS "$dir/all.log") passed, $(count FAIL "$dir/all.log") failed, $(count SKIP "$dir/all.log") skipped in the machine"
if [ "$without" = JAIL_NO_VM=1 ]; then
	cat <<-'END'

		*****************************************************************
		* JAIL_NO_VM=1: NOTHING WAS TESTED ON CGROUP V2.                *
		*****************************************************************
	END
fi
[ $code = 0 ] || echo "FAIL"
exit $code
