package python_test

import (
	"fmt"
	"io"
	"math/big"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"unicode/utf8"

	"example.com/jail/guest/internal/guesttest"
	"example.com/jail/guest/python"
	"example.com/jail/wire"
)

var guestPath string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "guest-python-")
	if err != nil {
		panic(err)
	}
	guestPath = filepath.Join(dir, python.FileName)
	if err := os.WriteFile(guestPath, python.Source, 0o600); err != nil {
		panic(err)
	}
	code := m.Run()
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

// argv is the launcher's command with a real interpreter: the one that
// GUEST_PYTHON names, or the distribution's.
func argv() []string {
	argv := python.Argv(guestPath)
	argv[0] = "/usr/bin/python3"
	if path := os.Getenv("GUEST_PYTHON"); path != "" {
		argv[0] = path
	}
	return argv
}

var bindings = []wire.StartBinding{
	{Name: "search", Signature: "search(query: str, *, limit: int = 10, tags=('a', 1)) -> list[dict]", Description: "Finds products."},
	{Name: "odd", Signature: "odd <x> => y", Description: "Odd."},
	{Name: "evil", Signature: "evil(a=__import__('os').abort()): pass\nimport os\nos.abort()\ndef g("},
	{Name: "echo"},
}

func run(t *testing.T, program string) guesttest.Outcome {
	t.Helper()
	return guesttest.Run(t, guesttest.Options{Argv: argv(), Program: program, Bindings: bindings})
}

func runWith(t *testing.T, program string, handler func(*guesttest.Calls, wire.Request)) guesttest.Outcome {
	t.Helper()
	return guesttest.Run(t, guesttest.Options{Argv: argv(), Program: program, Bindings: bindings, Handler: handler})
}

// L40.
func TestDeclarationsMirrorGo(t *testing.T) {
	guesttest.CheckMirror(t, argv())
}

// L16, W2, W11, W13, W18, W20 to W27, C4, C20: the golden frames of wire.
func TestGoldenFrames(t *testing.T) {
	const replay = `
import base64, importlib.util, json, sys
spec = importlib.util.spec_from_file_location("guest", sys.argv[1])
guest = importlib.util.module_from_spec(spec)
spec.loader.exec_module(guest)
for line in sys.stdin:
    row = json.loads(line)
    kind, value, out = row["kind"], row["value"], {}
    if kind in ("Request", "Result"):
        out["packed"] = guest.pack(dict(v=1, **value))[4:].decode()
    else:
        try:
            fields = guest.unpack(kind, base64.b64decode(row["body"]))
            del fields["v"]
            if kind == "Response":
                ok, text, kind = guest.answer_of(fields)
                fields = {"id": fields["id"], "ok": ok, "value" if ok else "error": text, "kind": kind}
            for part in [fields, fields.get("budget", {}), *fields.get("bindings", [])]:
                for name in [n for n, v in part.items() if v in ("", 0) and n not in ("ok", "program")]:
                    del part[name]
            out["value"] = fields
        except guest.VersionError:
            out["error"] = "version"
        except guest.ProtocolError:
            out["error"] = "protocol"
    print(json.dumps(out))
`
	argv := argv()
	guesttest.CheckGolden(t, append(argv[:len(argv)-1], "-c", replay, guestPath))
}

// L17, L20, L24, W26.
func TestValueCrossesExactly(t *testing.T) {
	for _, c := range []struct{ name, program, want string }{
		{"nothing", "x = 1", ""},
		{"empty program", "", ""},
		{"only a comment", "# nothing", ""},
		{"last expression", "x = 20\nx + 22", "42"},
		{"last expression is None", "print()", "null"},
		{"string alone", "'text'", `"text"`},
		{"result beats last expression", "result = 1\n2", "1"},
		{"result beats an expression that is no JSON", "result = 1\nobject()", "1"},
		{"result None", "result = None\n2", "null"},
		{"result of a thread", "import threading, time\ndef f():\n global result\n time.sleep(.1)\n result = 5\nthreading.Thread(target=f).start()", "5"},
		{"globals is no hidden value", "class A: pass\nresult = len([1])\nglobals()", "1"},
		{"2 to the 60", "2**60", "1152921504606846976"},
		{"2 to the 53 plus 1", "-(2**53+1)", "-9007199254740993"},
		{"5001 digits", "10**5000", "1" + strings.Repeat("0", 5000)},
		{"float", "[0.1, 1.0, 1e-7, -2.5e-300, 5e-324]", "[0.1,1.0,1e-07,-2.5e-300,5e-324]"},
		{"integral floats have exact digits", "[2.0**60, 1e23]", "[1152921504606846976.0,99999999999999991611392.0]"},
		{"bool is no int", "[True, False, None, 1, 0]", "[true,false,null,1,0]"},
		{"tuple", "(1, (2,), [])", "[1,[2],[]]"},
		{"dict order and nesting", `{"b": {"x": []}, "a": {}, "": [{}]}`, `{"b":{"x":[]},"a":{},"":[{}]}`},
		{"strings", `"\"\\/\n\x00é\u2028<>&\U0001f600\x7f"`, `"\"\\/\n\u0000é` + "\u2028" + `<>&😀` + "\x7f" + `"`},
		{"subclasses", "import enum, collections\nclass E(enum.IntEnum):\n A = 7\nclass S(str): pass\n[E.A, S('s'), collections.OrderedDict(a=1), collections.namedtuple('P', 'x')(3)]", `[7,"s",{"a":1},[3]]`},
		{"same list twice is no cycle", "a = [1]\n[a, a, {'k': a}]", `[[1],[1],{"k":[1]}]`},
		{"byte order mark and CRLF", "\ufeffx = 1\r\nx + 1\r\n", "2"},
		{"deep", "result = []\nfor i in range(99999): result = [result]", strings.Repeat("[", 100000) + strings.Repeat("]", 100000)},
		{"deep dict", "result = 0\nfor i in range(20000): result = {'a': result}", strings.Repeat(`{"a":`, 20000) + "0" + strings.Repeat("}", 20000)},
		{"main module", "import sys\n[__name__, sys.modules['__main__'].__dict__ is globals(), sys.argv, '__file__' in globals()]", `["__main__",true,["program.py"],false]`},
		{"future import stays the program's", "from __future__ import annotations\ndef f(x: nothing): pass\nf.__annotations__['x']", `"nothing"`},
		{"sys.exit(0) keeps result", "import sys\nresult = 3\nsys.exit(0)", "3"},
		{"sys.exit() without result", "import sys\nsys.exit()", ""},
		{"many members", "list(range(100000))[-1:] + [{'k': i} for i in range(3)]", `[99999,{"k":0},{"k":1},{"k":2}]`},
	} {
		t.Run(c.name, func(t *testing.T) {
			guesttest.WantOK(t, run(t, c.program), c.want)
		})
	}
}

