package guesttest

import (
	"context"
	"os"
	"os/exec"
	"sync/atomic"
	"testing"

	"example.com/jail/wire"
)

// CheckWire runs a guest against package wire's own ends of the channels. The
// program makes 50 overlapping calls of echo, then 20 more, of which 10 find
// the budget used up, and gives the value [50,10].
func CheckWire(t *testing.T, argv []string, program string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), Limit)
	defer cancel()
	start, startChild, err := wire.Pair()
	if err != nil {
		t.Fatal(err)
	}
	calls, callsChild, err := wire.Pair()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.ExtraFiles = []*os.File{startChild, callsChild}
	cmd.Stderr = os.Stderr
	err = cmd.Start()
	_ = startChild.Close()
	_ = callsChild.Close()
	if err != nil {
		t.Fatal(err)
	}

	var arrived atomic.Int64
	together := make(chan struct{})
	server := wire.NewServer(calls, func(ctx context.Context, req wire.Request) (wire.Response, error) {
		if arrived.Add(1) == 50 {
			close(together)
		}
		select {
		case <-together:
			return wire.Response{OK: true, Value: req.Args}, nil
		case <-ctx.Done():
			return wire.Response{}, ctx.Err()
		}
	}, wire.WithBudget(&wire.Budget{MaxCalls: 60}))
	served := make(chan error, 1)
	go func() { served <- server.Serve(ctx) }()

	result, err := wire.NewStarter(start).Start(ctx, wire.Start{
		Program: program, Bindings: []wire.StartBinding{{Name: "echo"}}, Budget: wire.StartBudget{MaxCalls: 60},
	})
	if err != nil {
		t.Errorf("start channel: %v", err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("guest: %v", err)
	}
	if err := <-served; err != nil {
		t.Errorf("call channel: %v", err)
	}
	_ = start.Close()
	if !result.OK || result.Value != "[50,10]" {
		t.Errorf("Result is %+v", result)
	}
	used := server.Usage()
	if used.Accepted != 60 || used.Refused != 10 {
		t.Errorf("ledger is %+v", used)
	}
	if int64(result.Calls) != used.Accepted+used.Refused || int64(result.Bytes) != used.Bytes {
		t.Errorf("guest claims %d calls and %d bytes, the ledger is %+v", result.Calls, result.Bytes, used)
	}
}
