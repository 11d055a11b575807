package jail

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"example.com/jail/internal/faults"
	"example.com/jail/jail/jailinit"
)

// forker is the process that forks every init, with the launcher as their
// parent. A fork by the launcher itself would copy all of its descriptors and
// close them again, 9 for each jail that is alive.
type forker struct {
	mu      sync.Mutex
	socket  *os.File       // nil if there is none
	started <-chan started // what became of its start, once
}

type started struct {
	pid int
	err error
}

var theForker forker

var errForkerGone = errors.New("the forker ended")

// fork asks for an init with these descriptors from 0 on; a nil file is closed.
// What comes of it is told over the control socket. The files can be closed.
func (f *forker) fork(files []*os.File) error {
	request, files := jailinit.Fork(files)
	for again := false; ; {
		socket, err := f.get()
		if err != nil {
			return fmt.Errorf("start the forker: %w", err)
		}
		err = sendFiles(socket, request, files)
		if err == nil {
			faults.Here("jail.fork")
			return nil
		}
		dropped, startErr := f.drop(socket)
		if startErr != nil {
			return fmt.Errorf("start the forker: %w", startErr)
		}
		if again && dropped {
			return fmt.Errorf("ask the forker: %w", err)
		}
		again = again || dropped // else it was another's doing, as often as that is
	}
}

// get starts the forker if there is none. It does not wait: what is asked for
// meanwhile is in the socket when the forker gets to read it.
func (f *forker) get() (*os.File, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.socket != nil {
		return f.socket, nil
	}
	ours, theirs, err := seqpacket()
	if err != nil {
		return nil, err
	}
	reply := make(chan started, 1)
	forkerThread() <- func() {
		pid, err := execForker(theirs)
		theirs.Close()
		reply <- started{pid, err}
	}
	f.socket, f.started = ours, reply
	return ours, nil
}

// drop ends the forker of a socket, so that the next fork starts another, and
// tells whether nobody else had done so. The error is that of its start.
func (f *forker) drop(socket *os.File) (bool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if socket == nil || f.socket != socket {
		return false, nil
	}
	socket.Close()
	f.socket = nil
	s := <-f.started
	if s.err == nil {
		_, _, _ = reap(s.pid)
	}
	return true, s.err
}

// stop ends the forker if there is one. It has no more to do with the inits that
// it forked.
func (f *forker) stop() {
	f.mu.Lock()
	socket := f.socket
	f.mu.Unlock()
	_, _ = f.drop(socket)
}

// forkerThread starts every forker. The parent-death signal of a forker and of
// its inits follows the thread that started it (prctl(2), golang/go#27505): this
// one is locked for the life of the process.
var forkerThread = sync.OnceValue(func() chan<- func() {
	c := make(chan func(), 1)
	go func() {
		runtime.LockOSThread()
		for f := range c {
			f()
		}
	}()
	return c
})

func execForker(socket *os.File) (int, error) {
	image, err := jailinit.Image()
	if err != nil {
		return 0, err
	}
	pid, err := syscall.ForkExec("/proc/self/fd/1", []string{"jail-init"}, &syscall.ProcAttr{
		Env:   []string{},
		Files: []uintptr{socket.Fd(), image.Fd()},
		Sys: &syscall.SysProcAttr{
			// A group of its own: a Ctrl-C at the launcher's terminal is for
			// the launcher.
			Setpgid:   true,
			Pdeathsig: syscall.SIGKILL,
		},
	})
	runtime.KeepAlive(socket)
	faults.Here("jail.exec")
	return pid, err
}

// seqpacket makes the pair of sockets between launcher and forker. Ours is
// non-blocking and in the poller.
func seqpacket() (ours, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		err = unix.SetNonblock(fds[0], true)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("make a socket pair: %w", err)
	}
	return os.NewFile(uintptr(fds[0]), "forker"), os.NewFile(uintptr(fds[1]), "forker-child"), nil
}

// reap waits for one child and retries EINTR.
func reap(pid int) (syscall.WaitStatus, syscall.Rusage, error) {
	var ws syscall.WaitStatus
	var ru syscall.Rusage
	for {
		_, err := syscall.Wait4(pid, &ws, syscall.WALL, &ru)
		if !errors.Is(err, syscall.EINTR) {
			return ws, ru, err
		}
	}
}
