package cgroup

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// v2 has one hierarchy for all controllers.
type v2 struct{}

func (v2) String() string { return "v2" }

func (v2) usage() string { return "memory.current" }

func (v2) refaulted(n int64) int64 { return n * int64(os.Getpagesize()) }

func (v2) kill(d dir) error { return d.write("cgroup.kill", "1") }

func (v v2) limit(d dir, c Controller, l Limits) ([]Applied, error) {
	switch c {
	case Memory:
		return v.limitMemory(d, l)
	case Pids:
		a, err := d.setOwn(c, "v2", "pids.max", l.Pids, 0)
		return []Applied{a}, err
	case CPU:
		quota := l.quota(period)
		got, err := d.set("cpu.max", fmt.Sprintf("%d %d", quota, period), quota, 0)
		return []Applied{{Controller: c, File: "cpu.max (v2)", Wrote: quota, Read: got}}, err
	case CPUSet:
		return d.confine("v2", "cpuset.cpus.effective", l.CPUSet)
	case IO:
		return v.limitIO(d, l.IO)
	case CPUAcct:
		_, err := v.cpu(d)
		return nil, err
	}
	return nil, fmt.Errorf("unknown controller %q", c)
}

func (v v2) limitMemory(d dir, l Limits) (as []Applied, err error) {
	if l.Memory > 0 {
		if as, err = v.limitMemoryMax(d, l.Memory); err != nil {
			return nil, err
		}
	}
	if l.MemoryHigh > 0 {
		high, err := d.setOwn(Memory, "v2", "memory.high", l.MemoryHigh, int64(os.Getpagesize()-1))
		return append(as, high), err
	}
	return as, nil
}

func (v2) limitMemoryMax(d dir, limit int64) ([]Applied, error) {
	max, err := d.setOwn(Memory, "v2", "memory.max", limit, int64(os.Getpagesize()-1))
	if err != nil {
		return nil, err
	}
	as := []Applied{max}
	swap, err := d.setOwn(Memory, "v2", "memory.swap.max", 0, 0)
	switch {
	case err == nil:
		as = append(as, swap)
	case !errors.Is(err, unix.ENOENT):
		return nil, err
	case swapOn():
		return nil, noSwapFile("memory.swap.max", d)
	}
	group, err := d.setOwn(Memory, "v2", "memory.oom.group", 1, 0)
	return append(as, group), err
}

func (v v2) stats(d dir, c Controller, s *Stats) (err error) {
	switch c {
	case Memory:
		if s.MemoryPeak, err = d.count("memory.peak"); err != nil {
			return err
		}
		ns, err := d.counts("memory.events", "oom_kill")
		s.OOMKills = ns[0]
		return err
	case Pids:
		return pidsStats(d, s)
	case CPU:
		ns, err := d.counts("cpu.stat", "nr_throttled", "throttled_usec")
		s.ThrottledPeriods, s.Throttled = ns[0], span(ns[1], time.Microsecond)
		return err
	case CPUAcct:
		ns, err := d.counts("cpu.stat", "user_usec", "system_usec")
		s.CPUUser, s.CPUSystem = span(ns[0], time.Microsecond), span(ns[1], time.Microsecond)
		return err
	}
	return nil
}

func (v2) cpu(d dir) (time.Duration, error) {
	ns, err := d.counts("cpu.stat", "usage_usec")
	if err == nil && ns[0] < 0 {
		err = fmt.Errorf("read cpu.stat of %s: no usage_usec", d.path)
	}
	return span(ns[0], time.Microsecond), err
}

// has tells whether a file of names has word.
func has(d dir, file, word string) (bool, error) {
	data, err := d.read(file)
	if err != nil {
		return false, err
	}
	return listed(data, word), nil
}

// listed tells whether names, with spaces between them, have word.
func listed(names []byte, word string) bool {
	return slices.ContainsFunc(bytes.Fields(names), func(f []byte) bool { return string(f) == word })
}

func (v v2) enable(base dir, c Controller) error {
	if c == CPUAcct {
		return nil // cpu.stat needs no controller
	}
	on, err := has(base, "cgroup.subtree_control", string(c))
	if err != nil {
		return err
	}
	if !on {
		if ok, err := has(base, "cgroup.controllers", string(c)); err != nil {
			return err
		} else if !ok {
			return &fault{fmt.Errorf("%s is not in cgroup.controllers of %s", c, base.path), fixDelegate}
		}
	}
	kind, err := kindOf(base)
	if err != nil {
		return err
	}
	if on && (kind == "" || kind == "domain") {
		return nil
	}
	write := func() error { return base.write("cgroup.subtree_control", "+"+string(c)) }
	if kind == "" {
		return write()
	}
	// A group that holds processes itself may not have memory limits in its
	// children: that is EBUSY. With pids and cpu it may; but then it is a
	// threaded domain, and its children take no process. So it has to be empty
	// for any of them.
	return v.stepAside(base, write)
}

// kindOf returns the type of a group, "" for the root of the hierarchy, which
// may hold processes whatever its children have.
func kindOf(d dir) (string, error) {
	data, err := d.read("cgroup.type")
	if errors.Is(err, unix.ENOENT) && d.exists() {
		return "", nil
	}
	return string(bytes.TrimSpace(data)), err
}

