package seccomp

import (
	"errors"
	"math/rand/v2"
	"testing"
)

// fuzzNames are the calls that fuzzed profiles speak about: few, so that rules
// meet. fchmodat2 is one that libseccomp 2.5 has no name for.
var fuzzNames = []string{"read", "write", "ioctl", "socket", "clone", "personality", "openat", "fchmodat2"}

// source hands out bytes of the fuzzer's input; when they are used up it gives
// zeros.
type source []byte

func (s *source) byte() byte {
	if len(*s) == 0 {
		return 0
	}
	b := (*s)[0]
	*s = (*s)[1:]
	return b
}

// value prefers numbers whose halves are at the edges, where a 64-bit
// comparison made of two 32-bit ones goes wrong.
func (s *source) value() uint64 {
	half := func() uint64 {
		b := s.byte()
		switch b % 8 {
		case 0:
			return 0
		case 1:
			return 1
		case 2:
			return 0xffffffff
		case 3:
			return 0x80000000
		case 4:
			return 0x7fffffff
		case 5:
			return uint64(b)
		case 6:
			return 1 << (b >> 3)
		}
		return uint64(b)<<24 | uint64(s.byte())<<16 | uint64(s.byte())
	}
	return half()<<32 | half()
}

func (s *source) profile() *Profile {
	actions := []Action{Allow, Errno(1), Errno(38), Errno(97), KillProcess, KillThread, Trap, Log, Errno(0)}
	p := &Profile{Default: actions[int(s.byte())%len(actions)]}
	for n := int(s.byte()) % 12; n > 0; n-- {
		if last := len(p.Rules) - 1; last >= 0 && s.byte()%3 == 0 {
			// Another rule of the same shape, which shares a stage with the last.
			r := p.Rules[last]
			r.Args = append([]Arg(nil), r.Args...)
			for i := range r.Args {
				if a := &r.Args[i]; s.byte()%2 == 0 {
					a.Value = s.value()
					if a.Op == MaskedEqual {
						a.Value &= a.Mask
					}
				}
			}
			p.Rules = append(p.Rules, r)
			continue
		}
		r := Rule{Action: actions[int(s.byte())%len(actions)]}
		for k := int(s.byte())%3 + 1; k > 0; k-- {
			r.Names = append(r.Names, fuzzNames[int(s.byte())%len(fuzzNames)])
		}
		used := s.byte()
		for i := uint(0); i < 6; i++ {
			if used>>i&1 == 0 || s.byte()&1 == 0 {
				continue
			}
			a := Arg{Index: i, Op: Op(s.byte()%7) + 1, Value: s.value()}
			if a.Op == MaskedEqual {
				a.Mask = a.Value | s.value()
				a.Value &= s.value()
				if a.Mask == 0 {
					a.Mask = 1
				}
			}
			r.Args = append(r.Args, a)
		}
		p.Rules = append(p.Rules, r)
	}
	return p
}

// calls makes inputs next to every value that the profile compares with.
func (s *source) calls(p *Profile, rnd *rand.Rand) []call {
	var near [6][]uint64
	for i := range near {
		near[i] = []uint64{0, 1, ^uint64(0), s.value()}
	}
	for _, r := range p.Rules {
		for _, a := range r.Args {
			v := a.Value
			near[a.Index] = append(near[a.Index], v, v-1, v+1, v^1<<32, v+1<<32, v-1<<32, v|^a.Mask, v^a.Mask)
		}
	}
	var out []call
	for _, name := range fuzzNames {
		nr := allNumbers()[name]
		for range 60 {
			c := call{nr: int32(nr), arch: nativeArch}
			for i := range c.args {
				c.args[i] = near[i][rnd.IntN(len(near[i]))]
			}
			out = append(out, c)
		}
		// And calls that one rule matches in all arguments.
		for _, r := range p.Rules {
			c := call{nr: int32(nr), arch: nativeArch}
			for _, a := range r.Args {
				c.args[a.Index] = a.Value
			}
			out = append(out, c)
		}
	}
	return append(out, call{nr: 1023, arch: nativeArch}, call{nr: -1, arch: nativeArch})
}

func checkAgainstModel(t *testing.T, in []byte) {
	s := source(in)
	p := s.profile()
	f, err := Compile(p)
	if err != nil {
		if errors.Is(err, ErrProfile) && f == nil {
			return
		}
		t.Fatalf("compile %+v: %v", p, err)
	}
	m := newMachine(f)
	rnd := rand.New(rand.NewPCG(uint64(len(in)), uint64(p.Default)))
	for _, c := range s.calls(p, rnd) {
		if got, want := m.mustRun(t, c), decide(p, allNumbers(), c); got != want {
			t.Fatalf("profile %+v\ncall %d %x: program says %v, profile says %v", p, c.nr, c.args, got, want)
		}
	}
}

func TestRandomProfilesMeanWhatTheySay(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	for range 1000 {
		in := make([]byte, rnd.IntN(400))
		for i := range in {
			in[i] = byte(rnd.Uint32())
		}
		checkAgainstModel(t, in)
	}
}

func FuzzCompile(f *testing.F) {
	f.Fuzz(func(t *testing.T, in []byte) { checkAgainstModel(t, in) })
}

// Inputs on which libseccomp 2.5.4 alone, given the rules of one call at once,
// makes a program that misses a rule. (On others it does not return.)
func TestRulesThatLibseccompMixesUp(t *testing.T) {
	rule := func(args ...Arg) Rule { return Rule{Names: []string{"write"}, Args: args, Action: Allow} }
	tests := []struct {
		name  string
		rules []Rule
		args  [6]uint64
	}{
		{"two bounds of one argument",
			[]Rule{rule(Arg{0, LessEqual, 0, 1 << 32}), rule(Arg{0, LessEqual, 0, 0})}, [6]uint64{1}},
		{"comparisons of several arguments",
			[]Rule{
				rule(Arg{0, Less, 0, 17592722915328}, Arg{5, GreaterEqual, 0, 3416261796632199349}),
				rule(Arg{1, MaskedEqual, 16091643490632073397, 16091643142739722404}),
				rule(Arg{0, Less, 0, 1610285195}, Arg{4, Less, 0, 9223372032559808512})},
			[6]uint64{0x80000000, 0x7fffffff00000000, 0, 0, 0xcfce006e000000bd, 0x7ffffffe00000080}},
		{"rule without arguments after others of another action",
			[]Rule{{Names: []string{"write"}, Args: []Arg{{0, Equal, 0, 1}}, Action: Trap}, rule()}, [6]uint64{1}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := &Profile{Default: KillProcess, Rules: tt.rules}
			f, err := Compile(p)
			if err != nil {
				t.Fatal(err)
			}
			c := call{nr: int32(allNumbers()["write"]), arch: nativeArch, args: tt.args}
			if got, want := newMachine(f).mustRun(t, c), decide(p, allNumbers(), c); got != want || want == KillProcess {
				t.Errorf("program says %v, profile says %v", got, want)
			}
		})
	}
}
