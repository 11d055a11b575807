package cgroup

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// A counter counts the OOM events that the kernel notifies of in one v1 group:
// the group's own limit was hit, or that of a group above it.
type counter struct {
	file *os.File // a non-blocking eventfd, waited for by Go's poller
	mu   sync.Mutex
	n    int64
}

// countOOMs begins to count in d.
func countOOMs(d dir) (*counter, error) {
	fail := func(err error) (*counter, error) {
		return nil, fmt.Errorf("watch memory.oom_control of %s: %w", d.path, err)
	}
	efd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return fail(err)
	}
	file := os.NewFile(uintptr(efd), "eventfd")
	fd, err := d.file("memory.oom_control", unix.O_RDONLY)
	if err == nil {
		err = d.write("cgroup.event_control", fmt.Sprintf("%d %d", efd, fd))
		unix.Close(fd)
	}
	if err != nil {
		file.Close()
		return fail(err)
	}
	return &counter{file: file}, nil
}

// drain takes what the eventfd has and returns the count.
func (c *counter) drain(fd uintptr) int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	var b [8]byte
	retry(func() error { // EAGAIN: nothing new
		n, err := unix.Read(int(fd), b[:])
		if n == len(b) {
			c.n += int64(native(b))
		}
		return err
	})
	return c.n
}

// ooms counts in b, that is, in the launcher's own group and above.
func (b *hierarchy) ooms() (_ *counter, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.count == nil {
		b.count, err = countOOMs(b.dir)
	}
	return b.count, err
}

// count returns the number of events so far.
func (c *counter) count() (n int64, err error) {
	rc, err := c.file.SyscallConn()
	if err == nil {
		err = rc.Control(func(fd uintptr) { n = c.drain(fd) })
	}
	return n, err
}

// wait blocks until the count is not seen. It fails when the file is closed.
func (c *counter) wait(seen int64) (n int64, err error) {
	rc, err := c.file.SyscallConn()
	if err == nil {
		err = rc.Read(func(fd uintptr) bool { n = c.drain(fd); return n != seen })
	}
	return n, err
}

// events1 is OOM evidence by notification. The kernel notifies a group and all
// below it when the group's limit is hit and reclaim did not help, each time
// before it kills one process. So an event of the launcher's own group is also
// one of the leaf, and the leaf's other events are of its own limit.
type events1 struct {
	leaf  *counter
	base  *hierarchy
	start int64 // the count of base when the leaf was made
	oom   int   // memory.oom_control, for the goroutine below

	once sync.Once
	ch   chan struct{}
	stop chan struct{}
	done sync.WaitGroup
}

func (v1) watch(h *hierarchy, d dir) (watch, error) {
	w := &events1{base: h, ch: make(chan struct{}), stop: make(chan struct{})}
	// First the base: an event between the two steps must not look like one of
	// the leaf alone. Without it the leaf can still be watched.
	base, err := h.ooms()
	if err == nil {
		w.start, err = base.count()
	}
	if err != nil && transient(err) {
		return nil, err
	}
	if w.leaf, err = countOOMs(d); err != nil {
		return nil, err
	}
	if w.oom, err = d.file("memory.oom_control", unix.O_RDONLY); err != nil {
		w.leaf.file.Close()
		return nil, fmt.Errorf("open memory.oom_control of %s: %w", d.path, err)
	}
	return w, nil
}

func (w *events1) fired() <-chan struct{} {
	w.once.Do(func() { w.done.Go(w.run) })
	return w.ch
}

// settle bounds how long after a notification the kill is looked for. The
// kernel kills right after it, unless other OOM kills are before this one.
const settle = 2 * time.Second

// run waits for a notification and then for a kill in this very leaf: the one
// that died can be in another leaf if the limit was that of a group above.
func (w *events1) run() {
	for seen := int64(0); ; {
		var err error
		if seen, err = w.leaf.wait(seen); err != nil {
			return
		}
		pause := 50 * time.Microsecond
		for end := time.Now().Add(settle); time.Now().Before(end); pause = min(2*pause, 10*time.Millisecond) {
			data, err := readFD(w.oom)
			if err != nil {
				return // the group was removed
			}
			if n, _ := keyed(data, "oom_kill"); n > 0 {
				close(w.ch)
				return
			}
			select {
			case <-w.stop:
				return
			case <-time.After(pause):
			}
		}
	}
}

func (w *events1) close() {
	w.once.Do(func() {}) // no goroutine after this
	close(w.stop)
	w.leaf.file.Close()
	w.done.Wait()
	unix.Close(w.oom)
}

func (w *events1) scope(dir) (Scope, error) {
	base, err := w.base.ooms()
	if err != nil {
		return "", err
	}
	for {
		before, err1 := base.count()
		mine, err2 := w.leaf.count()
		after, err3 := base.count()
		if err := errors.Join(err1, err2, err3); err != nil {
			return "", err
		}
		above := after - w.start
		switch {
		case before != after:
			continue // the two counts are not of the same moment
		case mine > above:
			return Self, nil
		case mine > 0:
			return Ancestor, nil
		}
		return Machine, nil
	}
}
