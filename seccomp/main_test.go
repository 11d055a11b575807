package seccomp

import (
	"encoding/json"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The test binary runs itself as a helper that loads a filter and then makes
// calls or becomes another program.
const (
	helperEnv = "SECCOMP_TEST_HELPER"
	filterEnv = "SECCOMP_TEST_FILTER"
)

func TestMain(m *testing.M) {
	switch mode := os.Getenv(helperEnv); mode {
	case "":
	case "calls":
		helperCalls()
		return
	case "exec":
		helperExec()
	default:
		panic("unknown helper " + mode)
	}
	// A child that hangs shows where.
	watchdog := time.AfterFunc(5*time.Minute, func() {
		debug.SetTraceback("all")
		panic("the tests hang")
	})
	code := m.Run()
	watchdog.Stop()
	os.Exit(code)
}

// marker stands for EPERM in the filter "marked": no kernel code returns it, so
// a call that gives it was refused by the filter and not by something else.
const marker = unix.Errno(3131)

func helperFilter() *Filter {
	switch name := os.Getenv(filterEnv); name {
	case "bare":
		return &Filter{}
	case "marked":
		p := Default()
		for i := range p.Rules {
			if p.Rules[i].Action == Errno(unix.EPERM) {
				p.Rules[i].Action = Errno(marker)
			}
		}
		f, err := Compile(p)
		if err != nil {
			panic(err)
		}
		return f
	default:
		f, err := Load(name)
		if err != nil {
			panic(err)
		}
		return f
	}
}

// install puts a filter on all threads of this process.
func install(f *Filter) {
	if f.Len() == 0 {
		return
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		panic(err)
	}
	prog := f.Program()
	fprog := unix.SockFprog{Len: uint16(len(prog)), Filter: &prog[0]}
	_, _, e := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC,
		uintptr(unsafe.Pointer(&fprog)))
	runtime.KeepAlive(prog)
	if e != 0 {
		panic(e)
	}
}

// sysCall is one call for the helper; Path, if set, is what argument PathArg
// points to.
type sysCall struct {
	NR      uint64
	Args    [6]uint64
	Path    string
	PathArg int
}

// sysResult is what the call returned: Errno as a number, 0 for success.
type sysResult struct {
	Value int64
	Errno int
}

func helperCalls() {
	var calls []sysCall
	if err := json.NewDecoder(os.Stdin).Decode(&calls); err != nil {
		panic(err)
	}
	out := make([]sysResult, len(calls))
	install(helperFilter())
	for i, c := range calls {
		var a [6]uintptr
		for k, v := range c.Args {
			a[k] = uintptr(v)
		}
		var path []byte
		if c.Path != "" {
			path = append([]byte(c.Path), 0)
			a[c.PathArg] = uintptr(unsafe.Pointer(&path[0]))
		}
		r, _, e := unix.Syscall6(uintptr(c.NR), a[0], a[1], a[2], a[3], a[4], a[5])
		runtime.KeepAlive(path)
		out[i] = sysResult{Value: int64(r), Errno: int(e)}
	}
	if err := json.NewEncoder(os.Stdout).Encode(out); err != nil {
		panic(err)
	}
}

func helperExec() {
	f := helperFilter()
	if len(os.Args) < 2 {
		panic("nothing to execute")
	}
	env := os.Environ()
	install(f)
	err := unix.Exec(os.Args[1], os.Args[1:], env)
	fmt.Fprintf(os.Stderr, "execute %s: %v\n", os.Args[1], err)
	os.Exit(126)
}
