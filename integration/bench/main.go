package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"example.com/jail/integration/internal/measure"
	"example.com/jail/jail"
	"example.com/jail/rootfs"
)

const target = "/usr/bin/busybox" // static

// section is a part of the benchmark.
type section struct {
	name string
	run  func(*bench, context.Context) error
}

var sections = []section{
	{"start", (*bench).starts},
	{"rates", (*bench).rates},
	{"calls", (*bench).calls},
	{"pool", (*bench).pools},
	{"stream", (*bench).streams},
	{"limits", (*bench).limits},
	{"sequence", (*bench).sequence},
	{"scale", (*bench).scale},
}

// bench is one run of the benchmark.
type bench struct {
	rounds int
	pause  time.Duration
	quick  bool
	jail   string        // the command
	cell   time.Duration // how long a rate is measured

	out        io.Writer
	work       string // directory for files
	warm, cold *rootfs.Cache
	// idle is how many processors' worth of time the machine uses when nothing
	// is measured.
	idle float64
}

func main() {
	b := &bench{cell: 1500 * time.Millisecond}
	flag.IntVar(&b.rounds, "n", 100, "rounds; long ones are done less often")
	flag.DurationVar(&b.pause, "pause", 25*time.Millisecond, "pause before each turn")
	flag.BoolVar(&b.quick, "quick", false, "few rounds of small sizes: to see that everything works")
	flag.StringVar(&b.jail, "jail", "bin/jail", "the jail command")
	names := make([]string, len(sections))
	for i, s := range sections {
		names[i] = s.name
	}
	only := flag.String("only", strings.Join(names, ","), "`SECTIONS` to run, in this order")
	flag.Parse()
	var chosen []section
	for _, name := range strings.Split(*only, ",") {
		i := slices.Index(names, name)
		if i < 0 {
			fmt.Fprintf(os.Stderr, "bench: no section %q: there are %s\n", name, strings.Join(names, ", "))
			os.Exit(2)
		}
		chosen = append(chosen, sections[i])
	}
	if b.rounds < 1 || b.pause < 0 || flag.NArg() > 0 {
		flag.Usage()
		os.Exit(2)
	}
	if b.quick {
		b.rounds, b.cell = min(b.rounds, 5), 200*time.Millisecond
	}

	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	// A reader of the tables that goes away ends the benchmark as well.
	signal.Ignore(syscall.SIGPIPE)
	ctx, cancel := context.WithCancelCause(ctx)
	b.out = &output{os.Stdout, cancel}
	if err := b.run(ctx, chosen); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		if ctx.Err() != nil {
			os.Exit(130)
		}
		os.Exit(1)
	}
}

// output ends the benchmark when nobody reads it.
type output struct {
	to     io.Writer
	cancel context.CancelCauseFunc
}

func (o *output) Write(p []byte) (int, error) {
	n, err := o.to.Write(p)
	if err != nil {
		o.cancel(err)
	}
	return n, err
}

// run does the chosen sections. Whatever happens, it leaves nothing.
func (b *bench) run(ctx context.Context, chosen []section) (err error) {
	if b.work, err = os.MkdirTemp("", "jail-bench-"); err != nil {
		return err
	}
	dir := fmt.Sprintf("/run/jail-bench-%d", os.Getpid())
	b.warm, b.cold = &rootfs.Cache{Dir: dir}, &rootfs.Cache{Dir: dir + "-cold"}
	defer func() {
		jail.Settle()
		for _, c := range []*rootfs.Cache{b.warm, b.cold} {
			_, dropErr := c.Drop()
			err = errors.Join(err, dropErr)
		}
		err = errors.Join(err, os.RemoveAll(b.work))
	}()

	fmt.Fprintf(b.out, "Linux %s, %d processors, load %s, %d rounds in random order, %s before each turn\n",
		jail.KernelRelease(), runtime.NumCPU(), measure.Load(), b.rounds, b.pause)
	if b.quick {
		fmt.Fprintln(b.out, "quick: too few rounds for numbers to mean anything")
	}
	if err := b.first(ctx); err != nil {
		return err
	}
	if err := b.baseline(ctx); err != nil {
		return err
	}
	fmt.Fprintf(b.out, "CPU time of the whole machine is from /proc/stat, in ticks of %s, without the %.3f processors used when nothing is measured\n", measure.Tick, b.idle)
	for _, s := range chosen {
		if err := s.run(b, ctx); err != nil {
			if ctx.Err() != nil {
				return fmt.Errorf("%s: interrupted: %w", s.name, context.Cause(ctx))
			}
			return fmt.Errorf("%s: %w", s.name, err)
		}
	}
	fmt.Fprintf(b.out, "\nload at the end: %s\n", measure.Load())
	return ctx.Err()
}

// first runs a jail, so that what stays for the life of the process is there, and
// waits until the helper that made its template has ended.
func (b *bench) first(ctx context.Context) error {
	if err := b.library(target, "true")(ctx); err != nil {
		return err
	}
	jail.Settle()
	for end := time.Now().Add(10 * time.Second); len(children(os.Getpid())) > 0; {
		if time.Now().After(end) {
			return errors.New("the template helper did not end within 10 s")
		}
		if err := rest(ctx, time.Millisecond); err != nil {
			return err
		}
	}
	return b.library(target, "true")(ctx) // starts the forker again
}

// part is a share of the rounds, in percent, for what takes long.
func (b *bench) part(percent int) int { return max(b.rounds*percent/100, 3) }

// size is a number of things, few in a quick run.
func (b *bench) size(n, quick int) int {
	if b.quick {
		return quick
	}
	return n
}

func (b *bench) spec(args ...string) jail.Spec {
	return jail.Spec{Args: args, Budget: jail.DefaultBudget(), Templates: b.warm}
}

func (b *bench) method(format string, args ...any) {
	fmt.Fprintf(b.out, "\n"+format+"\n", args...)
}
