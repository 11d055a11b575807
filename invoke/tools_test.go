package invoke

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"example.com/jail/wire"
	"example.com/jail/wire/toolfail"
)

// records collects what a recorder gets.
type records struct {
	mu  sync.Mutex
	all []Record
}

func (r *records) add(rec Record) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all = append(r.all, rec)
}

func (r *records) take() []Record {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := r.all
	r.all = nil
	return all
}

func value(v any) func(context.Context, json.RawMessage) (any, error) {
	return func(context.Context, json.RawMessage) (any, error) { return v, nil }
}

func newTools(t *testing.T, m Manifest, stages []Stage, o Options) (*Tools, *records) {
	t.Helper()
	rec := &records{}
	o.Recorder = rec.add
	tools, err := NewTools(m, stages, o)
	if err != nil {
		t.Fatal(err)
	}
	return tools, rec
}

func newRun(t *testing.T, tools *Tools) *Run {
	t.Helper()
	run := tools.NewRun(context.Background(), "run1")
	t.Cleanup(func() {
		if err := run.Close(); err != nil {
			t.Error(err)
		}
	})
	return run
}

func handle(t *testing.T, run *Run, tool, args string) wire.Response {
	t.Helper()
	resp, err := run.Handle(context.Background(), wire.Request{V: 1, ID: "7", Tool: tool, Args: args})
	if err != nil || resp.ID != "7" || resp.V != wire.Version {
		t.Fatalf("Handle(%.40s) = %+v, %v", tool, resp, err)
	}
	return resp
}

func TestCallsThatAreRefusedBeforeAnyStageOrTool(t *testing.T) { // B3, B4, C6, D9, L29, K7
	ran := 0
	call := func(context.Context, json.RawMessage) (any, error) { ran++; return nil, nil }
	gate := 0
	stage := StageFunc{StageName: "gate", Fn: func(context.Context, Call) (Verdict, error) { gate++; return Verdict{Allow: true}, nil }}
	schema := json.RawMessage(`{"type":"object","properties":{"limit":{"type":"integer","minimum":1}},"required":["limit"],"additionalProperties":false}`)
	tools, rec := newTools(t, Manifest{"orders": {Call: call}, "strict": {Call: call, Schema: schema}}, []Stage{stage}, Options{MaxArgs: 1000})
	run := newRun(t, tools)
	deep := strings.Repeat("[", maxArgsDepth+1) + strings.Repeat("]", maxArgsDepth+1)
	for _, c := range []struct{ name, tool, args, want string }{
		{"unknown name", "order", "{}", "no such tool"},
		{"other case", "Orders", "{}", "no such tool"},
		{"look-alike letter", "\u043erders", "{}", `"\u043erders"`},
		{"combining form", "orders\u0301", "{}", "no such tool"},
		{"trailing space", "orders ", "{}", "no such tool"},
		{"trailing NUL", "orders\x00", "{}", "no such tool"},
		{"path", "../x", "{}", "no such tool"},
		{"empty name", "", "{}", "tool name is empty"},
		{"very long name", strings.Repeat("o", 1<<20), "{}", "bytes more"},
		{"object model", "__proto__", "{}", "no such tool"},
		{"no arguments", "orders", "", "arguments: "},
		{"not JSON", "orders", "{", "arguments: "},
		{"two values", "orders", "{}{}", "arguments: "},
		{"invalid UTF-8", "orders", "\"\xff\"", "arguments: "},
		{"lone surrogate", "orders", `"\ud800"`, "arguments: "},
		{"equal keys", "orders", `{"a":1,"a":2}`, "arguments: "},
		{"inexact number", "orders", "9007199254740993", "arguments: "},
		{"infinite number", "orders", "1e400", "arguments: "},
		{"negative zero", "orders", "-0", "arguments: "},
		{"too deep", "orders", deep[:maxArgsDepth+1], "more than 1000"},
		{"too long", "orders", strings.Repeat(" ", 999) + "{}", "arguments of 1001 bytes: more than 1000"},
		{"long and not JSON", "orders", strings.Repeat("{", 1001), "arguments of 1001 bytes"},
		{"bad JSON of an unknown tool", "nope", "{", "arguments: "},
		{"schema: missing", "strict", "{}", "limit"},
		{"schema: type", "strict", `{"limit":"5"}`, "at /limit"},
		{"schema: range", "strict", `{"limit":0}`, "at /limit"},
		{"schema: unknown property", "strict", `{"limit":1,"x":2}`, "x"},
		{"schema: exponent", "strict", `{"limit":1e-999999999}`, "exponent beyond"},
		{"schema: digits", "strict", `{"limit":0.` + strings.Repeat("1", 500) + `}`, "longer than 400"},
	} {
		t.Run(c.name, func(t *testing.T) {
			resp := handle(t, run, c.tool, c.args)
			want := toolfail.Invalid
			if c.tool == "" {
				want = toolfail.Denied
			}
			if resp.OK || resp.Kind != string(want) || !strings.Contains(resp.Error, c.want) || len(resp.Error) > 1024 {
				t.Errorf("response %+v, want %s with %q", resp, want, c.want)
			}
			all := rec.take()
			if len(all) != 1 || all[0].Allowed || all[0].Call.Name != c.tool || all[0].Call.Args != c.args || all[0].Call.Caller != "run1" {
				t.Errorf("records %.200v", fmt.Sprint(all))
			}
		})
	}
	if ran != 0 || gate != 0 {
		t.Errorf("tools ran %d times, stages %d times", ran, gate)
	}
}

