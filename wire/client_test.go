package wire

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// peer is a hand-made parent at the other end of a Client.
type peer struct {
	t    *testing.T
	conn io.ReadWriteCloser
}

func (p peer) request() Request {
	p.t.Helper()
	type out struct {
		r   Request
		err error
	}
	o := mustReturn(p.t, "read of a request", func() out {
		text, err := ReadFrame(p.conn, nil)
		if err != nil {
			return out{err: err}
		}
		r, _, err := decodeRequest(text, MaxFrameBytes)
		return out{r, err}
	})
	if o.err != nil {
		p.t.Fatalf("read request: %v", o.err)
	}
	return o.r
}

func (p peer) respond(text string) {
	p.t.Helper()
	if err := mustReturn(p.t, "write of a response", func() error { return WriteFrame(p.conn, []byte(text)) }); err != nil {
		p.t.Fatalf("write response: %v", err)
	}
}

func (p peer) answer(id, value string) {
	p.t.Helper()
	p.respond(fmt.Sprintf(`{"v":1,"id":%q,"ok":true,"value":%q}`, id, value))
}

type answer struct {
	r   Response
	err error
}

// goCall calls in the background.
func goCall(ctx context.Context, c *Client, id, args string) chan answer {
	ch := make(chan answer, 1)
	go func() {
		r, err := c.CallWithID(ctx, id, "t", args)
		ch <- answer{r, err}
	}()
	return ch
}

func get(t *testing.T, ch chan answer) answer {
	t.Helper()
	return mustReturn(t, "call", func() answer { return <-ch })
}

// W54, W56, W57: responses go by id alone; what nobody waits for is dropped.
func TestClientMatchesResponsesByID(t *testing.T) {
	transports(t, func(t *testing.T, parent, child io.ReadWriteCloser) {
		c, p := NewClient(child), peer{t, parent}
		defer c.Close()
		calls := map[string]chan answer{}
		for _, id := range []string{"a", "b", "c"} {
			calls[id] = goCall(context.Background(), c, id, id)
			if r := p.request(); r.ID != id || r.Args != id || r.Tool != "t" || r.DeadlineMS != 0 {
				t.Fatalf("got %+v", r)
			}
		}
		p.answer("nobody", "x")
		p.answer("c", "3")
		p.answer("c", "again")
		p.answer("a", "1")
		p.answer("b", "2")
		for id, want := range map[string]string{"a": "1", "b": "2", "c": "3"} {
			if o := get(t, calls[id]); o.err != nil || !o.r.OK || o.r.ID != id || o.r.Value != want {
				t.Errorf("call %s: %+v", id, o)
			}
		}
		// The id is free again, and the second answer to c was delivered to nobody.
		again := goCall(context.Background(), c, "c", "")
		p.request()
		p.answer("c", "new")
		if o := get(t, again); o.r.Value != "new" {
			t.Errorf("got %+v", o)
		}
	})
}

// W54: ids that the client mints differ, also from those of another client.
func TestClientMintsUniqueIDs(t *testing.T) {
	leaks(t)
	seen := map[string]bool{}
	for range 3 {
		parent, child := nonblockingPair(t)
		c, p := NewClient(child), peer{t, parent}
		for range 20 {
			ch := make(chan answer, 1)
			go func() {
				r, err := c.Call(context.Background(), "t", "")
				ch <- answer{r, err}
			}()
			r := p.request()
			if seen[r.ID] || len(r.ID) > MaxIDBytes {
				t.Fatalf("id %q is there twice or too long", r.ID)
			}
			seen[r.ID] = true
			p.respond(fmt.Sprintf(`{"v":1,"id":%q,"ok":false,"kind":"denied","error":"no"}`, r.ID))
			if o := get(t, ch); o.err != nil || o.r.OK || o.r.Kind != "denied" || o.r.Error != "no" {
				t.Errorf("a failed call is %+v, want a response", o)
			}
		}
		c.Close()
	}
}

