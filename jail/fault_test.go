//go:build faults

package jail_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"example.com/jail/guest/python"
	"example.com/jail/jail"
	"example.com/jail/rootfs"
	"example.com/jail/rootfs/image"
)

var faultKills = flag.Int("faults", 200, "kills of TestFaultAtEveryStep; every step is met at least once")

// places are where the launchers of these tests leave things.
type places struct{ templates, work string }

func (p places) cache() *rootfs.Cache { return &rootfs.Cache{Dir: p.templates} }
func (p places) store() *image.Store  { return &image.Store{Dir: p.work + "/store"} }

// sleeper is a jail that does not end on its own. The writable bind is idmapped.
func (p places) sleeper() jail.Spec {
	s := jail.Spec{
		Args:      []string{"/bin/sh", "-c", "setsid sleep 3600 & trap '' TERM; while :; do sleep 3600; done"},
		Budget:    jail.DefaultBudget(),
		Templates: p.cache(),
	}
	s.Root.Binds = []rootfs.Bind{{Source: p.work + "/bind", Target: "/mnt", Writable: true}}
	s.Budget.WallClock = time.Hour
	return s
}

// scenarios are the lives of a launcher. Together they meet every step, and each
// ends with nil if nobody is killed.
var scenarios = map[string]func(places) error{
	"run": func(p places) error {
		j, err := jail.Start(context.Background(), p.sleeper())
		if err != nil {
			return err
		}
		return finish(j)
	},
	// Waits to be killed; the image is for gc to find.
	"stay": func(p places) error {
		img, err := p.store().Open(context.Background(), p.work+"/image.tar.gz")
		if err != nil {
			return err
		}
		defer img.Close()
		if _, err := jail.Start(context.Background(), p.sleeper()); err != nil {
			return err
		}
		time.Sleep(time.Minute)
		return errors.New("not killed")
	},
	"failing": func(p places) error {
		s := p.sleeper()
		s.Args = []string{"/no/such/program"}
		var setup *jail.SetupError
		if _, err := jail.Start(context.Background(), s); !errors.As(err, &setup) || setup.Stage != "exec" {
			return fmt.Errorf("start of no program: %w", err)
		}
		return nil
	},
	"pool": func(p places) error { return p.pool(p.sleeper(), 2) },
	"guests": func(p places) error {
		s := p.sleeper()
		s.Args = python.Argv(rootfs.FilesDir + "/" + python.FileName)
		s.Root.Files = []rootfs.File{{Name: python.FileName, Data: python.Source}}
		s.Script = &jail.Script{Program: "import time\ntime.sleep(3600)"}
		return p.pool(s, 1)
	},
	"templates": func(p places) error {
		cfg := p.sleeper().Root
		if _, err := p.cache().Open(cfg); err != nil {
			return err
		}
		if err := p.cache().Discard(cfg); err != nil {
			return err
		}
		// Names without anything, enough for one to be in the way.
		for i := range 32 {
			if err := os.WriteFile(fmt.Sprintf("%s/%032x", p.templates, i), nil, 0o600); err != nil {
				return err
			}
		}
		_, err := p.cache().Open(cfg)
		return err
	},
	"image": func(p places) error {
		// What another launcher, killed before, would have left.
		if err := os.MkdirAll(p.work+"/store/half-sha256-1", 0o700); err != nil {
			return err
		}
		img, err := p.store().Open(context.Background(), p.work+"/image.tar.gz")
		if err != nil {
			return err
		}
		defer img.Close()
		s := jail.Spec{Args: []string{"/bin/busybox", "true"}, Root: rootfs.Config{Dir: img.Dir}, Budget: jail.DefaultBudget(), Templates: p.cache()}
		r, err := jail.Run(context.Background(), s)
		if err == nil && r.Cause != jail.CauseOK {
			err = fmt.Errorf("cause %q: %s", r.Cause, r.Error)
		}
		return err
	},
	"gc": func(p places) error { return p.gc() },
}

// gc is what the command of that name does.
func (p places) gc() error {
	_, _, err := jail.Collect(p.cache())
	_, imageErr := p.store().Drop()
	return errors.Join(err, imageErr)
}

