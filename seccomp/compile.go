package seccomp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"

	"golang.org/x/sys/unix"

	libseccomp "github.com/seccomp/libseccomp-golang"
)

// Filter is a program for the kernel. It never changes; any number of
// goroutines may use it. The zero Filter holds no program: nothing to load.
type Filter struct {
	prog []unix.SockFilter
}

// Len is the number of instructions, at most 4096. 0 means that there is
// nothing to load.
func (f *Filter) Len() int { return len(f.prog) }

// Program is a copy of the instructions, for struct sock_fprog.
func (f *Filter) Program() []unix.SockFilter {
	return append([]unix.SockFilter(nil), f.prog...)
}

// Bytes is a copy of the program as an array of struct sock_filter: 8 bytes for
// each instruction, in the byte order of the machine.
func (f *Filter) Bytes() []byte {
	b := make([]byte, 0, len(f.prog)*insnSize)
	for _, i := range f.prog {
		b = binary.NativeEndian.AppendUint16(b, i.Code)
		b = append(b, i.Jt, i.Jf)
		b = binary.NativeEndian.AppendUint32(b, i.K)
	}
	return b
}

const (
	insnSize = 8
	// maxInsns is the kernel's BPF_MAXINSNS.
	maxInsns = 4096
	// maxStages bounds the work for a profile whose rules for one call
	// alternate between actions.
	maxStages = 64
)

// next is what a stage returns for a call that it does not decide. No profile
// can ask for it, since Action has no tracing.
const next = unix.SECCOMP_RET_TRACE | 0xffff

// Compile makes the program of a profile. That takes milliseconds (2.6 for the
// default profile), so callers compile once and keep the Filter. Errors that the profile
// causes wrap ErrProfile: unknown names or actions, arguments that cannot be
// compared as asked, and a program above the kernel's 4096 instructions.
// Compile may run concurrently.
func Compile(p *Profile) (*Filter, error) {
	if runtime.GOARCH != "amd64" && runtime.GOARCH != "arm64" {
		return nil, fmt.Errorf("compile seccomp profile: architecture %s is not supported", runtime.GOARCH)
	}
	if err := p.check(); err != nil {
		return nil, err
	}
	stages, err := p.stages()
	if err != nil {
		return nil, err
	}
	prog := make([]unix.SockFilter, 0, 512)
	for i, s := range stages {
		code, err := s.compile()
		if err != nil {
			return nil, fmt.Errorf("compile seccomp profile: stage %d: %w", i, err)
		}
		prog = append(prog, link(compress(code, i > 0))...)
		if len(prog) >= maxInsns {
			return nil, fmt.Errorf("%w: more than %d instructions", ErrProfile, maxInsns)
		}
	}
	prog = append(prog, unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: uint32(p.Default)})
	return &Filter{prog: prog}, nil
}

// link makes a stage go on behind its last instruction wherever it would return
// next.
func link(code []unix.SockFilter) []unix.SockFilter {
	for i, in := range code {
		if in.Code == unix.BPF_RET|unix.BPF_K && in.K == next {
			code[i] = unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JA, K: uint32(len(code) - i - 1)}
		}
	}
	return code
}

// A stage is one libseccomp filter. All rules that a stage has for one call
// share one action and fit together; a call whose next rule does not fit goes
// on to the next stage.
type stage []stageRule

type stageRule struct {
	nr     int
	args   []Arg
	action Action
}

// fits tells whether libseccomp 2.5 compiles two rules of one call and one
// filter to what they say. It keeps no order between rules: one without
// arguments swallows the others, whatever their actions. And it walks a tree of
// comparisons, of 32 bits each, without turning back: once one comparison of a
// rule holds and its next does not, other rules that would match may not be
// tried; on some sets of rules it does not return at all. None of this happens
// if the actions are equal and the rules test the same bits of the same
// arguments for equality.
//
// Related test: TestRulesThatLibseccompMixesUp.
func (r stageRule) fits(o stageRule) bool {
	if r.action != o.action {
		return false
	}
	if len(r.args) == 0 {
		return true
	}
	if len(r.args) != len(o.args) {
		return false
	}
	for i, a := range r.args {
		b := o.args[i]
		if a.Index != b.Index || a.Op != b.Op || a.Mask != b.Mask || a.Op != Equal && a.Op != MaskedEqual {
			return false
		}
	}
	return true
}

