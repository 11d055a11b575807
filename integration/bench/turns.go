package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"sync"
	"syscall"
	"time"

	"example.com/jail/jail"
)

// turn is one thing that is measured in turns with others.
type turn struct {
	name string
	does string // what a reader has to know beside the name
	// prepare runs before the pause and is not measured.
	prepare func(context.Context) error
	// do does it once and returns its times, one for each of kinds, or one if
	// there are none.
	do    func(context.Context) ([]time.Duration, error)
	kinds []string
	// foreign turns may fail: they get err in place of times.
	foreign bool

	times []sample
	err   error
}

// timed measures a function from its call to its return.
func timed(f func(context.Context) error) func(context.Context) ([]time.Duration, error) {
	return func(ctx context.Context) ([]time.Duration, error) {
		t := time.Now()
		err := f(ctx)
		return []time.Duration{time.Since(t)}, err
	}
}

// interleave lets every turn have one go that is not counted, and then one in each
// round, in an order that is drawn for the round.
func (b *bench) interleave(ctx context.Context, rounds int, turns []*turn) error {
	order := slices.Clone(turns)
	for round := range rounds + 1 {
		for _, t := range order {
			if t.err != nil {
				continue
			}
			d, err := b.once(ctx, t)
			switch {
			case ctx.Err() != nil:
				return ctx.Err()
			case err != nil && t.foreign:
				t.err = err
				continue
			case err != nil:
				return fmt.Errorf("%s: %w", t.name, err)
			case round == 0:
				t.times = make([]sample, len(d))
				continue
			}
			for i := range d {
				t.times[i] = append(t.times[i], d[i])
			}
		}
		rand.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
	}
	return nil
}

func (b *bench) once(ctx context.Context, t *turn) ([]time.Duration, error) {
	if t.prepare != nil {
		if err := t.prepare(ctx); err != nil {
			return nil, err
		}
	}
	if err := rest(ctx, b.pause); err != nil {
		return nil, err
	}
	return t.do(ctx)
}

func rest(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// flow is what workers achieved in the time of a cell.
type flow struct {
	times sample
	wall  time.Duration
	cpu   time.Duration // of the whole machine, without what it uses when idle
}

func (f *flow) perSecond() float64 { return float64(len(f.times)) / f.wall.Seconds() }
func (f *flow) cpuEach() time.Duration {
	return f.cpu / time.Duration(max(len(f.times), 1))
}

// settleIn is how long workers are at work before a cell begins: what was in stock
// is used up by then.
const settleIn = 500 * time.Millisecond

// steady keeps workers doing op and counts what ended within a cell. edge is
// called at the cell's begin and end.
func (b *bench) steady(ctx context.Context, workers int, cell time.Duration, op func(context.Context) error, edge func()) (*flow, error) {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	var mu sync.Mutex
	var wg sync.WaitGroup
	var times sample
	over := make(chan struct{})
	for range workers {
		wg.Go(func() {
			for {
				select {
				case <-over:
					return
				default:
				}
				t := time.Now()
				if err := op(ctx); err != nil {
					stop(err)
					return
				}
				mu.Lock()
				times = append(times, time.Since(t))
				mu.Unlock()
			}
		})
	}
	f := &flow{}
	err := rest(ctx, min(settleIn, cell))
	if err == nil {
		edge()
		mu.Lock()
		times = nil
		mu.Unlock()
		f.wall, f.cpu, err = b.machine(func() error { return rest(ctx, cell) })
		edge()
		mu.Lock()
		f.times = times
		mu.Unlock()
	}
	close(over)
	wg.Wait()
	if cause := context.Cause(ctx); cause != nil {
		return nil, cause
	}
	if len(f.times) == 0 && err == nil {
		err = fmt.Errorf("nothing ended within %s", cell)
	}
	return f, err
}

// command is a child process that a Ctrl-C at the terminal does not reach: a
// container tool that is interrupted half-way leaves things behind. When ctx ends
// it has leaveWithin to end by itself.
func command(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return nil }
	cmd.WaitDelay = leaveWithin
	return cmd
}

const leaveWithin = 5 * time.Second

// run returns a function that runs a command which succeeds and prints nothing.
func run(env []string, name string, args ...string) func(context.Context) error {
	return func(ctx context.Context) error {
		cmd := command(ctx, name, args...)
		cmd.Env = append(os.Environ(), env...)
		out, err := cmd.CombinedOutput()
		if err == nil && len(out) > 0 {
			err = errors.New("unexpected output")
		}
		if err != nil {
			return fmt.Errorf("%w: %s", err, bytes.TrimSpace(out))
		}
		return nil
	}
}

// expect tells what is wrong with a run that had to end for a cause.
func expect(ctx context.Context, cause jail.Cause, r *jail.Report, err error) error {
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		return err
	case r.Cause != cause:
		return fmt.Errorf("cause %s, want %s: %s", r.Cause, cause, r.Error)
	}
	return nil
}
