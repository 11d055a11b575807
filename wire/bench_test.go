package wire

import (
	"bufio"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"
)

// benchPair returns two ends that both are polled, as two Go processes have them.
func benchPair(b *testing.B) (parent, child io.ReadWriteCloser) {
	p, c := nonblockingPair(b)
	return p, c
}

var benchSizes = []int{16, 1 << 10, 64 << 10, 1 << 20}

// BenchmarkRoundTrip is one echo call after the other, over a socket pair.
//
// bare is the floor: a length and the same number of bytes of text, without
// JSON, ids, goroutines or limits. wire is Client and Server with the command
// line's defaults.
func BenchmarkRoundTrip(b *testing.B) {
	for _, size := range benchSizes {
		payload := strings.Repeat("x", size)
		b.Run(fmt.Sprintf("bare/%d", size), func(b *testing.B) {
			parent, child := benchPair(b)
			go bareEcho(parent)
			r := bufio.NewReaderSize(child, 8<<10)
			frame := binary.BigEndian.AppendUint32(nil, uint32(size))
			frame = append(frame, payload...)
			got := make([]byte, size)
			var header [4]byte
			b.ReportAllocs()
			for b.Loop() {
				if _, err := child.Write(frame); err != nil {
					b.Fatal(err)
				}
				if _, err := io.ReadFull(r, header[:]); err != nil {
					b.Fatal(err)
				}
				if _, err := io.ReadFull(r, got); err != nil {
					b.Fatal(err)
				}
			}
			child.Close()
		})
		for name, opts := range map[string][]ServerOption{
			"wire":          {WithBudget(&Budget{MaxBytes: 1 << 50})},
			"wire+deadline": {WithBudget(&Budget{MaxBytes: 1 << 50}), WithMaxCallDeadline(30 * time.Second)},
		} {
			b.Run(fmt.Sprintf("%s/%d", name, size), func(b *testing.B) {
				parent, child := benchPair(b)
				s := NewServer(parent, func(_ context.Context, r Request) (Response, error) {
					return Response{OK: true, Value: r.Args}, nil
				}, opts...)
				done := make(chan error)
				go func() { done <- s.Serve(context.Background()) }()
				c := NewClient(child)
				ctx := context.Background()
				b.ReportAllocs()
				for b.Loop() {
					if r, err := c.Call(ctx, "echo", payload); err != nil || len(r.Value) != size {
						b.Fatal(r.Error, err)
					}
				}
				c.Close()
				if err := <-done; err != nil {
					b.Fatal(err)
				}
			})
		}
	}
}

// BenchmarkServerAlone is Server under a peer that does no more than the frames
// need, so that what Client costs is left out.
func BenchmarkServerAlone(b *testing.B) {
	for _, size := range benchSizes {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			parent, child := benchPair(b)
			s := NewServer(parent, func(_ context.Context, r Request) (Response, error) {
				return Response{OK: true, Value: r.Args}, nil
			}, WithMaxCallDeadline(30*time.Second))
			done := make(chan error)
			go func() { done <- s.Serve(context.Background()) }()
			frame, err := appendRequest(nil, &Request{ID: "1", Tool: "echo", Args: strings.Repeat("x", size)})
			if err != nil {
				b.Fatal(err)
			}
			r := bufio.NewReaderSize(child, 8<<10)
			var buf []byte
			b.ReportAllocs()
			for b.Loop() {
				if _, err := child.Write(frame); err != nil {
					b.Fatal(err)
				}
				if buf, err = ReadFrame(r, buf); err != nil || len(buf) < size {
					b.Fatal(err)
				}
			}
			child.Close()
			if err := <-done; err != nil {
				b.Fatal(err)
			}
		})
	}
}

func bareEcho(rw io.ReadWriteCloser) {
	defer rw.Close()
	r := bufio.NewReaderSize(rw, 8<<10)
	var buf []byte
	for {
		var header [4]byte
		if _, err := io.ReadFull(r, header[:]); err != nil {
			return
		}
		n := 4 + int(binary.BigEndian.Uint32(header[:]))
		if cap(buf) < n {
			buf = make([]byte, n)
		}
		copy(buf, header[:])
		if _, err := io.ReadFull(r, buf[4:n]); err != nil {
			return
		}
		if _, err := rw.Write(buf[:n]); err != nil {
			return
		}
	}
}

