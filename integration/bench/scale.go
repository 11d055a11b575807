package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"example.com/jail/cgroup"
	"example.com/jail/jail"
)

// scale prints what many jails that are alive do to the next one, and what they
// need.
//
// What grows with their number is looked for in the stages of a start, measured
// apart: the leaf, each kind of namespace, and a start with as many descriptors but
// no jail. The last one is what bends: a fork copies the table of descriptors, and
// the exec closes each of them again.
func (b *bench) scale(ctx context.Context) error {
	before, err := held()
	if err != nil {
		return err
	}
	dying := dyingGroups()

	c := &crowd{b: b, before: before}
	// Also after a failure, so that nothing is alive when the templates go.
	defer c.end(ctx)
	var columns []string
	var stages [][]*turn
	var footprints []*footprint
	measure := func(name string) error {
		turns := b.stages()
		if err := b.interleave(ctx, b.part(30), turns); err != nil {
			return err
		}
		columns, stages = append(columns, name), append(stages, turns)
		return nil
	}
	for _, n := range []int{1, b.size(100, 10), b.size(1000, 40)} {
		took, err := c.grow(ctx, n)
		if err != nil {
			return err
		}
		f, err := c.footprint(took)
		if err != nil {
			return err
		}
		footprints = append(footprints, f)
		if err := measure(fmt.Sprint(len(c.jails))); err != nil {
			return err
		}
		if len(c.jails) < n {
			break
		}
	}
	ids := c.ids()
	n := len(ids)
	began := time.Now()
	if err := c.end(ctx); err != nil {
		return err
	}
	gone := time.Since(began)
	for _, id := range ids {
		dir, err := leafDir(id)
		if err != nil {
			return err
		}
		if _, err := os.Lstat(dir); !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("leaf %s is still there: %v", dir, err)
		}
	}
	after, err := before.backTo(ctx)
	if err != nil {
		return err
	}
	line, dyingErr := awaitDying(ctx, dying, n)
	if err := measure("0 again"); err != nil {
		return err
	}
	most := footprints[len(footprints)-1].descriptors
	release, err := duplicate(most)
	defer release()
	if err != nil {
		return err
	}
	if err := measure(fmt.Sprintf("0, %d descriptors", most)); err != nil {
		return err
	}
	release()

	b.method("jails that sleep, started after each other without pauses; p50 of %d of each row beside so many alive, in turns; 0: when all are gone, without and with as many descriptors of this process as they had\n"+
		"clone rows: %s true by os/exec with one new namespace; for a user namespace Go copies the memory of this process as well", b.part(30), target)
	b.compare(columns, stages)
	b.method("charged: by the kernel to the leaf, kernel memory included; PSS: of pid 1 and the program; the rest is this process's growth per jail")
	t := newTable(b.out, "alive", "ms for one start", "charged KiB", "PSS KiB", "launcher KiB", "descriptors", "goroutines")
	for _, f := range footprints {
		t.row(f.row()...)
	}
	t.end()
	fmt.Fprintf(b.out, "%d jails killed and removed in %.0f ms, by cancel of their context\n", n, gone.Seconds()*1e3)
	fmt.Fprintf(b.out, "%s\n%s\n", after.against(before), line)
	return dyingErr
}

