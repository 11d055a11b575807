package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/docker/go-units"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"example.com/jail/cgroup"
	"example.com/jail/jail"
	"example.com/jail/rootfs"
	"example.com/jail/rootfs/image"
	"example.com/jail/seccomp"
)

// options are the flags of run and script.
type options struct {
	budget          jail.Budget
	memory          sizeValue
	output          sizeValue
	tmp             sizeValue
	callBytes       sizeValue
	memoryHigh      sizeValue
	allowUnenforced []string

	env     []string
	dir     string
	binds   []rootfs.Bind
	rootfs  string
	seccomp string
	tools   string
	stdin   bool
	report  string
	events  eventsValue
	user    userValue
}

func (o *options) register(f *pflag.FlagSet) {
	d := jail.DefaultBudget()
	o.budget = d
	o.memory, o.output = sizeValue(d.MaxMemory), sizeValue(d.MaxOutput)
	o.tmp, o.callBytes = sizeValue(d.MaxTmp), sizeValue(d.MaxBytes)

	f.Var(&o.memory, "memory", "memory of all processes together, page cache and tmpfs included;\nat the limit the jail is killed, cause memory")
	f.Var((*durationValue)(&o.budget.WallClock), "wall", "time from the program's release to its end, tool calls included;\nat the limit the jail is killed, cause wall_clock")
	f.Var((*durationValue)(&o.budget.CPUTime), "cpu-time", "cpu time of all processes together; at the limit the jail is killed,\ncause cpu_time (0: not asked for)")
	f.Var((*cpusValue)(&o.budget.CPUs), "cpus", "processors' worth of cpu bandwidth; the jail is throttled to it\n(0: not asked for)")
	f.Var((*countValue)(&o.budget.MaxPIDs), "pids", "processes and threads; at the limit fork fails in the jail")
	f.Var(&o.output, "output", "bytes of stdout and stderr together; at the limit the jail is killed,\ncause output, and what came before is delivered")
	f.Var(&o.tmp, "tmp", "bytes in /tmp and /dev/shm together; at the limit ENOSPC in the jail")
	f.Var((*intValue)(&o.budget.MaxCalls), "calls", "tool calls; one more is refused with class quota")
	f.Var(&o.callBytes, "call-bytes", "bytes of tool answers; one more is refused with class quota")
	f.Var((*intValue)(&o.budget.Inflight), "inflight", "tool calls at work at once; one more is refused with class\nrate_limited")
	f.Var((*durationValue)(&o.budget.CallDeadline), "call-deadline", "time for one tool call; at expiry it is answered with class transient")
	f.Var((*intValue)(&o.budget.OpenFiles), "open-files", "open files of each process; one more fails with EMFILE in the jail\n(0: not asked for, and still 1024)")
	f.Var(&o.memoryHigh, "memory-high", "memory above which the jail is slowed down and its memory reclaimed;\nneeds cgroup v2 (0: not asked for)")
	f.StringVar(&o.budget.CPUSet, "cpuset", "", "`LIST` of processors that the jail may run on, such as 0-1,3")
	f.Var((*ioValue)(&o.budget.IO), "io", "greatest rates of a disk, such as /dev/sda:rbps=10MiB,wbps=1MiB,riops=100,\nwiops=50 (bytes read, written, reads, writes a second) or 8:0:wbps=1MiB;\nat a limit a request waits (repeatable)")
	f.StringArrayVar(&o.allowUnenforced, "allow-unenforced", nil, "run although this host cannot enforce the budget `ITEM`, by the name\nthat jail check shows (repeatable)")

	f.StringArrayVar(&o.env, "env", nil, "add `KEY=VALUE` to the program's environment (repeatable)")
	f.StringVar(&o.dir, "workdir", "", "`DIR` in the jail to work in (default /tmp, or the image's)")
	f.Var(&bindValue{list: &o.binds}, "ro-bind", "host file or directory to show read-only in the jail (repeatable)")
	f.Var(&bindValue{list: &o.binds, writable: true}, "bind", "host file or directory that the program may write with its owner's\nrights (repeatable)")
	f.StringVar(&o.rootfs, "rootfs", "host", "root file system: host for a read-only view of this one, a directory, or\nan OCI image on disk (layout directory or archive, with :TAG or @DIGEST);\n`host|DIR|IMAGE`")
	f.StringVar(&o.seccomp, "seccomp", "default", "system call filter: default, none, or a file with an OCI profile;\n`NAME|FILE`")
	f.StringVar(&o.tools, "tools", "", "read the tools that the program may call from `FILE` (YAML or JSON)")
	f.BoolVar(&o.stdin, "stdin", false, "pass standard input to the program (otherwise it is empty)")
	f.StringVar(&o.report, "report", "", "write the report as JSON to `FILE`, - for standard output")
	f.Var(&o.events, "events", "write output and exit to standard output as JSON lines, output as\nbase64, or with =utf8 as text")
	f.Lookup("events").NoOptDefVal = "b64"
	f.Var(&o.user, "user", "ids that the program sees (default 1000:1000)")
	f.SortFlags = false
}