// W55: the end of the connection fails what is pending, and what comes later at once.
func TestClientEnds(t *testing.T) {
	for _, tc := range []struct {
		name   string
		end    func(c *Client, p peer)
		reason error
	}{
		{"parent closes", func(c *Client, p peer) { p.conn.Close() }, io.EOF},
		{"closed here", func(c *Client, p peer) { c.Close(); c.Close() }, ErrClosed},
		{"other version", func(c *Client, p peer) { p.respond(`{"v":2,"id":"a","ok":true}`) }, ErrVersion},
		{"no response", func(c *Client, p peer) { p.respond(`{"v":1,"id":"a","tool":"t","args":""}`) }, nil},
		{"too large", func(c *Client, p peer) { _, _ = p.conn.Write(header(MaxFrameBytes + 1)) }, ErrFrameTooLarge},
		{"empty", func(c *Client, p peer) { _, _ = p.conn.Write(header(0)) }, ErrEmptyFrame},
		{"cut", func(c *Client, p peer) { _, _ = p.conn.Write([]byte("\x00\x00\x00\x09{")); p.conn.Close() }, io.ErrUnexpectedEOF},
	} {
		t.Run(tc.name, func(t *testing.T) {
			transports(t, func(t *testing.T, parent, child io.ReadWriteCloser) {
				c, p := NewClient(child), peer{t, parent}
				var calls []chan answer
				for i := range 5 {
					calls = append(calls, goCall(context.Background(), c, fmt.Sprint(i), ""))
					p.request()
				}
				tc.end(c, p)
				for _, ch := range calls {
					if o := get(t, ch); !errors.Is(o.err, ErrClosed) || tc.reason != nil && !errors.Is(o.err, tc.reason) {
						t.Errorf("pending call: %+v, want %v", o, tc.reason)
					}
				}
				if o := get(t, goCall(context.Background(), c, "later", "")); !errors.Is(o.err, ErrClosed) {
					t.Errorf("later call: %+v", o)
				}
				if tc.reason != io.EOF && tc.reason != ErrClosed {
					_, err := c.Call(context.Background(), "t", "")
					protocolError(t, err, ErrClosed)
				}
			})
		})
	}
}

// W57: a caller's context ends its call alone; the late response is dropped.
func TestClientContextEndsOneCall(t *testing.T) {
	transports(t, func(t *testing.T, parent, child io.ReadWriteCloser) {
		c, p := NewClient(child), peer{t, parent}
		defer c.Close()
		ctx, cancel := context.WithCancel(context.Background())
		// The first to wait reads for all: both orders have to work.
		for _, order := range [][2]string{{"gone", "stays"}, {"stays", "gone"}} {
			calls := map[string]chan answer{}
			ctx, cancel = context.WithCancel(context.Background())
			for _, id := range order {
				use := context.Background()
				if id == "gone" {
					use = ctx
				}
				calls[id] = goCall(use, c, id, "")
				p.request()
			}
			// Half of a response is on its way when the reader gives up.
			late := `{"v":1,"id":"gone","ok":true,"value":"late"}`
			frame := string(header(uint32(len(late)))) + late
			if _, err := parent.Write([]byte(frame[:11])); err != nil {
				t.Fatal(err)
			}
			cancel()
			if o := get(t, calls["gone"]); !errors.Is(o.err, context.Canceled) || errors.Is(o.err, ErrClosed) {
				t.Errorf("order %v: %+v, want context.Canceled", order, o)
			}
			if _, err := parent.Write([]byte(frame[11:])); err != nil {
				t.Fatal(err)
			}
			p.answer("stays", "v")
			if o := get(t, calls["stays"]); o.err != nil || o.r.Value != "v" {
				t.Errorf("order %v: the other call: %+v", order, o)
			}
		}
		cancel()
		if o := get(t, goCall(ctx, c, "z", "")); !errors.Is(o.err, context.Canceled) {
			t.Errorf("call with an ended context: %+v", o)
		}
	})
}

// W43: the time that is left to the context travels along, never as 0.
func TestClientSendsItsDeadline(t *testing.T) {
	leaks(t)
	parent, child := nonblockingPair(t)
	c, p := NewClient(child), peer{t, parent}
	defer c.Close()
	for i, d := range []time.Duration{time.Hour, 10 * time.Second} {
		ctx, cancel := context.WithTimeout(context.Background(), d)
		ch := goCall(ctx, c, fmt.Sprint(i), "")
		r := p.request()
		if ms := d.Milliseconds(); r.DeadlineMS > ms || r.DeadlineMS < ms-5000 {
			t.Errorf("deadline of %v travels as %d ms", d, r.DeadlineMS)
		}
		p.answer(r.ID, "")
		get(t, ch)
		cancel()
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Millisecond)
	defer cancel()
	ch := goCall(ctx, c, "short", "")
	if r := p.request(); r.DeadlineMS < 1 || r.DeadlineMS > 31 {
		t.Errorf("deadline of 30 ms travels as %d ms", r.DeadlineMS)
	}
	if o := get(t, ch); !errors.Is(o.err, context.DeadlineExceeded) {
		t.Errorf("got %+v", o)
	}
}

// W58, W4, W53: what is refused before a byte is written.
func TestClientRefusesLocally(t *testing.T) {
	leaks(t)
	parent, child := nonblockingPair(t)
	c, p := NewClient(child), peer{t, parent}
	defer c.Close()
	pending := goCall(context.Background(), c, "dup", "")
	p.request()
	for _, tc := range []struct {
		name, id, tool, args string
		reason               error
	}{
		{"pending id", "dup", "t", "", ErrDuplicateID},
		{"no id", "", "t", "", nil},
		{"long id", strings.Repeat("i", MaxIDBytes+1), "t", "", nil},
		{"no tool", "a", "", "", nil},
		{"id that is not UTF-8", "a\xff", "t", "", errUTF8},
		{"tool that is not UTF-8", "a", "t\xff", "", errUTF8},
		{"args that are not UTF-8", "a", "t", "\xed\xa0\x80", errUTF8},
		{"args above a frame", "a", "t", strings.Repeat("x", MaxFrameBytes+1), ErrFrameTooLarge},
		{"args above a frame after escaping", "a", "t", strings.Repeat("\x01", MaxFrameBytes/5), ErrFrameTooLarge},
	} {
		if _, err := c.CallWithID(context.Background(), tc.id, tc.tool, tc.args); err == nil || tc.reason != nil && !errors.Is(err, tc.reason) {
			t.Errorf("%s: %v, want %v", tc.name, err, tc.reason)
		}
	}
	next := goCall(context.Background(), c, "next", "")
	if r := p.request(); r.ID != "next" {
		t.Errorf("%+v was written by a refused call", r)
	}
	p.answer("next", "")
	p.answer("dup", "")
	get(t, next)
	get(t, pending)
}

