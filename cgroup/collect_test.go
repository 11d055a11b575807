package cgroup

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

var runLimits = Limits{Memory: 256 * mib, Pids: 40}

// "launcher NAME" makes a leaf with a process in it and waits to be killed.
var _ = register("launcher", func(args []string) {
	h, err := Probe()
	if err != nil {
		fmt.Println(err)
		return
	}
	leaf, err := h.NewLeaf(args[0], runLimits)
	if err != nil {
		fmt.Println(err)
		return
	}
	cmd := inLeaf(leaf, exec.Command("/bin/sleep", "3600"))
	if err := cmd.Start(); err != nil {
		fmt.Println(err)
		return
	}
	for n := 0; n == 0; {
		if n, err = leaf.Procs(); err != nil {
			fmt.Println(err)
			return
		}
	}
	fmt.Println("running", cmd.Process.Pid)
	bufLine()
	if err := leaf.Remove(context.Background()); err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("removed")
})

func launcher(t *testing.T, name string) (p *proc, pid int) {
	t.Helper()
	p = start(t, nil, helperCmd("launcher", name))
	line := p.line(t)
	if _, err := fmt.Sscanf(line, "running %d", &pid); err != nil {
		t.Fatal(line)
	}
	return p, pid
}

// gone tells whether a process that is no child of ours has ended.
func gone(pid int) bool {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err != nil || strings.Contains(string(data), ") Z ")
}

// row 18, E1: a launcher is killed; the next one removes what it left, with the
// process that ran there, and nothing else.
func TestCollectTakesWhatADeadLauncherLeft(t *testing.T) {
	if !inside(t, nil) {
		return
	}
	h := need(t, Memory, Pids)
	dead, orphan := launcher(t, "jail-dead")
	live, kept := launcher(t, "jail-live")
	own := newTestLeaf(t, h, runLimits)
	names := []string{"jail-dead", "jail-live", own.Name()}
	if removed := collected(t, h, names...); len(removed) > 0 {
		t.Fatalf("Collect with all alive = %v", removed)
	}
	dead.cmd.Process.Kill()
	dead.wait()
	if gone(orphan) {
		t.Fatal("the process did not outlive its launcher: nothing is tested")
	}
	if removed := collected(t, h, names...); !slices.Equal(removed, names[:1]) {
		t.Errorf("Collect = %v", removed)
	}
	within("the orphan is dead", 5*time.Second, func() bool { return gone(orphan) })
	if left := leftGroups("jail-dead"); left != nil {
		t.Errorf("left %v", left)
	}
	if gone(kept) {
		t.Error("the live launcher's process is dead")
	}
	for _, d := range dirs(own) {
		if !exists(d) {
			t.Errorf("%s is gone", d)
		}
	}
	if removed := collected(t, h, names...); len(removed) > 0 {
		t.Errorf("second Collect = %v", removed)
	}
	goOn(t, live)
	live.expect(t, "removed")
}

