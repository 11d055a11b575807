package jail_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"example.com/jail/guest/python"
	"example.com/jail/invoke"
	"example.com/jail/jail"
	"example.com/jail/rootfs"
	"example.com/jail/wire/toolfail"
)

// script returns a spec that runs a Python program with these tools.
func script(t *testing.T, program string, tools invoke.Manifest, o invoke.Options) jail.Spec {
	t.Helper()
	s := command(python.Argv(rootfs.FilesDir + "/" + python.FileName)...)
	s.Root.Files = []rootfs.File{{Name: python.FileName, Data: python.Source}}
	s.Script = &jail.Script{Program: program}
	if tools != nil {
		ts, err := invoke.NewTools(tools, nil, o)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = ts.Close() })
		s.Script.Tools = ts
	}
	return s
}

func tool(f func(ctx context.Context, args json.RawMessage) (any, error)) invoke.ToolSpec {
	return invoke.ToolSpec{Call: f}
}

var echo = tool(func(_ context.Context, args json.RawMessage) (any, error) { return args, nil })

// What a guest's Result says and what its end says are told apart, and a failure
// of the program from one of anything else (B16, L34, L35).
func TestScriptValues(t *testing.T) {
	for _, c := range []struct {
		name, program string
		cause         jail.Cause
		class         toolfail.Class
		value, errs   string
	}{
		{"result", "result = {'a': [1, 2.5, None, True, 'é']}", jail.CauseOK, "", `{"a":[1,2.5,null,true,"é"]}`, ""},
		{"last expression", "x = 20\nx * 2 + 2", jail.CauseOK, "", "42", ""},
		{"exact numbers", "result = [2**60, 2**64, -2**53, 1.5e-7]", jail.CauseOK, "", "[1152921504606846976,18446744073709551616,-9007199254740992,1.5e-07]", ""},
		{"descriptors 0 to 4 and the one that lists them (J5)", "import os\nsorted(os.listdir('/proc/self/fd'))", jail.CauseOK, "", `["0","1","2","3","4","5"]`, ""},
		{"no value", "x = 1", jail.CauseOK, "", "", ""},
		{"exception", "raise KeyError('k')", jail.CauseProgram, toolfail.Permanent, "", "KeyError: 'k'"},
		{"no JSON", "result = {1, 2}", jail.CauseProgram, toolfail.Invalid, "", "set"},
		{"infinite", "result = float('inf')", jail.CauseProgram, toolfail.Invalid, "", ""},
		{"syntax error", "def f(:", jail.CauseProgram, toolfail.Permanent, "", "SyntaxError"},
		{"exit", "import sys\nsys.exit(4)", jail.CauseProgram, toolfail.Permanent, "", "exit status 4"},
		{"exit 0 with a result", "import sys\nresult = 5\nsys.exit()", jail.CauseOK, "", "5", ""},
		{"no tools at all", "host.nothing()", jail.CauseProgram, toolfail.Permanent, "", "AttributeError"},
		{"no tool by that name on the wire (D9)", `
import json, os
b = json.dumps({"v": 1, "id": "x", "tool": "../x", "args": ""}).encode()
os.write(4, len(b).to_bytes(4, "big") + b)
n = int.from_bytes(os.read(4, 4), "big")
result = json.loads(os.read(4, n))["kind"]`, jail.CauseOK, "", `"invalid"`, ""},
		{"killed by itself", "import os\nos.kill(os.getpid(), 11)", jail.CauseSignaled, toolfail.Unknown, "", ""},
		{"exit without a result (J8)", "import os\nos._exit(0)", jail.CauseLost, toolfail.Unknown, "", ""},
		{"start channel closed (J8)", "import os, time\nos.close(3)\ntime.sleep(60)", jail.CauseLost, toolfail.Unknown, "", ""},
		{"result and end at once (J9)", `
import json, os
b = json.dumps({"v": 1, "result_id": RID, "ok": True, "value": "7"}).encode()
os.write(3, len(b).to_bytes(4, "big") + b)
os._exit(0)`, jail.CauseOK, "", "7", ""},
		{"a second result (J10)", `
import json, os, time
for v in "8", "9":
    b = json.dumps({"v": 1, "result_id": RID, "ok": True, "value": v}).encode()
    os.write(3, len(b).to_bytes(4, "big") + b)
time.sleep(60)`, jail.CauseOK, "", "8", ""},
		{"a value that is no JSON", `
import json, os
b = json.dumps({"v": 1, "result_id": RID, "ok": True, "value": "{'a': 1}"}).encode()
os.write(3, len(b).to_bytes(4, "big") + b)
os._exit(0)`, jail.CauseProgram, toolfail.Invalid, "", "value of the result"},
		{"a class that is none", `
import json, os
b = json.dumps({"v": 1, "result_id": RID, "ok": False, "kind": "great", "error": "x"}).encode()
os.write(3, len(b).to_bytes(4, "big") + b)
os._exit(0)`, "", "", "", ""},
		{"a result of another run (W61)", `
import json, os, time
b = json.dumps({"v": 1, "result_id": "other", "ok": True}).encode()
os.write(3, len(b).to_bytes(4, "big") + b)
time.sleep(60)`, jail.CauseProtocol, toolfail.Permanent, "", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			// Programs that send the Result themselves find its id where the
			// guest has it.
			find := "import gc\nRID = next(d['result_id'] for d in gc.get_objects() if isinstance(d, dict) and isinstance(d.get('result_id'), str))\n"
			program := c.program
			if strings.Contains(program, "RID") {
				program = find + program
			}
			r := run(t, script(t, program, nil, invoke.Options{}))
			if c.cause == "" {
				if r.Cause == jail.CauseOK {
					t.Errorf("cause %q", r.Cause)
				}
				return
			}
			if r.Cause != c.cause || r.Class != c.class || string(r.Value) != c.value || !strings.Contains(r.Error, c.errs) {
				t.Errorf("cause %q class %q value %s error %q\n%s", r.Cause, r.Class, r.Value, r.Error, r.stderr)
			}
		})
	}
}