// L19, L20, L35.
func TestValueThatIsNotLosslessIsInvalid(t *testing.T) {
	for _, c := range []struct{ name, program, text string }{
		{"NaN", "float('nan')", "nan is not a JSON number"},
		{"infinity", "[1, float('inf')]", "inf is not a JSON number"},
		{"infinities alone", "[float('-inf')] * 3", "-inf is not a JSON number"},
		{"negative zero", "-0.0", "-0.0 is not a JSON number"},
		{"negative zero among floats", "[1.5, -0.0]", "-0.0 is not a JSON number"},
		{"lone surrogate", `"\ud800"`, "lone surrogate"},
		{"lone surrogate in a key", `{"a\udfff": 1}`, "lone surrogate"},
		{"int key", "{1: 2}", "dict key 1 is not a str"},
		{"None key", "{None: 2}", "dict key None is not a str"},
		{"set, with its place", "{'a': [{'b': {1}}]}", `result["a"][...]["b"]: set is not a JSON value`},
		{"bytes", "b'x'", "result: bytes is not a JSON value"},
		{"cycle", "a = []\na.append(a)\na", "list contains itself"},
		{"cycle through dicts", "a = {}\na['k'] = [a]\na", "dict contains itself"},
		{"forged class", "class F:\n __class__ = int\nF()", "F is not a JSON value"},
		{"deep and wrong", "result = object()\nfor i in range(100000): result = [result]", "object is not a JSON value"},
		{"function", "def main(): pass\nmain", "function is not a JSON value"},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := run(t, c.program)
			guesttest.WantFailed(t, o, "invalid", c.text, 1)
			if !strings.Contains(o.Stderr, c.text) {
				t.Errorf("stderr %q does not say so", o.Stderr)
			}
		})
	}
}

// L35, W4: too large is quota, never a cut value, and the bound is exact.
func TestValueThatDoesNotFitAFrameIsQuota(t *testing.T) {
	around := len(guesttest.Frame(wire.Result{V: 1, ResultID: "result-1", OK: true, Value: `""`})) - 4
	fits := wire.MaxFrameBytes - around
	o := run(t, fmt.Sprintf("'x' * %d", fits))
	guesttest.WantOK(t, o, `"`+strings.Repeat("x", fits)+`"`)
	for name, program := range map[string]string{
		"one byte more":    fmt.Sprintf("'x' * %d", fits+1),
		"by escapes alone": "'\\x00' * 3000000",
		"many members":     "[[i, 'x'] for i in range(2000000)]",
	} {
		t.Run(name, func(t *testing.T) {
			guesttest.WantFailed(t, run(t, program), "quota", "bytes", 1)
		})
	}
}

// C14, K7: the traceback holds the program's own frames with their lines, and
// nothing of the guest or the interpreter's library.
func TestUncaughtExceptionIsPermanentWithOwnFrames(t *testing.T) {
	for _, c := range []struct {
		name, program string
		want          []string
		frames        int
	}{
		{"plain", "def f(x):\n    return 1 / x\n\nf(0)", []string{`File "program.py", line 4, in <module>`, "    f(0)\n", `File "program.py", line 2, in f`, "return 1 / x", "ZeroDivisionError: division by zero"}, 2},
		{"in the last expression", "x = 0\n1 / x", []string{`line 2, in <module>`, "1 / x\n"}, 1},
		{"chained", "try:\n    {}['a']\nexcept KeyError as e:\n    raise ValueError('b') from e", []string{"KeyError: 'a'", "direct cause", "ValueError: b"}, 2},
		{"context", "try:\n    {}['a']\nexcept KeyError:\n    None.x", []string{"KeyError: 'a'", "another exception occurred", "AttributeError"}, 2},
		{"through the library", "import json\njson.loads('{')", []string{"JSONDecodeError: Expecting"}, 1},
		{"through asyncio", "import asyncio\nasync def main():\n    raise ValueError('async')\nasyncio.run(main())", []string{"ValueError: async", "in main"}, 2},
		{"out of a call", "host.echo(object())", []string{"TypeError: host.echo() takes keyword arguments"}, 1},
		{"unknown tool", "host.nope()", []string{"AttributeError: host has no tool 'nope'; it has: echo, evil, odd, search"}, 1},
		{"syntax error", "x = 1\nif x\n    pass", []string{`File "program.py", line 2`, "    if x\n", "SyntaxError"}, 1},
		{"bad indentation", "if 1:\npass", []string{"IndentationError", "line 2"}, 1},
		{"null byte", "x = '\x00'", []string{"null bytes"}, 0},
		{"keyboard interrupt", "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nfor i in range(10**9): pass", []string{"KeyboardInterrupt"}, 1},
		{"memory", "x = 1\nraise MemoryError", []string{"MemoryError"}, 1},
		{"really no memory", "x = bytearray(1 << 60)", []string{"MemoryError"}, 1},
		{"recursion", "def f():\n    f()\nf()", []string{"RecursionError", "repeated"}, 4},
		{"exception that has no text", "class E(Exception):\n    def __str__(self): raise ValueError\nraise E", []string{"E: <"}, 1},
		{"line separators in a string", "s = 'a\u2028b\x0cc'\nx = 1\nx.foo", []string{"line 3", "x.foo\n"}, 1},
		{"group", "import sys\nif sys.version_info < (3, 11):\n    raise ValueError('one')\nraise ExceptionGroup('g', [ValueError('one'), KeyError('two')])", []string{"ValueError: one"}, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := run(t, c.program)
			guesttest.WantFailed(t, o, "permanent", c.want[len(c.want)-1], 1)
			for _, text := range c.want {
				if !strings.Contains(o.Result.Error+"\n", text) {
					t.Errorf("error %q lacks %q", o.Result.Error, text)
				}
			}
			if got := strings.Count(o.Result.Error, `File "`); got != c.frames || strings.Count(o.Result.Error, `File "program.py"`) != got {
				t.Errorf("error has %d frames, want %d of program.py: %s", got, c.frames, o.Result.Error)
			}
			if !strings.HasSuffix(o.Stderr, o.Result.Error+"\n") {
				t.Errorf("stderr is %q, error %q", o.Stderr, o.Result.Error)
			}
		})
	}
}

