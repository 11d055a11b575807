package jail_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"example.com/jail/guest/node"
	"example.com/jail/guest/python"
	"example.com/jail/invoke"
	"example.com/jail/jail"
	"example.com/jail/rootfs"
)

// pool returns a full pool that is closed with the test.
func pool(t *testing.T, s jail.Spec, size int) *jail.Pool {
	t.Helper()
	p, err := jail.NewPool(s, size)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	if err := p.Fill(context.Background()); err != nil {
		t.Fatal(err)
	}
	return p
}

// runIn runs one use of a pool that has to come from a parked jail.
func runIn(t *testing.T, p *jail.Pool, use jail.Use) result {
	t.Helper()
	taken := p.Stats().Taken
	r := runAny(t, p, use)
	if s := p.Stats(); s.Taken != taken+1 {
		t.Errorf("the run got a fresh jail: %+v", s)
	}
	return r
}

func runAny(t *testing.T, p *jail.Pool, use jail.Use) result {
	t.Helper()
	var out, errs bytes.Buffer
	if use.Stdout == nil {
		use.Stdout = &out
	}
	use.Stderr = &errs
	start := time.Now()
	r, err := p.Run(context.Background(), use)
	if err != nil {
		t.Fatal(err)
	}
	checkReport(t, r)
	return result{r, out.String(), errs.String(), time.Since(start)}
}

func budget(change func(*jail.Budget)) *jail.Budget {
	b := jail.DefaultBudget()
	change(&b)
	return &b
}

// ownNice is the nice value of this process.
func ownNice(t *testing.T) int {
	t.Helper()
	n, err := syscall.Getpriority(syscall.PRIO_PROCESS, 0)
	if err != nil {
		t.Fatal(err)
	}
	return 20 - n // as the system call has it
}

// A parked jail becomes exactly what a fresh one is: posture, priority, limits,
// verdicts.
func TestPoolOfCommands(t *testing.T) {
	s := shell(postureScript)
	p := pool(t, s, 2)
	if b := p.Stats(); b.Ready != 2 || b.Bytes <= 0 || b.Bytes > 4<<20 {
		t.Errorf("parked: %+v", b)
	}
	checkPosture(t, runIn(t, p, jail.Use{}))

	sh := func(script string) []string { return []string{"/bin/sh", "-c", script} }
	for _, c := range []struct {
		name   string
		use    jail.Use
		cause  jail.Cause
		stdout string
	}{
		{"exit code", jail.Use{Args: sh("exit 7")}, jail.CauseProgram, ""},
		{"signal", jail.Use{Args: sh("kill -SEGV $$")}, jail.CauseSignaled, ""},
		{"priority", jail.Use{Args: sh("nice; cut -d' ' -f2- /proc/self/autogroup 2>/dev/null || echo nice 0")}, jail.CauseOK, fmt.Sprintf("%d\nnice 0\n", ownNice(t))},
		{"own wall clock", jail.Use{Args: sh("sleep 60"), Budget: budget(func(b *jail.Budget) { b.WallClock = 200 * time.Millisecond })}, jail.CauseWall, ""},
		{"own memory limit", jail.Use{Args: []string{"/usr/bin/python3", "-c", "x = bytearray(1 << 28)"}, Budget: budget(func(b *jail.Budget) { b.MaxMemory = 64 << 20 })}, jail.CauseMemory, ""},
		{"more memory", jail.Use{Args: []string{"/usr/bin/python3", "-c", "print(len(bytearray(1 << 28)))"}, Budget: budget(func(b *jail.Budget) { b.MaxMemory = 512 << 20 })}, jail.CauseOK, "268435456\n"},
		{"own pid limit", jail.Use{Args: sh("sleep 1 & sleep 1 & sleep 1 & sleep 1"), Budget: budget(func(b *jail.Budget) { b.MaxPIDs = 2 })}, jail.CauseProgram, ""},
		{"own output limit", jail.Use{Args: sh("echo 123456789"), Budget: budget(func(b *jail.Budget) { b.MaxOutput = 4 })}, jail.CauseOutput, "1234"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if err := p.Fill(context.Background()); err != nil {
				t.Fatal(err)
			}
			r := runIn(t, p, c.use)
			if r.Cause != c.cause || r.stdout != c.stdout {
				t.Errorf("cause %q (%s), stdout %q, stderr %q", r.Cause, r.Error, r.stdout, r.stderr)
			}
			if b := c.use.Budget; b != nil {
				for _, l := range r.Report.Budget {
					for item, want := range map[jail.Item]int64{jail.ItemMemory: b.MaxMemory, jail.ItemPIDs: b.MaxPIDs, jail.ItemTmp: b.MaxTmp} {
						if l.Item == item && (int64(l.Asked) != want || int64(l.ReadBack) != want || l.EnforcedBy == "") {
							t.Errorf("%+v, want %d", l, want)
						}
					}
				}
			}
		})
	}

	// What a fresh jail would refuse or fail at, a parked one does as well.
	var setup *jail.SetupError
	if _, err := p.Run(context.Background(), jail.Use{Args: []string{"/no/such/program"}}); !errors.As(err, &setup) || setup.Stage != "exec" || !errors.Is(err, syscall.ENOENT) {
		t.Errorf("no such program: %v", err)
	}
	var refused *jail.RefusedError
	if _, err := p.Run(context.Background(), jail.Use{Budget: budget(func(b *jail.Budget) { b.MaxMemory = -1 })}); !errors.As(err, &refused) {
		t.Errorf("a negative limit: %v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := p.Run(ctx, jail.Use{}); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled before: %v", err)
	}
}

