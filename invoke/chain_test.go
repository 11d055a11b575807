package invoke

import (
	"context"
	"encoding/json"
	"errors"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"example.com/jail/wire/toolfail"
)

func allow(name string) Stage {
	return StageFunc{StageName: name, Fn: func(context.Context, Call) (Verdict, error) { return Verdict{Allow: true}, nil }}
}

func verdict(name string, v Verdict, err error) Stage {
	return StageFunc{StageName: name, Fn: func(context.Context, Call) (Verdict, error) { return v, err }}
}

func panicking(name string, value any) Stage {
	return StageFunc{StageName: name, Fn: func(context.Context, Call) (Verdict, error) { panic(value) }}
}

func echo(_ context.Context, call Call) (Result, error) { return Result{Text: call.Args}, nil }

// brokenName panics where a stage only says who it is.
type brokenName struct{}

func (brokenName) Name() string                                 { panic("no name") }
func (brokenName) Judge(context.Context, Call) (Verdict, error) { return Verdict{Allow: true}, nil }

type pointerStage struct{ name string }

func (p *pointerStage) Name() string { return p.name }
func (p *pointerStage) Judge(context.Context, Call) (Verdict, error) {
	return Verdict{Allow: true}, nil
}

func TestNewChainRefusesWhatCannotJudge(t *testing.T) { // I1, I4
	fn := func(context.Context, Call) (Verdict, error) { return Verdict{Allow: true}, nil }
	var nilPointer *pointerStage
	var nilFunc *StageFunc
	for _, c := range []struct {
		name    string
		handler Handler
		stages  []Stage
		want    error
	}{
		{"nil handler", nil, nil, ErrNoHandler},
		{"nil handler and stages", nil, []Stage{allow("a")}, ErrNoHandler},
		{"nil stage", echo, []Stage{allow("a"), nil}, ErrNilStage},
		{"stage without function", echo, []Stage{StageFunc{StageName: "x"}}, ErrNilStage},
		{"pointer to stage without function", echo, []Stage{&StageFunc{}}, ErrNilStage},
		{"nil pointer to StageFunc", echo, []Stage{nilFunc}, ErrNilStage},
		{"nil pointer of another type", echo, []Stage{nilPointer}, ErrNilStage},
		{"approval without anybody to ask", echo, []Stage{Approve(nil)}, ErrNilStage},
		{"no stages", echo, nil, nil},
		{"pointer to StageFunc", echo, []Stage{&StageFunc{Fn: fn}}, nil},
		{"nil option", echo, []Stage{&pointerStage{}}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			chain, err := NewChain(c.handler, c.stages, nil)
			if !errors.Is(err, c.want) || (err == nil) != (chain != nil) {
				t.Errorf("NewChain = %v, %v; want error %v", chain, err, c.want)
			}
		})
	}
}

