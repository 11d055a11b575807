package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// The disks in the order in which the machine has them.
const (
	rootDisk   = "/dev/vda"
	inDisk     = "/dev/vdb"
	outDisk    = "/dev/vdc"
	swapDisk   = "/dev/vdd"
	outputPort = "/dev/ttyS1"

	cgroupRoot = "/sys/fs/cgroup"
	initScope  = "/init.scope"
)

// guestInit is the first process of the guest. What goes wrong is told on the
// console; the host sees that no result has come.
func guestInit() {
	if err := guest(); err != nil {
		fmt.Println("init:", err)
	}
	unix.Sync()
	if err := unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF); err != nil {
		fmt.Println("init: power off:", err)
	}
	select {} // the first process may not end
}

func guest() error {
	data, err := os.ReadFile("/" + initrdJob)
	if err != nil {
		return err
	}
	var j job
	if err := json.Unmarshal(data, &j); err != nil {
		return err
	}
	for _, step := range []func() error{insertModules, mountRoot, mountRest, network, fetch, swap} {
		if err := step(); err != nil {
			return err
		}
	}
	dir, err := j.makeCgroup()
	if err != nil {
		return err
	}
	defer dir.Close()
	before, err := snapshot()
	if err != nil {
		return err
	}
	port, err := openPort()
	if err != nil {
		return err
	}
	defer port.Close()
	code, err := j.execute(dir, port)
	if err != nil {
		return err
	}
	after, err := snapshot()
	if err != nil {
		return err
	}
	if lines := append(leftProcesses(dir.Name()), difference(before, after)...); j.Clean && len(lines) > 0 {
		fmt.Fprintln(port, "vm: left behind or changed:")
		for _, line := range lines {
			fmt.Fprintln(port, "vm:", line)
		}
		if code == 0 {
			code = 1
		}
	}
	// Waits until all of it is out.
	if err := unix.IoctlSetInt(int(port.Fd()), unix.TCSBRK, 1); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(resultDir, exitName), []byte(strconv.Itoa(code)), 0o600); err != nil {
		return err
	}
	out, err := os.OpenFile(outDisk, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	return errors.Join(pack(out, [][2]string{{resultDir, "/"}}), out.Sync(), out.Close())
}

// insertModules inserts the modules in any order in which they can be: one
// whose symbols are missing yet fails with ENOENT and has another turn.
func insertModules() error {
	names, err := filepath.Glob("/" + initrdModules + "/*")
	for len(names) > 0 && err == nil {
		var later []string
		var missing error
		for _, name := range names {
			switch e := insertModule(name); {
			case errors.Is(e, unix.ENOENT):
				later, missing = append(later, name), e
			case e != nil && !errors.Is(e, unix.EEXIST):
				err = errors.Join(err, e)
			}
		}
		if len(later) == len(names) {
			return missing
		}
		names = later
	}
	return err
}

func insertModule(name string) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	flags := 0
	if !strings.HasSuffix(name, ".ko") {
		flags = unix.MODULE_INIT_COMPRESSED_FILE
	}
	if err := unix.FinitModule(int(f.Fd()), "", flags); err != nil {
		return fmt.Errorf("insert module %s: %w", name, err)
	}
	return nil
}

type mount struct {
	source, target, fs string
	flags              uintptr
	data               string
}

