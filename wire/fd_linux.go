package wire

import (
	"fmt"
	"os"
	"syscall"
)

// OpenFD returns a file over one of a guest's two channels, StartFD or CallFD,
// which it makes non-blocking and close-on-exec (W66). A descriptor that is not
// open or no stream socket is an error: the process is not the guest of a
// launcher. Each descriptor may be opened once; the file owns it.
func OpenFD(fd int) (*os.File, error) {
	kind, err := syscall.GetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_TYPE)
	if err != nil {
		return nil, fmt.Errorf("open channel on descriptor %d: %w", fd, err)
	}
	if kind != syscall.SOCK_STREAM {
		return nil, fmt.Errorf("open channel on descriptor %d: socket of type %d", fd, kind)
	}
	syscall.CloseOnExec(fd)
	if err := syscall.SetNonblock(fd, true); err != nil {
		return nil, fmt.Errorf("make descriptor %d non-blocking: %w", fd, err)
	}
	return os.NewFile(uintptr(fd), fmt.Sprintf("channel-%d", fd)), nil
}

// Pair returns the two ends of a new channel, both close-on-exec. The parent's
// end is non-blocking, so that Close and deadlines end a blocked Read or Write
// (W66). The child's end is blocking, as guests expect it; it is for
// exec.Cmd.ExtraFiles or the like and has to be closed in the parent once the
// child runs, otherwise the parent never sees the end of the stream (C3).
func Pair() (parent, child *os.File, err error) {
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make a channel: %w", err)
	}
	if err := syscall.SetNonblock(fds[0], true); err != nil {
		syscall.Close(fds[0])
		syscall.Close(fds[1])
		return nil, nil, fmt.Errorf("make a channel non-blocking: %w", err)
	}
	return os.NewFile(uintptr(fds[0]), "channel"), os.NewFile(uintptr(fds[1]), "channel-child"), nil
}
