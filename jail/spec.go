package jail

import (
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"example.com/jail/cgroup"
	"example.com/jail/invoke"
	"example.com/jail/rootfs"
	"example.com/jail/seccomp"
)

// Spec says what to run and within what. It is plain data: Start reads it and
// keeps no reference to its slices.
type Spec struct {
	// Args is the program and its arguments. Args[0] without a slash is
	// looked up in the PATH of the jail.
	Args []string
	// Env is added to the environment of every jail, which holds PATH, HOME,
	// TMPDIR and LANG and nothing of the launcher's own. Each is "KEY=VALUE";
	// a later one replaces an earlier one.
	Env []string
	// Dir is the working directory in the jail, "/tmp" if empty.
	Dir string
	// User is the uid and gid that the program sees; nil is 1000:1000. On the
	// host the program has ids of its own whatever is set here: an unused pair
	// per run, or one pair per root if that maps directories of the host.
	User *User

	// Root is the root file system; the zero value is a read-only view of the
	// host.
	Root rootfs.Config
	// Templates keeps roots between runs; nil is the process's own cache,
	// pinned in [rootfs.DefaultDir].
	Templates *rootfs.Cache
	// Seccomp is the system call filter; nil is the default profile, compiled
	// once per process. The zero Filter is none.
	Seccomp *seccomp.Filter

	Budget Budget
	// AllowUnenforced names budget items that may go without enforcement on a
	// host that cannot enforce them. The report says so. Everything else that
	// the host cannot enforce refuses the run.
	AllowUnenforced []Item

	// Script makes the run a guest's: fds 3 and 4 are open in the program and
	// the run is judged by its Result.
	Script *Script

	// Stdin is copied to the program; nil is an empty input. Stdout and
	// Stderr take its output; nil discards it. They are called from one
	// goroutine each. A writer that blocks makes the program block, and never
	// keeps a limit from ending it; if it still blocks [StallTimeout] after the
	// program's end, what it has not taken is counted as dropped.
	Stdin  io.Reader
	Stdout io.Writer
	Stderr io.Writer
}

// User is a uid and gid as the program sees them.
type User struct{ UID, GID uint32 }

// Script is what a guest interprets.
type Script struct {
	// Program is the text that goes to the guest in its Start frame.
	Program string
	// Tools are the calls that it may make; nil is none. Every call passes
	// the chain that the tools were built with.
	Tools *invoke.Tools
}

// Budget is what a run may use. For each item zero means "not asked for"; what
// happens at the limit is told per item. Negative values are refused.
type Budget struct {
	// MaxMemory is bytes of memory of all processes of the jail together with
	// their page cache, tmpfs and kernel memory; swap is not available. At the
	// limit the kernel kills and the whole jail ends with cause "memory".
	MaxMemory int64
	// WallClock counts from the moment the program is released, also while a
	// tool works or the program is stopped (CLOCK_MONOTONIC: not while the
	// machine is suspended). The whole jail is killed, cause "wall_clock".
	WallClock time.Duration
	// CPUTime is user and system time of all processes together. The whole
	// jail is killed, cause "cpu_time".
	CPUTime time.Duration
	// CPUs is a rate, in processors: the jail is throttled to it.
	CPUs float64
	// MaxPIDs counts processes and threads, the jail's init not among them.
	// At the limit fork fails in the jail; the report counts it.
	MaxPIDs int64
	// MaxOutput is bytes of stdout and stderr together. Exactly that many are
	// delivered, then the whole jail is killed, cause "output".
	MaxOutput int64
	// MaxTmp is bytes of /tmp and /dev/shm together (one tmpfs, one inode per
	// 4 KiB); ENOSPC in the jail. They count as memory, too.
	MaxTmp int64
	// MaxCalls and MaxBytes bound the tool calls of a run and the bytes of
	// their answers; a call beyond is refused with class "quota".
	MaxCalls int
	MaxBytes int
	// Inflight is how many calls may be at work at once, 64 if zero; a call
	// beyond is refused with class "rate_limited".
	Inflight int
	// CallDeadline bounds each call; at expiry it is answered with class
	// "transient".
	CallDeadline time.Duration
	// OpenFiles is how many descriptors each process may have open
	// (RLIMIT_NOFILE): one more fails with EMFILE. At zero, too, it is 1024; the
	// report then does not list it.
	OpenFiles int

	// These are optional: no default budget asks for them, and a host without
	// them is not worse for it.

	// MemoryHigh is bytes of memory above which the jail is slowed down and its
	// memory reclaimed, at most MaxMemory. It ends nothing and can be exceeded.
	// It needs cgroup v2; on v1 it is refused.
	MemoryHigh int64
	// CPUSet lists the processors that the jail may run on, "0-1,3" as in
	// cpuset(7). Others than the launcher's own cgroup has are refused.
	CPUSet string
	// IO has the greatest rates of block devices; at a limit a request waits.
	// For which writes they hold is told at [cgroup.IOLimit].
	IO []cgroup.IOLimit
}

