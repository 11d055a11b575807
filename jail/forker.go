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

	"example.com/jail/jail/jailinit"
)

// forkRequest asks the forker thread for one init.
type forkRequest struct {
	files []uintptr
	reply chan<- forkReply
}

type forkReply struct {
	pid int
	// network says that the init is in a network namespace that no other jail
	// has been in.
	network bool
	err     error
}

// aheadAfter is how long the forker is idle before it makes the network
// namespace of the next jail: the most expensive one, 0.6 ms of a start.
const aheadAfter = 2 * time.Millisecond

// forks leads to the one thread that starts every jail. The parent-death
// signal of an init follows the thread that forked it (prctl(2),
// golang/go#27505): this one is locked for the life of the process.
var forks = sync.OnceValue(func() chan<- forkRequest {
	c := make(chan forkRequest)
	offMainThread(func() {
		ahead, started := false, 0
		idle := time.NewTimer(time.Hour)
		for {
			select {
			case r := <-c:
				pid, err := forkInit(r.files)
				r.reply <- forkReply{pid, ahead, err}
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
func fork(files []*os.File) (pid int, network bool, err error) {
	fds := make([]uintptr, len(files))
	for i, f := range files {
		fds[i] = ^uintptr(0)
		if f != nil {
			fds[i] = f.Fd()
		}
	}
	reply := make(chan forkReply, 1)
	forks() <- forkRequest{fds, reply}
	r := <-reply
	runtime.KeepAlive(files)
	return r.pid, r.network, r.err
}

func forkInit(files []uintptr) (int, error) {
	image, err := jailinit.Image()
	if err != nil {
		return 0, err
	}
	// The image is among the files: ForkExec moves descriptors out of each
	// other's way, to any number that is not one of them.
	path := fmt.Sprintf("/proc/self/fd/%d", len(files))
	files = append(files, image.Fd())
	attr := syscall.ProcAttr{
		Env:   []string{},
		Files: files,
		Sys: &syscall.SysProcAttr{
			// A group of its own: a Ctrl-C at the launcher's terminal is for
			// the launcher, and one signal reaches both tasks of a set-up.
			Setpgid:   true,
			Pdeathsig: syscall.SIGKILL,
		},
	}
	pid, err := syscall.ForkExec(path, []string{"jail-init"}, &attr)
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
