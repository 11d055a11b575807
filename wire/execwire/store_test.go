package execwire

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func start(t *testing.T, s *Store, id string) *Log {
	t.Helper()
	l, err := s.Start(id, Options{Text: true})
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func attach(t *testing.T, s *Store, id string, where Where) *Stream {
	t.Helper()
	st, err := s.Attach(s.Runtime(), id, where)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(st.Close)
	return st
}

func put(t *testing.T, l *Log, text string) {
	t.Helper()
	if err := l.Output(t.Context(), Stdout, []byte(text)); err != nil {
		t.Fatal(err)
	}
}

// take reads the stream to its end and gives the events and what ended it.
func take(t *testing.T, st *Stream) ([]Event, error) {
	t.Helper()
	var lines bytes.Buffer
	for {
		line, err := st.Next(t.Context())
		if err != nil {
			events, decErr := decodeAll(&lines)
			if decErr != nil && decErr != io.ErrUnexpectedEOF {
				t.Fatal(decErr)
			}
			return events, err
		}
		lines.Write(line)
	}
}

// next reads one event.
func next(t *testing.T, st *Stream) Event {
	t.Helper()
	line, err := st.Next(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	e, err := NewDecoder(bytes.NewReader(line)).Next()
	if err != nil {
		t.Fatalf("%q: %v", line, err)
	}
	return e
}

func checkSeqs(t *testing.T, events []Event, from, to int64) {
	t.Helper()
	if len(events) != int(to-from+1) {
		t.Fatalf("%d events, want seq %d to %d", len(events), from, to)
	}
	for i, e := range events {
		if e.Seq != from+int64(i) {
			t.Fatalf("event %d has seq %d, want %d", i, e.Seq, from+int64(i))
		}
	}
}

// E18, E19: replay from the start, after an event and from now on; then live.
func TestReplayThenLive(t *testing.T) {
	tests := []struct {
		name  string
		where Where
		from  int64
	}{
		{"full", Full, 1}, {"zero value", 0, 1}, {"after 0", After(0), 1}, {"after 1", After(1), 2},
		{"after 3", After(3), 4}, {"tail", Tail, 4},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s := NewStore()
			l := start(t, s, "x")
			for i := range 3 {
				put(t, l, fmt.Sprint("logged ", i))
			}
			st := attach(t, s, "x", tt.where)
			put(t, l, "live")
			if err := l.Exit(7, Extra{Cause: "program"}); err != nil {
				t.Fatal(err)
			}
			events, err := take(t, st)
			if err != io.EOF {
				t.Fatal(err)
			}
			checkSeqs(t, events, tt.from, 5)
			last := events[len(events)-1]
			if last.Name != Exit || last.Code != 7 || last.Cause != "program" {
				t.Errorf("last event %+v", last)
			}
			if _, err := st.Next(t.Context()); err != io.EOF {
				t.Errorf("after the end: %v", err)
			}
		})
	}
}

// E19: an execution that has ended can be read again and again; its tail is
// empty.
func TestReplayAfterTheEnd(t *testing.T) {
	s := NewStore()
	l := start(t, s, "x")
	put(t, l, "a")
	if err := l.Exit(0, Extra{}); err != nil {
		t.Fatal(err)
	}
	for where, n := range map[Where]int{Full: 2, After(1): 1, After(2): 0, Tail: 0} {
		for range 2 {
			st := attach(t, s, "x", where)
			events, err := take(t, st)
			if err != io.EOF || len(events) != n {
				t.Errorf("from %d: %d events, %v", where, len(events), err)
			}
			st.Close()
		}
	}
}

