package strictjson

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/big"
	"reflect"
	"runtime"
	"strings"
	"testing"
	"unicode/utf8"
)

// kind names the sentinel that err wraps, for tables.
func kind(err error) string {
	for name, sentinel := range map[string]error{
		"invalid": ErrInvalid, "over": ErrOverBudget, "lossy": ErrNotLossless,
		"depth": ErrDepth, "key": ErrKey, "type": ErrType,
	} {
		if errors.Is(err, sentinel) {
			return name
		}
	}
	return fmt.Sprint(err)
}

// L19, L20: which number tokens survive a reader that keeps doubles.
func TestNumbersThatDoNotCrossWithoutLoss(t *testing.T) {
	for _, tc := range []struct {
		token string
		want  string
	}{
		{"0", "<nil>"},
		{"1", "<nil>"},
		{"-1", "<nil>"},
		{"999999999999999", "<nil>"},
		{"9007199254740991", "<nil>"},  // 2^53-1
		{"-9007199254740991", "<nil>"}, // -(2^53-1)
		{"9007199254740992", "<nil>"},  // 2^53
		{"9007199254740993", "lossy"},  // 2^53+1
		{"-9007199254740993", "lossy"}, // -(2^53+1)
		{"9007199254740994", "<nil>"},  // 2^53+2
		{"1152921504606846976", "<nil>"},
		{"1152921504606847000", "lossy"},
		{"18446744073709551616", "<nil>"}, // 2^64
		{"18446744073709551615", "lossy"},
		{"100000000000000000000000", "lossy"}, // 10^23 is no double
		{"10000000000000000000000", "<nil>"},  // 10^22 is the largest power of ten that is
		{new(big.Int).Lsh(big.NewInt(1), 1023).String(), "<nil>"},
		{new(big.Int).Lsh(big.NewInt(1), 1024).String(), "lossy"},
		{strings.Repeat("9", 400), "lossy"},
		{"-" + strings.Repeat("9", 400), "lossy"},
		{strings.Repeat("9", 309), "lossy"},
		{"1" + strings.Repeat("0", 308), "lossy"},
		{"-0", "lossy"},
		{"-0.0", "lossy"},
		{"-0e7", "lossy"},
		{"-0.000e-99", "lossy"},
		{"-1e-400", "lossy"}, // read as -0
		{"1e-400", "<nil>"},  // read as 0, by intent
		{"1e400", "lossy"},
		{"-1E+400", "lossy"},
		{"1e999999999999999999999", "lossy"},
		{"0.1", "<nil>"},
		{"9007199254740993.0", "<nil>"}, // a double by intent
		{"9007199254740993e0", "<nil>"},
		{"1.7976931348623157e308", "<nil>"},
	} {
		for _, text := range []string{tc.token, "[" + tc.token + "]", `{"a":` + tc.token + `}`, " " + tc.token + " "} {
			n, err := Check([]byte(text), Options{})
			if got := kind(err); got != tc.want {
				t.Errorf("Check(%.40s) = %s, want %s", text, got, tc.want)
			}
			if want := len(strings.TrimSpace(text)); n != want {
				t.Errorf("Check(%.40s) counts %d bytes, want %d", text, n, want)
			}
		}
	}
}

// L19: numbers inside of strings are no numbers, whatever escapes say.
func TestStringsAreSkippedByTheNumberRules(t *testing.T) {
	for _, text := range []string{
		`"9007199254740993"`, `"\"9007199254740993"`, `{"9007199254740993":1}`, `["\\","-0"]`, `"\\\" -0 \\"`,
	} {
		if _, err := Check([]byte(text), Options{}); err != nil {
			t.Errorf("Check(%s): %v", text, err)
		}
	}
	if _, err := Check([]byte(`["\\",-0]`), Options{}); kind(err) != "lossy" {
		t.Errorf("a number behind an escaped backslash: %v, want lossy", err)
	}
}