func TestArgumentsAsDeepAsAToolCanDecode(t *testing.T) { // C6, L17, L18
	tools, _ := newTools(t, Manifest{"t": {Call: func(_ context.Context, args json.RawMessage) (any, error) {
		var v any
		return nil, json.Unmarshal(args, &v)
	}}}, nil, Options{})
	run := newRun(t, tools)
	nest := func(n int) string { return strings.Repeat("[", n) + strings.Repeat("]", n) }
	if resp := handle(t, run, "t", nest(maxArgsDepth)); !resp.OK {
		t.Errorf("%d levels: %+v", maxArgsDepth, resp)
	}
	if resp := handle(t, run, "t", nest(maxArgsDepth+1)); resp.Kind != "invalid" {
		t.Errorf("%d levels: %+v", maxArgsDepth+1, resp)
	}
}

func TestValuesCrossWithoutLoss(t *testing.T) { // B5, B6, B7, L24, L25, L28
	type inner struct {
		A int64   `json:"a"`
		F float64 `json:"f"`
	}
	for _, c := range []struct {
		name string
		v    any
		want string // empty: class permanent
	}{
		{"nil", nil, "null"},
		{"text", "a<b>&c\u2028\"\\\n\x00", "\"a<b>&c\u2028\\\"\\\\\\n\\u0000\""},
		{"true", true, "true"},
		{"2^60 as int64", int64(1) << 60, "1152921504606846976"},
		{"2^60 as float64", float64(1 << 60), "1152921504606846976"},
		{"2^60 deep inside", map[string]any{"b": []any{float64(1 << 60)}, "a": 1}, `{"a":1,"b":[1152921504606846976]}`},
		{"2^64 as uint64 token", json.Number("18446744073709551616"), "18446744073709551616"},
		{"raw token", json.RawMessage(" {\"x\" : 1.50 , \"y\":1e2}\n"), `{"x":1.50,"y":1e2}`},
		{"empty raw", json.RawMessage(nil), "null"},
		{"fraction", 0.1, "0.1"},
		{"large double", 1e300, "1e+300"},
		{"struct", inner{1, 0.5}, `{"a":1,"f":0.5}`},
		{"map of text", map[string]string{"k": "<v>"}, `{"k":"<v>"}`},
		{"nil slice", []any(nil), "null"},
		{"nil map", map[string]any(nil), "null"},
		{"100000 levels", json.RawMessage(strings.Repeat("[", 100000) + strings.Repeat("]", 100000)), strings.Repeat("[", 100000) + strings.Repeat("]", 100000)},
		{"exactly at the limit", strings.Repeat("a", 1<<20-2), `"` + strings.Repeat("a", 1<<20-2) + `"`},

		{"2^53+1 as int64", int64(1)<<53 + 1, ""},
		{"2^60 as a float64 field", inner{F: 1 << 60}, ""},
		{"NaN", math.NaN(), ""},
		{"infinity", []any{math.Inf(1)}, ""},
		{"negative zero", math.Copysign(0, -1), ""},
		{"channel", make(chan int), ""},
		{"raw that is not JSON", json.RawMessage("{"), ""},
		{"raw with equal keys", json.RawMessage(`{"a":1,"a":1}`), ""},
		{"text that is not UTF-8", "\xff", ""},
		{"key that is not UTF-8", map[string]any{"\xff": 1}, ""},
		{"one byte over the limit", strings.Repeat("a", 1<<20-1), ""},
		{"map that holds itself", func() any { m := map[string]any{}; m["m"] = m; return m }(), ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			tools, rec := newTools(t, Manifest{"t": {Call: value(c.v)}}, nil, Options{})
			resp := handle(t, newRun(t, tools), "t", "{}")
			if c.want != "" && (!resp.OK || resp.Value != c.want) {
				t.Errorf("got %.200v, want %.200s", resp, c.want)
			}
			if c.want == "" && (resp.OK || resp.Kind != "permanent" || resp.Error == "") {
				t.Errorf("got %.200v, want class permanent", resp)
			}
			if all := rec.take(); len(all) != 1 || !all[0].Allowed || all[0].OutBytes != len(c.want) {
				t.Errorf("%d records, or not of %d bytes", len(all), len(c.want))
			}
		})
	}
}

