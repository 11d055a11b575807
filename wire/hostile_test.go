package wire

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"example.com/jail/wire/strictjson"
)

// A hostile case is a program that has the call channel, or the start channel,
// and does its worst; it runs as a process of its own.
type hostile struct {
	name string
	// do is the program, on the descriptor of its channel.
	do func(f *os.File)
	// reason is what Serve or Start must end with; nil for a clean end of Serve.
	reason error
	// offset is where the faulty frame starts.
	offset int64
	opts   []ServerOption
}

// raw writes a frame of text, whatever it is.
func raw(f *os.File, text string) {
	_, _ = f.Write(append(header(uint32(len(text))), text...))
}

// dwell stays alive without a word.
func dwell() { time.Sleep(time.Hour) }

var first = callText("first", "x")

// after is where the frame behind first starts.
var after = int64(headerBytes + len(first))

// D3 and its neighbours on fd 4.
var hostileCallers = []hostile{
	{name: "length 0xFFFFFFFF", do: func(f *os.File) { raw(f, first); f.Write([]byte("\xff\xff\xff\xff")); dwell() }, reason: ErrFrameTooLarge, offset: after},
	{name: "negative length", do: func(f *os.File) { f.Write([]byte("\x80\x00\x00\x01x")); dwell() }, reason: ErrFrameTooLarge},
	{name: "flood of empty frames", do: func(f *os.File) { flood(f, make([]byte, 4096)) }, reason: ErrEmptyFrame},
	{name: "flood of bytes", do: func(f *os.File) { flood(f, []byte(strings.Repeat("\xfe", 1<<16))) }, reason: ErrFrameTooLarge},
	{name: "flood of zeros in frames", do: func(f *os.File) {
		for {
			raw(f, "\x00\x00\x00\x00")
		}
	}, reason: strictjson.ErrInvalid},
	{name: "JSON lines", do: func(f *os.File) { flood(f, []byte(`{"v":1,"id":"a","tool":"t","args":""}`+"\n")) }, reason: ErrFrameTooLarge},
	{name: "cut frame, then the end", do: func(f *os.File) { raw(f, first); f.Write(header(100)); f.Write([]byte(`{"v":1`)) }, reason: io.ErrUnexpectedEOF, offset: after},
	{name: "cut header, then the end", do: func(f *os.File) { f.Write([]byte("\x00\x00\x00")) }, reason: io.ErrUnexpectedEOF},
	{name: "killed in the middle of a frame", do: func(f *os.File) { f.Write(header(100)); syscall.Kill(syscall.Getpid(), syscall.SIGKILL); dwell() }, reason: io.ErrUnexpectedEOF},
	{name: "100 000 levels as the frame", do: func(f *os.File) { raw(f, strings.Repeat("[", 100000)+strings.Repeat("]", 100000)); dwell() }, reason: strictjson.ErrType},
	{name: "100 000 levels in a member, not closed", do: func(f *os.File) { raw(f, first[:len(first)-1]+`,"x":`+strings.Repeat("[", 100000)); dwell() }, reason: strictjson.ErrInvalid},
	{name: "8 million open objects", do: func(f *os.File) { raw(f, strings.Repeat(`{"":`, 4<<20-8)); dwell() }, reason: strictjson.ErrInvalid},
	{name: "100 000 levels in a member", do: func(f *os.File) {
		raw(f, first[:len(first)-1]+`,"x":`+strings.Repeat("[", 100000)+strings.Repeat("]", 100000)+`}`)
		ReadFrame(f, nil)
	}},
	{name: "a million keys", do: func(f *os.File) {
		var b strings.Builder
		for i := range 1000000 {
			fmt.Fprintf(&b, `,"%x":0`, i)
		}
		raw(f, first[:len(first)-1]+b.String()+"}")
		dwell()
	}, reason: strictjson.ErrKey},
	{name: "key twice", do: func(f *os.File) { raw(f, `{"v":1,"id":"a","id":"b","tool":"t","args":""}`); dwell() }, reason: strictjson.ErrKey},
	{name: "key in other case", do: func(f *os.File) { raw(f, `{"v":1,"id":"a","Tool":"u","tool":"t","args":""}`); dwell() }, reason: strictjson.ErrKey},
	{name: "invalid UTF-8", do: func(f *os.File) { raw(f, "{\"v\":1,\"id\":\"a\",\"tool\":\"t\",\"args\":\"\xff\"}"); dwell() }, reason: strictjson.ErrInvalid},
	{name: "lone surrogate", do: func(f *os.File) { raw(f, `{"v":1,"id":"a","tool":"t","args":"\ud800"}`); dwell() }, reason: strictjson.ErrNotLossless},
	{name: "number of 15 MiB as the deadline", do: func(f *os.File) {
		raw(f, `{"v":1,"id":"a","tool":"t","args":"","deadline_ms":`+strings.Repeat("9", 15<<20)+`}`)
		dwell()
	}, reason: strictjson.ErrType},
	{name: "number of 15 MiB in another member", do: func(f *os.File) {
		raw(f, first[:len(first)-1]+`,"x":1e`+strings.Repeat("9", 15<<20)+`}`)
		ReadFrame(f, nil)
	}},
	{name: "deadline 2^64", do: func(f *os.File) {
		raw(f, `{"v":1,"id":"a","tool":"t","args":"","deadline_ms":18446744073709551616}`)
		dwell()
	}, reason: strictjson.ErrType},
	{name: "negative deadline", do: func(f *os.File) { raw(f, `{"v":1,"id":"a","tool":"t","args":"","deadline_ms":-1}`); dwell() }, reason: errNegative},
	{name: "id as a number, 2^64", do: func(f *os.File) { raw(f, `{"v":1,"id":18446744073709551616,"tool":"t","args":""}`); dwell() }, reason: strictjson.ErrType},
	{name: "id of a megabyte", do: func(f *os.File) { raw(f, callText(strings.Repeat("i", 1<<20), "")); dwell() }, reason: strictjson.ErrOverBudget},
	{name: "trailing data", do: func(f *os.File) { raw(f, first+first); dwell() }, reason: strictjson.ErrInvalid},
	{name: "trailing frame inside of a frame", do: func(f *os.File) { raw(f, first+string(header(2))+"{}"); dwell() }, reason: strictjson.ErrInvalid},
	{name: "a Result on the call channel", do: func(f *os.File) { raw(f, `{"v":1,"result_id":"r","ok":true}`); dwell() }, reason: strictjson.ErrType},
	{name: "a Response on the call channel", do: func(f *os.File) { raw(f, `{"v":1,"id":"a","ok":true,"value":"forged"}`); dwell() }, reason: strictjson.ErrType},
	{name: "version 2", do: func(f *os.File) { raw(f, `{"v":2,"id":[]}`); dwell() }, reason: ErrVersion},
	{name: "id used again at once", do: func(f *os.File) { raw(f, callText("hang", "")); raw(f, callText("hang", "")); dwell() }, reason: ErrDuplicateID, offset: int64(headerBytes + len(callText("hang", "")))},
	{name: "id used again later", do: func(f *os.File) { raw(f, first); ReadFrame(f, nil); raw(f, first); dwell() }, reason: ErrDuplicateID, offset: after},
	{name: "calls for ever without reading", do: func(f *os.File) {
		for i := 0; ; i++ {
			raw(f, callText(fmt.Sprint(i), strings.Repeat("x", 10000)))
		}
	}, reason: ErrUnread, offset: -1, opts: []ServerOption{WithWriteTimeout(200 * time.Millisecond), WithBudget(nil)}},
	{name: "calls for ever after the last one", do: func(f *os.File) {
		for i := 0; ; i++ {
			raw(f, callText(fmt.Sprint(i), ""))
			ReadFrame(f, nil)
		}
	}, reason: ErrRefusals, offset: -2, opts: []ServerOption{WithMaxRefusals(50)}},
	{name: "closes at once", do: func(f *os.File) {}},
	{name: "dies with unread responses", do: func(f *os.File) {
		raw(f, first)
		time.Sleep(50 * time.Millisecond)
		syscall.Kill(syscall.Getpid(), syscall.SIGKILL)
		dwell()
	}},
	{name: "a byte at a time", do: func(f *os.File) {
		for _, b := range append(header(uint32(len(first))), first...) {
			f.Write([]byte{b})
			time.Sleep(100 * time.Microsecond)
		}
		ReadFrame(f, nil)
	}},
	{name: "16 MiB of args, many times", do: func(f *os.File) {
		for i := range 10 {
			raw(f, callText(fmt.Sprint(i), strings.Repeat("x", MaxFrameBytes-1000)))
			ReadFrame(f, nil)
		}
	}},
}

