package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"example.com/jail/guest/python"
	"example.com/jail/integration/internal/measure"
	"example.com/jail/jail"
	"example.com/jail/rootfs"
)

// guest is a run of a Python program.
func (b *bench) guest(program string, preload ...string) jail.Spec {
	spec := b.spec(python.Argv(rootfs.FilesDir+"/"+python.FileName, preload...)...)
	spec.Root.Files = []rootfs.File{{Name: python.FileName, Data: python.Source}}
	spec.Script = &jail.Script{Program: program}
	return spec
}

// compiled is a guest that is not compiled at each start.
func (b *bench) compiled(ctx context.Context) (jail.Spec, error) {
	return python.Compile(ctx, b.guest(""))
}

// running returns a guest's spec with another program.
func running(spec jail.Spec, program string) jail.Spec {
	spec.Script = &jail.Script{Program: program}
	return spec
}

// guestProgram is a program with the modules that it imports. Its result is 42.
type guestProgram struct {
	name    string
	modules []string
	text    string
}

var (
	trivial  = guestProgram{"trivial program", nil, "result = 42"}
	standard = guestProgram{"json, re, datetime", []string{"json", "re", "datetime"}, "import json, re, datetime\nresult = json.loads('42')"}
	numeric  = guestProgram{"numpy", []string{"numpy"}, "import numpy\nresult = int(numpy.arange(10).sum()) - 3"}
)

// answers checks the result of a guest's run and returns when it came, counted
// from the program's release.
func answers(r *jail.Report) ([]time.Duration, error) {
	if string(r.Value) != "42" || r.ResultNS <= 0 {
		return nil, fmt.Errorf("result %s after %d ns", r.Value, r.ResultNS)
	}
	return []time.Duration{time.Duration(r.ResultNS)}, nil
}

// ask runs a program in a fresh jail and returns its result.
func (b *bench) ask(ctx context.Context, program string) (result string, err error) {
	r, err := jail.Run(ctx, b.guest(program))
	if err := expect(ctx, jail.CauseOK, r, err); err != nil {
		return "", err
	}
	return result, json.Unmarshal(r.Value, &result)
}

// pools prints what parked jails cost and give.
func (b *bench) pools(ctx context.Context) error {
	// The interpreter that jails use, for the rows beside them.
	interpreter, err := b.ask(ctx, "import sys\nresult = sys.executable")
	if err != nil {
		return err
	}
	programs := []guestProgram{trivial, standard}
	found, err := b.ask(ctx, "import importlib.util\nresult = 'yes' if importlib.util.find_spec('numpy') else 'no'")
	if err != nil {
		return err
	}
	if found == "yes" {
		programs = append(programs, numeric)
	}
	for _, part := range []func(context.Context, string, []guestProgram) error{b.takes, b.parked, b.ownStart, b.sustained, b.neighbours} {
		if err := part(ctx, interpreter, programs); err != nil {
			return err
		}
	}
	if found != "yes" {
		fmt.Fprintln(b.out, "numpy cannot be imported here: no rows for it")
	}
	return nil
}

// takes prints the time from the take of a parked jail to its report, beside
// fresh jails.
func (b *bench) takes(ctx context.Context, interpreter string, programs []guestProgram) error {
	const size = 2
	var pools []*jail.Pool
	defer func() {
		for _, p := range pools {
			p.Close()
		}
	}()
	// A turn begins when every pool is full: nothing but the taken jail's own
	// successor is made meanwhile.
	full := func(ctx context.Context) error {
		for _, p := range pools {
			if err := p.Fill(ctx); err != nil {
				return err
			}
		}
		return nil
	}
	var turns []*turn
	add := func(name string, do func(context.Context) ([]time.Duration, error), kinds ...string) {
		turns = append(turns, &turn{name: name, prepare: full, do: do, kinds: kinds})
	}
	park := func(name string, spec jail.Spec, use jail.Use, check func(*jail.Report) ([]time.Duration, error), kinds ...string) error {
		p, err := jail.NewPool(spec, size)
		if err == nil {
			pools = append(pools, p)
			add(name, taken(p, use, jail.CauseOK, check), kinds...)
		}
		return err
	}
	released := func(r *jail.Report) ([]time.Duration, error) { return []time.Duration{time.Duration(r.WallNS)}, nil }
	guests := []string{"to report", "release to Result"}
	compiled, err := b.compiled(ctx)
	if err != nil {
		return err
	}

	add("os/exec true", timed(run(nil, target, "true")))
	add("jail.Run true", func(ctx context.Context) ([]time.Duration, error) {
		return fresh(ctx, b.spec(target, "true"), released)
	}, "to report", "release to exit")
	if err := park("parked true", b.spec(target, "true"), jail.Use{}, released, "to report", "release to exit"); err != nil {
		return err
	}
	add("os/exec python, -c pass", timed(run(nil, interpreter, pass...)))
	for _, g := range programs {
		add("jail.Run python, "+g.name, func(ctx context.Context) ([]time.Duration, error) {
			return fresh(ctx, b.guest(g.text), answers)
		}, guests...)
		add("jail.Run python, compiled, "+g.name, func(ctx context.Context) ([]time.Duration, error) {
			return fresh(ctx, running(compiled, g.text), answers)
		}, guests...)
		use := jail.Use{Script: &jail.Script{Program: g.text}}
		if err := park("parked python, "+g.name, b.guest(""), use, answers, guests...); err != nil {
			return err
		}
		if len(g.modules) == 0 {
			continue
		}
		if err := park("parked python, preloaded "+g.name, b.guest("", g.modules...), use, answers, guests...); err != nil {
			return err
		}
	}
	if err := b.interleave(ctx, b.rounds, turns); err != nil {
		return err
	}
	b.method("a run from the call to its report, leaf removed; Result: report.result_ns, which begins with the release; pools of %d, full before each turn\n"+
		"the jail that replaces a taken one is made meanwhile, at nice 19; each run of a pool had to get a parked jail", size)
	b.times("parked and fresh, ms", time.Millisecond, turns)
	return nil
}

