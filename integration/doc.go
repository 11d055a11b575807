// Package integration is the home of what tests and measures the whole of jail
// from outside: the benchmark command in bench. It has no code of its own.
package integration
