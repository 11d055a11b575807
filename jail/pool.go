package jail

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"example.com/jail/internal/faults"
	"example.com/jail/jail/jailinit"
)

// Pool keeps jails of one Spec parked, so that a run starts in a jail that is
// there already. Without a Script a parked jail is complete but for its program;
// with one, the guest has been started as well and waits for its Start. Each jail
// is used once and then destroyed, and no guest is a copy of another one: each
// was executed anew. A parked jail shows the host's files as they were mounted
// when it was made: after an update of the host's programs, make another Pool.
//
// A Pool is safe for concurrent use.
type Pool struct {
	spec   Spec
	size   int
	ctx    context.Context
	cancel context.CancelFunc
	work   sync.WaitGroup

	mu     sync.Mutex
	ready  []*Jail     // the oldest first
	timer  *time.Timer // of the next refill
	making int
	closed bool
	err    error // of the last attempt to make one
	stats  PoolStats
	// changed is closed and replaced when a jail was made, or could not be.
	changed chan struct{}
}

// PoolStats tells what a pool has and has done.
type PoolStats struct {
	// Ready is the number of parked jails, Bytes the memory that is charged to
	// all of them, read from the kernel.
	Ready int
	Bytes int64
	// Taken is how many runs got a parked jail, Fresh how many got one that was
	// started for them: none was ready, or the run did not fit.
	Taken, Fresh int64
	// Discarded is how many parked jails were found dead or failed at the take.
	Discarded int64
	// Err is why the pool could not be filled at the last attempt.
	Err error
}

// Use is what one run has of its own. The rest is as in the pool's Spec.
type Use struct {
	// Args is the program; nil is that of the Spec. A guest that is parked is
	// running already: with other Args the run gets a fresh jail.
	Args []string
	// Budget is that of this run; nil is that of the Spec. If it asks for other
	// kinds of limits of the kernel than the Spec's, or differs in MaxTmp or
	// OpenFiles, the run gets a fresh jail.
	Budget *Budget
	// Script is for a pool of guests: nil is that of the Spec.
	Script *Script
	// Stdin, Stdout and Stderr are as in Spec; none is taken from the pool's. A
	// run with an input gets a fresh jail if the pool's Spec has none.
	Stdin          io.Reader
	Stdout, Stderr io.Writer
}

// ErrPoolClosed is returned by Start and Run of a Pool after Close.
var ErrPoolClosed = errors.New("pool is closed")

// NewPool returns a pool that keeps size jails of spec, and begins to fill it.
// It returns a *[RefusedError] for a spec that cannot be run here. Of the spec's
// Stdin it matters only whether it is nil: no run has an input then. Stdout and
// Stderr are not used.
//
// The caller must call [Pool.Close].
func NewPool(spec Spec, size int) (*Pool, error) {
	if size < 1 {
		return nil, fmt.Errorf("pool of %d jails: want 1 or more", size)
	}
	if err := spec.preflight(); err != nil {
		return nil, err
	}
	if bad, _ := spec.unenforceable(true); len(bad) > 0 {
		return nil, &RefusedError{Items: bad}
	}
	p := &Pool{spec: spec, size: size, changed: make(chan struct{})}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	p.mu.Lock()
	p.refill()
	p.mu.Unlock()
	return p, nil
}

// Start runs a program in a parked jail, or in a fresh one if none is ready. It
// is [Start] in all else.
func (p *Pool) Start(ctx context.Context, use Use) (*Jail, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	spec := p.spec
	if use.Args != nil {
		spec.Args = use.Args
	}
	if use.Budget != nil {
		spec.Budget = *use.Budget
	}
	if use.Script != nil {
		spec.Script = use.Script
	}
	spec.Stdin, spec.Stdout, spec.Stderr = use.Stdin, use.Stdout, use.Stderr
	if err := spec.preflight(); err != nil {
		return nil, err
	}
	j, err := p.take(&spec, use)
	if err != nil {
		return nil, err
	}
	if j != nil {
		if err = j.release(ctx, spec); err == nil {
			faults.Here("pool.release")
			p.count(&p.stats.Taken)
			go j.supervise(ctx)
			return j, nil
		}
		j.dismantle()
		if final(err) || ctx.Err() != nil {
			return nil, err
		}
		p.count(&p.stats.Discarded)
	}
	p.count(&p.stats.Fresh)
	return Start(ctx, spec)
}

// Run starts a program and waits for it, as [Run] does.
func (p *Pool) Run(ctx context.Context, use Use) (*Report, error) {
	j, err := p.Start(ctx, use)
	if err != nil {
		return NewReport("", err), err
	}
	return j.Wait()
}

// fits tells whether a parked jail can become that of the run.
func (p *Pool) fits(spec *Spec, use Use) bool {
	a, b := &spec.Budget, &p.spec.Budget
	for _, i := range items {
		if i.set != nil && (i.asked(a) > 0) != (i.asked(b) > 0) {
			return false
		}
	}
	return (spec.Stdin == nil || p.spec.Stdin != nil) && a.MaxTmp == b.MaxTmp && a.OpenFiles == b.OpenFiles &&
		(spec.Script != nil) == (p.spec.Script != nil) && (spec.Script == nil || use.Args == nil)
}

