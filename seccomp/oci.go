package seccomp

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// maxProfileBytes bounds the text of a profile. The largest profiles in use
// have about 20 KiB.
const maxProfileBytes = 1 << 20

// ParseOCI reads a profile in the JSON form of linux.seccomp of the OCI runtime
// specification, at most 1 MiB.
//
// It is strict: an unknown, misspelt or repeated key, null, a trailing value,
// an unknown action, operator or architecture is an error that wraps
// ErrProfile. So is whatever it could not carry out: SCMP_ACT_NOTIFY and
// SCMP_ACT_TRACE with the listener keys, flags, and architectures without the
// machine's own. Further architectures are accepted and change nothing: their
// calls kill the process.
//
// OCI rules have no order. Where several match a call, the most restrictive
// action decides, as between filters in the kernel: kill_process, kill_thread,
// trap, errno, log, allow; of two errno actions the first in the text. With
// libseccomp alone a rule without arguments would hide the others.
func ParseOCI(b []byte) (*Profile, error) {
	p, err := parseOCI(b)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrProfile, err)
	}
	if err := p.check(); err != nil {
		return nil, err
	}
	return p, nil
}

func parseOCI(b []byte) (*Profile, error) {
	if len(b) > maxProfileBytes {
		return nil, fmt.Errorf("text has %d bytes, more than %d", len(b), maxProfileBytes)
	}
	if err := checkKeys(b); err != nil {
		return nil, err
	}
	var in specs.LinuxSeccomp
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&in); err != nil {
		return nil, err
	}
	if err := checkUnsupported(&in); err != nil {
		return nil, err
	}
	var (
		p   Profile
		err error
	)
	if p.Default, err = ociAction(in.DefaultAction, in.DefaultErrnoRet); err != nil {
		return nil, fmt.Errorf("defaultAction: %w", err)
	}
	for i, s := range in.Syscalls {
		r := Rule{Names: s.Names}
		if r.Action, err = ociAction(s.Action, s.ErrnoRet); err != nil {
			return nil, fmt.Errorf("syscalls %d: %w", i, err)
		}
		for _, a := range s.Args {
			arg, err := ociArg(a)
			if err != nil {
				return nil, fmt.Errorf("syscalls %d: argument %d: %w", i, a.Index, err)
			}
			r.Args = append(r.Args, arg)
		}
		p.Rules = append(p.Rules, r)
	}
	slices.SortStableFunc(p.Rules, func(a, b Rule) int { return a.Action.rank() - b.Action.rank() })
	return &p, nil
}

// ociKeys are the keys of all objects of the form. encoding/json would take
// them in any case.
var ociKeys = map[string]bool{
	"defaultAction": true, "defaultErrnoRet": true, "architectures": true, "flags": true,
	"listenerPath": true, "listenerMetadata": true, "syscalls": true,
	"names": true, "action": true, "errnoRet": true, "args": true,
	"index": true, "value": true, "valueTwo": true, "op": true,
}

// argLevel is how deep the innermost object lies: the profile, its list of
// rules, a rule, its list of arguments, an argument.
const argLevel = 5

// checkKeys refuses what encoding/json lets pass: repeated keys, keys in
// another case, null, and a second value.
func checkKeys(b []byte) error {
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.UseNumber()
	type level struct {
		keys  map[string]bool // nil in an array
		inKey bool
	}
	var open []level
	for {
		tok, err := dec.Token()
		if err != nil {
			return fmt.Errorf("not one JSON object: %w", err)
		}
		if len(open) == 0 && tok != json.Delim('{') {
			return errors.New("not one JSON object")
		}
		if len(open) > 0 {
			if top := &open[len(open)-1]; top.keys != nil && tok != json.Delim('}') {
				top.inKey = !top.inKey
				if key, ok := tok.(string); ok && top.inKey {
					if !ociKeys[key] {
						return fmt.Errorf("unknown key %q", key)
					}
					if top.keys[key] {
						return fmt.Errorf("repeated key %q", key)
					}
					top.keys[key] = true
				}
			}
		}
		switch tok {
		case json.Delim('{'):
			open = append(open, level{keys: make(map[string]bool)})
		case json.Delim('['):
			open = append(open, level{})
		case json.Delim('}'), json.Delim(']'):
			// A missing value would be read as 0.
			if keys := open[len(open)-1].keys; len(open) == argLevel && keys != nil &&
				!(keys["index"] && keys["value"] && keys["op"]) {
				return errors.New("an argument needs index, value and op")
			}
			open = open[:len(open)-1]
		case nil:
			return errors.New("null is not a value here")
		}
		if len(open) > argLevel {
			return errors.New("nested deeper than the form")
		}
		if len(open) == 0 {
			break
		}
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return errors.New("more than one JSON value")
	}
	return nil
}

