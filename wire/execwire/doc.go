// Package execwire is the event stream that a launcher gives its own caller:
// JSON lines with the output of one execution and how it ended.
//
// The trap first: the exit event is the only proof that a stream is whole. A
// stream that ends without one was cut, and what it carried says nothing about
// how the program ended. [Decoder.Next] tells the two apart by io.EOF and
// io.ErrUnexpectedEOF.
//
// Each line is one object (E1):
//
//	{"id":"r1","seq":1,"name":"stdout","enc":"b64","value":"aGkK"}
//	{"id":"r1","seq":2,"name":"stderr","enc":"utf8","value":"no\n"}
//	{"id":"r1","seq":2,"name":"heartbeat","pid":7,"elapsedMs":30000,"lastOutputMs":29000}
//	{"id":"r1","seq":3,"name":"exit","value":0,"cause":"ok","usage":{…}}
//
// seq grows by one from event to event of one execution, whatever the kind,
// and starts at 1. A heartbeat is not numbered: it carries the seq of the event
// before it, so a replay has no gaps (C16). The exit event is the last one. Its
// value is the exit code (C15); cause and usage are additions of this project.
// Decoders ignore keys that they do not know.
//
// enc alone says what value is: text, or bytes in base64. A program's bytes are
// always a value inside of a line that the launcher writes, so no program can
// forge an event (E34).
//
// [Encoder] writes one stream to an io.Writer. [Store] keeps the streams of many
// executions in memory for callers who come back: numbered, replayable from any
// event, at most 16 MiB each, with one live subscriber whose pace holds back the
// execution (E27).
//
// What this package does not do: it starts and kills nothing, so time limits
// (E29), the environment of the program (E31) and the question whether a failed
// start may be repeated (E32) are with its callers.
package execwire
