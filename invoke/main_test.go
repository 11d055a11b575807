package invoke

import (
	"fmt"
	"os"
	"runtime"
	"runtime/pprof"
	"strings"
	"testing"
	"time"
)

// helperVar names the helper that the test binary runs as instead of the tests.
const helperVar = "INVOKE_TEST_HELPER"

var helpers = map[string]func(args []string) int{}

// helperUsed collects the helpers that a test asked for: one that none asks for
// is dead code.
var helperUsed = map[string]bool{}

// helperCommand is the command line and environment of helper name.
func helperCommand(name string, args ...string) (argv []string, env string) {
	if helpers[name] == nil {
		panic("no helper " + name)
	}
	helperUsed[name] = true
	return append([]string{os.Args[0]}, args...), helperVar + "=" + name
}

func TestMain(m *testing.M) {
	if h := helpers[os.Getenv(helperVar)]; h != nil {
		os.Exit(h(os.Args[1:]))
	}
	code := m.Run()
	if code == 0 {
		code = leaks()
	}
	os.Exit(code)
}

// leaks fails the run if a goroutine or a child process outlived the tests, or a
// helper was never used.
func leaks() int {
	code := 0
	deadline := time.Now().Add(10 * time.Second)
	for {
		goroutines, children := runtime.NumGoroutine(), children()
		if goroutines <= 2 && len(children) == 0 {
			break
		}
		if time.Now().After(deadline) {
			fmt.Printf("LEAK: %d goroutines, child processes %v\n", goroutines, children)
			_ = pprof.Lookup("goroutine").WriteTo(os.Stdout, 1)
			code = 1
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	if len(os.Args) < 2 || !strings.Contains(strings.Join(os.Args, " "), "-test.run=") {
		for name := range helpers {
			if !helperUsed[name] {
				fmt.Printf("UNUSED helper %s\n", name)
				code = 1
			}
		}
	}
	return code
}

// children lists this process's children that are not reaped, zombies included.
func children() []string {
	var out []string
	tasks, _ := os.ReadDir("/proc/self/task")
	for _, t := range tasks {
		b, _ := os.ReadFile("/proc/self/task/" + t.Name() + "/children")
		out = append(out, strings.Fields(string(b))...)
	}
	return out
}

// openFDs counts this process's file descriptors.
func openFDs(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}
