package main

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"example.com/jail/jail"
)

// ended waits for a command, which fails the test if it takes long, and returns
// its exit code.
func ended(t *testing.T, c *exec.Cmd) int {
	t.Helper()
	stuck := time.AfterFunc(30*time.Second, func() { _ = c.Process.Kill() })
	_ = c.Wait()
	if !stuck.Stop() {
		t.Error("had to be killed")
	}
	return c.ProcessState.ExitCode()
}

func started(t *testing.T, c *exec.Cmd) {
	t.Helper()
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
}

// full returns a pipe that takes nothing more, since nobody reads it.
func full(t *testing.T) *os.File {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close(); w.Close() })
	if err := w.SetWriteDeadline(time.Now().Add(50 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	_, _ = w.Write(make([]byte, 1<<20))
	return w
}

// Nobody reads what the command prints: the run ends with its limit all the same,
// and the report is written to its file.
func TestRunThatNobodyReads(t *testing.T) {
	file := filepath.Join(t.TempDir(), "r.json")
	c := jailCommand(t, "run", "--wall", "200ms", "--report", file, "--", "yes")
	c.Stdout = full(t)
	c.Stderr = c.Stdout
	started(t, c)
	if code := ended(t, c); code != 124 {
		t.Errorf("exit code %d", code)
	}
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var r jail.Report
	if err := json.Unmarshal(b, &r); err != nil || r.Cause != jail.CauseWall {
		t.Errorf("%v, %s", err, b)
	}

	// What a slow reader has missed is not passed over in silence. One that has
	// seen enough asked for it. The program ends: two pipes take what it writes.
	for reader, want := range map[string]bool{"until [ -e ended ]; do sleep 0.1; done; cat >/dev/null": true, "exec head -c 1 >/dev/null": false} {
		c := exec.Command("/bin/sh", "-c", "("+jailCommand(t).Path+" run -- head -c 100000 /dev/zero; >ended) | ("+reader+")")
		c.Env, c.Dir = jailCommand(t).Env, t.TempDir()
		var errs bytes.Buffer
		c.Stderr = &errs
		started(t, c)
		if ended(t, c); strings.Contains(errs.String(), "stdout: ") != want || strings.Contains(errs.String(), " bytes were not delivered") != want {
			t.Errorf("%s: stderr %q", reader, errs.String())
		}
	}
}

// A signal ends the command also while it waits for a reader of its report.
func TestSignalsWhileTheReportWaits(t *testing.T) {
	fifo := filepath.Join(t.TempDir(), "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		report string
		code   int
	}{{fifo, 130}, {"-", exitFailed}} {
		cmd := jailCommand(t, "run", "--report", c.report, "--", "true")
		cmd.Stdout = full(t)
		started(t, cmd)
		time.Sleep(500 * time.Millisecond) // so that it waits
		if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatalf("--report %s: %v", c.report, err)
		}
		if code := ended(t, cmd); code != c.code {
			t.Errorf("--report %s: exit code %d, want %d", c.report, code, c.code)
		}
	}
}

// The signals that a terminal sends cancel the run; those that the command was
// started without do not, by nohup or by a shell's &.
func TestSignals(t *testing.T) {
	for _, c := range []struct {
		signal syscall.Signal
		trap   string
		code   int
	}{
		{syscall.SIGINT, "", 130}, {syscall.SIGHUP, "", 130}, {syscall.SIGTERM, "", 130}, {syscall.SIGQUIT, "", 130},
		{syscall.SIGHUP, "trap '' HUP; ", 7}, {syscall.SIGINT, "trap '' INT; ", 7},
	} {
		jail := jailCommand(t)
		cmd := exec.Command("/bin/sh", "-c", c.trap+"exec "+jail.Path+" run -- sh -c 'echo; sleep 1; exit 7'")
		cmd.Env = jail.Env
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		started(t, cmd)
		if _, err := out.Read(make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Process.Signal(c.signal); err != nil {
			t.Fatal(err)
		}
		if code := ended(t, cmd); code != c.code {
			t.Errorf("%s%s: exit code %d, want %d", c.trap, c.signal, code, c.code)
		}
	}
}
