package cgroup

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestCgroupMountsOfAMountinfo(t *testing.T) {
	const mountinfo = `22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
31 23 0:28 / /sys/fs/cgroup rw,relatime shared:9 - tmpfs tmpfs rw,mode=755
33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:10 master:3 - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro,relatime - cgroup cgroup rw,memory
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
41 31 0:38 /../.. /mnt/with\040space\134and\011tab rw,relatime - cgroup2 none rw,nsdelegate
42 31 0:39 / /a - b rw - cgroup2 none rw
43 31 zero:39 / /bad rw - cgroup2 none rw
44 31 0:40 / /odd rw - cgroupfs none rw
45 31 0:41 / /short - cgroup2
46 31 0:42

`
	want := []mount{
		{unix.Mkdev(0, 30), "/", "/sys/fs/cgroup/cpu,cpuacct", v1{}, []string{"rw", "cpu", "cpuacct"}},
		{unix.Mkdev(0, 32), "/docker/abc", "/sys/fs/cgroup/memory", v1{}, []string{"rw", "memory"}},
		{unix.Mkdev(0, 37), "/", "/sys/fs/cgroup/systemd", v1{}, []string{"rw", "name=systemd"}},
		{unix.Mkdev(0, 38), "/../..", "/mnt/with space\\and\ttab", v2{}, nil},
	}
	got := cgroupMounts([]byte(mountinfo))
	if len(got) != len(want) {
		t.Fatalf("got %v", got)
	}
	for i := range want {
		if fmt.Sprint(got[i]) != fmt.Sprint(want[i]) {
			t.Errorf("mount %d = %v, want %v", i, got[i], want[i])
		}
	}
}

func TestLocate(t *testing.T) {
	for _, tt := range []struct{ root, point, own, want string }{
		{"/", "/sys/fs/cgroup", "/", "/sys/fs/cgroup"},
		{"/", "/sys/fs/cgroup", "/a/b", "/sys/fs/cgroup/a/b"},
		{"/a", "/cg", "/a", "/cg"},
		{"/a", "/cg", "/a/b", "/cg/b"},
		{"/a", "/cg", "/ab", ""},
		{"/a", "/cg", "/", ""},
		{"/a/b", "/cg", "/a", ""},
		{"/..", "/cg", "/", ""},
		{"/../../x", "/cg", "/", ""},
		{"/", "/cg", "/../x", ""},
		{"/", "/cg", "/..", ""},
		{"/", "/cg", "/..x", "/cg/..x"},
		{"/", "/cg", "", ""},
		{"/", "/cg", "relative", ""},
	} {
		got, ok := mount{root: tt.root, point: tt.point}.locate(tt.own)
		if got != tt.want || ok != (tt.want != "") {
			t.Errorf("%s at %s: locate(%q) = %q, %v; want %q", tt.root, tt.point, tt.own, got, ok, tt.want)
		}
	}
}

func TestNumbersOfFiles(t *testing.T) {
	for _, tt := range []struct {
		data string
		want int64
		ok   bool
	}{
		{"67108864\n", 67108864, true},
		{"max\n", math.MaxInt64, true},
		{"max 100000\n", math.MaxInt64, true}, // cpu.max
		{"50000 100000\n", 50000, true},
		{"-1\n", -1, true},
		{"18446744073709551615\n", math.MaxInt64, true},
		{"9223372036854771712", 9223372036854771712, true},
		{"", 0, false},
		{"\n", 0, false},
		{"many\n", 0, false},
		{"-99999999999999999999\n", 0, false},
		{"1x\n", 0, false},
	} {
		if got, err := number([]byte(tt.data)); got != tt.want || (err == nil) != tt.ok {
			t.Errorf("number(%q) = %d, %v; want %d", tt.data, got, err, tt.want)
		}
	}
}