// E20, E21, E22: each failure has its own name.
func TestStoreErrors(t *testing.T) {
	s := NewStore()
	l := start(t, s, "x")
	put(t, l, "a")
	st := attach(t, s, "x", Full)
	err := func(_ *Stream, err error) error { return err }
	started := func(_ *Log, err error) error { return err }
	tests := []struct {
		name string
		err  error
		want *Error
		code string
	}{
		{"second subscriber", err(s.Attach("", "x", Tail)), ErrBusy, "EEXEC_BUSY"},
		{"start while running", started(s.Start("x", Options{})), ErrBusy, "EEXEC_BUSY"},
		{"unknown id", err(s.Attach("", "y", Full)), ErrNotFound, "ENOENT"},
		{"dispose of an unknown id", s.Dispose("y"), ErrNotFound, "ENOENT"},
		{"other runtime", err(s.Attach(NewStore().Runtime(), "x", Full)), ErrLost, "EEXEC_LOST"},
		{"other runtime, unknown id", err(s.Attach("gone", "y", Full)), ErrLost, "EEXEC_LOST"},
	}
	for _, tt := range tests {
		var named *Error
		if !errors.Is(tt.err, tt.want) || !errors.As(tt.err, &named) || named.Code != tt.code {
			t.Errorf("%s: %v", tt.name, tt.err)
		}
	}
	st.Close()
	if _, err := s.Attach("", "x", After(2)); !errors.Is(err, ErrLost) {
		t.Errorf("after an event that was never made: %v", err)
	}
	for _, where := range []Where{After(-1), -3} {
		if st, err := s.Attach("", "x", where); err == nil || st != nil {
			t.Errorf("after %d: no error", where)
		}
	}
	for _, id := range []string{"", "\xff", strings.Repeat("x", 129)} {
		if _, err := s.Start(id, Options{}); err == nil {
			t.Errorf("id %q was taken", id)
		}
	}
}

// E20: a subscriber that leaves makes room for the next, which misses nothing.
func TestSubscriberCanComeBack(t *testing.T) {
	s := NewStore()
	l := start(t, s, "x")
	put(t, l, "a")
	put(t, l, "b")
	st := attach(t, s, "x", Full)
	if e := next(t, st); e.Seq != 1 {
		t.Fatalf("%+v", e)
	}
	st.Close()
	st.Close()
	if _, err := st.Next(t.Context()); !errors.Is(err, os.ErrClosed) {
		t.Errorf("next after close: %v", err)
	}
	put(t, l, "c")
	if err := l.Exit(0, Extra{}); err != nil {
		t.Fatal(err)
	}
	again := attach(t, s, "x", After(1))
	st.Close() // of the first one: must not free the second's place
	if _, err := s.Attach("", "x", Full); !errors.Is(err, ErrBusy) {
		t.Errorf("third subscriber: %v", err)
	}
	events, err := take(t, again)
	if err != io.EOF {
		t.Fatal(err)
	}
	checkSeqs(t, events, 2, 4)
}

// E21: the id of an ended execution can be used again; who still reads the old
// one is told and not given the new one's events.
func TestIDIsReusedAfterTheEnd(t *testing.T) {
	s := NewStore()
	old := start(t, s, "x")
	put(t, old, "old 1")
	put(t, old, "old 2")
	if err := old.Exit(0, Extra{}); err != nil {
		t.Fatal(err)
	}
	st := attach(t, s, "x", Full)
	if e := next(t, st); string(e.Data) != "old 1" {
		t.Fatalf("%+v", e)
	}
	l := start(t, s, "x")
	put(t, l, "new")
	if _, err := st.Next(t.Context()); !errors.Is(err, ErrNotFound) {
		t.Errorf("old subscriber: %v", err)
	}
	// seq 3 of the old execution is beyond the new one.
	if _, err := s.Attach("", "x", After(3)); !errors.Is(err, ErrLost) {
		t.Errorf("after an event of the old execution: %v", err)
	}
	if e := next(t, attach(t, s, "x", Full)); e.Seq != 1 || string(e.Data) != "new" {
		t.Errorf("%+v", e)
	}
}

