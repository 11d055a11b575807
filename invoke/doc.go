// Package invoke puts a chain of checks in front of the tools that a jailed
// program may call, in such a way that no call can go around it.
//
// The trap first: a tool runs on the host, with the host's rights, on arguments
// that a hostile program chose. The chain decides which calls reach it and keeps
// the record; it does not make a careless tool safe. A tool that builds a path,
// a query or a shell line from its arguments is a way out of the jail.
//
// # What it promises
//
//   - A Chain's handler is reached by Do alone, after every stage allowed the
//     call. A stage that fails or panics denies.
//   - One Record for every call: allowed, denied, unknown, failed or panicked.
//   - A tool gets lossless JSON that matches its schema, as its own copy, and its
//     value reaches the program without a changed digit, or not at all.
//   - Every failure has a class of package toolfail, decided by types and never
//     by text. A panic's value and a broken stage's cause stay on the host.
//   - The processes of a command tool end with its call, those of an MCP server
//     with Close, as long as they stay in their process group.
//
// # What it does not promise
//
//   - It does not count calls or bytes, and sets no deadline: the call channel's
//     server does (package wire).
//   - It does not retry, and it cannot stop a Go tool that ignores its context.
//   - It does not confine command tools or MCP servers, which are the host's own
//     programs. A command also inherits descriptors that this process got from
//     its parent without close-on-exec. What a command prints on standard error
//     when it fails is shown to the program.
//   - A recorder cannot fail a call. Where a call must not run without a trace,
//     use Audit.
//
// # The pieces
//
// NewChain, Stage and Record are the chain. NewTools puts a Manifest of Go
// functions behind one; LoadFile reads a manifest of host commands and MCP
// servers from a file. A launcher takes the Tools, gives Bindings to the guest
// and has one Run a jail answer its requests. AllowOnly, RateLimit, CheckArgs,
// Approve and Audit are stages to choose from.
package invoke
