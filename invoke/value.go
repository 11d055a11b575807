package invoke

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"example.com/jail/wire/strictjson"
)

// maxArgsDepth is how deep arguments may nest: as deep as a tool that decodes
// them by encoding/json can follow (C6).
const maxArgsDepth = strictjson.StdlibDepth

// checkJSON refuses what is not one lossless JSON text of at most depth levels.
func checkJSON(text string, depth int) error {
	_, err := strictjson.Check([]byte(text), strictjson.Options{MaxDepth: depth, UniqueKeys: true})
	return err
}

// encodeValue writes a tool's value as compact JSON of at most max bytes.
func encodeValue(v any, max int) (json.RawMessage, error) {
	text, err := appendValue(nil, v, 0)
	if err != nil {
		return nil, err
	}
	return compactJSON(text, max)
}

// compactJSON copies text without its white space. Every token stays as it is.
func compactJSON(text []byte, max int) (json.RawMessage, error) {
	out, err := strictjson.Compact(nil, text, strictjson.Options{MaxBytes: max, UniqueKeys: true})
	if errors.Is(err, strictjson.ErrOverBudget) {
		return nil, fmt.Errorf("value of more than %d bytes", max)
	}
	return out, err
}

// appendValue encodes what json.Unmarshal makes of a JSON text by itself, since
// encoding/json writes float64(1<<60) with the digits ...847000 (L24). It leaves
// every other type to encoding/json; a float64 beyond 2^53 inside of those comes
// out with wrong digits and is refused later as not lossless.
func appendValue(dst []byte, v any, depth int) ([]byte, error) {
	if depth > maxArgsDepth {
		return dst, fmt.Errorf("value nested deeper than %d levels", maxArgsDepth)
	}
	var err error
	switch v := v.(type) {
	case nil:
		return append(dst, "null"...), nil
	case string:
		return appendString(dst, v)
	case float64:
		return appendFloat(dst, v)
	case json.RawMessage:
		if len(v) == 0 {
			return append(dst, "null"...), nil
		}
		return append(dst, v...), nil
	case []any:
		if v == nil {
			return append(dst, "null"...), nil
		}
		dst = append(dst, '[')
		for i, item := range v {
			if i > 0 {
				dst = append(dst, ',')
			}
			if dst, err = appendValue(dst, item, depth+1); err != nil {
				return dst, err
			}
		}
		return append(dst, ']'), nil
	case map[string]any:
		if v == nil {
			return append(dst, "null"...), nil
		}
		dst = append(dst, '{')
		for i, key := range slices.Sorted(maps.Keys(v)) {
			if i > 0 {
				dst = append(dst, ',')
			}
			if dst, err = appendString(dst, key); err != nil {
				return dst, err
			}
			dst = append(dst, ':')
			if dst, err = appendValue(dst, v[key], depth+1); err != nil {
				return dst, err
			}
		}
		return append(dst, '}'), nil
	}
	var buf bytes.Buffer
	enc := json.NewEncoder(&buf)
	enc.SetEscapeHTML(false) // L25
	if err := enc.Encode(v); err != nil {
		return dst, err
	}
	return append(dst, buf.Bytes()...), nil
}

func appendString(dst []byte, s string) ([]byte, error) {
	if !utf8.ValidString(s) {
		return dst, errors.New("text is not UTF-8")
	}
	return strictjson.AppendQuote(dst, s), nil
}

func appendFloat(dst []byte, f float64) ([]byte, error) {
	switch {
	case math.IsNaN(f) || math.IsInf(f, 0) || f == 0 && math.Signbit(f):
		return dst, fmt.Errorf("number %v is not lossless JSON", f)
	case f == math.Trunc(f) && math.Abs(f) < 1e21:
		return strconv.AppendFloat(dst, f, 'f', 0, 64), nil
	}
	text, err := json.Marshal(f)
	return append(dst, text...), err
}

// cutText makes text valid UTF-8 of at most max bytes.
func cutText(s string, max int) string {
	if len(s) > max {
		cut := max
		for cut > 0 && cut > max-utf8.UTFMax && !utf8.RuneStart(s[cut]) {
			cut--
		}
		s = s[:cut]
	}
	return strings.ToValidUTF8(s, "?")
}

func waitFor(done <-chan struct{}, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-done:
		return true
	case <-t.C:
		return false
	}
}
