package jail_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"example.com/jail/cgroup"
	"example.com/jail/jail"
)

// userNamespaces bounds how many user namespaces there may be below the one of
// the process that reads or writes it.
const userNamespaces = "/proc/sys/user/max_user_namespaces"

// The budget items that rest on cgroups, in the order of reports.
var cgroupItems = []string{"max_memory", "cpu_time", "cpus", "max_pids", "memory_high", "cpuset", "io"}

// demanding asks for every budget item that rests on cgroups.
func demanding() jail.Spec {
	s := command("/bin/true")
	s.Budget.CPUTime, s.Budget.CPUs, s.Budget.MemoryHigh, s.Budget.CPUSet = time.Minute, 1, 64<<20, "0"
	s.Budget.IO = []cgroup.IOLimit{{Device: "8:0", ReadBytes: 1 << 30}}
	return s
}

// An outcome is what a launcher is told in the place where it runs.
type outcome struct {
	Cause   jail.Cause
	Refused []jail.Refusal
	Table   []jail.Check // as the library gives it
	Command []jail.Check // as "jail check --json" prints it
	Code    int          // its exit code
}

// In its own namespaces or cgroup this process takes something away from itself
// and prints what comes of it.
var lacking = registerHelper("lacking", func(steps []string) {
	code := 0
	for _, step := range steps {
		if err := lack[step](); err != nil {
			fmt.Fprintf(os.Stderr, "%s: %v\n", step, err)
			code = 1
		}
	}
	if _, err := templates.Drop(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
})

var lack = map[string]func() error{
	"private mounts": func() error { return unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, "") },
	"unmount":        func() error { return unix.Unmount("/sys/fs/cgroup", unix.MNT_DETACH) },
	"hide":           func() error { return unix.Mount("none", "/sys/fs/cgroup", "tmpfs", 0, "") },
	"read-only": func() error {
		data, err := os.ReadFile("/proc/thread-self/mountinfo")
		for _, line := range strings.Split(string(data), "\n") {
			f := strings.Fields(line)
			// This mount alone: without MS_BIND the hierarchy itself would be
			// read-only, for the whole machine.
			if err == nil && strings.Contains(line, " - cgroup") {
				err = unix.Mount("", f[4], "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, "")
			}
		}
		return err
	},
	"no user namespaces": func() (err error) {
		if savedUserNamespaces, err = os.ReadFile(userNamespaces); err != nil {
			return err
		}
		return os.WriteFile(userNamespaces, []byte("0"), 0)
	},
	"user namespaces again": func() error { return os.WriteFile(userNamespaces, savedUserNamespaces, 0) },
	"run":                   func() error { return tell(command("/bin/true")) },
	"run with every item":   func() error { return tell(demanding()) },
}

// tell prints the outcome of a spec here.
func tell(s jail.Spec) error {
	var o outcome
	r, err := jail.Run(context.Background(), s)
	jail.Settle()
	if o.Cause, o.Refused = r.Cause, r.Refused; err != nil && len(o.Refused) == 0 {
		return err
	}
	o.Table = jail.Preflight()
	check := exec.Command(os.Getenv(commandEnv), "check", "--json")
	check.Stderr = os.Stderr
	out, err := check.Output()
	if o.Code = check.ProcessState.ExitCode(); o.Code < 0 {
		return err
	}
	var printed struct{ Items []jail.Check }
	if err := json.Unmarshal(out, &printed); err != nil {
		return fmt.Errorf("%w: %q", err, out)
	}
	o.Command = printed.Items
	return json.NewEncoder(os.Stdout).Encode(o)
}

var savedUserNamespaces []byte

// commandEnv names the jail command where the tests cannot build it.
const commandEnv = "JAIL_COMMAND"

func jailCommand(t *testing.T) string {
	t.Helper()
	if path := os.Getenv(commandEnv); path != "" {
		return path
	}
	path := filepath.Join(t.TempDir(), "jail")
	if out, err := exec.Command("go", "build", "-tags", "runc_nocriu", "-o", path, "../cmd/jail").CombinedOutput(); err != nil {
		t.Fatalf("build the command, or name it in %s: %v\n%s", commandEnv, err, out)
	}
	return path
}

// A launcher is refused with everything that its place lacks, at once, each with
// the fix, and "jail check" says the same there.
func TestRefusedPlaces(t *testing.T) {
	path := jailCommand(t)
	ownMounts := &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS}
	all := []syscall.SysProcIDMap{{Size: 1<<32 - 1}}
	// Root there has the rights that the switch asks for, and the switch is
	// that namespace's own.
	ownUsers := &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS, UidMappings: all, GidMappings: all, GidMappingsEnableSetgroups: true}
	type place struct {
		name   string
		attr   *syscall.SysProcAttr
		steps  []string
		items  []string // refused
		reason string
		fix    string
	}
	const mount = "mount cgroup2 on /sys/fs/cgroup"
	places := []place{
		{"no cgroupfs", ownMounts, []string{"private mounts", "unmount", "run with every item"},
			cgroupItems, "is not mounted", mount},
		{"cgroupfs read-only", ownMounts, []string{"private mounts", "read-only", "run with every item"},
			cgroupItems, "read-only file system", "read-write"},
		{"no user namespaces", ownUsers, []string{"no user namespaces", "run", "user namespaces again", "run"},
			[]string{"namespaces"}, "user.max_user_namespaces is 0", "sysctl -w user.max_user_namespaces=10000"},
		{"no user namespaces, no cgroupfs", ownUsers, []string{"hide", "no user namespaces", "run with every item"},
			append([]string{"namespaces"}, cgroupItems...), "", ""},
	}
	if os.Getenv("JAIL_TEST_MACHINE") != "" {
		places = append(places, place{"no user namespaces at all", nil, []string{"no user namespaces", "run", "user namespaces again", "run"},
			[]string{"namespaces"}, "user.max_user_namespaces is 0", "sysctl -w user.max_user_namespaces=10000"})
	}
	table := jail.Preflight()
	host, err := cgroup.Probe()
	if err != nil {
		t.Fatal(err)
	}
	// The head and the rows of the summary's table: see prove.
	fmt.Printf("tested on: %s cgroups, Linux %s\n", host.Mode(), jail.KernelRelease())
	fmt.Printf("budget items: %s\n", strings.Trim(fmt.Sprint(jail.Items()), "[]"))
	if host.Mode() == "unified" {
		bare, delegated := v2Groups(t, host)
		places = append(places,
			place{"v2 not delegated", bare, []string{"run with every item"},
				slices.DeleteFunc(slices.Clone(cgroupItems), func(i string) bool { return i == "cpu_time" }), // needs no controller
				"is not in cgroup.controllers of", "Delegate=yes"},
			place{"v2 delegated", delegated, []string{"run"}, nil, "", ""})
	}
	for _, c := range places {
		t.Run(c.name, func(t *testing.T) {
			before, err := os.ReadFile(userNamespaces)
			if err != nil {
				t.Fatal(err)
			}
			usedHelpers[lacking] = true
			self, err := os.Executable()
			if err != nil {
				t.Fatal(err)
			}
			cmd := exec.Command(self, c.steps...)
			cmd.Env = append(os.Environ(), helperEnv+"="+lacking, commandEnv+"="+path)
			cmd.SysProcAttr = c.attr
			var errs strings.Builder
			cmd.Stderr = &errs
			out, err := cmd.Output()
			if err != nil {
				t.Fatalf("%v: %s", err, errs.String())
			}
			d := json.NewDecoder(strings.NewReader(string(out)))
			var o outcome
			if err := d.Decode(&o); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			checkRefused(t, o, table, c.items, c.reason, c.fix)
			if c.steps[len(c.steps)-1] == "run" && len(c.steps) > 1 { // afterwards
				o = outcome{}
				if err := d.Decode(&o); err != nil {
					t.Fatal(err)
				}
				checkRefused(t, o, table, nil, "", "")
			}
			if after, err := os.ReadFile(userNamespaces); err != nil || string(after) != string(before) {
				t.Errorf("%s is %s, %v; it was %s", userNamespaces, after, err, before)
			}
			what := "nothing is refused"
			switch len(c.items) {
			case 0:
			case 1:
				what = "refused: " + c.items[0]
			default:
				what = fmt.Sprintf("refused: %d items", len(c.items))
			}
			if !t.Failed() {
				fmt.Printf("proven: place: %s|%s|%s\n", c.name, what, t.Name())
			}
		})
	}
}

