package jail_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"example.com/jail/cgroup"
	"example.com/jail/jail"
	"example.com/jail/rootfs"
)

// line returns a report's line of a budget item that was asked for.
func line(t *testing.T, r *jail.Report, item jail.Item) jail.BudgetLine {
	t.Helper()
	i := slices.IndexFunc(r.Budget, func(b jail.BudgetLine) bool { return b.Item == item })
	if i < 0 {
		t.Fatalf("no %s in %+v", item, r.Budget)
	}
	return r.Budget[i]
}

// refused runs a spec that has to be refused, and returns the items.
func refused(t *testing.T, s jail.Spec) (items []string, r *jail.Report) {
	t.Helper()
	r, err := jail.Run(context.Background(), s)
	var e *jail.RefusedError
	if !errors.As(err, &e) {
		t.Fatalf("error %v, want a refusal", err)
	}
	for _, i := range e.Items {
		items = append(items, i.Item)
		if i.Reason == "" || i.Fix == "" {
			t.Errorf("%s: reason %q, fix %q", i.Item, i.Reason, i.Fix)
		}
	}
	checkReport(t, r)
	return items, r
}

// New items come after the old ones, so that a report's list keeps its order.
func TestItemsKeepTheirOrder(t *testing.T) {
	want := []jail.Item{"max_memory", "wall_clock", "cpu_time", "cpus", "max_pids", "max_output", "max_tmp", "max_calls", "max_bytes",
		"open_files", "memory_high", "cpuset", "io"}
	if got := jail.Items(); !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	var rows []jail.Item
	for _, c := range jail.Preflight() {
		if slices.Contains(want, jail.Item(c.Item)) {
			rows = append(rows, jail.Item(c.Item))
		}
		if optional := c.Item == "memory_high" || c.Item == "cpuset" || c.Item == "io"; c.Optional != optional {
			t.Errorf("%s is optional: %t", c.Item, c.Optional)
		}
		if c.Enforceable != (c.By != "") || c.Enforceable != (c.Reason == "") || c.Enforceable != (c.Fix == "") {
			t.Errorf("%+v", c)
		}
	}
	if !slices.Equal(rows, want) {
		t.Errorf("Preflight has %v", rows)
	}
}

// Values that mean nothing on any host are refused under the item's name, before
// anything is tried.
func TestBudgetValuesThatMeanNothing(t *testing.T) {
	for _, c := range []struct {
		name   string
		edit   func(*jail.Budget)
		item   string
		reason string
	}{
		{"negative open files", func(b *jail.Budget) { b.OpenFiles = -1 }, "open_files", "-1 is not a budget"},
		{"fewer files than the init needs", func(b *jail.Budget) { b.OpenFiles = 19 }, "open_files", "19 is out of range"},
		{"too many files", func(b *jail.Budget) { b.OpenFiles = 1<<20 + 1 }, "open_files", "1048577 is out of range"},
		{"too many processors", func(b *jail.Budget) { b.CPUs = 65537 }, "cpus", "65537 is out of range"},
		{"next to no processor", func(b *jail.Budget) { b.CPUs = 0.001 }, "cpus", "0.001 is out of range"},
		{"negative high", func(b *jail.Budget) { b.MemoryHigh = -1 }, "memory_high", "-1 is not a budget"},
		{"high above the limit", func(b *jail.Budget) { b.MemoryHigh = 1 << 40 }, "memory_high", "1099511627776 is more than max_memory, 268435456"},
		{"no list", func(b *jail.Budget) { b.CPUSet = "all" }, "cpuset", `cpuset "all" is no list of CPUs`},
		{"list that runs backwards", func(b *jail.Budget) { b.CPUSet = "1-0" }, "cpuset", "runs backwards"},
		{"processor that cannot be", func(b *jail.Budget) { b.CPUSet = "8192" }, "cpuset", "the last there can be is 8191"},
		{"path for a device", func(b *jail.Budget) { b.IO = []cgroup.IOLimit{{Device: "/dev/sda", ReadBytes: 1}} }, "io", `"/dev/sda" is no MAJOR:MINOR`},
		{"no rate", func(b *jail.Budget) { b.IO = []cgroup.IOLimit{{Device: "8:0"}} }, "io", "limits nothing"},
		{"negative rate", func(b *jail.Budget) { b.IO = []cgroup.IOLimit{{Device: "8:0", ReadOps: -5}} }, "io", "is negative: -5"},
		{"device twice", func(b *jail.Budget) {
			b.IO = []cgroup.IOLimit{{Device: "8:0", ReadOps: 5}, {Device: "8:0", WriteOps: 5}}
		}, "io", "is there twice"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := command("/bin/true")
			c.edit(&s.Budget)
			items, r := refused(t, s)
			if !slices.Equal(items, []string{c.item}) || !strings.Contains(r.Refused[0].Reason, c.reason) {
				t.Errorf("refused %+v, want %s: %s", r.Refused, c.item, c.reason)
			}
			// That is no item to give up: it is a mistake.
			s.AllowUnenforced = []jail.Item{jail.Item(c.item)}
			if items, _ := refused(t, s); !slices.Equal(items, []string{c.item}) {
				t.Errorf("given up: refused %v", items)
			}
		})
	}
}

