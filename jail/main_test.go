package jail_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"sort"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"example.com/jail/jail"
	"example.com/jail/rootfs"
)

// Helpers are what the test binary does when it is run again, as a launcher to be
// killed. One that no test used fails the run.
var (
	helpers     = map[string]func(args []string){}
	usedHelpers = map[string]bool{}
)

const helperEnv = "JAIL_TEST_HELPER"

// registerHelper is called from a test file's var or init.
func registerHelper(name string, f func(args []string)) string {
	helpers[name] = f
	return name
}

// helperCommand runs this binary again as a helper.
func helperCommand(name string, args ...string) *exec.Cmd {
	usedHelpers[name] = true
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), helperEnv+"="+name)
	return cmd
}

// templates of the tests are pinned apart from those of the machine's users.
var templates = &rootfs.Cache{Dir: fmt.Sprintf("/run/jail-test-%d", os.Getpid())}

func TestMain(m *testing.M) {
	if name := os.Getenv(helperEnv); name != "" {
		helpers[name](os.Args[1:])
		os.Exit(0)
	}
	if os.Geteuid() != 0 {
		fmt.Fprintln(os.Stderr, "the tests of the launcher need root: nothing was tested")
		os.Exit(1)
	}
	// A first run makes what stays for the process's life: threads, a template.
	if _, err := jail.Run(context.Background(), command("/bin/true")); err != nil {
		fmt.Fprintln(os.Stderr, "first run:", err)
		os.Exit(1)
	}
	jail.Settle()
	_, noPins := os.Lstat(rootfs.DefaultDir)
	before := residue()
	code := m.Run()
	jail.Settle()
	if noPins != nil { // the examples', which show the default
		_, _ = new(rootfs.Cache).Drop()
	}
	if code == 0 && flagRunAll() {
		for name := range helpers {
			if !usedHelpers[name] {
				fmt.Fprintf(os.Stderr, "helper %s is not used by any test\n", name)
				code = 1
			}
		}
	}
	// Goroutines of ended tests may need a moment.
	var left string
	for range 50 {
		if left = difference(before, residue()); left == "" {
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	if left != "" {
		fmt.Fprintf(os.Stderr, "left behind by the tests:\n%s\n", left)
		code = 1
	}
	if _, err := templates.Drop(); err != nil {
		fmt.Fprintln(os.Stderr, "drop templates:", err)
		code = 1
	}
	os.Exit(code)
}

func flagRunAll() bool {
	for _, a := range os.Args {
		if strings.HasPrefix(a, "-test.run") || strings.HasPrefix(a, "-test.skip") || strings.HasPrefix(a, "-test.list") || strings.HasPrefix(a, "-test.fuzz") {
			return false
		}
	}
	return true
}

// residue lists everything that a jail must not leave: cgroups, mounts, open
// descriptors, children, goroutines, files in the temporary directory.
func residue() map[string]int {
	r := map[string]int{}
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, d os.DirEntry, err error) error {
		if err != nil || !d.IsDir() || !runName.MatchString(d.Name()) {
			return nil
		}
		// One with a lock is another launcher's that runs at the same time.
		if fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0); err == nil {
			if unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB) == nil {
				r["cgroup "+path]++
			}
			unix.Close(fd)
		}
		return filepath.SkipDir
	})
	mounts, _ := os.ReadFile("/proc/thread-self/mountinfo")
	for _, line := range strings.Split(string(mounts), "\n") {
		f := strings.Fields(line)
		if len(f) < 5 || strings.HasPrefix(f[4], templates.Dir) || strings.HasPrefix(f[4], rootfs.DefaultDir) {
			continue
		}
		// Where a launcher could leave one; other programs mount elsewhere.
		for _, dir := range []string{"/run", "/proc", "/sys", "/dev", "/tmp", "/usr"} {
			if f[4] == dir || strings.HasPrefix(f[4], dir+"/") {
				r["mount "+f[4]]++
			}
		}
	}
	fds, _ := os.ReadDir("/proc/self/fd")
	for _, fd := range fds {
		if to, err := os.Readlink("/proc/self/fd/" + fd.Name()); err == nil {
			// Numbers differ, kinds do not; the template of each root of the
			// tests stays open by design.
			kind := strings.TrimRight(to, "[]0123456789")
			if strings.HasPrefix(kind, "mnt:") || strings.HasPrefix(kind, "/proc/") || strings.HasPrefix(kind, rootfs.DefaultDir) {
				continue
			}
			r["fd "+kind]++
		}
	}
	children, _ := filepath.Glob("/proc/self/task/*/children")
	for _, c := range children {
		b, _ := os.ReadFile(c)
		for range strings.Fields(string(b)) {
			r["child process"]++
		}
	}
	temp, _ := os.ReadDir(os.TempDir())
	for _, e := range temp {
		if strings.HasPrefix(e.Name(), "jail") {
			r["temporary "+e.Name()]++
		}
	}
	r["goroutines"] = runtime.NumGoroutine()
	return r
}

