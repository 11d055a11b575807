package rootfs

import (
	"cmp"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"example.com/jail/internal/faults"
)

// DefaultDir is where pins are kept. It belongs to root alone.
const DefaultDir = "/run/jail"

// hostIDs of templates that mount something with its owner as the program:
// the jails of such a template share one id. The range is apart from the ids
// that package jail gives to single runs (0x60000000 and up).
const templateIDs = 0x50000000

// Template is a finished root. Its namespace lives as long as the process; the
// value is safe for concurrent use.
type Template struct {
	ns         *os.File
	late       []Late
	owner      uint32
	rootWrites bool
}

// Namespace returns the descriptor of the mount namespace, for setns(2) in a
// process that copies it at once (CLONE_NEWNS). It must not be closed.
func (t *Template) Namespace() *os.File { return t.ns }

// Late returns the binds that a jail's init has to mount on top of its own
// /tmp.
func (t *Template) Late() []Late { return t.late }

// OwnerID returns the host uid and gid that sources of this template map their
// owner to, or 0 if it maps none and each run may have ids of its own.
func (t *Template) OwnerID() uint32 { return t.owner }

// WritesAsRoot tells whether the program can create files of the host that
// belong to root: a writable bind whose source root owns. A filter has to keep
// it from making them set-uid.
func (t *Template) WritesAsRoot() bool { return t.rootWrites }

// Cache holds the templates of one process and their pins on disk. The zero
// value pins in DefaultDir. It is safe for concurrent use, also by several
// processes on one directory.
type Cache struct {
	Dir string

	mu    sync.Mutex
	built map[string]*entry
}

type entry struct {
	once sync.Once
	t    *Template
	err  error
}

// Open returns the template of a Config: one that this process has, or a pin
// that an earlier process left, or a newly built one (some 20 ms). Errors that
// wrap ErrInvalid blame the Config; a failed build is not remembered.
func (c *Cache) Open(cfg Config) (*Template, error) {
	p, err := cfg.resolve()
	if err != nil {
		return nil, err
	}
	name, err := p.name()
	if err != nil {
		return nil, err
	}
	if p.idmapped() {
		b, err := hex.DecodeString(name[:8])
		if err != nil {
			return nil, fmt.Errorf("template name %q: %w", name, err)
		}
		p.OwnerID = templateIDs + binary.BigEndian.Uint32(b)%(1<<27)*2
	}

	c.mu.Lock()
	if c.built == nil {
		c.built = map[string]*entry{}
	}
	e := c.built[name]
	if e == nil {
		e = &entry{}
		c.built[name] = e
	}
	c.mu.Unlock()

	e.once.Do(func() {
		var ns *os.File
		if ns, e.err = c.obtain(p, name); e.err == nil {
			e.t = &Template{ns: ns, late: p.late(), owner: p.OwnerID, rootWrites: p.rootWrites()}
		}
	})
	if e.err != nil {
		c.mu.Lock()
		if c.built[name] == e {
			delete(c.built, name)
		}
		c.mu.Unlock()
	}
	return e.t, e.err
}

// Discard forgets the template of a Config, pin and all, so that the next Open
// builds it anew: a jail could not be made from it. Jails that run from it are
// not touched.
func (c *Cache) Discard(cfg Config) error {
	p, err := cfg.resolve()
	if err != nil {
		return err
	}
	name, err := p.name()
	if err != nil {
		return err
	}
	c.mu.Lock()
	delete(c.built, name)
	c.mu.Unlock()
	d, err := lockPinDir(c.dir())
	if err != nil {
		return err
	}
	defer d.Close()
	d.unpin(name)
	faults.Here("pins.discard")
	return nil
}

func (c *Cache) dir() string {
	if c.Dir != "" {
		return c.Dir
	}
	return DefaultDir
}

// obtain returns a pinned namespace or builds one under the directory's lock,
// so that of two launchers that need the same template one builds it.
func (c *Cache) obtain(p *plan, name string) (*os.File, error) {
	d, err := openPinDir(c.dir())
	if err != nil {
		return nil, err
	}
	ns := d.pinned(name)
	d.Close()
	if ns != nil {
		return ns, nil
	}
	if d, err = lockPinDir(c.dir()); err != nil {
		return nil, err
	}
	defer d.Close()
	if ns := d.pinned(name); ns != nil {
		return ns, nil
	}
	faults.Here("pins.lock")
	ns, err = p.build(c.dir())
	if err != nil {
		return nil, err
	}
	faults.Here("pins.built")
	// The descriptor is the pin that counts. Outside of the initial mount
	// namespace the bind fails at random on Linux 6.18 (the kernel's loop
	// check compares namespace ids that it hands out in per-CPU batches), and
	// then later processes build the template again.
	_ = d.pin(name, ns)
	faults.Here("pins.pinned")
	return ns, nil
}

