package cgroup

import (
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// A version is how groups of one cgroup version are limited, read and ended.
type version interface {
	String() string

	// enable makes c usable in the children of base.
	enable(base dir, c Controller) error

	// enter opens the file by which a process gets into d: a v2 directory, or a
	// v1 tasks file.
	enter(d dir) (*os.File, error)

	// limit sets in d what l asks of c, and returns what the kernel made of it.
	limit(d dir, c Controller, l Limits) ([]Applied, error)

	// stats fills in the part of s that c counts in d.
	stats(d dir, c Controller, s *Stats) error

	// pressure returns what the kernel counted of stalls in d. The error is
	// errors.ErrUnsupported if it counts none.
	pressure(d dir) (Pressure, error)

	// cpu returns the CPU time used in d and below.
	cpu(d dir) (time.Duration, error)

	// watch begins to gather evidence of OOM kills in d, a child of h.
	watch(h *hierarchy, d dir) (watch, error)

	// usage is the file that counts the memory used now.
	usage() string

	// refaulted turns the counter of memory.stat into bytes.
	refaulted(n int64) int64

	// kill kills all processes in d and below at once. The error is ENOENT if
	// the kernel has no such operation.
	kill(d dir) error
}

// A watch gathers evidence of OOM kills in one leaf.
type watch interface {
	// fired is closed after the first OOM kill, if the kernel leaves the rest of
	// the leaf alive. It is nil if the kernel kills the whole leaf.
	fired() <-chan struct{}
	// scope tells whose limit was hit.
	scope(d dir) (Scope, error)
	// close frees everything and waits for the watch's goroutine.
	close()
}

// v1 has one hierarchy a controller, or several controllers on one.
type v1 struct{}

func (v1) String() string { return "v1" }

func (v1) enable(dir, Controller) error { return nil }

func (v1) usage() string { return "memory.usage_in_bytes" }

// Some older kernels print bytes on v1, newer ones pages (memcg_page_state_output).
func (v1) refaulted(n int64) int64 {
	if page := int64(os.Getpagesize()); n%page != 0 {
		return n * page
	}
	return n
}

func (v1) kill(dir) error { return unix.ENOENT }

func (v1) enter(d dir) (*os.File, error) {
	// A group inherits its parent's notify_on_release. With it, the host's
	// release agent removes the leaf when its last process ends, and the
	// counters with it.
	if n, err := d.count("notify_on_release"); err != nil {
		return nil, err
	} else if n > 0 {
		if err := d.write("notify_on_release", "0"); err != nil {
			return nil, err
		}
	}
	fd, err := d.file("tasks", unix.O_WRONLY)
	if err != nil {
		return nil, fmt.Errorf("open tasks of %s: %w", d.path, err)
	}
	return os.NewFile(uintptr(fd), d.path+"/tasks"), nil
}

func (v v1) limit(d dir, c Controller, l Limits) ([]Applied, error) {
	switch c {
	case Memory:
		return v.limitMemory(d, l)
	case Pids:
		a, err := d.setOwn(c, "v1", "pids.max", l.Pids, 0)
		return []Applied{a}, err
	case CPU:
		per, err := d.count("cpu.cfs_period_us")
		if err != nil {
			return nil, err
		}
		a, err := d.setOwn(c, "v1", "cpu.cfs_quota_us", l.quota(per), 0)
		return []Applied{a}, err
	case CPUSet:
		return v.limitCPUSet(d, l.CPUSet)
	case IO:
		return v.limitIO(d, l.IO)
	case CPUAcct:
		_, err := v.cpu(d)
		return nil, err
	}
	return nil, fmt.Errorf("unknown controller %q", c)
}

func (v1) limitMemory(d dir, l Limits) ([]Applied, error) {
	if l.MemoryHigh > 0 {
		// memory.soft_limit_in_bytes is looked at when the host runs out, and
		// slows nobody down before.
		return nil, &fault{fmt.Errorf("set memory.high to %d: cgroup v1 has no such limit", l.MemoryHigh), fixHigh}
	}
	limit := l.Memory
	// Memory first: memsw may not be less than it.
	slack := int64(os.Getpagesize() - 1)
	a, err := d.setOwn(Memory, "v1", "memory.limit_in_bytes", limit, slack)
	if errors.Is(err, unix.EINVAL) {
		// A limit that is raised: memsw may not be less at any time.
		if _, err = d.setOwn(Memory, "v1", "memory.memsw.limit_in_bytes", limit, slack); err == nil {
			a, err = d.setOwn(Memory, "v1", "memory.limit_in_bytes", limit, slack)
		}
	}
	if err != nil {
		return nil, err
	}
	as := []Applied{a}
	a, err = d.setOwn(Memory, "v1", "memory.memsw.limit_in_bytes", limit, slack)
	switch {
	case err == nil:
		as = append(as, a)
	case !errors.Is(err, unix.ENOENT):
		return nil, err
	case swapOn():
		return nil, noSwapFile("memory.memsw.limit_in_bytes", d)
	}
	// A group inherits its parent's oom_kill_disable. With it, tasks at the
	// limit would sleep for ever instead of being killed.
	ns, err := d.counts("memory.oom_control", "oom_kill_disable", "oom_kill")
	if err != nil {
		return nil, err
	}
	if ns[0] != 0 {
		if err := d.write("memory.oom_control", "0"); err != nil {
			return nil, err
		}
		if ns, err = d.counts("memory.oom_control", "oom_kill_disable", "oom_kill"); err != nil {
			return nil, err
		}
		if ns[0] != 0 {
			return nil, fmt.Errorf("oom_kill_disable of %s stays %d", d.path, ns[0])
		}
		as = append(as, Applied{Controller: Memory, File: "memory.oom_control (v1)", Read: ns[0]})
	}
	if ns[1] < 0 {
		return nil, fmt.Errorf("memory.oom_control of %s counts no OOM kills", d.path)
	}
	return as, nil
}

func noSwapFile(name string, d dir) error {
	return &fault{fmt.Errorf("set %s of %s: no such file: %w", name, d.path, ErrSwap), fixSwap}
}

func (v v1) stats(d dir, c Controller, s *Stats) (err error) {
	switch c {
	case Memory:
		if s.MemoryPeak, err = d.count("memory.max_usage_in_bytes"); err != nil {
			return err
		}
		ns, err := d.counts("memory.oom_control", "oom_kill")
		s.OOMKills = ns[0]
		return err
	case Pids:
		return pidsStats(d, s)
	case CPU:
		ns, err := d.counts("cpu.stat", "nr_throttled", "throttled_time")
		s.ThrottledPeriods, s.Throttled = ns[0], span(ns[1], time.Nanosecond)
		return err
	case CPUAcct:
		user, err := d.count("cpuacct.usage_user")
		if err != nil {
			return err
		}
		system, err := d.count("cpuacct.usage_sys")
		if err != nil {
			return err
		}
		all, err := d.count("cpuacct.usage")
		s.CPUUser, s.CPUSystem = split(all, user, system)
		return err
	}
	return nil
}

// split divides the CPU time used, which is exact, in the proportion of two
// parts that are only sampled, at each tick. v2 does the same in the kernel.
func split(all, user, system int64) (time.Duration, time.Duration) {
	if all < 0 || user < 0 || system < 0 {
		return -1, -1
	}
	part := time.Duration(all)
	if user+system > 0 {
		part = time.Duration(float64(all) * (float64(user) / float64(user+system)))
	}
	return part, time.Duration(all) - part
}

// pidsStats reads files that both versions have.
func pidsStats(d dir, s *Stats) (err error) {
	if s.PidsPeak, err = d.count("pids.peak"); err != nil {
		return err
	}
	ns, err := d.counts("pids.events", "max")
	s.PidsRefused = ns[0]
	return err
}

func (v1) cpu(d dir) (time.Duration, error) {
	data, err := d.read("cpuacct.usage")
	if err != nil {
		return 0, err
	}
	n, err := number(data)
	if err != nil {
		return 0, fmt.Errorf("cpuacct.usage of %s %w", d.path, err)
	}
	return span(n, time.Nanosecond), nil
}
