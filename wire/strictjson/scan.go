package strictjson

import (
	"bytes"
	"cmp"
	"hash/maphash"
	"math"
	"slices"
	"strconv"
	"unicode/utf8"
)

// maxSafe is the largest integer up to which every integer has a double of its
// own (2^53-1).
const maxSafe = 1<<53 - 1

// keySeed makes the hashes of UniqueKeys unpredictable to whoever writes the keys.
var keySeed = maphash.MakeSeed()

// scanner walks one JSON value without recursion. It is the only code of the
// package that knows the grammar. Its zero value, with text set, checks syntax
// and lone surrogates and nothing else.
type scanner struct {
	text []byte
	pos  int

	// nest has one bit for each open container, 1 for an object (L17).
	nest  []uint64
	depth int

	maxDepth int // 0: none
	maxBytes int // 0: none
	numbers  bool
	unique   bool

	// size is the length of the compact form so far.
	size int
	// out receives the compact form if emit is set.
	out  []byte
	emit bool

	// lossy is the first fault that does not stop the walk, since over-budget
	// beats it wherever it is (L22).
	lossy *Error

	// keys holds those of the open objects, and first where each object's begin.
	keys  []keyRef
	first []int
}

// keyRef is one key of an open object: 16 bytes, whatever its length.
type keyRef struct {
	hash  uint64
	start int
}

func (s *scanner) fail(err error, at int, reason string) *Error {
	return &Error{Err: err, Offset: at, Reason: reason}
}

func (s *scanner) note(at int, reason string) {
	if s.lossy == nil {
		s.lossy = s.fail(ErrNotLossless, at, reason)
	}
}

// add charges n bytes of compact form. It returns false once over budget (L21).
func (s *scanner) add(n int) bool {
	s.size += n
	return s.maxBytes == 0 || s.size <= s.maxBytes
}

func (s *scanner) over(at int) *Error {
	return s.fail(ErrOverBudget, at, "compact form is longer than "+strconv.Itoa(s.maxBytes)+" bytes")
}

// punct charges and emits one structural byte, which is at pos.
func (s *scanner) punct(c byte) *Error {
	if !s.add(1) {
		return s.over(s.pos)
	}
	if s.emit {
		s.out = append(s.out, c)
	}
	s.pos++
	return nil
}

func (s *scanner) space() {
	for s.pos < len(s.text) {
		switch s.text[s.pos] {
		case ' ', '\t', '\n', '\r':
			s.pos++
		default:
			return
		}
	}
}

// peek returns the byte at pos, or 0 at the end: 0 is no byte of JSON outside of
// a string, so every caller refuses it.
func (s *scanner) peek() byte {
	if s.pos < len(s.text) {
		return s.text[s.pos]
	}
	return 0
}

// unexpected reports the byte at pos, or the end of the text.
func (s *scanner) unexpected(want string) *Error {
	if s.pos >= len(s.text) {
		return s.fail(ErrInvalid, s.pos, "text ends where "+want+" is expected")
	}
	return s.fail(ErrInvalid, s.pos, "no "+want)
}

func (s *scanner) push(object bool) *Error {
	if s.maxDepth > 0 && s.depth >= s.maxDepth {
		return s.fail(ErrDepth, s.pos, "more than "+strconv.Itoa(s.maxDepth)+" levels")
	}
	word, bit := s.depth/64, uint64(1)<<(s.depth%64)
	if word == len(s.nest) {
		s.nest = append(s.nest, 0)
	}
	if object {
		s.nest[word] |= bit
		if s.unique {
			s.first = append(s.first, len(s.keys))
		}
	} else {
		s.nest[word] &^= bit
	}
	s.depth++
	return nil
}

func (s *scanner) inObject() bool {
	top := s.depth - 1
	return s.nest[top/64]>>(top%64)&1 == 1
}

// document walks the whole text: one value with nothing but white space around.
func (s *scanner) document() *Error {
	if err := s.value(); err != nil {
		return err
	}
	s.space()
	if s.pos < len(s.text) {
		return s.fail(ErrInvalid, s.pos, "bytes after the value")
	}
	return nil
}

