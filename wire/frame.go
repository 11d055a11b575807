package wire

import (
	"encoding/binary"
	"errors"
	"io"
	"slices"
	"syscall"
)

const (
	headerBytes = 4
	// stepBytes is the first step by which a body buffer grows; a step is never
	// larger than what has arrived before it (W9).
	stepBytes = 64 << 10
)

// ReadFrame reads one frame and returns its JSON text, which uses the memory of
// buf if that is large enough. It reads exactly the frame (W62).
//
// The error is io.EOF if the stream ends before the first byte, and
// io.ErrUnexpectedEOF if it ends later (W7). A length above MaxFrameBytes is a
// *FrameSizeError and 0 is ErrEmptyFrame, both before anything is allocated (W3,
// W5). A reset connection counts as ended: a Unix socket gives ECONNRESET in
// place of EOF when the peer died with unread data. Other errors of r are
// returned as they are.
func ReadFrame(r io.Reader, buf []byte) ([]byte, error) {
	f := frameReader{r: r, buf: buf[:0], grow: slices.Grow[[]byte]}
	return f.next()
}

// frameReader reads one frame after the other. After an error of r that is not
// the end of the stream, such as a deadline, next goes on where it stopped.
type frameReader struct {
	r    io.Reader
	buf  []byte // what there is of the header, then what there is of the body
	size int    // of the body; 0 while the header is read
	grow func([]byte, int) []byte
}

func (f *frameReader) next() ([]byte, error) {
	if f.size == 0 {
		if err := f.fill(headerBytes); err != nil {
			return nil, ended(err, len(f.buf) > 0)
		}
		size := binary.BigEndian.Uint32(f.buf)
		if size > MaxFrameBytes {
			return nil, &FrameSizeError{Size: int64(size)}
		}
		if size == 0 {
			return nil, ErrEmptyFrame
		}
		f.size, f.buf = int(size), f.buf[:0]
	}
	for len(f.buf) < f.size {
		if err := f.fill(min(f.size, len(f.buf)+max(stepBytes, len(f.buf)))); err != nil {
			return nil, ended(err, true)
		}
	}
	frame := f.buf
	f.size, f.buf = 0, nil
	return frame, nil
}

// fill reads until buf has n bytes.
func (f *frameReader) fill(n int) error {
	have := len(f.buf)
	f.buf = f.grow(f.buf, n-have)
	got, err := io.ReadFull(f.r, f.buf[have:n])
	f.buf = f.buf[:have+got]
	return err
}

// ended maps what a reader returns at the end of the stream.
func ended(err error, inside bool) error {
	if err != io.EOF && err != io.ErrUnexpectedEOF && !errors.Is(err, syscall.ECONNRESET) {
		return err
	}
	if inside {
		return io.ErrUnexpectedEOF
	}
	return io.EOF
}

// WriteFrame writes payload as one frame by one call of w.Write, so that frames
// of several writers never mix if w is safe for concurrent use (W8). A payload
// above MaxFrameBytes is a *FrameSizeError and an empty one ErrEmptyFrame; then
// nothing is written (W4).
func WriteFrame(w io.Writer, payload []byte) error {
	buf := make([]byte, headerBytes, headerBytes+min(len(payload), MaxFrameBytes))
	if len(payload) <= MaxFrameBytes {
		buf = append(buf, payload...)
	}
	if err := seal(buf, len(payload)); err != nil {
		return err
	}
	_, err := w.Write(buf)
	return err
}

// seal writes the length of the payload into the header at the start of frame.
func seal(frame []byte, size int) error {
	if size > MaxFrameBytes {
		return &FrameSizeError{Size: int64(size)}
	}
	if size == 0 {
		return ErrEmptyFrame
	}
	binary.BigEndian.PutUint32(frame, uint32(size))
	return nil
}
