package wire

import (
	"context"
	"time"
)

const (
	// Version is the only protocol version (W10). A frame of any other version
	// is refused before its other fields are decoded.
	Version = 1

	// MaxFrameBytes bounds the JSON text of one frame, on read and on write (W3, W4).
	MaxFrameBytes = 16 << 20

	// DefaultMaxInflight is how many calls of one jail may run at once (W31).
	DefaultMaxInflight = 64
)

// StartFD and CallFD are where a guest finds its two channels.
const (
	StartFD = 3
	CallFD  = 4
)

// Request is one tool call, child to parent (W20).
type Request struct {
	V    int    `json:"v"`
	ID   string `json:"id"`
	Tool string `json:"tool"`
	// Args is the raw argument text, usually JSON. The protocol never parses it.
	Args string `json:"args"`
	// DeadlineMS is the child's own limit in milliseconds; 0 is no limit.
	DeadlineMS int64 `json:"deadline_ms,omitempty"`
}

// Response is the answer to one Request, parent to child (W21).
type Response struct {
	V     int    `json:"v"`
	ID    string `json:"id"`
	OK    bool   `json:"ok"`
	Value string `json:"value,omitempty"`
	// Kind is the failure class (package toolfail), empty when OK.
	Kind string `json:"kind,omitempty"`
	// Error is text for humans. Nothing decides on it.
	Error string `json:"error,omitempty"`
}

// Start tells a guest what to run, parent to child (W23).
type Start struct {
	V        int            `json:"v"`
	Program  string         `json:"program"`
	Bindings []StartBinding `json:"bindings"`
	Budget   StartBudget    `json:"budget"`
	ResultID string         `json:"result_id"`
}

// StartBinding names one tool that the program may call (W24). It never
// carries an implementation.
type StartBinding struct {
	Name string `json:"name"`
	// Signature is the call form shown to the program; empty means the generic
	// form host.<name>(argsJSON).
	Signature string `json:"signature,omitempty"`
	// Description is the tool's help text.
	Description string `json:"description,omitempty"`
}

// StartBudget is what was asked for this run (W25). Zero is not asked for.
type StartBudget struct {
	// WallClock crosses the wire as integer nanoseconds.
	WallClock time.Duration `json:"wall_clock,omitempty"`
	MaxCalls  int           `json:"max_calls,omitempty"`
	MaxBytes  int           `json:"max_bytes,omitempty"`
	MaxMemory int64         `json:"max_memory,omitempty"`
}

// Result ends one execution, child to parent (W26).
type Result struct {
	V        int    `json:"v"`
	ResultID string `json:"result_id"`
	OK       bool   `json:"ok"`
	Value    string `json:"value,omitempty"`
	Kind     string `json:"kind,omitempty"`
	Error    string `json:"error,omitempty"`
	// Calls and Bytes are the child's claim, for reconciliation only.
	Calls int `json:"calls,omitempty"`
	Bytes int `json:"bytes,omitempty"`
}

// Handler answers one accepted Request. Its context carries the call's
// deadline and ends with the run.
type Handler func(ctx context.Context, req Request) (Response, error)

// Usage is the parent's ledger of one call channel.
type Usage struct {
	// Accepted counts requests whose handler was started, Refused those that
	// were answered with a failure without a handler.
	Accepted, Refused int64
	// Bytes counts value and error text delivered to the child (W37), except the
	// error text of class quota.
	Bytes int64
	// Busy is the time during which at least one call was in flight; a call that
	// was answered at its deadline is in flight until its handler returns.
	Busy time.Duration
}