func flood(f *os.File, p []byte) {
	for {
		if _, err := f.Write(p); err != nil {
			dwell()
		}
	}
}

// D3 on fd 3, where the parent waits for a Result.
var hostileRunners = []hostile{
	{name: "length 0xFFFFFFFF", do: func(f *os.File) { f.Write([]byte("\xff\xff\xff\xff")); dwell() }, reason: ErrFrameTooLarge},
	{name: "flood of empty frames", do: func(f *os.File) { flood(f, make([]byte, 4096)) }, reason: ErrEmptyFrame},
	{name: "flood of bytes", do: func(f *os.File) { flood(f, []byte(strings.Repeat("\xfe", 1<<16))) }, reason: ErrFrameTooLarge},
	{name: "cut frame, then silence", do: func(f *os.File) { f.Write(header(100)); f.Write([]byte(`{"v":1`)); dwell() }, reason: context.DeadlineExceeded, offset: -1},
	{name: "cut frame, then the end", do: func(f *os.File) { f.Write(header(100)); f.Write([]byte(`{"v":1`)) }, reason: io.ErrUnexpectedEOF},
	{name: "silence", do: func(f *os.File) { dwell() }, reason: context.DeadlineExceeded, offset: -1},
	{name: "a byte at a time, for ever", do: func(f *os.File) {
		f.Write(header(MaxFrameBytes))
		for {
			f.Write([]byte("x"))
			time.Sleep(time.Millisecond)
		}
	}, reason: context.DeadlineExceeded, offset: -1},
	{name: "the end without a Result", do: func(f *os.File) {}, reason: io.EOF, offset: -1},
	{name: "100 000 levels", do: func(f *os.File) { raw(f, strings.Repeat("[", 100000)); dwell() }, reason: strictjson.ErrInvalid},
	{name: "forged result id", do: func(f *os.File) { raw(f, `{"v":1,"result_id":"r-2","ok":true}`); dwell() }, reason: ErrResultID},
	{name: "Result before the Start is read", do: func(f *os.File) { raw(f, `{"v":1,"result_id":"","ok":true}`); dwell() }, reason: ErrResultID},
	{name: "its own Start sent back", do: func(f *os.File) { text, _ := ReadFrame(f, nil); raw(f, string(text)); dwell() }, reason: strictjson.ErrType},
	{name: "negative calls", do: func(f *os.File) { raw(f, `{"v":1,"result_id":"r-1","ok":true,"calls":-1}`); dwell() }, reason: errNegative},
}

