package invoke

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"example.com/jail/wire/toolfail"
)

func TestLoadRefusesWithTheLine(t *testing.T) { // L41, L29
	ok := "tools:\n- name: a\n  command: [/bin/true]\n"
	for _, c := range []struct{ name, text, want string }{
		{"empty", "", "tools:1: tools file: want a mapping, got null"},
		{"a list of strings", "- a\n", "tools:1: tool 1: want a mapping, got a string"},
		{"an empty list", "[]\n", "tools:1: neither tools nor mcp has an entry"},
		{"a string", "a\n", "tools:1: tools file: want a mapping, got a string"},
		{"a command of spaces", "tools:\n- {name: a, command: \" \"}\n", "tools:2: tool a: command: no program"},
		{"nothing in it", "tools: []\n", "tools:1: neither tools nor mcp"},
		{"unknown key", ok + "tool: []\n", `tools:4: tools file: unknown key "tool"`},
		{"unknown key of a tool", "tools:\n- name: a\n  comand: x\n", `tools:3: tool 1: unknown key "comand" (known: name,`},
		{"key in another case", "tools:\n- Name: a\n", `tools:2: tool 1: unknown key "Name"`},
		{"hostile key", "tools:\n- \"a\\e[31m\u043e\": a\n", `unknown key "a\x1b[31m\u043e"`},
		{"key twice", "tools:\n- name: a\n  name: b\n", "tools:3: "},
		{"key that is a number", "1: a\n", "tools:1: key "},
		{"tools is a mapping", "tools:\n  a: b\n", "tools:2: tools: want a list, got a mapping"},
		{"tool is a string", "tools: [a]\n", "tools:1: tool 1: want a mapping, got a string"},
		{"no name", "tools:\n- command: [/bin/true]\n", "tools:2: tool 1: name is missing"},
		{"name is a number", "tools:\n- name: 5\n", `tools:2: tool 1: name: want a string, got a number "5"`},
		{"name is null", "tools:\n- name:\n  command: [/bin/true]\n", "tools:2: tool 1: name: want a string, got null"},
		{"name is no identifier", "tools:\n- name: a-b\n", `tools:2: tool name "a-b": not an identifier`},
		{"name is reserved", "tools:\n- name: import\n", "tools:2: tool name \"import\": reserved word"},
		{"reserved for early reads", "tools:\n- name: $prepare\n", "reserved by the call channel"},
		{"name twice", ok + "- name: a\n  command: [/bin/true]\n", "tools:4: tool a: already declared in line 2"},
		{"no command", "tools:\n- name: a\n", "tools:2: tool a: command is missing"},
		{"command is empty", "tools:\n- name: a\n  command: []\n", "tools:3: tool a: command: no program"},
		{"command is a mapping", "tools:\n- name: a\n  command: {x: y}\n", "tools:3: tool a: command: want a list, got a mapping"},
		{"command has a number", "tools:\n- name: a\n  command: [/bin/true, 5]\n", `tools:3: tool a: command: want a string, got a number "5"`},
		{"program is missing", "tools:\n- name: a\n  command: [./nothing-here]\n", `tools:3: tool a: command "./nothing-here": `},
		{"program is not in PATH", "tools:\n- name: a\n  command: [no-such-program-here]\n", `tools:3: tool a: command "no-such-program-here": `},
		{"program is a folder", "tools:\n- name: a\n  command: [/tmp]\n", `tools:3: tool a: command "/tmp": `},
		{"NUL in the command", "tools:\n- name: a\n  command: [/bin/true, \"a\\0b\"]\n", "NUL byte"},
		{"dir is missing", ok + "  dir: nothing-here\n", "tools:4: tool a: dir "},
		{"env is a list", ok + "  env: [a]\n", "tools:4: tool a: env: want a mapping, got a list"},
		{"env value is a number", ok + "  env: {A: 5}\n", `tools:4: tool a: env: "A": want a string (put it in quotes), got a number`},
		{"env name", ok + "  env: {\"A=B\": x}\n", `tools:4: tool a: env: "A=B": not a variable`},
		{"env that is not set here", ok + "  env:\n    NOT_SET_ANYWHERE_X1:\n", `tools:5: tool a: env: "NOT_SET_ANYWHERE_X1" has no value here`},
		{"timeout is a number", ok + "  timeout: 5\n", `tools:4: tool a: timeout: want a string, got a number "5"`},
		{"timeout is no duration", ok + "  timeout: soon\n", `tools:4: tool a: timeout: "soon": want a duration`},
		{"timeout is negative", ok + "  timeout: -5s\n", `"-5s": want a duration`},
		{"timeout is zero", ok + "  timeout: 0s\n", `"0s": want a duration`},
		{"idempotent is a string", ok + "  idempotent: \"true\"\n", `tools:4: tool a: idempotent: want true or false, got a string "true"`},
		{"idempotent is yes", ok + "  idempotent: yes\n", `got a string "yes"`},
		{"early_read is a number", ok + "  early_read: 1\n", `tools:4: tool a: early_read: want true or false, got a number "1"`},
		{"description is a list", ok + "  description: [a]\n", "tools:4: tool a: description: want a string, got a list"},
		{"schema is a string", ok + "  schema: object\n", "tools:4: tool a: schema: want a mapping"},
		{"schema does not compile", ok + "  schema:\n    type: strin\n", "tools:5: tool a: schema: "},
		{"schema refers to a file", ok + "  schema:\n    $ref: other.json\n", "tools:5: tool a: schema: "},
		{"schema with a hexadecimal number", ok + "  schema: {maximum: 0x10}\n", "number \"0x10\": write it as JSON does"},
		{"anchor", "tools: &a []\n", "not used in a tools file"},
		{"alias", "tools: *a\n", "not used in a tools file"},
		{"tag", "tools: !!str a\n", "not used in a tools file"},
		{"merge key", "tools:\n- <<: a\n", "not used in a tools file"},
		{"two documents", ok + "---\n" + ok, "want one"},
		{"syntax", "tools: [\n", "tools:"},
		{"indentation", "tools:\n- name: a\n   command: b\n", "tools:"},
		{"not UTF-8", "tools: \"\xff\"\n", "not UTF-8"},
		{"too long", "#" + strings.Repeat("a", maxFileBytes), "more than 1048576 bytes"},
		{"deep brackets", strings.Repeat("[", 1<<19), "nested too deep"},
		{"deep dashes", strings.Repeat("- ", 1<<18), "nested too deep"},
		{"deep keys", strings.Repeat("? ", 1<<18), "not used in a tools file"},
		{"deep blocks", deepBlocks(1000), "nested deeper than 100"},

		{"JSON: unknown key", "{\n \"tools\": [\n  {\"nam\": \"a\"}]}", `tools:3: tool 1: unknown key "nam"`},
		{"JSON: key twice", `{"tools":[],"tools":[]}`, "tools:1: "},
		{"JSON: name twice", "{\"tools\":[{\"name\":\"a\",\"command\":\"/bin/true\"},\n{\"name\":\"a\",\"command\":\"/bin/true\"}]}", "tools:2: tool a: already declared in line 1"},
		{"JSON: trailing text", "{} x", "tools:1: "},
		{"JSON: comment", "{\"tools\":[] // x\n}", "tools:1: "},
		{"JSON: deep", `{"tools":` + strings.Repeat("[", 1<<19), "tools:1: "},
		{"JSON: lone surrogate", `{"tools":"\ud800"}`, "not lossless"},

		{"mcp: neither", "mcp:\n- name: a\n", "tools:2: mcp server a: want either command or url"},
		{"mcp: both", "mcp:\n- command: /bin/true\n  url: http://127.0.0.1/\n", "tools:2: mcp server 1: want either command or url"},
		{"mcp: unknown key", "mcp:\n- uri: x\n", `tools:2: mcp server 1: unknown key "uri"`},
		{"mcp: name", "mcp:\n- name: \"a b\"\n  command: /bin/true\n", `mcp server 1: name "a b": want`},
		{"mcp: name twice", "mcp:\n- name: a\n  command: /bin/true\n- name: a\n  command: /bin/true\n", "tools:4: mcp server a: already declared in line 2"},
		{"mcp: url", "mcp:\n- url: ftp://x/\n", `tools:2: mcp server 1: url "ftp://x/": want http or https`},
		{"mcp: url without host", "mcp:\n- url: \"http:///x\"\n", "no host"},
		{"mcp: env of a url", "mcp:\n- url: http://127.0.0.1/\n  env: {A: b}\n", "tools:3: mcp server 1: env: only for a server that is a command"},
		{"mcp: tools", "mcp:\n- command: /bin/true\n  tools: all\n", "tools:3: mcp server 1: tools: want a list, got a string"},
		{"mcp: prefix", "mcp:\n- command: /bin/true\n  prefix: a-\n", `tools:3: mcp server 1: prefix "a-": not an identifier`},
	} {
		t.Run(c.name, func(t *testing.T) {
			f, err := Load(strings.NewReader(c.text), t.TempDir())
			if err == nil || f != nil || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("Load = %v, %v; want error with %q", f, err, c.want)
			}
			if len(err.Error()) > 2048 {
				t.Errorf("error of %d bytes", len(err.Error()))
			}
		})
	}
}

