package jail

import (
	"context"
	"errors"
	"io"
	"os"
	"sync"
	"time"

	"example.com/jail/invoke"
	"example.com/jail/wire"
)

// channels are the launcher's ends of a guest's fds 3 and 4.
type channels struct {
	start, call *os.File

	server *wire.Server
	run    *invoke.Run
	cancel context.CancelFunc

	// result gets the guest's Result, once. startEnd is closed when the start
	// channel ended without one, fault gets what was wrong with a channel.
	result   chan wire.Result
	startEnd chan struct{}
	fault    chan error
	wait     sync.WaitGroup
}

func newChannels(files []*os.File, theirs *closers) (*channels, error) {
	c := &channels{
		result:   make(chan wire.Result, 1),
		startEnd: make(chan struct{}),
		fault:    make(chan error, 2),
	}
	for i, ours := range []**os.File{&c.start, &c.call} {
		our, their, err := wire.Pair()
		if err != nil {
			c.close()
			return nil, err
		}
		theirs.add(their)
		*ours, files[i] = our, their
	}
	return c, nil
}

// close cuts the channels: end of file is how a guest is canceled (W48).
func (c *channels) close() {
	if c.cancel != nil {
		c.cancel()
	}
	for _, f := range []*os.File{c.start, c.call} {
		if f != nil {
			f.Close()
		}
	}
}

// serve starts both channels for one run.
func (c *channels) serve(id string, s *Script, b Budget) {
	ctx, cancel := context.WithCancel(context.Background())
	c.cancel = cancel
	handler := noTools
	bindings := []wire.StartBinding{}
	if s.Tools != nil {
		c.run = s.Tools.NewRun(ctx, id)
		handler = c.run.Handle
		bindings = s.Tools.Bindings()
	}
	options := []wire.ServerOption{
		wire.WithMaxInflight(b.Inflight),
		wire.WithBudget(&wire.Budget{MaxCalls: b.MaxCalls, MaxBytes: b.MaxBytes}),
	}
	if c.run != nil {
		// What the server itself turns away is on record, too.
		options = append(options, wire.WithOnRefused(c.run.Refused))
	}
	if b.CallDeadline > 0 {
		options = append(options, wire.WithMaxCallDeadline(b.CallDeadline))
	}
	c.server = wire.NewServer(c.call, handler, options...)
	start := wire.Start{
		V: wire.Version, Program: s.Program, Bindings: bindings, ResultID: id,
		Budget: wire.StartBudget{WallClock: b.WallClock, MaxCalls: b.MaxCalls, MaxBytes: b.MaxBytes, MaxMemory: b.MaxMemory},
	}
	c.wait.Add(2)
	go func() {
		defer c.wait.Done()
		if err := c.server.Serve(ctx); err != nil && ctx.Err() == nil {
			c.fault <- err
		}
	}()
	go func() {
		defer c.wait.Done()
		r, err := wire.NewStarter(c.start).Start(ctx, start)
		switch {
		case err == nil:
			c.result <- r
		case ctx.Err() != nil:
		case gone(err):
			close(c.startEnd)
		default:
			c.fault <- err
		}
	}()
}

// noTools answers the calls of a guest that was given none.
func noTools(_ context.Context, req wire.Request) (wire.Response, error) {
	return wire.Response{Kind: "invalid", Error: "no tool " + invoke.Quote(req.Tool, 64) + ": this run has none"}, nil
}

// gone tells an end of file, in a frame or between two, from a fault of the
// protocol: a guest that was killed while it wrote is not at fault.
func gone(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, os.ErrClosed)
}

// channelGrace is how long the end of a channel may come before the end of
// the program that caused it.
const channelGrace = 100 * time.Millisecond

// finish cuts the channels and returns the ledger.
func (c *channels) finish() wire.Usage {
	c.close()
	c.wait.Wait()
	if c.run != nil {
		_ = c.run.Close()
	}
	return c.server.Usage()
}
