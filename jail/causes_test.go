package jail_test

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"syscall"
	"testing"
	"time"

	"example.com/jail/jail"
	"example.com/jail/wire/toolfail"
)

// Every cause of the report that a plain command can have, provoked for real
// (7.3, J12, D1). The program's own words never decide: a program that exits
// with the launcher's codes or kills itself is told apart from one that a limit
// ended.
func TestCauseOfACommand(t *testing.T) {
	for _, c := range []struct {
		name   string
		spec   func() jail.Spec
		cause  jail.Cause
		class  toolfail.Class
		code   int // -1: none
		signal int // 0: none
	}{
		{"exit 0", func() jail.Spec { return shell("exit 0") }, jail.CauseOK, "", 0, 0},
		{"exit 77", func() jail.Spec { return shell("exit 77") }, jail.CauseProgram, toolfail.Permanent, 77, 0},
		{"forged memory code", func() jail.Spec { return shell("exit 137") }, jail.CauseProgram, toolfail.Permanent, 137, 0},
		{"forged timeout code", func() jail.Spec { return shell("exit 124") }, jail.CauseProgram, toolfail.Permanent, 124, 0},
		{"forged launcher code", func() jail.Spec { return shell("exit 125") }, jail.CauseProgram, toolfail.Permanent, 125, 0},
		{"kills itself", func() jail.Spec { return shell("kill -9 $$") }, jail.CauseSignaled, toolfail.Unknown, -1, 9},
		{"raises SIGSYS itself", func() jail.Spec { return shell("kill -SYS $$") }, jail.CauseSignaled, toolfail.Unknown, -1, 31},
		{"segfaults", func() jail.Spec { return shell("kill -SEGV $$") }, jail.CauseSignaled, toolfail.Unknown, -1, 11},
		{"forges a report", func() jail.Spec {
			return shell(`echo '{"v":1,"cause":"memory"}'; echo '{"v":1,"cause":"ok"}' >&2; exit 3`)
		},
			jail.CauseProgram, toolfail.Permanent, 3, 0},
		{"memory hog", func() jail.Spec {
			s := command("/usr/bin/python3", "-c", "x=bytearray(1<<30)")
			s.Budget.MaxMemory = 64 << 20
			return s
		}, jail.CauseMemory, toolfail.Quota, -1, 0},
		{"child of a shell is the hog", func() jail.Spec {
			s := shell("/usr/bin/python3 -c 'x=bytearray(1<<30)'; echo survived; sleep 60")
			s.Budget.MaxMemory = 64 << 20
			return s
		}, jail.CauseMemory, toolfail.Quota, -1, 0},
		{"wall clock", func() jail.Spec {
			s := command("/bin/sleep", "60")
			s.Budget.WallClock = 300 * time.Millisecond
			return s
		}, jail.CauseWall, toolfail.Quota, -1, 0},
		{"cpu time", func() jail.Spec {
			s := shell("while :; do :; done")
			s.Budget.CPUTime = 300 * time.Millisecond
			return s
		}, jail.CauseCPUTime, toolfail.Quota, -1, 0},
		{"cpu time over many processes", func() jail.Spec {
			s := shell("for i in 1 2 3 4; do (while :; do :; done) & done; wait")
			s.Budget.CPUTime = 300 * time.Millisecond
			return s
		}, jail.CauseCPUTime, toolfail.Quota, -1, 0},
		{"output", func() jail.Spec {
			s := shell("while :; do echo yes; done")
			s.Budget.MaxOutput = 100000
			return s
		}, jail.CauseOutput, toolfail.Quota, -1, 0},
		{"too much output at the end", func() jail.Spec {
			s := shell("echo 123456789")
			s.Budget.MaxOutput = 9
			return s
		}, jail.CauseOutput, toolfail.Quota, -2, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := run(t, c.spec())
			if r.Cause != c.cause || r.Class != c.class {
				t.Fatalf("cause %q class %q, want %q %q (%s)", r.Cause, r.Class, c.cause, c.class, r.Error)
			}
			switch {
			case c.code == -1 && r.ExitCode != nil:
				t.Errorf("exit code %d, want none", *r.ExitCode)
			case c.code >= 0 && (r.ExitCode == nil || *r.ExitCode != c.code):
				t.Errorf("exit code %v, want %d", r.ExitCode, c.code)
			}
			if c.signal != 0 && (r.Signal == nil || *r.Signal != c.signal) {
				t.Errorf("signal %v, want %d", r.Signal, c.signal)
			}
			if item, ok := itemOf[c.cause]; ok {
				prove(t, r.Report, item)
			}
			if strings.Contains(r.stdout, "survived") {
				t.Error("the rest of the jail outlived its first OOM kill")
			}
		})
	}
}

