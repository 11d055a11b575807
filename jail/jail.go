package jail

import (
	"context"
	"errors"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"example.com/jail/cgroup"
	"example.com/jail/internal/faults"
	"example.com/jail/jail/jailinit"
	"example.com/jail/seccomp"
	"example.com/jail/wire"
)

// Jail is one running jail. Its methods are safe for concurrent use.
type Jail struct {
	spec   Spec
	id     string
	number uint32 // the id's, and of the host ids of the run
	budget []BudgetLine
	given  map[Item]bool // not enforced, as the spec allows

	leaf     *cgroup.Leaf
	filter   *seccomp.Filter
	request  jailinit.Request // but for what to run
	control  *os.File         // socket to the init
	forked   bool             // an init was asked for
	stager   int              // pid of the init's first task until it is reaped
	pid      int              // of pid 1, a child of this process
	tmp      int64            // bytes of /tmp, as the kernel made it
	guest    int              // of a parked guest, 0 if not known
	pidfd    *os.File
	released int64   // CLOCK_MONOTONIC at which the program was let loose
	parked   cpuTime // used before that, by a guest of a pool

	stdin          *os.File
	stdout, stderr *stream
	allow          *allowance
	channels       *channels // nil without a Script

	killOnce sync.Once
	kill     chan struct{}

	done   chan struct{} // closed when report is set
	report *Report
	waited sync.Once
}

// ID returns the name of the run, which is also that of its cgroup leaf.
func (j *Jail) ID() string { return j.id }

// Kill ends the jail as a cancel of its context does: every process is killed
// and the report's cause is "canceled", unless the program had ended before.
// It does not wait, and may be called at any time and any number of times.
func (j *Jail) Kill() { j.killOnce.Do(func() { close(j.kill) }) }

// Wait waits until the jail has ended and everything of it is gone, and returns
// its report. The error is nil unless Wait was called before (ErrWaited, with
// the same report).
func (j *Jail) Wait() (*Report, error) {
	<-j.done
	err := ErrWaited
	j.waited.Do(func() { err = nil })
	return j.report, err
}

// facts is what the launcher knows about the end of a jail. Each is set by the
// launcher's own books or by the kernel.
type facts struct {
	canceled bool
	protocol error
	wall     bool
	cpu      bool
	thrash   string // what the kernel counted of a leaf that is out of memory and alive
	output   bool
	result   *wire.Result
	resultAt int64 // CLOCK_MONOTONIC
	exited   bool
	status   syscall.WaitStatus
	endedAt  int64 // CLOCK_MONOTONIC
	left     int32 // processes alive when the program ended
	lost     bool  // the start channel was closed without a Result
}

// decided tells whether anything has happened that ends a jail.
func (f *facts) decided() bool {
	return f.canceled || f.protocol != nil || f.wall || f.cpu || f.thrash != "" || f.output || f.exited || f.lost
}

func (f *facts) note(r wire.Result) { f.result, f.resultAt = &r, monotonic() }

// resultGrace is how long a guest may go on after its Result.
const resultGrace = time.Second

// supervise owns the jail from the exec to the report.
func (j *Jail) supervise(ctx context.Context) {
	go j.stdout.copy()
	go j.stderr.copy()
	if j.stdin != nil {
		go feed(j.stdin, j.spec.Stdin)
	}
	if j.channels != nil {
		j.channels.serve(j.id, j.spec.Script, j.spec.Budget)
	}
	messages := make(chan jailinit.Message, 4)
	go func() {
		defer close(messages)
		for {
			m, err := j.receive()
			if err != nil {
				return
			}
			messages <- m
		}
	}()

	faults.Here("jail.watch")
	f := j.watch(ctx, messages)
	faults.Here("jail.decided")
	usage := j.end(f.exited && f.left == 0)
	if f.endedAt == 0 {
		f.endedAt = monotonic() // not later: a reader may be slow to take the rest
	}
	if j.channels != nil {
		// J9: a Result that was written before the end counts, also when
		// the end was seen first.
		j.drainResult(f)
	}
	var ledger wire.Usage
	if j.channels != nil {
		ledger = j.channels.finish()
	}
	j.stdout.finish()
	j.stderr.finish()
	select {
	case <-j.allow.full:
		// Seen only now: the program wrote too much and ended at once.
		f.output = true
	default:
	}
	if j.stdin != nil {
		j.stdin.Close()
	}
	j.report = j.account(f, usage, ledger)
	faults.Here("jail.account")
	j.control.Close()
	j.pidfd.Close()
	if err := removeLeaf(j.leaf); err != nil && j.report.Error == "" {
		j.report.Error = err.Error()
	}
	faults.Here("jail.removed")
	close(j.done)
}

// removeTimeout bounds the removal of a leaf: a task in an uninterruptible wait
// keeps it, and the next collection takes it.
const removeTimeout = 2 * time.Second

func removeLeaf(l *cgroup.Leaf) error {
	ctx, cancel := context.WithTimeout(context.Background(), removeTimeout)
	defer cancel()
	return l.Remove(ctx)
}

func monotonic() int64 {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
	return ts.Nano()
}

