package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"example.com/jail/cmd/jail/internal/early"
	"example.com/jail/jail"
)

// exitFailed is the exit code for everything that is not the program's doing.
const exitFailed = 125

func main() { os.Exit(run(os.Args[1:], os.Stdin, os.Stdout, os.Stderr)) }

// run is the whole command line; it returns the exit code.
func run(args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	// A consumer that closes the pipe ends the program in the jail, not the
	// launcher, which still has a report to write.
	signal.Ignore(syscall.SIGPIPE)
	if early.Runs(args) {
		jail.Prepare()      // beside the making of the tree of commands
		defer jail.Settle() // a pid 1 that does not reap would keep the helper for ever
	}

	a := &app{stdin: stdin, stdout: &lastByte{w: stdout}, stderr: stderr}
	root := a.command()
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(early.Context())
	if err == nil {
		return a.code
	}
	var done *exitError
	if errors.As(err, &done) {
		return done.code
	}
	// Flags that could not be parsed: nothing was started, but whoever asked
	// for a report gets one.
	fmt.Fprintf(stderr, "jail: %v\n", err)
	a.reportUsage(early.Context(), args, err)
	return exitFailed
}

// exitError ends the command with a code; its message has been printed.
type exitError struct{ code int }

func (e *exitError) Error() string { return fmt.Sprintf("exit %d", e.code) }

// app is what the commands share.
type app struct {
	stdin  io.Reader
	stdout *lastByte
	stderr io.Writer
	code   int
}

// lastByte remembers whether what was written ends with a newline, so that a
// report on the same stream starts on a line of its own.
type lastByte struct {
	w    io.Writer
	last byte
}

func (l *lastByte) Write(p []byte) (int, error) {
	n, err := l.w.Write(p)
	if n > 0 {
		l.last = p[n-1]
	}
	return n, err
}

func (a *app) command() *cobra.Command {
	root := &cobra.Command{
		Use:   "jail",
		Short: "Run programs that nobody trusts, within limits that the kernel holds",
		Long: `jail runs a program in namespaces, a cgroup and a seccomp filter of its own.
A budget that this host cannot enforce refuses the run before anything starts.
Why a program ended is told by a report that the program cannot forge.`,
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	root.AddCommand(a.runCommand(), a.scriptCommand(), a.checkCommand(), a.gcCommand(), a.versionCommand())
	return root
}