// value walks one value from pos, white space before it included, and leaves pos
// behind it.
func (s *scanner) value() *Error {
	base := s.depth
	for {
		s.space()
		var err *Error
		opened := false
		switch c := s.peek(); {
		case c == '"':
			err = s.str()
		case c == '{' || c == '[':
			if err = s.push(c == '{'); err == nil {
				err = s.punct(c)
			}
			opened = true
		case c == '-' || '0' <= c && c <= '9':
			err = s.number()
		case c == 't':
			err = s.literal("true")
		case c == 'f':
			err = s.literal("false")
		case c == 'n':
			err = s.literal("null")
		default:
			err = s.unexpected("value")
		}
		if err != nil {
			return err
		}
		// Behind a value or an opening bracket: close what ends here, then stop or
		// go on with the next element.
		for {
			if s.depth == base {
				return nil
			}
			s.space()
			object := s.inObject()
			c := s.peek()
			if object && c == '}' || !object && c == ']' {
				if err := s.punct(c); err != nil {
					return err
				}
				s.pop(object)
				opened = false
				continue
			}
			if !opened {
				if c != ',' {
					return s.unexpected("comma or end of the container")
				}
				if err := s.punct(','); err != nil {
					return err
				}
				s.space()
			}
			if object {
				if err := s.key(); err != nil {
					return err
				}
			}
			break
		}
	}
}

func (s *scanner) pop(object bool) {
	s.depth--
	if object && s.unique {
		from := s.first[len(s.first)-1]
		s.first = s.first[:len(s.first)-1]
		s.equalKeys(s.keys[from:])
		s.keys = s.keys[:from]
	}
}

// equalKeys notes a pair of equal keys. It sorts, so that its cost does
// not grow with the square of the number of keys.
func (s *scanner) equalKeys(keys []keyRef) {
	slices.SortFunc(keys, func(a, b keyRef) int {
		return cmp.Or(cmp.Compare(a.hash, b.hash), cmp.Compare(a.start, b.start))
	})
	for i := 1; i < len(keys); i++ {
		// Equal hashes of unequal keys: 1 in 2^64 a pair, and then a refusal.
		if keys[i].hash == keys[i-1].hash {
			s.note(keys[i].start, "key is there twice")
			return
		}
	}
}

// key walks a key and the colon behind it.
func (s *scanner) key() *Error {
	if s.peek() != '"' {
		return s.unexpected("key")
	}
	start := s.pos
	if err := s.str(); err != nil {
		return err
	}
	if s.unique {
		raw := s.text[start:s.pos]
		key := raw[1 : len(raw)-1]
		if bytes.IndexByte(key, '\\') >= 0 {
			key = []byte(unquote(raw))
		}
		s.keys = append(s.keys, keyRef{maphash.Bytes(keySeed, key), start})
	}
	s.space()
	if s.peek() != ':' {
		return s.unexpected("colon")
	}
	return s.punct(':')
}

func (s *scanner) literal(word string) *Error {
	if len(s.text)-s.pos < len(word) || string(s.text[s.pos:s.pos+len(word)]) != word {
		return s.fail(ErrInvalid, s.pos, "no "+word)
	}
	return s.token(s.pos + len(word))
}

// token charges and emits the bytes from pos to end as they are.
func (s *scanner) token(end int) *Error {
	if !s.add(end - s.pos) {
		return s.over(s.pos)
	}
	if s.emit {
		s.out = append(s.out, s.text[s.pos:end]...)
	}
	s.pos = end
	return nil
}