func checkUnsupported(in *specs.LinuxSeccomp) error {
	if len(in.Flags) > 0 {
		return fmt.Errorf("flag %q is not supported", in.Flags[0])
	}
	if in.ListenerPath != "" || in.ListenerMetadata != "" {
		return errors.New("a listener is not supported")
	}
	if len(in.Architectures) == 0 {
		return nil
	}
	for _, a := range in.Architectures {
		if !slices.Contains(ociArchs, a) {
			return fmt.Errorf("unknown architecture %q", a)
		}
	}
	if own := ociNative[runtime.GOARCH]; !slices.Contains(in.Architectures, own) {
		return fmt.Errorf("architectures leave out the machine's own, %q", own)
	}
	return nil
}

var ociNative = map[string]specs.Arch{"amd64": specs.ArchX86_64, "arm64": specs.ArchAARCH64}

var ociArchs = []specs.Arch{
	specs.ArchX86, specs.ArchX86_64, specs.ArchX32, specs.ArchARM, specs.ArchAARCH64,
	specs.ArchMIPS, specs.ArchMIPS64, specs.ArchMIPS64N32, specs.ArchMIPSEL,
	specs.ArchMIPSEL64, specs.ArchMIPSEL64N32, specs.ArchPPC, specs.ArchPPC64,
	specs.ArchPPC64LE, specs.ArchS390, specs.ArchS390X, specs.ArchPARISC,
	specs.ArchPARISC64, specs.ArchRISCV64, specs.ArchLOONGARCH64, specs.ArchM68K,
	specs.ArchSH, specs.ArchSHEB,
}

func ociAction(a specs.LinuxSeccompAction, errno *uint) (Action, error) {
	if errno != nil && a != specs.ActErrno {
		return 0, fmt.Errorf("action %q takes no errno", a)
	}
	switch a {
	case specs.ActKill, specs.ActKillThread:
		return KillThread, nil
	case specs.ActKillProcess:
		return KillProcess, nil
	case specs.ActTrap:
		return Trap, nil
	case specs.ActLog:
		return Log, nil
	case specs.ActAllow:
		return Allow, nil
	case specs.ActErrno:
		if errno == nil {
			return Errno(unix.EPERM), nil
		}
		if *errno > maxErrno {
			return 0, fmt.Errorf("errno %d is above %d", *errno, maxErrno)
		}
		return Errno(unix.Errno(*errno)), nil
	case specs.ActNotify, specs.ActTrace:
		return 0, fmt.Errorf("action %q needs a supervisor, which is not supported", a)
	}
	return 0, fmt.Errorf("unknown action %q", a)
}

func ociArg(a specs.LinuxSeccompArg) (Arg, error) {
	out := Arg{Index: a.Index, Value: a.Value}
	switch a.Op {
	case specs.OpEqualTo:
		out.Op = Equal
	case specs.OpNotEqual:
		out.Op = NotEqual
	case specs.OpLessThan:
		out.Op = Less
	case specs.OpLessEqual:
		out.Op = LessEqual
	case specs.OpGreaterThan:
		out.Op = Greater
	case specs.OpGreaterEqual:
		out.Op = GreaterEqual
	case specs.OpMaskedEqual:
		// value is the mask and valueTwo what is left of the argument under it.
		return Arg{Index: a.Index, Op: MaskedEqual, Mask: a.Value, Value: a.ValueTwo}, nil
	default:
		return Arg{}, fmt.Errorf("unknown operator %q", a.Op)
	}
	if a.ValueTwo != 0 {
		return Arg{}, fmt.Errorf("operator %q takes no second value", a.Op)
	}
	return out, nil
}

// rank orders actions as the kernel does between filters, strictest first.
// kill_process has the sign bit set.
func (a Action) rank() int {
	return int(int32(a&unix.SECCOMP_RET_ACTION_FULL)) >> 16
}
