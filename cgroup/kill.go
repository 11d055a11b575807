package cgroup

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"example.com/jail/internal/faults"
)

func native(b [8]byte) uint64 { return binary.NativeEndian.Uint64(b[:]) }

// maxGroups bounds the groups below one leaf that are searched for processes.
const maxGroups = 4096

// A part is a leaf's group in one hierarchy.
type part struct {
	base        *hierarchy
	dir         dir
	name        string
	controllers []Controller

	gone    atomic.Bool
	refused atomic.Int64 // PidsRefused before stopForks, -1 if that was not needed
}

// procs calls f for each process of the group itself. The pid is 0 if it is of
// another pid namespace.
func (d dir) procs(f func(pid int)) error {
	fd, err := d.file("cgroup.procs", unix.O_RDONLY)
	if err != nil {
		return fmt.Errorf("read cgroup.procs of %s: %w", d.path, err)
	}
	defer unix.Close(fd)
	lines := bufio.NewScanner(fdReader(fd))
	for lines.Scan() {
		pid, err := strconv.Atoi(lines.Text())
		if err != nil {
			return fmt.Errorf("read cgroup.procs of %s: %w", d.path, err)
		}
		f(pid)
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("read cgroup.procs of %s: %w", d.path, err)
	}
	return nil
}

// fdReader reads from a descriptor that someone else closes.
type fdReader int

func (r fdReader) Read(b []byte) (n int, err error) {
	err = retry(func() (err error) { n, err = unix.Read(int(r), b); return err })
	if n == 0 && err == nil {
		err = io.EOF
	}
	return max(n, 0), err
}

// child returns the name of some group in d, "" if there is none.
func (d dir) child() (string, error) {
	var found string
	err := d.children(func(name string) bool { found = name; return false })
	return found, err
}

// children calls f for each group in d until it returns false.
func (d dir) children(f func(name string) bool) error {
	fd, err := openat(d.fd, ".", unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return fmt.Errorf("list %s: %w", d.path, err)
	}
	file := os.NewFile(uintptr(fd), d.path)
	defer file.Close()
	for {
		entries, err := file.ReadDir(256)
		for _, e := range entries {
			if e.IsDir() && !f(e.Name()) {
				return nil
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return fmt.Errorf("list %s: %w", d.path, err)
		}
	}
}

// walk calls f for d and the groups below it. A group that is removed meanwhile
// is left out.
func (d dir) walk(f func(dir) error) error {
	if err := f(d); err != nil {
		return err
	}
	var todo []string // paths relative to d
	list := func(at dir, rel string) error {
		err := at.children(func(name string) bool { todo = append(todo, rel+name); return len(todo) < maxGroups })
		if err == nil && len(todo) >= maxGroups {
			err = fmt.Errorf("%s has %d groups or more", d.path, maxGroups)
		}
		return err
	}
	if err := list(d, ""); err != nil {
		return err
	}
	for i := 0; i < len(todo); i++ {
		at, err := d.sub(todo[i])
		if err == nil {
			if err = f(at); err == nil {
				err = list(at, todo[i]+"/")
			}
			at.close()
		}
		if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENODEV) {
			return err
		}
	}
	return nil
}

// population counts the processes in d and below.
func (d dir) population() (n int, err error) {
	err = d.walk(func(at dir) error { return at.procs(func(int) { n++ }) })
	return n, err
}

// signalAll sends SIGKILL to each process in d and below, and returns how many
// it saw. A pid can be used anew between reading and signalling; so the process
// is pinned first, and signalled only if its pid is still in the group then.
func signalAll(d dir) (seen int, err error) {
	err = d.walk(func(at dir) error {
		var pids []int
		if err := at.procs(func(pid int) { pids = append(pids, pid) }); err != nil {
			return err
		}
		seen += len(pids)
		var errs error
		for len(pids) > 0 {
			n := min(len(pids), 64) // descriptors at a time
			errs = errors.Join(errs, signal(at, pids[:n]))
			pids = pids[n:]
		}
		return errs
	})
	return seen, err
}

func signal(d dir, pids []int) error {
	var errs error
	pinned := make(map[int]int, len(pids))
	defer func() {
		for _, fd := range pinned {
			unix.Close(fd)
		}
	}()
	for _, pid := range pids {
		if pid == 0 {
			errs = fmt.Errorf("kill a process in %s: it is in another pid namespace", d.path)
			continue
		}
		fd, err := unix.PidfdOpen(pid, 0)
		if err == nil {
			pinned[pid] = fd
		} else if err != unix.ESRCH {
			errs = fmt.Errorf("kill process %d in %s: %w", pid, d.path, err)
		}
	}
	err := d.procs(func(pid int) {
		if fd, ok := pinned[pid]; ok {
			if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && err != unix.ESRCH {
				errs = fmt.Errorf("kill process %d in %s: %w", pid, d.path, err)
			}
		}
	})
	return errors.Join(errs, err)
}

