package strictjson

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"unicode/utf8"
)

var names = []string{"v", "id", "tool_k"}

// L16, L11: what encoding/json lets through and a frame must not.
func TestMembersRefusesWhatEncodingJSONAccepts(t *testing.T) {
	for _, tc := range []struct{ name, text, want string }{
		{"plain", `{"v":1,"id":"a"}`, "<nil>"},
		{"white space", " {\n\"v\" : 1 , \"id\":\t\"a\" } \r", "<nil>"},
		{"empty object", `{}`, "<nil>"},
		{"escaped key", `{"\u0069d":"a"}`, "<nil>"},
		{"unknown member", `{"v":1,"zz":[{"a":1,"a":2},null]}`, "<nil>"},
		{"unknown member, other case of another unknown", `{"zz":1,"ZZ":2}`, "<nil>"},
		{"unknown members nest 100 000 deep", `{"zz":` + strings.Repeat("[", 100000) + strings.Repeat("]", 100000) + `}`, "<nil>"},
		{"number that is not lossless in an unknown member", `{"zz":9007199254740993}`, "<nil>"},

		{"key twice", `{"id":"a","id":"b"}`, "key"},
		{"key twice, one escaped", `{"id":"a","\u0069\u0064":"b"}`, "key"},
		{"key twice, unknown", `{"zz":1,"zz":2}`, "key"},
		{"key twice, unknown, one escaped", `{"zz":1,"z\u007a":2}`, "key"},
		{"case variant before", `{"ID":"a","id":"b"}`, "key"},
		{"case variant after", `{"id":"b","Id":"a"}`, "key"},
		{"case variant alone", `{"ID":"a"}`, "key"},
		{"case variant, escaped", `{"\u0049D":"a"}`, "key"},
		{"case variant by Unicode folding", `{"tool_` + "\u212a" + `":1}`, "key"},
		{"too many members", manyMembers(MaxMembers + 1), "key"},
		{"as many members as allowed", manyMembers(MaxMembers), "<nil>"},

		{"lone surrogate in a wanted member", `{"id":"\ud800"}`, "lossy"},
		{"lone surrogate in an unknown member", `{"zz":"\ud800"}`, "lossy"},
		{"lone surrogate in a key", `{"\ud800":1}`, "lossy"},
		{"invalid UTF-8 in a wanted member", "{\"id\":\"\xff\"}", "invalid"},
		{"invalid UTF-8 in an unknown member", "{\"zz\":\"\xff\"}", "invalid"},
		{"invalid UTF-8 in a key", "{\"\xff\":1}", "invalid"},

		{"null", `null`, "type"}, {"array", `[{"v":1}]`, "type"}, {"string", `"v"`, "type"}, {"number", `1`, "type"}, {"true", `true`, "type"},
		{"nothing", ``, "invalid"}, {"white space alone", `  `, "invalid"}, {"byte order mark", "\xef\xbb\xbf{}", "invalid"},
		{"trailing object", `{"v":1}{"v":1}`, "invalid"}, {"trailing bracket", `{"v":1}}`, "invalid"}, {"trailing NUL", "{\"v\":1}\x00", "invalid"},
		{"cut in a key", `{"v`, "invalid"}, {"cut in a value", `{"v":"`, "invalid"}, {"cut behind a comma", `{"v":1,`, "invalid"},
		{"comma before the end", `{"v":1,}`, "invalid"}, {"two commas", `{"v":1,,"id":1}`, "invalid"}, {"no comma", `{"v":1 "id":1}`, "invalid"},
		{"no colon", `{"v" 1}`, "invalid"}, {"no value", `{"v":}`, "invalid"}, {"unquoted key", `{v:1}`, "invalid"},
		{"array cut and of the wrong type", `[1`, "invalid"},
		{"never closed, a million levels", `{"zz":` + strings.Repeat("[", 1<<20), "invalid"},
	} {
		values := make([]Value, len(names))
		err := Members([]byte(tc.text), names, values)
		if got := kind(err); got != tc.want {
			t.Errorf("%s: Members = %v, want %s", tc.name, err, tc.want)
		}
		if strings.Contains(fmt.Sprint(err), "zz") {
			t.Errorf("%s: the error quotes the text: %v", tc.name, err)
		}
	}
}