func (m mount) make() error {
	if err := os.MkdirAll(m.target, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(m.source, m.target, m.fs, m.flags, m.data); err != nil {
		return fmt.Errorf("mount %s on %s: %w", m.fs, m.target, err)
	}
	return nil
}

const plain = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC

// mountRoot makes the root disk the root. It is mounted over the first file
// system, which cannot be pivoted away from.
func mountRoot() error {
	if err := (mount{"dev", "/dev", "devtmpfs", unix.MS_NOSUID, "mode=755"}).make(); err != nil {
		return err
	}
	for _, disk := range []string{rootDisk, inDisk, outDisk, swapDisk} {
		for tries := 0; ; tries++ {
			if _, err := os.Stat(disk); err == nil {
				break
			} else if tries == 500 {
				return fmt.Errorf("no disk after 10 s: %w", err)
			}
			time.Sleep(20 * time.Millisecond)
		}
	}
	const newRoot = "/newroot"
	if err := (mount{rootDisk, newRoot, "ext4", 0, ""}).make(); err != nil {
		return err
	}
	if err := unix.Mount("/dev", newRoot+"/dev", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("move /dev: %w", err)
	}
	if err := os.Chdir(newRoot); err != nil {
		return err
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("move the root: %w", err)
	}
	if err := unix.Chroot("."); err != nil {
		return err
	}
	return os.Chdir("/")
}

// mountRest mounts what systemd mounts, and shares all of it, as systemd does.
func mountRest() error {
	for _, m := range []mount{
		{"proc", "/proc", "proc", plain, ""},
		{"sysfs", "/sys", "sysfs", plain, ""},
		{"cgroup2", cgroupRoot, "cgroup2", plain, "nsdelegate,memory_recursiveprot"},
		{"devpts", "/dev/pts", "devpts", unix.MS_NOSUID | unix.MS_NOEXEC, "mode=620,gid=5,ptmxmode=666"},
		{"tmpfs", "/dev/shm", "tmpfs", unix.MS_NOSUID | unix.MS_NODEV, "mode=1777"},
		{"mqueue", "/dev/mqueue", "mqueue", plain, ""},
		{"tmpfs", "/run", "tmpfs", unix.MS_NOSUID | unix.MS_NODEV, "mode=755,size=20%"},
		{"tmpfs", "/tmp", "tmpfs", unix.MS_NOSUID | unix.MS_NODEV, "mode=1777"},
	} {
		if err := m.make(); err != nil {
			return err
		}
	}
	for link, to := range map[string]string{"/dev/fd": "/proc/self/fd", "/dev/stdin": "/proc/self/fd/0", "/dev/stdout": "/proc/self/fd/1", "/dev/stderr": "/proc/self/fd/2"} {
		if err := os.Symlink(to, link); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	if err := unix.Mount("", "/", "", unix.MS_SHARED|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("share the mounts: %w", err)
	}
	return os.MkdirAll(resultDir, 0o755)
}

// network gives the guest a name and its loopback device.
func network() error {
	if err := unix.Sethostname([]byte("vm")); err != nil {
		return err
	}
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(s)
	lo, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	lo.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	if err := unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, lo); err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	return nil
}

// fetch unpacks the files that the host has sent.
func fetch() error {
	in, err := os.Open(inDisk)
	if err != nil {
		return err
	}
	defer in.Close()
	return unpack(in, "/")
}

// swap turns swap on, so that a memory limit that forgets swap is found out.
func swap() error {
	for _, args := range [][]string{{"/usr/sbin/mkswap", swapDisk}, {"/usr/sbin/swapon", swapDisk}} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", args[0], err, out)
		}
	}
	return nil
}

// makeCgroup makes the program's cgroup, with every controller in it, and moves
// init away from the root, as systemd does.
func (j *job) makeCgroup() (*os.File, error) {
	scope := cgroupRoot + initScope
	if err := os.Mkdir(scope, 0o755); err != nil {
		return nil, err
	}
	if err := os.WriteFile(scope+"/cgroup.procs", []byte("0"), 0); err != nil {
		return nil, err
	}
	controllers, err := os.ReadFile(cgroupRoot + "/cgroup.controllers")
	if err != nil {
		return nil, err
	}
	all := "+" + strings.Join(strings.Fields(string(controllers)), " +")
	dir := cgroupRoot
	for name := range strings.FieldsFuncSeq(j.Cgroup, func(r rune) bool { return r == '/' }) {
		if err := os.WriteFile(dir+"/cgroup.subtree_control", []byte(all), 0); err != nil {
			return nil, err
		}
		dir += "/" + name
		if err := os.Mkdir(dir, 0o755); err != nil {
			return nil, err
		}
	}
	return os.Open(dir)
}

