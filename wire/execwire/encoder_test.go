package execwire

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"
)

// decodeAll reads a whole stream. It copies what is valid for one call only.
func decodeAll(r io.Reader) ([]Event, error) {
	d := NewDecoder(r)
	var out []Event
	for {
		e, err := d.Next()
		if err == io.EOF {
			return out, nil
		}
		if err != nil {
			return out, err
		}
		e.Data, e.Usage = bytes.Clone(e.Data), bytes.Clone(e.Usage)
		out = append(out, e)
	}
}

func mustDecode(t *testing.T, r io.Reader) []Event {
	t.Helper()
	events, err := decodeAll(r)
	if err != nil {
		t.Fatal(err)
	}
	return events
}

// joined is the output of one stream.
func joined(events []Event, name string) []byte {
	var b []byte
	for _, e := range events {
		if e.Name == name {
			b = append(b, e.Data...)
		}
	}
	return b
}

// The form of each line: E1, E2, E3, E7, E17, E35, C15, C16.
func TestEncoderWritesTheseLines(t *testing.T) {
	var b bytes.Buffer
	e := NewEncoder(&b, "r1", Options{Text: true})
	steps := []error{
		e.Heartbeat(Beat{PID: 7}),
		e.Output(Stdout, []byte("a \"quoted\" line\nand \\ \t\x01\u2028é\x7f\r\n")),
		e.Output(Stderr, []byte{0xff, 0xfe}),
		e.Heartbeat(Beat{PID: 7, Elapsed: 1500 * time.Millisecond, LastOutput: time.Second}),
		e.Output(Stdout, nil),
		e.Exit(3, Extra{Cause: "program", Usage: map[string]int{"wall_ns": 5}}),
	}
	for i, err := range steps {
		if err != nil {
			t.Fatalf("step %d: %v", i, err)
		}
	}
	want := strings.Join([]string{
		`{"id":"r1","seq":0,"name":"heartbeat","pid":7,"elapsedMs":0,"lastOutputMs":0}`,
		`{"id":"r1","seq":1,"name":"stdout","enc":"utf8","value":"a \"quoted\" line\nand \\ \t\u0001` + "\u2028é\x7f" + `\r\n"}`,
		`{"id":"r1","seq":2,"name":"stderr","enc":"b64","value":"//4="}`,
		`{"id":"r1","seq":2,"name":"heartbeat","pid":7,"elapsedMs":1500,"lastOutputMs":1000}`,
		`{"id":"r1","seq":3,"name":"stdout","enc":"utf8","value":""}`,
		`{"id":"r1","seq":4,"name":"exit","value":3,"cause":"program","usage":{"wall_ns":5}}`,
		``}, "\n")
	if b.String() != want {
		t.Errorf("got\n%swant\n%s", b.String(), want)
	}
}

// E8: bytes are the default. An exit without extras has three keys and value.
func TestEncoderDefaultIsBytes(t *testing.T) {
	var b bytes.Buffer
	e := NewEncoder(&b, "x", Options{})
	if err := errors.Join(e.Output(Stdout, []byte("hi\n")), e.Output(Stdout, nil), e.Exit(0, Extra{})); err != nil {
		t.Fatal(err)
	}
	want := `{"id":"x","seq":1,"name":"stdout","enc":"b64","value":"aGkK"}
{"id":"x","seq":2,"name":"stdout","enc":"b64","value":""}
{"id":"x","seq":3,"name":"exit","value":0}
`
	if b.String() != want {
		t.Errorf("got\n%swant\n%s", b.String(), want)
	}
}

