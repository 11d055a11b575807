package main

import (
	"errors"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// hierarchies are the cgroup mounts of this host: v1 by controller, v2 or "".
type hierarchies struct {
	v1 map[string]string
	v2 string
}

func readHierarchies(mountinfo string) (*hierarchies, error) {
	b, err := os.ReadFile(mountinfo)
	if err != nil {
		return nil, err
	}
	h := &hierarchies{v1: map[string]string{}}
	for _, line := range strings.Split(string(b), "\n") {
		mount, rest, ok := strings.Cut(line, " - ")
		f, tail := strings.Fields(mount), strings.Fields(rest)
		if !ok || len(f) < 5 || len(tail) < 3 {
			continue
		}
		switch tail[0] {
		case "cgroup2":
			h.v2 = f[4]
		case "cgroup":
			for _, option := range strings.Split(tail[2], ",") {
				h.v1[option] = f[4]
			}
		}
	}
	return h, nil
}

// group is the directory of a process's cgroup that holds a controller, ""
// without one.
func (h *hierarchies) group(pid, controller string) string {
	b, _ := os.ReadFile("/proc/" + pid + "/cgroup")
	for _, line := range strings.Split(strings.TrimSpace(string(b)), "\n") {
		f := strings.SplitN(line, ":", 3)
		if len(f) != 3 {
			continue
		}
		if mount := h.v1[controller]; mount != "" {
			for _, c := range strings.Split(f[1], ",") {
				if c == controller {
					return filepath.Join(mount, f[2])
				}
			}
		} else if f[0] == "0" && h.v2 != "" {
			return filepath.Join(h.v2, f[2])
		}
	}
	return ""
}

// own tells whether a process has a cgroup for a controller that this process
// is not in, too, and returns its directory.
func (h *hierarchies) own(pid, controller string) (dir string, ok bool) {
	dir = h.group(pid, controller)
	return dir, dir != "" && !within(h.group("self", controller), dir)
}

// within tells whether a path is a directory or lies below it.
func within(path, dir string) bool {
	return path == dir || dir == "/" || strings.HasPrefix(path, dir+"/")
}

// limit is the smallest limit that a process's cgroups set and this process's do
// not, or ok is false.
func (h *hierarchies) limit(pid, controller string, files ...string) (least int64, ok bool) {
	self := h.group("self", controller)
	least = math.MaxInt64
	for dir := h.group(pid, controller); dir != "" && dir != "/" && !within(self, dir); dir = filepath.Dir(dir) {
		if n, err := readNumber(dir, files...); err == nil && n < least {
			least = n
		}
	}
	// The v1 memory controller writes "no limit" as the largest number of
	// whole pages.
	return least, least < math.MaxInt64-1<<20
}

func (h *hierarchies) memoryLimit(pid string) (int64, bool) {
	return h.limit(pid, "memory", "memory.limit_in_bytes", "memory.max")
}

func (h *hierarchies) pidsLimit(pid string) (int64, bool) {
	return h.limit(pid, "pids", "pids.max")
}

// readNumber reads the first of files that is there; "max" is an error.
func readNumber(dir string, files ...string) (int64, error) {
	err := error(os.ErrNotExist)
	for _, f := range files {
		var b []byte
		if b, err = os.ReadFile(filepath.Join(dir, f)); err == nil {
			return strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
		}
	}
	return 0, err
}

// remove removes the cgroups without processes whose names begin with a run's
// own, and their children. They lie at the top or beside this process.
func (h *hierarchies) remove(name string) error {
	var err error
	tops := map[string]bool{h.v2: h.v2 != ""}
	for controller, mount := range h.v1 {
		tops[mount], tops[h.group("self", controller)] = true, true
	}
	tops[h.group("self", "")] = true
	delete(tops, "")
	for top := range tops {
		groups, _ := filepath.Glob(filepath.Join(top, name+"*"))
		for _, g := range groups {
			err = errors.Join(err, removeTree(g))
		}
	}
	return err
}

func removeTree(group string) error {
	children, err := os.ReadDir(group)
	if errors.Is(err, os.ErrNotExist) {
		return nil // seen by way of another controller of the same mount
	}
	for _, c := range children {
		if c.IsDir() {
			err = errors.Join(err, removeTree(filepath.Join(group, c.Name())))
		}
	}
	return errors.Join(err, unix.Rmdir(group))
}