// pinDir is an open pin directory. Everything below it is reached through the
// handle.
type pinDir struct {
	fd   int
	path string
}

// openPinDir opens the directory, makes it if it is missing, and refuses one
// that is not root's alone. It is a private mount of its own, since a mount
// namespace cannot be pinned below a shared one.
func openPinDir(path string) (*pinDir, error) {
	for {
		if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
			return nil, fmt.Errorf("make template directory: %w", err)
		}
		faults.Here("pins.mkdir")
		d, mounted, err := openOnce(path)
		if errors.Is(err, os.ErrNotExist) {
			continue // a collection has removed it
		}
		if err != nil || mounted {
			return d, err
		}
		err = d.mount()
		d.Close()
		if err != nil {
			return nil, err
		}
	}
}

// lockPinDir opens the directory and locks it. What it waited for may have been
// a collection, which removes the directory: then it is made anew.
func lockPinDir(path string) (*pinDir, error) {
	for {
		d, err := openPinDir(path)
		if err != nil {
			return nil, err
		}
		if err := d.lock(); err != nil {
			d.Close()
			return nil, err
		}
		if d.current() {
			return d, nil
		}
		d.Close()
	}
}

// openOnce opens what is there, and tells whether it is a mount.
func openOnce(path string) (_ *pinDir, mounted bool, err error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, false, &os.PathError{Op: "open template directory", Path: path, Err: err}
	}
	var st unix.Statx_t
	if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_BASIC_STATS, &st); err != nil {
		unix.Close(fd)
		return nil, false, &os.PathError{Op: "statx", Path: path, Err: err}
	}
	if st.Uid != 0 || st.Mode&0o7777 != 0o700 {
		unix.Close(fd)
		return nil, false, fmt.Errorf("template directory %s has owner %d and mode %#o, want 0 and 0700: remove it or set another", path, st.Uid, st.Mode&0o7777)
	}
	return &pinDir{fd: fd, path: path}, st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0, nil
}

// mount makes the directory a mount, unless somebody else did or removed it.
func (d *pinDir) mount() error {
	// The lock is on the inode, which the mount shares.
	if err := d.lock(); err != nil {
		return err
	}
	if !d.current() {
		return nil
	}
	faults.Here("pins.dir.lock")
	if err := unix.Mount(d.path, d.path, "", unix.MS_BIND, ""); err != nil {
		return &os.PathError{Op: "bind template directory", Path: d.path, Err: err}
	}
	faults.Here("pins.dir.bind")
	if err := unix.Mount("", d.path, "", unix.MS_PRIVATE, ""); err != nil {
		return &os.PathError{Op: "make template directory private", Path: d.path, Err: err}
	}
	faults.Here("pins.dir.private")
	return nil
}

// current tells whether the path leads to this very directory and mount.
func (d *pinDir) current() bool {
	const mask = unix.STATX_INO | unix.STATX_MNT_ID
	var mine, there unix.Statx_t
	return unix.Statx(d.fd, "", unix.AT_EMPTY_PATH, mask, &mine) == nil &&
		unix.Statx(unix.AT_FDCWD, d.path, unix.AT_SYMLINK_NOFOLLOW, mask, &there) == nil &&
		mine.Ino == there.Ino && mine.Mnt_id == there.Mnt_id
}

// Close gives up the handle and the lock.
func (d *pinDir) Close() { unix.Close(d.fd) }

func (d *pinDir) lock() error {
	for {
		err := unix.Flock(d.fd, unix.LOCK_EX)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return &os.PathError{Op: "lock template directory", Path: d.path, Err: err}
		}
		return nil
	}
}

// record is what identifies a pinned namespace: the kernel never uses an id
// twice, so a pin with another id is not the one that was built.
type record struct {
	ID     uint64 // 0: the kernel cannot tell (before Linux 6.12)
	Inode  uint64
	Mounts uint32
}

