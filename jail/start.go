package jail

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"example.com/jail/cgroup"
	"example.com/jail/jail/jailinit"
	"example.com/jail/rootfs"
	"example.com/jail/seccomp"
	"example.com/jail/wire"
)

// Ids on the host. A run takes an even one for its program and the next for
// its init; the number is part of the run's name, and the making of a cgroup
// of that name is what claims it.
const (
	templateIDs = 0x50000000 // see package rootfs
	runIDs      = 0x60000000
	idSpan      = 1 << 28
)

// setupTimeout bounds what happens between fork and exec. It is generous: on a
// loaded machine a set-up of 3 ms may take seconds, and never hang for ever.
const setupTimeout = 30 * time.Second

var templates rootfs.Cache

var defaultFilter = sync.OnceValues(func() (*seccomp.Filter, error) {
	return seccomp.Load("default")
})

// collectOnce removes what dead launchers left, once per process and beside
// the first run.
var collectOnce = sync.OnceValue(func() <-chan struct{} {
	done := make(chan struct{})
	go func() {
		defer close(done)
		if host, err := cgroup.Probe(); err == nil {
			_, _ = host.Collect()
		}
	}()
	return done
})

// Settle waits until the first run's clean-up after dead launchers is done. A
// program that runs one jail and exits calls it at its end.
func Settle() { <-collectOnce() }

// Start runs the program of a spec in a new jail and returns once the program
// has been executed. The jail ends, at the latest, with its limits, with ctx,
// with [Jail.Kill], or with the calling process. Start returns
// a *[RefusedError] if nothing was started, a *[SetupError] if something failed
// on the way, and ctx's error; in each case nothing is left. It is safe for
// concurrent use.
//
// The caller must call [Jail.Wait].
func Start(ctx context.Context, spec Spec) (*Jail, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if err := spec.preflight(); err != nil {
		return nil, err
	}
	collectOnce()
	j, err := start(ctx, spec)
	var setup *SetupError
	if errors.As(err, &setup) && setup.stale() && spec.templates().Discard(spec.Root) == nil {
		// The template has gone bad: a directory that it mounts over was
		// removed, say. Build it anew, once.
		j, err = start(ctx, spec)
	}
	if err != nil {
		return nil, err
	}
	go j.supervise(ctx)
	return j, nil
}

func start(ctx context.Context, spec Spec) (*Jail, error) {
	j := &Jail{spec: spec, kill: make(chan struct{}), done: make(chan struct{})}
	if err := j.setUp(ctx); err != nil {
		j.dismantle()
		return nil, err
	}
	return j, nil
}

// stale tells errors of the init, not of the making of a template, that point to
// a template that cannot be used.
func (e *SetupError) stale() bool {
	var errno syscall.Errno
	return (e.Stage == stageMount || e.Stage == stageTemplate) && e.inside && errors.As(e.Err, &errno)
}

const (
	stageMount    = "mount"
	stageTemplate = "template"
)

func (s *Spec) templates() *rootfs.Cache {
	if s.Templates != nil {
		return s.Templates
	}
	return &templates
}

// Run starts a jail and waits for it. The report is never nil; the error is
// that of [Start], nil whenever the program was started, however it ended.
func Run(ctx context.Context, spec Spec) (*Report, error) {
	j, err := Start(ctx, spec)
	if err != nil {
		return NewReport("", err), err
	}
	return j.Wait()
}

func setupError(stage string, err error) error { return &SetupError{Stage: stage, Err: err} }

// setUp makes everything that the jail consists of, in order: leaf, template,
// descriptors, init. What it made is in j, for dismantle.
func (j *Jail) setUp(ctx context.Context) error {
	if err := j.makeLeaf(); err != nil {
		return err
	}
	template, err := j.spec.templates().Open(j.spec.Root)
	if err != nil {
		if errors.Is(err, rootfs.ErrInvalid) {
			return setupError(stageMount, err)
		}
		return setupError(stageTemplate, err)
	}
	filter := j.spec.Seccomp
	if filter == nil {
		if filter, err = defaultFilter(); err != nil {
			return setupError("seccomp", err)
		}
	} else if template.WritesAsRoot() {
		return &RefusedError{Items: []Refusal{{
			Item:   "bind",
			Reason: "a writable bind of a directory of root, without the default seccomp profile that denies set-uid files",
			Fix:    "give the directory to another user, bind it read-only, or use the default profile",
		}}}
	}
	return j.launch(ctx, template, filter)
}

