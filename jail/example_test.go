package jail_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"time"

	"example.com/jail/guest/python"
	"example.com/jail/invoke"
	"example.com/jail/jail"
	"example.com/jail/rootfs"
)

// A program, its budget, and what became of it.
func ExampleRun() {
	budget := jail.DefaultBudget()
	budget.MaxMemory = 64 << 20
	report, err := jail.Run(context.Background(), jail.Spec{
		Args:   []string{"python3", "-c", "print(6 * 7, flush=True); x = bytearray(1 << 30)"},
		Budget: budget,
		Stdout: os.Stdout,
	})
	if err != nil {
		fmt.Println("not started:", err)
		return
	}
	fmt.Println(report.Cause, report.Memory.Scope)
	// Output:
	// 42
	// memory self
}

// A program that calls a Go function of its host.
func ExampleScript() {
	tools, err := invoke.NewTools(invoke.Manifest{
		"price": {
			Description: "Price of an article in cents.",
			Signature:   "price(sku: str) -> int",
			Call: func(_ context.Context, args json.RawMessage) (any, error) {
				var in struct{ SKU string }
				if err := json.Unmarshal(args, &in); err != nil {
					return nil, err
				}
				return 100 * len(in.SKU), nil
			},
		},
	}, nil, invoke.Options{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer tools.Close()

	report, err := jail.Run(context.Background(), jail.Spec{
		Args:   python.Argv(rootfs.FilesDir + "/" + python.FileName),
		Root:   rootfs.Config{Files: []rootfs.File{{Name: python.FileName, Data: python.Source}}},
		Budget: jail.DefaultBudget(),
		Script: &jail.Script{Program: "result = sum(host.price(sku=s) for s in ['A', 'BB'])", Tools: tools},
	})
	if err != nil {
		fmt.Println("not started:", err)
		return
	}
	fmt.Println(report.Cause, string(report.Value), report.Calls.Accepted)
	// Output: ok 300 2
}

// Guests that have been started, and have imported what programs need: a program
// does not wait for its interpreter.
func ExamplePool() {
	ctx := context.Background()
	spec, err := python.Compile(ctx, jail.Spec{
		Args:   python.Argv(rootfs.FilesDir+"/"+python.FileName, "json", "re"),
		Root:   rootfs.Config{Files: []rootfs.File{{Name: python.FileName, Data: python.Source}}},
		Budget: jail.DefaultBudget(),
		Script: &jail.Script{}, // each run brings its own
	})
	if err != nil {
		fmt.Println(err) // the spec can be used nevertheless
	}
	pool, err := jail.NewPool(spec, 2)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer pool.Close()
	if err := pool.Fill(ctx); err != nil {
		fmt.Println(err)
		return
	}

	budget := jail.DefaultBudget()
	budget.WallClock = 5 * time.Second
	report, err := pool.Run(ctx, jail.Use{
		Budget: &budget,
		Script: &jail.Script{Program: "import re\nlen(re.findall('a', 'banana'))"},
	})
	if err != nil {
		fmt.Println("not started:", err)
		return
	}
	fmt.Println(report.Cause, string(report.Value), pool.Stats().Taken)
	// Output: ok 3 1
}
