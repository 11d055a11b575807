// Package strictjson reads JSON that a hostile program wrote.
//
// The trap first: encoding/json is lenient where it matters here. It matches
// keys without regard to case, lets the last of several equal keys win, turns
// invalid UTF-8 and lone surrogates into U+FFFD without a word, takes null for
// anything, and rounds integers to doubles (L16, L19). Text that this package
// accepted may still be read differently by such a decoder: set
// [Options.UniqueKeys] for text that somebody else will decode.
//
// It has two parts over one scanner:
//
//   - [Members] and [Elements] split a small frame into its members as raw
//     [Value]s, which are then decoded one by one. Keys must be unique, and a key
//     that differs from an expected one only by case is refused. Nothing is
//     decoded that was not asked for.
//   - [Check] and [Compact] look at a whole JSON text of any depth: is it JSON,
//     can it cross without loss, and how long is its compact form (L17 to L25)?
//
// The scanner keeps one bit a level and never recurses, so depth costs an eighth
// of a byte: the limit of 10 000 levels that encoding/json and
// encoding/json/jsontext share is why neither is used here (L18).
//
// The package does not build Go values out of JSON beyond strings, booleans and
// 64-bit integers, and it does not limit the size of the text itself: that is the
// job of whoever read it.
package strictjson