// stages are what is measured beside jails that are alive.
func (b *bench) stages() []*turn {
	n := 0
	turns := []*turn{
		{name: "jail.Start", kinds: []string{"to exec", "to report of true"}, do: func(ctx context.Context) ([]time.Duration, error) {
			t := time.Now()
			j, err := jail.Start(ctx, b.spec(target, "true"))
			if err != nil {
				return nil, err
			}
			started := time.Since(t)
			r, err := j.Wait()
			return []time.Duration{started, time.Since(t)}, expect(ctx, jail.CauseOK, r, err)
		}},
		{name: "Kill", kinds: []string{"to report"}, do: func(ctx context.Context) ([]time.Duration, error) { return killIn(ctx, b.sleeper(time.Hour)) }},
		{name: "wall clock late", kinds: []string{"to all dead", "to report"}, do: func(ctx context.Context) ([]time.Duration, error) {
			return lateBy(ctx, b.sleeper(shortWall))
		}},
		{name: "leaf", kinds: []string{"made", "removed"}, do: func(ctx context.Context) ([]time.Duration, error) {
			host, err := cgroup.Probe()
			if err != nil {
				return nil, err
			}
			n++
			t := time.Now()
			leaf, err := host.NewLeaf(fmt.Sprintf("%sbench-%d-%d", cgroup.Prefix, os.Getpid(), n), cgroup.Limits{Memory: 256 << 20, Pids: 65})
			made := time.Since(t)
			if err != nil {
				return nil, err
			}
			t = time.Now()
			err = leaf.Remove(context.Background())
			return []time.Duration{made, time.Since(t)}, err
		}},
		{name: "os/exec true", do: timed(run(nil, target, "true"))},
	}
	for _, ns := range []struct {
		name string
		flag uintptr
	}{
		{"network", unix.CLONE_NEWNET}, {"mount", unix.CLONE_NEWNS}, {"pid", unix.CLONE_NEWPID}, {"ipc", unix.CLONE_NEWIPC},
		{"uts", unix.CLONE_NEWUTS}, {"cgroup", unix.CLONE_NEWCGROUP}, {"user", unix.CLONE_NEWUSER},
	} {
		turns = append(turns, &turn{name: "clone, " + ns.name + " namespace", do: timed(func(ctx context.Context) error {
			cmd := command(ctx, target, "true")
			cmd.SysProcAttr.Cloneflags = ns.flag
			return cmd.Run()
		})})
	}
	if start := bwrap(); start != nil {
		turns = append(turns, &turn{name: "bwrap true", do: timed(start), foreign: true})
	}
	return turns
}

// duplicate opens n descriptors. release closes them; it may be called again.
func duplicate(n int) (release func(), err error) {
	var fds []int
	release = func() {
		for _, fd := range fds {
			unix.Close(fd)
		}
		fds = nil
	}
	for range n {
		fd, err := unix.FcntlInt(os.Stderr.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return release, fmt.Errorf("duplicate a descriptor: %w", err)
		}
		fds = append(fds, fd)
	}
	return release, nil
}

// compare prints the p50 of each row in each column, with the maximum of what has
// to be prompt.
func (b *bench) compare(columns []string, stages [][]*turn) {
	t := newTable(b.out, append([]string{"ms, beside jails alive:"}, columns...)...)
	for i, turn := range stages[0] {
		for k := range turn.times {
			name := turn.name
			if k < len(turn.kinds) {
				name += " " + turn.kinds[k]
			}
			for _, q := range []struct {
				name string
				p    float64
			}{{"p50", 50}, {"p95", 95}, {"max", 100}} {
				if q.p > 50 && i > 2 {
					continue // the stages are told apart by their p50
				}
				row := []string{name + ", " + q.name}
				for _, turns := range stages {
					if s := turns[i]; s.err != nil || k >= len(s.times) {
						row = append(row, "failed")
					} else {
						row = append(row, ms(s.times[k].at(q.p)))
					}
				}
				t.row(row...)
			}
		}
	}
	t.end()
}

// crowd is jails that are alive at the same time.
type crowd struct {
	b      *bench
	before holdings // of this process
	ctx    context.Context
	cancel context.CancelFunc
	jails  []*jail.Jail
}

// grow starts jails until there are n, or as many as this process may have.
func (c *crowd) grow(ctx context.Context, n int) (each time.Duration, err error) {
	if c.ctx == nil {
		c.ctx, c.cancel = context.WithCancel(ctx)
	}
	if fit, why := c.room(); n > fit {
		fmt.Fprintf(c.b.out, "\n%d jails instead of %d: %s\n", fit, n, why)
		n = fit
	}
	had := len(c.jails)
	began := time.Now()
	for len(c.jails) < n {
		j, err := jail.Start(c.ctx, c.b.sleeper(time.Hour))
		if ctx.Err() != nil {
			return 0, ctx.Err()
		}
		if full(err) && len(c.jails) > had {
			fmt.Fprintf(c.b.out, "\n%d jails instead of %d: %v (%s)\n", len(c.jails), n, err, limitsOfTasks())
			// Room for those that are measured.
			for range 10 {
				last := len(c.jails) - 1
				c.jails[last].Kill()
				_, _ = c.jails[last].Wait()
				c.jails = c.jails[:last]
			}
			break
		}
		if err != nil {
			return 0, fmt.Errorf("start jail %d: %w", len(c.jails)+1, err)
		}
		c.jails = append(c.jails, j)
	}
	return time.Since(began) / time.Duration(max(len(c.jails)-had, 1)), nil
}

