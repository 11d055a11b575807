package wire

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"

	"example.com/jail/wire/toolfail"
)

var plainStart = Start{
	Program: "print(1)", ResultID: "r-1",
	Bindings: []StartBinding{{Name: "read", Signature: "host.read(path: str)"}, {Name: "now"}},
	Budget:   StartBudget{WallClock: 1500 * time.Millisecond, MaxCalls: 3, MaxBytes: 1 << 20, MaxMemory: 64 << 20},
}

// W14, W16, W19, W23 to W27, W61, W62, W63: one Start down, one Result up.
func TestStartAndResult(t *testing.T) {
	for _, want := range []Result{
		{OK: true, Value: `{"x":1}`, Calls: 2, Bytes: 7},
		{OK: true},
		{Kind: "permanent", Error: "Traceback"},
	} {
		transports(t, func(t *testing.T, parent, child io.ReadWriteCloser) {
			type got struct {
				r   Result
				err error
			}
			started := make(chan got, 1)
			go func() {
				r, err := NewStarter(parent).Start(context.Background(), plainStart)
				started <- got{r, err}
			}()
			runner := NewRunner(child)
			st, err := runner.AwaitStart(context.Background())
			if err != nil {
				t.Fatal(err)
			}
			expected := plainStart
			expected.V = Version
			if !reflect.DeepEqual(st, expected) {
				t.Errorf("got %+v, want %+v", st, expected)
			}
			sent := want
			sent.ResultID = "forged" // W63: Start's is echoed
			if err := runner.SendResult(sent); err != nil {
				t.Fatal(err)
			}
			g := mustReturn(t, "Start", func() got { return <-started })
			expectedResult := want
			expectedResult.V, expectedResult.ResultID = Version, "r-1"
			if g.err != nil || g.r != expectedResult {
				t.Errorf("Start = %+v, %v, want %+v", g.r, g.err, expectedResult)
			}
			if err := runner.SendResult(want); !errors.Is(err, ErrUsed) {
				t.Errorf("second SendResult = %v", err)
			}
			if _, err := runner.AwaitStart(context.Background()); !errors.Is(err, ErrUsed) {
				t.Errorf("second AwaitStart = %v", err)
			}
		})
	}
}

// start runs a Starter and gives its outcome.
func start(ctx context.Context, rw io.ReadWriter, st Start) chan error {
	ch := make(chan error, 1)
	go func() {
		_, err := NewStarter(rw).Start(ctx, st)
		ch <- err
	}()
	return ch
}

func outcomeOf(t *testing.T, ch chan error) error {
	t.Helper()
	return mustReturn(t, "Start", func() error { return <-ch })
}

// W59, J7: a peer that is silent, does not even read, or talks for ever holds
// Start no longer than its context.
func TestStartReturnsWhenItsContextEnds(t *testing.T) {
	big := plainStart
	big.Program = strings.Repeat("x", 8<<20)
	for name, st := range map[string]Start{"silent": plainStart, "does not read": big} {
		t.Run(name, func(t *testing.T) {
			transports(t, func(t *testing.T, parent, child io.ReadWriteCloser) {
				ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
				defer cancel()
				if err := outcomeOf(t, start(ctx, parent, st)); !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("Start = %v", err)
				}
				// The child is given EOF.
				if _, err := io.Copy(io.Discard, child); err != nil && !errors.Is(err, syscall.ECONNRESET) {
					t.Errorf("child reads %v", err)
				}
			})
		})
	}
	t.Run("trickles", func(t *testing.T) {
		leaks(t)
		parent, child := nonblockingPair(t)
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Millisecond)
		defer cancel()
		ch := start(ctx, parent, plainStart)
		_, _ = child.Write(header(MaxFrameBytes))
		for {
			if _, err := child.Write([]byte("x")); err != nil {
				break
			}
			time.Sleep(time.Millisecond)
		}
		if err := outcomeOf(t, ch); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Start = %v", err)
		}
	})
	t.Run("ended before", func(t *testing.T) {
		leaks(t)
		parent, child := nonblockingPair(t)
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		if err := outcomeOf(t, start(ctx, parent, plainStart)); !errors.Is(err, context.Canceled) {
			t.Errorf("Start = %v", err)
		}
		if b, err := io.ReadAll(child); len(b) != 0 || err != nil {
			t.Errorf("child reads %q, %v, want nothing", b, err)
		}
	})
}

