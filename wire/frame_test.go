package wire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"testing/iotest"
)

func header(n uint32) []byte { return binary.BigEndian.AppendUint32(nil, n) }

func allocated(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// W1, W2: a length and the bytes, whatever they are.
func TestFramesRoundTrip(t *testing.T) {
	payloads := []string{
		"{}", "x", "\n", "\x00", "{\"a\":\"\\u0000\"}\n{\"b\":1}\n", "\x00\x00\x00\x02{}", "\xff\xff\xff\xff",
		strings.Repeat("long ", 50000), strings.Repeat("y", MaxFrameBytes),
	}
	var stream bytes.Buffer
	for _, p := range payloads {
		before := stream.Len()
		if err := WriteFrame(&stream, []byte(p)); err != nil {
			t.Fatal(err)
		}
		if got := stream.Bytes()[before:]; !bytes.Equal(got, append(header(uint32(len(p))), p...)) {
			t.Fatalf("the frame of %.20q is not a length and the payload", p)
		}
	}
	var buf []byte
	for _, p := range payloads {
		var err error
		if buf, err = ReadFrame(&stream, buf); err != nil || string(buf) != p {
			t.Fatalf("read %.20q, %v, want %.20q", buf, err, p)
		}
	}
	if _, err := ReadFrame(&stream, buf); err != io.EOF {
		t.Errorf("behind the last frame: %v, want io.EOF", err)
	}
}

// W3, W9: a length costs nothing, only bytes that arrive do.
func TestAnnouncedLengthIsNotAllocated(t *testing.T) {
	for _, tc := range []struct {
		name   string
		stream []byte
		want   error
		limit  uint64
	}{
		{"4 GiB", header(0xFFFFFFFF), ErrFrameTooLarge, 4 << 10},
		{"2 GiB, negative as an int32", header(0x80000000), ErrFrameTooLarge, 4 << 10},
		{"one more than allowed", header(MaxFrameBytes + 1), ErrFrameTooLarge, 4 << 10},
		{"16 MiB announced, nothing sent", header(MaxFrameBytes), io.ErrUnexpectedEOF, 192 << 10},
		{"16 MiB announced, 100 KiB sent", append(header(MaxFrameBytes), make([]byte, 100<<10)...), io.ErrUnexpectedEOF, 512 << 10},
		{"nothing", header(0), ErrEmptyFrame, 4 << 10}, // W5
	} {
		var err error
		got := allocated(func() { _, err = ReadFrame(bytes.NewReader(tc.stream), nil) })
		if !errors.Is(err, tc.want) {
			t.Errorf("%s: %v, want %v", tc.name, err, tc.want)
		}
		if got > tc.limit {
			t.Errorf("%s: %d bytes allocated, want at most %d", tc.name, got, tc.limit)
		}
	}
	var e *FrameSizeError
	if _, err := ReadFrame(bytes.NewReader(header(0xFFFFFFFF)), nil); !errors.As(err, &e) || e.Size != 0xFFFFFFFF {
		t.Errorf("got %v, want a FrameSizeError with the announced size", err)
	}
}

// W4: too large is an error before the first byte.
func TestWriterRefusesTooLargeBeforeTheFirstByte(t *testing.T) {
	for _, tc := range []struct {
		size int
		want error
	}{{MaxFrameBytes, nil}, {MaxFrameBytes + 1, ErrFrameTooLarge}, {0, ErrEmptyFrame}, {1, nil}} {
		var w countingWriter
		err := WriteFrame(&w, make([]byte, tc.size))
		if !errors.Is(err, tc.want) {
			t.Errorf("%d bytes: %v, want %v", tc.size, err, tc.want)
		}
		if want := tc.size + headerBytes; tc.want == nil && (w.bytes != want || w.calls != 1) || tc.want != nil && w.calls != 0 {
			t.Errorf("%d bytes: %d bytes in %d writes", tc.size, w.bytes, w.calls)
		}
	}
}

type countingWriter struct{ bytes, calls int }

func (w *countingWriter) Write(p []byte) (int, error) {
	w.calls++
	w.bytes += len(p)
	return len(p), nil
}

// W6, W7: every split of the bytes reads the same, and every cut is told apart.
func TestSplitAndCutStreams(t *testing.T) {
	var stream bytes.Buffer
	for _, p := range []string{`{"a":1}`, `x`, strings.Repeat("z", 300)} {
		if err := WriteFrame(&stream, []byte(p)); err != nil {
			t.Fatal(err)
		}
	}
	all := stream.Bytes()
	boundary := map[int]int{0: 0, 11: 1, 16: 2, 320: 3} // length of the stream: whole frames in it
	for cut := 0; cut <= len(all); cut++ {
		for name, wrap := range map[string]func(io.Reader) io.Reader{
			"whole":                    func(r io.Reader) io.Reader { return r },
			"bytes":                    iotest.OneByteReader,
			"error with the last data": iotest.DataErrReader,
		} {
			r := wrap(bytes.NewReader(all[:cut]))
			frames := 0
			var err error
			for err == nil {
				if _, err = ReadFrame(r, nil); err == nil {
					frames++
				}
			}
			want, clean := boundary[cut]
			if clean && (err != io.EOF || frames != want) || !clean && err != io.ErrUnexpectedEOF {
				t.Fatalf("%s, cut at %d: %d frames, then %v", name, cut, frames, err)
			}
		}
	}
}

// W7: a Unix socket says ECONNRESET in place of EOF when the peer died with
// unread data; that is an end like any other.
func TestResetIsAnEnd(t *testing.T) {
	parent, child := nonblockingPair(t)
	if _, err := parent.Write([]byte("unread")); err != nil {
		t.Fatal(err)
	}
	child.Close()
	if _, err := parent.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Fatalf("the kernel says %v, not ECONNRESET: the case has gone", err)
	}
	for have, want := range map[string]error{"": io.EOF, "\x00": io.ErrUnexpectedEOF, "\x00\x00\x00\x09": io.ErrUnexpectedEOF, "\x00\x00\x00\x09ab": io.ErrUnexpectedEOF} {
		r := io.MultiReader(strings.NewReader(have), iotest.ErrReader(fmt.Errorf("read: %w", syscall.ECONNRESET)))
		if _, err := ReadFrame(r, nil); err != want {
			t.Errorf("reset behind %q: %v, want %v", have, err, want)
		}
	}
}