// stages spreads the rules. The first stage holds the first rules of every
// call, so a call with one rule is decided there.
func (p *Profile) stages() ([]stage, error) {
	type state struct {
		stage  int
		first  stageRule // of that stage; what fits it fits all that do
		closed bool      // a rule without arguments came: nothing gets past it
	}
	var (
		stages []stage
		calls  = make(map[int]*state)
		total  int
	)
	for i, r := range p.Rules {
		for _, name := range r.Names {
			nr, ok := number(name)
			if !ok {
				return nil, fmt.Errorf("%w: rule %d: unknown system call %q", ErrProfile, i, name)
			}
			if nr < 0 {
				continue
			}
			rule := stageRule{nr: nr, args: r.Args, action: r.Action}
			s := calls[nr]
			switch {
			case s == nil:
				s = &state{first: rule}
				calls[nr] = s
			case s.closed:
				continue
			case !rule.fits(s.first):
				s.stage++
				s.first = rule
			}
			s.closed = len(r.Args) == 0
			// Each rule needs an instruction, so neither bound refuses a profile
			// that the kernel would take.
			if total++; total > maxInsns || s.stage >= maxStages {
				return nil, fmt.Errorf("%w: rule %d: %s: too many rules", ErrProfile, i, name)
			}
			if s.stage == len(stages) {
				stages = append(stages, nil)
			}
			stages[s.stage] = append(stages[s.stage], rule)
		}
	}
	if len(stages) == 0 {
		// The check of the ABI is made by a stage, so there must be one.
		stages = append(stages, nil)
	}
	return stages, nil
}

func (s stage) compile() ([]unix.SockFilter, error) {
	f, err := libseccomp.NewFilter(libseccomp.ActTrace.SetReturnCode(-1))
	if err != nil {
		return nil, err
	}
	defer f.Release()
	// libseccomp's own choice would end only the calling thread.
	if err := f.SetBadArchAction(libseccomp.ActKillProcess); err != nil {
		return nil, err
	}
	// 2 is a binary tree over the numbers.
	if err := f.SetOptimize(2); err != nil {
		return nil, err
	}
	for _, r := range s {
		action, err := r.action.lib()
		if err != nil {
			return nil, err
		}
		conds := make([]libseccomp.ScmpCondition, 0, len(r.args))
		for _, a := range r.args {
			c, err := a.lib()
			if err != nil {
				return nil, err
			}
			conds = append(conds, c)
		}
		if err := f.AddRuleConditionalExact(libseccomp.ScmpSyscall(r.nr), action, conds); err != nil {
			return nil, fmt.Errorf("add rule for system call %d: %w", r.nr, err)
		}
	}
	return export(f)
}

func export(f *libseccomp.ScmpFilter) ([]unix.SockFilter, error) {
	fd, err := unix.MemfdCreate("seccomp", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("create memfd: %w", err)
	}
	file := os.NewFile(uintptr(fd), "seccomp")
	defer file.Close()
	if err := f.ExportBPF(file); err != nil {
		return nil, fmt.Errorf("export program: %w", err)
	}
	if _, err := file.Seek(0, io.SeekStart); err != nil {
		return nil, fmt.Errorf("read program: %w", err)
	}
	b, err := io.ReadAll(file)
	if err != nil {
		return nil, fmt.Errorf("read program: %w", err)
	}
	if len(b) == 0 || len(b)%insnSize != 0 {
		return nil, fmt.Errorf("program has %d bytes, not a multiple of %d", len(b), insnSize)
	}
	prog := make([]unix.SockFilter, len(b)/insnSize)
	for i := range prog {
		in := b[i*insnSize:]
		prog[i] = unix.SockFilter{Code: binary.NativeEndian.Uint16(in), Jt: in[2], Jf: in[3],
			K: binary.NativeEndian.Uint32(in[4:])}
	}
	return prog, nil
}

func (a Action) lib() (libseccomp.ScmpAction, error) {
	switch a {
	case KillProcess:
		return libseccomp.ActKillProcess, nil
	case KillThread:
		return libseccomp.ActKillThread, nil
	case Trap:
		return libseccomp.ActTrap, nil
	case Log:
		return libseccomp.ActLog, nil
	case Allow:
		return libseccomp.ActAllow, nil
	}
	e, ok := a.errno()
	if !ok {
		return libseccomp.ActInvalid, fmt.Errorf("action %v is not supported", a)
	}
	return libseccomp.ActErrno.SetReturnCode(int16(e)), nil
}

func (a Arg) lib() (libseccomp.ScmpCondition, error) {
	switch a.Op {
	case Equal:
		return libseccomp.MakeCondition(a.Index, libseccomp.CompareEqual, a.Value)
	case NotEqual:
		return libseccomp.MakeCondition(a.Index, libseccomp.CompareNotEqual, a.Value)
	case Less:
		return libseccomp.MakeCondition(a.Index, libseccomp.CompareLess, a.Value)
	case LessEqual:
		return libseccomp.MakeCondition(a.Index, libseccomp.CompareLessOrEqual, a.Value)
	case Greater:
		return libseccomp.MakeCondition(a.Index, libseccomp.CompareGreater, a.Value)
	case GreaterEqual:
		return libseccomp.MakeCondition(a.Index, libseccomp.CompareGreaterEqual, a.Value)
	case MaskedEqual:
		return libseccomp.MakeCondition(a.Index, libseccomp.CompareMaskedEqual, a.Mask, a.Value)
	}
	return libseccomp.ScmpCondition{}, errors.New("unknown comparison")
}
