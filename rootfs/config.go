package rootfs

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// Bind makes a file or directory of the host visible in the jail.
type Bind struct {
	// Source is a path of the host. A relative one is taken from the working
	// directory; symbolic links in it are followed.
	Source string
	// Target is the absolute path in the jail, Source if empty. With a
	// directory as root it must exist there: nothing is created in it.
	Target string
	// Writable binds can be written by the program with the rights of the
	// owner of Source; what it creates belongs to that owner.
	Writable bool
}

// Config says what a root is made of. The zero value is the read-only view of
// the host: /usr, the links or directories beside it, and an /etc without
// anything of the host's users.
type Config struct {
	// Dir is a directory to use as root instead of the host view. It is
	// mounted read-only and must have the directories /proc, /dev and /tmp.
	Dir   string
	Binds []Bind
	// Files appear read-only below [FilesDir].
	Files []File
}

// File is a small file that every jail of a template can read.
type File struct {
	Name string // base name
	Data []byte
}

// FilesDir is where the files of a Config appear in a jail. It is part of
// /dev, which is the package's own in every root.
const FilesDir = "/dev/jail"

// lateDir holds binds that belong below /tmp or /dev/shm: those are mounted
// per jail, so the init binds them from here.
const lateDir = FilesDir + "/bind"

// Late is a bind that the init repeats on top of its own mounts.
type Late struct {
	From, To  string
	Directory bool
}

// ErrInvalid marks a Config that can never work, whatever the host.
var ErrInvalid = errors.New("invalid root")

// plan is a Config made absolute and checked, with the identity of each source.
// It crosses to the helper as JSON, and its digest is the template's name.
type plan struct {
	Dir   string
	DirID identity
	// Points are the directories of Dir that are mounted over. One that was
	// replaced has lost its mounts in a template that was built before.
	Points   []identity
	Binds    []plannedBind
	Files    []File
	Host     []hostEntry
	OwnerID  uint32 // host uid and gid that owners of idmapped sources become
	Versions string
}

type plannedBind struct {
	Source, Target string
	Writable       bool
	Directory      bool
	Late           bool
	IDMap          bool // set by the helper
	ID             identity
}

// identity tells one inode of the host from another.
type identity struct {
	Dev, Ino uint64
	Mode     uint32
	UID, GID uint32
}

func identify(file string, follow bool) (identity, error) {
	var st unix.Stat_t
	flags := 0
	if !follow {
		flags = unix.AT_SYMLINK_NOFOLLOW
	}
	if err := unix.Fstatat(unix.AT_FDCWD, file, &st, flags); err != nil {
		return identity{}, &os.PathError{Op: "stat", Path: file, Err: err}
	}
	id := identity{Dev: st.Dev, Ino: st.Ino, Mode: st.Mode, UID: st.Uid, GID: st.Gid}
	return id, nil
}

func (id identity) directory() bool { return id.Mode&unix.S_IFMT == unix.S_IFDIR }

// versions is part of a template's name: another build of the launcher or of
// libcontainer shapes roots its own way.
var versions = sync.OnceValue(func() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	parts := []string{"layout 1"}
	for _, m := range info.Deps {
		if m.Path == "github.com/opencontainers/runc" {
			parts = append(parts, m.Version)
		}
	}
	return strings.Join(parts, " ")
})

