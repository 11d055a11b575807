package cgroup

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// J17: what the kernel rounded is what is reported, and it is what the file has.
func TestLimitsAreReadBack(t *testing.T) {
	h := need(t, controllers...)
	page := int64(os.Getpagesize())
	type want struct {
		c           Controller
		v1, v2      string // file
		wrote, read int64
	}
	for _, tt := range []struct {
		name string
		l    Limits
		want []want
	}{
		{"nothing", Limits{}, nil},
		{"memory of whole pages", Limits{Memory: 64 << 20}, []want{
			{Memory, "memory.limit_in_bytes", "memory.max", 64 << 20, 64 << 20},
			{Memory, "memory.memsw.limit_in_bytes", "", 64 << 20, 64 << 20},
			{Memory, "", "memory.swap.max", 0, 0},
			{Memory, "", "memory.oom.group", 1, 1},
		}},
		{"memory of a page and a half", Limits{Memory: page + page/2}, []want{
			{Memory, "memory.limit_in_bytes", "memory.max", page + page/2, page},
		}},
		{"memory beyond any machine", Limits{Memory: 1 << 60}, []want{
			{Memory, "memory.limit_in_bytes", "memory.max", 1 << 60, 1 << 60},
		}},
		{"one task", Limits{Pids: 1}, []want{{Pids, "pids.max", "pids.max", 1, 1}}},
		{"many tasks", Limits{Pids: 4_000_000}, []want{{Pids, "pids.max", "pids.max", 4_000_000, 4_000_000}}},
		{"half a core", Limits{CPUs: 0.5}, []want{{CPU, "cpu.cfs_quota_us", "cpu.max", 50_000, 50_000}}},
		{"a hundredth of a core", Limits{CPUs: 0.01}, []want{{CPU, "cpu.cfs_quota_us", "cpu.max", 1_000, 1_000}}},
		{"a third of a core", Limits{CPUs: 1. / 3}, []want{{CPU, "cpu.cfs_quota_us", "cpu.max", 33_333, 33_333}}},
		{"two and a half cores", Limits{CPUs: 2.5}, []want{{CPU, "cpu.cfs_quota_us", "cpu.max", 250_000, 250_000}}},
		{"counting", Limits{CPUTime: true}, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			leaf := newTestLeaf(t, h, tt.l)
			got := leaf.Applied()
			if tt.want == nil && len(got) > 0 {
				t.Errorf("Applied = %v, want nothing", got)
			}
			for _, w := range tt.want {
				file, v := w.v1, "v1"
				if on2(h, w.c) {
					file, v = w.v2, "v2"
				}
				if file == "" || file == "memory.memsw.limit_in_bytes" && !exists(h.Support(Memory).Dir+"/"+file) {
					continue
				}
				a := Applied{Controller: w.c, File: file + " (" + v + ")", Wrote: w.wrote, Read: w.read}
				if !slices.Contains(got, a) {
					t.Errorf("Applied has no %v: %v", a, got)
				}
				data, err := os.ReadFile(h.Support(w.c).Dir + "/" + leaf.Name() + "/" + file)
				if f := strings.Fields(string(data)); err != nil || f[0] != fmt.Sprint(w.read) {
					t.Errorf("%s has %q, %v; reported was %d", file, data, err, w.read)
				}
			}
		})
	}
}

func TestLimitsThatCannotBeAreRefused(t *testing.T) {
	h := need(t, Memory, Pids, CPU)
	for _, tt := range []struct {
		name string
		l    Limits
		want string // in the error
		is   Controller
	}{
		{"less than a page", Limits{Memory: 1}, "reads back as 0", Memory},
		{"negative memory", Limits{Memory: -1}, "memory limit -1 is negative", ""},
		{"negative high", Limits{MemoryHigh: -1}, "memory high -1 is negative", ""},
		{"high above the limit", Limits{Memory: 4096, MemoryHigh: 8192}, "memory high 8192 is above the memory limit 4096", ""},
		{"negative pids", Limits{Pids: -5}, "pids limit -5 is negative", ""},
		{"more tasks than pids", Limits{Pids: math.MaxInt64}, "set pids.max of ", Pids},
		{"negative cpus", Limits{CPUs: -0.5}, "cpus limit -0.5 is not", ""},
		{"infinite cpus", Limits{CPUs: math.Inf(1)}, "cpus limit +Inf is not", ""},
		{"undefined cpus", Limits{CPUs: math.NaN()}, "cpus limit NaN is not", ""},
		{"too few cpus", Limits{CPUs: 0.001}, "cpus limit 0.001 is below 0.01", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			name := newName()
			leaf, err := h.NewLeaf(name, tt.l)
			if err == nil {
				remove1(t, leaf)
				t.Fatal("NewLeaf made it")
			}
			if leaf != nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("NewLeaf = %v, %v; want %q", leaf, err, tt.want)
			}
			var u *UnsupportedError
			if errors.As(err, &u) != (tt.is != "") || u != nil && (u.Missing[0].Controller != tt.is || u.Missing[0].Fix == "") {
				t.Errorf("%#v is no refusal of %q with a fix", err, tt.is)
			}
			if left := leftGroups(name); left != nil { // J1
				t.Errorf("left behind: %v", left)
			}
		})
	}
	// None of these was the host's fault.
	if s := h.Support(Memory); s.Err != nil {
		t.Error(s.Err)
	}
}