// E6: any bytes come back as they were, by both encodings.
func TestRoundTripOfAnyBytes(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 1))
	var samples [][]byte
	all := make([]byte, 256)
	for i := range all {
		all[i] = byte(i)
		samples = append(samples, []byte{byte(i)})
	}
	samples = append(samples, all, nil, []byte("\xed\xa0\x80"), []byte("\xc0\x80"), []byte("\xf4\x90\x80\x80"), []byte("é\x80é"))
	for range 12 {
		b := make([]byte, rnd.IntN(100_000))
		for i := range b {
			b[i] = byte(rnd.Uint32())
		}
		samples = append(samples, b)
	}
	for _, text := range []bool{false, true} {
		var stream bytes.Buffer
		e := NewEncoder(&stream, "x", Options{Text: text})
		var want []byte
		for _, s := range samples {
			if err := e.Output(Stderr, s); err != nil {
				t.Fatal(err)
			}
			want = append(want, s...)
		}
		if err := e.Exit(0, Extra{}); err != nil {
			t.Fatal(err)
		}
		events := mustDecode(t, &stream)
		if got := joined(events, Stderr); !bytes.Equal(got, want) {
			t.Errorf("text %v: %d bytes came back, want %d", text, len(got), len(want))
		}
		for _, ev := range events {
			if ev.Text && (!text || !utf8.Valid(ev.Data)) {
				t.Errorf("event %d says that %q is text", ev.Seq, ev.Data)
			}
		}
	}
}

// E8: characters that are cut by the ends of reads arrive as text, whatever the
// cuts, and each stream keeps its own half.
func TestTextIsAssembledAcrossReads(t *testing.T) {
	const text = "aé€\U0001f600z\u0301\n漢字"
	for a := range len(text) {
		for b := a; b <= len(text); b++ {
			var stream bytes.Buffer
			e := NewEncoder(&stream, "x", Options{Text: true})
			for _, part := range []string{text[:a], text[a:b], text[b:]} {
				if part == "" {
					continue
				}
				// The other stream is cut in the same place at the same time.
				if err := errors.Join(e.Output(Stdout, []byte(part)), e.Output(Stderr, []byte(part))); err != nil {
					t.Fatal(err)
				}
			}
			if err := e.Exit(0, Extra{}); err != nil {
				t.Fatal(err)
			}
			events := mustDecode(t, &stream)
			for _, name := range []string{Stdout, Stderr} {
				if got := joined(events, name); string(got) != text {
					t.Errorf("cut at %d and %d: %s is %q", a, b, name, got)
				}
			}
			for _, ev := range events[:len(events)-1] {
				if !ev.Text || len(ev.Data) == 0 {
					t.Errorf("cut at %d and %d: event %d is %q, text %v", a, b, ev.Seq, ev.Data, ev.Text)
				}
			}
		}
	}
}

// Bytes that are not text make their own event base64 and no other.
func TestInvalidTextFallsBack(t *testing.T) {
	tests := []struct {
		name  string
		parts []string
		want  string // t or b for each event
	}{
		{"valid", []string{"a", "b"}, "tt"},
		{"invalid in the middle", []string{"a", "x\xffy", "b"}, "tbt"},
		{"start that the next part does not go on with", []string{"a\xe2\x82", "b"}, "tb"},
		{"start that never goes on", []string{"a\xf0\x9f\x98"}, "tb"},
		{"lone continuation", []string{"\x80", "a"}, "bt"},
		{"start that cannot become valid", []string{"\xc0"}, "b"},
		{"surrogate", []string{"\xed\xa0\x80"}, "b"},
		{"three halves", []string{"\xf0", "\x9f", "\x98\x80"}, "t"},
		{"half, then an empty read", []string{"\xc3", "", "\xa9"}, "tt"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var stream bytes.Buffer
			e := NewEncoder(&stream, "x", Options{Text: true})
			for _, p := range tt.parts {
				if err := e.Output(Stdout, []byte(p)); err != nil {
					t.Fatal(err)
				}
			}
			if err := e.Exit(0, Extra{}); err != nil {
				t.Fatal(err)
			}
			events := mustDecode(t, &stream)
			var got string
			for _, ev := range events[:len(events)-1] {
				if ev.Text {
					got += "t"
				} else {
					got += "b"
				}
			}
			if data := joined(events, Stdout); got != tt.want || string(data) != strings.Join(tt.parts, "") {
				t.Errorf("events %q with %q, want %q", got, data, tt.want)
			}
		})
	}
}

