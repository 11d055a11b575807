// Package wire is the protocol between a launcher and the program it holds in a
// jail: four frame types on two channels, each channel one connection.
//
// The trap first: give this package connections that Close unblocks. os.NewFile
// over a blocking descriptor gives a file whose Read stays blocked after Close,
// and then neither a context nor a deadline ends anything (W66). [Pair] and
// [OpenFD] return files of the right kind; calling Fd on such a file turns it
// into the wrong kind.
//
// # Channels
//
// The start channel (fd 3 in the jail) carries one [Start] down and one [Result]
// up: [Starter] in the launcher, [Runner] in the jail. The call channel (fd 4)
// carries any number of [Request]s up and [Response]s down: [Client] in the
// jail, [Server] in the launcher. The child asks and the parent answers, never
// the other way round, so there is no type for a connection that does both
// (W16, W17, W67).
//
// A frame is a 4-byte big-endian length N, 1 to [MaxFrameBytes], and N bytes of
// JSON text: one object with the integer field v = 1 (W1, W10). [ReadFrame] and
// [WriteFrame] are the whole framing.
//
// # Promises
//
// The launcher's side treats every inbound byte as hostile:
//
//   - No length is trusted: memory grows with the bytes that arrived (W3, W9).
//   - v is looked at before anything else; another version, a key that is there
//     twice or in other case, invalid UTF-8, a lone surrogate, null, a wrong type,
//     and bytes behind the object are each refused by type of error. Unknown
//     members of a good frame are dropped (C4).
//   - Numbers that the child sends decide nothing. Calls and bytes are counted
//     where they are accepted (W35).
//   - A child that never reads its responses, or that goes on calling when its
//     calls are used up, ends Serve with an error (J13, C19).
//   - Memory of one Server is bounded by: one frame being read, at most 2 x
//     [MaxFrameBytes] while its buffer grows; [MaxInflightBytes] of requests whose
//     handlers run; of responses, 2 x ([MaxFrameBytes] + 1 MiB) encoded, and for
//     each call in flight the one value that its handler returned; and, with a
//     Budget of up to 65536 calls, their ids. Buffers above 8 KiB go back to a pool
//     that all connections share and the garbage collector empties.
//
// # What it does not do
//
// It does not parse args or value: both are opaque strings here, and package
// strictjson looks inside (C6). It never retries (C18), starts no process, and
// keeps no clock but the deadline of a call. It cannot stop a handler that
// ignores its context; such a handler keeps its place among the calls in flight
// until it returns (W46). It does not hide what a handler writes into an error
// text: that text is shown to the program.
package wire
