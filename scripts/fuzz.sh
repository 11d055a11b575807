#!/bin/sh
# Runs every fuzz target for a bounded time (FUZZTIME, default 10s each).
set -eu
cd "$(dirname "$0")/.."
time=${FUZZTIME:-10s}
log=$(mktemp)
trap 'rm -f "$log"' EXIT
for package in $(go list -tags runc_nocriu ./...); do
	for target in $(go test -tags runc_nocriu -list '^Fuzz' "$package" | grep '^Fuzz' || true); do
		echo "$package $target ($time)"
		if ! go test -tags runc_nocriu -run '^$' -fuzz "^$target\$" -fuzztime "$time" "$package" >"$log" 2>&1; then
			cat "$log"
			exit 1
		fi
		grep -E '^fuzz: elapsed' "$log" | tail -n 1
	done
done
