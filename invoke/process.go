package invoke

import (
	"errors"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// pipeGrace is how long the pipes of an ended process may stay open because
// something outside of its group holds them.
const pipeGrace = time.Second

// process is a started command that leads a process group of its own. It stays
// unreaped until end, so that its pid, which is the group's id, cannot come to
// mean somebody else's processes before the group is killed.
type process struct {
	cmd *exec.Cmd
	// exited is closed when the leader ended by itself or was killed.
	exited chan struct{}

	once sync.Once
	err  error
}

// startProcess starts cmd. The kernel kills the command if this process dies.
func startProcess(cmd *exec.Cmd) (*process, error) {
	p := &process{cmd: cmd, exited: make(chan struct{})}
	cmd.WaitDelay = pipeGrace
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	started := make(chan error, 1)
	go func() {
		// The parent that PR_SET_PDEATHSIG watches is a thread: this one has to
		// live as long as the command (golang/go#27505).
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err != nil {
			return
		}
		for {
			err := unix.Waitid(unix.P_PID, cmd.Process.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
			if !errors.Is(err, unix.EINTR) {
				break
			}
		}
		close(p.exited)
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return p, nil
}

// end kills what is left of the group, waits for the leader and gives its exit
// status as exec.Cmd.Wait does. It can be called more than once.
func (p *process) end() error {
	p.once.Do(func() {
		// The leader is alive or a zombie here, so the group is ours.
		_ = unix.Kill(-p.cmd.Process.Pid, unix.SIGKILL)
		<-p.exited
		// A child that the leader forked while it was being killed.
		_ = unix.Kill(-p.cmd.Process.Pid, unix.SIGKILL)
		p.err = p.cmd.Wait()
	})
	return p.err
}

// inherited are the variables that a command gets from this process; everything
// else has to be declared (E31).
var inherited = wordSet("PATH HOME TMPDIR TZ LANG TERM USER LOGNAME")

// hostEnviron is the allow-listed part of this process's environment.
func hostEnviron() []string {
	var env []string
	for _, kv := range os.Environ() {
		name, _, _ := strings.Cut(kv, "=")
		if inherited[name] || strings.HasPrefix(name, "LC_") {
			env = append(env, kv)
		}
	}
	return env
}

// tail keeps the last bytes of what is written to it.
type tail struct {
	mu   sync.Mutex
	keep int
	buf  []byte
	cut  bool
}

func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := len(b)
	if len(b) > t.keep {
		b, t.cut = b[len(b)-t.keep:], true
	}
	t.buf = append(t.buf, b...)
	if over := len(t.buf) - t.keep; over > 0 {
		t.buf = append(t.buf[:0], t.buf[over:]...)
		t.cut = true
	}
	return n, nil
}

// String is what was kept, as valid UTF-8 without white space around it.
func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := strings.TrimSpace(strings.ToValidUTF8(string(t.buf), "?"))
	if t.cut {
		s = "..." + s
	}
	return s
}

// capped keeps up to max bytes and then fails and closes over.
type capped struct {
	max  int
	buf  []byte
	over chan struct{}
	once sync.Once
}

var errOutput = errors.New("too much output")

func (c *capped) Write(b []byte) (int, error) {
	if len(c.buf)+len(b) > c.max {
		c.once.Do(func() { close(c.over) })
		return 0, errOutput
	}
	c.buf = append(c.buf, b...)
	return len(b), nil
}
