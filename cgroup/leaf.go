package cgroup

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"example.com/jail/internal/faults"
)

// A Leaf is the group of one run: a directory of one name in each hierarchy
// that is needed. Its methods may be called at the same time. After Remove or
// Close only Remove, Kill and Close do something sensible: they return nil; the
// others return os.ErrClosed.
type Leaf struct {
	name  string
	parts []*part
	tasks []*os.File
	start *os.File // see Dir

	mu     sync.RWMutex // held for reading while a handle is in use
	closed bool
	mem    *part // nil if memory is not limited
	watch  watch // nil if memory is not limited
	acct   *part // nil if CPU time is not counted

	applying sync.Mutex // guards what follows
	limits   Limits     // in effect
	applied  []Applied
}

// removeWithin bounds Remove, killWithin the killing of processes one by one.
const (
	removeWithin = 10 * time.Second
	killWithin   = 5 * time.Second
)

// NewLeaf makes the group of one run below the caller's own, and sets and reads
// back what l asks for. Where there is cgroup v2 the leaf has a part there, also
// if no limit is set in it. The directories are locked until Remove, Close or
// the death of this process; see Collect.
//
// name begins with [Prefix] and is at most 255 bytes. The directories have the
// sticky bit, by which Collect knows them. Making it is exclusive:
// of two callers with the same name below the same cgroup one gets [ErrExist].
//
// It fails with an [*UnsupportedError] if a limit cannot be enforced, and with
// another error if the host lacks a resource at the moment. What was made of the
// leaf is removed again then; should that fail, the error says so.
func (h *Host) NewLeaf(name string, l Limits) (*Leaf, error) {
	if err := checkName(name); err != nil {
		return nil, err
	}
	if err := l.Check(); err != nil {
		return nil, err
	}
	h.mu.Lock()
	plan, err := h.plan(l.asked())
	h.mu.Unlock()
	var leaf *Leaf
	if err == nil {
		leaf, err = newLeaf(name, l, plan)
	}
	var u *UnsupportedError
	if errors.As(err, &u) {
		h.mu.Lock()
		for i, s := range u.Missing { // it worked before and does no longer
			delete(h.placed, s.Controller)
			delete(h.proven, s.Controller)
			u.Missing[i] = h.locate(s)
		}
		h.mu.Unlock()
	}
	return leaf, err
}

// A place is a group to be made: a hierarchy and what is to be limited there.
type place struct {
	base        *hierarchy
	controllers []Controller
}

// plan decides which groups a leaf needs. The one of v2 is the first: all
// launchers make it, so that it decides who gets a name.
func (h *Host) plan(asked []Controller) ([]place, error) {
	var plan []place
	add := func(base *hierarchy, cs ...Controller) {
		i := slices.IndexFunc(plan, func(p place) bool { return p.base == base })
		if i < 0 {
			plan, i = append(plan, place{base: base}), len(plan)
		}
		plan[i].controllers = append(plan[i].controllers, cs...)
	}
	two, none := h.unified()
	switch {
	case none == nil:
		add(two)
	case transient(none):
		return nil, none
	}
	var missing []Support
	for _, c := range asked {
		s, base := h.place(c)
		switch {
		case s.Err == nil:
			add(base, c)
		case transient(s.Err):
			return nil, s.Err
		default:
			missing = append(missing, s)
		}
	}
	if len(missing) > 0 {
		return nil, &UnsupportedError{missing}
	}
	if none != nil {
		// Without cgroup.kill, a pids limit of 0 keeps what is to be killed
		// from forking; failing that, any group will do to find it by.
		for _, c := range []Controller{Pids, Memory, CPUAcct, CPU} {
			if base, err := h.legacy(c.legacy()); err == nil && (c == Pids || len(plan) == 0) {
				add(base)
			}
		}
	}
	if len(plan) == 0 {
		return nil, &UnsupportedError{[]Support{unsupported("", nil, none)}}
	}
	return plan, nil
}

