package cgroup

import (
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// "affinity" writes the CPUs that it may use and, after it has asked for all of
// them, those that it was given.
var _ = register("affinity", func([]string) {
	var all, of unix.CPUSet
	for n := range 1024 {
		all.Set(n)
	}
	runtime.LockOSThread()
	err := unix.SchedGetaffinity(0, &of)
	fmt.Println("may use", listOf(&of), err)
	_ = unix.SchedSetaffinity(0, &all) // whether it is refused or cut down is the kernel's to say
	err = unix.SchedGetaffinity(0, &of)
	fmt.Println("got", listOf(&of), err)
})

// A leaf's processes run on its CPUs and cannot get at others.
func TestCPUSetConfines(t *testing.T) {
	h := need(t, CPUSet)
	all, err := parseCPUs(allCPUs())
	if err != nil {
		t.Fatal(err)
	}
	lists := []string{all.String()}
	for n := range maxCPU {
		if all.has(n) && len(lists) < 5 {
			lists = append(lists, strconv.Itoa(n))
		}
	}
	for _, list := range lists {
		leaf := newTestLeaf(t, h, Limits{CPUSet: list + "," + list}) // as the kernel takes it
		want := Applied{CPUSet, "cpuset.cpus (" + h.Support(CPUSet).Hierarchy + ")", 1, 1, list}
		if list == lists[0] {
			want.Wrote, want.Read = all.count(), all.count()
		}
		if got := leaf.Applied(); !slices.Equal(got, []Applied{want}) {
			t.Errorf("Applied = %v, want %v", got, want)
		}
		p := start(t, leaf, helperCmd("affinity"))
		p.expect(t, "may use "+list+" <nil>")
		p.expect(t, "got "+list+" <nil>")
		p.wait()
	}
}

// What the launcher's own cgroup may not use is refused, also where the kernel
// would give the parent's CPUs instead.
func TestCPUSetWithinTheParents(t *testing.T) {
	l := everything
	l.CPUSet, _, _ = strings.Cut(strings.ReplaceAll(l.CPUSet, "-", ","), ",") // the first
	if !insideParent(t, l, nil) {
		return
	}
	h := need(t, CPUSet)
	mine, err := strconv.Atoi(allCPUs())
	if err != nil {
		t.Fatalf("this test has the CPUs %s, and not one", allCPUs())
	}
	for _, list := range []string{fmt.Sprint(mine + 1), fmt.Sprintf("%d-%d", mine, mine+1), "8191"} {
		name := newName()
		leaf, err := h.NewLeaf(name, Limits{CPUSet: list})
		var u *UnsupportedError
		if leaf != nil || !errors.As(err, &u) || u.Missing[0].Controller != CPUSet || u.Missing[0].Fix != fixCPUs || u.Missing[0].Err == nil ||
			!strings.HasSuffix(u.Missing[0].Err.Error(), fmt.Sprintf(" to %s: %s has %d", list, u.Missing[0].Dir, mine)) {
			t.Errorf("NewLeaf with CPUs %s: %v", list, err)
		}
		if left := leftGroups(name); left != nil { // J1
			t.Errorf("left %v", left)
		}
	}
	leaf := newTestLeaf(t, h, Limits{CPUSet: fmt.Sprint(mine)})
	p := start(t, leaf, helperCmd("affinity"))
	p.expect(t, fmt.Sprintf("may use %d <nil>", mine))
}

// What each version makes of the files of a group and its parent.
func TestCPUSetOfFiles(t *testing.T) {
	for _, tt := range []struct {
		name             string
		parent, leaf     string // effective, that of the leaf after the write
		list, want, fail string
	}{
		{"some", "0-3\n", "1-2\n", "2,1", "1-2", ""},
		{"all by default", "0-3\n", "0-3\n", "", "0-3", ""},
		{"more than the parent has", "0-3\n", "0-3\n", "3-4", "", "has 0-3"},
		{"the kernel gave others", "0-3\n", "0-3\n", "1", "", "reads back as 0-3"},
		{"the kernel gave fewer", "0-3\n", "1\n", "1-2", "", "reads back as 1"},
		{"the kernel gave none", "0-3\n", "\n", "1", "", "is no list of CPUs"},
		{"the parent has none", "\n", "\n", "", "", "is no list of CPUs"},
	} {
		for _, v := range []version{v1{}, v2{}} {
			t.Run(v.String()+" "+tt.name, func(t *testing.T) {
				effective := map[string]string{"v1": "cpuset.effective_cpus", "v2": "cpuset.cpus.effective"}[v.String()]
				up := plainDir(t)
				writePlain(t, up, effective, tt.parent)
				writePlain(t, up, "cpuset.effective_mems", "0-1\n")
				if err := os.Mkdir(up.path+"/leaf", 0o700); err != nil {
					t.Fatal(err)
				}
				d, err := up.sub("leaf")
				if err != nil {
					t.Fatal(err)
				}
				defer d.close()
				writePlain(t, d, "cpuset.cpus", "")
				writePlain(t, d, "cpuset.mems", "")
				writePlain(t, d, effective, tt.leaf)
				as, err := v.limit(d, CPUSet, Limits{CPUSet: tt.list})
				if tt.fail != "" {
					if as != nil || err == nil || !strings.Contains(err.Error(), tt.fail) {
						t.Errorf("limit = %v, %v; want %q", as, err, tt.fail)
					}
					return
				}
				if err != nil || len(as) != 1 || as[0].Detail != tt.want {
					t.Errorf("limit = %v, %v", as, err)
				}
				if got := string(mustRead(t, d.path+"/cpuset.cpus")); got != tt.want {
					t.Errorf("cpuset.cpus = %q", got)
				}
				want := map[string]string{"v1": "0-1", "v2": ""}[v.String()]
				if got := string(mustRead(t, d.path+"/cpuset.mems")); got != want {
					t.Errorf("cpuset.mems = %q, want %q", got, want)
				}
			})
		}
	}
}

func TestCPULists(t *testing.T) {
	for _, tt := range []struct{ list, want, fail string }{
		{"0", "0", ""},
		{"0-1,3", "0-1,3", ""},
		{"3,1-2,0", "0-3", ""},
		{"63-64", "63-64", ""},
		{"5-5", "5", ""},
		{"8191", "8191", ""},
		{"0-8191", "0-8191", ""},
		{"8192", "", "the last there can be is 8191"},
		{"0-99999999", "", "the last there can be is 8191"},
		{"99999999999999999999", "", "is no list"},
		{"3-1", "", "runs backwards"},
		{"", "", "is no list"},
		{",", "", "is no list"},
		{"0,", "", "is no list"},
		{"-1", "", "is no list"},
		{"1-", "", "is no list"},
		{"0-1-2", "", "is no list"},
		{" 0", "", "is no list"},
		{"0\n", "", "is no list"},
		{"0-7:2/4", "", "is no list"},
		{"all", "", "is no list"},
		{strings.Repeat("0,", 3000) + "0", "", "more than 4096 bytes"},
	} {
		s, err := parseCPUs(tt.list)
		if tt.fail != "" {
			if err == nil || !strings.Contains(err.Error(), tt.fail) {
				t.Errorf("parseCPUs(%.40q): %v, want %q", tt.list, err, tt.fail)
			}
			if err := (Limits{CPUSet: tt.list}).Check(); tt.list != "" && (err == nil || len(err.Error()) > 300) {
				t.Errorf("check of %.40q: %.400v", tt.list, err)
			}
			continue
		}
		if err != nil || s.String() != tt.want {
			t.Errorf("parseCPUs(%q) = %v, %v; want %s", tt.list, s, err, tt.want)
		}
	}
}

// Two ways: what is read can be written and is read as the same, and each CPU of
// it is in the set.
func FuzzCPULists(f *testing.F) {
	f.Add("0-1,3")
	f.Add("8191,63-65,0")
	f.Fuzz(func(t *testing.T, list string) {
		s, err := parseCPUs(list)
		if err != nil {
			return
		}
		written := s.String()
		again, err := parseCPUs(written)
		if err != nil && len(written) <= maxCPUList || err == nil && *again != *s {
			t.Fatalf("%q: written as %q, read as %v, %v", list, written, again, err)
		}
		n := int64(0)
		for i := range maxCPU {
			if s.has(i) {
				n++
			}
		}
		if n == 0 || n != s.count() {
			t.Fatalf("%q: %d CPUs, counted %d", list, n, s.count())
		}
	})
}

// Memory above MemoryHigh is had at leisure, and nobody is killed. v1 has no
// such thing.
func TestMemoryHigh(t *testing.T) {
	h := need(t, Memory)
	name := newName()
	leaf, err := h.NewLeaf(name, Limits{Memory: 256 * mib, MemoryHigh: 32*mib + 1})
	if !on2(h, Memory) {
		var u *UnsupportedError
		if leaf != nil || !errors.As(err, &u) || u.Missing[0].Controller != Memory || u.Missing[0].Fix != fixHigh || !strings.Contains(err.Error(), "cgroup v1 has no such limit") {
			t.Errorf("NewLeaf: %v, %v", leaf, err)
		}
		if left := leftGroups(name); left != nil { // J1
			t.Errorf("left %v", left)
		}
		if s := h.Support(Memory); s.Err != nil {
			t.Errorf("memory cannot be used any more: %+v", s)
		}
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { remove1(t, leaf) })
	if a := (Applied{Controller: Memory, File: "memory.high (v2)", Wrote: 32*mib + 1, Read: 32 * mib}); !slices.Contains(leaf.Applied(), a) {
		t.Errorf("Applied has no %v: %v", a, leaf.Applied())
	}
	p := start(t, leaf, helperCmd("hog", strconv.Itoa(36*mib)))
	p.expect(t, "ready")
	if _, err := io.WriteString(p.in, "\n"); err != nil {
		t.Fatal(err)
	}
	within("it is slowed down", 20*time.Second, func() bool {
		ns, err := leaf.mem.dir.counts("memory.events", "high")
		if err != nil {
			t.Fatal(err)
		}
		return ns[0] > 0
	})
	if s, err := leaf.Stats(); err != nil || s.OOMKills != 0 {
		t.Errorf("Stats = %+v, %v", s, err)
	}
	// By itself, without a limit that kills.
	alone := newTestLeaf(t, h, Limits{MemoryHigh: 32 * mib})
	if got := alone.Applied(); len(got) != 1 || got[0].Read != 32*mib {
		t.Errorf("Applied = %v", got)
	}
}
