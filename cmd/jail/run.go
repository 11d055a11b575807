package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/docker/go-units"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"example.com/jail/cmd/jail/internal/early"
	"example.com/jail/guest/node"
	"example.com/jail/guest/python"
	"example.com/jail/invoke"
	"example.com/jail/jail"
	"example.com/jail/rootfs"
	"example.com/jail/wire/execwire"
)

func (a *app) runCommand() *cobra.Command {
	var o options
	c := &cobra.Command{
		Use:   "run [flags] -- COMMAND [ARG...]",
		Short: "Run a command in a new jail",
		Long: `Run a command in a new jail. It has an empty standard input unless --stdin is
given, its output goes to standard output and standard error.`,
		Example: `  jail run -- python3 -c 'print(6 * 7)'
  jail run --memory 64MiB --wall 2s --report - --ro-bind ./prog:/opt/prog -- /opt/prog
  jail run --ro-bind ./data:/data --bind ./out:/out -- cp /data/in /out/copy`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return errors.New("run: no command; write it after --")
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) error {
			return a.execute(c.Context(), &o, func(s *jail.Spec) (func(), error) {
				s.Args = args
				return func() {}, nil
			})
		},
	}
	// Flags after the command are the command's own.
	c.Flags().SetInterspersed(false)
	o.register(c.Flags())
	return c
}

func (a *app) scriptCommand() *cobra.Command {
	var o options
	var guest string
	c := &cobra.Command{
		Use:   "script [flags] FILE",
		Short: "Run a program that may call tools of this host",
		Long: `Run FILE by a guest: an interpreter in the jail that reads the program and its
tools from fd 3, calls tools over fd 4 and sends the program's value back. The
guest is chosen by the file's name (.py: Python, .mjs: Node.js) or by --guest.`,
		Example: `  jail script --tools tools.yaml --report - report.py
  jail script --guest /usr/local/bin/my-guest program.txt`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return fmt.Errorf("script: want one FILE, have %d arguments", len(args))
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) error {
			return a.execute(c.Context(), &o, func(s *jail.Spec) (func(), error) {
				return prepareScript(c.Context(), s, args[0], guest, o.tools)
			})
		},
	}
	o.register(c.Flags())
	c.Flags().StringVar(&guest, "guest", "", "`COMMAND` in the jail that speaks the protocol on fds 3 and 4")
	return c
}

// guests are the interpreters by file suffix.
var guests = map[string]struct {
	file   string
	source []byte
	argv   func(path string, preload ...string) []string
}{
	python.Suffix: {python.FileName, python.Source, python.Argv},
	node.Suffix:   {node.FileName, node.Source, node.Argv},
}

func prepareScript(ctx context.Context, s *jail.Spec, file, guest, tools string) (cleanUp func(), err error) {
	program, err := readProgram(file)
	if err != nil {
		return nil, err
	}
	s.Script = &jail.Script{Program: program}
	if guest != "" {
		s.Args = strings.Fields(guest)
	} else {
		g, ok := guests[filepath.Ext(file)]
		if !ok {
			return nil, refusal("guest", fmt.Sprintf("no guest for %s", file), "name the file .py or .mjs, or give --guest COMMAND")
		}
		s.Args = g.argv(rootfs.FilesDir + "/" + g.file)
	}
	if tools == "" {
		return func() {}, nil
	}
	f, err := invoke.LoadFile(tools)
	if err != nil {
		return nil, refusal("tools", "--tools "+err.Error(), "correct the tools file")
	}
	t, err := f.Open(ctx, nil, invoke.Options{})
	if err != nil {
		return nil, refusal("tools", "--tools "+err.Error(), "see that its servers can be started")
	}
	s.Script.Tools = t
	return func() { _ = t.Close() }, nil
}

