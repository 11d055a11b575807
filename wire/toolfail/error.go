package toolfail

import (
	"context"
	"errors"
	"strings"
	"unicode/utf8"
)

// MaxText bounds the text of a failure in bytes (K7).
const MaxText = 4 << 10

// cutMark ends a text that CapText shortened. Its bytes are inside of MaxText.
const cutMark = " [cut]"

// Error is a failure whose class is known. Text is for humans.
type Error struct {
	Class Class
	Text  string
}

// Error returns the class and the text, for example "denied: not on the list".
func (e *Error) Error() string {
	if e.Text == "" {
		return string(Parse(string(e.Class)))
	}
	return string(Parse(string(e.Class))) + ": " + e.Text
}

// Of returns the class of err and looks at types and sentinels only, never at
// the text: the class of the first *Error in its tree, else Transient for
// context.DeadlineExceeded, else Canceled for context.Canceled, else Unknown.
// Of(nil) is the empty string, which is no class.
func Of(err error) Class {
	if err == nil {
		return ""
	}
	var e *Error
	switch {
	case errors.As(err, &e):
		return Parse(string(e.Class))
	case errors.Is(err, context.DeadlineExceeded):
		return Transient
	case errors.Is(err, context.Canceled):
		return Canceled
	default:
		return Unknown
	}
}

// CapText returns s as valid UTF-8 of at most MaxText bytes. Invalid bytes
// become U+FFFD. A text that is too long is cut between two characters and ends
// in " [cut]" (K7, L35). The cost does not grow with what is cut off.
func CapText(s string) string {
	cut := len(s) > MaxText
	if cut {
		s = s[:MaxText]
	}
	s = strings.ToValidUTF8(s, "\uFFFD")
	// U+FFFD is longer than a bad byte, so the text may have grown past the limit.
	if cut || len(s) > MaxText {
		end := min(len(s), MaxText-len(cutMark))
		for end > 0 && end < len(s) && !utf8.RuneStart(s[end]) {
			end--
		}
		s = s[:end] + cutMark
	}
	return s
}
