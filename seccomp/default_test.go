//go:build amd64

package seccomp

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	libseccomp "github.com/seccomp/libseccomp-golang"
	"golang.org/x/sys/unix"
)

var update = flag.Bool("update", false, "write the golden file")

const goldenFile = "testdata/default_amd64.txt"

// garbage is what a program can leave in the upper half of a register that the
// kernel reads as an int.
var garbage = []uint64{0, 1 << 32, 1 << 63, 0xffffffff << 32, 0xdeadbeef << 32}

func libVersion() string {
	major, minor, micro := libseccomp.GetLibraryVersion()
	return fmt.Sprintf("%d.%d.%d", major, minor, micro)
}

// TestDefaultProgramIsUpToDate compares the program that was made ahead with
// the profile as it is now. Another libseccomp may lay out the same meaning
// differently; the meaning is checked by the tests below, whatever the version.
func TestDefaultProgramIsUpToDate(t *testing.T) {
	f, err := Compile(Default())
	if err != nil {
		t.Fatal(err)
	}
	if libVersion() == defaultProgramBy && !slices.Equal(f.prog, defaultProgram) {
		t.Error("the program made ahead differs from Compile(Default()): run make")
	}
}

// defaultFilters are the program made ahead and a fresh one.
func defaultFilters(t *testing.T) map[string]*machine {
	ahead, err := Load("default")
	if err != nil {
		t.Fatal(err)
	}
	fresh, err := Compile(Default())
	if err != nil {
		t.Fatal(err)
	}
	return map[string]*machine{"made ahead": newMachine(ahead), "fresh": newMachine(fresh)}
}

// defaultCalls are all inputs of the golden file and, beside them, what each
// rule of the profile is about and its neighbours.
func defaultCalls() []call {
	var out []call
	add := func(nr int, args ...uint64) {
		c := call{nr: int32(nr), arch: unix.AUDIT_ARCH_X86_64}
		copy(c.args[:], args)
		out = append(out, c)
	}
	for nr := -1; nr < 1024; nr++ {
		add(nr)
		add(nr, ^uint64(0), ^uint64(0), ^uint64(0), ^uint64(0), ^uint64(0), ^uint64(0))
		add(nr, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff)
	}
	numbers := allNumbers()
	for _, r := range Default().Rules {
		if len(r.Args) == 0 {
			continue
		}
		for _, name := range r.Names {
			for _, g := range garbage {
				var args [6]uint64
				for _, a := range r.Args {
					args[a.Index] = a.Value | g
				}
				add(numbers[name], args[:]...)
				for _, a := range r.Args {
					near := args
					for _, v := range []uint64{a.Value + 1, a.Value - 1, a.Value ^ a.Mask, a.Value | ^a.Mask} {
						near[a.Index] = v
						add(numbers[name], near[:]...)
					}
				}
			}
		}
	}
	return out
}

// TestDefaultProgramMeansTheProfile compares the program with a reading of the
// profile's data for every number and around every comparison, and demands that
// these inputs reach every instruction but one kind: each stage ends in a kill
// for a foreign ABI, which none but the first can meet and the first does
// elsewhere.
func TestDefaultProgramMeansTheProfile(t *testing.T) {
	p, numbers := Default(), allNumbers()
	for which, m := range defaultFilters(t) {
		for _, c := range defaultCalls() {
			if got, want := m.mustRun(t, c), decide(p, numbers, c); got != want {
				t.Fatalf("%s: %s (%d) %x: program says %v, profile says %v", which, nameOf(int(c.nr)), c.nr, c.args, got, want)
			}
		}
		// A foreign ABI reaches the rest (B5).
		for _, c := range foreignCalls() {
			if got := m.mustRun(t, c); got != KillProcess {
				t.Fatalf("%s: number %#x of architecture %#x: %v", which, uint32(c.nr), c.arch, got)
			}
		}
		dead := 0
		for i, ok := range m.reached {
			switch {
			case ok:
			case m.prog[i] == unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: uint32(KillProcess)}:
				dead++
			default:
				t.Errorf("%s: instruction %d %+v was not reached", which, i, m.prog[i])
			}
		}
		if dead > 3 {
			t.Errorf("%s: %d kills were not reached, more than there are stages", which, dead)
		}
	}
}

