package invoke

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"sync"

	"example.com/jail/wire"
	"example.com/jail/wire/strictjson"
	"example.com/jail/wire/toolfail"
)

// The two reserved names that carry early reads on the call channel (B18).
const (
	prepareName = "$prepare"
	resolveName = "$resolve"
)

// envelopeBytes is what the request of an early read may hold beside the
// arguments of its call, escapeFactor how much longer those are as a JSON string.
const (
	envelopeBytes = 4 << 10
	escapeFactor  = 6
)

// Run answers the calls of one execution. It holds the early reads of that
// execution, and nothing else that a second one could see.
type Run struct {
	tools  *Tools
	caller string
	ctx    context.Context
	cancel context.CancelFunc

	mu     sync.Mutex
	closed bool
	last   int64
	early  map[int64]*earlyRead
	wg     sync.WaitGroup
	active int
}

// earlyRead is a call that was started before its value was asked for.
type earlyRead struct {
	tool, args string
	cancel     context.CancelFunc
	done       chan struct{}
	// res and err are set before done is closed.
	res Result
	err error
}

// NewRun starts the books of one execution. ctx bounds its early reads. caller
// is the Call.Caller of its records. End it with Close.
func (t *Tools) NewRun(ctx context.Context, caller string) *Run {
	r := &Run{tools: t, caller: caller, early: make(map[int64]*earlyRead)}
	r.ctx, r.cancel = context.WithCancel(ctx)
	return r
}

// Handle is a wire.Handler. Every request that is not the resolving of an early
// read goes through the chain once and leaves one Record; an early read leaves
// its one Record when its call ends. The error is always nil: a failure is in
// the Response, with its class.
func (r *Run) Handle(ctx context.Context, req wire.Request) (wire.Response, error) {
	var res Result
	var err error
	switch req.Tool {
	case prepareName:
		res = r.prepare(ctx, req.Args)
	case resolveName:
		res, err = r.resolve(ctx, req.Args)
	default:
		res, err = r.do(ctx, req.Tool, req.Args)
	}
	resp := wire.Response{V: wire.Version, ID: req.ID}
	if err != nil {
		resp.Kind, resp.Error = string(toolfail.Of(err)), failText(err)
		return resp, nil
	}
	resp.OK, resp.Value = true, string(res.Structured)
	return resp, nil
}

