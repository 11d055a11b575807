// Package node carries the guest that runs Node.js programs in a jail.
//
// Nothing in the guest is a security boundary: the program shares its process
// and can reach fds 3 and 4 itself. The jail around the process and the host's
// end of both channels hold it; the guest only serves honest programs.
//
// The guest is one file without dependencies for Node.js 18 and later. It reads
// one Start frame from fd 3, runs the program in it as an ES module with the
// globals host and ToolError, sends one Result, and carries tool calls over
// fd 4 (protocols.md 1, 5 and 7.1). The program can import the built-in
// modules and file: URLs; its own URL is a data: URL, so there is no package
// search and no relative import.
//
// The program's value is its default export, awaited if it is a promise, else
// globalThis.result, else empty. It has to be JSON without loss: a BigInt and
// an integral number cross with all digits; NaN, infinities, negative zero,
// lone surrogates, undefined members of an array, cycles, and objects that are
// neither plain nor arrays end the run with class invalid, a value that does
// not fit one frame with class quota. A property that is undefined is left
// out, as JSON.stringify does. In answers of tools, integers beyond 2^53-1 are
// BigInt.
//
// An uncaught exception or an unhandled rejection ends the run at once with
// class permanent, or with the class of an uncaught ToolError, and exit code 1.
// The error text is the stack with the program's own frames and those of its
// causes, at most 4 KiB, of which the end is kept; stderr gets all of it.
// process.exit(n) gives exit code n, and for n other than 0 the error "exit
// status n". Otherwise the program ends when its event loop has nothing more to
// do; if a top-level await still waits then, the exit code is 13.
//
// Calls in the Result counts requests sent, early reads and requests that the
// host refused included; Bytes counts the value and error text of every
// response that arrived, in UTF-8, but for the error text of class quota: as
// the host's ledger does (W37).
//
// The guest does not queue calls: above the host's in-flight cap they fail with
// class rate_limited. A value that is no JSON text is given as that text.
//
// Node itself runs 11 threads, which count against max_pids, and takes 44 MB
// (20.20 on x86-64).
//
// stdout and stderr are made to block when they are pipes, so that what was
// printed is out when the process ends.
package node
