package wire

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"
)

// outboxBytes is how much may wait behind the write under way before those who
// answer have to wait too.
const outboxBytes = 1 << 20

// outbox holds the responses of a Server until they are written. Whoever finds
// no write under way writes, and takes along what others add meanwhile, so that
// a response costs no switch to a writing goroutine and frames never mix (W8).
type outbox struct {
	w       io.Writer
	timeout time.Duration
	setter  interface{ SetWriteDeadline(time.Time) error } // nil if w has none
	until   time.Time                                      // the deadline that is set

	mu      sync.Mutex
	room    sync.Cond
	queue   []byte // whole frames
	spare   []byte
	writing bool
	dead    bool
}

func (o *outbox) init(w io.Writer) {
	o.w, o.timeout = w, DefaultWriteTimeout
	o.room.L = &o.mu
	o.setter, _ = w.(interface{ SetWriteDeadline(time.Time) error })
}

// lock waits until there is room and locks. It returns false if nothing will be
// written any more; the outbox is locked then too.
func (o *outbox) lock() bool {
	o.mu.Lock()
	for len(o.queue) >= outboxBytes && !o.dead {
		o.room.Wait()
	}
	return !o.dead
}

// flush writes the queue unless somebody does already, and unlocks. It returns
// ErrUnread if a write took too long, and otherwise what stopped it.
func (o *outbox) flush() (err error) {
	defer o.mu.Unlock()
	if o.writing {
		return nil
	}
	o.writing = true
	for len(o.queue) > 0 && !o.dead {
		frames := o.queue
		o.queue, o.spare = o.spare, nil
		o.mu.Unlock()
		err = o.write(frames)
		o.mu.Lock()
		if err != nil {
			o.dead = true // and frames may still be in use
		} else {
			o.spare = keep(frames)
		}
		o.room.Broadcast()
	}
	o.writing = false
	if o.dead {
		o.queue, o.spare = nil, nil
	}
	return err
}

// write writes frames within the timeout.
func (o *outbox) write(frames []byte) error {
	// Setting a deadline costs as much as a small frame, so one is kept for
	// several writes while half of it is left.
	if now := time.Now(); o.setter != nil && o.until.Sub(now) < o.timeout/2 {
		o.until = now.Add(o.timeout)
		if o.setter.SetWriteDeadline(o.until) != nil {
			o.setter = nil // a file that cannot be polled
		}
	}
	if o.setter != nil {
		_, err := o.w.Write(frames)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return fmt.Errorf("%w: %d bytes wait", ErrUnread, len(frames))
		}
		return err
	}
	written := make(chan error, 1)
	go func() {
		_, err := o.w.Write(frames)
		written <- err
	}()
	timer := time.NewTimer(o.timeout)
	defer timer.Stop()
	select {
	case err := <-written:
		return err
	case <-timer.C:
		return fmt.Errorf("%w: %d bytes wait", ErrUnread, len(frames))
	}
}

// kill drops what waits and lets all go on who wait for room.
func (o *outbox) kill() {
	o.mu.Lock()
	o.dead = true
	o.room.Broadcast()
	o.mu.Unlock()
}