// pass are the arguments of an interpreter that does nothing, started as a guest
// is.
var pass = []string{"-I", "-B", "-X", "utf8", "-c", "pass"}

// fresh measures one run in a fresh jail, as taken does one in a parked jail.
func fresh(ctx context.Context, spec jail.Spec, check func(*jail.Report) ([]time.Duration, error)) ([]time.Duration, error) {
	t := time.Now()
	r, err := jail.Run(ctx, spec)
	d := []time.Duration{time.Since(t)}
	if err := expect(ctx, jail.CauseOK, r, err); err != nil {
		return nil, err
	}
	more, err := check(r)
	return append(d, more...), err
}

// parked prints what a jail that waits needs, and what it costs to make one.
func (b *bench) parked(ctx context.Context, _ string, programs []guestProgram) error {
	n := b.size(32, 4)
	b.method("pools of %d, each filled alone; charged: by the kernel to the leaves, kernel memory included; PSS: of pid 1 and the guest\n"+
		"CPU: whole machine, exact to %s ms", n, ms(2*measure.Tick/time.Duration(n)))
	t := newTable(b.out, "a parked jail", "charged KiB", "PSS KiB", "ms to make", "CPU ms to make")
	measure := func(name string, spec jail.Spec, processes int) error {
		others := len(descendants(os.Getpid()))
		var p *jail.Pool
		wall, cpu, err := b.machine(func() (err error) {
			if p, err = jail.NewPool(spec, n); err != nil {
				return err
			}
			return p.Fill(ctx)
		})
		if p != nil {
			defer p.Close()
		}
		if err != nil {
			return err
		}
		s := p.Stats()
		if s.Ready != n || s.Bytes == 0 {
			return fmt.Errorf("%s: %+v, want %d jails ready", name, s, n)
		}
		sum, err := pss(descendants(os.Getpid()), others+n*processes)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		per := func(v int64) string { return fmt.Sprintf("%.0f", float64(v)/float64(n)/1024) }
		t.row(name, per(s.Bytes), per(sum), ms(wall/time.Duration(n)), ms(cpu/time.Duration(n)))
		return nil
	}
	if err := measure("bare", b.spec(target, "true"), 1); err != nil {
		return err
	}
	if err := measure("python", b.guest(""), 2); err != nil {
		return err
	}
	compiled, err := b.compiled(ctx)
	if err != nil {
		return err
	}
	if err := measure("python, compiled", compiled, 2); err != nil {
		return err
	}
	for _, g := range programs {
		if len(g.modules) > 0 {
			if err := measure("python, preloaded "+g.name, b.guest("", g.modules...), 2); err != nil {
				return err
			}
		}
	}
	t.end()
	return nil
}

