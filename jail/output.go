package jail

import (
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// StallTimeout is how long a writer of a Spec may take nothing after the
// program's end before the rest of the output is dropped.
const StallTimeout = time.Second

// TruncationMarker is the line that tells a person that the output limit was
// reached (L30). It is never part of the program's streams.
func TruncationMarker(limit int64) string {
	return fmt.Sprintf("[jail] output truncated at %d bytes", limit)
}

// allowance is the output budget that stdout and stderr share.
type allowance struct {
	mu      sync.Mutex
	limited bool
	left    int64
	// full is closed when the program has written more than it may.
	full chan struct{}
	over bool
}

func newAllowance(limit int64) *allowance {
	return &allowance{limited: limit > 0, left: limit, full: make(chan struct{})}
}

// take returns how many of n bytes may still be delivered.
func (a *allowance) take(n int) int {
	if !a.limited {
		return n
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if int64(n) <= a.left {
		a.left -= int64(n)
		return n
	}
	n = int(a.left)
	a.left = 0
	if !a.over {
		a.over = true
		close(a.full)
	}
	return n
}

// stream carries one of the program's outputs to its writer, counts every byte
// and never holds more than one buffer.
type stream struct {
	from  *os.File
	to    io.Writer
	allow *allowance

	seen, delivered atomic.Int64
	// progress is the time of the last byte taken by the writer.
	progress atomic.Int64
	done     chan struct{}

	grown bool // of the copying goroutine
}

func newStream(from *os.File, to io.Writer, allow *allowance) *stream {
	if to == nil {
		to = io.Discard
	}
	s := &stream{from: from, to: to, allow: allow, done: make(chan struct{})}
	s.progress.Store(time.Now().UnixNano())
	return s
}

// Sizes of a pipe: at first (pipe(7)), and of one that is made full use of.
const (
	pipeSize  = 64 << 10
	largePipe = 1 << 20
)

const outputBuffer = 128 << 10

var outputBuffers = sync.Pool{New: func() any { b := make([]byte, outputBuffer); return &b }}

// copy runs until the program's end of the pipe is closed or nobody takes its
// output any more; then the program gets SIGPIPE, as in any pipeline.
func (s *stream) copy() {
	defer close(s.done)
	defer s.from.Close()
	if to := spliceable(s.to); to != nil {
		s.splice(to)
		return
	}
	buf := outputBuffers.Get().(*[]byte)
	defer outputBuffers.Put(buf)
	for {
		n, err := s.from.Read(*buf)
		if n > 0 {
			s.grow(n)
			s.seen.Add(int64(n))
			allowed := s.allow.take(n)
			if allowed > 0 && !s.deliver((*buf)[:allowed]) {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

func (s *stream) deliver(b []byte) bool {
	n, err := s.to.Write(b)
	n = max(0, min(n, len(b)))
	s.took(n)
	return err == nil && n == len(b)
}

func (s *stream) took(n int) {
	s.delivered.Add(int64(n))
	s.progress.Store(time.Now().UnixNano())
}

// grow makes the pipe larger, once the program is seen to fill it: fewer
// switches between writer and reader. A kernel that gives no more is content
// with what it gave.
func (s *stream) grow(n int) {
	if !s.grown && n >= pipeSize {
		s.grown = true
		_, _ = unix.FcntlInt(s.from.Fd(), unix.F_SETPIPE_SZ, largePipe)
	}
}

// finish waits until everything that the dead program wrote is delivered. A
// writer that takes nothing for StallTimeout is given up: it keeps its
// goroutine, not the run.
func (s *stream) finish() {
	s.progress.Store(time.Now().UnixNano())
	for {
		idle := time.Since(time.Unix(0, s.progress.Load()))
		if idle >= StallTimeout {
			return
		}
		t := time.NewTimer(StallTimeout - idle)
		select {
		case <-s.done:
			t.Stop()
			return
		case <-t.C:
		}
	}
}

// usage reads the counters. What was not delivered counts as dropped, what a
// given-up writer still holds included, so that seen is always accounted for.
func (s *stream) usage() StreamUsage {
	u := StreamUsage{Seen: s.seen.Load(), Delivered: s.delivered.Load()}
	u.Dropped = u.Seen - u.Delivered
	return u
}

// feed copies the caller's input into the program and closes it at the end. The
// program may end first: that is no error of anybody.
func feed(to *os.File, from io.Reader) {
	defer to.Close()
	_, _ = io.Copy(struct{ io.Writer }{to}, from)
}
