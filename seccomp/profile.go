package seccomp

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// ErrProfile is wrapped by every error that says that a profile is wrong, in
// contrast to an error of reading or compiling it.
var ErrProfile = errors.New("bad seccomp profile")

// Profile says what happens to each system call. It is plain data; methods do
// not change it, and it must not be changed while one runs.
//
// The zero Profile kills the thread at its first call.
type Profile struct {
	// Default is the action for a call that no rule matches.
	Default Action
	// Rules are tried in order for each call. The first that matches decides.
	Rules []Rule
}

// Rule matches calls by name and arguments.
type Rule struct {
	// Names are system calls. A name that exists only on another architecture
	// matches nothing; a name that nobody knows is an error of Compile.
	Names []string
	// Args must all hold for the rule to match; none means any arguments. One
	// argument may be compared only once in a rule.
	Args []Arg
	// Action is what a matching call gets.
	Action Action
}

// Arg compares one argument register of a call, all 64 bits, unsigned.
type Arg struct {
	// Index is the argument, 0 to 5.
	Index uint
	// Op says how; the zero value is an error.
	Op Op
	// Mask is used by MaskedEqual only, and must be 0 for any other Op.
	Mask uint64
	// Value is what the argument is compared with. For MaskedEqual it must
	// have no bit outside of Mask.
	Value uint64
}

// Op is a comparison of an argument (left) with Arg.Value (right).
type Op uint8

const (
	Equal        Op = 1
	NotEqual     Op = 2
	Less         Op = 3
	LessEqual    Op = 4
	Greater      Op = 5
	GreaterEqual Op = 6
	// MaskedEqual holds if argument & Mask == Value.
	MaskedEqual Op = 7
)

var opNames = [...]string{Equal: "==", NotEqual: "!=", Less: "<", LessEqual: "<=",
	Greater: ">", GreaterEqual: ">=", MaskedEqual: "&=="}

// String gives the comparison as a sign, such as "==".
func (o Op) String() string {
	if o >= Equal && o <= MaskedEqual {
		return opNames[o]
	}
	return fmt.Sprintf("op(%d)", uint8(o))
}

// Action is what the kernel does with a call: the value that a filter returns
// (SECCOMP_RET_*). Errno makes the actions that are not listed here.
type Action uint32

const (
	// KillProcess ends the process as if by SIGSYS.
	KillProcess Action = unix.SECCOMP_RET_KILL_PROCESS
	// KillThread ends only the calling thread. Other threads live on and may
	// wait for it for ever.
	KillThread Action = unix.SECCOMP_RET_KILL_THREAD
	// Trap sends SIGSYS to the thread, which may handle it.
	Trap Action = unix.SECCOMP_RET_TRAP
	// Log allows the call and writes it to the kernel's log.
	Log Action = unix.SECCOMP_RET_LOG
	// Allow runs the call.
	Allow Action = unix.SECCOMP_RET_ALLOW
)

// maxErrno is the largest error number that a system call can return.
const maxErrno = 4095

// Errno is the action that refuses a call with an error number, 1 to 4095.
// Number 0 makes the call return 0 without having run. A larger number makes
// an Action that Compile refuses.
func Errno(e unix.Errno) Action {
	if e > maxErrno {
		return unix.SECCOMP_RET_ERRNO | 0xffff
	}
	return unix.SECCOMP_RET_ERRNO | Action(e)
}

// String gives the action as one word, such as "allow" or "errno(EPERM)".
func (a Action) String() string {
	switch a {
	case KillProcess:
		return "kill_process"
	case KillThread:
		return "kill_thread"
	case Trap:
		return "trap"
	case Log:
		return "log"
	case Allow:
		return "allow"
	}
	if e, ok := a.errno(); ok {
		if name := unix.ErrnoName(e); name != "" {
			return "errno(" + name + ")"
		}
		return fmt.Sprintf("errno(%d)", uint(e))
	}
	return fmt.Sprintf("action(%#x)", uint32(a))
}

// errno reports the error number of an Errno action.
func (a Action) errno() (unix.Errno, bool) {
	n := uint32(a) &^ unix.SECCOMP_RET_ACTION_FULL
	return unix.Errno(n), uint32(a)&unix.SECCOMP_RET_ACTION_FULL == unix.SECCOMP_RET_ERRNO && n <= maxErrno
}

func (a Action) valid() bool {
	switch a {
	case KillProcess, KillThread, Trap, Log, Allow:
		return true
	}
	_, ok := a.errno()
	return ok
}

// Digest is the SHA-256 of the profile in hexadecimal. Two profiles with the
// same default and the same rules in the same order have the same digest.
func (p *Profile) Digest() string {
	h := sha256.New()
	fmt.Fprintf(h, "jail seccomp profile 1\ndefault %d\n", uint32(p.Default))
	for _, r := range p.Rules {
		fmt.Fprintf(h, "rule %d %d %d\n", uint32(r.Action), len(r.Names), len(r.Args))
		for _, n := range r.Names {
			fmt.Fprintf(h, "%q\n", n)
		}
		for _, a := range r.Args {
			fmt.Fprintf(h, "%d %d %d %d\n", a.Index, uint8(a.Op), a.Mask, a.Value)
		}
	}
	return hex.EncodeToString(h.Sum(nil))
}

// check finds everything that is wrong with a profile except unknown names.
func (p *Profile) check() error {
	if !p.Default.valid() {
		return fmt.Errorf("%w: default action %v is not supported", ErrProfile, p.Default)
	}
	for i, r := range p.Rules {
		if err := r.check(); err != nil {
			return fmt.Errorf("%w: rule %d: %w", ErrProfile, i, err)
		}
	}
	return nil
}

func (r *Rule) check() error {
	if len(r.Names) == 0 {
		return errors.New("no system call is named")
	}
	if !r.Action.valid() {
		return fmt.Errorf("action %v is not supported", r.Action)
	}
	var seen [6]bool
	for _, a := range r.Args {
		if a.Index > 5 {
			return fmt.Errorf("argument index %d is above 5", a.Index)
		}
		// Runtimes disagree about two comparisons of one argument: some match
		// if either holds, so that "!= 16" and "!= 40" match everything.
		if seen[a.Index] {
			return fmt.Errorf("argument %d is compared twice: write two rules", a.Index)
		}
		seen[a.Index] = true
		switch {
		case a.Op < Equal || a.Op > MaskedEqual:
			return fmt.Errorf("argument %d: unknown comparison %v", a.Index, a.Op)
		case a.Op != MaskedEqual && a.Mask != 0:
			return fmt.Errorf("argument %d: comparison %v has a mask", a.Index, a.Op)
		case a.Op == MaskedEqual && a.Mask == 0:
			return fmt.Errorf("argument %d: mask is 0", a.Index)
		case a.Op == MaskedEqual && a.Value&^a.Mask != 0:
			return fmt.Errorf("argument %d: value %#x has bits outside of mask %#x", a.Index, a.Value, a.Mask)
		}
	}
	return nil
}