// E25.
func TestNothingIsRecordedAfterExit(t *testing.T) {
	s := NewStore()
	l := start(t, s, "x")
	if err := l.Exit(0, Extra{}); err != nil {
		t.Fatal(err)
	}
	l.Abort(errBroken)
	l.Heartbeat(Beat{})
	for name, err := range map[string]error{"output": l.Output(t.Context(), Stdout, nil), "exit": l.Exit(1, Extra{})} {
		if !errors.Is(err, ErrEnded) {
			t.Errorf("%s: %v", name, err)
		}
	}
	events, err := take(t, attach(t, s, "x", Full))
	if err != io.EOF || len(events) != 1 || events[0].Code != 0 {
		t.Errorf("%+v, %v", events, err)
	}
}

// E23: past its bound the log is dropped as a whole. Nothing is silently partial
// on replay: it is all there or ErrTruncated.
func TestLogPastItsBoundIsDropped(t *testing.T) {
	s := NewStore()
	l := start(t, s, "x")
	chunk := strings.Repeat("x", maxChunk)
	var seq int64
	for l.size+2*maxChunk <= MaxLog {
		put(t, l, chunk)
		seq++
	}
	st := attach(t, s, "x", Full)
	if e := next(t, st); e.Seq != 1 {
		t.Fatalf("before the bound: %+v", e)
	}
	st.Close()
	put(t, l, chunk)
	put(t, l, chunk)
	seq += 2
	if !l.truncated || l.size != 0 || len(l.lines) != 0 {
		t.Fatalf("truncated %v, %d bytes in %d lines", l.truncated, l.size, len(l.lines))
	}
	for _, where := range []Where{Full, After(1), After(seq - 1)} {
		if _, err := s.Attach("", "x", where); !errors.Is(err, ErrTruncated) || errors.Is(err, ErrNotFound) {
			t.Errorf("from %d: %v", where, err)
		}
	}
	// Who has everything so far, or wants nothing of it, misses nothing.
	for _, all := range []bool{false, true} {
		where := Tail
		if all {
			where = After(seq)
		}
		st := attach(t, s, "x", where)
		put(t, l, "more")
		seq++
		if e := next(t, st); e.Seq != seq || string(e.Data) != "more" {
			t.Errorf("from %d: %+v", where, e)
		}
		st.Close()
	}
	if err := l.Exit(0, Extra{}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Attach("", "x", Full); !errors.Is(err, ErrTruncated) {
		t.Errorf("after the end: %v", err)
	}
	if events, err := take(t, attach(t, s, "x", Tail)); err != io.EOF || len(events) != 0 {
		t.Errorf("tail after the end: %d events, %v", len(events), err)
	}
}

// E23: a live subscriber gets every event while the log is dropped under it, and
// what is kept for it is small.
func TestLiveSubscriberOutlivesTheLog(t *testing.T) {
	s := NewStore()
	l := start(t, s, "x")
	st := attach(t, s, "x", Full)
	const n = 2 * MaxLog / maxChunk
	go func() {
		chunk := bytes.Repeat([]byte("y"), maxChunk)
		for range n {
			if err := l.Output(context.Background(), Stdout, chunk); err != nil {
				t.Error(err)
			}
		}
		if err := l.Exit(0, Extra{}); err != nil {
			t.Error(err)
		}
	}()
	d := NewDecoder(&streamReader{t: t, st: st})
	var seq, total int64
	for {
		e, err := d.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if seq++; e.Seq != seq {
			t.Fatalf("seq %d follows %d", e.Seq, seq-1)
		}
		total += int64(len(e.Data))
		l.mu.Lock()
		if l.truncated && l.size > window+2*maxChunk {
			t.Errorf("%d bytes are kept", l.size)
		}
		l.mu.Unlock()
	}
	if seq != n+1 || total != n*maxChunk || !l.truncated {
		t.Errorf("%d events with %d bytes, truncated %v", seq, total, l.truncated)
	}
}

// streamReader reads the lines of a subscription.
type streamReader struct {
	t    *testing.T
	st   *Stream
	left []byte
}

func (r *streamReader) Read(p []byte) (int, error) {
	if len(r.left) == 0 {
		line, err := r.st.Next(r.t.Context())
		if err != nil {
			return 0, err
		}
		r.left = line
	}
	n := copy(p, r.left)
	r.left = r.left[n:]
	return n, nil
}

// E27: output waits for a subscriber that does not read, goes on when it reads,
// leaves or the caller gives up, and exit does not wait.
func TestOutputWaitsForTheSubscriber(t *testing.T) {
	big := bytes.Repeat([]byte("z"), window)
	blocked := func(t *testing.T, s *Store, ctx context.Context) (*Log, *Stream, chan error) {
		l := start(t, s, "x")
		st := attach(t, s, "x", Full)
		if err := l.Output(ctx, Stderr, []byte("small")); err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		go func() { done <- l.Output(ctx, Stdout, big) }()
		synctest.Wait()
		select {
		case err := <-done:
			t.Fatalf("output did not wait: %v", err)
		default:
		}
		return l, st, done
	}
	tests := []struct {
		name string
		end  func(t *testing.T, s *Store, l *Log, st *Stream, cancel func())
		want error
	}{
		{"reads", func(t *testing.T, _ *Store, _ *Log, st *Stream, _ func()) {
			next(t, st)
			next(t, st)
		}, nil},
		{"leaves (E20)", func(_ *testing.T, _ *Store, _ *Log, st *Stream, _ func()) { st.Close() }, nil},
		{"caller gives up", func(_ *testing.T, _ *Store, _ *Log, _ *Stream, cancel func()) { cancel() }, context.Canceled},
		{"is disposed of (E24)", func(t *testing.T, s *Store, _ *Log, _ *Stream, _ func()) {
			if err := s.Dispose("x"); err != nil {
				t.Error(err)
			}
		}, nil},
		{"aborts", func(_ *testing.T, _ *Store, l *Log, _ *Stream, _ func()) { l.Abort(errBroken) }, nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				s := NewStore()
				l, st, done := blocked(t, s, ctx)
				tt.end(t, s, l, st, cancel)
				if err := <-done; !errors.Is(err, tt.want) {
					t.Errorf("output: %v, want %v", err, tt.want)
				}
			})
		})
	}
	t.Run("exit does not wait", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			l, st, done := blocked(t, NewStore(), ctx)
			cancel()
			<-done
			if err := l.Exit(1, Extra{}); err != nil {
				t.Fatal(err)
			}
			events, err := take(t, st)
			if err != io.EOF || len(events) != 3 || len(joined(events, Stdout)) != len(big) {
				t.Errorf("%d events, %v", len(events), err)
			}
		})
	})
	t.Run("nobody attached", func(t *testing.T) {
		l := start(t, NewStore(), "x")
		for range 10 {
			if err := l.Output(t.Context(), Stdout, big); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// A replay of a long log holds back the execution too, so that what is kept
// stays bounded.
func TestReplayHoldsBackTheExecution(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewStore()
		l := start(t, s, "x")
		for range 10 {
			put(t, l, strings.Repeat("a", maxChunk))
		}
		st := attach(t, s, "x", Full)
		done := make(chan error, 1)
		go func() { done <- l.Output(t.Context(), Stdout, []byte("b")) }()
		for i := range 10 {
			synctest.Wait()
			if len(done) > 0 {
				t.Fatalf("output went on with %d of 10 replayed", i)
			}
			next(t, st)
		}
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		if e := next(t, st); e.Seq != 11 || string(e.Data) != "b" {
			t.Errorf("%+v", e)
		}
	})
}

func TestNextWaits(t *testing.T) {
	tests := []struct {
		name string
		do   func(s *Store, l *Log, st *Stream, cancel func()) error
		want error
	}{
		{"for output", func(_ *Store, l *Log, _ *Stream, _ func()) error { return l.Output(context.Background(), Stdout, nil) }, nil},
		{"for exit", func(_ *Store, l *Log, _ *Stream, _ func()) error { return l.Exit(0, Extra{}) }, nil},
		{"for a heartbeat", func(_ *Store, l *Log, _ *Stream, _ func()) error { l.Heartbeat(Beat{}); return nil }, nil},
		{"until its context ends", func(_ *Store, _ *Log, _ *Stream, cancel func()) error { cancel(); return nil }, context.Canceled},
		{"until it is closed", func(_ *Store, _ *Log, st *Stream, _ func()) error { st.Close(); return nil }, os.ErrClosed},
		{"until the execution is aborted (E30)", func(_ *Store, l *Log, _ *Stream, _ func()) error { l.Abort(errBroken); return nil }, errBroken},
		{"until the execution is disposed of", func(s *Store, _ *Log, _ *Stream, _ func()) error { return s.Dispose("x") }, ErrNotFound},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				s := NewStore()
				l := start(t, s, "x")
				st := attach(t, s, "x", Tail)
				done := make(chan error, 1)
				go func() {
					_, err := st.Next(ctx)
					done <- err
				}()
				synctest.Wait()
				if len(done) > 0 {
					t.Fatalf("next did not wait: %v", <-done)
				}
				if err := tt.do(s, l, st, cancel); err != nil {
					t.Fatal(err)
				}
				if err := <-done; !errors.Is(err, tt.want) {
					t.Errorf("next: %v, want %v", err, tt.want)
				}
			})
		})
	}
}

