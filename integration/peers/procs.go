package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// parents maps every process of the host to its parent.
func parents() map[int]int {
	all := map[int]int{}
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, d := range dirs {
		b, err := os.ReadFile(d + "/stat")
		if err != nil {
			continue // ended
		}
		// The name, in parentheses, may hold anything.
		f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
		pid, _ := strconv.Atoi(filepath.Base(d))
		if len(f) > 1 {
			all[pid], _ = strconv.Atoi(f[1])
		}
	}
	return all
}

// tree returns the processes below root, root included.
func tree(all map[int]int, root int) []int {
	pids := []int{root}
	for i := 0; i < len(pids); i++ {
		for pid, parent := range all {
			if parent == pids[i] {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

// findPayload returns the host's pid of the payload that was given a token as
// argument, 0 if there is none that the host sees. Tools carry the token in
// their command lines, too.
func findPayload(token string) int {
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, d := range dirs {
		b, err := os.ReadFile(d + "/cmdline")
		if err != nil || !bytes.Contains(b, []byte("\x00"+token+"\x00")) {
			continue
		}
		if exe, err := os.Readlink(d + "/exe"); err == nil && filepath.Base(exe) == filepath.Base(payload) {
			pid, _ := strconv.Atoi(filepath.Base(d))
			return pid
		}
	}
	return 0
}

// sandboxOf returns the processes of the sandbox that is alive: those of the
// payload and what is above it up to shared, a server of many sandboxes, or to
// this process. Without a payload it is everything below this process but for
// the trees of servers.
func sandboxOf(payload int, servers []int) []int {
	all, self := parents(), os.Getpid()
	if payload == 0 {
		for _, s := range servers {
			delete(all, s)
		}
		return tree(all, self)[1:]
	}
	stop := map[int]bool{self: true, 0: true, 1: true}
	for _, s := range servers {
		stop[s] = true
	}
	top := payload
	for !stop[all[top]] {
		top = all[top]
	}
	return tree(all, top)
}

// footprint is the memory of one sandbox whose program sleeps, in KiB.
type footprint struct {
	Processes int   `json:"processes"`
	PSS       int64 `json:"pss_kib"`
	Private   int64 `json:"private_kib"`
	// Charge is what the kernel counts for the sandbox's own cgroup, kernel
	// memory included; -1 where it has none.
	Charge int64 `json:"charge_kib"`
}

func (h *hierarchies) footprint(pids []int) (*footprint, error) {
	f := &footprint{Charge: -1}
	for _, pid := range pids {
		p := strconv.Itoa(pid)
		b, err := os.ReadFile("/proc/" + p + "/smaps_rollup")
		if err != nil {
			continue // ended, or has no memory
		}
		f.Processes++
		for _, line := range strings.Split(string(b), "\n") {
			var n int64
			key, rest, _ := strings.Cut(line, ":")
			if _, err := fmt.Sscan(rest, &n); err != nil {
				continue
			}
			switch key {
			case "Pss":
				f.PSS += n
			case "Private_Clean", "Private_Dirty":
				f.Private += n
			}
		}
		if dir, ok := h.own(p, "memory"); ok && f.Charge < 0 {
			if n, err := readNumber(dir, "memory.usage_in_bytes", "memory.current"); err == nil {
				f.Charge = n >> 10
			}
		}
	}
	if f.Processes == 0 {
		return nil, fmt.Errorf("no process of the sandbox found")
	}
	return f, nil
}