func TestOtherReadErrorsPassThrough(t *testing.T) {
	boom := errors.New("boom")
	for _, have := range []string{"", "\x00", "\x00\x00\x00\x09ab"} {
		r := io.MultiReader(strings.NewReader(have), iotest.ErrReader(boom))
		if _, err := ReadFrame(r, nil); err != boom {
			t.Errorf("error behind %q: %v", have, err)
		}
	}
}

// L5, L6: a frame that arrives in a million pieces costs what its bytes cost.
func TestManySmallPiecesCostNoMore(t *testing.T) {
	const size = 1 << 20
	stream := append(header(size), make([]byte, size)...)
	grown := allocated(func() {
		frame, err := ReadFrame(iotest.OneByteReader(bytes.NewReader(stream)), nil)
		if err != nil || len(frame) != size {
			t.Errorf("read %d bytes, %v", len(frame), err)
		}
	})
	if grown > 4*size {
		t.Errorf("%d bytes allocated for a frame of %d", grown, size)
	}
}

// A deadline in the middle of a frame must not lose the bytes before it.
func TestFrameReaderGoesOnAfterATemporaryError(t *testing.T) {
	var stream bytes.Buffer
	for _, p := range []string{"abc", strings.Repeat("d", 200<<10)} {
		if err := WriteFrame(&stream, []byte(p)); err != nil {
			t.Fatal(err)
		}
	}
	all := stream.Bytes()
	for _, cut := range []int{0, 1, 3, 4, 5, 7, 9, 11, 20, 100 << 10, len(all) - 1} {
		boom := errors.New("not now")
		r := &hiccup{r: bytes.NewReader(all), after: cut, err: boom}
		f := frameReader{r: r, grow: grow}
		var sizes []int
		hiccups := 0
		for {
			frame, err := f.next()
			if err == boom {
				hiccups++
				continue
			}
			if err != nil {
				if err != io.EOF {
					t.Fatalf("cut %d: %v", cut, err)
				}
				break
			}
			sizes = append(sizes, len(frame))
			f.buf = keep(frame)
		}
		if hiccups != 1 || fmt.Sprint(sizes) != "[3 204800]" {
			t.Errorf("cut %d: %d hiccups, frames of %v bytes", cut, hiccups, sizes)
		}
	}
}