// final tells an error that a fresh jail would bring again.
func final(err error) bool {
	var refused *RefusedError
	var setup *SetupError
	return errors.As(err, &refused) || errors.As(err, &setup) && setup.inside && !setup.stale()
}

func (p *Pool) count(n *int64) {
	p.mu.Lock()
	*n++
	p.mu.Unlock()
}

// take removes the oldest parked jail that is well; nil if there is none for
// such a run.
func (p *Pool) take(spec *Spec, use Use) (*Jail, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, ErrPoolClosed
	}
	if !p.fits(spec, use) {
		return nil, nil
	}
	defer p.replace()
	for len(p.ready) > 0 {
		j := p.ready[0]
		p.ready[0] = nil
		p.ready = p.ready[1:]
		if j.healthy() {
			faults.Here("pool.take")
			return j, nil
		}
		p.stats.Discarded++
		p.work.Go(j.dismantle)
	}
	return nil, nil
}

// replaceAfter is how long after a take its replacement is begun: most runs of
// parked jails are over by then, or wait for something.
const replaceAfter = 3 * time.Millisecond

// replace has the pool filled up: at once when it is empty. The caller holds the
// lock.
func (p *Pool) replace() {
	if len(p.ready) == 0 {
		p.refill()
		return
	}
	if p.timer == nil {
		p.timer = time.AfterFunc(replaceAfter, func() {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.timer = nil
			p.refill()
		})
	}
}

// refill starts what it takes to fill the pool: as many at a time as there are
// processors. The caller holds the lock.
func (p *Pool) refill() {
	for !p.closed && p.making < processors() && len(p.ready)+p.making < p.size {
		p.making++
		p.work.Go(p.make)
	}
}

// retryAfter is how long a pool waits after it could not make a jail.
const retryAfter = 100 * time.Millisecond

// make parks jails until the pool is full.
func (p *Pool) make() {
	for {
		p.mu.Lock()
		park := yielding
		if len(p.ready) == 0 {
			park = parked // runs are waiting, or would have to
		}
		p.mu.Unlock()
		j, err := start(p.ctx, p.spec, park)
		if err == nil && j.channels != nil {
			err = j.settle(p.ctx)
			faults.Here("pool.settle")
		}
		if err != nil && j != nil {
			j.dismantle()
		}
		if err != nil {
			select {
			case <-p.ctx.Done():
			case <-time.After(retryAfter):
			}
		}
		p.mu.Lock()
		if err == nil {
			p.ready = append(p.ready, j)
			faults.Here("pool.ready")
		}
		p.err = err
		close(p.changed)
		p.changed = make(chan struct{})
		if p.closed || len(p.ready)+p.making > p.size {
			p.making--
			p.mu.Unlock()
			return
		}
		p.mu.Unlock()
	}
}

// Fill waits until the pool is full. It returns the error of an attempt to make
// a jail that failed meanwhile, though the pool goes on trying, and ctx's.
func (p *Pool) Fill(ctx context.Context) error {
	for {
		p.mu.Lock()
		n, err, changed, closed := len(p.ready), p.err, p.changed, p.closed
		p.mu.Unlock()
		switch {
		case closed:
			return ErrPoolClosed
		case n >= p.size:
			return nil
		case err != nil:
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		}
	}
}

// Stats returns what the pool has at the moment and has done so far.
func (p *Pool) Stats() PoolStats {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.stats
	s.Ready, s.Err = len(p.ready), p.err
	for _, j := range p.ready {
		if n, err := j.leaf.MemoryUsage(); err == nil {
			s.Bytes += n
		}
	}
	return s
}

// Close destroys all parked jails and returns when they are gone. Runs that have
// begun go on. It may be called again.
func (p *Pool) Close() {
	p.cancel()
	faults.Here("pool.cancel")
	p.mu.Lock()
	p.closed = true
	ready := p.ready
	p.ready = nil
	p.mu.Unlock()
	for _, j := range ready {
		p.work.Go(j.dismantle)
	}
	p.work.Wait()
	faults.Here("pool.close")
	// One that was made meanwhile.
	p.mu.Lock()
	ready, p.ready = p.ready, nil
	p.mu.Unlock()
	for _, j := range ready {
		j.dismantle()
	}
}

