package main

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// posture is what a sandbox really had on: seen by a program inside, but for the
// host's uid and the limits, which are read from outside while it sleeps.
type posture struct {
	// Kernel is not empty if the program saw another kernel than the host's.
	Kernel     string   `json:"kernel,omitempty"`
	Namespaces []string `json:"namespaces"` // those that are not the host's
	// Root is the error of a write to /, "writable" without one.
	Root    string `json:"root"`
	NNP     string `json:"no_new_privs"`
	Seccomp string `json:"seccomp"`
	CapEff  string `json:"cap_eff"`
	CapBnd  string `json:"cap_bnd"`
	UID     string `json:"uid"`
	HostUID string `json:"host_uid"`
	Memory  string `json:"memory"`
	// Hog tells whether a program could take twice the limit.
	Hog       bool   `json:"took_twice_the_limit"`
	PIDs      string `json:"pids"`
	Processes string `json:"processes_seen"`
	HostSeen  bool   `json:"host_process_seen"`
}

const (
	none         = "none"
	addressSpace = "RLIMIT_AS "
)

// limit is the memory limit for a table: one that did not hold is none.
func (p *posture) limit() string {
	switch {
	case p == nil:
		return "unknown"
	case p.Hog && p.Memory != none:
		return none + " (" + p.Memory + " did not hold)"
	}
	return p.Memory
}

// holdFor is how long a program sleeps at most so that it can be looked at, and
// appearWithin how long its process is waited for. A sandbox with a kernel of
// its own has none that the host sees.
const (
	holdFor      = 5 * time.Second
	appearWithin = 3 * time.Second
)

var tokens atomic.Int64

// hold starts a command of the payload that sleeps, and calls look with its pid
// on the host (0 if it is not seen) while it does. args follow seconds and
// token.
func hold(s starter, out *output, look func(pid int), what string, args ...string) error {
	token := fmt.Sprintf("token-%d-%d", os.Getpid(), tokens.Add(1))
	argv := append([]string{payload, what, fmt.Sprint(holdFor.Seconds()), token}, args...)
	out.reset()
	ended := make(chan error, 1)
	go func() { ended <- s.start(0, argv, out) }()
	pid := 0
	for began := time.Now(); pid == 0 && time.Since(began) < appearWithin; time.Sleep(10 * time.Millisecond) {
		select {
		case err := <-ended:
			if err == nil {
				err = fmt.Errorf("%s ended at once", what)
			}
			return err
		default:
			pid = findPayload(token)
		}
	}
	time.Sleep(200 * time.Millisecond) // until it sleeps
	look(pid)
	if pid > 0 {
		_ = unix.Kill(pid, unix.SIGTERM)
	}
	err := <-ended
	if err == nil && out.decode != nil {
		err = out.decode()
	}
	if err == nil && out.exit != 0 {
		err = fmt.Errorf("%s: exit code %d", what, out.exit)
	}
	return err
}

// inspect finds out what is on in the sandboxes of a starter and what memory
// one takes.
func inspect(h *hierarchies, s starter, servers []int, out *output) (*posture, *footprint, error) {
	var memory *footprint
	var memoryErr error
	if err := hold(s, out, func(pid int) {
		memory, memoryErr = h.footprint(sandboxOf(pid, servers))
	}, "hold"); err != nil {
		return nil, nil, err
	}
	if memoryErr != nil {
		return nil, nil, memoryErr
	}

	comm, err := os.ReadFile("/proc/self/comm")
	if err != nil {
		return nil, nil, err
	}
	p := &posture{Memory: none, PIDs: none}
	if err := hold(s, out, func(pid int) { p.outside(h, pid, servers) }, "probe",
		strconv.Itoa(os.Getpid()), strings.TrimSpace(string(comm))); err != nil {
		return nil, nil, err
	}
	p.inside(string(out.bytes))

	out.reset()
	err = s.start(0, []string{payload, "hog", fmt.Sprint(2 * memoryLimit)}, out)
	if err == nil && out.decode != nil {
		err = out.decode()
	}
	p.Hog = err == nil && string(out.bytes) == "held\n"
	return p, memory, nil
}

// outside reads what the host knows of a sandbox.
func (p *posture) outside(h *hierarchies, pid int, servers []int) {
	pids := []int{pid}
	if pid == 0 {
		pids = sandboxOf(0, servers)
	} else if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid)); err == nil {
		for _, line := range strings.Split(string(b), "\n") {
			if f := strings.Fields(line); len(f) > 1 && f[0] == "Uid:" {
				p.HostUID = f[1]
			}
		}
	}
	for _, pid := range pids {
		id := strconv.Itoa(pid)
		if n, ok := h.memoryLimit(id); ok {
			p.Memory = "cgroup " + mib(n)
		}
		if n, ok := h.pidsLimit(id); ok {
			p.PIDs = fmt.Sprintf("cgroup %d", n)
		}
	}
}

// inside reads what the payload's probe printed.
func (p *posture) inside(printed string) {
	host := map[string]string{}
	for _, ns := range namespaces {
		host[ns], _ = os.Readlink("/proc/self/ns/" + ns)
	}
	version, _ := os.ReadFile("/proc/version")
	for _, line := range strings.Split(printed, "\n") {
		key, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		value = strings.TrimSpace(value)
		switch key {
		case "kernel":
			if value != strings.TrimSpace(string(version)) {
				p.Kernel = value
			}
		case "root":
			p.Root = value
		case "nnp":
			p.NNP = value
		case "seccomp":
			p.Seccomp = value
		case "capeff":
			p.CapEff = value
		case "capbnd":
			p.CapBnd = value
		case "uid":
			p.UID = value
		case "rlimit.as":
			if n, err := strconv.ParseInt(value, 10, 64); err == nil && n <= 2*memoryLimit && p.Memory == none {
				p.Memory = addressSpace + mib(n)
			}
		case "rlimit.nproc":
			if n, err := strconv.ParseInt(value, 10, 64); err == nil && n <= 1024 && p.PIDs == none {
				p.PIDs = "RLIMIT_NPROC " + value
			}
		case "processes":
			p.Processes = value
		case "host":
			p.HostSeen = value == "seen"
		default:
			if ns, ok := strings.CutPrefix(key, "ns."); ok && value != host[ns] {
				p.Namespaces = append(p.Namespaces, ns)
			}
		}
	}
	slices.SortFunc(p.Namespaces, func(a, b string) int {
		return slices.Index(namespaces, a) - slices.Index(namespaces, b)
	})
}

var namespaces = []string{"user", "pid", "mnt", "ipc", "uts", "net", "cgroup"}

func mib(n int64) string { return fmt.Sprintf("%d MiB", n>>20) }
