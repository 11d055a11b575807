package wire

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"example.com/jail/wire/toolfail"
)

// gate is a handler whose calls wait until they are let go, by id.
type gate struct {
	mu      sync.Mutex
	entered []string
	open    map[string]chan struct{}
}

func (g *gate) door(id string) chan struct{} {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.open == nil {
		g.open = make(map[string]chan struct{})
	}
	if g.open[id] == nil {
		g.open[id] = make(chan struct{})
	}
	return g.open[id]
}

// handle waits for the door of the call, whatever its context says.
func (g *gate) handle(_ context.Context, r Request) (Response, error) {
	g.mu.Lock()
	g.entered = append(g.entered, r.ID)
	g.mu.Unlock()
	<-g.door(r.ID)
	return Response{OK: true, Value: r.Args}, nil
}

func (g *gate) inside() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.entered)
}

// W15, W17, W30, W42: one call that blocks delays no other, and answers come in any order.
func TestSlowCallDelaysNoOther(t *testing.T) {
	transports(t, func(t *testing.T, parent, child io.ReadWriteCloser) {
		g := new(gate)
		s := serve(t, parent, child, func(ctx context.Context, r Request) (Response, error) {
			if strings.HasPrefix(r.ID, "slow") {
				return g.handle(ctx, r)
			}
			return echo(ctx, r)
		})
		// Quick calls first, so that the server has settled on their pace.
		for i := range 100 {
			s.send(callText(fmt.Sprint("warm", i), "w"))
			s.receive()
		}
		s.send(callText("slow1", "1"), callText("slow2", "2"))
		for i := range 50 {
			s.send(callText(fmt.Sprint("quick", i), "q"))
			if r := s.receive(); r.ID != fmt.Sprint("quick", i) || r.Value != "q" {
				t.Fatalf("got %+v", r)
			}
		}
		close(g.door("slow2"))
		if r := s.receive(); r.ID != "slow2" || r.Value != "2" {
			t.Errorf("got %+v, want the second slow call first", r)
		}
		close(g.door("slow1"))
		if r := s.receive(); r.ID != "slow1" || !r.OK || r.Value != "1" {
			t.Errorf("got %+v", r)
		}
		s.end()
	})
}

// W31, W32, W33, W34, K6: above the cap a call is refused at once, is not queued
// and not charged.
func TestInflightLimit(t *testing.T) {
	transports(t, func(t *testing.T, parent, child io.ReadWriteCloser) {
		g := new(gate)
		budget := &Budget{MaxCalls: 4}
		s := serve(t, parent, child, g.handle, WithMaxInflight(3), WithBudget(budget))
		s.send(callText("a", ""), callText("b", ""), callText("c", ""))
		eventually(t, "three handlers", func() bool { return g.inside() == 3 })
		for range 10 {
			s.send(callText("d", ""))
			r := s.receive()
			if r.ID != "d" || r.OK || r.Kind != string(toolfail.RateLimited) || r.Error != ErrInflightLimit.Error() {
				t.Fatalf("got %+v", r)
			}
		}
		if n := g.inside(); n != 3 {
			t.Errorf("%d handlers were called", n)
		}
		close(g.door("b"))
		if r := s.receive(); r.ID != "b" {
			t.Errorf("got %+v, want the answer to b", r)
		}
		// The slot is free by the time the answer is there, and the ten refusals
		// left one of the four calls.
		close(g.door("d"))
		s.send(callText("d", "last"))
		if r := s.receive(); r.ID != "d" || r.Value != "last" {
			t.Errorf("got %+v, want d to be accepted now", r)
		}
		s.send(callText("e", ""))
		if r := s.receive(); r.Kind != string(toolfail.Quota) {
			t.Errorf("got %+v, want class quota after four calls", r)
		}
		if u := s.Usage(); u.Accepted != 4 || u.Refused != 11 {
			t.Errorf("usage %+v, want 4 accepted and 11 refused", u)
		}
		close(g.door("a"))
		close(g.door("c"))
		s.receive()
		s.receive()
		s.end()
	})
}

// W31.
func TestOptionDefaults(t *testing.T) {
	for _, n := range []int{0, -1, math.MinInt} {
		s := NewServer(bare{}, echo, WithMaxInflight(n), WithMaxArgsBytes(n), WithMaxValueBytes(n), WithMaxRefusals(n),
			WithMaxCallDeadline(time.Duration(n)), WithWriteTimeout(time.Duration(n)), WithGrace(time.Duration(n)), WithBudget(nil))
		if s.maxInflight != 64 || s.maxArgs != 1<<20 || s.maxValue != 1<<20 || s.maxRefusals != 1024 || s.maxDeadline != 0 ||
			s.out.timeout != 30*time.Second || s.grace != time.Second || s.budget == nil {
			t.Errorf("options of %d do not give the defaults", n)
		}
	}
	if DefaultMaxInflight != 64 || MaxFrameBytes != 16<<20 || Version != 1 || StartFD != 3 || CallFD != 4 {
		t.Error("a constant of the protocol has changed")
	}
}

// A child that has its answer may call again at once: the slot and the id of the
// call before are free by then.
func TestSlotIsFreeWhenTheAnswerArrives(t *testing.T) {
	transports(t, func(t *testing.T, parent, child io.ReadWriteCloser) {
		s := serve(t, parent, child, echo, WithMaxInflight(1))
		for i := range 2000 {
			s.send(callText("same", ""))
			if r := s.receive(); !r.OK {
				t.Fatalf("call %d: %+v", i, r)
			}
		}
		s.end()
	})
}

