package main

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"time"
)

// starter starts programs, each in a sandbox of its own.
type starter interface {
	// start runs a command of the root in a new sandbox and returns once it
	// has ended and all of its stdout is in out. slot tells sandboxes that
	// are alive at the same time apart: 0 to maxAtOnce-1. An error means that
	// the start failed; the program's own failure is in out.
	start(slot int, argv []string, out *output) error
	// close gives up what the starter keeps between starts.
	close() error
}

// maxAtOnce is how many sandboxes are alive at most.
const maxAtOnce = 32

// row is one way to start a program.
type row struct {
	name string
	// ours marks rows of this project: they have to succeed.
	ours bool
	// slow rows take part in one of slowEvery rounds.
	slow bool
	// open makes the starter; its error is why there is none here.
	open func(*setup) (starter, error)
	// version makes the peer tell its version, if it can.
	version []string
	// note is what a reader of the table has to know.
	note string
}

const slowEvery = 5

// allRows lists every row; the report sorts them by time.
func allRows() []*row {
	return []*row{
		{name: "os/exec", open: openExec, note: "no sandbox: the floor"},
		{name: "jail.Run", ours: true, open: openLibrary, note: "library, template ready"},
		{name: "jail.Pool", ours: true, open: openPool, note: "library, jails parked, each used once"},
		{name: "jail run", ours: true, open: openCommandLine, note: "command line, template kept"},
		{name: "bwrap", open: openBwrap, version: []string{"bwrap", "--version"}},
		{name: "minijail", open: openMinijail, version: []string{"minijail0"}},
		{name: "nsjail", open: openNsjail, version: []string{"nsjail"}},
		{name: "firejail", open: openFirejail, version: []string{"firejail", "--version"}, note: "on the host's own root"},
		{name: "nspawn", slow: true, open: openNspawn, version: []string{"systemd-nspawn", "--version"}},
		{name: "isolate", open: openIsolate, version: []string{"isolate", "--version"}, note: "init, run, cleanup"},
		{name: "isolate run", open: openIsolateRun, version: []string{"isolate", "--version"}, note: "a box used again and again"},
		{name: "runc", open: openRunc, version: []string{"runc", "--version"}},
		{name: "crun", open: openCrun, version: []string{"crun", "--version"}},
		{name: "runsc", slow: true, open: openRunsc, version: []string{"runsc"}, note: "gVisor, systrap"},
		{name: "go-judge", open: openJudge, version: []string{"go-judge", "-version"}, note: "resident server, containers used again, output as JSON"},
	}
}

// work is a program that is measured.
type work struct {
	name string
	argv []string
	size int
	sum  [sha256.Size]byte
}

// payload is the program's path in the root.
const payload = "/bin/payload"

const (
	blockSize = 64 << 10
	blocks    = 320 // 20 MiB
)

var (
	nothing = &work{name: "true", argv: []string{payload, "true"}, sum: sha256.Sum256(nil)}
	script  = &work{name: "python", argv: []string{"/usr/bin/python3", "-I", "-S", "-c", "print(1)"}, size: 2, sum: sha256.Sum256([]byte("1\n"))}
	stream  = &work{name: "20 MiB", argv: []string{payload, "out", fmt.Sprint(blocks)}, size: blocks * blockSize, sum: streamSum()}
	works   = []*work{nothing, script, stream}
)

// streamSum is the checksum of what "payload out" writes.
func streamSum() (sum [sha256.Size]byte) {
	h := sha256.New()
	b := make([]byte, blockSize)
	for i := range b {
		b[i] = 'a' + byte(i%26)
	}
	for n := range blocks {
		copy(b, fmt.Sprintf("%016x", n))
		h.Write(b)
	}
	h.Sum(sum[:0])
	return sum
}

// check says what is wrong with an answer.
func (w *work) check(out *output) error {
	switch {
	case out.exit != 0:
		return fmt.Errorf("exit code %d", out.exit)
	case len(out.bytes) != w.size:
		return fmt.Errorf("%d bytes of output, want %d", len(out.bytes), w.size)
	case sha256.Sum256(out.bytes) != w.sum:
		return errors.New("output has a wrong checksum")
	}
	return nil
}

// output is what a program answered. Its room is fixed, so that taking output
// costs the same from the first start on.
type output struct {
	bytes []byte
	exit  int
	// decode turns an answer that came as something else into bytes and exit
	// code. It runs after the clock has been stopped.
	decode func() error
}

func newOutput(room int) *output {
	o := &output{bytes: make([]byte, room)}
	clear(o.bytes) // touches the pages
	o.reset()
	return o
}

func (o *output) reset() { o.bytes, o.exit, o.decode = o.bytes[:0], 0, nil }

var errTooLong = errors.New("more output than any program here writes")

// Write implements io.Writer for starters that hand output over.
func (o *output) Write(p []byte) (int, error) {
	if len(o.bytes)+len(p) > cap(o.bytes) {
		return 0, errTooLong
	}
	o.bytes = append(o.bytes, p...)
	return len(p), nil
}

// readAll takes output from a pipe without copying it again.
func (o *output) readAll(r io.Reader) error {
	for {
		if len(o.bytes) == cap(o.bytes) {
			return errTooLong
		}
		n, err := r.Read(o.bytes[len(o.bytes):cap(o.bytes)])
		o.bytes = o.bytes[:len(o.bytes)+n]
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// once starts a program one time and checks its answer. The time ends when the
// output is complete and the exit code known, before the check.
func once(s starter, slot int, w *work, out *output) (time.Duration, error) {
	out.reset()
	began := time.Now()
	err := s.start(slot, w.argv, out)
	took := time.Since(began)
	if err == nil && out.decode != nil {
		err = out.decode()
	}
	if err == nil {
		err = w.check(out)
	}
	return took, err
}
