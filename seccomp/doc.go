// Package seccomp compiles syscall profiles to kernel programs.
//
// The trap first: a filter sees 64-bit registers, and the kernel often uses
// only the low half of one. A rule that compares an int argument by
// [Equal] or [NotEqual] can be passed or dodged with garbage in the upper 32
// bits. Compare such arguments by [MaskedEqual] with the mask 0xffffffff.
// A filter never sees what a pointer points to, so a flag behind a pointer
// (clone3, openat2) cannot be checked and the call must be refused as a whole.
//
// A [Profile] is plain data: a default [Action] and rules in order. The first
// rule that matches a call decides; if none does, the default decides.
// [Compile] turns it once, by libseccomp, into a [Filter] for the machine's own
// architecture. A Filter never changes and may be loaded into any number of
// processes by code without libc: set no_new_privs, then call seccomp(2) or
// prctl(2) with [Filter.Program] or [Filter.Bytes].
//
// What a compiled filter does for every profile, the one that allows
// everything included: a call by a foreign ABI (i386 by int 0x80, x32 numbers)
// kills the process, because rules are written for one numbering only.
//
// What this package does not do: it does not load filters, it has no
// user-notification and no tracing (SECCOMP_RET_USER_NOTIF, SECCOMP_RET_TRACE),
// so nothing here can tell afterwards which call was refused (J15).
//
// It needs cgo and libseccomp 2.5 or newer. The code is for amd64 and arm64; the
// golden file and the tests in a kernel are for amd64.
package seccomp
