// Package shop has no code: its tests run the example against the real protocol,
// without a jail around the program.
package shop

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"example.com/jail/guest/python"
	"example.com/jail/invoke"
	"example.com/jail/wire"
)

const python3 = "/usr/bin/python3"

func openTools(t *testing.T, o invoke.Options) *invoke.Tools {
	t.Helper()
	file, err := invoke.LoadFile("tools.yaml")
	if err != nil {
		t.Fatal(err)
	}
	tools, err := file.Open(context.Background(), nil, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := tools.Close(); err != nil {
			t.Error(err)
		}
	})
	return tools
}

func TestTools(t *testing.T) {
	tools := openTools(t, invoke.Options{})
	var signatures []string
	for _, b := range tools.Bindings() {
		signatures = append(signatures, b.Signature)
		if b.Description == "" {
			t.Errorf("%s has no description", b.Name)
		}
	}
	if got, want := strings.Join(signatures, " "), "customers() orders(customer_id: int, limit: int = 100) rates() stock(sku: str)"; got != want {
		t.Errorf("signatures %s, want %s", got, want)
	}
	run := tools.NewRun(context.Background(), "test")
	defer run.Close()
	for _, c := range []struct{ tool, args, kind, want string }{
		{"customers", `{}`, "", `{"id":6,"name":"Rosa Péter","country":"HU"}]`},
		{"orders", `{"customer_id":5,"limit":1}`, "", `[{"id":1008,"sku":"LP-1","quantity":3,"unit_cents":2790,"currency":"EUR","day":"2026-03-17"}]`},
		{"orders", `{"customer_id":6}`, "", `[]`},
		{"stock", `{"sku":"MS-5"}`, "", `{"sku":"MS-5","name":"Mouse, five buttons","units":0}`},
		{"rates", `{}`, "", `"USD":"1.0832"`},
		{"orders", `{"customer_id":99}`, "permanent", "no customer 99"},
		{"stock", `{"sku":"' OR 1=1 --"}`, "permanent", `no article "' OR 1=1 --"`},
		{"orders", `{"customer_id":"1 OR 1=1"}`, "invalid", "at /customer_id"},
		{"orders", `{"customer_id":1,"sql":"x"}`, "invalid", "sql"},
		{"customers", `[]`, "invalid", `want "object"`},
		{"Customers", `{}`, "invalid", "no such tool"},
	} {
		resp, err := run.Handle(context.Background(), wire.Request{V: wire.Version, ID: "1", Tool: c.tool, Args: c.args})
		if err != nil || resp.Kind != c.kind || !strings.Contains(resp.Value+resp.Error, c.want) {
			t.Errorf("%s(%s) = %+v, %v; want %q", c.tool, c.args, resp, err, c.want)
		}
	}
}

// The committed database holds what the committed SQL says.
func TestDatabaseIsThatOfTheSQL(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"make_db.py", "shop.sql"} {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if out, err := exec.Command(python3, "-IB", filepath.Join(dir, "make_db.py")).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	dump := func(path string) string {
		out, err := exec.Command(python3, "-IBc", "import sqlite3,sys\nprint(*sqlite3.connect(sys.argv[1]).iterdump(), sep='\\n')", path).CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return string(out)
	}
	if got, want := dump("shop.db"), dump(filepath.Join(dir, "shop.db")); got != want || !strings.Contains(want, "Ada Byron") {
		t.Errorf("shop.db has\n%s\nwant\n%s", got, want)
	}
}

// TestReport runs report.py by the guest and the protocol of `jail script`, but
// without a jail.
func TestReport(t *testing.T) { // B18, I25, W14, W42
	var mu sync.Mutex
	var records []invoke.Record
	tools := openTools(t, invoke.Options{Recorder: func(r invoke.Record) {
		mu.Lock()
		defer mu.Unlock()
		records = append(records, r)
	}})
	program, err := os.ReadFile("report.py")
	if err != nil {
		t.Fatal(err)
	}
	guest := filepath.Join(t.TempDir(), python.FileName)
	if err := os.WriteFile(guest, python.Source, 0o600); err != nil {
		t.Fatal(err)
	}
	startParent, startChild, err := wire.Pair()
	if err != nil {
		t.Fatal(err)
	}
	callParent, callChild, err := wire.Pair()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	argv := python.Argv(guest)
	cmd := exec.CommandContext(ctx, python3, argv[1:]...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.ExtraFiles = []*os.File{startChild, callChild}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	startChild.Close()
	callChild.Close()

	run := tools.NewRun(ctx, "report")
	served := make(chan error, 1)
	go func() { served <- wire.NewServer(callParent, run.Handle).Serve(ctx) }()
	result, err := wire.NewStarter(startParent).Start(ctx, wire.Start{
		V: wire.Version, Program: string(program), Bindings: tools.Bindings(), ResultID: "report"})
	if err != nil {
		t.Errorf("Start: %v", err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("guest: %v: %s", err, stderr.String())
	}
	if err := <-served; err != nil {
		t.Errorf("Serve: %v", err)
	}
	callParent.Close()
	startParent.Close()
	if err := run.Close(); err != nil {
		t.Error(err)
	}

	if !result.OK {
		t.Fatalf("result %+v\n%s", result, stderr.String())
	}
	wantOut := "6 customers\n18 orders\n4 of 8 ordered articles run out\nas expected, orders failed: permanent\n"
	wantOut = strings.Replace(wantOut, "4 of", "3 of", 1)
	if stdout.String() != wantOut {
		t.Errorf("standard output %q, want %q", stdout.String(), wantOut)
	}
	var value struct {
		Turnover []struct {
			Customer  string `json:"customer"`
			Orders    int    `json:"orders"`
			EuroCents int    `json:"euro_cents"`
		} `json:"turnover"`
		EuroCents int `json:"euro_cents"`
		RunOut    []struct {
			SKU string `json:"sku"`
		} `json:"run_out"`
	}
	if err := json.Unmarshal([]byte(result.Value), &value); err != nil {
		t.Fatalf("value %s: %v", result.Value, err)
	}
	if len(value.Turnover) != 6 || value.Turnover[0].Customer != "Grace Murray" || value.Turnover[5].EuroCents != 0 || len(value.RunOut) != 3 {
		t.Errorf("value %s", result.Value)
	}
	sum := 0
	for _, c := range value.Turnover {
		sum += c.EuroCents
	}
	if d := sum - value.EuroCents; d < -6 || d > 6 {
		t.Errorf("turnovers add up to %d cents, total %d", sum, value.EuroCents)
	}
	// One record a call: customers, 6 orders and one that fails, 8 articles, and
	// the early read of the rates.
	mu.Lock()
	defer mu.Unlock()
	if len(records) != 17 {
		t.Errorf("%d records", len(records))
	}
	for _, r := range records {
		if r.Call.Caller != "report" || !r.Allowed {
			t.Errorf("record %+v", r)
		}
	}
}
