package node_test

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
	"time"
	"unicode/utf8"

	"example.com/jail/guest/internal/guesttest"
	"example.com/jail/guest/node"
	"example.com/jail/wire"
)

var guestPath string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "guest-node-")
	if err != nil {
		panic(err)
	}
	guestPath = filepath.Join(dir, node.FileName)
	if err := os.WriteFile(guestPath, node.Source, 0o600); err != nil {
		panic(err)
	}
	code := m.Run()
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

// argv is the launcher's command with a real interpreter: the one that
// GUEST_NODE names, or the distribution's.
func argv() []string {
	argv := node.Argv(guestPath)
	argv[0] = "/usr/bin/node"
	if path := os.Getenv("GUEST_NODE"); path != "" {
		argv[0] = path
	}
	return argv
}

var bindings = []wire.StartBinding{
	{Name: "search", Signature: "search({query, limit = 10})", Description: "Finds products."},
	{Name: "echo"},
}

func run(t *testing.T, program string) guesttest.Outcome {
	t.Helper()
	return runWith(t, program, nil)
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
globalThis[Symbol.for('jail.guest.codec')] = true;
const guest = await import('file://' + process.argv[1]);
const plain = (value) => JSON.stringify(value, (_, v) => (typeof v === 'bigint' ? 'big ' + v : v)).replace(/"big (\d+)"/g, '$1');
let input = '';
for await (const part of process.stdin.setEncoding('utf8')) input += part;
for (const line of input.split('\n').slice(0, -1)) {
  const { kind, body, value } = JSON.parse(line);
  const out = {};
  if (kind === 'Request' || kind === 'Result') {
    // JSON.parse loses the digits of the largest integers, which no guest writes.
    out.packed = guest.pack({ v: 1, ...value }).subarray(4).toString().replace(/9223372036854776000/g, '9223372036854775807');
  } else {
    try {
      let fields = guest.unpack(kind, Buffer.from(body, 'base64'));
      delete fields.v;
      if (kind === 'Response') {
        const a = guest.answerOf(fields);
        fields = { id: fields.id, ok: a.ok, [a.ok ? 'value' : 'error']: a.text, kind: a.kind };
      }
      for (const part of [fields, fields.budget ?? {}, ...fields.bindings ?? []]) {
        for (const name of Object.keys(part)) {
          if ((part[name] === '' || part[name] === 0) && name !== 'program') delete part[name];
        }
      }
      out.value = fields;
    } catch (e) {
      out.error = e instanceof guest.VersionError ? 'version' : e.constructor.name === 'ProtocolError' ? 'protocol' : e.stack;
    }
  }
  console.log(plain(out));
}`
	argv := argv()
	guesttest.CheckGolden(t, []string{argv[0], "--input-type=module", "-e", replay, guestPath})
}

// L17, L20, L24, W26.
func TestValueCrossesExactly(t *testing.T) {
	deep := strings.Repeat("[", 100000) + strings.Repeat("]", 100000)
	for _, c := range []struct{ name, program, want string }{
		{"nothing", "const x = 1;", ""},
		{"empty program", "", ""},
		{"only a comment", "// nothing", ""},
		{"default export", "export default 42", "42"},
		{"default export null", "export default null", "null"},
		{"default export of a promise", "export default Promise.resolve([1])", "[1]"},
		{"default export of an async function's call", "async function main() { await null; return 'x'; }\nexport default main();", `"x"`},
		{"result", "globalThis.result = 1", "1"},
		{"default export beats result", "globalThis.result = 1; export default 2", "2"},
		{"result after a timer", "setTimeout(() => { globalThis.result = 5; }, 50)", "5"},
		{"top-level await", "const x = await new Promise((r) => setTimeout(r, 20, 3)); export default x", "3"},
		{"BigInt", "export default 2n ** 60n", "1152921504606846976"},
		{"BigInt 2 to the 53 plus 1", "export default -(2n ** 53n + 1n)", "-9007199254740993"},
		{"5001 digits", "export default 10n ** 5000n", "1" + strings.Repeat("0", 5000)},
		{"integral numbers have exact digits", "export default [2 ** 60, 1e21, 1e23, -(2 ** 53)]", "[1152921504606846976,1000000000000000000000,99999999999999991611392,-9007199254740992]"},
		{"fractions", "export default [0.1, 1.5, 1e-7, -2.5e-300, 5e-324]", "[0.1,1.5,1e-7,-2.5e-300,5e-324]"},
		{"other scalars", "export default [true, false, null, '']", `[true,false,null,""]`},
		{"nested and in order", `export default {b: {x: []}, a: {}, "": [{}], __proto__: null}`, `{"b":{"x":[]},"a":{},"":[{}]}`},
		{"own __proto__", `export default JSON.parse('{"__proto__": 1}')`, `{"__proto__":1}`},
		{"undefined property is left out", "export default {a: undefined, b: 1, c: undefined}", `{"b":1}`},
		{"strings", `export default "\"\\/\n\0é\u2028<>&\u{1f600}\x7f"`, `"\"\\/\n\u0000é` + "\u2028" + `<>&😀` + "\x7f" + `"`},
		{"same array twice is no cycle", "const a = [1]; export default [a, a, {k: a}]", `[[1],[1],{"k":[1]}]`},
		{"byte order mark, shebang and CRLF", "\ufeff#!/usr/bin/node\r\nexport default 2;\r\n", "2"},
		{"deep", "let x = []; for (let i = 0; i < 99999; i++) x = [x]; export default x", deep},
		{"deep objects", "let x = 0; for (let i = 0; i < 20000; i++) x = {a: x}; export default x", strings.Repeat(`{"a":`, 20000) + "0" + strings.Repeat("}", 20000)},
		{"argv", "export default process.argv.slice(1)", `["program.mjs"]`},
		{"process.exit(0) keeps result", "globalThis.result = 3; process.exit(0)", "3"},
		{"process.exit() without result", "process.exit()", ""},
		{"built-in import", "import fs from 'node:fs'; import path from 'path'; export default [fs.existsSync('/'), path.join('a', 'b')]", `[true,"a/b"]`},
		{"dynamic import", "const os = await import('node:os'); export default typeof os.cpus", `"function"`},
	} {
		t.Run(c.name, func(t *testing.T) {
			guesttest.WantOK(t, run(t, c.program), c.want)
		})
	}
}

// L19, L20, L35.
func TestValueThatIsNotLosslessIsInvalid(t *testing.T) {
	for _, c := range []struct{ name, value, text string }{
		{"NaN", "NaN", "result: NaN is not a JSON number"},
		{"infinity", "[1, Infinity]", "result[1]: Infinity is not a JSON number"},
		{"negative zero", "-0", "-0 is not a JSON number"},
		{"lone surrogate", `"\ud800"`, "lone surrogate"},
		{"lone surrogate in a key", `{"a\udfff": 1}`, "lone surrogate"},
		{"undefined in an array", "[undefined]", "undefined is not a JSON value"},
		{"hole", "[1, , 2]", "undefined is not a JSON value"},
		{"Map, with its place", "{a: [{b: new Map()}]}", `result["a"][0]["b"]: Map is not a JSON value`},
		{"Date", "new Date()", "result: Date is not a JSON value"},
		{"Buffer", "Buffer.from('x')", "Buffer is not a JSON value"},
		{"instance", "new (class Point { x = 1 })()", "Point is not a JSON value"},
		{"function", "() => 1", "function is not a JSON value"},
		{"symbol", "Symbol()", "symbol is not a JSON value"},
		{"cycle", "(() => { const a = []; a.push(a); return a; })()", "array contains itself"},
		{"cycle through objects", "(() => { const a = {}; a.k = [a]; return a; })()", "object contains itself"},
		{"deep and wrong", "(() => { let x = NaN; for (let i = 0; i < 100000; i++) x = [x]; return x; })()", "NaN is not a JSON number"},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := run(t, "export default "+c.value)
			guesttest.WantFailed(t, o, "invalid", c.text, 1)
			if !strings.Contains(o.Stderr, c.text) {
				t.Errorf("stderr %q does not say so", o.Stderr)
			}
		})
	}
	o := run(t, "export default {get x() { throw new Error('no x') }}")
	guesttest.WantFailed(t, o, "permanent", "Error: no x", 1)
}

// L35, W4: too large is quota, never a cut value, and the bound is exact.
func TestValueThatDoesNotFitAFrameIsQuota(t *testing.T) {
	around := len(guesttest.Frame(wire.Result{V: 1, ResultID: guesttest.ResultID, OK: true, Value: `""`})) - 4
	fits := wire.MaxFrameBytes - around
	o := run(t, fmt.Sprintf("export default 'x'.repeat(%d)", fits))
	guesttest.WantOK(t, o, `"`+strings.Repeat("x", fits)+`"`)
	for name, value := range map[string]string{
		"one byte more":    fmt.Sprintf("'x'.repeat(%d)", fits+1),
		"by escapes alone": `'\0'.repeat(3000000)`,
		"many members":     "Array.from({length: 2000000}, (_, i) => [i, 'x'])",
	} {
		t.Run(name, func(t *testing.T) {
			guesttest.WantFailed(t, run(t, "export default "+value), "quota", "bytes", 1)
		})
	}
}

// C14, K7: the stack holds the program's own frames with their lines, and
// nothing of the guest or of Node.
func TestUncaughtExceptionIsPermanentWithOwnFrames(t *testing.T) {
	for _, c := range []struct {
		name, program string
		want          []string
		frames        int
	}{
		{"plain", "function f() {\n  throw new RangeError('no');\n}\n\nf();", []string{"RangeError: no", "at f (program.mjs:2:9)", "at program.mjs:5:1"}, 2},
		{"at top level after await", "await null;\nthrow new Error('late')", []string{"Error: late", "program.mjs:2:7"}, 1},
		{"in a timer", "setTimeout(() => {\n  null.x;\n}, 5)", []string{"TypeError: ", "program.mjs:2:8"}, 1},
		{"unhandled rejection", "Promise.reject(new Error('gone'));\nsetInterval(() => {}, 1000)", []string{"Error: gone", "program.mjs:1:16"}, 1},
		{"unhandled rejection without an error", "Promise.reject('gone')", []string{"gone"}, 0},
		{"rejected default export", "export default Promise.reject(new Error('gone'))", []string{"Error: gone", "program.mjs:1:31"}, 1},
		{"through Node", "import fs from 'node:fs';\nfs.readFileSync('/does/not/exist')", []string{"ENOENT", "program.mjs:2:4"}, 1},
		{"causes", "throw new Error('a', {cause: new Error('b', {cause: 'c'})})", []string{"Error: a", "caused by: Error: b", "caused by: thrown: c"}, 2},
		{"endless causes", "const e = new Error('a'); e.cause = e; throw e", []string{"caused by: Error: a"}, 8},
		{"string", "throw 'text'", []string{"thrown: text"}, 0},
		{"undefined", "throw undefined", []string{"thrown: undefined"}, 0},
		{"object", "throw {code: 7}", []string{`thrown: {"code":7}`}, 0},
		{"hostile object", "throw {get cause() { throw 1 }, get x() { throw 2 }, toString() { throw 3 }}", []string{"thrown: a value without text"}, 0},
		{"syntax error", "let a = 1;\nlet b = ;\n", []string{"program.mjs:2\nlet b = ;\n", "SyntaxError: Unexpected token ';'"}, 1},
		{"own syntax error", "JSON.parse('{')", []string{"SyntaxError: ", "program.mjs:1:6"}, 1},
		{"missing export", "import {nope} from 'node:fs'", []string{"SyntaxError: ", "nope"}, 1},
		{"no package", "import x from 'nopkg'", []string{"Invalid URL"}, 0},
		{"recursion", "function f() { f(); }\nf()", []string{"RangeError: Maximum call stack size exceeded", "at f (program.mjs:1:16)"}, 10},
		{"unknown tool", "host.nope()", []string{`TypeError: host has no tool "nope"; it has: echo, search`, "program.mjs:1:6"}, 1},
		{"wrong arguments", "await host.echo(1)", []string{"TypeError: host.echo() takes one object or one string of JSON", "program.mjs:1:12"}, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := run(t, c.program)
			guesttest.WantFailed(t, o, "permanent", c.want[len(c.want)-1], 1)
			for _, text := range c.want {
				if !strings.Contains(o.Result.Error+"\n", text) {
					t.Errorf("error %q lacks %q", o.Result.Error, text)
				}
			}
			if got := strings.Count(o.Result.Error, "program.mjs:"); got != c.frames {
				t.Errorf("error has %d frames, want %d: %s", got, c.frames, o.Result.Error)
			}
			for _, text := range []string{"node:internal", node.FileName, "base64"} {
				if strings.Contains(o.Result.Error, text) {
					t.Errorf("error shows %s: %s", text, o.Result.Error)
				}
			}
			if o.Stderr != o.Result.Error+"\n" {
				t.Errorf("stderr is %q, error %q", o.Stderr, o.Result.Error)
			}
		})
	}
}

// K7: at most 4 KiB, cut on a character, with the end kept; stderr has all.
func TestErrorIsCutAt4KiBAndKeepsTheEnd(t *testing.T) {
	for shift := range 4 {
		o := run(t, fmt.Sprintf("throw 'é€😀'.repeat(2000) + '%s end'", strings.Repeat("x", shift)))
		guesttest.WantFailed(t, o, "permanent", " end", 1)
		text := o.Result.Error
		if len(text) > guesttest.MaxErrorBytes || len(text) < guesttest.MaxErrorBytes-3 {
			t.Errorf("error takes %d bytes", len(text))
		}
		if !utf8.ValidString(text) || strings.ContainsRune(text, utf8.RuneError) || !strings.HasSuffix(text, " end") {
			t.Errorf("error is cut badly: %q ... %q", text[:20], text[len(text)-20:])
		}
		if len(o.Stderr) < 9*2000 || !strings.Contains(o.Stderr, "thrown: ") {
			t.Errorf("stderr has %d bytes", len(o.Stderr))
		}
	}
}

func TestExitStatus(t *testing.T) {
	for _, c := range []struct {
		program, text string
		code          int
	}{
		{"process.exit(3)", "exit status 3", 3},
		{"globalThis.result = 1; process.exit(137)", "exit status 137", 137},
		{"process.exitCode = 4", "exit status 4", 4},
		{"setTimeout(() => process.exit(5), 10)", "exit status 5", 5},
		{"process.on('exit', () => {}); process.exit(1)", "exit status 1", 1},
		{"await new Promise(() => {})", "waits at its top level", 13},
	} {
		t.Run(c.program, func(t *testing.T) {
			guesttest.WantFailed(t, run(t, c.program), "permanent", c.text, c.code)
		})
	}
}

var (
	float1e300 = new(big.Float).SetFloat64(1e300).Text('f', 0)
	tooLarge   = fmt.Sprint(wire.MaxFrameBytes)
)

// W20, W24: what the program writes is what the request holds.
func TestCallForms(t *testing.T) {
	for _, c := range []struct{ call, args string }{
		{"host.echo()", "{}"},
		{"host.echo({query: 'x', limit: 3})", `{"query":"x","limit":3}`},
		{"host.echo({'a b': [1, null], c: undefined})", `{"a b":[1,null]}`},
		{`host.echo('{ "a" : 1 }')`, `{ "a" : 1 }`},
		{"host.echo('not JSON')", "not JSON"},
		{"host.echo({n: 2n ** 100n, f: 1e300})", `{"n":1267650600228229401496703205376,"f":` + float1e300 + `}`},
		{"host['echo']({a: 1})", `{"a":1}`},
	} {
		t.Run(c.call, func(t *testing.T) {
			o := run(t, "export default await "+c.call)
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
	for _, call := range []string{"host.echo(1)", "host.echo({}, {})", "host.echo([1])", "host.echo(null)", "host.prepare.echo(true)"} {
		o := run(t, "await "+call)
		guesttest.WantFailed(t, o, "permanent", "echo() takes one object or one string of JSON", 1)
		if len(o.Requests) != 0 {
			t.Errorf("%s sent %v", call, o.Requests)
		}
	}
	for _, call := range []string{"host.echo({a: -0})", "host.echo({a: new Date()})", `host.echo('"\ud800"')`, "host.echo({a: 'x'.repeat(" + tooLarge + ")})", "host.echo('x'.repeat(" + tooLarge + "))"} {
		o := run(t, "await "+call)
		guesttest.WantFailed(t, o, "invalid", "ToolError: arguments", 1)
		if len(o.Requests) != 0 {
			t.Errorf("%s sent %d requests", call, len(o.Requests))
		}
	}
}

// W21, W22, L24: answers keep their numbers; what is no JSON is text.
func TestAnswers(t *testing.T) {
	deep := strings.Repeat("[", 100000) + strings.Repeat("]", 100000)
	const back = "export default await host.echo()"
	for _, c := range []struct{ name, value, program, want string }{
		{"beyond 2 to the 53 is BigInt", `[1152921504606846977, 9007199254740991, 9007199254740992, -3, "1152921504606846977"]`, "const a = await host.echo(); globalThis.result = [a, a.map((x) => typeof x)]", `[[1152921504606846977,9007199254740991,9007199254740992,-3,"1152921504606846977"],["bigint","number","bigint","number","string"]]`},
		{"int of 6000 digits", strings.Repeat("9", 6000), "export default await host.echo() + 1n", "1" + strings.Repeat("0", 6000)},
		{"fractions and exponents are numbers", `[0.12345678901234567890, 1e3, 12345678901234567890.0]`, "export default (await host.echo()).map((x) => typeof x)", `["number","number","number"]`},
		{"null", "null", back, "null"},
		{"empty text", "", back, `""`},
		{"plain text", "pong", back, `"pong"`},
		{"NaN is text", "NaN", back, `"NaN"`},
		{"two values are text", "1 2", back, `"1 2"`},
		{"spaces around", " \t\r\n{\"a\" : [ 1234567890123456789 ] , \"b\" : { } } ", back, `{"a":[1234567890123456789],"b":{}}`},
		{"escapes", `["\"\\\\", "\\", "1234567890123456\u00e9\\\"", {"\\":"\\"}]`, back, `["\"\\\\","\\","1234567890123456é\\\"",{"\\":"\\"}]`},
		{"own __proto__", `{"__proto__":{"x":1234567890123456789}}`, "const a = await host.echo(); export default [a.x === undefined, a]", `[true,{"__proto__":{"x":1234567890123456789}}]`},
		{"deep", deep, back, deep},
		{"deep and exact", strings.Repeat("[", 50000) + "1234567890123456789" + strings.Repeat("]", 50000), back, strings.Repeat("[", 50000) + "1234567890123456789" + strings.Repeat("]", 50000)},
		{"no JSON with long numbers", "[1234567890123456789,]", back, `"[1234567890123456789,]"`},
		{"bad number", "[01234567890123456789]", back, `"[01234567890123456789]"`},
		{"cut", `{"a":1234567890123456789`, back, `"{\"a\":1234567890123456789"`},
		{"large", `"` + strings.Repeat("x", 4<<20) + `"`, "export default (await host.echo()).length", "4194304"},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := runWith(t, c.program, func(h *guesttest.Calls, req wire.Request) { h.Answer(req, c.value) })
			guesttest.WantOK(t, o, c.want)
			if o.Result.Bytes != len(c.value) || o.Result.Calls != 1 {
				t.Errorf("claims %d bytes in %d calls of %d", o.Result.Bytes, o.Result.Calls, len(c.value))
			}
		})
	}
}

// L17, L20, L24.
func TestRandomValuesRoundTrip(t *testing.T) {
	guesttest.CheckRoundTrip(t, argv(), func(n int) string {
		return fmt.Sprintf("const all = []; for (let i = 0; i < %d; i++) all.push(await host.echo({i})); export default all", n)
	})
}

// W21, 7.1.
func TestFailedCallRejectsWithToolError(t *testing.T) {
	fail := func(h *guesttest.Calls, req wire.Request) { h.Fail(req, req.Args, "no such pröduct") }
	o := runWith(t, `
const out = [];
for (const kind of ["transient", "rate_limited", "quota", "invalid", "denied", "auth",
  "canceled", "permanent", "unknown", "", "made up"]) {
  try {
    await host.search(kind);
  } catch (e) {
    out.push([e.kind, e.tool, e.message, e.name, e instanceof host.ToolError && e instanceof ToolError && e instanceof Error]);
  }
}
export default out`, fail)
	var rows []string
	for _, kind := range []string{"transient", "rate_limited", "quota", "invalid", "denied", "auth", "canceled", "permanent", "unknown", "unknown", "unknown"} {
		rows = append(rows, fmt.Sprintf(`[%q,"search","no such pröduct","ToolError",true]`, kind))
	}
	guesttest.WantOK(t, o, "["+strings.Join(rows, ",")+"]")
	if o.Result.Calls != 11 || o.Result.Bytes != 10*len("no such pröduct") /* all but quota, as the host counts (W37) */ {
		t.Errorf("claim is %d calls, %d bytes", o.Result.Calls, o.Result.Bytes)
	}

	o = runWith(t, "async function f() {\n  await host.search('denied');\n}\nawait f();", fail)
	guesttest.WantFailed(t, o, "denied", "ToolError: no such pröduct", 1)
	for _, frame := range []string{"f (program.mjs:2:3)", "program.mjs:4:1"} {
		if !strings.Contains(o.Result.Error, frame) {
			t.Errorf("error lacks %s: %s", frame, o.Result.Error)
		}
	}
	guesttest.WantFailed(t, runWith(t, "host.search('quota')", fail), "quota", "ToolError", 1)
	guesttest.WantFailed(t, run(t, "throw new ToolError('own', 'made up')"), "permanent", "ToolError: own", 1)
}

// W20, W42, W58.
func TestFiftyCallsOverlap(t *testing.T) {
	o := runWith(t, `
const got = await Promise.all(Array.from({length: 50}, (_, i) => host.echo({i})));
export default got.every((g, i) => g.i === i)`, guesttest.Gather(t, 50))
	guesttest.WantOK(t, o, "true")
	ids := make(map[string]bool)
	for _, req := range o.Requests {
		ids[req.ID] = true
	}
	if len(ids) != 50 {
		t.Errorf("%d different ids in %d requests", len(ids), len(o.Requests))
	}
}

// W54, W56, W57: answers go to their own call once, whatever else arrives.
func TestAnswersGoToTheirOwnCall(t *testing.T) {
	var mu sync.Mutex
	var held []wire.Request
	o := runWith(t, `
const late = host.echo({i: "late"});
const first = await Promise.race([late, new Promise((r) => setTimeout(r, 5, "gave up"))]);
export default [first, ...await Promise.all([0, 1, 2].map((i) => host.echo({i})))]`, func(h *guesttest.Calls, req wire.Request) {
		mu.Lock()
		defer mu.Unlock()
		held = append(held, req)
		if len(held) < 4 {
			return
		}
		h.Answer(wire.Request{ID: "99"}, `"nobody's"`)
		h.Answer(wire.Request{ID: "10"}, `"nobody's"`)
		for i := len(held) - 1; i >= 0; i-- {
			h.Answer(held[i], held[i].Args)
			h.Answer(held[i], `"twice"`)
		}
	})
	guesttest.WantOK(t, o, `["gave up",{"i":0},{"i":1},{"i":2}]`)
}

// W55: no call outlives its channel, and a broken channel is told.
func TestLostChannelFailsEveryCall(t *testing.T) {
	guesttest.CheckLostChannel(t, guesttest.Options{Argv: argv(), Bindings: bindings, Program: `
const kinds = [];
const note = (e) => { if (!(e instanceof ToolError)) throw e; kinds.push([e.kind, e.message]); };
await Promise.all([1, 2, 3].map(() => host.echo().catch(note)));
await host.echo().catch(note);
try { host.prepare.echo(); } catch (e) { note(e); }
export default kinds`}, 3, 5)
}

// W14, W15, W23, W26, W36, W37, C7: against wire's own Starter and Server.
func TestAgainstWire(t *testing.T) {
	guesttest.CheckWire(t, argv(), `
const all = await Promise.all(Array.from({length: 50}, (_, i) => host.echo({i})));
const result = [all.length, 0];
for (let i = 0; i < 20; i++) {
  try {
    await host.echo({text: "é"});
  } catch (e) {
    if (e.kind === "quota") result[1]++;
  }
}
export default result`)
}

// W6: split anywhere, several in one write.
func TestResponsesArriveInPieces(t *testing.T) {
	var mu sync.Mutex
	var frames []byte
	arrived := 0
	o := runWith(t, "export default await Promise.all([0, 1, 2, 3].map((i) => host.echo({i})))",
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
	guesttest.CheckStartRefused(t, argv(), "import fs from 'node:fs'; fs.writeFileSync('ran', '')")
}

// W10, W25, C4: unknown fields are dropped; W62: nothing after Start is read.
func TestStartIsReadAloneAndUnknownFieldsAreDropped(t *testing.T) {
	start := guesttest.RawFrame([]byte(` {"extra":{"v":2},"budget":{"wall_clock":1500000000,"max_calls":9223372036854775807,"new":[]},"program":"import fs from 'node:fs'; const b = Buffer.alloc(100); export default b.toString('utf8', 0, fs.readSync(3, b))","bindings":[{"name":"a","more":1}],"result_id":"result-1","v":1} `))
	guesttest.WantOK(t, guesttest.Run(t, guesttest.Options{Argv: argv(), Start: append(start, "tail"...)}), `"tail"`)
}

// C3: the guest also works on channels that do not block.
func TestNonblockingChannels(t *testing.T) {
	o := guesttest.Run(t, guesttest.Options{
		Argv: argv(), Bindings: bindings, Nonblocking: true,
		Program: "const a = await host.echo({a: 'x'.repeat(3000000)}); export default a.a",
	})
	guesttest.WantOK(t, o, `"`+strings.Repeat("x", 3000000)+`"`)
}

// B11, B12, B18.
func TestEarlyRead(t *testing.T) {
	const args = `{"query":"ä\"b","n":18446744073709551616}`
	const program = `const f = host.prepare.search({query: 'ä"b', n: 2n ** 64n});` + "\n"
	const about = `"tool":"search","args":"{\"query\":\"ä\\\"b\",\"n\":18446744073709551616}"}`
	prepare := wire.Request{V: 1, ID: "1", Tool: guesttest.Prepare, Args: `{` + about}
	ordinary := wire.Request{V: 1, ID: "2", Tool: "search", Args: args}
	handle := func(text string) func(*guesttest.Calls, wire.Request) {
		return guesttest.Early(func(h *guesttest.Calls, req wire.Request) { h.Answer(req, text) })
	}
	resolve := wire.Request{V: 1, ID: "2", Tool: guesttest.Resolve, Args: `{"handle":18446744073709551615,` + about}
	const big = "18446744073709551615"
	for _, c := range []struct {
		name, program, want string
		handler             func(*guesttest.Calls, wire.Request)
		requests            []wire.Request
	}{
		{"result", "export default await f.result()", `"resolved"`, handle(big), []wire.Request{prepare, resolve}},
		{"awaited", "export default await f", `"resolved"`, handle(big), []wire.Request{prepare, resolve}},
		{"asked for often", "export default await Promise.all([f, f.result(), f, f.then((x) => x)])", `["resolved","resolved","resolved","resolved"]`, handle(big), []wire.Request{prepare, resolve}},
		{"handle 0", "export default await f", `"ordinary"`, handle("0"), []wire.Request{prepare, ordinary}},
		{"handle that is none", "export default await f", `"ordinary"`, handle(`"7"`), []wire.Request{prepare, ordinary}},
		{"negative handle", "export default await f", `"ordinary"`, handle("-7"), []wire.Request{prepare, ordinary}},
		{"prepare refused", "export default await f", `"ordinary"`, guesttest.Early(func(h *guesttest.Calls, req wire.Request) { h.Fail(req, "invalid", "no tool") }), []wire.Request{prepare, ordinary}},
		{"never asked for", "export default await host.echo()", `"ordinary"`, handle("1"), []wire.Request{prepare, {V: 1, ID: "2", Tool: "echo", Args: "{}"}}},
		{"never answered and never asked for", "export default await host.echo()", `"ordinary"`, guesttest.Early(func(*guesttest.Calls, wire.Request) {}), []wire.Request{prepare, {V: 1, ID: "2", Tool: "echo", Args: "{}"}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := runWith(t, program+c.program, c.handler)
			guesttest.WantOK(t, o, c.want)
			if !slices.Equal(o.Requests, c.requests) {
				t.Errorf("requests are %+v\nwant %+v", o.Requests, c.requests)
			}
		})
	}
	// An early read that nobody asks for does not keep the program alive.
	o := runWith(t, program+"export default 1", guesttest.Early(func(*guesttest.Calls, wire.Request) {}))
	guesttest.WantOK(t, o, "1")

	// 50 early reads are under way at once, before anybody asks for a value.
	o = runWith(t, "const fs = Array.from({length: 50}, (_, i) => host.prepare.echo({i}));\nexport default (await Promise.all(fs)).every((x) => x === 'ordinary')", guesttest.Early(guesttest.Gather(t, 50)))
	guesttest.WantOK(t, o, "true")

	o = runWith(t, "const f = host.prepare.search({a: 1});\ntry { await f; } catch (e) { globalThis.result = [e.kind, e.tool, e.message]; }",
		func(h *guesttest.Calls, req wire.Request) {
			if req.Tool == guesttest.Prepare {
				h.Answer(req, "3")
			} else {
				h.Fail(req, "denied", "not you")
			}
		})
	guesttest.WantOK(t, o, `["denied","search","not you"]`)
}

// W24.
func TestToolsShowSignatureAndDescription(t *testing.T) {
	o := run(t, `
console.log(host);
export default [host.search.name, host.search.signature, host.search.description, host.echo.signature,
  Object.keys(host).sort(), 'search' in host, 'nope' in host, host === globalThis.host,
  host.search === host.search, host.then === undefined, typeof host.prepare.search,
  await (async () => host)() === host]`)
	guesttest.WantOK(t, o, `["search","search({query, limit = 10})","Finds products.","echo({...})",`+
		`["ToolError","echo","prepare","search"],true,false,true,true,true,"function",true]`)
	if !strings.Contains(o.Stdout, "Finds products.") {
		t.Errorf("stdout is %q", o.Stdout)
	}
	o = guesttest.Run(t, guesttest.Options{Argv: argv(), Program: "host.x"})
	guesttest.WantFailed(t, o, "permanent", `TypeError: host has no tool "x"; it has: none`, 1)
}

// Accidents of honest programs: none of them loses or doubles the Result.
func TestAccidentsKeepTheResult(t *testing.T) {
	for _, c := range []struct{ name, program, want, stdout string }{
		{"destroys stdout", "console.log('a'); process.stdout.destroy(); globalThis.result = 1", "1", "a\n"},
		{"closes fds 0 to 2", "import fs from 'node:fs'; console.log('a'); for (const i of [0, 1, 2]) fs.closeSync(i); globalThis.result = 1", "1", "a\n"},
		{"changes directory", "process.chdir('/'); export default await host.echo({a: 1})", `{"a":1}`, ""},
		{"rebinds globals", "for (const name of ['Array', 'BigInt', 'Buffer', 'Error', 'JSON', 'Map', 'Math', 'Number', 'Object', 'Promise', 'RegExp', 'Set', 'String', 'TextDecoder', 'process']) globalThis[name] = undefined; globalThis.result = [await host.echo({a: 1}), {b: 12345678901234567890n}]", `[{"a":1},{"b":12345678901234567890}]`, ""},
		{"own handler of uncaught exceptions", "process.on('uncaughtException', (e) => console.log('own', e.message)); setTimeout(() => { throw new Error('x'); }, 1); setTimeout(() => { globalThis.result = 1; }, 30)", "1", "own x\n"},
		{"own handler of rejections", "process.on('unhandledRejection', (e) => console.log('own', e)); Promise.reject('x'); globalThis.result = 1", "1", "own x\n"},
		{"child process has no channel", "import { spawnSync } from 'node:child_process'; export default spawnSync('/bin/sh', ['-c', 'for f in 3 4; do readlink /proc/self/fd/$f; done; true']).stdout.toString().includes('socket')", "false", ""},
		{"timers and pending work are waited for", "setTimeout(async () => console.log('late', (await host.echo({a: 1})).a), 30); export default 1", "1", "late 1\n"},
		{"call that nobody awaits", "host.echo({a: 1}).then((x) => console.log(x.a)); export default 1", "1", "1\n"},
		{"much output, then exit", "console.log('x'.repeat(2000000)); for (let i = 0; i < 1000; i++) console.log(i); globalThis.result = 1; process.exit(0)", "1", "count 1001"},
		{"much output", "for (let i = 0; i < 200000; i++) console.log(i); globalThis.result = 1", "1", "count 200000"},
		{"exit event", "process.on('exit', () => console.log('bye')); export default 1", "1", "bye\n"},
		{"beforeExit makes more work", "let n = 0; process.on('beforeExit', () => { if (n++ < 2) setTimeout(() => console.log(n), 1); }); export default 1", "1", "1\n2\n"},
		{"own stack trace limit", "Error.stackTraceLimit = 0; export default await host.echo({a: 1})", `{"a":1}`, ""},
		{"polluted prototype", "Object.prototype.kind = 'y'; Object.prototype.id = () => 1; String.prototype.toJSON = () => 2; Array.prototype.toJSON = () => 1; globalThis.result = [await host.echo({a: 1})]", `[{"a":1}]`, ""},
		{"worker", "import { Worker } from 'node:worker_threads'; const w = new Worker('process.exit(7)', {eval: true}); export default await new Promise((r) => w.on('exit', r))", "7", ""},
		{"strict module", "export default (function () { return this === undefined; })()", "true", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := run(t, c.program)
			guesttest.WantOK(t, o, c.want)
			if n, ok := strings.CutPrefix(c.stdout, "count "); ok {
				if got := fmt.Sprint(strings.Count(o.Stdout, "\n")); got != n {
					t.Errorf("stdout has %s lines", got)
				}
			} else if o.Stdout != c.stdout {
				t.Errorf("stdout is %q, want %q", o.Stdout, c.stdout)
			}
			if strings.Contains(o.Stderr, node.FileName) {
				t.Errorf("stderr shows the guest: %s", o.Stderr)
			}
		})
	}
}

// Fd 3 closed by the program: no frame lands in a file that got the number.
func TestClosedChannelNeverWritesIntoAFile(t *testing.T) {
	dir := t.TempDir()
	o := guesttest.Run(t, guesttest.Options{Argv: argv(), Dir: dir, Bindings: bindings, Program: `
import fs from 'node:fs';
fs.closeSync(3);
fs.closeSync(4);
if (fs.openSync('three', 'w') !== 3 || fs.openSync('four', 'w') !== 4) process.exit(9);
try { await host.echo(); } catch (e) { console.log(e.message); }
export default 1`})
	if len(o.Frames) != 0 || o.ExitCode != 70 || !strings.Contains(o.Stderr, "send the Result on fd 3") {
		t.Errorf("exit code %d, frames %q, stderr %q", o.ExitCode, o.Frames, o.Stderr)
	}
	if o.Stdout != "fd 4: the program closed it\n" {
		t.Errorf("stdout is %q", o.Stdout)
	}
	for _, name := range []string{"three", "four"} {
		if data, err := os.ReadFile(filepath.Join(dir, name)); err != nil || len(data) != 0 {
			t.Errorf("%s holds %q, %v", name, data, err)
		}
	}
}

// A stdout that nobody reads any more may fail the program, never the Result.
func TestBrokenStdout(t *testing.T) {
	for _, c := range []struct{ name, program, kind string }{
		{"caught", "process.stdout.on('error', () => {}); console.log('x'); export default 1", ""},
		{"uncaught", "for (let i = 0; i < 1000; i++) process.stdout.write('x\\n'); setTimeout(() => {}, 50)", "permanent"},
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
				guesttest.WantFailed(t, o, c.kind, "EPIPE", 1)
			}
		})
	}
}

// Output that a slow reader has not taken yet survives process.exit.
func TestOutputSurvivesExit(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Close() }()
	read := make(chan int)
	go func() {
		time.Sleep(200 * time.Millisecond) // the pipe is full by then
		out, _ := io.ReadAll(r)
		read <- len(out)
	}()
	o := guesttest.Run(t, guesttest.Options{Argv: argv(), Program: "console.log('x'.repeat(1000000)); process.exit(0)", Stdout: w})
	_ = w.Close()
	guesttest.WantOK(t, o, "")
	if n := <-read; n != 1000001 {
		t.Errorf("%d bytes arrived, want 1000001", n)
	}
}

func TestArgvAndSource(t *testing.T) {
	if want := []string{"node", "/g.mjs"}; !reflect.DeepEqual(node.Argv("/g.mjs"), want) {
		t.Errorf("Argv is %q", node.Argv("/g.mjs"))
	}
	file, err := os.ReadFile("guest.mjs")
	if err != nil || string(file) != string(node.Source) {
		t.Errorf("Source differs from guest.mjs, %v", err)
	}
}
