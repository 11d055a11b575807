package wire

import (
	"sync/atomic"
	"testing"
	"time"
)

// W30: who has the stream, step by step.
func TestRelay(t *testing.T) {
	var handed atomic.Int64
	r := relay{handOn: func() { handed.Add(1) }}
	if r.lend(false) != 0 {
		t.Error("lent although other requests are there")
	}
	first := r.lend(true)
	if first == 0 {
		t.Fatal("not lent to the first call")
	}
	eventually(t, "the timer", func() bool { return handed.Load() == 1 })
	if r.lend(true) != 0 {
		t.Error("lent right after a slow call")
	}
	for range relayProbation {
		if r.back(0, 0) {
			t.Error("given back without a loan")
		}
	}
	second := r.lend(true)
	if second == 0 {
		t.Fatal("not lent after enough quick calls")
	}
	// The first call returns at last: the stream is not its own, nor is it taken
	// from the second one.
	if r.back(first, time.Second) {
		t.Error("the first call got the stream of the second")
	}
	if !r.back(second, 0) {
		t.Error("the second call lost its stream")
	}
	if r.back(second, 0) {
		t.Error("the second call got its stream twice")
	}
	if r.lend(true) != 0 {
		t.Error("lent although the first call was slow")
	}
	for range relayProbation {
		r.back(0, 0)
	}
	// A call that is slow without being caught by the timer counts too.
	loan := r.lend(true)
	if loan == 0 || !r.back(loan, 2*quickCall) || r.lend(true) != 0 {
		t.Error("a call above quickCall is followed by a loan")
	}
	eventually(t, "the timer's rest", func() bool { r.mu.Lock(); defer r.mu.Unlock(); return !r.active })
	if n := handed.Load(); n != 1 {
		t.Errorf("handed on %d times, want once", n)
	}
	for range relayProbation {
		r.back(0, 0)
	}
	if r.lend(true) == 0 {
		t.Fatal("not lent again")
	}
	eventually(t, "the timer, started again", func() bool { return handed.Load() == 2 })
}
