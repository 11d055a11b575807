package wire

import (
	"context"
	"sync"
	"time"
)

// callContext is a context with a deadline that costs next to nothing until
// somebody waits for its end or derives from it; then it becomes a context of the
// standard library.
type callContext struct {
	context.Context // the run's
	deadline        time.Time

	mu     sync.Mutex
	real   context.Context
	cancel context.CancelFunc
	ended  bool
}

func (c *callContext) become() context.Context {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.real == nil {
		c.real, c.cancel = context.WithDeadline(c.Context, c.deadline)
		if c.ended {
			c.cancel()
		}
	}
	return c.real
}

// end cancels the context once the handler returned.
func (c *callContext) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended = true
	if c.cancel != nil {
		c.cancel()
	}
}

func (c *callContext) Deadline() (time.Time, bool) {
	if t, ok := c.Context.Deadline(); ok && t.Before(c.deadline) {
		return t, true
	}
	return c.deadline, true
}

func (c *callContext) Done() <-chan struct{} { return c.become().Done() }

func (c *callContext) Value(key any) any { return c.become().Value(key) }

func (c *callContext) Err() error {
	c.mu.Lock()
	plain := c.real == nil && !c.ended && c.Context.Err() == nil && time.Now().Before(c.deadline)
	c.mu.Unlock()
	if plain {
		return nil
	}
	return c.become().Err()
}