// DefaultBudget returns what the command line asks for unless told otherwise.
func DefaultBudget() Budget {
	return Budget{
		MaxMemory:    256 << 20,
		WallClock:    30 * time.Second,
		MaxPIDs:      64,
		MaxOutput:    16 << 20,
		MaxTmp:       64 << 20,
		MaxCalls:     1024,
		MaxBytes:     16 << 20,
		Inflight:     64,
		CallDeadline: 30 * time.Second,
		OpenFiles:    defaultOpenFiles,
	}
}

// Item names a budget item in reports, refusals and AllowUnenforced.
type Item string

// The budget items. The names are part of the report's format.
const (
	ItemMemory     Item = "max_memory"
	ItemWall       Item = "wall_clock"
	ItemCPUTime    Item = "cpu_time"
	ItemCPUs       Item = "cpus"
	ItemPIDs       Item = "max_pids"
	ItemOutput     Item = "max_output"
	ItemTmp        Item = "max_tmp"
	ItemCalls      Item = "max_calls"
	ItemBytes      Item = "max_bytes"
	ItemOpenFiles  Item = "open_files"
	ItemMemoryHigh Item = "memory_high"
	ItemCPUSet     Item = "cpuset"
	ItemIO         Item = "io"
)

// Items lists all budget items in the order of reports.
func Items() []Item {
	names := make([]Item, len(items))
	for i := range items {
		names[i] = items[i].name
	}
	return names
}

const (
	defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	defaultDir  = "/tmp"
	defaultUID  = 1000
	hostname    = "jail"

	defaultOpenFiles = 1024
	// MaxProgram bounds the text of a script: it has to fit one frame with
	// room for escaping.
	MaxProgram = 2 << 20
)

// environment returns the whole environment of the program.
func (s *Spec) environment() []string {
	env := []string{"PATH=" + defaultPath, "HOME=/tmp", "TMPDIR=/tmp", "LANG=C.UTF-8"}
	at := map[string]int{}
	for i, e := range env {
		k, _, _ := strings.Cut(e, "=")
		at[k] = i
	}
	for _, e := range s.Env {
		k, _, _ := strings.Cut(e, "=")
		if i, ok := at[k]; ok {
			env[i] = e
			continue
		}
		at[k] = len(env)
		env = append(env, e)
	}
	return env
}

