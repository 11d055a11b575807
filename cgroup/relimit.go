package cgroup

import (
	"errors"
	"fmt"
	"slices"
)

// ErrOtherLimits is returned by [Leaf.Limit] for limits of another kind than the
// leaf was made with.
var ErrOtherLimits = errors.New("the leaf was not made for these limits")

// Limit replaces the values of the limits that NewLeaf set, and reads them back.
// A value may go up or down; l asks for the same controllers as before, or the
// error is [ErrOtherLimits] and nothing has changed. After another error some of
// the values may be the new ones.
//
// What is used already may exceed a lower memory limit: v1 refuses it then
// (EBUSY), v2 reclaims, and kills if that is not enough.
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
	if !slices.Equal(limits.asked(), l.limits.asked()) || (limits.Memory > 0) != (l.limits.Memory > 0) || (limits.MemoryHigh > 0) != (l.limits.MemoryHigh > 0) {
		return fmt.Errorf("limit cgroup %s: %w", l.name, ErrOtherLimits)
	}
	var applied []Applied
	for _, p := range l.parts {
		for _, c := range p.controllers {
			as, err := p.base.version.limit(p.dir, c, limits)
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

// FilePages returns the bytes among them that are pages of files on disks, which
// the kernel drops and reads again rather than to kill for them.
func (l *Leaf) FilePages() (int64, error) {
	done, err := l.use()
	if err != nil {
		return 0, err
	}
	defer done()
	if l.mem == nil {
		return 0, fmt.Errorf("cgroup %s: memory is not limited", l.name)
	}
	ns, err := l.mem.dir.counts("memory.stat", "active_file", "inactive_file")
	if err != nil {
		return 0, err
	}
	if ns[0] < 0 || ns[1] < 0 {
		return 0, fmt.Errorf("memory.stat of %s has no pages of files", l.mem.dir.path)
	}
	return ns[0] + ns[1], nil
}
