package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"github.com/opencontainers/runtime-spec/specs-go"
)

func oci(path, state, bundle string) func(context.Context) error {
	n := 0
	// Not jail-*: cgroups of that name whose launcher is dead are cleared away.
	return func(ctx context.Context) error {
		n++
		return run(nil, path, "--root", state, "run", "--bundle", bundle, fmt.Sprintf("bench-%d-%d", os.Getpid(), n))(ctx)
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