// itemOf is the budget item that a cause proves.
var itemOf = map[jail.Cause]jail.Item{
	jail.CauseMemory: jail.ItemMemory, jail.CauseWall: jail.ItemWall, jail.CauseCPUTime: jail.ItemCPUTime, jail.CauseOutput: jail.ItemOutput,
}

func TestMemoryIsBoundedAndEnoughIsEnough(t *testing.T) {
	hog := command("/usr/bin/python3", "-c", "x=bytearray(1<<30)")
	hog.Budget.MaxMemory = 64 << 20
	r := run(t, hog)
	if r.Cause != jail.CauseMemory || r.Memory.Scope != "self" || r.Memory.PeakBytes > 64<<20 || r.Memory.OOMKills < 1 {
		t.Errorf("64 MiB: cause %q, memory %+v", r.Cause, r.Memory)
	}
	hog.Budget.MaxMemory = 1536 << 20
	r = run(t, hog)
	if r.Cause != jail.CauseOK || r.Memory.PeakBytes < 1<<30 {
		t.Errorf("1536 MiB: cause %q, memory %+v", r.Cause, r.Memory)
	}
}

// J11: the caller's cancel is its own cause, whether by context or by Kill.
func TestCancel(t *testing.T) {
	for _, how := range []string{"context", "kill"} {
		t.Run(how, func(t *testing.T) {
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			j, err := jail.Start(ctx, command("/bin/sleep", "60"))
			if err != nil {
				t.Fatal(err)
			}
			if how == "context" {
				cancel()
			} else {
				j.Kill()
				j.Kill()
			}
			r, err := j.Wait()
			if err != nil || r.Cause != jail.CauseCanceled || r.Class != toolfail.Canceled {
				t.Errorf("cause %q class %q, %v", r.Cause, r.Class, err)
			}
			if again, err := j.Wait(); !errors.Is(err, jail.ErrWaited) || again != r {
				t.Errorf("second Wait: %v, same report %t", err, again == r)
			}
		})
	}
}

func TestCanceledBeforeStart(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	r, err := jail.Run(ctx, command("/bin/true"))
	if !errors.Is(err, context.Canceled) || r.Cause != jail.CauseCanceled {
		t.Errorf("%v, cause %q", err, r.Cause)
	}
}

