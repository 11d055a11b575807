package guesttest

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"testing"
	"time"

	"example.com/jail/wire"
)

// ResultID is what Run puts into Start.
const ResultID = "result-1"

// Limit is how long one guest may run before its test fails.
const Limit = 90 * time.Second

// Options says what to run. Argv is needed, everything else has a default.
type Options struct {
	// Argv is the interpreter with the guest.
	Argv []string
	// Program and Bindings go into Start.
	Program  string
	Bindings []wire.StartBinding
	// Start is sent raw instead of a Start frame unless nil. Nothing follows it.
	Start []byte
	// Handler sees each request in a goroutine of its own; nil answers with the
	// arguments of the request.
	Handler func(c *Calls, req wire.Request)
	// Env is the whole environment of the interpreter, Dir its directory.
	Env []string
	Dir string
	// Stdout replaces the captured stdout unless nil.
	Stdout *os.File
	// Nonblocking gives the guest channels that do not block.
	Nonblocking bool
}

// Outcome is everything that one guest did.
type Outcome struct {
	// Frames are the texts that came up the start channel, Result is the first.
	Frames []string
	Result wire.Result
	// Requests came up the call channel, in the order of arrival.
	Requests       []wire.Request
	Stdout, Stderr string
	ExitCode       int
	// Took is the time from the start of the process to its first Result.
	Took time.Duration
}

// Calls is the host's end of the call channel. It is safe for concurrent use.
type Calls struct {
	mu   sync.Mutex
	file *os.File
}

// Answer sends value as the successful response to req.
func (c *Calls) Answer(req wire.Request, value string) {
	c.Send(wire.Response{V: wire.Version, ID: req.ID, OK: true, Value: value})
}

// Fail sends the failure kind with text as the response to req.
func (c *Calls) Fail(req wire.Request, kind, text string) {
	c.Send(wire.Response{V: wire.Version, ID: req.ID, Kind: kind, Error: text})
}

// Send sends v as one frame.
func (c *Calls) Send(v any) { c.Raw(Frame(v)) }

// Raw sends data as it is. A guest that is gone is no error.
func (c *Calls) Raw(data []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, _ = c.file.Write(data)
}

// Close closes the call channel.
func (c *Calls) Close() {
	_ = c.file.Close()
}

// Frame returns v as one frame.
func Frame(v any) []byte {
	var text bytes.Buffer
	enc := json.NewEncoder(&text)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		panic(err)
	}
	return RawFrame(bytes.TrimSuffix(text.Bytes(), []byte("\n")))
}

// RawFrame returns text with its length in front.
func RawFrame(text []byte) []byte {
	return append(binary.BigEndian.AppendUint32(nil, uint32(len(text))), text...)
}

// ReadFrame reads one frame; io.EOF says that none began.
func ReadFrame(r io.Reader) ([]byte, error) {
	var header [4]byte
	if _, err := io.ReadFull(r, header[:]); err != nil {
		return nil, err
	}
	size := binary.BigEndian.Uint32(header[:])
	if size == 0 || size > wire.MaxFrameBytes {
		return nil, fmt.Errorf("guest sent a frame of %d bytes", size)
	}
	body := make([]byte, size)
	if _, err := io.ReadFull(r, body); err != nil {
		return nil, fmt.Errorf("guest sent a part of a frame: %w", err)
	}
	return body, nil
}

// pair returns the parent's end, pollable, and the child's.
func pair(t testing.TB) (parent, child *os.File) {
	t.Helper()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.SetNonblock(fds[0], true); err != nil {
		t.Fatal(err)
	}
	return os.NewFile(uintptr(fds[0]), "host"), os.NewFile(uintptr(fds[1]), "guest")
}

// Run runs one guest to the end of its process. It fails the test when the
// guest is still there after Limit or sends anything that is not a frame.
func Run(t testing.TB, o Options) Outcome {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), Limit)
	defer cancel()

	start, startChild := pair(t)
	calls, callsChild := pair(t)
	defer func() { _ = start.Close() }()
	defer func() { _ = calls.Close() }()

	if o.Nonblocking {
		for _, f := range []*os.File{startChild, callsChild} {
			if err := syscall.SetNonblock(int(f.Fd()), true); err != nil {
				t.Fatal(err)
			}
		}
	}
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, o.Argv[0], o.Argv[1:]...)
	cmd.ExtraFiles = []*os.File{startChild, callsChild} // fds 3 and 4
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if o.Stdout != nil {
		cmd.Stdout = o.Stdout
	}
	cmd.Env = append([]string{"PATH=/usr/local/bin:/usr/bin:/bin"}, o.Env...)
	cmd.Dir = o.Dir
	cmd.WaitDelay = 10 * time.Second
	began := time.Now()
	err := cmd.Start()
	_ = startChild.Close()
	_ = callsChild.Close()
	if err != nil {
		t.Fatal(err)
	}

	first := o.Start
	if first == nil {
		bindings := o.Bindings
		if bindings == nil {
			bindings = []wire.StartBinding{}
		}
		first = Frame(wire.Start{V: wire.Version, Program: o.Program, Bindings: bindings, ResultID: ResultID})
	}
	if _, err := start.Write(first); err != nil {
		t.Errorf("send Start: %v", err)
	}
	if o.Start != nil {
		if c, err := start.SyscallConn(); err == nil {
			_ = c.Control(func(fd uintptr) { _ = syscall.Shutdown(int(fd), syscall.SHUT_WR) })
		}
	}

	var out Outcome
	var readers, handlers sync.WaitGroup
	readers.Add(2)
	go func() {
		defer readers.Done()
		for {
			frame, err := ReadFrame(start)
			if err != nil {
				if !errors.Is(err, io.EOF) {
					t.Errorf("start channel: %v", err)
				}
				return
			}
			if len(out.Frames) == 0 {
				out.Took = time.Since(began)
			}
			out.Frames = append(out.Frames, string(frame))
		}
	}()
	go func() {
		defer readers.Done()
		host := &Calls{file: calls}
		for {
			frame, err := ReadFrame(calls)
			if err != nil {
				if !errors.Is(err, io.EOF) && !errors.Is(err, os.ErrClosed) && !errors.Is(err, syscall.ECONNRESET) {
					t.Errorf("call channel: %v", err)
				}
				return
			}
			req := decode[wire.Request](t, frame)
			out.Requests = append(out.Requests, req)
			if o.Handler == nil {
				host.Answer(req, req.Args)
				continue
			}
			handlers.Go(func() { o.Handler(host, req) })
		}
	}()
	err = cmd.Wait()
	if ctx.Err() != nil {
		t.Fatalf("guest still runs after %v\nstdout: %s\nstderr: %s", Limit, stdout.String(), stderr.String())
	}
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("wait: %v\nstderr: %s", err, stderr.String())
	}
	readers.Wait()
	handlers.Wait()
	out.ExitCode = cmd.ProcessState.ExitCode()
	out.Stdout, out.Stderr = stdout.String(), stderr.String()
	if len(out.Frames) > 0 {
		out.Result = decode[wire.Result](t, []byte(out.Frames[0]))
	}
	return out
}

// decode is strict about names: a guest sends no field that wire does not know.
func decode[T any](t testing.TB, text []byte) T {
	t.Helper()
	var v T
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&v); err != nil {
		t.Errorf("frame %.200q: %v", text, err)
	}
	if dec.More() {
		t.Errorf("frame %.200q: text after the object", text)
	}
	return v
}