func TestToolErrorsKeepTheirClass(t *testing.T) { // B8, W38, K2, K7
	for _, c := range []struct {
		name string
		call func(context.Context, json.RawMessage) (any, error)
		kind toolfail.Class
		text string
	}{
		{"plain error", func(context.Context, json.RawMessage) (any, error) { return nil, errors.New("rate_limited") }, toolfail.Unknown, "rate_limited"},
		{"classed", func(context.Context, json.RawMessage) (any, error) {
			return nil, &toolfail.Error{Class: toolfail.Auth, Text: "no token"}
		}, toolfail.Auth, "no token"},
		{"classed and wrapped", func(context.Context, json.RawMessage) (any, error) {
			return nil, fmt.Errorf("get: %w", &toolfail.Error{Class: toolfail.Auth, Text: "no token"})
		}, toolfail.Auth, "get: auth: no token"},
		{"deadline", func(context.Context, json.RawMessage) (any, error) { return nil, context.DeadlineExceeded }, toolfail.Transient, "deadline"},
		{"canceled", func(context.Context, json.RawMessage) (any, error) { return nil, context.Canceled }, toolfail.Canceled, "canceled"},
		{"panic", func(context.Context, json.RawMessage) (any, error) { panic("/root/x.go") }, toolfail.Unknown, "the tool failed"},
		{"long text", func(context.Context, json.RawMessage) (any, error) {
			return nil, errors.New(strings.Repeat("\u00e9", 1<<20))
		}, toolfail.Unknown, "cut"},
	} {
		t.Run(c.name, func(t *testing.T) {
			calls := 0
			tools, _ := newTools(t, Manifest{"t": {Call: func(ctx context.Context, args json.RawMessage) (any, error) {
				calls++
				return c.call(ctx, args)
			}}}, nil, Options{})
			resp := handle(t, newRun(t, tools), "t", "{}")
			if resp.OK || resp.Kind != string(c.kind) || !strings.Contains(resp.Error, c.text) || len(resp.Error) > toolfail.MaxText {
				t.Errorf("got %.300v", resp)
			}
			if calls != 1 {
				t.Errorf("the tool ran %d times", calls)
			}
		})
	}
}

func TestBrokenStageTellsTheProgramNothing(t *testing.T) { // C23, K7
	for name, stage := range map[string]Stage{
		"error": verdict("gate", Verdict{}, errors.New("dial /run/secret.sock")),
		"panic": panicking("gate", "/run/secret.sock"),
	} {
		tools, _ := newTools(t, Manifest{"t": {Call: value(1)}}, []Stage{stage}, Options{})
		resp := handle(t, newRun(t, tools), "t", "{}")
		if resp.Kind != "unknown" || strings.Contains(resp.Error, "secret") || resp.Error == "" {
			t.Errorf("%s: %+v", name, resp)
		}
	}
}

func TestToolOwnsItsArguments(t *testing.T) { // B1
	buffer := []byte(`{"a":"original"}`)
	started, proceed := make(chan struct{}), make(chan struct{})
	var seen string
	tools, _ := newTools(t, Manifest{"t": {Call: func(_ context.Context, args json.RawMessage) (any, error) {
		close(started)
		<-proceed
		seen = string(args)
		clear(args) // its own copy: nobody else's text changes
		return nil, nil
	}}}, nil, Options{})
	run := newRun(t, tools)
	done := make(chan struct{})
	go func() {
		defer close(done)
		// The request's text aliases a buffer that is used again.
		handle(t, run, "t", unsafe.String(unsafe.SliceData(buffer), len(buffer)))
	}()
	<-started
	clear(buffer)
	close(proceed)
	<-done
	if seen != `{"a":"original"}` {
		t.Errorf("the tool saw %q", seen)
	}
}

func TestManifestIsCopied(t *testing.T) { // B2, B18, W24
	schema := json.RawMessage(`{"type":"object","properties":{"a":{"type":"string"}}}`)
	m := Manifest{
		"b": {Call: value("b"), Description: "second", Schema: schema},
		"a": {Call: value("a"), Signature: "a(x)", Schema: schema},
	}
	stages := []Stage{allow("a")}
	tools, _ := newTools(t, m, stages, Options{})
	delete(m, "a")
	m["c"] = ToolSpec{Call: value("c")}
	clear(schema)
	stages[0] = verdict("deny", Verdict{}, nil)
	want := []wire.StartBinding{{Name: "a", Signature: "a(x)"}, {Name: "b", Signature: "b(a: str = ...)", Description: "second"}}
	got := tools.Bindings()
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("bindings %v, want %v", got, want)
	}
	got[0].Name = "changed"
	if tools.Bindings()[0].Name != "a" {
		t.Error("a caller changed the bindings")
	}
	run := newRun(t, tools)
	if resp := handle(t, run, "a", `{"a":"x"}`); resp.Value != `"a"` {
		t.Errorf("a: %+v", resp)
	}
	if resp := handle(t, run, "c", "{}"); resp.Kind != "invalid" {
		t.Errorf("c: %+v", resp)
	}
	if bare, err := NewTools(nil, nil, Options{}); err != nil || len(bare.Bindings()) != 0 {
		t.Errorf("no tools: %v, %v", bare, err)
	}
}