// K7: at most 4 KiB, cut on a character, with the end kept; stderr has all.
func TestErrorIsCutAt4KiBAndKeepsTheEnd(t *testing.T) {
	for shift := range 4 {
		o := run(t, fmt.Sprintf("raise ValueError('é€😀' * 2000 + '%s end')", strings.Repeat("x", shift)))
		guesttest.WantFailed(t, o, "permanent", " end", 1)
		text := o.Result.Error
		if len(text) > guesttest.MaxErrorBytes || len(text) < guesttest.MaxErrorBytes-3 {
			t.Errorf("error takes %d bytes", len(text))
		}
		if !utf8.ValidString(text) || strings.ContainsRune(text, utf8.RuneError) || !strings.HasSuffix(text, " end") {
			t.Errorf("error is cut badly: %q ... %q", text[:20], text[len(text)-20:])
		}
		if len(o.Stderr) < 9*2000 || !strings.Contains(o.Stderr, "Traceback") {
			t.Errorf("stderr has %d bytes", len(o.Stderr))
		}
	}
	o := run(t, `raise ValueError("lone \ud800 surrogate")`)
	guesttest.WantFailed(t, o, "permanent", `lone \ud800 surrogate`, 1)
}

func TestExitStatus(t *testing.T) {
	for _, c := range []struct {
		program, text string
		code          int
	}{
		{"import sys\nsys.exit(3)", "exit status 3", 3},
		{"exit(137)", "exit status 137", 137},
		{"quit(1)", "exit status 1", 1},
		{"raise SystemExit(-1)", "exit status -1", 255},
		{"raise SystemExit(256)", "exit status 256", 0},
		{"raise SystemExit(2**80 + 5)", "exit status 1208925819614629174706181", 5},
		{"import sys\nresult = 1\nsys.exit('went wrong')", "exit status 1: went wrong", 1},
		{"import sys\nresult = 1\nsys.exit(True)", "exit status 1", 1},
	} {
		t.Run(c.program, func(t *testing.T) {
			o := run(t, c.program)
			guesttest.WantFailed(t, o, "permanent", c.text, c.code)
			if strings.Contains(c.program, "went wrong") && o.Stderr != "went wrong\n" {
				t.Errorf("stderr is %q", o.Stderr)
			}
		})
	}
}

// W20, W24: what the program writes is what the request holds.
func TestCallForms(t *testing.T) {
	for _, c := range []struct{ program, args string }{
		{"host.echo()", "{}"},
		{"host.echo(query='x', limit=3)", `{"query":"x","limit":3}`},
		{"host.echo(self=1, args=2, tool=3, name=4)", `{"self":1,"args":2,"tool":3,"name":4}`},
		{"host.echo({'a b': [1, None]})", `{"a b":[1,null]}`},
		{`host.echo('{ "a" : 1 }')`, `{ "a" : 1 }`},
		{`host.echo('not JSON')`, `not JSON`},
		{"host.echo(n=2**100, f=1e300)", `{"n":1267650600228229401496703205376,"f":` + float1e300 + `.0}`},
		{"import asyncio\nasync def main():\n    return await host.aio.echo(a=1)\nasyncio.run(main())", `{"a":1}`},
		{"getattr(host, 'echo')(a=1)", `{"a":1}`},
	} {
		t.Run(c.program, func(t *testing.T) {
			o := run(t, c.program)
			if len(o.Requests) != 1 {
				t.Fatalf("%d requests, stderr %s", len(o.Requests), o.Stderr)
			}
			want := wire.Request{V: 1, ID: "1", Tool: "echo", Args: c.args}
			if o.Requests[0] != want {
				t.Errorf("request is %+v, want %+v", o.Requests[0], want)
			}
			if !o.Result.OK || o.Result.Calls != 1 || o.Result.Bytes != len(c.args) {
				t.Errorf("Result is %+v", o.Result)
			}
		})
	}
	for _, program := range []string{"host.echo(1)", "host.echo({}, {})", "host.echo({}, a=1)", "host.echo([1])", "host.echo(None)"} {
		o := run(t, program)
		guesttest.WantFailed(t, o, "permanent", "TypeError: host.echo() takes keyword arguments, or one dict, or one str of JSON", 1)
		if len(o.Requests) != 0 {
			t.Errorf("%s sent %v", program, o.Requests)
		}
	}
	for _, program := range []string{"host.echo(a=-0.0)", "host.echo(a={1})", `host.echo('"\ud800"')`, "host.echo(a='x' * (16 << 20))", "host.echo('x' * (16 << 20))"} {
		o := run(t, program)
		guesttest.WantFailed(t, o, "invalid", "host.ToolError: arguments", 1)
		if len(o.Requests) != 0 {
			t.Errorf("%s sent %d requests", program, len(o.Requests))
		}
	}
}

var float1e300 = new(big.Float).SetFloat64(1e300).Text('f', 0)

