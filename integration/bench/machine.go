package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"example.com/jail/cgroup"
	"example.com/jail/integration/internal/measure"
)

// machine measures a function: wall clock and CPU time of the whole machine,
// without what the machine uses when nothing is measured.
func (b *bench) machine(f func() error) (wall, cpu time.Duration, err error) {
	before, processors, err := measure.Idle()
	if err != nil {
		return 0, 0, err
	}
	began := time.Now()
	if err := f(); err != nil {
		return 0, 0, err
	}
	wall = time.Since(began)
	after, _, err := measure.Idle()
	return wall, time.Duration(float64(wall)*(float64(processors)-b.idle)) - (after - before), err
}

// baseline finds what the machine uses when nothing is measured.
func (b *bench) baseline(ctx context.Context) error {
	b.idle = 0
	wall, cpu, err := b.machine(func() error {
		for end := time.Now().Add(2 * b.cell); time.Now().Before(end); {
			if err := rest(ctx, b.pause); err != nil {
				return err
			}
		}
		return nil
	})
	b.idle = float64(cpu) / float64(max(wall, 1))
	return err
}

// holdings is what this process has. Goroutines and descriptors of runs that have
// ended may need a moment to go.
type holdings struct {
	fds, goroutines, children int
	rss                       int64
}

func held() (holdings, error) {
	debug.FreeOSMemory()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return holdings{}, err
	}
	rss, err := statusBytes(os.Getpid(), "VmRSS")
	return holdings{len(fds), runtime.NumGoroutine(), len(descendants(os.Getpid())), rss}, err
}

// backTo waits until this process has no more than before, memory aside.
func (before holdings) backTo(ctx context.Context) (after holdings, err error) {
	for end := time.Now().Add(10 * time.Second); ; {
		if after, err = held(); err != nil {
			return after, err
		}
		if after.fds <= before.fds && after.goroutines <= before.goroutines && after.children <= before.children {
			return after, nil
		}
		if time.Now().After(end) {
			return after, fmt.Errorf("left behind: %s", after.against(before))
		}
		if err := rest(ctx, 20*time.Millisecond); err != nil {
			return after, err
		}
	}
}

// against is a line with what this process had before and has now.
func (after holdings) against(before holdings) string {
	return fmt.Sprintf("the launcher before and after: descriptors %d, %d; goroutines %d, %d; processes %d, %d; memory (VmRSS) %.1f, %.1f MiB",
		before.fds, after.fds, before.goroutines, after.goroutines, before.children, after.children, float64(before.rss)/(1<<20), float64(after.rss)/(1<<20))
}

// statusBytes reads a size from a process's status, VmRSS or VmHWM.
func statusBytes(pid int, key string) (int64, error) {
	name := fmt.Sprintf("/proc/%d/status", pid)
	b, err := os.ReadFile(name)
	if err != nil {
		return 0, err
	}
	return kib(name, string(b), key)
}

// kib finds a line "Key: N kB" and returns bytes.
func kib(name, text, key string) (int64, error) {
	for line := range strings.Lines(text) {
		if rest, ok := strings.CutPrefix(line, key+":"); ok {
			n, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
			return n << 10, err
		}
	}
	return 0, fmt.Errorf("%s has no %s", name, key)
}

// descendants lists the processes below one.
func descendants(pid int) []int {
	all := children(pid)
	for _, child := range all {
		all = append(all, descendants(child)...)
	}
	return all
}

// children leaves the forker out, which is there once for all jails.
func children(pid int) []int {
	var all []int
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, f := range files {
		b, _ := os.ReadFile(f) // none of a thread that ended
		for _, child := range strings.Fields(string(b)) {
			comm, _ := os.ReadFile("/proc/" + child + "/comm")
			if n, err := strconv.Atoi(child); err == nil && string(comm) != "jail-forker\n" {
				all = append(all, n)
			}
		}
	}
	return all
}

// death is when a process died, by now.
type death struct {
	at  time.Duration
	err error
}