func TestNewToolsRefuses(t *testing.T) { // L9, L29, L41, B18
	ok := value(1)
	for _, c := range []struct {
		name string
		m    Manifest
		o    Options
		want string
	}{
		{"no function", Manifest{"t": {}}, Options{}, "no Call function"},
		{"empty name", Manifest{"": {Call: ok}}, Options{}, "name is empty"},
		{"digit first", Manifest{"1a": {Call: ok}}, Options{}, "not an identifier"},
		{"dash", Manifest{"a-b": {Call: ok}}, Options{}, "not an identifier"},
		{"look-alike", Manifest{"\u043erders": {Call: ok}}, Options{}, `"\u043erders"`},
		{"Python word", Manifest{"lambda": {Call: ok}}, Options{}, "reserved word"},
		{"JavaScript word", Manifest{"typeof": {Call: ok}}, Options{}, "reserved word"},
		{"console", Manifest{"console": {Call: ok}}, Options{}, "runtime"},
		{"thenable", Manifest{"then": {Call: ok}}, Options{}, "runtime"},
		{"guest's own", Manifest{"prepare": {Call: ok}}, Options{}, "runtime"},
		{"dunder", Manifest{"__name__": {Call: ok}}, Options{}, "underscores"},
		{"reserved name", Manifest{"$prepare": {Call: ok}}, Options{}, "reserved by the call channel"},
		{"other reserved name", Manifest{"$resolve": {Call: ok}}, Options{}, "reserved by the call channel"},
		{"long name", Manifest{strings.Repeat("a", 65): {Call: ok}}, Options{}, "longer than 64"},
		{"schema is no JSON", Manifest{"t": {Call: ok, Schema: json.RawMessage("{")}}, Options{}, "schema"},
		{"schema is no object", Manifest{"t": {Call: ok, Schema: json.RawMessage("true")}}, Options{}, "not an object"},
		{"schema does not compile", Manifest{"t": {Call: ok, Schema: json.RawMessage(`{"type":"strin"}`)}}, Options{}, "schema"},
		{"schema refers to a file", Manifest{"t": {Call: ok, Schema: json.RawMessage(`{"$ref":"file:///etc/passwd"}`)}}, Options{}, "whole in itself"},
		{"schema refers to a network", Manifest{"t": {Call: ok, Schema: json.RawMessage(`{"$ref":"http://127.0.0.1:1/x"}`)}}, Options{}, "whole in itself"},
		{"schema too long", Manifest{"t": {Call: ok, Schema: json.RawMessage(`{"title":"` + strings.Repeat("a", maxSchemaText) + `"}`)}}, Options{}, "more than"},
		{"descriptions too long", Manifest{"t": {Call: ok, Description: strings.Repeat("a", maxBindings)}}, Options{}, "more than"},
		{"negative limit", nil, Options{MaxArgs: -1}, "MaxArgs -1"},
		{"limit beyond a frame", nil, Options{MaxValue: wire.MaxFrameBytes}, "MaxValue"},
	} {
		t.Run(c.name, func(t *testing.T) {
			tools, err := NewTools(c.m, nil, c.o)
			if err == nil || tools != nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("NewTools = %v, %v; want error with %q", tools, err, c.want)
			}
		})
	}
	for _, name := range []string{"orders", "Orders", "_x", "a1", "get_forecast", "name", "int", strings.Repeat("a", 64)} {
		if _, err := NewTools(Manifest{name: {Call: ok}}, nil, Options{}); err != nil {
			t.Errorf("name %s: %v", name, err)
		}
	}
}

func TestLargestTextsFitInAFrame(t *testing.T) { // L9, W3
	// JSON text of quotes only: each takes two bytes in a frame.
	text := strings.Repeat(`"`, largestMaxText)
	frame, err := json.Marshal(wire.Response{V: 1, ID: strings.Repeat("i", 128), OK: true, Value: text})
	if err != nil || len(frame) > wire.MaxFrameBytes {
		t.Errorf("frame of %d bytes, limit %d, %v", len(frame), wire.MaxFrameBytes, err)
	}
}

func TestDirectAndJailedCallsLeaveTheSameRecord(t *testing.T) { // I25
	tools, rec := newTools(t, Manifest{"t": {Call: value(1), Server: "srv"}}, []Stage{allow("gate")}, Options{})
	run := newRun(t, tools)
	for _, args := range []string{"{}", "{"} {
		handle(t, run, "t", args)
		_, _ = tools.Do(context.Background(), Call{Name: "t", Caller: "run1", Args: args})
		all := rec.take()
		if len(all) != 2 {
			t.Fatalf("%d records", len(all))
		}
		for i := range all {
			all[i].Duration = 0
			for j := range all[i].Stages {
				all[i].Stages[j].Duration = 0
			}
		}
		if fmt.Sprintf("%+v", all[0]) != fmt.Sprintf("%+v", all[1]) {
			t.Errorf("args %s:\njailed %+v\ndirect %+v", args, all[0], all[1])
		}
		if all[0].Call.Server != "srv" {
			t.Errorf("server %q", all[0].Call.Server)
		}
	}
}

