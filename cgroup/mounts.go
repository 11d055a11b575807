package cgroup

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// A mount is one place where a cgroup hierarchy is mounted.
type mount struct {
	dev     uint64
	root    string // of the hierarchy, what is seen at point
	point   string
	version version
	options []string // names the controllers on v1
}

// aroundCgroups returns the lines of a mountinfo file that are about cgroup
// mounts, or about mounts at, above or below their mount points, which can hide
// them.
func aroundCgroups(mountinfo []byte) []byte {
	points := []string{"/sys/fs/cgroup"}
	for _, m := range cgroupMounts(mountinfo) {
		points = append(points, m.point)
	}
	var kept []byte
	for line := range bytes.Lines(mountinfo) {
		f := bytes.Fields(line)
		if len(f) < 5 {
			continue
		}
		at := unescape(string(f[4]))
		for _, p := range points {
			if under(at, p) || under(p, at) {
				kept = append(kept, line...)
				break
			}
		}
	}
	return kept
}

// under tells whether a path is dir or below it.
func under(p, dir string) bool {
	return p == dir || strings.HasPrefix(p, strings.TrimSuffix(dir, "/")+"/")
}

// cgroupMounts returns the cgroup mounts among the lines of a mountinfo file.
// Lines that have not its form are skipped: they are not cgroup mounts.
func cgroupMounts(mountinfo []byte) []mount {
	var ms []mount
	for line := range bytes.Lines(mountinfo) {
		// 32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime shared:9 - cgroup cgroup rw,cpu
		front, back, ok := bytes.Cut(line, []byte(" - "))
		if !ok || !bytes.HasPrefix(back, []byte("cgroup")) {
			continue
		}
		f, b := strings.Fields(string(front)), strings.Fields(string(back))
		if len(f) < 6 || len(b) < 3 {
			continue
		}
		dev, ok := device(f[2])
		if !ok {
			continue
		}
		m := mount{dev: dev, root: unescape(f[3]), point: unescape(f[4]), version: v1{}}
		switch b[0] {
		case "cgroup2":
			m.version = v2{}
		case "cgroup":
			m.options = strings.Split(b[2], ",")
		default:
			continue
		}
		ms = append(ms, m)
	}
	return ms
}

func device(s string) (uint64, bool) {
	major, minor, ok := strings.Cut(s, ":")
	a, err1 := strconv.ParseUint(major, 10, 32)
	b, err2 := strconv.ParseUint(minor, 10, 32)
	return unix.Mkdev(uint32(a), uint32(b)), ok && err1 == nil && err2 == nil
}

// unescape undoes the octal escapes of a mountinfo path: space, tab, newline
// and backslash.
func unescape(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+4 <= len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(n))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

// locate returns where the group own of m's hierarchy is seen, if it is.
func (m mount) locate(own string) (string, bool) {
	// A path that begins with /.. is outside of the cgroup namespace: the part
	// that would be needed to compare the two is not known here.
	if outside(own) || outside(m.root) || !strings.HasPrefix(own, "/") {
		return "", false
	}
	root := strings.TrimSuffix(m.root, "/")
	if own != root && !strings.HasPrefix(own, root+"/") {
		return "", false
	}
	return path.Join(m.point, own[len(root):]), true
}

func outside(p string) bool { return p == "/.." || strings.HasPrefix(p, "/../") }

// open opens the group at p and makes sure that it is in the hierarchy of m: a
// later mount can hide this one.
func (m mount) open(p string) (dir, error) {
	fd, err := openat(unix.AT_FDCWD, p, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return dir{}, fmt.Errorf("open the launcher's cgroup %s: %w", p, err)
	}
	var fs unix.Statfs_t
	var st unix.Stat_t
	err = retry(func() error { return unix.Fstatfs(fd, &fs) })
	if err == nil {
		err = retry(func() error { return unix.Fstat(fd, &st) })
	}
	if err == nil && (fs.Type != unix.CGROUP_SUPER_MAGIC && fs.Type != unix.CGROUP2_SUPER_MAGIC || st.Dev != m.dev) {
		err = fmt.Errorf("is hidden by another file system: %w", unix.ENOENT)
	}
	if err != nil {
		unix.Close(fd)
		return dir{}, fmt.Errorf("open the launcher's cgroup %s: %w", p, err)
	}
	return dir{fd, p}, nil
}

// A mountTable is what /proc/thread-self/mountinfo says around cgroups. The file
// stays open, since the kernel tells by poll whether it would say anything else
// now (proc_pid_mountinfo(5)): to format it takes longer than all the rest of a
// Probe.
type mountTable struct {
	file      *os.File
	namespace unix.Stat_t // that the file is of
	lines     []byte
}

// refresh reads the table if it may have changed or if the calling thread is in
// another mount namespace than last time. It tells whether the lines differ.
func (t *mountTable) refresh() (changed bool, err error) {
	var own unix.Stat_t
	if err := unix.Stat("/proc/thread-self/ns/mnt", &own); err != nil {
		return false, &os.PathError{Op: "stat", Path: "/proc/thread-self/ns/mnt", Err: err}
	}
	// The open file holds its namespace, so that the number is of no other.
	if t.file != nil && own.Ino == t.namespace.Ino && own.Dev == t.namespace.Dev {
		p := []unix.PollFd{{Fd: int32(t.file.Fd()), Events: unix.POLLPRI}}
		if n, err := unix.Poll(p, 0); err == nil && n == 0 {
			return false, nil
		}
	}
	// Not by os.Open: the runtime would poll it, and each change is told once.
	fd, err := unix.Open("/proc/thread-self/mountinfo", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return false, &os.PathError{Op: "open", Path: "/proc/thread-self/mountinfo", Err: err}
	}
	f := os.NewFile(uintptr(fd), "mountinfo")
	table, err := io.ReadAll(f)
	if err != nil {
		f.Close()
		return false, err
	}
	if t.file != nil {
		t.file.Close()
	}
	// Mounts come and go on a host; few of them have to do with cgroups.
	old := t.lines
	t.file, t.namespace, t.lines = f, own, aroundCgroups(table)
	return !bytes.Equal(old, t.lines), nil
}
