package cgroup

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Prefix begins the name of every group that this package makes or removes.
const Prefix = "jail-"

// leafMode is the mode of a leaf's directories. The sticky bit, which means little
// on a cgroup, tells a leaf from a group that somebody else gave such a name: it is
// there from the directory's first moment on, on both versions, and costs nothing.
const leafMode = 0o1755

// launcherName is the group that a caller on cgroup v2 moves itself to, so that
// its own cgroup can have children with limits. It has the prefix and is still
// no leaf.
const launcherName = Prefix + "launcher"

// A Controller is a kernel facility that limits or counts.
type Controller string

const (
	Memory  Controller = "memory"  // memory with swap, and the OOM killer's evidence
	Pids    Controller = "pids"    // number of tasks
	CPU     Controller = "cpu"     // bandwidth
	CPUSet  Controller = "cpuset"  // which CPUs are used
	IO      Controller = "io"      // rates of block devices; v1 calls it blkio
	CPUAcct Controller = "cpuacct" // CPU time used; needs no controller on cgroup v2
)

// controllers has all of them in the order in which parts of a leaf are made.
var controllers = []Controller{Memory, Pids, CPU, CPUSet, IO, CPUAcct}

// legacy is the name of c on cgroup v1.
func (c Controller) legacy() string {
	if c == IO {
		return "blkio"
	}
	return string(c)
}

var (
	// ErrExist is returned by NewLeaf if a group of that name exists. Making a
	// group is exclusive, so this can serve to claim a unique name.
	ErrExist = errors.New("cgroup exists")

	// ErrSwap is inside an UnsupportedError if the host has swap and the kernel
	// has no file to bound it: a memory limit would not hold.
	ErrSwap = errors.New("swap is on and cannot be bounded")
)

// A Place is where this process finds a controller. Whether it can be used there
// is another question: see Support.Err.
type Place string

const (
	Delegated    Place = "v2 delegated here"
	NotDelegated Place = "v2 not delegated" // v2 has it, and the launcher's cgroup does not or may not make groups
	Legacy       Place = "v1"
	Absent       Place = "absent" // from the kernel, or from what can be seen here
)

// Support says where a controller can be used by this process, or why not.
type Support struct {
	Controller Controller // empty for the group itself: no hierarchy can be used at all
	Place      Place      // empty for the group itself
	Hierarchy  string     // "v2", "v1", or "" if there is none
	Dir        string     // the group below which leaves are made, as far as known
	Err        error      // nil if the controller can be used
	Fix        string     // what to change on the host or in the request; empty if Err is nil
}

// An UnsupportedError lists what was asked for and cannot be enforced. NewLeaf
// returns it before it leaves anything behind.
type UnsupportedError struct {
	Missing []Support // at least one
}

// Error names each controller with the reason and the fix.
func (e *UnsupportedError) Error() string {
	var b strings.Builder
	for i, s := range e.Missing {
		if i > 0 {
			b.WriteString("; ")
		}
		if s.Controller != "" {
			fmt.Fprintf(&b, "cgroup controller %s: ", s.Controller)
		}
		b.WriteString(s.Err.Error())
		if s.Fix != "" {
			fmt.Fprintf(&b, " (%s)", s.Fix)
		}
	}
	return b.String()
}

// Unwrap returns the reasons.
func (e *UnsupportedError) Unwrap() []error {
	errs := make([]error, len(e.Missing))
	for i, s := range e.Missing {
		errs[i] = s.Err
	}
	return errs
}

// Limits is what a leaf has to enforce. The zero value of a field means that it
// is not asked for: no limit is set and nothing is counted for it.
type Limits struct {
	// Memory is the limit in bytes, at least one page. Swap is bounded with it:
	// to nothing on v2; on v1 memory and swap together have this limit. At the
	// limit the kernel kills: on v2 the whole leaf, on v1 one process, after
	// which [Leaf.OOM] fires and the caller kills the rest.
	Memory int64
	// MemoryHigh is the memory in bytes above which the leaf is slowed down and
	// its memory reclaimed, at least one page and no more than Memory. It kills
	// nobody, bounds no swap and can be exceeded. It needs v2: on v1 it is
	// refused.
	MemoryHigh int64
	// Pids is the greatest number of tasks, threads included. At the limit fork
	// fails with EAGAIN.
	Pids int64
	// CPUs is the CPU bandwidth in cores per 100 ms, at least 0.01. At the limit
	// the leaf is throttled. It is rounded to 0.00001.
	CPUs float64
	// CPUSet lists the CPUs that may be used, "0-1,3" as in cpuset(7). It has to
	// be within what the launcher's own cgroup may use.
	CPUSet string
	// IO has the greatest rates of block devices. It is a pointer so that Limits
	// can be compared; nil and an empty list ask for nothing.
	IO *IOLimits
	// CPUTime asks that the CPU time used can be read. It limits nothing.
	CPUTime bool
}

func (l Limits) asked() []Controller {
	var cs []Controller
	for _, c := range controllers {
		switch {
		case c == Memory && (l.Memory > 0 || l.MemoryHigh > 0),
			c == Pids && l.Pids > 0,
			c == CPU && l.CPUs > 0,
			c == CPUSet && l.CPUSet != "",
			c == IO && l.IO != nil && len(*l.IO) > 0,
			c == CPUAcct && l.CPUTime:
			cs = append(cs, c)
		}
	}
	return cs
}