// stopForks lets no process in p fork any more, so that killing one by one
// comes to an end. The refusals that this causes are kept out of the books.
func (p *part) stopForks() {
	ns, err := p.dir.counts("pids.events", "max")
	if err != nil || ns[0] < 0 {
		return
	}
	p.refused.CompareAndSwap(-1, ns[0])
	// Without it the loop of killOneByOne can still win.
	_ = p.dir.write("pids.max", "0")
}

// kill kills everything in the parts: at once where the kernel can, else one by
// one.
func kill(parts []*part, within time.Duration) error {
	var errs error
	for _, p := range parts {
		if p.gone.Load() {
			continue
		}
		switch err := p.base.version.kill(p.dir); {
		case err == nil:
			return nil
		case !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENODEV):
			errs = errors.Join(errs, err)
		}
	}
	return errors.Join(errs, killOneByOne(parts, within))
}

func killOneByOne(parts []*part, within time.Duration) error {
	for _, p := range parts {
		if !p.gone.Load() {
			p.stopForks()
		}
	}
	end := time.Now().Add(within)
	for pause := 100 * time.Microsecond; ; pause = min(2*pause, 10*time.Millisecond) {
		seen, errs := 0, error(nil)
		for _, p := range parts {
			if p.gone.Load() {
				continue
			}
			n, err := signalAll(p.dir)
			if err != nil && p.dir.exists() {
				errs = errors.Join(errs, err)
			}
			seen += n
		}
		if seen == 0 {
			return errs
		}
		if time.Now().After(end) {
			return errors.Join(errs, fmt.Errorf("%d processes in %s are alive %v after SIGKILL", seen, parts[0].name, within))
		}
		time.Sleep(pause)
	}
}

// removeTree removes the group and those below it, however deep they are, with
// two handles at a time.
func (p *part) removeTree() error {
	if !p.dir.exists() {
		return nil // so that another group that has the name by now is left alone
	}
	err := rmdir(p.base.dir.fd, p.name)
	if err != unix.EBUSY {
		return err
	}
	names := []string{}
	at := p.dir
	defer func() {
		if at.fd != p.dir.fd {
			at.close()
		}
	}()
	move := func(name string) error {
		fd, err := openat(at.fd, name, unix.O_RDONLY|unix.O_DIRECTORY)
		if err != nil {
			return err
		}
		if at.fd != p.dir.fd {
			at.close()
		}
		at = dir{fd, p.dir.path}
		return nil
	}
	for {
		name, err := at.child()
		if err != nil {
			return err
		}
		if name != "" {
			if err := move(name); err == unix.ENOENT {
				continue
			} else if err != nil {
				return err
			}
			names = append(names, name)
			continue
		}
		if len(names) == 0 {
			return rmdir(p.base.dir.fd, p.name)
		}
		if err := move(".."); err != nil {
			return err
		}
		name, names = names[len(names)-1], names[:len(names)-1]
		if err := rmdir(at.fd, name); err != nil {
			return err
		}
	}
}

func rmdir(fd int, name string) error {
	err := retry(func() error { return unix.Unlinkat(fd, name, unix.AT_REMOVEDIR) })
	if err == unix.ENOENT {
		return nil
	}
	return err
}

// remove removes all parts. What it finds alive it kills. A task that is dying
// keeps its group busy for a moment.
func remove(ctx context.Context, parts []*part) error {
	var swept time.Time
	for pause := 50 * time.Microsecond; ; pause = min(2*pause, 5*time.Millisecond) {
		var errs error
		for _, p := range parts {
			if p.gone.Load() {
				continue
			}
			if err := p.removeTree(); err != nil {
				errs = errors.Join(errs, fmt.Errorf("remove cgroup %s: %w", p.dir.path, err))
				continue
			}
			p.gone.Store(true)
			faults.Here("cgroup.remove")
		}
		if errs == nil {
			return nil
		}
		if time.Since(swept) > 20*time.Millisecond {
			for _, p := range parts {
				if p.gone.Load() {
					continue
				}
				if err := p.base.version.kill(p.dir); err != nil {
					p.stopForks()
					_, _ = signalAll(p.dir) // what is left is reported below
				}
			}
			swept = time.Now()
		}
		select {
		case <-ctx.Done():
			n := 0
			for _, p := range parts {
				if !p.gone.Load() {
					m, err := p.dir.population()
					n, errs = max(n, m), errors.Join(errs, err)
				}
			}
			return errors.Join(fmt.Errorf("%d processes to be seen: %w", n, context.Cause(ctx)), errs)
		case <-time.After(pause):
		}
	}
}