// hiccup returns err once, after some bytes.
type hiccup struct {
	r     io.Reader
	after int
	err   error
	done  bool
}

func (h *hiccup) Read(p []byte) (int, error) {
	if !h.done && h.after == 0 {
		h.done = true
		return 0, h.err
	}
	if !h.done && len(p) > h.after {
		p = p[:h.after]
	}
	n, err := h.r.Read(p)
	h.after -= n
	return n, err
}

// L7: a connection keeps no large buffer between frames.
func TestLargeBuffersAreGivenBack(t *testing.T) {
	if b := keep(make([]byte, 10, keepBytes+1)); b != nil {
		t.Errorf("keep holds on to %d bytes", cap(b))
	}
	if b := keep(make([]byte, 10, keepBytes)); cap(b) != keepBytes || len(b) != 0 {
		t.Errorf("keep of a small buffer has length %d, capacity %d", len(b), cap(b))
	}
	b := grow([]byte("abc"), 100<<10)
	if string(b) != "abc" || cap(b) < 100<<10+3 {
		t.Errorf("grow gives %d bytes, %q", cap(b), b)
	}
}

func FuzzReadFrame(f *testing.F) {
	for _, s := range []string{"", "\x00", "\x00\x00\x00\x00", "\x00\x00\x00\x02{}", "\x00\x00\x00\x02{}\x00\x00\x00\x01", "\xff\xff\xff\xff", "\x01\x00\x00\x00", "\x01\x00\x00\x01"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, stream []byte) {
		whole, split := bytes.NewReader(stream), iotest.OneByteReader(bytes.NewReader(stream))
		var again bytes.Buffer
		for {
			frame, err := ReadFrame(whole, nil)
			other, otherErr := ReadFrame(split, nil)
			if fmt.Sprint(err) != fmt.Sprint(otherErr) || !bytes.Equal(frame, other) {
				t.Fatalf("whole: %q, %v; a byte at a time: %q, %v", frame, err, other, otherErr)
			}
			if err != nil {
				rest := stream[again.Len():]
				switch {
				case err == io.EOF:
					if len(rest) != 0 {
						t.Fatalf("clean end with %d bytes left", len(rest))
					}
				case err == io.ErrUnexpectedEOF:
					if len(rest) == 0 || len(rest) >= 4 && int64(len(rest)) >= 4+int64(binary.BigEndian.Uint32(rest)) {
						t.Fatalf("cut, but %d bytes are left", len(rest))
					}
				case errors.Is(err, ErrFrameTooLarge) || err == ErrEmptyFrame:
					if n := binary.BigEndian.Uint32(rest); n != 0 && n <= MaxFrameBytes {
						t.Fatalf("length %d refused: %v", n, err)
					}
				default:
					t.Fatal(err)
				}
				return
			}
			if err := WriteFrame(&again, frame); err != nil || !bytes.HasPrefix(stream, again.Bytes()) {
				t.Fatalf("written again: %v, not what was read", err)
			}
		}
	})
}
