package cgroup

import (
	"errors"
	"fmt"
	"io"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// reread maps a file and touches all of it, once for each line that it gets.
var _ = register("reread", func(args []string) {
	f, err := os.Open(args[0])
	if err != nil {
		fmt.Println(err)
		return
	}
	info, err := f.Stat()
	if err != nil {
		fmt.Println(err)
		return
	}
	m, err := unix.Mmap(int(f.Fd()), 0, int(info.Size()), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		fmt.Println(err)
		return
	}
	sum := 0
	for line := make([]byte, 1); ; {
		for i := 0; i < len(m); i += 4096 {
			sum += int(m[i])
		}
		fmt.Println("touched", sum)
		if _, err := io.ReadFull(os.Stdin, line); err != nil {
			return
		}
	}
})

// A file that is larger than the memory is dropped and read again.
func TestReclaim(t *testing.T) {
	const limit = 32 << 20
	leaf := newTestLeaf(t, need(t, Memory), Limits{Memory: limit})
	if r, err := leaf.Reclaim(); r != (Reclaim{}) || err != nil {
		t.Errorf("fresh: %+v, %v", r, err)
	}
	dir, err := os.MkdirTemp("/var/tmp", "jail-cgroup") // never a tmpfs, whose pages stay
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	f, err := os.Create(dir + "/file")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.Write(make([]byte, 2*limit)); err != nil {
		t.Fatal(err)
	}
	// It is charged to whoever reads it next.
	if err := errors.Join(f.Sync(), unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)); err != nil {
		t.Fatal(err)
	}
	p := start(t, leaf, helperCmd("reread", f.Name()))
	var first, r Reclaim
	for round := range 3 {
		p.expect(t, "touched 0")
		// What the kernel counts for each processor comes with a delay.
		within("the pages are counted", 20*time.Second, func() bool {
			if r, err = leaf.Reclaim(); err != nil {
				t.Fatal(err)
			}
			return r.FilePages > limit/4 && r.MajorFaults > first.MajorFaults && (round == 0 || r.Refaults > first.Refaults)
		})
		if r.FilePages > limit {
			t.Errorf("%+v of %d", r, limit)
		}
		if first = r; round < 2 {
			fmt.Fprint(p.in, "\n")
		}
	}
	if n, err := newTestLeaf(t, need(t, Pids), Limits{Pids: 5}).Reclaim(); err == nil {
		t.Errorf("memory is not limited: %+v", n)
	}
}

// What was read again is bytes, whatever the kernel prints.
func TestRefaultsAreBytes(t *testing.T) {
	for _, c := range []struct {
		version version
		n, want int64
	}{
		{v2{}, 3, 3 << 12}, {v2{}, 4096, 4096 << 12},
		{v1{}, 3, 3 << 12}, {v1{}, 4097, 4097 << 12}, {v1{}, 0, 0},
		{v1{}, 3 << 12, 3 << 12}, // an older kernel
	} {
		if got := c.version.refaulted(c.n); os.Getpagesize() == 4096 && got != c.want {
			t.Errorf("%s: %d is %d bytes, want %d", c.version, c.n, got, c.want)
		}
	}
}