// watch waits for the first event that ends the jail. Events that are there at
// the same moment are taken together; the verdict's precedence orders them.
func (j *Jail) watch(ctx context.Context, messages <-chan jailinit.Message) *facts {
	f := &facts{}
	b := j.spec.Budget

	var wall <-chan time.Time
	if b.WallClock > 0 {
		t := time.NewTimer(b.WallClock - time.Duration(monotonic()-j.released))
		defer t.Stop()
		wall = t.C
	}
	cpu := newCPUWatch(j.leaf, b.CPUTime, j.parked)
	defer cpu.stop()
	thrash := newThrashWatch(j.leaf, b.MaxMemory)
	defer thrash.stop()
	var result <-chan wire.Result
	var startEnd <-chan struct{}
	var fault <-chan error
	if c := j.channels; c != nil {
		result, startEnd, fault = c.result, c.startEnd, c.fault
	}
	var grace, afterResult <-chan time.Time
	var broken error // a channel that ended in the middle of a frame
	oom := j.leaf.OOM()

	for first := true; ; {
		if !first {
			// Something has ended it: take what else is there already.
			select {
			case m, ok := <-messages:
				j.note(f, m, ok)
				messages = nil
				continue
			case <-ctx.Done():
				f.canceled = true
			case <-j.kill:
				f.canceled = true
			default:
			}
			return f
		}
		select {
		case m, ok := <-messages:
			j.note(f, m, ok)
			messages = nil
			if !f.decided() { // pid 1 is gone without a word
				return f
			}
		case <-wall:
			f.wall = true
		case <-cpu.c:
			f.cpu = cpu.check()
		case <-thrash.c:
			f.thrash = thrash.check()
		case <-j.allow.full:
			f.output = true
		case <-oom:
			// cgroup v1 kills one process of the leaf at a time; the
			// counters tell the verdict.
			return f
		case r := <-result:
			f.note(r)
			result = nil
			grace, startEnd = nil, nil
			afterResult = time.After(resultGrace)
		case <-startEnd:
			startEnd = nil
			if grace == nil {
				grace = time.After(channelGrace)
			}
		case err := <-fault:
			if !gone(err) {
				f.protocol = err
				break
			}
			broken, fault = err, nil
			grace = time.After(channelGrace)
		case <-grace:
			// The program outlives a channel that it broke.
			if broken != nil {
				f.protocol = broken
			} else {
				f.lost = true
			}
		case <-afterResult:
			return f
		case <-ctx.Done():
			f.canceled = true
		case <-j.kill:
			f.canceled = true
		}
		first = !f.decided()
	}
}

// note takes a message of the init, or the end of its socket.
func (j *Jail) note(f *facts, m jailinit.Message, ok bool) {
	switch {
	case !ok:
	case m.Kind == jailinit.Exited:
		f.exited, f.status, f.endedAt, f.left = true, syscall.WaitStatus(m.A), int64(m.T), m.B
	case m.Kind == jailinit.Deadline:
		f.wall, f.endedAt = true, int64(m.T)
	}
}

// drainResult gives a Result that the guest had written before its end the
// time that it takes to read it.
func (j *Jail) drainResult(f *facts) {
	if f.result != nil || !f.exited {
		return
	}
	t := time.NewTimer(resultGrace)
	defer t.Stop()
	select {
	case r := <-j.channels.result:
		f.note(r)
	case err := <-j.channels.fault:
		if !gone(err) {
			f.protocol = err
		}
	case <-j.channels.startEnd:
	case <-t.C:
	}
}

// end kills whatever is left of the jail and reaps pid 1; alone says that pid 1
// was the last. It returns the resources that the kernel counted for pid 1 and
// all that it reaped.
func (j *Jail) end(alone bool) syscall.Rusage {
	// The signal to pid 1 ends its pid namespace; the leaf's kill covers what
	// may still be on its way into it. Both are by handle, never by number.
	_ = signalPidfd(j.pidfd, unix.SIGKILL)
	faults.Here("jail.signal")
	if !alone {
		_ = j.leaf.Kill()
	}
	faults.Here("jail.kill")
	waitPidfd(j.pidfd)
	faults.Here("jail.reap")
	_, usage, _ := reap(j.pid)
	faults.Here("jail.reaped")
	return usage
}

func signalPidfd(f *os.File, sig unix.Signal) error {
	c, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var sendErr error
	if err := c.Control(func(fd uintptr) { sendErr = unix.PidfdSendSignal(int(fd), sig, nil, 0) }); err != nil {
		return err
	}
	return sendErr
}

// waitPidfd waits in the poller, without a thread, until the process is dead.
func waitPidfd(f *os.File) {
	c, err := f.SyscallConn()
	if err != nil {
		return
	}
	_ = c.Read(func(fd uintptr) bool {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(p, 0)
		return n > 0 || err != nil && !errors.Is(err, unix.EINTR)
	})
}

// cpuTime is what a leaf has used.
type cpuTime struct{ user, system time.Duration }

// cpuWatch looks at the leaf's CPU time when its budget could be used up at
// the earliest: what is left, spread over all processors.
type cpuWatch struct {
	leaf   *cgroup.Leaf
	budget time.Duration
	t      *time.Timer
	c      <-chan time.Time
}

func newCPUWatch(leaf *cgroup.Leaf, budget time.Duration, used cpuTime) *cpuWatch {
	w := &cpuWatch{leaf: leaf, budget: budget + used.user + used.system}
	if budget > 0 {
		w.t = time.NewTimer(w.next(budget))
		w.c = w.t.C
	}
	return w
}

func (w *cpuWatch) next(left time.Duration) time.Duration {
	return max(left/time.Duration(processors()), time.Millisecond)
}

// check tells whether the budget is used up, and otherwise sets the timer for
// the next look.
func (w *cpuWatch) check() bool {
	used, err := w.leaf.CPUUsage()
	if err == nil && used >= w.budget {
		return true
	}
	w.t.Reset(w.next(w.budget - used))
	return false
}

func (w *cpuWatch) stop() {
	if w.t != nil {
		w.t.Stop()
	}
}

// processors is how many CPUs this machine can run at once. The launcher's own
// affinity does not bind the jail's.
var processors = sync.OnceValue(func() int {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil || set.Count() == 0 {
		return 1
	}
	return set.Count()
})
