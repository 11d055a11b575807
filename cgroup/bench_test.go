package cgroup

import (
	"context"
	"testing"
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
