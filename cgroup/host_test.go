package cgroup

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path"
	"runtime"
	"strings"
	"syscall"
	"testing"

	cgroups "github.com/containerd/cgroups/v3"
	"golang.org/x/sys/unix"
)

// Support says where, and leaves nothing behind.
func TestSupportOfThisHost(t *testing.T) {
	h := need(t, controllers...)
	for _, c := range controllers {
		s := h.Support(c)
		if s.Controller != c || s.Fix != "" || s.Hierarchy != "v1" && s.Hierarchy != "v2" {
			t.Errorf("%+v", s)
		}
		var st unix.Statfs_t
		if err := unix.Statfs(s.Dir, &st); err != nil {
			t.Fatal(err)
		}
		if want := map[string]int64{"v1": unix.CGROUP_SUPER_MAGIC, "v2": unix.CGROUP2_SUPER_MAGIC}[s.Hierarchy]; st.Type != want {
			t.Errorf("%+v is not of that version: %x", s, st.Type)
		}
		if again := h.Support(c); again != s {
			t.Errorf("second time %+v, first %+v", again, s)
		}
	}
	if left := leftGroups(fmt.Sprintf("jail-probe-%d-", os.Getpid())); left != nil { // others probe, too
		t.Errorf("left %v", left)
	}
	if s := h.Support("hugetlb"); s.Err == nil || s.Fix == "" || s.Controller != "hugetlb" {
		t.Errorf("a controller this package does not know: %+v", s)
	}
	mode := map[cgroups.CGMode]string{cgroups.Unified: "unified", cgroups.Hybrid: "hybrid", cgroups.Legacy: "legacy"}[cgroups.Mode()]
	if h.Mode() != mode {
		t.Errorf("Mode = %q, want %q", h.Mode(), mode)
	}
	if again := probe(t); again != h && !strings.Contains(string(mustRead(t, "/proc/self/cgroup")), launcherName) {
		t.Error("Probe made a second Host although nothing has changed")
	}
}

// The table has a row for each controller, with what the kernel itself says of
// where it is.
func TestTableOfThisHost(t *testing.T) {
	h := need(t, controllers...)
	v1 := map[string]bool{"cpuacct": h.Support(CPUAcct).Hierarchy == "v1"}
	for line := range strings.Lines(string(mustRead(t, "/proc/self/cgroup"))) {
		for name := range strings.SplitSeq(strings.Split(line, ":")[1], ",") {
			v1[name] = v1[name] || name != "cpuacct"
		}
	}
	var names []string
	for _, s := range h.Table() {
		names = append(names, string(s.Controller))
		want := Delegated
		if v1[s.Controller.legacy()] {
			want = Legacy
		}
		if s.Place != want || s != h.Support(s.Controller) {
			t.Errorf("%+v, want it %s", s, want)
		}
	}
	if got := strings.Join(names, " "); got != "memory pids cpu cpuset io cpuacct" {
		t.Errorf("order: %s", got)
	}
}

// A controller that v2 has and does not hand on, one that no kernel has, and
// none that is to be seen. The Host is this one's with less to be seen.
func TestPlacesOfWhatCannotBeUsed(t *testing.T) {
	h := need(t, controllers...)
	two := needV2(t, h)
	part := func(keep func(m mount) bool) *Host {
		p := &Host{v2own: h.v2own, v1own: map[string]string{}, opened: map[string]*hierarchy{}, placed: map[Controller]*hierarchy{}, proven: map[Controller]bool{}}
		for _, m := range h.mounts {
			if keep(m) {
				p.mounts = append(p.mounts, m)
			}
		}
		return p
	}
	v2alone := part(func(m mount) bool { return m.version == v2{} })
	for _, s := range v2alone.Table() {
		want := NotDelegated
		if ok, err := has(two.dir, "cgroup.controllers", string(s.Controller)); err != nil {
			t.Fatal(err)
		} else if ok || s.Controller == CPUAcct {
			want = Delegated
		}
		if s.Place != want || (s.Err == nil) != (want == Delegated) {
			t.Errorf("v2 alone: %+v, want it %s", s, want)
		}
	}
	for _, s := range part(func(mount) bool { return false }).Table() {
		if s.Place != Absent || s.Err == nil || s.Fix != fixMount {
			t.Errorf("no mount: %+v", s)
		}
	}
	for _, h := range []*Host{h, v2alone} {
		if s := h.Support("perf_event"); s.Place != Absent || s.Err == nil {
			t.Errorf("one that this package does not know: %+v", s)
		}
	}
}

