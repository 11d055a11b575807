package jail

import (
	"encoding/json"
	"fmt"
	"syscall"

	"example.com/jail/cgroup"
	"example.com/jail/wire"
	"example.com/jail/wire/strictjson"
	"example.com/jail/wire/toolfail"
)

// account turns what is known about the end of a jail into its report. The
// leaf still exists, its processes do not.
func (j *Jail) account(f *facts, rusage syscall.Rusage, ledger wire.Usage) *Report {
	r := &Report{V: 1, ID: j.id, Refused: []Refusal{}, Budget: j.budget}
	r.WallNS = f.endedAt - j.released
	r.CPUUserNS, r.CPUSystemNS = rusage.Utime.Nano(), rusage.Stime.Nano()
	r.Stdout, r.Stderr = j.stdout.usage(), j.stderr.usage()

	stats, err := j.leaf.Stats()
	if err != nil {
		r.Error = err.Error()
	}
	// -1 is the package's word for "not counted".
	r.Memory.PeakBytes, r.Memory.OOMKills = max(stats.MemoryPeak, 0), max(stats.OOMKills, 0)
	r.PIDs.Peak, r.PIDs.Refused = max(stats.PidsPeak-1, 0), max(stats.PidsRefused, 0)
	if stats.CPUUser >= 0 && stats.CPUSystem >= 0 && stats.CPUUser+stats.CPUSystem > 0 {
		// The leaf counts what its processes used; pid 1's rusage lacks
		// children whose parents ignored SIGCHLD.
		r.CPUUserNS, r.CPUSystemNS = int64(max(stats.CPUUser-j.parked.user, 0)), int64(max(stats.CPUSystem-j.parked.system, 0))
	}

	r.Calls.Accepted, r.Calls.Refused = ledger.Accepted, ledger.Refused
	r.Calls.Bytes, r.Calls.WallNS = ledger.Bytes, int64(ledger.Busy)
	r.Calls.Reconciled = true
	if f.result != nil {
		// It was sent before the end, though it may be read after it.
		r.ResultNS = min(f.resultAt-j.released, r.WallNS)
		r.Calls.ClaimedCalls, r.Calls.ClaimedBytes = int64(f.result.Calls), int64(f.result.Bytes)
		// A guest counts what it sent, refused or not.
		r.Calls.Reconciled = r.Calls.ClaimedCalls == ledger.Accepted+ledger.Refused && r.Calls.ClaimedBytes == ledger.Bytes
	}
	if f.exited {
		r.Leftovers.Processes = int64(max(f.left, 0))
		if f.status.Signaled() {
			n := int(f.status.Signal())
			r.Signal = &n
		} else {
			n := f.status.ExitStatus()
			r.ExitCode = &n
		}
	}
	j.decide(r, f)
	return r
}

// decide applies the order of J12: canceled, protocol, memory, the other
// limits, the guest's Result, the exit.
func (j *Jail) decide(r *Report, f *facts) {
	set := func(c Cause, class toolfail.Class, format string, args ...any) {
		r.Cause, r.Class = c, class
		if format != "" {
			r.Error = fmt.Sprintf(format, args...)
		}
	}
	b := j.spec.Budget
	switch {
	case f.canceled:
		set(CauseCanceled, toolfail.Canceled, "canceled by the caller")
	case f.protocol != nil:
		set(CauseProtocol, toolfail.Permanent, "%v", f.protocol)
	case r.Memory.OOMKills > 0:
		scope, err := j.leaf.Scope()
		if err != nil {
			r.Error = err.Error()
		}
		r.Memory.Scope = string(scope)
		set(CauseMemory, toolfail.Quota, "out of memory: processes killed by the kernel: %d, limit: %s", r.Memory.OOMKills, r.Memory.Scope)
	case f.thrash != "":
		r.Memory.Scope = string(cgroup.Self)
		set(CauseMemory, toolfail.Quota, "out of memory: %s", f.thrash)
	case f.cpu:
		set(CauseCPUTime, toolfail.Quota, "used up %s of cpu time", b.CPUTime)
	case f.output:
		set(CauseOutput, toolfail.Quota, "%s", TruncationMarker(b.MaxOutput))
	case f.wall:
		set(CauseWall, toolfail.Quota, "ran for %s", b.WallClock)
	case f.result != nil:
		j.judge(r, f.result)
	case f.exited && f.status.Signaled():
		set(CauseSignaled, toolfail.Unknown, "ended by signal %d (%s)", f.status.Signal(), f.status.Signal())
	case j.channels != nil && f.exited:
		set(CauseLost, toolfail.Unknown, "the guest exited with status %d and sent no result", f.status.ExitStatus())
	case j.channels != nil && f.lost:
		set(CauseLost, toolfail.Unknown, "the guest closed its start channel and sent no result")
	case f.exited && f.status.ExitStatus() == 0:
		set(CauseOK, "", "")
	case f.exited:
		set(CauseProgram, toolfail.Permanent, "exit status %d", f.status.ExitStatus())
	default:
		set(CauseLost, toolfail.Unknown, "the jail's init was killed from outside")
	}
}

// valueRules leave room for the report around the value: what reads the report
// may be limited as encoding/json is.
var valueRules = strictjson.Options{MaxDepth: strictjson.StdlibDepth - 10, UniqueKeys: true}

// judge takes a guest's Result. The value has to be JSON that says the same to
// every reader; it is shown as it came, never rewritten.
func (j *Jail) judge(r *Report, res *wire.Result) {
	if !res.OK {
		r.Cause, r.Class, r.Error = CauseProgram, toolfail.Parse(res.Kind), toolfail.CapText(res.Error)
		return
	}
	if res.Value != "" {
		if _, err := strictjson.Check([]byte(res.Value), valueRules); err != nil {
			r.Cause, r.Class, r.Error = CauseProgram, toolfail.Invalid, "value of the result: "+err.Error()
			return
		}
		r.Value = json.RawMessage(res.Value)
	}
	r.Cause, r.Class = CauseOK, ""
}
