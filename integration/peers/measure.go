package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"example.com/jail/integration/internal/measure"
)

// options are how much is measured.
type options struct {
	rounds int
	pause  time.Duration
	seed   uint64
	// cpuStarts is the batch of which the CPU time is taken, cell how long a
	// rate is measured.
	cpuStarts int
	cell      time.Duration
}

var levels = []int{1, 2, 8, 32}

// result is all that is known of a row.
type result struct {
	Row     string `json:"row"`
	Ours    bool   `json:"ours"`
	Slow    bool   `json:"slow"`
	Note    string `json:"note,omitempty"`
	Version string `json:"version,omitempty"`
	// Unavailable is why the row was not measured.
	Unavailable string             `json:"unavailable,omitempty"`
	Posture     *posture           `json:"posture,omitempty"`
	Memory      *footprint         `json:"memory,omitempty"`
	Times       map[string]*series `json:"times,omitempty"`
	CPU         *cpuTime           `json:"cpu,omitempty"`
	Rates       []rate             `json:"rates,omitempty"`

	starter starter
}

// cpuTime is what starts cost the whole machine.
type cpuTime struct {
	Starts  int     `json:"starts"`
	PerMS   float64 `json:"ms_per_start"`
	Seconds float64 `json:"seconds"`
	Error   string  `json:"error,omitempty"`
}

// rate is how many starts a second a number of workers reached.
type rate struct {
	AtOnce    int     `json:"at_once"`
	PerSecond float64 `json:"per_second"`
	series
}

// bench measures the rows of one run.
type bench struct {
	options
	setup    *setup
	results  []*result
	random   *rand.Rand
	progress io.Writer
	out      *output            // for one start at a time
	outs     [maxAtOnce]*output // for starts of the payload at once
	idleRate float64            // busy seconds a second without starts
}

func newBench(s *setup, o options, progress io.Writer) *bench {
	b := &bench{options: o, setup: s, progress: progress, random: rand.New(rand.NewPCG(o.seed, 0))}
	// JSON writes a byte of output as up to six.
	b.out = newOutput(2 * stream.size)
	for i := range b.outs {
		b.outs[i] = newOutput(4096)
	}
	return b
}

// open makes the starters and finds out which rows this host takes.
func (b *bench) open(ctx context.Context, rows []*row) error {
	for _, r := range rows {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		res := &result{Row: r.name, Ours: r.ours, Slow: r.slow, Note: r.note, Times: map[string]*series{}}
		b.results = append(b.results, res)
		s, err := r.open(b.setup)
		if err != nil {
			res.Unavailable = err.Error()
			continue
		}
		res.starter = s
		if len(r.version) > 0 {
			res.Version = b.setup.version(r.version)
		}
		if _, err := once(s, 0, nothing, b.out); err != nil {
			res.Unavailable = "refuses this host: " + oneLine(err)
		}
	}
	return nil
}

// close closes the starters.
func (b *bench) close() error {
	var err error
	for _, r := range b.results {
		if r.starter != nil {
			err = errors.Join(err, r.starter.close())
		}
	}
	return err
}

func (b *bench) available() []*result {
	var all []*result
	for _, r := range b.results {
		if r.Unavailable == "" {
			all = append(all, r)
		}
	}
	return all
}

