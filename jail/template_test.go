package jail_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"example.com/jail/jail"
	"example.com/jail/rootfs"
)

// A template that has gone bad under its name is built anew, unseen by the
// caller. Removing a directory of the root and making it again takes the mount
// over it away from every template, and may give it its old inode number.
func TestBadTemplateIsBuiltAnew(t *testing.T) {
	root := t.TempDir()
	for _, d := range []string{"bin", "proc", "dev", "tmp"} {
		if err := os.Mkdir(filepath.Join(root, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile("/usr/bin/busybox")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "bin/busybox"), b, 0o755); err != nil {
		t.Fatal(err)
	}
	cache := &rootfs.Cache{Dir: templates.Dir}
	s := command("/bin/busybox", "true")
	s.Root, s.Templates = rootfs.Config{Dir: root}, cache
	if r := run(t, s); r.Cause != jail.CauseOK {
		t.Fatalf("cause %q: %s", r.Cause, r.Error)
	}
	same := false
	for range 20 {
		var before, after unix.Stat_t
		proc := filepath.Join(root, "proc")
		if err := errors.Join(unix.Stat(proc, &before), os.Remove(proc), os.Mkdir(proc, 0o755), unix.Stat(proc, &after)); err != nil {
			t.Fatal(err)
		}
		if same = before.Ino == after.Ino; same {
			break
		}
	}
	if !same {
		t.Log("this file system gave no inode number twice: the new template has a new name")
	}
	if r := run(t, s); r.Cause != jail.CauseOK {
		t.Errorf("after the directory was replaced: cause %q: %s", r.Cause, r.Error)
	}

	// What is wrong with the root itself stays wrong, and is said.
	if err := os.Remove(filepath.Join(root, "proc")); err != nil {
		t.Fatal(err)
	}
	var setup *jail.SetupError
	if _, err := jail.Run(context.Background(), s); !errors.As(err, &setup) || setup.Stage != "mount" {
		t.Errorf("without /proc: %v", err)
	}
}
