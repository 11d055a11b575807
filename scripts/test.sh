#!/bin/sh
# Runs every test with the race detector and prints what failed, what was
# skipped, and which budget item was proven on which cgroup hierarchy.
# Usage: test.sh TIMEOUT [PACKAGE...]
set -u
timeout=$1
shift
[ $# -gt 0 ] || set -- ./...
log=$(mktemp)
trap 'rm -f "$log"' EXIT

echo "go test -race $* (at most $timeout a package)"
# The race detector would sleep for a second at the end of every process.
export GORACE="atexit_sleep_ms=0${GORACE:+ $GORACE}"
# One package at a time: their leak checks look at the whole machine.
go test -tags runc_nocriu -race -p 1 -count=1 -timeout "$timeout" -v "$@" >"$log" 2>&1
code=$?

grep -E '^(ok|FAIL|---|panic:|\?)' "$log" | grep -E '^(ok|FAIL)' || true
if [ $code != 0 ]; then
	echo
	echo "failures:"
	# What was printed between a failing test's start and its verdict.
	awk '/^=== RUN/ {buf=""} {buf=buf $0 "\n"} /^ *--- FAIL/ {printf "%s", buf; buf=""} /^--- PASS/ {buf=""}' "$log" | tail -n 300
	grep -nE '^(panic|fatal error|WARNING: DATA RACE|left behind|helper .* not used)' "$log" | head -20
fi

echo
echo "budget items proven by ending or refusing a real program:"
grep -hoE 'proven: .*' "$log" | sed 's/^proven: //' | sort -u | awk -F'|' '{printf "  %-11s %-52s %s\n", $1, $2, $3}'
for item in max_memory wall_clock cpu_time cpus max_pids max_output max_tmp max_calls max_bytes; do
	if ! grep -q "proven: $item|" "$log" && [ "$*" = "./..." ]; then
		echo "  $item: NOT PROVEN by any test"
		code=1
	fi
done

passed=$(grep -cE '^ *--- PASS' "$log")
failed=$(grep -cE '^ *--- FAIL' "$log")
skipped=$(grep -cE '^ *--- SKIP' "$log")
if [ "$skipped" != 0 ]; then
	echo
	echo "skipped:"
	grep -E '^ *--- SKIP' -A1 "$log"
fi
echo
echo "$passed passed, $failed failed, $skipped skipped"
exit $code