// A parent that does not read cannot hold a caller beyond its context.
func TestClientContextEndsABlockedWrite(t *testing.T) {
	transports(t, func(t *testing.T, parent, child io.ReadWriteCloser) {
		c := NewClient(child)
		defer c.Close()
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		calls := []chan answer{goCall(ctx, c, "a", strings.Repeat("x", 4<<20))}
		if _, err := io.ReadFull(parent, make([]byte, 5)); err != nil { // the write is under way
			t.Fatal(err)
		}
		calls = append(calls, goCall(ctx, c, "b", "waits for its turn to write"))
		time.Sleep(5 * time.Millisecond)
		cancel()
		for _, ch := range calls {
			if o := get(t, ch); !errors.Is(o.err, context.Canceled) {
				t.Errorf("got %+v", o)
			}
		}
		// Half a frame is in the channel, so it is of no use any more.
		if o := get(t, goCall(context.Background(), c, "c", "")); !errors.Is(o.err, ErrClosed) {
			t.Errorf("call after a cut frame: %+v", o)
		}
	})
}

// W58: many callers, contexts that end at any time, one connection.
func TestClientUnderConcurrency(t *testing.T) {
	transports(t, func(t *testing.T, parent, child io.ReadWriteCloser) {
		s := serve(t, parent, child, func(ctx context.Context, r Request) (Response, error) {
			if strings.HasPrefix(r.Args, "slow") {
				select {
				case <-ctx.Done():
				case <-time.After(time.Millisecond):
				}
			}
			return Response{OK: true, Value: r.Args}, nil
		}, WithMaxInflight(1000))
		c := NewClient(child)
		var callers sync.WaitGroup
		var canceled atomic.Int64
		for i := range 16 {
			callers.Go(func() {
				for j := range 60 {
					args := fmt.Sprintf("%d-%d-%s", i, j, strings.Repeat("x", j*37))
					ctx, cancel := context.Background(), context.CancelFunc(func() {})
					if j%3 == 0 {
						args = "slow" + args
						ctx, cancel = context.WithTimeout(ctx, time.Duration(i)*200*time.Microsecond)
					}
					r, err := c.Call(ctx, "t", args)
					cancel()
					switch {
					case errors.Is(err, ErrClosed) && errors.Is(err, context.DeadlineExceeded):
						return // this caller's context ended in the middle of its write
					case errors.Is(err, context.DeadlineExceeded):
						canceled.Add(1)
					case err != nil:
						if !errors.Is(err, ErrClosed) {
							t.Error(err)
						}
						return
					case r.OK && r.Value != args:
						t.Errorf("response to another call: %.40q, want %.40q", r.Value, args)
						return
					case !r.OK && r.Kind != "transient":
						t.Errorf("got %+v", r)
						return
					}
				}
			})
		}
		mustReturn(t, "960 calls", func() bool { callers.Wait(); return true })
		if canceled.Load() == 0 {
			t.Error("no context ended in time: the test tries nothing")
		}
		c.Close()
		_ = s.wait()
	})
}

// A connection without a read deadline, or without Close, works too.
func TestClientOverABareConnection(t *testing.T) {
	leaks(t)
	p, ch := net.Pipe()
	s := serve(t, p, ch, echo)
	c := NewClient(bare{ch})
	if r, err := c.Call(context.Background(), "t", "x"); err != nil || r.Value != "x" {
		t.Errorf("got %+v, %v", r, err)
	}
	c.Close()
	if _, err := c.Call(context.Background(), "t", "x"); !errors.Is(err, ErrClosed) {
		t.Errorf("call after Close: %v", err)
	}
	s.end()
}

// W47: a deadline far away does not overflow.
func TestClientWithAFarDeadline(t *testing.T) {
	leaks(t)
	parent, child := nonblockingPair(t)
	s := serve(t, parent, child, echo)
	c := NewClient(child)
	ctx, cancel := context.WithDeadline(context.Background(), time.Now().Add(math.MaxInt64))
	defer cancel()
	if r, err := c.Call(ctx, "t", "x"); err != nil || !r.OK {
		t.Errorf("got %+v, %v", r, err)
	}
	c.Close()
	s.end()
}
