package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"example.com/jail/jail"
	"example.com/jail/rootfs"
)

func TestMain(m *testing.M) {
	// On cgroup v2 the tests' process steps aside here, if its cgroup is not the
	// root: the commands that they run share that cgroup.
	switch filepath.Base(os.Args[0]) {
	case "jail", "mcpserver":
	default:
		jail.Preflight()
	}
	testscript.Main(m, map[string]func(){"jail": main, "mcpserver": mcpServer})
}

// Each file of testdata/script is one thing that a user does.
func TestScripts(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("the tests of the command line need root")
	}
	dir := fmt.Sprintf("/run/jail-test-cli-%d", os.Getpid())
	t.Cleanup(func() {
		if _, err := (&rootfs.Cache{Dir: dir}).Drop(); err != nil {
			t.Error(err)
		}
	})
	testscript.Run(t, testscript.Params{
		Dir: "testdata/script",
		Setup: func(e *testscript.Env) error {
			e.Setenv(templatesEnv, dir)
			return nil
		},
		Cmds: map[string]func(ts *testscript.TestScript, neg bool, args []string){
			"exitcode": exitCodeCmd,
			"report":   reportCmd,
			"mkimage":  mkimageCmd,
		},
		RequireUniqueNames: true,
	})
}

// exitCodeCmd runs a command and wants an exit code: exitcode N COMMAND ARG...
func exitCodeCmd(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: exitcode N COMMAND [ARG...]")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	err = ts.Exec(args[1], args[2:]...)
	code := 0
	if err != nil {
		var n int
		if _, scan := fmt.Sscanf(err.Error(), "exit status %d", &n); scan != nil {
			ts.Fatalf("%v", err)
		}
		code = n
	}
	if code != want {
		ts.Fatalf("exit code %d, want %d", code, want)
	}
}

// reportCmd looks at a report: report FILE KEY[.KEY...] WANT, where FILE may be
// stdout (its last line) and WANT is JSON text, or - for "absent".
func reportCmd(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) != 3 {
		ts.Fatalf("usage: report FILE KEY WANT")
	}
	text := ts.ReadFile(args[0])
	if args[0] == "stdout" {
		lines := strings.Split(strings.TrimSpace(text), "\n")
		text = lines[len(lines)-1]
	}
	d := json.NewDecoder(strings.NewReader(text))
	d.UseNumber()
	var v any
	if err := d.Decode(&v); err != nil {
		ts.Fatalf("%s is no report: %v\n%s", args[0], err, text)
	}
	found := true
	for _, key := range strings.Split(args[1], ".") {
		switch m := v.(type) {
		case map[string]any:
			v, found = m[key]
		case []any:
			i, err := strconv.Atoi(key)
			if found = err == nil && i < len(m); found {
				v = m[i]
			}
		default:
			found = false
		}
		if !found {
			break
		}
	}
	got := "-"
	if found {
		b, err := json.Marshal(v)
		ts.Check(err)
		got = string(b)
	}
	if (got == args[2]) == neg {
		ts.Fatalf("%s is %s, want %s\n%s", args[1], got, args[2], text)
	}
}
