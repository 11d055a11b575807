package jail_test

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"example.com/jail/jail"
	"example.com/jail/rootfs"
)

// childrenNamed lists the children of this process whose command has the name.
func childrenNamed(t *testing.T, name string) (pids []int) {
	t.Helper()
	files, _ := filepath.Glob("/proc/self/task/*/children")
	for _, f := range files {
		b, _ := os.ReadFile(f)
		for _, p := range strings.Fields(string(b)) {
			pid, err := strconv.Atoi(p)
			if err != nil {
				t.Fatal(err)
			}
			// An init that was just forked has the forker's name, but does
			// not lead the group.
			if group, _ := syscall.Getpgid(pid); name == "jail-forker" && group != pid {
				continue
			}
			if comm, _ := os.ReadFile("/proc/" + p + "/comm"); string(comm) == name+"\n" {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

// One process forks all jails. Whatever ends it, the next start has another.
func TestForkerIsReplaced(t *testing.T) {
	ok := func() {
		t.Helper()
		if r := run(t, command("/bin/true")); r.Cause != jail.CauseOK {
			t.Fatalf("cause %q: %s", r.Cause, r.Error)
		}
	}
	forker := func() int {
		t.Helper()
		pids := childrenNamed(t, "jail-forker")
		if len(pids) != 1 {
			t.Fatalf("forkers %v", pids)
		}
		return pids[0]
	}
	ok()
	first := forker()
	ok()
	if again := forker(); again != first {
		t.Errorf("forker %d, then %d", first, again)
	}
	// systemd asks all processes of a unit to end, while the launcher still
	// finishes its work.
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1} {
		if err := syscall.Kill(first, sig); err != nil {
			t.Fatal(err)
		}
	}
	ok()
	if again := forker(); again != first {
		t.Errorf("forker %d, then %d", first, again)
	}
	if err := syscall.Kill(first, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	ok()
	if again := forker(); again == first {
		t.Errorf("forker %d was killed", first)
	}
	jail.Settle()
	if left := childrenNamed(t, "jail-forker"); len(left) > 0 {
		t.Errorf("left %v", left)
	}
	ok()
}

// The kernel copies the descriptors of whoever forks: that is never the launcher,
// and no other process gets any that is not meant for it, or holds its directory.
func TestForkerHoldsNoDescriptorOfTheLauncher(t *testing.T) {
	j, err := jail.Start(context.Background(), command("/bin/sleep", "60"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		j.Kill()
		_, _ = j.Wait()
	}()
	for _, name := range []string{"jail-forker", "jail-init"} {
		pids := childrenNamed(t, name)
		if len(pids) == 0 {
			t.Errorf("no %s", name)
		}
		for _, pid := range pids {
			if cwd, err := os.Readlink(fmt.Sprintf("/proc/%d/cwd", pid)); cwd != "/" {
				t.Errorf("%s is in %q, %v", name, cwd, err)
			}
			dir := fmt.Sprintf("/proc/%d/fd/", pid)
			// Pid 1 still closes some when its program has begun.
			await(t, name+" has sockets alone", func() bool {
				fds, _ := os.ReadDir(dir)
				for _, fd := range fds {
					to, _ := os.Readlink(dir + fd.Name())
					if !strings.HasPrefix(to, "socket:") && to != "anon_inode:[signalfd]" {
						return false
					}
				}
				return len(fds) > 0 && len(fds) <= 6
			})
		}
	}
}

// Starts, kills of the forker and its end, all at once: each start succeeds or
// says that it failed, and nothing is left of any (see TestMain).
func TestForkerEndsAmongStarts(t *testing.T) {
	var wg sync.WaitGroup
	stop := make(chan struct{})
	killer := make(chan struct{})
	go func() {
		defer close(killer)
		for {
			select {
			case <-stop:
				return
			default:
			}
			for _, pid := range childrenNamed(t, "jail-forker") {
				_ = syscall.Kill(pid, syscall.SIGKILL)
			}
			jail.Settle()
		}
	}()
	var mu sync.Mutex
	good := 0
	for range 4 {
		wg.Go(func() {
			for range 20 {
				r, err := jail.Run(context.Background(), command("/bin/true"))
				switch {
				case err == nil && r.Cause == jail.CauseOK:
					mu.Lock()
					good++
					mu.Unlock()
				case err == nil:
					t.Errorf("cause %q: %s", r.Cause, r.Error)
				case r.Cause != jail.CauseSetup || r.Setup == nil || r.Setup.Stage != "fork":
					t.Errorf("%v: cause %q", err, r.Cause)
				}
			}
		})
	}
	wg.Wait()
	close(stop)
	<-killer
	t.Logf("%d of 80 started", good)
}

// However often the forker is ended by Settle, no start fails for it.
func TestSettleAmongStarts(t *testing.T) {
	var starts, settles sync.WaitGroup
	stop := make(chan struct{})
	for range 3 {
		settles.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					jail.Settle()
				}
			}
		})
	}
	for range 8 {
		starts.Go(func() {
			for range 25 {
				if r, err := jail.Run(context.Background(), command("/bin/true")); err != nil || r.Cause != jail.CauseOK {
					t.Errorf("cause %q: %v", r.Cause, err)
				}
			}
		})
	}
	starts.Wait()
	close(stop)
	settles.Wait()
}

var noChildrenHelper = registerHelper("nochildren", func(args []string) {
	signal.Ignore(syscall.SIGCHLD)
	s := shell("exit 3")
	s.Templates = &rootfs.Cache{Dir: args[0]}
	for range 3 {
		r, err := jail.Run(context.Background(), s)
		if err != nil {
			panic(err)
		}
		fmt.Println(*r.ExitCode)
	}
	jail.Settle()
})

// With SIGCHLD ignored the kernel reaps everything before the launcher does.
func TestLauncherThatIgnoresItsChildren(t *testing.T) {
	out, err := helperCommand(noChildrenHelper, templates.Dir).CombinedOutput()
	if err != nil || string(out) != "3\n3\n3\n" {
		t.Errorf("%v, %q", err, out)
	}
}
