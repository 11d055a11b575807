package cgroup

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"
	"sync"

	cgroups "github.com/containerd/cgroups/v3"
	"golang.org/x/sys/unix"
)

// A Host is the cgroups as this process can use them: below its own cgroup of
// each hierarchy. It is safe for concurrent use.
type Host struct {
	mounts []mount
	v1own  map[string]string // the caller's group by v1 controller
	v2own  string

	mu     sync.Mutex
	opened map[string]*hierarchy // by path
	placed map[Controller]*hierarchy
	proven map[Controller]bool
}

// A hierarchy is the caller's own group of one hierarchy. It stays open as long
// as a Host or a Leaf refers to it.
type hierarchy struct {
	version version
	dir     dir

	keep []*os.File // the files behind the handles, to be closed with the hierarchy

	mu    sync.Mutex
	up    []dir    // see above
	count *counter // see ooms
}

var last struct {
	sync.Mutex
	host   *Host
	groups []byte
	mounts mountTable
}

// Probe finds the cgroups of the calling thread. It looks at /proc only; the
// controllers are tried when they are first asked for. As long as neither the
// caller's groups nor the mounts change, it returns the same Host, which
// remembers the controllers that it found to work. It does not remember those
// that it did not: what was missing can be repaired.
//
// It fails if /proc cannot be read. A host without cgroups is no error here.
func Probe() (*Host, error) {
	// Not /proc/self: the main thread may be in another mount namespace than
	// the rest, as libraries that build containers leave it.
	groups, err := os.ReadFile("/proc/thread-self/cgroup")
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("find the launcher's cgroups: %w", err)
	}
	last.Lock()
	defer last.Unlock()
	changed, err := last.mounts.refresh()
	if err != nil {
		return nil, fmt.Errorf("find the cgroup mounts: %w", err)
	}
	if last.host != nil && !changed && bytes.Equal(groups, last.groups) {
		return last.host, nil
	}
	h := &Host{
		mounts: cgroupMounts(last.mounts.lines),
		opened: map[string]*hierarchy{},
		placed: map[Controller]*hierarchy{},
		proven: map[Controller]bool{},
	}
	if h.v1own, h.v2own, err = cgroups.ParseCgroupFromReaderUnified(bytes.NewReader(groups)); err != nil {
		return nil, fmt.Errorf("find the launcher's cgroups: %w", err)
	}
	// A caller that has stepped aside, or was started by one that has.
	if path.Base(h.v2own) == launcherName {
		h.v2own = path.Dir(h.v2own)
	}
	last.host, last.groups = h, groups
	return h, nil
}

// Mode returns "unified" for cgroup v2 alone, "legacy" for v1 alone, "hybrid"
// for both, and "none" if the caller's group is visible in no hierarchy. The
// first three say what is mounted at /sys/fs/cgroup; hierarchies mounted
// elsewhere are used all the same. It does not say which controllers can be
// used: see Support.
func (h *Host) Mode() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	seen, _ := h.unified()
	for _, c := range controllers {
		if seen == nil {
			seen, _ = h.legacy(c.legacy())
		}
	}
	if seen == nil {
		return "none"
	}
	switch cgroups.Mode() {
	case cgroups.Unified:
		return "unified"
	case cgroups.Hybrid:
		return "hybrid"
	case cgroups.Legacy:
		return "legacy"
	}
	return "none"
}

// Table tells of every controller where it is and whether it can be used, in
// the order memory, pids, cpu, cpuset, io, cpuacct. It asks Support for each.
func (h *Host) Table() []Support {
	table := make([]Support, len(controllers))
	for i, c := range controllers {
		table[i] = h.Support(c)
	}
	return table
}

// Support tells where c can be used, after it has made a group named
// jail-probe-*, set a limit there, read it back and removed it. Of IO, whose
// limits need a device, it looks for the files only.
func (h *Host) Support(c Controller) Support {
	h.mu.Lock()
	defer h.mu.Unlock()
	s, base := h.place(c)
	if s.Err != nil || h.proven[c] {
		return h.locate(s)
	}
	if err := h.try(c, base); err != nil {
		delete(h.placed, c)
		return h.locate(unsupported(c, base, err))
	}
	h.proven[c] = true
	return s
}

// place finds the hierarchy that has c and makes c usable in its leaves.
func (h *Host) place(c Controller) (Support, *hierarchy) {
	base, err := h.placed[c], error(nil)
	if base == nil {
		if base, err = h.find(c); err == nil {
			err = base.version.enable(base.dir, c)
		}
		if err != nil {
			return unsupported(c, base, err), nil
		}
		h.placed[c] = base
	}
	s := Support{Controller: c, Place: Legacy, Hierarchy: base.version.String(), Dir: base.dir.path}
	if (base.version == v2{}) {
		s.Place = Delegated
	}
	return s, base
}