// W35, W36: exactly MaxCalls handlers run, however many requests come at once.
func TestMaxCallsIsExactUnderConcurrency(t *testing.T) {
	transports(t, func(t *testing.T, parent, child io.ReadWriteCloser) {
		var ran atomic.Int64
		budget := &Budget{MaxCalls: 37}
		s := serve(t, parent, child, func(ctx context.Context, r Request) (Response, error) {
			ran.Add(1)
			runtime.Gosched()
			return echo(ctx, r)
		}, WithBudget(budget), WithMaxInflight(1000))
		c := NewClient(child)
		var ok, quota atomic.Int64
		var callers sync.WaitGroup
		for range 8 {
			callers.Go(func() {
				for range 25 {
					r, err := c.Call(context.Background(), "t", "x")
					switch {
					case err != nil:
						t.Error(err)
						return
					case r.OK:
						ok.Add(1)
					case r.Kind == string(toolfail.Quota):
						quota.Add(1)
					default:
						t.Errorf("got %+v", r)
					}
				}
			})
		}
		mustReturn(t, "200 calls", func() bool { callers.Wait(); return true })
		if ran.Load() != 37 || ok.Load() != 37 || quota.Load() != 163 {
			t.Errorf("%d handlers ran, %d calls succeeded, %d were refused, want 37, 37, 163", ran.Load(), ok.Load(), quota.Load())
		}
		if u := s.Usage(); u.Accepted != 37 || u.Refused != 163 || u.Bytes != 37 {
			t.Errorf("usage %+v", u)
		}
		c.Close()
		if err := s.wait(); err != nil {
			t.Error(err)
		}
	})
}

// W28, W36: two servers may draw on one budget.
func TestSharedBudget(t *testing.T) {
	leaks(t)
	budget := &Budget{MaxCalls: 10, MaxBytes: 9}
	var ok atomic.Int64
	var callers sync.WaitGroup
	for range 2 {
		parent, child := nonblockingPair(t)
		serve(t, parent, child, echo, WithBudget(budget))
		c := NewClient(child)
		for range 4 {
			callers.Go(func() {
				for range 5 {
					if r, err := c.Call(context.Background(), "t", "x"); err != nil {
						t.Error(err)
					} else if r.OK {
						ok.Add(1)
					}
				}
			})
		}
	}
	mustReturn(t, "40 calls", func() bool { callers.Wait(); return true })
	if ok.Load() != 9 || budget.calls != 10 || budget.bytes != 9 {
		t.Errorf("%d calls succeeded, %d calls and %d bytes charged, want 9, 10, 9", ok.Load(), budget.calls, budget.bytes)
	}
}

// W37: bytes are those of the text, a response over the limit is replaced and not
// charged, and a smaller one still fits.
func TestMaxBytes(t *testing.T) {
	transports(t, func(t *testing.T, parent, child io.ReadWriteCloser) {
		s := serve(t, parent, child, func(_ context.Context, r Request) (Response, error) {
			if r.Args == "fail" {
				return Response{Kind: "permanent", Error: "abc"}, nil
			}
			return Response{OK: true, Value: r.Args}, nil
		}, WithBudget(&Budget{MaxBytes: 20}))
		for i, tc := range []struct {
			args  string
			ok    bool
			kind  toolfail.Class
			total int64
		}{
			{"\n\n\n\n\n\n", true, "", 6},                   // before escaping
			{"éé", true, "", 10},                            // bytes, not characters
			{"fail", false, toolfail.Permanent, 13},         // error text counts
			{"12345678", false, toolfail.Quota, 13},         // 21 would be over
			{"1234567", true, "", 20},                       // exactly full
			{"x", false, toolfail.Quota, 20},                // nothing is left
			{"fail", false, toolfail.Quota, 20},             // for no text
			{"", true, "", 20},                              // but an empty value fits
			{strings.Repeat("x", 5000), false, "quota", 20}, // and so on
		} {
			s.send(callText(fmt.Sprint(i), tc.args))
			r := s.receive()
			if r.OK != tc.ok || r.Kind != string(tc.kind) {
				t.Errorf("call %d with %.10q: %+v", i, tc.args, r)
			}
			if tc.ok && r.Value != tc.args {
				t.Errorf("call %d: value %q, want %q whole", i, r.Value, tc.args)
			}
			if u := s.Usage(); u.Bytes != tc.total {
				t.Errorf("after call %d: %d bytes charged, want %d", i, u.Bytes, tc.total)
			}
		}
		s.end()
	})
}

// W37: the server's own text gives way when bytes run out; its class gets through.
func TestRefusalsGetThroughWithoutBytes(t *testing.T) {
	leaks(t)
	parent, child := nonblockingPair(t)
	s := serve(t, parent, child, echo, WithBudget(&Budget{MaxBytes: 1}), WithMaxArgsBytes(1))
	s.send(callText("a", "too long"))
	if r := s.receive(); r.Kind != string(toolfail.Invalid) || r.Error != "" {
		t.Errorf("got %+v, want class invalid without a text", r)
	}
	s.end()
}