func TestKeyedFiles(t *testing.T) {
	const events = "low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 1\n"
	const oomControl = "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"
	for _, tt := range []struct {
		data, key string
		want      int64
		ok        bool
	}{
		{events, "oom", 3, true},
		{events, "oom_kill", 2, true},
		{events, "oom_group_kill", 1, true},
		{events, "kill", 0, false},
		{oomControl, "oom_kill", 5, true},
		{oomControl, "oom_kill_disable", 0, true},
		{"max 3", "max", 3, true},
		{"usage_usec 18446744073709551615\n", "usage_usec", math.MaxInt64, true},
		{"oom_kill\n", "oom_kill", 0, false},
		{"oom_kill many\n", "oom_kill", 0, false},
		{"oom_kill 1 2\n", "oom_kill", 0, false},
		{"", "oom_kill", 0, false},
	} {
		if got, ok := keyed([]byte(tt.data), tt.key); got != tt.want || ok != tt.ok {
			t.Errorf("keyed(%q, %s) = %d, %v; want %d, %v", tt.data, tt.key, got, ok, tt.want, tt.ok)
		}
	}
}

// What each version makes of the files of a group, also of those that this
// host's kernel does not have.
func TestStatsOfFiles(t *testing.T) {
	two := map[string]string{
		"memory.peak":   "1048576\n",
		"memory.events": "low 0\nhigh 0\nmax 9\noom 2\noom_kill 4\noom_group_kill 1\n",
		"pids.peak":     "17\n",
		"pids.events":   "max 6\n",
		"cpu.stat":      "usage_usec 3000\nuser_usec 2000\nsystem_usec 1000\nnr_periods 10\nnr_throttled 4\nthrottled_usec 5000\n",
	}
	one := map[string]string{
		"memory.max_usage_in_bytes": "1048576\n",
		"memory.oom_control":        "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n",
		"pids.peak":                 "17\n",
		"pids.events":               "max 6\n",
		"cpu.stat":                  "nr_periods 10\nnr_throttled 4\nthrottled_time 5000000\n",
		"cpuacct.usage":             "3000000\n",
		"cpuacct.usage_user":        "2000000\n",
		"cpuacct.usage_sys":         "1000000\n",
	}
	full := Stats{1048576, 4, 17, 6, 2 * time.Millisecond, time.Millisecond, 5 * time.Millisecond, 4}
	without := func(s Stats, f func(*Stats)) Stats { f(&s); return s }
	for _, tt := range []struct {
		name   string
		v      version
		files  map[string]string
		lack   []string
		want   Stats
		usage  time.Duration
		failed bool
	}{
		{"v2", v2{}, two, nil, full, 3 * time.Millisecond, false},
		{"v2 before 5.19", v2{}, two, []string{"memory.peak", "pids.peak"}, without(full, func(s *Stats) { s.MemoryPeak, s.PidsPeak = -1, -1 }), 3 * time.Millisecond, false},
		{"v2 without cpu.stat", v2{}, two, []string{"cpu.stat"}, without(full, func(s *Stats) { s.CPUUser, s.CPUSystem, s.Throttled, s.ThrottledPeriods = -1, -1, -1, -1 }), 0, true},
		{"v1", v1{}, one, nil, full, 3 * time.Millisecond, false},
		{"v1 without pids.events and peak", v1{}, one, []string{"pids.events", "pids.peak"}, without(full, func(s *Stats) { s.PidsRefused, s.PidsPeak = -1, -1 }), 3 * time.Millisecond, false},
		{"v1 without cpuacct", v1{}, one, []string{"cpuacct.usage"}, without(full, func(s *Stats) { s.CPUUser, s.CPUSystem = -1, -1 }), 0, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := plainDir(t)
			for name, data := range tt.files {
				if !slices.Contains(tt.lack, name) {
					writePlain(t, d, name, data)
				}
			}
			got := noStats()
			for _, c := range controllers {
				if err := tt.v.stats(d, c, &got); err != nil {
					t.Errorf("%s: %v", c, err)
				}
			}
			if got != tt.want {
				t.Errorf("stats = %+v\nwant    %+v", got, tt.want)
			}
			used, err := tt.v.cpu(d)
			if (err != nil) != tt.failed || err == nil && used != tt.usage {
				t.Errorf("cpu = %v, %v", used, err)
			}
		})
	}
	// A file that says nonsense is an error and not a number.
	for _, v := range []version{v1{}, v2{}} {
		d := plainDir(t)
		for _, f := range []string{"memory.peak", "memory.max_usage_in_bytes", "pids.peak", "cpuacct.usage_user"} {
			writePlain(t, d, f, "nonsense\n")
		}
		for _, c := range []Controller{Memory, Pids} {
			s := noStats()
			if err := v.stats(d, c, &s); err == nil || s != noStats() {
				t.Errorf("%s %s of nonsense: %+v, %v", v, c, s, err)
			}
		}
	}
}