// spec makes the Spec that the flags describe, but for what is run. close gives
// up the image that the spec uses.
func (o *options) spec(ctx context.Context, progress func(done, total int64)) (s jail.Spec, close func(), err error) {
	close = func() {}
	s = jail.Spec{Env: o.env, Dir: o.dir, Budget: o.budget, User: o.user.user}
	s.Budget.MaxMemory, s.Budget.MaxOutput = int64(o.memory), int64(o.output)
	s.Budget.MaxTmp, s.Budget.MaxBytes = int64(o.tmp), int(o.callBytes)
	s.Budget.MemoryHigh = int64(o.memoryHigh)
	for _, i := range o.allowUnenforced {
		s.AllowUnenforced = append(s.AllowUnenforced, jail.Item(i))
	}
	s.Root.Binds = o.binds
	switch {
	case o.rootfs == "host":
	case image.IsImage(o.rootfs):
		store := imageStore()
		store.Progress = progress
		i, err := store.Open(ctx, o.rootfs)
		if err != nil {
			return s, close, refusal("rootfs", fmt.Sprintf("--rootfs %s: %v", o.rootfs, err), "give host, a directory or an OCI image on disk")
		}
		close = func() { _ = i.Close() }
		s.Root.Dir = i.Dir
		s.Env = append(slices.Clone(i.Env), s.Env...)
		if o.dir == "" {
			s.Dir = i.WorkingDir
		}
	default:
		if _, err := os.Stat(o.rootfs); err != nil {
			return s, close, refusal("rootfs", fmt.Sprintf("--rootfs %s: %v", o.rootfs, pathErr(err)), "give host, a directory or an OCI image on disk")
		}
		s.Root.Dir = o.rootfs
	}
	if o.seccomp != "default" {
		filter, err := seccomp.Load(o.seccomp)
		if err != nil {
			return s, close, refusal("seccomp", fmt.Sprintf("--seccomp %s: %v", o.seccomp, err), "give default, none or a file with an OCI seccomp profile")
		}
		s.Seccomp = filter
	}
	return s, close, nil
}

// imagesEnv names another directory for unpacked images than the default.
const imagesEnv = "JAIL_IMAGES"

func imageStore() *image.Store { return &image.Store{Dir: os.Getenv(imagesEnv)} }

func refusal(item, reason, fix string) error {
	return &jail.RefusedError{Items: []jail.Refusal{{Item: item, Reason: reason, Fix: fix}}}
}

func pathErr(err error) error {
	if p, ok := err.(*os.PathError); ok {
		return p.Err
	}
	return err
}

// sizeValue is a number of bytes: 64MiB, 64M, 64m or plain; 0 is no limit.
type sizeValue int64

func (v *sizeValue) Type() string { return "SIZE" }

func (v *sizeValue) String() string {
	n := int64(*v)
	for _, u := range []struct {
		bytes int64
		name  string
	}{{1 << 40, "TiB"}, {1 << 30, "GiB"}, {1 << 20, "MiB"}, {1 << 10, "KiB"}} {
		if n != 0 && n%u.bytes == 0 {
			return strconv.FormatInt(n/u.bytes, 10) + u.name
		}
	}
	return strconv.FormatInt(n, 10)
}

func (v *sizeValue) Set(s string) error {
	n, err := units.RAMInBytes(s)
	if err != nil || n < 0 || strings.HasPrefix(s, "-") || !sizeFits(s) {
		return fmt.Errorf("want a size such as 64MiB, 64M or 67108864, or 0 for no limit")
	}
	*v = sizeValue(n)
	return nil
}

// sizeFits refuses what RAMInBytes would wrap or round beyond 2^62.
func sizeFits(s string) bool {
	digits := strings.TrimRight(s, "bBiIkKmMgGtTpP ")
	f, err := strconv.ParseFloat(digits, 64)
	if err != nil {
		return false
	}
	if i := strings.IndexAny("kmgtp", strings.ToLower(strings.TrimRight(strings.TrimPrefix(s, digits), "bBiI "))+"-"); i >= 0 {
		f *= math.Pow(1024, float64(i+1))
	}
	return f < 1<<62
}

// durationValue is a positive time span; 0 is no limit.
type durationValue time.Duration

func (v *durationValue) Type() string   { return "DURATION" }
func (v *durationValue) String() string { return time.Duration(*v).String() }
func (v *durationValue) Set(s string) error {
	d, err := time.ParseDuration(s)
	if err != nil || d < 0 {
		return fmt.Errorf("want a duration such as 10s, 500ms or 1m30s, or 0 for no limit")
	}
	*v = durationValue(d)
	return nil
}

// countValue is a number of things; 0 is no limit.
type countValue int64