// E30: an execution whose exit cannot be recorded ends with an error for the
// subscriber, after all that was recorded, and for whoever attaches later.
func TestAbortEndsTheStream(t *testing.T) {
	s := NewStore()
	l := start(t, s, "x")
	st := attach(t, s, "x", Full)
	put(t, l, "a")
	l.Abort(errBroken)
	l.Abort(errors.New("another"))
	for name, err := range map[string]error{"output": l.Output(t.Context(), Stdout, nil), "exit": l.Exit(1, Extra{})} {
		if !errors.Is(err, errBroken) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for range 2 {
		events, err := take(t, st)
		if !errors.Is(err, errBroken) || len(events) != 1 {
			t.Errorf("%d events, %v", len(events), err)
		}
		st.Close()
		st = attach(t, s, "x", Full)
	}
	if _, err := s.Start("x", Options{}); err != nil {
		t.Errorf("id of an aborted execution: %v", err)
	}
	nothing := start(t, s, "y")
	nothing.Abort(nil)
	if _, err := take(t, attach(t, s, "y", Full)); err == nil || err == io.EOF {
		t.Errorf("aborted without a reason: %v", err)
	}
}

// An exit whose usage cannot be encoded is recorded without it.
func TestExitIsRecordedWithoutBadUsage(t *testing.T) {
	s := NewStore()
	l := start(t, s, "x")
	if err := l.Exit(3, Extra{Cause: "ok", Usage: func() {}}); err == nil {
		t.Error("no error")
	}
	events, err := take(t, attach(t, s, "x", Full))
	if err != io.EOF || len(events) != 1 || events[0].Code != 3 || events[0].Usage != nil {
		t.Errorf("%+v, %v", events, err)
	}
}

// C16, E26: a heartbeat comes after everything recorded, with the last seq; a
// newer one replaces it; a replay does not have it and has no gap.
func TestHeartbeatsAreNotRecorded(t *testing.T) {
	s := NewStore()
	l := start(t, s, "x")
	l.Heartbeat(Beat{PID: 1}) // nobody there
	st := attach(t, s, "x", Full)
	put(t, l, "a")
	l.Heartbeat(Beat{PID: 2})
	l.Heartbeat(Beat{PID: 3, Elapsed: time.Minute, LastOutput: time.Second})
	put(t, l, "b")
	if e := next(t, st); e.Seq != 1 || e.Name != Stdout {
		t.Errorf("%+v", e)
	}
	if e := next(t, st); e.Seq != 2 || e.Name != Stdout {
		t.Errorf("%+v", e)
	}
	if e := next(t, st); e.Seq != 2 || e.Name != Heartbeat || e.Beat != (Beat{PID: 3, Elapsed: time.Minute, LastOutput: time.Second}) {
		t.Errorf("%+v", e)
	}
	l.Heartbeat(Beat{PID: 4})
	if err := l.Exit(0, Extra{}); err != nil {
		t.Fatal(err)
	}
	events, err := take(t, st)
	if err != io.EOF || len(events) != 1 || events[0].Seq != 3 {
		t.Errorf("%+v, %v", events, err)
	}
	st.Close()
	events, err = take(t, attach(t, s, "x", Full))
	if err != io.EOF {
		t.Fatal(err)
	}
	checkSeqs(t, events, 1, 3)
}

// E24: five minutes after the end the log goes, seen by a look every 30 seconds;
// a running execution stays; Dispose is at once.
func TestRetention(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewStore()
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- s.Run(ctx) }()
		running, ended, aborted := start(t, s, "running"), start(t, s, "ended"), start(t, s, "aborted")
		put(t, running, "a")
		time.Sleep(10 * time.Minute)
		if err := ended.Exit(0, Extra{}); err != nil {
			t.Fatal(err)
		}
		aborted.Abort(errBroken)
		time.Sleep(Retention - time.Second)
		for _, id := range []string{"ended", "aborted"} {
			attach(t, s, id, Full).Close()
		}
		st := attach(t, s, "ended", Tail)
		time.Sleep(sweepEvery + 2*time.Second)
		for _, id := range []string{"ended", "aborted"} {
			if _, err := s.Attach("", id, Full); !errors.Is(err, ErrNotFound) {
				t.Errorf("%s: %v", id, err)
			}
		}
		if _, err := st.Next(ctx); !errors.Is(err, ErrNotFound) {
			t.Errorf("subscriber of what went: %v", err)
		}
		attach(t, s, "running", Full).Close()
		if err := s.Dispose("running"); err != nil {
			t.Fatal(err)
		}
		if err := running.Output(ctx, Stdout, nil); !errors.Is(err, ErrNotFound) {
			t.Errorf("producer of what was disposed of: %v", err)
		}
		if _, err := s.Attach("", "running", Full); !errors.Is(err, ErrNotFound) {
			t.Errorf("attach to what was disposed of: %v", err)
		}
		if len(s.logs) != 0 {
			t.Errorf("%d logs are left", len(s.logs))
		}
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("run: %v", err)
		}
	})
}