// readProgram reads a script, which has to be an ordinary file of a size that
// fits a frame.
func readProgram(file string) (string, error) {
	bad := func(err error) error {
		return refusal("program", fmt.Sprintf("%s: %v", file, pathErr(err)), "give a readable program file")
	}
	// O_NONBLOCK: a FIFO must not block the launcher.
	f, err := os.OpenFile(file, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return "", bad(err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return "", bad(err)
	}
	if !info.Mode().IsRegular() {
		return "", bad(errors.New("not a regular file"))
	}
	b, err := io.ReadAll(io.LimitReader(f, jail.MaxProgram+1))
	if err != nil {
		return "", bad(err)
	}
	if len(b) > jail.MaxProgram {
		return "", bad(fmt.Errorf("larger than %d bytes", jail.MaxProgram))
	}
	return string(b), nil
}

// execute runs one jail: flags to spec, spec to report, report to exit code.
func (a *app) execute(ctx context.Context, o *options, prepare func(*jail.Spec) (func(), error)) error {
	var events *eventStream
	if o.events != "" {
		events = newEventStream(a.stdout, o.events)
	}
	report, err := a.openReport(ctx, o)
	if err != nil {
		a.tell("%v", err)
		if ctx.Err() == nil {
			err = refusal("report", err.Error(), "give a file that can be written")
		} else {
			err = ctx.Err()
		}
		r := jail.NewReport("", err)
		if events != nil {
			events.name(r.ID)
			_ = waitFor(ctx.Done(), func() error { return events.exit(r, err) })
		}
		return &exitError{exitCode(r)}
	}
	if err := ownScope(ctx); err != nil {
		fmt.Fprintf(a.stderr, "jail: %v\n", err)
	}
	r, err := func() (*jail.Report, error) {
		spec, closeImage, err := o.spec(ctx, a.progress())
		if err != nil {
			return jail.NewReport("", err), err
		}
		defer closeImage()
		cleanUp, err := prepare(&spec)
		if err != nil {
			return jail.NewReport("", err), err
		}
		defer cleanUp()
		// The same root for every command: one template serves them all.
		for _, g := range guests {
			spec.Root.Files = append(spec.Root.Files, rootfs.File{Name: g.file, Data: g.source})
		}
		if o.stdin {
			spec.Stdin = a.stdin
		}
		spec.Templates = templates()
		spec.Stdout, spec.Stderr = a.stdout, a.stderr
		if o.report != "-" {
			spec.Stdout = a.stdout.w // the very pipe, which costs less
		}
		if events != nil {
			spec.Stdout, spec.Stderr = events.output(execwire.Stdout), events.output(execwire.Stderr)
		}
		j, err := jail.Start(ctx, spec)
		if err != nil {
			return jail.NewReport("", err), err
		}
		if events != nil {
			events.name(j.ID())
		}
		go jail.Settle() // beside the run: this process starts no other
		return j.Wait()
	}()
	if events != nil {
		if err != nil {
			events.name(r.ID)
		}
		if werr := waitFor(ctx.Done(), func() error { return events.exit(r, err) }); werr != nil {
			a.tell("%v", werr)
		}
	}
	a.explain(r, err)
	if werr := waitFor(ctx.Done(), func() error { return report(r) }); werr != nil {
		a.tell("write report: %v", werr)
		return &exitError{exitFailed}
	}
	a.code = exitCode(r)
	return nil
}

// waitFor runs f, which may have to do with somebody who does not read, and gives
// it up once jail.StallTimeout has passed after done was closed.
func waitFor(done <-chan struct{}, f func() error) error {
	end := make(chan error, 1)
	go func() { end <- f() }()
	select {
	case err := <-end:
		return err
	case <-done:
	}
	select {
	case err := <-end:
		return err
	case <-time.After(jail.StallTimeout):
		return errors.New("nobody reads it")
	}
}

// templatesEnv names another directory for pinned templates than the default.
const templatesEnv = "JAIL_TEMPLATES"

func templates() *rootfs.Cache { return &rootfs.Cache{Dir: os.Getenv(templatesEnv)} }

// progress shows at a terminal how far the unpacking of an image is.
func (a *app) progress() func(done, total int64) {
	if !isTerminal(a.stderr) {
		return nil
	}
	last := time.Now()
	return func(done, total int64) {
		if done < total && time.Since(last) < 100*time.Millisecond {
			return
		}
		last = time.Now()
		fmt.Fprintf(a.stderr, "\runpacking image: %s of %s\x1b[K", units.BytesSize(float64(done)), units.BytesSize(float64(total)))
		if done >= total {
			fmt.Fprintln(a.stderr)
		}
	}
}

// explain says in one line why a run did not end by itself, and in another what a
// reader that is still there has missed.
func (a *app) explain(r *jail.Report, err error) {
	if r.Cause != jail.CauseOutput {
		for _, s := range []struct {
			name  string
			to    io.Writer
			usage jail.StreamUsage
		}{{"stdout", a.stdout.w, r.Stdout}, {"stderr", a.stderr, r.Stderr}} {
			if s.usage.Dropped > 0 && !readerGone(s.to) {
				a.tell("%s: %d bytes were not delivered", s.name, s.usage.Dropped)
			}
		}
	}
	switch {
	case err != nil:
		a.tell("%s", oneLine(err.Error()))
	case r.Cause == jail.CauseOK || r.Cause == jail.CauseProgram:
	case r.Cause == jail.CauseOutput:
		a.say(r.Error)
	default:
		a.tell("%s: %s", r.Cause, oneLine(r.Error))
	}
}

// tell prints a line about the run. It does not wait for a reader that is stuck:
// the report would wait with it.
func (a *app) tell(format string, args ...any) { a.say("jail: " + fmt.Sprintf(format, args...)) }

func (a *app) say(line string) {
	now := make(chan struct{})
	close(now)
	_ = waitFor(now, func() error {
		_, err := fmt.Fprintln(a.stderr, line)
		return err
	})
}

// readerGone tells whether a pipe has no reader any more.
func readerGone(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	p := []unix.PollFd{{Fd: int32(f.Fd())}}
	_, err := unix.Poll(p, 0)
	return err == nil && p[0].Revents&unix.POLLERR != 0
}

func oneLine(s string) string { return strings.ReplaceAll(strings.TrimSpace(s), "\n", " ") }

// openReport opens where the report goes before anything starts.
func (a *app) openReport(ctx context.Context, o *options) (func(*jail.Report) error, error) {
	switch o.report {
	case "":
		return func(*jail.Report) error { return nil }, nil
	case "-":
		if o.events != "" {
			return nil, errors.New("--report - and --events both write to standard output: give --report a file")
		}
		return a.writeReport, nil
	}
	var f *os.File
	err := waitFor(ctx.Done(), func() (err error) { // for the reader of a FIFO
		f, err = os.OpenFile(o.report, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o644)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("--report %s: %w", o.report, pathErr(err))
	}
	return func(r *jail.Report) error {
		err := encodeReport(f, r, false)
		return errors.Join(err, f.Close())
	}, nil
}

func (a *app) writeReport(r *jail.Report) error {
	if a.stdout.last != 0 && a.stdout.last != '\n' {
		fmt.Fprintln(a.stdout)
	}
	return encodeReport(a.stdout, r, isTerminal(a.stdout.w))
}

// encodeReport writes one object: on one line for programs, indented for a
// person at a terminal.
func encodeReport(w io.Writer, r *jail.Report, indent bool) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	if indent {
		e.SetIndent("", "  ")
	}
	return e.Encode(r)
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// reportUsage writes the report of a command line that could not be parsed, if
// one was asked for and is to be found.
func (a *app) reportUsage(ctx context.Context, args []string, err error) {
	if !early.Runs(args) {
		return
	}
	var o options
	flags := pflag.NewFlagSet("", pflag.ContinueOnError)
	new(options).register(flags)
	flags.String("guest", "", "")
scan:
	for i := 1; i < len(args) && args[i] != "--"; i++ {
		name, value, given := strings.Cut(args[i], "=")
		f := flags.Lookup(strings.TrimPrefix(name, "--"))
		switch {
		case !strings.HasPrefix(name, "--"):
			if args[0] == "run" {
				// The command begins here, as far as can be told. Its own
				// --report is not to be written to.
				break scan
			}
		case f != nil && !given && f.NoOptDefVal == "" && i+1 < len(args):
			i++
			value = args[i]
		}
		switch name {
		case "--report":
			o.report = value
		case "--events":
			o.events = "b64"
		}
	}
	r := jail.NewReport("", refusal(usageItem(err), oneLine(err.Error()), "see jail "+args[0]+" --help"))
	write, openErr := a.openReport(ctx, &o)
	if openErr == nil {
		openErr = waitFor(ctx.Done(), func() error { return write(r) })
	}
	if o.events != "" {
		events := newEventStream(a.stdout, o.events)
		events.name(r.ID)
		openErr = errors.Join(openErr, events.exit(r, err))
	}
	if openErr != nil {
		fmt.Fprintf(a.stderr, "jail: %v\n", openErr)
	}
}

// budgetFlags are the budget items that flags set, for reports of flags that
// cannot be parsed.
var budgetFlags = map[string]jail.Item{
	"memory": jail.ItemMemory, "wall": jail.ItemWall, "cpu-time": jail.ItemCPUTime, "cpus": jail.ItemCPUs,
	"pids": jail.ItemPIDs, "output": jail.ItemOutput, "tmp": jail.ItemTmp, "calls": jail.ItemCalls, "call-bytes": jail.ItemBytes,
	"open-files": jail.ItemOpenFiles, "memory-high": jail.ItemMemoryHigh,
}

func usageItem(err error) string {
	var invalid *pflag.InvalidValueError
	if !errors.As(err, &invalid) {
		return "usage"
	}
	name := invalid.GetFlag().Name
	if item, ok := budgetFlags[name]; ok {
		return string(item)
	}
	return name
}

// exitCode follows the table of the documentation.
func exitCode(r *jail.Report) int {
	switch r.Cause {
	case jail.CauseWall, jail.CauseCPUTime:
		return 124
	case jail.CauseMemory:
		return 137
	case jail.CauseCanceled:
		return 130
	case jail.CauseSetup:
		if r.Setup != nil && r.Setup.Stage == "exec" {
			if syscall.Errno(r.Setup.Errno) == syscall.ENOENT {
				return 127
			}
			return 126
		}
		return exitFailed
	case jail.CauseSignaled:
		if r.Signal != nil {
			return 128 + *r.Signal
		}
	case jail.CauseOK:
		if r.ExitCode != nil {
			return *r.ExitCode
		}
		return 0
	case jail.CauseProgram:
		if r.ExitCode != nil && *r.ExitCode != 0 {
			return *r.ExitCode
		}
		return 1
	}
	return exitFailed
}
