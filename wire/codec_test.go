package wire

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"example.com/jail/wire/strictjson"
)

// golden is one entry of a file in testdata; see the README there.
type golden struct {
	Name, Kind, Error string
	OK                bool
	Text              string
	Base64            []byte
	Value             json.RawMessage
	Canonical         bool
	Frames            []string
}

func (g golden) bytes() []byte {
	if g.Base64 != nil {
		return g.Base64
	}
	return []byte(g.Text)
}

func readGolden(tb testing.TB, kind string) []golden {
	tb.Helper()
	text, err := os.ReadFile("testdata/" + kind + ".json")
	if err != nil {
		tb.Fatal(err)
	}
	var rows []golden
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&rows); err != nil {
		tb.Fatal(err)
	}
	for _, g := range rows {
		if g.Kind != kind {
			tb.Fatalf("%s is of kind %q in the file of %s", g.Name, g.Kind, kind)
		}
	}
	return rows
}

// decoders return a pointer to what they read, or nil.
var decoders = map[string]func([]byte) (any, error){
	"request": func(b []byte) (any, error) {
		r, tooLarge, err := decodeRequest(b, DefaultMaxArgsBytes)
		if tooLarge != "" {
			return nil, errors.New(tooLarge)
		}
		return pointer(r, err)
	},
	"response": func(b []byte) (any, error) { return pointer(decodeResponse(b)) },
	"start":    func(b []byte) (any, error) { return pointer(decodeStart(b)) },
	"result":   func(b []byte) (any, error) { return pointer(decodeResult(b)) },
}

func pointer[T any](v T, err error) (any, error) { return &v, err }

func encode(v any) ([]byte, error) {
	switch v := v.(type) {
	case *Request:
		return appendRequest(nil, v)
	case *Response:
		return appendResponse(nil, v)
	case *Start:
		return appendStart(nil, v)
	case *Result:
		return appendResult(nil, v)
	}
	panic(fmt.Sprintf("no encoder for %T", v))
}

// W10 to W13, W18, W20 to W29, W39, W47, W51, W53, L10, L11, L14, L16: what each
// decoder accepts, refuses, and reads. The struct tags of the four types are
// pinned too, since what was read is compared by them (L40).
func TestGoldenFrames(t *testing.T) {
	for kind, decode := range decoders {
		for _, g := range readGolden(t, kind) {
			v, err := decode(g.bytes())
			got := "ok"
			switch {
			case errors.Is(err, ErrVersion):
				got = "version"
			case err != nil:
				got = "protocol"
			}
			want := g.Error
			if g.OK {
				want = "ok"
			}
			if got != want {
				t.Errorf("%s %s: %v, want %s", kind, g.Name, err, want)
				continue
			}
			if !g.OK {
				if !reflect.ValueOf(v).Elem().IsZero() {
					t.Errorf("%s %s: refused, but half decoded: %+v", kind, g.Name, v)
				}
				continue
			}
			if want := valueOf(t, g.Value); !reflect.DeepEqual(valueOf(t, v), want) {
				t.Errorf("%s %s: read %+v, want %v", kind, g.Name, v, want)
			}
			frame, err := encode(v)
			if err != nil {
				t.Fatal(err)
			}
			if g.Canonical && string(frame[headerBytes:]) != g.Text {
				t.Errorf("%s %s: written as\n%s\nwant\n%s", kind, g.Name, frame[headerBytes:], g.Text)
			}
		}
	}
}

// valueOf returns v, a frame or its JSON text, as what encoding/json makes of it,
// with every number as its digits.
func valueOf(t *testing.T, v any) (m map[string]any) {
	t.Helper()
	text, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.UseNumber()
	if err := dec.Decode(&m); err != nil {
		t.Fatal(err)
	}
	delete(m, "v")
	return m
}

// W1 to W7 for peers in other languages.
func TestGoldenStreams(t *testing.T) {
	for _, g := range readGolden(t, "stream") {
		r := bytes.NewReader(g.Base64)
		var frames []string
		var err error
		for err == nil {
			var frame []byte
			if frame, err = ReadFrame(r, nil); err == nil {
				frames = append(frames, string(frame))
			}
		}
		want := map[string]error{"": io.EOF, "unexpected_eof": io.ErrUnexpectedEOF, "empty": ErrEmptyFrame, "too_large": ErrFrameTooLarge}[g.Error]
		if !errors.Is(err, want) || fmt.Sprint(frames) != fmt.Sprint(g.Frames) {
			t.Errorf("%s: %q, then %v; want %q, then %v", g.Name, frames, err, g.Frames, want)
		}
	}
}

