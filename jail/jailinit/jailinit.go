package jailinit

import (
	"bytes"
	_ "embed"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

//go:embed jail-init
var image []byte

// FDControl is the control socket of an init. 0 to 4 are the program's.
const FDControl = 5

// Fork returns the message that asks the forker for an init, over its socket
// (SOCK_SEQPACKET), and the descriptors that go with it. files are the init's from
// 0 to FDControl; a nil one is closed there.
func Fork(files []*os.File) ([]byte, []*os.File) {
	var numbers uint32
	var there []*os.File
	for i, f := range files {
		if f != nil {
			numbers |= 1 << i
			there = append(there, f)
		}
	}
	b := binary.NativeEndian.AppendUint32(nil, numbers)
	return binary.NativeEndian.AppendUint32(b, uint32(len(there))), there
}

// MaxFiles is how many descriptors may go with a [Request].
const MaxFiles = 8

// MaxStrings bounds the sum of arguments and environment in bytes, and
// MaxString one of them: the kernel's MAX_ARG_STRLEN (execve(2)).
const (
	MaxStrings = 1 << 20
	MaxString  = 128<<10 - 1
)

// ErrTooLarge is returned for arguments or environment beyond MaxStrings or
// MaxString. Nothing is ever truncated.
var ErrTooLarge = errors.New("arguments and environment are too large")

// Image returns the init as a sealed memfd, made once per process. The
// descriptor is close-on-exec and never closed.
var Image = sync.OnceValues(func() (*os.File, error) {
	fd, err := unix.MemfdCreate("jail-init", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("create memfd for the init: %w", err)
	}
	file := os.NewFile(uintptr(fd), "jail-init")
	if n, err := unix.Write(fd, image); err != nil || n != len(image) {
		return nil, fmt.Errorf("write %d bytes of the init: %d written: %w", len(image), n, err)
	}
	const seals = unix.F_SEAL_SEAL | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
		return nil, fmt.Errorf("seal the init: %w", err)
	}
	return file, nil
})

// Request is all that the init is told.
type Request struct {
	Args []string // Args[0] is looked up in PATH of Env if it has no slash
	Env  []string

	UID, GID uint32 // of the program, as the jail sees them
	InitID   uint32 // uid and gid of pid 1
	// UIDMap and GIDMap are the texts for uid_map and gid_map
	// (user_namespaces(7)).
	UIDMap, GIDMap string

	Late []Late // binds on top of /tmp and /dev/shm

	Hostname   string
	TmpOptions string // of the tmpfs for /tmp and /dev/shm
	Dir        string // working directory

	Wall       time.Duration // 0 for none
	CPUSeconds uint32        // RLIMIT_CPU, 0 for none
	OpenFiles  uint32        // RLIMIT_NOFILE

	Filter []unix.SockFilter // none: no seccomp filter

	// Files is the number of descriptors that go with the request: the
	// template's mount namespace, the leaf's cgroup v2 directory if Leaf says so,
	// and tasks files of cgroup v1.
	Files int
	Leaf  bool

	Channels bool // the program keeps fds 3 and 4
	// Hold makes the init wait for a second request before it starts the
	// program. That one, without files, says what program, by which limits and
	// behind which filter; what is built already stays as it is.
	Hold bool
	// Park starts the program, but its wall clock only with what [Unpark]
	// returns.
	Park bool
	// Yield gives all that the jail does the lowest priority.
	Yield bool
}

// Late is a bind that the init makes on top of its own mounts.
type Late struct {
	From, To  string
	Directory bool
}

const (
	magic      = 0x314c494a
	headerSize = 64

	flagLeaf     = 1
	flagChannels = 2
	flagHold     = 4
	flagPark     = 8
	flagYield    = 16
)