// checkRefused wants these items to be refused, with reason and fix, by library and
// command alike; without items, a launcher that works. What the whole host lacks
// is no matter of the place.
func checkRefused(t *testing.T, o outcome, host []jail.Check, items []string, reason, fix string) {
	t.Helper()
	var got []string
	for _, r := range o.Refused {
		got = append(got, r.Item)
		if r.Reason == "" || r.Fix == "" || !strings.Contains(r.Reason, reason) || !strings.Contains(r.Fix, fix) {
			t.Errorf("%s: reason %q, fix %q; want %q, %q", r.Item, r.Reason, r.Fix, reason, fix)
		}
	}
	if !slices.Equal(got, items) || (o.Cause == jail.CauseOK) != (items == nil) {
		t.Errorf("cause %q, refused %v; want %v", o.Cause, got, items)
	}
	if o.Code != min(len(items), 1) {
		t.Errorf("jail check: exit code %d", o.Code)
	}
	for from, table := range map[string][]jail.Check{"Preflight": o.Table, "jail check": o.Command} {
		var cannot []string
		for _, row := range table {
			if row.Enforceable || slices.Contains(host, row) {
				continue
			}
			cannot = append(cannot, row.Item)
			if !strings.Contains(row.Reason, reason) || !strings.Contains(row.Fix, fix) {
				t.Errorf("%s: %+v", from, row)
			}
		}
		if !slices.Equal(cannot, items) {
			t.Errorf("%s lists %v, want %v", from, cannot, items)
		}
	}
}

// v2Groups makes two cgroups below the launcher's own: to one its parent hands on no
// controller, to the other all of them.
func v2Groups(t *testing.T, host *cgroup.Host) (bare, delegated *syscall.SysProcAttr) {
	t.Helper()
	base := host.Support(cgroup.Pids).Dir
	make := func(name, control string) *syscall.SysProcAttr {
		parent := filepath.Join(base, fmt.Sprintf("jail-test-%d-%s", os.Getpid(), name))
		dir := filepath.Join(parent, "service")
		if err := os.Mkdir(parent, 0o755); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			// The launcher's processes may still be dying.
			for _, d := range []string{filepath.Join(dir, "jail-launcher"), dir, parent} {
				await(t, "removal of "+d, func() bool { err := os.Remove(d); return err == nil || errors.Is(err, os.ErrNotExist) })
			}
		})
		if err := os.WriteFile(filepath.Join(parent, "cgroup.subtree_control"), []byte(control), 0); err != nil {
			t.Fatal(err)
		}
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		f, err := os.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		return &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(f.Fd())}
	}
	return make("bare", ""), make("delegated", "+memory +pids +cpu +cpuset +io")
}
