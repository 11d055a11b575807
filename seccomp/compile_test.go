package seccomp

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

func run(t *testing.T, p *Profile, name string, args ...uint64) Action {
	t.Helper()
	f, err := Compile(p)
	if err != nil {
		t.Fatal(err)
	}
	c := call{nr: int32(allNumbers()[name]), arch: nativeArch}
	copy(c.args[:], args)
	return newMachine(f).mustRun(t, c)
}

func TestFirstMatchingRuleDecides(t *testing.T) {
	sti := Arg{Index: 1, Op: MaskedEqual, Mask: 0xffffffff, Value: unix.TIOCSTI}
	deny := Rule{Names: []string{"ioctl"}, Args: []Arg{sti}, Action: Errno(unix.EPERM)}
	allow := Rule{Names: []string{"ioctl"}, Action: Allow}
	tests := []struct {
		name  string
		rules []Rule
		arg   uint64
		want  Action
	}{
		{"refusal first", []Rule{deny, allow}, unix.TIOCSTI, Errno(unix.EPERM)},
		{"refusal first, upper half set", []Rule{deny, allow}, 1<<40 | unix.TIOCSTI, Errno(unix.EPERM)},
		{"refusal first, other request", []Rule{deny, allow}, unix.TCGETS, Allow},
		{"allowed first", []Rule{allow, deny}, unix.TIOCSTI, Allow},
		{"refusal alone", []Rule{deny}, unix.TCGETS, Trap},
		{"no rules", nil, unix.TCGETS, Trap},
		{"rules of another call", []Rule{{Names: []string{"read"}, Action: Allow}}, unix.TCGETS, Trap},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := run(t, &Profile{Default: Trap, Rules: tt.rules}, "ioctl", 0, tt.arg); got != tt.want {
				t.Errorf("%v, want %v", got, tt.want)
			}
		})
	}
}

// B2: "not 16 and not 40" is two refusals and an allowance. Written as two "!="
// rules it would allow everything.
func TestNotEqualRulesAreAlternatives(t *testing.T) {
	not := func(v uint64) Rule {
		return Rule{Names: []string{"socket"}, Args: []Arg{{Index: 0, Op: NotEqual, Value: v}}, Action: Allow}
	}
	if got := run(t, &Profile{Rules: []Rule{not(16), not(40)}}, "socket", 16); got != Allow {
		t.Errorf("two alternatives: %v", got)
	}
	both := not(16)
	both.Args = append(both.Args, Arg{Index: 0, Op: NotEqual, Value: 40})
	if _, err := Compile(&Profile{Rules: []Rule{both}}); !errors.Is(err, ErrProfile) || !strings.Contains(err.Error(), "compared twice") {
		t.Errorf("one argument twice: %v", err)
	}
}

// B5: the foreign ABIs end the process whatever the profile says.
func TestForeignABIIsKilledByEveryProfile(t *testing.T) {
	for _, p := range []*Profile{{Default: Allow}, {Default: Log, Rules: []Rule{{Names: []string{"getpid"}, Action: Allow}}}} {
		f, err := Compile(p)
		if err != nil {
			t.Fatal(err)
		}
		m := newMachine(f)
		if got := m.mustRun(t, call{nr: 20, arch: unix.AUDIT_ARCH_I386}); got != KillProcess {
			t.Errorf("i386: %v", got)
		}
		if nativeArch == unix.AUDIT_ARCH_X86_64 {
			if got := m.mustRun(t, call{nr: 0x40000000 | 39, arch: nativeArch}); got != KillProcess {
				t.Errorf("x32: %v", got)
			}
		}
		if got := m.mustRun(t, call{nr: 1000, arch: nativeArch}); got != p.Default {
			t.Errorf("native: %v", got)
		}
	}
}