// healthy tells whether a parked jail has its pid 1 and nothing to tell, and lost
// no process for want of memory: that would count as the run's.
func (j *Jail) healthy() bool {
	select {
	case <-j.leaf.OOM():
		return false
	default:
	}
	fds := []unix.PollFd{{Fd: int32(j.pidfd.Fd()), Events: unix.POLLIN}, {Fd: int32(j.control.Fd()), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(fds, 0)
		if !errors.Is(err, unix.EINTR) {
			return err == nil && n == 0
		}
	}
}

// release makes a parked jail that of a run: its budget, its program, its
// streams.
func (j *Jail) release(ctx context.Context, spec Spec) error {
	j.spec = spec
	if err := j.leaf.Limit(j.limits()); err != nil {
		return setupError("cgroup", err)
	}
	faults.Here("pool.limit")
	j.budget = j.budgetLines()
	j.readBack(j.tmp)
	j.allow = newAllowance(spec.Budget.MaxOutput)
	j.stdout, j.stderr = newStream(j.stdout.from, spec.Stdout, j.allow), newStream(j.stderr.from, spec.Stderr, j.allow)
	if spec.Stdin == nil && j.stdin != nil {
		j.stdin.Close()
		j.stdin = nil
	}
	if err := j.priority(); err != nil {
		return setupError("priority", err)
	}
	faults.Here("pool.priority")
	if j.channels == nil {
		return j.handshake(ctx, nil)
	}
	// A guest may have threads and children that went on while it was parked.
	if used, err := j.leaf.CPUUsage(); err == nil && used > j.parked.user+j.parked.system+100*time.Microsecond {
		if err := j.markParked(); err != nil {
			return setupError("cgroup", err)
		}
	}
	wall := spec.Budget.WallClock
	if wall > 0 {
		wall += initSlack
	}
	j.released = monotonic()
	if _, err := j.control.Write(jailinit.Unpark(wall)); err != nil {
		return setupError("control", err)
	}
	faults.Here("pool.unpark")
	return nil
}

// yields tells whether parked jails are made at the lowest priority: not
// if the launcher may not raise it again.
var yields = sync.OnceValue(func() bool {
	if have, err := capabilities(); err != nil || !have(unix.CAP_SYS_NICE) {
		return false
	}
	_, err := os.Stat("/proc/thread-self/children") // CONFIG_PROC_CHILDREN
	return err == nil
})

// priority gives all that is in a parked jail the nice value of the launcher,
// which a fresh jail has.
func (j *Jail) priority() error {
	if !j.request.Yield {
		return nil
	}
	n, err := unix.Getpriority(unix.PRIO_PROCESS, 0)
	if err != nil {
		return err
	}
	nice := 20 - n // the system call's own result is never negative
	if err := unix.Setpriority(unix.PRIO_PROCESS, j.pid, nice); err != nil {
		return err
	}
	if j.guest == 0 {
		return nil
	}
	// The guest leads a process group, which has its threads and children.
	if err := unix.Setpriority(unix.PRIO_PGRP, j.guest, nice); err != nil {
		return err
	}
	return autogroup(j.guest, 0)
}

// autogroup sets the nice value of a process's session among sessions, which
// is the one that counts where the kernel has autogroups (sched(7)).
func autogroup(pid, nice int) error {
	err := os.WriteFile(fmt.Sprintf("/proc/%d/autogroup", pid), []byte(strconv.Itoa(nice)), 0)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.EINVAL) {
		return nil // none here
	}
	return err
}

// Times of the wait for a guest to have started: settleEvery between two looks,
// settleWithin in all. A guest that computes longer than that is parked as it is.
const (
	settleEvery  = 2 * time.Millisecond
	settleWithin = 10 * time.Second
)

// settle waits until the guest sleeps, which it does when it waits for its Start.
// It remembers the CPU time that was used up to then.
func (j *Jail) settle(ctx context.Context) error {
	children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", j.pid, j.pid))
	if pid, _, ok := strings.Cut(string(children), " "); err == nil && ok {
		if j.guest, err = strconv.Atoi(pid); err != nil {
			return err
		}
		if j.request.Yield {
			if err := autogroup(j.guest, 19); err != nil {
				return err
			}
		}
	}
	last := ""
	for end := time.Now().Add(settleWithin); j.guest > 0 && time.Now().Before(end); {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(settleEvery):
		}
		if !j.healthy() {
			return setupError("park", fmt.Errorf("the guest ended, or ran out of memory, before its Start: %q", j.lastWords()))
		}
		now := asleep(j.guest)
		if now != "" && now == last {
			break
		}
		last = now
	}
	_ = j.leaf.OOM() // watched from here on
	return j.markParked()
}

// markParked has the CPU time used up to now left out of the run's.
func (j *Jail) markParked() error {
	stats, err := j.leaf.Stats()
	if err != nil {
		return err
	}
	j.parked = cpuTime{max(stats.CPUUser, 0), max(stats.CPUSystem, 0)}
	return nil
}

// lastWords returns the end of what a guest that is not read yet has written to
// stderr.
func (j *Jail) lastWords() string {
	_ = j.stderr.from.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
	b, _ := io.ReadAll(io.LimitReader(j.stderr.from, outputBuffer))
	return string(bytes.TrimSpace(b[max(0, len(b)-512):]))
}

// asleep returns the CPU time of a process's main thread if that sleeps, else "".
func asleep(pid int) string {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return ""
	}
	// "pid (comm) S ...", and comm may hold anything.
	_, rest, _ := strings.Cut(string(stat[strings.LastIndexByte(string(stat), ')')+1:]), " ")
	if !strings.HasPrefix(rest, "S") {
		return ""
	}
	used, err := os.ReadFile(fmt.Sprintf("/proc/%d/schedstat", pid))
	if err != nil {
		return rest
	}
	return string(used)
}
