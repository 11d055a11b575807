package jail_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/jail/guest/python"
	"example.com/jail/invoke"
	"example.com/jail/jail"
	"example.com/jail/rootfs"
)

// Names that a compiled guest has in its jail.
const pycName, loaderName = python.FileName + "c", "load.py"

// compiled returns a spec with its guest compiled.
func compiled(t *testing.T, s jail.Spec) jail.Spec {
	t.Helper()
	c, err := python.Compile(context.Background(), s)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// file returns the content of a file of the root.
func file(t *testing.T, s jail.Spec, name string) []byte {
	t.Helper()
	i := slices.IndexFunc(s.Root.Files, func(f rootfs.File) bool { return f.Name == name })
	if i < 0 {
		t.Fatalf("no file %s in the root", name)
	}
	return s.Root.Files[i].Data
}

// withFile returns the spec with another content of a file; nil is none.
func withFile(s jail.Spec, name string, data []byte) jail.Spec {
	s.Root.Files = slices.DeleteFunc(slices.Clone(s.Root.Files), func(f rootfs.File) bool { return f.Name == name })
	if data != nil {
		s.Root.Files = append(s.Root.Files, rootfs.File{Name: name, Data: data})
	}
	return s
}

// A compiled guest runs without its source. Where the code is not this
// interpreter's, or no code, the source is what runs.
func TestCompiledGuest(t *testing.T) {
	s := script(t, "result = 42", nil, invoke.Options{})
	c := compiled(t, s)
	if len(s.Root.Files) != 1 || slices.Contains(s.Args, rootfs.FilesDir+"/"+loaderName) {
		t.Errorf("the given spec was changed: %q", s.Args)
	}
	pyc := file(t, c, pycName)
	if again := compiled(t, s); !bytes.Equal(pyc, file(t, again, pycName)) {
		t.Error("a second compilation differs: each process would pin a template of its own")
	}
	without := withFile(c, python.FileName, []byte("raise SystemExit(99)"))
	if r := run(t, without); r.Cause != jail.CauseOK || string(r.Value) != "42" {
		t.Errorf("without the source: cause %q (%s), value %s\n%s", r.Cause, r.Error, r.Value, r.stderr)
	}
	for name, code := range map[string][]byte{
		"another magic number": append([]byte{pyc[0] + 1}, pyc[1:]...),
		"cut short":            pyc[:len(pyc)/2],
		"nothing after header": pyc[:16],
		"another object":       append(slices.Clone(pyc[:16]), 'N'), // None
		"rubbish":              append(slices.Clone(pyc[:16]), "rubbish"...),
		"empty":                {},
		"no file":              nil,
	} {
		t.Run(name, func(t *testing.T) {
			if r := run(t, withFile(c, pycName, code)); r.Cause != jail.CauseOK || string(r.Value) != "42" || r.stderr != "" {
				t.Errorf("cause %q (%s), value %s, stderr %q", r.Cause, r.Error, r.Value, r.stderr)
			}
			if r := run(t, withFile(without, pycName, code)); r.Cause != jail.CauseLost || *r.ExitCode != 99 {
				t.Errorf("without the source, too: cause %q (%s), value %s", r.Cause, r.Error, r.Value)
			}
		})
	}
}

// Nothing that a program prints, returns or fails with tells whether its guest was
// compiled before.
func TestCompiledGuestTellsTheSame(t *testing.T) {
	s := script(t, "", invoke.Manifest{"echo": echo}, invoke.Options{})
	c := compiled(t, s)
	for name, program := range map[string]string{
		"traceback":       "def f(x):\n    return 1 / x\n\ntry:\n    f(0)\nexcept ZeroDivisionError as e:\n    raise KeyError('k') from e",
		"syntax error":    "x = 1\ndef f(:\n",
		"thread":          "import threading\ndef f():\n    raise ValueError('v')\nt = threading.Thread(target=f, name='t')\nt.start()\nt.join()\nraise SystemExit(3)",
		"no tool":         "host.nothing()",
		"tool":            "try:\n    host.echo(1)\nexcept TypeError as e:\n    print(e)\nresult = host.echo(a=1)",
		"no JSON":         "result = object",
		"deep":            "import sys\nn = 0\ndef f():\n    global n\n    n += 1\n    f()\ntry:\n    f()\nexcept RecursionError:\n    pass\nresult = n",
		"stack":           "import inspect\ndef f():\n    return [[i.filename, i.lineno, i.function, i.code_context] for i in inspect.stack()]\nresult = f()[:-1]",
		"depth":           "import inspect\nresult = len(inspect.stack())",
		"source":          "import inspect\ndef f():\n    return 1\nresult = [inspect.getsource(f), f.__code__.co_filename, f.__module__]",
		"names":           "import sys\nresult = [__name__, globals().get('__file__'), sys.argv, sorted(globals()), sorted(sys.modules), sys.path, sys.flags.isolated]",
		"of the guest":    "result = [host.__class__.__module__, repr(host), host.echo.__doc__, type(host).__init__.__code__.co_filename, type(host).__init__.__code__.co_firstlineno]",
		"lines of guest":  "import inspect\nresult = inspect.getsource(type(host))",
		"tool error":      "raise host.ToolError('no', 'auth')",
		"exit of a child": "import os\npid = os.fork()\nif not pid:\n    raise ValueError('child')\nresult = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])",
	} {
		t.Run(name, func(t *testing.T) {
			var told []string
			for _, spec := range []jail.Spec{s, c} {
				spec.Script = &jail.Script{Program: program, Tools: s.Script.Tools}
				r := run(t, spec)
				b, err := json.Marshal([]any{r.Cause, r.Class, r.ExitCode, r.Error, r.Value, r.stdout, r.stderr, r.Calls.Accepted})
				if err != nil {
					t.Fatal(err)
				}
				told = append(told, string(b))
			}
			if told[0] != told[1] {
				t.Errorf("from source\n%s\ncompiled\n%s", told[0], told[1])
			}
		})
	}
}

// Guests of a pool are compiled, too, keep what they preload, and survive code of
// another interpreter.
func TestPoolOfCompiledGuests(t *testing.T) {
	s := script(t, "", nil, invoke.Options{})
	s.Args = python.Argv(rootfs.FilesDir+"/"+python.FileName, "json", "decimal")
	c := compiled(t, s)
	pyc := file(t, c, pycName)
	for name, spec := range map[string]jail.Spec{
		"without the source":   withFile(c, python.FileName, []byte("raise SystemExit(99)")),
		"another magic number": withFile(c, pycName, append([]byte{pyc[0] + 1}, pyc[1:]...)),
	} {
		t.Run(name, func(t *testing.T) {
			p := pool(t, spec, 2)
			r := runIn(t, p, jail.Use{Script: &jail.Script{Program: "import sys\nresult = [m in sys.modules for m in ('json', 'decimal', 'xml.dom')]"}})
			if r.Cause != jail.CauseOK || string(r.Value) != "[true,true,false]" {
				t.Errorf("cause %q (%s), value %s", r.Cause, r.Error, r.Value)
			}
		})
	}
}

// An interpreter that answers anything but code costs no more than its jail, and
// the spec stays what it was.
func TestCompileByAHostileInterpreter(t *testing.T) {
	guest := rootfs.FilesDir + "/" + python.FileName
	sh := func(script string) []string { return []string{"/bin/sh", "-c", script, guest} }
	const forger = `
import json, os, sys
start = open(3, "rb", closefd=False)
rid = json.loads(start.read(int.from_bytes(start.read(4), "big")))["result_id"]
b = json.dumps({"v": 1, "result_id": rid, "ok": True, "value": json.dumps(eval(sys.argv[2]))}).encode()
with open(3, "wb", closefd=False) as f:
    f.write(len(b).to_bytes(4, "big") + b)
`
	forge := func(value string) []string { return []string{"/usr/bin/python3", "-I", "-c", forger, guest, value} }
	for _, c := range []struct {
		name string
		args []string
		want string
	}{
		{"ends at once", sh("exit 0"), "lost"},
		{"prints rubbish", sh("echo rubbish; echo rubbish >&3; sleep 60"), "protocol"},
		{"prints without end", sh("while :; do echo rubbish; done"), "output"},
		{"frame of 4 GB", sh(`printf '\377\377\377\377' >&3; sleep 60`), "protocol"},
		{"takes all memory", []string{"/usr/bin/python3", "-c", "x = []\nwhile True: x.append(bytearray(1 << 20))", guest}, "memory"},
		{"fails", forge("1 / 0"), "lost"},
		{"result that is no text", forge("[1]"), "cannot unmarshal"},
		{"no result", forge("None"), "no code object"},
		{"text that is no code", forge("'import os'"), "invalid byte"},
		{"source instead of code", forge("'import os, sys, json'.encode().hex()"), "no code object"},
		{"header alone", forge("b'\\xa7\\r\\r\\n'.ljust(16, b'\\0').hex()"), "no code object"},
		{"more than 1 MiB", forge("b'\\xa7\\r\\r\\n'.ljust((1 << 20) + 1, b'\\0').hex()"), "at most 1048576"},
		{"hangs", sh("sleep 60"), "wall_clock"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := script(t, "result = 42", nil, invoke.Options{})
			s.Args = c.args
			s.Budget.MaxOutput, s.Budget.MaxMemory = 64<<10, 64<<20
			s.Budget.WallClock = 0 // then it has one of its own
			began := time.Now()
			got, err := python.Compile(context.Background(), s)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want %q", err, c.want)
			}
			if took := time.Since(began); took > 20*time.Second {
				t.Errorf("took %s", took)
			}
			if fmt.Sprint(got) != fmt.Sprint(s) {
				t.Errorf("the spec became %q with %d files", got.Args, len(got.Root.Files))
			}
		})
	}
}

// What Compile cannot compile it says, before anything is started.
func TestCompileRefuses(t *testing.T) {
	s := script(t, "", nil, invoke.Options{})
	for name, bad := range map[string]jail.Spec{
		"another program":  func() jail.Spec { s := s; s.Args = []string{"/bin/true"}; return s }(),
		"another guest":    withFile(s, python.FileName, []byte("pass")),
		"no guest":         withFile(s, python.FileName, nil),
		"compiled already": compiled(t, s),
		"a file of ours":   withFile(s, loaderName, []byte("pass")),
	} {
		if got, err := python.Compile(context.Background(), bad); err == nil || fmt.Sprint(got) != fmt.Sprint(bad) {
			t.Errorf("%s: error %v", name, err)
		}
	}
	var refused *jail.RefusedError
	bad := s
	bad.Budget.MaxPIDs = -1
	if _, err := python.Compile(context.Background(), bad); !errors.As(err, &refused) {
		t.Errorf("a negative limit: %v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := python.Compile(ctx, s); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled before: %v", err)
	}
}
