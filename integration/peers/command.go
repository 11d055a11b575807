package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// command starts a sandbox by running a program that makes one and waits.
type command struct {
	setup *setup
	// argv is the whole command line for a command of the root.
	argv func(slot int, argv []string) ([]string, error)
	env  []string
	// file is opened for each start and becomes the tool's fd 3.
	file string
	// fork, if set, calls a function on a thread of its own kind.
	fork func(func() error) error
	// done, if set, cleans up after a start whose exit code is not zero.
	done func(slot int)
}

// newCommand makes a starter whose command line is a fixed one, with the
// command of the root behind it.
func newCommand(s *setup, fixed ...string) *command {
	return &command{setup: s, argv: func(_ int, argv []string) ([]string, error) {
		return slices.Concat(fixed, argv), nil
	}}
}

func (c *command) close() error { return nil }

func (c *command) start(slot int, argv []string, out *output) error {
	line, err := c.argv(slot, argv)
	if err != nil {
		return err
	}
	cmd := exec.Command(line[0], line[1:]...)
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH")}, c.env...)
	// A terminal's interrupt is for this process, which ends between starts.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if c.file != "" {
		f, err := os.Open(c.file)
		if err != nil {
			return err
		}
		defer f.Close()
		cmd.ExtraFiles = []*os.File{f}
	}
	// A file, so that a message costs nothing unless somebody reads it.
	stderr, err := os.OpenFile(filepath.Join(c.setup.work, fmt.Sprintf("stderr-%d", slot)), os.O_CREATE|os.O_RDWR|os.O_APPEND|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer stderr.Close()
	cmd.Stderr = stderr

	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	cmd.Stdout = w
	launch := cmd.Start
	if c.fork != nil {
		launch = func() error { return c.fork(cmd.Start) }
	}
	err = launch()
	w.Close()
	if err != nil {
		return err
	}
	_ = r.SetReadDeadline(time.Now().Add(timeout + time.Second))
	readErr := out.readAll(r)
	if readErr != nil {
		_ = unix.Kill(-cmd.Process.Pid, unix.SIGKILL)
	}
	err = cmd.Wait()
	if err != nil && c.done != nil {
		c.done(slot)
	}
	var ended *exec.ExitError
	if errors.As(err, &ended) {
		err = nil
		if out.exit = ended.ExitCode(); out.exit != 0 {
			err = fmt.Errorf("%w%s", ended, lastLine(stderr.Name()))
		}
	}
	return errors.Join(readErr, err)
}

// lastLine is what a tool said last, to be put behind an error.
func lastLine(file string) string {
	b, err := os.ReadFile(file)
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	last := strings.TrimSpace(lines[len(lines)-1])
	if err != nil || last == "" {
		return ""
	}
	if len(last) > 200 {
		last = last[:200] + "..."
	}
	return ": " + last
}

func openExec(s *setup) (starter, error) {
	return &command{setup: s, argv: func(_ int, argv []string) ([]string, error) { return s.hostArgv(argv), nil }}, nil
}

func openBwrap(s *setup) (starter, error) {
	path, err := s.look("bwrap")
	if err != nil {
		return nil, err
	}
	c := newCommand(s, path, "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL",
		"--ro-bind", s.root, "/", "--ro-bind", "/usr", "/usr", "--dev-bind", "/dev/null", "/dev/null",
		"--proc", "/proc", "--size", fmt.Sprint(tmpLimit), "--tmpfs", "/tmp", "--seccomp", "3", "--")
	c.file = s.denyProgram
	return c, nil
}

func openMinijail(s *setup) (starter, error) {
	path, err := s.look("minijail0")
	if err != nil {
		return nil, err
	}
	return newCommand(s, path, "-P", s.root, "-b", s.root+",/", "-v", "-p", "-l", "-e", "--uts", "-n", "-c", "0", "--ambient",
		"--seccomp-bpf-binary="+s.denyProgram, "-b", "/usr", "-b", "/dev/null",
		"-k", "proc,/proc,proc,0xe", "-t16M",
		"-R", fmt.Sprintf("%d,%d,%d", unix.RLIMIT_AS, memoryLimit, memoryLimit), "-T", "static", "--"), nil
}

