package invoke

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"example.com/jail/wire"
	"example.com/jail/wire/toolfail"
)

const (
	// defaultMaxText is the default of Options.MaxArgs and Options.MaxValue.
	defaultMaxText = 1 << 20
	// largestMaxText is the most that they may be: a JSON text takes up to twice
	// its size in a frame (L9).
	largestMaxText = wire.MaxFrameBytes/2 - 1<<20
	// defaultMaxPending bounds the early reads of one run (B11).
	defaultMaxPending = 64
	// maxBindings bounds names, signatures and descriptions of all tools
	// together, maxSchemaText the schema of one.
	maxBindings   = 1 << 20
	maxSchemaText = 256 << 10

	// stageManifest refuses what is no call of a tool: it is the first stage of
	// Tools after the audit.
	stageManifest = "manifest"
)

// ToolSpec is one tool of a host (B1, B2).
type ToolSpec struct {
	// Call runs the tool. args is lossless JSON and the tool's own copy. The
	// returned value is encoded as JSON without loss (see Tools.Do); nil is null.
	// An error's class is toolfail.Of of it; a plain error is class unknown.
	// ctx ends with the call's deadline and with the run, and a tool has to stop
	// then by itself (B9). Call runs concurrently with itself.
	Call func(ctx context.Context, args json.RawMessage) (any, error)
	// AllowEarlyRead lets a program start the call before it needs the value.
	// Set it only for reads that give the same value during the whole run (B13).
	// An early read is bounded by its run; the deadline of a call bounds the
	// waiting for it.
	AllowEarlyRead bool
	// Idempotent says that running the call twice does no more than running it
	// once. Only the host can know that (K5).
	Idempotent bool
	// Description is the help text that a program sees.
	Description string
	// Signature is the call form that a program sees; empty makes one from
	// Schema.
	Signature string
	// Schema is the JSON Schema of the arguments, draft 2020-12 unless it says
	// otherwise; empty accepts every JSON. It must be whole in itself: references
	// to files or networks are refused.
	Schema json.RawMessage
	// Server is the name of the MCP server that has the tool, for records;
	// empty is the host itself.
	Server string
}

// Manifest maps the names that a program sees to tools. Names are compared byte
// by byte (B3).
type Manifest map[string]ToolSpec

// Options of Tools. The zero value is the default for every field.
type Options struct {
	// MaxArgs bounds the argument text of one call in bytes; 0 is 1 MiB. A
	// longer one is refused with class invalid before it is parsed (B4).
	MaxArgs int
	// MaxValue bounds the encoded value of one call in bytes; 0 is 1 MiB. A
	// longer one is replaced by a failure of class permanent (B7).
	MaxValue int
	// MaxPending bounds the early reads of one run that were started and not yet
	// resolved; 0 is 64, negative is none at all. One more is not prepared (B11).
	MaxPending int
	// Recorder is called once for every call, see WithRecorder.
	Recorder func(Record)
	// Audit writes every call to a log before it may run, see Audit.
	Audit *Audit
	// OnClose is called by Close, for instance to end MCP servers.
	OnClose func() error
}

// Tools is what a launcher takes: a manifest behind a chain of stages. Nothing
// of it but the chain can reach a tool (I24). Safe for concurrent use.
type Tools struct {
	specs      map[string]ToolSpec
	bindings   []wire.StartBinding
	chain      *Chain
	args       *argChecker
	maxArgs    int
	maxValue   int
	maxPending int
	onClose    func() error
}

// NewTools puts the tools of m behind stages. It keeps its own copy of both.
// Before stages, Tools itself refuses what no stage needs to see: names that are
// not in m, arguments that are too long, not lossless JSON, or do not match the
// tool's schema, all with class invalid. The error names the tool and what is
// wrong with it; a name that a guest could not show is an error (L29).
func NewTools(m Manifest, stages []Stage, o Options) (*Tools, error) {
	t := &Tools{specs: make(map[string]ToolSpec, len(m)), onClose: o.OnClose}
	for _, l := range []struct {
		name      string
		value     int
		otherwise int
		to        *int
	}{
		{"MaxArgs", o.MaxArgs, defaultMaxText, &t.maxArgs},
		{"MaxValue", o.MaxValue, defaultMaxText, &t.maxValue},
	} {
		*l.to = l.value
		if l.value == 0 {
			*l.to = l.otherwise
		}
		if *l.to < 0 || *l.to > largestMaxText {
			return nil, fmt.Errorf("make tools: %s %d: want 1 to %d, or 0 for %d", l.name, l.value, largestMaxText, l.otherwise)
		}
	}
	switch {
	case o.MaxPending == 0:
		t.maxPending = defaultMaxPending
	case o.MaxPending > 0:
		t.maxPending = o.MaxPending
	}

	schemas := make(map[string]json.RawMessage)
	size := 0
	for _, name := range slices.Sorted(maps.Keys(m)) {
		spec := m[name]
		if err := checkName(name); err != nil {
			return nil, fmt.Errorf("make tools: %w", err)
		}
		if spec.Call == nil {
			return nil, fmt.Errorf("make tools: tool %s: no Call function", name)
		}
		spec.Schema = slices.Clone(spec.Schema)
		if len(spec.Schema) > maxSchemaText {
			return nil, fmt.Errorf("make tools: tool %s: schema of %d bytes: more than %d", name, len(spec.Schema), maxSchemaText)
		}
		if len(spec.Schema) > 0 {
			schemas[name] = spec.Schema
			if spec.Signature == "" {
				spec.Signature = signature(name, spec.Schema)
			}
		}
		t.specs[name] = spec
		t.bindings = append(t.bindings, wire.StartBinding{Name: name, Signature: spec.Signature, Description: spec.Description})
		size += len(name) + len(spec.Signature) + len(spec.Description)
	}
	if size > maxBindings {
		return nil, fmt.Errorf("make tools: %d bytes of names, signatures and descriptions: more than %d", size, maxBindings)
	}
	var err error
	if t.args, err = newArgChecker(schemas); err != nil {
		return nil, fmt.Errorf("make tools: %w", err)
	}

	var all []Stage
	record := o.Recorder
	if a := o.Audit; a != nil {
		all = append(all, a.Stage())
		record = func(r Record) {
			a.Record(r)
			if o.Recorder != nil {
				o.Recorder(r)
			}
		}
	}
	all = append(all, StageFunc{StageName: stageManifest, Fn: t.judge})
	all = append(all, stages...)
	if t.chain, err = NewChain(t.run, all, WithRecorder(record)); err != nil {
		return nil, fmt.Errorf("make tools: %w", err)
	}
	return t, nil
}