func (p places) pool(s jail.Spec, size int) error {
	pool, err := jail.NewPool(s, size)
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := pool.Fill(context.Background()); err != nil {
		return err
	}
	time.Sleep(10 * time.Millisecond) // for the namespace that is made ahead
	use := jail.Use{Budget: budget(func(b *jail.Budget) { b.MaxMemory, b.WallClock = 100<<20, time.Hour })}
	j, err := pool.Start(context.Background(), use)
	if err != nil {
		return err
	}
	return finish(j)
}

func finish(j *jail.Jail) error {
	j.Kill()
	r, err := j.Wait()
	if err == nil && r.Cause != jail.CauseCanceled {
		err = fmt.Errorf("cause %q: %s", r.Cause, r.Error)
	}
	return err
}

// exitError is what the helper exits with if its scenario failed.
const exitError = 3

var faultHelper = registerHelper("fault", func(args []string) {
	err := scenarios[args[0]](places{args[1], args[2]})
	jail.Settle()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(exitError)
	}
})

// fault is one kill.
type fault struct {
	scenario, at, kill string
	n                  int
	after              time.Duration
}

// launch runs a scenario as a process of its own and returns its pid, how it
// ended and what it complained of.
func (p places) launch(t *testing.T, scenario, plan string) (pid int, state *os.ProcessState, stderr string) {
	t.Helper()
	usedHelpers[faultHelper] = true
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, "/proc/self/exe", scenario, p.templates, p.work)
	cmd.Env = append(os.Environ(), helperEnv+"="+faultHelper, "JAIL_FAULT="+plan, "GORACE=atexit_sleep_ms=0", "TMPDIR="+p.work+"/tmp")
	file, err := os.OpenFile(p.work+"/stderr", os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	cmd.Stderr = file // not a pipe, which survivors would hold
	_ = cmd.Run()
	if ctx.Err() != nil {
		t.Fatalf("%s, %s: not at its end after 30 s", scenario, plan)
	}
	b, err := os.ReadFile(file.Name())
	if err != nil {
		t.Fatal(err)
	}
	return cmd.Process.Pid, cmd.ProcessState, string(b)
}

func killed(state *os.ProcessState) bool {
	ws, ok := state.Sys().(syscall.WaitStatus)
	return ok && ws.Signaled() && ws.Signal() == syscall.SIGKILL
}

// trace returns the lines of the trace: pid and step.
func (p places) trace(t *testing.T) [][]string {
	t.Helper()
	b, err := os.ReadFile(p.work + "/trace")
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	_ = os.Remove(p.work + "/trace")
	var lines [][]string
	for line := range strings.Lines(string(b)) {
		lines = append(lines, strings.Fields(line))
	}
	return lines
}

// strike runs a scenario into a fault and tells whether it got there.
func (p places) strike(t *testing.T, f fault) bool {
	t.Helper()
	plan := fmt.Sprintf("at=%s n=%d kill=%s after=%v trace=%s/trace", f.at, f.n, f.kill, f.after, p.work)
	pid, state, stderr := p.launch(t, f.scenario, plan)
	awaitEmpty(t, 10*time.Second, "alive", survivors) // a helper may outlive its launcher
	struck := ""
	for _, l := range p.trace(t) {
		if len(l) == 3 {
			struck = l[0]
		}
	}
	byHelper := f.kill == "parent" || f.kill == "both"
	dead := struck != "" && (byHelper || f.kill == "self" && struck == strconv.Itoa(pid))
	switch {
	case dead && byHelper && state.Success():
		return false // the launcher was at its end already
	case killed(state) != dead:
		t.Errorf("%v, killed %q of launcher %d: %s", state, struck, pid, stderr)
	case dead:
	case f.kill == "forker" && !state.Success():
		t.Errorf("%v: a launcher makes itself another forker: %s", state, stderr)
	case state.ExitCode() != exitError && !state.Success() || struck == "" && !state.Success():
		t.Errorf("%v: %s", state, stderr)
	default:
		awaitEmpty(t, 5*time.Second, "cgroups of a launcher that lives", deserted)
	}
	return struck != ""
}

