package cgroup

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const mib = 1 << 20

// touch makes n bytes of fresh memory present.
func touch(n int) []byte {
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		fmt.Println("mmap:", err)
		os.Exit(1)
	}
	for i := 0; i < n; i += 4096 {
		b[i] = 1
	}
	return b
}

// preferred makes the kernel choose this process before all others.
func preferred() {
	if err := os.WriteFile("/proc/self/oom_score_adj", []byte("1000"), 0); err != nil {
		fmt.Println("oom_score_adj:", err)
		os.Exit(1)
	}
}

var _ = register("hog", func(args []string) {
	preferred()
	n, _ := strconv.Atoi(args[0])
	fmt.Println("ready")
	bufLine()
	b := touch(n)
	fmt.Println("have it", b[0])
	io.Copy(io.Discard, os.Stdin)
})

var _ = register("file hog", func(args []string) {
	preferred()
	n, _ := strconv.Atoi(args[0])
	fmt.Println("ready")
	bufLine()
	fd, err := unix.MemfdCreate("hog", unix.MFD_CLOEXEC)
	for chunk := make([]byte, mib); err == nil && n > 0; n -= mib {
		_, err = unix.Write(fd, chunk)
	}
	if err != nil {
		fmt.Println("memfd:", err)
		os.Exit(1)
	}
	fmt.Println("have it 1")
	io.Copy(io.Discard, os.Stdin)
})

// bufLine waits for a line on standard input.
func bufLine() {
	b := make([]byte, 1)
	for b[0] != '\n' {
		if _, err := os.Stdin.Read(b); err != nil {
			os.Exit(0)
		}
	}
}

func goOn(t *testing.T, p *proc) {
	t.Helper()
	if _, err := io.WriteString(p.in, "\n"); err != nil {
		t.Fatal(err)
	}
}

// J6, C1, C6, L37: below the limit it lives, above it the kernel's counter tells of the
// kill; memory of a file system in memory counts as well.
func TestMemoryAtTheLimit(t *testing.T) {
	h := need(t, Memory)
	const limit, margin = 96 * mib, 32 * mib // Go's own memory is within the margin
	const batch = 64 << 12                   // v1 lets a page or two through that it must not refuse
	for _, kind := range []string{"hog", "file hog"} {
		t.Run(kind+" below", func(t *testing.T) {
			leaf := newTestLeaf(t, h, Limits{Memory: limit})
			p := start(t, leaf, helperCmd(kind, strconv.Itoa(limit-margin)))
			p.expect(t, "ready")
			goOn(t, p)
			p.expect(t, "have it 1")
			s, err := leaf.Stats()
			if err != nil || s.OOMKills != 0 || s.MemoryPeak < limit-margin && s.MemoryPeak != -1 || s.MemoryPeak > limit+batch {
				t.Errorf("Stats = %+v, %v", s, err)
			}
			select {
			case <-leaf.OOM():
				t.Error("OOM fired")
			default:
			}
		})
		t.Run(kind+" above", func(t *testing.T) {
			leaf := newTestLeaf(t, h, Limits{Memory: limit})
			bystander := sleeper(t, leaf)
			p := start(t, leaf, helperCmd(kind, strconv.Itoa(limit+margin)))
			p.expect(t, "ready")
			fired := leaf.OOM()
			if (fired == nil) != on2(h, Memory) {
				t.Fatalf("OOM is nil: %v", fired == nil)
			}
			goOn(t, p)
			if sig := p.signal(); sig != syscall.SIGKILL {
				t.Errorf("ended with signal %v: %s", sig, <-p.lines)
			}
			if fired != nil {
				select {
				case <-fired:
				case <-time.After(10 * time.Second):
					t.Error("OOM did not fire")
				}
				// The rest is the caller's to kill.
				if err := leaf.Kill(); err != nil {
					t.Error(err)
				}
			}
			if sig := bystander.signal(); sig != syscall.SIGKILL {
				t.Errorf("bystander: %v", sig)
			}
			s, err := leaf.Stats()
			if err != nil || s.OOMKills < 1 || s.MemoryPeak > limit+batch || s.MemoryPeak < limit-mib && s.MemoryPeak != -1 {
				t.Errorf("Stats = %+v, %v", s, err)
			}
			if scope, err := leaf.Scope(); scope != Self || err != nil {
				t.Errorf("Scope = %v, %v", scope, err)
			}
		})
	}
}

