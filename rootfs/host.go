package rootfs

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

type hostKind string

const (
	hostBind hostKind = "bind" // mounted, read-only
	hostLink hostKind = "link" // a symbolic link as on the host (merged /usr)
	hostCopy hostKind = "copy" // a small file, copied when the template is built
)

// hostEntry is one part of the host view.
type hostEntry struct {
	Path string
	Kind hostKind
	Link string
	ID   identity
	// MTime of a copied file: a changed file makes another template.
	MTime int64
}

// hostView is what a program needs to run and nothing about the host's users,
// services or secrets. What the host lacks is left out.
var hostView = []struct {
	path string
	copy bool
}{
	{path: "/usr"}, {path: "/bin"}, {path: "/sbin"},
	{path: "/lib"}, {path: "/lib32"}, {path: "/lib64"}, {path: "/libx32"},
	{path: "/etc/alternatives"}, {path: "/etc/ssl/certs"},
	{path: "/etc/ld.so.cache", copy: true}, {path: "/etc/ld.so.conf", copy: true},
	{path: "/etc/localtime", copy: true}, {path: "/etc/mime.types", copy: true},
	{path: "/etc/protocols", copy: true}, {path: "/etc/services", copy: true},
	{path: "/etc/debian_version", copy: true}, {path: "/etc/os-release", copy: true},
}

// etc is written into the host view: names for the ids that a jail shows, no
// resolver, no other host.
var etc = map[string]string{
	"passwd":        "root:x:0:0:root:/tmp:/bin/sh\njail:x:1000:1000:jail:/tmp:/bin/sh\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n",
	"group":         "root:x:0:\njail:x:1000:\nnogroup:x:65534:\n",
	"hosts":         "127.0.0.1 localhost jail\n::1 localhost jail\n",
	"nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
	"hostname":      "jail\n",
	"resolv.conf":   "",
}

// emptyDirs exist in the host view beside what it shows of the host.
var emptyDirs = []string{"proc", "dev", "tmp", "etc", "sys", "run", "var", "home", "root", "opt", "mnt", "srv"}

func hostEntries() ([]hostEntry, error) {
	var list []hostEntry
	for _, v := range hostView {
		id, err := identify(v.path, v.copy)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("host view: %w", err)
		}
		e := hostEntry{Path: v.path, Kind: hostBind, ID: id}
		switch {
		case v.copy:
			info, err := os.Stat(v.path)
			if err != nil {
				return nil, fmt.Errorf("host view: %w", err)
			}
			e.Kind, e.MTime = hostCopy, info.ModTime().UnixNano()
		case id.Mode&unix.S_IFMT == unix.S_IFLNK:
			if e.Link, err = os.Readlink(v.path); err != nil {
				return nil, fmt.Errorf("host view: %w", err)
			}
			e.Kind = hostLink
		case !id.directory():
			continue
		}
		list = append(list, e)
	}
	return list, nil
}

// maxCopy bounds a copied host file.
const maxCopy = 1 << 20

// layHost writes the skeleton of the host view into root, an empty tmpfs of
// the helper's own mount namespace.
func layHost(root string, entries []hostEntry) error {
	for _, d := range emptyDirs {
		if err := os.Mkdir(filepath.Join(root, d), 0o755); err != nil {
			return err
		}
	}
	if err := os.Symlink("/tmp", filepath.Join(root, "var/tmp")); err != nil {
		return err
	}
	for name, text := range etc {
		if err := os.WriteFile(filepath.Join(root, "etc", name), []byte(text), 0o644); err != nil {
			return err
		}
	}
	for _, e := range entries {
		to := filepath.Join(root, e.Path)
		switch e.Kind {
		case hostLink:
			if err := os.Symlink(e.Link, to); err != nil {
				return err
			}
		case hostCopy:
			if err := copyFile(to, e.Path); err != nil {
				return err
			}
		case hostBind:
			if err := os.MkdirAll(to, 0o755); err != nil {
				return err
			}
		}
	}
	return nil
}

func copyFile(to, from string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	b, err := io.ReadAll(io.LimitReader(in, maxCopy+1))
	if err != nil {
		return err
	}
	if len(b) > maxCopy {
		return fmt.Errorf("host view: %s is larger than %d bytes", from, maxCopy)
	}
	return os.WriteFile(to, b, 0o644)
}
