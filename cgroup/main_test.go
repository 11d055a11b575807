package cgroup

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// The test binary is also every program that the tests run: "helper NAME ARGS".
// Each is registered next to its use; one that no test uses fails the run.
var (
	helpers  = map[string]func(args []string){}
	used     sync.Map
	allTests = true
)

func register(name string, f func(args []string)) bool {
	helpers[name] = f
	return true
}

func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == "helper" {
		f := helpers[os.Args[2]]
		if f == nil {
			fmt.Fprintln(os.Stderr, "no such helper:", os.Args[2])
			os.Exit(99)
		}
		f(os.Args[3:])
		os.Exit(0)
	}
	for _, a := range os.Args[1:] {
		if strings.HasPrefix(a, "-test.run") || strings.HasPrefix(a, "-test.bench=") || strings.HasPrefix(a, "-test.fuzz") ||
			strings.HasPrefix(a, "-test.skip") || strings.HasPrefix(a, "-test.list") {
			allTests = false
		}
	}
	code := m.Run()
	if os.Getenv(insideVar) != "" {
		used.Range(func(name, _ any) bool { fmt.Println(usedLine, name); return true })
	}
	if code == 0 && allTests && os.Geteuid() == 0 {
		for name := range helpers {
			if _, ok := used.Load(name); !ok {
				fmt.Fprintln(os.Stderr, "no test used the helper", name)
				code = 1
			}
		}
	}
	if left := leftGroups(testPrefix()); len(left) > 0 {
		fmt.Fprintln(os.Stderr, "groups left behind:", left)
		code = 1
	}
	os.Exit(code)
}

// testPrefix begins the names of this process's groups: other test binaries can
// run on the same host at the same time.
func testPrefix() string { return fmt.Sprintf("jail-test-%d-", os.Getpid()) }

var nameCount atomic.Int64

func newName() string { return testPrefix() + strconv.FormatInt(nameCount.Add(1), 10) }

// leftGroups lists the groups below the caller's own that begin with prefix.
func leftGroups(prefix string) (left []string) {
	h, err := Probe()
	if err != nil {
		return []string{err.Error()}
	}
	h.mu.Lock()
	bases := h.bases()
	h.mu.Unlock()
	for _, b := range bases {
		if shared(b) {
			continue
		}
		err := b.dir.children(func(name string) bool {
			if strings.HasPrefix(name, prefix) && name != launcherName {
				left = append(left, b.dir.path+"/"+name)
			}
			return true
		})
		if err != nil {
			left = append(left, err.Error())
		}
	}
	return left
}

// shared tells whether an inner test does not have b to itself: no limit and no
// count of its parent is in that hierarchy. Other launchers can be at work there.
func shared(b *hierarchy) bool {
	return os.Getenv(insideVar) != "" && (b.version == v1{}) &&
		!strings.Contains(b.dir.path, "jail-test-") && !strings.Contains(b.dir.path, "with space")
}

// collected is what Collect removed of names.
func collected(t *testing.T, h *Host, names ...string) []string {
	t.Helper()
	removed, err := h.Collect()
	if err != nil {
		t.Errorf("Collect: %v", err)
	}
	return slices.DeleteFunc(removed, func(name string) bool { return !slices.Contains(names, name) })
}

// needRoot skips a test that cannot work for an ordinary user, and says so.
func needRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("NOT TESTED: making cgroups on this host needs root")
	}
}

func probe(t testing.TB) *Host {
	t.Helper()
	h, err := Probe()
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// need returns the Host if it has the controllers. For root it has to: a limit
// that is not tested must not look like one that works (J14).
func need(t testing.TB, cs ...Controller) *Host {
	t.Helper()
	needRoot(t)
	h := probe(t)
	for _, c := range cs {
		if s := h.Support(c); s.Err != nil {
			t.Fatalf("this host should have the controller %s: %v (%s)", c, s.Err, s.Fix)
		}
	}
	return h
}

// needV2 returns the v2 hierarchy. Only a legacy host may be without.
func needV2(t *testing.T, h *Host) *hierarchy {
	t.Helper()
	h.mu.Lock()
	two, err := h.unified()
	h.mu.Unlock()
	if err != nil && h.Mode() == "legacy" {
		t.Skip("NOT TESTED: a legacy host has no cgroup v2")
	}
	if err != nil {
		t.Fatalf("this host should have cgroup v2: %v", err)
	}
	return two
}

// on2 tells whether c is limited by cgroup v2 here.
func on2(h *Host, c Controller) bool { return h.Support(c).Hierarchy == "v2" }

func newTestLeaf(t testing.TB, h *Host, l Limits) *Leaf {
	t.Helper()
	leaf, err := h.NewLeaf(newName(), l)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { remove1(t, leaf) })
	return leaf
}

