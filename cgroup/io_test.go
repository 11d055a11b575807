package cgroup

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// onDisk returns a directory that is on a disk, and the disk.
func onDisk(t *testing.T) (path, device string) {
	t.Helper()
	for _, parent := range []string{os.TempDir(), "/var/tmp", "."} {
		var st unix.Stat_t
		if err := unix.Stat(parent, &st); err != nil {
			continue
		}
		sys, err := filepath.EvalSymlinks(fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(st.Dev), unix.Minor(st.Dev)))
		if err != nil {
			continue // a file system without a device of its own
		}
		if exists(sys + "/partition") {
			sys = filepath.Dir(sys)
		}
		path, err := os.MkdirTemp(parent, "cgroup-test-")
		if err != nil {
			continue
		}
		t.Cleanup(func() { os.RemoveAll(path) })
		return path, strings.TrimSpace(string(mustRead(t, sys+"/dev")))
	}
	t.Skip("NOT TESTED: no directory for temporary files is on a disk")
	return "", ""
}

// "direct FILE read|write COUNT SIZE" moves blocks past the page cache and
// writes how many nanoseconds that took.
var _ = register("direct", func(args []string) {
	count, _ := strconv.Atoi(args[2])
	size, _ := strconv.Atoi(args[3])
	fd, err := unix.Open(args[0], unix.O_RDWR|unix.O_DIRECT|unix.O_CLOEXEC, 0)
	if err != nil {
		fmt.Println("open:", err)
		return
	}
	buf := touch(size)
	if uintptr(unsafe.Pointer(&buf[0]))%4096 != 0 {
		fmt.Println("not aligned")
		return
	}
	begin := time.Now()
	for i := range count {
		var n int
		if args[1] == "read" {
			n, err = unix.Pread(fd, buf, int64(i*size))
		} else {
			n, err = unix.Pwrite(fd, buf, int64(i*size))
		}
		if err != nil || n != size {
			fmt.Println(args[1], n, err)
			return
		}
	}
	fmt.Println("took", time.Since(begin).Nanoseconds())
})

