package wire

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"sync"
	"syscall"

	"example.com/jail/wire/toolfail"
)

// ErrResultID is a Result for another execution than the one that was started
// (W61). Starter reports it in a *ProtocolError.
var ErrResultID = errors.New("result is for another execution")

// Starter is the launcher's end of a start channel.
type Starter struct {
	rw   io.ReadWriter
	mu   sync.Mutex
	used bool
}

// NewStarter returns the launcher's end of the start channel on rw, which should
// be an io.Closer whose Close unblocks Read and Write (W60, W66).
func NewStarter(rw io.ReadWriter) *Starter { return &Starter{rw: rw} }

// Start sends st and waits for the Result of the same result id (W61). V is set
// here, and so is ResultID if it is empty. One Starter sends one Start: later
// calls are ErrUsed (W14).
//
// It returns when ctx ends or the peer disconnects, however silent the peer is:
// then it closes the connection, and the error wraps ctx.Err() (W59). Without an
// io.Closer it returns as well, but a goroutine stays blocked until the peer
// disconnects (W60).
//
// The other errors: a *ProtocolError for a frame that is no Result of this
// execution or is cut; one that wraps io.EOF for a peer that closed its end
// without a Result; and, before anything was written, one that wraps
// ErrFrameTooLarge or says what is wrong with st, after which Start may be called
// again. What the peer sends behind its Result is never read.
//
// Error and Kind of the Result are capped and of the set; Calls and Bytes are the
// child's claims.
func (s *Starter) Start(ctx context.Context, st Start) (Result, error) {
	st.V = Version
	if st.ResultID == "" {
		st.ResultID = rand.Text()
	}
	if err := checkStart(&st); err != nil {
		return Result{}, fmt.Errorf("start: %w", err)
	}
	frame, err := appendStart(nil, &st)
	if err != nil {
		return Result{}, fmt.Errorf("start: %w", err)
	}
	s.mu.Lock()
	used := s.used
	s.used = true
	s.mu.Unlock()
	if used {
		return Result{}, fmt.Errorf("start: %w", ErrUsed)
	}
	result, err := within(ctx, s.rw, func() (Result, error) {
		if _, err := s.rw.Write(frame); err != nil {
			if errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET) {
				err = fmt.Errorf("%w: %w", io.EOF, err) // the same to a caller
			}
			return Result{}, fmt.Errorf("send Start: %w", err)
		}
		text, err := readOne(s.rw)
		if err != nil {
			return Result{}, fmt.Errorf("read Result: %w", err)
		}
		result, err := decodeResult(text)
		if err == nil && result.ResultID != st.ResultID {
			err = ErrResultID
		}
		if err != nil {
			return Result{}, &ProtocolError{Err: err}
		}
		return result, nil
	})
	if err != nil {
		return Result{}, fmt.Errorf("start: %w", err)
	}
	return result, nil
}

func checkStart(st *Start) error {
	b := st.Budget
	if b.WallClock < 0 || b.MaxCalls < 0 || b.MaxBytes < 0 || b.MaxMemory < 0 {
		return fmt.Errorf("budget %+v: %w", b, errNegative) // W29
	}
	if len(st.ResultID) > MaxIDBytes {
		return fmt.Errorf("result id of %d bytes, limit %d", len(st.ResultID), MaxIDBytes)
	}
	size := len(st.Program)
	for _, b := range st.Bindings {
		if b.Name == "" || len(b.Name) > maxToolBytes {
			return fmt.Errorf("binding name of %d bytes, want 1 to %d", len(b.Name), maxToolBytes)
		}
		if err := checkUTF8("binding name", b.Name, "signature", b.Signature, "description", b.Description); err != nil {
			return err
		}
		size += len(b.Name) + len(b.Signature) + len(b.Description)
	}
	if size > MaxFrameBytes { // spares the encoding
		return &FrameSizeError{Size: int64(size)}
	}
	return checkUTF8("program", st.Program, "result id", st.ResultID)
}

// readOne reads the only frame of its direction.
func readOne(r io.Reader) ([]byte, error) {
	text, err := ReadFrame(r, nil)
	if err == io.ErrUnexpectedEOF || err == ErrEmptyFrame || errors.Is(err, ErrFrameTooLarge) {
		err = &ProtocolError{Err: err}
	}
	return text, err
}

// within runs f, which uses rw, until it returns or ctx ends. Then it closes rw,
// which ends f too, and returns an error that wraps ctx.Err(). A result that was
// there first is returned.
func within[T any](ctx context.Context, rw io.ReadWriter, f func() (T, error)) (T, error) {
	type outcome struct {
		v   T
		err error
	}
	done := make(chan outcome, 1)
	if ctx.Err() == nil {
		go func() {
			v, err := f()
			done <- outcome{v, err}
		}()
	}
	select {
	case o := <-done:
		return o.v, o.err
	case <-ctx.Done():
	}
	if c, ok := rw.(io.Closer); ok {
		c.Close()
	}
	select {
	case o := <-done:
		if o.err == nil {
			return o.v, nil
		}
	default:
	}
	var zero T
	return zero, ctx.Err()
}

