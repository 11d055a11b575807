package guesttest

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"example.com/jail/wire"
)

// WantOK fails the test unless there is exactly one Result (W14, W63), with
// this value, and exit code 0.
func WantOK(t testing.TB, o Outcome, value string) {
	t.Helper()
	if len(o.Frames) != 1 || !o.Result.OK || o.Result.Value != value || o.ExitCode != 0 {
		t.Fatalf("exit code %d, value %.300q, want %.300q\nframes: %.600q\nstderr: %s",
			o.ExitCode, o.Result.Value, value, o.Frames, o.Stderr)
	}
	if o.Result.V != wire.Version || o.Result.ResultID != ResultID || o.Result.Kind != "" || o.Result.Error != "" {
		t.Fatalf("Result is %+v", o.Result)
	}
}

// WantFailed fails the test unless there is exactly one Result, failed with
// kind, whose error holds text, and the exit code is code.
func WantFailed(t testing.TB, o Outcome, kind, text string, code int) {
	t.Helper()
	if len(o.Frames) != 1 || o.Result.OK || o.Result.Kind != kind || !strings.Contains(o.Result.Error, text) || o.ExitCode != code {
		t.Fatalf("exit code %d, kind %q, error %q, want %d, %q, %q\nframes: %.600q\nstderr: %s",
			o.ExitCode, o.Result.Kind, o.Result.Error, code, kind, text, o.Frames, o.Stderr)
	}
	if o.Result.Value != "" || o.Result.ResultID != ResultID {
		t.Fatalf("Result is %+v", o.Result)
	}
}

// Gather returns a handler that answers nothing until n requests have arrived,
// so that calls made one after another never end.
func Gather(t testing.TB, n int) func(*Calls, wire.Request) {
	var all sync.WaitGroup
	all.Add(n)
	return func(h *Calls, req wire.Request) {
		all.Done()
		together := make(chan struct{})
		go func() { all.Wait(); close(together) }()
		select {
		case <-together:
			h.Answer(req, req.Args)
		case <-time.After(Limit):
			t.Errorf("request %s waits alone", req.ID)
		}
	}
}

// Early returns a handler with early reads as B11 and B12 tell: prepared
// answers $prepare, $resolve gives "resolved", any other call "ordinary".
func Early(prepared func(*Calls, wire.Request)) func(*Calls, wire.Request) {
	return func(h *Calls, req wire.Request) {
		switch req.Tool {
		case Prepare:
			prepared(h, req)
		case Resolve:
			h.Answer(req, `"resolved"`)
		default:
			h.Answer(req, `"ordinary"`)
		}
	}
}

// CheckStartRefused gives the guest what is no Start of version 1: it sends
// nothing, exits with 70, tells why on stderr, and does not run program, which
// makes a file named ran.
func CheckStartRefused(t *testing.T, argv []string, program string) {
	text := string(Frame(program)[4:])
	rest := `"program":` + text + `,"bindings":[],"budget":{},"result_id":"r"`
	for _, c := range []struct{ name, body, want string }{
		{"not JSON", `x`, "is not JSON"},
		{"blank", `  `, "is not JSON"},
		{"array", `[1]`, "not an object"},
		{"text after the object", `{"v":1,` + rest + `} {}`, "is not JSON"},
		{"v absent", `{` + rest + `}`, "protocol version 0, this guest speaks 1"},
		{"v 2 with other types", `{"v":2,"program":7}`, "protocol version 2, this guest speaks 1"},
		{"v text", `{"v":"1",` + rest + `}`, "this guest speaks 1"},
		{"v true", `{"v":true,` + rest + `}`, "this guest speaks 1"},
		{"v null", `{"v":null,` + rest + `}`, "this guest speaks 1"},
		{"v 1.0", `{"v":1.0,` + rest + `}`, "this guest speaks 1"},
		{"key twice", `{"v":1,"v":1,` + rest + `}`, "twice"},
		{"key in another case", `{"v":1,"Result_ID":"x",` + rest + `}`, "another case"},
		{"no program", `{"v":1,"bindings":[],"budget":{},"result_id":"r"}`, "program is missing"},
		{"program null", `{"v":1,"program":null,"bindings":[],"budget":{},"result_id":"r"}`, "program has the wrong type"},
		{"no bindings", `{"v":1,"program":` + text + `,"budget":{},"result_id":"r"}`, "bindings is missing"},
		{"no budget", `{"v":1,"program":` + text + `,"bindings":[],"result_id":"r"}`, "budget is missing"},
		{"no result_id", `{"v":1,"program":` + text + `,"bindings":[],"budget":{}}`, "result_id is missing"},
		{"result_id empty", `{"v":1,"program":` + text + `,"bindings":[],"budget":{},"result_id":""}`, "result_id is empty"},
		{"lone surrogate", `{"v":1,"program":"\ud800","bindings":[],"budget":{},"result_id":"r"}`, "lone surrogate"},
		{"bad UTF-8", "{\"v\":1,\"program\":\"\xff\",\"bindings\":[],\"budget\":{},\"result_id\":\"r\"}", "is not JSON"},
		{"binding no object", `{"v":1,"program":` + text + `,"bindings":[1],"budget":{},"result_id":"r"}`, "not an object"},
		{"binding without name", `{"v":1,"program":` + text + `,"bindings":[{"signature":"x"}],"budget":{},"result_id":"r"}`, "name is missing"},
		{"binding with an empty name", `{"v":1,"program":` + text + `,"bindings":[{"name":""}],"budget":{},"result_id":"r"}`, "name is empty"},
		{"negative budget", `{"v":1,"program":` + text + `,"bindings":[],"budget":{"max_calls":-1},"result_id":"r"}`, "max_calls is out of range"},
		{"budget beyond int64", `{"v":1,"program":` + text + `,"bindings":[],"budget":{"max_memory":9223372036854775808},"result_id":"r"}`, "max_memory is out of range"},
		{"budget in text", `{"v":1,"program":` + text + `,"bindings":[],"budget":{"wall_clock":"1s"},"result_id":"r"}`, "wall_clock has the wrong type"},
		{"a Request", `{"v":1,"id":"1","tool":"t","args":""}`, "program is missing"},
		{"deep", strings.Repeat("[", 100000), "is not JSON"},
	} {
		t.Run(c.name, func(t *testing.T) {
			checkStartRefused(t, argv, RawFrame([]byte(c.body)), c.want)
		})
	}
	for _, c := range []struct{ name, raw, want string }{
		{"nothing", "", "fd 3 closed before a Start came"},
		{"part of a header", "\x00\x00", "closed inside a frame"},
		{"part of a body", "\x00\x00\x10\x00{", "closed inside a frame"},
		{"length 0", "\x00\x00\x00\x00", "frame length 0 is not in 1 to 16777216"},
		{"length over the limit", "\x01\x00\x00\x01", "frame length 16777217 is not in 1 to 16777216"},
		{"length all ones", "\xff\xff\xff\xff", "frame length 4294967295"},
	} {
		t.Run(c.name, func(t *testing.T) {
			checkStartRefused(t, argv, []byte(c.raw), c.want)
		})
	}
}