// A large write becomes several events, each far below the bound of a line even
// if all of it must be escaped, and no character is cut.
func TestLargeOutputIsSplit(t *testing.T) {
	for name, p := range map[string][]byte{
		"escapes": bytes.Repeat([]byte{1}, 1<<20), "characters": bytes.Repeat([]byte("€"), 1<<18), "bytes": bytes.Repeat([]byte{0xff}, 1<<20)} {
		var stream bytes.Buffer
		e := NewEncoder(&stream, "x", Options{Text: true})
		if err := errors.Join(e.Output(Stdout, p), e.Exit(0, Extra{})); err != nil {
			t.Fatal(err)
		}
		for line := range bytes.Lines(stream.Bytes()) {
			if len(line) > 6*maxChunk+200 {
				t.Errorf("%s: a line has %d bytes", name, len(line))
			}
		}
		events := mustDecode(t, &stream)
		if !bytes.Equal(joined(events, Stdout), p) || len(events) < 12 {
			t.Errorf("%s: %d events", name, len(events))
		}
		for _, ev := range events[:len(events)-1] {
			if ev.Text != (name != "bytes") {
				t.Errorf("%s: event %d is text: %v", name, ev.Seq, ev.Text)
			}
		}
	}
}

// writeCounter fails the test if a write is not one whole line.
type writeCounter struct {
	t *testing.T
	bytes.Buffer
	writes int
}

func (w *writeCounter) Write(p []byte) (int, error) {
	if bytes.IndexByte(p, '\n') != len(p)-1 {
		w.t.Errorf("a write is not one line: %q", p)
	}
	w.writes++
	return w.Buffer.Write(p)
}