func TestDoAndEvaluateStagesAgree(t *testing.T) { // I5, I6, I7, I8, I10, I11, I12, I13, I14, I15, I17, I19, I20, I21, C23
	broken := errors.New("gate is down")
	for _, c := range []struct {
		name      string
		tool      string
		stages    []Stage
		denied    *DenyError // nil: allowed
		is        []error
		class     toolfail.Class
		evaluated []string
	}{
		{name: "no stages", tool: "t"},
		{name: "all allow", tool: "t", stages: []Stage{allow("a"), allow("b")}, evaluated: []string{"a", "b"}},
		{name: "unnamed stage", tool: "t", stages: []Stage{allow("")}, evaluated: []string{"unnamed"}},
		{
			name: "first denial stops", tool: "t",
			stages:    []Stage{allow("a"), verdict("b", Verdict{Reason: "no"}, nil), panicking("c", "not reached")},
			denied:    &DenyError{Stage: "b", Tool: "t", Reason: "no"},
			class:     toolfail.Denied,
			evaluated: []string{"a", "b"},
		},
		{
			name: "retryable denial", tool: "t",
			stages:    []Stage{verdict("b", Verdict{Reason: "busy", Retryable: true}, nil)},
			denied:    &DenyError{Stage: "b", Tool: "t", Reason: "busy", Retryable: true},
			class:     toolfail.RateLimited,
			evaluated: []string{"b"},
		},
		{
			name: "denial with a class of its own", tool: "t",
			stages:    []Stage{verdict("b", Verdict{Reason: "bad", Class: toolfail.Invalid}, nil)},
			denied:    &DenyError{Stage: "b", Tool: "t", Reason: "bad"},
			class:     toolfail.Invalid,
			evaluated: []string{"b"},
		},
		{
			name: "denial with a word that is no class", tool: "t",
			stages:    []Stage{verdict("b", Verdict{Reason: "bad", Class: "fine"}, nil)},
			denied:    &DenyError{Stage: "b", Tool: "t", Reason: "bad"},
			class:     toolfail.Unknown,
			evaluated: []string{"b"},
		},
		{
			name: "error beats an allowing verdict", tool: "t",
			stages:    []Stage{verdict("b", Verdict{Allow: true, Retryable: true}, broken), allow("c")},
			denied:    &DenyError{Stage: "b", Tool: "t", Reason: "gate is down", Cause: broken},
			is:        []error{ErrStageFailed, broken},
			class:     toolfail.Unknown,
			evaluated: []string{"b"},
		},
		{
			name: "error that claims to be a denial is still a broken gate", tool: "t",
			stages:    []Stage{verdict("b", Verdict{Reason: "r"}, &toolfail.Error{Class: toolfail.Denied})},
			denied:    &DenyError{Stage: "b", Tool: "t", Reason: "r", Cause: &toolfail.Error{Class: toolfail.Denied}},
			is:        []error{ErrStageFailed},
			class:     toolfail.Unknown,
			evaluated: []string{"b"},
		},
		{
			name: "panic", tool: "t",
			stages:    []Stage{allow("a"), panicking("p", "boom"), allow("c")},
			denied:    &DenyError{Stage: stagePanic, Tool: "t", Reason: "stage p panicked", Cause: ErrPanic},
			is:        []error{ErrPanic, ErrStageFailed},
			class:     toolfail.Unknown,
			evaluated: []string{"a", "p"},
		},
		{
			name: "panic with nil", tool: "t",
			stages:    []Stage{panicking("p", nil)},
			denied:    &DenyError{Stage: stagePanic, Tool: "t", Reason: "stage p panicked", Cause: ErrPanic},
			is:        []error{ErrPanic},
			class:     toolfail.Unknown,
			evaluated: []string{"p"},
		},
		{
			name: "panic in Name", tool: "t",
			stages:    []Stage{brokenName{}},
			denied:    &DenyError{Stage: stagePanic, Tool: "t", Reason: "stage unnamed panicked", Cause: ErrPanic},
			is:        []error{ErrPanic},
			class:     toolfail.Unknown,
			evaluated: []string{"unnamed"},
		},
		{
			name: "empty name comes before every stage", tool: "",
			stages: []Stage{panicking("p", "not reached")},
			denied: &DenyError{Stage: "precondition", Reason: ErrEmptyName.Error()},
			is:     []error{ErrEmptyName},
			class:  toolfail.Denied,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			var records []Record
			reached := false
			chain, err := NewChain(func(ctx context.Context, call Call) (Result, error) {
				reached = true
				return Result{Text: "out"}, nil
			}, c.stages, WithRecorder(func(r Record) { records = append(records, r) }))
			if err != nil {
				t.Fatal(err)
			}
			call := Call{Name: c.tool, Server: "s", Caller: "c", Args: "{}"}
			res, doErr := chain.Do(context.Background(), call)
			evalErr := EvaluateStages(context.Background(), c.stages, call)

			if len(records) != 1 {
				t.Fatalf("%d records of one Do", len(records))
			}
			rec := records[0]
			var evaluated []string
			for _, s := range rec.Stages {
				evaluated = append(evaluated, s.Stage)
			}
			if !slices.Equal(evaluated, c.evaluated) {
				t.Errorf("evaluated %q, want %q", evaluated, c.evaluated)
			}
			if rec.Call != call || rec.Err != doErr || rec.Duration <= 0 {
				t.Errorf("record %+v, Do error %v", rec, doErr)
			}
			if c.denied == nil {
				if doErr != nil || evalErr != nil || !reached || !rec.Allowed || res.Text != "out" || rec.OutBytes != 3 {
					t.Errorf("Do = %v, %v, EvaluateStages = %v, reached %v, record %+v", res, doErr, evalErr, reached, rec)
				}
				return
			}
			if reached || rec.Allowed || res.Text != "" || rec.OutBytes != 0 {
				t.Errorf("denied call: reached %v, record %+v, result %v", reached, rec, res)
			}
			for from, err := range map[string]error{"Do": doErr, "EvaluateStages": evalErr} {
				var d *DenyError
				if !errors.As(err, &d) {
					t.Fatalf("%s: %v is no DenyError", from, err)
				}
				if d.Stage != c.denied.Stage || d.Tool != c.denied.Tool || d.Reason != c.denied.Reason || d.Retryable != c.denied.Retryable {
					t.Errorf("%s: %+v, want %+v", from, d, c.denied)
				}
				if (d.Cause == nil) != (c.denied.Cause == nil) {
					t.Errorf("%s: cause %v, want %v", from, d.Cause, c.denied.Cause)
				}
				for _, sentinel := range c.is {
					if !errors.Is(err, sentinel) {
						t.Errorf("%s: %v is not %v", from, err, sentinel)
					}
				}
				if got := toolfail.Of(err); got != c.class {
					t.Errorf("%s: class %q, want %q", from, got, c.class)
				}
			}
		})
	}
}

