package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// maxPath and maxDepth bound an entry's name. The kernel takes no longer
	// path; the depth keeps the making of directories linear.
	maxPath  = 4095
	maxDepth = 256

	// beneath is for names that must not lead over a symbolic link, inRoot for
	// those that may, as long as it is the root's.
	beneath = unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV
	inRoot  = unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV
)

// splitName cuts an entry's name into its parts. It may be absolute, which
// means the root; it has no part for the root itself.
func splitName(name string) ([]string, error) {
	if len(name) > maxPath {
		return nil, fmt.Errorf("%w: %.128q...: name has %d bytes, limit %d", ErrInvalid, name, len(name), maxPath)
	}
	if strings.IndexByte(name, 0) >= 0 {
		return nil, fmt.Errorf("%w: %.128q: name with a zero byte", ErrInvalid, name)
	}
	var parts []string
	for part := range strings.SplitSeq(name, "/") {
		switch part {
		case "", ".":
			continue
		case "..":
			return nil, fmt.Errorf("%w: %.128q leads out of its directory", ErrInvalid, name)
		}
		parts = append(parts, part)
	}
	if len(parts) > maxDepth {
		return nil, fmt.Errorf("%w: %.128q...: %d directories deep, limit %d", ErrInvalid, name, len(parts), maxDepth)
	}
	return parts, nil
}

// openat2 opens a path below a handle. The kernel asks to try again when
// something was renamed anywhere while it went up a "..".
func openat2(at int, name string, flags, resolve uint64) (int, error) {
	for tries := 0; ; tries++ {
		fd, err := unix.Openat2(at, name, &unix.OpenHow{Flags: flags | unix.O_CLOEXEC, Resolve: resolve})
		if errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN) && tries < 10_000 {
			runtime.Gosched()
			continue
		}
		return fd, err
	}
}

// tree is a root directory in the making. All of it is reached through the
// handle, and nobody else writes to it.
type tree struct {
	root    int
	trash   int // an empty directory beside the root
	trashed int
	left    *int64 // how many more files and directories may be made
	limit   int64
}

// find opens a directory of the tree.
func (t *tree) find(parts []string, resolve uint64) (int, error) {
	return openat2(t.root, "./"+strings.Join(parts, "/"), unix.O_PATH|unix.O_DIRECTORY, resolve)
}

// make opens a directory of the tree and makes what is missing of it.
func (t *tree) make(parts []string) (int, error) {
	if fd, err := t.find(parts, beneath); err == nil {
		return fd, nil
	}
	at, err := t.find(nil, beneath)
	if err != nil {
		return -1, err
	}
	for i, part := range parts {
		next, err := openat2(at, part, unix.O_PATH|unix.O_DIRECTORY, beneath)
		switch {
		case errors.Is(err, unix.ELOOP):
			next, err = t.find(parts[:i+1], inRoot)
			if err != nil {
				err = fmt.Errorf("%w: symbolic link in its path: %w", ErrInvalid, err)
			}
		case errors.Is(err, unix.ENOENT):
			if err = t.mkdir(at, part, 0o755); err == nil {
				next, err = openat2(at, part, unix.O_PATH|unix.O_DIRECTORY, beneath)
			}
		}
		unix.Close(at)
		if err != nil {
			return -1, err
		}
		at = next
	}
	return at, nil
}

func (t *tree) count() error {
	*t.left--
	if *t.left < 0 {
		return fmt.Errorf("%w: more than %d files and directories", ErrInvalid, t.limit)
	}
	return nil
}

func (t *tree) mkdir(at int, name string, mode uint32) error {
	if err := t.count(); err != nil {
		return err
	}
	if err := unix.Mkdirat(at, name, 0o700); err != nil {
		return err
	}
	return own(at, name, mode)
}

// own makes root the owner of what was just made, whatever group or umask the
// process has.
func own(at int, name string, mode uint32) error {
	if err := unix.Fchownat(at, name, 0, 0, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return err
	}
	return unix.Fchmodat(at, name, mode, 0)
}

func stat(at int, name string) (st unix.Stat_t, err error) {
	err = unix.Fstatat(at, name, &st, unix.AT_SYMLINK_NOFOLLOW)
	return st, err
}

// remove takes a name out of the tree. A directory that is not empty goes to
// the trash as it is.
func (t *tree) remove(at int, name string) error {
	err := unix.Unlinkat(at, name, 0)
	if errors.Is(err, unix.EISDIR) {
		t.trashed++
		err = unix.Renameat(at, name, t.trash, strconv.Itoa(t.trashed))
	}
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// replace makes something with a function that fails if the name is taken, and
// removes what has it.
func (t *tree) replace(at int, name string, create func() error) error {
	err := create()
	if !errors.Is(err, unix.EEXIST) {
		return err
	}
	if err := t.remove(at, name); err != nil {
		return err
	}
	return create()
}

func (t *tree) directory(at int, name string, mode uint32) error {
	st, err := stat(at, name)
	if err == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return own(at, name, mode)
	}
	return t.replace(at, name, func() error { return t.mkdir(at, name, mode) })
}