func remove1(t testing.TB, leaf *Leaf) {
	t.Helper()
	if err := leaf.Remove(context.Background()); err != nil {
		t.Errorf("remove %s: %v", leaf.Name(), err)
	}
}

// everything is a parent's limits: all controllers, none of them tight.
var everything = Limits{Memory: 1 << 30, Pids: 4000, CPUs: 4, CPUSet: allCPUs(), IO: someIO(), CPUTime: true}

// allCPUs lists the CPUs of this process.
func allCPUs() string {
	var of unix.CPUSet
	if err := unix.SchedGetaffinity(0, &of); err != nil {
		panic(err)
	}
	return listOf(&of)
}

func listOf(of *unix.CPUSet) string {
	var s cpuSet
	for n := range maxCPU {
		if of.IsSet(n) {
			s[n/64] |= 1 << (n % 64)
		}
	}
	return s.String()
}

// someIO is a limit that no disk reaches, nil if the host has no disk.
func someIO() *IOLimits {
	data, _ := os.ReadFile("/proc/partitions")
	for line := range strings.Lines(string(data)) {
		// The first that is a disk is one as a whole.
		if f := strings.Fields(line); len(f) == 4 && f[0] != "major" && !exists("/sys/class/block/"+f[3]+"/partition") {
			return &IOLimits{{Device: f[0] + ":" + f[1], ReadBytes: 1 << 40, WriteOps: 1 << 30}}
		}
	}
	return nil
}

// within waits for ok. On a hang it dies with every goroutine's stack.
func within(what string, d time.Duration, ok func() bool) {
	for end := time.Now().Add(d); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			debug.SetTraceback("all")
			panic("not within " + d.String() + ": " + what)
		}
	}
}

// A proc is a helper that runs in a leaf.
type proc struct {
	cmd   *exec.Cmd
	in    io.WriteCloser
	lines chan string
	ended chan struct{}
	err   bytes.Buffer
}

// inLeaf makes cmd start in leaf as a jail does: cloned into the v2 part, and by
// its own single thread into the v1 parts.
func inLeaf(leaf *Leaf, cmd *exec.Cmd) *exec.Cmd {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	if d := leaf.Dir(); d != nil {
		cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(d.Fd())
	}
	script := ""
	for _, f := range leaf.Tasks() {
		cmd.ExtraFiles = append(cmd.ExtraFiles, f)
		n := 2 + len(cmd.ExtraFiles)
		script += fmt.Sprintf("echo 0 >&%d && exec %d>&- && ", n, n)
	}
	if script != "" {
		cmd.Args = append([]string{"sh", "-c", script + `exec "$0" "$@"`, cmd.Path}, cmd.Args[1:]...)
		cmd.Path = "/bin/sh"
	}
	return cmd
}

func helperCmd(name string, args ...string) *exec.Cmd {
	used.Store(name, true)
	self, err := os.Executable()
	if err != nil {
		panic(err)
	}
	cmd := exec.Command(self, append([]string{"helper", name}, args...)...)
	cmd.Env = append(os.Environ(), "GOTRACEBACK=none", noRaceSleep)
	return cmd
}

// start starts a command, in leaf if there is one.
func start(t testing.TB, leaf *Leaf, cmd *exec.Cmd) *proc {
	t.Helper()
	if leaf != nil {
		inLeaf(leaf, cmd)
	}
	p := &proc{cmd: cmd, lines: make(chan string, 1000), ended: make(chan struct{})}
	var err error
	if p.in, err = cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr = w, &p.err
	cmd.WaitDelay = 5 * time.Second
	err = cmd.Start()
	w.Close()
	if err != nil {
		r.Close()
		t.Fatal(err)
	}
	go func() {
		defer r.Close()
		defer close(p.lines)
		for s := bufio.NewScanner(r); s.Scan(); {
			p.lines <- s.Text()
		}
	}()
	go func() { cmd.Wait(); close(p.ended) }()
	t.Cleanup(func() {
		p.in.Close()
		cmd.Process.Kill()
		p.wait()
	})
	return p
}

// line returns the next line that the helper writes.
func (p *proc) line(t testing.TB) string {
	t.Helper()
	select {
	case s, ok := <-p.lines:
		if !ok {
			<-p.ended
			t.Fatalf("%v ended: %v: %s", p.cmd.Args, p.cmd.ProcessState, p.err.String())
		}
		return s
	case <-time.After(20 * time.Second):
		debug.SetTraceback("all")
		panic(fmt.Sprint("no line from ", p.cmd.Args))
	}
}

