package jail_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"example.com/jail/jail"
)

// Scripts write to /dev/stderr and read /dev/stdin. Each pipe can be opened anew,
// and only in the direction that the program has it in.
func TestStandardStreamsByName(t *testing.T) {
	for name, c := range map[string]struct {
		script, stdin          string
		code                   int
		stdout, stderr, denied string
	}{
		"output":               {script: "echo a >/dev/stdout; echo b >>/dev/stderr; echo c >/proc/self/fd/1; echo d | tee /dev/fd/2", stdout: "a\nc\nd\n", stderr: "b\nd\n"},
		"input":                {script: "cat /dev/stdin", stdin: "hello", stdout: "hello"},
		"no input":             {script: "cat /dev/stdin"},
		"output is not read":   {script: "cat </dev/stdout", code: 2, denied: "/dev/stdout"},
		"output, both ways":    {script: "exec 5<>/dev/stderr", code: 2, denied: "/dev/stderr"},
		"input is not written": {script: "echo x >/dev/stdin", stdin: "hello", code: 2, denied: "/dev/stdin"},
		"not the program's":    {script: "chmod 666 /dev/stdout", code: 1, denied: "/dev/stdout"},
	} {
		t.Run(name, func(t *testing.T) {
			s := shell(c.script)
			if c.stdin != "" {
				s.Stdin = strings.NewReader(c.stdin)
			}
			r := run(t, s)
			if r.ExitCode == nil || *r.ExitCode != c.code || r.stdout != c.stdout {
				t.Errorf("cause %q, stdout %q, stderr %q", r.Cause, r.stdout, r.stderr)
			}
			if c.denied == "" && r.stderr != c.stderr || c.denied != "" && !strings.Contains(r.stderr, c.denied) {
				t.Errorf("stderr %q", r.stderr)
			}
		})
	}
}

// A memory limit in which not even the jail can be made refuses the run.
func TestMemoryTooSmallForTheJail(t *testing.T) {
	s := command("/bin/true")
	s.Budget.MaxMemory = 16 << 10
	var refused *jail.RefusedError
	if r, err := jail.Run(context.Background(), s); !errors.As(err, &refused) || refused.Items[0].Item != "max_memory" || r.Cause != jail.CauseRefused {
		t.Errorf("%v, cause %q", err, r.Cause)
	}
}