func writePlain(t *testing.T, d dir, name, data string) {
	t.Helper()
	fd, err := openat(d.fd, name, unix.O_RDONLY)
	if err == nil {
		unix.Close(fd)
	}
	fd, err = unix.Openat(d.fd, name, unix.O_CREAT|unix.O_TRUNC|unix.O_WRONLY|unix.O_CLOEXEC, 0o600)
	if err == nil {
		err = writeFD(fd, data)
		unix.Close(fd)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// A file that never ends is not read for ever.
func TestFilesAreReadWithABound(t *testing.T) {
	d := plainDir(t)
	writePlain(t, d, "cpu.stat", strings.Repeat("x 1\n", maxFile/4+1))
	if _, err := d.read("cpu.stat"); err == nil || !strings.Contains(err.Error(), "more than 65536 bytes") {
		t.Errorf("read: %v", err)
	}
}

func TestSpans(t *testing.T) {
	for _, tt := range []struct {
		n    int64
		unit time.Duration
		want time.Duration
	}{
		{0, time.Microsecond, 0},
		{-1, time.Microsecond, -1},
		{5, time.Microsecond, 5 * time.Microsecond},
		{math.MaxInt64, time.Nanosecond, math.MaxInt64},
		{math.MaxInt64, time.Microsecond, math.MaxInt64},
		{math.MaxInt64/1000 + 1, time.Microsecond, math.MaxInt64},
	} {
		if got := span(tt.n, tt.unit); got != tt.want {
			t.Errorf("span(%d, %v) = %d, want %d", tt.n, tt.unit, got, tt.want)
		}
	}
}

// The two parts have the proportion of the samples and the sum of the exact time.
func TestSplit(t *testing.T) {
	for _, tt := range []struct{ all, user, system, wantUser, wantSystem int64 }{
		{0, 0, 0, 0, 0},
		{100, 0, 0, 100, 0},
		{100, 0, 7, 0, 100},
		{100, 7, 0, 100, 0},
		{1000, 1, 3, 250, 750},
		{7, 1 << 60, 1 << 60, 3, 4},
		{-1, 3, 4, -1, -1},
		{9, -1, 4, -1, -1},
		{9, 3, -1, -1, -1},
	} {
		user, system := split(tt.all, tt.user, tt.system)
		if int64(user) != tt.wantUser || int64(system) != tt.wantSystem {
			t.Errorf("split(%d, %d, %d) = %d, %d", tt.all, tt.user, tt.system, user, system)
		}
	}
}

// A value that was read back is right, rounded, or an error (J17).
func TestCompare(t *testing.T) {
	for _, tt := range []struct {
		want, got, slack int64
		ok               bool
	}{
		{8192, 8192, 4095, true},
		{8193, 8192, 4095, true},
		{12287, 8192, 4095, true},
		{12288, 8192, 4095, false},
		{8192, 8193, 4095, false},
		{1, 0, 4095, false},
		{4095, -1, 4095, false},
		{0, 0, 0, true},
		{1, 1, 0, true},
		{5, math.MaxInt64, 0, false},
	} {
		if err := compare(tt.want, tt.got, tt.slack); (err == nil) != tt.ok {
			t.Errorf("compare(%d, %d, %d) = %v", tt.want, tt.got, tt.slack, err)
		}
	}
}

// Two ways: what is written as a mountinfo line is found again, and what is
// found can be written so that it is found again.
func FuzzCgroupMounts(f *testing.F) {
	f.Add("/", "/sys/fs/cgroup", "rw,memory", true, uint32(0), uint32(30))
	f.Add("/../..", "/with space\tand\\back\nline", "name=systemd", false, uint32(7), uint32(1<<20-1))
	f.Fuzz(func(t *testing.T, root, point, options string, two bool, major, minor uint32) {
		escape := strings.NewReplacer(" ", `\040`, "\t", `\011`, "\n", `\012`, `\`, `\134`).Replace
		fs := "cgroup"
		if two {
			fs = "cgroup2"
		}
		if !strings.HasPrefix(root, "/") || !strings.HasPrefix(point, "/") {
			return // the kernel writes absolute paths
		}
		for _, s := range []string{root, point, options} {
			// The kernel writes no empty field and no other white space of Unicode.
			if s == "" || strings.ContainsFunc(s, func(r rune) bool { return r > 0x7e || r == '\r' || r == '\v' || r == '\f' || r == 0 }) {
				return
			}
		}
		line := fmt.Sprintf("31 23 %d:%d %s %s rw,relatime shared:1 - %s none %s\n", major&0xfff, minor&0xfffff, escape(root), escape(point), fs, escape(options))
		got := cgroupMounts([]byte("22 1 254:0 / / rw - ext4 /dev/vda rw\n" + line))
		if len(got) != 1 {
			t.Fatalf("%q: found %v", line, got)
		}
		m := got[0]
		if m.root != root || m.point != point || (m.version == v2{}) != two || m.dev != unix.Mkdev(major&0xfff, minor&0xfffff) {
			t.Fatalf("%q: found %+v", line, m)
		}
		if p, ok := m.locate(root); ok == outside(root) || ok && !strings.HasPrefix(p, "/") {
			t.Fatalf("%q: locate = %q, %v", line, p, ok)
		}
	})
}

// Two ways: a number is found exactly if a line of two words begins with the
// key, and is the one written there.
func FuzzKeyed(f *testing.F) {
	f.Add([]byte("low 0\noom_kill 3\n"), "oom_kill", int64(3))
	f.Add([]byte("\x00\noom_kill x\n"), "oom_kill", int64(-1))
	f.Fuzz(func(t *testing.T, data []byte, key string, n int64) {
		got, ok := keyed(data, key)
		found := false
		for _, line := range strings.Split(string(data), "\n") {
			w := strings.Fields(line)
			found = found || len(w) == 2 && w[0] == key
		}
		if ok && !found || !ok && got != 0 {
			t.Fatalf("keyed(%q, %q) = %d, %v", data, key, got, ok)
		}
		if w := strings.Fields(key); len(w) != 1 || w[0] != key || found {
			return
		}
		with := append(append([]byte{}, data...), fmt.Sprintf("\n%s %d\n", key, n)...)
		if got, ok := keyed(with, key); !ok || got != n {
			t.Fatalf("keyed(%q, %q) = %d, %v; want %d", with, key, got, ok, n)
		}
	})
}

// Mounts that have nothing to do with cgroups do not count as a change; those
// that can hide one do.
func TestAroundCgroups(t *testing.T) {
	const cgroup = "38 31 0:35 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
	for _, c := range []struct {
		line string
		kept bool
	}{
		{"22 1 254:0 / / rw - ext4 /dev/vda rw\n", true},
		{"23 22 0:20 / /sys rw - sysfs sysfs rw\n", true},
		{"31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n", true},
		{"40 38 0:40 / /sys/fs/cgroup/memory/a rw - tmpfs tmpfs rw\n", true},
		{"41 22 0:41 / /run/jail rw - ext4 /dev/vda rw\n", false},
		{"42 22 0:42 / /sys/fs/cgroupx rw - tmpfs tmpfs rw\n", false},
		{"43 22 0:43 / /s rw - tmpfs tmpfs rw\n", false},
		{"short\n", false},
	} {
		want := cgroup
		if c.kept {
			want = c.line + cgroup
		}
		if got := string(aroundCgroups([]byte(c.line + cgroup))); got != want {
			t.Errorf("%q: kept %q", c.line, got)
		}
	}
}