// ownStart prints the CPU time of the interpreter itself, without a jail.
func (b *bench) ownStart(ctx context.Context, interpreter string, _ []guestProgram) error {
	compiled, err := b.compiled(ctx)
	if err != nil {
		return err
	}
	for _, f := range compiled.Root.Files {
		if err := os.WriteFile(b.work+"/"+f.Name, f.Data, 0o600); err != nil {
			return err
		}
	}
	used := func(exit int, args ...string) func(context.Context) ([]time.Duration, error) {
		return func(ctx context.Context) ([]time.Duration, error) {
			cmd := command(ctx, interpreter, args...)
			err := cmd.Run()
			var status *exec.ExitError
			if ctx.Err() != nil || err != nil && !errors.As(err, &status) {
				return nil, errors.Join(ctx.Err(), err)
			}
			if got := cmd.ProcessState.ExitCode(); got != exit {
				return nil, fmt.Errorf("exit code %d, want %d", got, exit)
			}
			return []time.Duration{cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()}, nil
		}
	}
	const noChannel = 70 // of a guest without fd 3
	turns := []*turn{{name: strings.Join(append([]string{"python3"}, pass...), " "), do: used(0, pass...)}}
	for _, spec := range []jail.Spec{b.guest(""), compiled} {
		argv := slices.Clone(spec.Args)
		last := &argv[len(argv)-1]
		*last = path.Base(*last)
		name := strings.Join(argv, " ")
		*last = b.work + "/" + *last
		turns = append(turns, &turn{name: name, does: "ends at once: no fd 3", do: used(noChannel, argv[1:]...)})
	}
	if err := b.interleave(ctx, b.rounds, turns); err != nil {
		return err
	}
	b.method("user and system time of the interpreter without a jail (wait4), mean and quantiles; at most: %d processors / mean", runtime.NumCPU())
	t := newTable(b.out, append(append([]string{"the interpreter's own start, CPU ms"}, quantiles...), "mean", "at most a second", "")...)
	for _, r := range turns {
		s := r.times[0]
		t.row(append(append([]string{r.name}, s.columns(time.Millisecond)...), ms(s.mean()), fmt.Sprintf("%.0f", float64(runtime.NumCPU())/s.mean().Seconds()), r.does)...)
	}
	t.end()
	return nil
}

// sustained prints how many programs a second a pool of guests carries when it is
// refilled all the time.
func (b *bench) sustained(ctx context.Context, _ string, _ []guestProgram) error {
	compiled, err := b.compiled(ctx)
	if err != nil {
		return err
	}
	type row struct {
		guest       string
		spec        jail.Spec
		pool        *jail.Pool
		level       int
		take, start *flow
		taken, made int64
	}
	var rows []*row
	for _, g := range []row{{guest: "source", spec: b.guest("")}, {guest: "compiled", spec: compiled}} {
		if g.pool, err = jail.NewPool(g.spec, poolSize); err != nil {
			return err
		}
		defer g.pool.Close()
		for _, level := range []int{1, 2, 4, 8} {
			r := g
			r.level = level
			rows = append(rows, &r)
		}
	}
	check := func(ctx context.Context, r *jail.Report, err error) error {
		if err := expect(ctx, jail.CauseOK, r, err); err != nil {
			return err
		}
		_, err = answers(r)
		return err
	}
	for _, i := range rand.Perm(2 * len(rows)) {
		r := rows[i/2]
		spec := running(r.spec, trivial.text)
		for _, other := range rows { // nothing is made for a pool that is not measured
			if err := other.pool.Fill(ctx); err != nil {
				return err
			}
		}
		if i%2 == 0 {
			r.start, err = b.steady(ctx, r.level, 2*b.cell, func(ctx context.Context) error {
				report, err := jail.Run(ctx, spec)
				return check(ctx, report, err)
			}, func() {})
			if err != nil {
				return err
			}
			continue
		}
		var edges []jail.PoolStats
		r.take, err = b.steady(ctx, r.level, 2*b.cell, func(ctx context.Context) error {
			report, err := r.pool.Run(ctx, jail.Use{Script: spec.Script})
			return check(ctx, report, err)
		}, func() { edges = append(edges, r.pool.Stats()) })
		if err != nil {
			return err
		}
		r.taken, r.made = edges[1].Taken-edges[0].Taken, edges[1].Fresh-edges[0].Fresh
		if n := edges[1].Discarded; n > 0 {
			return fmt.Errorf("%d parked jails were found dead", n)
		}
	}
	b.method("%s, without pauses, counted for %s from %s after the first; pool of %d, refilled all the time; cells in random order\n"+
		"taken and fresh: runs that got a parked jail, or one that was started for them; CPU: whole machine", trivial.name, 2*b.cell, min(settleIn, 2*b.cell), poolSize)
	t := newTable(b.out, "python at once", "guest", "a second", "taken", "fresh", "p50 ms", "p99 ms", "CPU ms each", "jail.Run, a second", "p50 ms", "p99 ms", "CPU ms each")
	for _, r := range rows {
		f, g := r.take, r.start
		t.row(fmt.Sprint(r.level), r.guest, fmt.Sprintf("%.0f", f.perSecond()), fmt.Sprint(r.taken), fmt.Sprint(r.made), ms(f.times.at(50)), ms(f.times.at(99)), ms(f.cpuEach()),
			fmt.Sprintf("%.0f", g.perSecond()), ms(g.times.at(50)), ms(g.times.at(99)), ms(g.cpuEach()))
	}
	t.end()
	return nil
}