// refusals checks that everything is refused, each with a reason that has one
// of the words, a fix, and nothing left.
func refusals(t *testing.T, cs []Controller, reason, fix string) {
	t.Helper()
	h := probe(t)
	for _, c := range cs {
		s := h.Support(c)
		if s.Err == nil || !strings.Contains(s.Err.Error(), reason) || s.Fix != fix {
			t.Errorf("Support(%s) = %v (%s)\nwant %q (%s)", c, s.Err, s.Fix, reason, fix)
		}
	}
	name := newName()
	l := everything
	if l.IO == nil {
		l.IO = &IOLimits{{Device: "8:0", ReadBytes: 1}} // it comes to nothing anyway
	}
	leaf, err := h.NewLeaf(name, l)
	var u *UnsupportedError
	if leaf != nil || !errors.As(err, &u) {
		t.Fatalf("NewLeaf = %v, %v", leaf, err)
	}
	for i, c := range cs { // J1: all of them at once
		if len(u.Missing) != len(cs) || u.Missing[i].Controller != c || u.Missing[i].Fix != fix || !strings.Contains(err.Error(), string(c)) {
			t.Errorf("NewLeaf: %#v", u.Missing)
			break
		}
	}
	if left := leftGroups(Prefix); left != nil {
		t.Errorf("left %v", left)
	}
	if removed := collected(t, h, name); len(removed) > 0 {
		t.Errorf("Collect = %v", removed)
	}
}

// mountNS gives the inner test a mount namespace of its own.
func mountNS(_ *Leaf, cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS}
}

// E5: no cgroup file system at all.
func TestRefusedWithoutCgroups(t *testing.T) {
	if !inside(t, mountNS) {
		return
	}
	hide(t, "/sys/fs/cgroup")
	refusals(t, controllers, "open the launcher's cgroup /sys/fs/cgroup", fixMount)
	h := probe(t)
	if h.Mode() != "none" {
		t.Errorf("Mode = %q", h.Mode())
	}
	// Not even a group without limits.
	_, err := h.NewLeaf(newName(), Limits{})
	var u *UnsupportedError
	if !errors.As(err, &u) || u.Missing[0].Controller != "" || u.Missing[0].Fix != fixMount {
		t.Errorf("NewLeaf: %v", err)
	}
}

// E5: all unmounted, as in a container that shows none.
func TestRefusedWithoutCgroupMounts(t *testing.T) {
	if !inside(t, mountNS) {
		return
	}
	mustMount(t, "", "/", "", unix.MS_PRIVATE|unix.MS_REC, "")
	if err := unix.Unmount("/sys/fs/cgroup", unix.MNT_DETACH); err != nil { // of this namespace alone
		t.Fatal(err)
	}
	refusals(t, controllers, "is not mounted", fixMount)
}

// The table of mounts is kept, and read again when the kernel says that it has
// changed, or for a thread that lives in another namespace.
func TestProbeSeesMountsChange(t *testing.T) {
	if !inside(t, mountNS) {
		return
	}
	mustMount(t, "", "/", "", unix.MS_PRIVATE|unix.MS_REC, "")
	h := probe(t)
	if len(h.mounts) == 0 {
		t.Fatal("no cgroup mounts")
	}
	dir := t.TempDir()
	mustMount(t, "elsewhere", dir, "tmpfs", 0, "")
	if probe(t) != h {
		t.Error("a mount elsewhere made another Host")
	}
	for i := range 3 {
		mustMount(t, "cover", h.mounts[0].point, "tmpfs", 0, "")
		if probe(t) == h {
			t.Errorf("round %d: a hierarchy was covered, and the Host is the same", i)
		}
		if err := unix.Unmount(h.mounts[0].point, 0); err != nil {
			t.Fatal(err)
		}
		h = probe(t)
	}
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		t.Fatal(err)
	}
	for _, m := range h.mounts {
		if err := unix.Unmount(m.point, unix.MNT_DETACH); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(probe(t).mounts); n != 0 {
		t.Errorf("%d cgroup mounts in a namespace without any", n)
	}
	if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
		t.Fatal(err)
	}
}

