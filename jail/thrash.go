package jail

import (
	"fmt"
	"time"

	"example.com/jail/cgroup"
)

// thrashWatch notices a program that has run out of memory and is not killed for
// it: close to its limit the kernel drops the pages of the program's own code,
// reads them again at the next instruction, and as long as some can be dropped
// it kills nothing. Seen on v1 and v2, with code that no other cgroup has in the
// page cache: 10 s until the kill on Linux 6.18, none in 100 s on a slow machine.
//
// What it goes by are the kernel's books of the leaf, not the program's behaviour.
type thrashWatch struct {
	leaf  *cgroup.Leaf
	limit int64
	last  *cgroup.Reclaim // at the last look, nil if it was not close to the limit then
	t     *time.Ticker
	c     <-chan time.Time
}

// thrashEvery is how often it looks: a jail that is shorter costs nothing.
const thrashEvery = time.Second

func newThrashWatch(leaf *cgroup.Leaf, limit int64) *thrashWatch {
	w := &thrashWatch{leaf: leaf, limit: limit, last: &cgroup.Reclaim{}}
	if limit > 0 {
		w.t = time.NewTicker(thrashEvery)
		w.c = w.t.C
	}
	return w
}

// check tells what the kernel counted since the last look if that is the end, and
// nothing otherwise.
func (w *thrashWatch) check() string {
	last := w.last
	w.last = nil
	used, err := w.leaf.MemoryUsage()
	if err != nil || used < w.limit-w.little() {
		return ""
	}
	now, err := w.leaf.Reclaim()
	if err != nil {
		return "" // the kernel does not count it
	}
	w.last = &now
	if last == nil {
		return ""
	}
	again, faults := now.Refaults-last.Refaults, now.MajorFaults-last.MajorFaults
	if !thrashing(again, faults, now.FilePages, w.little()) {
		return ""
	}
	return fmt.Sprintf("%d of %d bytes used, and in %s the kernel dropped and read again %d bytes of files, of which %d are left",
		used, w.limit, thrashEvery, again, now.FilePages)
}

// little is what makes no difference to the limit.
func (w *thrashWatch) little() int64 { return max(w.limit/32, 1<<20) }

// thrashing judges one interval of a leaf at its limit. Reading again alone is no
// sign: a program may work on files that are larger than its memory. Out of
// memory is who has little left that could be dropped, reads all of that again
// many times over, and by page faults, as code is.
func thrashing(again, faults, files, little int64) bool {
	return files <= little && again >= 8*max(files, 256<<10) && faults >= 20
}

func (w *thrashWatch) stop() {
	if w.t != nil {
		w.t.Stop()
	}
}