func deepBlocks(n int) string {
	var b strings.Builder
	for i := range n {
		b.WriteString(strings.Repeat(" ", i) + "a:\n")
	}
	return b.String()
}

func TestLoadReadsYAMLAndJSONAlike(t *testing.T) { // W24
	yaml := `# a comment
tools:
- name: orders
  description: |
    Orders of a customer.
    Newest first.
  schema:
    type: object
    properties: {customer_id: {type: integer, maximum: 1152921504606846976}, rate: {type: number, default: 1e3}}
    required: [customer_id]
  command: [/bin/cat]
  idempotent: true
  early_read: true
- name: echo
  signature: echo(**arguments)
  command: /bin/cat
  timeout: 5s
`
	json := `
{ "tools": [
	{"name": "orders", "description": "Orders of a customer.\nNewest first.\n",
	 "schema": {"type": "object", "properties": {"customer_id": {"type": "integer", "maximum": 1152921504606846976}, "rate": {"type": "number", "default": 1e3}}, "required": ["customer_id"]},
	 "command": ["/bin/cat"], "idempotent": true, "early_read": true},
	{"name": "echo", "signature": "echo(**arguments)", "command": "/bin/cat -u  -", "timeout": "5s"}]}`
	commented := strings.ReplaceAll(strings.ReplaceAll(yaml, ":\n", ": # why\n"), "- name", "# between\n- name") + "# end\n"
	bare := json[strings.Index(json, "[") : strings.LastIndex(json, "]")+1]
	for name, text := range map[string]string{"YAML": yaml, "JSON": json, "a bare list": bare, "YAML with comments": commented, "YAML with CRLF": strings.ReplaceAll(yaml, "\n", "\r\n")} {
		f, err := Load(strings.NewReader(text), t.TempDir())
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		tools, err := f.Open(context.Background(), nil, Options{})
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		b := tools.Bindings()
		if len(b) != 2 || b[1].Signature != "orders(customer_id: int, rate: float = 1e3)" || b[0].Signature != "echo(**arguments)" ||
			strings.ReplaceAll(b[1].Description, "\r", "") != "Orders of a customer.\nNewest first.\n" {
			t.Errorf("%s: bindings %q", name, b)
		}
		if !tools.Idempotent("orders") || tools.Idempotent("echo") || tools.Idempotent("nope") {
			t.Errorf("%s: idempotent", name)
		}
		run := newRun(t, tools)
		if resp := handle(t, run, "orders", `{"customer_id": 1152921504606846976}`); resp.Value != `{"customer_id":1152921504606846976}` {
			t.Errorf("%s: %+v", name, resp)
		}
		if resp := handle(t, run, "orders", `{"customer_id": 1152921504606847232}`); resp.Kind != "invalid" {
			t.Errorf("%s: beyond the maximum: %+v", name, resp)
		}
		if resp := handle(t, run, "$prepare", prepareArgs("orders", `{"customer_id":1}`)); resp.Value != "1" {
			t.Errorf("%s: early read: %+v", name, resp)
		}
		if err := tools.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestLoadFileNamesTheFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "tools.yaml")
	if _, err := LoadFile(path); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), path) {
		t.Errorf("missing file: %v", err)
	}
	write(t, path, "tools:\n- nam: a\n", 0o644)
	if _, err := LoadFile(path); err == nil || !strings.HasPrefix(err.Error(), path+":2: ") {
		t.Errorf("bad file: %v", err)
	}
	if _, err := LoadFile(dir); err == nil {
		t.Error("a folder is no tools file")
	}
	if _, err := Load(errReader{}, dir); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("reader that fails: %v", err)
	}
}

