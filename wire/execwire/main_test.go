package execwire

import (
	"bytes"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"testing"
	"time"
)

// TestMain fails if a test leaves a goroutine of this package behind, and shows
// where a test hangs.
func TestMain(m *testing.M) {
	watchdog := time.AfterFunc(4*time.Minute, func() {
		debug.SetTraceback("all")
		panic("the tests hang")
	})
	code := m.Run()
	watchdog.Stop()
	left := ownGoroutines()
	for range 100 {
		if len(left) == 0 {
			os.Exit(code)
		}
		time.Sleep(10 * time.Millisecond)
		left = ownGoroutines()
	}
	fmt.Fprintf(os.Stderr, "%d goroutines are left\n%s\n", len(left), bytes.Join(left, []byte("\n\n")))
	os.Exit(1)
}

// ownGoroutines are the stacks that run code of this package, but for the
// caller's, which is the first.
func ownGoroutines() [][]byte {
	buf := make([]byte, 1<<20)
	stacks := bytes.Split(buf[:runtime.Stack(buf, true)], []byte("\n\n"))
	var own [][]byte
	for _, s := range stacks[1:] {
		if bytes.Contains(s, []byte("/execwire.")) {
			own = append(own, s)
		}
	}
	return own
}