func init() {
	find := func(list []hostile, fd uintptr) func() int {
		return func() int {
			// The worst child does not die of a closed channel.
			for _, h := range list {
				if h.name == os.Getenv("HOSTILE_CASE") {
					h.do(os.NewFile(fd, "channel"))
					return 0
				}
			}
			return 9
		}
	}
	helpers["hostile-caller"] = find(hostileCallers, CallFD)
	helpers["hostile-runner"] = find(hostileRunners, StartFD)
}

// D3, D4, D5, D10, D11, W3, W5, W7, W51, J7, J8, J13, L1: each program ends the
// channel with its fault and the fault's offset, or is served, and the parent's
// memory stays bounded.
func TestHostileCallers(t *testing.T) {
	for _, h := range hostileCallers {
		t.Run(h.name, func(t *testing.T) {
			leaks(t)
			parent, child, err := Pair()
			if err != nil {
				t.Fatal(err)
			}
			handler := func(ctx context.Context, r Request) (Response, error) {
				if r.ID == "hang" {
					<-ctx.Done()
				}
				return echo(ctx, r)
			}
			opts := append([]ServerOption{WithBudget(&Budget{MaxCalls: 1000})}, h.opts...)
			if h.reason == ErrUnread {
				opts = h.opts
			}
			s := serve(t, parent, nil, handler, opts...)
			cmd := helperProcess(t, "hostile-caller", nil, child, "HOSTILE_CASE="+h.name)
			err = s.wait()
			if h.reason == nil {
				if err != nil {
					t.Errorf("Serve = %v, want a clean end", err)
				}
			} else {
				p := protocolError(t, err, h.reason)
				if h.offset != -2 && p.Offset != h.offset {
					t.Errorf("%v: offset %d, want %d", err, p.Offset, h.offset)
				}
				if len(err.Error()) > 500 {
					t.Errorf("the error has %d bytes", len(err.Error()))
				}
			}
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		})
	}
}