type errReader struct{}

func (errReader) Read([]byte) (int, error) { return 0, io.ErrUnexpectedEOF }

func write(t *testing.T, path, text string, mode os.FileMode) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		t.Fatal(err)
	}
}

// shellTool makes tools of one command tool t that is a shell script.
func shellTool(t *testing.T, script, more string) *Tools {
	t.Helper()
	dir := t.TempDir()
	write(t, filepath.Join(dir, "t.sh"), "#!/bin/sh\n"+script+"\n", 0o755)
	f, err := Load(strings.NewReader("tools:\n- name: t\n  command: [./t.sh, one, \"two words\", $HOME]\n"+more), dir)
	if err != nil {
		t.Fatal(err)
	}
	tools, err := f.Open(context.Background(), nil, Options{})
	if err != nil {
		t.Fatal(err)
	}
	return tools
}

func TestCommandTool(t *testing.T) { // B1, B5, B6, B7, L28, E31, K7
	t.Setenv("DECLARED_HERE", "from the launcher")
	t.Setenv("SECRET_TOKEN", "do not pass on")
	t.Setenv("LC_TEST", "kept")
	for _, c := range []struct {
		name, script, more, args string
		kind                     toolfail.Class
		want                     string
	}{
		{"echo", "cat", "", `{"n":1152921504606846976}`, "", `{"n":1152921504606846976}`},
		{"no output is null", ":", "", "{}", "", "null"},
		{"white space is null", `printf ' \n\n'`, "", "{}", "", "null"},
		{"pretty JSON", `printf '{\n  "a": [1.50, 2e3]\n}\n'`, "", "{}", "", `{"a":[1.50,2e3]}`},
		{"arguments of the command, without a shell", `printf '"%s|%s|%s"' "$1" "$2" "$3"`, "", "{}", "", `"one|two words|$HOME"`},
		{"environment", `printf '"%s|%s|%s|%s|%s"' "$DECLARED_HERE" "$OWN" "$SECRET_TOKEN" "$LC_TEST" "${PATH:+path}"`, "  env:\n    DECLARED_HERE:\n    OWN: \"x=y\"\n", "{}", "", `"from the launcher|x=y||kept|path"`},
		{"folder of the file", `test -f ./t.sh && printf 1`, "", "{}", "", "1"},
		{"standard error of a success", `echo warning >&2; printf 1`, "", "{}", "", "1"},
		{"large arguments unread", `printf 1`, "", `"` + strings.Repeat("a", 1<<19) + `"`, "", "1"},

		{"status 1", "exit 1", "", "{}", toolfail.Permanent, "exit status 1"},
		{"status with text", "echo 'no such customer' >&2; exit 3", "", "{}", toolfail.Permanent, "no such customer"},
		{"long text keeps its end", "head -c 100000 /dev/zero | tr '\\0' x >&2; echo END >&2; exit 1", "", "{}", toolfail.Permanent, "xEND"},
		{"text that is not UTF-8", "printf 'a\\377b' >&2; exit 1", "", "{}", toolfail.Permanent, "a?b"},
		{"output of a failure is not a value", "printf 1; exit 1", "", "{}", toolfail.Permanent, "exit status 1"},
		{"killed", "kill -9 $$", "", "{}", toolfail.Permanent, "signal: killed"},
		{"not JSON", "echo hello", "", "{}", toolfail.Permanent, "did not write JSON"},
		{"two values", "echo 1 2", "", "{}", toolfail.Permanent, "did not write JSON"},
		{"inexact number", "echo 9007199254740993", "", "{}", toolfail.Permanent, "not lossless"},
		{"not UTF-8", `printf '"\377"'`, "", "{}", toolfail.Permanent, "did not write JSON"},
		{"too much", "cat /dev/zero", "", "{}", toolfail.Permanent, "more than 1048576 bytes"},
		{"timeout", "sleep 1000", "  timeout: 50ms\n", "{}", toolfail.Transient, "did not end within 50ms"},
		{"timeout against SIGTERM", "trap '' TERM INT HUP; while :; do sleep 1000; done", "  timeout: 50ms\n", "{}", toolfail.Transient, "did not end within"},
	} {
		t.Run(c.name, func(t *testing.T) {
			tools := shellTool(t, c.script, c.more)
			resp := handle(t, newRun(t, tools), "t", c.args)
			got := resp.Value
			if !resp.OK {
				got = resp.Error
			}
			if resp.Kind != string(c.kind) || !strings.Contains(got, c.want) || c.kind == "" && got != c.want || len(got) > toolfail.MaxText {
				t.Errorf("got %.500v", resp)
			}
			if n := children(); len(n) != 0 {
				t.Errorf("processes left: %v", n)
			}
		})
	}
}