// W21, W22, L24: answers keep their numbers; what is no JSON is text.
func TestAnswers(t *testing.T) {
	deep := strings.Repeat("[", 100000) + strings.Repeat("]", 100000)
	for _, c := range []struct{ name, value, program, want string }{
		{"big int", "[1152921504606846977, 1.5, -3]", "host.echo()", "[1152921504606846977,1.5,-3]"},
		{"int of 6000 digits", strings.Repeat("9", 6000), "host.echo() + 1", "1" + strings.Repeat("0", 6000)},
		{"float stays float", "1.0", "type(host.echo()).__name__", `"float"`},
		{"null", "null", "host.echo() is None", "true"},
		{"empty text", "", "host.echo()", `""`},
		{"plain text", "pong", "host.echo()", `"pong"`},
		{"NaN is text", "NaN", "host.echo()", `"NaN"`},
		{"two values are text", "1 2", "host.echo()", `"1 2"`},
		{"spaces around", " \t\r\n{\"a\" : [ ] } ", "host.echo()", `{"a":[]}`},
		{"deep", deep, "host.echo()", deep},
		{"deep with all kinds", strings.Repeat(`[1, "a]", {"k" : `, 5000) + `null` + strings.Repeat(`, "z":-1.5e3}, [], {}]`, 5000), "import json, sys\nx = host.echo()\nn = 0\nwhile x is not None:\n    assert x[:2] == [1, 'a]'] and x[3:] == [[], {}] and x[2]['z'] == -1500.0 and list(x[2]) == ['k', 'z'], n\n    x = x[2]['k']\n    n += 1\nn", "5000"},
		{"deep and cut", strings.Repeat("[", 50000), "len(host.echo())", "50000"},
		{"deep and wrong", strings.Repeat("[", 50000) + "1 2" + strings.Repeat("]", 50000), "type(host.echo()).__name__", `"str"`},
		{"deep with a bad key", strings.Repeat(`{"a":`, 5000) + "{1:2}" + strings.Repeat("}", 5000), "type(host.echo()).__name__", `"str"`},
		{"deep and closed wrong", strings.Repeat("[", 5000) + "}" + strings.Repeat("]", 4999), "type(host.echo()).__name__", `"str"`},
		{"from deep in the stack", `[[[[[[[[1]]]]]]]]`, "def f(n):\n    return f(n - 1) if n else host.echo()\nimport sys\nlow = 0\nfor n in range(1, sys.getrecursionlimit()):\n    try:\n        result = f(n)\n    except RecursionError:\n        break\nassert n > 100\nresult", `[[[[[[[[1]]]]]]]]`},
		{"large", `"` + strings.Repeat("x", 4<<20) + `"`, "len(host.echo())", "4194304"},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := runWith(t, c.program, func(h *guesttest.Calls, req wire.Request) { h.Answer(req, c.value) })
			guesttest.WantOK(t, o, c.want)
			if o.Result.Bytes != len(c.value)*o.Result.Calls {
				t.Errorf("claims %d bytes in %d calls of %d", o.Result.Bytes, o.Result.Calls, len(c.value))
			}
		})
	}
}

// L17, L20, L24.
func TestRandomValuesRoundTrip(t *testing.T) {
	guesttest.CheckRoundTrip(t, argv(), func(n int) string { return fmt.Sprintf("[host.echo(i=i) for i in range(%d)]", n) })
}

// W21, 7.1.
func TestFailedCallRaisesToolError(t *testing.T) {
	fail := func(h *guesttest.Calls, req wire.Request) { h.Fail(req, req.Args, "no such pröduct") }
	o := runWith(t, `
import copy
out = []
for kind in ("transient", "rate_limited", "quota", "invalid", "denied", "auth",
             "canceled", "permanent", "unknown", "", "made up"):
    try:
        host.search(kind)
    except host.ToolError as e:
        out.append([e.kind, e.tool, str(e), copy.copy(e).kind == e.kind])
out`, fail)
	var rows []string
	for _, kind := range []string{"transient", "rate_limited", "quota", "invalid", "denied", "auth", "canceled", "permanent", "unknown", "unknown", "unknown"} {
		rows = append(rows, fmt.Sprintf(`[%q,"search","no such pröduct",true]`, kind))
	}
	guesttest.WantOK(t, o, "["+strings.Join(rows, ",")+"]")
	if o.Result.Calls != 11 || o.Result.Bytes != 10*len("no such pröduct") /* all but quota, as the host counts (W37) */ {
		t.Errorf("claim is %d calls, %d bytes", o.Result.Calls, o.Result.Bytes)
	}

	o = runWith(t, "def f():\n    host.search('denied')\nf()", fail)
	guesttest.WantFailed(t, o, "denied", "host.ToolError: no such pröduct", 1)
	if strings.Count(o.Result.Error, "File ") != 2 {
		t.Errorf("error is %s", o.Result.Error)
	}
	guesttest.WantFailed(t, run(t, "raise host.ToolError('own', 'made up')"), "permanent", "host.ToolError: own", 1)
}

// W20, W42, W58: 50 calls are in flight at once, from one loop and from threads.
func TestFiftyCallsOverlap(t *testing.T) {
	for name, program := range map[string]string{
		"asyncio":         "import asyncio\nasync def main():\n    got = await asyncio.gather(*[host.aio.echo(i=i) for i in range(50)])\n    return [g['i'] for g in got] == list(range(50))\nasyncio.run(main())",
		"threads":         "from concurrent.futures import ThreadPoolExecutor as P\nwith P(50) as p:\n    result = [g['i'] for g in p.map(lambda i: host.echo(i=i), range(50))] == list(range(50))",
		"two event loops": "import asyncio, threading\ngot = []\nasync def main(a):\n    got.extend(await asyncio.gather(*[host.aio.echo(i=i) for i in range(a, a + 25)]))\nts = [threading.Thread(target=lambda a=a: asyncio.run(main(a))) for a in (0, 25)]\n[t.start() for t in ts]\n[t.join() for t in ts]\nsorted(g['i'] for g in got) == list(range(50))",
	} {
		t.Run(name, func(t *testing.T) {
			o := runWith(t, program, guesttest.Gather(t, 50))
			guesttest.WantOK(t, o, "true")
			ids := make(map[string]bool)
			for _, req := range o.Requests {
				ids[req.ID] = true
			}
			if len(ids) != 50 {
				t.Errorf("%d different ids in %d requests", len(ids), len(o.Requests))
			}
		})
	}
}

