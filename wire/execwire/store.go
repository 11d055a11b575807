package execwire

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"sync"
	"time"
)

// Error is a failure that has a name on the wire. Compare with errors.Is.
type Error struct {
	// Code is the name, such as "EEXEC_BUSY".
	Code string
	text string
}

func (e *Error) Error() string { return e.text }

var (
	// ErrBusy: the execution still runs, or it has a subscriber already.
	ErrBusy = &Error{"EEXEC_BUSY", "execution is busy"}
	// ErrNotFound: there is no such execution, or no longer.
	ErrNotFound = &Error{"ENOENT", "no such execution"}
	// ErrTruncated: the execution is known, but its log was dropped because it
	// grew past its bound.
	ErrTruncated = &Error{"ELOG_TRUNCATED", "log of the execution was dropped"}
	// ErrLost: the execution that the caller means belonged to another process
	// of the launcher, or to an earlier use of its id.
	ErrLost = &Error{"EEXEC_LOST", "execution was lost"}
)

const (
	// MaxLog bounds the log of one execution in bytes of its lines (E23).
	MaxLog = 16 << 20
	// Retention is how long the log of an ended execution is kept (E24).
	Retention = 5 * time.Minute
	// sweepEvery is how often Run looks for logs that are past it.
	sweepEvery = 30 * time.Second
	// window is how far a subscriber may be behind, in bytes of lines, before it
	// holds back the execution.
	window = 64 << 10
)

// Store keeps the logs of the executions of one process. Its methods may be
// called concurrently. It does not survive the process (E24): the names of its
// executions are bound to Runtime.
type Store struct {
	runtime string
	now     func() time.Time

	mu   sync.Mutex
	logs map[string]*Log
}

// NewStore makes an empty store with a new runtime name.
func NewStore() *Store {
	return &Store{runtime: rand.Text(), now: time.Now, logs: make(map[string]*Log)}
}

// Runtime names this store. Callers keep it with the id of an execution and give
// both to Attach.
func (s *Store) Runtime() string { return s.runtime }

// Start makes the log of a new execution. An id that is still running is
// ErrBusy. The log of an ended execution with that id is disposed of (E21). The
// id is UTF-8, 1 to 128 bytes.
func (s *Store) Start(id string, opts Options) (*Log, error) {
	f, err := newFramer(id, opts.Text)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if old := s.logs[id]; old != nil {
		if !old.over() {
			return nil, fmt.Errorf("start %q: %w", id, ErrBusy)
		}
		old.dispose()
	}
	l := &Log{id: id, now: s.now, f: f, base: 1}
	l.changed.L = &l.mu
	s.logs[id] = l
	return l, nil
}

// Where says what a subscriber gets first.
type Where int64

const (
	// Full is everything from the start. It is the zero value.
	Full Where = 0
	// Tail is only what happens from now on.
	Tail Where = -1
)

// After is everything after the event with that seq (E18). A seq below 0 is an
// error of Attach.
func After(seq int64) Where {
	if seq < 0 {
		return -2
	}
	return Where(seq)
}

// Attach subscribes to an execution: first to what is logged after where, then
// to what follows, without a gap. The caller must close the Stream. An execution
// has one subscriber at a time.
//
// Errors: ErrNotFound for an unknown id; ErrLost if runtime is neither empty nor
// this store's, or if where lies beyond the last event, so that the caller means
// another use of the id; ErrBusy with a subscriber present; ErrTruncated if an
// event after where is no longer there.
func (s *Store) Attach(runtime, id string, where Where) (*Stream, error) {
	if runtime != "" && runtime != s.runtime {
		return nil, fmt.Errorf("attach to %q of runtime %q: %w", id, runtime, ErrLost)
	}
	s.mu.Lock()
	l := s.logs[id]
	s.mu.Unlock()
	if l == nil {
		return nil, fmt.Errorf("attach to %q: %w", id, ErrNotFound)
	}
	st, err := l.attach(where)
	if err != nil {
		return nil, fmt.Errorf("attach to %q: %w", id, err)
	}
	return st, nil
}

