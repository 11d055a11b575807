package main

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	systemd "github.com/coreos/go-systemd/v22/dbus"
	"github.com/godbus/dbus/v5"

	"example.com/jail/cgroup"
)

// scopeTimeout bounds what systemd may take to make a scope.
const scopeTimeout = 10 * time.Second

// ownScope moves this process into a scope of its own, with its children's
// cgroups delegated to it, if it shares its cgroup v2 with a shell, say: below
// such a group nothing can be limited. It is what systemd-run --scope does, in
// the slice that the process is in, whose limits go on to hold. Without systemd
// it does nothing, and the refusal says what to do.
func ownScope(ctx context.Context) error {
	host, err := cgroup.Probe()
	if err != nil {
		return nil // told when the host is looked at for a run
	}
	group, crowded := host.Crowded()
	if _, err := os.Stat("/run/systemd/system"); !crowded || err != nil || os.Geteuid() != 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, scopeTimeout)
	defer cancel()
	name := fmt.Sprintf("jail-%d.scope", os.Getpid())
	if err := startScope(ctx, name, sliceOf(group)); err != nil {
		return fmt.Errorf("ask systemd for %s: %w", name, err)
	}
	return nil
}

func startScope(ctx context.Context, name, slice string) error {
	conn, err := systemd.NewSystemdConnectionContext(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	done := make(chan string, 1)
	properties := []systemd.Property{
		systemd.PropDescription("jail"),
		systemd.PropSlice(slice),
		systemd.PropPids(uint32(os.Getpid())),
		{Name: "Delegate", Value: dbus.MakeVariant(true)},
		{Name: "CollectMode", Value: dbus.MakeVariant("inactive-or-failed")},
	}
	if _, err := conn.StartTransientUnitContext(ctx, name, "fail", properties, done); err != nil {
		return err
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case result := <-done:
		if result != "done" {
			return fmt.Errorf("job ended as %q", result)
		}
		return nil
	}
}

// sliceOf returns the slice of systemd that a group is in. Slices further down
// belong to a user's own manager.
func sliceOf(group string) string {
	slice := "-.slice"
	for _, name := range strings.Split(strings.Trim(group, "/"), "/") {
		if !strings.HasSuffix(name, ".slice") {
			break
		}
		slice = name
	}
	return slice
}
