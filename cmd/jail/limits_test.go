package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"example.com/jail/rootfs"
)

// jailCommand is the command under test with templates of the test's own.
func jailCommand(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cache := fmt.Sprintf("/run/jail-test-limits-%d", os.Getpid())
	t.Cleanup(func() { _, _ = (&rootfs.Cache{Dir: cache}).Drop() })
	// By this name the test binary is the command (see TestMain).
	name := filepath.Join(t.TempDir(), "jail")
	if err := os.Symlink(exe, name); err != nil {
		t.Fatal(err)
	}
	c := exec.Command(name, args...)
	c.Env = append(os.Environ(), templatesEnv+"="+cache)
	return c
}

// --io takes a path as well: the number of the disk is looked up.
func TestIOByPath(t *testing.T) {
	disk, number := someDisk(t)
	for _, device := range []string{disk, number} {
		c := jailCommand(t, "run", "--io", device+":rbps=1TiB,wiops=1000000000", "--report", "-", "--", "true")
		out, err := c.CombinedOutput()
		if want := `"asked_text":"` + number + `:rbps=1099511627776,wiops=1000000000","enforced_by"`; err != nil || !strings.Contains(string(out), want) {
			t.Errorf("%s: %v, %s, want %s", device, err, out, want)
		}
		if want := `"read_back_text":"` + number + `:rbps=1099511627776,wiops=1000000000"`; !strings.Contains(string(out), want) {
			t.Errorf("%s: %s, want %s", device, out, want)
		}
	}
}

// someDisk returns the path and the number of the first disk of this host.
func someDisk(t *testing.T) (path, number string) {
	t.Helper()
	disks, err := filepath.Glob("/sys/block/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range disks {
		name := "/dev/" + filepath.Base(d)
		if number, err := blockDevice(name); err == nil {
			return name, number
		}
	}
	t.Fatalf("none of %v has a device in /dev: nothing is tested", disks)
	return "", ""
}

// Beyond its own hard limit a launcher gives only what the host lets it raise.
func TestOpenFilesBeyondTheHardLimit(t *testing.T) {
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&head, &data[0]); err != nil {
		t.Fatal(err)
	}
	mayRaise := data[0].Effective&(1<<unix.CAP_SYS_RESOURCE) != 0
	c := jailCommand(t, "run", "--open-files", "600", "--", "sh", "-c", "ulimit -n")
	c.Path, c.Args = "/usr/bin/prlimit", append([]string{"prlimit", "--nofile=512:512"}, c.Args...)
	var out, errs bytes.Buffer
	c.Stdout, c.Stderr = &out, &errs
	err := c.Run()
	t.Logf("may raise: %t, %v", mayRaise, err)
	switch {
	case mayRaise && (err != nil || out.String() != "600\n"):
		t.Errorf("%v, printed %q%s", err, out.String(), errs.String())
	case !mayRaise && (err == nil || !strings.Contains(errs.String(), "open_files: the launcher's own hard limit is 512")):
		t.Errorf("%v, printed %q%s", err, out.String(), errs.String())
	}
}