// Dispose forgets an execution at once, running or not (E24). Its subscriber and
// its producer get ErrNotFound from their next call. An unknown id is
// ErrNotFound.
func (s *Store) Dispose(id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.logs[id]
	if l == nil {
		return fmt.Errorf("dispose of %q: %w", id, ErrNotFound)
	}
	l.dispose()
	delete(s.logs, id)
	return nil
}

// Run disposes of logs whose executions ended more than Retention ago, every 30
// seconds until ctx ends, and returns the error of ctx. A store whose Run is not
// called keeps them until Dispose or Start.
func (s *Store) Run(ctx context.Context) error {
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
			s.sweep()
		}
	}
}

func (s *Store) sweep() {
	limit := s.now().Add(-Retention)
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, l := range s.logs {
		if l.endedBefore(limit) {
			l.dispose()
			delete(s.logs, id)
		}
	}
}

// Log records one execution. Its methods may be called concurrently.
type Log struct {
	id  string
	now func() time.Time

	mu      sync.Mutex
	changed sync.Cond // a line was added or taken, or an end came
	f       *framer
	// lines are the events from seq base on. Once the log is truncated, only
	// those that the subscriber has not taken remain.
	lines     [][]byte
	base      int64
	size      int // bytes of lines
	truncated bool
	sub       *Stream
	err       error     // of Abort or dispose
	gone      bool      // disposed of
	end       time.Time // when the exit event or err came
}

// Output records p as output of the stream name, Stdout or Stderr, in events of
// at most 64 KiB each, and gives them to the subscriber. If there is one and it
// is more than 64 KiB behind, Output waits until it has caught up or left, or ctx
// ends; then it returns the error of ctx although p is recorded. Callers read
// the program's pipes one piece at a time, so a program that writes faster than
// the subscriber reads is held back (E27).
//
// A log past MaxLog is dropped as a whole: from then on it cannot be replayed,
// while the subscriber goes on without a gap (E23). Output returns ErrEnded
// after Exit, ErrNotFound after Dispose, and the error of Abort.
func (l *Log) Output(ctx context.Context, name string, p []byte) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return l.err
	}
	if err := l.f.output(name, p, l.add); err != nil {
		return err
	}
	if !l.behind() {
		return nil
	}
	defer l.wakeOn(ctx)()
	for l.behind() {
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("wait for the subscriber of %q: %w", l.id, err)
		}
		l.changed.Wait()
	}
	return nil
}

// Exit records the exit event, the last one. It never waits. A second call
// returns ErrEnded (E25). If extra.Usage cannot be encoded or has more than
// 1 MiB, the event goes without it and the error says so.
func (l *Log) Exit(code int, extra Extra) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return l.err
	}
	err := l.f.exit(code, extra, l.add)
	if l.end.IsZero() {
		l.end = l.now()
	}
	return err
}

// Abort ends the execution without an exit event, because there is none or it
// could not be made: the subscriber gets what was recorded, then err (E30). It
// does nothing after Exit.
func (l *Log) Abort(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.f.ended || l.err != nil {
		return
	}
	if err == nil {
		err = errors.New("aborted")
	}
	l.err = fmt.Errorf("execution %q: %w", l.id, err)
	l.end = l.now()
	l.changed.Broadcast()
}

// Heartbeat gives the subscriber a heartbeat as soon as it has taken everything
// else. It is not recorded (C16); a later one replaces it. Without a subscriber,
// and after the end, it does nothing.
func (l *Log) Heartbeat(beat Beat) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.sub == nil || l.err != nil || l.f.ended {
		return
	}
	l.sub.beat, l.sub.hasBeat = beat, true
	l.changed.Broadcast()
}

// add records a line.
func (l *Log) add(line []byte) error {
	l.lines = append(l.lines, append(make([]byte, 0, len(line)), line...))
	l.size += len(line)
	if l.size > MaxLog {
		l.truncated = true
	}
	l.trim()
	l.changed.Broadcast()
	return nil
}