func TestNamesOfLeaves(t *testing.T) {
	h := need(t)
	long := Prefix + strings.Repeat("x", unix.NAME_MAX-len(Prefix))
	for _, name := range []string{"", "x", "jail-", "jail", "jail-launcher", "jail-a/b", "../jail-a", "jail-\n", "jail-\x00", long + "x", strings.Repeat("y", 1<<20)} {
		if leaf, err := h.NewLeaf(name, Limits{}); err == nil || len(err.Error()) > 1000 {
			t.Errorf("NewLeaf(%.40q) = %v, %.100v", name, leaf, err)
		}
	}
	leaf, err := h.NewLeaf(long, Limits{})
	if err != nil {
		t.Fatal(err)
	}
	if leaf.Name() != long {
		t.Errorf("Name = %q", leaf.Name())
	}
	remove1(t, leaf)
}

// E13: a name is had by one launcher.
func TestANameIsTakenOnce(t *testing.T) {
	h := need(t, Memory, Pids)
	first := newTestLeaf(t, h, Limits{Pids: 5})
	for _, l := range []Limits{{}, {Memory: 1 << 20}, {Pids: 5, Memory: 1 << 20}} {
		if _, err := h.NewLeaf(first.Name(), l); !errors.Is(err, ErrExist) {
			t.Errorf("second NewLeaf with %+v: %v, want ErrExist", l, err)
		}
	}
	for _, d := range dirs(first) {
		if !exists(d) {
			t.Errorf("%s of the first is gone", d)
		}
	}
	// And what the loser had made before it lost is gone.
	if got := leftGroups(first.Name()); len(got) != len(first.parts) {
		t.Errorf("groups of that name: %v", got)
	}

	const racers = 8
	name, won := newName(), make(chan *Leaf, racers)
	for range racers {
		go func() {
			leaf, err := h.NewLeaf(name, Limits{Memory: 1 << 20, Pids: 5})
			if err != nil && !errors.Is(err, ErrExist) {
				t.Error(err)
			}
			won <- leaf
		}()
	}
	winners := 0
	var leaves []*Leaf
	for range racers {
		if leaf := <-won; leaf != nil {
			winners++
			leaves = append(leaves, leaf)
		}
	}
	if winners != 1 {
		t.Errorf("%d of %d got the name", winners, racers)
	}
	for _, leaf := range leaves {
		remove1(t, leaf)
	}
}

// E9: whatever system call fails, nothing is left and the error is no refusal.
func TestNewLeafUndoesWhatItDid(t *testing.T) {
	if !inside(t, nil) {
		return
	}
	h := need(t, controllers...)
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	// Once with a Host that has found everything, once with one that has not.
	for _, host := range []func() *Host{func() *Host { return h }, func() *Host { return freshHost(t) }} {
		failed := 0
		for n := uint64(0); ; n++ {
			name, h := newName(), host()
			if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: n, Max: old.Max}); err != nil {
				t.Fatal(err)
			}
			leaf, err := h.NewLeaf(name, everything)
			if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &old); err != nil {
				t.Fatal(err)
			}
			if err == nil {
				if (leaf.Dir() == nil) != (h.Mode() == "legacy") {
					t.Errorf("with %d descriptors: mode %s, Dir %v", n, h.Mode(), leaf.Dir())
				}
				remove1(t, leaf)
				break
			}
			failed++
			var u *UnsupportedError
			if !errors.Is(err, unix.EMFILE) || errors.As(err, &u) {
				t.Errorf("with %d descriptors: %v", n, err)
			}
			if left := leftGroups(name); left != nil {
				t.Fatalf("with %d descriptors: left %v", n, left)
			}
			if n > 1000 {
				t.Fatal("no number of descriptors is enough")
			}
		}
		if failed < 5 {
			t.Errorf("only %d steps could be made to fail", failed)
		}
	}
}