// Runs that no parked jail fits get a fresh one, with everything on.
func TestPoolFallsBackToAFreshJail(t *testing.T) {
	p := pool(t, shell("cat"), 1)
	for name, use := range map[string]jail.Use{
		"another tmp size":      {Args: []string{"/bin/true"}, Budget: budget(func(b *jail.Budget) { b.MaxTmp = 1 << 20 })},
		"another kind of limit": {Args: []string{"/bin/true"}, Budget: budget(func(b *jail.Budget) { b.CPUs = 0.5 })},
		"an input":              {Stdin: strings.NewReader("hello")},
	} {
		fresh := p.Stats().Fresh
		if r := runAny(t, p, use); r.Cause != jail.CauseOK || use.Stdin != nil && r.stdout != "hello" {
			t.Errorf("%s: cause %q (%s), %q", name, r.Cause, r.Error, r.stdout)
		}
		if s := p.Stats(); s.Fresh != fresh+1 || s.Discarded != 0 {
			t.Errorf("%s: %+v", name, s)
		}
	}

	// More runs at once than jails: all run, each in a jail of its own.
	var wg sync.WaitGroup
	var mu sync.Mutex
	ids := map[string]bool{}
	for range 12 {
		wg.Go(func() {
			var out bytes.Buffer
			r, err := p.Run(context.Background(), jail.Use{Args: []string{"/bin/sh", "-c", "echo $$; grep -E '^(Seccomp|NoNewPrivs|CapBnd):' /proc/self/status"}, Stdout: &out})
			mu.Lock()
			defer mu.Unlock()
			if err != nil || r.Cause != jail.CauseOK || ids[r.ID] || out.String() != "2\nCapBnd:\t0000000000000000\nNoNewPrivs:\t1\nSeccomp:\t2\n" {
				t.Errorf("%v, %+v, %q", err, r, out.String())
				return
			}
			ids[r.ID] = true
		})
	}
	wg.Wait()
	if s := p.Stats(); s.Taken+s.Fresh != 15 || s.Taken == 0 {
		t.Errorf("%+v", s)
	}

	in := shell("cat")
	in.Stdin = strings.NewReader("of nobody")
	q := pool(t, in, 1)
	if r := runIn(t, q, jail.Use{Stdin: strings.NewReader("hello")}); r.stdout != "hello" {
		t.Errorf("input: %q", r.stdout)
	}
	if err := q.Fill(context.Background()); err != nil {
		t.Fatal(err)
	}
	if r := runIn(t, q, jail.Use{}); r.Cause != jail.CauseOK || r.stdout != "" {
		t.Errorf("no input: %q, cause %q", r.stdout, r.Cause)
	}
}

