package jail

import (
	"errors"
	"io"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// splice delivers to a pipe without copying through this process (splice(2)).
func (s *stream) splice(to syscall.RawConn) {
	from, err := s.from.SyscallConn()
	if err != nil {
		return
	}
	for {
		n := 0
		err := from.Read(func(fd uintptr) bool {
			n = available(int(fd))
			return n != 0
		})
		if err != nil || n < 0 {
			return
		}
		s.grow(n)
		s.seen.Add(int64(n))
		allowed := s.allow.take(n)
		if !s.move(to, allowed) {
			return
		}
		if _, err := io.CopyN(io.Discard, s.from, int64(n-allowed)); err != nil {
			return
		}
	}
}

// spliceable returns the pipe that a writer is, nil if it is none. Nothing is
// gained with files on a disk, and two streams into one of them would overwrite
// each other: splice takes no lock on the file's offset.
func spliceable(w io.Writer) syscall.RawConn {
	f, ok := w.(*os.File)
	if !ok {
		return nil
	}
	c, err := f.SyscallConn()
	if err != nil {
		return nil
	}
	ok = false
	err = c.Control(func(fd uintptr) {
		var st unix.Stat_t
		ok = unix.Fstat(int(fd), &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFIFO
	})
	if err != nil || !ok {
		return nil
	}
	return c
}

// available returns how many bytes are in a pipe, -1 at its end, 0 if there are
// none yet.
func available(fd int) int {
	n, err := unix.IoctlGetInt(fd, unix.TIOCINQ)
	if err != nil {
		return -1
	}
	if n > 0 {
		return n
	}
	p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	for {
		_, err := unix.Poll(p, 0)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil || p[0].Revents&unix.POLLIN == 0 && p[0].Revents != 0:
			return -1
		case p[0].Revents == 0:
			return 0
		default: // written meanwhile
			if n, err = unix.IoctlGetInt(fd, unix.TIOCINQ); err != nil {
				return -1
			}
			return n
		}
	}
}

// move delivers n bytes that are in the pipe.
func (s *stream) move(to syscall.RawConn, n int) bool {
	for n > 0 {
		var k int64
		var spliceErr error
		err := to.Write(func(fd uintptr) bool {
			for {
				k, spliceErr = unix.Splice(int(s.from.Fd()), nil, int(fd), nil, n, unix.SPLICE_F_MOVE|unix.SPLICE_F_NONBLOCK)
				if spliceErr != unix.EINTR {
					return spliceErr != unix.EAGAIN
				}
			}
		})
		switch {
		case spliceErr == unix.EAGAIN && err != nil && !errors.Is(err, os.ErrDeadlineExceeded):
			// A file that the runtime cannot wait for, standard output say.
			err = to.Control(func(fd uintptr) {
				_, spliceErr = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}, -1)
			})
			if err != nil || spliceErr != nil && spliceErr != unix.EINTR {
				return false
			}
		case err != nil || spliceErr != nil || k <= 0:
			return false
		default:
			n -= int(k)
			s.took(int(k))
		}
	}
	return true
}