// W12: both versions are named, whatever the frame said.
func TestVersionErrorNamesBothVersions(t *testing.T) {
	for text, got := range map[string]string{
		`{"v":2}`: "2", `{}`: "absent", `{"v":"1"}`: `"1"`, `{"v":null}`: "null", `{"v":1.0}`: "1.0",
		`{"v":"` + strings.Repeat("x", 1000) + `"}`: `"` + strings.Repeat("x", 31),
	} {
		_, err := decodeResult([]byte(text))
		var e *VersionError
		if !errors.As(err, &e) || !errors.Is(err, ErrVersion) || e.Got != got || e.Want != Version {
			t.Errorf("%.40s: %v", text, err)
			continue
		}
		if s := e.Error(); !strings.Contains(s, fmt.Sprintf("%q", got)) || !strings.Contains(s, "v 1") {
			t.Errorf("%.40s: the text names not both: %s", text, s)
		}
	}
}

// W13: nothing but v is decoded when it differs, so a frame of any other make
// gives a version error and costs no memory.
func TestOtherVersionsAreNotDecoded(t *testing.T) {
	text := []byte(`{"id":"` + strings.Repeat("x", 4<<20) + `","tool":[],"args":{},"v":2}`)
	grown := allocated(func() {
		if _, _, err := decodeRequest(text, DefaultMaxArgsBytes); !errors.Is(err, ErrVersion) {
			t.Errorf("got %v, want a version error", err)
		}
	})
	if grown > 64<<10 {
		t.Errorf("refusing it cost %d bytes", grown)
	}
}

// W20: args and a tool's name above their limits are no protocol error, and are not built.
func TestArgsAboveTheirLimitAreNotBuilt(t *testing.T) {
	for _, tc := range []struct {
		tool, args string
		want       string
	}{
		{"t", strings.Repeat("x", 100), ""},
		{"t", strings.Repeat("x", 101), "args longer than 100 bytes"},
		{"t", strings.Repeat("\n", 100), ""}, // escaped it is twice as long
		{"t", strings.Repeat("é", 51), "args longer than 100 bytes"},
		{strings.Repeat("t", maxToolBytes), "", ""},
		{strings.Repeat("t", maxToolBytes+1), "", "tool longer than 1024 bytes"},
	} {
		frame, err := appendRequest(nil, &Request{ID: "a", Tool: tc.tool, Args: tc.args})
		if err != nil {
			t.Fatal(err)
		}
		req, tooLarge, err := decodeRequest(frame[headerBytes:], 100)
		if err != nil || tooLarge != tc.want || req.ID != "a" {
			t.Errorf("%d bytes of args: %+v, %q, %v, want %q", len(tc.args), req, tooLarge, err, tc.want)
		}
		if tooLarge == "" && (req.Tool != tc.tool || req.Args != tc.args) {
			t.Errorf("%d bytes of args arrive as %d", len(tc.args), len(req.Args))
		}
	}
}

// W4, C22: what is checked is the encoded size, which is up to six times the text.
func TestEncodersRefuseWhatIsTooLargeAfterEscaping(t *testing.T) {
	for _, tc := range []struct {
		name  string
		value string
		fits  bool
	}{
		{"plain, exactly a frame", strings.Repeat("x", MaxFrameBytes-len(`{"v":1,"id":"a","ok":true,"value":""}`)), true},
		{"plain, one byte over", strings.Repeat("x", MaxFrameBytes-len(`{"v":1,"id":"a","ok":true,"value":""}`)+1), false},
		{"control characters, a fifth of a frame", strings.Repeat("\x01", MaxFrameBytes/5), false},
		{"control characters, a seventh of a frame", strings.Repeat("\x01", MaxFrameBytes/7), true},
		{"quotes, two thirds of a frame", strings.Repeat(`"`, MaxFrameBytes/3*2), false},
	} {
		r := &Response{ID: "a", OK: true, Value: tc.value}
		frame, err := appendResponse([]byte("kept"), r)
		if tc.fits != (err == nil) || err != nil && !errors.Is(err, ErrFrameTooLarge) {
			t.Errorf("%s: %v, want to fit: %v", tc.name, err, tc.fits)
		}
		if err != nil && string(frame) != "kept" {
			t.Errorf("%s: %d bytes are left behind", tc.name, len(frame))
		}
		if size := responseSize(r); (size <= MaxFrameBytes) != tc.fits {
			t.Errorf("%s: responseSize = %d", tc.name, size)
		}
	}
}

// responseSize is exact where it matters.
func TestResponseSizeIsWhatAppendResponseWrites(t *testing.T) {
	big := strings.Repeat("a\x01\"é", MaxFrameBytes/20)
	for _, r := range []Response{
		{ID: "a", OK: true, Value: big},
		{ID: "\"\n", Kind: "quota", Error: big},
		{ID: "é", Kind: "", Error: big},
	} {
		frame, err := appendResponse(nil, &r)
		if err != nil {
			t.Fatal(err)
		}
		if size := responseSize(&r); size != len(frame)-headerBytes {
			t.Errorf("responseSize = %d, the frame has %d", size, len(frame)-headerBytes)
		}
	}
}

