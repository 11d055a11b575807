#!/bin/sh
# Runs every fuzz target for a bounded time (FUZZTIME, default 10s each).
set -eu
cd "$(dirname "$0")/.."
time=${FUZZTIME:-10s}
for package in $(go list -tags runc_nocriu ./...); do
	for target in $(go test -tags runc_nocriu -list '^Fuzz' "$package" | grep '^Fuzz' || true); do
		echo "$package $target ($time)"
		go test -tags runc_nocriu -run '^$' -fuzz "^$target\$" -fuzztime "$time" "$package" | tail -n 2
	done
done
