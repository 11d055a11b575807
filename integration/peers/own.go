package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"example.com/jail/jail"
	"example.com/jail/rootfs"
)

// library starts jails in this process.
type library struct{ spec jail.Spec }

func openLibrary(s *setup) (starter, error) {
	budget := jail.DefaultBudget()
	budget.MaxMemory = memoryLimit
	budget.MaxPIDs = pidsLimit
	budget.MaxTmp = tmpLimit
	budget.MaxOutput = outputLimit
	budget.WallClock = timeout
	return &library{jail.Spec{
		Root:      rootfs.Config{Dir: s.root, Binds: []rootfs.Bind{{Source: "/usr"}}},
		Templates: s.cache,
		Budget:    budget,
	}}, nil
}

func (l *library) start(_ int, argv []string, out *output) error {
	spec := l.spec
	spec.Args = argv
	spec.Stdout = out
	return exitOf(out)(jail.Run(context.Background(), spec))
}

func (l *library) close() error { return nil }

// exitOf takes what a run returns.
func exitOf(out *output) func(*jail.Report, error) error {
	return func(r *jail.Report, err error) error {
		if err != nil {
			return err
		}
		if r.ExitCode == nil {
			return fmt.Errorf("cause %s: %s", r.Cause, r.Error)
		}
		out.exit = *r.ExitCode
		return nil
	}
}

// parked takes jails of a pool, which replaces them between the starts.
type parked struct{ pool *jail.Pool }

// poolSize is less than what runs at once: a pool that is exhausted starts
// fresh jails, and that shows in the starts a second.
const poolSize = 8

func openPool(s *setup) (starter, error) {
	l, err := openLibrary(s)
	if err != nil {
		return nil, err
	}
	spec := l.(*library).spec
	spec.Args = []string{payload} // each start has its own
	pool, err := jail.NewPool(spec, poolSize)
	if err != nil {
		return nil, err
	}
	if err := pool.Fill(context.Background()); err != nil {
		pool.Close()
		return nil, err
	}
	return &parked{pool}, nil
}

func (p *parked) start(_ int, argv []string, out *output) error {
	return exitOf(out)(p.pool.Run(context.Background(), jail.Use{Args: argv, Stdout: out}))
}

func (p *parked) close() error {
	p.pool.Close()
	return nil
}

// openCommandLine starts jails by the command.
func openCommandLine(s *setup) (starter, error) {
	if s.jail == "" {
		return nil, errors.New("no jail command given")
	}
	c := newCommand(s, s.jail, "run",
		"--memory", fmt.Sprint(memoryLimit), "--pids", fmt.Sprint(pidsLimit), "--tmp", fmt.Sprint(tmpLimit),
		"--output", fmt.Sprint(outputLimit), "--wall", fmt.Sprint(timeout),
		"--rootfs", s.root, "--ro-bind", "/usr", "--")
	c.env = []string{"JAIL_TEMPLATES=" + s.cache.Dir}
	return c, nil
}

// What every row asks for, if it can be asked for it.
const (
	memoryLimit = 64 << 20
	pidsLimit   = 64
	tmpLimit    = 16 << 20
	outputLimit = 64 << 20
	// timeout ends a start that hangs.
	timeout = 30 * time.Second
)
