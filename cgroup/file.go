package cgroup

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// maxFile bounds what is read from one file. The files that are read whole have
// a few hundred bytes.
const maxFile = 64 << 10

// A dir is an open directory of a cgroup hierarchy. Files are opened relative
// to the handle; the path is for messages only.
type dir struct {
	fd   int
	path string
}

// retry calls f until it is not interrupted. Go's own preemption signal
// interrupts writes to memory.limit_in_bytes.
func retry(f func() error) error {
	for {
		if err := f(); err != unix.EINTR {
			return err
		}
	}
}

func openat(fd int, name string, flags int) (int, error) {
	var got int
	err := retry(func() (err error) {
		got, err = unix.Openat(fd, name, flags|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
		return err
	})
	return got, err
}

// file opens a file of the group. The error is bare, for the caller to name
// what it wanted.
func (d dir) file(name string, flags int) (int, error) { return openat(d.fd, name, flags) }

// sub opens a directory below d.
func (d dir) sub(name string) (dir, error) {
	fd, err := openat(d.fd, name, unix.O_RDONLY|unix.O_DIRECTORY)
	return dir{fd, d.path + "/" + name}, err
}

// parent opens the directory above d.
func (d dir) parent() (dir, error) {
	fd, err := openat(d.fd, "..", unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return dir{}, fmt.Errorf("open the cgroup above %s: %w", d.path, err)
	}
	return dir{fd, path.Dir(d.path)}, nil
}

func (d dir) close() { unix.Close(d.fd) }

// exists tells whether the group behind the handle has not been removed: a
// removed group has no files.
func (d dir) exists() bool {
	var st unix.Stat_t
	err := retry(func() error { return unix.Fstatat(d.fd, "cgroup.procs", &st, unix.AT_SYMLINK_NOFOLLOW) })
	return err == nil
}

// readFD reads what fd has from its start, up to maxFile.
func readFD(fd int) ([]byte, error) {
	buf := make([]byte, 0, 1024)
	for {
		if len(buf) == cap(buf) {
			if len(buf) >= maxFile {
				return nil, fmt.Errorf("has more than %d bytes", maxFile)
			}
			buf = append(make([]byte, 0, 4*cap(buf)), buf...)
		}
		var n int
		err := retry(func() (err error) {
			n, err = unix.Pread(fd, buf[len(buf):cap(buf)], int64(len(buf)))
			return err
		})
		if err != nil {
			return nil, err
		}
		if n == 0 {
			return buf, nil
		}
		buf = buf[:len(buf)+n]
	}
}

func writeFD(fd int, value string) error {
	return retry(func() error {
		n, err := unix.Write(fd, []byte(value))
		if err == nil && n != len(value) {
			return io.ErrShortWrite
		}
		return err
	})
}

func (d dir) read(name string) ([]byte, error) {
	fd, err := d.file(name, unix.O_RDONLY)
	if err == nil {
		defer unix.Close(fd)
		var data []byte
		if data, err = readFD(fd); err == nil {
			return data, nil
		}
	}
	return nil, fmt.Errorf("read %s of %s: %w", name, d.path, err)
}

// write writes value to a file of the group.
func (d dir) write(name, value string) error {
	fd, err := d.file(name, unix.O_WRONLY)
	if err == nil {
		defer unix.Close(fd)
		err = writeFD(fd, value)
	}
	if err != nil {
		return fmt.Errorf("set %s of %s to %s: %w", name, d.path, value, err)
	}
	return nil
}

// set writes value to a file of the group and returns its first number after
// that. want is that number as asked for; a result that is greater, or less by
// more than slack, is an error: the limit would not be the one asked for.
func (d dir) set(name, value string, want, slack int64) (int64, error) {
	fd, err := d.file(name, unix.O_RDWR)
	if err != nil {
		return 0, fmt.Errorf("set %s of %s to %s: %w", name, d.path, value, err)
	}
	defer unix.Close(fd)
	if err := writeFD(fd, value); err != nil {
		return 0, fmt.Errorf("set %s of %s to %s: %w", name, d.path, value, err)
	}
	data, err := readFD(fd)
	if err != nil {
		return 0, fmt.Errorf("read %s of %s back: %w", name, d.path, err)
	}
	got, err := number(data)
	if err != nil {
		return 0, fmt.Errorf("read %s of %s back: %w", name, d.path, err)
	}
	if err := compare(want, got, slack); err != nil {
		return 0, &fault{fmt.Errorf("set %s of %s to %s: %w", name, d.path, value, err), fixValue}
	}
	return got, nil
}

// compare judges a value that was read back.
func compare(want, got, slack int64) error {
	if got > want || got < want-slack || got <= 0 && want > 0 {
		if got == math.MaxInt64 {
			return errors.New("reads back as no limit")
		}
		return fmt.Errorf("reads back as %d", got)
	}
	return nil
}

// setOwn is set for a number that the kernel takes as it is.
func (d dir) setOwn(c Controller, version, name string, want, slack int64) (Applied, error) {
	got, err := d.set(name, strconv.FormatInt(want, 10), want, slack)
	return Applied{Controller: c, File: name + " (" + version + ")", Wrote: want, Read: got}, err
}

// number returns the first number of a file. "max" is math.MaxInt64, and so is
// what does not fit.
func number(data []byte) (int64, error) {
	f := bytes.Fields(data)
	if len(f) == 0 {
		return 0, errors.New("is empty")
	}
	return parse(f[0])
}

func parse(word []byte) (int64, error) {
	if string(word) == "max" {
		return math.MaxInt64, nil
	}
	n, err := strconv.ParseInt(string(word), 10, 64)
	if errors.Is(err, strconv.ErrRange) && word[0] != '-' {
		return math.MaxInt64, nil
	}
	if err != nil {
		return 0, fmt.Errorf("%.40q is not a number", word)
	}
	return n, nil
}

// keyed returns the number of the line "key number" of a flat keyed file.
func keyed(data []byte, key string) (int64, bool) {
	for line := range bytes.Lines(data) {
		f := bytes.Fields(line)
		if len(f) == 2 && string(f[0]) == key {
			n, err := parse(f[1])
			return n, err == nil
		}
	}
	return 0, false
}

// count returns the number of a file, -1 if the kernel does not have the file.
func (d dir) count(name string) (int64, error) {
	data, err := d.read(name)
	if err != nil {
		if errors.Is(err, unix.ENOENT) && d.exists() {
			return -1, nil
		}
		return -1, err
	}
	n, err := number(data)
	if err != nil {
		return -1, fmt.Errorf("%s of %s %w", name, d.path, err)
	}
	return n, nil
}

// counts returns the numbers of some keys of a file, -1 for one that it lacks.
func (d dir) counts(name string, keys ...string) ([]int64, error) {
	ns := make([]int64, len(keys))
	data, err := d.read(name)
	if errors.Is(err, unix.ENOENT) && d.exists() {
		err = nil
	}
	for i, key := range keys {
		n, ok := keyed(data, key)
		if !ok {
			n = -1
		}
		ns[i] = n
	}
	return ns, err
}

// span is n units as a duration; -1 stays -1, and what does not fit is the
// greatest duration.
func span(n int64, unit time.Duration) time.Duration {
	switch {
	case n < 0:
		return -1
	case n > math.MaxInt64/int64(unit):
		return math.MaxInt64
	}
	return time.Duration(n) * unit
}

// swapOn tells whether the host has swap. What cannot be found out counts as
// swap: a limit must not rest on a guess.
func swapOn() bool {
	data, err := os.ReadFile("/proc/swaps")
	if err != nil {
		return !errors.Is(err, os.ErrNotExist)
	}
	return strings.Count(strings.TrimSpace(string(data)), "\n") > 0
}