// A leaf of which a launcher had made one part when it died, groups below it,
// a frozen process: all the same to Collect.
func TestCollectTakesHalfMadeLeaves(t *testing.T) {
	if !inside(t, nil) {
		return
	}
	h := need(t, Memory, Pids)
	var all []string
	h.mu.Lock()
	bases := slices.DeleteFunc(h.bases(), shared)
	h.mu.Unlock()
	for i, b := range bases {
		if exists(b.dir.path+"/cpuset.mems") && (b.version == v1{}) {
			// Else the groups have no CPU, and take no process.
			if err := b.dir.write("cgroup.clone_children", "1"); err != nil {
				t.Fatal(err)
			}
		}
		for _, name := range []string{"jail-half-" + strconv.Itoa(i), "jail-all"} {
			if err := unix.Mkdir(b.dir.path+"/"+name, leafMode); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.MkdirAll(b.dir.path+"/jail-all/a/b", 0o755); err != nil {
			t.Fatal(err)
		}
		all = append(all, "jail-half-"+strconv.Itoa(i))
		p := sleeper(t, nil)
		moveTo(t, p.cmd.Process.Pid, b.dir.path+"/jail-all/a/b")
		if (b.version == v2{}) {
			freeze(t, b.dir.path+"/jail-all/a")
		}
	}
	all = append(all, "jail-all")
	slices.Sort(all)
	if removed := collected(t, h, all...); !slices.Equal(removed, all) {
		t.Errorf("Collect = %v, want %v", removed, all)
	}
	if left := leftGroups(Prefix); left != nil {
		t.Errorf("left %v", left)
	}
}

// row 35: groups that somebody else made stay, with what runs in them, whatever
// they are called.
func TestCollectLeavesOthersGroupsAlone(t *testing.T) {
	if !inside(t, nil) {
		return
	}
	h := need(t, Memory, Pids)
	names := []string{"other-x", "jailed", "jail-foo", "jail-0123abc", "jail-probe-1-1", "jail-launcher"}
	h.mu.Lock()
	bases := slices.DeleteFunc(h.bases(), shared)
	h.mu.Unlock()
	var procs []*proc
	for _, b := range bases {
		for _, name := range names {
			d := b.dir.path + "/" + name
			if err := os.MkdirAll(d, 0o755); err != nil {
				t.Fatal(err)
			}
			if (b.version == v2{}) && name == "jail-foo" {
				p := sleeper(t, nil)
				moveTo(t, p.cmd.Process.Pid, d)
				procs = append(procs, p)
			}
		}
	}
	if removed := collected(t, h, names...); len(removed) > 0 {
		t.Errorf("Collect = %v", removed)
	}
	for _, p := range procs {
		if gone(p.cmd.Process.Pid) {
			t.Error("the process in jail-foo is dead")
		}
		p.cmd.Process.Kill()
		p.wait()
	}
	if len(procs) == 0 && h.Mode() != "legacy" {
		t.Error("no process was in a group: nothing is tested")
	}
	for _, b := range bases {
		for _, name := range names {
			// The inner test itself may be in the one that it stepped aside to.
			err := os.Remove(b.dir.path + "/" + name)
			if err != nil && !(name == launcherName && errors.Is(err, unix.EBUSY)) {
				t.Error(err)
			}
		}
	}
}

// What tells a leaf is there under any umask.
func TestALeafIsMarked(t *testing.T) {
	h := need(t, Memory, Pids)
	defer unix.Umask(unix.Umask(0o777))
	leaf := newTestLeaf(t, h, runLimits)
	for _, d := range dirs(leaf) {
		var st unix.Stat_t
		if err := unix.Stat(d, &st); err != nil || st.Mode&unix.S_ISVTX == 0 {
			t.Errorf("mode of %s is %o, %v", d, st.Mode, err)
		}
	}
}

// The lock is the leaf's: a process that inherits what a jail is started with
// does not hold it.
func TestTheLockDiesWithTheLauncher(t *testing.T) {
	if !inside(t, nil) {
		return
	}
	h := need(t, Memory, Pids)
	leaf := newTestLeaf(t, h, runLimits)
	for _, d := range dirs(leaf) {
		fd, err := unix.Open(d, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		if locked, err := (dir{fd, d}).lock(); locked || err != nil {
			t.Errorf("lock of %s while its maker lives: %v, %v", d, locked, err)
		}
		unix.Close(fd)
	}
	heir := helperCmd("sleep")
	heir.ExtraFiles = append(leaf.Tasks(), leaf.Dir())
	start(t, nil, heir).expect(t, "ready")
	if err := leaf.Close(); err != nil {
		t.Fatal(err)
	}
	if removed := collected(t, h, leaf.Name()); !slices.Equal(removed, []string{leaf.Name()}) {
		t.Errorf("Collect = %v", removed)
	}
}

// "churn N" makes and removes leaves and checks that nobody else touches them.
var _ = register("churn", func(args []string) {
	n, _ := strconv.Atoi(args[0])
	h, err := Probe()
	if err != nil {
		fmt.Println(err)
		return
	}
	for i := range n {
		leaf, err := h.NewLeaf(fmt.Sprintf("jail-churn-%d-%d", os.Getpid(), i), runLimits)
		if err != nil {
			fmt.Println("make:", err)
			return
		}
		if i%8 == 0 {
			// A leaf that a collector had killed would kill this.
			if out, err := inLeaf(leaf, exec.Command("/bin/true")).CombinedOutput(); err != nil {
				fmt.Println("run:", err, string(out))
				return
			}
		}
		for _, d := range dirs(leaf) {
			if !exists(d) {
				fmt.Println("taken away:", d)
				return
			}
		}
		if _, err := leaf.Stats(); err != nil {
			fmt.Println("stats:", err)
			return
		}
		if err := leaf.Remove(context.Background()); err != nil {
			fmt.Println("remove:", err)
			return
		}
	}
	fmt.Println("churned")
	bufLine()
})

// "collector" collects until its standard input ends.
var _ = register("collector", func([]string) {
	h, err := Probe()
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("ready")
	eof := make(chan struct{})
	go func() { io.Copy(io.Discard, os.Stdin); close(eof) }()
	var all []string
	for {
		removed, err := h.Collect()
		if err != nil {
			fmt.Println(err)
			return
		}
		all = append(all, removed...)
		select {
		case <-eof:
			slices.Sort(all)
			fmt.Println("collected", strings.Join(slices.Compact(all), " "))
			return
		default:
		}
	}
})

// E13, row 35: two launchers and two collectors at the same time. No live leaf
// is touched, no dead one stays.
func TestLaunchersAndCollectorsRace(t *testing.T) {
	if !inside(t, nil) {
		return
	}
	need(t, Memory, Pids)
	collectors := []*proc{start(t, nil, helperCmd("collector")), start(t, nil, helperCmd("collector"))}
	for _, p := range collectors {
		p.expect(t, "ready")
	}
	churners := []*proc{start(t, nil, helperCmd("churn", "200")), start(t, nil, helperCmd("churn", "200"))}
	for _, p := range churners {
		p.expect(t, "churned")
	}
	_, orphan := launcherAndKill(t, "jail-racing")
	within("somebody collects it", 10*time.Second, func() bool { return len(leftGroups("jail-racing")) == 0 && gone(orphan) })
	for _, p := range collectors {
		p.in.Close()
		if line := p.line(t); !strings.HasPrefix(line, "collected") {
			t.Error(line)
		}
		p.wait()
	}
	if left := leftGroups(Prefix); left != nil {
		t.Errorf("left %v", left)
	}
}

func launcherAndKill(t *testing.T, name string) (*proc, int) {
	t.Helper()
	p, pid := launcher(t, name)
	p.cmd.Process.Kill()
	p.wait()
	return p, pid
}

// E1: a launcher is killed at whatever point it has reached.
func TestALauncherKilledAtAnyPoint(t *testing.T) {
	if !inside(t, nil) {
		return
	}
	h := need(t, Memory, Pids)
	left := 0
	for range 25 {
		p := start(t, nil, helperCmd("churn", "1000000"))
		within("it is at work", 10*time.Second, func() bool { return len(leftGroups("jail-churn-"+strconv.Itoa(p.cmd.Process.Pid))) > 0 })
		time.Sleep(rand.N(3 * time.Millisecond))
		p.cmd.Process.Kill()
		p.wait()
		// A child that it had forked and that has not come to its exec yet
		// has the lock for that long.
		within("all is collected", 5*time.Second, func() bool {
			removed, err := h.Collect()
			if err != nil {
				t.Error(err)
			}
			left += len(removed)
			return leftGroups(Prefix) == nil
		})
	}
	if left == 0 {
		t.Error("no kill left anything: nothing is tested")
	}
}

// A collector that is in the middle of taking a leaf whose maker has not locked
// it yet makes NewLeaf wait or make it again, not fail.
func TestANewLeafWithstandsACollector(t *testing.T) {
	if !inside(t, nil) {
		return
	}
	h := need(t, Pids)
	base := h.bases()[0]
	stop, done := make(chan struct{}), make(chan int)
	name := newName()
	go func() { // takes the lock as often as it can, and removes like a collector
		n := 0
		for {
			select {
			case <-stop:
				done <- n
				return
			default:
			}
			d, err := base.dir.sub(name)
			if err != nil {
				continue
			}
			if locked, _ := d.lock(); locked && d.exists() {
				n++
				if n%2 == 0 {
					time.Sleep(200 * time.Microsecond)
				}
				rmdir(base.dir.fd, name)
			}
			d.close()
		}
	}()
	for range 300 {
		leaf, err := h.NewLeaf(name, Limits{Pids: 5})
		if errors.Is(err, ErrExist) {
			continue // not this leaf: the part of another hierarchy is held
		}
		if err != nil {
			t.Error(err)
			break
		}
		for _, d := range dirs(leaf) {
			if !exists(d) {
				t.Errorf("%s is gone", d)
			}
		}
		remove1(t, leaf)
	}
	close(stop)
	t.Logf("taken %d times before it was locked", <-done)
}

// Somebody who holds the lock for ever does not make NewLeaf hang.
func TestALockThatIsNeverFreed(t *testing.T) {
	if !inside(t, nil) {
		return
	}
	h := need(t, Pids)
	base := h.bases()[0]
	name := newName()
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for held := false; ; {
			select {
			case <-stop:
				return
			default:
			}
			if held {
				time.Sleep(time.Millisecond)
				continue
			}
			if d, err := base.dir.sub(name); err == nil {
				held, _ = d.lock()
				defer d.close()
			}
		}
	}()
	for range 200 { // until the other is the quicker one
		begin := time.Now()
		leaf, err := h.NewLeaf(name, Limits{Pids: 5})
		if err == nil {
			remove1(t, leaf)
			continue
		}
		if took := time.Since(begin); took > 10*time.Second || !strings.Contains(err.Error(), "another process holds it") {
			t.Errorf("after %v: %v", took, err)
		}
		break
	}
	close(stop)
	<-done
	if left := leftGroups(name); left != nil {
		t.Errorf("left %v", left)
	}
}