// openAll opens files until it cannot, and prints why, how many are open, and
// what it may raise that to.
const openAll = `
import errno, os, resource
try:
    while True:
        fd = os.open("/dev/null", os.O_RDONLY)
except OSError as e:
    print(errno.errorcode[e.errno], fd + 1, *resource.getrlimit(resource.RLIMIT_NOFILE))
`

func TestOpenFilesAreLimited(t *testing.T) {
	for asked, want := range map[int]int{0: 1024, 20: 20, 64: 64, 1024: 1024, 4000: 4000} {
		t.Run(strconv.Itoa(asked), func(t *testing.T) {
			s := command("/usr/bin/python3", "-c", openAll)
			s.Budget.OpenFiles = asked
			r := run(t, s)
			if got := fmt.Sprintf("EMFILE %d %d %d\n", want, want, want); r.Cause != jail.CauseOK || r.stdout != got {
				t.Errorf("cause %q, printed %q%s, want %q", r.Cause, r.stdout, r.stderr, got)
			}
			if asked == 0 { // not asked for, and not unlimited for that
				if slices.ContainsFunc(r.Budget, func(b jail.BudgetLine) bool { return b.Item == jail.ItemOpenFiles }) {
					t.Errorf("budget %+v", r.Budget)
				}
				return
			}
			if got, want := line(t, r.Report, jail.ItemOpenFiles), (jail.BudgetLine{Item: "open_files", Asked: float64(want), EnforcedBy: "RLIMIT_NOFILE", ReadBack: float64(want)}); got != want {
				t.Errorf("%+v, want %+v", got, want)
			}
			prove(t, r.Report, jail.ItemOpenFiles)
		})
	}
}

// allowed prints the processors that it may run on, and again after it has asked
// for others.
const allowed = `
import os
print(*sorted(os.sched_getaffinity(0)))
try:
    os.sched_setaffinity(0, set(range(os.cpu_count())))
except OSError as e:
    pass
print(*sorted(os.sched_getaffinity(0)))
`

func TestCPUSetConfinesTheJail(t *testing.T) {
	var own unix.CPUSet
	if err := unix.SchedGetaffinity(0, &own); err != nil {
		t.Fatal(err)
	}
	tested := 0
	for n := 0; n < 1024 && tested < 4; n++ {
		if !own.IsSet(n) {
			continue
		}
		tested++
		s := command("/usr/bin/python3", "-c", allowed)
		s.Budget.CPUSet = fmt.Sprintf("%d,%d", n, n)
		r := run(t, s)
		if r.Cause != jail.CauseOK || r.stdout != fmt.Sprintf("%d\n%d\n", n, n) {
			t.Errorf("CPU %d: cause %q, printed %q%s", n, r.Cause, r.stdout, r.stderr)
		}
		got := line(t, r.Report, jail.ItemCPUSet)
		if got.Asked != 1 || got.AskedText != s.Budget.CPUSet || got.ReadBack != 1 || got.ReadBackText != strconv.Itoa(n) || !strings.HasPrefix(got.EnforcedBy, "cpuset.cpus (v") {
			t.Errorf("%+v", got)
		}
		prove(t, r.Report, jail.ItemCPUSet)
	}
	if tested == 0 {
		t.Error("no processor was found")
	}
}

// onDisk returns a directory on a disk, and the disk's number.
func onDisk(t *testing.T) (dir, disk string) {
	t.Helper()
	for _, parent := range []string{os.TempDir(), "/var/tmp", "."} {
		var st unix.Stat_t
		if err := unix.Stat(parent, &st); err != nil {
			continue
		}
		sys, err := filepath.EvalSymlinks(fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(st.Dev), unix.Minor(st.Dev)))
		if err != nil {
			continue // a file system without a device of its own
		}
		if _, err := os.Stat(sys + "/partition"); err == nil {
			sys = filepath.Dir(sys)
		}
		number, err := os.ReadFile(sys + "/dev")
		if err != nil {
			t.Fatal(err)
		}
		// Not t.TempDir, which is below the first parent always.
		if dir, err = os.MkdirTemp(parent, "jail-disk-"); err != nil {
			continue
		}
		t.Cleanup(func() { os.RemoveAll(dir) })
		if dir, err = filepath.Abs(dir); err != nil {
			t.Fatal(err)
		}
		return dir, strings.TrimSpace(string(number))
	}
	t.Fatal("no directory for temporary files is on a disk: nothing is tested")
	return "", ""
}

