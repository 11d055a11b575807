package jail

import (
	"errors"
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
	Enforceable bool `json:"enforceable"`
	// Optional tells items that no default budget asks for and that hosts may
	// do without.
	Optional bool   `json:"optional,omitempty"`
	By       string `json:"by"`
	Reason   string `json:"reason"`
	Fix      string `json:"fix"`
}

// Preflight returns the table that "jail check" prints and that [Start] refuses
// from: what every run needs first, then the budget items. It makes and removes
// cgroups named jail-probe-*.
func Preflight() []Check {
	sample := DefaultBudget()
	// A controller of memory does not tell whether it has this.
	sample.MemoryHigh = sample.MaxMemory
	return append(needs(), budgetChecks(&sample, true, true)...)
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
	have, err := capabilities()
	missing := []string{}
	for _, c := range []struct {
		name string
		bit  uint
	}{{"CAP_SYS_ADMIN", unix.CAP_SYS_ADMIN}, {"CAP_SYS_CHROOT", unix.CAP_SYS_CHROOT}, {"CAP_SETUID", unix.CAP_SETUID}, {"CAP_SETGID", unix.CAP_SETGID}} {
		if !have(c.bit) {
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

// capabilities returns which the calling thread has in effect.
func capabilities() (have func(bit uint) bool, err error) {
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	err = unix.Capget(&head, &data[0])
	return func(bit uint) bool { return data[bit/32].Effective&(1<<(bit%32)) != 0 }, err
}

// readSmall reads a file of /proc that has no more than a line, without the
// poller that os.ReadFile registers it with.
func readSmall(name string) ([]byte, error) {
	fd, err := unix.Open(name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	b := make([]byte, 256)
	n, err := unix.Read(fd, b)
	return b[:max(n, 0)], err
}

// namespaceCheck reads the limits of namespaces(7); a zero makes clone fail
// with ENOSPC.
func namespaceCheck() Check {
	c := Check{Item: "namespaces", By: "user, mnt, pid, ipc, uts, net, cgroup", Enforceable: true}
	for _, ns := range []string{"user", "mnt", "pid", "ipc", "uts", "net", "cgroup"} {
		name := "/proc/sys/user/max_" + ns + "_namespaces"
		b, err := readSmall(name)
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

// Mechanisms that are not a cgroup's.
const (
	byClock    = "CLOCK_MONOTONIC timers in the launcher and in pid 1"
	byLauncher = "launcher"
	byTmpfs    = "tmpfs size"
	byCPUCount = "launcher, by the leaf's cpu time"
	byRlimit   = "RLIMIT_NOFILE"
)

// An item is a row of the budget's table: how it is asked for, what holds it, and
// how the report tells what became of it.
type item struct {
	name Item
	// optional tells those that no default budget asks for and that hosts may
	// do without.
	optional bool
	// asked is the value: bytes, nanoseconds, a count or processors. text has it in
	// full where a number does not. Between least and most is what can be meant,
	// if most is not 0.
	asked       func(b *Budget) float64
	text        func(b *Budget) string
	least, most float64

	// controller is what holds it, and set asks a leaf for it.
	controller cgroup.Controller
	set        func(b *Budget, l *cgroup.Limits)
	// by is what holds it if no value in a cgroup does, and fault why that
	// cannot be on this host, "" if it can.
	by    string
	fault func(b *Budget) (reason, fix string)

	// echo corrects a line of the report that has the controller's first value.
	echo func(line *BudgetLine, values []cgroup.Applied)
}

// items is the table, in the order of reports.
var items = []item{
	{name: ItemMemory, asked: func(b *Budget) float64 { return float64(b.MaxMemory) },
		controller: cgroup.Memory, set: func(b *Budget, l *cgroup.Limits) { l.Memory = b.MaxMemory }},
	{name: ItemWall, asked: func(b *Budget) float64 { return float64(b.WallClock) }, by: byClock},
	{name: ItemCPUTime, asked: func(b *Budget) float64 { return float64(b.CPUTime) },
		controller: cgroup.CPUAcct, set: func(_ *Budget, l *cgroup.Limits) { l.CPUTime = true }, by: byCPUCount},
	{name: ItemCPUs, asked: func(b *Budget) float64 { return b.CPUs }, least: 0.01, most: 1 << 16,
		controller: cgroup.CPU, set: func(b *Budget, l *cgroup.Limits) { l.CPUs = b.CPUs },
		echo: func(line *BudgetLine, values []cgroup.Applied) {
			line.ReadBack = line.Asked * float64(values[0].Read) / float64(values[0].Wrote)
		}},
	{name: ItemPIDs, asked: func(b *Budget) float64 { return float64(b.MaxPIDs) },
		controller: cgroup.Pids, set: func(b *Budget, l *cgroup.Limits) { l.Pids = b.MaxPIDs + 1 },
		echo: func(line *BudgetLine, _ []cgroup.Applied) {
			line.EnforcedBy, line.ReadBack = line.EnforcedBy+", less one for the init", line.ReadBack-1
		}},
	{name: ItemOutput, asked: func(b *Budget) float64 { return float64(b.MaxOutput) }, by: byLauncher},
	{name: ItemTmp, asked: func(b *Budget) float64 { return float64(b.MaxTmp) }, by: byTmpfs},
	{name: ItemCalls, asked: func(b *Budget) float64 { return float64(b.MaxCalls) }, by: byLauncher},
	{name: ItemBytes, asked: func(b *Budget) float64 { return float64(b.MaxBytes) }, by: byLauncher},
	// The init itself needs up to 18 before it starts the program.
	{name: ItemOpenFiles, asked: func(b *Budget) float64 { return float64(b.OpenFiles) }, least: 20, most: 1 << 20,
		by: byRlimit, fault: openFilesFault},

	{name: ItemMemoryHigh, optional: true, asked: func(b *Budget) float64 { return float64(b.MemoryHigh) },
		controller: cgroup.Memory, set: func(b *Budget, l *cgroup.Limits) { l.MemoryHigh = b.MemoryHigh },
		echo: func(line *BudgetLine, values []cgroup.Applied) {
			high := values[slices.IndexFunc(values, func(a cgroup.Applied) bool { return strings.HasPrefix(a.File, "memory.high") })]
			line.EnforcedBy, line.ReadBack = high.File, float64(high.Read)
		}},
	{name: ItemCPUSet, optional: true,
		asked: func(b *Budget) float64 {
			if b.CPUSet == "" {
				return 0
			}
			n, _ := cgroup.CountCPUs(b.CPUSet)
			return float64(max(n, 1)) // what is no list is refused for that
		},
		text:       func(b *Budget) string { return b.CPUSet },
		controller: cgroup.CPUSet, set: func(b *Budget, l *cgroup.Limits) { l.CPUSet = b.CPUSet },
		echo: func(line *BudgetLine, values []cgroup.Applied) { line.ReadBackText = values[0].Detail }},
	{name: ItemIO, optional: true, asked: func(b *Budget) float64 { return float64(len(b.IO)) },
		text: func(b *Budget) string {
			var limits []string
			for _, l := range b.IO {
				limits = append(limits, l.String())
			}
			return strings.Join(limits, " ")
		},
		controller: cgroup.IO, set: func(b *Budget, l *cgroup.Limits) { l.IO = (*cgroup.IOLimits)(&b.IO) },
		echo: echoIO},
}

// limits is what the item asks of a leaf, nothing if it is not asked for.
func (i *item) limits(b *Budget) cgroup.Limits {
	var l cgroup.Limits
	if i.set != nil && i.asked(b) > 0 {
		i.set(b, &l)
	}
	return l
}

// echoIO gathers the rates of all devices and the files that hold them.
func echoIO(line *BudgetLine, values []cgroup.Applied) {
	var files, devices []string
	for _, v := range values {
		device, rate, _ := strings.Cut(v.Detail, " ")
		rate = fmt.Sprintf("%s=%d", rate, v.Read)
		if last := len(devices) - 1; last >= 0 && strings.HasPrefix(devices[last], device+":") {
			devices[last] += "," + rate
		} else {
			devices = append(devices, device+":"+rate)
		}
		if !slices.Contains(files, v.File) {
			files = append(files, v.File)
		}
	}
	line.EnforcedBy, line.ReadBack, line.ReadBackText = strings.Join(files, ", "), float64(len(devices)), strings.Join(devices, " ")
}

// openFilesFault tells whether the launcher may give its jails as many: up to
// its own hard limit, and beyond with CAP_SYS_RESOURCE of the host.
func openFilesFault(b *Budget) (reason, fix string) {
	var own unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &own); err == nil && uint64(b.OpenFiles) <= own.Max {
		return "", ""
	}
	ns, _ := os.Readlink("/proc/self/ns/user")
	if have, err := capabilities(); err == nil && have(unix.CAP_SYS_RESOURCE) && ns == initUserNS {
		data, err := os.ReadFile("/proc/sys/fs/nr_open")
		if n, err2 := strconv.Atoi(strings.TrimSpace(string(data))); err == nil && err2 == nil && b.OpenFiles > n {
			return fmt.Sprintf("fs.nr_open is %d", n), fmt.Sprintf("sysctl -w fs.nr_open=%d, or ask for less", b.OpenFiles)
		}
		return "", ""
	}
	return fmt.Sprintf("the launcher's own hard limit is %d, and it has no CAP_SYS_RESOURCE to raise it", own.Max),
		fmt.Sprintf("ask for %d or less, or raise it: LimitNOFILE of a systemd unit, --ulimit of a container", own.Max)
}

// initUserNS is the user namespace in which capabilities are the host's: the
// kernel has given it this number since it numbers namespaces.
const initUserNS = "user:[4026531837]"

// budgetChecks tells for the items that b asks for whether this host holds them;
// with all, for the others as well, as far as can be told without a value.
// Without cgroups it has only the items that need another look at the host.
func budgetChecks(b *Budget, all, cgroups bool) []Check {
	var table []Check
	var host *cgroup.Host
	var err error
	if cgroups {
		host, err = cgroup.Probe()
	}
	for _, i := range items {
		if !all && i.asked(b) <= 0 || !cgroups && i.fault == nil {
			continue
		}
		row := Check{Item: string(i.name), Optional: i.optional, By: i.by}
		switch {
		case i.controller == "":
			if i.fault != nil {
				row.Reason, row.Fix = i.fault(b)
			}
		case err != nil:
			row.Reason, row.Fix = err.Error(), "mount a cgroup hierarchy at /sys/fs/cgroup and make it writable"
		default:
			row.By, row.Reason, row.Fix = i.try(host, b)
		}
		if row.Enforceable = row.Reason == ""; !row.Enforceable {
			row.By = ""
		}
		table = append(table, row)
	}
	return table
}

// try finds out whether a cgroup holds the item, with the value that b asks for
// if it does.
func (i *item) try(host *cgroup.Host, b *Budget) (by, reason, fix string) {
	s := host.Support(i.controller)
	if limits := i.limits(b); s.Err == nil && limits != (cgroup.Limits{}) {
		err := host.Try(limits)
		var refused *cgroup.UnsupportedError
		if errors.As(err, &refused) {
			s = refused.Missing[0]
		} else if err != nil {
			s.Err, s.Fix = err, "try again when the host has resources left"
		}
	}
	if s.Err != nil {
		return "", s.Err.Error(), s.Fix
	}
	return fmt.Sprintf("cgroup %s %s controller", s.Hierarchy, i.controller), "", ""
}

// Controller tells where this host has a controller of cgroups. JSON keys are part
// of the format of "jail check --json".
type Controller struct {
	Name string `json:"controller"`
	// Place is "v2 delegated here", "v2 not delegated", "v1" or "absent".
	Place string `json:"place"`
	// Dir is the group below which jails get theirs, "" if there is none.
	Dir string `json:"dir"`
	// Usable tells whether a limit could be set there; Reason and Fix are
	// empty then.
	Usable bool   `json:"usable"`
	Reason string `json:"reason"`
	Fix    string `json:"fix"`
}

// Controllers returns where this host has the controllers that the budget's table
// rests on: the second part of what "jail check" prints. Like [Preflight] it makes
// and removes cgroups named jail-probe-*.
func Controllers() ([]Controller, error) {
	host, err := cgroup.Probe()
	if err != nil {
		return nil, err
	}
	var list []Controller
	for _, s := range host.Table() {
		c := Controller{Name: string(s.Controller), Place: string(s.Place), Dir: s.Dir, Usable: s.Err == nil, Fix: s.Fix}
		if s.Err != nil {
			c.Reason = s.Err.Error()
		}
		list = append(list, c)
	}
	return list, nil
}

// preflight refuses a spec that is wrong, or a host that lacks what every jail
// rests on, with every item that fails. Whether cgroups enforce the budget is
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
	if budget, _ := s.unenforceable(false); len(bad) == 0 && len(budget) == 0 {
		return nil
	}
	budget, _ := s.unenforceable(true)
	// One reason an item: a value that is wrong cannot be enforced, either.
	budget = slices.DeleteFunc(budget, func(r Refusal) bool {
		return slices.ContainsFunc(bad, func(b Refusal) bool { return b.Item == r.Item })
	})
	return &RefusedError{Items: append(bad, budget...)}
}

// unenforceable returns the budget items that this host cannot enforce: those
// that refuse the run, and those that the spec gives up. Without cgroups it leaves
// out what the making of the leaf tells.
func (s *Spec) unenforceable(cgroups bool) (bad []Refusal, given map[Item]bool) {
	given = map[Item]bool{}
	for _, c := range budgetChecks(&s.Budget, false, cgroups) {
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