func TestCommandGetsNoneOfOurDescriptors(t *testing.T) { // J5
	marker, err := os.Create(filepath.Join(t.TempDir(), "marker-file"))
	if err != nil {
		t.Fatal(err)
	}
	defer marker.Close()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	ours, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", r.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	tools := shellTool(t, `printf '"'; for f in /proc/$$/fd/*; do printf '%s ' "$(readlink $f)"; done; printf '"'`, "")
	resp := handle(t, newRun(t, tools), "t", "{}")
	if !resp.OK || !strings.Contains(resp.Value, "pipe:") {
		t.Fatalf("%+v", resp)
	}
	for _, leaked := range []string{"marker-file", ours} {
		if strings.Contains(resp.Value, leaked) {
			t.Errorf("the command has %s: %s", leaked, resp.Value)
		}
	}
}

func TestCommandThatCannotStart(t *testing.T) { // K7
	for _, c := range []struct {
		name string
		do   func(path string) error
	}{
		{"not executable any more", func(p string) error { return os.WriteFile(p, []byte{0x7f, 'E', 'L', 'F'}, 0o755) }},
		{"removed", os.Remove},
	} {
		dir := t.TempDir()
		path := filepath.Join(dir, "p")
		write(t, path, "#!/bin/sh\n", 0o755)
		file, err := Load(strings.NewReader("tools:\n- name: t\n  command: ./p\n"), dir)
		if err != nil {
			t.Fatal(err)
		}
		if err := c.do(path); err != nil {
			t.Fatal(err)
		}
		tools, err := file.Open(context.Background(), nil, Options{})
		if err != nil {
			t.Fatal(err)
		}
		resp := handle(t, newRun(t, tools), "t", "{}")
		if resp.Kind != "permanent" || strings.Contains(resp.Error, dir) || resp.Error == "" {
			t.Errorf("%s: %+v", c.name, resp)
		}
	}
}