func manyMembers(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, `,"x%d":0`, i)
	}
	return "{" + b.String()[1:] + "}"
}

// L10: values are raw text of exactly what was asked for; W13: they are there
// even if another member is refused.
func TestMembersFillsValues(t *testing.T) {
	values := []Value{Value("left over"), nil, nil}
	if err := Members([]byte(`{"zz":1, "id" : "a b" , "v": [1, 2] }`), names, values); err != nil {
		t.Fatal(err)
	}
	if string(values[0]) != "[1, 2]" || string(values[1]) != `"a b"` || values[2] != nil {
		t.Errorf("values = %q", values)
	}
	for _, text := range []string{`{"id":1,"id":2,"v":7}`, `{"ID":1,"v":7,"v":8}`, `{"zz":"\ud800","v":7}`} {
		if err := Members([]byte(text), names, values); err == nil || errors.Is(err, ErrInvalid) {
			t.Errorf("Members(%s) = %v", text, err)
		}
		if string(values[0]) != "7" {
			t.Errorf("Members(%s) leaves v as %q, want the first, 7", text, values[0])
		}
	}
}

func TestMembersReportsTheOffset(t *testing.T) {
	for _, tc := range []struct {
		text   string
		offset int
	}{
		{`{"v":1,"v":2}`, 7}, {`{"v":1, "ID":2}`, 8}, {`{"v":1}x`, 7}, {`  [1]`, 2}, {"{\"v\":\"\xff\"}", 6}, {`{"v":"\udead"}`, 6},
	} {
		var e *Error
		if err := Members([]byte(tc.text), names, make([]Value, 3)); !errors.As(err, &e) || e.Offset != tc.offset {
			t.Errorf("Members(%q) = %v, want offset %d", tc.text, err, tc.offset)
		}
	}
}

// L16: null and the wrong type are never a zero value.
func TestValuesAreOfTheirTypeOrRefused(t *testing.T) {
	all := []string{`null`, `true`, `false`, `0`, `-7`, `1.0`, `1e2`, `9223372036854775808`, `""`, `"a"`, `"1"`, `"true"`, `[]`, `[1]`, `{}`}
	str := map[string]string{`""`: "", `"a"`: "a", `"1"`: "1", `"true"`: "true"}
	integer := map[string]int64{`0`: 0, `-7`: -7}
	boolean := map[string]bool{`true`: true, `false`: false}
	array := map[string]int{`[]`: 0, `[1]`: 1}
	for _, raw := range append(all, "") {
		v := Value(raw)
		if raw == "" {
			v = nil
		}
		if got, err := v.Text(0); !agrees(str, raw, got, err) {
			t.Errorf("Value(%s).Text() = %q, %v", raw, got, err)
		}
		if got, err := v.Int64(); !agrees(integer, raw, got, err) {
			t.Errorf("Value(%s).Int64() = %d, %v", raw, got, err)
		}
		if got, err := v.Bool(); !agrees(boolean, raw, got, err) {
			t.Errorf("Value(%s).Bool() = %v, %v", raw, got, err)
		}
		n := 0
		err := v.Elements(func(Value) error { n++; return nil })
		if !agrees(array, raw, n, err) {
			t.Errorf("Value(%s).Elements() = %d calls, %v", raw, n, err)
		}
	}
	for _, n := range []int64{math.MaxInt64, math.MinInt64} {
		if got, err := Value(fmt.Sprint(n)).Int64(); err != nil || got != n {
			t.Errorf("Int64 of %d = %d, %v", n, got, err)
		}
	}
}

// agrees: a value that the table lists is returned, any other is ErrType.
func agrees[T comparable](table map[string]T, raw string, got T, err error) bool {
	want, listed := table[raw]
	if listed {
		return err == nil && got == want
	}
	return errors.Is(err, ErrType) && got == *new(T)
}

