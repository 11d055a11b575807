package seccomp

import (
	"encoding/binary"
	"fmt"
	"sync"
	"testing"

	libseccomp "github.com/seccomp/libseccomp-golang"
	"golang.org/x/sys/unix"
)

// allNumbers maps every name that exists on this machine to its number.
var allNumbers = sync.OnceValue(func() map[string]int {
	m := make(map[string]int)
	for nr := range 1024 {
		if name := nameOf(nr); name != "" {
			m[name] = nr
		}
	}
	return m
})

func nameOf(nr int) string {
	for name, n := range newer {
		if n == nr {
			return name
		}
	}
	name, err := libseccomp.ScmpSyscall(nr).GetName()
	if err != nil {
		return ""
	}
	return name
}

// call is struct seccomp_data without the instruction pointer.
type call struct {
	nr   int32
	arch uint32
	args [6]uint64
}

// data lays the call out as the kernel does: nr, arch, instruction pointer and
// six arguments, each in the byte order of the machine.
func (c call) data() []byte {
	b := binary.NativeEndian.AppendUint32(nil, uint32(c.nr))
	b = binary.NativeEndian.AppendUint32(b, c.arch)
	b = binary.NativeEndian.AppendUint64(b, 0x7f0000001000)
	for _, a := range c.args {
		b = binary.NativeEndian.AppendUint64(b, a)
	}
	return b
}

// machine runs a program as the kernel's seccomp_check_filter allows it, and
// remembers which instructions it reached.
type machine struct {
	prog    []unix.SockFilter
	reached []bool
}

func newMachine(f *Filter) *machine {
	return &machine{prog: f.Program(), reached: make([]bool, f.Len())}
}

// run evaluates one call. A program that the kernel would refuse is an error:
// a jump out of the program, an unaligned load, an unknown instruction.
func (m *machine) run(c call) (Action, error) {
	data := c.data()
	var a uint32
	for pc := 0; ; pc++ {
		if pc >= len(m.prog) {
			return 0, fmt.Errorf("runs off the end at %d", pc)
		}
		m.reached[pc] = true
		in := m.prog[pc]
		jump := func(cond bool) {
			if cond {
				pc += int(in.Jt)
			} else {
				pc += int(in.Jf)
			}
		}
		switch in.Code {
		case unix.BPF_LD | unix.BPF_W | unix.BPF_ABS:
			if in.K%4 != 0 || int(in.K)+4 > len(data) {
				return 0, fmt.Errorf("instruction %d loads at %d", pc, in.K)
			}
			a = binary.NativeEndian.Uint32(data[in.K:])
		case unix.BPF_ALU | unix.BPF_AND | unix.BPF_K:
			a &= in.K
		case unix.BPF_JMP | unix.BPF_JA | unix.BPF_K:
			pc += int(in.K)
		case unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K:
			jump(a == in.K)
		case unix.BPF_JMP | unix.BPF_JGT | unix.BPF_K:
			jump(a > in.K)
		case unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K:
			jump(a >= in.K)
		case unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K:
			jump(a&in.K != 0)
		case unix.BPF_RET | unix.BPF_K:
			return Action(in.K), nil
		default:
			return 0, fmt.Errorf("instruction %d has code %#x", pc, in.Code)
		}
	}
}

func (m *machine) mustRun(t testing.TB, c call) Action {
	t.Helper()
	a, err := m.run(c)
	if err != nil {
		t.Fatalf("run nr %d args %x: %v", c.nr, c.args, err)
	}
	return a
}

// decide is the meaning of a profile, read from its data and from nothing of
// the compiler: the first rule that matches, else the default.
func decide(p *Profile, numbers map[string]int, c call) Action {
	for _, r := range p.Rules {
		for _, n := range r.Names {
			if nr, ok := numbers[n]; ok && nr == int(c.nr) && argsHold(r.Args, c.args) {
				return r.Action
			}
		}
	}
	return p.Default
}

func argsHold(args []Arg, regs [6]uint64) bool {
	for _, a := range args {
		v := regs[a.Index]
		var ok bool
		switch a.Op {
		case Equal:
			ok = v == a.Value
		case NotEqual:
			ok = v != a.Value
		case Less:
			ok = v < a.Value
		case LessEqual:
			ok = v <= a.Value
		case Greater:
			ok = v > a.Value
		case GreaterEqual:
			ok = v >= a.Value
		case MaskedEqual:
			ok = v&a.Mask == a.Value
		}
		if !ok {
			return false
		}
	}
	return true
}
