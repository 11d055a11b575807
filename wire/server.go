package wire

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"example.com/jail/wire/toolfail"
)

const (
	// DefaultMaxArgsBytes and DefaultMaxValueBytes bound one call's args and one
	// call's value, decoded (C22).
	DefaultMaxArgsBytes  = 1 << 20
	DefaultMaxValueBytes = 1 << 20
	// MaxInflightBytes bounds the sum of id, tool and args over all calls whose
	// handlers run. A request above it is refused like one above the cap on
	// their number (J13).
	MaxInflightBytes = 64 << 20
	// DefaultMaxRefusals is how often a child may call after its calls are used
	// up (C19).
	DefaultMaxRefusals = 1024
	// DefaultWriteTimeout is how long the child may take to read what was
	// written to it at once (J13).
	DefaultWriteTimeout = 30 * time.Second
	// DefaultGrace is how long Serve waits for handlers that ignore their
	// context (W49).
	DefaultGrace = time.Second

	// maxSeenCalls bounds the MaxCalls for which all ids of a run are kept, so
	// that keeping them costs at most some 16 MiB (W52).
	maxSeenCalls = 1 << 16

	// maxIdle is how many goroutines of a server may wait for the stream.
	maxIdle = 2
)

// ServerOption changes a default of a Server.
type ServerOption func(*Server)

// WithMaxInflight sets how many calls may be in flight at once. n <= 0 is
// DefaultMaxInflight (W31).
func WithMaxInflight(n int) ServerOption {
	return func(s *Server) { s.maxInflight = positive(n, DefaultMaxInflight) }
}

// WithMaxCallDeadline sets the longest time that a call may take before it is
// answered with class transient. d <= 0 is no cap, which is the default. The
// child can ask for a shorter time, never for a longer one (W43).
func WithMaxCallDeadline(d time.Duration) ServerOption {
	return func(s *Server) { s.maxDeadline = max(d, 0) }
}

// WithBudget sets what the child may use in all. Nil, the default, is no limit.
func WithBudget(b *Budget) ServerOption {
	return func(s *Server) {
		if b != nil {
			s.budget = b
		}
	}
}

// WithMaxArgsBytes sets the longest args of one call in bytes, decoded. n <= 0 is
// DefaultMaxArgsBytes. A longer one is answered with class invalid and is not
// accepted. A limit above MaxFrameBytes makes Serve fail, since it could not hold
// (L9).
func WithMaxArgsBytes(n int) ServerOption {
	return func(s *Server) { s.maxArgs = positive(n, DefaultMaxArgsBytes) }
}

// WithMaxValueBytes sets the longest value of one response in bytes, before
// escaping. n <= 0 is DefaultMaxValueBytes. A longer one is replaced by a failure
// of class quota, never cut, and so is one that makes too large a frame after
// escaping. A limit above MaxFrameBytes makes Serve fail (L9).
func WithMaxValueBytes(n int) ServerOption {
	return func(s *Server) { s.maxValue = positive(n, DefaultMaxValueBytes) }
}

// WithMaxRefusals sets how many calls are answered with a refusal after the
// Budget's calls are used up; the next one ends Serve with ErrRefusals. n <= 0 is
// DefaultMaxRefusals (C19).
func WithMaxRefusals(n int) ServerOption {
	return func(s *Server) { s.maxRefusals = positive(n, DefaultMaxRefusals) }
}

// WithWriteTimeout sets how long the child may take to read the responses that
// were written to it at once; then Serve ends with ErrUnread. d <= 0 is
// DefaultWriteTimeout. The limit is kept to within a half.
func WithWriteTimeout(d time.Duration) ServerOption {
	return func(s *Server) { s.out.timeout = positive(d, DefaultWriteTimeout) }
}

// WithGrace sets how long Serve waits, once the channel has ended, for handlers
// to return. d <= 0 is DefaultGrace.
func WithGrace(d time.Duration) ServerOption {
	return func(s *Server) { s.grace = positive(d, DefaultGrace) }
}

// WithOnRefused calls f for every request that is answered with a failure
// without its handler being called, for an audit of what never reached a
// handler. Text of the request that is above its limit is missing from it. f is
// called by one goroutine at a time, which reads no further request meanwhile.
func WithOnRefused(f func(Request, Response)) ServerOption {
	return func(s *Server) { s.onRefused = f }
}

