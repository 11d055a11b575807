package invoke

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"math"
	"os/exec"
	"strings"
	"testing"
	"time"

	"example.com/jail/wire/toolfail"
)

func do(t *testing.T, stages []Stage, call Call) error {
	t.Helper()
	chain, err := NewChain(echo, stages)
	if err != nil {
		t.Fatal(err)
	}
	_, err = chain.Do(context.Background(), call)
	return err
}

func TestAllowOnlyComparesBytes(t *testing.T) { // D9, B3
	for name, want := range map[string]toolfail.Class{
		"orders": "", "Orders": "denied", "orders ": "denied", "\u043erders": "denied", "order": "denied", "orders\x00": "denied", "orders\u200b": "denied",
	} {
		if got := toolfail.Of(do(t, []Stage{AllowOnly("orders", "stock")}, Call{Name: name})); got != want {
			t.Errorf("%q: class %q, want %q", name, got, want)
		}
	}
	if err := do(t, []Stage{AllowOnly()}, Call{Name: "orders"}); err == nil {
		t.Error("an empty list allows")
	}
}

func TestRateLimitDeniesAtOnce(t *testing.T) { // I11, C23
	stage, err := RateLimit(0.001, 2, "slow")
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []toolfail.Class{"", "", "rate_limited", "rate_limited"} {
		err := do(t, []Stage{stage}, Call{Name: "slow"})
		if got := toolfail.Of(err); got != want {
			t.Errorf("call %d: %q, want %q", i, got, want)
		}
		var d *DenyError
		if errors.As(err, &d) && (!d.Retryable || !toolfail.Of(err).Retryable()) {
			t.Errorf("call %d: %+v is not retryable", i, d)
		}
	}
	if err := do(t, []Stage{stage}, Call{Name: "other"}); err != nil {
		t.Errorf("a tool that is not counted: %v", err)
	}
	for _, bad := range []struct {
		rate  float64
		burst int
	}{{0, 1}, {-1, 1}, {math.NaN(), 1}, {math.Inf(1), 1}, {1, 0}, {1, -1}} {
		if s, err := RateLimit(bad.rate, bad.burst); err == nil || s != nil {
			t.Errorf("RateLimit(%v, %d) = %v, %v", bad.rate, bad.burst, s, err)
		}
	}
}

func TestCheckArgs(t *testing.T) { // L21, C23
	stage, err := CheckArgs(map[string]json.RawMessage{"t": json.RawMessage(`{"type":"object","required":["a"]}`)})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		tool, args string
		want       toolfail.Class
	}{
		{"t", `{"a":1}`, ""}, {"t", `{}`, "invalid"}, {"t", `[]`, "invalid"}, {"t", `{`, "invalid"}, {"t", ``, "invalid"}, {"u", `{`, ""},
	} {
		if got := toolfail.Of(do(t, []Stage{stage}, Call{Name: c.tool, Args: c.args})); got != c.want {
			t.Errorf("%s(%s): %q, want %q", c.tool, c.args, got, c.want)
		}
	}
	if _, err := CheckArgs(map[string]json.RawMessage{"t": json.RawMessage(`{"type":1}`)}); err == nil || !strings.Contains(err.Error(), "tool t") {
		t.Errorf("bad schema: %v", err)
	}
}