// B10, C7: the main path of a call and its books: values cross exactly, the ledger and
// the guest's claim agree, time in tools is told apart.
func TestCallsAndTheirLedger(t *testing.T) {
	var records atomic.Int64
	s := script(t, `
import asyncio
print(host.echo(n=2**60, s="é<&>"))
async def main():
    return await asyncio.gather(*[host.aio.meet(i=i) for i in range(50)])
values = asyncio.run(main())
try:
    host.fail()
except host.ToolError as e:
    print(e.kind, e.tool, e)
result = [len(values), sorted(values) == list(range(50))]
`, invoke.Manifest{
		"echo": echo,
		// Answers only once 50 calls are at work.
		"meet": meet(50),
		"fail": tool(func(context.Context, json.RawMessage) (any, error) {
			return nil, &toolfail.Error{Class: toolfail.Auth, Text: "no credential"}
		}),
	}, invoke.Options{Recorder: func(invoke.Record) { records.Add(1) }})
	r := run(t, s)
	if r.Cause != jail.CauseOK || string(r.Value) != "[50,true]" {
		t.Fatalf("cause %q value %s: %s\n%s", r.Cause, r.Value, r.Error, r.stderr)
	}
	if want := "{'n': 1152921504606846976, 's': 'é<&>'}\nauth fail no credential\n"; r.stdout != want {
		t.Errorf("printed %q, want %q", r.stdout, want)
	}
	if c := r.Calls; c.Accepted != 52 || c.Refused != 0 || c.ClaimedCalls != 52 || c.Bytes == 0 || !c.Reconciled || c.WallNS <= 0 {
		t.Errorf("calls %+v", c)
	}
	if records.Load() != 52 {
		t.Errorf("%d records of 52 calls", records.Load())
	}
}