// W38, W39, W40, W41, K2, K7, L28: what handlers return and what crosses.
func TestHandlerOutcomes(t *testing.T) {
	long := strings.Repeat("x", 10000)
	for _, tc := range []struct {
		name    string
		handler Handler
		want    Response
	}{
		{"value", func(context.Context, Request) (Response, error) { return Response{OK: true, Value: "v"}, nil }, Response{OK: true, Value: "v"}},
		{"empty value", func(context.Context, Request) (Response, error) { return Response{OK: true}, nil }, Response{OK: true}},
		{"other id and version", func(context.Context, Request) (Response, error) {
			return Response{V: 7, ID: "forged", OK: true, Value: "v"}, nil
		}, Response{OK: true, Value: "v"}},
		{"ok with a class", func(context.Context, Request) (Response, error) {
			return Response{OK: true, Value: "v", Kind: "denied", Error: "e"}, nil
		}, Response{OK: true, Value: "v"}},
		{"class", func(context.Context, Request) (Response, error) { return Response{Kind: "denied", Error: "no"}, nil }, Response{Kind: "denied", Error: "no"}},
		{"class with a value", func(context.Context, Request) (Response, error) {
			return Response{Kind: "denied", Error: "no", Value: "secret"}, nil
		}, Response{Kind: "denied", Error: "no"}},
		{"no class", func(context.Context, Request) (Response, error) { return Response{Error: "no"}, nil }, Response{Kind: "unknown", Error: "no"}},
		{"foreign class", func(context.Context, Request) (Response, error) {
			return Response{Kind: "UNAVAILABLE", Error: "no"}, nil
		}, Response{Kind: "unknown", Error: "UNAVAILABLE: no"}},
		{"error", func(context.Context, Request) (Response, error) {
			return Response{OK: true, Value: "v"}, errors.New("boom")
		}, Response{Kind: "unknown", Error: "boom"}},
		{"long error", func(context.Context, Request) (Response, error) { return Response{}, errors.New(long) }, Response{Kind: "unknown", Error: toolfail.CapText(long)}},
		{"long text", func(context.Context, Request) (Response, error) { return Response{Kind: "auth", Error: long}, nil }, Response{Kind: "auth", Error: toolfail.CapText(long)}},
		{"error that is not UTF-8", func(context.Context, Request) (Response, error) { return Response{}, errors.New("a\xff") }, Response{Kind: "unknown", Error: "a\uFFFD"}},
		{"value that is not UTF-8", func(context.Context, Request) (Response, error) { return Response{OK: true, Value: "a\xff"}, nil }, Response{Kind: "permanent", Error: "the tool's value is not valid UTF-8"}},
		{"value too long", func(context.Context, Request) (Response, error) {
			return Response{OK: true, Value: strings.Repeat("v", DefaultMaxValueBytes+1)}, nil
		}, Response{Kind: "quota", Error: "the tool's value has 1048577 bytes, limit 1048576"}},
		{"value as long as allowed", func(context.Context, Request) (Response, error) {
			return Response{OK: true, Value: strings.Repeat("v", DefaultMaxValueBytes)}, nil
		}, Response{OK: true, Value: strings.Repeat("v", DefaultMaxValueBytes)}},
		{"panic", func(context.Context, Request) (Response, error) { panic("secret") }, Response{Kind: "unknown", Error: "the tool broke down"}},
		{"nil dereference", func(_ context.Context, r Request) (Response, error) { var p *Request; return Response{ID: p.ID}, nil }, Response{Kind: "unknown", Error: "the tool broke down"}},
		{"end of the goroutine", func(context.Context, Request) (Response, error) { runtime.Goexit(); return Response{}, nil }, Response{Kind: "unknown", Error: "the tool broke down"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			transports(t, func(t *testing.T, parent, child io.ReadWriteCloser) {
				var calls atomic.Int64
				s := serve(t, parent, child, func(ctx context.Context, r Request) (Response, error) {
					if calls.Add(1)%2 == 0 {
						return echo(ctx, r)
					}
					return tc.handler(ctx, r)
				})
				// The server goes on afterwards, over and over.
				for range 3 {
					s.send(callText("x", "after"))
					r := s.receive()
					want := tc.want
					want.V, want.ID = Version, "x"
					if r != want {
						t.Fatalf("got %.200v, want %.200v", r, want)
					}
					s.send(callText("x", "after"))
					if r := s.receive(); !r.OK || r.Value != "after" {
						t.Fatalf("the call after it: %+v", r)
					}
				}
				s.end()
			})
		})
	}
}

// C22: a value that is too large for a frame only after escaping is answered.
func TestValueTooLargeAfterEscapingIsAFailureNotSilence(t *testing.T) {
	leaks(t)
	parent, child := nonblockingPair(t)
	s := serve(t, parent, child, func(_ context.Context, r Request) (Response, error) {
		n := 3 << 20
		if r.Args == "fits" {
			n = 2 << 20
		}
		return Response{OK: true, Value: strings.Repeat("\x01", n)}, nil
	}, WithMaxValueBytes(MaxFrameBytes), WithBudget(&Budget{MaxBytes: 5 << 20}))
	s.send(callText("a", ""))
	if r := s.receive(); r.OK || r.Kind != "quota" || !strings.Contains(r.Error, "frame") {
		t.Errorf("got %.200v, want class quota", r)
	}
	if u := s.Usage(); u.Bytes != 0 {
		t.Errorf("%d bytes charged for it", u.Bytes)
	}
	s.send(callText("b", "fits"))
	if r := s.receive(); !r.OK || len(r.Value) != 2<<20 {
		t.Errorf("got ok %v, %d bytes", r.OK, len(r.Value))
	}
	s.end()
}

// W43, W47: the shorter of the limits that are set, and no overflow.
func TestEffectiveDeadline(t *testing.T) {
	for _, tc := range []struct {
		child int64
		host  time.Duration
		want  time.Duration
	}{
		{0, 0, 0},
		{0, time.Second, time.Second},
		{500, 0, 500 * time.Millisecond},
		{500, time.Second, 500 * time.Millisecond},
		{5000, time.Second, time.Second},
		{1000, time.Second, time.Second},
		{math.MaxInt64, 0, math.MaxInt64},
		{math.MaxInt64, time.Second, time.Second},
		{math.MaxInt64 / 1000000, 0, math.MaxInt64 / 1000000 * 1000000},
		{math.MaxInt64/1000000 + 1, 0, math.MaxInt64},
		{18446744073710, 0, math.MaxInt64}, // times 1e6 it wraps to a small number
	} {
		if got := effectiveDeadline(tc.child, tc.host); got != tc.want {
			t.Errorf("child %d ms, host %v: %v, want %v", tc.child, tc.host, got, tc.want)
		}
	}
}

// W44, W45, W46, K6: at the deadline the answer comes without the handler; what
// the handler returns later is dropped; its slot is taken until then.
func TestDeadlineIsAnsweredWithoutTheHandler(t *testing.T) {
	transports(t, func(t *testing.T, parent, child io.ReadWriteCloser) {
		g := new(gate)
		s := serve(t, parent, child, g.handle, WithMaxInflight(2), WithMaxCallDeadline(20*time.Millisecond))
		s.send(callText("a", "late"), `{"v":1,"id":"b","tool":"t","args":"late","deadline_ms":1}`)
		got := []string{}
		for range 2 {
			r := s.receive()
			if r.OK || r.Kind != string(toolfail.Transient) {
				t.Errorf("got %+v, want class transient", r)
			}
			got = append(got, r.ID)
		}
		slices.Sort(got)
		if !slices.Equal(got, []string{"a", "b"}) {
			t.Errorf("answers to %q", got)
		}
		// Both are answered and both still run: no slot is free.
		for range 5 {
			s.send(callText("c", ""))
			if r := s.receive(); r.ID != "c" || r.Kind != string(toolfail.RateLimited) {
				t.Errorf("got %+v, want class rate_limited while the handlers run", r)
			}
		}
		if n := g.inside(); n != 2 {
			t.Errorf("%d handlers run", n)
		}
		close(g.door("a"))
		close(g.door("b"))
		close(g.door("d"))
		// Answers to a and b would come before the one to d.
		eventually(t, "free slots", func() bool { s.mu.Lock(); defer s.mu.Unlock(); return s.slots == 0 })
		s.send(callText("d", "x"))
		if r := s.receive(); r.ID != "d" || !r.OK {
			t.Errorf("got %+v, want the answer to d alone", r)
		}
		s.end()
		if u := s.Usage(); u.Busy <= 0 {
			t.Errorf("usage %+v, want time with calls in flight", u)
		}
	})
}