// trim drops, once the log is truncated, what the subscriber does not need.
func (l *Log) trim() {
	if !l.truncated {
		return
	}
	drop := len(l.lines)
	if l.sub != nil {
		drop = int(l.sub.next - l.base)
		l.sub.taken = 0
	}
	for i, line := range l.lines[:drop] {
		l.size -= len(line)
		l.lines[i] = nil
	}
	l.lines = l.lines[drop:]
	l.base += int64(drop)
}

// behind tells whether the subscriber holds back the execution.
func (l *Log) behind() bool {
	return l.sub != nil && l.err == nil && l.size-l.sub.taken > window
}

func (l *Log) over() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return !l.end.IsZero()
}

func (l *Log) endedBefore(t time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return !l.end.IsZero() && l.end.Before(t)
}

func (l *Log) dispose() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.err = fmt.Errorf("execution %q: %w", l.id, ErrNotFound)
	l.gone = true
	l.lines = nil
	if l.end.IsZero() {
		l.end = l.now()
	}
	l.changed.Broadcast()
}

func (l *Log) attach(where Where) (*Stream, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.gone {
		return nil, ErrNotFound
	}
	next := int64(where) + 1
	switch {
	case l.sub != nil:
		return nil, ErrBusy
	case where < Tail:
		return nil, errors.New("seq is below 0")
	case where == Tail:
		next = l.f.seq + 1
	case int64(where) > l.f.seq:
		return nil, fmt.Errorf("seq %d is beyond the last, %d: %w", where, l.f.seq, ErrLost)
	case next < l.base:
		return nil, ErrTruncated
	}
	l.sub = &Stream{l: l, next: next}
	for _, line := range l.lines[:next-l.base] {
		l.sub.taken += len(line)
	}
	return l.sub, nil
}

// wakeOn wakes the waiters when ctx ends; the result undoes it.
func (l *Log) wakeOn(ctx context.Context) (stop func() bool) {
	return context.AfterFunc(ctx, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.changed.Broadcast()
	})
}

// Stream is the one subscription to an execution.
type Stream struct {
	l    *Log
	next int64 // seq of the event to take next
	// taken is the size of those lines of the log that come before next.
	taken   int
	beat    Beat
	hasBeat bool
	closed  bool
}

// Next waits for the next line, with its newline, and takes it. The line stays
// valid and must not be changed. After the exit event Next returns io.EOF; after
// Dispose, ErrNotFound; after Abort, its error once everything recorded was
// taken; after Close, os.ErrClosed; and the error of ctx if that ends first. One
// goroutine at a time may call it.
func (s *Stream) Next(ctx context.Context) ([]byte, error) {
	l := s.l
	l.mu.Lock()
	defer l.mu.Unlock()
	var stop func() bool
	for {
		switch {
		case s.closed:
			return nil, os.ErrClosed
		case l.gone:
			return nil, l.err
		case s.next <= l.f.seq:
			line := l.lines[s.next-l.base]
			s.next++
			s.taken += len(line)
			l.trim()
			l.changed.Broadcast()
			return line, nil
		case l.err != nil:
			return nil, l.err
		case l.f.ended:
			return nil, io.EOF
		case s.hasBeat:
			s.hasBeat = false
			// Made only now, so that its seq is that of the last line taken.
			return slices.Clone(l.f.heartbeat(s.beat)), nil
		case ctx.Err() != nil:
			return nil, ctx.Err()
		}
		if stop == nil {
			stop = l.wakeOn(ctx)
			defer stop()
		}
		l.changed.Wait()
	}
}

// Close gives up the subscription: another may attach, and output that waits
// for this one goes on (E20). It wakes a Next that waits. A second Close does
// nothing.
func (s *Stream) Close() {
	l := s.l
	l.mu.Lock()
	defer l.mu.Unlock()
	if s.closed {
		return
	}
	s.closed = true
	l.sub = nil
	l.trim()
	l.changed.Broadcast()
}