func TestHostileRunners(t *testing.T) {
	for _, h := range hostileRunners {
		t.Run(h.name, func(t *testing.T) {
			leaks(t)
			parent, child, err := Pair()
			if err != nil {
				t.Fatal(err)
			}
			defer parent.Close()
			cmd := helperProcess(t, "hostile-runner", child, nil, "HOSTILE_CASE="+h.name)
			limit := patience / 2
			if h.reason == context.DeadlineExceeded {
				limit = 300 * time.Millisecond
			}
			ctx, cancel := context.WithTimeout(context.Background(), limit)
			defer cancel()
			err = outcomeOf(t, start(ctx, parent, plainStart))
			var p *ProtocolError
			if !errors.Is(err, h.reason) || errors.As(err, &p) != (h.offset == 0) {
				t.Errorf("Start = %v, want %v", err, h.reason)
			}
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		})
	}
}

// D5, W30: a child that floods or sleeps does not hold up the channel of another one.
func TestChannelsDoNotAffectEachOther(t *testing.T) {
	leaks(t)
	parent, child := nonblockingPair(t)
	stuck := serve(t, parent, child, func(context.Context, Request) (Response, error) {
		return Response{OK: true, Value: strings.Repeat("v", 1<<20)}, nil
	}, WithWriteTimeout(time.Hour))
	go func() {
		for i := 0; ; i++ {
			if WriteFrame(child, []byte(callText(fmt.Sprint(i), ""))) != nil {
				return
			}
		}
	}()
	p2, c2 := nonblockingPair(t)
	s := serve(t, p2, c2, echo)
	for i := range 200 {
		s.send(callText(fmt.Sprint(i), ""))
		s.receive()
	}
	s.end()
	stuck.cancel()
	if err := stuck.wait(); !errors.Is(err, context.Canceled) {
		t.Errorf("Serve of the stuck channel = %v", err)
	}
}

// D2: what is written to other descriptors cannot reach the channel, and what
// looks like a frame inside of a value stays a value.
func TestFramesInsideOfTextStayText(t *testing.T) {
	leaks(t)
	parent, child := nonblockingPair(t)
	s := serve(t, parent, child, echo)
	forged := string(header(uint32(len(first)))) + first
	s.send(callText("a", forged))
	if r := s.receive(); r.ID != "a" || r.Value != forged {
		t.Errorf("got %+v", r)
	}
	if u := s.Usage(); u.Accepted != 1 {
		t.Errorf("usage %+v", u)
	}
	s.end()
}