func TestEvaluateStagesDeniesByANilStage(t *testing.T) { // I4, I12
	for _, stages := range [][]Stage{{nil}, {StageFunc{StageName: "x"}}, {(*pointerStage)(nil)}} {
		err := EvaluateStages(context.Background(), stages, Call{Name: "t"})
		var d *DenyError
		if !errors.As(err, &d) || d.Cause == nil {
			t.Errorf("EvaluateStages(%v) = %v, want a denial with a cause", stages, err)
		}
	}
	if err := EvaluateStages(context.Background(), nil, Call{Name: "t"}); err != nil {
		t.Errorf("no stages: %v", err)
	}
}

func TestOneRecordWhateverTheHandlerDoes(t *testing.T) { // I9, I16, I19, I20
	failed := errors.New("tool failed")
	for _, c := range []struct {
		name    string
		handler Handler
		want    error
		out     int
	}{
		{"text", func(context.Context, Call) (Result, error) { return Result{Text: "abc"}, nil }, nil, 3},
		{"structured", func(context.Context, Call) (Result, error) { return Result{Structured: json.RawMessage("[1]")}, nil }, nil, 3},
		{"nothing", func(context.Context, Call) (Result, error) { return Result{}, nil }, nil, 0},
		{"both", func(context.Context, Call) (Result, error) {
			return Result{Text: "a", Structured: json.RawMessage("1")}, nil
		}, ErrTwoResults, 0},
		{"error", func(context.Context, Call) (Result, error) { return Result{Text: "partial"}, failed }, failed, 0},
		{"panic", func(context.Context, Call) (Result, error) { panic("boom") }, ErrPanic, 0},
		{"runtime error", func(context.Context, Call) (Result, error) { var s []int; s[len(s)] = 1; return Result{}, nil }, ErrPanic, 0},
		{"end of the goroutine", func(context.Context, Call) (Result, error) { runtime.Goexit(); return Result{}, nil }, ErrPanic, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			var records []Record
			chain, err := NewChain(c.handler, []Stage{allow("a")}, WithRecorder(func(r Record) { records = append(records, r) }))
			if err != nil {
				t.Fatal(err)
			}
			var res Result
			done := make(chan struct{})
			go func() {
				defer close(done)
				res, err = chain.Do(context.Background(), Call{Name: "t"})
			}()
			<-done
			if len(records) != 1 {
				t.Fatalf("%d records", len(records))
			}
			r := records[0]
			if !errors.Is(r.Err, c.want) || (c.want == nil) != (r.Err == nil) || !r.Allowed || r.OutBytes != c.out {
				t.Errorf("record %+v, want error %v, %d bytes", r, c.want, c.out)
			}
			if c.want != nil && (res.Text != "" || res.Structured != nil) {
				t.Errorf("result %v beside an error", res)
			}
		})
	}
}

func TestPanicValueStaysOutOfTheText(t *testing.T) { // I9, W40, K7
	chain, err := NewChain(func(context.Context, Call) (Result, error) { panic("/etc/secret") }, nil)
	if err != nil {
		t.Fatal(err)
	}
	_, err = chain.Do(context.Background(), Call{Name: "t"})
	if strings.Contains(err.Error(), "secret") || strings.Contains(failText(err), "secret") {
		t.Errorf("text tells the panic value: %v", err)
	}
	var p *PanicError
	if !errors.As(err, &p) || p.Value != "/etc/secret" || len(p.Stack) == 0 {
		t.Errorf("the host cannot see the panic: %#v", p)
	}
}