// Guests are started and wait for their Start; what a run gets of it is its own.
func TestPoolOfGuests(t *testing.T) {
	for name, c := range map[string]struct {
		argv             []string
		state, preloaded string
		call             string
	}{
		"python": {python.Argv(rootfs.FilesDir+"/"+python.FileName, "json", "decimal"),
			"import uuid, sys\nresult = [str(hash('secret')), uuid.uuid4().hex]",
			"import sys\nresult = [m in sys.modules for m in ('json', 'decimal', 'xml.dom')]", "host.echo(a=2**60)"},
		"node": {node.Argv(rootfs.FilesDir+"/"+node.FileName, "node:zlib"),
			"import c from 'node:crypto'; export default c.randomUUID()",
			"export default [true, process.moduleLoadList.includes('NativeModule zlib'), false]", "export default await host.echo({a: 2n**60n})"},
	} {
		t.Run(name, func(t *testing.T) {
			s := script(t, "", invoke.Manifest{"echo": echo}, invoke.Options{})
			s.Args = c.argv
			s.Root.Files = append(s.Root.Files, rootfs.File{Name: node.FileName, Data: node.Source})
			tools := s.Script.Tools
			p := pool(t, s, 2)
			parked := p.Stats().Bytes / 2
			if parked < 1<<20 || parked > 100<<20 {
				t.Errorf("a parked guest has %d bytes", parked)
			}
			use := func(program string) jail.Use {
				return jail.Use{Script: &jail.Script{Program: program, Tools: tools}}
			}
			seen := map[string]bool{}
			for range 4 {
				if err := p.Fill(context.Background()); err != nil {
					t.Fatal(err)
				}
				r := runIn(t, p, use(c.state))
				if r.Cause != jail.CauseOK || seen[string(r.Value)] {
					t.Errorf("cause %q (%s), value %s", r.Cause, r.Error, r.Value)
				}
				seen[string(r.Value)] = true
				if r.ResultNS <= 0 || r.ResultNS > r.WallNS {
					t.Errorf("result after %d of %d ns", r.ResultNS, r.WallNS)
				}
			}
			if err := p.Fill(context.Background()); err != nil {
				t.Fatal(err)
			}
			if r := runIn(t, p, use(c.preloaded)); string(r.Value) != "[true,true,false]" {
				t.Errorf("preloaded: %s, %s", r.Value, r.Error)
			}
			if err := p.Fill(context.Background()); err != nil {
				t.Fatal(err)
			}
			if r := runIn(t, p, use(c.call)); string(r.Value) != `{"a":1152921504606846976}` || r.Calls.Accepted != 1 || !r.Calls.Reconciled {
				t.Errorf("call: %s, %+v, %s", r.Value, r.Calls, r.Error)
			}
		})
	}
}

// The account of a run begins with the run: neither the wall clock nor the CPU
// time of the parking is in it.
func TestPoolCountsFromTheTake(t *testing.T) {
	s := script(t, "", nil, invoke.Options{})
	s.Args = append(s.Args, "--preload=decimal,json,typing,dataclasses,asyncio")
	s.Budget.CPUTime = 400 * time.Millisecond
	s.Budget.WallClock = 400 * time.Millisecond
	p := pool(t, s, 1)
	time.Sleep(500 * time.Millisecond)
	// What is parked runs at the lowest priority, what is taken at ours.
	r := runIn(t, p, jail.Use{Script: &jail.Script{Program: "import os\nos.nice(0)"}})
	if r.Cause != jail.CauseOK || string(r.Value) != strconv.Itoa(ownNice(t)) {
		t.Errorf("cause %q: %s, %s", r.Cause, r.Error, r.Value)
	}
	if r.WallNS > int64(400*time.Millisecond) || r.CPUUserNS+r.CPUSystemNS > int64(100*time.Millisecond) {
		t.Errorf("wall %d, cpu %d + %d ns", r.WallNS, r.CPUUserNS, r.CPUSystemNS)
	}
	for cause, b := range map[jail.Cause]func(*jail.Budget){
		jail.CauseWall: func(b *jail.Budget) { b.CPUTime, b.WallClock = time.Hour, 300*time.Millisecond },
		// Beyond the pool's own, which is no limit of this run.
		jail.CauseCPUTime: func(b *jail.Budget) { b.CPUTime, b.WallClock = 3*time.Second, time.Hour },
		jail.CauseMemory:  func(b *jail.Budget) { b.CPUTime, b.WallClock, b.MaxMemory = time.Hour, time.Hour, 64<<20 },
	} {
		if err := p.Fill(context.Background()); err != nil {
			t.Fatal(err)
		}
		program := "while True: pass"
		if cause == jail.CauseMemory {
			program = "x = []\nwhile True: x.append(bytearray(1 << 20))"
		}
		r := runIn(t, p, jail.Use{Budget: budget(b), Script: &jail.Script{Program: program}})
		if r.Cause != cause {
			t.Errorf("cause %q (%s), want %q", r.Cause, r.Error, cause)
		}
		if cause != jail.CauseMemory && r.CPUUserNS+r.CPUSystemNS > int64(5*time.Second) {
			t.Errorf("%s: %d ns of cpu", cause, r.CPUUserNS+r.CPUSystemNS)
		}
	}
}

