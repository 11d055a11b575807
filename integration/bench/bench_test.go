package main

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"example.com/jail/jail"
)

func TestPercentileIsTheNearestRank(t *testing.T) {
	hundred := make(sample, 100)
	for i := range hundred {
		hundred[i] = time.Duration(100 - i)
	}
	for _, c := range []struct {
		s    sample
		p    float64
		want time.Duration
	}{
		{sample{7}, 0, 7}, {sample{7}, 99, 7}, {sample{2, 1}, 50, 1}, {sample{3, 1, 2}, 50, 2}, {sample{3, 1, 2}, 99, 3},
		{hundred, 0, 1}, {hundred, 50, 50}, {hundred, 95, 95}, {hundred, 99, 99}, {hundred, 100, 100},
	} {
		if got := c.s.at(c.p); got != c.want {
			t.Errorf("percentile %g of %v: %d, want %d", c.p, c.s, got, c.want)
		}
	}
}

func TestSizesOfProcAreBytes(t *testing.T) {
	const status = "Name:\tjail\nVmHWM:\t  1024 kB\nVmRSS:\t   512 kB\n"
	if n, err := kib("status", status, "VmRSS"); n != 512<<10 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
	if _, err := kib("status", status, "VmSwap"); err == nil {
		t.Error("a size that is not there was read")
	}
}

func TestTurnsCountRoundsAndForeignFailures(t *testing.T) {
	ok := &turn{name: "ok", do: timed(func(context.Context) error { return nil })}
	refuses := &turn{name: "refuses", foreign: true, do: timed(func(context.Context) error { return errors.New("refused") })}
	b := &bench{}
	if err := b.interleave(context.Background(), 5, []*turn{ok, refuses}); err != nil {
		t.Fatal(err)
	}
	if len(ok.times) != 1 || len(ok.times[0]) != 5 || ok.err != nil {
		t.Errorf("%+v, want 5 times: the first go is not counted", ok)
	}
	if len(refuses.times) != 0 || refuses.err == nil {
		t.Errorf("%+v", refuses)
	}

	goes := 0
	breaks := &turn{name: "breaks", do: timed(func(context.Context) error {
		if goes++; goes == 3 {
			return io.ErrUnexpectedEOF
		}
		return nil
	})}
	if err := b.interleave(context.Background(), 5, []*turn{breaks}); !errors.Is(err, io.ErrUnexpectedEOF) || !strings.HasPrefix(err.Error(), "breaks: ") || goes != 3 {
		t.Errorf("%v after %d goes", err, goes)
	}
	ctx, cancel := context.WithCancel(context.Background())
	stops := &turn{name: "stops", foreign: true, do: timed(func(context.Context) error { cancel(); return nil })}
	if err := b.interleave(ctx, 5, []*turn{stops}); !errors.Is(err, context.Canceled) {
		t.Errorf("interrupted: %v", err)
	}
}

func TestSteadyTellsTheFailureOfAnOperation(t *testing.T) {
	b := &bench{}
	fails := errors.New("fails")
	if _, err := b.steady(context.Background(), 3, time.Minute, func(context.Context) error { return fails }, func() {}); !errors.Is(err, fails) {
		t.Errorf("%v, want %v", err, fails)
	}
	edges := 0
	f, err := b.steady(context.Background(), 3, 20*time.Millisecond, func(ctx context.Context) error { return rest(ctx, time.Millisecond) }, func() { edges++ })
	if err != nil || edges != 2 || f.perSecond() <= 0 || f.wall < 20*time.Millisecond {
		t.Errorf("%v, %d edges, %+v", err, edges, f)
	}
}

func TestRunsMustEndForTheirCause(t *testing.T) {
	ctx := context.Background()
	wall := &jail.Report{Cause: jail.CauseWall}
	if err := expect(ctx, jail.CauseWall, wall, nil); err != nil {
		t.Error(err)
	}
	if err := expect(ctx, jail.CauseOK, wall, nil); err == nil {
		t.Error("another cause was accepted")
	}
	if err := expect(ctx, jail.CauseOK, nil, io.EOF); !errors.Is(err, io.EOF) {
		t.Error(err)
	}
	cut := &jail.Report{Cause: jail.CauseOK, Stdout: jail.StreamUsage{Seen: 100, Delivered: 99, Dropped: 1}}
	if err := complete(ctx, 100, cut, nil); err == nil {
		t.Error("output that was not delivered was accepted")
	}
	for _, r := range []*jail.Report{{Value: []byte("41"), ResultNS: 1}, {Value: []byte("42")}} {
		if _, err := answers(r); err == nil {
			t.Errorf("%+v was accepted", r)
		}
	}
}

func TestOthersThatFailFailWhatIsBesideThem(t *testing.T) {
	alone := func(ctx context.Context) ([]time.Duration, error) { return nil, rest(ctx, 20*time.Millisecond) }
	if _, err := beside(context.Background(), 2, func(context.Context) error { return io.EOF }, alone); !errors.Is(err, io.EOF) {
		t.Error(err)
	}
	if _, err := beside(context.Background(), 2, func(ctx context.Context) error { return rest(ctx, time.Hour) }, alone); err != nil {
		t.Error(err)
	}
}

func TestDescriptorsLeftBehindAreToldByNumber(t *testing.T) {
	before, err := held()
	if err != nil {
		t.Fatal(err)
	}
	release, err := duplicate(3)
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	after, err := held()
	if err != nil || after.fds != before.fds+3 {
		t.Errorf("%v; %s", err, after.against(before))
	}
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	if _, err := before.backTo(ctx); err == nil {
		t.Error("descriptors that are open were not seen")
	}
	release()
	if _, err := before.backTo(context.Background()); err != nil {
		t.Error(err)
	}
}