func positive[T int | time.Duration](n, def T) T {
	if n <= 0 {
		return def
	}
	return n
}

// Server answers the calls of one child on one connection. Its methods are safe
// for concurrent use.
type Server struct {
	rw      io.ReadWriter
	handler Handler

	maxInflight, maxArgs, maxValue, maxRefusals int
	maxDeadline, grace                          time.Duration
	budget                                      *Budget
	onRefused                                   func(Request, Response)

	used    atomic.Bool
	parent  context.Context
	ctx     context.Context // of the handlers
	cancel  context.CancelFunc
	stopped chan struct{}
	once    sync.Once
	err     error          // why it stopped; read after stopped is closed
	work    sync.WaitGroup // readers and calls

	relay  relay
	stream chan struct{} // hands the stream on; unbuffered
	idle   atomic.Int32  // goroutines that wait for it

	// The reader's state belongs to the one goroutine that reads.
	in     *bufio.Reader
	frames frameReader
	offset int64

	out outbox // locked before mu where both are

	mu        sync.Mutex
	ids       map[string]struct{} // calls without an answer
	seen      map[string]struct{} // all accepted calls, or nil (W52)
	slots     int                 // handlers that have not returned (W46)
	slotBytes int
	refusals  int  // after the calls were used up
	gone      bool // the peer takes no more responses
	ending    bool // nothing is accepted any more
	usage     Usage
	busySince time.Time // while slots > 0
	over      bool      // Serve returned; usage.Busy stands still
}

// call is one accepted request.
type call struct {
	req      Request
	bytes    int
	answered bool           // guarded by Server.mu
	expiring sync.WaitGroup // the answer to an expiry
}

// NewServer returns a server that answers the calls on rw by h. rw should be an
// io.Closer whose Close unblocks Read and Write (W66), and may have a
// SetWriteDeadline method as net.Conn and os.File do.
func NewServer(rw io.ReadWriter, h Handler, opts ...ServerOption) *Server {
	s := &Server{
		rw: rw, handler: h,
		maxInflight: DefaultMaxInflight, maxArgs: DefaultMaxArgsBytes, maxValue: DefaultMaxValueBytes,
		maxRefusals: DefaultMaxRefusals, grace: DefaultGrace, budget: new(Budget),
		stopped: make(chan struct{}), stream: make(chan struct{}), ids: make(map[string]struct{}), in: bufio.NewReaderSize(rw, 8<<10),
	}
	s.frames = frameReader{r: s.in, grow: grow}
	s.out.init(rw)
	s.relay.handOn = s.handOn
	for _, o := range opts {
		o(s)
	}
	return s
}

// Serve answers calls until the child closes its end, the child breaks the
// protocol, or ctx ends, and closes the connection in each case. Handlers run at
// the same time, each in a goroutine that does nothing else meanwhile (W30), with
// a context that carries the call's deadline and ends with Serve (W44, W48). A
// request that arrives while a handler has just begun, after calls that took less
// than 100 microseconds, may wait up to 4 ms for a goroutine to read it.
//
// It returns nil if the stream ended between two frames, an error that wraps
// ctx.Err() if ctx ended, and a *ProtocolError if the child broke the protocol
// (W49, W51). An end inside of a frame is a *ProtocolError that wraps
// io.ErrUnexpectedEOF: a child that was killed while it wrote looks like that
// too. Any other error is the connection's own, such as os.ErrClosed after
// somebody else closed it, or says why Serve did not begin.
//
// Calls in flight at the end are canceled and not answered. Serve returns when
// all handlers have returned, at the latest after the grace period; a handler
// that still runs then is left behind.
//
// A request is refused, and neither its handler called nor the Budget charged, in
// this order: class quota when MaxCalls is used up, invalid when args or the
// tool's name are too long, rate_limited above the cap on calls or bytes in
// flight (W32 to W34). Nothing is queued.
//
// Without an io.Closer a blocked read or write outlives Serve (W60).
func (s *Server) Serve(ctx context.Context) error {
	if !s.used.CompareAndSwap(false, true) {
		return fmt.Errorf("serve calls: %w", ErrUsed)
	}
	if s.handler == nil {
		return fmt.Errorf("serve calls: %w", errNoHandler)
	}
	if err := s.budget.validate(); err != nil {
		return fmt.Errorf("serve calls: %w", err)
	}
	if n := max(s.maxArgs, s.maxValue); n > MaxFrameBytes {
		return fmt.Errorf("serve calls: limit of %d bytes for args or value: %w", n, ErrFrameTooLarge)
	}
	if n := s.budget.MaxCalls; 0 < n && n <= maxSeenCalls {
		s.seen = make(map[string]struct{})
	}
	s.parent = ctx
	s.ctx, s.cancel = context.WithCancel(ctx)
	unhook := context.AfterFunc(ctx, func() { s.stop(nil) })
	defer unhook()
	s.work.Add(1)
	go s.read()
	<-s.stopped

	idle := make(chan struct{})
	go func() {
		s.work.Wait()
		close(idle)
	}()
	select {
	case <-idle:
	case <-time.After(s.grace):
	}
	s.mu.Lock()
	if s.slots > 0 {
		s.usage.Busy += time.Since(s.busySince)
	}
	s.over = true
	s.mu.Unlock()
	return s.err
}