// An OOM kill is told also to who asks after it happened, and to everyone who asks.
func TestOOMIsToldAfterwards(t *testing.T) {
	h := need(t, Memory)
	leaf := newTestLeaf(t, h, Limits{Memory: 32 * mib})
	p := start(t, leaf, helperCmd("hog", strconv.Itoa(64*mib)))
	p.expect(t, "ready")
	goOn(t, p)
	p.wait()
	if scope, err := leaf.Scope(); scope != Self || err != nil { // takes the notification from the channel's reader
		t.Errorf("Scope = %v, %v", scope, err)
	}
	for range 2 {
		if fired := leaf.OOM(); fired != nil {
			select {
			case <-fired:
			case <-time.After(10 * time.Second):
				t.Error("OOM did not fire")
			}
		}
	}
	if s, err := leaf.Stats(); err != nil || s.OOMKills < 1 {
		t.Errorf("Stats = %+v, %v", s, err)
	}
}

// J15, D1: what a program does to look OOM-killed is none.
func TestWhatOnlyLooksLikeAnOOMKill(t *testing.T) {
	h := need(t, Memory)
	for _, script := range []string{"exit 137", "kill -KILL $$", "echo oom_kill 1; exit 9"} {
		leaf := newTestLeaf(t, h, Limits{Memory: 64 * mib})
		fired := leaf.OOM()
		start(t, leaf, exec.Command("/bin/sh", "-c", script)).wait()
		if s, err := leaf.Stats(); err != nil || s.OOMKills != 0 {
			t.Errorf("%s: Stats = %+v, %v", script, s, err)
		}
		select {
		case <-fired:
			t.Errorf("%s: OOM fired", script)
		default:
		}
	}
}

// C3: a process that is killed at exec, before it runs an instruction of its own.
func TestMemoryTooSmallForTheProgramItself(t *testing.T) {
	h := need(t, Memory)
	leaf := newTestLeaf(t, h, Limits{Memory: 16 * int64(os.Getpagesize())})
	p := start(t, leaf, helperCmd("hog", "1"))
	if sig := p.signal(); sig != syscall.SIGKILL && sig != syscall.SIGSEGV {
		t.Errorf("ended with %v", p.cmd.ProcessState)
	}
	s, err := leaf.Stats()
	if err != nil || s.OOMKills < 1 {
		t.Errorf("Stats = %+v, %v", s, err)
	}
}

// E4: the limit that was hit is that of the parent, and the leaf is far below
// its own. Another leaf that hits its own limit later is not confused by it.
func TestTheLimitOfAnAncestor(t *testing.T) {
	l := everything
	l.Memory = 160 * mib
	if !insideParent(t, l, nil) {
		return
	}
	h := need(t, Memory)
	low := newTestLeaf(t, h, Limits{Memory: 512 * mib})
	idle := newTestLeaf(t, h, Limits{Memory: 512 * mib})
	p := start(t, low, helperCmd("hog", strconv.Itoa(300*mib)))
	p.expect(t, "ready")
	fired := low.OOM()
	quiet := idle.OOM()
	goOn(t, p)
	if sig := p.signal(); sig != syscall.SIGKILL {
		t.Fatalf("hog ended with %v", p.cmd.ProcessState)
	}
	if s, err := low.Stats(); err != nil || s.OOMKills < 1 || s.MemoryPeak > l.Memory+mib {
		t.Errorf("Stats = %+v, %v", s, err)
	}
	if scope, err := low.Scope(); scope != Ancestor || err != nil {
		t.Errorf("Scope = %v, %v", scope, err)
	}
	if fired != nil {
		select {
		case <-fired:
		case <-time.After(10 * time.Second):
			t.Error("OOM did not fire")
		}
	}
	select {
	case <-quiet:
		t.Error("OOM of a leaf fired in which nothing was killed")
	default:
	}
	if s, err := idle.Stats(); err != nil || s.OOMKills != 0 {
		t.Errorf("idle: Stats = %+v, %v", s, err)
	}

	for _, leaf := range []*Leaf{idleSmall(t, h), idleSmall(t, h)} {
		p := start(t, leaf, helperCmd("hog", strconv.Itoa(64*mib)))
		p.expect(t, "ready")
		goOn(t, p)
		p.wait()
		if scope, err := leaf.Scope(); scope != Self || err != nil {
			t.Errorf("leaf at its own limit: Scope = %v, %v", scope, err)
		}
	}
	if scope, err := low.Scope(); scope != Ancestor || err != nil {
		t.Errorf("later: Scope = %v, %v", scope, err)
	}
}

