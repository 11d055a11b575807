//go:build faults

package faults

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const variable = "JAIL_FAULT"

type plan struct {
	at, kill, trace string
	n               int64
	after           time.Duration
	parent          int // 0 in a launcher
	reached         atomic.Int64
}

var planned = parse(os.Getenv(variable))

func parse(text string) *plan {
	p := &plan{kill: "self", n: 1}
	for _, word := range strings.Fields(text) {
		key, value, _ := strings.Cut(word, "=")
		var err error
		switch key {
		case "at":
			p.at = value
		case "n":
			p.n, err = strconv.ParseInt(value, 10, 64)
		case "after":
			p.after, err = time.ParseDuration(value)
		case "kill":
			p.kill = value
		case "trace":
			p.trace = value
		case "parent":
			p.parent, err = strconv.Atoi(value)
		default:
			err = fmt.Errorf("unknown word %q", word)
		}
		if err != nil {
			panic(fmt.Sprintf("%s: %v", variable, err))
		}
	}
	return p
}

// Here is the step of that name, a constant that no other step has.
func Here(name string) {
	p := planned
	p.note(name)
	if name != p.at || p.reached.Add(1) != p.n {
		return
	}
	if p.after > 0 {
		time.AfterFunc(p.after, p.strike)
		return
	}
	p.strike()
}

// Env is what a helper process has to have in its environment.
func Env() []string {
	// The race detector would have the helper sleep at its end.
	return []string{fmt.Sprintf("%s=%s parent=%d", variable, os.Getenv(variable), os.Getpid()), "GORACE=" + os.Getenv("GORACE")}
}

func (p *plan) strike() {
	launcher := p.kill == "parent" || p.kill == "both"
	if launcher && os.Getppid() != p.parent {
		return // gone already: the parent is somebody else
	}
	p.note(p.at + " killed")
	if launcher {
		kill(p.parent)
	}
	switch p.kill {
	case "self", "both":
		kill(os.Getpid())
	case "children":
		for _, pid := range children() {
			kill(pid)
		}
	case "forker":
		for _, pid := range named("jail-forker") {
			kill(pid)
		}
	case "eldest", "youngest":
		inits := named("jail-init")
		if len(inits) > 0 && p.kill == "eldest" {
			kill(inits[0])
		} else if len(inits) > 0 {
			kill(inits[len(inits)-1])
		}
	}
}

// named lists the children of this process whose command has the name.
func named(name string) []int {
	return slices.DeleteFunc(children(), func(pid int) bool {
		comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
		// An init that was just forked has the forker's name, but does not
		// lead the group.
		group, _ := unix.Getpgid(pid)
		return string(comm) != name+"\n" || name == "jail-forker" && group != pid
	})
}

// children lists this process's children, those of one thread in the order of
// their birth.
func children() (pids []int) {
	files, _ := filepath.Glob("/proc/self/task/*/children")
	for _, f := range files {
		b, _ := os.ReadFile(f)
		for _, child := range strings.Fields(string(b)) {
			if pid, err := strconv.Atoi(child); err == nil {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

// kill does not return if it is this process.
func kill(pid int) { _ = unix.Kill(pid, unix.SIGKILL) }

// note adds a line to the trace. One write is never mixed with another's.
func (p *plan) note(what string) {
	if p.trace == "" {
		return
	}
	f, err := os.OpenFile(p.trace, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		panic(fmt.Sprintf("%s: %v", variable, err))
	}
	_, err = fmt.Fprintf(f, "%d %s\n", os.Getpid(), what)
	f.Close()
	if err != nil {
		panic(fmt.Sprintf("%s: %v", variable, err))
	}
}
