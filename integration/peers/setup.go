package main

import (
	_ "embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"example.com/jail/rootfs"
)

// setup is what all rows share.
type setup struct {
	// name is this run's own; cgroups, containers and directories begin with
	// it. Not jail-*: cgroups of that name whose maker is dead are cleared
	// away by the project's own collector.
	name string
	// work is a directory of this run, with root in it.
	work, root string
	// denyProgram is a file with the filter of denied system calls.
	denyProgram string
	// jail is the project's command; peers a directory searched before PATH.
	jail, peers string
	cache       *rootfs.Cache
	cgroups     *hierarchies
}

//go:embed payload/payload.c
var payloadSource []byte

func newSetup(jail, peers string) (s *setup, err error) {
	s = &setup{name: fmt.Sprintf("peers-%d", os.Getpid()), jail: jail, peers: peers}
	s.cache = &rootfs.Cache{Dir: "/run/jail-" + s.name}
	if s.cgroups, err = readHierarchies("/proc/self/mountinfo"); err != nil {
		return nil, err
	}
	// Not below /tmp, over which some of the sandboxes mount.
	if s.work, err = os.MkdirTemp("/var/tmp", s.name+"-"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	if err := os.Chmod(s.work, 0o755); err != nil {
		return nil, err
	}
	if err := s.compile(); err != nil {
		return nil, err
	}
	s.root = filepath.Join(s.work, "root")
	if err := s.makeRoot(s.root); err != nil {
		return nil, err
	}
	program, err := denyProgram()
	if err != nil {
		return nil, err
	}
	s.denyProgram = filepath.Join(s.work, "deny.bpf")
	return s, os.WriteFile(s.denyProgram, program, 0o644)
}

// close removes everything that this run has made on the host.
func (s *setup) close() error {
	_, err := s.cache.Drop()
	err = errors.Join(err, s.cgroups.remove(s.name+"-"))
	// Removing through a mount would remove the host's own files.
	mounts, e := os.ReadFile("/proc/self/mountinfo")
	if e != nil || strings.Contains(string(mounts), " "+s.work+"/") {
		return errors.Join(err, fmt.Errorf("%s is left: something is mounted in it, or that cannot be told: %v", s.work, e))
	}
	return errors.Join(err, os.RemoveAll(s.work))
}

func (s *setup) compile() error {
	source := filepath.Join(s.work, "payload.c")
	if err := os.WriteFile(source, payloadSource, 0o644); err != nil {
		return err
	}
	out, err := exec.Command("gcc", "-O2", "-static", "-o", s.hostPayload(), source).CombinedOutput()
	if err != nil {
		return fmt.Errorf("compile the payload: %w: %s", err, out)
	}
	return nil
}

func (s *setup) hostPayload() string { return filepath.Join(s.work, "payload") }

// hostArgv is a command of the root as the host calls it.
func (s *setup) hostArgv(argv []string) []string {
	argv = slices.Clone(argv)
	if argv[0] == payload {
		argv[0] = s.hostPayload()
	}
	return argv
}

// makeRoot makes a root directory: the payload, links for programs of the host's
// /usr, and the places where sandboxes mount.
func (s *setup) makeRoot(dir string) error {
	for _, d := range []string{"bin", "usr", "proc", "dev", "tmp", "sys", "etc", "run", "var"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return err
		}
	}
	return errors.Join(
		os.Link(s.hostPayload(), filepath.Join(dir, payload)),
		os.WriteFile(filepath.Join(dir, "dev/null"), nil, 0o666),
		os.WriteFile(filepath.Join(dir, "etc/os-release"), []byte("ID=peers\n"), 0o644), // nspawn asks for it
		os.Symlink("usr/lib", filepath.Join(dir, "lib")),
		os.Symlink("usr/lib64", filepath.Join(dir, "lib64")),
	)
}

var errNotInstalled = errors.New("not installed")

// look finds a peer's program.
func (s *setup) look(name string) (string, error) {
	if s.peers != "" {
		if path, err := exec.LookPath(filepath.Join(s.peers, name)); err == nil {
			return path, nil
		}
	}
	path, err := exec.LookPath(name)
	if err != nil {
		return "", fmt.Errorf("%s: %w", name, errNotInstalled)
	}
	return path, nil
}