// Close cancels the early reads of the run and waits for them, up to 2 s for
// tools that do not stop when told to. The error says how many still run.
func (r *Run) Close() error {
	r.mu.Lock()
	r.closed = true
	r.mu.Unlock()
	r.cancel()
	done := make(chan struct{})
	go func() {
		r.wg.Wait()
		close(done)
	}()
	if waitFor(done, closeGrace) {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return fmt.Errorf("close run %s: %d %w", quoteBare(r.caller, maxNameShown), r.active, errClosing)
}

func (r *Run) do(ctx context.Context, tool, args string) (Result, error) {
	return r.tools.Do(ctx, Call{Name: tool, Caller: r.caller, Args: args})
}

// Refused records a request that the call channel refused without asking
// Handle, for instance because the calls of the run are used up. It is for
// wire.WithOnRefused.
func (r *Run) Refused(req wire.Request, resp wire.Response) {
	ctx := context.WithValue(r.ctx, refusal{}, refusal{toolfail.Parse(resp.Kind), resp.Error})
	_, _ = r.do(ctx, req.Tool, req.Args)
}

// refuse records a call that is refused for reason.
func (r *Run) refuse(ctx context.Context, tool, args, reason string) error {
	_, err := r.do(context.WithValue(ctx, refusal{}, refusal{toolfail.Invalid, reason}), tool, args)
	return err
}

// prepare starts an early read. Its value is the handle; 0 says that none was
// started, which is an answer and no failure (B11).
func (r *Run) prepare(ctx context.Context, text string) Result {
	none := Result{Structured: json.RawMessage("0")}
	e, err := r.envelope(text, false)
	if err != nil {
		_ = r.refuse(ctx, prepareName, text, err.Error())
		return none
	}
	if spec, ok := r.tools.specs[e.tool]; !ok {
		_ = r.refuse(ctx, e.tool, e.args, "no such tool")
		return none
	} else if !spec.AllowEarlyRead {
		_ = r.refuse(ctx, e.tool, e.args, "the tool allows no early reads")
		return none
	}
	handle, read := r.admit(e.tool, e.args)
	if read == nil {
		_ = r.refuse(ctx, e.tool, e.args, fmt.Sprintf("early read not started: %d are pending, or the run is over", r.tools.maxPending))
		return none
	}
	return Result{Structured: json.RawMessage(strconv.FormatInt(handle, 10))}
}

func (r *Run) admit(tool, args string) (int64, *earlyRead) {
	r.mu.Lock()
	defer r.mu.Unlock()
	// A read that was given up may still run: it keeps its place until it ends,
	// or a program could start tools without bound.
	if r.closed || r.active >= r.tools.maxPending || len(r.early) >= r.tools.maxPending {
		return 0, nil
	}
	ctx, cancel := context.WithCancel(r.ctx)
	read := &earlyRead{tool: tool, args: args, cancel: cancel, done: make(chan struct{})}
	r.last++
	r.early[r.last] = read
	r.active++
	r.wg.Go(func() {
		defer func() {
			cancel()
			r.mu.Lock()
			r.active--
			r.mu.Unlock()
			close(read.done)
		}()
		read.err = errors.New("early read ended without an outcome") // a tool may end its goroutine
		read.res, read.err = r.do(ctx, tool, args)
	})
	return r.last, read
}

// resolve gives the value of an early read (B12).
func (r *Run) resolve(ctx context.Context, text string) (Result, error) {
	e, err := r.envelope(text, true)
	if err != nil {
		return Result{}, r.refuse(ctx, resolveName, text, err.Error())
	}
	if e.handle == 0 {
		return r.do(ctx, e.tool, e.args)
	}
	r.mu.Lock()
	read, ok := r.early[e.handle]
	delete(r.early, e.handle)
	r.mu.Unlock()
	if !ok {
		return Result{}, r.refuse(ctx, resolveName, text, fmt.Sprintf("handle %d: unknown or already used", e.handle))
	}
	if read.tool != e.tool || read.args != e.args {
		read.cancel()
		return r.do(ctx, e.tool, e.args)
	}
	select {
	case <-read.done:
		return read.res, read.err
	case <-ctx.Done():
		read.cancel()
		return Result{}, fmt.Errorf("wait for early read of %s: %w", quoteBare(e.tool, maxNameShown), ctx.Err())
	}
}

type envelope struct {
	handle     int64
	tool, args string
}

// envelope reads the arguments of a reserved name: an object with the keys tool,
// args (the call's own argument text, as a string) and, to resolve, handle. That
// text is checked with the call.
func (r *Run) envelope(text string, withHandle bool) (envelope, error) {
	var e envelope
	if limit := r.tools.maxArgs*escapeFactor + envelopeBytes; len(text) > limit {
		return e, fmt.Errorf("arguments of %d bytes: more than %d", len(text), limit)
	}
	names := []string{"tool", "args", "handle"}
	if !withHandle {
		names = names[:2]
	}
	values := make([]strictjson.Value, len(names))
	if err := strictjson.Members([]byte(text), names, values); err != nil {
		return e, fmt.Errorf("arguments: %w", err)
	}
	var err error
	if e.tool, err = values[0].Text(0); err != nil {
		return e, fmt.Errorf("arguments: tool: %w", err)
	}
	if e.args, err = values[1].Text(r.tools.maxArgs); err != nil {
		return e, fmt.Errorf("arguments: args: %w", err)
	}
	if withHandle {
		if e.handle, err = values[2].Int64(); err != nil {
			return e, fmt.Errorf("arguments: handle: %w", err)
		}
	}
	return e, nil
}

// failText is what a program is told of a failure. The cause of a broken stage
// and the value of a panic are the host's own business.
func failText(err error) string {
	var deny *DenyError
	var panicked *PanicError
	var failure *toolfail.Error
	switch {
	case errors.As(err, &deny):
		switch {
		case toolfail.Of(deny) == toolfail.Invalid: // a mistake of the caller, no decision
			return toolfail.CapText(quoteBare(deny.Tool, maxNameShown) + ": " + deny.Reason)
		case deny.Cause != nil:
			return "call of " + quoteBare(deny.Tool, maxNameShown) + " not decided: stage " + quoteBare(deny.Stage, maxNameShown) + " failed"
		}
	case errors.As(err, &panicked), errors.Is(err, ErrPanic):
		return "the tool failed"
	case errors.As(err, &failure) && err == error(failure):
		return toolfail.CapText(failure.Text)
	}
	return toolfail.CapText(err.Error())
}