// runName matches the cgroups of runs, and no other package's of a test that runs
// at the same time.
var runName = regexp.MustCompile(`^jail-[0-9a-f]{7}$`)

func difference(before, after map[string]int) string {
	var lines []string
	for k, n := range after {
		if n > before[k] {
			lines = append(lines, fmt.Sprintf("%s: %d, before %d", k, n, before[k]))
			if k == "goroutines" {
				buf := make([]byte, 1<<16)
				lines = append(lines, string(buf[:runtime.Stack(buf, true)]))
			}
		}
	}
	sort.Strings(lines)
	return strings.Join(lines, "\n")
}

// spec returns a spec with the default budget for a shell script.
func shell(script string) jail.Spec { return command("/bin/sh", "-c", script) }

func command(args ...string) jail.Spec {
	return jail.Spec{Args: args, Budget: jail.DefaultBudget(), Templates: templates}
}

// result is a run with what it printed.
type result struct {
	*jail.Report
	stdout, stderr string
	elapsed        time.Duration
}

// run runs a spec to its end, within a generous bound after which the whole
// test binary fails with a full traceback.
func run(t *testing.T, s jail.Spec) result {
	t.Helper()
	var out, errs bytes.Buffer
	if s.Stdout == nil {
		s.Stdout = &out
	}
	if s.Stderr == nil {
		s.Stderr = &errs
	}
	start := time.Now()
	r, err := jail.Run(context.Background(), s)
	if err != nil {
		t.Fatalf("run %q: %v", s.Args, err)
	}
	res := result{r, out.String(), errs.String(), time.Since(start)}
	checkReport(t, r)
	return res
}

// prove records that a test saw a budget item hold (or be told right) on this
// host, and by what. The summary of make test is made of these lines.
func prove(t *testing.T, r *jail.Report, item jail.Item) {
	t.Helper()
	for _, b := range r.Budget {
		if b.Item == item && b.EnforcedBy != "" {
			fmt.Printf("proven: %s|%s|%s\n", item, b.EnforcedBy, t.Name())
			return
		}
	}
	t.Errorf("budget item %s is not enforced: %+v", item, r.Budget)
}

// checkReport checks what holds for every report.
func checkReport(t *testing.T, r *jail.Report) {
	t.Helper()
	for name, s := range map[string]jail.StreamUsage{"stdout": r.Stdout, "stderr": r.Stderr} {
		if s.Seen != s.Delivered+s.Dropped {
			t.Errorf("%s: seen %d, delivered %d, dropped %d do not add up", name, s.Seen, s.Delivered, s.Dropped)
		}
	}
	if (r.Cause == jail.CauseOK) != (r.Class == "") {
		t.Errorf("cause %q with class %q", r.Cause, r.Class)
	}
	if (r.Memory.Scope != "") != (r.Cause == jail.CauseMemory) {
		t.Errorf("cause %q with memory scope %q", r.Cause, r.Memory.Scope)
	}
	if (len(r.Refused) > 0) != (r.Cause == jail.CauseRefused) {
		t.Errorf("cause %q with refusals %v", r.Cause, r.Refused)
	}
}

// await polls a condition that must come true soon.
func await(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("%s: did not happen within 20 s", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}