// check refuses what no host could run. Every fault is one Refusal.
func (s *Spec) check() []Refusal {
	var bad []Refusal
	refuse := func(item, fix, format string, args ...any) {
		bad = append(bad, Refusal{Item: item, Reason: fmt.Sprintf(format, args...), Fix: fix})
	}
	if len(s.Args) == 0 || s.Args[0] == "" {
		refuse("args", "name a program", "no program to run")
	}
	for _, e := range s.Env {
		if k, _, ok := strings.Cut(e, "="); !ok || k == "" {
			refuse("env", "write KEY=VALUE", "environment entry %q has no name and value", clip(e))
		}
	}
	for _, list := range [][]string{s.Args, s.Env, {s.Dir}} {
		for _, v := range list {
			if strings.IndexByte(v, 0) >= 0 {
				refuse("args", "remove the NUL byte", "%q holds a NUL byte", clip(v))
			}
		}
	}
	if s.Dir != "" && !strings.HasPrefix(s.Dir, "/") {
		refuse("workdir", "give an absolute path of the jail", "working directory %q is not absolute", clip(s.Dir))
	}
	if u := s.User; u != nil {
		for _, id := range []uint32{u.UID, u.GID} {
			// Ids from 0x50000000 up to 0x70000000 are handed out on the
			// host; the init shows one of them inside, too.
			if id == math.MaxUint32 || id >= templateIDs && id < runIDs+idSpan {
				refuse("user", "use an id below 65534", "id %d is not available", id)
			}
		}
	}
	for i := range items {
		v, limits := items[i].asked(&s.Budget), items[i].limits(&s.Budget)
		if v < 0 || math.IsNaN(v) || math.IsInf(v, 0) {
			refuse(string(items[i].name), "give a positive value, or 0 for no limit", "%v is not a budget", v)
		} else if least, most := items[i].least, items[i].most; v > 0 && (v < least || most > 0 && v > most) {
			refuse(string(items[i].name), fmt.Sprintf("give %g to %.0f, or 0", least, most), "%s is out of range", strconv.FormatFloat(v, 'f', -1, 64))
		} else if err := limits.Check(); err != nil {
			refuse(string(items[i].name), "correct the value: docs/limits.md tells what each item takes", "%v", err)
		}
	}
	if b := &s.Budget; b.MaxMemory > 0 && b.MemoryHigh > b.MaxMemory {
		refuse(string(ItemMemoryHigh), "give less than max_memory", "%d is more than max_memory, %d", b.MemoryHigh, b.MaxMemory)
	}
	if s.Budget.Inflight < 0 || s.Budget.CallDeadline < 0 {
		refuse("budget", "give positive values", "inflight %d, call deadline %s", s.Budget.Inflight, s.Budget.CallDeadline)
	}
	for _, i := range s.AllowUnenforced {
		if !slices.Contains(Items(), i) {
			refuse("allow_unenforced", "name one of "+itemList(), "%q is no budget item", clip(string(i)))
		}
	}
	if s.Script != nil && len(s.Script.Program) > MaxProgram {
		refuse("program", "make the program smaller", "program of %d bytes, at most %d", len(s.Script.Program), MaxProgram)
	}
	if s.Script != nil && !utf8.ValidString(s.Script.Program) {
		refuse("program", "save it as UTF-8", "program is not valid UTF-8") // JSON carries no other
	}
	return bad
}

func itemList() string {
	var names []string
	for _, i := range Items() {
		names = append(names, string(i))
	}
	return strings.Join(names, ", ")
}

// clip keeps text of a caller out of messages beyond what helps.
func clip(s string) string {
	if len(s) > 80 {
		return s[:80] + "..."
	}
	return s
}

// Refusal is one reason why a run was not started.
type Refusal struct {
	Item   string `json:"item"`
	Reason string `json:"reason"`
	Fix    string `json:"fix"`
}

// RefusedError is returned when nothing was started: the spec cannot be run as
// it is, or this host cannot enforce it. It lists every item that fails.
type RefusedError struct{ Items []Refusal }

func (e *RefusedError) Error() string {
	var parts []string
	for _, r := range e.Items {
		parts = append(parts, fmt.Sprintf("%s: %s (fix: %s)", r.Item, r.Reason, r.Fix))
	}
	return "refused: " + strings.Join(parts, "; ")
}

// SetupError is returned when a jail could not be built. Everything that had
// been made is gone again.
type SetupError struct {
	// Stage is the step that failed; "exec" means that the program itself
	// could not be executed.
	Stage string
	// Index tells steps of a stage apart.
	Index int
	Err   error

	inside bool // told by the init
}

func (e *SetupError) Error() string { return fmt.Sprintf("set up jail: %s: %v", e.Stage, e.Err) }

// Unwrap returns the cause, usually a syscall.Errno.
func (e *SetupError) Unwrap() error { return e.Err }

// ErrWaited is returned by a second Wait.
var ErrWaited = errors.New("jail was already waited for")