func TestWhatIsNotJSONIsInvalid(t *testing.T) {
	for _, tc := range []struct {
		text   string
		offset int
	}{
		{"", 0}, {" ", 1}, {"[", 1}, {"[1", 2}, {"[1,", 3}, {"[1,]", 3}, {"[,1]", 1}, {"[1 2]", 3}, {"]", 0},
		{"{", 1}, {"{,}", 1}, {`{"a"}`, 4}, {`{"a":}`, 5}, {`{"a":1,}`, 7}, {`{"a":1 "b":2}`, 7}, {`{1:2}`, 1}, {`{'a':1}`, 1},
		{"[1}", 2}, {`{"a":1]`, 6}, {"1 2", 2}, {"{}{}", 2}, {"null,", 4},
		{"tru", 0}, {"nul", 0}, {"falsy", 0}, {"True", 0}, {"NaN", 0}, {"Infinity", 0}, {"-Infinity", 1}, {"undefined", 0},
		{"01", 0}, {"-01", 1}, {"1.", 2}, {".5", 0}, {"1e", 2}, {"1e+", 3}, {"+1", 0}, {"-", 1}, {"0x10", 1}, {"1_000", 1},
		{`"`, 0}, {`"a`, 0}, {`"\"`, 0}, {"\"a\nb\"", 2}, {"\"\x00\"", 1}, {`"\x41"`, 1}, {`"\u12"`, 1}, {`"\u12g4"`, 1}, {`"\`, 1}, {`"\u`, 1},
		{"\"\xff\"", 1}, {"\"\xc0\x80\"", 1}, {"\"\xed\xa0\x80\"", 1}, {"\"\xf5\x80\x80\x80\"", 1}, {"\"\xe2\x82\"", 1}, {"{\"\xff\":1}", 2},
		{"\xef\xbb\xbf1", 0}, {"1\x00", 1}, {"\xa01", 0}, {"/**/1", 0}, {"\x0b1", 0},
	} {
		n, err := Check([]byte(tc.text), Options{})
		var e *Error
		if !errors.As(err, &e) || e.Err != ErrInvalid || e.Offset != tc.offset || n != 0 {
			t.Errorf("Check(%q) = %d, %v, want invalid at offset %d", tc.text, n, err, tc.offset)
		}
	}
}

// L23: the meter, without building the string.
func TestMeterOfStrings(t *testing.T) {
	for _, tc := range []struct {
		text string
		want int
	}{
		{`""`, 2}, {`"a"`, 3}, {`"\u0041"`, 3}, {`"\/"`, 3},
		{`"\u0000"`, 8}, {`"\u001f"`, 8}, {`"\u007f"`, 3},
		{`"\""`, 4}, {`"\\"`, 4}, {`"\b\t\n\f\r"`, 12}, {`"\u0008\u000a"`, 6}, {`"\u0022"`, 4},
		{`"é"`, 4}, {`"\u00e9"`, 4}, {`"\u00E9"`, 4}, {`"€"`, 5}, {`"\u2028"`, 5},
		{`"😀"`, 6}, {`"\ud83d\ude00"`, 6}, {`"\uD83D\uDE00"`, 6},
		{`"<>&"`, 5}, {`"\u003c"`, 3},
	} {
		n, err := Check([]byte(tc.text), Options{MaxBytes: tc.want})
		if err != nil || n != tc.want {
			t.Errorf("Check(%s) = %d, %v, want %d", tc.text, n, err, tc.want)
		}
		if _, err := Check([]byte(tc.text), Options{MaxBytes: tc.want - 1}); kind(err) != "over" {
			t.Errorf("Check(%s) with one byte less: %v, want over budget", tc.text, err)
		}
		var s string
		if err := json.Unmarshal([]byte(tc.text), &s); err != nil {
			t.Fatal(err)
		}
		if got := QuotedLen(s); got != tc.want {
			t.Errorf("QuotedLen(%q) = %d, want %d", s, got, tc.want)
		}
		if got := AppendQuote(nil, s); len(got) != tc.want {
			t.Errorf("AppendQuote(%q) = %s, want %d bytes", s, got, tc.want)
		}
	}
}

// L16, L23: a lone surrogate has six bytes, so over budget beats it.
func TestLoneSurrogatesAreNotLossless(t *testing.T) {
	for _, text := range []string{`"\ud800"`, `"\udc00"`, `"\uDBFF"`} {
		if n, err := Check([]byte(text), Options{MaxBytes: 8}); kind(err) != "lossy" || n != 8 {
			t.Errorf("Check(%s) = %d, %v, want 8 and lossy", text, n, err)
		}
		if _, err := Check([]byte(text), Options{MaxBytes: 7}); kind(err) != "over" {
			t.Errorf("Check(%s) with 7 bytes: %v, want over budget", text, err)
		}
	}
	for _, text := range []string{
		`"\udc00\ud800"`, `"\ud800\ud800"`, `"\ud800\n"`, `"\ud800x\udc00"`, `{"\ud800":1}`, `[["\udead"]]`, `"\ud83d😀"`,
	} {
		if _, err := Check([]byte(text), Options{}); kind(err) != "lossy" {
			t.Errorf("Check(%s): %v, want lossy", text, err)
		}
	}
}

// L21: the budget holds for every byte of the compact form, and the walk stops
// where it is crossed, before what follows is looked at.
func TestBudgetIsExactAndStopsTheWalk(t *testing.T) {
	for _, tc := range []struct {
		text string
		size int
	}{
		{"[]", 2}, {"{}", 2}, {" [ ] ", 2}, {"[1,2,3]", 7}, {" [ 1 , 2 , 3 ] ", 7}, {`{"a":1}`, 7},
		{`{ "a" : [ true , null ] , "b" : { } }`, 24}, {"1.50e+03", 8}, {"null", 4}, {"-12", 3},
		{strings.Repeat("\n", 5000) + "1", 1},
	} {
		for limit := 1; limit <= tc.size+1; limit++ {
			n, err := Check([]byte(tc.text), Options{MaxBytes: limit})
			if fits := limit >= tc.size; fits && (err != nil || n != tc.size) || !fits && (kind(err) != "over" || n != 0) {
				t.Errorf("Check(%.30q, %d) = %d, %v; its size is %d", tc.text, limit, n, err, tc.size)
			}
		}
	}
	// A string with less than two bytes left fails, even an empty one (L23).
	if _, err := Check([]byte(`["`), Options{MaxBytes: 2}); kind(err) != "over" {
		t.Errorf("a string with one byte left: %v, want over budget before its end is looked for", err)
	}
	for _, text := range []string{`[1,2,3,4,5,` + "\xff", `"aaaaaaaaaaaa` + "\x00", `{"a":111111111111,,`} {
		if _, err := Check([]byte(text), Options{MaxBytes: 8}); kind(err) != "over" {
			t.Errorf("Check(%q, 8): %v, want over budget before the syntax error behind it", text, err)
		}
	}
}

// L22: over budget beats lossy in every order, and the lossy token's own digits count.
func TestOverBudgetBeatsNotLossless(t *testing.T) {
	long := strings.Repeat("x", 50)
	for _, tc := range []struct {
		text  string
		limit int
		want  string
	}{
		{`[-0,"` + long + `"]`, 20, "over"},
		{`["` + long + `",-0]`, 20, "over"},
		{`[-0,"` + long + `"]`, 100, "lossy"},
		{`["` + long + `",-0]`, 100, "lossy"},
		{"9007199254740993", 15, "over"},
		{"9007199254740993", 16, "lossy"},
		{strings.Repeat("9", 400), 399, "over"},
		{"[-0,", 100, "invalid"},
		{"[-0", 3, "invalid"},
		{`[-0,[[[]]]]`, 100, "lossy"},
	} {
		n, err := Check([]byte(tc.text), Options{MaxBytes: tc.limit})
		if kind(err) != tc.want {
			t.Errorf("Check(%.30s, %d) = %d, %v, want %s", tc.text, tc.limit, n, err, tc.want)
		}
	}
	_, err := Check([]byte(`[1, -0, 9007199254740993]`), Options{})
	var e *Error
	if !errors.As(err, &e) || e.Offset != 4 {
		t.Errorf("got %v, want the first lossy number, at offset 4", err)
	}
}

// L17, L18: depth is bounded by the text and by MaxDepth alone.
func TestDepth(t *testing.T) {
	deep := func(n int) []byte {
		return []byte(strings.Repeat("[", n) + "7" + strings.Repeat("]", n))
	}
	text := deep(100000)
	n, err := Check(text, Options{})
	if err != nil || n != 200001 {
		t.Fatalf("100 000 nested arrays: %d, %v, want 200001 bytes", n, err)
	}
	if json.Valid(text) {
		t.Error("encoding/json reads 100 000 levels now: the reason for this scanner has gone")
	}
	out, err := Compact(nil, text, Options{})
	if err != nil || !bytes.Equal(out, text) {
		t.Errorf("Compact of 100 000 levels: %d bytes, %v", len(out), err)
	}
	mixed := []byte(strings.Repeat(`{"a":[`, 50000) + strings.Repeat("]}", 50000))
	if n, err := Check(mixed, Options{UniqueKeys: true}); err != nil || n != len(mixed) {
		t.Errorf("50 000 objects in arrays: %d, %v", n, err)
	}
	crossed := append([]byte{}, mixed...)
	crossed[len(crossed)-1], crossed[len(crossed)-2] = ']', '}'
	if _, err := Check(crossed, Options{}); kind(err) != "invalid" {
		t.Errorf("brackets that cross at the outermost level: %v", err)
	}
	for _, tc := range []struct {
		levels, limit int
		want          string
	}{
		{StdlibDepth, StdlibDepth, "<nil>"}, {StdlibDepth + 1, StdlibDepth, "depth"},
		{1, 1, "<nil>"}, {2, 1, "depth"}, {0, 1, "<nil>"}, {64, 64, "<nil>"}, {65, 64, "depth"}, {65, 65, "<nil>"},
	} {
		text := deep(tc.levels)
		if _, err := Check(text, Options{MaxDepth: tc.limit}); kind(err) != tc.want {
			t.Errorf("%d levels, limit %d: %v, want %s", tc.levels, tc.limit, err, tc.want)
		}
		if accepted := tc.want == "<nil>"; tc.limit == StdlibDepth && json.Valid(text) != accepted {
			t.Errorf("%d levels: accepted here is %v, encoding/json disagrees", tc.levels, accepted)
		}
	}
	// Siblings do not add up.
	if _, err := Check([]byte("["+strings.Repeat("[],", 1000)+"[]]"), Options{MaxDepth: 2}); err != nil {
		t.Errorf("1001 siblings at level 2: %v", err)
	}
	// Depth that is never closed is found without a stack of its size.
	if _, err := Check(bytes.Repeat([]byte("["), 1<<20), Options{}); kind(err) != "invalid" {
		t.Errorf("a million open brackets: %v", err)
	}
}

// L20: extra memory grows with depth, not with the number of members.
func TestFlatValueCostsNoMemory(t *testing.T) {
	var b strings.Builder
	b.WriteString("[")
	for range 2_000_000 {
		b.WriteString("1,")
	}
	b.WriteString("1]")
	text := []byte(b.String())
	grown := allocated(func() {
		if n, err := Check(text, Options{}); err != nil || n != len(text) {
			t.Fatalf("Check = %d, %v", n, err)
		}
	})
	if grown > 64<<10 {
		t.Errorf("a flat array of 2 000 001 elements cost %d bytes", grown)
	}
	deep := []byte(strings.Repeat("[", 1<<20) + strings.Repeat("]", 1<<20))
	grown = allocated(func() {
		if _, err := Check(deep, Options{}); err != nil {
			t.Fatal(err)
		}
	})
	if grown > 1<<20 { // 128 KiB of bits, and what append copied on the way
		t.Errorf("1 048 576 levels cost %d bytes", grown)
	}
}

func allocated(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// L16: keys that another decoder would merge.
func TestUniqueKeys(t *testing.T) {
	many := func(last string) string {
		var b strings.Builder
		b.WriteString("{")
		for i := range 5000 {
			fmt.Fprintf(&b, `"k%d":{"a":1},`, i)
		}
		return b.String() + last + ":0}"
	}
	for _, tc := range []struct {
		text string
		want string
	}{
		{`{"a":1,"b":2}`, "<nil>"},
		{`{"a":1,"a":1}`, "lossy"},
		{`{"a":1,"\u0061":2}`, "lossy"},
		{`{"é":1,"\u00e9":2}`, "lossy"},
		{`{"\n":1,"\u000a":2}`, "lossy"},
		{`{"a":1,"A":2}`, "<nil>"},
		{`{"a":{"a":1},"b":{"a":1}}`, "<nil>"},
		{`{"a":{"b":1,"b":2}}`, "lossy"},
		{`[{"a":1},{"a":1}]`, "<nil>"},
		{`{"x":1,"a":{"x":{"x":[{"x":1}]}},"x":2}`, "lossy"},
		{`{"":1,"":2}`, "lossy"},
		{`{"__proto__":1,"__proto__":2}`, "lossy"},
		{many(`"k"`), "<nil>"},
		{many(`"k4999"`), "lossy"},
		{many(`"k0"`), "lossy"},
	} {
		if _, err := Check([]byte(tc.text), Options{UniqueKeys: true}); kind(err) != tc.want {
			t.Errorf("Check(%.40s) = %v, want %s", tc.text, err, tc.want)
		}
		if _, err := Check([]byte(tc.text), Options{}); err != nil {
			t.Errorf("Check(%.40s) without UniqueKeys: %v", tc.text, err)
		}
	}
	if _, err := Check([]byte(`{"a":1,"a":"xxxxxxxx"}`), Options{UniqueKeys: true, MaxBytes: 12}); kind(err) != "over" {
		t.Errorf("equal keys over budget: %v, want over budget (L22)", err)
	}
}

func TestNegativeLimitsAreRefused(t *testing.T) {
	for _, o := range []Options{{MaxBytes: -1}, {MaxDepth: -1}} {
		if _, err := Check([]byte("1"), o); err == nil {
			t.Errorf("Check with %+v succeeded", o)
		}
		if out, err := Compact([]byte("x"), []byte("1"), o); err == nil || string(out) != "x" {
			t.Errorf("Compact with %+v = %q, %v", o, out, err)
		}
	}
}

// L24, L25: the compact form keeps number tokens and escapes nothing more than it must.
func TestCompact(t *testing.T) {
	for _, tc := range []struct{ in, want string }{
		{" [ 1 , 2 ] ", "[1,2]"},
		{"{\n\t\"b\" : 1,\r\n \"a\" : {} }", `{"b":1,"a":{}}`},
		{"1152921504606846976", "1152921504606846976"},
		{"[1.0,1E5,0.10]", "[1.0,1E5,0.10]"},
		{`"<\u003c>&\u2028\/"`, "\"<<>&\u2028/\""},
		{`"\u0041\u00e9\ud83d\ude00"`, `"Aé😀"`},
		{`"\u0000\u001F\u0008\u0022\u005c"`, `"\u0000\u001f\b\"\\"`},
		{`{"\u0061":"\t"}`, `{"a":"\t"}`},
	} {
		got, err := Compact([]byte("> "), []byte(tc.in), Options{MaxBytes: len(tc.want)})
		if err != nil || string(got) != "> "+tc.want {
			t.Errorf("Compact(%s) = %s, %v, want %s", tc.in, got, err, tc.want)
		}
	}
	for _, bad := range []string{"[1,", "-0", `"\ud800"`, `"toolong"`} {
		if got, err := Compact([]byte("> "), []byte(bad), Options{MaxBytes: 8}); err == nil || string(got) != "> " {
			t.Errorf("Compact(%s) = %q, %v, want an error and dst as it was", bad, got, err)
		}
	}
	// The defect that L24 tells of: a double of 2^60 leaves encoding/json as
	// another number, and Check refuses what left it.
	std, err := json.Marshal(float64(1 << 60))
	if err != nil || string(std) != "1152921504606847000" {
		t.Fatalf("encoding/json writes 2^60 as %s, %v", std, err)
	}
	if _, err := Check(std, Options{}); kind(err) != "lossy" {
		t.Errorf("Check(%s) = %v, want lossy", std, err)
	}
}

// L25: where encoding/json does not escape for HTML, the two encoders agree.
func TestAppendQuoteAgreesWithEncodingJSON(t *testing.T) {
	var all strings.Builder
	for r := range rune(0x3000) {
		if r != 0x2028 && r != 0x2029 { // escaped by encoding/json in any case
			all.WriteRune(r)
		}
	}
	all.WriteString("\U0001F600\U0010FFFF")
	var std bytes.Buffer
	enc := json.NewEncoder(&std)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(all.String()); err != nil {
		t.Fatal(err)
	}
	got := string(AppendQuote(nil, all.String())) + "\n"
	if got != std.String() {
		t.Error("AppendQuote and encoding/json differ")
	}
	if s := string(AppendQuote(nil, "a\xffb\xed\xa0\x80")); s != "\"a\uFFFDb\uFFFD\uFFFD\uFFFD\"" {
		t.Errorf("invalid UTF-8 became %q", s)
	}
	if n := QuotedLen("a\xff"); n != 6 {
		t.Errorf("QuotedLen of an invalid byte = %d, want 6", n)
	}
}

// seeds are shared by the fuzz targets.
var seeds = []string{
	``, `{}`, `[]`, `null`, ` [1 , 2.5e-3 ,"a\u00e9\ud83d\ude00"] `, `{"a":{"a":[{}]},"b":-0}`, `9007199254740993`,
	`1152921504606846976`, `"\ud800"`, "\"\xff\"", `{"a":1,"a":2}`, `{"a":1,"A":2}`, `1e400`, `-1e-400`, `[[[[[[[[]]]]]]]]`,
	`{"v":1,"id":"x","tool":"t","args":"{}"}`, `{"v":1,"ID":"x"}`, `"\u0000"`, `[1,]`, `{"a"`, `01`, "\ufeff1", `"a` + "\n" + `"`,
}

// FuzzCheck compares the scanner with encoding/json and math/big, both ways.
func FuzzCheck(f *testing.F) {
	for _, s := range seeds {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		if bytes.Count(text, []byte("["))+bytes.Count(text, []byte("{")) > StdlibDepth {
			return // deeper than encoding/json may go
		}
		size, err := Check(text, Options{})
		valid := json.Valid(text) && utf8.Valid(text)
		if valid == errors.Is(err, ErrInvalid) {
			t.Fatalf("Check says %v, encoding/json says valid=%v", err, valid)
		}
		if !valid {
			return
		}
		lossless := !bytes.Contains(text, []byte{'\\'}) || !hasLoneSurrogate(text)
		var v any
		dec := json.NewDecoder(bytes.NewReader(text))
		dec.UseNumber()
		if err := dec.Decode(&v); err != nil {
			t.Fatal(err)
		}
		if lossless && noNumberLost(text) == (err != nil) {
			t.Fatalf("Check(%q) = %v, the reference disagrees", text, err)
		}
		if !lossless && !errors.Is(err, ErrNotLossless) {
			t.Fatalf("Check(%q) = %v with a lone surrogate", text, err)
		}
		if size > 1 {
			if _, err := Check(text, Options{MaxBytes: size - 1}); !errors.Is(err, ErrOverBudget) {
				t.Fatalf("Check(%q, %d) = %v, size is %d", text, size-1, err, size)
			}
		}
		if _, again := Check(text, Options{MaxBytes: size}); !reflect.DeepEqual(again, err) {
			t.Fatalf("Check(%q, %d) = %v, without a limit %v", text, size, again, err)
		}
		out, cerr := Compact(nil, text, Options{})
		if !reflect.DeepEqual(cerr, err) {
			t.Fatalf("Compact says %v, Check says %v", cerr, err)
		}
		if err != nil {
			return
		}
		if len(out) != size {
			t.Fatalf("Compact(%q) = %q has %d bytes, Check counts %d", text, out, len(out), size)
		}
		var w any
		dec = json.NewDecoder(bytes.NewReader(out))
		dec.UseNumber()
		if err := dec.Decode(&w); err != nil || !reflect.DeepEqual(v, w) {
			t.Fatalf("Compact(%q) = %q reads as %v (%v), before as %v", text, out, w, err, v)
		}
		if twice, err := Compact(nil, out, Options{}); err != nil || !bytes.Equal(twice, out) {
			t.Fatalf("Compact is not stable: %q, then %q, %v", out, twice, err)
		}
	})
}

// hasLoneSurrogate looks at the \u escapes of valid JSON alone.
func hasLoneSurrogate(text []byte) bool {
	unit := func(i int) int {
		if i+6 > len(text) || text[i] != '\\' || text[i+1] != 'u' {
			return -1
		}
		var n int
		if _, err := fmt.Sscanf(string(text[i+2:i+6]), "%04x", &n); err != nil {
			return -1
		}
		return n
	}
	for i := 0; i < len(text); i++ {
		if text[i] != '\\' {
			continue
		}
		u := unit(i)
		switch {
		case u < 0:
			i++
		case 0xD800 <= u && u < 0xDC00 && 0xDC00 <= unit(i+6) && unit(i+6) < 0xE000:
			i += 11
		case 0xD800 <= u && u < 0xE000:
			return true
		default:
			i += 5
		}
	}
	return false
}

// noNumberLost is the reference for L19 and L20, by tokens of encoding/json and math/big.
func noNumberLost(text []byte) bool {
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.UseNumber()
	for {
		tok, err := dec.Token()
		if err != nil {
			return true
		}
		n, ok := tok.(json.Number)
		if !ok {
			continue
		}
		f, err := n.Float64()
		if err != nil || math.IsInf(f, 0) || f == 0 && math.Signbit(f) {
			return false
		}
		if i, ok := new(big.Int).SetString(n.String(), 10); ok {
			if exact, _ := new(big.Float).SetFloat64(f).Int(nil); exact.Cmp(i) != 0 {
				return false
			}
		}
	}
}

func BenchmarkCheck(b *testing.B) {
	text := []byte(`{"path":"/srv/data/report.txt","lines":[1,2,3,44,555],"text":"` + strings.Repeat("words and more words, ", 40) + `"}`)
	for _, bc := range []struct {
		name string
		f    func() error
	}{
		{"Check", func() error { _, err := Check(text, Options{MaxBytes: 1 << 20, MaxDepth: StdlibDepth}); return err }},
		{"Check unique", func() error { _, err := Check(text, Options{UniqueKeys: true}); return err }},
		{"json.Valid", func() error {
			if !json.Valid(text) {
				return errors.New("invalid")
			}
			return nil
		}},
	} {
		b.Run(bc.name, func(b *testing.B) {
			b.SetBytes(int64(len(text)))
			b.ReportAllocs()
			for b.Loop() {
				if err := bc.f(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
