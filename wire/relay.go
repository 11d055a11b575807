package wire

import (
	"sync"
	"time"
)

const (
	// relayTick is how long a handler may keep the goroutine that reads; a request
	// that arrives meanwhile waits for one to two ticks. Each tick wakes a thread,
	// so a shorter one is felt by all calls.
	relayTick = 2 * time.Millisecond
	// quickCall is what a call may take to count as quick.
	quickCall = 100 * time.Microsecond
	// relayProbation is how many quick calls in a row it takes after a slow one.
	relayProbation = 32
)

// relay decides when the goroutine that read a request lets another one read on.
//
// Waking a second goroutine for every call costs as much as the rest of a small
// call, and is for nothing if the handler returns in a few microseconds and no
// other request is there. So a handler keeps the stream, and a timer that runs
// only while calls come in takes it away from one that turns out to be slow
// (W30). After a call that was not quick, each handler gives the stream away
// before it runs, until enough of them have been quick again.
type relay struct {
	handOn func()

	mu     sync.Mutex
	loan   uint64 // counts loans of the stream to a handler
	lent   bool   // the last one is under way
	seen   uint64 // the last loan that the last tick saw
	timer  *time.Timer
	active bool // timer is set
	slow   int  // how many quick calls are missing
}

// lend returns a loan that lets the caller keep the stream while it runs a
// handler, or 0 if the stream has to be handed on first.
func (r *relay) lend(alone bool) (loan uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !alone || r.slow > 0 {
		return 0
	}
	r.loan++
	r.lent = true
	if !r.active {
		r.active = true
		if r.timer == nil {
			r.timer = time.AfterFunc(relayTick, r.tick)
		} else {
			r.timer.Reset(relayTick)
		}
	}
	return r.loan
}

// back ends a loan, or a call without one, that took d. It returns whether the
// caller still has the stream.
func (r *relay) back(loan uint64, d time.Duration) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if d > quickCall {
		r.slow = relayProbation
	} else if r.slow > 0 {
		r.slow--
	}
	if loan == 0 || loan != r.loan || !r.lent {
		return false
	}
	r.lent = false
	return true
}

func (r *relay) tick() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.lent && r.loan == r.seen {
		r.lent = false
		r.slow = relayProbation
		r.handOn()
	}
	if r.active = r.loan != r.seen; r.active {
		r.seen = r.loan
		r.timer.Reset(relayTick)
	}
}