func TestApprovalWaitsForAPerson(t *testing.T) { // I7, I10
	answer := func(v Verdict, err error) func(context.Context, Call) (Verdict, error) {
		return func(context.Context, Call) (Verdict, error) { return v, err }
	}
	for _, c := range []struct {
		name string
		ask  func(context.Context, Call) (Verdict, error)
		tool string
		want toolfail.Class
	}{
		{"yes", answer(Verdict{Allow: true, Note: "alice"}, nil), "pay", ""},
		{"no", answer(Verdict{Reason: "too much"}, nil), "pay", "denied"},
		{"nobody there", answer(Verdict{Allow: true}, errors.New("terminal closed")), "pay", "unknown"},
		{"tool nobody asks about", answer(Verdict{Reason: "not asked"}, nil), "read", ""},
	} {
		if got := toolfail.Of(do(t, []Stage{Approve(c.ask, "pay")}, Call{Name: c.tool})); got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
	defer cancel()
	slow := func(ctx context.Context, _ Call) (Verdict, error) { <-ctx.Done(); return Verdict{Allow: true}, nil }
	err := EvaluateStages(ctx, []Stage{Approve(slow)}, Call{Name: "pay"})
	var d *DenyError
	if !errors.As(err, &d) || !errors.Is(d.Cause, context.DeadlineExceeded) {
		t.Errorf("an approval after the deadline: %v", err)
	}
}

// sink fails from the given write on, after it took the first bytes of it.
type sink struct {
	bytes.Buffer
	writes, failAt, until, torn int
}

func (s *sink) Write(b []byte) (int, error) {
	s.writes++
	if s.failAt > 0 && s.writes >= s.failAt && s.writes < s.until {
		n, _ := s.Buffer.Write(b[:s.torn])
		return n, errors.New("no space left on device")
	}
	return s.Buffer.Write(b)
}

func auditLines(t *testing.T, log string) (lines []map[string]any, bad int) {
	t.Helper()
	for _, text := range strings.Split(strings.TrimSuffix(log, "\n"), "\n") {
		for i := range len(text) {
			if text[i] < ' ' || text[i] > '~' {
				t.Errorf("byte %#x in line %q", text[i], text)
			}
		}
		var m map[string]any
		if json.Unmarshal([]byte(text), &m) != nil {
			bad++
			continue
		}
		lines = append(lines, m)
	}
	return lines, bad
}

func TestAuditHasEveryAttempt(t *testing.T) { // D4, D9, I19, I20
	var log bytes.Buffer
	audit := NewAudit(&log, AuditOptions{MaxArgs: 16})
	tools, _ := newTools(t, Manifest{
		"read": {Call: value("v"), AllowEarlyRead: true},
		"pay":  {Call: func(context.Context, json.RawMessage) (any, error) { panic("boom") }},
	}, []Stage{verdict("note", Verdict{Allow: true, Note: "by \u202ealice"}, nil)}, Options{Audit: audit})
	run := newRun(t, tools)
	name := "\u043erders\x1b[31m" + strings.Repeat("o", 1<<20)
	handle(t, run, "read", `{}`)
	handle(t, run, "pay", `{"text":"\u202e <b> 1234567890"}`)
	handle(t, run, name, "{}")
	handle(t, run, "", "{}")
	handle(t, run, "$prepare", prepareArgs("pay", "{}"))
	handle(t, run, "$prepare", prepareArgs("read", "{}"))
	handle(t, run, "$resolve", resolveArgs("1", "read", "{}"))
	if audit.Err() != nil {
		t.Error(audit.Err())
	}
	lines, bad := auditLines(t, log.String())
	if bad != 0 {
		t.Errorf("%d lines are not JSON", bad)
	}
	type end struct {
		tool    string
		allowed bool
		class   any
	}
	want := []end{
		{"read", true, nil}, {"pay", true, "unknown"}, {"\u043erders\x1b[31m", false, "invalid"},
		{"", false, "denied"}, {"pay", false, "invalid"}, {"read", true, nil},
	}
	calls := map[float64]map[string]any{}
	for i, l := range lines {
		if l["seq"] != float64(i+1) || l["v"] != 1.0 || l["caller"] != "run1" {
			t.Errorf("line %d: %v", i, l)
		}
		if l["event"] == "call" {
			calls[l["seq"].(float64)] = l
			if len(l["args"].(string)) > 16 || l["args_bytes"].(float64) < 2 {
				t.Errorf("arguments of %v", l)
			}
			continue
		}
		if len(want) == 0 {
			t.Fatalf("one more end: %v", l)
		}
		w := want[0]
		want = want[1:]
		if tool := l["tool"].(string); !strings.HasPrefix(tool, w.tool) || len(tool) > maxAuditText || l["allowed"] != w.allowed || l["class"] != w.class {
			t.Errorf("end %.300v, want %v", l, w)
		}
		if w.tool == "" {
			if l["call"] != nil || l["args"] != "{}" {
				t.Errorf("a call that no stage saw: %v", l)
			}
		} else if c := calls[l["call"].(float64)]; c["tool"] != l["tool"] {
			t.Errorf("end %v of call %v", l, c)
		}
		if w.class == "invalid" && len(w.tool) > 10 && l["tool_bytes"] != float64(len(name)) {
			t.Errorf("length of the name: %v", l["tool_bytes"])
		}
	}
	if len(want) != 0 {
		t.Errorf("no end of %v", want)
	}
	if !strings.Contains(log.String(), `"note":"by \u202ealice"`) {
		t.Error("the stage's note is missing")
	}
}

func TestAuditSinkThatFails(t *testing.T) { // E15, I7, I22
	for _, c := range []struct {
		name    string
		failAt  int
		until   int
		torn    int
		goOn    bool
		classes []toolfail.Class // of 4 calls
		ran     int
		lost    float64
	}{
		{"never", 0, 0, 0, false, []toolfail.Class{"", "", "", ""}, 4, 0},
		{"intent: the call is refused", 3, 5, 0, false, []toolfail.Class{"", "unknown", "", ""}, 3, 2},
		{"intent, torn line", 3, 5, 7, false, []toolfail.Class{"", "unknown", "", ""}, 3, 2},
		{"outcome: told by the next line", 2, 3, 3, false, []toolfail.Class{"", "", "", ""}, 4, 1},
		{"for ever", 1, 1000, 0, false, []toolfail.Class{"unknown", "unknown", "unknown", "unknown"}, 0, 0},
		{"by choice calls go on", 3, 6, 4, true, []toolfail.Class{"", "", "", ""}, 4, 3},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := &sink{failAt: c.failAt, until: c.until, torn: c.torn}
			audit := NewAudit(w, AuditOptions{ContinueOnError: c.goOn})
			ran := 0
			tools, _ := newTools(t, Manifest{"t": {Call: func(context.Context, json.RawMessage) (any, error) { ran++; return nil, nil }}}, nil, Options{Audit: audit})
			for i, want := range c.classes {
				_, err := tools.Do(context.Background(), Call{Name: "t", Args: "{}"})
				if got := toolfail.Of(err); got != want {
					t.Errorf("call %d: %q, want %q", i, got, want)
				}
			}
			if ran != c.ran {
				t.Errorf("tool ran %d times, want %d", ran, c.ran)
			}
			if (audit.Err() == nil) != (c.failAt == 0) {
				t.Errorf("Err = %v", audit.Err())
			}
			lines, bad := auditLines(t, w.String())
			lost := 0.0
			for _, l := range lines {
				if n, ok := l["lost"].(float64); ok {
					lost += n
				}
			}
			if lost != c.lost {
				t.Errorf("log tells of %v lost lines, want %v", lost, c.lost)
			}
			if bad > c.until-c.failAt {
				t.Errorf("%d broken lines of %d failed writes", bad, c.until-c.failAt)
			}
		})
	}
}