// W54, W56, W57: answers go to their own call once, whatever else arrives.
func TestAnswersGoToTheirOwnCall(t *testing.T) {
	var mu sync.Mutex
	var held []wire.Request
	o := runWith(t, `
import asyncio
async def main():
    late = asyncio.ensure_future(host.aio.echo(i="late"))
    await asyncio.sleep(0)
    late.cancel()
    try:
        await late
    except asyncio.CancelledError:
        pass
    try:
        await asyncio.wait_for(host.aio.echo(i="slow"), 0.01)
    except asyncio.TimeoutError:
        pass
    return await asyncio.gather(*[host.aio.echo(i=i) for i in range(3)])
asyncio.run(main())`, func(h *guesttest.Calls, req wire.Request) {
		mu.Lock()
		defer mu.Unlock()
		held = append(held, req)
		if len(held) < 5 {
			return
		}
		h.Answer(wire.Request{ID: "99"}, `"nobody's"`)
		h.Answer(wire.Request{ID: "" + held[0].ID + "0"}, `"nobody's"`)
		for i := len(held) - 1; i >= 0; i-- {
			h.Answer(held[i], held[i].Args)
			h.Answer(held[i], `"twice"`)
		}
	})
	guesttest.WantOK(t, o, `[{"i":0},{"i":1},{"i":2}]`)
}

// W55: no call outlives its channel, and a broken channel is told.
func TestLostChannelFailsEveryCall(t *testing.T) {
	const program = `
import threading
kinds = []
def call():
    try:
        host.echo()
    except host.ToolError as e:
        kinds.append([e.kind, str(e)])
ts = [threading.Thread(target=call) for i in range(3)]
[t.start() for t in ts]
[t.join() for t in ts]
call()
early = None
try:
    early = host.prepare.echo()
except host.ToolError as e:
    kinds.append([e.kind, str(e)])
kinds`
	guesttest.CheckLostChannel(t, guesttest.Options{Argv: argv(), Program: program, Bindings: bindings}, 3, 5)
}

// C3: the guest also works on channels that do not block.
func TestNonblockingChannels(t *testing.T) {
	o := guesttest.Run(t, guesttest.Options{
		Argv: argv(), Bindings: bindings, Nonblocking: true, Program: "host.echo(a='x' * 3000000)['a']",
	})
	guesttest.WantOK(t, o, `"`+strings.Repeat("x", 3000000)+`"`)
}

// W14, W15, W23, W26, W36, W37, C7: against wire's own Starter and Server.
func TestAgainstWire(t *testing.T) {
	guesttest.CheckWire(t, argv(), `
import asyncio
async def main():
    return len(await asyncio.gather(*[host.aio.echo(i=i) for i in range(50)]))
result = [asyncio.run(main()), 0]
for i in range(20):
    try:
        host.echo(text="é")
    except host.ToolError as e:
        result[1] += e.kind == "quota"
`)
}

// W6: split anywhere, several in one write.
func TestResponsesArriveInPieces(t *testing.T) {
	var mu sync.Mutex
	var frames []byte
	arrived := 0
	o := runWith(t, "import asyncio\nasync def main():\n    return await asyncio.gather(*[host.aio.echo(i=i) for i in range(4)])\nasyncio.run(main())",
		func(h *guesttest.Calls, req wire.Request) {
			mu.Lock()
			defer mu.Unlock()
			frames = append(frames, guesttest.Frame(wire.Response{V: 1, ID: req.ID, OK: true, Value: req.Args})...)
			switch arrived++; arrived {
			case 2: // two in one write
				h.Raw(frames)
				frames = nil
			case 4: // two byte by byte
				for i := range frames {
					h.Raw(frames[i : i+1])
				}
			}
		})
	guesttest.WantOK(t, o, `[{"i":0},{"i":1},{"i":2},{"i":3}]`)
}

// W10 to W13, W18, W23 to W25, W29, L16.
func TestStartIsRefused(t *testing.T) {
	guesttest.CheckStartRefused(t, argv(), "open('ran','w')")
}

// W10, W25, C4: unknown fields are dropped; W62: nothing after Start is read.
func TestStartIsReadAloneAndUnknownFieldsAreDropped(t *testing.T) {
	start := guesttest.RawFrame([]byte(` {"extra":{"v":2},"budget":{"wall_clock":1500000000,"max_calls":9223372036854775807,"new":[]},"program":"import os\nos.read(3, 100).decode()","bindings":[{"name":"a","more":1}],"result_id":"result-1","v":1} `))
	guesttest.WantOK(t, guesttest.Run(t, guesttest.Options{Argv: argv(), Start: append(start, "tail"...)}), `"tail"`)
}

