package wire

import (
	"testing"
	"time"
)

// W30: who has the stream, step by step.
func TestRelay(t *testing.T) {
	handed := 0
	// A timer that calls nothing: the test ticks itself.
	r := relay{handOn: func() { handed++ }, timer: time.NewTimer(time.Hour)}
	if r.lend(false) != 0 {
		t.Error("lent although other requests are there")
	}
	first := r.lend(true)
	if first == 0 {
		t.Fatal("not lent to the first call")
	}
	if r.tick(); handed != 0 {
		t.Error("taken away at the first tick, which may come at once")
	}
	if r.tick(); handed != 1 {
		t.Error("not taken away at the second tick")
	}
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
	r.tick()
	if r.tick(); r.active {
		t.Error("the timer runs on without a call")
	}
	if handed != 1 {
		t.Errorf("handed on %d times, want once", handed)
	}
	for range relayProbation {
		r.back(0, 0)
	}
	if r.lend(true) == 0 || !r.active {
		t.Error("not lent again, with the timer on")
	}
	r.tick()
	if r.tick(); handed != 2 {
		t.Errorf("handed on %d times, want twice", handed)
	}
}