// nsGetInfo is NS_MNT_GET_INFO (Linux 6.12).
const nsGetInfo = 0x8010b70a

func describe(fd int) (record, error) {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err != nil {
		return record{}, os.NewSyscallError("fstatfs", err)
	}
	if fs.Type != unix.NSFS_MAGIC {
		return record{}, errors.New("no namespace")
	}
	kind, err := unix.IoctlRetInt(fd, unix.NS_GET_NSTYPE)
	if err != nil {
		return record{}, os.NewSyscallError("NS_GET_NSTYPE", err)
	}
	if kind != unix.CLONE_NEWNS {
		return record{}, fmt.Errorf("namespace of type %#x", kind)
	}
	var st, own unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return record{}, os.NewSyscallError("fstat", err)
	}
	if err := unix.Stat("/proc/thread-self/ns/mnt", &own); err != nil {
		return record{}, &os.PathError{Op: "stat", Path: "/proc/thread-self/ns/mnt", Err: err}
	}
	if st.Dev == own.Dev && st.Ino == own.Ino {
		return record{}, errors.New("the launcher's own mount namespace")
	}
	if err := ownUserNamespace(fd); err != nil {
		return record{}, err
	}
	r := record{Inode: st.Ino}
	var info struct {
		size, mounts uint32
		id           uint64
	}
	info.size = uint32(unsafe.Sizeof(info))
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), nsGetInfo, uintptr(unsafe.Pointer(&info))); errno == 0 {
		r.ID, r.Mounts = info.id, info.mounts
	}
	return r, nil
}

// ownUserNamespace refuses a namespace that another user namespace owns: its
// mounts could be changed from there.
func ownUserNamespace(fd int) error {
	owner, err := unix.IoctlRetInt(fd, unix.NS_GET_USERNS)
	if err != nil {
		return os.NewSyscallError("NS_GET_USERNS", err)
	}
	defer unix.Close(owner)
	var a, b unix.Stat_t
	if err := unix.Fstat(owner, &a); err != nil {
		return os.NewSyscallError("fstat", err)
	}
	if err := unix.Stat("/proc/thread-self/ns/user", &b); err != nil {
		return &os.PathError{Op: "stat", Path: "/proc/thread-self/ns/user", Err: err}
	}
	if a.Dev != b.Dev || a.Ino != b.Ino {
		return errors.New("owned by another user namespace")
	}
	return nil
}

// pinned returns the namespace of a usable pin, nil if there is none. Anything
// that is off makes it unusable, never an error: it is built again.
func (d *pinDir) pinned(name string) *os.File {
	// O_NONBLOCK: a FIFO in its place must not block the open.
	fd, err := unix.Openat(d.fd, name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	want, err := d.readRecord(name)
	if err == nil {
		var have record
		if have, err = describe(fd); err == nil && have == want {
			return os.NewFile(uintptr(fd), "template "+name)
		}
	}
	unix.Close(fd)
	return nil
}

func (d *pinDir) readRecord(name string) (record, error) {
	var r record
	fd, err := unix.Openat(d.fd, name+".json", unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return r, err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return r, err
	}
	if st.Mode != unix.S_IFREG|0o600 || st.Uid != 0 {
		return r, fmt.Errorf("record of template %s has mode %#o and owner %d", name, st.Mode, st.Uid)
	}
	buf := make([]byte, 512)
	n, err := unix.Read(fd, buf)
	if err != nil {
		return r, err
	}
	// The time of the last use, for evict.
	_ = unix.UtimesNanoAt(fd, "", nil, unix.AT_EMPTY_PATH)
	return r, json.Unmarshal(buf[:n], &r)
}

// maxPins bounds how many templates stay pinned: each is a few mounts of the
// kernel's, and runs with ever new binds make ever new ones.
const maxPins = 32

// evict drops the templates that were not used for longest until there is room
// for one more. The caller holds the lock.
func (d *pinDir) evict() error {
	names, err := d.names()
	if err != nil {
		return err
	}
	used := map[string]int64{}
	for _, n := range names {
		var st unix.Stat_t
		if unix.Fstatat(d.fd, n+".json", &st, unix.AT_SYMLINK_NOFOLLOW) == nil {
			used[n] = st.Mtim.Nano()
		}
	}
	slices.SortFunc(names, func(a, b string) int { return cmp.Compare(used[a], used[b]) })
	for len(names) >= maxPins {
		d.unpin(names[0])
		faults.Here("pins.evict")
		names = names[1:]
	}
	return nil
}

// names lists the templates that are, or should be, pinned here.
func (d *pinDir) names() ([]string, error) {
	// A handle of its own: reading a directory moves its offset.
	fd, err := unix.Openat(d.fd, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: d.path, Err: err}
	}
	f := os.NewFile(uintptr(fd), d.path)
	defer f.Close()
	all, err := f.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, n := range all {
		// A launcher that was killed may have left a record without a pin.
		n = strings.TrimSuffix(n, ".json")
		if _, err := hex.DecodeString(n); err == nil && len(n) == nameLen && !slices.Contains(names, n) {
			names = append(names, n)
		}
	}
	return names, nil
}

