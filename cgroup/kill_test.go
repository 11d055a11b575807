package cgroup

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// "orphans N" leaves N processes of sessions of their own, which ignore SIGTERM,
// and whose parent is gone.
var _ = register("orphans", func(args []string) {
	n, _ := strconv.Atoi(args[0])
	self, _ := os.Executable()
	for range n {
		middle := exec.Command(self, "helper", "orphan's parent")
		middle.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		if out, err := middle.CombinedOutput(); err != nil {
			fmt.Println(err, string(out))
			return
		}
	}
	fmt.Println("ready")
})

var _ = register("orphan's parent", func([]string) {
	used.Store("orphan's parent", true)
	cmd := exec.Command("/bin/sh", "-c", `trap "" TERM HUP INT; while :; do sleep 1000; done`)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
})

func init() { used.Store("orphan's parent", true) } // "orphans" uses it

// population waits until there are n processes in leaf.
func population(t *testing.T, leaf *Leaf, n int) {
	t.Helper()
	var got int
	var err error
	within(fmt.Sprintf("%d processes", n), 10*time.Second, func() bool { got, err = leaf.Procs(); return err != nil || got == n })
	if err != nil {
		t.Fatal(err)
	}
}

func parts(leaf *Leaf, f func(p *part)) {
	for _, p := range leaf.parts {
		f(p)
	}
}