func unsupported(c Controller, base *hierarchy, err error) Support {
	s := Support{Controller: c, Err: explain(err)}
	if base != nil {
		s.Hierarchy, s.Dir = base.version.String(), base.dir.path
	}
	var f *fault
	errors.As(s.Err, &f)
	s.Fix = f.fix
	return s
}

// Try makes a leaf with these limits, named jail-probe-*, and removes it: it tells
// whether NewLeaf would succeed. Its errors are those of NewLeaf and Remove.
func (h *Host) Try(l Limits) error {
	leaf, err := h.NewLeaf(probeName(), l)
	if err != nil {
		return err
	}
	return leaf.Remove(context.Background())
}

var probes atomic.Int64

func probeName() string {
	return Prefix + "probe-" + strconv.Itoa(os.Getpid()) + "-" + strconv.FormatInt(probes.Add(1), 10)
}

// try makes and removes a leaf for c alone.
func (h *Host) try(c Controller, base *hierarchy) error {
	// All CPUs and no device: which ones there are is the caller's to know.
	small := Limits{Memory: 64 << 20, Pids: 64, CPUs: 0.01, CPUTime: true}
	leaf, err := newLeaf(probeName(), small, []place{{base, []Controller{c}}})
	if err != nil {
		var u *UnsupportedError
		if errors.As(err, &u) {
			return u.Missing[0].Err
		}
		return err
	}
	return leaf.Remove(context.Background())
}

// newLeaf carries out a plan, or undoes what it has done of it.
func newLeaf(name string, l Limits, plan []place) (_ *Leaf, err error) {
	leaf := &Leaf{name: name, limits: l}
	defer func() {
		if err != nil {
			err = errors.Join(err, leaf.Remove(context.Background()))
		}
	}()
	for _, pl := range plan {
		p, err := claim(pl, name)
		if err != nil {
			return nil, refuse(pl, pl.controllers, err)
		}
		leaf.parts = append(leaf.parts, p)
		faults.Here("cgroup.part")
		for _, c := range pl.controllers {
			as, err := pl.base.version.limit(p.dir, c, l)
			if err != nil {
				return nil, refuse(pl, []Controller{c}, err)
			}
			leaf.applied = append(leaf.applied, as...)
			faults.Here("cgroup.limit")
			switch c {
			case Memory:
				if leaf.watch, err = pl.base.version.watch(pl.base, p.dir); err != nil {
					return nil, refuse(pl, []Controller{c}, err)
				}
				leaf.mem = p
				faults.Here("cgroup.watch")
			case CPUAcct:
				leaf.acct = p
			}
		}
		f, err := pl.base.version.enter(p.dir)
		if err != nil {
			return nil, refuse(pl, pl.controllers, err)
		}
		faults.Here("cgroup.enter")
		if (pl.base.version == v2{}) {
			leaf.start = f
		} else {
			leaf.tasks = append(leaf.tasks, f)
		}
	}
	if leaf.acct == nil && (leaf.parts[0].base.version == v2{}) {
		leaf.acct = leaf.parts[0] // it counts without being asked
	}
	return leaf, nil
}

// refuse makes an UnsupportedError of err unless it is a passing one.
func refuse(pl place, cs []Controller, err error) error {
	if transient(err) {
		return err
	}
	if len(cs) == 0 {
		cs = []Controller{""}
	}
	u := &UnsupportedError{}
	for _, c := range cs {
		u.Missing = append(u.Missing, unsupported(c, pl.base, err))
	}
	return u
}

// claimWithin bounds the waiting for a collector that took a leaf for a dead
// launcher's; it needs microseconds.
const claimWithin = time.Second