// Encode returns the request as it goes over the control socket. It refuses
// strings with NUL bytes and more than MaxStrings.
func (r *Request) Encode() ([]byte, error) {
	if len(r.Args) == 0 {
		return nil, errors.New("no program to run")
	}
	late := make([]string, 0, 2*len(r.Late))
	for _, l := range r.Late {
		kind := "f"
		if l.Directory {
			kind = "d"
		}
		late = append(late, kind+l.From, l.To)
	}
	strs := [][]string{{r.UIDMap, r.GIDMap, r.Hostname, r.TmpOptions, r.Dir}, late, r.Args, r.Env}
	total := 0
	for _, list := range strs {
		for _, s := range list {
			if strings.IndexByte(s, 0) >= 0 {
				return nil, fmt.Errorf("%.40q holds a NUL byte", s)
			}
			if len(s) > MaxString {
				return nil, fmt.Errorf("%w: one of %d bytes, at most %d", ErrTooLarge, len(s), MaxString)
			}
			total += len(s) + 1
		}
	}
	if total > MaxStrings {
		return nil, fmt.Errorf("%w: %d bytes, at most %d", ErrTooLarge, total, MaxStrings)
	}

	var flags uint32
	for _, f := range []struct {
		set bool
		bit uint32
	}{{r.Leaf, flagLeaf}, {r.Channels, flagChannels}, {r.Hold, flagHold}, {r.Park, flagPark}, {r.Yield, flagYield}} {
		if f.set {
			flags |= f.bit
		}
	}
	size := headerSize + len(r.Filter)*8 + total
	b := make([]byte, 0, size)
	for _, v := range []uint32{
		magic, uint32(size), flags, 0,
		uint32(len(r.Args)), uint32(len(r.Env)),
		r.UID, r.GID, r.InitID, r.OpenFiles, r.CPUSeconds, uint32(len(r.Filter)),
	} {
		b = binary.NativeEndian.AppendUint32(b, v)
	}
	b = binary.NativeEndian.AppendUint64(b, uint64(r.Wall))
	b = binary.NativeEndian.AppendUint32(b, uint32(len(r.Late)))
	b = binary.NativeEndian.AppendUint32(b, uint32(r.Files))
	for _, f := range r.Filter {
		b = binary.NativeEndian.AppendUint16(b, f.Code)
		b = append(b, f.Jt, f.Jf)
		b = binary.NativeEndian.AppendUint32(b, f.K)
	}
	for _, list := range strs {
		for _, s := range list {
			b = append(append(b, s...), 0)
		}
	}
	return b, nil
}

// Unpark returns the message that begins the wall clock of a parked program: it
// ends when wall has passed, or never if wall is 0.
func Unpark(wall time.Duration) []byte { return binary.NativeEndian.AppendUint64(nil, uint64(wall)) }

// Kind is the kind of a [Message]. The numbers cross a process boundary.
type Kind uint32

// Kinds of messages.
const (
	Child    Kind = 1 // A: pid of pid 1 as the launcher sees it
	Held     Kind = 2 // U: bytes that /tmp holds
	Started  Kind = 3 // T: CLOCK_MONOTONIC at the release, U: bytes that /tmp holds
	Exited   Kind = 4 // A: wait status of the program, B: processes left alive
	Deadline Kind = 5 // pid 1's own wall clock ran out
	Failed   Kind = 6 // A: stage, B: index, C: errno
	Forked   Kind = 7 // A: pid of the stager, always the first
)

// Message is one report of the init.
type Message struct {
	Kind    Kind
	A, B, C int32
	T, U    uint64
}

// MessageSize is the length of a message on the control socket.
const MessageSize = 32

// Decode reads one message. Messages come from the init alone, which no
// program of the jail can reach; an unknown kind is an error all the same.
func Decode(b []byte) (Message, error) {
	var m Message
	if err := binary.Read(bytes.NewReader(b), binary.NativeEndian, &m); err != nil {
		return m, fmt.Errorf("decode message of the init: %w", err)
	}
	switch m.Kind {
	case Child, Held, Started, Exited, Deadline, Failed, Forked:
	default:
		return m, fmt.Errorf("message of the init has unknown kind %d", m.Kind)
	}
	return m, nil
}

// Stage names a step of set-up; it is what a report shows of a failed one.
type Stage int32

// Stages whose object the launcher names.
const (
	StageWorkdir Stage = 13
	StageExec    Stage = 15 // the program itself could not be executed
)

var stageNames = [...]string{
	1: "request", 2: "proc", 3: "template", 4: "clone", 5: "idmap",
	6: "cgroup", 7: "ids", 8: "hostname", 9: "mount", 10: "rlimit",
	11: "caps", 12: "seccomp", StageWorkdir: "workdir", 14: "fork", StageExec: "exec",
}

func (s Stage) String() string {
	if s > 0 && int(s) < len(stageNames) {
		return stageNames[s]
	}
	return fmt.Sprintf("stage %d", int32(s))
}