// makeLeaf makes the leaf with the budget's limits. A host that cannot hold one
// of them refuses the run, unless the spec gives that one up.
func (j *Jail) makeLeaf() error {
	host, err := cgroup.Probe()
	if err != nil {
		return setupError("cgroup", err)
	}
	given := map[Item]bool{}
	err = j.claimLeaf(host, given)
	var missing *cgroup.UnsupportedError
	if errors.As(err, &missing) {
		var bad []Refusal
		if bad, given = j.spec.unenforceable(); len(bad) > 0 {
			return &RefusedError{Items: bad}
		}
		err = j.claimLeaf(host, given)
	}
	if err != nil {
		return setupError("cgroup", err)
	}
	j.budget = j.budgetLines(given)
	return nil
}

// claimLeaf makes a leaf of a name that no run has, with the limits that are
// not given up.
func (j *Jail) claimLeaf(host *cgroup.Host, given map[Item]bool) error {
	b := j.spec.Budget
	var limits cgroup.Limits
	if !given[ItemMemory] {
		limits.Memory = b.MaxMemory
	}
	if b.MaxPIDs > 0 && !given[ItemPIDs] {
		limits.Pids = b.MaxPIDs + 1 // the init's
	}
	if !given[ItemCPUs] {
		limits.CPUs = b.CPUs
	}
	limits.CPUTime = b.CPUTime > 0 && !given[ItemCPUTime]
	for {
		var n [4]byte
		_, _ = rand.Read(n[:]) // never fails (crypto/rand)
		j.number = binary.NativeEndian.Uint32(n[:]) % (idSpan / 2)
		j.id = fmt.Sprintf("%s%07x", cgroup.Prefix, j.number)
		leaf, err := host.NewLeaf(j.id, limits)
		if errors.Is(err, cgroup.ErrExist) {
			continue
		}
		var missing *cgroup.UnsupportedError
		if errors.As(err, &missing) && limits == (cgroup.Limits{}) {
			// Nothing is asked of a cgroup, and there is none to be had: the
			// pid namespace still ends everything.
			leaf, err = &cgroup.Leaf{}, nil
		}
		if err == nil {
			j.leaf = leaf
		}
		return err
	}
}

// controllerOf tells which controller's values stand for a budget item.
var controllerOf = map[Item]cgroup.Controller{
	ItemMemory: cgroup.Memory, ItemPIDs: cgroup.Pids, ItemCPUs: cgroup.CPU,
}

// mechanisms of items that no value of a cgroup stands for.
var mechanisms = map[Item]string{
	ItemWall: byClock, ItemCPUTime: byCPUCount, ItemOutput: byLauncher, ItemTmp: byTmpfs, ItemCalls: byLauncher, ItemBytes: byLauncher,
}

// budgetLines echoes what was asked for and what the kernel made of it.
func (j *Jail) budgetLines(given map[Item]bool) []BudgetLine {
	lines := []BudgetLine{}
	applied := j.leaf.Applied()
	for _, item := range Items() {
		asked := j.spec.Budget.asked(item)
		if asked == 0 {
			continue
		}
		line := BudgetLine{Item: item, Asked: asked}
		if c, ok := controllerOf[item]; ok && !given[item] {
			// The first value is the limit; others (swap, OOM group) belong to it.
			i := slices.IndexFunc(applied, func(a cgroup.Applied) bool { return a.Controller == c })
			a := applied[i]
			line.EnforcedBy = a.File
			switch item {
			case ItemMemory:
				line.ReadBack = float64(a.Read)
			case ItemPIDs:
				line.EnforcedBy, line.ReadBack = a.File+", less one for the init", float64(a.Read-1)
			case ItemCPUs:
				line.ReadBack = asked * float64(a.Read) / float64(a.Wrote)
			}
		} else if !given[item] {
			line.EnforcedBy, line.ReadBack = mechanisms[item], asked
		}
		lines = append(lines, line)
	}
	return lines
}

// closers collects the child's ends of descriptors, which the launcher closes
// once the init has them: an end of file would never come otherwise.
type closers []io.Closer

func (c *closers) add(f io.Closer) { *c = append(*c, f) }
func (c *closers) Close() {
	for _, f := range *c {
		f.Close()
	}
	*c = nil
}

