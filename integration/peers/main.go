package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"example.com/jail/integration/internal/measure"
)

func main() {
	var c config
	flag.IntVar(&c.rounds, "n", 100, "rounds")
	flag.DurationVar(&c.pause, "pause", 25*time.Millisecond, "pause before each start")
	flag.BoolVar(&c.quick, "quick", false, "few rounds and short cells: to see that every row works")
	flag.StringVar(&c.only, "only", "", "rows to measure, by name, with commas between them")
	flag.Uint64Var(&c.seed, "seed", 0, "seed of the random order (0: a new one)")
	flag.StringVar(&c.json, "json", "", "write everything that was measured to this file")
	flag.StringVar(&c.svg, "svg", "", "write a chart to this file")
	flag.StringVar(&c.jail, "jail", "bin/jail", "the jail command")
	flag.StringVar(&c.peers, "peers", or(os.Getenv("JAIL_PEERS_DIR"), "build/peers"), "directory with peers, searched before PATH")
	flag.Parse()
	if c.rounds < 1 || c.pause < 0 || flag.NArg() > 0 {
		flag.Usage()
		os.Exit(2)
	}
	if c.quick {
		c.rounds, c.cpuStarts, c.cell = min(c.rounds, slowEvery), 10, 300*time.Millisecond
	} else {
		c.cpuStarts, c.cell = c.rounds, 1500*time.Millisecond
	}
	if c.seed == 0 {
		c.seed = rand.Uint64N(1e6) + 1
	}
	// Starts are not interrupted: the run ends between two of them.
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	if err := c.run(ctx, os.Stdout, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "peers:", err)
		if errors.Is(err, context.Canceled) {
			os.Exit(130)
		}
		os.Exit(1)
	}
}

// config is a command line.
type config struct {
	options
	quick       bool
	only        string
	json, svg   string
	jail, peers string
}

// run measures and reports. It fails if a row of this project does.
func (c *config) run(ctx context.Context, to, progress io.Writer) (err error) {
	rows, err := selectRows(allRows(), c.only)
	if err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return errors.New("needs root, as do most of the rows")
	}
	s, err := newSetup(c.jail, c.peers)
	if err != nil {
		return err
	}
	b := newBench(s, c.options, progress)
	defer func() { err = errors.Join(err, b.close(), s.close()) }()

	m := readMachine(c.options)
	fmt.Fprintf(progress, "%d rows, %d rounds, seed %d; cgroups and containers of this run are named %s-*\n", len(rows), c.rounds, c.seed, s.name)
	if err := b.open(ctx, rows); err != nil {
		return err
	}
	if err := b.run(ctx); err != nil {
		return err
	}
	m.LoadEnd, m.IdleBusy = measure.Load(), b.idleRate
	if err := writeReport(to, m, b.results); err != nil {
		return err
	}
	if c.json != "" {
		if err := writeJSON(c.json, m, b.results); err != nil {
			return err
		}
	}
	if c.svg != "" {
		if err := os.WriteFile(c.svg, []byte(chart(m, b.results)), 0o644); err != nil {
			return err
		}
	}
	return oursFailed(b.results)
}

// oursFailed is an error if a row of this project was not measured or failed.
func oursFailed(results []*result) error {
	var err error
	for _, r := range results {
		if !r.Ours {
			continue
		}
		if r.Unavailable != "" {
			err = errors.Join(err, fmt.Errorf("%s: %s", r.Row, r.Unavailable))
		}
		for _, f := range r.failures() {
			err = errors.Join(err, fmt.Errorf("%s: %s", r.Row, f))
		}
	}
	return err
}

// selectRows returns the rows with these names, all without any.
func selectRows(rows []*row, only string) ([]*row, error) {
	if only == "" {
		return rows, nil
	}
	var some []*row
	for _, name := range strings.Split(only, ",") {
		i := slices.IndexFunc(rows, func(r *row) bool { return r.name == strings.TrimSpace(name) })
		if i < 0 {
			var names []string
			for _, r := range rows {
				names = append(names, r.name)
			}
			return nil, fmt.Errorf("no row %q; there are %s", name, strings.Join(names, ", "))
		}
		some = append(some, rows[i])
	}
	return some, nil
}