// run measures everything of the rows that this host takes.
func (b *bench) run(ctx context.Context) error {
	for _, step := range []struct {
		name string
		do   func(context.Context) error
	}{
		{"what is on, memory", b.inspect},
		{"start times", b.times},
		{"CPU time", b.cpu},
		{"starts a second", b.rates},
	} {
		fmt.Fprintf(b.progress, "measuring: %s\n", step.name)
		if err := step.do(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) inspect(ctx context.Context) error {
	var servers []int
	for _, r := range b.available() {
		if s, ok := r.starter.(interface{ server() int }); ok {
			servers = append(servers, s.server())
		}
	}
	for _, r := range b.available() {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		p, m, err := inspect(b.setup.cgroups, r.starter, servers, b.out)
		if err != nil {
			r.Unavailable = "what is on could not be read: " + oneLine(err)
			continue
		}
		r.Posture, r.Memory = p, m
	}
	return nil
}

// times takes the time of each program in each row, in rounds of random order.
func (b *bench) times(ctx context.Context) error {
	type turn struct {
		r *result
		w *work
	}
	var turns []turn
	for _, r := range b.available() {
		for _, w := range works {
			_, _ = once(r.starter, 0, w, b.out) // not counted
			r.Times[w.name] = &series{}
			turns = append(turns, turn{r, w})
		}
	}
	for round := range b.rounds {
		if round > 0 && round%50 == 0 {
			fmt.Fprintf(b.progress, "%d of %d rounds\n", round, b.rounds)
		}
		b.random.Shuffle(len(turns), func(i, j int) { turns[i], turns[j] = turns[j], turns[i] })
		for _, t := range turns {
			if t.r.Slow && round%slowEvery != 0 {
				continue
			}
			if ctx.Err() != nil {
				return ctx.Err()
			}
			time.Sleep(b.pause)
			took, err := once(t.r.starter, 0, t.w, b.out)
			t.r.Times[t.w.name].add(int64(took), err)
		}
	}
	return nil
}

// cpu takes the CPU time of the whole machine over a batch of starts, each after
// a pause, and subtracts what it uses without them.
func (b *bench) cpu(ctx context.Context) error {
	idle := func() error { return nil }
	var err error
	_, seconds, busy, err := b.batch(ctx, 4*b.cpuStarts, idle)
	if err != nil {
		return err
	}
	b.idleRate = busy / seconds
	rows := b.available()
	b.random.Shuffle(len(rows), func(i, j int) { rows[i], rows[j] = rows[j], rows[i] })
	for _, r := range rows {
		n := b.cpuStarts
		if r.Slow {
			n = max(n/slowEvery, 1)
		}
		fails, seconds, busy, err := b.batch(ctx, n, func() error {
			_, err := once(r.starter, 0, nothing, b.out)
			return err
		})
		if err != nil {
			return err
		}
		r.CPU = &cpuTime{Starts: n, PerMS: (busy - b.idleRate*seconds) / float64(n) * 1e3, Seconds: seconds}
		if fails != nil {
			r.CPU.Error = fails.Error()
		}
	}
	return nil
}

func (b *bench) batch(ctx context.Context, n int, start func() error) (fails error, seconds, busy float64, err error) {
	began := time.Now()
	before, cores, err := measure.Idle()
	if err != nil {
		return nil, 0, 0, err
	}
	for range n {
		if ctx.Err() != nil {
			return nil, 0, 0, ctx.Err()
		}
		time.Sleep(b.pause)
		if err := start(); err != nil && fails == nil {
			fails = err
		}
	}
	seconds = time.Since(began).Seconds()
	after, _, err := measure.Idle()
	return fails, seconds, float64(cores)*seconds - (after - before).Seconds(), err
}

// rates counts starts a second, without pauses, at each level in random order.
func (b *bench) rates(ctx context.Context) error {
	type turn struct {
		r     *result
		level int
	}
	var turns []turn
	for _, r := range b.available() {
		r.Rates = make([]rate, len(levels))
		for i := range levels {
			turns = append(turns, turn{r, i})
		}
	}
	b.random.Shuffle(len(turns), func(i, j int) { turns[i], turns[j] = turns[j], turns[i] })
	for _, t := range turns {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		time.Sleep(200 * time.Millisecond) // until the last cell's ends are over
		t.r.Rates[t.level] = b.rate(ctx, t.r.starter, levels[t.level])
	}
	return nil
}

// rate lets workers start one program after the other until the cell is over.
// The last ones end after it, and so does the time that is counted.
func (b *bench) rate(ctx context.Context, s starter, workers int) rate {
	out := rate{AtOnce: workers}
	var mu sync.Mutex
	var wg sync.WaitGroup
	began := time.Now()
	for slot := range workers {
		wg.Go(func() {
			for ctx.Err() == nil && time.Since(began) < b.cell {
				took, err := once(s, slot, nothing, b.outs[slot])
				mu.Lock()
				out.add(int64(took), err)
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	out.PerSecond = float64(len(out.NS)) / time.Since(began).Seconds()
	return out
}

func oneLine(err error) string { return strings.Join(strings.Fields(err.Error()), " ") }
