package execwire

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"reflect"
	"runtime"
	"strings"
	"testing"
	"testing/iotest"
	"time"
	"unicode/utf8"
)

const exitLine = `{"id":"x","seq":99,"name":"exit","value":0}`

func TestDecoderReads(t *testing.T) {
	tests := []struct {
		name, in string
		want     []Event
	}{
		{"nothing (E14)", "", nil},
		{"empty lines (E14)", "\n\n\n", nil},
		{"text", `{"id":"x","seq":0,"name":"stdout","enc":"utf8","value":"a\nb"}` + "\n" + exitLine + "\n",
			[]Event{{ID: "x", Seq: 0, Name: Stdout, Text: true, Data: []byte("a\nb")}, {ID: "x", Seq: 99, Name: Exit}}},
		{"last line without a newline (E13)", exitLine, []Event{{ID: "x", Seq: 99, Name: Exit}}},
		{"empty lines between", "\n" + `{"id":"x","seq":1,"name":"stderr","enc":"b64","value":""}` + "\n\n\n" + exitLine + "\n\n",
			[]Event{{ID: "x", Seq: 1, Name: Stderr, Data: []byte{}}, {ID: "x", Seq: 99, Name: Exit}}},
		{"another order, spaces, unknown keys (E35)",
			` { "value" : "/w==" , "zz":[{"a":[]},{},-1.5e+3,true,false,null,"\ud83d\ude00"], "enc":"b64","name":"stderr","seq":7,"id":"x" } ` + "\r\n" + exitLine,
			[]Event{{ID: "x", Seq: 7, Name: Stderr, Data: []byte{0xff}}, {ID: "x", Seq: 99, Name: Exit}}},
		{"every escape", `{"id":"\u0078","seq":1,"n\u0061me":"std\u006fut","enc":"utf8","value":"\"\\\/\b\f\n\r\t\u00e9\u20ac\ud83d\ude00\u0000"}` + "\n" + exitLine,
			[]Event{{ID: "x", Seq: 1, Name: Stdout, Text: true, Data: []byte("\"\\/\b\f\n\r\té€\U0001f600\x00")}, {ID: "x", Seq: 99, Name: Exit}}},
		{"heartbeats (E26, C16)", `{"id":"x","seq":4,"name":"heartbeat","pid":1,"elapsedMs":2000,"lastOutputMs":0}` + "\n" +
			`{"id":"x","seq":5,"name":"stdout","enc":"utf8","value":""}` + "\n" +
			`{"id":"x","seq":5,"name":"heartbeat","pid":1,"elapsedMs":3000,"lastOutputMs":2500}` + "\n" + exitLine,
			[]Event{{ID: "x", Seq: 4, Name: Heartbeat, Beat: Beat{PID: 1, Elapsed: 2 * time.Second}},
				{ID: "x", Seq: 5, Name: Stdout, Text: true, Data: []byte{}},
				{ID: "x", Seq: 5, Name: Heartbeat, Beat: Beat{PID: 1, Elapsed: 3 * time.Second, LastOutput: 2500 * time.Millisecond}},
				{ID: "x", Seq: 99, Name: Exit}}},
		{"exit with extras (C15, E35)", `{"id":"x","seq":1,"name":"exit","value":-1,"cause":"memory","usage":{"a": "\n\u0041", "b":[1, 2]},"code":5}`,
			[]Event{{ID: "x", Seq: 1, Name: Exit, Code: -1, Cause: "memory", Usage: json.RawMessage(`{"a": "\n\u0041", "b":[1, 2]}`)}}},
		{"usage null", `{"id":"x","seq":1,"name":"exit","value":1,"usage":null}`, []Event{{ID: "x", Seq: 1, Name: Exit, Code: 1, Usage: json.RawMessage("null")}}},
		{"largest numbers", `{"id":"x","seq":9223372036854775807,"name":"exit","value":-2147483648}`,
			[]Event{{ID: "x", Seq: math.MaxInt64, Name: Exit, Code: math.MinInt32}}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			for how, r := range map[string]io.Reader{"at once": strings.NewReader(tt.in), "byte by byte (E11, E12)": iotest.OneByteReader(strings.NewReader(tt.in)),
				"data with EOF": iotest.DataErrReader(strings.NewReader(tt.in))} {
				got := mustDecode(t, r)
				if len(got) == 0 && len(tt.want) == 0 {
					continue
				}
				for i := range got {
					if got[i].Data == nil && (got[i].Name == Stdout || got[i].Name == Stderr) {
						got[i].Data = []byte{}
					}
				}
				if !reflect.DeepEqual(got, tt.want) {
					t.Errorf("%s:\n got %+v\nwant %+v", how, got, tt.want)
				}
			}
		})
	}
}