// resolve checks a Config against the host and makes it absolute. Errors for
// things that the caller can mend wrap ErrInvalid or name the path.
func (c Config) resolve() (*plan, error) {
	p := &plan{Files: slices.Clone(c.Files), Versions: versions()}
	// The name is of what is there, not of the order in which it was listed.
	slices.SortFunc(p.Files, func(a, b File) int { return strings.Compare(a.Name, b.Name) })
	for _, f := range c.Files {
		if f.Name == "" || f.Name != path.Base(f.Name) || f.Name == ".." || f.Name == "bind" {
			return nil, fmt.Errorf("%w: file name %q is no base name", ErrInvalid, f.Name)
		}
	}
	if c.Dir != "" {
		dir, id, err := source(c.Dir)
		if err != nil {
			return nil, fmt.Errorf("root directory: %w", err)
		}
		if !id.directory() {
			return nil, fmt.Errorf("%w: root %s is no directory", ErrInvalid, dir)
		}
		if dir == "/" {
			return nil, fmt.Errorf("%w: the host's / cannot be a root; use the host view", ErrInvalid)
		}
		p.Dir, p.DirID = dir, id
	} else {
		host, err := hostEntries()
		if err != nil {
			return nil, err
		}
		p.Host = host
	}
	seen := map[string]bool{}
	for i, b := range c.Binds {
		src, id, err := source(b.Source)
		if err != nil {
			return nil, fmt.Errorf("bind %d: %w", i, err)
		}
		target := b.Target
		if target == "" {
			if target, err = filepath.Abs(b.Source); err != nil {
				return nil, fmt.Errorf("bind %d: %w", i, err)
			}
		}
		if err := checkTarget(target); err != nil {
			return nil, err
		}
		if rest, ok := strings.CutPrefix(target, "/var/tmp/"); ok && c.Dir == "" {
			target = "/tmp/" + rest // where the host view's /var/tmp leads
		}
		if seen[target] {
			return nil, fmt.Errorf("%w: two binds to %s", ErrInvalid, target)
		}
		seen[target] = true
		switch id.Mode & unix.S_IFMT {
		case unix.S_IFDIR, unix.S_IFREG:
		default:
			// A socket or device of the host in a jail is a way out of it.
			return nil, fmt.Errorf("%w: bind source %s is neither directory nor regular file", ErrInvalid, src)
		}
		p.Binds = append(p.Binds, plannedBind{
			Source: src, Target: target, Writable: b.Writable, Directory: id.directory(),
			Late: below(target, "/tmp") || below(target, "/dev/shm"), ID: id,
		})
	}
	if p.Dir != "" {
		points := []string{"/proc", "/dev", "/tmp"}
		for _, b := range p.Binds {
			points = append(points, b.Target)
		}
		for _, point := range points {
			id, err := identify(filepath.Join(p.Dir, point), false)
			if err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, unix.ENOTDIR) {
				return nil, fmt.Errorf("root directory: %w", err)
			}
			p.Points = append(p.Points, id) // what is missing or wrong is told later
		}
	}
	return p, nil
}

func source(name string) (string, identity, error) {
	if name == "" {
		return "", identity{}, fmt.Errorf("%w: empty path", ErrInvalid)
	}
	abs, err := filepath.Abs(name)
	if err != nil {
		return "", identity{}, err
	}
	// Resolved once here: what is mounted later is this path, and the
	// identity that follows is part of the template's name.
	abs, err = filepath.EvalSymlinks(abs)
	if err != nil {
		return "", identity{}, err
	}
	id, err := identify(abs, true)
	return abs, id, err
}

func checkTarget(t string) error {
	switch {
	case !strings.HasPrefix(t, "/"):
		return fmt.Errorf("%w: bind target %q is not absolute", ErrInvalid, t)
	case path.Clean(t) != t || strings.ContainsAny(t, "\x00\n"):
		return fmt.Errorf("%w: bind target %q is not a clean path", ErrInvalid, t)
	case t == "/":
		return fmt.Errorf("%w: a bind cannot cover the whole root; use a root directory", ErrInvalid)
	case t == "/tmp" || t == "/dev/shm":
		return fmt.Errorf("%w: %s is the jail's own; bind below it", ErrInvalid, t)
	case below(t, "/proc") || t == "/proc" || t == "/dev" || below(t, "/dev") && !below(t, "/dev/shm"):
		return fmt.Errorf("%w: bind target %s lies in /proc or /dev, which are the jail's own", ErrInvalid, t)
	}
	return nil
}

func below(t, dir string) bool { return strings.HasPrefix(t, dir+"/") }

// name returns the template's name, a digest of all that shapes it.
func (p *plan) name() (string, error) {
	// Contents by their own digest: as JSON they would cost a command 0.2 ms.
	type digest struct {
		Name string
		Sum  [sha256.Size]byte
	}
	files := make([]digest, len(p.Files))
	for i, f := range p.Files {
		files[i] = digest{f.Name, sha256.Sum256(f.Data)}
	}
	b, err := json.Marshal(struct {
		*plan
		Files []digest
	}{p, files})
	if err != nil {
		return "", fmt.Errorf("encode root: %w", err)
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:16]), nil
}

// idmapped tells whether sources of the plan are mounted with their owner as
// the program, so that jails of it share one host id.
func (p *plan) idmapped() bool { return p.Dir != "" || len(p.Binds) > 0 }

func (p *plan) rootWrites() bool {
	for _, b := range p.Binds {
		if b.Writable && (b.ID.UID == 0 || b.ID.GID == 0) {
			return true
		}
	}
	return false
}

// late returns the binds that the init has to repeat.
func (p *plan) late() []Late {
	var l []Late
	for i, b := range p.Binds {
		if b.Late {
			l = append(l, Late{From: fmt.Sprintf("%s/%d", lateDir, i), To: b.Target, Directory: b.Directory})
		}
	}
	return l
}