// Direct reads and writes wait for the rate; without one they do not.
func TestIOIsThrottledInTheJail(t *testing.T) {
	dir, disk := onDisk(t)
	if err := os.WriteFile(filepath.Join(dir, "file"), make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name, dd string // moves a second's worth
		limit    cgroup.IOLimit
		text     string
	}{
		{"bytes written", "if=/dev/zero of=/data/file oflag=direct conv=notrunc bs=64k count=16", cgroup.IOLimit{WriteBytes: 1 << 20}, "wbps=1048576"},
		{"bytes read", "if=/data/file of=/dev/null iflag=direct bs=64k count=16", cgroup.IOLimit{ReadBytes: 1 << 20}, "rbps=1048576"},
		{"writes", "if=/dev/zero of=/data/file oflag=direct conv=notrunc bs=4k count=20", cgroup.IOLimit{WriteOps: 20}, "wiops=20"},
		{"reads, beside another rate", "if=/data/file of=/dev/null iflag=direct bs=4k count=20", cgroup.IOLimit{ReadOps: 20, WriteBytes: 1 << 40}, "wbps=1099511627776,riops=20"},
	} {
		t.Run(c.name, func(t *testing.T) {
			move := func(l cgroup.IOLimit) (result, time.Duration) {
				s := shell("dd " + c.dd)
				s.Root.Binds = []rootfs.Bind{{Source: dir, Target: "/data", Writable: true}}
				l.Device = disk
				s.Budget.IO = []cgroup.IOLimit{l}
				r := run(t, s)
				if r.Cause != jail.CauseOK {
					t.Fatalf("cause %q: %s", r.Cause, r.stderr)
				}
				return r, time.Duration(r.WallNS)
			}
			r, slow := move(c.limit)
			_, free := move(cgroup.IOLimit{ReadBytes: 1 << 40})
			t.Logf("a second's worth took %v, without the limit %v", slow, free)
			// The kernel gives slices of time in advance.
			if slow < 500*time.Millisecond || free >= slow {
				t.Errorf("took %v, without the limit %v", slow, free)
			}
			got, text := line(t, r.Report, jail.ItemIO), disk+":"+c.text
			if got.Asked != 1 || got.AskedText != text || got.ReadBack != 1 || got.ReadBackText != text || got.EnforcedBy == "" {
				t.Errorf("%+v, want %s", got, text)
			}
			prove(t, r.Report, jail.ItemIO)
		})
	}
}

