package strictjson

import (
	"bytes"
	"math/bits"
	"strings"
	"unicode/utf8"
)

const hexDigits = "0123456789abcdef"

// asciiPlain marks the bytes that stand for themselves inside of a JSON string.
var asciiPlain = func() (t [256]bool) {
	for c := 0x20; c < 0x80; c++ {
		t[c] = c != '"' && c != '\\'
	}
	return t
}()

// plainRun returns where the run of such bytes that starts at text[i] ends. It
// looks at eight bytes at a time.
func plainRun[T string | []byte](text T, i int) int {
	const ones, high = 0x0101010101010101, 0x8080808080808080
	for len(text)-i >= 8 {
		t := text[i : i+8]
		x := uint64(t[0]) | uint64(t[1])<<8 | uint64(t[2])<<16 | uint64(t[3])<<24 |
			uint64(t[4])<<32 | uint64(t[5])<<40 | uint64(t[6])<<48 | uint64(t[7])<<56
		// The high bit of a byte is set if it was, if the byte is below 0x20, or if it
		// is the quote or the backslash. A borrow reaches only bytes behind such a one.
		if m := (x | (x - ones*0x20) | ((x ^ ones*'"') - ones) | ((x ^ ones*'\\') - ones)) & high; m != 0 {
			return i + bits.TrailingZeros64(m)/8
		}
		i += 8
	}
	for i < len(text) && asciiPlain[text[i]] {
		i++
	}
	return i
}

func isSurrogate(r rune) bool { return 0xD800 <= r && r < 0xE000 }

// escape decodes the escape at text[i], which is a backslash. It returns the
// character and where the text goes on, or 0 for no valid escape. A surrogate is
// returned as such if it is alone.
func escape(text []byte, i int) (r rune, next int) {
	if i+1 >= len(text) {
		return 0, 0
	}
	switch text[i+1] {
	case '"', '\\', '/':
		return rune(text[i+1]), i + 2
	case 'b':
		return '\b', i + 2
	case 'f':
		return '\f', i + 2
	case 'n':
		return '\n', i + 2
	case 'r':
		return '\r', i + 2
	case 't':
		return '\t', i + 2
	case 'u':
		r = hex4(text, i+2)
		if r < 0 {
			return 0, 0
		}
		next = i + 6
		if 0xD800 <= r && r < 0xDC00 && next+1 < len(text) && text[next] == '\\' && text[next+1] == 'u' {
			if low := hex4(text, next+2); 0xDC00 <= low && low < 0xE000 {
				return 0x10000 + (r-0xD800)<<10 + (low - 0xDC00), next + 6
			}
		}
		return r, next
	}
	return 0, 0
}

// hex4 returns the four hex digits at text[i], or -1.
func hex4(text []byte, i int) rune {
	if len(text)-i < 4 {
		return -1
	}
	var r rune
	for _, c := range text[i : i+4] {
		switch {
		case '0' <= c && c <= '9':
			c -= '0'
		case 'a' <= c && c <= 'f':
			c -= 'a' - 10
		case 'A' <= c && c <= 'F':
			c -= 'A' - 10
		default:
			return -1
		}
		r = r<<4 | rune(c)
	}
	return r
}

// quotedRuneLen is the length of what appendQuotedRune writes (L23).
func quotedRuneLen(r rune) int {
	switch {
	case r == '"' || r == '\\' || r == '\b' || r == '\t' || r == '\n' || r == '\f' || r == '\r':
		return 2
	case r < 0x20 || isSurrogate(r):
		return 6
	default:
		return utf8.RuneLen(r)
	}
}

func appendQuotedRune(dst []byte, r rune) []byte {
	switch {
	case r == '"' || r == '\\':
		return append(dst, '\\', byte(r))
	case r == '\b':
		return append(dst, '\\', 'b')
	case r == '\t':
		return append(dst, '\\', 't')
	case r == '\n':
		return append(dst, '\\', 'n')
	case r == '\f':
		return append(dst, '\\', 'f')
	case r == '\r':
		return append(dst, '\\', 'r')
	case r < 0x20 || isSurrogate(r):
		return append(dst, '\\', 'u', hexDigits[r>>12&15], hexDigits[r>>8&15], hexDigits[r>>4&15], hexDigits[r&15])
	default:
		return utf8.AppendRune(dst, r)
	}
}

// AppendQuote appends s as a JSON string to dst. It escapes the quote, the
// backslash and the characters below U+0020 and nothing else: <, >, & and U+2028
// stay as they are, unlike in encoding/json (L25). Invalid UTF-8 becomes U+FFFD,
// so a caller that must not lose bytes asks utf8.ValidString first.
func AppendQuote(dst []byte, s string) []byte {
	dst = append(dst, '"')
	for i := 0; i < len(s); {
		run := i
		i = plainRun(s, i)
		dst = append(dst, s[run:i]...)
		if i == len(s) {
			break
		}
		r, n := rune(s[i]), 1
		if r >= utf8.RuneSelf {
			r, n = utf8.DecodeRuneInString(s[i:])
		}
		dst = appendQuotedRune(dst, r)
		i += n
	}
	return append(dst, '"')
}

// QuotedLen returns how many bytes AppendQuote(nil, s) has, without building
// them (L23).
func QuotedLen(s string) int {
	n := 2
	for i := 0; i < len(s); {
		if end := plainRun(s, i); end > i {
			n += end - i
			i = end
			continue
		}
		r, size := utf8.DecodeRuneInString(s[i:])
		n += quotedRuneLen(r)
		i += size
	}
	return n
}

// nextEscape returns where the first backslash at or behind text[i] is, or where
// the text ends.
func nextEscape(text []byte, i int) int {
	if n := bytes.IndexByte(text[i:], '\\'); n >= 0 {
		return i + n
	}
	return len(text)
}

// unquotedLen returns the length of the text of a string token that the scanner
// accepted, and whether it has escapes.
func unquotedLen(raw []byte) (n int, escaped bool) {
	text := raw[1 : len(raw)-1]
	n = len(text)
	for i := nextEscape(text, 0); i < len(text); {
		r, next := escape(text, i)
		width := 3 // of U+FFFD
		if !isSurrogate(r) {
			width = utf8.RuneLen(r)
		}
		n += width - (next - i)
		escaped = true
		if i = next; i < len(text) && text[i] != '\\' {
			i = nextEscape(text, i)
		}
	}
	return n, escaped
}

// unquote returns the text of a string token that the scanner accepted, in
// memory of its own. A lone surrogate becomes U+FFFD; callers refuse it earlier.
func unquote(raw []byte) string {
	n, escaped := unquotedLen(raw)
	text := raw[1 : len(raw)-1]
	if !escaped {
		return string(text)
	}
	var b strings.Builder
	b.Grow(n)
	for i := 0; i < len(text); {
		if text[i] == '\\' {
			r, next := escape(text, i)
			b.WriteRune(r)
			i = next
			continue
		}
		end := nextEscape(text, i)
		b.Write(text[i:end])
		i = end
	}
	return b.String()
}