// W60: without an io.Closer Start returns as well.
func TestStartWithoutCloser(t *testing.T) {
	leaks(t)
	parent, child := nonblockingPair(t)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	if err := outcomeOf(t, start(ctx, bare{parent}, plainStart)); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Start = %v", err)
	}
	child.Close() // lets the blocked reader go
}

// W61, W11, J8, D3: what is no Result of this execution, and what is none at all.
func TestStartRefusesOtherFrames(t *testing.T) {
	frame := func(text string) string { return string(header(uint32(len(text)))) + text }
	for _, tc := range []struct {
		name, bytes string
		reason      error
		protocol    bool
	}{
		{"closed without a Result", "", io.EOF, false},
		{"other execution", frame(`{"v":1,"result_id":"r-2","ok":true}`), ErrResultID, true},
		{"empty result id", frame(`{"v":1,"result_id":"","ok":true}`), ErrResultID, true},
		{"no version", frame(`{"result_id":"r-1","ok":true}`), ErrVersion, true},
		{"version 2", frame(`{"v":2,"result_id":"r-1","ok":true}`), ErrVersion, true},
		{"a Response", frame(`{"v":1,"id":"r-1","ok":true}`), nil, true},
		{"no JSON", frame(`print`), nil, true},
		{"length 0xFFFFFFFF", "\xff\xff\xff\xff", ErrFrameTooLarge, true},
		{"length 0", "\x00\x00\x00\x00", ErrEmptyFrame, true},
		{"cut in the header", "\x00", io.ErrUnexpectedEOF, true},
		{"cut in the body", frame(`{"v":1,"result_id":"r-1","ok":true}`)[:20], io.ErrUnexpectedEOF, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			transports(t, func(t *testing.T, parent, child io.ReadWriteCloser) {
				ch := start(context.Background(), parent, plainStart)
				if _, err := ReadFrame(child, nil); err != nil {
					t.Fatal(err)
				}
				if tc.bytes != "" {
					if _, err := child.Write([]byte(tc.bytes)); err != nil {
						t.Fatal(err)
					}
				}
				child.Close()
				err := outcomeOf(t, ch)
				var p *ProtocolError
				if err == nil || tc.reason != nil && !errors.Is(err, tc.reason) || errors.As(err, &p) != tc.protocol {
					t.Errorf("Start = %v, want %v, protocol error %v", err, tc.reason, tc.protocol)
				}
				if p != nil && p.Offset != 0 {
					t.Errorf("offset %d", p.Offset)
				}
			})
		})
	}
	// Every frame that the golden file refuses is refused here.
	for _, g := range readGolden(t, "result") {
		parent, child := nonblockingPair(t)
		ch := start(context.Background(), parent, plainStart)
		if len(g.bytes()) == 0 {
			continue
		}
		if err := WriteFrame(child, g.bytes()); err != nil {
			t.Fatal(err)
		}
		err := outcomeOf(t, ch)
		var p *ProtocolError
		if g.OK != (err == nil) || !g.OK && !errors.As(err, &p) {
			t.Errorf("%s: Start = %v", g.Name, err)
		}
		parent.Close()
		child.Close()
	}
}

// A child that dies before it reads its Start ends Start like one that dies later.
func TestStartToADeadChild(t *testing.T) {
	leaks(t)
	parent, child := nonblockingPair(t)
	child.Close()
	var p *ProtocolError
	if err := outcomeOf(t, start(context.Background(), parent, plainStart)); !errors.Is(err, io.EOF) || errors.As(err, &p) {
		t.Errorf("Start = %v, want one that wraps io.EOF", err)
	}
}

// J9, J10: the first Result counts, whatever follows it, even the end.
func TestFirstResultDecides(t *testing.T) {
	leaks(t)
	parent, child := nonblockingPair(t)
	type got struct {
		r   Result
		err error
	}
	ch := make(chan got, 1)
	go func() {
		r, err := NewStarter(parent).Start(context.Background(), plainStart)
		ch <- got{r, err}
	}()
	if _, err := ReadFrame(child, nil); err != nil {
		t.Fatal(err)
	}
	first, second := `{"v":1,"result_id":"r-1","ok":false,"kind":"permanent"}`, `{"v":1,"result_id":"r-1","ok":true,"value":"forged"}`
	if _, err := child.Write([]byte(string(header(uint32(len(first)))) + first + string(header(uint32(len(second)))) + second + "\xff\xff\xff\xff")); err != nil {
		t.Fatal(err)
	}
	child.Close()
	if g := mustReturn(t, "Start", func() got { return <-ch }); g.err != nil || g.r.OK || g.r.Kind != "permanent" {
		t.Errorf("Start = %+v, %v", g.r, g.err)
	}
}

