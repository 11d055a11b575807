package invoke

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime/debug"
	"time"
)

// Errors of the chain. Every one is found by errors.Is in what Do, NewChain and
// EvaluateStages return.
var (
	// ErrNoHandler is returned by NewChain for a nil handler (I1).
	ErrNoHandler = errors.New("no handler")
	// ErrNilStage is returned by NewChain for a stage that cannot judge (I4).
	ErrNilStage = errors.New("stage is nil")
	// ErrEmptyName marks the denial of a call without a tool name (I6).
	ErrEmptyName = errors.New("tool name is empty")
	// ErrStageFailed marks a denial by a stage that broke (I7).
	ErrStageFailed = errors.New("stage failed")
	// ErrPanic marks a recovered panic of a stage or of the handler (I8, I9).
	ErrPanic = errors.New("panic")
	// ErrTwoResults marks a handler that set both Text and Structured (I16).
	ErrTwoResults = errors.New("result has both text and structured content")
)

// Call is one call of one tool (I15).
type Call struct {
	// Name is the tool's name, byte for byte as the caller wrote it. It may be
	// hostile: print it by String or through Quote.
	Name string
	// Server says where the tool lives: empty for the host itself, else the
	// name of an MCP server.
	Server string
	// Caller says who calls, usually the id of a run.
	Caller string
	// Args is the raw argument text.
	Args string
}

// String is a one-line form of the call for people: escaped to ASCII, and cut.
func (c Call) String() string {
	return quoteBare(c.Name, maxNameShown) + " " + Quote(c.Args, maxArgsShown)
}

// Result is what a handler gives back. At most one field is set (I16).
type Result struct {
	Text       string
	Structured json.RawMessage
}

// Handler runs a call that every stage allowed.
type Handler func(ctx context.Context, call Call) (Result, error)

// Record tells what became of one Do (I19). A call's Args and Name in it are
// the caller's own text, which may be hostile.
type Record struct {
	Call Call
	// Stages lists the stages that were evaluated, in order, the denying one
	// included (I21).
	Stages []StageResult
	// Allowed says that the handler was reached, also if it then failed (I20).
	Allowed bool
	// Err is nil if and only if the call succeeded.
	Err error
	// Duration is that of the whole chain.
	Duration time.Duration
	// OutBytes is the size of the Result that Do returned.
	OutBytes int
}

// Chain runs stages and then a handler. The handler can be reached by Do alone
// (I2). A Chain never changes (I3) and is safe for concurrent use. It takes no
// locks around the handler: what the handler shares is the handler's to guard
// (I23).
type Chain struct {
	handler Handler
	stages  []Stage
	record  func(Record)
}

// Option changes how a Chain is built.
type Option func(*Chain)

// WithRecorder has f called once for every Do, whatever its end (I19), on the
// goroutine of that Do and after its outcome is settled. What f does changes
// nothing about the outcome, a panic included (I22); a record that must exist
// before a call may run is the work of a stage (see Audit). A nil f records
// nothing (I18). f must be safe for concurrent use.
func WithRecorder(f func(Record)) Option {
	return func(c *Chain) { c.record = f }
}

// NewChain makes a chain of handler behind stages. It keeps its own copy of
// stages. Errors: ErrNoHandler, ErrNilStage.
func NewChain(handler Handler, stages []Stage, opts ...Option) (*Chain, error) {
	if handler == nil {
		return nil, fmt.Errorf("make chain: %w", ErrNoHandler)
	}
	own := make([]Stage, len(stages))
	for i, s := range stages {
		if p, ok := s.(*StageFunc); ok && p != nil {
			s = *p // a pointer would let its owner change the chain later
		}
		if unusable(s) {
			return nil, fmt.Errorf("make chain: stage %d: %w", i, ErrNilStage)
		}
		own[i] = s
	}
	c := &Chain{handler: handler, stages: own}
	for _, opt := range opts {
		if opt != nil {
			opt(c)
		}
	}
	return c, nil
}

// Do has every stage judge call, in order, and then runs the handler (I5). The
// first denial ends it with a *DenyError. A panic of a stage or of the handler
// becomes an error that wraps ErrPanic and a *PanicError (I8, I9). On an error
// the Result is empty.
func (c *Chain) Do(ctx context.Context, call Call) (res Result, err error) {
	start := time.Now()
	rec := Record{Call: call}
	// A handler that ends its goroutine (runtime.Goexit) skips the rest of this
	// function but not the deferred record, which must not tell of a success.
	err = fmt.Errorf("call of %s: goroutine ended: %w", quoteBare(call.Name, maxNameShown), ErrPanic)
	defer func() {
		if c.record == nil {
			return
		}
		rec.Err = err
		rec.Duration = time.Since(start)
		rec.OutBytes = len(res.Text) + len(res.Structured)
		defer func() { _ = recover() }() // I22
		c.record(rec)
	}()

	var denied *DenyError
	rec.Stages, denied = evaluate(ctx, c.stages, call)
	if denied != nil {
		err = denied
		return Result{}, err
	}
	rec.Allowed = true
	res, err = c.run(ctx, call)
	return res, err
}

func (c *Chain) run(ctx context.Context, call Call) (res Result, err error) {
	defer func() {
		if v := recover(); v != nil {
			res, err = Result{}, fmt.Errorf("call of %s: %w", quoteBare(call.Name, maxNameShown), newPanicError(v))
		}
	}()
	res, err = c.handler(ctx, call)
	if err == nil && res.Text != "" && len(res.Structured) > 0 {
		err = fmt.Errorf("call of %s: %w", quoteBare(call.Name, maxNameShown), ErrTwoResults)
	}
	if err != nil {
		return Result{}, err
	}
	return res, nil
}

// PanicError holds a recovered panic for the host's own eyes. Its text tells
// neither the value nor the stack, since errors reach the caller of a tool.
type PanicError struct {
	Value any
	Stack []byte
}

func newPanicError(v any) *PanicError { return &PanicError{Value: v, Stack: debug.Stack()} }

// Error is a fixed text.
func (e *PanicError) Error() string { return ErrPanic.Error() }

// Is reports ErrPanic.
func (e *PanicError) Is(target error) bool { return target == ErrPanic }
