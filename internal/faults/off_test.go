//go:build !faults

package faults

import (
	"bytes"
	"os"
	"testing"
)

// A build without the tag has nothing of a step, not even its name.
func TestNothingIsLeftOfAStep(t *testing.T) {
	Here("fault.test.step")
	exe, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	// Put together here, so that these are not in the binary either.
	for name, want := range map[string]bool{"fault.test" + suffix(".step"): false, "a control: " + suffix("in the binary"): true} {
		if got := bytes.Contains(exe, []byte(name)); got != want {
			t.Errorf("%q is in the binary: %t, want %t", name, got, want)
		}
	}
	control(t, "a control: in the binary")
}

//go:noinline
func suffix(s string) string { return s }

//go:noinline
func control(t *testing.T, s string) { t.Log(s) }

func BenchmarkHere(b *testing.B) {
	for b.Loop() {
		Here("fault.test.benchmark")
	}
}

func BenchmarkNothing(b *testing.B) {
	for b.Loop() {
	}
}
