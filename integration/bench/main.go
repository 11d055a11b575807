package main

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"

	"example.com/jail/jail"
	"example.com/jail/rootfs"
)

const target = "/usr/bin/busybox" // static

func main() {
	rounds := flag.Int("n", 100, "rounds")
	pause := flag.Duration("pause", 25*time.Millisecond, "pause before each start")
	command := flag.String("jail", "bin/jail", "the jail command")
	flag.Parse()
	if err := bench(*rounds, *pause, *command); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// row is one way to start the program.
type row struct {
	name  string
	does  string // what of the sandbox is on
	start func() error
	// prepare runs before each start and is not measured.
	prepare func() error
	err     error
	times   []time.Duration
}

func bench(rounds int, pause time.Duration, command string) error {
	work, err := os.MkdirTemp("", "jail-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	warm := fmt.Sprintf("/run/jail-bench-%d", os.Getpid())
	cold := warm + "-cold"
	defer func() {
		for _, d := range []string{warm, cold} {
			_, _ = (&rootfs.Cache{Dir: d}).Drop()
		}
	}()

	rows := []*row{
		{name: "os/exec", does: "nothing", start: run(nil, target, "true")},
		{name: "jail.Run", does: "all, template ready", start: library(&rootfs.Cache{Dir: warm})},
		{name: "jail run", does: "all, template kept", start: run([]string{"JAIL_TEMPLATES=" + warm}, command, "run", "--", target, "true")},
		{name: "jail run, first", does: "all, template built", start: run([]string{"JAIL_TEMPLATES=" + cold}, command, "run", "--", target, "true"),
			prepare: func() error { _, err := (&rootfs.Cache{Dir: cold}).Drop(); return err }},
	}
	if path, err := exec.LookPath("bwrap"); err == nil {
		rows = append(rows, &row{name: "bwrap", does: "namespaces, read-only root; no memory limit, no filter", start: run(nil, path,
			"--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL",
			"--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64",
			"--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", target, "true")})
	}
	for _, name := range []string{"runc", "crun"} {
		path, err := exec.LookPath(name)
		if err != nil {
			continue
		}
		bundle := filepath.Join(work, name)
		if err := makeBundle(bundle); err != nil {
			return err
		}
		rows = append(rows, &row{name: name, does: "namespaces, read-only root, memory limit; no filter",
			start: oci(path, filepath.Join(work, name+"-state"), bundle)})
	}

	fmt.Printf("%s, %d processors, load %s, %d rounds in random order, %s before each start\n\n",
		jail.KernelRelease(), runtime.NumCPU(), load(), rounds, pause)
	for _, r := range rows {
		r.measure(pause) // not counted
		r.times = nil
	}
	for range rounds {
		rand.Shuffle(len(rows), func(i, j int) { rows[i], rows[j] = rows[j], rows[i] })
		for _, r := range rows {
			r.measure(pause)
		}
	}
	report(rows)
	if err := benchCalls(&rootfs.Cache{Dir: warm}); err != nil {
		return err
	}
	if err := benchLimits(&rootfs.Cache{Dir: warm}, 200); err != nil {
		return err
	}
	fmt.Printf("\nload at the end: %s\n", load())
	for _, r := range rows {
		if r.err != nil && strings.HasPrefix(r.name, "jail") {
			return fmt.Errorf("%s: %w", r.name, r.err)
		}
	}
	return nil
}

func (r *row) measure(pause time.Duration) {
	if r.err != nil {
		return
	}
	if r.prepare != nil {
		if r.err = r.prepare(); r.err != nil {
			return
		}
	}
	time.Sleep(pause)
	t := time.Now()
	if r.err = r.start(); r.err == nil {
		r.times = append(r.times, time.Since(t))
	}
}

func report(rows []*row) {
	var bwrap time.Duration
	for _, r := range rows {
		slices.Sort(r.times)
		if r.name == "bwrap" && r.err == nil {
			bwrap = r.times[len(r.times)/2]
		}
	}
	slices.SortFunc(rows, func(a, b *row) int {
		if (a.err == nil) != (b.err == nil) {
			if a.err == nil {
				return -1
			}
			return 1
		}
		if a.err != nil {
			return strings.Compare(a.name, b.name)
		}
		return int(a.times[len(a.times)/2] - b.times[len(b.times)/2])
	})
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "start to exit, ms\tmin\tp50\tp95\tx bwrap\twhat is on")
	ms := func(d time.Duration) string { return fmt.Sprintf("%.2f", float64(d)/1e6) }
	for _, r := range rows {
		if r.err != nil {
			fmt.Fprintf(w, "%s\t-\t-\t-\t-\tfailed: %s\n", r.name, strings.ReplaceAll(r.err.Error(), "\n", " "))
			continue
		}
		n := len(r.times)
		ratio := "-"
		if bwrap > 0 {
			ratio = fmt.Sprintf("%.2f", float64(r.times[n/2])/float64(bwrap))
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\n", r.name, ms(r.times[0]), ms(r.times[n/2]), ms(r.times[n*95/100]), ratio, r.does)
	}
	w.Flush()
}

func run(env []string, name string, args ...string) func() error {
	return func() error {
		cmd := exec.Command(name, args...)
		cmd.Env = append(os.Environ(), env...)
		if out, err := cmd.CombinedOutput(); err != nil || len(out) > 0 {
			return fmt.Errorf("%v: %s", err, bytes.TrimSpace(out))
		}
		return nil
	}
}

func library(cache *rootfs.Cache) func() error {
	spec := benchSpec(cache, target, "true")
	return func() error {
		r, err := jail.Run(context.Background(), spec)
		if err != nil {
			return err
		}
		if r.Cause != jail.CauseOK {
			return fmt.Errorf("cause %s: %s", r.Cause, r.Error)
		}
		return nil
	}
}

func oci(path, state, bundle string) func() error {
	n := 0
	// Not jail-*: cgroups of that name whose launcher is dead are cleared away.
	return func() error {
		n++
		return run(nil, path, "--root", state, "run", "--bundle", bundle, fmt.Sprintf("bench-%d-%d", os.Getpid(), n))()
	}
}

// makeBundle writes an OCI bundle that does the same work: a read-only root
// with the host's /usr, all namespaces, a memory limit.
func makeBundle(dir string) error {
	root := filepath.Join(dir, "rootfs")
	for _, d := range []string{"proc", "dev", "tmp", "usr", "sys"} {
		if err := os.MkdirAll(filepath.Join(root, d), 0o755); err != nil {
			return err
		}
	}
	limit := int64(256 << 20)
	s := specs.Spec{
		Version: "1.0.2",
		Process: &specs.Process{Args: []string{target, "true"}, Cwd: "/", Env: []string{"PATH=/usr/bin"}, NoNewPrivileges: true},
		Root:    &specs.Root{Path: "rootfs", Readonly: true},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc"},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "mode=755"}},
			{Destination: "/usr", Type: "bind", Source: "/usr", Options: []string{"rbind", "ro"}},
			{Destination: "/tmp", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "nodev", "size=64m"}},
		},
		Linux: &specs.Linux{
			Namespaces: []specs.LinuxNamespace{{Type: specs.PIDNamespace}, {Type: specs.MountNamespace}, {Type: specs.IPCNamespace}, {Type: specs.UTSNamespace}, {Type: specs.NetworkNamespace}},
			Resources:  &specs.LinuxResources{Memory: &specs.LinuxMemory{Limit: &limit}},
		},
	}
	b, err := json.Marshal(s)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "config.json"), b, 0o644)
}

func load() string {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "unknown"
	}
	return strings.Join(strings.Fields(string(b))[:3], " ")
}
