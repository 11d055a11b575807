package cgroup

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// IOLimits has one entry a device.
type IOLimits []IOLimit

// An IOLimit has the greatest rates of one block device, a second. 0 is no
// limit; at least one is needed. At a limit the request waits.
//
// What goes through the page cache is not the leaf's own request: a read counts
// if it reaches the device, and a write is the kernel's, some time later. On v2
// such a write still counts if memory is limited as well and the file system
// supports that (ext4, btrfs, xfs do); on v1 it does not: WriteBytes and
// WriteOps hold for direct and synchronous writes only.
type IOLimit struct {
	Device                string // "MAJOR:MINOR" of a whole disk, not of a partition
	ReadBytes, WriteBytes int64  // v2 takes no 1
	ReadOps, WriteOps     int64  // below 2^32-1; v2 takes no 1
}

// A rate is one limit with its name on either version.
type rate struct {
	two, one string
	n        int64
}

func (l IOLimit) rates() []rate {
	all := []rate{
		{"rbps", "blkio.throttle.read_bps_device", l.ReadBytes},
		{"wbps", "blkio.throttle.write_bps_device", l.WriteBytes},
		{"riops", "blkio.throttle.read_iops_device", l.ReadOps},
		{"wiops", "blkio.throttle.write_iops_device", l.WriteOps},
	}
	return slices.DeleteFunc(all, func(r rate) bool { return r.n == 0 })
}

// String returns the limit as "8:0:rbps=1048576,wiops=20".
func (l IOLimit) String() string {
	sep, s := ":", l.Device
	for _, r := range l.rates() {
		s += fmt.Sprintf("%s%s=%d", sep, r.two, r.n)
		sep = ","
	}
	return s
}

// key is the device as the kernel writes it.
func (l IOLimit) key() (string, error) {
	dev, ok := device(l.Device)
	if key := fmt.Sprintf("%d:%d", unix.Major(dev), unix.Minor(dev)); ok && key == l.Device {
		return key, nil
	}
	return "", fmt.Errorf("io device %.40q is no MAJOR:MINOR", l.Device)
}

func (ls *IOLimits) check() error {
	seen := map[string]bool{}
	for _, l := range *ls {
		key, err := l.key()
		if err != nil {
			return err
		}
		rates := l.rates()
		switch {
		case seen[key]:
			return fmt.Errorf("io device %s is there twice", key)
		case len(rates) == 0:
			return fmt.Errorf("io limit of device %s limits nothing", key)
		}
		for _, r := range rates {
			switch {
			case r.n < 0:
				return fmt.Errorf("io limit %s of device %s is negative: %d", r.two, key, r.n)
			case strings.HasSuffix(r.two, "iops") && r.n >= math.MaxUint32:
				// The kernel has 32 bits for it. v1 drops the upper ones.
				return fmt.Errorf("io limit %s of device %s is %d, above %d", r.two, key, r.n, int64(math.MaxUint32-1))
			}
		}
		seen[key] = true
	}
	return nil
}

// kinds names what is limited, without the values.
func (ls *IOLimits) kinds() (names []string) {
	if ls == nil {
		return nil
	}
	for _, l := range *ls {
		for _, r := range l.rates() {
			names = append(names, l.Device+" "+r.two)
		}
	}
	return names
}

// throttles makes sure that the group has a file that limits rates.
func (d dir) throttles(name string) error {
	_, err := d.read(name)
	if errors.Is(err, unix.ENOENT) {
		err = &fault{err, fixThrottle}
	}
	return err
}

// throttle writes a device's limit to a file of the group and reads the file back.
func (d dir) throttle(name, value string) ([]byte, error) {
	switch err := d.write(name, value); {
	case errors.Is(err, unix.ENODEV), errors.Is(err, unix.ENXIO):
		return nil, &fault{err, fixDevice}
	case errors.Is(err, unix.ENOENT):
		return nil, &fault{err, fixThrottle}
	case err != nil:
		return nil, err
	}
	return d.read(name)
}

// judge compares a limit with what was found of it.
func (d dir) judge(name, value string, want, got int64, found bool) error {
	err := errors.New("reads back as no limit")
	if found {
		err = compare(want, got, 0)
	}
	if err != nil {
		err = &fault{fmt.Errorf("set %s of %s to %s: %w", name, d.path, value, err), fixValue}
	}
	return err
}

func (v1) limitIO(d dir, limits *IOLimits) (as []Applied, err error) {
	if limits == nil {
		for _, r := range (IOLimit{"", 1, 1, 1, 1}).rates() {
			err = errors.Join(err, d.throttles(r.one))
		}
		return nil, err
	}
	for _, l := range *limits {
		for _, r := range l.rates() {
			value := fmt.Sprintf("%s %d", l.Device, r.n)
			data, err := d.throttle(r.one, value)
			if err != nil {
				return nil, err
			}
			got, ok := keyed(data, l.Device)
			if err := d.judge(r.one, value, r.n, got, ok); err != nil {
				return nil, err
			}
			as = append(as, Applied{IO, r.one + " (v1)", r.n, got, l.Device + " " + r.two})
		}
	}
	return as, nil
}

func (v2) limitIO(d dir, limits *IOLimits) (as []Applied, err error) {
	if limits == nil {
		return nil, d.throttles("io.max")
	}
	for _, l := range *limits {
		value := l.Device
		for _, r := range l.rates() {
			value += fmt.Sprintf(" %s=%d", r.two, r.n)
		}
		data, err := d.throttle("io.max", value)
		if err != nil {
			return nil, err
		}
		for _, r := range l.rates() {
			got, ok := nested(data, l.Device, r.two)
			if err := d.judge("io.max", value, r.n, got, ok); err != nil {
				return nil, err
			}
			as = append(as, Applied{IO, "io.max (v2)", r.n, got, l.Device + " " + r.two})
		}
	}
	return as, nil
}

// nested returns the number of a nested keyed file: the line begins with key,
// and has sub=number.
func nested(data []byte, key, sub string) (int64, bool) {
	for line := range bytes.Lines(data) {
		f := bytes.Fields(line)
		if len(f) == 0 || string(f[0]) != key {
			continue
		}
		for _, word := range f[1:] {
			if name, n, ok := bytes.Cut(word, []byte("=")); ok && string(name) == sub {
				n, err := parse(n)
				return n, err == nil
			}
		}
	}
	return 0, false
}
