package cgroup

import (
	"bytes"
	"errors"
	"fmt"
	"math/bits"
	"strconv"
	"strings"
)

const (
	maxCPU     = 8192 // the greatest CONFIG_NR_CPUS
	maxCPUList = 4096 // bytes
)

// cpuSet has a bit for each CPU.
type cpuSet [maxCPU / 64]uint64

func (s *cpuSet) has(n int) bool { return n < maxCPU && s[n/64]&(1<<(n%64)) != 0 }

func (s *cpuSet) count() (n int64) {
	for _, w := range s {
		n += int64(bits.OnesCount64(w))
	}
	return n
}

func (s *cpuSet) within(of *cpuSet) bool {
	for i, w := range s {
		if w&^of[i] != 0 {
			return false
		}
	}
	return true
}

// String returns the list as the kernel writes it.
func (s *cpuSet) String() string {
	var b strings.Builder
	for n := 0; n < maxCPU; n++ {
		if !s.has(n) {
			continue
		}
		if b.Len() > 0 {
			b.WriteByte(',')
		}
		b.WriteString(strconv.Itoa(n))
		if s.has(n + 1) {
			for s.has(n + 1) {
				n++
			}
			b.WriteString("-" + strconv.Itoa(n))
		}
	}
	return b.String()
}

// CountCPUs returns how many CPUs a list like "0-1,3" names.
func CountCPUs(list string) (int, error) {
	s, err := parseCPUs(list)
	if err != nil {
		return 0, fmt.Errorf("cpuset %.100q %w", list, err)
	}
	return int(s.count()), nil
}

// parseCPUs reads a list of numbers and ranges with at least one CPU.
func parseCPUs(list string) (*cpuSet, error) {
	if len(list) > maxCPUList {
		return nil, fmt.Errorf("has more than %d bytes", maxCPUList)
	}
	s := &cpuSet{}
	for item := range strings.SplitSeq(list, ",") {
		a, b, isRange := strings.Cut(item, "-")
		if !isRange {
			b = a
		}
		first, err1 := strconv.ParseUint(a, 10, 32)
		last, err2 := strconv.ParseUint(b, 10, 32)
		switch {
		case err1 != nil || err2 != nil:
			return nil, errors.New(`is no list of CPUs like "0-1,3"`)
		case first > last:
			return nil, fmt.Errorf("has the range %s, which runs backwards", item)
		case last >= maxCPU:
			return nil, fmt.Errorf("has CPU %d, and the last there can be is %d", last, maxCPU-1)
		}
		for n := first; n <= last; n++ {
			s[n/64] |= 1 << (n % 64)
		}
	}
	return s, nil
}

// cpus reads a list of CPUs from a file of the group.
func (d dir) cpus(name string) (*cpuSet, error) {
	data, err := d.read(name)
	if err != nil {
		return nil, err
	}
	s, err := parseCPUs(string(bytes.TrimSpace(data)))
	if err != nil {
		return nil, fmt.Errorf("%s of %s %w", name, d.path, err)
	}
	return s, nil
}

// confine sets cpuset.cpus to list, or to all CPUs that the parent has. What is
// in force is in the file effective.
func (d dir) confine(version, effective, list string) ([]Applied, error) {
	up, err := d.parent()
	if err != nil {
		return nil, err
	}
	defer up.close()
	allowed, err := up.cpus(effective)
	if err != nil {
		return nil, err
	}
	want := allowed
	if list != "" {
		if want, err = parseCPUs(list); err != nil {
			return nil, fmt.Errorf("cpuset %.100q %w", list, err)
		}
	}
	// v2 takes any list and falls back to the parent's; v1 says EACCES, which
	// would look like a want of permission.
	if !want.within(allowed) {
		return nil, &fault{fmt.Errorf("set cpuset.cpus of %s to %s: %s has %s", d.path, want, up.path, allowed), fixCPUs}
	}
	if err := d.write("cpuset.cpus", want.String()); err != nil {
		return nil, err
	}
	got, err := d.cpus(effective)
	if err != nil {
		return nil, err
	}
	if *got != *want {
		return nil, &fault{fmt.Errorf("set cpuset.cpus of %s to %s: %s reads back as %s", d.path, want, effective, got), fixCPUs}
	}
	return []Applied{{CPUSet, "cpuset.cpus (" + version + ")", want.count(), got.count(), got.String()}}, nil
}

// limitCPUSet also sets cpuset.mems: a v1 group begins with no CPU and no memory
// node, and takes no task before it has both.
func (v1) limitCPUSet(d dir, list string) ([]Applied, error) {
	up, err := d.parent()
	if err != nil {
		return nil, err
	}
	defer up.close()
	mems, err := up.read("cpuset.effective_mems")
	if err != nil {
		return nil, err
	}
	if err := d.write("cpuset.mems", string(bytes.TrimSpace(mems))); err != nil {
		return nil, err
	}
	return d.confine("v1", "cpuset.effective_cpus", list)
}
