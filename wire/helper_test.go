package wire

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"
)

// patience is how long a test waits for what must happen. It is a bound for a
// hang, not a measure.
const patience = 20 * time.Second

// helpers are the programs that this test binary becomes when WIRE_HELPER names
// one. Each has the call channel at descriptor CallFD and the start channel at
// StartFD. What a helper returns is its exit code.
var helpers = map[string]func() int{}

const helperEnv = "WIRE_HELPER"

func TestMain(m *testing.M) {
	if name := os.Getenv(helperEnv); name != "" {
		os.Exit(helpers[name]())
	}
	os.Exit(m.Run())
}

// helperProcess starts the helper name as a process of its own, with start and
// call as its two channels; either may be nil. The parent's copies are closed.
func helperProcess(tb testing.TB, name string, start, call *os.File, env ...string) *exec.Cmd {
	tb.Helper()
	if helpers[name] == nil {
		tb.Fatalf("no helper %q", name)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append([]string{helperEnv + "=" + name}, env...)
	cmd.Stderr = os.Stderr
	null, err := os.Open(os.DevNull)
	if err != nil {
		tb.Fatal(err)
	}
	defer null.Close()
	cmd.ExtraFiles = []*os.File{null, null}
	for i, f := range []*os.File{start, call} {
		if f != nil {
			cmd.ExtraFiles[i] = f
			defer f.Close()
		}
	}
	if err := cmd.Start(); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return cmd
}

// nonblockingPair returns a socket pair with both ends polled, closed at the end
// of the test.
func nonblockingPair(tb testing.TB) (parent, child *os.File) {
	tb.Helper()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC|syscall.SOCK_NONBLOCK, 0)
	if err != nil {
		tb.Fatal(err)
	}
	parent, child = os.NewFile(uintptr(fds[0]), "parent"), os.NewFile(uintptr(fds[1]), "child")
	tb.Cleanup(func() {
		parent.Close()
		child.Close()
	})
	return parent, child
}

// transports runs f over every kind of connection: the real one, net.Pipe, and
// one without deadlines.
func transports(t *testing.T, f func(t *testing.T, parent, child io.ReadWriteCloser)) {
	t.Run("socketpair", func(t *testing.T) {
		leaks(t)
		p, c := nonblockingPair(t)
		f(t, p, c)
	})
	t.Run("net.Pipe", func(t *testing.T) {
		leaks(t)
		p, c := net.Pipe()
		t.Cleanup(func() { p.Close(); c.Close() })
		f(t, p, c)
	})
	t.Run("no deadlines", func(t *testing.T) {
		leaks(t)
		p, c := net.Pipe()
		t.Cleanup(func() { p.Close(); c.Close() })
		f(t, plain{p, p}, plain{c, c})
	})
}

// plain hides all methods of a connection but three.
type plain struct {
	io.ReadWriter
	io.Closer
}

// bare hides Close as well.
type bare struct{ io.ReadWriter }

// leaks fails the test if it leaves goroutines of this package or descriptors.
// Call it before anything that has a cleanup of its own.
func leaks(t *testing.T) {
	t.Helper()
	before := openFDs(t)
	t.Cleanup(func() {
		deadline := time.Now().Add(patience)
		for {
			stacks, fds := ownGoroutines(), openFDs(t)
			if len(stacks) == 0 && fds == before {
				return
			}
			if time.Now().After(deadline) {
				t.Errorf("%d descriptors before, %d after; goroutines left:\n%s", before, fds, strings.Join(stacks, "\n\n"))
				return
			}
			time.Sleep(time.Millisecond)
		}
	})
}

func openFDs(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// ownGoroutines returns the stacks of goroutines in this package that are not
// tests themselves.
func ownGoroutines() (own []string) {
	buf := make([]byte, 1<<20)
	buf = buf[:runtime.Stack(buf, true)]
	for _, g := range strings.Split(string(buf), "\n\n") {
		if strings.Contains(g, "/wire.") && !strings.Contains(g, "testing.tRunner") && !strings.Contains(g, "testing.(*M)") &&
			!strings.Contains(g, "wire.TestMain") {
			own = append(own, g)
		}
	}
	return own
}

// mustReturn fails the whole run with all stacks if f hangs.
func mustReturn[T any](tb testing.TB, what string, f func() T) T {
	tb.Helper()
	done := make(chan T, 1)
	go func() { done <- f() }()
	select {
	case v := <-done:
		return v
	case <-time.After(patience):
		buf := make([]byte, 1<<20)
		panic(fmt.Sprintf("%s hangs\n\n%s", what, buf[:runtime.Stack(buf, true)]))
	}
}

// eventually waits for a condition.
func eventually(tb testing.TB, what string, cond func() bool) {
	tb.Helper()
	mustReturn(tb, what, func() bool {
		for !cond() {
			time.Sleep(time.Millisecond)
		}
		return true
	})
}

// served is a running Server and what its child has.
type served struct {
	*Server
	t      testing.TB
	child  io.ReadWriteCloser
	cancel context.CancelFunc
	done   chan error
	got    bool
	err    error
}

// serve starts a Server on parent.
func serve(tb testing.TB, parent, child io.ReadWriteCloser, h Handler, opts ...ServerOption) *served {
	tb.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	s := &served{Server: NewServer(parent, h, opts...), t: tb, child: child, cancel: cancel, done: make(chan error, 1)}
	go func() { s.done <- s.Serve(ctx) }()
	tb.Cleanup(func() {
		cancel()
		s.wait()
	})
	return s
}

// wait returns what Serve returned.
func (s *served) wait() error {
	s.t.Helper()
	if !s.got {
		s.err = mustReturn(s.t, "Serve", func() error { return <-s.done })
		s.got = true
	}
	return s.err
}

// end closes the child's end and wants a clean end of Serve.
func (s *served) end() {
	s.t.Helper()
	s.child.Close()
	if err := s.wait(); err != nil {
		s.t.Errorf("Serve = %v, want nil after a clean end", err)
	}
}

// send writes raw frames as the child.
func (s *served) send(texts ...string) {
	s.t.Helper()
	for _, text := range texts {
		if err := mustReturn(s.t, "write of a frame", func() error { return WriteFrame(s.child, []byte(text)) }); err != nil {
			s.t.Fatalf("write %.80q: %v", text, err)
		}
	}
}

// receive reads one response as the child.
func (s *served) receive() Response {
	s.t.Helper()
	type out struct {
		r   Response
		err error
	}
	o := mustReturn(s.t, "read of a response", func() out {
		text, err := ReadFrame(s.child, nil)
		if err != nil {
			return out{err: err}
		}
		r, err := decodeResponse(text)
		return out{r, err}
	})
	if o.err != nil {
		s.t.Fatalf("read response: %v", o.err)
	}
	return o.r
}

// callText is a request with the id and the args, as text.
func callText(id, args string) string {
	frame, err := appendRequest(nil, &Request{ID: id, Tool: "t", Args: args})
	if err != nil {
		panic(err)
	}
	return string(frame[headerBytes:])
}

func echo(_ context.Context, r Request) (Response, error) {
	return Response{OK: true, Value: r.Args}, nil
}

// protocolError wants a *ProtocolError for reason and returns it.
func protocolError(tb testing.TB, err, reason error) *ProtocolError {
	tb.Helper()
	var p *ProtocolError
	if !errors.As(err, &p) || !errors.Is(err, reason) {
		tb.Fatalf("got %v, want a protocol error: %v", err, reason)
	}
	return p
}