// foreignCalls are i386 numbers and x32 numbers, B5.
func foreignCalls() []call {
	var out []call
	for nr := range 1024 {
		out = append(out,
			call{nr: int32(nr), arch: unix.AUDIT_ARCH_I386},
			call{nr: int32(nr), arch: unix.AUDIT_ARCH_AARCH64},
			call{nr: int32(nr), arch: 0},
			call{nr: int32(nr | 0x40000000), arch: unix.AUDIT_ARCH_X86_64})
	}
	for _, nr := range []uint32{0x7fffffff, 0x80000000, 0xfffffffe, 0x40000000} {
		out = append(out, call{nr: int32(nr), arch: unix.AUDIT_ARCH_X86_64})
	}
	return out
}

// TestDefaultGolden pins the whole default profile: A13, A14, A18, A19, A20,
// B1, B2, B4, B5, B7, B9 as far as a filter decides them.
func TestDefaultGolden(t *testing.T) {
	m := defaultFilters(t)["made ahead"]
	got := golden(t, m)
	if *update {
		if err := os.WriteFile(goldenFile, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(goldenFile)
	if err != nil {
		t.Fatal(err)
	}
	if got == string(want) {
		return
	}
	g, w := strings.Split(got, "\n"), strings.Split(string(want), "\n")
	for i := range max(len(g), len(w)) {
		line := func(s []string) string {
			if i < len(s) {
				return s[i]
			}
			return "(nothing)"
		}
		if line(g) != line(w) {
			t.Fatalf("line %d of %s\n got: %s\nwant: %s", i+1, goldenFile, line(g), line(w))
		}
	}
}

// golden writes what a program does with everything that the profile is about.
func golden(t *testing.T, m *machine) string {
	var b strings.Builder
	// eval gives the action for some arguments and fails if garbage in the upper
	// half of an int argument changes it.
	eval := func(name string, ints []int, args ...uint64) Action {
		c := call{nr: int32(allNumbers()[name]), arch: unix.AUDIT_ARCH_X86_64}
		copy(c.args[:], args)
		want := m.mustRun(t, c)
		for _, g := range garbage {
			d := c
			for _, i := range ints {
				d.args[i] |= g
			}
			if got := m.mustRun(t, d); got != want {
				t.Errorf("%s %x: %v, but %x: %v", name, c.args, want, d.args, got)
			}
		}
		return want
	}

	b.WriteString("# number, name, action; two actions: all arguments 0, all bits 1\n")
	for nr := range 1024 {
		c := call{nr: int32(nr), arch: unix.AUDIT_ARCH_X86_64}
		zero := m.mustRun(t, c)
		for i := range c.args {
			c.args[i] = ^uint64(0)
		}
		line := fmt.Sprintf("%d %s %v", nr, nameOf(nr), zero)
		if ones := m.mustRun(t, c); ones != zero {
			line += fmt.Sprintf(" %v", ones)
		}
		fmt.Fprintln(&b, strings.Replace(line, "  ", " - ", 1))
	}

	protocols := []uint64{0, 1, 2, 6, 17, 58, 115, 132, 136, 255, 256, 262}
	for _, name := range []string{"socket", "socketpair"} {
		fmt.Fprintf(&b, "# %s: family, type/protocol for types 0 to 15 and protocols %d\n", name, protocols)
		for family := range uint64(51) {
			by := make(map[Action][]string)
			for typ := range uint64(16) {
				for _, proto := range protocols {
					a := eval(name, []int{0, 2}, family, typ, proto)
					for _, flags := range []uint64{unix.SOCK_CLOEXEC, unix.SOCK_NONBLOCK, unix.SOCK_CLOEXEC | unix.SOCK_NONBLOCK, 1 << 32, 1 << 63} {
						if got := eval(name, []int{0, 2}, family, typ|flags, proto); got != a {
							t.Errorf("%s %d %d %d: %v, with flags %#x: %v", name, family, typ, proto, a, flags, got)
						}
					}
					by[a] = append(by[a], fmt.Sprintf("%d/%d", typ, proto))
				}
			}
			line := fmt.Sprintf("%s %d", name, family)
			for _, a := range []Action{Allow, Errno(unix.EPROTONOSUPPORT), Errno(unix.EAFNOSUPPORT)} {
				switch n := len(by[a]); {
				case n == 0:
				case a == Allow:
					line += fmt.Sprintf(" %v %s", a, strings.Join(by[a], " "))
				default:
					line += fmt.Sprintf(" %v %d", a, n)
				}
				delete(by, a)
			}
			for a, rest := range by {
				t.Errorf("%s %d: unexpected %v for %v", name, family, a, rest)
			}
			fmt.Fprintln(&b, line)
		}
	}

	const thread = unix.CLONE_VM | unix.CLONE_FS | unix.CLONE_FILES | unix.CLONE_SIGHAND | unix.CLONE_THREAD |
		unix.CLONE_SYSVSEM | unix.CLONE_SETTLS | unix.CLONE_PARENT_SETTID | unix.CLONE_CHILD_CLEARTID
	fmt.Fprintf(&b, "# clone: one flag alone, and with SIGCHLD, and with the flags of a thread\n")
	for bit := range 64 {
		f := uint64(1) << bit
		fmt.Fprintf(&b, "clone 1<<%d %v %v %v\n", bit, eval("clone", []int{0}, f),
			eval("clone", []int{0}, f|uint64(unix.SIGCHLD)), eval("clone", []int{0}, f|thread))
	}

	fmt.Fprintf(&b, "# personality\n")
	values := []uint64{0, 1, 2, 3, 6, 8, 0x10, 0x20008, 0x420000, 0x400008, 0xfffffffe, 0xffffffff}
	for bit := range 32 {
		values = append(values, 1<<bit)
	}
	slices.Sort(values)
	for _, v := range slices.Compact(values) {
		fmt.Fprintf(&b, "personality %#x %v\n", v, eval("personality", []int{0}, v))
	}

	fmt.Fprintf(&b, "# ioctl: request\n")
	for _, v := range []uint64{unix.TCGETS, unix.TIOCINQ, unix.TIOCGWINSZ, unix.TIOCSCTTY, unix.TIOCSTI - 1, unix.TIOCSTI,
		unix.TIOCSTI + 1, 0x541c - 1, 0x541c, 0x541d, 0x541e, 0x5422, unix.TIOCSETD, unix.TIOCGETD, 0, 0xffffffff} {
		fmt.Fprintf(&b, "ioctl %#x %v\n", v, eval("ioctl", []int{0, 1}, 0, v))
	}

	fmt.Fprintf(&b, "# prctl: options 0 to 127 that are not allowed\n")
	for v := range uint64(128) {
		if a := eval("prctl", []int{0}, v); a != Allow {
			fmt.Fprintf(&b, "prctl %d %v\n", v, a)
		}
	}

	fmt.Fprintf(&b, "# mode bits, one at a time and with 0644\n")
	type modeCall struct {
		name   string
		index  int
		before []uint64
	}
	for _, mc := range []modeCall{
		{"chmod", 1, nil}, {"fchmod", 1, nil}, {"fchmodat", 2, nil}, {"fchmodat2", 2, nil},
		{"mkdir", 1, nil}, {"mkdirat", 2, nil}, {"creat", 1, nil},
		{"open", 2, []uint64{0, unix.O_RDWR}}, {"open", 2, []uint64{0, unix.O_CREAT}}, {"open", 2, []uint64{0, unix.O_TMPFILE}},
		{"openat", 3, []uint64{0, 0, unix.O_RDWR | unix.O_DIRECTORY}}, {"openat", 3, []uint64{0, 0, unix.O_CREAT | unix.O_EXCL}},
		{"openat", 3, []uint64{0, 0, unix.O_TMPFILE | unix.O_WRONLY}},
	} {
		line := fmt.Sprintf("%s %#x", mc.name, mc.before)
		for bit := range 16 {
			args := make([]uint64, 6)
			copy(args, mc.before)
			args[mc.index] = 1 << bit
			a := eval(mc.name, []int{mc.index}, args...)
			args[mc.index] |= 0o644
			if got := eval(mc.name, []int{mc.index}, args...); got != a {
				t.Errorf("%s: mode %#o alone: %v, with 0644: %v", mc.name, 1<<bit, a, got)
			}
			if a != Allow {
				line += fmt.Sprintf(" %#o %v", 1<<bit, a)
			}
		}
		fmt.Fprintln(&b, line)
	}

	fmt.Fprintf(&b, "# mknod, mknodat: file type, alone and with set-user-ID\n")
	for typ := range uint64(16) {
		mode := typ<<12 | 0o600
		a, s := eval("mknod", []int{1}, 0, mode), eval("mknod", []int{1}, 0, mode|unix.S_ISUID)
		if x, y := eval("mknodat", []int{2}, 0, 0, mode), eval("mknodat", []int{2}, 0, 0, mode|unix.S_ISUID); x != a || y != s {
			t.Errorf("mknodat %#o: %v and %v, mknod: %v and %v", mode, x, y, a, s)
		}
		fmt.Fprintf(&b, "mknod %#o %v %v\n", typ<<12, a, s)
	}
	return b.String()
}