func TestToolDoesNotStartAfterItsCallEnded(t *testing.T) { // B9, D6
	ran := false
	ctx, cancel := context.WithCancel(context.Background())
	late := StageFunc{StageName: "late", Fn: func(context.Context, Call) (Verdict, error) { cancel(); return Verdict{Allow: true}, nil }}
	tools, _ := newTools(t, Manifest{"t": {Call: func(context.Context, json.RawMessage) (any, error) { ran = true; return nil, nil }}}, []Stage{late}, Options{})
	_, err := tools.Do(ctx, Call{Name: "t", Args: "{}"})
	if ran || toolfail.Of(err) != toolfail.Canceled {
		t.Errorf("ran %v, error %v", ran, err)
	}
}

func TestSlowCallDoesNotDelayOthers(t *testing.T) { // I23, W30
	block := make(chan struct{})
	tools, _ := newTools(t, Manifest{
		"slow": {Call: func(context.Context, json.RawMessage) (any, error) { <-block; return nil, nil }},
		"fast": {Call: value(1)},
	}, []Stage{allow("gate")}, Options{})
	run := newRun(t, tools)
	done := make(chan struct{})
	go func() { defer close(done); handle(t, run, "slow", "{}") }()
	for range 100 {
		if resp := handle(t, run, "fast", "{}"); !resp.OK {
			t.Errorf("%+v", resp)
		}
	}
	close(block)
	<-done
}

func TestSchemaRefusalOfLargeArgumentsStaysCheap(t *testing.T) { // L21, D3
	schema := json.RawMessage(`{"type":"array","items":{"type":"string"}}`)
	tools, _ := newTools(t, Manifest{"t": {Call: value(1), Schema: schema}}, nil, Options{})
	args := "[" + strings.Repeat("1,", 1<<19-2) + "1]"
	resp := handle(t, newRun(t, tools), "t", args)
	if resp.Kind != "invalid" || resp.Error == "" || len(resp.Error) > 1024 {
		t.Errorf("got %.300v", resp)
	}
}

func prepareArgs(tool, args string) string {
	b, err := json.Marshal(map[string]any{"tool": tool, "args": args})
	if err != nil {
		panic(err)
	}
	return string(b)
}

func resolveArgs(handle, tool, args string) string {
	return strings.TrimSuffix(prepareArgs(tool, args), "}") + `,"handle":` + handle + "}"
}

func TestEarlyReads(t *testing.T) { // B11, B12, B13, B18
	var calls atomic.Int64
	count := func(_ context.Context, args json.RawMessage) (any, error) {
		n := calls.Add(1)
		if string(args) == `"fail"` {
			return nil, &toolfail.Error{Class: toolfail.Auth, Text: "no token"}
		}
		return map[string]any{"args": args, "call": n}, nil
	}
	m := Manifest{"read": {Call: count, AllowEarlyRead: true}, "write": {Call: count}}
	type step struct {
		tool, args string
		want       string // value, or "class: part of the text"
	}
	for _, c := range []struct {
		name    string
		stages  []Stage
		steps   []step
		calls   int64
		records int
	}{
		{"match", nil, []step{
			{"$prepare", prepareArgs("read", `"a"`), "1"},
			{"$resolve", resolveArgs("1", "read", `"a"`), `{"args":"a","call":1}`},
		}, 1, 1},
		{"handle is used once", nil, []step{
			{"$prepare", prepareArgs("read", `"a"`), "1"},
			{"$resolve", resolveArgs("1", "read", `"a"`), `{"args":"a","call":1}`},
			{"$resolve", resolveArgs("1", "read", `"a"`), "invalid: handle 1: unknown or already used"},
		}, 1, 2},
		{"failure is delivered as it is", nil, []step{
			{"$prepare", prepareArgs("read", `"fail"`), "1"},
			{"$resolve", resolveArgs("1", "read", `"fail"`), "auth: no token"},
		}, 1, 1},
		{"denial is delivered as it is", []Stage{verdict("gate", Verdict{Reason: "not today"}, nil)}, []step{
			{"$prepare", prepareArgs("read", `"a"`), "1"},
			{"$resolve", resolveArgs("1", "read", `"a"`), "denied: not today"},
		}, 0, 1},
		{"bad arguments of the call", nil, []step{
			{"$prepare", prepareArgs("read", `{`), "1"},
			{"$resolve", resolveArgs("1", "read", `{`), "invalid: arguments"},
		}, 0, 1},
		{"other arguments run anew", nil, []step{
			{"$prepare", prepareArgs("read", `"fail"`), "1"},
			{"$resolve", resolveArgs("1", "read", `"b"`), `"args":"b"`},
		}, 2, 2},
		{"same value in other bytes runs anew", nil, []step{
			{"$prepare", prepareArgs("read", `"fail"`), "1"},
			{"$resolve", resolveArgs("1", "read", ` "b"`), `"args":"b"`},
		}, 2, 2},
		{"other tool runs anew", nil, []step{
			{"$prepare", prepareArgs("read", `"a"`), "1"},
			{"$resolve", resolveArgs("1", "write", `"a"`), `"args":"a"`},
		}, 2, 2},
		{"handle 0 is an ordinary call", nil, []step{{"$resolve", resolveArgs("0", "write", `"a"`), `{"args":"a","call":1}`}}, 1, 1},
		{"unknown handle", nil, []step{{"$resolve", resolveArgs("5", "read", `"a"`), "invalid: handle 5"}}, 0, 1},
		{"negative handle", nil, []step{{"$resolve", resolveArgs("-1", "read", `"a"`), "invalid: handle -1"}}, 0, 1},
		{"handle of the wrong type", nil, []step{{"$resolve", resolveArgs(`"1"`, "read", `"a"`), "invalid: arguments: handle"}}, 0, 1},
		{"handle beyond 64 bits", nil, []step{{"$resolve", resolveArgs("18446744073709551616", "read", `"a"`), "invalid: arguments: handle"}}, 0, 1},
		{"no handle", nil, []step{{"$resolve", prepareArgs("read", `"a"`), "invalid: arguments: handle"}}, 0, 1},
		{"tool that allows none", nil, []step{{"$prepare", prepareArgs("write", `"a"`), "0"}}, 0, 1},
		{"unknown tool", nil, []step{{"$prepare", prepareArgs("nope", `"a"`), "0"}}, 0, 1},
		{"reserved name in itself", nil, []step{{"$prepare", prepareArgs("$prepare", `"a"`), "0"}}, 0, 1},
		{"not JSON", nil, []step{{"$prepare", "{", "0"}, {"$resolve", "{", "invalid"}}, 0, 2},
		{"args that are no text", nil, []step{{"$prepare", `{"tool":"read","args":{}}`, "0"}}, 0, 1},
		{"tool that is no text", nil, []step{{"$prepare", `{"tool":null,"args":"{}"}`, "0"}}, 0, 1},
		{"no args", nil, []step{{"$prepare", `{"tool":"read"}`, "0"}}, 0, 1},
		{"key of another case", nil, []step{{"$prepare", `{"Tool":"read","args":"{}"}`, "0"}}, 0, 1},
		{"equal keys", nil, []step{{"$prepare", `{"tool":"write","tool":"read","args":"{}"}`, "0"}}, 0, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			calls.Store(0)
			tools, rec := newTools(t, m, c.stages, Options{})
			run := tools.NewRun(context.Background(), "run1")
			for _, s := range c.steps {
				resp := handle(t, run, s.tool, s.args)
				got := resp.Value
				if !resp.OK {
					got = resp.Kind + ": " + resp.Error
					if kind, text, _ := strings.Cut(s.want, ": "); kind == resp.Kind && strings.Contains(resp.Error, text) {
						got = s.want
					}
				} else if strings.HasPrefix(s.want, `"args"`) && strings.Contains(got, s.want) {
					got = s.want
				}
				if got != s.want {
					t.Errorf("%s(%s) = %q, want %q", s.tool, s.args, got, s.want)
				}
			}
			if err := run.Close(); err != nil {
				t.Error(err)
			}
			if all := rec.take(); len(all) != c.records {
				t.Errorf("%d records, want %d: %v", len(all), c.records, all)
			}
			if n := calls.Load(); n > c.calls || n < c.calls-1 {
				t.Errorf("tools ran %d times, want %d", n, c.calls)
			}
		})
	}
}