// Two streams of output, a subscriber that comes and goes, heartbeats: each
// event arrives once and in order.
func TestStoreIsConcurrent(t *testing.T) {
	s := NewStore()
	l := start(t, s, "x")
	const n = 400
	var producers sync.WaitGroup
	for _, name := range []string{Stdout, Stderr} {
		producers.Go(func() {
			for i := range n {
				if err := l.Output(t.Context(), name, fmt.Appendf(nil, "%d,%s", i, strings.Repeat("x", 500))); err != nil {
					t.Error(err)
				}
				l.Heartbeat(Beat{PID: i})
			}
		})
	}
	go func() {
		producers.Wait()
		if err := l.Exit(0, Extra{}); err != nil {
			t.Error(err)
		}
	}()
	var lines bytes.Buffer
	var last int64
	for ended := false; !ended; {
		st, err := s.Attach(s.Runtime(), "x", After(last))
		if err != nil {
			t.Fatal(err)
		}
		for range 50 {
			line, err := st.Next(t.Context())
			if err == io.EOF {
				ended = true
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			e, err := NewDecoder(bytes.NewReader(line)).Next()
			if err != nil {
				t.Fatal(err)
			}
			last = e.Seq
			lines.Write(line)
		}
		st.Close()
	}
	events := mustDecode(t, &lines)
	var numbered []Event
	for _, e := range events {
		if e.Name != Heartbeat {
			numbered = append(numbered, e)
		}
	}
	checkSeqs(t, numbered, 1, 2*n+1)
}
