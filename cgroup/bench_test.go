package cgroup

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// The leaf of an ordinary run, made and removed.
func BenchmarkLeaf(b *testing.B) {
	h := need(b, Memory, Pids)
	for b.Loop() {
		leaf, err := h.NewLeaf(newName(), Limits{Memory: 64 * mib, Pids: 64})
		if err != nil {
			b.Fatal(err)
		}
		if err := leaf.Remove(context.Background()); err != nil {
			b.Fatal(err)
		}
	}
}

// What the first run of a process pays before its leaf.
func BenchmarkFirstProbe(b *testing.B) {
	needRoot(b)
	for b.Loop() {
		h := freshHost(b)
		for _, c := range []Controller{Memory, Pids} {
			if s := h.Support(c); s.Err != nil {
				b.Fatal(s.Err)
			}
		}
	}
}

func BenchmarkCPUUsage(b *testing.B) {
	h := need(b, CPUAcct)
	leaf := newTestLeaf(b, h, Limits{CPUTime: true})
	for b.Loop() {
		if _, err := leaf.CPUUsage(); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkStats(b *testing.B) {
	h := need(b, Memory, Pids)
	leaf := newTestLeaf(b, h, Limits{Memory: 64 * mib, Pids: 64})
	for b.Loop() {
		if _, err := leaf.Stats(); err != nil {
			b.Fatal(err)
		}
	}
}

// The leaf of a run that asks for everything.
func BenchmarkLeafWithEverything(b *testing.B) {
	h := need(b, controllers...)
	for b.Loop() {
		leaf, err := h.NewLeaf(newName(), everything)
		if err != nil {
			b.Fatal(err)
		}
		if err := leaf.Remove(context.Background()); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkPressure(b *testing.B) {
	h := need(b, Pids)
	leaf := newTestLeaf(b, h, Limits{Pids: 5})
	if _, err := leaf.Pressure(); err != nil {
		b.Skip("NOT MEASURED: ", err)
	}
	for b.Loop() {
		if _, err := leaf.Pressure(); err != nil {
			b.Fatal(err)
		}
	}
}

// From the kill of four processes that are busy until all have been waited for:
// by cgroup.kill, one by one as on v1 alone, and by a bare loop over the pids.
func BenchmarkKill(b *testing.B) {
	h := need(b, Memory, Pids)
	for _, way := range []struct {
		name string
		kill func(leaf *Leaf, ps []*proc) error
	}{
		{"Leaf.Kill", func(leaf *Leaf, _ []*proc) error { return leaf.Kill() }},
		{"one by one", func(leaf *Leaf, _ []*proc) error { return killOneByOne(leaf.parts, killWithin) }},
		{"by pid", func(_ *Leaf, ps []*proc) (err error) {
			for _, p := range ps {
				err = p.cmd.Process.Kill()
			}
			return err
		}},
	} {
		b.Run(way.name, func(b *testing.B) {
			for b.Loop() {
				b.StopTimer()
				leaf, err := h.NewLeaf(newName(), Limits{Memory: 256 * mib, Pids: 100})
				if err != nil {
					b.Fatal(err)
				}
				var ps []*proc
				for range 4 {
					p := start(b, leaf, helperCmd("spin", "1h"))
					p.expect(b, "ready")
					ps = append(ps, p)
				}
				b.StartTimer()
				if err := way.kill(leaf, ps); err != nil {
					b.Fatal(err)
				}
				for _, p := range ps {
					p.wait()
				}
				b.StopTimer()
				if n, err := leaf.Procs(); n != 0 || err != nil {
					b.Fatalf("%d processes are left, %v", n, err)
				}
				remove1(b, leaf)
				b.StartTimer()
			}
		})
	}
}

// How far a fast allocator gets beyond its limit, and how long after the
// kernel's kill the channel of OOM is closed. The kill is seen by a thread that
// reads the counter all the time.
func BenchmarkOOM(b *testing.B) {
	h := need(b, Memory)
	const limit = 64 * mib
	var over, most int64
	var late, latest time.Duration
	n := int64(0)
	for b.Loop() {
		leaf, err := h.NewLeaf(newName(), Limits{Memory: limit})
		if err != nil {
			b.Fatal(err)
		}
		p := start(b, leaf, helperCmd("hog", strconv.Itoa(256*mib)))
		p.expect(b, "ready")
		fired := leaf.OOM()
		seen := make(chan time.Time, 1)
		if fired != nil {
			go func() { seen <- killSeen(leaf) }()
		}
		if _, err := fmt.Fprintln(p.in); err != nil {
			b.Fatal(err)
		}
		if fired != nil {
			<-fired
			d := time.Since(<-seen)
			late, latest = late+d, max(latest, d)
		}
		p.wait()
		s, err := leaf.Stats()
		if err != nil || s.OOMKills < 1 {
			b.Fatalf("%+v, %v", s, err)
		}
		over, most = over+s.MemoryPeak-limit, max(most, s.MemoryPeak-limit)
		n++
		remove1(b, leaf)
	}
	b.ReportMetric(float64(over)/float64(n), "B-over")
	b.ReportMetric(float64(most), "B-over-max")
	if on2(h, Memory) {
		return // the kernel kills the leaf, and there is no channel
	}
	b.ReportMetric(float64(late.Microseconds())/float64(n), "µs-to-channel")
	b.ReportMetric(float64(latest.Microseconds()), "µs-to-channel-max")
}

// killSeen returns when the v1 counter of OOM kills was first seen not to be 0.
func killSeen(leaf *Leaf) time.Time {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	fd, err := leaf.mem.dir.file("memory.oom_control", unix.O_RDONLY)
	if err != nil {
		panic(err)
	}
	defer os.NewFile(uintptr(fd), "memory.oom_control").Close()
	for end := time.Now().Add(20 * time.Second); ; {
		data, err := readFD(fd)
		now := time.Now()
		if n, _ := keyed(data, "oom_kill"); n > 0 {
			return now
		}
		if err != nil || now.After(end) {
			panic(fmt.Sprint("no OOM kill: ", err))
		}
	}
}