// awaitChild tells when the only child of this process, the pid 1 of a jail, is
// dead. It does not reap it.
func awaitChild() <-chan death {
	c := make(chan death, 1)
	all := children(os.Getpid())
	if len(all) != 1 {
		c <- death{err: fmt.Errorf("%d children, want the jail's pid 1 alone", len(all))}
		return c
	}
	fd, err := unix.PidfdOpen(all[0], 0)
	if err != nil {
		c <- death{err: err}
		return c
	}
	go func() {
		defer unix.Close(fd)
		for {
			_, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, -1)
			if !errors.Is(err, unix.EINTR) {
				c <- death{now(), err}
				return
			}
		}
	}()
	return c
}

// pss sums the proportional memory of processes; want is how many there have to
// be.
func pss(pids []int, want int) (int64, error) {
	var sum int64
	if len(pids) != want {
		return 0, fmt.Errorf("%d processes in the jails, want %d", len(pids), want)
	}
	for _, pid := range pids {
		name := fmt.Sprintf("/proc/%d/smaps_rollup", pid)
		b, err := os.ReadFile(name)
		if err != nil {
			return 0, err
		}
		n, err := kib(name, string(b), "Pss")
		if err != nil {
			return 0, err
		}
		sum += n
	}
	return sum, nil
}

// charge reads the bytes that the kernel counts for the leaves of runs.
func charge(ids []string) (int64, error) {
	var sum int64
	for _, id := range ids {
		b, err := leafFile(id, "memory.current", "memory.usage_in_bytes")
		if err != nil {
			return 0, err
		}
		n, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
		if err != nil {
			return 0, err
		}
		sum += n
	}
	return sum, nil
}

// leafFile reads a file of a run's leaf that has one name on cgroup v2 and
// another on v1.
func leafFile(id, two, one string) ([]byte, error) {
	dir, err := leafDir(id)
	if err != nil {
		return nil, err
	}
	b, err := os.ReadFile(filepath.Join(dir, two))
	if errors.Is(err, os.ErrNotExist) {
		b, err = os.ReadFile(filepath.Join(dir, one))
	}
	return b, err
}

// leafDir is the directory of a run's leaf in the hierarchy that limits memory.
func leafDir(id string) (string, error) {
	host, err := cgroup.Probe()
	if err != nil {
		return "", err
	}
	s := host.Support(cgroup.Memory)
	return filepath.Join(s.Dir, id), s.Err
}

// dyingGroups reads how many removed cgroups the kernel still holds, -1 where
// there is no cgroup v2.
func dyingGroups() int {
	for _, f := range []string{"/sys/fs/cgroup/cgroup.stat", "/sys/fs/cgroup/unified/cgroup.stat"} {
		b, _ := os.ReadFile(f)
		for line := range strings.Lines(string(b)) {
			if n, ok := strings.CutPrefix(line, "nr_dying_descendants "); ok {
				if n, err := strconv.Atoi(strings.TrimSpace(n)); err == nil {
					return n
				}
			}
		}
	}
	return -1
}

// awaitDying waits until the kernel holds no more removed cgroups than before,
// and returns a line with both numbers. Others of this machine make and remove
// groups, too: it fails if a tenth of n groups is left.
func awaitDying(ctx context.Context, before, n int) (line string, err error) {
	if before < 0 {
		return "dying cgroups (nr_dying_descendants): not counted without cgroup v2", nil
	}
	began := time.Now()
	after := dyingGroups()
	for after > before && time.Since(began) < 30*time.Second {
		if err := rest(ctx, 50*time.Millisecond); err != nil {
			return "", err
		}
		after = dyingGroups()
	}
	if after > before+n/10 {
		err = fmt.Errorf("%d dying cgroups are left of %d jails", after-before, n)
	}
	return fmt.Sprintf("dying cgroups (nr_dying_descendants): %d before, %d %.1f s after", before, after, time.Since(began).Seconds()), err
}

// now is CLOCK_MONOTONIC, which programs in a jail can read, too.
func now() time.Duration {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
	return time.Duration(ts.Nano())
}
