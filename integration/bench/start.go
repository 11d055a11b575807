package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	"example.com/jail/integration/internal/measure"
	"example.com/jail/jail"
)

// way is one way to start the program.
type way struct {
	turn
	// start is for many at once; nil keeps the way out of the rates.
	start func(context.Context) error
	cpu   time.Duration
}

// poolSize is how many jails the pool keeps parked.
const poolSize = 8

// ways returns all ways to start the static "true" that this host has. end gives
// up what they keep.
func (b *bench) ways(ctx context.Context) (ways []*way, end func(), err error) {
	pool, err := jail.NewPool(b.spec(target, "true"), poolSize)
	if err != nil {
		return nil, nil, err
	}
	add := func(name, does string, start func(context.Context) error) *way {
		w := &way{turn: turn{name: name, does: does, do: timed(start)}, start: start}
		ways = append(ways, w)
		return w
	}
	add("os/exec", "nothing", run(nil, target, "true"))
	add("jail.Run", "all, template ready", b.library(target, "true"))
	w := add("jail.Pool", "all, parked", fromPool(pool))
	w.prepare = pool.Fill
	w.do = taken(pool, jail.Use{}, jail.CauseOK, nil)
	add("jail run", "all, template kept", run([]string{"JAIL_TEMPLATES=" + b.warm.Dir}, b.jail, "run", "--", target, "true"))
	w = add("jail run, first", "all, template built", run([]string{"JAIL_TEMPLATES=" + b.cold.Dir}, b.jail, "run", "--", target, "true"))
	w.start = nil
	w.prepare = func(context.Context) error { _, err := b.cold.Drop(); return err }
	if start := bwrap(); start != nil {
		add("bwrap", "namespaces, read-only root; no memory limit, no filter", start).foreign = true
	}
	for _, name := range []string{"runc", "crun"} {
		path, err := exec.LookPath(name)
		if err != nil {
			continue
		}
		bundle := filepath.Join(b.work, name)
		if err := makeBundle(bundle); err != nil {
			pool.Close()
			return nil, nil, err
		}
		w := add(name, "namespaces, read-only root, memory limit; no filter", oci(path, filepath.Join(b.work, name+"-state"), bundle))
		w.foreign, w.start = true, nil
	}
	return ways, pool.Close, nil
}

// bwrap starts the program with bubblewrap, nil if there is none.
func bwrap() func(context.Context) error {
	path, err := exec.LookPath("bwrap")
	if err != nil {
		return nil
	}
	return run(nil, path,
		"--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL",
		"--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64",
		"--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", target, "true")
}

// library runs a program by jail.Run.
func (b *bench) library(args ...string) func(context.Context) error {
	spec := b.spec(args...)
	return func(ctx context.Context) error {
		r, err := jail.Run(ctx, spec)
		return expect(ctx, jail.CauseOK, r, err)
	}
}

// fromPool runs the program of a pool, in a parked jail or in a fresh one.
func fromPool(p *jail.Pool) func(context.Context) error {
	return func(ctx context.Context) error {
		r, err := p.Run(ctx, jail.Use{})
		return expect(ctx, jail.CauseOK, r, err)
	}
}

// taken measures one run in a parked jail, from the call to the report. A run
// that got a fresh one is an error. check may return further times.
func taken(p *jail.Pool, use jail.Use, cause jail.Cause, check func(*jail.Report) ([]time.Duration, error)) func(context.Context) ([]time.Duration, error) {
	return func(ctx context.Context) ([]time.Duration, error) {
		before := p.Stats().Taken
		t := time.Now()
		r, err := p.Run(ctx, use)
		d := []time.Duration{time.Since(t)}
		if err := expect(ctx, cause, r, err); err != nil {
			return nil, err
		}
		if s := p.Stats(); s.Taken != before+1 {
			return nil, fmt.Errorf("the run got no parked jail: %+v", s)
		}
		if check == nil {
			return d, nil
		}
		more, err := check(r)
		return append(d, more...), err
	}
}

// cpuStarts is the number of starts that CPU time is divided by, in batches that
// take turns.
const cpuStarts, cpuBatches = 150, 3