// W44: the context carries the deadline; W43: the child cannot lengthen it.
func TestHandlerContextCarriesTheDeadline(t *testing.T) {
	leaks(t)
	parent, child := nonblockingPair(t)
	type key struct{}
	seen := make(chan error, 1)
	s := serve(t, parent, child, func(ctx context.Context, r Request) (Response, error) {
		seen <- func() error {
			d, ok := ctx.Deadline()
			if left := time.Until(d); !ok || left > time.Hour || left < time.Minute {
				return fmt.Errorf("deadline in %v, %v, want some time below the host's hour", left, ok)
			}
			if ctx.Err() != nil || ctx.Value(key{}) != nil {
				return fmt.Errorf("err %v, value %v", ctx.Err(), ctx.Value(key{}))
			}
			// A context derived from it ends with it.
			sub, cancel := context.WithCancel(ctx)
			defer cancel()
			if d2, ok := sub.Deadline(); !ok || !d2.Equal(d) {
				return fmt.Errorf("derived deadline %v, %v", d2, ok)
			}
			return nil
		}()
		return echo(ctx, r)
	}, WithMaxCallDeadline(time.Hour))
	s.send(`{"v":1,"id":"a","tool":"t","args":"","deadline_ms":86400000}`)
	s.receive()
	if err := mustReturn(t, "handler", func() error { return <-seen }); err != nil {
		t.Error(err)
	}
	s.end()
}

// W44, K6: a handler that honours its context gives class transient too, whether
// it or the timer is first.
func TestHandlerThatGivesUpAtTheDeadline(t *testing.T) {
	leaks(t)
	for range 50 {
		parent, child := nonblockingPair(t)
		s := serve(t, parent, child, func(ctx context.Context, r Request) (Response, error) {
			<-ctx.Done()
			// The child ends the channel as soon as it has its answer: the handler
			// must have learned of the deadline by then.
			if ctx.Err() != context.DeadlineExceeded || context.Cause(ctx) != context.DeadlineExceeded {
				t.Errorf("context ends with %v, cause %v", ctx.Err(), context.Cause(ctx))
			}
			return Response{}, ctx.Err()
		}, WithMaxCallDeadline(2*time.Millisecond))
		s.send(callText("a", ""))
		if r := s.receive(); r.ID != "a" || r.Kind != string(toolfail.Transient) {
			t.Fatalf("got %+v, want class transient once", r)
		}
		s.end()
	}
}

// A deadline's context is a context like any other.
func TestCallContext(t *testing.T) {
	type key struct{}
	parent, cancelParent := context.WithCancel(context.WithValue(context.Background(), key{}, "v"))
	defer cancelParent()
	fresh := func(d time.Duration) *callContext {
		return &callContext{Context: parent, deadline: time.Now().Add(d)}
	}
	past := fresh(-time.Second)
	if past.Err() != context.DeadlineExceeded || context.Cause(past) != context.DeadlineExceeded {
		t.Errorf("past its deadline: %v, %v", past.Err(), context.Cause(past))
	}
	select {
	case <-past.Done():
	default:
		t.Error("past its deadline, but not done")
	}
	c := fresh(time.Hour)
	if c.Err() != nil || c.Value(key{}) != "v" {
		t.Errorf("fresh: %v, %v", c.Err(), c.Value(key{}))
	}
	c.end()
	if c.Err() != context.Canceled {
		t.Errorf("after its end: %v", c.Err())
	}
	unused := fresh(time.Hour)
	unused.end()
	if unused.Err() != context.Canceled {
		t.Errorf("after its end, unused before: %v", unused.Err())
	}
	shorter, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	nested := &callContext{Context: shorter, deadline: time.Now().Add(time.Hour)}
	defer nested.end()
	if d, _ := nested.Deadline(); time.Until(d) > time.Minute {
		t.Errorf("deadline in %v, the run's is within a minute", time.Until(d))
	}
	waiting, used := fresh(time.Hour), fresh(time.Hour)
	defer waiting.end()
	defer used.end()
	done := used.Done()
	cancelParent()
	mustReturn(t, "the end of the parent", func() bool { <-done; return true })
	if used.Err() != context.Canceled || waiting.Err() != context.Canceled {
		t.Errorf("after the parent's end: %v, %v", used.Err(), waiting.Err())
	}
}

// W48, W49: the end of the parent's context ends handlers and connection.
func TestServeEndsWithItsContext(t *testing.T) {
	transports(t, func(t *testing.T, parent, child io.ReadWriteCloser) {
		entered, left := make(chan bool), make(chan error, 1)
		s := serve(t, parent, child, func(ctx context.Context, r Request) (Response, error) {
			entered <- true
			<-ctx.Done()
			left <- ctx.Err()
			return Response{}, ctx.Err()
		}, WithMaxCallDeadline(time.Hour))
		s.send(callText("a", ""))
		mustReturn(t, "handler", func() bool { return <-entered })
		s.cancel()
		if err := s.wait(); !errors.Is(err, context.Canceled) {
			t.Errorf("Serve = %v, want context.Canceled", err)
		}
		var p *ProtocolError
		if errors.As(s.wait(), &p) {
			t.Errorf("Serve = %v, which is no fault of the child", p)
		}
		if err := mustReturn(t, "handler", func() error { return <-left }); err != context.Canceled {
			t.Errorf("handler's context: %v", err)
		}
		if _, err := ReadFrame(child, nil); err != io.EOF {
			t.Errorf("child reads %v, want EOF as the cancel signal", err)
		}
	})
}