// claim makes a directory and locks it. Between the two steps a collector can
// lock and remove it; then it is made again.
func claim(pl place, name string) (*part, error) {
	p := &part{base: pl.base, name: name, controllers: pl.controllers}
	p.refused.Store(-1)
	path := pl.base.dir.path + "/" + name
	for end := time.Now().Add(claimWithin); ; {
		err := retry(func() error { return unix.Mkdirat(pl.base.dir.fd, name, leafMode) })
		if err == unix.EEXIST {
			err = ErrExist
		}
		if err != nil {
			return nil, fmt.Errorf("make cgroup %s: %w", path, err)
		}
		faults.Here("cgroup.mkdir")
		if p.dir, err = pl.base.dir.sub(name); err == nil {
			var locked bool
			if locked, err = p.dir.lockUntil(end); locked {
				faults.Here("cgroup.lock")
				return p, nil
			}
			p.dir.close()
		}
		if err != nil && err != unix.ENOENT {
			return nil, errors.Join(fmt.Errorf("lock cgroup %s: %w", path, err), rmdir(pl.base.dir.fd, name))
		}
	}
}

// lockUntil locks a group that was just made. It returns false without an error
// if a collector had it first and removed it.
func (d dir) lockUntil(end time.Time) (bool, error) {
	for {
		locked, err := d.lock()
		if err != nil {
			return false, err
		}
		if !d.exists() {
			return false, nil
		}
		if locked {
			return true, nil
		}
		if time.Now().After(end) {
			return false, errors.New("another process holds it")
		}
		time.Sleep(50 * time.Microsecond)
	}
}

// lock takes the lock that says that the leaf's maker is alive. It returns
// false if somebody else has it.
func (d dir) lock() (bool, error) {
	err := retry(func() error { return unix.Flock(d.fd, unix.LOCK_EX|unix.LOCK_NB) })
	if err == unix.EWOULDBLOCK {
		return false, nil
	}
	return err == nil, err
}

// Name returns the name given to NewLeaf.
func (l *Leaf) Name() string { return l.name }

// Applied returns each value that was written last, with the value read back.
func (l *Leaf) Applied() []Applied {
	l.applying.Lock()
	defer l.applying.Unlock()
	return slices.Clone(l.applied)
}

// Dir returns the leaf's v2 directory, opened for CLONE_INTO_CGROUP
// (syscall.SysProcAttr.CgroupFD), or nil on a host without v2. The Leaf closes
// it. It does not carry the lock, so a child may inherit it.
func (l *Leaf) Dir() *os.File {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.start
}

// Tasks returns the open tasks files of the leaf's v1 parts, none on v2 alone.
// To join the leaf a process with a single thread writes "0" to each of them,
// besides being cloned into Dir. The Leaf closes them.
func (l *Leaf) Tasks() []*os.File {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return slices.Clone(l.tasks)
}

// Entered closes what [Leaf.Dir] and [Leaf.Tasks] have returned: the leaf has its
// processes. A launcher of many jails has that many descriptors less for each
// fork to copy.
func (l *Leaf) Entered() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closeEntries()
}

func (l *Leaf) closeEntries() {
	for _, f := range l.tasks {
		f.Close()
	}
	if l.start != nil {
		l.start.Close()
	}
	l.tasks, l.start = nil, nil
}

// use keeps the handles open until the returned function is called.
func (l *Leaf) use() (func(), error) {
	l.mu.RLock()
	if l.closed {
		l.mu.RUnlock()
		return nil, fmt.Errorf("cgroup %s: %w", l.name, os.ErrClosed)
	}
	return l.mu.RUnlock, nil
}

// OOM returns a channel that is closed when the kernel has killed a process of
// the leaf because a memory limit of cgroup v1 was hit; the others live on then.
// It is nil if memory is not limited, and on v2, where the kernel kills the
// whole leaf. It does not tell of kills for want of the host's memory: those
// are in Stats. The channel is never closed without a kill, and stays open if
// the leaf is closed before one.
func (l *Leaf) OOM() <-chan struct{} {
	done, err := l.use()
	if err != nil || l.watch == nil {
		if err == nil {
			done()
		}
		return nil
	}
	defer done()
	return l.watch.fired()
}