// neighbours prints what the filling of a pool does to a jail that runs.
func (b *bench) neighbours(ctx context.Context, interpreter string, _ []guestProgram) error {
	work := b.spec(interpreter, "-I", "-S", "-c", "for i in range(10_000_000): pass")
	alone := func(ctx context.Context) ([]time.Duration, error) {
		r, err := jail.Run(ctx, work)
		if err := expect(ctx, jail.CauseOK, r, err); err != nil {
			return nil, err
		}
		return []time.Duration{time.Duration(r.WallNS), time.Duration(r.CPUUserNS + r.CPUSystemNS)}, nil
	}
	drained, err := jail.NewPool(b.guest(trivial.text), poolSize)
	if err != nil {
		return err
	}
	defer drained.Close()
	kinds := []string{"wall", "CPU"}
	made, took, fresh := 0, int64(0), int64(0) // beside the work
	turns := []*turn{
		{name: "alone", kinds: kinds, do: alone},
		{name: "beside a pool that fills", kinds: kinds, does: "nothing is taken", do: func(ctx context.Context) ([]time.Duration, error) {
			const size = 1000 // more than are made meanwhile
			p, err := jail.NewPool(b.guest(""), size)
			if err != nil {
				return nil, err
			}
			defer p.Close()
			for p.Stats().Ready == 0 {
				if err := rest(ctx, time.Millisecond); err != nil {
					return nil, err
				}
			}
			before := p.Stats()
			d, err := alone(ctx)
			s := p.Stats()
			if err == nil && (s.Ready == size || s.Err != nil) {
				err = fmt.Errorf("the pool did not fill all the time: %+v", s)
			}
			made += s.Ready - before.Ready
			return d, err
		}},
		{name: "beside a pool that is drained and refilled", kinds: kinds, does: fmt.Sprintf("%d programs at once", runtime.NumCPU()), prepare: drained.Fill,
			do: func(ctx context.Context) ([]time.Duration, error) {
				before := drained.Stats()
				d, err := beside(ctx, runtime.NumCPU(), fromPool(drained), alone)
				s := drained.Stats()
				if err == nil && s.Taken == before.Taken {
					err = fmt.Errorf("nothing was taken meanwhile: %+v", s)
				}
				took, fresh = took+s.Taken-before.Taken, fresh+s.Fresh-before.Fresh
				return d, err
			}},
		{name: "beside busy jails", kinds: kinds, does: fmt.Sprintf("%d of equal priority", runtime.NumCPU()), do: func(ctx context.Context) ([]time.Duration, error) {
			return beside(ctx, runtime.NumCPU(), b.busy, alone)
		}},
	}
	rounds := b.part(15)
	if err := b.interleave(ctx, rounds, turns); err != nil {
		return err
	}
	if made == 0 {
		return errors.New("the pool that fills made no jail beside the work")
	}
	b.method("a jail with the same CPU-bound work each time, by its report; %d runs each; parked jails are made at nice 19, taken ones run at nice 0", rounds)
	b.times("fixed work, ms", time.Millisecond, turns)
	each := func(n int64) float64 { return float64(n) / float64(rounds+1) }
	fmt.Fprintf(b.out, "beside each, the pool that fills made %.1f jails; of the pool that is drained %.1f were taken, and %.1f runs got a fresh one\n",
		each(int64(made)), each(took), each(fresh))
	return nil
}

// busy keeps a processor busy in a jail until ctx ends.
func (b *bench) busy(ctx context.Context) error {
	r, err := jail.Run(ctx, b.spec(target, "sh", "-c", "while :; do :; done"))
	return expect(ctx, jail.CauseCanceled, r, err)
}

// beside does something while others do op again and again. The others' failure
// is that of all.
func beside(ctx context.Context, others int, op func(context.Context) error, do func(context.Context) ([]time.Duration, error)) ([]time.Duration, error) {
	theirs, stop := context.WithCancel(ctx)
	defer stop()
	var wg sync.WaitGroup
	failed := make(chan error, others)
	for range others {
		wg.Go(func() {
			for theirs.Err() == nil {
				if err := op(theirs); err != nil && theirs.Err() == nil {
					failed <- err
					return
				}
			}
		})
	}
	d, err := do(ctx)
	stop()
	wg.Wait()
	select {
	case other := <-failed:
		err = errors.Join(err, fmt.Errorf("beside it: %w", other))
	default:
	}
	return d, err
}