func TestChainNeverChanges(t *testing.T) { // I3
	fn := func(context.Context, Call) (Verdict, error) { return Verdict{Reason: "no"}, nil }
	f := &StageFunc{StageName: "pointer", Fn: fn}
	stages := []Stage{allow("a"), StageFunc{StageName: "deny", Fn: fn}}
	ofSlice, err := NewChain(echo, stages)
	if err != nil {
		t.Fatal(err)
	}
	ofPointer, err := NewChain(echo, []Stage{f})
	if err != nil {
		t.Fatal(err)
	}
	stages[1] = allow("other")
	f.Fn = func(context.Context, Call) (Verdict, error) { return Verdict{Allow: true}, nil }
	for name, chain := range map[string]*Chain{"slice": ofSlice, "pointer": ofPointer} {
		if _, err := chain.Do(context.Background(), Call{Name: "t"}); err == nil {
			t.Errorf("%s: its owner opened the chain after it was made", name)
		}
	}
}

func TestRecorderCannotChangeTheOutcome(t *testing.T) { // I18, I22
	for name, opt := range map[string]Option{
		"panic": WithRecorder(func(Record) { panic("recorder") }),
		"nil":   WithRecorder(nil),
	} {
		for _, stage := range []Stage{allow("a"), verdict("d", Verdict{Reason: "no"}, nil)} {
			chain, err := NewChain(echo, []Stage{stage}, opt)
			if err != nil {
				t.Fatal(err)
			}
			res, err := chain.Do(context.Background(), Call{Name: "t", Args: "x"})
			if allowed := stage.Name() == "a"; allowed != (err == nil) || allowed != (res.Text == "x") {
				t.Errorf("%s, stage %s: %v, %v", name, stage.Name(), res, err)
			}
		}
	}
}

func TestChainIsSafeForManyCallers(t *testing.T) { // I3, I19, I23
	var handled, recorded atomic.Int64
	chain, err := NewChain(func(ctx context.Context, call Call) (Result, error) {
		handled.Add(1)
		return Result{Text: call.Args}, nil
	}, []Stage{allow("a"), StageFunc{StageName: "odd", Fn: func(_ context.Context, call Call) (Verdict, error) {
		return Verdict{Allow: call.Args != "deny", Reason: "asked for"}, nil
	}}}, WithRecorder(func(Record) { recorded.Add(1) }))
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			_, _ = chain.Do(context.Background(), Call{Name: "t", Args: "deny"})
			if res, err := chain.Do(context.Background(), Call{Name: "t", Args: "x"}); err != nil || res.Text != "x" {
				t.Errorf("Do = %v, %v", res, err)
			}
		})
	}
	wg.Wait()
	if handled.Load() != 50 || recorded.Load() != 100 {
		t.Errorf("%d handled, %d recorded; want 50, 100", handled.Load(), recorded.Load())
	}
}

func TestHandlerIsReachedByDoAlone(t *testing.T) { // I2, I24
	// What is exported of each type is listed here, so that a new way around the
	// chain does not come in unnoticed.
	for _, c := range []struct {
		of   reflect.Type
		want []string
	}{
		{reflect.TypeFor[*Chain](), []string{"Do"}},
		{reflect.TypeFor[*Tools](), []string{"Bindings", "Close", "Do", "Idempotent", "NewRun"}},
		{reflect.TypeFor[*Run](), []string{"Close", "Handle", "Refused"}},
	} {
		var got []string
		for m := range c.of.Methods() {
			got = append(got, m.Name)
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%v has methods %v, want %v", c.of, got, c.want)
		}
		for f := range c.of.Elem().Fields() {
			if f.IsExported() {
				t.Errorf("%v has exported field %s", c.of, f.Name)
			}
		}
	}
}

func TestHostileNamesAreEscapedAndCut(t *testing.T) { // D9, L27
	long := strings.Repeat("A", 1<<20)
	for _, name := range []string{"../x", "\u043erders", "a\x1b[31mb", "a\nb", "a\u202eb", "\xff\xfe", long, "orders\x00"} {
		chain, err := NewChain(echo, []Stage{AllowOnly("orders")})
		if err != nil {
			t.Fatal(err)
		}
		_, err = chain.Do(context.Background(), Call{Name: name, Args: long})
		texts := []string{err.Error(), Call{Name: name, Args: long}.String(), failText(err)}
		for _, s := range texts {
			if len(s) > 1024 {
				t.Errorf("%.20q: text of %d bytes", name, len(s))
			}
			for _, r := range s {
				if r < ' ' || r > '~' {
					t.Errorf("%.20q: %q in %q", name, r, s)
				}
			}
		}
	}
}