// B11, B12, B18.
func TestEarlyRead(t *testing.T) {
	const args = `{"query":"ä\"b","n":18446744073709551616}`
	const program = `f = host.prepare.search(query='ä"b', n=2**64)` + "\n"
	const about = `"tool":"search","args":"{\"query\":\"ä\\\"b\",\"n\":18446744073709551616}"}`
	prepare := wire.Request{V: 1, ID: "1", Tool: guesttest.Prepare, Args: `{` + about}
	ordinary := wire.Request{V: 1, ID: "2", Tool: "search", Args: args}
	handle := func(text string) func(*guesttest.Calls, wire.Request) {
		return guesttest.Early(func(h *guesttest.Calls, req wire.Request) { h.Answer(req, text) })
	}
	resolve := wire.Request{V: 1, ID: "2", Tool: guesttest.Resolve, Args: `{"handle":18446744073709551615,` + about}
	for _, c := range []struct {
		name, program, want string
		handler             func(*guesttest.Calls, wire.Request)
		requests            []wire.Request
	}{
		{"resolved", "f.result()", `"resolved"`, handle("18446744073709551615"), []wire.Request{prepare, resolve}},
		{"result is kept", "[f.result(), f.result(timeout=5)]", `["resolved","resolved"]`, handle("18446744073709551615"), []wire.Request{prepare, resolve}},
		{"awaited twice at once", "import asyncio\nasync def main():\n    async def one(): return await f\n    return await asyncio.gather(one(), one())\nasyncio.run(main())", `["resolved","resolved"]`, handle("18446744073709551615"), []wire.Request{prepare, resolve}},
		{"result in threads", "import threading\ngot = []\nts = [threading.Thread(target=lambda: got.append(f.result())) for i in range(8)]\n[t.start() for t in ts]\n[t.join() for t in ts]\nset(got) == {'resolved'}", "true", handle("18446744073709551615"), []wire.Request{prepare, resolve}},
		{"handle 0", "f.result()", `"ordinary"`, handle("0"), []wire.Request{prepare, ordinary}},
		{"handle that is none", "f.result()", `"ordinary"`, handle(`"7"`), []wire.Request{prepare, ordinary}},
		{"negative handle", "f.result()", `"ordinary"`, handle(`-7`), []wire.Request{prepare, ordinary}},
		{"prepare refused", "f.result()", `"ordinary"`, guesttest.Early(func(h *guesttest.Calls, req wire.Request) { h.Fail(req, "invalid", "no tool") }), []wire.Request{prepare, ordinary}},
		{"never asked for", "f = None\nhost.echo()", `"ordinary"`, handle("1"), []wire.Request{prepare, {V: 1, ID: "2", Tool: "echo", Args: "{}"}}},
		{"no answer in time", "try:\n    f.result(timeout=2)\nexcept TimeoutError as e:\n    result = str(e)", `"host.prepare.search: no value after 2 s"`, guesttest.Early(func(*guesttest.Calls, wire.Request) {}), []wire.Request{prepare}},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := runWith(t, program+c.program, c.handler)
			guesttest.WantOK(t, o, c.want)
			if !slices.Equal(o.Requests, c.requests) {
				t.Errorf("requests are %+v\nwant %+v", o.Requests, c.requests)
			}
		})
	}
	// 50 early reads are under way at once, before anybody asks for a value.
	together := guesttest.Gather(t, 50)
	o := runWith(t, "fs = [host.prepare.echo(i=i) for i in range(50)]\n[f.result() for f in fs] == ['ordinary'] * 50", guesttest.Early(together))
	guesttest.WantOK(t, o, "true")

	o = runWith(t, "f = host.prepare.search(a=1)\ntry:\n    f.result()\nexcept host.ToolError as e:\n    result = [e.kind, e.tool, str(e)]",
		func(h *guesttest.Calls, req wire.Request) {
			if req.Tool == guesttest.Prepare {
				h.Answer(req, "3")
			} else {
				h.Fail(req, "denied", "not you")
			}
		})
	guesttest.WantOK(t, o, `["denied","search","not you"]`)
}

// W24: names, signatures and descriptions; a signature is never evaluated.
func TestHelpShowsSignatureAndDescription(t *testing.T) {
	o := run(t, "help(host.search)\nhelp(host.odd)\nhelp(host.evil)\nhelp(host.aio.echo)\nhelp(host.prepare.search)\nhelp(host)")
	if !o.Result.OK {
		t.Fatal(o.Result.Error)
	}
	for _, want := range []string{
		"host.search(query: str, *, limit: int = 10, tags=('a', 1)) -> list[dict]",
		"host.prepare.search(query: str", "Finds products.", "odd <x> => y", "Odd.",
		"evil(a=__import__('os').abort())", "host.aio.echo(**arguments)", "host.ToolError",
	} {
		if !strings.Contains(o.Stdout, want) {
			t.Errorf("help lacks %q:\n%s", want, o.Stdout)
		}
	}
	o = run(t, `
import inspect
def sig(tool):
    try:
        return str(inspect.signature(tool))
    except ValueError:
        return None
[sig(host.search), sig(host.aio.search), sig(host.odd), sig(host.evil), sig(host.echo),
 inspect.signature(host.search).parameters["tags"].default, dir(host), dir(host.aio),
 host.search.__name__, host.search is host.search, hasattr(host, "nope"), str(host),
 inspect.iscoroutine(c := host.aio.echo()), c.close()]`)
	guesttest.WantOK(t, o, `["(query: str, *, limit: int = 10, tags=('a', 1)) -> list[dict]","(query: str, *, limit: int = 10, tags=('a', 1)) -> list[dict]",`+
		`"(*args, **arguments)","(*args, **arguments)","(*args, **arguments)",["a",1],`+
		`["ToolError","aio","echo","evil","odd","prepare","search"],["echo","evil","odd","search"],"search",true,false,`+
		`"<host tools: echo, evil, odd, search>",true,null]`)
	o = guesttest.Run(t, guesttest.Options{Argv: argv(), Program: "host.x"})
	guesttest.WantFailed(t, o, "permanent", "AttributeError: host has no tool 'x'; it has: none", 1)
}

