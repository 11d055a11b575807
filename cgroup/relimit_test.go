package cgroup

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"
)

// A lower limit of tasks that more tasks are above already would hold nobody.
func TestPidsLimitBelowWhatIsThere(t *testing.T) {
	h := need(t, Pids)
	leaf := newTestLeaf(t, h, Limits{Pids: 200})
	sleeper(t, leaf)
	var tasks int64 // threads count, too
	for _, p := range leaf.parts {
		if n, err := p.dir.count("pids.current"); err == nil {
			tasks = max(tasks, n)
		}
	}
	if tasks < 2 {
		t.Fatalf("%d tasks", tasks)
	}
	// A runtime may start a thread meanwhile.
	if err := leaf.Limit(Limits{Pids: tasks + 20}); err != nil {
		t.Errorf("above: %v", err)
	}
	if err := leaf.Limit(Limits{Pids: tasks - 1}); !errors.Is(err, unix.EBUSY) {
		t.Errorf("below: %v", err)
	}
}

// The limit of a device that is not asked for any more would stay.
func TestIOLimitsOfOtherDevicesOrRates(t *testing.T) {
	h := need(t, IO)
	first := someIO()
	if first == nil {
		t.Skip("this host has no disk")
	}
	leaf := newTestLeaf(t, h, Limits{IO: first})
	higher := IOLimits{(*first)[0]}
	higher[0].ReadBytes *= 2
	other := IOLimits{{Device: higher[0].Device, ReadBytes: 1 << 40}}
	if err := leaf.Limit(Limits{IO: &other}); !errors.Is(err, ErrOtherLimits) {
		t.Errorf("another rate: %v", err)
	}
	if err := leaf.Limit(Limits{IO: &higher}); err != nil {
		t.Errorf("another value: %v", err)
	}
}