// steps finds the names of all steps in the source.
func steps(t *testing.T) []string {
	t.Helper()
	var names []string
	err := filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && path != ".." && (strings.HasPrefix(d.Name(), ".") || d.Name() == "build" || d.Name() == "testdata") {
			return filepath.SkipDir
		}
		if d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		ast.Inspect(file, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			fun, ok := call.Fun.(*ast.SelectorExpr)
			if !ok || fun.Sel.Name != "Here" {
				return true
			}
			if pkg, ok := fun.X.(*ast.Ident); !ok || pkg.Name != "faults" {
				return true
			}
			lit, ok := call.Args[0].(*ast.BasicLit)
			if !ok || lit.Kind != token.STRING {
				t.Errorf("%s: the name of a step is no constant", path)
				return true
			}
			name, err := strconv.Unquote(lit.Value)
			if err != nil || slices.Contains(names, name) {
				t.Errorf("%s: step %s is not the only one of its name", path, lit.Value)
			}
			names = append(names, name)
			return true
		})
		return nil
	})
	if err != nil || len(names) == 0 {
		t.Fatalf("%d steps in the source: %v", len(names), err)
	}
	return names
}

// placesForFaults makes what the scenarios need, and takes the orphans of killed
// launchers as children, so that none can be missed.
func placesForFaults(t *testing.T, dir string) places {
	t.Helper()
	p := places{templates: dir, work: t.TempDir()}
	for _, d := range []string{"/bind", "/tmp"} {
		if err := os.Mkdir(p.work+d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	writeImage(t, p.work+"/image.tar.gz")
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
		if err := p.gc(); err != nil {
			t.Error(err)
		}
	})
	return p
}

// writeImage makes a compressed archive as docker save does, with busybox in it.
func writeImage(t *testing.T, file string) {
	t.Helper()
	busybox, err := os.ReadFile("/usr/bin/busybox")
	if err != nil {
		t.Fatal(err)
	}
	type member struct {
		name string
		data []byte
	}
	archive := func(members ...member) []byte {
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		for _, m := range members {
			err := w.WriteHeader(&tar.Header{Name: m.name, Mode: 0o755, Size: int64(len(m.data))})
			if err == nil {
				_, err = w.Write(m.data)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		return b.Bytes()
	}
	encode := func(v any) []byte {
		b, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	layer := archive(member{"bin/busybox", busybox})
	config := encode(map[string]any{
		"architecture": "amd64", "os": "linux", "config": map[string]any{},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{fmt.Sprintf("sha256:%x", sha256.Sum256(layer))}},
	})
	manifest := encode([]map[string]any{{"Config": "config.json", "RepoTags": []string{"fault:1"}, "Layers": []string{"layer.tar"}}})
	var b bytes.Buffer
	w, err := gzip.NewWriterLevel(&b, gzip.BestSpeed)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(archive(member{"manifest.json", manifest}, member{"config.json", config}, member{"layer.tar", layer})); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(w.Close(), os.WriteFile(file, b.Bytes(), 0o600)); err != nil {
		t.Fatal(err)
	}
}

// survivors reaps what has died of the killed launchers' descendants and lists
// the others.
func survivors() []string {
	files, _ := filepath.Glob("/proc/self/task/*/children")
	var alive []string
	for _, f := range files {
		b, _ := os.ReadFile(f)
		for _, child := range strings.Fields(string(b)) {
			pid, _ := strconv.Atoi(child)
			if n, _ := unix.Wait4(pid, nil, unix.WNOHANG|unix.WALL, nil); n != pid {
				comm, _ := os.ReadFile("/proc/" + child + "/comm")
				alive = append(alive, child+" "+strings.TrimSpace(string(comm)))
			}
		}
	}
	return alive
}

// awaitEmpty polls until list returns nothing.
func awaitEmpty(t *testing.T, within time.Duration, what string, list func() []string) {
	t.Helper()
	for end := time.Now().Add(within); ; time.Sleep(time.Millisecond) {
		left := list()
		if len(left) == 0 {
			return
		}
		if time.Now().After(end) {
			t.Errorf("%s after %v: %q", what, within, left)
			return
		}
	}
}

// deserted lists leaves whose maker is dead: nobody holds their lock.
func deserted() []string {
	var names []string
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() || !strings.HasPrefix(d.Name(), "jail-") || d.Name() == "jail-launcher" {
			return nil
		}
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err == nil {
			var st unix.Stat_t
			if unix.Fstat(fd, &st) == nil && st.Mode&unix.S_ISVTX != 0 && unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB) == nil {
				names = append(names, path)
			}
			unix.Close(fd)
		}
		return filepath.SkipDir
	})
	return names
}

// mounted returns the mount points at and below a directory.
func mounted(t *testing.T, dir string) (points []string) {
	t.Helper()
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); f[4] == dir || strings.HasPrefix(f[4], dir+"/") {
			points = append(points, f[4])
		}
	}
	return points
}

