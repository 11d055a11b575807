package cgroup_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os/exec"
	"syscall"
	"time"

	"example.com/jail/cgroup"
)

// A run with limits, from the refusal of what the host cannot enforce to the
// evidence of what it did.
func Example() {
	host, err := cgroup.Probe()
	if err != nil {
		log.Fatal(err)
	}
	leaf, err := host.NewLeaf("jail-0001", cgroup.Limits{Memory: 64 << 20, Pids: 32, CPUTime: true})
	var u *cgroup.UnsupportedError
	if errors.As(err, &u) {
		for _, s := range u.Missing {
			fmt.Printf("%s: %v\n\tfix: %s\n", s.Controller, s.Err, s.Fix)
		}
		return
	}
	if err != nil {
		log.Fatal(err)
	}
	defer func() {
		if err := leaf.Remove(context.Background()); err != nil {
			log.Print(err)
		}
	}()
	for _, a := range leaf.Applied() {
		fmt.Printf("%s: asked for %d, is %d\n", a.File, a.Wrote, a.Read)
	}

	cmd := exec.Command("/usr/libexec/init") // has a single thread, and writes "0" to fds 3 and up
	cmd.ExtraFiles = leaf.Tasks()
	if dir := leaf.Dir(); dir != nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd())}
	}
	if err := cmd.Start(); err != nil {
		log.Print(err)
		return
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	select {
	case <-ended:
	case <-leaf.OOM():
	case <-time.After(30 * time.Second):
	}
	if err := leaf.Kill(); err != nil {
		log.Print(err)
	}
	stats, err := leaf.Stats()
	if err != nil {
		log.Print(err)
	}
	if stats.OOMKills > 0 {
		scope, err := leaf.Scope()
		fmt.Println("out of memory:", scope, err)
	}
	fmt.Println("peak", stats.MemoryPeak, "user", stats.CPUUser)
}