// Stats reads the leaf's counters. They stay readable after its processes are
// gone and until Remove.
func (l *Leaf) Stats() (Stats, error) {
	s := noStats()
	done, err := l.use()
	if err != nil {
		return s, err
	}
	defer done()
	var errs error
	for _, p := range l.parts {
		for _, c := range p.controllers {
			if c != CPUAcct {
				errs = errors.Join(errs, p.base.version.stats(p.dir, c, &s))
			}
			if n := p.refused.Load(); c == Pids && n >= 0 {
				s.PidsRefused = n
			}
		}
	}
	if l.acct != nil {
		errs = errors.Join(errs, l.acct.base.version.stats(l.acct.dir, CPUAcct, &s))
	}
	return s, errs
}

// Pressure reads how long tasks of the leaf had to wait for memory, CPU and
// block devices. The kernel counts it on cgroup v2, also where v1 has the
// controllers, as long as the tasks are in the leaf's v2 part. The error is
// errors.ErrUnsupported if it counts nothing for this leaf.
func (l *Leaf) Pressure() (Pressure, error) {
	done, err := l.use()
	if err != nil {
		return noPressure(), err
	}
	defer done()
	if len(l.parts) == 0 {
		return noPressure(), fmt.Errorf("pressure of a leaf without groups: %w", errors.ErrUnsupported)
	}
	return l.parts[0].base.version.pressure(l.parts[0].dir)
}

// Scope tells whose memory ran out when a process of the leaf was OOM-killed.
// It means nothing if Stats has no OOM kill.
func (l *Leaf) Scope() (Scope, error) {
	done, err := l.use()
	if err != nil {
		return "", err
	}
	defer done()
	if l.watch == nil {
		// It has no limit that could have been hit.
		return "", fmt.Errorf("cgroup %s: memory is not limited", l.name)
	}
	return l.watch.scope(l.mem.dir)
}

// CPUUsage returns the CPU time that all processes of the leaf have used so
// far, those that are gone included. It reads one file.
func (l *Leaf) CPUUsage() (time.Duration, error) {
	done, err := l.use()
	if err != nil {
		return 0, err
	}
	defer done()
	if l.acct == nil {
		return 0, fmt.Errorf("cgroup %s: CPU time is not counted", l.name)
	}
	return l.acct.base.version.cpu(l.acct.dir)
}

// Procs returns the number of processes in the leaf and in groups below it.
func (l *Leaf) Procs() (int, error) {
	done, err := l.use()
	if err != nil {
		return 0, err
	}
	defer done()
	return l.parts[0].dir.population()
}

// Kill sends SIGKILL to every process of the leaf and of groups below it,
// frozen and stopped ones included. With cgroup.kill (v2, Linux 5.14) it
// returns at once and the processes die on their own; on a hybrid host these are
// the ones in the v2 part. Without, it stops forking, kills by pidfd and returns
// when none is left, or with an error after 5 seconds. It may be called again,
// and after Remove.
func (l *Leaf) Kill() error {
	done, err := l.use()
	if err != nil {
		return nil
	}
	defer done()
	return kill(l.parts, killWithin)
}

// Remove removes the leaf with all groups below it, and frees what the Leaf
// holds. It kills what is still alive in any part, and tries again while tasks
// are dying: until ctx is done, but no longer than 10 seconds. What is left then
// is in the error, and Remove may be called again. Once it has succeeded it does
// nothing.
func (l *Leaf) Remove(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, removeWithin,
		fmt.Errorf("not gone after %v: %w", removeWithin, context.DeadlineExceeded))
	defer cancel()
	done, err := l.use()
	if err != nil {
		return nil
	}
	err = remove(ctx, l.parts)
	done()
	if err != nil {
		return err
	}
	return l.Close()
}

// Close frees what the Leaf holds and leaves the groups to [Host.Collect].
func (l *Leaf) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil
	}
	l.closed = true
	if l.watch != nil {
		l.watch.close()
	}
	l.closeEntries()
	for _, p := range l.parts {
		p.dir.close()
	}
	return nil
}