// Usage returns what was used so far. It may be called at any time, also while
// Serve runs; after Serve returned it does not change any more.
func (s *Server) Usage() Usage {
	s.mu.Lock()
	defer s.mu.Unlock()
	u := s.usage
	if s.slots > 0 && !s.over {
		u.Busy += time.Since(s.busySince)
	}
	return u
}

// stop ends the channel. The first call decides what Serve returns.
func (s *Server) stop(err error) {
	s.once.Do(func() {
		if ctxErr := s.parent.Err(); ctxErr != nil {
			err = fmt.Errorf("serve calls: %w", ctxErr)
		}
		s.err = err
		s.mu.Lock()
		s.ending = true
		s.mu.Unlock()
		s.out.kill() // before handlers learn of it, so that none of them answers
		s.cancel()
		if c, ok := s.rw.(io.Closer); ok {
			c.Close()
		}
		close(s.stopped)
	})
}

// read takes requests from the stream until one is accepted, and becomes the
// goroutine of that call, so that the handler starts without a switch between
// goroutines. Another one reads on: at once, or once the handler has run for a
// tick if quick ones came before it and nothing else is under way. See relay.
//
// A few goroutines that are done wait for the stream to come round, since a new
// one has to grow its stack first.
func (s *Server) read() {
	defer s.work.Done()
	for {
		c, err := s.next()
		if err != nil {
			if err == io.EOF {
				err = nil
			}
			s.stop(err)
			return
		}
		if c == nil {
			continue
		}
		if s.takeCall(c) {
			continue
		}
		if s.idle.Add(1) > maxIdle {
			s.idle.Add(-1)
			return
		}
		select {
		case <-s.stream:
			s.idle.Add(-1)
		case <-s.stopped:
			return
		}
	}
}

// takeCall runs a call and returns whether the stream is still the caller's.
func (s *Server) takeCall(c *call) (kept bool) {
	loan := s.relay.lend(s.in.Buffered() == 0 && s.alone())
	if loan == 0 {
		s.handOn()
	}
	start, returned := time.Now(), false
	defer func() {
		kept = s.relay.back(loan, time.Since(start))
		if kept && !returned {
			s.handOn() // the handler ended this goroutine
		}
	}()
	s.run(c)
	returned = true
	return kept
}

// handOn lets another goroutine read the stream. Its caller is one that s.work
// counts, or keeps one from ending.
func (s *Server) handOn() {
	select {
	case s.stream <- struct{}{}:
	default:
		s.work.Add(1)
		go s.read()
	}
}

// alone tells whether one call at most is in flight.
func (s *Server) alone() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.slots <= 1
}

// next reads one request. It returns no call for one that was refused. Its errors
// end the channel.
func (s *Server) next() (*call, error) {
	start := s.offset
	frame, err := s.frames.next()
	fault := func(err error) error { return &ProtocolError{Offset: start, Err: err} }
	switch {
	case err == nil:
	case err == io.EOF:
		return nil, err
	case err == io.ErrUnexpectedEOF || err == ErrEmptyFrame || errors.Is(err, ErrFrameTooLarge):
		return nil, fault(err)
	default:
		return nil, fmt.Errorf("read call channel: %w", err)
	}
	s.offset += headerBytes + int64(len(frame))
	req, tooLarge, err := decodeRequest(frame, s.maxArgs)
	s.frames.buf = keep(frame) // the request owns its memory (B1)
	if err != nil {
		return nil, fault(err)
	}
	c, refusal, err := s.admit(req, tooLarge)
	switch {
	case err == io.EOF:
		return nil, err
	case err != nil:
		return nil, fault(err)
	case c == nil:
		s.refuse(req, refusal)
	}
	return c, nil
}

