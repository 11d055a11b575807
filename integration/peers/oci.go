package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// runtimeRow is an OCI runtime: each start is a container made from a bundle,
// run and deleted.
type runtimeRow struct {
	command
	path  string
	flags []string
	apart *apart

	mu      sync.Mutex
	n       int
	bundles map[string]string // by command line
	ids     [maxAtOnce]string
}

func openRunc(s *setup) (starter, error) { return openRuntime(s, "runc") }
func openRunsc(s *setup) (starter, error) {
	return openRuntime(s, "runsc", "--network=none", "--platform=systrap")
}

func openCrun(s *setup) (starter, error) {
	st, err := openRuntime(s, "crun")
	if err != nil || s.cgroups.v2 == "" || len(s.cgroups.v1) == 0 {
		return st, err
	}
	// It refuses hybrid hosts; one that shows no cgroup v2 it takes.
	a, err := newApart(func() error { return unix.Mount("tmpfs", s.cgroups.v2, "tmpfs", 0, "") })
	if err != nil {
		return nil, err
	}
	r := st.(*runtimeRow)
	r.apart, r.fork = a, a.do
	return r, nil
}

func openRuntime(s *setup, name string, flags ...string) (starter, error) {
	path, err := s.look(name)
	if err != nil {
		return nil, err
	}
	r := &runtimeRow{path: path, bundles: map[string]string{}}
	r.flags = append([]string{"--root", filepath.Join(s.work, name+"-state")}, flags...)
	r.setup = s
	r.argv = func(slot int, argv []string) ([]string, error) {
		r.mu.Lock()
		defer r.mu.Unlock()
		key := strings.Join(argv, "\x00")
		bundle := r.bundles[key]
		if bundle == "" {
			bundle = filepath.Join(s.work, fmt.Sprintf("%s-bundle-%d", name, len(r.bundles)))
			if err := s.makeBundle(bundle, argv); err != nil {
				return nil, err
			}
			r.bundles[key] = bundle
		}
		r.n++
		r.ids[slot] = fmt.Sprintf("%s-%s-%d", s.name, name, r.n)
		return r.line("run", "--bundle", bundle, r.ids[slot]), nil
	}
	r.done = func(slot int) { _ = r.delete(r.ids[slot]) }
	return r, nil
}

func (r *runtimeRow) line(args ...string) []string {
	return slices.Concat([]string{r.path}, r.flags, args)
}

func (r *runtimeRow) delete(id string) error {
	line := r.line("delete", "--force", id)
	cmd := exec.Command(line[0], line[1:]...)
	if r.fork != nil {
		if err := r.fork(cmd.Start); err != nil {
			return err
		}
		return cmd.Wait()
	}
	return cmd.Run()
}

// close deletes what containers are left.
func (r *runtimeRow) close() error {
	state := r.flags[1]
	left, err := os.ReadDir(state)
	if errors.Is(err, os.ErrNotExist) {
		err = nil
	}
	for _, e := range left {
		if e.IsDir() && strings.HasPrefix(e.Name(), r.setup.name) {
			err = errors.Join(err, r.delete(e.Name()))
		}
	}
	// runsc keeps a network namespace mounted there.
	if e := unix.Unmount(filepath.Join(state, "null-netns"), 0); e != nil && e != unix.ENOENT && e != unix.EINVAL {
		err = errors.Join(err, e)
	}
	if r.apart != nil {
		r.apart.close()
	}
	return err
}

// makeBundle writes an OCI bundle that runs a command of the root.
func (s *setup) makeBundle(dir string, argv []string) error {
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	memory, pids, errno := int64(memoryLimit), int64(pidsLimit), uint(unix.EPERM)
	spec := specs.Spec{
		Version: "1.0.2",
		Process: &specs.Process{
			Args: argv, Cwd: "/", Env: []string{"PATH=/usr/bin:/bin"}, NoNewPrivileges: true,
			Capabilities: &specs.LinuxCapabilities{},
		},
		Root:     &specs.Root{Path: s.root, Readonly: true},
		Hostname: "peer",
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc"},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "mode=755"}},
			{Destination: "/usr", Type: "bind", Source: "/usr", Options: []string{"rbind", "ro"}},
			{Destination: "/tmp", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "nodev", fmt.Sprintf("size=%d", tmpLimit)}},
		},
		Linux: &specs.Linux{
			Namespaces: []specs.LinuxNamespace{
				{Type: specs.PIDNamespace}, {Type: specs.MountNamespace}, {Type: specs.IPCNamespace}, {Type: specs.UTSNamespace}, {Type: specs.NetworkNamespace},
			},
			Resources: &specs.LinuxResources{Memory: &specs.LinuxMemory{Limit: &memory}, Pids: &specs.LinuxPids{Limit: &pids}},
			Seccomp: &specs.LinuxSeccomp{
				DefaultAction: specs.ActAllow, Architectures: []specs.Arch{specs.ArchX86_64},
				Syscalls: []specs.LinuxSyscall{{Names: denied, Action: specs.ActErrno, ErrnoRet: &errno}},
			},
		},
	}
	b, err := json.Marshal(spec)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "config.json"), b, 0o644)
}