// E5, E15 and what else is refused. The events before the bad line are given,
// the error is final, and it names the line.
func TestDecoderRefuses(t *testing.T) {
	out := func(rest string) string { return `{"id":"x","seq":5,"name":"stdout",` + rest + `}` }
	tests := []struct{ name, text, in string }{
		{"no JSON", "not a JSON object", `x`},
		{"array", "not a JSON object", `[]`},
		{"string", "not a JSON object", `"x"`},
		{"only a space", "not a JSON object", ` `},
		{"cut off", "line ends", `{"id":"x"`},
		{"cut off in a string", "line ends", `{"id":"x`},
		{"cut off in an escape", "bad escape", `{"id":"x\`},
		{"two objects", "unexpected", exitLine + exitLine},
		{"trailing comma", "unexpected", `{"id":"x",}`},
		{"key without quotes", "unexpected", `{id:"x"}`},
		{"single quotes", "unexpected", `{'id':'x'}`},
		{"empty object", "id, seq or name", `{}`},
		{"no id", "id, seq or name", `{"seq":5,"name":"exit","value":0}`},
		{"no seq", "id, seq or name", `{"id":"x","name":"exit","value":0}`},
		{"no name", "id, seq or name", `{"id":"x","seq":5,"value":0}`},
		{"empty id", "id has 0 bytes", `{"id":"","seq":5,"name":"exit","value":0}`},
		{"long id", "id has 129 bytes", `{"id":"` + strings.Repeat("x", 129) + `","seq":5,"name":"exit","value":0}`},
		{"other id", "id changes", `{"id":"y","seq":5,"name":"exit","value":0}`},
		{"id is a number", "unexpected", `{"id":1,"seq":5,"name":"exit","value":0}`},
		{"seq below 0", "below 0", `{"id":"x","seq":-1,"name":"exit","value":0}`},
		{"seq is a string", "unexpected", `{"id":"x","seq":"5","name":"exit","value":0}`},
		{"seq with a fraction", "not an integer", `{"id":"x","seq":5.0,"name":"exit","value":0}`},
		{"seq with an exponent", "not an integer", `{"id":"x","seq":5e0,"name":"exit","value":0}`},
		{"seq with a zero in front", "unexpected", `{"id":"x","seq":05,"name":"exit","value":0}`},
		{"seq above 64 bits", "not an integer", `{"id":"x","seq":9223372036854775808,"name":"exit","value":0}`},
		{"seq of many digits", "number of 1000", `{"id":"x","seq":` + strings.Repeat("1", 1000) + `,"name":"exit","value":0}`},
		{"seq repeats (E16)", "seq 1 follows 1", `{"id":"x","seq":1,"name":"exit","value":0}`},
		{"seq goes back (E16)", "seq 0 follows 1", `{"id":"x","seq":0,"name":"exit","value":0}`},
		{"heartbeat goes back", "seq 0 follows 1", `{"id":"x","seq":0,"name":"heartbeat","pid":1,"elapsedMs":1,"lastOutputMs":1}`},
		{"unknown name", `unknown name "stdin"`, `{"id":"x","seq":5,"name":"stdin","enc":"utf8","value":""}`},
		{"name in another case", `unknown name "Exit"`, `{"id":"x","seq":5,"name":"Exit","value":0}`},
		{"key in another case", "id, seq or name", `{"ID":"x","seq":5,"name":"exit","value":0}`},
		{"unknown enc (E5)", `unknown enc "utf-8"`, out(`"enc":"utf-8","value":""`)},
		{"empty enc", `unknown enc ""`, out(`"enc":"","value":""`)},
		{"no enc", "needs enc", out(`"value":""`)},
		{"no value", "needs enc", out(`"enc":"b64"`)},
		{"value is a number", "needs enc", out(`"enc":"b64","value":5`)},
		{"value is null", "unexpected", out(`"enc":"b64","value":null`)},
		{"base64 without padding", "illegal base64", out(`"enc":"b64","value":"/w"`)},
		{"base64 of the URL alphabet", "illegal base64", out(`"enc":"b64","value":"_w=="`)},
		{"base64 with bits left over", "illegal base64", out(`"enc":"b64","value":"/x=="`)},
		{"base64 with a line end", "line end", out(`"enc":"b64","value":"/w==\n"`)},
		{"base64 with a space", "illegal base64", out(`"enc":"b64","value":"/w== "`)},
		{"base64 after its end", "illegal base64", out(`"enc":"b64","value":"/w==AAAA"`)},
		{"exit with enc", "exit has enc", `{"id":"x","seq":5,"name":"exit","enc":"utf8","value":0}`},
		{"exit without a value", "exit needs", `{"id":"x","seq":5,"name":"exit"}`},
		{"exit with a text", "exit needs", `{"id":"x","seq":5,"name":"exit","value":"0"}`},
		{"exit with code instead (C15)", "exit needs", `{"id":"x","seq":5,"name":"exit","code":0}`},
		{"exit code of 33 bits", "32 bits", `{"id":"x","seq":5,"name":"exit","value":2147483648}`},
		{"cause is a number", "unexpected", `{"id":"x","seq":5,"name":"exit","value":0,"cause":1}`},
		{"usage is no JSON", "unexpected", `{"id":"x","seq":5,"name":"exit","value":0,"usage":{]}`},
		{"heartbeat without pid", "heartbeat needs", `{"id":"x","seq":5,"name":"heartbeat","elapsedMs":1,"lastOutputMs":1}`},
		{"heartbeat with a value", "enc or value", `{"id":"x","seq":5,"name":"heartbeat","pid":1,"elapsedMs":1,"lastOutputMs":1,"value":1}`},
		{"heartbeat with a negative time", "out of range", `{"id":"x","seq":5,"name":"heartbeat","pid":1,"elapsedMs":-1,"lastOutputMs":1}`},
		{"heartbeat with a time that overflows", "out of range", `{"id":"x","seq":5,"name":"heartbeat","pid":1,"elapsedMs":9223372036854775807,"lastOutputMs":1}`},
		{"heartbeat of pid -1", "out of range", `{"id":"x","seq":5,"name":"heartbeat","pid":-1,"elapsedMs":1,"lastOutputMs":1}`},
		{"repeated key", `"seq" is repeated`, `{"id":"x","seq":5,"seq":5,"name":"exit","value":0}`},
		{"repeated value", `"value" is repeated`, out(`"enc":"utf8","value":"a","value":"b"`)},
		{"repeated key in disguise", `"id" is repeated`, `{"id":"x","\u0069d":"x","seq":5,"name":"exit","value":0}`},
		{"invalid UTF-8", "not UTF-8", out(`"enc":"utf8","value":"` + "\xff" + `"`)},
		{"invalid UTF-8 after an escape", "not UTF-8", out(`"enc":"utf8","value":"\n` + "\xe2\x82" + `"`)},
		{"invalid UTF-8 in an unknown key", "not UTF-8", out("\"\xff\":1")},
		{"invalid UTF-8 in an unknown value", "not UTF-8", out("\"z\":\"\xff\"")},
		{"control character", "unexpected", out(`"enc":"utf8","value":"` + "\x01" + `"`)},
		{"control character after an escape", "unexpected", out(`"enc":"utf8","value":"\n` + "\x01" + `"`)},
		{"control character in an unknown value", "unexpected", out(`"z":"` + "\x01" + `"`)},
		{"lone high surrogate", "bad escape", out(`"enc":"utf8","value":"\ud800"`)},
		{"lone low surrogate", "bad escape", out(`"enc":"utf8","value":"\udc00\ud800"`)},
		{"high surrogate and a letter", "bad escape", out(`"enc":"utf8","value":"\ud800\u0041"`)},
		{"lone surrogate in an unknown value", "bad escape", out(`"z":"\udc00"`)},
		{"unknown escape", "bad escape", out(`"enc":"utf8","value":"\x41"`)},
		{"short escape", "bad escape", out(`"enc":"utf8","value":"\u12"`)},
		{"escape with a sign", "bad escape", out(`"enc":"utf8","value":"\u+123"`)},
		{"unknown key, bad number", "unexpected", out(`"z":-`)},
		{"unknown key, bad fraction", "unexpected", out(`"z":1.`)},
		{"unknown key, bad exponent", "unexpected", out(`"z":1e`)},
		{"unknown key, bad word", "unexpected", out(`"z":nul`)},
		{"unknown key, NaN", "unexpected", out(`"z":NaN`)},
		{"unknown key, crossed brackets", "unexpected", out(`"z":[{]}`)},
		{"unknown key, object without a key", "unexpected", out(`"z":{1:2}`)},
		{"unknown key, object without a colon", "unexpected", out(`"z":{"a" 2}`)},
		{"unknown key, comma at the end", "unexpected", out(`"z":[1,]`)},
		{"unknown key, comma at the end of an object", "unexpected", out(`"z":{"a":1,}`)},
		{"unknown key, deep", "deeper than 64", out(`"z":` + strings.Repeat("[", 65))},
		{"unknown key, very deep", "deeper than 64", out(`"z":` + strings.Repeat(`{"a":`, 1<<20))},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			const first = `{"id":"x","seq":1,"name":"stdout","enc":"utf8","value":"ok"}`
			for _, r := range []io.Reader{strings.NewReader(first + "\n\n" + tt.in + "\n" + exitLine + "\n"),
				iotest.HalfReader(strings.NewReader(first + "\n\n" + tt.in + "\n" + exitLine + "\n"))} {
				d := NewDecoder(r)
				if e, err := d.Next(); err != nil || string(e.Data) != "ok" {
					t.Fatalf("first event: %v, %v", e, err)
				}
				_, err := d.Next()
				if !errors.Is(err, ErrMalformed) || !strings.Contains(err.Error(), tt.text) || !strings.Contains(err.Error(), "line 3: ") {
					t.Fatalf("error %v, want one with %q in line 3", err, tt.text)
				}
				if len(err.Error()) > 700 {
					t.Errorf("the error has %d bytes", len(err.Error()))
				}
				if _, again := d.Next(); again != err {
					t.Errorf("second call: %v", again)
				}
			}
		})
	}
}

// 64 levels of an unknown value pass.
func TestDecoderSkipsNestedValues(t *testing.T) {
	in := `{"z":` + strings.Repeat("[", 64) + strings.Repeat("]", 64) + `,"id":"x","seq":1,"name":"exit","value":0}`
	if _, err := decodeAll(strings.NewReader(in)); err != nil {
		t.Error(err)
	}
}

// E3: the exit event is the last one. A stream without it was cut.
func TestDecoderTellsAWholeStreamFromACutOne(t *testing.T) {
	const first = `{"id":"x","seq":1,"name":"stdout","enc":"utf8","value":"ok"}` + "\n"
	tests := []struct {
		name, in string
		events   int
		err      error
	}{
		{"whole", first + exitLine + "\n", 2, nil},
		{"nothing", "", 0, nil},
		{"cut between events", first, 1, io.ErrUnexpectedEOF},
		{"cut within an event", first + exitLine[:20], 1, ErrMalformed},
		{"event after exit", first + exitLine + "\n" + `{"id":"x","seq":100,"name":"stdout","enc":"utf8","value":""}`, 2, ErrMalformed},
		{"two exits", exitLine + "\n" + strings.Replace(exitLine, "99", "100", 1), 1, ErrMalformed},
		{"heartbeat after exit", exitLine + "\n" + `{"id":"x","seq":99,"name":"heartbeat","pid":1,"elapsedMs":1,"lastOutputMs":1}`, 1, ErrMalformed},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			events, err := decodeAll(strings.NewReader(tt.in))
			if len(events) != tt.events || !errors.Is(err, tt.err) {
				t.Errorf("%d events, %v", len(events), err)
			}
		})
	}
}

// An error of the reader is given as it is, after the whole lines before it.
func TestDecoderPassesOnReadErrors(t *testing.T) {
	const first = `{"id":"x","seq":1,"name":"stdout","enc":"utf8","value":"ok"}` + "\n"
	events, err := decodeAll(io.MultiReader(strings.NewReader(first+exitLine[:10]), iotest.ErrReader(errBroken)))
	if len(events) != 1 || err != errBroken {
		t.Errorf("%d events, %v", len(events), err)
	}
	if _, err := decodeAll(emptyReader{}); err != io.ErrNoProgress {
		t.Errorf("reader that gives nothing: %v", err)
	}
}

type emptyReader struct{}

func (emptyReader) Read([]byte) (int, error) { return 0, nil }

// E15: a line of exactly MaxLine bytes passes, one more does not.
func TestLineLengthIsBounded(t *testing.T) {
	pad := func(n int) string {
		return strings.Repeat(" ", n-len(exitLine)) + exitLine
	}
	for _, end := range []string{"", "\n"} {
		if events, err := decodeAll(strings.NewReader(pad(MaxLine) + end)); err != nil || len(events) != 1 {
			t.Errorf("%d bytes: %d events, %v", MaxLine, len(events), err)
		}
		_, err := decodeAll(strings.NewReader(pad(MaxLine+1) + end))
		if !errors.Is(err, ErrMalformed) || !strings.Contains(err.Error(), "line 1 has more than 16777216 bytes") {
			t.Errorf("%d bytes: %v", MaxLine+1, err)
		}
	}
}

// endless never gives a newline.
type endless struct{ read int64 }

func (r *endless) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = 'x'
	}
	r.read += int64(len(p))
	return len(p), nil
}

// A producer that never ends its line is given up on after MaxLine bytes, and
// one that announces nothing costs nothing.
func TestEndlessLineCostsABoundedAmount(t *testing.T) {
	allocated := func(f func()) uint64 {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		f()
		runtime.ReadMemStats(&after)
		return after.TotalAlloc - before.TotalAlloc
	}
	src := new(endless)
	if n := allocated(func() {
		if _, err := NewDecoder(src).Next(); !errors.Is(err, ErrMalformed) {
			t.Error(err)
		}
	}); n > 3*MaxLine || src.read > MaxLine+2 {
		t.Errorf("%d bytes allocated, %d read", n, src.read)
	}
	if n := allocated(func() {
		if _, err := decodeAll(strings.NewReader(exitLine)); err != nil {
			t.Error(err)
		}
	}); n > 128<<10 {
		t.Errorf("a short stream allocated %d bytes", n)
	}
}

// Decoding and encoding allocate nothing per event.
func TestEventsDoNotAllocate(t *testing.T) {
	for _, text := range []bool{true, false} {
		p := benchmarkChunk(text)
		e := NewEncoder(io.Discard, "run-1", Options{Text: text})
		if n := testing.AllocsPerRun(100, func() {
			if err := e.Output(Stdout, p); err != nil {
				t.Fatal(err)
			}
		}); n > 0 {
			t.Errorf("text %v: encoding allocates %v times", text, n)
		}
		d := NewDecoder(newRepeater(text))
		if n := testing.AllocsPerRun(100, func() {
			if _, err := d.Next(); err != nil {
				t.Fatal(err)
			}
		}); n > 0 {
			t.Errorf("text %v: decoding allocates %v times", text, n)
		}
	}
}

// repeater gives an endless stream of one event whose seq grows.
type repeater struct {
	enc *Encoder
	buf bytes.Buffer
	p   []byte
}

func newRepeater(text bool) *repeater {
	r := &repeater{p: benchmarkChunk(text)}
	r.enc = NewEncoder(&r.buf, "run-1", Options{Text: text})
	return r
}

func (r *repeater) Read(p []byte) (int, error) {
	if r.buf.Len() == 0 {
		if err := r.enc.Output(Stdout, r.p); err != nil {
			return 0, err
		}
	}
	return r.buf.Read(p)
}

// Whatever the input, reading it byte by byte gives the same events and the same
// error, and what is accepted means to encoding/json what it means here.
func FuzzDecoder(f *testing.F) {
	f.Add([]byte(exitLine))
	f.Add([]byte(`{"id":"x","seq":1,"name":"stdout","enc":"utf8","value":"a\u00e9\n\ud83d\ude00"}` + "\n" + exitLine + "\n"))
	f.Add([]byte(`{"id":"x","seq":1,"name":"stderr","enc":"b64","value":"/w=="}` + "\n\n" + `{"seq":1,"id":"x","name":"heartbeat","pid":1,"elapsedMs":1,"lastOutputMs":1}`))
	f.Add([]byte(`{"id":"x","seq":1,"name":"exit","value":-1,"cause":"ok","usage":{"a":[1,2.5e3,null,"\u0000"]},"zz":[[{}]]}`))
	f.Fuzz(func(t *testing.T, in []byte) {
		got, err := decodeAll(bytes.NewReader(bytes.Clone(in)))
		again, errAgain := decodeAll(iotest.OneByteReader(bytes.NewReader(bytes.Clone(in))))
		if !reflect.DeepEqual(got, again) || fmt.Sprint(err) != fmt.Sprint(errAgain) {
			t.Fatalf("at once: %+v, %v\nbyte by byte: %+v, %v", got, err, again, errAgain)
		}
		if err != nil && !errors.Is(err, ErrMalformed) && err != io.ErrUnexpectedEOF {
			t.Fatalf("error %v", err)
		}
		i := 0
		for line := range bytes.Lines(in) {
			if line = bytes.TrimSuffix(line, []byte("\n")); len(line) == 0 {
				continue
			}
			if i == len(got) {
				break
			}
			compareWithJSON(t, line, got[i])
			i++
		}
		if i != len(got) {
			t.Fatalf("%d events from %d lines", len(got), i)
		}
	})
}

func compareWithJSON(t *testing.T, line []byte, e Event) {
	var m map[string]json.RawMessage
	if err := json.Unmarshal(line, &m); err != nil || !utf8.Valid(line) {
		t.Fatalf("accepted %q: %v", line, err)
	}
	var id, name string
	var seq int64
	if json.Unmarshal(m["id"], &id) != nil || json.Unmarshal(m["seq"], &seq) != nil || json.Unmarshal(m["name"], &name) != nil ||
		id != e.ID || seq != e.Seq || name != e.Name {
		t.Fatalf("%q is %+v", line, e)
	}
	switch name {
	case Stdout, Stderr:
		var value, enc string
		if json.Unmarshal(m["value"], &value) != nil || json.Unmarshal(m["enc"], &enc) != nil || e.Text != (enc == "utf8") {
			t.Fatalf("%q is %+v", line, e)
		}
		if enc == "b64" {
			b, err := base64.StdEncoding.DecodeString(value)
			if err != nil {
				t.Fatalf("%q is %+v: %v", line, e, err)
			}
			value = string(b)
		}
		if value != string(e.Data) {
			t.Fatalf("%q is %+v", line, e)
		}
	case Exit:
		var code int
		if json.Unmarshal(m["value"], &code) != nil || code != e.Code || string(m["usage"]) != string(e.Usage) {
			t.Fatalf("%q is %+v", line, e)
		}
		var cause string
		if raw, ok := m["cause"]; ok && (json.Unmarshal(raw, &cause) != nil || cause != e.Cause) {
			t.Fatalf("%q is %+v", line, e)
		}
	case Heartbeat:
		var pid int
		var elapsed int64
		if json.Unmarshal(m["pid"], &pid) != nil || pid != e.Beat.PID ||
			json.Unmarshal(m["elapsedMs"], &elapsed) != nil || elapsed != e.Beat.Elapsed.Milliseconds() {
			t.Fatalf("%q is %+v", line, e)
		}
	}
}

// Any output, cut in any way and put on two streams, comes back as it was, in
// lines that encoding/json reads too.
func FuzzRoundTrip(f *testing.F) {
	f.Add([]byte("text é€\U0001f600"), uint64(0x12345), true)
	f.Add([]byte("\xff\x00\n\"\\"), uint64(3), false)
	f.Fuzz(func(t *testing.T, in []byte, cuts uint64, text bool) {
		var stream bytes.Buffer
		e := NewEncoder(&stream, "x", Options{Text: text})
		want := make(map[string][]byte)
		for rest := in; len(rest) > 0; {
			n := min(int(cuts%7)+1, len(rest))
			name := Stdout
			if cuts&8 != 0 {
				name = Stderr
			}
			cuts = cuts>>3 | cuts<<61
			if err := e.Output(name, rest[:n]); err != nil {
				t.Fatal(err)
			}
			want[name] = append(want[name], rest[:n]...)
			rest = rest[n:]
		}
		if err := e.Exit(0, Extra{Cause: string(in), Usage: string(in)}); err != nil {
			t.Fatal(err)
		}
		lines := bytes.Split(bytes.TrimSuffix(stream.Bytes(), []byte("\n")), []byte("\n"))
		events := mustDecode(t, bytes.NewReader(bytes.Clone(stream.Bytes())))
		if len(events) != len(lines) {
			t.Fatalf("%d events in %d lines", len(events), len(lines))
		}
		for i, ev := range events {
			compareWithJSON(t, lines[i], ev)
			if ev.Seq != int64(i+1) {
				t.Fatalf("event %d has seq %d", i, ev.Seq)
			}
		}
		for _, name := range []string{Stdout, Stderr} {
			if got := joined(events, name); !bytes.Equal(got, want[name]) {
				t.Fatalf("%s: %q, want %q", name, got, want[name])
			}
			if text && utf8.Valid(want[name]) {
				for _, ev := range events {
					if ev.Name == name && !ev.Text {
						t.Fatalf("%s: valid text became base64: %q", name, ev.Data)
					}
				}
			}
		}
	})
}

func BenchmarkDecoder(b *testing.B) {
	for _, text := range []bool{true, false} {
		b.Run(fmt.Sprintf("text=%v/execwire", text), func(b *testing.B) {
			r := newRepeater(text)
			b.SetBytes(int64(len(r.p)))
			b.ReportAllocs()
			d := NewDecoder(prepared(b, r))
			for b.Loop() {
				if _, err := d.Next(); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run(fmt.Sprintf("text=%v/encoding-json", text), func(b *testing.B) {
			r := newRepeater(text)
			b.SetBytes(int64(len(r.p)))
			b.ReportAllocs()
			d := json.NewDecoder(prepared(b, r))
			for b.Loop() {
				var err error
				if text {
					var e jsonText
					err = d.Decode(&e)
				} else {
					var e jsonBytes
					err = d.Decode(&e)
				}
				if err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// prepared gives an endless stream whose lines were made ahead, so that encoding
// is not measured.
func prepared(b *testing.B, r *repeater) io.Reader {
	b.Helper()
	r.enc.f.seq = 1e12
	if err := r.enc.Output(Stdout, r.p); err != nil {
		b.Fatal(err)
	}
	line := bytes.Clone(r.buf.Bytes())
	const key = `"seq":1000000000001`
	end := bytes.Index(line, []byte(key)) + len(key)
	return &loop{line: line, digits: line[end-12 : end]}
}

// loop repeats a line whose seq grows.
type loop struct {
	line, digits []byte
	at           int
}

func (l *loop) Read(p []byte) (int, error) {
	if l.at == len(l.line) {
		l.at = 0
		for i := len(l.digits) - 1; ; i-- {
			if l.digits[i]++; l.digits[i] <= '9' {
				break
			}
			l.digits[i] = '0'
		}
	}
	n := copy(p, l.line[l.at:])
	l.at += n
	return n, nil
}