// freshHost is a Host that has not found anything yet.
func freshHost(t testing.TB) *Host {
	t.Helper()
	last.Lock()
	last.host = nil
	last.Unlock()
	return probe(t)
}

// E5: the caller's own cgroup has no room for another one.
func TestNoRoomForGroups(t *testing.T) {
	if !inside(t, nil) {
		return
	}
	h := need(t, Pids)
	two := needV2(t, h)
	now, ok := keyed(mustRead(t, two.dir.path+"/cgroup.stat"), "nr_descendants")
	if !ok {
		t.Fatal("no nr_descendants")
	}
	if err := two.dir.write("cgroup.max.descendants", fmt.Sprint(now)); err != nil {
		t.Fatal(err)
	}
	name := newName()
	_, err := h.NewLeaf(name, Limits{Pids: 5})
	var u *UnsupportedError
	if !errors.As(err, &u) || !errors.Is(err, unix.EAGAIN) || u.Missing[0].Fix != fixRoom {
		t.Errorf("NewLeaf: %v", err)
	}
	if left := leftGroups(name); left != nil {
		t.Errorf("left %v", left)
	}
	if err := two.dir.write("cgroup.max.descendants", "max"); err != nil {
		t.Fatal(err)
	}
	newTestLeaf(t, h, Limits{Pids: 5})
}

