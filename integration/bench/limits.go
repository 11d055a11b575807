package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"example.com/jail/cgroup"
	"example.com/jail/jail"
)

// limits prints how late the limits act, how exact they are and what it costs to
// look at them.
func (b *bench) limits(ctx context.Context) error {
	for _, part := range []func(context.Context) error{b.lateness, b.memory, b.processorTime, b.processorRate, b.statistics} {
		if err := part(ctx); err != nil {
			return err
		}
	}
	return nil
}

// lateBy runs a program that its wall clock ends, and returns how late all of it
// was dead and how late the report came.
func lateBy(ctx context.Context, spec jail.Spec) ([]time.Duration, error) {
	j, err := jail.Start(ctx, spec)
	if err != nil {
		return nil, err
	}
	started := time.Now()
	r, err := j.Wait()
	reported := time.Since(started)
	if err := expect(ctx, jail.CauseWall, r, err); err != nil {
		return nil, err
	}
	return []time.Duration{time.Duration(r.WallNS) - spec.Budget.WallClock, reported - spec.Budget.WallClock}, nil
}

// killIn measures the end of a jail by Kill, to its report.
func killIn(ctx context.Context, spec jail.Spec) ([]time.Duration, error) {
	j, err := jail.Start(ctx, spec)
	if err != nil {
		return nil, err
	}
	waitErr := rest(ctx, 10*time.Millisecond) // the program is asleep by then
	t := time.Now()
	j.Kill()
	r, err := j.Wait()
	d := time.Since(t)
	return []time.Duration{d}, errors.Join(waitErr, expect(ctx, jail.CauseCanceled, r, err))
}

// sleeper is a program that does nothing until it is ended.
func (b *bench) sleeper(wall time.Duration) jail.Spec {
	spec := b.spec(target, "sleep", "3600")
	spec.Budget.WallClock = wall
	return spec
}

const shortWall = 100 * time.Millisecond

func (b *bench) lateness(ctx context.Context) error {
	turns := []*turn{
		{name: "wall clock", kinds: []string{"to all dead", "to report, leaf removed"}, do: func(ctx context.Context) ([]time.Duration, error) {
			return lateBy(ctx, b.sleeper(shortWall))
		}},
		{name: "Kill", kinds: []string{"to report, leaf removed"}, do: func(ctx context.Context) ([]time.Duration, error) {
			return killIn(ctx, b.sleeper(time.Hour))
		}},
	}
	if err := b.interleave(ctx, b.part(40), turns); err != nil {
		return err
	}
	b.method("from the moment a limit is reached, %d runs each; wall clock of %s, to all dead: by the report (wall_ns); to report: from the return of Start, just after the release", b.part(40), shortWall)
	b.times("lateness, ms", time.Millisecond, turns)
	return nil
}

// hog takes memory in steps and tells the time after each.
const hog = `
import os, time
taken = []
while True:
    taken.append(b"x" * (256 << 10))
    os.write(1, b"%d\n" % time.monotonic_ns())
`

func (b *bench) memory(ctx context.Context) error {
	const limit = 64 << 20
	var over int64
	turns := []*turn{{name: "memory", kinds: []string{"last step to report", "kill counted to report", "pid 1 dead to report"}, do: func(ctx context.Context) ([]time.Duration, error) {
		spec := b.spec("/usr/bin/python3", "-I", "-S", "-c", hog)
		spec.Budget.MaxMemory = limit
		var out bytes.Buffer
		spec.Stdout = &out
		j, err := jail.Start(ctx, spec)
		if err != nil {
			return nil, err
		}
		counted := make(chan time.Duration, 1)
		go func() { counted <- killCounted(j.ID()) }()
		dead := awaitChild()
		r, err := j.Wait()
		at := now()
		seen, end := <-counted, <-dead
		if err := errors.Join(expect(ctx, jail.CauseMemory, r, err), end.err); err != nil {
			return nil, err
		}
		if seen == 0 {
			return nil, errors.New("the kernel's counter did not change before the report")
		}
		over = max(over, r.Memory.PeakBytes-limit)
		lines := strings.Fields(out.String())
		if len(lines) < 100 {
			return nil, fmt.Errorf("the program took %d steps of 256 KiB only", len(lines))
		}
		last, err := strconv.ParseInt(lines[len(lines)-1], 10, 64)
		return []time.Duration{at - time.Duration(last), at - seen, at - end.at}, err
	}}}
	rounds := b.part(40)
	if err := b.interleave(ctx, rounds, turns); err != nil {
		return err
	}
	b.method("a program that takes memory in steps of 256 KiB and writes CLOCK_MONOTONIC after each; limit of %s, %d runs\n"+
		"the kernel's kill is after the last of these times: upper bounds, with the last step and the search of the OOM killer in them\n"+
		"counted: from when a thread, which looks every 0.1 ms, saw the leaf's oom_kill counter change; the report has the leaf removed", mib(limit), rounds)
	b.times("out of memory, ms", time.Millisecond, turns)
	fmt.Fprintf(b.out, "memory peak over the limit: at most %d bytes\n", over)
	return nil
}

