package main

import (
	"context"
	"encoding/json"
	"fmt"

	"example.com/jail/guest/python"
	"example.com/jail/invoke"
	"example.com/jail/jail"
	"example.com/jail/rootfs"
)

// callProgram measures tool calls from inside, where a program pays for them.
const callProgram = `
import asyncio, time
def clock(f):
    t = time.perf_counter()
    f()
    return time.perf_counter() - t

for i in range(100):
    host.echo(i=i)
each = sorted(clock(lambda: host.echo(i=1)) for i in range(2000))

async def many():
    gate = asyncio.Semaphore(60)
    async def one(i):
        async with gate:
            await host.aio.echo(i=i)
    await asyncio.gather(*[one(i) for i in range(5000)])
burst = clock(lambda: asyncio.run(many()))

text = "x" * 1000000
big = sorted(clock(lambda: host.echo(text=text)) for i in range(30))
result = {"p50_us": each[1000] * 1e6, "p99_us": each[1980] * 1e6, "per_second": 5000 / burst, "mib_per_second": 2 * len(text) / big[15] / 2**20}
`

// benchCalls prints what a call of a host's tool costs a Python program in a
// jail: the whole way through guest, socket, server, chain and back.
func benchCalls(cache *rootfs.Cache) error {
	tools, err := invoke.NewTools(invoke.Manifest{
		"echo": {Call: func(_ context.Context, args json.RawMessage) (any, error) { return args, nil }},
	}, nil, invoke.Options{})
	if err != nil {
		return err
	}
	defer tools.Close()
	budget := jail.DefaultBudget()
	budget.MaxCalls, budget.MaxBytes = 0, 0
	r, err := jail.Run(context.Background(), jail.Spec{
		Args:      python.Argv(rootfs.FilesDir + "/" + python.FileName),
		Root:      rootfs.Config{Files: []rootfs.File{{Name: python.FileName, Data: python.Source}}},
		Templates: cache,
		Budget:    budget,
		Script:    &jail.Script{Program: callProgram, Tools: tools},
	})
	if err != nil {
		return err
	}
	if r.Cause != jail.CauseOK {
		return fmt.Errorf("calls: cause %s: %s", r.Cause, r.Error)
	}
	var v struct {
		P50       float64 `json:"p50_us"`
		P99       float64 `json:"p99_us"`
		PerSecond float64 `json:"per_second"`
		MiB       float64 `json:"mib_per_second"`
	}
	if err := json.Unmarshal(r.Value, &v); err != nil {
		return err
	}
	fmt.Printf("\na tool call from Python in a jail, through the chain and back\n")
	fmt.Printf("one at a time    p50 %.0f us, p99 %.0f us\n", v.P50, v.P99)
	fmt.Printf("60 at a time     %.0f calls a second\n", v.PerSecond)
	fmt.Printf("1 MB each way    %.0f MiB a second\n", v.MiB)
	return nil
}
