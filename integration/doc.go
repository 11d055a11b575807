// Package integration is the home of what tests and measures the whole of jail
// from outside: the benchmarks in bench and peers, and the emulated machine with
// cgroup v2 in vm. It has no code of its own.
package integration