func openNsjail(s *setup) (starter, error) {
	path, err := s.look("nsjail")
	if err != nil {
		return nil, err
	}
	line := []string{path, "-Mo", "-Q", "--chroot", s.root, "-R", "/usr", "-R", "/dev/null",
		"-m", fmt.Sprintf("none:/tmp:tmpfs:size=%d", tmpLimit), "--rlimit_as", "4096",
		"--cgroup_mem_max", fmt.Sprint(memoryLimit), "--cgroup_pids_max", fmt.Sprint(pidsLimit),
		"--seccomp_string", denyKafel()}
	if v1 := s.cgroups.v1["memory"]; v1 != "" && s.cgroups.v1["pids"] != "" {
		line = append(line, "--cgroup_mem_parent", s.name+"-nsjail", "--cgroup_pids_parent", s.name+"-nsjail")
		// They have to be there before; setup.close removes them.
		for _, g := range []string{v1, s.cgroups.v1["pids"]} {
			if err := os.Mkdir(filepath.Join(g, s.name+"-nsjail"), 0o755); err != nil {
				return nil, err
			}
		}
	} else {
		line = append(line, "--use_cgroupv2")
	}
	return newCommand(s, append(line, "--")...), nil
}

func openFirejail(s *setup) (starter, error) {
	path, err := s.look("firejail")
	if err != nil {
		return nil, err
	}
	c := &command{setup: s, argv: func(_ int, argv []string) ([]string, error) {
		return slices.Concat([]string{path, "--quiet", "--noprofile", "--net=none", "--seccomp", "--caps.drop=all", "--nonewprivs",
			"--ipc-namespace", "--hostname=peer", "--read-only=/", "--private-tmp", "--keep-var-tmp",
			fmt.Sprintf("--rlimit-as=%d", memoryLimit)}, s.hostArgv(argv)), nil
	}}
	return c, nil
}

func openNspawn(s *setup) (starter, error) {
	path, err := s.look("systemd-nspawn")
	if err != nil {
		return nil, err
	}
	// It locks its directory, so each slot has one of its own.
	var mu sync.Mutex
	roots := map[int]string{}
	return &command{setup: s, argv: func(slot int, argv []string) ([]string, error) {
		mu.Lock()
		defer mu.Unlock()
		if roots[slot] == "" {
			dir := filepath.Join(s.work, fmt.Sprintf("%s-%d", s.name, slot))
			if err := s.makeRoot(dir); err != nil {
				return nil, err
			}
			roots[slot] = dir
		}
		return slices.Concat([]string{path, "-q", "--register=no", "--keep-unit", "-D", roots[slot], "--read-only",
			"--private-network", "--pipe", "--bind-ro=/usr", "--no-new-privileges=yes", "--drop-capability=all", "--"}, argv), nil
	}}, nil
}

// apart runs functions on one thread that has a mount namespace of its own, in
// which prepare has changed what it needs. What such a function forks is in that
// namespace; the rest of the process is not.
type apart struct{ calls chan func() }

func newApart(prepare func() error) (*apart, error) {
	a := &apart{calls: make(chan func())}
	ready := make(chan error)
	go func() {
		// Never unlocked: the thread ends with the goroutine.
		runtime.LockOSThread()
		err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS)
		if err == nil {
			err = unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
		}
		if err == nil {
			err = prepare()
		}
		ready <- err
		if err != nil {
			return
		}
		for f := range a.calls {
			f()
		}
	}()
	if err := <-ready; err != nil {
		return nil, fmt.Errorf("mount namespace of its own: %w", err)
	}
	return a, nil
}

func (a *apart) do(f func() error) error {
	done := make(chan error)
	a.calls <- func() { done <- f() }
	return <-done
}

func (a *apart) close() { close(a.calls) }