func (v *countValue) Type() string   { return "N" }
func (v *countValue) String() string { return strconv.FormatInt(int64(*v), 10) }
func (v *countValue) Set(s string) error {
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n < 0 || n > math.MaxInt32 {
		return fmt.Errorf("want a number from 1 to %d, or 0 for no limit", math.MaxInt32)
	}
	*v = countValue(n)
	return nil
}

// intValue is a countValue in an int.
type intValue int

func (v *intValue) Type() string   { return "N" }
func (v *intValue) String() string { return strconv.Itoa(int(*v)) }
func (v *intValue) Set(s string) error {
	var n countValue
	if err := n.Set(s); err != nil {
		return err
	}
	*v = intValue(n)
	return nil
}

// cpusValue is a number of processors, in fractions; 0 is no limit.
type cpusValue float64

func (v *cpusValue) Type() string   { return "N" }
func (v *cpusValue) String() string { return strconv.FormatFloat(float64(*v), 'g', -1, 64) }
func (v *cpusValue) Set(s string) error {
	f, err := strconv.ParseFloat(s, 64)
	if err != nil || !(f == 0 || f >= 0.01 && f <= 65536) {
		return fmt.Errorf("want a number of processors from 0.01 up, or 0 for no limit")
	}
	*v = cpusValue(f)
	return nil
}

// ioValue collects rates of block devices, DEVICE:rbps=SIZE,wbps=SIZE,riops=N,wiops=N.
type ioValue []cgroup.IOLimit

func (v *ioValue) Type() string   { return "DEVICE:RATES" }
func (v *ioValue) String() string { return "" }
func (v *ioValue) Set(s string) error {
	i := strings.LastIndex(s, ":")
	if i < 0 {
		return errIO
	}
	device, err := blockDevice(s[:i])
	if err != nil {
		return err
	}
	l := cgroup.IOLimit{Device: device}
	var riops, wiops countValue
	rates := map[string]interface{ Set(string) error }{
		"rbps": (*sizeValue)(&l.ReadBytes), "wbps": (*sizeValue)(&l.WriteBytes), "riops": &riops, "wiops": &wiops,
	}
	for _, word := range strings.Split(s[i+1:], ",") {
		name, value, _ := strings.Cut(word, "=")
		rate := rates[name]
		if rate == nil {
			return errIO
		}
		if err := rate.Set(value); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		delete(rates, name) // no rate is there twice
	}
	l.ReadOps, l.WriteOps = int64(riops), int64(wiops)
	*v = append(*v, l)
	return nil
}

var errIO = errors.New("want DEVICE:RATE=N,... with a path or MAJOR:MINOR, and some of rbps, wbps, riops and wiops, each once")

// blockDevice returns the number of a device that is given by its path.
func blockDevice(name string) (string, error) {
	if !strings.HasPrefix(name, "/") {
		return name, nil
	}
	var st unix.Stat_t
	if err := unix.Stat(name, &st); err != nil {
		return "", fmt.Errorf("device %s: %w", name, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFBLK {
		return "", fmt.Errorf("%s is no block device", name)
	}
	return fmt.Sprintf("%d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev)), nil
}

// userValue is UID:GID, or UID for both.
type userValue struct{ user *jail.User }

func (v *userValue) Type() string { return "UID:GID" }
func (v *userValue) String() string {
	if v.user == nil {
		return ""
	}
	return fmt.Sprintf("%d:%d", v.user.UID, v.user.GID)
}

func (v *userValue) Set(s string) error {
	u, g, both := strings.Cut(s, ":")
	if !both {
		g = u
	}
	uid, err := strconv.ParseUint(u, 10, 32)
	gid, err2 := strconv.ParseUint(g, 10, 32)
	if err != nil || err2 != nil {
		return fmt.Errorf("want numeric ids such as 1000:1000")
	}
	v.user = &jail.User{UID: uint32(uid), GID: uint32(gid)}
	return nil
}

// bindValue collects SRC or SRC:DST.
type bindValue struct {
	list     *[]rootfs.Bind
	writable bool
}

func (v *bindValue) Type() string   { return "SRC[:DST]" }
func (v *bindValue) String() string { return "" }
func (v *bindValue) Set(s string) error {
	b := rootfs.Bind{Source: s, Writable: v.writable}
	// A colon that is no separator belongs to a source that exists.
	if i := strings.LastIndex(s, ":"); i >= 0 {
		if _, err := os.Lstat(s); err != nil {
			b.Source, b.Target = s[:i], s[i+1:]
			if b.Target == "" {
				return fmt.Errorf("want SRC or SRC:DST")
			}
		}
	}
	if b.Source == "" {
		return fmt.Errorf("want SRC or SRC:DST")
	}
	if _, err := os.Stat(b.Source); err != nil {
		return fmt.Errorf("source %s: %w", b.Source, pathErr(err))
	}
	*v.list = append(*v.list, b)
	return nil
}