// K2, K7, W39: what a forged Result says is put right.
func TestResultIsNormalized(t *testing.T) {
	leaks(t)
	parent, child := nonblockingPair(t)
	ch := make(chan Result, 1)
	go func() {
		r, err := NewStarter(parent).Start(context.Background(), plainStart)
		if err != nil {
			t.Error(err)
		}
		ch <- r
	}()
	long := strings.Repeat("x", 10000)
	if err := WriteFrame(child, []byte(`{"v":1,"result_id":"r-1","ok":false,"value":"v","kind":"retry_me","error":"`+long+`"}`)); err != nil {
		t.Fatal(err)
	}
	want := Result{V: 1, ResultID: "r-1", Kind: "unknown", Error: toolfail.CapText(long)}
	if r := mustReturn(t, "Start", func() Result { return <-ch }); r != want {
		t.Errorf("got %.200v", r)
	}
}

// W29, W4, L28: what cannot be sent is refused before a byte, and may be corrected.
func TestStartRefusesLocally(t *testing.T) {
	leaks(t)
	parent, child := nonblockingPair(t)
	s := NewStarter(parent)
	for name, change := range map[string]func(*Start){
		"negative wall clock":           func(s *Start) { s.Budget.WallClock = -1 },
		"negative calls":                func(s *Start) { s.Budget.MaxCalls = -1 },
		"negative bytes":                func(s *Start) { s.Budget.MaxBytes = -1 },
		"negative memory":               func(s *Start) { s.Budget.MaxMemory = -1 },
		"long result id":                func(s *Start) { s.ResultID = strings.Repeat("r", MaxIDBytes+1) },
		"binding without a name":        func(s *Start) { s.Bindings = []StartBinding{{}} },
		"binding with a long name":      func(s *Start) { s.Bindings = []StartBinding{{Name: strings.Repeat("n", maxToolBytes+1)}} },
		"program that is not UTF-8":     func(s *Start) { s.Program = "\xff" },
		"description that is not UTF-8": func(s *Start) { s.Bindings = []StartBinding{{Name: "n", Description: "\xff"}} },
		"too large":                     func(s *Start) { s.Program = strings.Repeat("x", MaxFrameBytes+1) },
		"too large after escaping":      func(s *Start) { s.Program = strings.Repeat("\x01", MaxFrameBytes/5) },
	} {
		st := plainStart
		change(&st)
		if _, err := s.Start(context.Background(), st); err == nil || errors.Is(err, ErrUsed) || strings.HasPrefix(name, "too large") && !errors.Is(err, ErrFrameTooLarge) {
			t.Errorf("%s: %v", name, err)
		}
	}
	done := make(chan error, 1)
	go func() { _, err := s.Start(context.Background(), Start{}); done <- err }()
	runner := NewRunner(child)
	st, err := runner.AwaitStart(context.Background())
	if err != nil || len(st.ResultID) < 16 || st.Bindings == nil {
		t.Fatalf("the zero Start arrives as %+v, %v, want a minted result id", st, err)
	}
	if err := runner.SendResult(Result{OK: true}); err != nil {
		t.Fatal(err)
	}
	if err := outcomeOf(t, done); err != nil {
		t.Error(err)
	}
	if _, err := s.Start(context.Background(), plainStart); !errors.Is(err, ErrUsed) { // W14
		t.Errorf("second Start = %v", err)
	}
}

// W62: not one byte behind the Start is taken.
func TestAwaitStartTakesOneFrame(t *testing.T) {
	leaks(t)
	parent, child := nonblockingPair(t)
	frame, err := appendStart(nil, &plainStart)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := parent.Write(append(frame, "behind"...)); err != nil {
		t.Fatal(err)
	}
	if _, err := NewRunner(child).AwaitStart(context.Background()); err != nil {
		t.Fatal(err)
	}
	rest := make([]byte, 100)
	if n, err := child.Read(rest); err != nil || string(rest[:n]) != "behind" {
		t.Errorf("left behind: %q, %v", rest[:n], err)
	}
}