// meet returns a tool that answers with its argument i once n calls are there.
func meet(n int) invoke.ToolSpec {
	var mu sync.Mutex
	there, all := 0, make(chan struct{})
	return tool(func(ctx context.Context, args json.RawMessage) (any, error) {
		var a struct{ I int }
		if err := json.Unmarshal(args, &a); err != nil {
			return nil, err
		}
		mu.Lock()
		if there++; there == n {
			close(all)
		}
		mu.Unlock()
		select {
		case <-all:
			return a.I, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	})
}

// W35, W36, B14, D4: the budget counts where the calls arrive; no number of requests
// makes the handler run once more, and the refusal is typed.
func TestCallBudget(t *testing.T) {
	var ran atomic.Int64
	s := script(t, `
kinds = {}
import threading
def one():
    for i in range(25):
        try:
            host.count()
        except host.ToolError as e:
            kinds[e.kind] = kinds.get(e.kind, 0) + 1
ts = [threading.Thread(target=one) for i in range(4)]
[x.start() for x in ts]; [x.join() for x in ts]
result = kinds
`, invoke.Manifest{"count": tool(func(context.Context, json.RawMessage) (any, error) { return ran.Add(1), nil })}, invoke.Options{})
	s.Budget.MaxCalls = 10
	r := run(t, s)
	if r.Cause != jail.CauseOK || string(r.Value) != `{"quota":90}` || ran.Load() != 10 || r.Calls.Accepted != 10 || r.Calls.Refused != 90 {
		t.Errorf("cause %q value %s, handler ran %d times, calls %+v: %s", r.Cause, r.Value, ran.Load(), r.Calls, r.Error)
	}
	prove(t, r.Report, jail.ItemCalls)
	if !r.Calls.Reconciled {
		t.Errorf("an honest guest is not reconciled: %+v", r.Calls)
	}
}

// W37, W43, W44, D6: bytes, deadline, panic and a tool that never returns.
func TestCallLimitsAndFaults(t *testing.T) {
	hung := make(chan struct{})
	tools := invoke.Manifest{
		"big":   tool(func(context.Context, json.RawMessage) (any, error) { return strings.Repeat("x", 5000), nil }),
		"hang":  tool(func(context.Context, json.RawMessage) (any, error) { <-hung; return nil, nil }),
		"panic": tool(func(context.Context, json.RawMessage) (any, error) { panic("secret of the host") }),
		"plain": tool(func(context.Context, json.RawMessage) (any, error) { return nil, errors.New("plain") }),
	}
	t.Cleanup(func() { close(hung) })
	s := script(t, `
out = []
for name in ["big", "big", "hang", "panic", "plain"]:
    try:
        getattr(host, name)()
        out.append("ok")
    except host.ToolError as e:
        out.append(e.kind)
        assert "secret" not in str(e)
result = out
`, tools, invoke.Options{})
	s.Budget.MaxBytes = 8000
	s.Budget.CallDeadline = 200 * time.Millisecond
	r := run(t, s)
	if want := `["ok","quota","transient","unknown","unknown"]`; r.Cause != jail.CauseOK || string(r.Value) != want {
		t.Errorf("cause %q value %s, want %s: %s", r.Cause, r.Value, want, r.Error)
	}
	prove(t, r.Report, jail.ItemBytes)
}

// The wall clock runs on while a tool works, and a tool that ignores its context
// does not hold the report (D6).
func TestWallClockRunsWhileAToolHangs(t *testing.T) {
	hung := make(chan struct{})
	defer close(hung)
	s := script(t, "host.hang()", invoke.Manifest{
		"hang": tool(func(context.Context, json.RawMessage) (any, error) { <-hung; return nil, nil }),
	}, invoke.Options{})
	s.Budget.WallClock = 500 * time.Millisecond
	r := run(t, s)
	if r.Cause != jail.CauseWall || r.elapsed > 20*time.Second {
		t.Errorf("cause %q after %s", r.Cause, r.elapsed)
	}
	if r.Calls.WallNS <= 0 {
		t.Errorf("calls %+v", r.Calls)
	}
}

// D5, J13: a program that calls and never reads the answers ends by the wall
// clock or as a breach of the protocol, and the launcher's memory is not its
// to take.
func TestUnreadAnswers(t *testing.T) {
	s := script(t, `
import json, os
i = 0
while True:
    b = json.dumps({"v": 1, "id": str(i), "tool": "big", "args": "{}"}).encode()
    os.write(4, len(b).to_bytes(4, "big") + b)
    i += 1
`, invoke.Manifest{"big": tool(func(context.Context, json.RawMessage) (any, error) { return strings.Repeat("x", 500000), nil })}, invoke.Options{})
	s.Budget.WallClock, s.Budget.MaxCalls, s.Budget.MaxBytes = 3*time.Second, 0, 0
	r := run(t, s)
	if r.Cause != jail.CauseProtocol && r.Cause != jail.CauseWall {
		t.Errorf("cause %q: %s", r.Cause, r.Error)
	}
}

// C7 of protocols.md: a claim that the ledger does not bear out is told and
// changes nothing else.
func TestForgedClaim(t *testing.T) {
	s := script(t, `
import gc, json, os
RID = next(d['result_id'] for d in gc.get_objects() if isinstance(d, dict) and isinstance(d.get('result_id'), str))
b = json.dumps({"v": 1, "result_id": RID, "ok": True, "calls": 1000000, "bytes": 5}).encode()
os.write(3, len(b).to_bytes(4, "big") + b)
os._exit(0)`, invoke.Manifest{"echo": echo}, invoke.Options{})
	r := run(t, s)
	if r.Cause != jail.CauseOK || r.Calls.Reconciled || r.Calls.ClaimedCalls != 1000000 || r.Calls.Accepted != 0 {
		t.Errorf("cause %q, calls %+v: %s", r.Cause, r.Calls, r.Error)
	}
}

// W51 and neighbours: what breaks the protocol ends the jail with that cause.
func TestBrokenFramesEndTheJail(t *testing.T) {
	for name, bytes := range map[string]string{
		"length 0xFFFFFFFF":      `b"\xff\xff\xff\xff"`,
		"length zero":            `b"\0\0\0\0"`,
		"no JSON":                `b"\0\0\0\5hello"`,
		"no object":              `frame("[1]")`,
		"trailing data":          `frame('{"v":1,"id":"a","tool":"x","args":""}{}')`,
		"version 2":              `frame('{"v":2,"id":"a"}')`,
		"no version":             `frame('{"id":"a","tool":"x","args":""}')`,
		"empty id":               `frame('{"v":1,"id":"","tool":"x","args":""}')`,
		"long id":                `frame('{"v":1,"id":"' + "a" * 1000 + '","tool":"x","args":""}')`,
		"duplicate key":          `frame('{"v":1,"id":"a","id":"b","tool":"x","args":""}')`,
		"key in another case":    `frame('{"v":1,"ID":"a","tool":"x","args":""}')`,
		"args not a string":      `frame('{"v":1,"id":"a","tool":"x","args":{}}')`,
		"null tool":              `frame('{"v":1,"id":"a","tool":null,"args":""}')`,
		"invalid UTF-8":          `frame(b'{"v":1,"id":"\xff","tool":"x","args":""}')`,
		"deep":                   `frame('{"v":1,"id":"a","tool":"x","args":"","z":' + "[" * 100000 + "]" * 100000 + "}")`,
		"an id twice in flight":  `frame('{"v":1,"id":"a","tool":"hang","args":"{}"}') * 2`,
		"truncated, then closed": `b"\0\0"; os.write(4, data); os.close(4); data = b""`,
	} {
		t.Run(name, func(t *testing.T) {
			hung := make(chan struct{})
			defer close(hung)
			s := script(t, fmt.Sprintf(`
import os, time
def frame(s):
    s = s if isinstance(s, bytes) else s.encode()
    return len(s).to_bytes(4, "big") + s
data = %s
while data:
    data = data[os.write(4, data):]
time.sleep(60)`, bytes), invoke.Manifest{"hang": tool(func(context.Context, json.RawMessage) (any, error) { <-hung; return nil, nil })}, invoke.Options{})
			s.Budget.WallClock = 3 * time.Second
			r := run(t, s)
			if name == "deep" && r.Cause == jail.CauseWall {
				return // unknown members are dropped unread
			}
			if r.Cause != jail.CauseProtocol || r.Class != toolfail.Permanent {
				t.Errorf("cause %q class %q: %s", r.Cause, r.Class, r.Error)
			}
		})
	}
}