// Check refuses limits that no host could set. NewLeaf calls it first.
func (l Limits) Check() error {
	switch {
	case l.Memory < 0:
		return fmt.Errorf("memory limit %d is negative", l.Memory)
	case l.MemoryHigh < 0:
		return fmt.Errorf("memory high %d is negative", l.MemoryHigh)
	case l.Memory > 0 && l.MemoryHigh > l.Memory:
		return fmt.Errorf("memory high %d is above the memory limit %d", l.MemoryHigh, l.Memory)
	case l.Pids < 0:
		return fmt.Errorf("pids limit %d is negative", l.Pids)
	case math.IsNaN(l.CPUs) || l.CPUs < 0 || l.CPUs > maxCPUs:
		return fmt.Errorf("cpus limit %v is not within 0 and %d", l.CPUs, maxCPUs)
	case l.CPUs > 0 && l.quota(period) < minQuota:
		return fmt.Errorf("cpus limit %v is below 0.01", l.CPUs)
	}
	if l.CPUSet != "" {
		if _, err := CountCPUs(l.CPUSet); err != nil {
			return err
		}
	}
	if l.IO != nil {
		return l.IO.check()
	}
	return nil
}

const (
	period   = 100_000   // microseconds; the kernel's default, and the v1 files keep it
	minQuota = 1_000     // microseconds; the kernel refuses less
	maxCPUs  = 1_000_000 // keeps the quota far from overflow
)

// quota is the run time in microseconds a period.
func (l Limits) quota(period int64) int64 { return int64(math.Round(l.CPUs * float64(period))) }

// Applied is one value that NewLeaf wrote, and what the kernel made of it. For
// CPUSet that is the number of CPUs.
type Applied struct {
	Controller Controller
	File       string // "memory.max (v2)"
	Wrote      int64
	Read       int64  // differs from Wrote where the kernel rounds, as memory to whole pages
	Detail     string // CPUSet: the CPUs, "0-1,3"; IO: the device and its rate, "254:0 rbps"
}

// Stats is what the kernel counted in a leaf. A value of -1 was not counted:
// not asked for, or the kernel has no such counter.
type Stats struct {
	MemoryPeak  int64 // bytes; v2 has it since Linux 5.19
	OOMKills    int64 // OOM kills in the leaf, for whatever limit; v2 counts one twice if it kills all
	PidsPeak    int64 // tasks; since Linux 6.1
	PidsRefused int64 // forks that failed at the limit
	CPUUser     time.Duration
	CPUSystem   time.Duration
	// Throttled is how long tasks waited for bandwidth, ThrottledPeriods the
	// number of periods of 100 ms in which they had to.
	Throttled        time.Duration
	ThrottledPeriods int64
}

// noStats has every value not counted.
func noStats() Stats { return Stats{-1, -1, -1, -1, -1, -1, -1, -1} }

// A Scope tells whose memory ran out when a process was OOM-killed.
type Scope string

const (
	Self     Scope = "self"     // the leaf's own limit
	Ancestor Scope = "ancestor" // the limit of a cgroup above it
	Machine  Scope = "host"     // the host's memory; on v2 also an ancestor that is not visible from here
)

// fault is an error that knows what would help.
type fault struct {
	err error
	fix string
}

func (f *fault) Error() string { return f.err.Error() }
func (f *fault) Unwrap() error { return f.err }

// What helps against the usual refusals.
const (
	fixMount    = "mount cgroup2 on /sys/fs/cgroup, or start the launcher where the host's cgroups are visible"
	fixWritable = "mount the cgroup file system read-write for the launcher"
	fixPermit   = "start the launcher as root or in a delegated cgroup: systemd-run --user --scope -p Delegate=yes COMMAND"
	fixDelegate = "delegate the controller to the launcher's cgroup: systemd-run --scope -p Delegate=yes COMMAND"
	fixAlone    = "start the launcher alone in a delegated cgroup: systemd-run --scope -p Delegate=yes COMMAND"
	fixRoom     = "raise cgroup.max.descendants and cgroup.max.depth of the launcher's cgroup and of those above it"
	fixCPUs     = "ask for CPUs that the launcher's own cgroup may use"
	fixDevice   = "name a whole disk, not a partition, as MAJOR:MINOR: see lsblk"
	fixThrottle = "boot a kernel with CONFIG_BLK_DEV_THROTTLING"
	fixHigh     = "do not ask for it, or boot with cgroup v2 alone: systemd.unified_cgroup_hierarchy=1"
	fixValue    = "ask for a value that the kernel accepts below the launcher's own cgroup"
	fixSwap     = "turn swap off, or boot with swapaccount=1"
	fixRetry    = "try again when the host has resources left"
)

// explain gives err the fix that goes with its cause, if it has none yet.
func explain(err error) error {
	var f *fault
	if err == nil || errors.As(err, &f) {
		return err
	}
	fix := fixRetry
	switch {
	case errors.Is(err, unix.EROFS):
		fix = fixWritable
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		fix = fixPermit
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENODEV), errors.Is(err, unix.EOPNOTSUPP):
		fix = fixDelegate
	case errors.Is(err, unix.EAGAIN):
		fix = fixRoom
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ERANGE), errors.Is(err, unix.EBUSY):
		fix = fixValue
	}
	return &fault{err, fix}
}

// transient tells an error that says nothing about what the host can do.
func transient(err error) bool {
	return errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ENOMEM) ||
		errors.Is(err, unix.ENOSPC) || errors.Is(err, ErrExist)
}