// Above memory_high the jail is slowed down and not killed. cgroup v1 has no such
// limit, and the run is refused there.
func TestMemoryHighThrottles(t *testing.T) {
	s := command("/usr/bin/python3", "-c", "x = bytearray(48 << 20)")
	s.Budget.MemoryHigh = 32<<20 + 1
	host, err := cgroup.Probe()
	if err != nil {
		t.Fatal(err)
	}
	where := host.Support(cgroup.Memory)
	if where.Hierarchy == "v1" {
		items, r := refused(t, s)
		if !slices.Equal(items, []string{"memory_high"}) || !strings.Contains(r.Refused[0].Reason, "cgroup v1 has no such limit") ||
			!strings.Contains(r.Refused[0].Fix, "--allow-unenforced memory_high") {
			t.Errorf("refused %+v", r.Refused)
		}
		fmt.Printf("proven: %s|refused on v1|%s\n", jail.ItemMemoryHigh, t.Name())
		return
	}
	j, err := jail.Start(context.Background(), s)
	if err != nil {
		t.Fatal(err)
	}
	await(t, "throttled", func() bool {
		data, err := os.ReadFile(filepath.Join(where.Dir, j.ID(), "memory.events"))
		if err != nil {
			t.Fatal(err)
		}
		_, n, _ := strings.Cut(string(data), "high ")
		n, _, _ = strings.Cut(n, "\n")
		return n != "0" && n != ""
	})
	j.Kill()
	r, err := j.Wait()
	if err != nil {
		t.Fatal(err)
	}
	if r.Cause != jail.CauseCanceled || r.Memory.OOMKills != 0 {
		t.Errorf("cause %q, memory %+v", r.Cause, r.Memory)
	}
	if got, want := line(t, r, jail.ItemMemoryHigh), (jail.BudgetLine{Item: "memory_high", Asked: 32<<20 + 1, EnforcedBy: "memory.high (v2)", ReadBack: 32 << 20}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	if got := line(t, r, jail.ItemMemory); got.EnforcedBy != "memory.max (v2)" || got.ReadBack != 256<<20 {
		t.Errorf("%+v", got)
	}
	prove(t, r, jail.ItemMemoryHigh)
}

// J1: one refusal has every item that this host cannot enforce; each is given up
// by its own name, and the report says so.
func TestEveryUnenforceableItemIsListed(t *testing.T) {
	s := command("/bin/true")
	s.Budget.MaxMemory = 1 // the kernel makes nothing of it
	s.Budget.CPUSet = "8191"
	s.Budget.IO = []cgroup.IOLimit{{Device: "4095:1048575", WriteBytes: 1}}
	want := []string{"max_memory", "cpuset", "io"}
	if items, _ := refused(t, s); !slices.Equal(items, want) {
		t.Fatalf("refused %v, want %v", items, want)
	}
	// Mistakes and what the host lacks are told together.
	s.Env = []string{"NOVALUE"}
	if items, _ := refused(t, s); !slices.Equal(items, append([]string{"env"}, want...)) {
		t.Errorf("refused %v", items)
	}
	s.Env = nil
	for i, item := range want {
		s.AllowUnenforced = append(s.AllowUnenforced, jail.Item(item))
		if i == len(want)-1 {
			break
		}
		if items, _ := refused(t, s); !slices.Equal(items, want[i+1:]) {
			t.Errorf("with %v given up: refused %v", want[:i+1], items)
		}
	}
	r := run(t, s)
	if r.Cause != jail.CauseOK {
		t.Fatalf("cause %q: %s", r.Cause, r.Error)
	}
	for item, text := range map[jail.Item]string{"max_memory": "", "cpuset": "8191", "io": "4095:1048575:wbps=1"} {
		if got, want := line(t, r.Report, item), (jail.BudgetLine{Item: item, Asked: 1, AskedText: text}); got != want {
			t.Errorf("%+v, want %+v", got, want)
		}
	}
	if got := line(t, r.Report, jail.ItemPIDs); got.EnforcedBy == "" || got.ReadBack != 64 {
		t.Errorf("%+v", got)
	}
}

// row 35: groups that somebody else named as jails are stay, with what runs there.
func TestCollectLeavesOthersGroups(t *testing.T) {
	host, err := cgroup.Probe()
	if err != nil {
		t.Fatal(err)
	}
	base := host.Support(cgroup.Pids)
	if base.Err != nil {
		t.Fatal(base.Err)
	}
	// No run's number begins with f.
	for _, name := range []string{"jail-foo", "jail-fffffff"} {
		dir := filepath.Join(base.Dir, name)
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		sleep := exec.Command("/bin/sleep", "600")
		err := sleep.Start()
		if err == nil {
			err = os.WriteFile(dir+"/cgroup.procs", []byte(strconv.Itoa(sleep.Process.Pid)), 0)
		}
		if err != nil {
			t.Error(err)
		}
		groups, _, err := jail.Collect(&rootfs.Cache{Dir: templates.Dir + "-none"})
		if err != nil || slices.Contains(groups, name) {
			t.Errorf("collected %v, %v", groups, err)
		}
		if data, err := os.ReadFile(dir + "/cgroup.procs"); err != nil || strings.TrimSpace(string(data)) != strconv.Itoa(sleep.Process.Pid) {
			t.Errorf("%s has %q, %v", dir, data, err)
		}
		if err := sleep.Process.Kill(); err != nil {
			t.Error(err)
		}
		_ = sleep.Wait()
		await(t, "group is empty", func() bool { return os.Remove(dir) == nil })
	}
}

// What "jail check" tells of the controllers is what the items' rows rest on.
func TestControllersExplainTheTable(t *testing.T) {
	list, err := jail.Controllers()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	usable := map[string]bool{}
	for _, c := range list {
		names = append(names, c.Name)
		usable[c.Name] = c.Usable
		if !slices.Contains([]string{"v2 delegated here", "v2 not delegated", "v1", "absent"}, c.Place) {
			t.Errorf("%s is %q", c.Name, c.Place)
		}
		if c.Usable != (c.Reason == "") || c.Usable != (c.Fix == "") || c.Usable && c.Dir == "" {
			t.Errorf("%+v", c)
		}
	}
	if want := []string{"memory", "pids", "cpu", "cpuset", "io", "cpuacct"}; !slices.Equal(names, want) {
		t.Errorf("controllers %v, want %v", names, want)
	}
	rests := map[string]string{"max_memory": "memory", "max_pids": "pids", "cpus": "cpu", "cpu_time": "cpuacct", "cpuset": "cpuset", "io": "io"}
	for _, row := range jail.Preflight() {
		if c, ok := rests[row.Item]; ok && row.Enforceable != usable[c] {
			t.Errorf("%s is enforceable: %t; %s is usable: %t", row.Item, row.Enforceable, c, usable[c])
		}
	}
}