// killCounted returns when the kernel's counter of OOM kills of a run's leaf was
// first seen not to be 0, and 0 if that did not happen before the leaf was gone.
func killCounted(id string) time.Duration {
	runtime.LockOSThread() // sleeps more exactly than a timer
	defer runtime.UnlockOSThread()
	for {
		b, err := leafFile(id, "memory.events", "memory.oom_control")
		if err != nil {
			return 0
		}
		for line := range strings.Lines(string(b)) {
			if n, ok := strings.CutPrefix(line, "oom_kill "); ok && strings.TrimSpace(n) != "0" {
				return now()
			}
		}
		_ = unix.Nanosleep(&unix.Timespec{Nsec: 50_000}, nil)
	}
}

// loops is a program that keeps n processors busy.
func loops(n int) []string {
	const loop = "while :; do :; done"
	return []string{target, "sh", "-c", strings.Repeat(loop+" & ", n-1) + loop}
}

func (b *bench) processorTime(ctx context.Context) error {
	const budget = 200 * time.Millisecond
	over := func(n int) func(context.Context) ([]time.Duration, error) {
		return func(ctx context.Context) ([]time.Duration, error) {
			spec := b.spec(loops(n)...)
			spec.Budget.CPUTime = budget
			r, err := jail.Run(ctx, spec)
			if err := expect(ctx, jail.CauseCPUTime, r, err); err != nil {
				return nil, err
			}
			used := time.Duration(r.CPUUserNS + r.CPUSystemNS)
			if used < budget {
				return nil, fmt.Errorf("ended after %s of CPU time, before its budget", used)
			}
			return []time.Duration{used - budget}, nil
		}
	}
	turns := []*turn{{name: "1 process", do: over(1)}}
	if n := runtime.NumCPU(); n > 1 {
		turns = append(turns, &turn{name: fmt.Sprintf("%d processes", n), do: over(n)})
	}
	rounds := b.part(40)
	if err := b.interleave(ctx, rounds, turns); err != nil {
		return err
	}
	b.method("busy loops with %s of CPU time for all processes together, %d runs each; used by the report, less the budget", budget, rounds)
	b.times("CPU time over budget, ms", time.Millisecond, turns)
	return nil
}

func (b *bench) processorRate(ctx context.Context) error {
	wall := 2 * time.Second
	if b.quick {
		wall = 500 * time.Millisecond
	}
	rate := func(cpus float64, processes int) *turn {
		return &turn{name: fmt.Sprintf("%g processors, %d busy", cpus, processes), do: func(ctx context.Context) ([]time.Duration, error) {
			spec := b.spec(loops(processes)...)
			spec.Budget.CPUs, spec.Budget.WallClock = cpus, wall
			r, err := jail.Run(ctx, spec)
			if err := expect(ctx, jail.CauseWall, r, err); err != nil {
				return nil, err
			}
			got := float64(r.CPUUserNS+r.CPUSystemNS) / float64(r.WallNS)
			// A period of 100 ms may be begun twice.
			if most := cpus * float64(wall+200*time.Millisecond) / float64(wall) * 1.05; got > most {
				return nil, fmt.Errorf("rate of %.3f processors, want %g", got, cpus)
			}
			return []time.Duration{time.Duration(got * float64(time.Second))}, nil
		}}
	}
	turns := []*turn{rate(0.5, 1), rate(0.5, runtime.NumCPU())}
	rounds := b.part(10)
	if err := b.interleave(ctx, rounds, turns); err != nil {
		return err
	}
	b.method("busy loops for %s with a rate of CPU, %d runs each; CPU time by wall clock of the report, in processors", wall, rounds)
	b.times("CPU rate", time.Second, turns)
	return nil
}

func (b *bench) statistics(ctx context.Context) error {
	host, err := cgroup.Probe()
	if err != nil {
		return err
	}
	leaf, err := host.NewLeaf(fmt.Sprintf("%sbench-%d", cgroup.Prefix, os.Getpid()), cgroup.Limits{Memory: 64 << 20, Pids: 64, CPUTime: true})
	if err != nil {
		return err
	}
	defer leaf.Remove(context.Background())
	turns := []*turn{
		{name: "Leaf.Stats", does: "memory, pids, CPU time", do: timed(func(context.Context) error { _, err := leaf.Stats(); return err })},
		{name: "Leaf.CPUUsage", do: timed(func(context.Context) error { _, err := leaf.CPUUsage(); return err })},
		{name: "Leaf.MemoryUsage", do: timed(func(context.Context) error { _, err := leaf.MemoryUsage(); return err })},
	}
	quick := *b
	quick.pause = 0
	rounds := b.size(2000, 100)
	if err := quick.interleave(ctx, rounds, turns); err != nil {
		return err
	}
	b.method("one call for an empty leaf, %d each, without pauses", rounds)
	b.times("a leaf's statistics, us", time.Microsecond, turns)
	return nil
}