// execute runs the program to its end and returns its exit code, as a shell
// would: 128 plus the signal that ended it. Meanwhile it reaps the orphans.
func (j *job) execute(cgroup *os.File, port io.Writer) (int, error) {
	null, err := os.Open(os.DevNull)
	if err != nil {
		return 0, err
	}
	defer null.Close()
	r, w, err := os.Pipe()
	if err != nil {
		return 0, err
	}
	defer r.Close()
	// What systemd gives to a service.
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 1024, Max: 524288}); err != nil {
		return 0, err
	}
	pid, err := syscall.ForkExec(j.Args[0], j.Args, &syscall.ProcAttr{
		Dir:   j.Dir,
		Env:   append([]string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin", "HOME=/root", "LANG=C.UTF-8"}, j.Env...),
		Files: []uintptr{null.Fd(), w.Fd(), w.Fd()},
		Sys:   &syscall.SysProcAttr{Setsid: true, UseCgroupFD: true, CgroupFD: int(cgroup.Fd())},
	})
	w.Close()
	if err != nil {
		return 0, fmt.Errorf("start %s: %w", j.Args[0], err)
	}
	copied := make(chan error, 1)
	go func() {
		_, err := io.Copy(port, r)
		copied <- err
	}()
	status, err := reapUntil(pid)
	if err != nil {
		return 0, err
	}
	// What the program left running can hold the pipe open.
	select {
	case err = <-copied:
	case <-time.After(2 * time.Second):
		fmt.Fprintln(port, "vm: the output is still open after the program's end")
	}
	if status.Signaled() {
		return 128 + int(status.Signal()), err
	}
	return status.ExitStatus(), err
}

// openPort opens the serial port for the program's output, to pass bytes as
// they are.
func openPort() (*os.File, error) {
	port, err := os.OpenFile(outputPort, os.O_WRONLY|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, err
	}
	t, err := unix.IoctlGetTermios(int(port.Fd()), unix.TCGETS)
	if err == nil {
		t.Oflag &^= unix.OPOST
		err = unix.IoctlSetTermios(int(port.Fd()), unix.TCSETS, t)
	}
	if err != nil {
		port.Close()
		return nil, fmt.Errorf("set up %s: %w", outputPort, err)
	}
	return port, nil
}

// reapUntil reaps every child, also adopted ones, until pid has ended.
func reapUntil(pid int) (unix.WaitStatus, error) {
	for {
		var status unix.WaitStatus
		ended, err := unix.Wait4(-1, &status, 0, nil)
		switch {
		case err == unix.EINTR:
		case err != nil:
			return 0, err
		case ended == pid:
			return status, nil
		}
	}
}

// snapshot lists the mounts with their options and the cgroups. The options of
// the cgroup mount are the whole hierarchy's: a mount of it elsewhere, in a
// mount namespace of its own, can change them.
func snapshot() (lines []string, err error) {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(mounts)) {
		lines = append(lines, "mount "+strings.TrimSpace(line))
	}
	err = filepath.WalkDir(cgroupRoot, func(p string, e fs.DirEntry, err error) error {
		if err == nil && e.IsDir() && e.Name() != launcherName {
			lines = append(lines, "cgroup "+p)
		}
		return err
	})
	return lines, err
}

// launcherName is a cgroup that stays: a launcher moves there to make room for
// its jails (see package cgroup).
const launcherName = "jail-launcher"

// difference lists what is in one list only.
func difference(before, after []string) (lines []string) {
	for _, l := range before {
		if !slices.Contains(after, l) {
			lines = append(lines, "gone: "+l)
		}
	}
	for _, l := range after {
		if !slices.Contains(before, l) {
			lines = append(lines, "new: "+l)
		}
	}
	return lines
}

// leftProcesses describes the processes in the program's cgroup and below.
func leftProcesses(dir string) (left []string) {
	if dir == cgroupRoot {
		return nil // the kernel's threads are there
	}
	_ = filepath.WalkDir(dir, func(p string, e fs.DirEntry, err error) error {
		if err == nil && e.Name() == "cgroup.procs" {
			pids, _ := os.ReadFile(p)
			for _, pid := range strings.Fields(string(pids)) {
				line, _ := os.ReadFile("/proc/" + pid + "/cmdline")
				left = append(left, fmt.Sprintf("process %s in %s: %q", pid, filepath.Dir(p), line))
			}
		}
		return nil
	})
	return left
}