func TestServeWithAnEndedContext(t *testing.T) {
	leaks(t)
	parent, _ := nonblockingPair(t)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	s := NewServer(parent, echo)
	if err := mustReturn(t, "Serve", func() error { return s.Serve(ctx) }); !errors.Is(err, context.Canceled) {
		t.Errorf("Serve = %v", err)
	}
}

// W49: Serve waits for handlers, but not for ever; EOF cancels them (W48).
func TestServeWaitsForHandlers(t *testing.T) {
	leaks(t)
	parent, child := nonblockingPair(t)
	var ended atomic.Bool
	entered := make(chan bool)
	s := serve(t, parent, child, func(ctx context.Context, r Request) (Response, error) {
		entered <- true
		<-ctx.Done()
		time.Sleep(30 * time.Millisecond)
		ended.Store(true)
		return Response{}, nil
	}, WithGrace(time.Minute))
	s.send(callText("a", ""))
	mustReturn(t, "handler", func() bool { return <-entered })
	child.Close()
	if err := s.wait(); err != nil || !ended.Load() {
		t.Errorf("Serve = %v, handler ended %v", err, ended.Load())
	}
}

func TestServeLeavesAStubbornHandlerBehind(t *testing.T) {
	leaks(t)
	parent, child := nonblockingPair(t)
	g := new(gate)
	s := serve(t, parent, child, g.handle, WithGrace(20*time.Millisecond))
	s.send(callText("a", ""))
	eventually(t, "handler", func() bool { return g.inside() == 1 })
	child.Close()
	if err := s.wait(); err != nil {
		t.Errorf("Serve = %v", err)
	}
	u := s.Usage()
	time.Sleep(5 * time.Millisecond)
	if again := s.Usage(); again != u || u.Accepted != 1 || u.Busy < 20*time.Millisecond {
		t.Errorf("usage %+v, then %+v, want it to stand still with at least the grace", u, again)
	}
	close(g.door("a"))
	eventually(t, "end of the handler", func() bool { s.mu.Lock(); defer s.mu.Unlock(); return s.slots == 0 })
	if again := s.Usage(); again != u {
		t.Errorf("usage %+v changed to %+v after Serve returned", u, again)
	}
}

func TestServeMisuse(t *testing.T) {
	leaks(t)
	parent, child := nonblockingPair(t)
	s := serve(t, parent, child, echo)
	s.end()
	if err := s.Serve(context.Background()); !errors.Is(err, ErrUsed) {
		t.Errorf("second Serve = %v", err)
	}
	if err := NewServer(parent, nil).Serve(context.Background()); err == nil || !strings.Contains(err.Error(), "no handler") {
		t.Errorf("Serve without a handler = %v", err)
	}
	for _, b := range []*Budget{{MaxCalls: -1}, {MaxBytes: -1}} { // W29
		if err := NewServer(parent, echo, WithBudget(b)).Serve(context.Background()); err == nil || !strings.Contains(err.Error(), "negative") {
			t.Errorf("Serve with a negative budget = %v", err)
		}
	}
	// L9: a limit that no frame can hold is refused, not found out later.
	for _, o := range []ServerOption{WithMaxArgsBytes(MaxFrameBytes + 1), WithMaxValueBytes(MaxFrameBytes + 1)} {
		if err := NewServer(parent, echo, o).Serve(context.Background()); !errors.Is(err, ErrFrameTooLarge) {
			t.Errorf("Serve with a limit above a frame = %v", err)
		}
	}
	// Somebody else closing the connection is no fault of the child.
	p2, _ := nonblockingPair(t)
	s2 := serve(t, p2, nil, echo)
	p2.Close()
	var p *ProtocolError
	if err := s2.wait(); !errors.Is(err, os.ErrClosed) || errors.As(err, &p) {
		t.Errorf("Serve on a closed connection = %v", err)
	}
}

// W51, W7, W5, W18, D3: what ends the channel, with the offset of the frame.
func TestFatalFaults(t *testing.T) {
	good := callText("ok", "")
	prefix := headerBytes + len(good)
	frame := func(text string) string { return string(header(uint32(len(text)))) + text }
	for _, tc := range []struct {
		name   string
		bytes  string
		reason error
	}{
		{"length 0xFFFFFFFF", "\xff\xff\xff\xff", ErrFrameTooLarge},
		{"length 16 MiB and 1", string(header(MaxFrameBytes + 1)), ErrFrameTooLarge},
		{"length 0", "\x00\x00\x00\x00", ErrEmptyFrame},
		{"cut in the header", "\x00\x00", io.ErrUnexpectedEOF},
		{"cut in the body", "\x00\x00\x00\x10{", io.ErrUnexpectedEOF},
		{"wrong version", frame(`{"v":2,"id":"a","tool":"t","args":""}`), ErrVersion},
		{"no version", frame(`{"id":"a","tool":"t","args":""}`), ErrVersion},
		{"a newline-delimited client", "{\"v\":1,\"id\":\"a\"}\n", ErrFrameTooLarge},
		{"HTTP", "GET / HTTP/1.1\r\n\r\n", ErrFrameTooLarge},
	} {
		t.Run(tc.name, func(t *testing.T) {
			transports(t, func(t *testing.T, parent, child io.ReadWriteCloser) {
				s := serve(t, parent, child, echo)
				s.send(good)
				s.receive()
				go func() {
					_, _ = child.Write([]byte(tc.bytes))
					if strings.HasPrefix(tc.name, "cut") {
						child.Close()
					}
				}()
				p := protocolError(t, s.wait(), tc.reason)
				if p.Offset != int64(prefix) {
					t.Errorf("offset %d, the frame starts at %d", p.Offset, prefix)
				}
			})
		})
	}
	// Everything that the golden file calls a protocol error ends the channel too.
	for _, g := range readGolden(t, "request") {
		if g.OK || len(g.bytes()) == 0 {
			continue
		}
		parent, child := nonblockingPair(t)
		s := serve(t, parent, child, func(ctx context.Context, r Request) (Response, error) {
			t.Errorf("%s: handler called with %+v", g.Name, r)
			return echo(ctx, r)
		})
		s.send(string(g.bytes()))
		var p *ProtocolError
		if err := s.wait(); !errors.As(err, &p) || p.Offset != 0 || errors.Is(err, ErrVersion) != (g.Error == "version") {
			t.Errorf("%s: Serve = %v", g.Name, err)
		}
		if u := s.Usage(); u != (Usage{}) {
			t.Errorf("%s: usage %+v", g.Name, u) // W34
		}
		if _, err := ReadFrame(child, nil); err != io.EOF {
			t.Errorf("%s: the child reads %v, want the channel closed without an answer (W50)", g.Name, err)
		}
		if _, err := child.Write([]byte("more")); !errors.Is(err, syscall.EPIPE) {
			t.Errorf("%s: after the fault the child writes on: %v (L8)", g.Name, err)
		}
		child.Close()
	}
}