// nameLen is the length of a template's name in hexadecimal digits.
const nameLen = 32

// pin binds a namespace to its name. The caller holds the lock.
func (d *pinDir) pin(name string, ns *os.File) error {
	d.unpin(name)
	if err := d.evict(); err != nil {
		return err
	}
	r, err := describe(int(ns.Fd()))
	if err != nil {
		return err
	}
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	for _, f := range []struct {
		name string
		text []byte
	}{{name + ".json", text}, {name, nil}} {
		fd, err := unix.Openat(d.fd, f.name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
		if err != nil {
			return &os.PathError{Op: "make", Path: filepath.Join(d.path, f.name), Err: err}
		}
		faults.Here("pins.pin.make")
		err = unix.Fchmod(fd, 0o600)
		if err == nil && len(f.text) > 0 {
			_, err = unix.Write(fd, f.text)
		}
		unix.Close(fd)
		if err != nil {
			d.unpin(name)
			return &os.PathError{Op: "write", Path: filepath.Join(d.path, f.name), Err: err}
		}
		faults.Here("pins.pin.write")
	}
	// The directory is shared if a launcher was killed right after it bound it.
	dir := fmt.Sprintf("/proc/thread-self/fd/%d", d.fd)
	if err := unix.Mount("", dir, "", unix.MS_PRIVATE, ""); err != nil {
		d.unpin(name)
		return &os.PathError{Op: "make template directory private", Path: d.path, Err: err}
	}
	target := dir + "/" + name
	source := fmt.Sprintf("/proc/thread-self/fd/%d", ns.Fd())
	if err := unix.Mount(source, target, "", unix.MS_BIND, ""); err != nil {
		d.unpin(name)
		return &os.PathError{Op: "pin template at", Path: filepath.Join(d.path, name), Err: err}
	}
	faults.Here("pins.pin.bind")
	return nil
}

// unpin removes whatever stands at a template's name, several mounts over each
// other included. Jails that run from it keep their copies.
func (d *pinDir) unpin(name string) {
	target := fmt.Sprintf("/proc/thread-self/fd/%d/%s", d.fd, name)
	for unix.Unmount(target, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW) == nil {
	}
	faults.Here("pins.unpin.unmount")
	for _, n := range []string{name, name + ".json"} {
		if err := unix.Unlinkat(d.fd, n, 0); errors.Is(err, unix.EISDIR) {
			_ = unix.Unlinkat(d.fd, n, unix.AT_REMOVEDIR)
		}
		faults.Here("pins.unpin.unlink")
	}
}

// Drop removes every pin of the directory, and the directory once it is empty.
// It returns the names of the templates that were dropped. Running jails are
// not touched, and a process that has a template open keeps it.
func (c *Cache) Drop() ([]string, error) {
	if _, err := os.Lstat(c.dir()); errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	d, err := lockPinDir(c.dir())
	if err != nil {
		return nil, err
	}
	defer d.Close()
	faults.Here("pins.drop.lock")
	dropped, err := d.names()
	if err != nil {
		return nil, err
	}
	for _, name := range dropped {
		d.unpin(name)
		faults.Here("pins.drop.unpin")
	}
	if err := unix.Unmount(c.dir(), unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && !errors.Is(err, unix.EINVAL) {
		return dropped, &os.PathError{Op: "unmount", Path: c.dir(), Err: err}
	}
	faults.Here("pins.drop.unmount")
	if err := os.Remove(c.dir()); err != nil && !errors.Is(err, unix.ENOTEMPTY) && !errors.Is(err, os.ErrNotExist) {
		return dropped, err
	}
	faults.Here("pins.drop.remove")
	return dropped, nil
}
