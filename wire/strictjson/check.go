package strictjson

import "errors"

// StdlibDepth is how deep a text may nest so that encoding/json still reads it
// (L18). It is what Options.MaxDepth is for (C6).
const StdlibDepth = 10000

// Options limits Check and Compact.
type Options struct {
	// MaxBytes bounds the compact form in bytes. 0 is no bound beyond the text
	// itself, which is in memory already. A negative value is an error.
	MaxBytes int
	// MaxDepth bounds how many containers may be open at once. 0 is no bound: a
	// level costs one bit. A negative value is an error.
	MaxDepth int
	// UniqueKeys refuses an object with two equal keys as not lossless. Escapes
	// are resolved first, so "a" and "\u0061" are equal; letter case counts. It
	// costs 16 bytes for each key of the objects that are open at once.
	UniqueKeys bool
}

var errOptions = errors.New("strictjson: negative limit in Options")

// Check walks text, which must be one JSON value, and returns the length of its
// compact form: no white space, strings as AppendQuote writes them, numbers as
// they stand (L21, L23, L24).
//
// Refused as ErrNotLossless are lone surrogates, negative zero in any spelling,
// numbers too large for a double, and integers without fraction or exponent that
// no double equals, such as 2^53+1 (L19, L20). A number with a fraction or an
// exponent is a double by intent and may be rounded.
//
// The walk stops at the first byte that is not JSON, too deep or over budget.
// What is not lossless is reported only at the end: ErrOverBudget beats it,
// whatever comes first in the text (L22). On ErrNotLossless alone the length is
// returned as well; on any other error it is 0. Safe for concurrent use.
func Check(text []byte, o Options) (bytes int, err error) {
	s, err := walk(text, o, nil, false)
	if err != nil {
		return 0, err
	}
	if s.lossy != nil {
		return s.size, s.lossy
	}
	return s.size, nil
}

// Compact appends the compact form of text to dst. It accepts and refuses what
// Check does with the same options, and what it appends is as long as Check
// says (L25). On an error dst is returned as it was. Safe for concurrent use.
func Compact(dst, text []byte, o Options) ([]byte, error) {
	s, err := walk(text, o, dst, true)
	if err != nil {
		return dst, err
	}
	if s.lossy != nil {
		return dst, s.lossy
	}
	return s.out, nil
}

func walk(text []byte, o Options, dst []byte, emit bool) (*scanner, error) {
	if o.MaxBytes < 0 || o.MaxDepth < 0 {
		return nil, errOptions
	}
	s := &scanner{
		text: text, maxBytes: o.MaxBytes, maxDepth: o.MaxDepth,
		numbers: true, unique: o.UniqueKeys, out: dst, emit: emit,
	}
	if err := s.document(); err != nil {
		return nil, err
	}
	return s, nil
}