// room is how many jails the hard limit of open files allows. The Go runtime has
// raised the soft one to it.
func (c *crowd) room() (n int, why string) {
	h, err := held()
	if err != nil || len(c.jails) == 0 {
		return math.MaxInt, ""
	}
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		return math.MaxInt, ""
	}
	each := max((h.fds-c.before.fds)/len(c.jails), 1)
	const spare = 100 // of those that are measured
	return (int(l.Cur) - c.before.fds - spare) / each, fmt.Sprintf("the limit of open files is %d, and a jail has %d", l.Cur, each)
}

// full tells errors that mean that no more jails fit.
func full(err error) bool {
	for _, e := range []error{syscall.EMFILE, syscall.ENFILE, syscall.EAGAIN, syscall.ENOSPC, syscall.ENOMEM} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// limitsOfTasks tells the limits that keep processes from being made.
func limitsOfTasks() string {
	var all []string
	for _, name := range []string{"kernel/pid_max", "kernel/threads-max", "user/max_user_namespaces", "user/max_net_namespaces"} {
		b, err := os.ReadFile("/proc/sys/" + name)
		if err == nil {
			all = append(all, name+" "+strings.TrimSpace(string(b)))
		}
	}
	if host, err := cgroup.Probe(); err == nil {
		dir := host.Support(cgroup.Pids).Dir
		if b, err := os.ReadFile(dir + "/pids.max"); err == nil {
			all = append(all, dir+"/pids.max "+strings.TrimSpace(string(b)))
		}
	}
	return strings.Join(all, ", ")
}

func (c *crowd) ids() []string {
	ids := make([]string, len(c.jails))
	for i, j := range c.jails {
		ids[i] = j.ID()
	}
	return ids
}

// end ends all jails and waits for their reports.
func (c *crowd) end(ctx context.Context) error {
	if c.cancel == nil {
		return nil
	}
	c.cancel()
	var errs error
	for _, j := range c.jails {
		r, err := j.Wait()
		if err == nil && r.Cause != jail.CauseCanceled {
			err = fmt.Errorf("a jail of the crowd ended early: cause %s: %s", r.Cause, r.Error)
		}
		errs = errors.Join(errs, err)
	}
	c.jails = nil
	return errors.Join(errs, ctx.Err())
}

// footprint is what a crowd needs.
type footprint struct {
	alive                   int
	each                    time.Duration // to start one
	charged, pss, rss       int64
	descriptors, goroutines int
}

func (c *crowd) footprint(each time.Duration) (*footprint, error) {
	h, err := held()
	if err != nil {
		return nil, err
	}
	f := &footprint{alive: len(c.jails), each: each, rss: h.rss - c.before.rss, descriptors: h.fds - c.before.fds, goroutines: h.goroutines - c.before.goroutines}
	if f.charged, err = charge(c.ids()); err != nil {
		return nil, err
	}
	// Pid 1 and the program.
	f.pss, err = pss(descendants(os.Getpid()), c.before.children+2*len(c.jails))
	return f, err
}

func (f *footprint) row() []string {
	per := func(v float64) string { return fmt.Sprintf("%.1f", v/float64(f.alive)) }
	return []string{fmt.Sprint(f.alive), ms(f.each), per(float64(f.charged) / 1024), per(float64(f.pss) / 1024), per(float64(f.rss) / 1024),
		per(float64(f.descriptors)), per(float64(f.goroutines))}
}