// A jail that died while it was parked is never given to a run.
func TestPoolDiscardsTheDead(t *testing.T) {
	for name, s := range map[string]jail.Spec{"command": shell("echo 42"), "guest": script(t, "42", nil, invoke.Options{})} {
		t.Run(name, func(t *testing.T) {
			p := pool(t, s, 3)
			for _, pid := range childrenNamed(t, "jail-init") {
				if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
					t.Fatal(err)
				}
			}
			await(t, "their end", func() bool {
				for _, pid := range childrenNamed(t, "jail-init") {
					if stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)); !strings.Contains(string(stat), ") Z") {
						return false
					}
				}
				return true
			})
			r := runAny(t, p, jail.Use{})
			if r.Cause != jail.CauseOK || r.stdout+string(r.Value) != "42\n" && r.stdout+string(r.Value) != "42" {
				t.Errorf("cause %q (%s), %q, %s", r.Cause, r.Error, r.stdout, r.Value)
			}
			if got := p.Stats(); got.Discarded != 3 {
				t.Errorf("%+v", got)
			}
			if err := p.Fill(context.Background()); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// What a guest and its children do while they are parked is no part of the run
// that gets them: no CPU time, no OOM kill, no tasks beyond the run's limit.
func TestPoolLeavesOutWhatHappenedWhileParked(t *testing.T) {
	trigger := t.TempDir()
	// after runs something beside the guest once there is a file of that name.
	after := func(file, do string) jail.Spec {
		s := script(t, "import time\ntime.sleep(0.1)\n42", nil, invoke.Options{})
		s.Root.Binds = []rootfs.Bind{{Source: trigger, Target: "/trigger"}}
		s.Budget.CPUTime = time.Hour
		s.Args = []string{"/bin/sh", "-c", "(until [ -e /trigger/" + file + " ]; do sleep 0.01; done; " + do + ") & exec " + strings.Join(s.Args, " ")}
		return s
	}
	create := func(file string) string {
		t.Helper()
		file = filepath.Join(trigger, file)
		if err := os.WriteFile(file, nil, 0o644); err != nil {
			t.Fatal(err)
		}
		return file
	}
	state := func(pid string) string {
		b, _ := os.ReadFile("/proc/" + pid + "/stat")
		_, s, _ := strings.Cut(string(b), ") ")
		return s[:min(len(s), 1)]
	}
	children := func(pid string) []string {
		b, _ := os.ReadFile("/proc/" + pid + "/task/" + pid + "/children")
		return strings.Fields(string(b))
	}

	t.Run("cpu time", func(t *testing.T) {
		s := after("spin", "while [ -e /trigger/spin ]; do :; done; sleep 60")
		p := pool(t, s, 1)
		file := create("spin")
		// The pool has it at the lowest priority: as long as that takes.
		pid := strconv.Itoa(childrenNamed(t, "jail-init")[0])
		await(t, "300 ms of cpu time", func() bool {
			for _, guest := range children(pid) {
				for _, c := range children(guest) {
					b, _ := os.ReadFile("/proc/" + c + "/schedstat")
					ns, _, _ := strings.Cut(string(b), " ")
					if n, _ := strconv.ParseInt(ns, 10, 64); n > 300e6 {
						return true
					}
				}
			}
			return false
		})
		os.Remove(file)
		r := runIn(t, p, jail.Use{Budget: budget(func(b *jail.Budget) { b.CPUTime = 200 * time.Millisecond })})
		if r.Cause != jail.CauseOK || r.CPUUserNS+r.CPUSystemNS > int64(200*time.Millisecond) {
			t.Errorf("cause %q (%s), %d ns of cpu time", r.Cause, r.Error, r.CPUUserNS+r.CPUSystemNS)
		}
	})
	t.Run("oom kill", func(t *testing.T) {
		p := pool(t, after("eat", "exec /usr/bin/python3 -c 'x = bytearray(1 << 30)'"), 1)
		pid := strconv.Itoa(childrenNamed(t, "jail-init")[0])
		file := create("eat")
		await(t, "the kill", func() bool {
			guest := children(pid)
			if len(guest) == 0 || state(guest[0]) == "Z" {
				return true // cgroup v2 kills all of it
			}
			eater := children(guest[0])
			return len(eater) == 0 || state(eater[0]) == "Z"
		})
		os.Remove(file)
		time.Sleep(50 * time.Millisecond) // until the kernel's notification was read
		r := runAny(t, p, jail.Use{})
		if r.Cause != jail.CauseOK || r.Memory.OOMKills != 0 {
			t.Errorf("cause %q (%s), %+v", r.Cause, r.Error, r.Memory)
		}
		if s := p.Stats(); s.Discarded != 1 {
			t.Errorf("%+v", s)
		}
	})
	t.Run("tasks", func(t *testing.T) {
		p := pool(t, after("never", ""), 1)
		r := runAny(t, p, jail.Use{Budget: budget(func(b *jail.Budget) { b.CPUTime, b.MaxPIDs = time.Hour, 1 })})
		if s := p.Stats(); s.Discarded != 1 || s.Fresh != 1 || r.PIDs.Peak > 1 {
			t.Errorf("%+v, %+v, cause %q", s, r.PIDs, r.Cause)
		}
	})
}

var niceHelper = registerHelper("nice", func(args []string) {
	s := shell("nice")
	s.Templates = &rootfs.Cache{Dir: args[0]}
	p, err := jail.NewPool(s, 2)
	if err != nil {
		panic(err)
	}
	defer p.Close()
	for range 4 {
		if err := p.Fill(context.Background()); err != nil {
			panic(err)
		}
		if _, err := p.Run(context.Background(), jail.Use{Stdout: os.Stdout}); err != nil {
			panic(err)
		}
	}
	fmt.Println(p.Stats().Taken)
})

// A parked jail gets the priority that a fresh one has: the launcher's.
func TestPoolOfANiceLauncher(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	n := min(ownNice(t)+3, 19)
	cmd := helperCommand(niceHelper)
	cmd.Path, cmd.Args = "/usr/bin/nice", []string{"nice", "-n", "3", exe, templates.Dir}
	out, err := cmd.CombinedOutput()
	if want := strings.Repeat(fmt.Sprintln(n), 4) + "4\n"; err != nil || string(out) != want {
		t.Errorf("%v, %q, want %q", err, out, want)
	}
}

// A pool that cannot be filled says why, and runs still get their own answer.
func TestPoolThatCannotBeFilled(t *testing.T) {
	s := script(t, "", nil, invoke.Options{})
	s.Args = append(s.Args, "--preload=json,no_such_module")
	p, err := jail.NewPool(s, 2)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if err := p.Fill(context.Background()); err == nil || !strings.Contains(err.Error(), "no_such_module") {
		t.Errorf("fill: %v", err)
	}
	if r := runAny(t, p, jail.Use{Script: &jail.Script{Program: "1"}}); r.Cause != jail.CauseLost || *r.ExitCode != 70 {
		t.Errorf("cause %q: %s", r.Cause, r.Error)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	q, err := jail.NewPool(script(t, "", nil, invoke.Options{}), 50)
	if err != nil {
		t.Fatal(err)
	}
	defer q.Close()
	if err := q.Fill(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("fill within 50 ms: %v", err)
	}

	var refused *jail.RefusedError
	bad := shell("true")
	bad.Budget.WallClock = -1
	if _, err := jail.NewPool(bad, 1); !errors.As(err, &refused) {
		t.Errorf("a negative limit: %v", err)
	}
	if _, err := jail.NewPool(shell("true"), 0); err == nil {
		t.Error("a pool of 0")
	}
}

// Close leaves nothing, whatever goes on; runs that have begun go on.
func TestPoolClose(t *testing.T) {
	before := residue()
	for i := range 8 {
		p, err := jail.NewPool(shell("sleep 0.05; echo done"), 6)
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Duration(i) * 2 * time.Millisecond)
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				var out bytes.Buffer
				r, err := p.Run(context.Background(), jail.Use{Stdout: &out})
				if errors.Is(err, jail.ErrPoolClosed) {
					return
				}
				if err != nil || r.Cause != jail.CauseOK || out.String() != "done\n" {
					t.Errorf("%v, %+v", err, r)
				}
			})
		}
		time.Sleep(time.Duration(i) * time.Millisecond)
		p.Close()
		if s := p.Stats(); s.Ready != 0 {
			t.Errorf("after Close: %+v", s)
		}
		if _, err := p.Run(context.Background(), jail.Use{}); !errors.Is(err, jail.ErrPoolClosed) {
			t.Errorf("run after Close: %v", err)
		}
		if err := p.Fill(context.Background()); !errors.Is(err, jail.ErrPoolClosed) {
			t.Errorf("fill after Close: %v", err)
		}
		wg.Wait()
		p.Close()
	}
	var left string
	await(t, "nothing left", func() bool { left = difference(before, residue()); return left == "" })
}

