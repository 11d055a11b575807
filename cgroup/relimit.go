package cgroup

import (
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"
)

// ErrOtherLimits is returned by [Leaf.Limit] for limits of another kind than the
// leaf was made with.
var ErrOtherLimits = errors.New("the leaf was not made for these limits")

// Limit replaces the values of the limits that NewLeaf set, and reads them back.
// A value may go up or down; l asks for the same controllers, and the same rates of
// the same devices, as before, or the error is [ErrOtherLimits] and nothing has
// changed. After another error some of the values may be the new ones.
//
// What is used already may exceed a lower memory limit: v1 refuses it then
// (EBUSY), v2 reclaims, and kills if that is not enough. A pids limit below the
// number of tasks that are there is EBUSY.
func (l *Leaf) Limit(limits Limits) error {
	if err := limits.Check(); err != nil {
		return err
	}
	done, err := l.use()
	if err != nil {
		return err
	}
	defer done()
	l.applying.Lock()
	defer l.applying.Unlock()
	if limits == l.limits {
		return nil
	}
	if !slices.Equal(limits.asked(), l.limits.asked()) || (limits.Memory > 0) != (l.limits.Memory > 0) || (limits.MemoryHigh > 0) != (l.limits.MemoryHigh > 0) ||
		!slices.Equal(limits.IO.kinds(), l.limits.IO.kinds()) {
		return fmt.Errorf("limit cgroup %s: %w", l.name, ErrOtherLimits)
	}
	var applied []Applied
	for _, p := range l.parts {
		for _, c := range p.controllers {
			as, err := p.base.version.limit(p.dir, c, limits)
			if err == nil && c == Pids && limits.Pids < l.limits.Pids {
				err = p.dir.tasksWithin(limits.Pids)
			}
			if err != nil {
				l.limits = Limits{} // of which nobody knows what they are
				return fmt.Errorf("limit cgroup %s: %w", l.name, err)
			}
			applied = append(applied, as...)
		}
	}
	l.applied, l.limits = applied, limits
	return nil
}

// tasksWithin refuses a limit that is exceeded already: the kernel takes it, and
// lets the tasks be.
func (d dir) tasksWithin(limit int64) error {
	n, err := d.count("pids.current")
	if err == nil && n > limit {
		err = fmt.Errorf("set pids.max of %s to %d: %d tasks are there: %w", d.path, limit, n, unix.EBUSY)
	}
	return err
}

// MemoryUsage returns the bytes that are charged to the leaf now.
func (l *Leaf) MemoryUsage() (int64, error) {
	done, err := l.use()
	if err != nil {
		return 0, err
	}
	defer done()
	if l.mem == nil {
		return 0, fmt.Errorf("cgroup %s: memory is not limited", l.name)
	}
	return l.mem.dir.count(l.mem.base.version.usage())
}

// Reclaim is what becomes of pages of files in a leaf whose memory is scarce.
type Reclaim struct {
	FilePages   int64 // bytes that are there and can be dropped
	Refaults    int64 // bytes read again after they had been dropped, since the leaf was made
	MajorFaults int64 // page faults that waited for a disk, since the leaf was made
}

// Reclaim reads what the kernel did to stay below the leaf's memory limit
// (Linux 5.9, cgroup v1 and v2).
func (l *Leaf) Reclaim() (Reclaim, error) {
	done, err := l.use()
	if err != nil {
		return Reclaim{}, err
	}
	defer done()
	if l.mem == nil {
		return Reclaim{}, fmt.Errorf("cgroup %s: memory is not limited", l.name)
	}
	ns, err := l.mem.dir.counts("memory.stat", "active_file", "inactive_file", "workingset_refault_file", "pgmajfault")
	if err != nil {
		return Reclaim{}, err
	}
	if slices.Min(ns) < 0 {
		return Reclaim{}, fmt.Errorf("reclaim of %s: memory.stat does not have it: %w", l.mem.dir.path, errors.ErrUnsupported)
	}
	return Reclaim{ns[0] + ns[1], l.mem.base.version.refaulted(ns[2]), ns[3]}, nil
}