// BenchmarkAcross is BenchmarkRoundTrip with the child in a process of its own.
func BenchmarkAcross(b *testing.B) {
	for _, size := range []int{16, 1 << 10, 64 << 10} {
		for _, kind := range []string{"bare", "wire", "bare-child"} {
			b.Run(fmt.Sprintf("%s/%d", kind, size), func(b *testing.B) {
				parent, child, err := Pair()
				if err != nil {
					b.Fatal(err)
				}
				helper := map[string]string{"bare": "bench-bare", "wire": "bench-wire", "bare-child": "bench-frames"}[kind]
				done := make(chan error, 1)
				if kind == "bare" {
					go func() { bareEcho(parent); done <- nil }()
				} else {
					s := NewServer(parent, func(_ context.Context, r Request) (Response, error) {
						return Response{OK: true, Value: r.Args}, nil
					}, WithMaxCallDeadline(30*time.Second))
					go func() { done <- s.Serve(context.Background()) }()
				}
				cmd := helperProcess(b, helper, nil, child, fmt.Sprintf("BENCH_N=%d", b.N), fmt.Sprintf("BENCH_SIZE=%d", size))
				if err := <-done; err != nil {
					b.Fatal(err)
				}
				if err := cmd.Wait(); err != nil {
					b.Fatal(err)
				}
			})
		}
	}
}

func init() {
	args := func() (n int, size int) {
		n, _ = strconv.Atoi(os.Getenv("BENCH_N"))
		size, _ = strconv.Atoi(os.Getenv("BENCH_SIZE"))
		return n, size
	}
	// Like a guest that is not written in Go, these two block in their calls.
	exchange := func(frame []byte) int {
		n, _ := args()
		f := os.NewFile(CallFD, "call")
		r := bufio.NewReaderSize(f, 8<<10)
		var buf []byte
		for range n {
			if _, err := f.Write(frame); err != nil {
				return 1
			}
			var err error
			if buf, err = ReadFrame(r, buf); err != nil {
				return 2
			}
		}
		return 0
	}
	helpers["bench-bare"] = func() int {
		_, size := args()
		frame := binary.BigEndian.AppendUint32(nil, uint32(size))
		return exchange(append(frame, strings.Repeat("x", size)...))
	}
	helpers["bench-frames"] = func() int {
		_, size := args()
		frame, err := appendRequest(nil, &Request{ID: "1", Tool: "echo", Args: strings.Repeat("x", size)})
		if err != nil {
			return 3
		}
		return exchange(frame)
	}
	helpers["bench-wire"] = func() int {
		n, size := args()
		f, err := OpenFD(CallFD)
		if err != nil {
			return 3
		}
		c := NewClient(f)
		payload := strings.Repeat("x", size)
		for range n {
			if r, err := c.Call(context.Background(), "echo", payload); err != nil || !r.OK {
				return 1
			}
		}
		return 0
	}
}

// BenchmarkConcurrent is 64 callers on one channel.
func BenchmarkConcurrent(b *testing.B) {
	parent, child := benchPair(b)
	s := NewServer(parent, func(_ context.Context, r Request) (Response, error) {
		return Response{OK: true, Value: r.Args}, nil
	})
	done := make(chan error)
	go func() { done <- s.Serve(context.Background()) }()
	c := NewClient(child)
	b.SetParallelism(32)
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if r, err := c.Call(context.Background(), "echo", "{}"); err != nil || !r.OK {
				b.Error(r.Error, err)
				return
			}
		}
	})
	c.Close()
	if err := <-done; err != nil {
		b.Fatal(err)
	}
}

func BenchmarkDecodeRequest(b *testing.B) {
	text := []byte(`{"v":1,"id":"9f3a11c2d4e5-1","tool":"read_file","args":"{\"path\":\"/srv/data/report.txt\",\"lines\":[1,20]}","deadline_ms":1500}`)
	b.SetBytes(int64(len(text)))
	b.ReportAllocs()
	for b.Loop() {
		if _, _, err := decodeRequest(text, DefaultMaxArgsBytes); err != nil {
			b.Fatal(err)
		}
	}
}
