package jail

import "testing"

func TestThrashing(t *testing.T) {
	const little = 2 << 20 // of 64 MiB
	for _, c := range []struct {
		name                 string
		again, faults, files int64
		want                 bool
	}{
		// From the kernel's books, a second of each.
		{"Python with cold code, Linux 6.18 on v1", 325 << 20, 733, 516096, true},
		{"Python with cold code, emulated Linux 6.1 on v2", 52 << 20, 430, 225280, true},
		{"the same at its end", 73 << 20, 594, 147456, true},
		{"on a disk of 100 reads a second", 6 << 20, 100, 516096, true},

		{"nothing was dropped", 0, 0, 1 << 20, false},
		{"more code is loaded for the first time", 0, 800, 1 << 20, false},
		{"a file is read again and again", 500 << 20, 3, 1 << 20, false},
		{"a mapped file that is larger than the memory", 500 << 20, 4000, 30 << 20, false},
		{"some code came back", 1 << 20, 50, 1 << 20, false},
	} {
		if got := thrashing(c.again, c.faults, c.files, little); got != c.want {
			t.Errorf("%s: %t", c.name, got)
		}
	}
}