func TestTextLimitCountsTheDecodedBytes(t *testing.T) {
	for _, tc := range []struct {
		raw   string
		bytes int
	}{
		{`"abc"`, 3}, {`"\u0061\u0062\u0063"`, 3}, {`"é"`, 2}, {`"\u00e9\n"`, 3}, {`"\ud83d\ude00"`, 4},
	} {
		if s, err := Value(tc.raw).Text(tc.bytes); err != nil || len(s) != tc.bytes {
			t.Errorf("Text(%s, %d) = %q, %v", tc.raw, tc.bytes, s, err)
		}
		if s, err := Value(tc.raw).Text(tc.bytes - 1); kind(err) != "over" || s != "" {
			t.Errorf("Text(%s, %d) = %q, %v, want over budget", tc.raw, tc.bytes-1, s, err)
		}
	}
	huge := Value(`"` + strings.Repeat("x", 16<<20) + `"`)
	if n := allocated(func() { huge.Text(1 << 20) }); n > 64<<10 {
		t.Errorf("refusing 16 MiB cost %d bytes", n)
	}
}

// B1: a decoded string does not alias the text it came from.
func TestTextOutlivesTheBuffer(t *testing.T) {
	for _, text := range []string{`{"id":"abc"}`, `{"id":"a\u0062c"}`} {
		buf := []byte(text)
		values := make([]Value, 3)
		if err := Members(buf, names, values); err != nil {
			t.Fatal(err)
		}
		s, err := values[1].Text(0)
		if err != nil {
			t.Fatal(err)
		}
		for i := range buf {
			buf[i] = 'Z'
		}
		if s != "abc" {
			t.Errorf("string changed with the buffer: %q", s)
		}
	}
}

func TestElementsStopsAtTheFirstError(t *testing.T) {
	stop := errors.New("stop")
	var seen []string
	err := Value(`[ 1 , [2,3], {"a":[4]} ,"]"]`).Elements(func(v Value) error {
		seen = append(seen, string(v))
		if len(seen) == 3 {
			return stop
		}
		return nil
	})
	if err != stop || strings.Join(seen, "|") != `1|[2,3]|{"a":[4]}` {
		t.Errorf("Elements = %v after %q", err, seen)
	}
}

// FuzzMembers compares Members with encoding/json, both ways.
func FuzzMembers(f *testing.F) {
	for _, s := range seeds {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		values := make([]Value, len(names))
		err := Members(text, names, values)
		var std map[string]json.RawMessage
		stdErr := json.Unmarshal(text, &std)
		if err != nil {
			// Every refusal has a reason that can be told from outside.
			switch {
			case errors.Is(err, ErrInvalid):
				if stdErr == nil && utf8.Valid(text) {
					t.Fatalf("Members(%q) = %v, encoding/json reads it", text, err)
				}
			case errors.Is(err, ErrNotLossless):
				if !hasLoneSurrogate(text) {
					t.Fatalf("Members(%q) = %v without a lone surrogate", text, err)
				}
			case errors.Is(err, ErrType):
				if std != nil {
					t.Fatalf("Members(%q) = %v, encoding/json reads an object", text, err)
				}
			case !errors.Is(err, ErrKey):
				t.Fatalf("Members(%q) = %v, which is no error of this package", text, err)
			}
			return
		}
		if stdErr != nil && !strings.Contains(stdErr.Error(), "exceeded max depth") {
			t.Fatalf("Members accepts %q, encoding/json says %v", text, stdErr)
		}
		for i, name := range names {
			if raw, ok := std[name]; ok != (values[i] != nil) || ok && string(raw) != string(values[i]) {
				t.Fatalf("Members(%q): %s is %q, encoding/json has %q", text, name, values[i], raw)
			}
			if s, err := values[i].Text(0); err == nil {
				var want string
				if err := json.Unmarshal(values[i], &want); err != nil || s != want {
					t.Fatalf("Text of %q = %q, encoding/json reads %q, %v", values[i], s, want, err)
				}
			}
			if n, err := values[i].Int64(); err == nil {
				var want int64
				if err := json.Unmarshal(values[i], &want); err != nil || n != want {
					t.Fatalf("Int64 of %q = %d, encoding/json reads %d, %v", values[i], n, want, err)
				}
			}
			if err := values[i].Elements(func(Value) error { return nil }); err != nil && values[i] != nil && values[i][0] == '[' {
				t.Fatalf("Elements of %q: %v", values[i], err)
			}
		}
	})
}