// FuzzDecode feeds all four decoders; what one accepts, it reads again after the
// encoder wrote it, and the strict scanner accepts it.
func FuzzDecode(f *testing.F) {
	for _, kind := range []string{"request", "response", "start", "result"} {
		for _, g := range readGolden(f, kind) {
			f.Add(g.bytes())
		}
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		_, checkErr := strictjson.Check(text, strictjson.Options{})
		for kind, decode := range decoders {
			v, err := decode(text)
			if err != nil {
				if v != nil && !reflect.ValueOf(v).Elem().IsZero() {
					t.Fatalf("%s %q: %v, but half decoded: %+v", kind, text, err, v)
				}
				continue
			}
			// A number may be lossy in a member that is dropped, nothing else.
			if errors.Is(checkErr, strictjson.ErrInvalid) {
				t.Fatalf("%s %q accepted, but %v", kind, text, checkErr)
			}
			frame, err := encode(v)
			if err != nil {
				t.Fatal(err)
			}
			again, err := decode(frame[headerBytes:])
			if err != nil || !reflect.DeepEqual(v, again) {
				t.Fatalf("%s %q reads as %+v, written and read again as %+v, %v", kind, text, v, again, err)
			}
			var std map[string]any
			if err := json.Unmarshal(frame[headerBytes:], &std); err != nil {
				t.Fatalf("%s: encoding/json does not read %q: %v", kind, frame[headerBytes:], err)
			}
		}
	})
}

// FuzzEncode builds frames from arbitrary text: what went in comes out, and
// encoding/json reads the same.
func FuzzEncode(f *testing.F) {
	f.Add("a", "read", `{"path":"/x"}`, int64(1500))
	f.Add("\"", "\x00\x1f", "é\u2028😀", int64(0))
	f.Add("a", "t", "\\u0000 </script> \x7f", int64(1<<62))
	f.Fuzz(func(t *testing.T, id, tool, args string, n int64) {
		if checkUTF8("id", id, "tool", tool, "args", args) != nil || id == "" || len(id) > MaxIDBytes || tool == "" || len(tool) > maxToolBytes || len(args) > DefaultMaxArgsBytes || n < 0 {
			return
		}
		req := &Request{V: Version, ID: id, Tool: tool, Args: args, DeadlineMS: n}
		res := &Result{V: Version, ResultID: id, OK: true, Value: args, Calls: int(n), Bytes: int(n)}
		st := &Start{
			V: Version, Program: args, ResultID: id, Bindings: []StartBinding{{Name: tool, Signature: args, Description: id}, {Name: tool}},
			Budget: StartBudget{WallClock: time.Duration(n), MaxCalls: int(n), MaxBytes: int(n), MaxMemory: n},
		}
		for kind, v := range map[string]any{"request": req, "result": res, "start": st} {
			frame, err := encode(v)
			if err != nil {
				t.Fatal(err)
			}
			got, err := decoders[kind](frame[headerBytes:])
			if err != nil || !reflect.DeepEqual(got, v) {
				t.Fatalf("%+v came out as %+v, %v", v, got, err)
			}
			std := reflect.New(reflect.TypeOf(v).Elem()).Interface()
			if err := json.Unmarshal(frame[headerBytes:], std); err != nil || !reflect.DeepEqual(std, v) {
				t.Fatalf("%+v reads in encoding/json as %+v, %v", v, std, err)
			}
		}
	})
}

// The golden files must not hold a frame that no reader can be given.
func TestGoldenFilesAreWellFormed(t *testing.T) {
	for _, kind := range []string{"request", "response", "start", "result", "stream"} {
		seen := map[string]bool{}
		for _, g := range readGolden(t, kind) {
			if seen[g.Name] {
				t.Errorf("%s: %s is there twice", kind, g.Name)
			}
			seen[g.Name] = true
			if g.OK != (g.Error == "") || (g.Text == "") == (len(g.Base64) == 0) && kind != "stream" {
				t.Errorf("%s %s: ok %v, error %q, %d and %d bytes", kind, g.Name, g.OK, g.Error, len(g.Text), len(g.Base64))
			}
			if g.Base64 != nil && base64.StdEncoding.EncodeToString(g.Base64) == "" && kind != "stream" {
				t.Errorf("%s %s: empty", kind, g.Name)
			}
		}
		if len(seen) < 10 {
			t.Errorf("%s: only %d entries", kind, len(seen))
		}
	}
}