// admit accepts a request and charges it, or says how it is refused. An error is
// fatal, io.EOF if the channel has ended meanwhile. All of it is one step with
// respect to other requests (W36).
func (s *Server) admit(req Request, tooLarge string) (*call, *Response, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ending {
		return nil, nil, io.EOF
	}
	if _, dup := s.ids[req.ID]; dup {
		return nil, nil, fmt.Errorf("%w: in flight", ErrDuplicateID)
	}
	if _, dup := s.seen[req.ID]; dup {
		return nil, nil, fmt.Errorf("%w: answered before", ErrDuplicateID)
	}
	size := len(req.ID) + len(req.Tool) + len(req.Args)
	var class toolfail.Class
	var text string
	switch {
	case s.gone:
		class, text = toolfail.Canceled, "the child takes no more responses"
	case !s.budget.callsLeft():
		class = toolfail.Quota
	case tooLarge != "":
		class, text = toolfail.Invalid, tooLarge
	case s.slots >= s.maxInflight || s.slotBytes+size > MaxInflightBytes:
		class, text = toolfail.RateLimited, ErrInflightLimit.Error()
	case !s.budget.takeCall(): // another server of the same Budget was faster
		class = toolfail.Quota
	default:
		if s.slots == 0 {
			s.busySince = time.Now()
		}
		s.slots++
		s.slotBytes += size
		s.ids[req.ID] = struct{}{}
		if s.seen != nil {
			s.seen[req.ID] = struct{}{}
		}
		s.usage.Accepted++
		return &call{req: req, bytes: size}, nil, nil
	}
	if class == toolfail.Quota {
		text = fmt.Sprintf("all %d calls of this run are used up", s.budget.MaxCalls)
	}
	if class == toolfail.Quota || s.gone {
		if s.refusals++; s.refusals > s.maxRefusals {
			return nil, nil, fmt.Errorf("%w: %d times", ErrRefusals, s.maxRefusals)
		}
	}
	s.usage.Refused++
	return nil, &Response{V: Version, ID: req.ID, Kind: string(class), Error: text}, nil
}

func (s *Server) refuse(req Request, resp *Response) {
	if s.onRefused != nil {
		s.onRefused(req, *resp)
	}
	if s.out.lock() {
		s.append(resp, true)
	}
	s.flush()
}

// run calls the handler and answers. It is the call's own goroutine.
func (s *Server) run(c *call) {
	ctx := s.ctx
	if d := effectiveDeadline(c.req.DeadlineMS, s.maxDeadline); d > 0 {
		limited := &callContext{Context: ctx, deadline: time.Now().Add(d)}
		defer limited.end()
		ctx = limited
		c.expiring.Add(1)
		timer := time.AfterFunc(d, func() {
			defer c.expiring.Done()
			<-limited.Done() // due now; the child must not know first
			s.deliver(c, expiry(c.req.ID), true, false)
		})
		// Serve must not return while an expiry is being answered.
		defer func() {
			if timer.Stop() {
				c.expiring.Done()
			}
			c.expiring.Wait()
		}()
	}
	// A handler may panic or end its goroutine: both leave this answer (W40).
	resp := failure(c.req.ID, toolfail.Unknown, "the tool broke down")
	own := true
	defer func() {
		if own {
			_ = recover()
		}
		s.finish(c, resp, own)
	}()
	r, err := s.handler(ctx, c.req)
	if (err != nil || !r.OK) && ctx.Err() == context.DeadlineExceeded {
		// The handler gave up because of the deadline, and was faster than the
		// timer: the answer is the same (K6).
		resp = expiry(c.req.ID)
		return
	}
	resp = s.normalize(c.req.ID, r, err)
	own = false
}

// effectiveDeadline is the shorter of the two limits that are set; 0 is none
// (W43, W47).
func effectiveDeadline(childMS int64, host time.Duration) time.Duration {
	child := time.Duration(math.MaxInt64)
	if childMS <= math.MaxInt64/int64(time.Millisecond) {
		child = time.Duration(childMS) * time.Millisecond
	}
	if child <= 0 || host > 0 && host < child {
		return host
	}
	return child
}

