package cgroup

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"example.com/jail/internal/faults"
)

// collectWithin bounds the removal of one leftover group.
const collectWithin = 2 * time.Second

// Collect removes the leaves below the caller's own cgroups whose maker is
// dead, and kills what still runs in them. It returns their names, sorted. A
// group that NewLeaf did not make is left alone whatever its name. A
// leaf whose lock is held is left alone, also if this process holds it. A child
// of a dead maker, caught between fork and exec, holds it until its exec. What
// cannot be removed within 2 seconds is in the error; the others are removed
// all the same. Any number of collectors and launchers may run at the same time.
func (h *Host) Collect() (removed []string, err error) {
	h.mu.Lock()
	bases := h.bases()
	h.mu.Unlock()
	for _, b := range bases {
		var names []string
		err = errors.Join(err, b.dir.children(func(name string) bool {
			if strings.HasPrefix(name, Prefix) && name != launcherName {
				names = append(names, name)
			}
			return true
		}))
		for _, name := range names {
			ok, e := collect(b, name)
			faults.Here("cgroup.collect")
			if ok && !slices.Contains(removed, name) {
				removed = append(removed, name)
			}
			err = errors.Join(err, e)
		}
	}
	slices.Sort(removed)
	return removed, err
}

// collect removes one group if it is a leaf and nobody holds it.
func collect(b *hierarchy, name string) (bool, error) {
	d, err := b.dir.sub(name)
	if err == unix.ENOENT {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("open cgroup %s: %w", d.path, err)
	}
	defer d.close()
	var st unix.Stat_t
	if err := unix.Fstat(d.fd, &st); err != nil {
		return false, fmt.Errorf("stat cgroup %s: %w", d.path, err)
	}
	if st.Mode&unix.S_ISVTX == 0 {
		return false, nil // somebody else's
	}
	locked, err := d.lock()
	if err != nil {
		return false, fmt.Errorf("lock cgroup %s: %w", d.path, err)
	}
	// The maker can have removed it before the lock was taken.
	if !locked || !d.exists() {
		return false, nil
	}
	faults.Here("cgroup.collect.lock")
	ctx, cancel := context.WithTimeout(context.Background(), collectWithin)
	defer cancel()
	if err := remove(ctx, []*part{{base: b, dir: d, name: name}}); err != nil {
		return false, err
	}
	return true, nil
}