// W51, W52, L26, C5, D10: an id in flight is fatal always, a used one while MaxCalls
// bounds the memory for it.
func TestCallIDsAreUnique(t *testing.T) {
	leaks(t)
	for _, tc := range []struct {
		name     string
		maxCalls int
		fatal    bool
	}{{"no MaxCalls", 0, false}, {"MaxCalls", 10, true}, {"MaxCalls too large to keep ids", maxSeenCalls + 1, false}} {
		parent, child := nonblockingPair(t)
		s := serve(t, parent, child, echo, WithBudget(&Budget{MaxCalls: tc.maxCalls}))
		s.send(callText("a", ""))
		s.receive()
		s.send(callText("a", ""))
		if tc.fatal {
			protocolError(t, s.wait(), ErrDuplicateID)
		} else {
			s.receive()
			s.end()
		}
		if u := s.Usage(); tc.fatal && u.Accepted != 1 || !tc.fatal && u.Accepted != 2 {
			t.Errorf("%s: usage %+v", tc.name, u)
		}

		parent, child = nonblockingPair(t)
		g := new(gate)
		s = serve(t, parent, child, g.handle, WithBudget(&Budget{MaxCalls: tc.maxCalls}), WithGrace(time.Millisecond))
		s.send(callText("a", ""))
		eventually(t, "handler", func() bool { return g.inside() == 1 })
		s.send(callText("a", ""))
		p := protocolError(t, s.wait(), ErrDuplicateID)
		if want := int64(len(callText("a", "")) + headerBytes); p.Offset != want {
			t.Errorf("%s: offset %d, want that of the second frame, %d", tc.name, p.Offset, want)
		}
		close(g.door("a"))
	}
	// A refused id was not accepted, so it may come again.
	parent, child := nonblockingPair(t)
	g := new(gate)
	s := serve(t, parent, child, g.handle, WithBudget(&Budget{MaxCalls: 10}), WithMaxInflight(1))
	s.send(callText("a", ""))
	eventually(t, "handler", func() bool { return g.inside() == 1 })
	for range 2 {
		s.send(callText("b", ""))
		if r := s.receive(); r.Kind != string(toolfail.RateLimited) {
			t.Errorf("got %+v", r)
		}
	}
	close(g.door("a"))
	close(g.door("b"))
	s.receive()
	s.send(callText("b", "now"))
	if r := s.receive(); r.Value != "now" {
		t.Errorf("got %+v", r)
	}
	s.end()
}

// C19, D4: refusals are answered, but a busy loop is not answered for ever.
func TestCallingOnAfterTheQuotaIsCut(t *testing.T) {
	transports(t, func(t *testing.T, parent, child io.ReadWriteCloser) {
		s := serve(t, parent, child, echo, WithBudget(&Budget{MaxCalls: 2}), WithMaxRefusals(5))
		for i := range 7 {
			s.send(callText(fmt.Sprint(i), ""))
			if r := s.receive(); r.OK != (i < 2) || !r.OK && r.Kind != string(toolfail.Quota) {
				t.Errorf("call %d: %+v", i, r)
			}
		}
		s.send(callText("last", ""))
		p := protocolError(t, s.wait(), ErrRefusals)
		if p.Offset <= 0 {
			t.Errorf("offset %d", p.Offset)
		}
		if u := s.Usage(); u.Accepted != 2 || u.Refused != 5 {
			t.Errorf("usage %+v, want 2 accepted and 5 refused", u)
		}
	})
}

// C19: a child whose calls all hang is cut as well; the cap on calls in flight
// does not hide that its calls are used up.
func TestQuotaComesBeforeTheInflightCap(t *testing.T) {
	leaks(t)
	parent, child := nonblockingPair(t)
	g := new(gate)
	s := serve(t, parent, child, g.handle, WithBudget(&Budget{MaxCalls: 2}), WithMaxInflight(2), WithMaxRefusals(3), WithGrace(time.Millisecond))
	s.send(callText("a", ""), callText("b", ""))
	for i := range 3 {
		s.send(callText(fmt.Sprint(i), ""))
		if r := s.receive(); r.Kind != string(toolfail.Quota) {
			t.Errorf("got %+v, want class quota", r)
		}
	}
	s.send(callText("last", ""))
	protocolError(t, s.wait(), ErrRefusals)
	close(g.door("a"))
	close(g.door("b"))
}

// C22, W51: args above their cap are refused without being fatal or charged.
func TestLongArgsAreRefused(t *testing.T) {
	leaks(t)
	parent, child := nonblockingPair(t)
	type attempt struct {
		req  Request
		resp Response
	}
	var refused []attempt
	s := serve(t, parent, child, echo, WithMaxArgsBytes(10), WithBudget(&Budget{MaxCalls: 2}), WithOnRefused(func(q Request, r Response) {
		refused = append(refused, attempt{q, r})
	}))
	s.send(callText("a", "12345678901"))
	if r := s.receive(); r.ID != "a" || r.Kind != string(toolfail.Invalid) || r.Error != "args longer than 10 bytes" {
		t.Errorf("got %+v", r)
	}
	s.send(`{"v":1,"id":"b","args":"","tool":"` + strings.Repeat("t", maxToolBytes+1) + `"}`)
	if r := s.receive(); r.ID != "b" || r.Kind != string(toolfail.Invalid) {
		t.Errorf("got %+v", r)
	}
	for _, id := range []string{"c", "d"} {
		s.send(callText(id, "1234567890"))
		if r := s.receive(); !r.OK || r.Value != "1234567890" {
			t.Errorf("got %+v", r)
		}
	}
	s.send(callText("e", ""))
	s.receive()
	s.end()
	// D4: an audit sees every attempt that no handler saw.
	if len(refused) != 3 || refused[0].req.ID != "a" || refused[0].req.Tool != "t" || refused[0].resp.Kind != "invalid" ||
		refused[1].req.ID != "b" || refused[2].req.ID != "e" || refused[2].resp.Kind != "quota" {
		t.Errorf("OnRefused saw %+v", refused)
	}
	if u := s.Usage(); u.Accepted != 2 || u.Refused != 3 {
		t.Errorf("usage %+v", u)
	}
}