// Accidents of honest programs: none of them loses or doubles the Result.
func TestAccidentsKeepTheResult(t *testing.T) {
	for _, c := range []struct{ name, program, want, stdout string }{
		{"closes stdout", "import sys\nprint('a')\nsys.stdout.close()\n1", "1", "a\n"},
		{"closes fds 0 to 2", "import os\nprint('a')\nfor i in (0, 1, 2): os.close(i)\n1", "1", "a\n"},
		{"drops stdout", "import sys\nsys.stdout = sys.stderr = None\n1", "1", ""},
		{"replaces stdout", "import io, sys\nprint('a', end='')\nsys.stdout = io.StringIO()\nprint('b')\n1", "1", "a"},
		{"wraps stdout", "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding='utf-8')\nprint('é')\n1", "1", "é\n"},
		{"no newline at the end", "import sys\nsys.stdout.write('a'); sys.stderr.write('b')\nresult = 1", "1", "a"},
		{"changes directory", "import os\nos.chdir('/')\nhost.echo(a=1)", `{"a":1}`, ""},
		{"rebinds builtins", "import builtins\nhost.echo()\nfor name in ('len', 'isinstance', 'issubclass', 'type', 'str', 'int', 'dict', 'list', 'bool', 'float', 'print', 'open', 'iter', 'next', 'min', 'map', 'set', 'id', 'bytearray', 'memoryview', 'callable', 'hasattr', 'getattr', 'StopIteration', 'BaseException', 'OSError'):\n    setattr(builtins, name, None)\nresult = [host.echo(a=1), {'b': 2.5}]", `[{"a":1},{"b":2.5}]`, ""},
		{"patches os", "import os\nos.write = os.read = os.fstat = os.close = os._exit = None\nhost.echo(a=1)", `{"a":1}`, ""},
		{"forks and the child falls out", "import os\npid = os.fork()\nprint('child' if not pid else end) if not pid else os.waitpid(pid, 0)\n'parent' if pid else 'child'", `"parent"`, "child\n"},
		{"forks after a call", "import os\nhost.echo()\npid = os.fork()\nif not pid:\n    try:\n        host.echo(a=1)\n    except host.ToolError as e:\n        print(e.kind, e)\nelse:\n    os.waitpid(pid, 0)\nhost.echo(a=2) if pid else 1", `{"a":2}`, "permanent host tools cannot be called in a forked process\n"},
		{"child fails", "import os, sys\npid = os.fork()\nif not pid:\n    raise ValueError\nos.waitpid(pid, 0)[1] >> 8", "1", ""},
		{"child exits", "import os, sys\npid = os.fork()\nif not pid:\n    sys.exit(9)\nos.waitpid(pid, 0)[1] >> 8", "9", ""},
		{"fork in a thread", "import os, threading\ndef f():\n    global pid\n    pid = os.fork()\n    if not pid:\n        print('child', flush=True)\nt = threading.Thread(target=f)\nt.start()\nt.join()\nos.waitpid(pid, 0)[1]", "0", "child\n"},
		{"multiprocessing", "import multiprocessing\nm = multiprocessing.get_context('fork')\ndef f(q, x): q.put(x + 1)\nhost.echo()\nq = m.Queue()\np = m.Process(target=f, args=(q, 41))\np.start()\nx = q.get()\np.join()\nx", "42", ""},
		{"subprocess has no channel", "import subprocess, sys\nprogram = 'import os, stat\\nfor f in (3, 4):\\n try: print(stat.S_ISSOCK(os.fstat(f).st_mode))\\n except OSError: print(\"closed\")'\nsubprocess.run([sys.executable, '-I', '-c', program], close_fds=False, stdout=subprocess.PIPE).stdout.decode()", `"closed\nclosed\n"`, ""},
		{"preexec_fn", "import subprocess\nsubprocess.run(['true'], preexec_fn=lambda: None).returncode", "0", ""},
		{"signal handler", "import os, signal\ngot = []\nsignal.signal(signal.SIGUSR1, lambda *a: got.append(host.echo(n=1)))\nfor i in range(20):\n    os.kill(os.getpid(), signal.SIGUSR1)\n    host.echo(i=i)\nlen(got) > 0", "true", ""},
		{"timer in every call", "import signal\nn = 0\ndef f(*a):\n    global n\n    n += host.echo(k=1)['k']\nsignal.signal(signal.SIGALRM, f)\nsignal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)\nfor i in range(200):\n    assert host.echo(i=i)['i'] == i\nsignal.setitimer(signal.ITIMER_REAL, 0)\nn > 0", "true", ""},
		{"thread is joined", "import threading, time\ndef f():\n    time.sleep(.2)\n    print('late', host.echo(a=1))\nthreading.Thread(target=f).start()\n1", "1", "late {'a': 1}\n"},
		{"daemon thread is not", "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\nthreading.Thread(target=host.echo, args=('hang',), daemon=True).start()\n1", "1", ""},
		{"thread fails", "import threading\ndef f(): raise ValueError\nt = threading.Thread(target=f)\nt.start()\nt.join()\n1", "1", ""},
		{"atexit", "import atexit\natexit.register(lambda: print('bye', host.echo(a=1)))\nresult = 1", "1", "bye {'a': 1}\n"},
		{"atexit fails", "import atexit\natexit.register(lambda: 1 / 0)\n1", "1", ""},
		{"million lines", "for i in range(1000000): print(i)\n1", "1", "count 1000000"},
		{"no room for threads", "import _thread\n_thread.stack_size(1 << 46)\ntry:\n    host.echo()\nexcept host.ToolError as e:\n    print(e.kind, e.tool, e)\n_thread.stack_size(0)\nhost.echo(a=1)", `{"a":1}`, "permanent echo start the threads of the call channel: can't start new thread\n"},
		{"event loop left open", "import asyncio\nloop = asyncio.new_event_loop()\nasync def main(): return await host.aio.echo(a=1)\nresult = loop.run_until_complete(main())", `{"a":1}`, ""},
		{"call nobody waits for", "import asyncio\nasync def main():\n    asyncio.ensure_future(host.aio.echo('hang'))\n    await asyncio.sleep(0.05)\nasyncio.run(main())\n1", "1", ""},
		{"own recursion limit", "import sys\nsys.setrecursionlimit(60)\nhost.echo({'a': [[[1]]]})", `{"a":[[[1]]]}`, ""},
		{"import of a package", "import sys\n[p for p in sys.path if 'packages' in p] != []", "true", ""},
		{"del host", "h = host\ndel host\nh.echo(a=1)", `{"a":1}`, ""},
		{"garbage collector off, huge cycles", "import gc\ngc.disable()\nfor i in range(1000):\n    a = []\n    a.append(a)\n1", "1", ""},
		{"prints in utf-8", "print('é€😀')\n1", "1", "é€😀\n"},
		{"own traceback has source lines", "import traceback\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    result = traceback.format_exc()\nresult = '    1 / 0\\n' in result", "true", ""},
		{"warning", "import warnings\nwarnings.warn('careful')\n1", "1", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			o := guesttest.Run(t, guesttest.Options{
				Argv: argv(), Program: c.program, Bindings: bindings, Dir: dir,
				Handler: func(h *guesttest.Calls, req wire.Request) {
					if req.Args != "hang" {
						h.Answer(req, req.Args)
					}
				},
			})
			guesttest.WantOK(t, o, c.want)
			if n, ok := strings.CutPrefix(c.stdout, "count "); ok {
				if got := fmt.Sprint(strings.Count(o.Stdout, "\n")); got != n {
					t.Errorf("stdout has %s lines", got)
				}
			} else if o.Stdout != c.stdout {
				t.Errorf("stdout is %q, want %q", o.Stdout, c.stdout)
			}
			if strings.Contains(o.Stderr, python.FileName) {
				t.Errorf("stderr shows the guest: %s", o.Stderr)
			}
		})
	}
}