// locate fills in where the controller is that s says cannot be used.
func (h *Host) locate(s Support) Support {
	if s.Err == nil || s.Controller == "" {
		return s
	}
	c := s.Controller
	two, err := h.unified()
	here := false
	if err == nil {
		here, _ = has(two.dir, "cgroup.controllers", string(c)) // what fails here is in s.Err
	}
	switch {
	case here, err == nil && c == CPUAcct:
		s.Place = Delegated
	case h.v1own[c.legacy()] != "":
		s.Place = Legacy
	case two != nil && (c == CPUAcct || h.inKernel(c)):
		s.Place = NotDelegated
	default:
		s.Place = Absent
	}
	return s
}

// inKernel tells whether the kernel has c, which is in no v1 hierarchy.
func (h *Host) inKernel(c Controller) bool {
	// The topmost group that can be seen. Seen through a cgroup namespace, it
	// has only what was handed to that.
	for _, m := range h.mounts {
		if (m.version != v2{}) {
			continue
		}
		if d, err := m.open(m.point); err == nil {
			ok, _ := has(d, "cgroup.controllers", string(c))
			d.close()
			if ok {
				return true
			}
		}
	}
	// Since Linux 6.13 this leaves out those that could not be on v1.
	data, _ := os.ReadFile("/proc/cgroups")
	for line := range bytes.Lines(data) {
		f := bytes.Fields(line)
		if len(f) == 4 && string(f[0]) == c.legacy() && slices.Contains(controllers, c) {
			return string(f[3]) == "1"
		}
	}
	return false
}

// find returns the hierarchy that has c. On an error it returns the one that
// was looked at, if any.
func (h *Host) find(c Controller) (*hierarchy, error) {
	if !slices.Contains(controllers, c) {
		return nil, &fault{fmt.Errorf("controller %q is unknown", c), "ask for memory, pids, cpu, cpuset, io or cpuacct"}
	}
	two, err2 := h.unified()
	if err2 == nil {
		if c == CPUAcct {
			return two, nil
		}
		ok, err := has(two.dir, "cgroup.controllers", string(c))
		if ok || err != nil {
			return two, err
		}
	}
	one, err1 := h.legacy(c.legacy())
	switch {
	case err1 == nil:
		return one, nil
	case h.v1own[c.legacy()] != "":
		return one, err1
	case err2 == nil:
		return two, &fault{fmt.Errorf("%s is not in cgroup.controllers of %s", c, two.dir.path), fixDelegate}
	}
	return two, err2
}

// unified returns the v2 hierarchy. On an error leaves cannot be made there.
func (h *Host) unified() (*hierarchy, error) {
	return h.open("cgroup v2", h.v2own, func(m mount) bool { return m.version == v2{} })
}

// legacy returns the v1 hierarchy that has the controller. On an error leaves
// cannot be made there.
func (h *Host) legacy(controller string) (*hierarchy, error) {
	return h.open("the cgroup v1 hierarchy of "+controller, h.v1own[controller], func(m mount) bool {
		return m.version == v1{} && slices.Contains(m.options, controller)
	})
}

// open returns the caller's group own in the first mount that is wanted and
// shows it.
func (h *Host) open(what, own string, want func(mount) bool) (*hierarchy, error) {
	var first error
	for _, m := range h.mounts {
		if !want(m) {
			continue
		}
		p, ok := m.locate(own)
		if !ok {
			if first == nil {
				first = &fault{fmt.Errorf("%s shows %s at %s, and not the launcher's cgroup %s", what, m.root, m.point, own), fixMount}
			}
			continue
		}
		if base := h.opened[p]; base != nil {
			return base, base.writable()
		}
		d, err := m.open(p)
		if err != nil {
			if transient(err) {
				return nil, explain(err)
			}
			if first == nil {
				first = &fault{err, fixMount}
			}
			continue
		}
		base := &hierarchy{version: m.version, dir: d, keep: []*os.File{os.NewFile(uintptr(d.fd), p)}}
		h.opened[p] = base
		return base, base.writable()
	}
	if first == nil {
		first = &fault{fmt.Errorf("%s is not mounted", what), fixMount}
	}
	return nil, first
}

// writable tells whether groups can be made in b, as far as permissions go.
func (b *hierarchy) writable() error {
	err := retry(func() error { return unix.Faccessat(b.dir.fd, ".", unix.W_OK|unix.X_OK, unix.AT_EACCESS) })
	if err != nil {
		return explain(fmt.Errorf("make groups in %s: %w", b.dir.path, err))
	}
	return nil
}

// bases returns all hierarchies in which leaves can be.
func (h *Host) bases() []*hierarchy {
	var bs []*hierarchy
	add := func(b *hierarchy, err error) {
		if b != nil && err == nil && !slices.Contains(bs, b) {
			bs = append(bs, b)
		}
	}
	add(h.unified())
	for _, c := range controllers {
		add(h.legacy(c.legacy()))
	}
	return bs
}

// checkName refuses a name that is no leaf's.
func checkName(name string) error {
	switch {
	case !strings.HasPrefix(name, Prefix) || name == Prefix || name == launcherName,
		len(name) > unix.NAME_MAX,
		strings.ContainsAny(name, "/\n\x00"):
		return fmt.Errorf("%.300q cannot be the name of a leaf", name)
	}
	return nil
}