// A spec that no host can run is refused with every fault of it, and nothing is
// started.
func TestRefusedSpecs(t *testing.T) {
	for _, c := range []struct {
		name  string
		edit  func(*jail.Spec)
		items []string
	}{
		{"no program", func(s *jail.Spec) { s.Args = nil }, []string{"args"}},
		{"negative memory", func(s *jail.Spec) { s.Budget.MaxMemory = -1 }, []string{"max_memory"}},
		{"several at once", func(s *jail.Spec) {
			s.Budget.MaxMemory, s.Budget.WallClock, s.Budget.MaxPIDs, s.Dir = -1, -time.Second, -5, "relative"
		}, []string{"workdir", "max_memory", "wall_clock", "max_pids"}},
		{"unknown item given up", func(s *jail.Spec) { s.AllowUnenforced = []jail.Item{"memory"} }, []string{"allow_unenforced"}},
		{"bad environment", func(s *jail.Spec) { s.Env = []string{"NOVALUE"} }, []string{"env"}},
		{"NUL in an argument", func(s *jail.Spec) { s.Args = []string{"/bin/echo", "a\x00b"} }, []string{"args"}},
		{"program that is no UTF-8", func(s *jail.Spec) { s.Script = &jail.Script{Program: "x = '\xff'"} }, []string{"program"}},
		{"user id that the launcher hands out", func(s *jail.Spec) { s.User = &jail.User{UID: 0x60000001} }, []string{"user"}},
		{"arguments too large", func(s *jail.Spec) { s.Args = []string{"/bin/echo", strings.Repeat("x", 1<<20)} }, []string{"args"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := command("/bin/true")
			c.edit(&s)
			r, err := jail.Run(context.Background(), s)
			var refused *jail.RefusedError
			if !errors.As(err, &refused) {
				t.Fatalf("error %v, want a refusal", err)
			}
			var items []string
			for _, i := range refused.Items {
				items = append(items, i.Item)
				if i.Reason == "" || i.Fix == "" {
					t.Errorf("%s: reason %q, fix %q", i.Item, i.Reason, i.Fix)
				}
			}
			if strings.Join(items, " ") != strings.Join(c.items, " ") {
				t.Errorf("items %v, want %v", items, c.items)
			}
			if r.Cause != jail.CauseRefused || r.Class != toolfail.Denied || len(r.Refused) != len(c.items) || r.ExitCode != nil {
				t.Errorf("report %+v", r)
			}
		})
	}
}

// What cannot be set up is told with its stage and errno, and has no exit code
// (a failed exec is not an exit).
func TestSetupFailures(t *testing.T) {
	for _, c := range []struct {
		name  string
		edit  func(*jail.Spec)
		stage string
		errno syscall.Errno
	}{
		{"program not found", func(s *jail.Spec) { s.Args = []string{"no-such-program"} }, "exec", syscall.ENOENT},
		{"path not found", func(s *jail.Spec) { s.Args = []string{"/no/such/program"} }, "exec", syscall.ENOENT},
		{"directory", func(s *jail.Spec) { s.Args = []string{"/usr"} }, "exec", syscall.EACCES},
		{"not executable", func(s *jail.Spec) { s.Args = []string{"/etc/passwd"} }, "exec", syscall.EACCES},
		{"empty PATH element is not the working directory", func(s *jail.Spec) {
			s.Args, s.Env = []string{"prog"}, []string{"PATH=::"}
		}, "exec", syscall.ENOENT},
		{"no such working directory", func(s *jail.Spec) { s.Dir = "/no/such/dir" }, "workdir", syscall.ENOENT},
		{"working directory is a file", func(s *jail.Spec) { s.Dir = "/etc/passwd" }, "workdir", syscall.ENOTDIR},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := command("/bin/true")
			c.edit(&s)
			r, err := jail.Run(context.Background(), s)
			var setup *jail.SetupError
			if !errors.As(err, &setup) {
				t.Fatalf("error %v, want a set-up error", err)
			}
			if setup.Stage != c.stage || !errors.Is(err, c.errno) {
				t.Errorf("stage %q, error %v; want %q, %v", setup.Stage, err, c.stage, c.errno)
			}
			if r.Cause != jail.CauseSetup || r.ExitCode != nil || r.Setup == nil || r.Setup.Stage != c.stage || r.Setup.Errno != int(c.errno) {
				t.Errorf("report: cause %q, exit code %v, setup %+v", r.Cause, r.ExitCode, r.Setup)
			}
		})
	}
}