// alive tells whether a process that wrote its pid to the file still runs.
func alive(t *testing.T, pidFile string) bool {
	t.Helper()
	b, err := os.ReadFile(pidFile)
	if err != nil || len(b) == 0 {
		t.Fatalf("no pid in %s: %v", pidFile, err)
	}
	stat, err := os.ReadFile("/proc/" + strings.TrimSpace(string(b)) + "/stat")
	if err != nil {
		return false
	}
	after := string(stat[strings.LastIndexByte(string(stat), ')')+1:])
	return !strings.HasPrefix(strings.TrimSpace(after), "Z")
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within 20 s", what)
		}
	}
}

func TestCommandsProcessesEndWithTheCall(t *testing.T) { // B9, J4
	for _, c := range []struct {
		name   string
		script string
		cancel bool
		want   toolfail.Class
	}{
		{"canceled", "sleep 1000 & echo $! > pid.tmp; mv pid.tmp pid; wait", true, toolfail.Canceled},
		{"canceled while it ignores signals", "trap '' TERM; (trap '' TERM; sleep 1000; sleep 1000) & echo $! > pid.tmp; mv pid.tmp pid; while :; do wait; sleep 1; done", true, toolfail.Canceled},
		{"leader ends first", "sleep 1000 & echo $! > pid.tmp; mv pid.tmp pid; printf 1", false, ""},
		{"leader fails first", "sleep 1000 & echo $! > pid.tmp; mv pid.tmp pid; exit 1", false, toolfail.Permanent},
		{"too much output", "sleep 1000 & echo $! > pid.tmp; mv pid.tmp pid; cat /dev/zero", false, toolfail.Permanent},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			write(t, filepath.Join(dir, "t.sh"), "#!/bin/sh\n"+c.script+"\n", 0o755)
			f, err := Load(strings.NewReader("tools:\n- name: t\n  command: ./t.sh\n"), dir)
			if err != nil {
				t.Fatal(err)
			}
			tools, err := f.Open(context.Background(), nil, Options{})
			if err != nil {
				t.Fatal(err)
			}
			pid := filepath.Join(dir, "pid")
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			if c.cancel {
				go func() {
					for {
						if _, err := os.Stat(pid); err == nil {
							cancel()
							return
						}
						time.Sleep(5 * time.Millisecond)
					}
				}()
			}
			_, err = tools.Do(ctx, Call{Name: "t", Args: "{}"})
			if got := toolfail.Of(err); got != c.want {
				t.Errorf("class %q, want %q: %v", got, c.want, err)
			}
			eventually(t, "end of the background process", func() bool { return !alive(t, pid) })
		})
	}
}

