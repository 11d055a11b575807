package invoke

import (
	"context"
	"fmt"
	"reflect"
	"time"

	"example.com/jail/wire/toolfail"
)

const (
	// stagePrecondition is DenyError.Stage for what the chain itself refuses.
	stagePrecondition = "precondition"
	// stagePanic is DenyError.Stage for a stage that panicked (I8). The record's
	// trace keeps the stage's own name.
	stagePanic = "invoke.panic"
	// stageUnnamed stands for an empty StageFunc.StageName (I17).
	stageUnnamed = "unnamed"
)

// Verdict is what a stage says of a call. The zero Verdict denies.
type Verdict struct {
	Allow bool
	// Reason is shown to the caller when the call is denied.
	Reason string
	// Retryable says that the same call may be allowed later.
	Retryable bool
	// Class is what a denial is called on the wire; empty is rate_limited for a
	// Retryable denial and denied for any other.
	Class toolfail.Class
	// Note is kept in the Record and shown to nobody else, for instance who
	// approved the call.
	Note string
}

// Stage judges calls. An error means that the stage could not judge, and denies
// the call (I7). A Stage must be safe for concurrent use.
type Stage interface {
	Name() string
	Judge(ctx context.Context, call Call) (Verdict, error)
}

// StageFunc makes a Stage of a function (I17).
type StageFunc struct {
	// StageName is the stage's name; empty is recorded as "unnamed".
	StageName string
	Fn        func(ctx context.Context, call Call) (Verdict, error)
}

// Name is StageName, or "unnamed".
func (s StageFunc) Name() string {
	if s.StageName == "" {
		return stageUnnamed
	}
	return s.StageName
}

// Judge calls Fn. A nil Fn is ErrNilStage.
func (s StageFunc) Judge(ctx context.Context, call Call) (Verdict, error) {
	if s.Fn == nil {
		return Verdict{}, ErrNilStage
	}
	return s.Fn(ctx, call)
}

// StageResult is the trace of one stage in a Record.
type StageResult struct {
	Stage   string
	Verdict Verdict
	// Err is the stage's own failure, nil when it judged.
	Err      error
	Duration time.Duration
}

// DenyError says that a call did not reach the handler (I10). Cause is nil if a
// stage decided against the call, and not nil if the stage itself broke.
type DenyError struct {
	// Stage is the name of the denying stage.
	Stage string
	// Tool is the name as the caller wrote it, which may be hostile; Error
	// escapes and cuts it.
	Tool   string
	Reason string
	// Retryable comes from the verdict; always false when Cause is set (I11).
	Retryable bool
	Cause     error

	class  toolfail.Class
	marker error
}

// Error names tool, stage and reason.
func (e *DenyError) Error() string {
	return fmt.Sprintf("call of %s denied by stage %s: %s",
		quoteBare(e.Tool, maxNameShown), quoteBare(e.Stage, maxNameShown), e.Reason)
}

// Unwrap gives Cause and the sentinel, if any.
func (e *DenyError) Unwrap() []error {
	var errs []error
	if e.marker != nil {
		errs = append(errs, e.marker)
	}
	if e.Cause != nil {
		errs = append(errs, e.Cause)
	}
	return errs
}

// As makes toolfail.Of give the denial's class (C23): unknown when the stage
// broke, whatever its error says, else the verdict's own class, else
// rate_limited when Retryable and denied when not.
func (e *DenyError) As(target any) bool {
	t, ok := target.(**toolfail.Error)
	if !ok {
		return false
	}
	c := toolfail.Denied
	switch {
	case e.Cause != nil:
		c = toolfail.Unknown
	case e.class != "":
		c = e.class
	case e.Retryable:
		c = toolfail.RateLimited
	}
	*t = &toolfail.Error{Class: c, Text: e.Reason}
	return true
}

// EvaluateStages has every stage judge call in order, as Do does (I12, I14). It
// returns nil if all allow it, else a *DenyError. It is for calls whose body
// runs elsewhere.
func EvaluateStages(ctx context.Context, stages []Stage, call Call) error {
	if _, denied := evaluate(ctx, stages, call); denied != nil {
		return denied
	}
	return nil
}

// evaluate is the only place where the order of stages and the meaning of their
// verdicts is decided.
func evaluate(ctx context.Context, stages []Stage, call Call) ([]StageResult, *DenyError) {
	if call.Name == "" {
		return nil, &DenyError{Stage: stagePrecondition, Reason: ErrEmptyName.Error(), marker: ErrEmptyName}
	}
	trace := make([]StageResult, 0, len(stages))
	for _, s := range stages {
		r, denied := judge(ctx, s, call)
		trace = append(trace, r)
		if denied != nil {
			return trace, denied
		}
	}
	return trace, nil
}

func judge(ctx context.Context, s Stage, call Call) (r StageResult, denied *DenyError) {
	start := time.Now()
	r.Stage = stageUnnamed
	defer func() {
		if v := recover(); v != nil {
			cause := newPanicError(v)
			r.Verdict, r.Err = Verdict{}, cause
			denied = &DenyError{Stage: stagePanic, Tool: call.Name,
				Reason: "stage " + quoteBare(r.Stage, maxNameShown) + " panicked",
				Cause:  cause, marker: ErrStageFailed}
		}
		r.Duration = time.Since(start)
	}()
	if name := s.Name(); name != "" {
		r.Stage = name
	}
	r.Verdict, r.Err = s.Judge(ctx, call)
	switch {
	case r.Err != nil:
		r.Verdict.Allow, r.Verdict.Retryable = false, false
		reason := r.Verdict.Reason
		if reason == "" {
			reason = r.Err.Error()
		}
		denied = &DenyError{Stage: r.Stage, Tool: call.Name, Reason: reason, Cause: r.Err, marker: ErrStageFailed}
	case !r.Verdict.Allow:
		denied = &DenyError{Stage: r.Stage, Tool: call.Name, Reason: r.Verdict.Reason,
			Retryable: r.Verdict.Retryable, class: knownClass(r.Verdict.Class)}
	}
	return r, denied
}

// knownClass drops a class that is not of the closed set, so that a stage
// cannot put a word of its own on the wire.
func knownClass(c toolfail.Class) toolfail.Class {
	if c == "" {
		return ""
	}
	return toolfail.Parse(string(c))
}

// unusable reports a stage whose Judge could only fail: nil, a nil pointer, or a
// StageFunc without a function.
func unusable(s Stage) bool {
	if s == nil {
		return true
	}
	if f, ok := s.(StageFunc); ok {
		return f.Fn == nil
	}
	switch v := reflect.ValueOf(s); v.Kind() {
	case reflect.Pointer, reflect.Func:
		return v.IsNil()
	}
	return false
}