func mustRead(t testing.TB, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// A v1 group inherits oom_kill_disable. With it a jail at its limit would sleep
// until its wall clock ends.
func TestOOMKillingIsTurnedOn(t *testing.T) {
	if !inside(t, nil) {
		return
	}
	h := need(t, Memory)
	own := h.Support(Memory)
	if own.Hierarchy == "v2" {
		// There is no such switch; oom.group is what must be on.
		leaf := newTestLeaf(t, h, Limits{Memory: 8 << 20})
		if got := string(mustRead(t, leaf.mem.dir.path+"/memory.oom.group")); got != "1\n" {
			t.Errorf("memory.oom.group = %q", got)
		}
		return
	}
	if err := os.WriteFile(own.Dir+"/memory.oom_control", []byte("1"), 0); err != nil {
		t.Fatal(err)
	}
	leaf := newTestLeaf(t, h, Limits{Memory: 8 << 20})
	if n, _ := keyed(mustRead(t, leaf.mem.dir.path+"/memory.oom_control"), "oom_kill_disable"); n != 0 {
		t.Errorf("oom_kill_disable = %d", n)
	}
	if a := (Applied{Controller: Memory, File: "memory.oom_control (v1)"}); !slices.Contains(leaf.Applied(), a) {
		t.Errorf("Applied has no %v: %v", a, leaf.Applied())
	}
}

// A v1 group inherits notify_on_release too. With it the host's release agent
// would remove the counters when the last process ends.
func TestTheReleaseAgentIsKeptOut(t *testing.T) {
	if !inside(t, nil) {
		return
	}
	h := need(t, Memory, Pids)
	for _, c := range []Controller{Memory, Pids} {
		if s := h.Support(c); s.Hierarchy == "v1" {
			if err := os.WriteFile(s.Dir+"/notify_on_release", []byte("1"), 0); err != nil {
				t.Fatal(err)
			}
		}
	}
	leaf := newTestLeaf(t, h, Limits{Memory: 64 * mib, Pids: 5})
	parts(leaf, func(p *part) {
		data, err := os.ReadFile(p.dir.path + "/notify_on_release")
		if v := p.base.version.String(); v == "v1" && string(data) != "0\n" || v == "v2" && err == nil {
			t.Errorf("notify_on_release of %s = %q, %v", p.dir.path, data, err)
		}
	})
}

// On v1 a group may not have more bandwidth than its parent; on v2 it may ask
// for it, and has what the parent has.
func TestMoreBandwidthThanTheParentHas(t *testing.T) {
	if !inside(t, nil) {
		return
	}
	h := need(t, CPU)
	more := 2 * everything.CPUs
	if on2(h, CPU) {
		newTestLeaf(t, h, Limits{CPUs: more})
		return
	}
	_, err := h.NewLeaf(newName(), Limits{CPUs: more})
	var u *UnsupportedError
	if !errors.As(err, &u) || !errors.Is(err, unix.EINVAL) || u.Missing[0].Controller != CPU || u.Missing[0].Fix != fixValue {
		t.Errorf("NewLeaf: %v", err)
	}
	newTestLeaf(t, h, Limits{CPUs: everything.CPUs})
}

// C20: no limit on memory without one on swap.
func TestSwapIsBounded(t *testing.T) {
	h := need(t, Memory)
	leaf := newTestLeaf(t, h, Limits{Memory: 8 << 20})
	file, want := "/memory.swap.max", "0\n"
	if !on2(h, Memory) {
		file, want = "/memory.memsw.limit_in_bytes", "8388608\n"
	}
	data, err := os.ReadFile(leaf.mem.dir.path + file)
	if errors.Is(err, os.ErrNotExist) && !swapOn() {
		return // the kernel does not account for swap, and there is none
	}
	if err != nil || string(data) != want {
		t.Errorf("%s = %q, %v; want %q", file, data, err, want)
	}
}

// C20: a kernel without the file while swap is on. The files are plain ones, so
// that both versions can be tried on every host.
func TestSwapThatCannotBeBoundedIsRefused(t *testing.T) {
	for _, tt := range []struct {
		v     version
		files []string
		want  string
	}{
		{v1{}, []string{"memory.limit_in_bytes"}, "memory.memsw.limit_in_bytes"},
		{v2{}, []string{"memory.max"}, "memory.swap.max"},
	} {
		t.Run(tt.v.String(), func(t *testing.T) {
			d := plainDir(t, tt.files...)
			_, err := tt.v.limit(d, Memory, Limits{Memory: 1 << 20})
			if swapOn() != errors.Is(err, ErrSwap) {
				t.Errorf("limit: %v; swap is on: %v", err, swapOn())
			}
			s := unsupported(Memory, nil, noSwapFile(tt.want, d))
			if !errors.Is(s.Err, ErrSwap) || !strings.Contains(s.Err.Error(), tt.want) || s.Fix != fixSwap {
				t.Errorf("refusal: %v (%s)", s.Err, s.Fix)
			}
		})
	}
}

// plainDir is a directory of plain files that looks like a group.
func plainDir(t *testing.T, files ...string) dir {
	t.Helper()
	path := t.TempDir()
	for _, f := range append(files, "cgroup.procs") {
		if err := os.WriteFile(path+"/"+f, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	fd, err := openat(unix.AT_FDCWD, path, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return dir{fd, path}
}

// The descriptors, goroutines and groups of 100 leaves are gone with them, and
// the kernel's dying groups too (C21).
func TestNothingIsLeftOfALeaf(t *testing.T) {
	if !inside(t, nil) {
		return
	}
	h := need(t, controllers...)
	one := func(end func(*Leaf)) {
		leaf, err := h.NewLeaf(newName(), everything)
		if err != nil {
			t.Fatal(err)
		}
		leaf.OOM()
		cmd := inLeaf(leaf, exec.Command("/bin/true"))
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		if _, err := leaf.Stats(); err != nil {
			t.Fatal(err)
		}
		if _, err := leaf.Scope(); err != nil {
			t.Fatal(err)
		}
		if _, err := leaf.Pressure(); err != nil && !errors.Is(err, errors.ErrUnsupported) {
			t.Fatal(err)
		}
		end(leaf)
	}
	dying := func() int64 {
		if h.Mode() == "legacy" {
			return 0 // v1 does not count them
		}
		n, ok := keyed(mustRead(t, h.Support(CPUAcct).Dir+"/cgroup.stat"), "nr_dying_descendants")
		if !ok {
			t.Fatal("no nr_dying_descendants")
		}
		return n
	}
	byRemove := func(leaf *Leaf) { remove1(t, leaf) }
	byClose := func(leaf *Leaf) {
		if err := leaf.Close(); err != nil {
			t.Error(err)
		}
		if _, err := h.Collect(); err != nil {
			t.Error(err)
		}
	}
	one(byRemove) // opens what the Host keeps
	one(byClose)
	fds, routines := openFDs(t), runtime.NumGoroutine()
	for i := range 100 {
		if i%10 == 9 {
			one(byClose)
		} else {
			one(byRemove)
		}
	}
	if got := openFDs(t); !slices.Equal(got, fds) {
		t.Errorf("descriptors before %q, after %q", fds, got)
	}
	within("goroutines end", 5*time.Second, func() bool { return runtime.NumGoroutine() <= routines })
	if left := leftGroups(Prefix); left != nil {
		t.Errorf("left %v", left)
	}
	// Pages that are still charged keep the kernel's object for a while.
	within("dying groups go", 30*time.Second, func() bool { return dying() <= 5 })
}

// Every descriptor is close-on-exec: a jail must not get at cgroupfs or hold a
// dead launcher's lock.
func TestDescriptorsAreCloseOnExec(t *testing.T) {
	h := need(t, controllers...)
	leaf := newTestLeaf(t, h, everything)
	leaf.OOM()
	for _, line := range openFDs(t) {
		fd, to, _ := strings.Cut(line, " ")
		if !strings.Contains(to, leaf.Name()) && !strings.Contains(to, "eventfd") && !strings.HasPrefix(to, "/sys/fs/cgroup") {
			continue
		}
		var n int
		fmt.Sscan(fd, &n)
		if flags, err := unix.FcntlInt(uintptr(n), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
			t.Errorf("descriptor %s: flags %d, %v", line, flags, err)
		}
	}
}

// E10: one leaf, many goroutines, and its end meanwhile.
func TestALeafIsSafeForConcurrentUse(t *testing.T) {
	h := need(t, controllers...)
	for range 20 {
		leaf, err := h.NewLeaf(newName(), Limits{Memory: 64 << 20, Pids: 20, CPUs: 0.5, CPUTime: true})
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan struct{})
		calls := []func(){
			func() { leaf.Stats() }, func() { leaf.Scope() }, func() { leaf.CPUUsage() }, func() { leaf.Procs() }, func() { leaf.Pressure(); leaf.Reclaim() },
			func() { leaf.OOM() }, func() { leaf.Applied(); leaf.Tasks(); leaf.Dir() },
			func() {
				if err := leaf.Kill(); err != nil {
					t.Errorf("Kill: %v", err)
				}
			},
			func() {
				if err := leaf.Remove(context.Background()); err != nil {
					t.Errorf("Remove: %v", err)
				}
			},
		}
		for _, f := range calls {
			go func() {
				for range 20 {
					f()
				}
				done <- struct{}{}
			}()
		}
		for range calls {
			<-done
		}
		if left := leftGroups(leaf.Name()); left != nil {
			t.Errorf("left %v", left)
		}
	}
}

// After its end a leaf says so instead of using handles that are not its own.
func TestARemovedLeaf(t *testing.T) {
	// Another launcher's collector could take a closed leaf before it is looked at.
	if !inside(t, nil) {
		return
	}
	h := need(t, controllers...)
	for name, end := range map[string]func(*Leaf) error{
		"Remove": func(l *Leaf) error { return l.Remove(context.Background()) },
		"Close":  func(l *Leaf) error { return l.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			leaf, err := h.NewLeaf(newName(), everything)
			if err != nil {
				t.Fatal(err)
			}
			ds := dirs(leaf)
			for range 2 { // the second time does nothing
				if err := end(leaf); err != nil {
					t.Error(err)
				}
			}
			_, err1 := leaf.Stats()
			_, err2 := leaf.Scope()
			_, err3 := leaf.CPUUsage()
			_, err4 := leaf.Procs()
			_, err5 := leaf.Pressure()
			_, err6 := leaf.Reclaim()
			for i, err := range []error{err1, err2, err3, err4, err5, err6} {
				if !errors.Is(err, os.ErrClosed) {
					t.Errorf("call %d: %v", i, err)
				}
			}
			if leaf.OOM() != nil {
				t.Error("OOM is not nil")
			}
			for _, err := range []error{leaf.Kill(), leaf.Remove(context.Background()), leaf.Close()} {
				if err != nil {
					t.Error(err)
				}
			}
			for _, d := range ds {
				if exists(d) != (name == "Close") {
					t.Errorf("%s exists: %v", d, exists(d))
				}
				os.Remove(d)
			}
		})
	}
}