func (v2) enter(d dir) (*os.File, error) {
	if kind, err := kindOf(d); err != nil {
		return nil, err
	} else if kind != "domain" {
		return nil, &fault{fmt.Errorf("%s is of type %q and takes no process", d.path, kind), fixAlone}
	}
	fd, err := openat(d.fd, ".", unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		return nil, fmt.Errorf("open cgroup %s: %w", d.path, err)
	}
	return os.NewFile(uintptr(fd), d.path), nil
}

// moving serialises moves of this process between groups.
var moving sync.Mutex

// MayMove tells whether the first leaf may have to move the calling process into
// a group of its own, because one with processes can have no controllers for its
// children (cgroups(7), no internal processes). It is refused if the process has
// children in its group by then.
func (h *Host) MayMove() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	base, err := h.unified()
	if err != nil {
		return false
	}
	data, err := base.dir.read("cgroup.controllers")
	return err != nil || slices.ContainsFunc(controllers, func(c Controller) bool { return listed(data, string(c)) })
}

// Crowded tells whether the caller shares its own v2 group with other processes,
// so that no leaf below it could have a controller, and returns that group's path.
func (h *Host) Crowded() (group string, crowded bool) {
	if !h.MayMove() {
		return "", false
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	base, err := h.unified()
	if err != nil {
		return "", false
	}
	if kind, err := kindOf(base.dir); err != nil || kind == "" {
		return "", false
	}
	others := 0
	err = base.dir.procs(func(pid int) {
		if pid != os.Getpid() {
			others++
		}
	})
	return h.v2own, err == nil && others > 0
}

// stepAside enables something for the children of a cgroup that may hold no
// processes for it. If the only one is the caller, it moves to a child first;
// it is moved back if that does not help.
func (v2) stepAside(base dir, enable func() error) (err error) {
	moving.Lock()
	defer moving.Unlock()
	procs, here := 0, false
	if err := base.procs(func(pid int) { procs++; here = here || pid == os.Getpid() }); err != nil {
		return err
	}
	if procs == 0 {
		return enable()
	}
	if procs > 1 || !here {
		return &fault{fmt.Errorf("%s holds %d processes itself, so that its children cannot be limited", base.path, procs), fixAlone}
	}
	self := strconv.Itoa(os.Getpid())
	made := true
	if err := unix.Mkdirat(base.fd, launcherName, 0o755); err != nil {
		if made = false; err != unix.EEXIST {
			return fmt.Errorf("make cgroup %s/%s: %w", base.path, launcherName, err)
		}
	}
	defer func() {
		if err != nil {
			back := base.write("cgroup.procs", self)
			if made && back == nil {
				back = unix.Unlinkat(base.fd, launcherName, unix.AT_REMOVEDIR)
			}
			err = errors.Join(err, back)
		}
	}()
	child, err := base.sub(launcherName)
	if err != nil {
		return fmt.Errorf("open cgroup %s: %w", child.path, err)
	}
	defer child.close()
	if err := child.write("cgroup.procs", self); err != nil {
		return err
	}
	return enable()
}

// above returns b and the groups above it that have a limit of their own and can
// be seen. The root has none.
func (b *hierarchy) above() ([]dir, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.up != nil {
		return b.up, nil
	}
	up := []dir{}
	for d := b.dir; ; {
		ns, err := d.counts("memory.events.local", "oom")
		if err == nil && ns[0] >= 0 {
			up = append(up, d)
			d, err = d.sub("..")
			if err == nil {
				b.keep = append(b.keep, os.NewFile(uintptr(d.fd), d.path))
				continue
			}
		}
		if err != nil && transient(err) {
			return nil, fmt.Errorf("look at the cgroups above %s: %w", b.dir.path, err)
		}
		b.up = up
		return up, nil
	}
}

// events2 is OOM evidence by counters. The group is killed as a whole.
type events2 struct {
	base  *hierarchy
	start int64 // the sum when the leaf was made
}

func (v2) watch(h *hierarchy, _ dir) (_ watch, err error) {
	w := &events2{base: h}
	w.start, err = w.sum()
	return w, err
}

// sum adds up how often the limits above were hit.
func (w *events2) sum() (n int64, err error) {
	up, err := w.base.above()
	for _, d := range up {
		ns, err := d.counts("memory.events.local", "oom")
		if err != nil {
			return 0, err
		}
		n += max(ns[0], 0)
	}
	return n, err
}

func (*events2) fired() <-chan struct{} { return nil }
func (*events2) close()                 {}

func (w *events2) scope(d dir) (Scope, error) {
	// memory.events has the hits of the leaf's limit and of limits below it.
	ns, err := d.counts("memory.events", "oom")
	if err != nil {
		return "", err
	}
	if ns[0] > 0 {
		return Self, nil
	}
	now, err := w.sum()
	switch {
	case err != nil:
		return "", err
	case now > w.start:
		return Ancestor, nil
	}
	return Machine, nil
}