func failure(id string, class toolfail.Class, text string) *Response {
	return &Response{V: Version, ID: id, Kind: string(class), Error: text}
}

func expiry(id string) *Response {
	return failure(id, toolfail.Transient, "the call took longer than its deadline")
}

// normalize makes of what a handler returned what may cross.
func (s *Server) normalize(id string, r Response, err error) *Response {
	switch {
	case err != nil:
		return failure(id, toolfail.Unknown, toolfail.CapText(err.Error())) // W38
	case !r.OK:
		class, text := toolfail.Parse(r.Kind), r.Error
		if r.Kind != "" && !toolfail.Class(r.Kind).Valid() {
			text = r.Kind + ": " + text // W39
		}
		return failure(id, class, toolfail.CapText(text))
	case len(r.Value) > s.maxValue:
		return failure(id, toolfail.Quota, fmt.Sprintf("the tool's value has %d bytes, limit %d", len(r.Value), s.maxValue))
	case !utf8.ValidString(r.Value):
		return failure(id, toolfail.Permanent, "the tool's value is not valid UTF-8") // L28
	}
	return &Response{V: Version, ID: id, OK: true, Value: r.Value} // W41
}

// finish is called once the handler returned. It gives the slot back, with the
// answer if there was none, so that a child that has its answer finds the slot
// free.
func (s *Server) finish(c *call, resp *Response, own bool) {
	s.mu.Lock()
	if c.answered {
		s.release(c) // the late result is dropped (W45, W46)
		s.mu.Unlock()
		return
	}
	s.mu.Unlock()
	s.deliver(c, resp, own, true)
}

// deliver answers c unless that was done (W45), and gives its slot back if
// returned. own marks text made here.
func (s *Server) deliver(c *call, resp *Response, own, returned bool) {
	alive := s.out.lock()
	s.mu.Lock()
	first := !c.answered
	c.answered = true
	if first {
		delete(s.ids, c.req.ID)
	}
	if returned {
		s.release(c)
	}
	s.mu.Unlock()
	// What a handler returns because the run ends is no answer (W48).
	if first && alive && s.ctx.Err() == nil {
		s.append(resp, own)
	}
	s.flush()
}

// release gives a slot back. s.mu is held.
func (s *Server) release(c *call) {
	s.slots--
	s.slotBytes -= c.bytes
	if s.slots == 0 && !s.over {
		s.usage.Busy += time.Since(s.busySince)
	}
}

// append charges a response and puts its frame into the outbox, which is locked.
func (s *Server) append(resp *Response, own bool) {
	quota := func(text string) *Response { return failure(resp.ID, toolfail.Quota, text) }
	if size := responseSize(resp); size > MaxFrameBytes {
		resp = quota(fmt.Sprintf("the tool's value makes a frame of %d bytes, limit %d", size, MaxFrameBytes))
	}
	if n := charge(resp); !s.budget.takeBytes(n) {
		if own {
			resp.Error = "" // the class is enough, and it must get through
		} else {
			resp = quota(fmt.Sprintf("all %d bytes of this run are used up, or too few are left", s.budget.MaxBytes))
		}
	}
	s.mu.Lock()
	s.usage.Bytes += int64(charge(resp))
	s.mu.Unlock()
	s.out.queue = grow(s.out.queue, len(resp.Value)+len(resp.Error)+envelopeBytes)
	// No error is left: the size was looked at above.
	s.out.queue, _ = appendResponse(s.out.queue, resp)
}

// charge is what a response counts in bytes (W37).
func charge(r *Response) int {
	if r.Kind == string(toolfail.Quota) {
		return 0
	}
	return len(r.Value) + len(r.Error)
}

// flush writes out what is in the outbox, which is locked, and unlocks it.
func (s *Server) flush() {
	err := s.out.flush()
	if err == nil {
		return
	}
	if errors.Is(err, ErrUnread) {
		s.stop(&ProtocolError{Offset: -1, Err: err})
		return
	}
	// The peer takes no more. Whether it ended well is for the reader to find
	// out, so that a cut frame is told from a clean end.
	s.mu.Lock()
	s.gone = true
	s.mu.Unlock()
	s.cancel()
}