// E10, E16: two streams at once give whole lines, one write each, whose seq
// grows by one.
func TestEncoderIsConcurrent(t *testing.T) {
	w := &writeCounter{t: t}
	e := NewEncoder(w, "x", Options{Text: true})
	const n = 500
	var wg sync.WaitGroup
	for _, name := range []string{Stdout, Stderr} {
		wg.Go(func() {
			for i := range n {
				if err := e.Output(name, fmt.Appendf(nil, "%s %d\n", name, i)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if err := e.Exit(0, Extra{}); err != nil {
		t.Fatal(err)
	}
	events := mustDecode(t, w)
	if len(events) != 2*n+1 || w.writes != len(events) {
		t.Fatalf("%d events in %d writes, want %d", len(events), w.writes, 2*n+1)
	}
	for i, ev := range events {
		if ev.Seq != int64(i+1) {
			t.Fatalf("event %d has seq %d", i, ev.Seq)
		}
	}
	for _, name := range []string{Stdout, Stderr} {
		var want []byte
		for i := range n {
			want = fmt.Appendf(want, "%s %d\n", name, i)
		}
		if !bytes.Equal(joined(events, name), want) {
			t.Errorf("%s is out of order", name)
		}
	}
}

// E25, E33: exactly one exit event, and nothing after it.
func TestNothingFollowsExit(t *testing.T) {
	var b bytes.Buffer
	e := NewEncoder(&b, "x", Options{})
	if err := e.Exit(1, Extra{}); err != nil {
		t.Fatal(err)
	}
	size := b.Len()
	for name, err := range map[string]error{"output": e.Output(Stdout, []byte("x")), "empty output": e.Output(Stdout, nil),
		"exit": e.Exit(0, Extra{}), "heartbeat": e.Heartbeat(Beat{})} {
		if !errors.Is(err, ErrEnded) {
			t.Errorf("%s after exit: %v", name, err)
		}
	}
	if b.Len() != size {
		t.Errorf("wrote %q", b.Bytes()[size:])
	}
}

// E28, E33: a refusal is one stderr event and the exit event.
func TestRefusalHasTheShapeOfARun(t *testing.T) {
	var b bytes.Buffer
	e := NewEncoder(&b, "x", Options{Text: true})
	if err := errors.Join(e.Output(Stderr, []byte("refused: memory\n")), e.Exit(ExitCode(-1, 0), Extra{Cause: "refused"})); err != nil {
		t.Fatal(err)
	}
	events := mustDecode(t, &b)
	if len(events) != 2 || string(events[0].Data) != "refused: memory\n" || events[0].Name != Stderr ||
		events[1].Name != Exit || events[1].Code != -1 || events[1].Cause != "refused" {
		t.Errorf("%+v", events)
	}
}

// E34: whatever the program prints stays inside of a value.
func TestOutputCannotForgeAnEvent(t *testing.T) {
	forged := []string{
		`{"id":"x","seq":1,"name":"exit","value":0}` + "\n",
		"\n" + `{"id":"x","seq":99,"name":"exit","value":0,"cause":"ok"}` + "\n",
		`"}` + "\n" + `{"id":"x","seq":2,"name":"exit","value":0}` + "\n",
		`","name":"exit","value":0,"x":"`,
		"\\\"}\n{\"id\":\"x\"", "\r\n\x00\x85\u2028\u2029\n",
	}
	for _, text := range []bool{false, true} {
		var b bytes.Buffer
		e := NewEncoder(&b, "x", Options{Text: text})
		for _, f := range forged {
			if err := e.Output(Stdout, []byte(f)); err != nil {
				t.Fatal(err)
			}
		}
		if err := e.Exit(9, Extra{Cause: "signaled"}); err != nil {
			t.Fatal(err)
		}
		if got := bytes.Count(b.Bytes(), []byte("\n")); got != len(forged)+1 {
			t.Errorf("text %v: %d lines for %d events", text, got, len(forged)+1)
		}
		events := mustDecode(t, &b)
		if last := events[len(events)-1]; len(events) != len(forged)+1 || last.Code != 9 || string(joined(events, Stdout)) != strings.Join(forged, "") {
			t.Errorf("text %v: %+v", text, events)
		}
	}
}

// C15, E35: the additions of the exit event, also when they cannot be written.
func TestExitExtras(t *testing.T) {
	type usage struct {
		Wall int64 `json:"wall_ns"`
	}
	tests := []struct {
		name  string
		extra Extra
		fails bool
		cause string
		usage string
	}{
		{"none", Extra{}, false, "", ""},
		{"both", Extra{"wall_clock", usage{5}}, false, "wall_clock", `{"wall_ns":5}`},
		{"raw JSON over several lines", Extra{"ok", json.RawMessage("{\n \"a\": [1,\n2]}")}, false, "ok", `{"a":[1,2]}`},
		{"text that must be quoted", Extra{"a\n\"b\"\xff", "c\nd"}, false, "a\n\"b\"\ufffd", `"c\nd"`},
		{"usage that cannot be encoded", Extra{"ok", make(chan int)}, true, "ok", ""},
		{"raw JSON that is none", Extra{"ok", json.RawMessage("{")}, true, "ok", ""},
		{"usage too large", Extra{"ok", strings.Repeat("x", maxExtra)}, true, "ok", ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var b bytes.Buffer
			e := NewEncoder(&b, "x", Options{})
			if err := e.Exit(-1, tt.extra); (err != nil) != tt.fails {
				t.Errorf("exit: %v", err)
			}
			events := mustDecode(t, &b)
			if len(events) != 1 || events[0].Cause != tt.cause || string(events[0].Usage) != tt.usage || events[0].Code != -1 {
				t.Errorf("%+v with usage %s", events, events[0].Usage)
			}
			if err := e.Exit(0, Extra{}); !errors.Is(err, ErrEnded) {
				t.Errorf("second exit: %v", err)
			}
		})
	}
}

// failAfter is a writer that breaks in the middle of a line.
type failAfter struct {
	bytes.Buffer
	left int
}

var errBroken = errors.New("broken")

func (w *failAfter) Write(p []byte) (int, error) {
	n := min(len(p), w.left)
	w.left -= n
	w.Buffer.Write(p[:n])
	if n < len(p) {
		return n, errBroken
	}
	return n, nil
}

// E30: after a write that failed nothing more is written, and every call says so.
func TestWriteErrorIsFinal(t *testing.T) {
	w := &failAfter{left: 100}
	e := NewEncoder(w, "x", Options{})
	if err := e.Output(Stdout, []byte("one")); err != nil {
		t.Fatal(err)
	}
	if err := e.Output(Stdout, []byte("two")); !errors.Is(err, errBroken) {
		t.Fatalf("second write: %v", err)
	}
	w.left = 1000
	for name, err := range map[string]error{"output": e.Output(Stderr, nil), "heartbeat": e.Heartbeat(Beat{}), "exit": e.Exit(0, Extra{})} {
		if !errors.Is(err, errBroken) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if w.Len() != 100 {
		t.Errorf("%d bytes written, want 100", w.Len())
	}
}

func TestEncoderRefuses(t *testing.T) {
	for name, id := range map[string]string{"empty": "", "long": strings.Repeat("x", 129), "not UTF-8": "\xff"} {
		var b bytes.Buffer
		e := NewEncoder(&b, id, Options{})
		for call, err := range map[string]error{"output": e.Output(Stdout, nil), "exit": e.Exit(0, Extra{}), "heartbeat": e.Heartbeat(Beat{})} {
			if err == nil || b.Len() != 0 {
				t.Errorf("id %s: %s: %v, %d bytes", name, call, err, b.Len())
			}
		}
	}
	var b bytes.Buffer
	e := NewEncoder(&b, "x", Options{})
	for _, name := range []string{"", "exit", "heartbeat", "STDOUT", "stdout\n"} {
		if err := e.Output(name, nil); err == nil || b.Len() != 0 {
			t.Errorf("output %q: %v", name, err)
		}
	}
}

// E27: while the writer blocks, both streams wait; nothing is taken from them.
func TestBlockedWriterHoldsBackBothStreams(t *testing.T) {
	pr, pw := io.Pipe()
	e := NewEncoder(pw, "x", Options{})
	done := make(chan string, 2)
	for _, name := range []string{Stdout, Stderr} {
		go func() {
			if err := e.Output(name, []byte(name)); err != nil {
				t.Error(err)
			}
			done <- name
		}()
	}
	time.Sleep(20 * time.Millisecond)
	select {
	case name := <-done:
		t.Fatalf("%s was written with nobody reading", name)
	default:
	}
	d := NewDecoder(pr)
	for range 2 {
		if _, err := d.Next(); err != nil {
			t.Fatal(err)
		}
	}
	<-done
	<-done
	pw.Close()
}

// E28.
func TestExitCode(t *testing.T) {
	tests := []struct {
		code int
		sig  syscall.Signal
		want int
	}{
		{0, 0, 0}, {1, 0, 1}, {137, 0, 137}, {-1, 0, -1},
		{0, syscall.SIGTERM, 143}, {-1, syscall.SIGKILL, 137}, {0, syscall.SIGINT, 130}, {0, syscall.SIGHUP, 129},
		{0, syscall.SIGSEGV, -1}, {0, syscall.SIGSYS, -1}, {5, syscall.SIGPIPE, -1},
	}
	for _, tt := range tests {
		if got := ExitCode(tt.code, tt.sig); got != tt.want {
			t.Errorf("code %d signal %d: %d, want %d", tt.code, tt.sig, got, tt.want)
		}
	}
}

func benchmarkChunk(text bool) []byte {
	if text {
		return bytes.Repeat([]byte("a line of text, \"quoted\" at times\n"), 120)
	}
	b := make([]byte, 4096)
	for i := range b {
		b[i] = byte(i * 7)
	}
	return b
}

func BenchmarkEncoder(b *testing.B) {
	for _, text := range []bool{true, false} {
		p := benchmarkChunk(text)
		b.Run(fmt.Sprintf("text=%v/execwire", text), func(b *testing.B) {
			b.SetBytes(int64(len(p)))
			b.ReportAllocs()
			e := NewEncoder(io.Discard, "run-1", Options{Text: text})
			for b.Loop() {
				if err := e.Output(Stdout, p); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run(fmt.Sprintf("text=%v/encoding-json", text), func(b *testing.B) {
			b.SetBytes(int64(len(p)))
			b.ReportAllocs()
			enc := json.NewEncoder(io.Discard)
			enc.SetEscapeHTML(false)
			var seq int64
			for b.Loop() {
				seq++
				var err error
				if text {
					err = enc.Encode(jsonText{"run-1", seq, Stdout, "utf8", string(p)})
				} else {
					err = enc.Encode(jsonBytes{"run-1", seq, Stdout, "b64", p})
				}
				if err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

type jsonText struct {
	ID    string `json:"id"`
	Seq   int64  `json:"seq"`
	Name  string `json:"name"`
	Enc   string `json:"enc"`
	Value string `json:"value"`
}

type jsonBytes struct {
	ID    string `json:"id"`
	Seq   int64  `json:"seq"`
	Name  string `json:"name"`
	Enc   string `json:"enc"`
	Value []byte `json:"value"`
}