func TestEarlyReadsAreBounded(t *testing.T) { // B11
	block, begun := make(chan struct{}), make(chan struct{}, 100)
	m := Manifest{"read": {AllowEarlyRead: true, Call: func(ctx context.Context, _ json.RawMessage) (any, error) {
		begun <- struct{}{}
		<-block // a tool that does not look at ctx
		return "v", nil
	}}}
	tools, rec := newTools(t, m, nil, Options{MaxPending: 3})
	run := newRun(t, tools)
	for i := 1; i <= 3; i++ {
		if resp := handle(t, run, "$prepare", prepareArgs("read", "{}")); resp.Value != fmt.Sprint(i) {
			t.Fatalf("%d: %+v", i, resp)
		}
	}
	for range 3 { // one that is given up before its tool runs never runs it
		<-begun
	}
	if resp := handle(t, run, "$prepare", prepareArgs("read", "{}")); resp.Value != "0" {
		t.Errorf("one more: %+v", resp)
	}
	// A handle that is given up does not free the place of a tool that still runs.
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	resp, err := run.Handle(ctx, wire.Request{ID: "1", Tool: "$resolve", Args: resolveArgs("1", "read", "{}")})
	if err != nil || resp.Kind != "canceled" {
		t.Errorf("resolve with an ended call: %+v, %v", resp, err)
	}
	if resp := handle(t, run, "$prepare", prepareArgs("read", "{}")); resp.Value != "0" {
		t.Errorf("after giving one up: %+v", resp)
	}
	// The record of the read that was given up may be there already, or not yet.
	refusals := slices.DeleteFunc(rec.take(), func(r Record) bool {
		return r.Err == nil || !strings.Contains(r.Err.Error(), "early read not started")
	})
	if len(refusals) != 2 {
		t.Errorf("%d records of 2 refusals: %v", len(refusals), refusals)
	}
	close(block)
	for _, h := range []string{"2", "3"} {
		if resp := handle(t, run, "$resolve", resolveArgs(h, "read", "{}")); resp.Value != `"v"` {
			t.Errorf("resolve %s: %+v", h, resp)
		}
	}
	// A place that is free again gets a new handle, never an old one.
	deadline := time.Now().Add(10 * time.Second)
	for {
		resp := handle(t, run, "$prepare", prepareArgs("read", "{}"))
		if resp.Value == "4" {
			break
		}
		if resp.Value != "0" || time.Now().After(deadline) {
			t.Fatalf("place does not come free: %+v", resp)
		}
	}
}