func checkStartRefused(t *testing.T, argv []string, start []byte, want string) {
	t.Helper()
	dir := t.TempDir()
	o := Run(t, Options{Argv: argv, Start: start, Dir: dir})
	if len(o.Frames) != 0 || o.ExitCode != 70 || !strings.Contains(o.Stderr, want) || strings.Count(o.Stderr, "\n") != 1 {
		t.Errorf("exit code %d, frames %q, stderr %q, want 70, none, %q", o.ExitCode, o.Frames, o.Stderr, want)
	}
	if _, err := os.Stat(filepath.Join(dir, "ran")); err == nil {
		t.Error("the program ran")
	}
}

// CheckLostChannel breaks the call channel once calls requests wait for their
// answers. The program of o makes those calls, further ones after they failed,
// and gives the list of [kind, text] of all, failures in number.
func CheckLostChannel(t *testing.T, o Options, calls, failures int) {
	for _, c := range []struct {
		name string
		end  func(*Calls)
		want string
	}{
		{"closed", func(h *Calls) { h.Close() }, "the host closed the call channel"},
		{"closed in a frame", func(h *Calls) { h.Raw([]byte("\x00\x00\x00\x09{")); h.Close() }, "the host closed the call channel"},
		{"length over the limit", func(h *Calls) { h.Raw([]byte{0xff, 0xff, 0xff, 0xff}) }, "fd 4: frame length 4294967295 is not in 1 to 16777216"},
		{"length 0", func(h *Calls) { h.Raw(make([]byte, 4)) }, "fd 4: frame length 0 is not in 1 to 16777216"},
		{"not JSON", func(h *Calls) { h.Raw(RawFrame([]byte("{"))) }, "Response frame is not JSON"},
		{"no object", func(h *Calls) { h.Raw(RawFrame([]byte("[]"))) }, "Response frame is not an object"},
		{"other version", func(h *Calls) { h.Raw(RawFrame([]byte(`{"v":2,"id":{}}`))) }, "Response frame has protocol version 2, this guest speaks 1"},
		{"no ok", func(h *Calls) { h.Raw(RawFrame([]byte(`{"v":1,"id":"1"}`))) }, "Response: ok is missing"},
		{"ok as text", func(h *Calls) { h.Raw(RawFrame([]byte(`{"v":1,"id":"1","ok":"true"}`))) }, "Response: ok has the wrong type"},
		{"bad UTF-8", func(h *Calls) { h.Raw(RawFrame([]byte("{\"v\":1,\"id\":\"\xff\",\"ok\":true}"))) }, "Response frame is not JSON"},
		{"a Start", func(h *Calls) { h.Send(wire.Start{V: 1, Bindings: []wire.StartBinding{}, ResultID: "r"}) }, "Response: id is missing"},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := o
			var mu sync.Mutex
			arrived := 0
			o.Handler = func(h *Calls, _ wire.Request) {
				mu.Lock()
				defer mu.Unlock()
				if arrived++; arrived == calls {
					c.end(h)
				}
			}
			out := Run(t, o)
			if !out.Result.OK || strings.Count(out.Result.Value, `["unknown",`) != failures || strings.Count(out.Result.Value, c.want) != failures {
				t.Errorf("Result is %+v\nstderr: %s", out.Result, out.Stderr)
			}
		})
	}
}
