// Command bench measures what a jail costs: to start, to keep, to talk to, to
// end.
//
// It consists of sections, each of which prints its tables with a line that says
// how they were measured; -only chooses some. What is compared takes turns in a
// random order, each turn after a pause, in one run on one machine: compare rows
// of one run only. Each run's output and cause are checked. A row of another
// project that fails is reported with its error and no time; any other failure
// ends the benchmark. So does a signal: what was started is ended, and the
// templates are dropped, first.
//
//   - start.go, oci.go: start to exit, CPU time and starts a second
//   - calls.go: tool calls from a guest
//   - pool.go: parked jails
//   - stream.go: output
//   - limits.go: how late and how exact the limits are
//   - sequence.go: many jails after each other
//   - scale.go: many jails at once
//   - turns.go, stats.go, machine.go: how it is measured
package main
