package execwire

import (
	"fmt"
	"io"
	"sync"
)

// Options change how output is written. The zero value is the default.
type Options struct {
	// Text writes output as text where it is valid UTF-8 (E8). A character that
	// is cut by the end of one Output call waits for the next of the same stream,
	// or for Exit; bytes that are not UTF-8 make their event base64. Default:
	// everything is base64.
	Text bool
}

// Encoder writes the stream of one execution. Its methods may be called
// concurrently: each event is one Write, and seq follows the order of the
// writes. Nothing is buffered from event to event, so a writer that blocks holds
// back the caller, who stops reading the program's pipes (E27).
//
// After a failed write every later call returns the same error: a half line must
// not be followed by another.
type Encoder struct {
	mu  sync.Mutex
	w   io.Writer
	f   *framer
	err error
}

// NewEncoder makes an encoder for the execution id: UTF-8, 1 to 128 bytes. With
// any other id all calls fail.
func NewEncoder(w io.Writer, id string, opts Options) *Encoder {
	f, err := newFramer(id, opts.Text)
	return &Encoder{w: w, f: f, err: err}
}

// Output writes p as output of the stream name, Stdout or Stderr, in events of
// at most 64 KiB each. Empty output makes one empty event. It returns ErrEnded
// after Exit.
func (e *Encoder) Output(name string, p []byte) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.err != nil {
		return e.err
	}
	return e.f.output(name, p, e.write)
}

// Exit writes the exit event, the last one (E33). Like Output it waits for the
// writer: a caller who must not wait for a reader that stopped gives the writer
// a deadline. A second call returns ErrEnded. If extra.Usage cannot be encoded or has more than 1 MiB, the event
// goes without it and the error says so.
func (e *Encoder) Exit(code int, extra Extra) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.err != nil {
		return e.err
	}
	return e.f.exit(code, extra, e.write)
}

// Heartbeat writes a heartbeat with the seq of the last event, 0 if there is
// none yet. It returns ErrEnded after Exit.
func (e *Encoder) Heartbeat(beat Beat) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case e.err != nil:
		return e.err
	case e.f.ended:
		return ErrEnded
	}
	return e.write(e.f.heartbeat(beat))
}

func (e *Encoder) write(line []byte) error {
	n, err := e.w.Write(line)
	if err == nil && n != len(line) {
		err = io.ErrShortWrite
	}
	if err != nil {
		e.err = fmt.Errorf("write event: %w", err)
	}
	return e.err
}