func TestCommandThatLeavesItsGroupDoesNotHoldTheCall(t *testing.T) { // C11
	dir := t.TempDir()
	write(t, filepath.Join(dir, "t.sh"), "#!/bin/sh\nsetsid sh -c 'echo $$ > pid.tmp; mv pid.tmp pid; sleep 1000' &\nwhile ! test -f pid; do sleep 0.01; done; printf 1\n", 0o755)
	f, err := Load(strings.NewReader("tools:\n- name: t\n  command: ./t.sh\n"), dir)
	if err != nil {
		t.Fatal(err)
	}
	tools, err := f.Open(context.Background(), nil, Options{})
	if err != nil {
		t.Fatal(err)
	}
	res, err := tools.Do(context.Background(), Call{Name: "t", Args: "{}"})
	if err != nil || string(res.Structured) != "1" {
		t.Errorf("Do = %s, %v", res.Structured, err)
	}
	b, err := os.ReadFile(filepath.Join(dir, "pid"))
	if err != nil {
		t.Fatal(err)
	}
	var pid int
	if _, err := fmt.Sscan(string(b), &pid); err != nil {
		t.Fatal(err)
	}
	p, err := os.FindProcess(pid)
	if err != nil {
		t.Fatal(err)
	}
	_ = p.Kill() // this test's own sleeper, which nothing else ends
}

func TestManyCommandsLeaveNothing(t *testing.T) { // C21
	tools := shellTool(t, "cat", "")
	run := newRun(t, tools)
	handle(t, run, "t", "{}")
	fds, goroutines := openFDs(t), runtime.NumGoroutine()
	done := make(chan struct{})
	for range 8 {
		go func() {
			for range 10 {
				if resp := handle(t, run, "t", `{"a":1}`); resp.Value != `{"a":1}` {
					t.Errorf("%+v", resp)
				}
			}
			done <- struct{}{}
		}()
	}
	for range 8 {
		<-done
	}
	if n := children(); len(n) != 0 {
		t.Errorf("processes left: %v", n)
	}
	eventually(t, "end of goroutines", func() bool { return runtime.NumGoroutine() <= goroutines })
	if n := openFDs(t); n > fds {
		t.Errorf("%d descriptors, %d before", n, fds)
	}
}

func FuzzLoad(f *testing.F) { // L11, L41
	f.Add("tools:\n- name: a\n  command: [/bin/true]\n")
	f.Add(`{"tools":[{"name":"a","command":"/bin/true","schema":{"type":"object"}}]}`)
	f.Add("mcp:\n- url: http://127.0.0.1/\n  tools: [a]\n")
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, text string) {
		file, err := Load(strings.NewReader(text), dir)
		if (err == nil) != (file != nil) {
			t.Fatalf("Load = %v, %v", file, err)
		}
		if err != nil {
			return
		}
		// What loads without servers also opens.
		file.mcp = nil
		tools, err := file.Open(context.Background(), nil, Options{})
		if err != nil {
			t.Fatalf("loads but does not open: %v", err)
		}
		for _, b := range tools.Bindings() {
			if checkName(b.Name) != nil {
				t.Errorf("name %q", b.Name)
			}
		}
	})
}

func init() {
	helpers["tool-host"] = func(args []string) int {
		f, err := Load(strings.NewReader("tools:\n- name: t\n  command: ./t.sh\n"), args[0])
		if err != nil {
			return 2
		}
		tools, err := f.Open(context.Background(), nil, Options{})
		if err != nil {
			return 2
		}
		_, _ = tools.Do(context.Background(), Call{Name: "t", Args: "{}"})
		return 0
	}
}

func TestCommandDiesWithItsHost(t *testing.T) { // E1, E2
	dir := t.TempDir()
	write(t, filepath.Join(dir, "t.sh"), "#!/bin/sh\necho $$ > pid.tmp\nmv pid.tmp pid\nexec sleep 1000\n", 0o755)
	argv, env := helperCommand("tool-host", dir)
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Env = append(os.Environ(), env)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	pid := filepath.Join(dir, "pid")
	eventually(t, "start of the command", func() bool { _, err := os.Stat(pid); return err == nil })
	// The thread that forked must not be gone by now: the command lives on while
	// its host does.
	time.Sleep(50 * time.Millisecond)
	if !alive(t, pid) {
		t.Error("the command died while its host lives")
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	eventually(t, "end of the command", func() bool { return !alive(t, pid) })
}