// J13: the sum of what is in flight is bounded even where single calls may be large.
func TestInflightBytesAreBounded(t *testing.T) {
	leaks(t)
	parent, child := nonblockingPair(t)
	g := new(gate)
	s := serve(t, parent, child, g.handle, WithMaxArgsBytes(MaxFrameBytes))
	big := strings.Repeat("x", 15<<20)
	accepted := 0
	for i := range 6 {
		id := fmt.Sprint(i)
		s.send(callText(id, big))
		if i < 4 {
			eventually(t, "handler", func() bool { return g.inside() == i+1 })
			accepted++
			continue
		}
		if r := s.receive(); r.ID != id || r.Kind != string(toolfail.RateLimited) {
			t.Errorf("call %d: %+v, want class rate_limited at %d bytes in flight", i, r, MaxInflightBytes)
		}
	}
	s.send(callText("small", "")) // there is room for this one
	eventually(t, "handler", func() bool { return g.inside() == accepted+1 })
	close(g.door("small"))
	s.receive()
	for i := range accepted {
		close(g.door(fmt.Sprint(i)))
		s.receive()
	}
	s.mu.Lock()
	left := s.slotBytes
	s.mu.Unlock()
	if left != 0 {
		t.Errorf("%d bytes stay charged", left)
	}
	s.end()
}

// J13: 12 frames of 16 MiB cost the parent one frame at a time. The live heap
// is sampled while they are handled.
func TestLargeFramesDoNotPileUp(t *testing.T) {
	leaks(t)
	parent, child := nonblockingPair(t)
	s := serve(t, parent, child, echo)
	text := callText("x", strings.Repeat("y", MaxFrameBytes-100))
	frame := append(header(uint32(len(text))), text...)
	text = ""
	runtime.GC()
	var base, now runtime.MemStats
	runtime.ReadMemStats(&base)
	var peak uint64
	for range 12 {
		written := make(chan error, 1)
		go func() {
			_, err := child.Write(frame)
			written <- err
		}()
		if r := s.receive(); r.Kind != string(toolfail.Invalid) {
			t.Fatalf("got %+v", r)
		}
		if err := <-written; err != nil {
			t.Fatal(err)
		}
		runtime.ReadMemStats(&now)
		peak = max(peak, now.HeapSys-now.HeapReleased)
	}
	// Buffers that grew and have not been collected yet count here too.
	if limit := base.HeapSys + 160<<20; peak > limit {
		t.Errorf("the heap grew to %d MiB, from %d MiB", peak>>20, base.HeapSys>>20)
	}
	s.end()
}

// J13, D5: a child that never reads ends Serve, and holds nothing up meanwhile.
func TestUnreadResponses(t *testing.T) {
	transports(t, func(t *testing.T, parent, child io.ReadWriteCloser) {
		var ran atomic.Int64
		s := serve(t, parent, child, func(ctx context.Context, r Request) (Response, error) {
			ran.Add(1)
			return Response{OK: true, Value: strings.Repeat("v", 100<<10)}, nil
		}, WithWriteTimeout(100*time.Millisecond))
		go func() {
			for i := 0; ; i++ {
				if WriteFrame(child, []byte(callText(fmt.Sprint(i), ""))) != nil {
					return
				}
			}
		}()
		p := protocolError(t, s.wait(), ErrUnread)
		if p.Offset != -1 {
			t.Errorf("offset %d", p.Offset)
		}
		// One write, 1 MiB behind it, and the calls in flight: no more was done
		// for a child that took nothing.
		if n := ran.Load(); n > 2*DefaultMaxInflight+20 {
			t.Errorf("%d calls ran", n)
		}
		s.out.mu.Lock()
		defer s.out.mu.Unlock()
		if n := len(s.out.queue); n != 0 {
			t.Errorf("%d bytes stay queued", n)
		}
	})
}

// D5: refusals that nobody reads end Serve too.
func TestUnreadRefusals(t *testing.T) {
	leaks(t)
	parent, child := nonblockingPair(t)
	g := new(gate)
	s := serve(t, parent, child, g.handle, WithMaxInflight(1), WithWriteTimeout(100*time.Millisecond), WithGrace(time.Millisecond))
	go func() {
		for i := 0; ; i++ {
			if WriteFrame(child, []byte(callText(fmt.Sprint(i), ""))) != nil {
				return
			}
		}
	}()
	protocolError(t, s.wait(), ErrUnread)
	if n := g.inside(); n != 1 {
		t.Errorf("%d handlers ran", n)
	}
	close(g.door("0"))
}

// A child that reads slowly, but reads, is served.
func TestSlowReaderIsServed(t *testing.T) {
	leaks(t)
	parent, child := nonblockingPair(t)
	value := strings.Repeat("v", 500<<10)
	s := serve(t, parent, child, func(context.Context, Request) (Response, error) {
		return Response{OK: true, Value: value}, nil
	})
	const calls = 40
	go func() {
		for i := range calls {
			if WriteFrame(child, []byte(callText(fmt.Sprint(i), ""))) != nil {
				return
			}
		}
	}()
	time.Sleep(50 * time.Millisecond) // all that fits is written by now
	seen := map[string]bool{}
	for range calls {
		r := s.receive()
		if !r.OK || r.Value != value || seen[r.ID] {
			t.Fatalf("got %.100v", r)
		}
		seen[r.ID] = true
	}
	s.end()
}

