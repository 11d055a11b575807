package main

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"example.com/jail/invoke"
	"example.com/jail/jail"
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
result = {"one_ns": [int(t * 1e9) for t in each], "per_second": 5000 / burst, "mib_per_second": 2 * len(text) / big[15] / 2**20}
`

// calls prints what a call of a host's tool costs a Python program in a jail: the
// whole way through guest, socket, server, chain and back.
func (b *bench) calls(ctx context.Context) error {
	tools, err := invoke.NewTools(invoke.Manifest{
		"echo": {Call: func(_ context.Context, args json.RawMessage) (any, error) { return args, nil }},
	}, nil, invoke.Options{})
	if err != nil {
		return err
	}
	defer tools.Close()
	spec := b.guest(callProgram)
	spec.Script.Tools = tools
	spec.Budget.MaxCalls, spec.Budget.MaxBytes = 0, 0
	r, err := jail.Run(ctx, spec)
	if err := expect(ctx, jail.CauseOK, r, err); err != nil {
		return err
	}
	// 100 and 2000 one after the other, 5000 at once, 30 large ones.
	if want := int64(100 + 2000 + 5000 + 30); r.Calls.Accepted != want || !r.Calls.Reconciled {
		return fmt.Errorf("%+v, want %d calls", r.Calls, want)
	}
	var v struct {
		One       sample  `json:"one_ns"`
		PerSecond float64 `json:"per_second"`
		MiB       float64 `json:"mib_per_second"`
	}
	if err := json.Unmarshal(r.Value, &v); err != nil {
		return err
	}
	if len(v.One) != 2000 {
		return fmt.Errorf("%d times of calls", len(v.One))
	}
	b.method("an echo tool, called by a Python program in a jail, by its own clock: guest, socket, chain of the host and back")
	t := newTable(b.out, append([]string{"a tool call, us"}, quantiles...)...)
	t.row(append([]string{"one at a time"}, v.One.columns(time.Microsecond)...)...)
	t.end()
	fmt.Fprintf(b.out, "60 at a time   %.0f calls a second\n", v.PerSecond)
	fmt.Fprintf(b.out, "1 MB each way  %.0f MiB a second, median of 30\n", v.MiB)
	return nil
}
