package cgroup

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// Pressure is how long tasks of a leaf had to wait for what they lacked. Of what
// the kernel does not count every value is -1.
type Pressure struct {
	Memory, CPU, IO Stall
}

// A Stall is the waiting for one resource. -1 is not counted.
type Stall struct {
	Some  time.Duration // at least one task waited, since the leaf was made
	Full  time.Duration // all waited; for CPU since Linux 5.13
	Avg10 float64       // percent of the last 10 s in which at least one waited
}

func noPressure() Pressure {
	no := Stall{-1, -1, -1}
	return Pressure{no, no, no}
}

func (v1) pressure(d dir) (Pressure, error) {
	return noPressure(), fmt.Errorf("pressure of %s: cgroup v1 has none: %w", d.path, errors.ErrUnsupported)
}

func (v2) pressure(d dir) (Pressure, error) {
	p, found := noPressure(), false
	var errs error
	for _, file := range []struct {
		name string
		to   *Stall
	}{{"memory.pressure", &p.Memory}, {"cpu.pressure", &p.CPU}, {"io.pressure", &p.IO}} {
		data, err := d.read(file.name)
		switch {
		case err == nil:
			found = true
			if *file.to, err = stall(data); err != nil {
				errs = errors.Join(errs, fmt.Errorf("%s of %s %w", file.name, d.path, err))
			}
		case errors.Is(err, unix.ENOENT) && d.exists(), errors.Is(err, unix.EOPNOTSUPP):
			// Not built in, or turned off with psi=0 or cgroup.pressure.
		default:
			errs = errors.Join(errs, err)
		}
	}
	if errs == nil && !found {
		errs = fmt.Errorf("pressure of %s: the kernel counts none: %w", d.path, errors.ErrUnsupported)
	}
	return p, errs
}

// stall reads a pressure file.
func stall(data []byte) (Stall, error) {
	s := Stall{-1, -1, -1}
	for line := range bytes.Lines(data) {
		f := bytes.Fields(line)
		if len(f) == 0 {
			continue
		}
		kind := string(f[0])
		for _, word := range f[1:] {
			name, value, _ := bytes.Cut(word, []byte("="))
			switch string(name) {
			case "total":
				n, err := parse(value)
				if err != nil {
					return Stall{-1, -1, -1}, err
				}
				switch kind {
				case "some":
					s.Some = span(n, time.Microsecond)
				case "full":
					s.Full = span(n, time.Microsecond)
				}
			case "avg10":
				x, err := strconv.ParseFloat(string(value), 64)
				if err != nil || !(x >= 0 && x < math.MaxInt32) {
					return Stall{-1, -1, -1}, fmt.Errorf("%.40q is not a percentage", value)
				}
				if kind == "some" {
					s.Avg10 = x
				}
			}
		}
	}
	if s.Some < 0 || s.Avg10 < 0 {
		return Stall{-1, -1, -1}, errors.New("has no complete line of some")
	}
	return s, nil
}
