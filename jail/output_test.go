package jail_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"example.com/jail/jail"
)

// piped runs a spec whose output goes to a pipe of this process, as a command
// line's does, and returns what the other end of the pipe gets from read.
func piped(t *testing.T, s jail.Spec, read func(*os.File) []byte) (*jail.Report, []byte) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	got := make(chan []byte, 1)
	go func() {
		defer r.Close()
		got <- read(r)
	}()
	s.Stdout = w
	if s.Stderr == nil {
		s.Stderr = w
	}
	report, err := jail.Run(context.Background(), s)
	w.Close()
	if err != nil {
		t.Fatal(err)
	}
	checkReport(t, report)
	return report, <-got
}

func readAll(f *os.File) []byte {
	b, _ := io.ReadAll(f)
	return b
}

// Whatever the output goes to, a buffer or a pipe that takes it without a copy,
// the same bytes arrive, and the cap is as exact (C12).
func TestOutputIsTheSameForEveryDestination(t *testing.T) {
	const digits = "import hashlib, sys\nb = b''.join(b'%d\\n' % i for i in range(700000))\nsys.stdout.buffer.write(b)\nprint(hashlib.sha256(b).hexdigest(), file=sys.stderr)"
	for _, c := range []struct {
		name, program  string
		cap            int64
		cause          jail.Cause
		stdout, stderr int64 // delivered, -1 for any
	}{
		{"nothing", "pass", 0, jail.CauseOK, 0, 0},
		{"a byte", "print(end='x')", 0, jail.CauseOK, 1, 0},
		{"megabytes, no cap", digits, 0, jail.CauseOK, 4788890, 65},
		{"megabytes below the cap", digits, 16 << 20, jail.CauseOK, 4788890, 65},
		{"the cap to the byte", "import sys\nsys.stdout.write('x' * 100000)", 100000, jail.CauseOK, 100000, 0},
		{"a byte beyond", "import sys\nsys.stdout.write('x' * 100001)", 100000, jail.CauseOutput, 100000, 0},
		{"for ever", "while True: print('x' * 1000)", 3000000, jail.CauseOutput, 3000000, 0},
		{"on both", "import os\nfor i in range(1000): os.write(1, b'o' * 300); os.write(2, b'e' * 200)", 0, jail.CauseOK, 300000, 200000},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := command("/usr/bin/python3", "-I", "-S", "-c", c.program)
			s.Budget.MaxOutput = c.cap
			plain := run(t, s)
			var errs bytes.Buffer
			s.Stderr = &errs
			report, out := piped(t, s, readAll)
			for name, r := range map[string]*jail.Report{"buffer": plain.Report, "pipe": report} {
				if r.Cause != c.cause || r.Stdout.Delivered != c.stdout || r.Stderr.Delivered != c.stderr {
					t.Errorf("%s: cause %q (%s), delivered %d and %d", name, r.Cause, r.Error, r.Stdout.Delivered, r.Stderr.Delivered)
				}
			}
			if sha256.Sum256(out) != sha256.Sum256([]byte(plain.stdout)) || errs.String() != plain.stderr {
				t.Errorf("%d and %d bytes through a pipe, %d and %d into a buffer", len(out), errs.Len(), len(plain.stdout), len(plain.stderr))
			}
		})
	}
	// Both streams in one pipe: each of its own keeps its order.
	s := command("/usr/bin/python3", "-I", "-S", "-c", "import os\nfor i in range(2000): os.write(1, b'%04do' % i); os.write(2, b'%04de' % i)")
	s.Budget.MaxOutput = 0
	_, out := piped(t, s, readAll)
	for _, kind := range []string{"o", "e"} {
		n := 0
		for i := 0; i+5 <= len(out); i += 5 {
			if string(out[i+4]) == kind {
				n++
			}
		}
		if n != 2000 || len(out) != 20000 {
			t.Errorf("%d records of %s in %d bytes", n, kind, len(out))
		}
	}
}

// A reader that is stuck blocks the program, not the limits; one that goes away
// gives it SIGPIPE.
func TestReaderOfAPipeThatIsStuckOrGone(t *testing.T) {
	release := make(chan struct{})
	yes := command("/bin/sh", "-c", "while :; do echo yes; done")
	yes.Budget.MaxOutput = 0
	yes.Budget.WallClock = 300 * time.Millisecond
	start := time.Now()
	r, _ := piped(t, yes, func(f *os.File) []byte {
		select {
		case <-release:
		case <-time.After(3 * time.Second):
		}
		return nil
	})
	close(release)
	// StallTimeout is a second: it is not part of the run.
	if r.Cause != jail.CauseWall || r.WallNS > int64(time.Second) || r.Stdout.Dropped == 0 {
		t.Errorf("stuck: cause %q after %s, %+v", r.Cause, time.Duration(r.WallNS), r.Stdout)
	}
	if d := time.Since(start); d > 10*time.Second {
		t.Errorf("stuck: %s", d)
	}

	yes.Budget.WallClock = time.Minute
	r, got := piped(t, yes, func(f *os.File) []byte {
		b := make([]byte, 1000)
		n, _ := io.ReadFull(f, b)
		return b[:n]
	})
	if r.Cause != jail.CauseSignaled || r.Signal == nil || *r.Signal != 13 || string(got) != strings.Repeat("yes\n", 250) {
		t.Errorf("gone: cause %q, signal %v, %d bytes", r.Cause, r.Signal, len(got))
	}
}

// A deadline that the caller has set on its pipe ends the output, as it does where
// bytes are copied.
func TestDeadlineOfAPipe(t *testing.T) {
	for name, writer := range map[string]func(*os.File) io.Writer{
		"spliced": func(f *os.File) io.Writer { return f },
		"copied":  func(f *os.File) io.Writer { return struct{ io.Writer }{f} },
	} {
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close() // and nobody reads
		defer w.Close()
		if err := w.SetWriteDeadline(time.Now().Add(200 * time.Millisecond)); err != nil {
			t.Fatal(err)
		}
		s := command("/usr/bin/yes")
		s.Budget.MaxOutput = 0
		s.Stdout = writer(w)
		if r := run(t, s); r.Cause != jail.CauseSignaled || r.Signal == nil || *r.Signal != 13 {
			t.Errorf("%s: cause %q (%s), %+v", name, r.Cause, r.Error, r.Stdout)
		}
	}
}