// subgroups makes groups below the leaf's, in each hierarchy, depth deep.
func subgroups(t *testing.T, leaf *Leaf, depth int) (deepest []string) {
	t.Helper()
	parts(leaf, func(p *part) {
		at := p.dir.path + strings.Repeat("/x", depth)
		if err := os.MkdirAll(at, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.MkdirAll(at+"/side/branch", 0o755); err != nil {
			t.Fatal(err)
		}
		deepest = append(deepest, at)
	})
	return deepest
}

// moveTo moves a process to groups.
func moveTo(t *testing.T, pid int, groups ...string) {
	t.Helper()
	for _, g := range groups {
		if err := os.WriteFile(g+"/cgroup.procs", []byte(strconv.Itoa(pid)), 0); err != nil {
			t.Fatal(err)
		}
	}
}

// J4, C10, C16, row 30: whatever the processes did, one Kill ends them all and
// Remove takes the groups.
func TestKillEndsEverything(t *testing.T) {
	h := need(t, controllers...)
	for name, prepare := range map[string]func(t *testing.T, leaf *Leaf) int{
		"nothing in it": func(*testing.T, *Leaf) int { return 0 },
		"one":           func(t *testing.T, leaf *Leaf) int { sleeper(t, leaf); return 1 },
		"orphans of other sessions": func(t *testing.T, leaf *Leaf) int {
			p := start(t, leaf, helperCmd("orphans", "5"))
			p.expect(t, "ready")
			p.wait()
			return 10 // each shell and its sleep
		},
		"stopped": func(t *testing.T, leaf *Leaf) int {
			p := sleeper(t, leaf)
			if err := p.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			return 1
		},
		"in groups below": func(t *testing.T, leaf *Leaf) int {
			p := sleeper(t, leaf)
			sleeper(t, leaf)
			moveTo(t, p.cmd.Process.Pid, subgroups(t, leaf, 5)...)
			return 2
		},
		"frozen": func(t *testing.T, leaf *Leaf) int {
			needV2(t, h)
			sleeper(t, leaf)
			freeze(t, leaf.Dir().Name())
			return 1
		},
		"frozen in a group below": func(t *testing.T, leaf *Leaf) int {
			needV2(t, h)
			p := sleeper(t, leaf)
			at := subgroups(t, leaf, 2)
			moveTo(t, p.cmd.Process.Pid, at...)
			freeze(t, at[0])
			return 1
		},
		"many": func(t *testing.T, leaf *Leaf) int {
			p := start(t, leaf, helperCmd("forks", "150"))
			p.expect(t, "ready")
			goOn(t, p)
			p.expect(t, "started 150 refused 0")
			return 151
		},
	} {
		t.Run(name, func(t *testing.T) {
			leaf := newTestLeaf(t, h, Limits{Memory: 512 * mib, Pids: 400, CPUs: 4, CPUTime: true})
			if (leaf.Dir() == nil) != (h.Mode() == "legacy") {
				t.Fatalf("mode %s, Dir is nil: %v", h.Mode(), leaf.Dir() == nil)
			}
			population(t, leaf, prepare(t, leaf))
			for range 2 {
				if err := leaf.Kill(); err != nil {
					t.Fatal(err)
				}
			}
			population(t, leaf, 0)
			if err := leaf.Remove(context.Background()); err != nil {
				t.Fatal(err)
			}
			if left := leftGroups(leaf.Name()); left != nil {
				t.Errorf("left %v", left)
			}
		})
		t.Run(name+", by Remove alone", func(t *testing.T) {
			leaf := newTestLeaf(t, h, Limits{Memory: 512 * mib, Pids: 400, CPUs: 4, CPUTime: true})
			population(t, leaf, prepare(t, leaf))
			if err := leaf.Remove(context.Background()); err != nil {
				t.Fatal(err)
			}
			if left := leftGroups(leaf.Name()); left != nil {
				t.Errorf("left %v", left)
			}
		})
	}
}

func freeze(t *testing.T, group string) {
	t.Helper()
	if err := os.WriteFile(group+"/cgroup.freeze", []byte("1"), 0); err != nil {
		t.Fatal(err)
	}
	within("frozen", 5*time.Second, func() bool {
		n, _ := keyed(mustRead(t, group+"/cgroup.events"), "frozen")
		return n == 1
	})
}

// A process that got into the v1 parts alone is found by Remove.
func TestRemoveKillsInEveryPart(t *testing.T) {
	h := need(t, Memory, Pids)
	leaf := newTestLeaf(t, h, Limits{Memory: 256 * mib, Pids: 20})
	for _, p := range leaf.parts {
		lone := sleeper(t, nil)
		moveTo(t, lone.cmd.Process.Pid, p.dir.path)
	}
	remove1(t, leaf)
	if left := leftGroups(leaf.Name()); left != nil {
		t.Errorf("left %v", left)
	}
}

// Groups far deeper than a path can be long are removed, with few handles.
func TestRemoveGoesAsDeepAsTheGroupsDo(t *testing.T) {
	h := need(t, CPUAcct)
	leaf := newTestLeaf(t, h, Limits{CPUTime: true})
	name := strings.Repeat("d", 200)
	fd, err := unix.Dup(leaf.parts[0].dir.fd)
	if err != nil {
		t.Fatal(err)
	}
	for range 60 { // 12000 bytes
		next, err := -1, unix.Mkdirat(fd, name, 0o755)
		if err == nil {
			next, err = unix.Openat(fd, name, unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		}
		unix.Close(fd)
		if err != nil {
			t.Fatal(err)
		}
		fd = next
	}
	unix.Close(fd)
	fds := len(openFDs(t))
	remove1(t, leaf)
	if got := len(openFDs(t)); got > fds {
		t.Errorf("%d descriptors before, %d after", fds, got)
	}
	if left := leftGroups(leaf.Name()); left != nil {
		t.Errorf("left %.200q", left)
	}
}

// E12: a pid that was used anew in between is not signalled: it is not in the
// group. What is in no group of the leaf is left alone.
func TestOnlyMembersAreSignalled(t *testing.T) {
	h := need(t, Pids)
	leaf := newTestLeaf(t, h, Limits{Pids: 20})
	outside, inside := sleeper(t, nil), sleeper(t, leaf)
	d := leaf.parts[0].dir
	const never = 1 << 22 // beyond the greatest pid: like one that has ended
	if err := signal(d, []int{outside.cmd.Process.Pid, inside.cmd.Process.Pid, never}); err != nil {
		t.Error(err)
	}
	if sig := inside.signal(); sig != syscall.SIGKILL {
		t.Errorf("inside: %v", sig)
	}
	if err := outside.cmd.Process.Signal(syscall.Signal(0)); err != nil {
		t.Errorf("outside: %v", err)
	}
	if err := signal(d, []int{0}); err == nil || !strings.Contains(err.Error(), "another pid namespace") {
		t.Errorf("pid 0: %v", err)
	}
}

var _ = register("fork bomb", func(args []string) {
	fmt.Println("ready")
	self, _ := os.Executable()
	for {
		exec.Command(self, "helper", "fork bomb").Start()
	}
})

func hide(t *testing.T, point string) {
	t.Helper()
	mustMount(t, "", "/", "", unix.MS_PRIVATE|unix.MS_REC, "")
	mustMount(t, "tmpfs", point, "tmpfs", 0, "")
}

// hideV2 hides v2 if v1 has the controllers, and returns whether v1 is all that
// is to be seen then.
func hideV2(t *testing.T, h *Host) (legacy bool) {
	t.Helper()
	if on2(h, Memory) {
		return false
	}
	mustMount(t, "", "/", "", unix.MS_PRIVATE|unix.MS_REC, "")
	for _, m := range h.mounts {
		if (m.version == v2{}) {
			hide(t, m.point)
		}
	}
	return true
}

// C9 and E5 on a host without cgroup.kill: the limits hold, and a fork bomb is
// killed one by one. Where v2 has the controllers it cannot be hidden without
// them; there the same bomb is killed by cgroup.kill, or by pidfd as if the
// file was missing.
func TestAForkBombIsKilledOneByOne(t *testing.T) {
	if !inside(t, mountNS) {
		return
	}
	outer := need(t, Pids, Memory)
	legacy := hideV2(t, outer)
	h := need(t, Pids, Memory, CPUAcct)
	leaf := newTestLeaf(t, h, Limits{Memory: 1 << 29, Pids: 60, CPUTime: true})
	if legacy != (leaf.Dir() == nil) {
		t.Fatalf("Dir = %v", leaf.Dir())
	}
	if legacy && h.Support(CPUAcct).Hierarchy != "v1" {
		t.Errorf("%+v", h.Support(CPUAcct))
	}
	start(t, leaf, helperCmd("fork bomb")).expect(t, "ready")
	var before Stats
	within("the limit is hit", 20*time.Second, func() bool {
		var err error
		if before, err = leaf.Stats(); err != nil {
			t.Fatal(err)
		}
		return before.PidsRefused > 20
	})
	if before.CPUUser+before.CPUSystem <= 0 {
		t.Errorf("%+v", before)
	}
	if err := killOneByOne(leaf.parts, 10*time.Second); err != nil {
		t.Error(err)
	}
	if err := leaf.Kill(); err != nil {
		t.Error(err)
	}
	population(t, leaf, 0)
	after, err := leaf.Stats()
	if err != nil || after.PidsRefused < before.PidsRefused {
		t.Errorf("Stats = %+v, %v", after, err)
	}
	// What stopping the forks refused is not in the books: the number is the
	// one of the moment before.
	for range 3 {
		if err := leaf.Kill(); err != nil {
			t.Error(err)
		}
	}
	if again, err := leaf.Stats(); err != nil || again.PidsRefused != after.PidsRefused {
		t.Errorf("Stats = %+v, %v; before %+v", again, err, after)
	}
	parts(leaf, func(p *part) {
		if slices.Contains(p.controllers, Pids) && p.refused.Load() < before.PidsRefused {
			t.Errorf("forks were stopped after %d refusals", p.refused.Load())
		}
	})
}

// A leaf on a host with v1 alone and no limit can still be killed.
func TestALeafWithoutLimitsCanBeKilled(t *testing.T) {
	if !inside(t, mountNS) {
		return
	}
	legacy := hideV2(t, need(t, Pids))
	h := need(t)
	leaf := newTestLeaf(t, h, Limits{})
	if legacy && (h.Mode() != "legacy" || len(leaf.Tasks()) != 1 || leaf.Dir() != nil) {
		t.Errorf("mode %s, tasks %v, dir %v", h.Mode(), leaf.Tasks(), leaf.Dir())
	}
	p := sleeper(t, leaf)
	population(t, leaf, 1)
	if err := leaf.Kill(); err != nil {
		t.Fatal(err)
	}
	if sig := p.signal(); sig != syscall.SIGKILL {
		t.Error(sig)
	}
	if _, err := leaf.CPUUsage(); legacy && err == nil {
		t.Error("CPU time is counted without being asked for")
	}
}

// What cannot be killed is reported as left over, within a bound, and a later
// try can succeed. A process of another pid namespace is such a one for a
// launcher that has no cgroup.kill.
func TestLeftoversAreReported(t *testing.T) {
	if os.Getenv(insideVar) == t.Name() {
		leftoversInside(t)
		return
	}
	h := need(t, Pids, Memory)
	parent := newTestLeaf(t, h, everything)
	cmd := helperCmd("")
	cmd.Args = []string{cmd.Path, "-test.run", "^" + t.Name() + "$", "-test.v"}
	cmd.Env = append(os.Environ(), insideVar+"="+t.Name(), noRaceSleep)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID}
	p := start(t, parent, cmd)
	var groups []string
	for line := p.line(t); line != "waiting"; line = p.line(t) {
		if g, ok := strings.CutPrefix(line, "group "); ok {
			groups = append(groups, g)
		}
	}
	stranger := sleeper(t, nil)
	moveTo(t, stranger.cmd.Process.Pid, groups...)
	goOn(t, p)
	for line := p.line(t); line != "tried"; line = p.line(t) {
		t.Log(line)
	}
	stranger.cmd.Process.Kill()
	stranger.wait()
	goOn(t, p)
	p.in.Close()
	p.wait()
	for line := range p.lines {
		t.Log(line)
	}
	if !p.cmd.ProcessState.Success() {
		t.Errorf("inner test: %v %s", p.cmd.ProcessState, p.err.String())
	}
}

func leftoversInside(t *testing.T) {
	mustMount(t, "", "/", "", unix.MS_PRIVATE|unix.MS_REC, "")
	mustMount(t, "proc", "/proc", "proc", 0, "")
	legacy := hideV2(t, need(t, Pids, Memory))
	h := need(t, Pids, Memory)
	leaf := newTestLeaf(t, h, Limits{Memory: 1 << 28, Pids: 10})
	for _, d := range dirs(leaf) {
		fmt.Println("group", d)
	}
	fmt.Println("waiting")
	bufLine()
	ctx := context.Background()
	if legacy {
		var cancel func()
		ctx, cancel = context.WithTimeout(ctx, 100*time.Millisecond)
		defer cancel()
	}
	begin := time.Now()
	err := leaf.Remove(ctx)
	if took := time.Since(begin); took > 20*time.Second {
		t.Errorf("Remove took %v", took)
	}
	if legacy {
		// v1 does not even list the process, but the group is busy.
		if !errors.Is(err, unix.EBUSY) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Remove: %v", err)
		}
		if _, err := leaf.Stats(); err != nil {
			t.Errorf("Stats after a Remove that failed: %v", err)
		}
	} else if err != nil {
		t.Errorf("Remove: %v", err)
	}
	fmt.Println("tried")
	bufLine()
	if err := leaf.Remove(context.Background()); err != nil {
		t.Errorf("Remove: %v", err)
	}
	if left := leftGroups(leaf.Name()); left != nil {
		t.Errorf("left %v", left)
	}
	io.Copy(io.Discard, os.Stdin)
}

// E12, and the trap of the package comment: after a kill the group kills what
// comes later.
func TestAKilledLeafTakesNoOneIn(t *testing.T) {
	h := need(t, CPUAcct)
	needV2(t, h)
	leaf := newTestLeaf(t, h, Limits{})
	if !exists(filepath.Join(leaf.Dir().Name(), "cgroup.kill")) {
		t.Fatal("this host should have cgroup.kill")
	}
	if err := leaf.Kill(); err != nil {
		t.Fatal(err)
	}
	cmd := inLeaf(leaf, exec.Command("/bin/true"))
	if err := cmd.Run(); err == nil {
		t.Log("this kernel lets a later process live")
	} else if ws := cmd.ProcessState; ws == nil || ws.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Errorf("%v", err)
	}
	population(t, leaf, 0)
}