func TestAuditTakesAShortWriteForAFailure(t *testing.T) { // E15
	short := writerFunc(func(b []byte) (int, error) { return len(b) - 1, nil })
	audit := NewAudit(short, AuditOptions{})
	err := do(t, []Stage{audit.Stage()}, Call{Name: "t"})
	if !errors.Is(err, io.ErrShortWrite) {
		t.Errorf("err = %v", err)
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }

func TestSignatureFromSchema(t *testing.T) { // W24
	for schema, want := range map[string]string{
		`{"type":"object"}`: "f()",
		`{"type":"object","properties":{"customer":{"type":"string"},"limit":{"type":"integer","default":10}},"required":["customer"]}`: "f(customer: str, limit: int = 10)",
		`{"properties":{"z":{"type":"number"},"a":{"type":"boolean","default":true}}}`:                                                  "f(z: float = ..., a: bool = True)",
		`{"properties":{"b":{"type":"array"},"a":{"type":"object"}},"required":["a","b"]}`:                                              "f(a: dict, b: list)",
		`{"properties":{"a":{"type":["string","null"],"default":null},"b":{}}}`:                                                         "f(a: str | None = None, b: object = ...)",
		`{"properties":{"content-type":{"type":"string"},"class":{"type":"string"},"a":{"type":"string","default":"x\"y\u043e"}}}`:      `f(a: str = "x\"y\u043e", **arguments: "content-type: str, class: str")`,
		`{"properties":{"a":{"type":"array","default":[1,2]},"b":{"type":"array","default":[]},"c":{"default":0.50},"d":true}}`:         "f(a: list = ..., b: list = [], c: object = 0.50, d: object = ...)",
		`{"properties":{"a":{"type":"string"}},"required":["a","a","missing"]}`:                                                         "f(a: str)",
		`{"properties":{"` + strings.Repeat("a", 2000) + `":{}}}`:                                                                       "f(...)",
		`{"properties":{` + strings.TrimSuffix(strings.Repeat(`"a":1,`, 200), ",") + `}}`:                                               "f(...)",
		`{"type":"array"}`: "",
		`[]`:               "",
	} {
		got := signature("f", json.RawMessage(schema))
		if got != want {
			t.Errorf("%.100s:\n got %s\nwant %s", schema, got, want)
		}
		if got == "" || got == "f(...)" {
			continue
		}
		// The Python guest parses it as a function's header.
		if out, err := exec.Command("/usr/bin/python3", "-Ic", "import ast,sys; ast.parse('def '+sys.argv[1]+': pass')", got).CombinedOutput(); err != nil {
			t.Errorf("%s is no Python: %s", got, out)
		}
	}
}

func FuzzSignature(f *testing.F) { // W24
	f.Add(`{"type":"object","properties":{"a":{"type":"integer","default":1},"b-c":{}},"required":["a"]}`)
	f.Fuzz(func(t *testing.T, schema string) {
		got := signature("f", json.RawMessage(schema))
		if got == "" {
			return
		}
		if !strings.HasPrefix(got, "f(") || !strings.HasSuffix(got, ")") || len(got) > maxSignature {
			t.Errorf("%q", got)
		}
		for _, r := range got {
			if r < ' ' || r > '~' {
				t.Errorf("%q in %q", r, got)
			}
		}
	})
}
