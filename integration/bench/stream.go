package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"example.com/jail/jail"
)

const (
	block = 64 << 10 // of the writer
	// buffer is that of everything that copies: it is also the launcher's.
	buffer = 128 << 10
)

// zeros is a command that prints n bytes.
func zeros(n int64) []string {
	return []string{target, "dd", "if=/dev/zero", fmt.Sprintf("bs=%d", block), fmt.Sprintf("count=%d", n/block)}
}

// drain reads all there is with the buffer of a harness. seen, if any, is told
// how much came so far.
func drain(r io.Reader, seen func(int64)) (int64, error) {
	buf := make([]byte, buffer)
	var sum int64
	for {
		n, err := r.Read(buf)
		sum += int64(n)
		if seen != nil {
			seen(sum)
		}
		if err == io.EOF {
			return sum, nil
		}
		if err != nil {
			return sum, err
		}
	}
}

// counter is a writer that counts.
type counter int64

func (c *counter) Write(p []byte) (int, error) {
	*c += counter(len(p))
	return len(p), nil
}

// streams prints how fast output is, beside a pipe without a jail.
func (b *bench) streams(ctx context.Context) error {
	large := int64(b.size(1<<30, 64<<20))
	for _, s := range []struct {
		bytes  int64
		rounds int
	}{{20 << 20, b.part(30)}, {large, b.part(10)}} {
		if err := b.stream(ctx, s.bytes, s.rounds); err != nil {
			return err
		}
	}
	return b.stuck(ctx)
}

func (b *bench) stream(ctx context.Context, n int64, rounds int) error {
	unlimited := b.spec(zeros(n)...)
	unlimited.Budget.MaxOutput = 0
	pool, err := jail.NewPool(unlimited, 2)
	if err != nil {
		return err
	}
	defer pool.Close()
	var peak int64 // of the command's memory
	turns := []*turn{
		{name: "pipe", does: "os/exec, read from a pipe", do: timed(func(ctx context.Context) error { return barePipe(ctx, n, 0) })},
		{name: "pipe of 1 MiB", does: "the same, with the size that the launcher gives its pipes", do: timed(func(ctx context.Context) error { return barePipe(ctx, n, 1<<20) })},
		{name: "pipe, copied", does: "os/exec, read and written to another pipe", do: timed(func(ctx context.Context) error { return bareCopy(ctx, n) })},
		{name: "jail.Run to io.Writer", does: "counts", do: timed(func(ctx context.Context) error {
			return counted(ctx, n, func(w io.Writer) (*jail.Report, error) {
				spec := unlimited
				spec.Stdout = w
				return jail.Run(ctx, spec)
			})
		})},
		{name: "jail.Run to a pipe", does: "read from there", do: timed(func(ctx context.Context) error { return toPipe(ctx, n, unlimited) })},
		{name: "jail.Pool to io.Writer", does: "parked, counts", prepare: pool.Fill, do: timed(func(ctx context.Context) error {
			return counted(ctx, n, func(w io.Writer) (*jail.Report, error) { return pool.Run(ctx, jail.Use{Stdout: w}) })
		})},
		{name: "jail run to a pipe", does: "read from there", do: timed(func(ctx context.Context) error {
			p, err := b.fromCommand(ctx, n)
			peak = max(peak, p)
			return err
		})},
	}
	if err := b.interleave(ctx, rounds, turns); err != nil {
		return err
	}
	if s := pool.Stats(); s.Fresh > 0 {
		return fmt.Errorf("runs of the pool got no parked jail: %+v", s)
	}
	b.method("%s of stdout from %v, %d runs each; from the start to the last byte and the exit (jail: the report), start included\n"+
		"readers and copies use %d KiB at a time; no limit of output; all bytes were counted", mib(n), zeros(n)[1:], rounds, buffer>>10)
	t := newTable(b.out, append(append([]string{mib(n) + ", ms"}, quantiles...), "MiB/s", "x pipe", "x pipe, copied", "")...)
	for _, r := range turns {
		p50 := r.times[0].at(50)
		t.row(append(append([]string{r.name}, r.times[0].columns(time.Millisecond)...), fmt.Sprintf("%.0f", float64(n>>20)/p50.Seconds()),
			ratio(p50, turns[0].times[0].at(50)), ratio(p50, turns[2].times[0].at(50)), r.does)...)
	}
	t.end()
	fmt.Fprintf(b.out, "jail run: peak memory of the launcher (VmHWM, %s before the end) at most %.1f MiB\n", mib(unread), float64(peak)/(1<<20))
	return nil
}

func mib(n int64) string { return fmt.Sprintf("%d MiB", n>>20) }

func wantBytes(got, want int64) error {
	if got != want {
		return fmt.Errorf("%d bytes came, want %d", got, want)
	}
	return nil
}

// writer starts a command that writes to a pipe, and returns its other end. done
// waits for the command.
func writer(ctx context.Context, env []string, size int, name string, args ...string) (out *os.File, pid int, done func() error, err error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, 0, nil, err
	}
	cmd := command(ctx, name, args...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.Env = append(os.Environ(), env...)
	cmd.Stdout = w
	if size > 0 {
		_, err = unix.FcntlInt(w.Fd(), unix.F_SETPIPE_SZ, size)
	}
	if err == nil {
		err = cmd.Start()
	}
	w.Close()
	if err != nil {
		r.Close()
		return nil, 0, nil, err
	}
	return r, cmd.Process.Pid, cmd.Wait, nil
}