// Runner is the jail's end of a start channel. Its methods are safe for
// concurrent use.
type Runner struct {
	rw io.ReadWriter

	mu    sync.Mutex
	used  bool
	start *Start
	sent  bool
}

// NewRunner returns the jail's end of the start channel on rw, which should be an
// io.Closer whose Close unblocks Read (W66); see OpenFD.
func NewRunner(rw io.ReadWriter) *Runner { return &Runner{rw: rw} }

// AwaitStart reads the one Start, and no byte behind it (W62). When ctx ends it
// closes the connection, if that is an io.Closer, and returns an error that wraps
// ctx.Err(). A frame that is no Start is a *ProtocolError, and a parent that
// closed its end gives an error that wraps io.EOF. A second call is ErrUsed.
func (r *Runner) AwaitStart(ctx context.Context) (Start, error) {
	r.mu.Lock()
	used := r.used
	r.used = true
	r.mu.Unlock()
	if used {
		return Start{}, fmt.Errorf("await Start: %w", ErrUsed)
	}
	st, err := within(ctx, r.rw, func() (Start, error) {
		text, err := readOne(r.rw)
		if err != nil {
			return Start{}, err
		}
		st, err := decodeStart(text)
		if err != nil {
			return Start{}, &ProtocolError{Err: err}
		}
		return st, nil
	})
	if err != nil {
		return Start{}, fmt.Errorf("await Start: %w", err)
	}
	r.mu.Lock()
	r.start = &st
	r.mu.Unlock()
	return st, nil
}

// SendResult sends the one Result (W63). V and ResultID are set here; Kind of a
// failure becomes one of the set, and its Error is capped. A second call is
// ErrUsed, and so is one before AwaitStart succeeded. A Result that is too large
// for a frame, or that is not UTF-8, is an error before anything was written, and
// another one may be sent then. SendResult blocks until the parent read the frame
// or the connection is closed.
func (r *Runner) SendResult(res Result) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.start == nil || r.sent {
		return fmt.Errorf("send Result: %w", ErrUsed)
	}
	if res.Calls < 0 || res.Bytes < 0 {
		return fmt.Errorf("send Result of %d calls and %d bytes: %w", res.Calls, res.Bytes, errNegative)
	}
	res.V, res.ResultID = Version, r.start.ResultID
	res.Value, res.Kind, res.Error = outcome(res.OK, res.Value, res.Kind, res.Error)
	if err := checkUTF8("value", res.Value); err != nil {
		return fmt.Errorf("send Result: %w", err)
	}
	if len(res.Value) > MaxFrameBytes { // spares the encoding
		return fmt.Errorf("send Result: %w", &FrameSizeError{Size: int64(len(res.Value))})
	}
	frame, err := appendResult(nil, &res)
	if err != nil {
		return fmt.Errorf("send Result: %w", err)
	}
	r.sent = true
	if _, err := r.rw.Write(frame); err != nil {
		return fmt.Errorf("send Result: %w", err)
	}
	return nil
}

// Item names one item of a StartBudget, in the words of the wire.
type Item string

// The items of a StartBudget.
const (
	ItemWallClock Item = "wall_clock"
	ItemMaxCalls  Item = "max_calls"
	ItemMaxBytes  Item = "max_bytes"
	ItemMaxMemory Item = "max_memory"
)

// UnbackedError lists the items of a Start that the child cannot back.
type UnbackedError struct{ Items []Item }

// Error names the items.
func (e *UnbackedError) Error() string { return fmt.Sprintf("cannot back %v", e.Items) }

// Admit refuses the run if its Start asks for a budget item that is not among
// backed: it sends a failed Result of class denied that names the items, and
// returns an *UnbackedError (W64). An item that is not declared counts as one that
// cannot be backed (W65). Call it after AwaitStart and before the program starts;
// on an error the program must not start.
func (r *Runner) Admit(backed ...Item) error {
	r.mu.Lock()
	start := r.start
	r.mu.Unlock()
	if start == nil {
		return fmt.Errorf("admit the run: %w", ErrUsed)
	}
	var missing []Item
	for _, asked := range []struct {
		item Item
		n    int64
	}{
		{ItemWallClock, int64(start.Budget.WallClock)},
		{ItemMaxCalls, int64(start.Budget.MaxCalls)},
		{ItemMaxBytes, int64(start.Budget.MaxBytes)},
		{ItemMaxMemory, start.Budget.MaxMemory},
	} {
		declared := false
		for _, b := range backed {
			declared = declared || b == asked.item
		}
		if asked.n != 0 && !declared {
			missing = append(missing, asked.item)
		}
	}
	if missing == nil {
		return nil
	}
	refusal := &UnbackedError{Items: missing}
	if err := r.SendResult(Result{Kind: string(toolfail.Denied), Error: refusal.Error()}); err != nil {
		return errors.Join(refusal, err)
	}
	return refusal
}