// A signal handler that raises while the guest makes and sends the Result would
// lose it.
func TestSignalHandlerDoesNotRunAfterTheProgram(t *testing.T) {
	o := run(t, `
import os, signal, threading, time
def handler(number, frame):
    while frame:
        if frame.f_code.co_name in ("encode", "flush", "pack", "send_result"):
            raise RuntimeError("too late")
        frame = frame.f_back
def hammer():
    while True:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.0005)
signal.signal(signal.SIGUSR1, handler)
threading.Thread(target=hammer, daemon=True).start()
result = [[i] for i in range(200000)]`)
	var want strings.Builder
	for i := range 200000 {
		fmt.Fprintf(&want, ",[%d]", i)
	}
	guesttest.WantOK(t, o, "["+want.String()[1:]+"]")
}

// Files that the program leaves open get their data, as in a plain interpreter.
func TestOpenFilesAreWritten(t *testing.T) {
	dir := t.TempDir()
	o := guesttest.Run(t, guesttest.Options{Argv: argv(), Dir: dir, Program: `
import gzip, zipfile
f = open("plain", "w")
f.write("data")
g = gzip.open("gz", "wt")
g.write("data")
z = zipfile.ZipFile("zip", "w")
z.writestr("name", "data")
result = 1`})
	guesttest.WantOK(t, o, "1")
	o = guesttest.Run(t, guesttest.Options{Argv: argv(), Dir: dir, Program: `
import gzip, zipfile
[open("plain").read(), gzip.open("gz", "rt").read(), zipfile.ZipFile("zip").read("name").decode()]`})
	guesttest.WantOK(t, o, `["data","data","data"]`)
}

// Fds 3 and 4 closed by the program: no frame lands in a file that got the number.
func TestClosedChannelNeverWritesIntoAFile(t *testing.T) {
	dir := t.TempDir()
	o := guesttest.Run(t, guesttest.Options{Argv: argv(), Dir: dir, Bindings: bindings, Program: `
import os
host.echo()
os.closerange(3, 5)
a, b = open("three", "w"), open("four", "w")
assert (a.fileno(), b.fileno()) == (3, 4)
try:
    host.echo()
except host.ToolError as e:
    print(e)
result = 1`})
	if len(o.Frames) != 0 || o.ExitCode != 70 || !strings.Contains(o.Stderr, "send the Result on fd 3") {
		t.Errorf("exit code %d, frames %q, stderr %q", o.ExitCode, o.Frames, o.Stderr)
	}
	// The reader may find out by itself: EBADF.
	if !strings.Contains(o.Stdout, " fd 4: ") || strings.Count(o.Stdout, "\n") != 1 {
		t.Errorf("stdout is %q", o.Stdout)
	}
	for _, name := range []string{"three", "four"} {
		if data, err := os.ReadFile(filepath.Join(dir, name)); err != nil || len(data) != 0 {
			t.Errorf("%s holds %q, %v", name, data, err)
		}
	}
}

// A stdout that nobody reads any more fails a print, never the Result.
func TestBrokenStdout(t *testing.T) {
	for _, c := range []struct{ name, program, kind string }{
		{"caught", "try:\n    for i in range(100000): print(i)\nexcept BrokenPipeError:\n    result = 1", ""},
		{"left in the buffer", "import sys\nsys.stdout.write('x')\nresult = 1", ""},
		{"left in the buffer, with a file open", "import sys\nf = open('/dev/null')\nsys.stdout.write('x')\nresult = 1", ""},
		{"uncaught", "for i in range(100000): print(i)", "permanent"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r, w, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			_ = r.Close()
			defer func() { _ = w.Close() }()
			o := guesttest.Run(t, guesttest.Options{Argv: argv(), Program: c.program, Stdout: w})
			if c.kind == "" {
				guesttest.WantOK(t, o, "1")
			} else {
				guesttest.WantFailed(t, o, c.kind, "BrokenPipeError", 1)
			}
		})
	}
}

// Output comes line by line: a program that is killed has shown its last line.
func TestStdoutIsFlushedAtEachLine(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Close() }()
	o := guesttest.Run(t, guesttest.Options{Argv: argv(), Program: "import os\nprint('seen')\nos._exit(5)", Stdout: w})
	_ = w.Close()
	out, err := io.ReadAll(r)
	if err != nil || string(out) != "seen\n" || len(o.Frames) != 0 || o.ExitCode != 5 {
		t.Errorf("stdout %q, %v, exit code %d, frames %q", out, err, o.ExitCode, o.Frames)
	}
}

// L39: the environment and the working directory stay out of the interpreter.
func TestInterpreterIsIsolated(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"json.py", "_json.py", "sitecustomize.py", "startup.py"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("raise SystemExit(99)"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	o := guesttest.Run(t, guesttest.Options{
		Argv: argv(), Dir: dir, Program: "import json, sys\n[sys.flags.isolated, sys.flags.dont_write_bytecode, sys.flags.utf8_mode]",
		Env: []string{"PYTHONPATH=" + dir, "PYTHONSTARTUP=" + dir + "/startup.py", "PYTHONINSPECT=1", "LC_ALL=C"},
	})
	guesttest.WantOK(t, o, "[1,1,1]")
}

func TestArgvAndSource(t *testing.T) {
	if want := []string{"python3", "-I", "-B", "-X", "utf8", "/g.py"}; !reflect.DeepEqual(python.Argv("/g.py"), want) {
		t.Errorf("Argv is %q", python.Argv("/g.py"))
	}
	file, err := os.ReadFile("guest.py")
	if err != nil || string(file) != string(python.Source) {
		t.Errorf("Source differs from guest.py, %v", err)
	}
}