func idleSmall(t *testing.T, h *Host) *Leaf { return newTestLeaf(t, h, Limits{Memory: 32 * mib}) }

// E4 by the counters alone: no limit was hit, so it was the host.
func TestScopeOfCounts(t *testing.T) {
	count := func(n int64) *counter {
		fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
		if err != nil {
			t.Fatal(err)
		}
		c := &counter{file: os.NewFile(uintptr(fd), "eventfd"), n: n}
		t.Cleanup(func() { c.file.Close() })
		return c
	}
	for _, tt := range []struct {
		name              string
		start, base, leaf int64
		want              Scope
	}{
		{"nothing", 0, 0, 0, Machine},
		{"old events of the base", 7, 7, 0, Machine},
		{"events of the base that the leaf did not get", 7, 9, 0, Machine},
		{"own", 0, 0, 1, Self},
		{"own after old ones of the base", 7, 7, 2, Self},
		{"of the base", 0, 1, 1, Ancestor},
		{"of the base, many", 7, 10, 3, Ancestor},
		{"of the base, one before the leaf was watched", 7, 10, 2, Ancestor},
		{"both", 7, 9, 3, Self},
	} {
		t.Run("v1 "+tt.name, func(t *testing.T) {
			base := count(tt.base)
			w := &events1{leaf: count(tt.leaf), base: &hierarchy{count: base}, start: tt.start}
			if got, err := w.scope(dir{}); got != tt.want || err != nil {
				t.Errorf("scope = %v, %v; want %v", got, err, tt.want)
			}
		})
	}
	w := &events1{leaf: count(1), base: &hierarchy{dir: plainDir(t)}}
	if got, err := w.scope(dir{}); got != "" || !errors.Is(err, os.ErrNotExist) {
		t.Errorf("v1 without a base: %v, %v", got, err)
	}
	for _, tt := range []struct {
		name         string
		leaf, parent string
		start        int64
		want         Scope
	}{
		{"nothing", "oom 0\noom_kill 1\n", "oom 0\n", 0, Machine},
		{"own", "low 0\nhigh 0\nmax 3\noom 1\noom_kill 1\noom_group_kill 1\n", "oom 0\n", 0, Self},
		{"of the parent", "max 0\noom 0\noom_kill 1\n", "oom 5\n", 4, Ancestor},
		{"old ones of the parent", "max 0\noom 0\noom_kill 1\n", "oom 5\n", 5, Machine},
		{"own and the parent's", "oom 1\noom_kill 2\n", "oom 6\n", 5, Self},
	} {
		t.Run("v2 "+tt.name, func(t *testing.T) {
			leaf, parent := plainDir(t), plainDir(t)
			for path, s := range map[string]string{leaf.path + "/memory.events": tt.leaf, parent.path + "/memory.events.local": tt.parent} {
				if err := os.WriteFile(path, []byte(s), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			w := &events2{base: &hierarchy{up: []dir{parent}}, start: tt.start}
			if got, err := w.scope(leaf); got != tt.want || err != nil {
				t.Errorf("scope = %v, %v; want %v", got, err, tt.want)
			}
		})
	}
}

// A leaf whose memory is not limited cannot tell.
func TestScopeWithoutALimit(t *testing.T) {
	h := need(t, Pids)
	leaf := newTestLeaf(t, h, Limits{Pids: 5})
	if scope, err := leaf.Scope(); scope != "" || err == nil {
		t.Errorf("Scope = %q, %v", scope, err)
	}
	if leaf.OOM() != nil {
		t.Error("OOM is not nil")
	}
}

var _ = register("forks", func(args []string) {
	n, _ := strconv.Atoi(args[0])
	fmt.Println("ready")
	bufLine()
	started, refused := 0, 0
	for range n {
		cmd := exec.Command("/bin/sleep", "3600")
		if err := cmd.Start(); err == nil {
			started++
		} else if errors.Is(err, unix.EAGAIN) {
			refused++
		} else {
			fmt.Println(err)
		}
	}
	fmt.Println("started", started, "refused", refused)
	io.Copy(io.Discard, os.Stdin)
	time.Sleep(time.Hour)
})

// C9: forks stop at the limit, the refusals are counted, and all go with one kill.
func TestForksAtTheLimit(t *testing.T) {
	h := need(t, Pids)
	leaf := newTestLeaf(t, h, Limits{Pids: 40})
	p := start(t, leaf, helperCmd("forks", "100"))
	p.expect(t, "ready")
	if s, err := leaf.Stats(); err != nil || s.PidsRefused != 0 {
		t.Errorf("before: Stats = %+v, %v", s, err)
	}
	goOn(t, p)
	var started, refused int
	line := p.line(t)
	if _, err := fmt.Sscanf(line, "started %d refused %d", &started, &refused); err != nil || started+refused != 100 || started < 10 || refused < 60 {
		t.Fatalf("%q, %v", line, err)
	}
	s, err := leaf.Stats()
	if err != nil || s.PidsRefused < int64(refused) || s.PidsPeak != 40 && s.PidsPeak != -1 {
		t.Errorf("Stats = %+v, %v; refused were %d", s, err, refused)
	}
	if n, err := leaf.Procs(); err != nil || n != started+1 {
		t.Errorf("Procs = %d, %v; want %d", n, err, started+1)
	}
	if err := leaf.Kill(); err != nil {
		t.Error(err)
	}
	within("all are dead", 5*time.Second, func() bool { n, err := leaf.Procs(); return n == 0 && err == nil })
	if after, err := leaf.Stats(); err != nil || after.PidsRefused != s.PidsRefused {
		t.Errorf("after: Stats = %+v, %v", after, err)
	}
}

var _ = register("spin", func(args []string) {
	d, _ := time.ParseDuration(args[0])
	var ru unix.Rusage
	fmt.Println("ready")
	for used := time.Duration(0); used < d; {
		for range 100_000 {
			runtime.KeepAlive(ru)
		}
		if err := unix.Getrusage(unix.RUSAGE_SELF, &ru); err != nil {
			panic(err)
		}
		used = time.Duration(ru.Utime.Nano() + ru.Stime.Nano())
	}
	fmt.Println("done")
})

// A quota throttles, and says how much.
func TestBandwidth(t *testing.T) {
	h := need(t, CPU, CPUAcct)
	leaf := newTestLeaf(t, h, Limits{CPUs: 0.2, CPUTime: true})
	p := start(t, leaf, helperCmd("spin", "1h"))
	p.expect(t, "ready")
	from, err := leaf.CPUUsage()
	begin := time.Now()
	if err != nil {
		t.Fatal(err)
	}
	var s Stats
	within("it is throttled", 20*time.Second, func() bool {
		if s, err = leaf.Stats(); err != nil {
			t.Fatal(err)
		}
		return s.ThrottledPeriods >= 8
	})
	to, err := leaf.CPUUsage()
	wall := time.Since(begin)
	if err != nil {
		t.Fatal(err)
	}
	// One more period's worth may be had, and a slice on each core.
	if used, most := to-from, time.Duration(0.3*float64(wall))+100*time.Millisecond; used > most {
		t.Errorf("used %v in %v, at most %v were to be had", used, wall, most)
	}
	if s.Throttled <= 0 {
		t.Errorf("Stats = %+v", s)
	}
	plain := newTestLeaf(t, h, Limits{CPUTime: true})
	if s, err := plain.Stats(); err != nil || s.Throttled != -1 || s.ThrottledPeriods != -1 {
		t.Errorf("without a quota: Stats = %+v, %v", s, err)
	}
}

// C17: the time of all processes counts, of the dead ones too, and nothing of an
// earlier run.
func TestCPUTimeIsOfTheTree(t *testing.T) {
	h := need(t, CPUAcct)
	var last string
	for round := range 2 {
		leaf, err := h.NewLeaf(newName(), Limits{CPUTime: true})
		if err != nil {
			t.Fatal(err)
		}
		if used, err := leaf.CPUUsage(); err != nil || used > 20*time.Millisecond {
			t.Errorf("round %d: fresh leaf has used %v, %v; the one before was %s", round, used, err, last)
		}
		for range 2 {
			ps := []*proc{start(t, leaf, helperCmd("spin", "60ms")), start(t, leaf, helperCmd("spin", "60ms"))}
			for _, p := range ps {
				p.expect(t, "ready")
				p.expect(t, "done")
				p.wait()
			}
		}
		used, err := leaf.CPUUsage()
		s, err2 := leaf.Stats()
		if err != nil || err2 != nil || used < 220*time.Millisecond || used > 5*time.Second {
			t.Errorf("4 times 60ms: used %v, %v, %v", used, err, err2)
		}
		if sum := s.CPUUser + s.CPUSystem; s.CPUUser <= 0 || s.CPUSystem < 0 || sum < used-50*time.Millisecond || sum > used+50*time.Millisecond {
			t.Errorf("user %v and system %v, used %v", s.CPUUser, s.CPUSystem, used)
		}
		last = leaf.Name()
		remove1(t, leaf)
	}
}

// What was not asked for is not counted, rather than 0.
func TestWhatIsNotCounted(t *testing.T) {
	h := need(t, controllers...)
	leaf := newTestLeaf(t, h, Limits{})
	s, err := leaf.Stats()
	want := noStats()
	want.CPUUser, want.CPUSystem = s.CPUUser, s.CPUSystem // v2 counts them in any case
	if err != nil || s != want {
		t.Errorf("Stats = %+v, %v", s, err)
	}
	leaf = newTestLeaf(t, h, everything)
	s, err = leaf.Stats()
	if err != nil || s.OOMKills != 0 || s.PidsRefused != 0 || s.CPUUser != 0 || s.Throttled != 0 || s.ThrottledPeriods != 0 ||
		s.MemoryPeak < -1 || s.PidsPeak < -1 || s.MemoryPeak > mib || s.PidsPeak > 0 {
		t.Errorf("fresh: Stats = %+v, %v", s, err)
	}
}

// The counters are there when the processes are gone.
func TestStatsOutliveTheProcesses(t *testing.T) {
	h := need(t, Memory, Pids, CPUAcct)
	leaf := newTestLeaf(t, h, Limits{Memory: 256 * mib, Pids: 50, CPUTime: true})
	p := start(t, leaf, helperCmd("hog", strconv.Itoa(50*mib)))
	p.expect(t, "ready")
	goOn(t, p)
	p.expect(t, "have it 1")
	if err := leaf.Kill(); err != nil {
		t.Fatal(err)
	}
	p.wait()
	s, err := leaf.Stats()
	if err != nil || s.MemoryPeak < 50*mib && s.MemoryPeak != -1 || s.OOMKills != 0 || s.PidsPeak < 2 && s.PidsPeak != -1 || s.CPUUser+s.CPUSystem <= 0 {
		t.Errorf("Stats = %+v, %v", s, err)
	}
	if !strings.HasPrefix(leaf.Name(), Prefix) {
		t.Error(leaf.Name())
	}
}
