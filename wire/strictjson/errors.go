package strictjson

import (
	"errors"
	"strconv"
)

// What is wrong with a text. Every error of this package that concerns input is
// an *Error that wraps exactly one of them.
var (
	// ErrInvalid: not JSON, or JSON in invalid UTF-8.
	ErrInvalid = errors.New("invalid JSON")
	// ErrOverBudget: the compact form is longer than Options.MaxBytes, or a
	// string longer than the limit given to Value.Text.
	ErrOverBudget = errors.New("JSON over budget")
	// ErrNotLossless: a number or string that a reader would not get back as it
	// was written, or, where keys must be unique, an equal key.
	ErrNotLossless = errors.New("JSON not lossless")
	// ErrDepth: nested deeper than Options.MaxDepth.
	ErrDepth = errors.New("JSON nested too deeply")
	// ErrKey: a key of a frame that is there twice, differs from an expected one
	// by case only, or is one too many.
	ErrKey = errors.New("JSON key refused")
	// ErrType: a value of a frame that is missing or of another type.
	ErrType = errors.New("JSON value of the wrong type")
)

// Error says what is wrong and where.
type Error struct {
	// Err is one of the sentinels of this package.
	Err error
	// Offset is the byte at which the fault starts, from the beginning of the
	// text that was given to the function that failed.
	Offset int
	// Reason is for humans. It never quotes the text.
	Reason string
}

// Error returns the sentinel's text, the reason and the offset.
func (e *Error) Error() string {
	return e.Err.Error() + ": " + e.Reason + " at offset " + strconv.Itoa(e.Offset)
}

// Unwrap returns the sentinel.
func (e *Error) Unwrap() error { return e.Err }