// launch makes the descriptors, forks the init and sees it through set-up.
func (j *Jail) launch(ctx context.Context, template *rootfs.Template, filter *seccomp.Filter) error {
	b := j.spec.Budget
	var theirs closers
	defer theirs.Close()
	files := make([]*os.File, jailinit.FDTasks)

	if err := j.makeStdio(files, &theirs); err != nil {
		return setupError("stdio", err)
	}
	if j.spec.Script != nil {
		var err error
		if j.channels, err = newChannels(files[3:5], &theirs); err != nil {
			return setupError("channels", err)
		}
	}
	control, end, err := wire.Pair()
	if err != nil {
		return setupError("control", err)
	}
	theirs.add(end)
	j.control = control
	files[jailinit.FDControl] = end
	files[jailinit.FDTemplate] = template.Namespace()
	files[jailinit.FDLeaf] = j.leaf.Dir()
	files = append(files, j.leaf.Tasks()...)

	request := jailinit.Request{
		Args: j.spec.Args, Env: j.spec.environment(),
		UID: defaultUID, GID: defaultUID,
		InitID:   runIDs + 2*j.number + 1,
		Hostname: hostname, Dir: defaultDir,
		Wall:      b.WallClock,
		OpenFiles: defaultOpenFiles,
		Filter:    filter.Program(),
		Leaf:      j.leaf.Dir() != nil,
		Channels:  j.channels != nil,
		Tasks:     len(j.leaf.Tasks()),
	}
	for _, l := range template.Late() {
		request.Late = append(request.Late, jailinit.Late(l))
	}
	if j.spec.Dir != "" {
		request.Dir = j.spec.Dir
	}
	if u := j.spec.User; u != nil {
		request.UID, request.GID = u.UID, u.GID
	}
	if b.OpenFiles > 0 {
		request.OpenFiles = uint32(b.OpenFiles)
	}
	if b.CPUTime > 0 {
		// For one process the kernel stops at the second; the budget over
		// all of them is the launcher's to watch.
		request.CPUSeconds = uint32(min(b.CPUTime/time.Second+2, 1<<30))
	}
	if request.Wall > 0 {
		request.Wall += initSlack
	}
	request.TmpOptions = tmpOptions(b.MaxTmp)
	outer := template.OwnerID()
	if outer == 0 {
		outer = runIDs + 2*j.number
	}
	request.UIDMap = fmt.Sprintf("%d %d 1\n%d %d 1\n", request.UID, outer, request.InitID, request.InitID)
	request.GIDMap = fmt.Sprintf("%d %d 1\n%d %d 1\n", request.GID, outer, request.InitID, request.InitID)
	encoded, err := request.Encode()
	if err != nil {
		if errors.Is(err, jailinit.ErrTooLarge) {
			return &RefusedError{Items: []Refusal{{Item: "args", Reason: err.Error(), Fix: "pass large data by a file or by stdin"}}}
		}
		return setupError("request", err)
	}

	stager, network, err := fork(files)
	if err != nil {
		return setupError("fork", err)
	}
	if network {
		jailinit.KeepNetwork(encoded)
	}
	theirs.Close()
	j.stager = stager
	stop := context.AfterFunc(ctx, func() { _ = control.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	err = j.handshake(encoded)
	if err != nil && ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

// initSlack is how much later than the launcher pid 1 acts on the wall clock:
// it decides only if the launcher is stopped or starved (J16).
const initSlack = 20 * time.Millisecond

// tmpOptions sizes the tmpfs behind /tmp and /dev/shm. Without a limit the
// memory limit is what bounds it.
func tmpOptions(size int64) string {
	inodes := int64(0)
	if size > 0 {
		inodes = max(size/4096, 16)
	}
	return fmt.Sprintf("mode=0755,size=%d,nr_inodes=%d", size, inodes)
}

// handshake sends the request and follows the init until the program has been
// executed.
func (j *Jail) handshake(request []byte) error {
	if err := j.control.SetDeadline(time.Now().Add(setupTimeout)); err != nil {
		return setupError("control", err)
	}
	if _, err := j.control.Write(request); err != nil {
		// A stager that refuses the request has said why before it went.
		if !errors.Is(err, syscall.EPIPE) && !errors.Is(err, syscall.ECONNRESET) {
			return setupError("control", err)
		}
	}
	for {
		m, err := j.receive()
		if err != nil {
			return setupError("control", fmt.Errorf("init ended during set-up: %w", err))
		}
		switch m.Kind {
		case jailinit.Child:
			if err := j.adopt(int(m.A)); err != nil {
				return setupError("clone", err)
			}
		case jailinit.Failed:
			return j.initFault(m)
		case jailinit.Started:
			j.released = int64(m.T)
			j.tmpSize(int64(m.U))
			if _, _, err := reap(j.stager); err != nil {
				return setupError("clone", fmt.Errorf("wait for the stager: %w", err))
			}
			j.stager = 0
			return j.control.SetDeadline(time.Time{})
		default:
			return setupError("control", fmt.Errorf("unexpected message %d of the init", m.Kind))
		}
	}
}

// initFault names the object of a step that failed in the init.
func (j *Jail) initFault(m jailinit.Message) error {
	stage, errno := jailinit.Stage(m.A), error(syscall.Errno(m.C))
	switch stage {
	case jailinit.StageExec:
		errno = fmt.Errorf("%s: %w", clip(j.spec.Args[0]), errno)
	case jailinit.StageWorkdir:
		errno = fmt.Errorf("%s: %w", clip(j.spec.Dir), errno)
	}
	return &SetupError{Stage: stage.String(), Index: int(m.B), Err: errno, inside: true}
}

// receive reads one message of the init.
func (j *Jail) receive() (jailinit.Message, error) {
	var buf [jailinit.MessageSize]byte
	if _, err := io.ReadFull(j.control, buf[:]); err != nil {
		return jailinit.Message{}, err
	}
	return jailinit.Decode(buf[:])
}

// adopt takes pid 1 over: the stager cloned it as a child of this process.
func (j *Jail) adopt(pid int) error {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if err != nil {
		return fmt.Errorf("open pidfd of the init: %w", err)
	}
	j.pid, j.pidfd = pid, os.NewFile(uintptr(fd), "pidfd")
	return nil
}

// tmpSize puts the size that the kernel gave /tmp into the budget's echo.
func (j *Jail) tmpSize(size int64) {
	for i := range j.budget {
		if j.budget[i].Item == ItemTmp {
			j.budget[i].ReadBack = float64(size)
		}
	}
}

// makeStdio gives the program its fds 0 to 2: pipes, and /dev/null for an input
// that is empty. Nothing of the caller's own, a terminal least of all, reaches
// the jail (CVE-2017-5226).
func (j *Jail) makeStdio(files []*os.File, theirs *closers) error {
	if j.spec.Stdin == nil {
		null, err := os.Open(os.DevNull)
		if err != nil {
			return err
		}
		theirs.add(null)
		files[0] = null
	} else {
		r, w, err := pipe(true)
		if err != nil {
			return err
		}
		theirs.add(r)
		files[0], j.stdin = r, w
	}
	j.allow = newAllowance(j.spec.Budget.MaxOutput)
	for i, to := range []io.Writer{j.spec.Stdout, j.spec.Stderr} {
		r, w, err := pipe(false)
		if err != nil {
			return err
		}
		theirs.add(w)
		files[1+i] = w
		*[]**stream{&j.stdout, &j.stderr}[i] = newStream(r, to, j.allow)
	}
	return nil
}

// pipe makes a pipe of which the launcher's end (the write end if writes) is
// non-blocking and in the poller, and the program's end is an ordinary one.
func pipe(writes bool) (r, w *os.File, err error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return nil, nil, os.NewSyscallError("pipe2", err)
	}
	ours := fds[0]
	if writes {
		ours = fds[1]
	}
	if err := unix.SetNonblock(ours, true); err != nil {
		unix.Close(fds[0])
		unix.Close(fds[1])
		return nil, nil, os.NewSyscallError("fcntl", err)
	}
	return os.NewFile(uintptr(fds[0]), "pipe"), os.NewFile(uintptr(fds[1]), "pipe"), nil
}

// dismantle removes whatever set-up had made when it failed. It is safe on a
// jail at any stage.
func (j *Jail) dismantle() {
	switch {
	case j.stager > 0:
		// Both tasks of a set-up are in the stager's process group until it
		// is reaped, so this reaches a pid 1 that was never announced.
		_ = unix.Kill(-j.stager, unix.SIGKILL)
		if j.pid > 0 {
			_ = unix.Kill(j.pid, unix.SIGKILL)
			_, _, _ = reap(j.pid)
		}
		for {
			if _, _, err := reap(-j.stager); err != nil {
				break
			}
		}
	case j.pid > 0:
		_ = unix.Kill(j.pid, unix.SIGKILL)
		_, _, _ = reap(j.pid)
	}
	if j.pidfd != nil {
		j.pidfd.Close()
	}
	if j.control != nil {
		j.control.Close()
	}
	if j.stdin != nil {
		j.stdin.Close()
	}
	for _, s := range []*stream{j.stdout, j.stderr} {
		if s != nil {
			s.from.Close()
		}
	}
	if j.channels != nil {
		j.channels.close()
	}
	if j.leaf != nil {
		_ = j.leaf.Kill()
		_ = removeLeaf(j.leaf)
	}
}
