package wire

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strconv"
	"sync"
	"time"
)

// writeGrace is how long a frame may still take once its call's context ended:
// enough for a write that is all but done, so that it does not cost the connection.
const writeGrace = 100 * time.Millisecond

// Client calls the parent's tools. Its methods are safe for concurrent use (W58).
type Client struct {
	rw io.ReadWriter

	// write is a lock that a context can give up waiting for.
	write chan struct{}
	frame []byte // guarded by write

	mu      sync.Mutex
	pending map[string]chan Response
	prefix  string
	minted  uint64
	err     error         // why the connection ended
	ended   chan struct{} // closed when err is set

	// The stream belongs to the one goroutine that set reading.
	reading  bool          // guarded by mu
	turn     chan struct{} // wakes one that waits, to take the stream
	frames   frameReader
	offset   int64
	deadline interface{ SetReadDeadline(time.Time) error }
}

// NewClient returns a client on rw. Where rw takes a read deadline, as net.Conn
// and the file of OpenFD do, callers read it themselves while they wait.
// Otherwise NewClient starts a goroutine that reads until the connection ends.
func NewClient(rw io.ReadWriter) *Client {
	var random [6]byte
	_, _ = rand.Read(random[:]) // never fails: crypto/rand ends the process instead
	c := &Client{
		rw: rw, write: make(chan struct{}, 1), pending: make(map[string]chan Response),
		prefix: hex.EncodeToString(random[:]) + "-", ended: make(chan struct{}), turn: make(chan struct{}, 1),
		frames: frameReader{r: bufio.NewReaderSize(rw, 8<<10), grow: grow},
	}
	c.deadline, _ = rw.(interface{ SetReadDeadline(time.Time) error })
	if c.deadline == nil || c.deadline.SetReadDeadline(time.Time{}) != nil {
		c.reading = true
		go func() {
			for {
				if err := c.readOne(); err != nil {
					c.fail(err)
					return
				}
			}
		}()
	}
	return c
}

// Call calls a tool under a new id and waits for the response (W54). A call that
// failed is a Response with OK false and a class in Kind, not an error. args is
// raw text. The time that is left to ctx travels along as the call's deadline.
//
// The error wraps ctx.Err() if ctx ended, after which a response is dropped
// (W57); ErrClosed if the connection ended, before or meanwhile (W55); and
// ErrFrameTooLarge for a call that does not fit into a frame, of which nothing
// was written. If ctx ends while the call's own frame is being written, the write
// has another 100 ms; then the connection is closed if it can be, since half a
// frame must not stay in it.
func (c *Client) Call(ctx context.Context, tool, args string) (Response, error) {
	c.mu.Lock()
	c.minted++
	id := c.prefix + strconv.FormatUint(c.minted, 36)
	c.mu.Unlock()
	return c.CallWithID(ctx, id, tool, args)
}

// CallWithID is Call under an id of the caller's choice: 1 to MaxIDBytes bytes,
// not used before in this run. An id of a pending call is ErrDuplicateID (W58).
func (c *Client) CallWithID(ctx context.Context, id, tool, args string) (Response, error) {
	req := Request{V: Version, ID: id, Tool: tool, Args: args}
	if err := checkRequest(&req); err != nil {
		return Response{}, fmt.Errorf("call %.64q: %w", tool, err)
	}
	if err := ctx.Err(); err != nil {
		return Response{}, fmt.Errorf("call %.64q: %w", tool, err)
	}
	if t, ok := ctx.Deadline(); ok {
		// Rounded up: 0 would mean no deadline.
		req.DeadlineMS = max(1, int64(math.Ceil(float64(time.Until(t))/float64(time.Millisecond))))
	}
	answer, err := c.register(id)
	if err != nil {
		return Response{}, fmt.Errorf("call %.64q: %w", tool, err)
	}
	if err := c.send(ctx, &req); err != nil {
		c.forget(id)
		return Response{}, fmt.Errorf("call %.64q: %w", tool, err)
	}
	r, err := c.await(ctx, id, answer)
	if err != nil {
		return Response{}, fmt.Errorf("call %.64q: %w", tool, err)
	}
	return r, nil
}

func checkRequest(r *Request) error {
	switch {
	case r.ID == "" || len(r.ID) > MaxIDBytes:
		return fmt.Errorf("id of %d bytes, want 1 to %d", len(r.ID), MaxIDBytes)
	case r.Tool == "":
		return errors.New("empty tool name")
	case len(r.Args) > MaxFrameBytes: // spares the encoding
		return &FrameSizeError{Size: int64(len(r.Args))}
	}
	return checkUTF8("id", r.ID, "tool name", r.Tool, "args", r.Args)
}

func (c *Client) register(id string) (chan Response, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return nil, c.err
	}
	if _, dup := c.pending[id]; dup {
		return nil, fmt.Errorf("%w: pending", ErrDuplicateID)
	}
	// One place, so that the reader never waits for a caller.
	answer := make(chan Response, 1)
	c.pending[id] = answer
	return answer, nil
}