func (t *tree) file(at int, name string, mode uint32, modified time.Time, content io.Reader) error {
	if err := t.count(); err != nil {
		return err
	}
	fd := -1
	err := t.replace(at, name, func() (err error) {
		// O_EXCL: a hard link in its place is another name's file.
		fd, err = unix.Openat(at, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
		return err
	})
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), "file of the image")
	defer f.Close()
	if err := copyAll(f, content); err != nil {
		return err
	}
	if err := own(at, name, mode); err != nil {
		return err
	}
	// Caches that compare times, as Python's do, would be void otherwise. A
	// time that the file system cannot hold is none to keep.
	if ts, err := unix.TimeToTimespec(modified); err == nil {
		_ = unix.UtimesNanoAt(at, name, []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW)
	}
	return f.Close()
}

func (t *tree) symlink(at int, name, to string) error {
	if err := t.count(); err != nil {
		return err
	}
	if err := t.replace(at, name, func() error { return unix.Symlinkat(to, at, name) }); err != nil {
		return err
	}
	return unix.Fchownat(at, name, 0, 0, unix.AT_SYMLINK_NOFOLLOW)
}

// link makes a hard link to a file or symbolic link of the tree.
func (t *tree) link(at int, name string, to []string) error {
	if err := t.count(); err != nil {
		return err
	}
	if len(to) == 0 {
		return fmt.Errorf("%w: hard link to the root", ErrInvalid)
	}
	dir, err := t.find(to[:len(to)-1], inRoot)
	if err != nil {
		return fmt.Errorf("%w: hard link to nothing: %w", ErrInvalid, err)
	}
	defer unix.Close(dir)
	base := to[len(to)-1]
	old, err := stat(dir, base)
	if err != nil {
		return fmt.Errorf("%w: hard link to nothing: %w", ErrInvalid, err)
	}
	if kind := old.Mode & unix.S_IFMT; kind != unix.S_IFREG && kind != unix.S_IFLNK {
		return fmt.Errorf("%w: hard link to a directory", ErrInvalid)
	}
	if there, err := stat(at, name); err == nil && there.Ino == old.Ino {
		return nil
	}
	return t.replace(at, name, func() error { return unix.Linkat(dir, base, at, name, 0) })
}

// clear empties a directory of the tree.
func (t *tree) clear(at int) error {
	return eachName(at, func(name string) error { return t.remove(at, name) })
}

// eachName calls remove with each name in a directory until none is left. It
// holds few names at a time, however many there are.
func eachName(at int, remove func(name string) error) error {
	for {
		fd, err := unix.Openat(at, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return &os.PathError{Op: "open", Path: "directory of the image", Err: err}
		}
		f := os.NewFile(uintptr(fd), "directory of the image")
		removed := 0
		for {
			names, err := f.Readdirnames(1024)
			for _, name := range names {
				if err := remove(name); err != nil {
					f.Close()
					return err
				}
				removed++
			}
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				f.Close()
				return err
			}
		}
		f.Close()
		// What was added or passed over meanwhile.
		if removed == 0 {
			return nil
		}
	}
}

// removeAll removes a directory that lies in at, with all that is in it. It
// needs two descriptors, however deep that is: what is deeper is moved up.
func removeAll(at int, name string) error {
	top, err := unix.Openat(at, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return &os.PathError{Op: "open", Path: name, Err: err}
	}
	defer unix.Close(top)
	moved := 0
	// unlink removes a name, and reports a directory that is not empty.
	unlink := func(dir int, name string) (full bool, err error) {
		err = unix.Unlinkat(dir, name, 0)
		if errors.Is(err, unix.EISDIR) {
			err = unix.Unlinkat(dir, name, unix.AT_REMOVEDIR)
		}
		if errors.Is(err, unix.ENOTEMPTY) {
			return true, nil
		}
		if err != nil {
			err = &os.PathError{Op: "remove", Path: name, Err: err}
		}
		return false, err
	}
	up := func(dir int, name string) error {
		for {
			moved++
			err := unix.Renameat2(dir, name, top, "moved-"+strconv.Itoa(moved), unix.RENAME_NOREPLACE)
			// One of an earlier removal that was cut short.
			if errors.Is(err, unix.EEXIST) {
				continue
			}
			return os.NewSyscallError("rename", err)
		}
	}
	err = eachName(top, func(sub string) error {
		full, err := unlink(top, sub)
		if err != nil || !full {
			return err
		}
		dir, err := unix.Openat(top, sub, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			return &os.PathError{Op: "open", Path: sub, Err: err}
		}
		defer unix.Close(dir)
		err = eachName(dir, func(name string) error {
			full, err := unlink(dir, name)
			if err == nil && full {
				err = up(dir, name)
			}
			return err
		})
		if err != nil {
			return err
		}
		_, err = unlink(top, sub)
		return err
	})
	if err != nil {
		return err
	}
	if err := unix.Unlinkat(at, name, unix.AT_REMOVEDIR); err != nil {
		return &os.PathError{Op: "remove", Path: name, Err: err}
	}
	return nil
}

// readError tells a failed read from a failed write.
type readError struct{ error }

func (e *readError) Unwrap() error { return e.error }

func (e *readError) invalid(what string) error {
	if errors.Is(e.error, ErrInvalid) || errors.Is(e.error, context.Canceled) || errors.Is(e.error, context.DeadlineExceeded) {
		return fmt.Errorf("%s: %w", what, e.error)
	}
	return fmt.Errorf("%w: %s: %v", ErrInvalid, what, e.error)
}

func copyAll(w io.Writer, r io.Reader) error {
	buf := make([]byte, 128<<10)
	for {
		n, err := r.Read(buf)
		if n > 0 {
			if _, err := w.Write(buf[:n]); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return &readError{err}
		}
	}
}
