package jail

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"example.com/jail/internal/faults"
	"example.com/jail/jail/jailinit"
)

// forkRequest asks the forker thread for one init.
type forkRequest struct {
	files []*os.File
	reply chan<- forkReply
}

type forkReply struct {
	pid int
	err error
}

// aheadAfter is how long the forker is idle before it makes the network
// namespace of the next jail: the most expensive one, 0.6 ms of a start.
const aheadAfter = 2 * time.Millisecond

// forks leads to the one thread that starts every jail. The parent-death
// signal of an init follows the thread that forked it (prctl(2),
// golang/go#27505): this one is locked for the life of the process.
var forks = sync.OnceValue(func() chan<- forkRequest {
	c := make(chan forkRequest, 64)
	offMainThread(func() {
		// The first network namespace is made while the first run is prepared.
		ahead, started := unix.Unshare(unix.CLONE_NEWNET) == nil, 0
		_, _ = jailinit.Image() // is kept, and the error told at each fork
		idle := time.NewTimer(time.Hour)
		for {
			select {
			case r := <-c:
				pid, err := forkInit(r.files, ahead)
				r.reply <- forkReply{pid, err}
				// Used once: the next init makes its own, unless there is
				// time to make another here. A process that starts a single
				// jail has no use for one.
				ahead = false
				if started++; started > 1 {
					idle.Reset(aheadAfter)
				}
			case <-idle.C:
				// The thread is locked for ever: no other goroutine ever runs
				// in that namespace.
				ahead = unix.Unshare(unix.CLONE_NEWNET) == nil
				faults.Here("jail.ahead")
			}
		}
	})
	return c
})

// offMainThread runs f on a thread of its own, for ever locked to it, that is
// not the process's first: /proc/self of an embedding program shows that one's
// namespaces.
func offMainThread(f func()) {
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() != os.Getpid() {
			f()
			return
		}
		// Held until the other goroutine has a thread, which is then another.
		locked := make(chan struct{})
		go func() {
			runtime.LockOSThread()
			close(locked)
			f()
		}()
		<-locked
		runtime.UnlockOSThread()
	}()
}

// fork starts an init with these descriptors from 0 on; a nil file is closed.
// It does not wait; the files have to stay open until the reply.
func fork(files []*os.File) <-chan forkReply {
	reply := make(chan forkReply, 1)
	forks() <- forkRequest{files, reply}
	faults.Here("jail.fork")
	return reply
}

// forkInit starts an init. network says that this thread is in a network
// namespace that no jail has been in, so that the init need not make one.
func forkInit(files []*os.File, network bool) (int, error) {
	image, err := jailinit.Image()
	if err != nil {
		return 0, err
	}
	fds := make([]uintptr, len(files), len(files)+1)
	for i, f := range files {
		fds[i] = ^uintptr(0)
		if f != nil {
			fds[i] = f.Fd()
		}
	}
	// The image is among the files: ForkExec moves descriptors out of each
	// other's way, to any number that is not one of them.
	path := fmt.Sprintf("/proc/self/fd/%d", len(fds))
	argv := []string{"jail-init"}
	if network {
		argv = append(argv, "network")
	}
	attr := syscall.ProcAttr{
		Env:   []string{},
		Files: append(fds, image.Fd()),
		Sys: &syscall.SysProcAttr{
			// A group of its own: a Ctrl-C at the launcher's terminal is for
			// the launcher, and one signal reaches both tasks of a set-up.
			Setpgid:   true,
			Pdeathsig: syscall.SIGKILL,
		},
	}
	pid, err := syscall.ForkExec(path, argv, &attr)
	faults.Here("jail.exec")
	runtime.KeepAlive(files)
	if err != nil {
		return 0, fmt.Errorf("fork init: %w", err)
	}
	return pid, nil
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