// checkKept proves that a finished run has left its template and no more.
func (p places) checkKept(t *testing.T) {
	t.Helper()
	var want []string
	names, err := os.ReadDir(p.templates)
	if err != nil {
		t.Error(err)
	}
	for _, n := range names {
		if !strings.HasSuffix(n.Name(), ".json") {
			want = append(want, p.templates+"/"+n.Name())
		}
	}
	if len(names) != 2 || len(want) != 1 || names[1].Name() != names[0].Name()+".json" {
		t.Errorf("kept: %v, want one template", names)
	}
	if got := mounted(t, p.templates); !slices.Equal(got, append([]string{p.templates}, want...)) {
		t.Errorf("mounts %q", got)
	}
}

// checkGone proves that a collection leaves nothing.
func (p places) checkGone(t *testing.T) {
	t.Helper()
	if err := p.gc(); err != nil {
		t.Error(err)
	}
	// Other launchers of this machine have leaves without a lock for a moment.
	awaitEmpty(t, 5*time.Second, "cgroups", deserted)
	if got := mounted(t, p.templates); len(got) > 0 {
		t.Errorf("mounts %q", got)
	}
	if _, err := os.Lstat(p.templates); !errors.Is(err, os.ErrNotExist) {
		names, _ := os.ReadDir(p.templates)
		t.Errorf("%s is still there, with %v", p.templates, names)
	}
	if names, err := os.ReadDir(p.work + "/store"); len(names) > 0 || err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Errorf("image store: %v, %v", names, err)
	}
	if names, err := os.ReadDir(p.work + "/tmp"); len(names) > 0 || err != nil {
		t.Errorf("temporary files: %v, %v", names, err)
	}
}

// prepare gives gc something to do.
func (p places) prepare(t *testing.T, scenario string) {
	t.Helper()
	if scenario == "gc" && !p.strike(t, fault{scenario: "stay", at: "jail.stager", n: 1, kill: "self"}) {
		t.Fatal("the launcher to be collected was not killed")
	}
}

// plan finds out which scenarios meet which steps, in which process, and makes
// the faults: the first so many meet every step once.
func (p places) plan(t *testing.T) (faults []fault, first int) {
	t.Helper()
	all := steps(t)
	type meeting struct {
		scenario string
		times    int
		helper   bool
	}
	met := map[string][]meeting{}
	for _, s := range []string{"run", "pool", "guests", "failing", "templates", "image", "gc"} {
		p.prepare(t, s)
		pid, state, stderr := p.launch(t, s, "trace="+p.work+"/trace")
		if !state.Success() {
			t.Fatalf("%s: %v: %s", s, state, stderr)
		}
		awaitEmpty(t, 10*time.Second, s+": alive", survivors)
		times := map[string]int{}
		helper := map[string]bool{}
		for _, l := range p.trace(t) {
			times[l[1]]++
			helper[l[1]] = l[0] != strconv.Itoa(pid)
		}
		for name, n := range times {
			if strings.HasPrefix(name, "cgroup.collect") && s != "gc" {
				continue // another launcher's leaves, by chance
			}
			met[name] = append(met[name], meeting{s, n, helper[name]})
		}
		p.checkGone(t)
	}
	var rest []fault
	for _, name := range all {
		if len(met[name]) == 0 {
			t.Errorf("step %s is met by no scenario", name)
		}
		for i, m := range met[name] {
			kills := []string{"self"}
			if m.helper {
				kills = []string{"self", "parent", "both"}
			}
			for _, kill := range kills {
				for n := 1; n <= min(m.times, 5); n++ {
					f := fault{scenario: m.scenario, at: name, n: n, kill: kill}
					if i == 0 && n == 1 {
						faults = append(faults, f)
					} else {
						rest = append(rest, f)
					}
				}
			}
		}
	}
	// Between the request and the start of the program the init is at work:
	// the launcher, the stager, pid 1 or all of its processes die at any moment of it.
	const sweep = 16
	for i := range sweep {
		f := fault{scenario: "stay", at: "jail.sent", n: 1, kill: "self", after: 3 * time.Millisecond * time.Duration(i) / sweep}
		faults = append(faults, f)
		for _, f.kill = range []string{"children", "eldest", "youngest"} {
			f.scenario = "run"
			faults = append(faults, f)
		}
		// The forker, from before it is asked.
		f.scenario, f.at, f.kill = "pool", "jail.descriptors", "forker"
		faults = append(faults, f)
	}
	first = len(faults)
	t.Logf("%d steps, %d faults to meet each at least once, %d more", len(all), first, len(rest))
	// Some of the rest depend on the order of threads and will not be met.
	for rest = append(rest, faults...); len(faults) < max(first, *faultKills*11/10); {
		rand.Shuffle(len(rest), func(i, j int) { rest[i], rest[j] = rest[j], rest[i] })
		faults = append(faults, rest...)
	}
	return faults, first
}