func barePipe(ctx context.Context, n int64, size int) error {
	out, _, done, err := writer(ctx, nil, size, target, zeros(n)[1:]...)
	if err != nil {
		return err
	}
	defer out.Close()
	got, err := drain(out, nil)
	return errors.Join(err, done(), wantBytes(got, n))
}

func bareCopy(ctx context.Context, n int64) error {
	out, _, done, err := writer(ctx, nil, 0, target, zeros(n)[1:]...)
	if err != nil {
		return err
	}
	defer out.Close()
	return through(n, func(w *os.File) error {
		// Wrapped: io.Copy would look for ways around the buffer.
		_, err := io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{out}, make([]byte, buffer))
		return errors.Join(err, done())
	})
}

// through reads n bytes from a pipe that write fills.
func through(n int64, write func(*os.File) error) error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	written := make(chan error, 1)
	go func() {
		err := write(w)
		w.Close()
		written <- err
	}()
	got, err := drain(r, nil)
	r.Close() // so that write ends in any case
	return errors.Join(<-written, err, wantBytes(got, n))
}

// complete checks the report of a run that printed n bytes.
func complete(ctx context.Context, n int64, r *jail.Report, err error) error {
	if err := expect(ctx, jail.CauseOK, r, err); err != nil {
		return err
	}
	if r.Stdout.Seen != n || r.Stdout.Delivered != n {
		return fmt.Errorf("stdout: %+v, want %d", r.Stdout, n)
	}
	return nil
}

func counted(ctx context.Context, n int64, run func(io.Writer) (*jail.Report, error)) error {
	var got counter
	r, err := run(&got)
	if err := complete(ctx, n, r, err); err != nil {
		return err
	}
	return wantBytes(int64(got), n)
}

func toPipe(ctx context.Context, n int64, spec jail.Spec) error {
	return through(n, func(w *os.File) error {
		spec.Stdout = w
		r, err := jail.Run(ctx, spec)
		return complete(ctx, n, r, err)
	})
}

// unread is what is still to come when the command's memory is looked at: more
// than the pipes between the program and this process hold, so that it lives.
const unread = 4 << 20

// fromCommand reads what the command prints, and its peak memory just before the
// end. The kernel's own account of the child (ru_maxrss) would not do: the memory
// of this process before the exec is in it.
func (b *bench) fromCommand(ctx context.Context, n int64) (peak int64, err error) {
	env := []string{"JAIL_TEMPLATES=" + b.warm.Dir}
	out, pid, done, err := writer(ctx, env, 0, b.jail, append([]string{"run", "--output", "0", "--"}, zeros(n)...)...)
	if err != nil {
		return 0, err
	}
	defer out.Close()
	var statusErr error
	got, err := drain(out, func(sum int64) {
		if peak == 0 && statusErr == nil && sum >= n-unread {
			peak, statusErr = statusBytes(pid, "VmHWM")
		}
	})
	if peak == 0 && statusErr == nil {
		statusErr = errors.New("the launcher's memory was not read")
	}
	return peak, errors.Join(err, done(), wantBytes(got, n), statusErr)
}

// stuck prints how late the wall clock is when nobody takes the output.
func (b *bench) stuck(ctx context.Context) error {
	const wall = 200 * time.Millisecond
	late := func(ctx context.Context, to io.Writer, args ...string) ([]time.Duration, error) {
		spec := b.spec(args...)
		spec.Budget.WallClock, spec.Budget.MaxOutput = wall, 0
		spec.Stdout = to
		j, err := jail.Start(ctx, spec)
		if err != nil {
			return nil, err
		}
		started := now()
		dead := awaitChild()
		r, err := j.Wait()
		reported, end := now(), <-dead
		if err := errors.Join(expect(ctx, jail.CauseWall, r, err), end.err); err != nil {
			return nil, err
		}
		return []time.Duration{end.at - started - wall, reported - started - wall}, nil
	}
	endless := zeros(1 << 40)
	kinds := []string{"to pid 1 dead", "to report"}
	turns := []*turn{
		{name: "program that sleeps", kinds: kinds, do: func(ctx context.Context) ([]time.Duration, error) {
			return late(ctx, nil, target, "sleep", "3600")
		}},
		{name: "io.Writer that blocks", kinds: kinds, do: func(ctx context.Context) ([]time.Duration, error) {
			w := &blocked{make(chan struct{})}
			defer close(w.end)
			return late(ctx, w, endless...)
		}},
		{name: "pipe that nobody reads", kinds: kinds, do: func(ctx context.Context) ([]time.Duration, error) {
			r, w, err := os.Pipe()
			if err != nil {
				return nil, err
			}
			defer w.Close()
			defer r.Close() // the launcher's write fails then
			return late(ctx, w, endless...)
		}},
	}
	if err := b.interleave(ctx, b.part(10), turns); err != nil {
		return err
	}
	b.method("wall clock of %s for a program that writes without end to a reader that takes nothing, %d runs each; from the return of Start, just after the release, to pid 1's end by its pidfd and to the report\n"+
		"the report waits %s after the end for the reader, as documented (jail.StallTimeout)", wall, b.part(10), jail.StallTimeout)
	b.times("lateness, ms", time.Millisecond, turns)
	return nil
}

// blocked is a writer that takes nothing until end is closed.
type blocked struct{ end chan struct{} }

func (b *blocked) Write(p []byte) (int, error) {
	<-b.end
	return 0, io.ErrClosedPipe
}