func (p *proc) expect(t testing.TB, want string) {
	t.Helper()
	if got := p.line(t); got != want {
		t.Fatalf("%v wrote %q, want %q", p.cmd.Args, got, want)
	}
}

func (p *proc) wait() {
	select {
	case <-p.ended:
	case <-time.After(20 * time.Second):
		debug.SetTraceback("all")
		panic(fmt.Sprint("does not end: ", p.cmd.Args))
	}
}

// signal returns the signal that ended the process, 0 if none did.
func (p *proc) signal() syscall.Signal {
	p.wait()
	if ws := p.cmd.ProcessState.Sys().(syscall.WaitStatus); ws.Signaled() {
		return ws.Signal()
	}
	return 0
}

var _ = register("sleep", func([]string) {
	fmt.Println("ready")
	io.Copy(io.Discard, os.Stdin)
	time.Sleep(time.Hour)
})

// sleeper is a process in leaf that does nothing, ready when this returns.
func sleeper(t testing.TB, leaf *Leaf) *proc {
	t.Helper()
	p := start(t, leaf, helperCmd("sleep"))
	p.expect(t, "ready")
	return p
}

// inside runs the rest of a test in a process of its own whose cgroups are a
// leaf made for it, and returns true in that process. So the test has a cgroup
// to itself that is not the root. The outer process may give it namespaces and
// the like by change.
//
// On cgroup v2 all controllers are enabled for the inner process to hand on.
func inside(t *testing.T, change func(parent *Leaf, cmd *exec.Cmd)) bool {
	t.Helper()
	return insideParent(t, everything, change)
}

const (
	insideVar = "CGROUP_TEST_INSIDE"
	usedLine  = "used helper:" // the outer process reads it

	noRaceSleep = "GORACE=atexit_sleep_ms=0" // else a binary with the race detector ends a second late
)

func insideParent(t *testing.T, l Limits, change func(parent *Leaf, cmd *exec.Cmd)) bool {
	t.Helper()
	if os.Getenv(insideVar) == t.Name() {
		return true
	}
	h := need(t, controllers...)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	var pattern []string
	for _, part := range strings.Split(t.Name(), "/") {
		pattern = append(pattern, "^"+part+"$")
	}
	args := []string{"-test.run", strings.Join(pattern, "/"), "-test.v", "-test.timeout", "60s"}
	var out []byte
	for attempt := 1; ; attempt++ {
		parent := newTestLeaf(t, h, l)
		if on2(h, Memory) {
			// A limit of the parent is to kill what exceeds it, not the test.
			if err := parent.mem.dir.write("memory.oom.group", "0"); err != nil {
				t.Fatal(err)
			}
		}
		cmd := exec.Command(self, args...)
		cmd.Env = append(os.Environ(), insideVar+"="+t.Name(), noRaceSleep)
		if change != nil {
			change(parent, cmd)
		}
		inLeaf(parent, cmd)
		out, err = cmd.CombinedOutput()
		// While the first victim is dying, its memory is still charged for a
		// moment, and the kernel can choose a second one: the test.
		var exit *exec.ExitError
		if attempt == 5 || l.Memory == everything.Memory || !errors.As(err, &exit) ||
			exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
			break
		}
	}
	if err == nil && bytes.Contains(out, []byte("--- SKIP: "+t.Name())) {
		t.Skipf("inner test:\n%s", out)
	}
	if err != nil || !bytes.Contains(out, []byte("--- PASS: "+t.Name())) {
		t.Fatalf("inner test: %v\n%s", err, out)
	}
	for line := range strings.Lines(string(out)) {
		if name, ok := strings.CutPrefix(strings.TrimSpace(line), usedLine+" "); ok {
			used.Store(name, true)
		}
	}
	t.Logf("inner test:\n%s", out)
	return false
}

// dirs returns where leaf's parts are.
func dirs(leaf *Leaf) (ds []string) {
	for _, p := range leaf.parts {
		ds = append(ds, p.dir.path)
	}
	return ds
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// openFDs lists the descriptors of this process.
func openFDs(t testing.TB) []string {
	t.Helper()
	es, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	var fds []string
	for _, e := range es {
		if to, err := os.Readlink(filepath.Join("/proc/self/fd", e.Name())); err == nil {
			fds = append(fds, e.Name()+" "+to)
		}
	}
	slices.Sort(fds)
	return fds
}

func mustMount(t *testing.T, source, target, fs string, flags uintptr, data string) {
	t.Helper()
	if err := unix.Mount(source, target, fs, flags, data); err != nil {
		t.Fatalf("mount %s on %s: %v", fs, target, err)
	}
}
