package cgroup

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"
)

// Two that want the only CPU wait for each other, and the leaf says so.
func TestPressure(t *testing.T) {
	h := need(t, CPUSet)
	needV2(t, h)
	first, _, _ := strings.Cut(strings.ReplaceAll(allCPUs(), "-", ","), ",")
	leaf := newTestLeaf(t, h, Limits{CPUSet: first})
	p, err := leaf.Pressure()
	if !exists(leaf.Dir().Name() + "/cpu.pressure") {
		if !errors.Is(err, errors.ErrUnsupported) || p != noPressure() {
			t.Errorf("without the files: Pressure = %+v, %v", p, err)
		}
		return
	}
	if err != nil || p.CPU.Some != 0 || p.Memory.Some != 0 || p.IO.Some != 0 || p.CPU.Avg10 != 0 {
		t.Errorf("fresh: Pressure = %+v, %v", p, err)
	}
	for range 2 {
		start(t, leaf, helperCmd("spin", "1h")).expect(t, "ready")
	}
	within("they wait", 20*time.Second, func() bool {
		if p, err = leaf.Pressure(); err != nil {
			t.Fatal(err)
		}
		return p.CPU.Some > 0
	})
	// How much of the waiting a kernel sees is its own business; what it says is
	// what is returned.
	total := func() time.Duration {
		s, err := stall(mustRead(t, leaf.Dir().Name()+"/cpu.pressure"))
		if err != nil {
			t.Fatal(err)
		}
		return s.Some
	}
	before := total()
	p, err = leaf.Pressure()
	after := total()
	if err != nil || p.CPU.Some < before || p.CPU.Some > after || p.CPU.Avg10 > 100 {
		t.Errorf("Pressure = %+v, %v; before %v, after %v", p, err, before, after)
	}
}

// v1 alone counts nothing, nor does a leaf that has no groups.
func TestPressureIsNotInvented(t *testing.T) {
	if p, err := new(Leaf).Pressure(); !errors.Is(err, errors.ErrUnsupported) || p != noPressure() {
		t.Errorf("a leaf without groups: %+v, %v", p, err)
	}
	if !inside(t, mountNS) {
		return
	}
	if legacy := hideV2(t, need(t, Pids)); !legacy {
		return // v2 cannot be hidden without its controllers
	}
	leaf := newTestLeaf(t, need(t, Pids), Limits{Pids: 5})
	if p, err := leaf.Pressure(); !errors.Is(err, errors.ErrUnsupported) || p != noPressure() {
		t.Errorf("v1: %+v, %v", p, err)
	}
}

func TestPressureOfFiles(t *testing.T) {
	const full = "some avg10=1.50 avg60=0.00 avg300=0.00 total=2500\nfull avg10=0.25 avg60=0.00 avg300=0.00 total=700\n"
	none := Stall{-1, -1, -1}
	both := Stall{2500 * time.Microsecond, 700 * time.Microsecond, 1.5}
	some, _, _ := strings.Cut(full, "full")
	for _, tt := range []struct {
		name             string
		memory, cpu, io  string // "" is no file
		want             Pressure
		unsupported, bad bool
	}{
		{"all", full, full, full, Pressure{both, both, both}, false, false},
		{"cpu before 5.13", full, some, full, Pressure{both, Stall{both.Some, -1, 1.5}, both}, false, false},
		{"cpu alone", "", full, "", Pressure{none, both, none}, false, false},
		{"none", "", "", "", noPressure(), true, false},
		{"nonsense", full, "nonsense\n", full, Pressure{both, none, both}, false, true},
		{"no number", full, strings.Replace(full, "2500", "x", 1), full, Pressure{both, none, both}, false, true},
		{"negative", full, strings.Replace(full, "2500", "-5", 1), full, Pressure{both, none, both}, false, true},
		{"not a percentage", full, strings.Replace(full, "1.50", "NaN", 1), full, Pressure{both, none, both}, false, true},
		{"no total", full, "some avg10=1.50\n", full, Pressure{both, none, both}, false, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := plainDir(t)
			for name, data := range map[string]string{"memory.pressure": tt.memory, "cpu.pressure": tt.cpu, "io.pressure": tt.io} {
				if data != "" {
					writePlain(t, d, name, data)
				}
			}
			p, err := v2{}.pressure(d)
			if p != tt.want || (err != nil) != (tt.unsupported || tt.bad) || errors.Is(err, errors.ErrUnsupported) != tt.unsupported {
				t.Errorf("pressure = %+v, %v\nwant       %+v", p, err, tt.want)
			}
		})
	}
}

// Two ways: what is written as a pressure file is read as the same, and nothing
// that was read is negative or beyond its type.
func FuzzStall(f *testing.F) {
	f.Add([]byte("some avg10=1.50 total=2500\nfull avg10=0.25 total=700\n"), uint32(5), uint16(9999))
	f.Fuzz(func(t *testing.T, data []byte, total uint32, avg uint16) {
		s, err := stall(data)
		if err != nil && s != (Stall{-1, -1, -1}) || err == nil && !(s.Some >= 0 && s.Full >= -1 && s.Avg10 >= 0) {
			t.Fatalf("%q: %+v, %v", data, s, err)
		}
		line := fmt.Sprintf("some avg10=%d.%02d avg60=0.00 avg300=0.00 total=%d\n", avg/100, avg%100, total)
		s, err = stall([]byte(line))
		if want := (Stall{time.Duration(total) * time.Microsecond, -1, s.Avg10}); err != nil || s != want || fmt.Sprintf("%.2f", s.Avg10) != fmt.Sprintf("%d.%02d", avg/100, avg%100) {
			t.Fatalf("%q: %+v, %v", line, s, err)
		}
	})
}