// W62, W18, W11: how AwaitStart ends without a Start.
func TestAwaitStartFails(t *testing.T) {
	transports(t, func(t *testing.T, parent, child io.ReadWriteCloser) {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
		defer cancel()
		err := mustReturn(t, "AwaitStart", func() error { _, err := NewRunner(child).AwaitStart(ctx); return err })
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("AwaitStart = %v", err)
		}
		if _, err := ReadFrame(parent, nil); err != io.EOF {
			t.Errorf("parent reads %v, want EOF", err)
		}
	})
	transports(t, func(t *testing.T, parent, child io.ReadWriteCloser) {
		parent.Close()
		if _, err := NewRunner(child).AwaitStart(context.Background()); !errors.Is(err, io.EOF) {
			t.Errorf("AwaitStart = %v, want EOF", err)
		}
	})
	for _, text := range []string{callText("a", ""), `{"v":2}`, `{"v":1,"program":"p","bindings":[],"budget":{"max_calls":-1},"result_id":"r"}`, "nonsense"} {
		parent, child := nonblockingPair(t)
		if err := WriteFrame(parent, []byte(text)); err != nil {
			t.Fatal(err)
		}
		r := NewRunner(child)
		_, err := r.AwaitStart(context.Background())
		var p *ProtocolError
		if !errors.As(err, &p) || errors.Is(err, ErrVersion) != (text == `{"v":2}`) {
			t.Errorf("AwaitStart of %s = %v", text, err)
		}
		if err := r.SendResult(Result{OK: true}); !errors.Is(err, ErrUsed) {
			t.Errorf("SendResult without a Start = %v", err)
		}
		parent.Close()
		child.Close()
	}
}

// W63, W4: a Result that cannot be sent leaves room for another one.
func TestSendResultRefusesLocally(t *testing.T) {
	leaks(t)
	parent, child := nonblockingPair(t)
	ch := start(context.Background(), parent, plainStart)
	r := NewRunner(child)
	if _, err := r.AwaitStart(context.Background()); err != nil {
		t.Fatal(err)
	}
	for name, res := range map[string]Result{
		"too large":                {OK: true, Value: strings.Repeat("x", MaxFrameBytes+1)},
		"too large after escaping": {OK: true, Value: strings.Repeat("\x01", MaxFrameBytes/5)},
		"not UTF-8":                {OK: true, Value: "\xff"},
		"negative calls":           {OK: true, Calls: -1},
		"negative bytes":           {OK: true, Bytes: -1},
	} {
		if err := r.SendResult(res); err == nil || errors.Is(err, ErrUsed) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := r.SendResult(Result{Kind: string(toolfail.Quota)}); err != nil {
		t.Fatal(err)
	}
	if err := outcomeOf(t, ch); err != nil {
		t.Error(err)
	}
}

// W64, W65, C12: an item that is asked for and not declared is refused before the
// program starts, by a Result of class denied that names it.
func TestAdmitRefusesWhatIsNotBacked(t *testing.T) {
	all := StartBudget{WallClock: time.Second, MaxCalls: 1, MaxBytes: 1, MaxMemory: 1}
	for _, tc := range []struct {
		budget  StartBudget
		backed  []Item
		missing []Item
	}{
		{StartBudget{}, nil, nil},
		{StartBudget{}, []Item{ItemMaxMemory}, nil},
		{StartBudget{MaxMemory: 1}, nil, []Item{ItemMaxMemory}},
		{StartBudget{MaxMemory: 1}, []Item{ItemMaxMemory}, nil},
		{StartBudget{MaxMemory: 1}, []Item{ItemWallClock, ItemMaxCalls, ItemMaxBytes}, []Item{ItemMaxMemory}},
		{all, nil, []Item{ItemWallClock, ItemMaxCalls, ItemMaxBytes, ItemMaxMemory}},
		{all, []Item{ItemMaxBytes, ItemMaxMemory, ItemMaxCalls, ItemWallClock, "other"}, nil},
		{all, []Item{ItemMaxBytes, ItemMaxMemory}, []Item{ItemWallClock, ItemMaxCalls}},
	} {
		parent, child := nonblockingPair(t)
		type got struct {
			r   Result
			err error
		}
		ch := make(chan got, 1)
		go func() {
			r, err := NewStarter(parent).Start(context.Background(), Start{Program: "p", Budget: tc.budget})
			ch <- got{r, err}
		}()
		r := NewRunner(child)
		if _, err := r.AwaitStart(context.Background()); err != nil {
			t.Fatal(err)
		}
		ran := false
		err := r.Admit(tc.backed...)
		if err == nil {
			ran = true // the program's side effect
			if err := r.SendResult(Result{OK: true}); err != nil {
				t.Fatal(err)
			}
		}
		g := mustReturn(t, "Start", func() got { return <-ch })
		if g.err != nil {
			t.Fatal(g.err)
		}
		var u *UnbackedError
		switch {
		case tc.missing == nil && (err != nil || !g.r.OK):
			t.Errorf("%+v backed by %v: %v, %+v", tc.budget, tc.backed, err, g.r)
		case tc.missing != nil && (ran || !errors.As(err, &u) || !reflect.DeepEqual(u.Items, tc.missing) || g.r.OK || g.r.Kind != string(toolfail.Denied)):
			t.Errorf("%+v backed by %v: %v, %+v, want %v refused", tc.budget, tc.backed, err, g.r, tc.missing)
		}
		for _, item := range tc.missing {
			if !strings.Contains(g.r.Error, string(item)) {
				t.Errorf("%q does not name %s", g.r.Error, item)
			}
		}
		if tc.missing != nil {
			if err := r.SendResult(Result{OK: true}); !errors.Is(err, ErrUsed) {
				t.Errorf("a Result after the refusal: %v", err)
			}
		}
		parent.Close()
		child.Close()
	}
	if err := NewRunner(bare{}).Admit(); !errors.Is(err, ErrUsed) {
		t.Errorf("Admit before AwaitStart = %v", err)
	}
}

// W66: Close must end a Read that blocks. The first half shows why Pair and
// OpenFD set O_NONBLOCK: without it, it does not.
func TestCloseEndsABlockedRead(t *testing.T) {
	leaks(t)
	reads := func(f *os.File) chan error {
		ch := make(chan error, 1)
		go func() {
			_, err := f.Read(make([]byte, 1))
			ch <- err
		}()
		time.Sleep(20 * time.Millisecond) // until it blocks
		return ch
	}
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	blocking := os.NewFile(uintptr(fds[0]), "blocking")
	ch := reads(blocking)
	blocking.Close()
	select {
	case err := <-ch:
		t.Errorf("a blocking descriptor ends with %v at Close: the reason for O_NONBLOCK has gone", err)
	case <-time.After(50 * time.Millisecond):
	}
	if err := syscall.Shutdown(fds[0], syscall.SHUT_RDWR); err != nil {
		t.Fatal(err)
	}
	<-ch
	syscall.Close(fds[1])

	parent, child, err := Pair()
	if err != nil {
		t.Fatal(err)
	}
	ch = reads(parent)
	parent.Close()
	if err := mustReturn(t, "Read", func() error { return <-ch }); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Read of Pair's end = %v", err)
	}
	child.Close()

	if fds, err = syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0); err != nil {
		t.Fatal(err)
	}
	f, err := OpenFD(fds[0])
	if err != nil {
		t.Fatal(err)
	}
	ch = reads(f)
	f.Close()
	if err := mustReturn(t, "Read", func() error { return <-ch }); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Read of OpenFD's file = %v", err)
	}
	syscall.Close(fds[1])
}

