package main

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"example.com/jail/rootfs"
)

// C12, J13: whatever a program prints, the launcher holds a buffer of it. The
// bound leaves room for the race detector; a launcher that kept what a program
// floods it with would need gigabytes.
func TestLauncherMemoryIsBoundedUnderAFlood(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	bin := filepath.Join(t.TempDir(), "jail")
	if err := os.Symlink(exe, bin); err != nil {
		t.Fatal(err)
	}
	cache := "/run/jail-test-flood"
	t.Cleanup(func() { _, _ = (&rootfs.Cache{Dir: cache}).Drop() })
	for _, args := range [][]string{{"--output", "0"}, {"--output", "0", "--events"}} {
		args = append(append([]string{"run", "--wall", "2s"}, args...), "--", "/bin/sh", "-c", "yes & yes >&2")
		cmd := exec.Command(bin, args...)
		cmd.Env = append(os.Environ(), templatesEnv+"="+cache)
		out := &counter{}
		cmd.Stdout = out
		cmd.Stderr = io.Discard
		_ = cmd.Run()
		if code := cmd.ProcessState.ExitCode(); code != 124 {
			t.Fatalf("%v: exit code %d", args, code)
		}
		rss := cmd.ProcessState.SysUsage().(*syscall.Rusage).Maxrss << 10
		if out.n < 10<<20 || rss > 192<<20 {
			t.Errorf("%v: %d MiB of output, launcher used %d MiB", args, out.n>>20, rss>>20)
		}
		t.Logf("%d MiB of output, launcher used %d MiB", out.n>>20, rss>>20)
	}
}

type counter struct{ n int64 }

func (c *counter) Write(p []byte) (int, error) { c.n += int64(len(p)); return len(p), nil }
