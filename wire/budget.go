package wire

import (
	"errors"
	"fmt"
	"sync"
)

// Budget is the parent's ledger of what one run may use of its host's tools. It
// may be given to several servers, which then draw on it together. The limits
// must not change once a server runs; a Budget must not be copied.
//
// It is not StartBudget, which is what was asked for (W28).
type Budget struct {
	// MaxCalls bounds the requests that are accepted. 0 is no bound, a negative
	// value makes Serve fail. Above it requests are refused with class quota.
	MaxCalls int
	// MaxBytes bounds the text that is delivered, in bytes of UTF-8 before
	// escaping: value and error of every response, except the error text of
	// class quota, which must still get through when nothing is left. 0 is no
	// bound, a negative value makes Serve fail. A response that does not fit is
	// replaced by a refusal of class quota and is not counted (W37).
	MaxBytes int

	mu    sync.Mutex
	calls int64
	bytes int64
}

func (b *Budget) validate() error {
	if b.MaxCalls < 0 || b.MaxBytes < 0 {
		return fmt.Errorf("budget of %d calls and %d bytes: %w", b.MaxCalls, b.MaxBytes, errNegative)
	}
	return nil
}

// callsLeft tells whether takeCall would succeed now.
func (b *Budget) callsLeft() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.MaxCalls == 0 || b.calls < int64(b.MaxCalls)
}

// takeCall charges one call, or returns false and charges nothing (W36).
func (b *Budget) takeCall() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.MaxCalls != 0 && b.calls >= int64(b.MaxCalls) {
		return false
	}
	b.calls++
	return true
}

// takeBytes charges n bytes, or returns false and charges nothing (W37).
func (b *Budget) takeBytes(n int) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.MaxBytes != 0 && b.bytes+int64(n) > int64(b.MaxBytes) {
		return false
	}
	b.bytes += int64(n)
	return true
}

var errNoHandler = errors.New("no handler")