func TestNoEarlyReadsWhenTurnedOff(t *testing.T) { // B11
	tools, rec := newTools(t, Manifest{"read": {Call: value(1), AllowEarlyRead: true}}, nil, Options{MaxPending: -1})
	run := newRun(t, tools)
	if resp := handle(t, run, "$prepare", prepareArgs("read", "{}")); !resp.OK || resp.Value != "0" {
		t.Errorf("%+v", resp)
	}
	if all := rec.take(); len(all) != 1 || all[0].Err == nil {
		t.Errorf("records %v", all)
	}
}

func TestRunsShareNoEarlyReads(t *testing.T) { // B13
	tools, _ := newTools(t, Manifest{"read": {Call: value("secret"), AllowEarlyRead: true}}, nil, Options{})
	one, two := newRun(t, tools), newRun(t, tools)
	if resp := handle(t, one, "$prepare", prepareArgs("read", "{}")); resp.Value != "1" {
		t.Fatalf("%+v", resp)
	}
	if resp := handle(t, two, "$resolve", resolveArgs("1", "read", "{}")); resp.Kind != "invalid" {
		t.Errorf("another run's handle: %+v", resp)
	}
}

func TestCloseEndsEarlyReads(t *testing.T) { // B9
	started := make(chan struct{})
	tools, rec := newTools(t, Manifest{"read": {AllowEarlyRead: true, Call: func(ctx context.Context, _ json.RawMessage) (any, error) {
		close(started)
		<-ctx.Done()
		return nil, ctx.Err()
	}}}, nil, Options{})
	run := tools.NewRun(context.Background(), "run1")
	handle(t, run, "$prepare", prepareArgs("read", "{}"))
	<-started
	if err := run.Close(); err != nil {
		t.Error(err)
	}
	if all := rec.take(); len(all) != 1 || toolfail.Of(all[0].Err) != toolfail.Canceled {
		t.Errorf("records %v", all)
	}
	if resp := handle(t, run, "$prepare", prepareArgs("read", "{}")); resp.Value != "0" {
		t.Errorf("prepare after Close: %+v", resp)
	}
}

func TestCloseTellsOfAToolThatDoesNotStop(t *testing.T) { // B9, W49
	block, started := make(chan struct{}), make(chan struct{})
	tools, _ := newTools(t, Manifest{"read": {AllowEarlyRead: true, Call: func(context.Context, json.RawMessage) (any, error) {
		close(started)
		<-block
		return nil, nil
	}}}, nil, Options{})
	run := tools.NewRun(context.Background(), "run1")
	handle(t, run, "$prepare", prepareArgs("read", "{}"))
	<-started
	if err := run.Close(); err == nil || !strings.Contains(err.Error(), "1 early reads still running") {
		t.Errorf("Close = %v", err)
	}
	close(block)
	if err := run.Close(); err != nil {
		t.Errorf("second Close = %v", err)
	}
}

func TestConcurrentPrepareAndResolve(t *testing.T) { // B12, I19
	var calls atomic.Int64
	tools, rec := newTools(t, Manifest{"read": {AllowEarlyRead: true, Call: func(context.Context, json.RawMessage) (any, error) {
		return calls.Add(1), nil
	}}}, nil, Options{MaxPending: 8})
	run := newRun(t, tools)
	var wg sync.WaitGroup
	var prepared, refused atomic.Int64
	for range 40 {
		wg.Go(func() {
			resp := handle(t, run, "$prepare", prepareArgs("read", "{}"))
			if resp.Value == "0" {
				refused.Add(1)
				return
			}
			prepared.Add(1)
			// Two callers race for one handle: exactly one gets the value.
			var got atomic.Int64
			var race sync.WaitGroup
			for range 2 {
				race.Go(func() {
					if handle(t, run, "$resolve", resolveArgs(resp.Value, "read", "{}")).OK {
						got.Add(1)
					}
				})
			}
			race.Wait()
			if got.Load() != 1 {
				t.Errorf("handle %s gave %d values", resp.Value, got.Load())
			}
		})
	}
	wg.Wait()
	if calls.Load() != prepared.Load() {
		t.Errorf("%d calls of %d prepared", calls.Load(), prepared.Load())
	}
	// One record a call, one a refused prepare, one a lost race.
	if n := int64(len(rec.take())); n != 2*prepared.Load()+refused.Load() {
		t.Errorf("%d records of %d prepared and %d refused", n, prepared.Load(), refused.Load())
	}
}