func (s *scanner) number() *Error {
	text, start, i := s.text, s.pos, s.pos
	if text[i] == '-' {
		i++
	}
	first := i
	i = digits(text, i)
	if i == first {
		s.pos = i
		return s.unexpected("digit")
	}
	if text[first] == '0' && i > first+1 {
		return s.fail(ErrInvalid, first, "leading zero")
	}
	integer := true
	if i < len(text) && text[i] == '.' {
		integer = false
		from := i + 1
		if i = digits(text, from); i == from {
			s.pos = i
			return s.unexpected("digit")
		}
	}
	if i < len(text) && (text[i] == 'e' || text[i] == 'E') {
		integer = false
		i++
		if i < len(text) && (text[i] == '+' || text[i] == '-') {
			i++
		}
		from := i
		if i = digits(text, from); i == from {
			s.pos = i
			return s.unexpected("digit")
		}
	}
	// The token is charged even if it is lossy: its own digits count (L22).
	if err := s.token(i); err != nil {
		return err
	}
	if s.numbers && s.lossy == nil {
		if reason := lossyNumber(text[start:i], integer); reason != "" {
			s.note(start, reason)
		}
	}
	return nil
}

func digits(text []byte, i int) int {
	for i < len(text) && '0' <= text[i] && text[i] <= '9' {
		i++
	}
	return i
}

// lossyNumber returns why a number token does not survive a reader that keeps
// numbers as doubles, or "" (L19, L20).
func lossyNumber(token []byte, integer bool) string {
	negative := token[0] == '-'
	if integer {
		magnitude := token
		if negative {
			magnitude = token[1:]
		}
		switch {
		case len(magnitude) <= 15: // below 10^15, which is below 2^53
			if negative && magnitude[0] == '0' {
				return "negative zero"
			}
			return ""
		case len(magnitude) > 309: // the largest double has 309 digits
			return "number beyond the doubles"
		}
		f, err := strconv.ParseFloat(string(magnitude), 64)
		switch {
		case err != nil || math.IsInf(f, 0):
			return "number beyond the doubles"
		case f <= maxSafe:
			return ""
		}
		// Format 'f' without decimals writes a double of this size exactly.
		if !bytes.Equal(strconv.AppendFloat(make([]byte, 0, 310), f, 'f', 0, 64), magnitude) {
			return "integer that is no double"
		}
		return ""
	}
	f, err := strconv.ParseFloat(string(token), 64)
	switch {
	case err != nil || math.IsInf(f, 0):
		return "number beyond the doubles"
	case f == 0 && math.Signbit(f):
		return "negative zero"
	}
	return ""
}

// str walks a string. It charges what AppendQuote would write for it (L23).
func (s *scanner) str() *Error {
	text, start := s.text, s.pos
	// Both quotes are charged before anything inside is looked at (L23).
	if !s.add(2) {
		return s.over(start)
	}
	i, plain := start+1, true
	for {
		run := i
		i = plainRun(text, i)
		if i > run && !s.add(i-run) {
			return s.over(start)
		}
		if i >= len(text) {
			return s.fail(ErrInvalid, start, "string without an end")
		}
		switch c := text[i]; {
		case c == '"':
			i++
			if s.emit {
				s.emitString(text[start:i], plain)
			}
			s.pos = i
			return nil
		case c == '\\':
			plain = false
			r, next := escape(text, i)
			if next == 0 {
				return s.fail(ErrInvalid, i, "bad escape in a string")
			}
			if isSurrogate(r) {
				s.note(i, "lone surrogate")
			}
			if !s.add(quotedRuneLen(r)) {
				return s.over(start)
			}
			i = next
		case c < 0x20:
			return s.fail(ErrInvalid, i, "control character in a string")
		default:
			r, n := utf8.DecodeRune(text[i:])
			if r == utf8.RuneError && n == 1 {
				return s.fail(ErrInvalid, i, "invalid UTF-8")
			}
			if !s.add(n) {
				return s.over(start)
			}
			i += n
		}
	}
}

func (s *scanner) emitString(raw []byte, plain bool) {
	if plain {
		s.out = append(s.out, raw...)
		return
	}
	s.out = append(s.out, '"')
	for i := 1; i < len(raw)-1; {
		if raw[i] != '\\' {
			s.out = append(s.out, raw[i])
			i++
			continue
		}
		r, next := escape(raw, i)
		s.out = appendQuotedRune(s.out, r)
		i = next
	}
	s.out = append(s.out, '"')
}
