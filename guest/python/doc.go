// Package python carries the guest that runs Python programs in a jail.
//
// Nothing in the guest is a security boundary: the program shares its process
// and can reach fds 3 and 4 itself. The jail around the process and the host's
// end of both channels hold it; the guest only serves honest programs.
//
// The guest is one file without dependencies for CPython 3.9 and later. It
// reads one Start frame from fd 3, runs the program in it as __main__ with the
// global host, sends one Result, and carries tool calls over fd 4 (protocols.md
// 1, 5 and 7.1). Where many jails share a spec, [Compile] spares each of them
// the compilation of the guest.
//
// The program's value is its global result, else the value of its last
// expression, else empty. It has to be JSON without loss: integers of any size
// cross with all digits; NaN, infinities, negative zero, lone surrogates, keys
// that are no str, and any other type end the run with class invalid, a value
// that does not fit one frame with class quota.
//
// An uncaught exception ends the run with class permanent, or with the class
// of an uncaught host.ToolError, and exit code 1. The error text is the
// traceback of the program's own frames, at most 4 KiB, of which the end is
// kept; stderr gets all of it. sys.exit(n) gives exit code n, and for n other
// than 0 the error "exit status n". Threads that are no daemons are joined,
// atexit functions run, and stdout and stderr are flushed before the Result. A
// forked child never sends one. stdout is flushed at each line.
//
// Calls in the Result counts requests sent, early reads and requests that the
// host refused included; Bytes counts the value and error text of every
// response that arrived, in UTF-8, but for the error text of class quota: as
// the host's ledger does (W37).
//
// The guest does not queue calls: above the host's in-flight cap they fail
// with class rate_limited. The first call starts two threads, which count
// against max_pids; without room for them the call fails. A value that is no
// JSON text is given as that text.
package python