// E5: read-only, as in a container.
func TestRefusedReadOnly(t *testing.T) {
	if !inside(t, mountNS) {
		return
	}
	h := probe(t)
	mustMount(t, "", "/", "", unix.MS_PRIVATE|unix.MS_REC, "")
	for _, m := range h.mounts {
		// This mount alone: without MS_BIND the hierarchy itself would be read-only.
		mustMount(t, "", m.point, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, "")
	}
	refusals(t, controllers, "read-only file system", fixWritable)
	if h := probe(t); h.Mode() == "none" {
		t.Error("Mode is none although the groups can be seen")
	}
}

const user = 65534

// asUser makes cmd run without root's rights.
func asUser(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	// The binary is where only root may look; a copy is not.
	data, err := os.ReadFile(cmd.Path)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.CreateTemp("/tmp", "cgroup-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Remove(f.Name()) })
	_, err = f.Write(data)
	if err = errors.Join(err, f.Chmod(0o755), f.Close()); err != nil {
		t.Fatal(err)
	}
	cmd.Path, cmd.Args[0], cmd.Dir = f.Name(), f.Name(), "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: user, Gid: user}}
}

// E5: an ordinary user whose cgroup nobody delegated.
func TestRefusedToAUser(t *testing.T) {
	if !inside(t, func(_ *Leaf, cmd *exec.Cmd) { asUser(t, cmd) }) {
		return
	}
	if os.Geteuid() == 0 {
		t.Fatal("is root")
	}
	refusals(t, controllers, "permission denied", fixPermit)
}

// E5: a user to whom the cgroup was delegated needs nothing else.
func TestADelegatedCgroup(t *testing.T) {
	if !inside(t, func(parent *Leaf, cmd *exec.Cmd) {
		for _, p := range parent.parts {
			for _, f := range []string{"", "/cgroup.procs", "/tasks", "/cgroup.subtree_control"} {
				if err := os.Chown(p.dir.path+f, user, user); err != nil && !errors.Is(err, os.ErrNotExist) {
					t.Fatal(err)
				}
			}
		}
		// All threads: for cpuset the kernel wants the right to schedule each
		// process below, and a thread of root's would be out of reach.
		asUser(t, cmd)
	}) {
		return
	}
	if os.Geteuid() == 0 {
		t.Fatal("is root")
	}
	h := probe(t)
	for _, c := range controllers {
		if s := h.Support(c); s.Err != nil {
			t.Errorf("%s: %v (%s)", c, s.Err, s.Fix)
		}
	}
	leaf, err := h.NewLeaf(newName(), everything)
	if err != nil {
		t.Fatal(err)
	}
	if err := leaf.Kill(); err != nil {
		t.Error(err)
	}
	if _, err := leaf.Stats(); err != nil {
		t.Error(err)
	}
	remove1(t, leaf)
}

// E5, row 32: one controller is missing; the others are not affected.
func TestRefusedForOneController(t *testing.T) {
	if !inside(t, mountNS) {
		return
	}
	h := need(t, controllers...)
	if on2(h, Memory) {
		// One hierarchy has them all. A group to which its parent does not hand
		// on memory is the same case.
		own := h.Support(Pids).Dir
		if err := os.WriteFile(own+"/cgroup.subtree_control", []byte("-memory"), 0); err != nil {
			t.Fatal(err)
		}
		child := own + "/jail-child"
		if err := os.Mkdir(child, 0o755); err != nil {
			t.Fatal(err)
		}
		moveTo(t, os.Getpid(), child)
		s := probe(t).Support(Memory)
		if s.Err == nil || s.Err.Error() != "memory is not in cgroup.controllers of "+child || s.Fix != fixDelegate || s.Hierarchy != "v2" || s.Dir != child || s.Place != NotDelegated {
			t.Errorf("%+v", s)
		}
	} else {
		point := h.Support(Memory).Dir
		for _, m := range h.mounts {
			if strings.HasPrefix(point, m.point+"/") {
				hide(t, m.point)
			}
		}
		s := probe(t).Support(Memory)
		if s.Err == nil || !strings.Contains(s.Err.Error(), point) || s.Fix != fixMount || s.Place != Legacy {
			t.Errorf("%+v", s)
		}
	}
	h = probe(t)
	name := newName()
	_, err := h.NewLeaf(name, Limits{Memory: mib, Pids: 5})
	var u *UnsupportedError
	if !errors.As(err, &u) || len(u.Missing) != 1 || u.Missing[0].Controller != Memory {
		t.Errorf("NewLeaf: %v", err)
	}
	if left := leftGroups(name); left != nil {
		t.Errorf("left %v", left)
	}
	leaf := newTestLeaf(t, h, Limits{Pids: 5})
	if len(leaf.Applied()) != 1 {
		t.Errorf("%v", leaf.Applied())
	}
}

// The rule of cgroup v2 that a group with limited children holds no processes.
// The inner test is alone in its cgroup: it has to step aside, once.
func TestSteppingAside(t *testing.T) {
	if !inside(t, nil) {
		return
	}
	before := string(mustRead(t, "/proc/self/cgroup"))
	h := need(t, controllers...)
	after := string(mustRead(t, "/proc/self/cgroup"))
	if !on2(h, Memory) {
		// v1 has no such rule, and nobody is moved.
		if before != after {
			t.Errorf("moved from %s to %s", before, after)
		}
		return
	}
	own, _ := strings.CutPrefix(strings.TrimSpace(before), "0::")
	if got := strings.TrimSpace(after); got != "0::"+own+"/"+launcherName {
		t.Errorf("now in %s, was in %s", got, own)
	}
	dir := h.Support(Memory).Dir
	if !strings.HasSuffix(dir, own) {
		t.Errorf("leaves are made in %s, the cgroup was %s", dir, own)
	}
	// From there, this process and its children work on below the same group.
	if got := probe(t).Support(Memory); got.Dir != dir || got.Err != nil {
		t.Errorf("%+v", got)
	}
	p, _ := launcher(t, "jail-by-child")
	if !exists(dir + "/jail-by-child") {
		t.Errorf("a child's leaf is not in %s", dir)
	}
	goOn(t, p)
	p.expect(t, "removed")
	if removed := collected(t, h, launcherName); len(removed) > 0 {
		t.Errorf("Collect = %v", removed)
	}
	if !exists(dir + "/" + launcherName) {
		t.Error("the launcher's own group was collected")
	}
}

// The same rule, with another process in the cgroup: nobody else is moved.
func TestRefusedWhenNotAlone(t *testing.T) {
	if !inside(t, nil) {
		return
	}
	before := string(mustRead(t, "/proc/self/cgroup"))
	other := sleeper(t, nil)
	h := probe(t)
	s := h.Support(Memory)
	if s.Hierarchy == "v1" {
		if s.Err != nil {
			t.Errorf("v1 has no such rule: %+v", s)
		}
	} else {
		if s.Err == nil || s.Err.Error() != s.Dir+" holds 2 processes itself, so that its children cannot be limited" || s.Fix != fixAlone {
			t.Errorf("%+v", s)
		}
		// Nor a limit that the kernel itself would take: its leaf could not be entered.
		for _, l := range []Limits{{Pids: 4}, {CPUs: 1}, {Memory: mib}} {
			if _, err := h.NewLeaf(newName(), l); err == nil || !strings.Contains(err.Error(), "holds 2 processes") {
				t.Errorf("NewLeaf with %+v: %v", l, err)
			}
		}
		if left := leftGroups(Prefix); left != nil {
			t.Errorf("left %v", left)
		}
		// CPU time needs no controller.
		if s := h.Support(CPUAcct); s.Err != nil {
			t.Errorf("%+v", s)
		}
		// It is not remembered: when the other is gone, it works.
		other.cmd.Process.Kill()
		other.wait()
		if s := h.Support(Memory); s.Err != nil {
			t.Errorf("alone: %+v", s)
		}
		return
	}
	if after := string(mustRead(t, "/proc/self/cgroup")); before != after {
		t.Errorf("moved from %s to %s", before, after)
	}
}

// A process that steps aside in vain goes back, and nothing is left.
func TestSteppingAsideIsUndone(t *testing.T) {
	if !inside(t, nil) {
		return
	}
	before := string(mustRead(t, "/proc/self/cgroup"))
	two := needV2(t, probe(t))
	called := 0
	err := v2{}.stepAside(two.dir, func() error {
		called++
		if now := string(mustRead(t, "/proc/self/cgroup")); !strings.Contains(now, launcherName) {
			t.Errorf("not aside: %s", now)
		}
		return unix.EBUSY
	})
	if called != 1 || !errors.Is(err, unix.EBUSY) {
		t.Errorf("called %d times, %v", called, err)
	}
	if after := string(mustRead(t, "/proc/self/cgroup")); before != after {
		t.Errorf("now in %s, was in %s", after, before)
	}
	if exists(two.dir.path + "/" + launcherName) {
		t.Error("the group is left")
	}
}

// Containers: in a cgroup namespace, mounts from outside cannot be related to
// the own cgroup, and mounts made inside show it as the root.
func TestCgroupNamespaces(t *testing.T) {
	if !inside(t, nil) {
		return
	}
	outer := need(t, controllers...)
	where := map[Controller]Support{}
	for _, c := range controllers {
		where[c] = outer.Support(c)
	}
	runtime.LockOSThread() // the namespaces are this thread's alone, and it ends with the test
	if err := unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_NEWCGROUP | unix.CLONE_FS); err != nil {
		t.Fatal(err)
	}
	mustMount(t, "", "/", "", unix.MS_PRIVATE|unix.MS_REC, "")
	h := probe(t)
	for _, c := range controllers {
		if c == CPUAcct && where[Memory].Hierarchy == "v1" {
			continue // in its v1 hierarchy this process is in the root, which can be related
		}
		if s := h.Support(c); s.Err == nil || !strings.Contains(s.Err.Error(), " shows /..") || s.Fix != fixMount {
			t.Errorf("mounts from outside: %+v", s)
		}
	}
	root := t.TempDir()
	mustMount(t, "tmpfs", root, "tmpfs", 0, "")
	t.Cleanup(func() {
		if err := unix.Unmount(root, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	for _, m := range outer.mounts {
		point := root + "/" + path.Base(m.point) + "with space"
		if err := os.Mkdir(point, 0o755); err != nil {
			t.Fatal(err)
		}
		if (m.version == v2{}) {
			mustMount(t, "none", point, "cgroup2", 0, "")
			continue
		}
		for _, c := range controllers {
			if where[c].Hierarchy == "v1" && strings.HasPrefix(where[c].Dir+"/", m.point+"/") {
				mustMount(t, "none", point, "cgroup", 0, strings.Join(m.options[1:], ","))
				break
			}
		}
	}
	h = probe(t)
	for _, c := range controllers {
		s := h.Support(c)
		if s.Err != nil || !strings.HasPrefix(s.Dir, root) || s.Hierarchy != where[c].Hierarchy {
			t.Errorf("mounts from inside: %+v", s)
		}
	}
	leaf := newTestLeaf(t, h, Limits{Memory: 64 * mib, Pids: 5})
	// It is the same group that the outer view has below the same cgroup.
	at := where[Pids].Dir
	if where[Pids].Hierarchy == "v2" {
		at += "/" + launcherName // it had stepped aside: that was its own cgroup when the namespace was made
	}
	if at += "/" + leaf.Name(); !sameGroup(t, leaf, at) {
		t.Errorf("%s is not %v", at, dirs(leaf))
	}
	remove1(t, leaf)
}

// sameGroup looks at path in the mount namespace of the main thread.
func sameGroup(t *testing.T, leaf *Leaf, path string) bool {
	t.Helper()
	var st, own unix.Stat_t
	if err := unix.Stat("/proc/self/root"+path, &st); err != nil {
		t.Error(err)
		return false
	}
	for _, p := range leaf.parts {
		if err := unix.Fstat(p.dir.fd, &own); err != nil {
			t.Fatal(err)
		}
		if own.Dev == st.Dev && own.Ino == st.Ino {
			return true
		}
	}
	return false
}