// starts prints how long each way takes from the start of the program to its end,
// and what it costs the machine.
func (b *bench) starts(ctx context.Context) error {
	ways, end, err := b.ways(ctx)
	if err != nil {
		return err
	}
	defer end()
	turns := make([]*turn, len(ways))
	for i, w := range ways {
		turns[i] = &w.turn
	}
	if err := b.interleave(ctx, b.rounds, turns); err != nil {
		return err
	}
	n := b.size(cpuStarts, 6)
	if err := b.cpu(ctx, ways, n); err != nil {
		return err
	}

	var base time.Duration
	for _, w := range ways {
		if w.name == "bwrap" && w.err == nil {
			base = w.times[0].at(50)
		}
	}
	slices.SortStableFunc(ways, func(x, y *way) int {
		if x.err != nil || y.err != nil {
			return len(y.times) - len(x.times)
		}
		return int(x.times[0].at(50) - y.times[0].at(50))
	})
	b.method("each start runs %s true; jail: to the report, leaf removed; \"first\": the dropped template is built\n"+
		"CPU: whole machine, %d starts in %d batches, mean of one; ticks make it exact to %s ms; the pool's has the making of the next jail in it",
		target, n, cpuBatches, ms(2*cpuBatches*measure.Tick/time.Duration(n)))
	t := newTable(b.out, append(append([]string{"start to exit, ms"}, quantiles...), "x bwrap", "CPU ms", "what is on")...)
	for _, w := range ways {
		if w.err != nil {
			t.row(w.name, "-", "-", "-", "-", "-", "-", "-", "failed: "+oneLine(w.err))
			continue
		}
		times := "-"
		if base > 0 {
			times = ratio(w.times[0].at(50), base)
		}
		t.row(append(append([]string{w.name}, w.times[0].columns(time.Millisecond)...), times, ms(w.cpu), w.does)...)
	}
	t.end()
	return nil
}

// cpu takes the CPU time of the whole machine over n starts of each way.
func (b *bench) cpu(ctx context.Context, ways []*way, n int) error {
	order := slices.Clone(ways)
	for range cpuBatches {
		rand.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
		for _, w := range order {
			if w.err != nil {
				continue
			}
			_, cpu, err := b.machine(func() error {
				for range n / cpuBatches {
					if _, err := b.once(ctx, &w.turn); err != nil {
						return err
					}
				}
				return nil
			})
			switch {
			case ctx.Err() != nil:
				return ctx.Err()
			case err != nil && w.foreign:
				w.err = err
			case err != nil:
				return fmt.Errorf("%s: %w", w.name, err)
			}
			w.cpu += cpu / time.Duration(n)
		}
	}
	return nil
}

var atOnce = []int{1, 2, 8, 32}

// rates prints how many starts a second each way reaches.
func (b *bench) rates(ctx context.Context) error {
	ways, end, err := b.ways(ctx)
	if err != nil {
		return err
	}
	defer end()
	ways = slices.DeleteFunc(ways, func(w *way) bool { return w.start == nil })
	type cell struct {
		w       *way
		workers int
	}
	var cells []cell
	got := map[cell]*flow{}
	for _, w := range ways {
		for _, n := range atOnce {
			cells = append(cells, cell{w, n})
		}
	}
	rand.Shuffle(len(cells), func(i, j int) { cells[i], cells[j] = cells[j], cells[i] })
	for _, c := range cells {
		if c.w.err != nil {
			continue
		}
		got[c], err = b.steady(ctx, c.workers, b.cell, c.w.start, func() {})
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil && c.w.foreign:
			c.w.err = err
		case err != nil:
			return fmt.Errorf("%s, %d at once: %w", c.w.name, c.workers, err)
		}
	}
	b.method("starts of %s true that ended within %s, without pauses, %s after the first; cells in random order\n"+
		"the pool keeps %d parked and is refilled all the time", target, b.cell, min(settleIn, b.cell), poolSize)
	header := []string{"starts a second"}
	for _, n := range atOnce {
		header = append(header, fmt.Sprintf("%d at once", n))
	}
	t := newTable(b.out, append(header, "CPU ms each, at 8", "p99 ms, at 8", "")...)
	for _, w := range ways {
		row := []string{w.name}
		if w.err != nil {
			row = append(row, slices.Repeat([]string{"-"}, len(atOnce)+2)...)
			t.row(append(row, "failed: "+oneLine(w.err))...)
			continue
		}
		for _, n := range atOnce {
			row = append(row, fmt.Sprintf("%.0f", got[cell{w, n}].perSecond()))
		}
		eight := got[cell{w, 8}]
		t.row(append(row, ms(eight.cpuEach()), ms(eight.times.at(99)), w.does)...)
	}
	t.end()
	return nil
}

// ratio is how many times base a time is.
func ratio(d, base time.Duration) string { return fmt.Sprintf("%.2f", float64(d)/float64(base)) }
