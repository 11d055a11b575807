// Command peers measures this project beside other programs that start
// sandboxes, in one run on one machine.
//
// Every row starts the same static program in the same kind of root, takes its
// output and its exit code and checks both. The starts of all rows and all
// programs take turns in a random order, each after a pause, so that a row is
// measured from idle and what else happens on the machine meets all alike.
// Compare rows of one run only.
//
// What a sandbox is worth is not in its time: each row therefore starts, once, a
// program that tells from inside which namespaces are its own, what it may do
// and what it sees, while the limits of its cgroup are read from outside. A peer
// that is not installed or refuses this host is listed with the reason.
//
//   - starter.go: what a row is, and what is started
//   - own.go, command.go, oci.go, isolate.go, judge.go: the rows
//   - setup.go, deny.go: the root and the filter that all share
//   - measure.go: start times, starts per second, CPU time
//   - posture.go, procs.go, cgroups.go: what is on, and the memory of a sandbox
//   - report.go, chart.go, stats.go: tables, JSON, SVG
//
// It needs root. It starts nothing but the payload and the guests' python3, and
// leaves nothing behind, also when it is interrupted.
package main
