package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"
)

// exitFailed is the exit code for what is not the program's doing: the machine
// did not start, did not end in time, or gave no result.
const exitFailed = 125

func main() {
	if os.Getpid() == 1 {
		guestInit()
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	os.Exit(command(ctx, os.Args[1:]))
}

// list collects a flag that can be given more than once.
type list []string

func (l *list) String() string     { return strings.Join(*l, " ") }
func (l *list) Set(s string) error { *l = append(*l, s); return nil }

func command(ctx context.Context, args []string) int {
	var m machine
	var add list
	var err error
	if m.init, err = os.Executable(); err != nil {
		fmt.Fprintln(os.Stderr, "vm:", err)
		return exitFailed
	}
	f := flag.NewFlagSet("vm run", flag.ContinueOnError)
	f.StringVar(&m.cache, "cache", "build/vm", "directory with the guest's kernel, modules and image")
	f.DurationVar(&m.timeout, "timeout", 5*time.Minute, "kill the machine after this time")
	f.IntVar(&m.memory, "memory", 2048, "the machine's memory in MiB")
	f.IntVar(&m.cpus, "cpus", 2, "the machine's processors")
	f.StringVar(&m.results, "results", "", "directory for the files that the program leaves in /result")
	f.StringVar(&m.job.Cgroup, "cgroup", "/system.slice/jail-test.service", "the program's cgroup; / is the root")
	f.StringVar(&m.job.Dir, "dir", "/", "the program's working directory in the guest")
	f.BoolVar(&m.job.Clean, "clean", false, "fail also if the program leaves processes, cgroups or mounts behind, or changes mounts")
	f.Var((*list)(&m.job.Env), "env", "NAME=VALUE for the program's environment (repeatable)")
	f.Var(&add, "add", "HOSTPATH:GUESTPATH, a file or directory to put in the guest (repeatable)")
	f.Usage = func() {
		fmt.Fprintln(f.Output(), "usage: vm run [FLAG...] -- BINARY [ARG...]")
		f.PrintDefaults()
	}
	if len(args) == 0 || args[0] != "run" {
		f.Usage()
		return exitFailed
	}
	if err := f.Parse(args[1:]); err != nil {
		return exitFailed
	}
	if f.NArg() == 0 {
		f.Usage()
		return exitFailed
	}
	m.job.Args = append([]string{guestBinary}, f.Args()[1:]...)
	m.files = append(m.files, [2]string{f.Arg(0), guestBinary})
	for _, a := range add {
		from, to, ok := strings.Cut(a, ":")
		if !ok || !strings.HasPrefix(to, "/") {
			fmt.Fprintf(os.Stderr, "vm: -add %s: want HOSTPATH:GUESTPATH, the latter absolute\n", a)
			return exitFailed
		}
		m.files = append(m.files, [2]string{from, to})
	}
	code, err := m.run(ctx, os.Stdout)
	if err != nil {
		fmt.Fprintln(os.Stderr, "vm:", err)
		var hung *hangError
		if errors.As(err, &hung) {
			fmt.Fprintf(os.Stderr, "the end of the guest's console:\n%s\n", hung.console)
		}
		return exitFailed
	}
	return code
}