// TestChannelAndChainTogether drives a run through the call channel's own server.
func TestChannelAndChainTogether(t *testing.T) { // I24, W36, D4, B9
	parent, child := net.Pipe()
	var log strings.Builder
	tools, rec := newTools(t, Manifest{
		"read": {AllowEarlyRead: true, Call: func(_ context.Context, args json.RawMessage) (any, error) { return args, nil }},
		"hang": {Call: func(ctx context.Context, _ json.RawMessage) (any, error) { <-ctx.Done(); return nil, ctx.Err() }},
	}, []Stage{AllowOnly("read", "hang")}, Options{Audit: NewAudit(&log, AuditOptions{})})
	run := newRun(t, tools)
	served := make(chan error, 1)
	go func() {
		served <- wire.NewServer(parent, run.Handle, wire.WithBudget(&wire.Budget{MaxCalls: 5}), wire.WithMaxCallDeadline(time.Second), wire.WithOnRefused(run.Refused)).Serve(context.Background())
	}()
	client := wire.NewClient(child)
	want := []struct {
		tool, args string
		kind       toolfail.Class
		value      string
	}{
		{"read", `{"n":1152921504606846976}`, "", `{"n":1152921504606846976}`},
		{"Read", `{}`, toolfail.Invalid, ""},
		{"$prepare", prepareArgs("read", `[1]`), "", "1"},
		{"$resolve", resolveArgs("1", "read", `[1]`), "", "[1]"},
		{"hang", `{}`, toolfail.Transient, ""},
		{"read", `{}`, toolfail.Quota, ""},
	}
	for _, c := range want {
		resp, err := client.Call(context.Background(), c.tool, c.args)
		if err != nil || resp.Kind != string(c.kind) || resp.Value != c.value {
			t.Errorf("%s(%s) = %+v, %v", c.tool, c.args, resp, err)
		}
	}
	client.Close()
	if err := <-served; err != nil {
		t.Errorf("Serve: %v", err)
	}
	parent.Close()
	if err := run.Close(); err != nil {
		t.Error(err)
	}
	var got []string
	for _, r := range rec.take() {
		got = append(got, fmt.Sprintf("%s %v %s", r.Call.Name, r.Allowed, toolfail.Of(r.Err)))
	}
	slices.Sort(got) // the server answers an expired call before its record is made
	if text := strings.Join(got, ", "); text != "Read false invalid, hang true transient, read false quota, read true , read true " {
		t.Errorf("records: %s", text)
	}
	if n := strings.Count(log.String(), `"event":"end"`); n != 5 {
		t.Errorf("%d calls in the audit", n)
	}
}

func FuzzHandle(f *testing.F) { // B4, B6, B12, K1
	f.Add("t", `{"a":1}`)
	f.Add("$prepare", prepareArgs("t", "{}"))
	f.Add("$resolve", resolveArgs("1", "t", "{}"))
	f.Add("\u043e", "[")
	schema := json.RawMessage(`{"type":"object","properties":{"a":{"type":"number","multipleOf":0.1,"minimum":0}}}`)
	f.Fuzz(func(t *testing.T, tool, args string) {
		var n atomic.Int64
		tools, err := NewTools(Manifest{"t": {AllowEarlyRead: true, Schema: schema, Call: func(_ context.Context, args json.RawMessage) (any, error) {
			return args, nil
		}}}, nil, Options{Recorder: func(Record) { n.Add(1) }})
		if err != nil {
			t.Fatal(err)
		}
		run := tools.NewRun(context.Background(), "fuzz")
		resp, err := run.Handle(context.Background(), wire.Request{ID: "1", Tool: tool, Args: args})
		if err != nil {
			t.Fatal(err)
		}
		if err := run.Close(); err != nil {
			t.Fatal(err)
		}
		// A success is lossless JSON without a class; a failure has a class of the
		// set and no value; each left exactly one record.
		if resp.OK {
			if checkJSON(resp.Value, 0) != nil || resp.Kind != "" || resp.Error != "" {
				t.Errorf("success %+v", resp)
			}
		} else if resp.Value != "" || !toolfail.Class(resp.Kind).Valid() {
			t.Errorf("failure %+v", resp)
		}
		if n.Load() != 1 {
			t.Errorf("%d records", n.Load())
		}
	})
}

func BenchmarkHandle(b *testing.B) {
	schema := json.RawMessage(`{"type":"object","properties":{"id":{"type":"integer","minimum":1}},"required":["id"]}`)
	call := func(_ context.Context, args json.RawMessage) (any, error) { return args, nil }
	for _, c := range []struct {
		name, tool string
		o          Options
	}{
		{"bare", "bare", Options{}},
		{"schema", "schema", Options{}},
		{"audit", "bare", Options{Audit: NewAudit(io.Discard, AuditOptions{})}},
	} {
		b.Run(c.name, func(b *testing.B) {
			tools, err := NewTools(Manifest{"bare": {Call: call}, "schema": {Call: call, Schema: schema}}, []Stage{AllowOnly("bare", "schema")}, c.o)
			if err != nil {
				b.Fatal(err)
			}
			run := tools.NewRun(context.Background(), "bench")
			defer run.Close()
			b.ReportAllocs()
			for b.Loop() {
				if resp, _ := run.Handle(context.Background(), wire.Request{V: 1, ID: "1", Tool: c.tool, Args: `{"id":17}`}); !resp.OK {
					b.Fatal(resp)
				}
			}
		})
	}
}