var poolHelper = registerHelper("pool", func(args []string) {
	s := jail.Spec{Args: []string{"/bin/sleep", "3600"}, Budget: jail.DefaultBudget(), Templates: &rootfs.Cache{Dir: args[0]}}
	s.Budget.WallClock = time.Hour
	p, err := jail.NewPool(s, 4)
	if err != nil {
		panic(err)
	}
	g := s
	g.Args = python.Argv(rootfs.FilesDir + "/" + python.FileName)
	g.Root.Files = []rootfs.File{{Name: python.FileName, Data: python.Source}}
	g.Script = &jail.Script{}
	q, err := jail.NewPool(g, 2)
	if err != nil {
		panic(err)
	}
	for _, p := range []*jail.Pool{p, q} {
		if err := p.Fill(context.Background()); err != nil {
			panic(err)
		}
	}
	use := jail.Use{Script: &jail.Script{Program: "import time\ntime.sleep(3600)"}, Budget: &s.Budget}
	s.Budget.WallClock = 500 * time.Millisecond
	j, err := q.Start(context.Background(), use)
	if err != nil {
		panic(err)
	}
	b, _ := json.Marshal(q.Stats())
	fmt.Printf("%s %s\n", j.ID(), b)
	_, _ = j.Wait()
	select {}
})

// A launcher that is killed takes its parked jails along. One that is stopped
// does not lengthen the life of a run that was parked: pid 1 has the clock too
// (J16).
func TestPoolOfALauncherThatIsGone(t *testing.T) {
	cmd := helperCommand(poolHelper, templates.Dir)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line := make([]byte, 4096)
	n, err := out.Read(line)
	if err != nil {
		t.Fatal(err)
	}
	id, stats, _ := strings.Cut(string(line[:n]), " ")
	if !strings.Contains(stats, `"Taken":1,`) {
		t.Errorf("helper: %s", stats)
	}
	if err := cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	await(t, "the end of the run by its own clock", func() bool { return len(processesOf(id)) == 0 })
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	await(t, "the end of the parked jails", nothingLeft(t))
}
