// Package jail runs programs that nobody trusts.
//
// [Run] takes a [Spec], refuses it if this host cannot enforce what it asks for,
// and otherwise runs the program in namespaces, a cgroup leaf and a seccomp
// filter of its own, until it ends or one of its limits ends it. What happened
// is told by a [Report] whose verdict rests on kernel facts and the launcher's
// own books, never on what the program says.
//
// Traps first. The package needs root (CAP_SYS_ADMIN and the rights to write
// cgroups); it refuses to run without. Importing it lets the running binary act
// as the package's template helper (see package rootfs). A zero in a [Budget]
// means that the item is not asked for, explicitly: [DefaultBudget] is what the
// command line uses. A jail ends with the process that started it, also when
// that process is killed. The first start begins a small helper process, which
// forks the inits of all jails until [Settle] or the end of this process.
//
// Data goes one way: spec, preflight, leaf, jail, channels, verdict, report.
//
//   - spec.go: what is asked for, checked by itself
//   - preflight.go: what this host can enforce; the table of "jail check"
//   - start.go, forker.go: template, leaf, descriptors, init
//   - pool.go: jails that are made ahead
//   - output.go, splice.go: stdout and stderr, counted and capped
//   - channels.go: the guest's fds 3 and 4
//   - jail.go, thrash.go: the running jail, its limits and its end
//   - verdict.go, report.go: why it ended, and the whole account
//
// Not promised: protection against bugs of the kernel that an unprivileged
// process without network can reach through the system calls of the seccomp
// profile; equality of results between runs; a bound on memory that the tools of
// the host use.
package jail