func TestCompileRefuses(t *testing.T) {
	rule := func(r Rule) *Profile {
		if r.Names == nil {
			r.Names = []string{"read"}
		}
		if r.Action == 0 {
			r.Action = Allow
		}
		return &Profile{Rules: []Rule{r}}
	}
	arg := func(a Arg) *Profile { return rule(Rule{Args: []Arg{a}}) }
	many := func(n int, actions ...Action) *Profile {
		p := new(Profile)
		for i := range n {
			p.Rules = append(p.Rules, Rule{Names: []string{"read"}, Action: actions[i%len(actions)],
				Args: []Arg{{Op: Equal, Value: uint64(i)}}})
		}
		return p
	}
	tests := []struct {
		name, text string
		p          *Profile
	}{
		{"unknown name", `unknown system call "opne"`, rule(Rule{Names: []string{"read", "opne"}})},
		{"empty name", `unknown system call ""`, rule(Rule{Names: []string{""}})},
		{"name with a NUL", `unknown system call "read\x00x"`, rule(Rule{Names: []string{"read\x00x"}})},
		{"no names", "no system call", rule(Rule{Names: []string{}})},
		{"notify action", "action(0x7fc00000) is not supported", rule(Rule{Action: unix.SECCOMP_RET_USER_NOTIF})},
		{"trace action", "action(0x7ff00000) is not supported", rule(Rule{Action: unix.SECCOMP_RET_TRACE})},
		{"errno above 4095", "is not supported", rule(Rule{Action: Errno(4096)})},
		{"errno far above 4095", "is not supported", rule(Rule{Action: Errno(1<<16 + 1)})},
		{"allow with data", "is not supported", rule(Rule{Action: Allow | 1})},
		{"default", "default action", &Profile{Default: unix.SECCOMP_RET_TRACE}},
		{"index 6", "index 6 is above 5", arg(Arg{Index: 6, Op: Equal})},
		{"no operator", "unknown comparison op(0)", arg(Arg{})},
		{"operator 8", "unknown comparison op(8)", arg(Arg{Op: 8})},
		{"mask of an equality", "has a mask", arg(Arg{Op: Equal, Mask: 1})},
		{"mask 0", "mask is 0", arg(Arg{Op: MaskedEqual})},
		{"value outside of the mask", "outside of mask", arg(Arg{Op: MaskedEqual, Mask: 6, Value: 1})},
		{"too long a program", "more than 4096 instructions", many(4090, Allow)},
		{"too many rules", "too many rules", many(5000, Allow)},
		{"too many changes of action", "too many rules", many(65, Allow, Trap)},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f, err := Compile(tt.p)
			if f != nil || !errors.Is(err, ErrProfile) || !strings.Contains(err.Error(), tt.text) {
				t.Errorf("%v; want an error with %q", err, tt.text)
			}
		})
	}
	for name, p := range map[string]*Profile{"1000 values": many(1000, Allow), "64 changes": many(64, Allow, Trap)} {
		if _, err := Compile(p); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Names of other architectures match nothing: a profile may list them all.
func TestNamesOfOtherArchitecturesAreSkipped(t *testing.T) {
	p := &Profile{Rules: []Rule{{Names: []string{"vm86", "s390_pci_mmio_read", "arm_fadvise64_64", "read"}, Action: Allow}}}
	if got := run(t, p, "read"); got != Allow {
		t.Errorf("read: %v", got)
	}
	if got := run(t, p, "write"); got != KillThread {
		t.Errorf("write: %v", got)
	}
}

// The numbers of calls newer than libseccomp 2.5 must agree with a libseccomp
// that knows them.
func TestNewerNamesAgreeWithLibseccomp(t *testing.T) {
	seen := make(map[int]string)
	for name, nr := range newer {
		if other, ok := seen[nr]; ok || nr < 424 {
			t.Errorf("%s has number %d, as %q", name, nr, other)
		}
		seen[nr] = name
		if got, ok := libNumber(name); ok && got != nr {
			t.Errorf("%s has number %d, libseccomp says %d", name, nr, got)
		}
	}
}

func TestFilterIsNotShared(t *testing.T) {
	f, err := Load("default")
	if err != nil {
		t.Fatal(err)
	}
	prog, raw := f.Program(), f.Bytes()
	if len(prog) != f.Len() || len(raw) != 8*f.Len() || f.Len() == 0 || f.Len() > 4096 {
		t.Fatalf("%d instructions, %d copied, %d bytes", f.Len(), len(prog), len(raw))
	}
	for i, in := range prog {
		b := raw[8*i:]
		if in != (unix.SockFilter{Code: binary.NativeEndian.Uint16(b), Jt: b[2], Jf: b[3], K: binary.NativeEndian.Uint32(b[4:])}) {
			t.Fatalf("instruction %d: %+v and % x", i, in, b[:8])
		}
	}
	clear(prog)
	clear(raw)
	again, err := Load("default")
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Equal(f.Bytes(), raw) || !bytes.Equal(f.Bytes(), again.Bytes()) || f.Program()[0] == prog[0] {
		t.Error("a change of a copy reached the filter")
	}
}

func TestCompileIsConcurrentAndRepeatable(t *testing.T) {
	p := Default()
	out := make([][]byte, 8)
	var wg sync.WaitGroup
	for i := range out {
		wg.Go(func() {
			f, err := Compile(p)
			if err != nil {
				t.Error(err)
				return
			}
			out[i] = f.Bytes()
		})
	}
	wg.Wait()
	for i := range out {
		if !bytes.Equal(out[i], out[0]) {
			t.Errorf("program %d differs", i)
		}
	}
}

func TestCompileLeavesNoDescriptors(t *testing.T) {
	count := func() int {
		entries, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	before := count()
	for range 20 {
		if _, err := Compile(Default()); err != nil {
			t.Fatal(err)
		}
	}
	if after := count(); after != before {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
}

func TestDigestNamesTheProfile(t *testing.T) {
	if a, b := Default().Digest(), Default().Digest(); a != b || len(a) != 64 {
		t.Errorf("%q and %q", a, b)
	}
	base := func() *Profile {
		return &Profile{Default: Trap, Rules: []Rule{
			{Names: []string{"read", "write"}, Args: []Arg{{Index: 1, Op: Equal, Value: 2}}, Action: Allow},
			{Names: []string{"ioctl"}, Action: Log}}}
	}
	seen := map[string]string{base().Digest(): "base"}
	for name, change := range map[string]func(p *Profile){
		"default":      func(p *Profile) { p.Default = Log },
		"action":       func(p *Profile) { p.Rules[0].Action = Log },
		"name":         func(p *Profile) { p.Rules[0].Names[0] = "open" },
		"joined names": func(p *Profile) { p.Rules[0].Names = []string{"read\nwrite"} },
		"index":        func(p *Profile) { p.Rules[0].Args[0].Index = 2 },
		"op":           func(p *Profile) { p.Rules[0].Args[0].Op = NotEqual },
		"value":        func(p *Profile) { p.Rules[0].Args[0].Value++ },
		"mask":         func(p *Profile) { p.Rules[0].Args[0].Mask++ },
		"order":        func(p *Profile) { p.Rules[0], p.Rules[1] = p.Rules[1], p.Rules[0] },
		"fewer":        func(p *Profile) { p.Rules = p.Rules[:1] },
		"no args":      func(p *Profile) { p.Rules[0].Args = nil },
	} {
		p := base()
		change(p)
		d := p.Digest()
		if other, ok := seen[d]; ok {
			t.Errorf("%s and %s have one digest", name, other)
		}
		seen[d] = name
	}
}

func TestActionNames(t *testing.T) {
	for a, want := range map[Action]string{KillProcess: "kill_process", KillThread: "kill_thread", Trap: "trap",
		Log: "log", Allow: "allow", Errno(unix.EPERM): "errno(EPERM)", Errno(4000): "errno(4000)",
		Errno(0): "errno(0)", Errno(9999): "action(0x5ffff)", unix.SECCOMP_RET_TRACE: "action(0x7ff00000)"} {
		if got := a.String(); got != want {
			t.Errorf("%#x: %s, want %s", uint32(a), got, want)
		}
	}
}

func TestLoad(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	none, err := Load("none")
	if err != nil || none.Len() != 0 || len(none.Bytes()) != 0 || len(none.Program()) != 0 {
		t.Errorf("none: %v, %d instructions", err, none.Len())
	}
	f, err := Load(write("ok.json", `{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["getpid"],"action":"SCMP_ACT_ERRNO","errnoRet":38}]}`))
	if err != nil {
		t.Fatal(err)
	}
	c := call{nr: int32(allNumbers()["getpid"]), arch: nativeArch}
	if got := newMachine(f).mustRun(t, c); got != Errno(unix.ENOSYS) {
		t.Errorf("getpid: %v", got)
	}

	fifo := filepath.Join(dir, "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name, path, text string
		profile          bool
	}{
		{"missing", filepath.Join(dir, "missing"), "missing", false},
		{"empty name", "", "no such file", false},
		{"directory", dir, "not a regular file", true},
		{"FIFO without a writer", fifo, "not a regular file", true},
		{"device", "/dev/zero", "not a regular file", true},
		{"empty", write("empty", ""), "not one JSON object", true},
		{"too large", write("large", strings.Repeat(" ", maxProfileBytes+1)), "more than 1048576", true},
		{"wrong", write("wrong", `{"defaultAction":"ALLOW"}`), `unknown action "ALLOW"`, true},
		{"unknown call", write("call", `{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["x"],"action":"SCMP_ACT_KILL"}]}`), `unknown system call "x"`, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f, err := Load(tt.path)
			if f != nil || err == nil || !strings.Contains(err.Error(), tt.text) || errors.Is(err, ErrProfile) != tt.profile {
				t.Errorf("%v", err)
			}
		})
	}
	if _, err := Load(filepath.Join(dir, "missing")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("missing: %v", err)
	}
}

func BenchmarkCompileDefault(b *testing.B) {
	b.ReportAllocs()
	for b.Loop() {
		if _, err := Compile(Default()); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkLoadDefault(b *testing.B) {
	b.ReportAllocs()
	for b.Loop() {
		f, err := Load("default")
		if err != nil {
			b.Fatal(err)
		}
		if len(f.Bytes()) == 0 {
			b.Fatal("no program")
		}
	}
}
