package strictjson

import (
	"strconv"
	"strings"
)

// MaxMembers bounds how many keys an object may have that Members splits. It
// bounds the set in which equal keys are looked for.
const MaxMembers = 1024

// Value is the raw text of one JSON value, already known to be well formed. It
// aliases the text it was found in. Nil means that the member is absent.
type Value []byte

// Members splits text, which must be one JSON object, and puts the value of the
// member names[i] into values[i]; a member that is absent leaves nil. Other
// members are checked and dropped (L10). values must be as long as names.
//
// ErrInvalid means that the text is not JSON, and values are of no use. Any
// other error comes after the whole text was walked, so that a caller can look
// at one value, a version, before it refuses the rest (W13): the first of equal
// keys is in values then. ErrType: the text is not an object. ErrKey: a key is
// there twice, differs from one of names by case only, or is the one after
// MaxMembers. ErrNotLossless: a string somewhere has a lone surrogate.
//
// Keys are compared after their escapes are resolved. Depth is not limited, and
// numbers are not looked at.
func Members(text []byte, names []string, values []Value) error {
	clear(values)
	s := scanner{text: text}
	s.space()
	if s.peek() != '{' {
		return s.notContainer("object")
	}
	s.pos++
	var refused *Error
	refuse := func(at int, reason string) {
		if refused == nil {
			refused = s.fail(ErrKey, at, reason)
		}
	}
	var others map[string]struct{}
	s.space()
	for count := 0; s.peek() != '}' || count > 0; count++ {
		start := s.pos
		if s.peek() != '"' {
			return s.unexpected("key")
		}
		if err := s.str(); err != nil {
			return err
		}
		raw := s.text[start:s.pos]
		s.space()
		if s.peek() != ':' {
			return s.unexpected("colon")
		}
		s.pos++
		s.space()
		from := s.pos
		if err := s.value(); err != nil {
			return err
		}
		value := s.text[from:s.pos]
		i, sameCase := find(raw, names)
		switch {
		case count == MaxMembers:
			refuse(start, "more than "+strconv.Itoa(MaxMembers)+" keys")
		case count > MaxMembers: // refused above; the walk goes on for its syntax
		case i >= 0 && !sameCase:
			refuse(start, "key differs from "+names[i]+" by case only")
		case i >= 0 && values[i] != nil:
			refuse(start, "key "+names[i]+" is there twice")
		case i >= 0:
			values[i] = value
		default:
			if others == nil {
				others = make(map[string]struct{})
			}
			name := unquote(raw)
			if _, twice := others[name]; twice {
				refuse(start, "key is there twice")
			}
			others[name] = struct{}{}
		}
		s.space()
		if s.peek() == '}' {
			break
		}
		if s.peek() != ',' {
			return s.unexpected("comma or end of the object")
		}
		s.pos++
		s.space()
	}
	s.pos++
	s.space()
	if s.pos < len(s.text) {
		return s.fail(ErrInvalid, s.pos, "bytes after the object")
	}
	if refused != nil {
		return refused
	}
	if s.lossy != nil {
		return s.lossy
	}
	return nil
}

// notContainer tells JSON of another type from text that is no JSON.
func (s *scanner) notContainer(want string) error {
	at := s.pos
	if err := s.document(); err != nil {
		return err
	}
	return s.fail(ErrType, at, "not an "+want)
}

// find returns which of names the key token raw is, or -1, and whether it has
// the same case.
func find(raw []byte, names []string) (i int, sameCase bool) {
	inner := raw[1 : len(raw)-1]
	for i, name := range names {
		if string(inner) == name {
			return i, true
		}
	}
	// A character of a name takes at most six bytes in a key that folds to it: an
	// escape. Longer keys are other members, and are not unescaped for this.
	if len(inner) > 6*longest(names) {
		return -1, false
	}
	key := unquote(raw)
	fold := -1
	for i, name := range names {
		if key == name {
			return i, true
		}
		if fold < 0 && strings.EqualFold(key, name) {
			fold = i
		}
	}
	return fold, false
}

func longest(names []string) int {
	n := 0
	for _, name := range names {
		n = max(n, len(name))
	}
	return n
}

// Elements calls each for the elements of v, which must be an array, in order,
// and stops at the first error, which it returns. Absent or of another type is
// ErrType. Offsets in errors count from the beginning of v.
func (v Value) Elements(each func(Value) error) error {
	s := scanner{text: v}
	if s.peek() != '[' {
		return v.wrong("array")
	}
	s.pos++
	s.space()
	for n := 0; s.peek() != ']' || n > 0; n++ {
		s.space()
		from := s.pos
		if err := s.value(); err != nil {
			return err
		}
		if err := each(v[from:s.pos]); err != nil {
			return err
		}
		s.space()
		if s.peek() == ']' {
			return nil
		}
		if s.peek() != ',' {
			return s.unexpected("comma or end of the array")
		}
		s.pos++
	}
	return nil
}

// Text returns the string that v is, in memory of its own, so that it outlives
// the text v was found in (B1). A string longer than limit bytes of UTF-8 is
// ErrOverBudget and is not built; limit 0 is no limit. Absent or of another type
// is ErrType.
func (v Value) Text(limit int) (string, error) {
	if len(v) < 2 || v[0] != '"' {
		return "", v.wrong("string")
	}
	// The token is never shorter than its text, so most strings need no count.
	if limit > 0 && len(v)-2 > limit {
		if n, _ := unquotedLen(v); n > limit {
			return "", &Error{Err: ErrOverBudget, Reason: "string of " + strconv.Itoa(n) + " bytes, limit " + strconv.Itoa(limit)}
		}
	}
	return unquote(v), nil
}

// Int64 returns the integer that v is: optional minus and digits, without
// fraction or exponent. Anything else, absent and out of range included, is
// ErrType.
func (v Value) Int64() (int64, error) {
	// ParseInt would take a plus sign, which JSON has not; v is JSON already.
	n, err := strconv.ParseInt(string(v), 10, 64)
	if err != nil {
		return 0, v.wrong("integer of 64 bits")
	}
	return n, nil
}

// Bool returns the boolean that v is. Absent or of another type is ErrType.
func (v Value) Bool() (bool, error) {
	switch string(v) {
	case "true":
		return true, nil
	case "false":
		return false, nil
	}
	return false, v.wrong("boolean")
}

func (v Value) wrong(want string) error {
	if v == nil {
		return &Error{Err: ErrType, Reason: want + " is missing"}
	}
	return &Error{Err: ErrType, Reason: "not the " + want + " that is expected"}
}