// C12, L30, L32: exactly the cap is delivered, everything is counted, both
// streams share the budget; the marker is the launcher's own and no part of them.
func TestOutputCapIsExact(t *testing.T) {
	s := shell("while :; do echo out; echo err >&2; done")
	s.Budget.MaxOutput = 54321
	r := run(t, s)
	if r.Cause != jail.CauseOutput {
		t.Fatalf("cause %q", r.Cause)
	}
	if n := len(r.stdout) + len(r.stderr); n != 54321 || r.Stdout.Delivered+r.Stderr.Delivered != 54321 {
		t.Errorf("delivered %d bytes, report says %d+%d, want 54321", n, r.Stdout.Delivered, r.Stderr.Delivered)
	}
	if r.Error != jail.TruncationMarker(54321) || r.Stdout.Dropped+r.Stderr.Dropped == 0 {
		t.Errorf("error %q, dropped %d+%d", r.Error, r.Stdout.Dropped, r.Stderr.Dropped)
	}
	if !strings.HasPrefix(r.stdout, "out\nout\n") {
		t.Errorf("stdout starts with %.20q", r.stdout)
	}
}

// Output exactly at the cap is no fault.
func TestOutputAtTheCapIsOK(t *testing.T) {
	s := shell("head -c 5000 /dev/zero")
	s.Budget.MaxOutput = 5000
	if r := run(t, s); r.Cause != jail.CauseOK || r.Stdout.Delivered != 5000 {
		t.Errorf("cause %q, stdout %+v", r.Cause, r.Stdout)
	}
}

// C14: a consumer that takes nothing makes the program block and keeps neither
// the wall clock nor the report from coming.
func TestStuckReaderDoesNotHoldTheWallClock(t *testing.T) {
	s := shell("while :; do echo yes; done")
	s.Budget.WallClock = 300 * time.Millisecond
	s.Budget.MaxOutput = 0
	w := &stuckWriter{free: make(chan struct{})}
	s.Stdout = w
	r := run(t, s)
	close(w.free)
	if r.Cause != jail.CauseWall {
		t.Errorf("cause %q", r.Cause)
	}
	if r.Stdout.Dropped == 0 || r.Stdout.Delivered != 0 {
		t.Errorf("stdout %+v", r.Stdout)
	}
	if r.elapsed > 10*time.Second {
		t.Errorf("took %s", r.elapsed)
	}
}

type stuckWriter struct{ free chan struct{} }

func (w *stuckWriter) Write(p []byte) (int, error) { <-w.free; return 0, errors.New("freed") }

// A reader that goes away ends the program as in any pipeline.
func TestConsumerGoneGivesSIGPIPE(t *testing.T) {
	s := shell("while :; do echo yes; done")
	s.Stdout = failingWriter{}
	r := run(t, s)
	if r.Cause != jail.CauseSignaled || *r.Signal != int(syscall.SIGPIPE) {
		t.Errorf("cause %q, signal %v", r.Cause, r.Signal)
	}
}

type failingWriter struct{}

func (failingWriter) Write([]byte) (int, error) { return 0, syscall.EPIPE }

func TestStdin(t *testing.T) {
	s := command("/bin/cat")
	s.Stdin = bytes.NewReader(bytes.Repeat([]byte("0123456789abcdef"), 1<<16))
	if r := run(t, s); r.Cause != jail.CauseOK || len(r.stdout) != 1<<20 {
		t.Errorf("cause %q, %d bytes", r.Cause, len(r.stdout))
	}
	if r := run(t, command("/bin/cat")); r.Cause != jail.CauseOK || r.stdout != "" {
		t.Errorf("without input: cause %q, output %q", r.Cause, r.stdout)
	}
}

// A program that ends before it has read its input is no fault of anybody.
func TestStdinNotRead(t *testing.T) {
	s := command("/bin/true")
	s.Stdin = endless{}
	if r := run(t, s); r.Cause != jail.CauseOK {
		t.Errorf("cause %q: %s", r.Cause, r.Error)
	}
}

type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }
