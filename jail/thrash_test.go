package jail

import (
	"testing"
	"time"
)

func TestThrashing(t *testing.T) {
	const limit = 64 << 20
	for _, c := range []struct {
		name        string
		stalled     time.Duration
		used, files int64
		limit       int64
		want        bool
	}{
		// Read from the kernel's books, Linux 6.18.
		{"Python with cold code, at its limit", 740 * time.Millisecond, limit, 516096, limit, true},
		{"the same, a page below the limit", 740 * time.Millisecond, limit - 4096, 516096, limit, true},
		{"a program that works in between", 200 * time.Millisecond, limit, 516096, limit, false},
		{"held back by memory.high", 990 * time.Millisecond, limit / 2, 0, limit, false},
		{"the host's lack of memory", 990 * time.Millisecond, limit - 8<<20, 0, limit, false},
		{"a file larger than the memory, on a slow disk", 990 * time.Millisecond, limit, limit / 2, limit, false},
		{"1 GiB, 30 MiB of it files", 800 * time.Millisecond, 1 << 30, 30 << 20, 1 << 30, true},
		{"8 MiB", 800 * time.Millisecond, 8 << 20, 500 << 10, 8 << 20, true},
	} {
		if got := thrashing(c.stalled, c.used, c.files, c.limit); got != c.want {
			t.Errorf("%s: %t", c.name, got)
		}
	}
}
