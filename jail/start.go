package jail

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"example.com/jail/cgroup"
	"example.com/jail/internal/faults"
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

// Prepare begins what the first run of a process takes longest for, beside what
// the caller does before its first [Start]. It need not be called.
func Prepare() {
	// The forker stays in this process's cgroup, out of which it may have to
	// move first.
	if host, err := cgroup.Probe(); err == nil && !host.MayMove() {
		_, _ = theForker.get() // an error is met again, and told, at the fork
	}
}

// Settle waits until the first run's clean-up after dead launchers is done, and
// ends the helper process that starts this process's jails: the next Start makes
// another. A program that exits after its runs calls it at its end; where it does
// not, the helper ends with it. The helper keeps the rights, priority and cgroup
// that this process had at its first start: a program that gives some of them up
// calls Settle first.
func Settle() {
	theForker.stop()
	if settled.Load() { // else there was no first run
		<-collectOnce()
	}
}

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
	j, err := start(ctx, spec, released)
	if err != nil {
		return nil, err
	}
	go j.supervise(ctx)
	return j, nil
}

// parking is what becomes of a jail that has been made.
type parking int

const (
	released parking = iota // its program is started
	parked                  // it waits in a pool
	yielding                // it waits in a pool, and is made at the lowest priority
)

// start makes a jail and releases its program or, in a pool, parks it.
func start(ctx context.Context, spec Spec, park parking) (*Jail, error) {
	for again := false; ; again = true {
		j := &Jail{spec: spec, kill: make(chan struct{}), done: make(chan struct{})}
		err := j.setUp(ctx, park)
		if err == nil {
			collectOnce()
			return j, nil
		}
		j.dismantle()
		var setup *SetupError
		if again || !errors.As(err, &setup) {
			return nil, err
		}
		// Once more, if the forker was killed with the request, or if the
		// template has gone bad: a directory that it mounts over was removed,
		// say. It is built anew.
		if !errors.Is(err, errForkerGone) && (!setup.stale() || spec.templates().Discard(spec.Root) != nil) {
			return nil, err
		}
	}
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

// setUp makes everything that the jail consists of. The init is forked first: it
// gets as far as it can while leaf and template are made here. What was made is
// in j, for dismantle.
func (j *Jail) setUp(ctx context.Context, park parking) error {
	var theirs closers
	defer theirs.Close()
	files, err := j.descriptors(&theirs)
	if err != nil {
		return err
	}
	faults.Here("jail.descriptors")
	fork := func() error {
		defer theirs.Close()
		if err := theForker.fork(files); err != nil {
			return setupError("fork", err)
		}
		j.forked = true
		return nil
	}
	if settled.Load() {
		if err := fork(); err != nil {
			return err
		}
	}
	host, err := cgroup.Probe()
	if err != nil {
		return setupError("cgroup", err)
	}
	// A child of the launcher would stand in the way of its moving.
	if !j.forked && !host.MayMove() {
		if err := fork(); err != nil {
			return err
		}
	}
	if err := j.makeLeaf(host); err != nil {
		return err
	}
	template, err := j.openTemplate()
	if err != nil {
		return err
	}
	if !j.forked {
		if err := fork(); err != nil {
			return err
		}
	}
	return j.launch(ctx, template, park)
}

// settled says that a leaf could be made: nothing has to be moved for the next.
var settled atomic.Bool

// openTemplate gets the root, and the filter for it.
func (j *Jail) openTemplate() (*rootfs.Template, error) {
	template, err := j.spec.templates().Open(j.spec.Root)
	if err != nil {
		if errors.Is(err, rootfs.ErrInvalid) {
			return nil, setupError(stageMount, err)
		}
		return nil, setupError(stageTemplate, err)
	}
	faults.Here("jail.template")
	j.filter = j.spec.Seccomp
	if j.filter == nil {
		if j.filter, err = defaultFilter(); err != nil {
			return nil, setupError("seccomp", err)
		}
	} else if template.WritesAsRoot() {
		return nil, &RefusedError{Items: []Refusal{{
			Item:   "bind",
			Reason: "a writable bind of a directory of root, without the default seccomp profile that denies set-uid files",
			Fix:    "give the directory to another user, bind it read-only, or use the default profile",
		}}}
	}
	return template, nil
}

// makeLeaf makes the leaf with the budget's limits. A host that cannot hold one
// of them refuses the run, unless the spec gives that one up.
func (j *Jail) makeLeaf(host *cgroup.Host) error {
	_, j.given = j.spec.unenforceable(false)
	err := j.claimLeaf(host)
	var missing *cgroup.UnsupportedError
	if errors.As(err, &missing) {
		var bad []Refusal
		if bad, j.given = j.spec.unenforceable(true); len(bad) > 0 {
			return &RefusedError{Items: bad}
		}
		err = j.claimLeaf(host)
	}
	if err != nil {
		return setupError("cgroup", err)
	}
	j.budget = j.budgetLines()
	settled.Store(true)
	faults.Here("jail.leaf")
	return nil
}

// limits is what the budget asks of the leaf, but for what is given up.
func (j *Jail) limits() cgroup.Limits {
	var limits cgroup.Limits
	for _, i := range items {
		if i.set != nil && i.asked(&j.spec.Budget) > 0 && !j.given[i.name] {
			i.set(&j.spec.Budget, &limits)
		}
	}
	return limits
}

// claimLeaf makes a leaf of a name that no run has.
func (j *Jail) claimLeaf(host *cgroup.Host) error {
	limits := j.limits()
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

// budgetLines echoes what was asked for and what the kernel made of it.
func (j *Jail) budgetLines() []BudgetLine {
	b := j.spec.Budget
	lines := []BudgetLine{}
	for _, i := range items {
		line := BudgetLine{Item: i.name, Asked: i.asked(&b)}
		if line.Asked == 0 {
			continue
		}
		if i.text != nil {
			line.AskedText = i.text(&b)
		}
		values := slices.DeleteFunc(j.leaf.Applied(), func(a cgroup.Applied) bool { return a.Controller != i.controller })
		switch {
		case j.given[i.name]:
		case len(values) == 0:
			line.EnforcedBy, line.ReadBack = i.by, line.Asked
		default:
			// The first value is the limit; others (swap, OOM group) belong to it.
			line.EnforcedBy, line.ReadBack = values[0].File, float64(values[0].Read)
			if i.echo != nil {
				i.echo(&line, values)
			}
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

// descriptors makes the program's ends of the pipes and channels and the init's
// of the control socket, in the order of their numbers.
func (j *Jail) descriptors(theirs *closers) ([]*os.File, error) {
	files := make([]*os.File, jailinit.FDControl+1)
	if err := j.makeStdio(files, theirs); err != nil {
		return nil, setupError("stdio", err)
	}
	if j.spec.Script != nil {
		var err error
		if j.channels, err = newChannels(files[3:5], theirs); err != nil {
			return nil, setupError("channels", err)
		}
	}
	control, end, err := wire.Pair()
	if err != nil {
		return nil, setupError("control", err)
	}
	theirs.add(end)
	j.control = control
	files[jailinit.FDControl] = end
	return files, nil
}

// launch sends the init its request and sees it through set-up.
func (j *Jail) launch(ctx context.Context, template *rootfs.Template, park parking) error {
	files := []*os.File{template.Namespace()}
	if d := j.leaf.Dir(); d != nil {
		files = append(files, d)
	}
	files = append(files, j.leaf.Tasks()...)
	request := jailinit.Request{
		UID: defaultUID, GID: defaultUID,
		InitID:   runIDs + 2*j.number + 1,
		Hostname: hostname,
		Files:    len(files),
		Leaf:     j.leaf.Dir() != nil,
		Channels: j.channels != nil,
		Hold:     park != released && j.channels == nil,
		Park:     park != released && j.channels != nil,
		Yield:    park == yielding && yields(),
	}
	for _, l := range template.Late() {
		request.Late = append(request.Late, jailinit.Late(l))
	}
	if u := j.spec.User; u != nil {
		request.UID, request.GID = u.UID, u.GID
	}
	outer := template.OwnerID()
	if outer == 0 {
		outer = runIDs + 2*j.number
	}
	request.TmpOptions = tmpOptions(j.spec.Budget.MaxTmp)
	request.UIDMap = fmt.Sprintf("%d %d 1\n%d %d 1\n", request.UID, outer, request.InitID, request.InitID)
	request.GIDMap = fmt.Sprintf("%d %d 1\n%d %d 1\n", request.GID, outer, request.InitID, request.InitID)
	j.request = request
	if err := j.handshake(ctx, files); err != nil {
		return j.starved(err)
	}
	j.leaf.Entered()
	return nil
}

// starved explains an init that was killed since the memory limit does not even
// let a jail be made.
func (j *Jail) starved(err error) error {
	if !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		return err
	}
	stats, statErr := j.leaf.Stats()
	scope, scopeErr := j.leaf.Scope()
	if statErr != nil || scopeErr != nil || stats.OOMKills <= 0 {
		return err
	}
	if scope != cgroup.Self {
		return setupError("memory", fmt.Errorf("the %s is out of it: %w", scope, syscall.ENOMEM))
	}
	return &RefusedError{Items: []Refusal{{
		Item:   string(ItemMemory),
		Reason: fmt.Sprintf("%d bytes are too few for the jail itself", j.spec.Budget.MaxMemory),
		Fix:    "give 1 MiB or more",
	}}}
}

// encodeRequest adds what is to be run, and for how long.
func (j *Jail) encodeRequest() ([]byte, error) {
	b := j.spec.Budget
	r := j.request
	r.Args, r.Env, r.Dir = j.spec.Args, j.spec.environment(), defaultDir
	if j.spec.Dir != "" {
		r.Dir = j.spec.Dir
	}
	r.Filter = j.filter.Program()
	r.OpenFiles = defaultOpenFiles
	if b.OpenFiles > 0 {
		r.OpenFiles = uint32(b.OpenFiles)
	}
	if b.CPUTime > 0 && !r.Park {
		// For one process the kernel stops at the second; the budget over
		// all of them is the launcher's to watch.
		r.CPUSeconds = uint32(min(b.CPUTime/time.Second+2, 1<<30))
	}
	if !r.Park && b.WallClock > 0 {
		r.Wall = b.WallClock + initSlack
	}
	encoded, err := r.Encode()
	if errors.Is(err, jailinit.ErrTooLarge) {
		return nil, &RefusedError{Items: []Refusal{{Item: "args", Reason: err.Error(), Fix: "pass large data by a file or by stdin"}}}
	}
	if err != nil {
		return nil, setupError("request", err)
	}
	return encoded, nil
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
// executed, or until it is held.
func (j *Jail) handshake(ctx context.Context, files []*os.File) error {
	request, err := j.encodeRequest()
	if err != nil {
		return err
	}
	if err := j.control.SetDeadline(time.Now().Add(setupTimeout)); err != nil {
		return setupError("control", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = j.control.SetDeadline(time.Unix(1, 0)) })
	err = j.converse(request, files)
	if err == nil {
		err = j.control.SetDeadline(time.Time{})
	}
	if !stop() && err == nil || err != nil && ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

func (j *Jail) converse(request []byte, files []*os.File) error {
	if err := sendFiles(j.control, request, files); err != nil {
		// An init that fails early has said why before it went.
		if !errors.Is(err, syscall.EPIPE) && !errors.Is(err, syscall.ECONNRESET) {
			return setupError("control", err)
		}
	}
	faults.Here("jail.sent")
	for {
		m, err := j.receive()
		if err != nil && j.stager == 0 && j.pid == 0 {
			return setupError("fork", fmt.Errorf("%w: %w", errForkerGone, err))
		}
		if err != nil {
			return setupError("control", fmt.Errorf("init ended during set-up: %w", err))
		}
		switch m.Kind {
		case jailinit.Forked:
			j.stager = int(m.A)
			faults.Here("jail.forked")
			continue
		case jailinit.Child:
			if err := j.adopt(int(m.A)); err != nil {
				return setupError("clone", err)
			}
			faults.Here("jail.child")
			continue
		case jailinit.Failed:
			return j.initFault(m)
		case jailinit.Held:
			faults.Here("jail.held")
		case jailinit.Started:
			j.released = int64(m.T)
			faults.Here("jail.started")
		default:
			return setupError("control", fmt.Errorf("unexpected message %d of the init", m.Kind))
		}
		j.readBack(int64(m.U))
		if j.stager > 0 {
			// ECHILD: the calling program ignores SIGCHLD, or reaps by itself.
			if _, _, err := reap(j.stager); err != nil && !errors.Is(err, syscall.ECHILD) {
				return setupError("clone", fmt.Errorf("wait for the stager: %w", err))
			}
			j.stager = 0
			faults.Here("jail.stager")
		}
		return nil
	}
}

// sendFiles writes to a socket, and passes descriptors with the first byte
// (unix(7), SCM_RIGHTS).
func sendFiles(socket *os.File, b []byte, files []*os.File) error {
	if len(files) > 0 {
		fds := make([]int, len(files))
		for i, f := range files {
			fds[i] = int(f.Fd())
		}
		c, err := socket.SyscallConn()
		if err != nil {
			return err
		}
		var n int
		var sendErr error
		err = c.Write(func(fd uintptr) bool {
			n, sendErr = unix.SendmsgN(int(fd), b, unix.UnixRights(fds...), nil, unix.MSG_NOSIGNAL)
			return sendErr != unix.EAGAIN && sendErr != unix.EINTR
		})
		runtime.KeepAlive(files)
		if err = errors.Join(err, sendErr); err != nil {
			return err
		}
		b = b[n:]
		faults.Here("jail.sending")
	}
	if len(b) == 0 {
		return nil // an empty packet is an end of file to the forker
	}
	_, err := socket.Write(b)
	return err
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

// readBack puts into the budget's echo the size that the kernel gave /tmp, and
// pid 1's limit of open files, which every process of the jail has from it.
func (j *Jail) readBack(tmp int64) {
	j.tmp = tmp
	for i := range j.budget {
		line := &j.budget[i]
		switch {
		case line.EnforcedBy == "":
		case line.Item == ItemTmp:
			line.ReadBack = float64(tmp)
		case line.Item == ItemOpenFiles:
			var files unix.Rlimit
			_ = unix.Prlimit(j.pid, unix.RLIMIT_NOFILE, nil, &files) // then it is 0
			line.ReadBack = float64(files.Cur)
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
	// By /dev/stdin, /dev/stdout or /dev/stderr the program opens its end anew, in
	// its own direction only. The pipe is the launcher's, so the last bits count.
	ours, mode := fds[0], uint32(0o602)
	if writes {
		ours, mode = fds[1], 0o604
	}
	if err := errors.Join(unix.SetNonblock(ours, true), unix.Fchmod(ours, mode)); err != nil {
		unix.Close(fds[0])
		unix.Close(fds[1])
		return nil, nil, os.NewSyscallError("fcntl", err)
	}
	return os.NewFile(uintptr(fds[0]), "pipe"), os.NewFile(uintptr(fds[1]), "pipe"), nil
}

// dismantle removes whatever set-up had made when it failed. It is safe on a
// jail at any stage.
func (j *Jail) dismantle() {
	if j.forked && j.pid == 0 {
		j.awaitStager()
	}
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
	faults.Here("jail.dismantle")
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
	faults.Here("jail.dismantle.leaf")
	if j.leaf != nil {
		_ = j.leaf.Kill()
		_ = removeLeaf(j.leaf)
	}
}

// awaitStager learns the pid of a stager that was asked for and not heard of yet.
// There is none if the forker said so, or is gone.
func (j *Jail) awaitStager() {
	if j.stager > 0 || j.control.SetDeadline(time.Now().Add(setupTimeout)) != nil {
		return
	}
	if m, err := j.receive(); err == nil && m.Kind == jailinit.Forked {
		j.stager = int(m.A)
	}
}