// Bindings are what Start tells a guest of the tools, sorted by name (B18). The
// caller owns the slice.
func (t *Tools) Bindings() []wire.StartBinding { return slices.Clone(t.bindings) }

// Idempotent tells whether the host declared the tool as such; false for a name
// that is not in the manifest.
func (t *Tools) Idempotent(name string) bool { return t.specs[name].Idempotent }

// Do is a call by the host itself. It takes the same way, and leaves the same
// record, as a call from a jail (I25). The Result's Structured is the value's
// JSON: numbers of a json.Number, json.RawMessage or Go integer keep every
// digit, and no character is escaped that JSON lets stand. call.Server is set
// from the manifest. toolfail.Of of the error is its class.
func (t *Tools) Do(ctx context.Context, call Call) (Result, error) {
	call.Server = t.specs[call.Name].Server
	return t.chain.Do(ctx, call)
}

// Close ends what the tools hold, for instance MCP servers. Calls that still
// run may fail.
func (t *Tools) Close() error {
	if t.onClose == nil {
		return nil
	}
	return t.onClose()
}

// refusal is put into a context, under its own type, to have the manifest stage
// deny a call that is refused already, so that it is recorded like every other.
type refusal struct {
	class  toolfail.Class
	reason string
}

// judge is the manifest stage.
func (t *Tools) judge(ctx context.Context, call Call) (Verdict, error) {
	if r, ok := ctx.Value(refusal{}).(refusal); ok {
		return Verdict{Reason: r.reason, Class: r.class}, nil
	}
	if len(call.Args) > t.maxArgs {
		return Verdict{Reason: fmt.Sprintf("arguments of %d bytes: more than %d", len(call.Args), t.maxArgs), Class: toolfail.Invalid}, nil
	}
	if err := checkJSON(call.Args, maxArgsDepth); err != nil {
		return Verdict{Reason: cutText("arguments: "+err.Error(), maxReason), Class: toolfail.Invalid}, nil
	}
	if _, ok := t.specs[call.Name]; !ok {
		return Verdict{Reason: "no such tool", Class: toolfail.Invalid}, nil
	}
	reason, err := t.args.check(ctx, call.Name, call.Args)
	if err != nil || reason != "" {
		return Verdict{Reason: reason, Class: toolfail.Invalid}, err
	}
	return Verdict{Allow: true}, nil
}

// run is the chain's handler. The manifest stage let no unknown name pass.
func (t *Tools) run(ctx context.Context, call Call) (Result, error) {
	spec, ok := t.specs[call.Name]
	if !ok {
		return Result{}, &toolfail.Error{Class: toolfail.Invalid, Text: "no such tool"}
	}
	// A stage may have waited past the end of the call, for instance for a
	// person. Its caller is gone, so a tool with effects must not start.
	if err := ctx.Err(); err != nil {
		return Result{}, fmt.Errorf("tool not started: %w", err)
	}
	value, err := spec.Call(ctx, json.RawMessage(call.Args))
	if err != nil {
		return Result{}, err
	}
	text, err := encodeValue(value, t.maxValue)
	if err != nil {
		return Result{}, &toolfail.Error{Class: toolfail.Permanent, Text: cutText("the tool ran, but its value cannot be delivered: "+err.Error(), maxReason)}
	}
	return Result{Structured: text}, nil
}

// errClosing is returned by Run.Close.
var errClosing = errors.New("early reads still running")

// closeGrace is how long Run.Close waits for tools that were told to stop.
const closeGrace = 2 * time.Second