// C3, J5: both ends of a pair are close-on-exec, the child's is blocking.
func TestPairFlags(t *testing.T) {
	leaks(t)
	parent, child, err := Pair()
	if err != nil {
		t.Fatal(err)
	}
	defer parent.Close()
	defer child.Close()
	for name, f := range map[string]*os.File{"parent": parent, "child": child} {
		raw, err := f.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		var fdFlags, flFlags uintptr
		if err := raw.Control(func(fd uintptr) {
			fdFlags, _, _ = syscall.Syscall(syscall.SYS_FCNTL, fd, syscall.F_GETFD, 0)
			flFlags, _, _ = syscall.Syscall(syscall.SYS_FCNTL, fd, syscall.F_GETFL, 0)
		}); err != nil {
			t.Fatal(err)
		}
		if fdFlags&syscall.FD_CLOEXEC == 0 || (flFlags&syscall.O_NONBLOCK != 0) != (name == "parent") {
			t.Errorf("%s: flags %#x, %#x", name, fdFlags, flFlags)
		}
	}
}

func TestOpenFDRefusesWhatIsNoChannel(t *testing.T) {
	leaks(t)
	if _, err := OpenFD(1 << 20); !errors.Is(err, syscall.EBADF) {
		t.Errorf("closed descriptor: %v", err)
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	if _, err := OpenFD(int(null.Fd())); !errors.Is(err, syscall.ENOTSOCK) {
		t.Errorf("no socket: %v", err)
	}
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_DGRAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(fds[0])
	defer syscall.Close(fds[1])
	if _, err := OpenFD(fds[0]); err == nil || !strings.Contains(err.Error(), fmt.Sprint(syscall.SOCK_DGRAM)) {
		t.Errorf("datagram socket: %v", err)
	}
}
