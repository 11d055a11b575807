package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"example.com/jail/jail"
	"example.com/jail/rootfs"
)

// benchLimits prints how late the limits act: alone, and beside many jails that
// are alive.
func benchLimits(cache *rootfs.Cache, alive int) error {
	dying := dyingGroups()
	fmt.Printf("\nlimits, from the moment they are reached; %d runs each\n", lateRuns)
	if err := lateness(cache, "alone"); err != nil {
		return err
	}

	ctx, end := context.WithCancel(context.Background())
	defer end()
	var wg sync.WaitGroup
	start := time.Now()
	for range alive {
		spec := benchSpec(cache, target, "sleep", "3600")
		spec.Budget.WallClock = time.Hour
		j, err := jail.Start(ctx, spec)
		if err != nil {
			return fmt.Errorf("start a jail beside others: %w", err)
		}
		wg.Go(func() { _, _ = j.Wait() })
	}
	fmt.Printf("%d jails started after each other in %.0f ms\n", alive, time.Since(start).Seconds()*1e3)
	if err := lateness(cache, fmt.Sprintf("beside %d jails", alive)); err != nil {
		return err
	}
	start = time.Now()
	end()
	wg.Wait()
	fmt.Printf("%d jails killed and removed in %.0f ms\n", alive, time.Since(start).Seconds()*1e3)

	var over []time.Duration // bytes, for the percentiles
	for range 20 {
		spec := benchSpec(cache, "/usr/bin/python3", "-I", "-S", "-c", "x = bytearray(1 << 29)")
		spec.Budget.MaxMemory = 64 << 20
		r, err := jail.Run(context.Background(), spec)
		if err != nil {
			return err
		}
		if r.Cause != jail.CauseMemory {
			return fmt.Errorf("memory hog: cause %s", r.Cause)
		}
		over = append(over, time.Duration(max(r.Memory.PeakBytes-64<<20, 0)))
	}
	slices.Sort(over)
	fmt.Printf("memory peak over a limit of 64 MiB: at most %d bytes in %d runs\n", over[len(over)-1], len(over))
	start = time.Now()
	after := dyingGroups()
	for after != dying && time.Since(start) < 10*time.Second {
		time.Sleep(100 * time.Millisecond)
		after = dyingGroups()
	}
	if dying != "" {
		fmt.Printf("dying cgroups (nr_dying_descendants): %s before, %s %.1f s after\n", dying, after, time.Since(start).Seconds())
	}
	return nil
}

const lateRuns = 40

func benchSpec(cache *rootfs.Cache, args ...string) jail.Spec {
	return jail.Spec{Args: args, Budget: jail.DefaultBudget(), Templates: cache}
}

func lateness(cache *rootfs.Cache, where string) error {
	const wall = 100 * time.Millisecond
	var dead, reported, killed []time.Duration
	for range lateRuns {
		spec := benchSpec(cache, target, "sleep", "3600")
		spec.Budget.WallClock = wall
		j, err := jail.Start(context.Background(), spec)
		if err != nil {
			return err
		}
		started := time.Now()
		r, err := j.Wait()
		if err != nil {
			return err
		}
		if r.Cause != jail.CauseWall {
			return fmt.Errorf("wall clock: cause %s: %s", r.Cause, r.Error)
		}
		dead = append(dead, time.Duration(r.WallNS)-wall)
		reported = append(reported, time.Since(started)-wall)

		spec.Budget.WallClock = time.Hour
		if j, err = jail.Start(context.Background(), spec); err != nil {
			return err
		}
		time.Sleep(10 * time.Millisecond)
		at := time.Now()
		j.Kill()
		if _, err := j.Wait(); err != nil {
			return err
		}
		killed = append(killed, time.Since(at))
	}
	for _, row := range []struct {
		name string
		d    []time.Duration
	}{{"wall clock to all dead", dead}, {"wall clock to report, leaf removed", reported}, {"Kill to report, leaf removed", killed}} {
		slices.Sort(row.d)
		n := len(row.d)
		fmt.Printf("%-36s %-16s p50 %6.2f ms  p95 %6.2f ms  max %6.2f ms\n", row.name, where,
			row.d[n/2].Seconds()*1e3, row.d[n*95/100].Seconds()*1e3, row.d[n-1].Seconds()*1e3)
	}
	return nil
}

// dyingGroups reads how many removed cgroups the kernel still holds, "" where
// there is no cgroup v2.
func dyingGroups() string {
	for _, f := range []string{"/sys/fs/cgroup/cgroup.stat", "/sys/fs/cgroup/unified/cgroup.stat"} {
		b, err := os.ReadFile(f)
		if err != nil {
			continue
		}
		for _, line := range strings.Split(string(b), "\n") {
			if n, ok := strings.CutPrefix(line, "nr_dying_descendants "); ok {
				return n
			}
		}
	}
	return ""
}
