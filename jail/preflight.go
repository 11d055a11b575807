package jail

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"example.com/jail/cgroup"
)

// Check is one row of what this host can do. Rows for budget items carry the
// item's name; the others are what every run needs.
type Check struct {
	Item string `json:"item"`
	// Enforceable tells whether the host can; By what does it, Reason why it
	// cannot, and Fix what to do about that.
	Enforceable bool   `json:"enforceable"`
	By          string `json:"by"`
	Reason      string `json:"reason"`
	Fix         string `json:"fix"`
}

// Preflight returns the table that "jail check" prints and that [Start] refuses
// from: what every run needs first, then the budget items. It makes and removes
// cgroups named jail-probe-*.
func Preflight() []Check {
	return append(needs(), budgetChecks(nil)...)
}

// needs lists what every jail rests on.
func needs() []Check {
	return []Check{rootCheck(), namespaceCheck(), kernelCheck()}
}

// needsMet remembers that this process may make jails: what it rests on does not
// go away but by root's own doing, which set-up then reports.
var needsMet atomic.Bool

func rootCheck() Check {
	c := Check{Item: "privileges", By: "root with CAP_SYS_ADMIN", Enforceable: true}
	var head unix.CapUserHeader
	var data [2]unix.CapUserData
	head.Version = unix.LINUX_CAPABILITY_VERSION_3
	err := unix.Capget(&head, &data[0])
	missing := []string{}
	for _, c := range []struct {
		name string
		bit  uint
	}{{"CAP_SYS_ADMIN", unix.CAP_SYS_ADMIN}, {"CAP_SYS_CHROOT", unix.CAP_SYS_CHROOT}, {"CAP_SETUID", unix.CAP_SETUID}, {"CAP_SETGID", unix.CAP_SETGID}} {
		if data[c.bit/32].Effective&(1<<(c.bit%32)) == 0 {
			missing = append(missing, c.name)
		}
	}
	if err != nil || len(missing) > 0 || os.Geteuid() != 0 {
		c.Enforceable, c.By = false, ""
		c.Reason = fmt.Sprintf("effective uid %d, missing capabilities: %s", os.Geteuid(), strings.Join(missing, " "))
		c.Fix = "run as root (sudo), in a container with --privileged or with these capabilities added"
	}
	return c
}

// namespaceCheck reads the limits of namespaces(7); a zero makes clone fail
// with ENOSPC.
func namespaceCheck() Check {
	c := Check{Item: "namespaces", By: "user, mnt, pid, ipc, uts, net, cgroup", Enforceable: true}
	for _, ns := range []string{"user", "mnt", "pid", "ipc", "uts", "net", "cgroup"} {
		name := "/proc/sys/user/max_" + ns + "_namespaces"
		b, err := os.ReadFile(name)
		if err != nil {
			c.Reason, c.Fix = fmt.Sprintf("read %s: %v", name, err), "mount /proc, and use a kernel with CONFIG_NAMESPACES and CONFIG_USER_NS"
		} else if n, err := strconv.Atoi(strings.TrimSpace(string(b))); err != nil || n < 1 {
			key := "user.max_" + ns + "_namespaces"
			c.Reason, c.Fix = fmt.Sprintf("%s is %s", key, strings.TrimSpace(string(b))), "sysctl -w "+key+"=10000"
		} else {
			continue
		}
		c.Enforceable, c.By = false, ""
		return c
	}
	return c
}

// minKernel is the oldest release whose calls the launcher uses: close_range
// (5.9), openat2 and pidfd_open (5.6, 5.3), proc subset=pid (5.8),
// mount_setattr (5.12), cgroup.kill (5.14).
const minKernel = "5.14"

func kernelCheck() Check {
	c := Check{Item: "kernel", Enforceable: true}
	release := KernelRelease()
	var major, minor int
	if _, err := fmt.Sscanf(release, "%d.%d", &major, &minor); err != nil || major < 5 || major == 5 && minor < 14 {
		c.Enforceable = false
		c.Reason, c.Fix = "Linux "+release, "use Linux "+minKernel+" or newer"
		return c
	}
	c.By = "Linux " + release
	return c
}

// KernelRelease returns the running kernel's release, as uname -r.
func KernelRelease() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "unknown"
	}
	return unix.ByteSliceToString(u.Release[:])
}

// budgetChecks tells for the items that b asks for (all of them if b is nil)
// whether this host enforces them. Items that do not need the host are always
// enforceable.
func budgetChecks(b *Budget) []Check {
	var table []Check
	host, probeErr := cgroup.Probe()
	controller := func(item Item, c cgroup.Controller) {
		if b != nil && b.asked(item) <= 0 {
			return
		}
		row := Check{Item: string(item)}
		if probeErr != nil {
			row.Reason, row.Fix = probeErr.Error(), "mount a cgroup hierarchy at /sys/fs/cgroup and make it writable"
		} else if s := host.Support(c); s.Err != nil {
			row.Reason, row.Fix = s.Err.Error(), s.Fix
		} else {
			row.Enforceable, row.By = true, fmt.Sprintf("cgroup %s %s controller", s.Hierarchy, c)
		}
		table = append(table, row)
	}
	always := func(item Item, by string) {
		if b == nil || b.asked(item) > 0 {
			table = append(table, Check{Item: string(item), Enforceable: true, By: by})
		}
	}
	for _, i := range Items() {
		switch i {
		case ItemMemory:
			controller(i, cgroup.Memory)
		case ItemWall:
			always(i, byClock)
		case ItemCPUTime:
			controller(i, cgroup.CPUAcct)
		case ItemCPUs:
			controller(i, cgroup.CPU)
		case ItemPIDs:
			controller(i, cgroup.Pids)
		case ItemOutput:
			always(i, byLauncher)
		case ItemTmp:
			always(i, byTmpfs)
		case ItemCalls, ItemBytes:
			always(i, byLauncher)
		}
	}
	return table
}

// Mechanisms that are not a cgroup's.
const (
	byClock    = "CLOCK_MONOTONIC timers in the launcher and in pid 1"
	byLauncher = "launcher"
	byTmpfs    = "tmpfs size"
	byCPUCount = "launcher, by the leaf's cpu time"
)

// preflight refuses a spec that is wrong, or a host that lacks what every jail
// rests on, with every item that fails. Whether the host enforces the budget is
// found out by making the leaf, so that a good run pays for no probe.
func (s *Spec) preflight() error {
	bad := s.check()
	if !needsMet.Load() {
		met := true
		for _, c := range needs() {
			if !c.Enforceable {
				met = false
				bad = append(bad, Refusal{Item: c.Item, Reason: c.Reason, Fix: c.Fix})
			}
		}
		needsMet.Store(met)
	}
	if len(bad) == 0 {
		return nil
	}
	budget, _ := s.unenforceable()
	return &RefusedError{Items: append(bad, budget...)}
}

// unenforceable returns the budget items that this host cannot enforce: those
// that refuse the run, and those that the spec gives up.
func (s *Spec) unenforceable() (bad []Refusal, given map[Item]bool) {
	given = map[Item]bool{}
	for _, c := range budgetChecks(&s.Budget) {
		switch {
		case c.Enforceable:
		case slices.Contains(s.AllowUnenforced, Item(c.Item)):
			given[Item(c.Item)] = true
		default:
			bad = append(bad, Refusal{Item: c.Item, Reason: c.Reason, Fix: c.Fix + "; or give it up with --allow-unenforced " + c.Item})
		}
	}
	return bad, given
}