// Each of the four rates holds for a real disk. A second's worth of each may take
// less for the slices of time that the kernel gives in advance.
func TestIOIsThrottled(t *testing.T) {
	h := need(t, IO)
	path, disk := onDisk(t)
	file := path + "/file"
	if err := os.WriteFile(file, make([]byte, mib), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(file)
	if err == nil {
		err = errors.Join(f.Sync(), f.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
	move := func(t *testing.T, l Limits, args ...string) time.Duration {
		t.Helper()
		p := start(t, newTestLeaf(t, h, l), helperCmd("direct", append([]string{file}, args...)...))
		var n int64
		if line := p.line(t); strings.HasPrefix(line, "open: invalid argument") {
			t.Skip("NOT TESTED: the file system of ", path, " has no direct I/O")
		} else if _, err := fmt.Sscanf(line, "took %d", &n); err != nil {
			t.Fatal(line)
		}
		return time.Duration(n)
	}
	for _, tt := range []struct {
		name string
		l    IOLimit
		args []string // 1 second's worth, but for what is free
	}{
		{"bytes read", IOLimit{ReadBytes: mib}, []string{"read", "16", "65536"}},
		{"bytes written", IOLimit{WriteBytes: mib}, []string{"write", "16", "65536"}},
		{"reads", IOLimit{ReadOps: 20}, []string{"read", "20", "4096"}},
		{"writes", IOLimit{WriteOps: 20}, []string{"write", "20", "4096"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.l.Device = disk
			slow := move(t, Limits{IO: &IOLimits{tt.l}}, tt.args...)
			// The same without a limit on what it does.
			free := move(t, Limits{IO: &IOLimits{{Device: disk, ReadBytes: 1 << 40}}}, tt.args...)
			t.Logf("%v, without the limit %v", slow, free)
			if slow < 500*time.Millisecond || slow > 30*time.Second {
				t.Errorf("took %v", slow)
			}
			if free >= slow {
				t.Errorf("without a limit it took %v, with one %v", free, slow)
			}
		})
	}
}

// J17: every rate is read back, and is what the file has.
func TestIOLimitsAreReadBack(t *testing.T) {
	h := need(t, IO)
	_, disk := onDisk(t)
	l := IOLimit{disk, 1 << 20, math.MaxInt64, 100, math.MaxUint32 - 1}
	leaf := newTestLeaf(t, h, Limits{IO: &IOLimits{l}})
	var want []Applied
	for _, r := range l.rates() {
		a := Applied{IO, r.one + " (v1)", r.n, r.n, disk + " " + r.two}
		if on2(h, IO) {
			a.File = "io.max (v2)"
		}
		want = append(want, a)
		file, _, _ := strings.Cut(a.File, " ")
		data := string(mustRead(t, h.Support(IO).Dir+"/"+leaf.Name()+"/"+file))
		if n := fmt.Sprint(r.n); !strings.Contains(data, n) {
			t.Errorf("%s = %q, has no %s", file, data, n)
		}
	}
	if got := leaf.Applied(); !slices.Equal(got, want) || len(want) != 4 {
		t.Errorf("Applied = %v, want %v", got, want)
	}
	// An empty list asks for nothing.
	if got := newTestLeaf(t, h, Limits{IO: &IOLimits{}}).Applied(); len(got) > 0 {
		t.Errorf("Applied = %v", got)
	}
}

func TestIOLimitsThatCannotBeAreRefused(t *testing.T) {
	h := need(t, IO)
	_, disk := onDisk(t)
	for _, tt := range []struct {
		name string
		l    IOLimits
		want string // in the error
		fix  string // of an UnsupportedError
	}{
		{"no device", IOLimits{{ReadBytes: 1}}, `io device "" is no MAJOR:MINOR`, ""},
		{"a path", IOLimits{{Device: "/dev/vda", ReadBytes: 1}}, `io device "/dev/vda" is no`, ""},
		{"two words", IOLimits{{Device: "8:0 rbps=max", ReadBytes: 1}}, "is no MAJOR:MINOR", ""},
		{"leading zero", IOLimits{{Device: "08:0", ReadBytes: 1}}, "is no MAJOR:MINOR", ""},
		{"twice", IOLimits{{Device: disk, ReadBytes: 1}, {Device: disk, WriteBytes: 1}}, "io device " + disk + " is there twice", ""},
		{"no limit", IOLimits{{Device: disk}}, "limits nothing", ""},
		{"negative", IOLimits{{Device: disk, WriteOps: -1}}, "io limit wiops of device " + disk + " is negative: -1", ""},
		{"what 32 bits cannot hold", IOLimits{{Device: disk, ReadOps: 1 << 32}}, "is 4294967296, above 4294967294", ""},
		{"what the kernel takes for no limit", IOLimits{{Device: disk, ReadOps: math.MaxUint32}}, "is 4294967295, above 4294967294", ""},
		{"no such device", IOLimits{{Device: "4095:1048575", ReadBytes: 1}}, "4095:1048575", fixDevice},
		{"no such device after one", IOLimits{{Device: disk, ReadBytes: 2}, {Device: "4095:1048575", WriteOps: 1}}, "4095:1048575", fixDevice},
	} {
		t.Run(tt.name, func(t *testing.T) {
			name := newName()
			leaf, err := h.NewLeaf(name, Limits{IO: &tt.l})
			if leaf != nil || err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Fatalf("NewLeaf = %v, %v; want %q", leaf, err, tt.want)
			}
			var u *UnsupportedError
			if errors.As(err, &u) != (tt.fix != "") || u != nil && (u.Missing[0].Controller != IO || u.Missing[0].Fix != tt.fix || u.Missing[0].Place == "") {
				t.Errorf("%#v", err)
			}
			if left := leftGroups(name); left != nil { // J1
				t.Errorf("left %v", left)
			}
		})
	}
}

// What each version writes, on every host.
func TestIOLimitsOfFiles(t *testing.T) {
	limits := Limits{IO: &IOLimits{{Device: "8:16", ReadBytes: 5, WriteOps: 7}}}
	for _, tt := range []struct {
		v     version
		files map[string]string
		want  []Applied
	}{
		{v1{}, map[string]string{"blkio.throttle.read_bps_device": "8:16 5", "blkio.throttle.write_iops_device": "8:16 7",
			"blkio.throttle.read_iops_device": "", "blkio.throttle.write_bps_device": ""},
			[]Applied{{IO, "blkio.throttle.read_bps_device (v1)", 5, 5, "8:16 rbps"}, {IO, "blkio.throttle.write_iops_device (v1)", 7, 7, "8:16 wiops"}}},
		{v2{}, map[string]string{"io.max": "8:16 rbps=5 wiops=7"},
			[]Applied{{IO, "io.max (v2)", 5, 5, "8:16 rbps"}, {IO, "io.max (v2)", 7, 7, "8:16 wiops"}}},
	} {
		t.Run(tt.v.String(), func(t *testing.T) {
			d := plainDir(t)
			// A kernel without throttling has none of the files.
			for _, l := range []Limits{{}, limits} {
				var f *fault
				if _, err := tt.v.limit(d, IO, l); !errors.As(err, &f) && !errors.As(errors.Unwrap(err), &f) || f.fix != fixThrottle {
					t.Errorf("without the files: %v", err)
				}
			}
			for name := range tt.files {
				writePlain(t, d, name, "")
			}
			if as, err := tt.v.limit(d, IO, Limits{}); as != nil || err != nil {
				t.Errorf("with the files: %v, %v", as, err)
			}
			as, err := tt.v.limit(d, IO, limits)
			if err != nil || !slices.Equal(as, tt.want) {
				t.Errorf("limit = %v, %v", as, err)
			}
			for name, want := range tt.files {
				if got := string(mustRead(t, d.path+"/"+name)); got != want {
					t.Errorf("%s = %q, want %q", name, got, want)
				}
			}
			// A kernel that made something else of it.
			for name, data := range tt.files {
				if data == "" {
					continue
				}
				writePlain(t, d, name, "")
				if err := d.judge(name, data, 5, 6, true); err == nil || !strings.Contains(err.Error(), "reads back as 6") {
					t.Error(err)
				}
				if err := d.judge(name, data, 5, 0, false); err == nil || !strings.Contains(err.Error(), "reads back as no limit") {
					t.Error(err)
				}
			}
		})
	}
}

func TestIOLimitAsText(t *testing.T) {
	for want, l := range map[string]IOLimit{
		"8:0":                                  {Device: "8:0"},
		"8:0:wbps=1048576":                     {Device: "8:0", WriteBytes: 1 << 20},
		"254:16:rbps=1,wbps=2,riops=3,wiops=4": {"254:16", 1, 2, 3, 4},
	} {
		if got := l.String(); got != want {
			t.Errorf("%#v is %s, want %s", l, got, want)
		}
	}
}

func TestNestedFiles(t *testing.T) {
	const max = "8:16 rbps=2097152 wbps=max riops=max wiops=120\n8:0 rbps=1 wbps=max riops=x wiops\n"
	for _, tt := range []struct {
		key, sub string
		want     int64
		ok       bool
	}{
		{"8:16", "rbps", 2097152, true},
		{"8:16", "wbps", math.MaxInt64, true},
		{"8:16", "wiops", 120, true},
		{"8:0", "rbps", 1, true},
		{"8:0", "riops", 0, false},
		{"8:0", "wiops", 0, false},
		{"8:1", "rbps", 0, false},
		{"8:16", "bps", 0, false},
	} {
		if got, ok := nested([]byte(max), tt.key, tt.sub); got != tt.want || ok != tt.ok {
			t.Errorf("nested(%s, %s) = %d, %v; want %d, %v", tt.key, tt.sub, got, ok, tt.want, tt.ok)
		}
	}
}
