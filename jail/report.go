package jail

import (
	"context"
	"encoding/json"
	"errors"
	"syscall"

	"example.com/jail/wire/toolfail"
)

// Cause is why a run ended (protocols.md 7.3).
type Cause string

// The causes. Their names are part of the report's format.
const (
	CauseOK       Cause = "ok"
	CauseProgram  Cause = "program"
	CauseSignaled Cause = "signaled"
	CauseWall     Cause = "wall_clock"
	CauseCPUTime  Cause = "cpu_time"
	CauseMemory   Cause = "memory"
	CauseOutput   Cause = "output"
	CauseCanceled Cause = "canceled"
	CauseProtocol Cause = "protocol"
	CauseRefused  Cause = "refused"
	CauseSetup    Cause = "setup"
	CauseLost     Cause = "lost"
)

// Report is the account of one run. It is written by the launcher alone, on
// every path, refusal and failed set-up included; its JSON form is version 1 of
// the report's format.
type Report struct {
	V     int    `json:"v"`
	ID    string `json:"id"`
	Cause Cause  `json:"cause"`
	// Class is the failure class of the run, empty when ok.
	Class toolfail.Class `json:"class"`

	// ExitCode and Signal are the program's own, nil if it never ran or was
	// killed by the launcher before it ended.
	ExitCode *int `json:"exit_code,omitempty"`
	Signal   *int `json:"signal,omitempty"`

	// Value and Error are a guest's Result; Error also explains causes that
	// are not the program's.
	Value json.RawMessage `json:"value,omitempty"`
	Error string          `json:"error,omitempty"`

	WallNS int64 `json:"wall_ns"`
	// ResultNS is when a guest's Result came, counted as WallNS is.
	ResultNS    int64 `json:"result_ns,omitempty"`
	CPUUserNS   int64 `json:"cpu_user_ns"`
	CPUSystemNS int64 `json:"cpu_system_ns"`

	Memory    MemoryUsage `json:"memory"`
	PIDs      PIDUsage    `json:"pids"`
	Stdout    StreamUsage `json:"stdout"`
	Stderr    StreamUsage `json:"stderr"`
	Calls     CallUsage   `json:"calls"`
	Leftovers Leftovers   `json:"leftovers"`

	Budget  []BudgetLine `json:"budget"`
	Refused []Refusal    `json:"refused"`
	Setup   *SetupFault  `json:"setup,omitempty"`
}

// MemoryUsage is what the leaf's memory controller counted.
type MemoryUsage struct {
	PeakBytes int64 `json:"peak_bytes"`
	OOMKills  int64 `json:"oom_kills"`
	// Scope tells whose limit it was: "self", "ancestor" or "host"; only for
	// cause memory.
	Scope string `json:"scope,omitempty"`
}

// PIDUsage counts tasks, the jail's init not among them.
type PIDUsage struct {
	Peak    int64 `json:"peak"`
	Refused int64 `json:"refused"`
}

// StreamUsage accounts for every byte of a stream: Seen = Delivered + Dropped.
type StreamUsage struct {
	Seen      int64 `json:"seen"`
	Delivered int64 `json:"delivered"`
	Dropped   int64 `json:"dropped"`
}

// CallUsage is the launcher's ledger of the call channel, beside what the
// guest claims.
type CallUsage struct {
	Accepted int64 `json:"accepted"`
	Refused  int64 `json:"refused"`
	Bytes    int64 `json:"bytes"`
	// WallNS is time with at least one call in flight.
	WallNS       int64 `json:"wall_ns"`
	ClaimedCalls int64 `json:"claimed_calls"`
	ClaimedBytes int64 `json:"claimed_bytes"`
	// Reconciled says that claim and ledger agree.
	Reconciled bool `json:"reconciled"`
}

// Leftovers is what the main process left behind; all of it was killed.
type Leftovers struct {
	Processes int64 `json:"processes"`
}

// BudgetLine echoes one budget item that was asked for.
type BudgetLine struct {
	Item  Item    `json:"item"`
	Asked float64 `json:"asked"`
	// AskedText says it in full for items that are more than a number: the
	// list of CPUSet, the rates of IO. Asked then counts processors or devices.
	AskedText string `json:"asked_text,omitempty"`
	// EnforcedBy names the mechanism, "" if the item is not enforced (which
	// only AllowUnenforced makes possible).
	EnforcedBy string `json:"enforced_by"`
	// ReadBack is the value in force, as read from the kernel where the
	// kernel holds it.
	ReadBack     float64 `json:"read_back"`
	ReadBackText string  `json:"read_back_text,omitempty"`
}

// SetupFault is the step of set-up that failed.
type SetupFault struct {
	Stage string `json:"stage"`
	Index int    `json:"index"`
	Errno int    `json:"errno"`
}

// NewReport returns the report of a run that ended before it began, for the
// errors of [Start] and for callers that refuse a run themselves.
func NewReport(id string, err error) *Report {
	r := &Report{V: 1, ID: id, Refused: []Refusal{}, Budget: []BudgetLine{}}
	r.Calls.Reconciled = true
	r.fail(err)
	return r
}

func (r *Report) fail(err error) {
	var refused *RefusedError
	var setup *SetupError
	var errno syscall.Errno
	errors.As(err, &errno)
	switch {
	case err == nil:
	case errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded):
		r.Cause, r.Class, r.Error = CauseCanceled, toolfail.Canceled, err.Error()
	case errors.As(err, &refused):
		r.Cause, r.Class, r.Refused, r.Error = CauseRefused, toolfail.Denied, refused.Items, err.Error()
	default:
		r.Cause, r.Class, r.Error = CauseSetup, toolfail.Permanent, err.Error()
		r.Setup = &SetupFault{Stage: "start", Errno: int(errno)}
		if errors.As(err, &setup) {
			r.Setup.Stage, r.Setup.Index = setup.Stage, setup.Index
		}
		// 7.3: only what may pass by itself is worth another try.
		switch errno {
		case syscall.EAGAIN, syscall.EBUSY, syscall.ENOMEM, syscall.EMFILE, syscall.ENFILE, syscall.EINTR:
			r.Class = toolfail.Transient
		}
	}
}