// E1 at every step of set-up, use and end that leaves something on the host: of a
// launcher, of its template helper, of an init and of gc itself. All processes
// end, the next run is not in trouble, and gc leaves nothing.
func TestFaultAtEveryStep(t *testing.T) {
	p := placesForFaults(t, templates.Dir+"-fault")
	faults, first := p.plan(t)
	done, kills := 0, map[string]int{}
	for i, f := range faults {
		if i >= first && (done >= *faultKills || t.Failed()) {
			break
		}
		// Before the collection another launcher runs, or none.
		next := rand.IntN(2) == 0
		t.Run(fmt.Sprintf("%s %s n=%d after=%v kill=%s next=%t", f.scenario, f.at, f.n, f.after, f.kill, next), func(t *testing.T) {
			p.prepare(t, f.scenario)
			met := p.strike(t, f)
			for tries := 0; !met && i < first && tries < 10; tries++ { // another order of threads
				p.checkGone(t)
				p.prepare(t, f.scenario)
				met = p.strike(t, f)
			}
			switch {
			case met:
				done++
				kills[f.kill]++
			case i < first:
				t.Error("never got there")
			}
			if next {
				_, state, stderr := p.launch(t, "run", "")
				if !state.Success() {
					t.Errorf("next run: %v: %s", state, stderr)
				}
				awaitEmpty(t, 10*time.Second, "alive after the next run", survivors)
				awaitEmpty(t, 5*time.Second, "cgroups after the next run", deserted)
				if f.scenario == "run" || f.scenario == "pool" || f.scenario == "failing" || f.scenario == "stay" {
					p.checkKept(t)
				}
			}
			p.checkGone(t)
		})
	}
	t.Logf("%d kills: %v", done, kills)
	if done < *faultKills {
		t.Errorf("want %d kills", *faultKills)
	}
}

// A launcher that dies between the two steps that make the directory of templates
// a private mount leaves a shared one where the host's mounts are shared, as
// systemd has them, and nothing can be pinned below that.
func TestFaultSharedMount(t *testing.T) {
	dir := templates.Dir + "-shared"
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(unix.Unmount(dir, unix.MNT_DETACH), os.Remove(dir)); err != nil {
			t.Error(err)
		}
	})
	if err := errors.Join(unix.Mount("shared", dir, "tmpfs", 0, ""), unix.Mount("", dir, "", unix.MS_SHARED, "")); err != nil {
		t.Fatal(err)
	}
	p := placesForFaults(t, dir+"/pins")
	if !p.strike(t, fault{scenario: "run", at: "pins.dir.bind", n: 1, kill: "self"}) {
		t.Fatal("not reached")
	}
	for i := range 2 {
		_, state, stderr := p.launch(t, "run", "trace="+p.work+"/trace")
		if !state.Success() {
			t.Fatalf("run %d: %v: %s", i, state, stderr)
		}
		built := slices.ContainsFunc(p.trace(t), func(l []string) bool { return l[1] == "pins.built" })
		if built != (i == 0) {
			t.Errorf("run %d built the template: %t", i, built)
		}
	}
	p.checkKept(t)
	p.checkGone(t)
}

// Several collections at once, and runs that start in the middle of them.
func TestFaultCollectionsAtOnce(t *testing.T) {
	p := placesForFaults(t, templates.Dir+"-fault")
	for range 10 {
		p.prepare(t, "gc")
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() {
				for range 5 {
					if err := p.gc(); err != nil {
						t.Errorf("gc: %v", err)
					}
				}
			})
		}
		for range 3 {
			wg.Go(func() {
				for range 2 {
					// A cache of its own, as another launcher has.
					if _, err := p.cache().Open(p.sleeper().Root); err != nil {
						t.Errorf("open: %v", err)
					}
				}
			})
		}
		wg.Wait()
		p.checkGone(t)
	}
}
