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
	last  cgroup.Stall
	t     *time.Ticker
	c     <-chan time.Time
}

// thrashEvery is how often it looks: a jail that is shorter costs nothing. Of that
// time it takes thrashStall of waiting: 0.75 s were seen on an idle machine, less
// where programs wait for a processor, too.
const (
	thrashEvery = time.Second
	thrashStall = 300 * time.Millisecond
)

func newThrashWatch(leaf *cgroup.Leaf, limit int64) *thrashWatch {
	w := &thrashWatch{leaf: leaf, limit: limit}
	if limit > 0 {
		w.t = time.NewTicker(thrashEvery)
		w.c = w.t.C
	}
	return w
}

// check tells what the kernel counted since the last look if that is the end, and
// nothing otherwise. Where the kernel counts no stalls it stops looking.
func (w *thrashWatch) check() string {
	now, err := w.leaf.MemoryStall()
	if err != nil {
		w.stop()
		return ""
	}
	stalled := now.Full - w.last.Full
	w.last = now
	if stalled < thrashStall {
		return ""
	}
	used, err := w.leaf.MemoryUsage()
	if err != nil {
		return ""
	}
	files, err := w.leaf.FilePages()
	if err != nil || !thrashing(stalled, used, files, w.limit) {
		return ""
	}
	return fmt.Sprintf("all processes waited for memory for %d of %d ms, %d bytes of %d used, %d of them file pages",
		stalled.Milliseconds(), thrashEvery.Milliseconds(), used, w.limit, files)
}

// thrashing judges one interval. Waiting alone is no sign: memory.high makes a
// program wait below its limit, the host's or an ancestor's lack of memory does,
// and a program may work, slowly, on files that are larger than its memory. Out
// of memory is who waits again and again at the limit with next to nothing left
// that could be dropped.
func thrashing(stalled time.Duration, used, files, limit int64) bool {
	little := max(limit/32, 1<<20)
	return stalled >= thrashStall && used >= limit-little && files <= little
}

func (w *thrashWatch) stop() {
	if w.t != nil {
		w.t.Stop()
	}
}