// forget removes a waiter. After it no response is delivered to it.
func (c *Client) forget(id string) {
	c.mu.Lock()
	delete(c.pending, id)
	c.mu.Unlock()
}

// send writes a request's frame in one piece (W8).
func (c *Client) send(ctx context.Context, req *Request) error {
	select {
	case c.write <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	case <-c.ended:
		return c.err
	}
	defer func() { <-c.write }()
	frame, err := appendRequest(grow(c.frame, len(req.Args)+envelopeBytes), req)
	defer func() { c.frame = keep(frame) }()
	if err != nil {
		return err
	}
	if ctx.Done() != nil {
		// A frame that was cut ends the channel: EOF is the only cancel signal
		// there is (W48). Without an io.Closer the write goes on until the peer reads.
		written := make(chan struct{})
		unhook := context.AfterFunc(ctx, func() {
			select {
			case <-written:
			case <-time.After(writeGrace):
				c.fail(ctx.Err())
			}
		})
		defer unhook()
		defer close(written) // runs first
	}
	if _, err := c.rw.Write(frame); err != nil {
		c.fail(err)
		return c.err
	}
	return nil
}

// await waits for the response to a call. Whoever waits first reads the stream
// for all, which saves a switch between goroutines for each call; when it has its
// response it gives the stream to another one that waits.
func (c *Client) await(ctx context.Context, id string, answer chan Response) (Response, error) {
	var err error
	for err == nil {
		if c.takeStream() {
			err = c.lead(ctx, answer)
			c.passStream()
		}
		select {
		case r := <-answer:
			return r, nil
		default:
		}
		if err != nil {
			break
		}
		select {
		case r := <-answer:
			return r, nil
		case <-c.turn:
		case <-ctx.Done():
			err = ctx.Err()
		case <-c.ended:
			err = c.err
		}
	}
	c.mu.Lock()
	delete(c.pending, id) // nothing is delivered after this
	c.mu.Unlock()
	select {
	case r := <-answer: // came at the same moment
		return r, nil
	default:
		return Response{}, err
	}
}

func (c *Client) takeStream() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.reading || c.err != nil {
		return false
	}
	c.reading = true
	return true
}

func (c *Client) passStream() {
	c.mu.Lock()
	c.reading = false
	others := len(c.pending) > 0
	c.mu.Unlock()
	if others {
		select {
		case c.turn <- struct{}{}:
		default: // one is on its way already
		}
	}
}

// lead reads until there is an answer, or ctx or the connection ends.
func (c *Client) lead(ctx context.Context, answer chan Response) error {
	if ctx.Done() != nil {
		interrupted := make(chan struct{})
		unhook := context.AfterFunc(ctx, func() {
			_ = c.deadline.SetReadDeadline(time.Unix(1, 0))
			close(interrupted)
		})
		defer func() {
			if !unhook() {
				<-interrupted
				_ = c.deadline.SetReadDeadline(time.Time{})
			}
		}()
	}
	for len(answer) == 0 {
		err := c.readOne()
		switch {
		case err == nil:
		case ctx.Err() != nil && errors.Is(err, os.ErrDeadlineExceeded):
			return ctx.Err()
		default:
			c.fail(err)
			return c.err
		}
	}
	return nil
}

// readOne delivers one response.
func (c *Client) readOne() error {
	frame, err := c.frames.next()
	if err == io.ErrUnexpectedEOF || err == ErrEmptyFrame || errors.Is(err, ErrFrameTooLarge) {
		return &ProtocolError{Offset: c.offset, Err: err}
	}
	if err != nil {
		return err
	}
	resp, err := decodeResponse(frame)
	if err != nil {
		return &ProtocolError{Offset: c.offset, Err: err}
	}
	c.offset += headerBytes + int64(len(frame))
	c.frames.buf = keep(frame)
	c.mu.Lock()
	defer c.mu.Unlock()
	// A response without a waiter is dropped: late, forged or twice (W56, W57).
	if answer, ok := c.pending[resp.ID]; ok {
		delete(c.pending, resp.ID)
		answer <- resp
	}
	return nil
}

// fail ends the connection; the first reason stays.
func (c *Client) fail(err error) {
	c.mu.Lock()
	first := c.err == nil
	if first {
		c.err = fmt.Errorf("%w: %w", ErrClosed, err)
		clear(c.pending)
		close(c.ended)
	}
	c.mu.Unlock()
	if closer, ok := c.rw.(io.Closer); ok && first {
		closer.Close()
	}
}

// Close closes the connection, if it is an io.Closer, and makes all pending and
// later calls fail with ErrClosed (W55). It may be called more than once.
func (c *Client) Close() error {
	c.fail(errors.New("closed here"))
	return nil
}