// A child that shuts its receiving side, but calls on, gets no tools any more and
// is cut in the end; one that just dies is a clean end.
func TestPeerThatTakesNoResponses(t *testing.T) {
	leaks(t)
	parent, child := nonblockingPair(t)
	s := serve(t, parent, child, func(ctx context.Context, r Request) (Response, error) {
		return echo(ctx, r)
	}, WithMaxRefusals(3))
	raw, err := child.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if cerr := raw.Control(func(fd uintptr) { err = syscall.Shutdown(int(fd), syscall.SHUT_RD) }); cerr != nil || err != nil {
		t.Fatal(cerr, err)
	}
	s.send(callText("a", ""))
	eventually(t, "failed write", func() bool { s.mu.Lock(); defer s.mu.Unlock(); return s.gone })
	for i := range 4 {
		if WriteFrame(child, []byte(callText(fmt.Sprint(i), ""))) != nil {
			break
		}
	}
	protocolError(t, s.wait(), ErrRefusals)
	if u := s.Usage(); u.Accepted != 1 || u.Refused != 3 {
		t.Errorf("usage %+v", u)
	}

	parent, child = nonblockingPair(t)
	g := new(gate)
	s = serve(t, parent, child, g.handle)
	s.send(callText("a", ""), callText("b", ""))
	eventually(t, "handlers", func() bool { return g.inside() == 2 })
	close(g.door("a"))
	close(g.door("b"))
	s.end()
}

// W8: frames of many responders never mix, and each goes out by one write if
// nothing else is being written.
func TestResponsesNeverInterleave(t *testing.T) {
	leaks(t)
	parent, child := nonblockingPair(t)
	w := &recorder{ReadWriteCloser: parent}
	s := serve(t, w, child, func(_ context.Context, r Request) (Response, error) {
		return Response{OK: true, Value: strings.Repeat(r.Args, 1+len(r.ID)*1000)}, nil
	})
	c := NewClient(child)
	var callers sync.WaitGroup
	for i := range 32 {
		callers.Go(func() {
			for range 20 {
				id := fmt.Sprintf("%d-%s", i, strings.Repeat("i", i))
				args := string(rune('a' + i%26))
				r, err := c.CallWithID(context.Background(), id, "t", args)
				if err != nil || r.Value != strings.Repeat(args, 1+len(id)*1000) {
					t.Errorf("call %s: %.50v, %v", id, r, err)
					return
				}
			}
		})
	}
	mustReturn(t, "640 calls", func() bool { callers.Wait(); return true })
	c.Close()
	if err := s.wait(); err != nil {
		t.Error(err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	frames := 0
	for _, p := range w.writes {
		r := bytes.NewReader(p)
		for {
			_, err := ReadFrame(r, nil)
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatalf("a write holds no whole frames: %v", err)
			}
			frames++
		}
	}
	if frames != 640 {
		t.Errorf("%d frames in %d writes, want 640", frames, len(w.writes))
	}
}

// recorder keeps what is written, by call.
type recorder struct {
	io.ReadWriteCloser
	mu     sync.Mutex
	writes [][]byte
}

func (r *recorder) Write(p []byte) (int, error) {
	r.mu.Lock()
	r.writes = append(r.writes, bytes.Clone(p))
	r.mu.Unlock()
	return r.ReadWriteCloser.Write(p)
}

// B1: what a handler holds does not change when later frames arrive.
func TestArgsDoNotAliasTheReceiveBuffer(t *testing.T) {
	leaks(t)
	parent, child := nonblockingPair(t)
	var mu sync.Mutex
	held := map[string]Request{}
	s := serve(t, parent, child, func(_ context.Context, r Request) (Response, error) {
		mu.Lock()
		defer mu.Unlock()
		held[r.ID] = r
		return Response{OK: true}, nil
	})
	for i := range 50 {
		id := fmt.Sprint("id", i)
		s.send(callText(id, strings.Repeat(fmt.Sprint(i%10), 100)))
		s.receive()
	}
	mu.Lock()
	defer mu.Unlock()
	for i := range 50 {
		id := fmt.Sprint("id", i)
		if r := held[id]; r.ID != id || r.Tool != "t" || r.Args != strings.Repeat(fmt.Sprint(i%10), 100) {
			t.Fatalf("request %s changed: %+v", id, r)
		}
	}
	s.end()
}

// Usage is right while calls run, not only at the end.
func TestUsageWhileRunning(t *testing.T) {
	leaks(t)
	parent, child := nonblockingPair(t)
	g := new(gate)
	s := serve(t, parent, child, g.handle)
	if u := s.Usage(); u != (Usage{}) {
		t.Errorf("usage before the first call: %+v", u)
	}
	s.send(callText("a", "xyz"), callText("b", ""))
	eventually(t, "handlers", func() bool { return g.inside() == 2 })
	first := s.Usage()
	time.Sleep(3 * time.Millisecond)
	second := s.Usage()
	if first.Accepted != 2 || second.Busy < first.Busy+3*time.Millisecond {
		t.Errorf("usage %+v, 3 ms later %+v", first, second)
	}
	close(g.door("a"))
	s.receive()
	if u := s.Usage(); u.Bytes != 3 {
		t.Errorf("usage %+v, want 3 bytes", u)
	}
	close(g.door("b"))
	s.receive()
	idle := s.Usage()
	time.Sleep(3 * time.Millisecond)
	if u := s.Usage(); u != idle {
		t.Errorf("usage %+v changed to %+v without a call in flight", idle, u)
	}
	s.end()
	if u := s.Usage(); u != idle {
		t.Errorf("usage %+v, after Serve %+v", idle, u)
	}
}

// W60: without an io.Closer Serve still returns when its context ends.
func TestServeWithoutCloser(t *testing.T) {
	leaks(t)
	parent, child := nonblockingPair(t)
	ctx, cancel := context.WithCancel(context.Background())
	s := NewServer(bare{parent}, echo, WithGrace(10*time.Millisecond))
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx) }()
	cancel()
	if err := mustReturn(t, "Serve", func() error { return <-done }); !errors.Is(err, context.Canceled) {
		t.Errorf("Serve = %v", err)
	}
	// A request that comes too late is not accepted.
	if err := WriteFrame(child, []byte(callText("late", ""))); err != nil {
		t.Fatal(err)
	}
	time.Sleep(5 * time.Millisecond)
	if u := s.Usage(); u != (Usage{}) {
		t.Errorf("usage %+v after Serve returned", u)
	}
	child.Close() // lets the blocked reader go
}
