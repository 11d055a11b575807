package image

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"example.com/jail/internal/faults"
)

// DefaultDir is the store of the command line.
const DefaultDir = "/var/lib/jail/images"

// ErrInvalid marks an image, or a reference to one, that can never be used
// here, whatever the host.
var ErrInvalid = errors.New("invalid image")

// Image is an unpacked image.
type Image struct {
	// Dir is the absolute path of its root directory, for rootfs.Config.Dir.
	// It is shared by all who use the image: mount it read-only.
	Dir string
	// Env holds the image's KEY=VALUE pairs. They are the image's word, not
	// the host's.
	Env []string
	// WorkingDir is an absolute clean path that exists in the image, or empty
	// if the image names none.
	WorkingDir string
	// Digest is that of the image's manifest, or of its configuration for an
	// archive of docker save that has no manifest: "sha256:...".
	Digest string

	unlock func() error
}

// Close gives up the lock that keeps [Store.Drop] from removing the image. It
// may be called again. The lock is one descriptor; an Image that is dropped
// without Close keeps it until the process ends.
func (i *Image) Close() error {
	if i.unlock == nil {
		return nil
	}
	return i.unlock()
}

// Store keeps unpacked images in a directory. The zero value is usable. It is
// safe for concurrent use, also by several processes on one directory.
type Store struct {
	// Dir is the directory, DefaultDir if empty. It is made, with mode 0700,
	// if it is missing (its parent too for DefaultDir alone), and refused if
	// it is no directory, does not belong to root or has another mode.
	Dir string
	// Progress, if set, is called by Open while it unpacks, in Open's own
	// goroutine: so many bytes of the image out of so many have been read. A
	// compressed archive is decompressed first and counts on its own. Open
	// does not call it for an image that is unpacked already or that somebody
	// else unpacks at the time.
	Progress func(done, total int64)

	limits limits // zero: the defaults; tests lower them
}

// limits of one image.
type limits struct {
	bytes   int64 // unpacked, all layers together, what a later layer hides included
	entries int64 // likewise
}

var defaultLimits = limits{bytes: 8 << 30, entries: 1e6}

func (s *Store) dir() string {
	if s.Dir != "" {
		return s.Dir
	}
	return DefaultDir
}

// Open returns the image that ref names, unpacked. A ref is the path of an
// image layout directory or of an archive, with ":TAG" or "@sha256:..." after
// it if that holds several images; of an index for several platforms, linux
// with the launcher's own architecture is taken. If another process unpacks the
// same image, Open waits for it.
//
// Errors that wrap [ErrInvalid] blame the image or the ref; one about a choice
// lists what there is. A path that does not exist gives os.ErrNotExist. When
// ctx ends, Open removes what it has unpacked and returns the context's error.
func (s *Store) Open(ctx context.Context, ref string) (*Image, error) {
	img, err := s.open(ctx, ref)
	if err != nil {
		return nil, fmt.Errorf("image %s: %w", ref, err)
	}
	return img, nil
}

func (s *Store) open(ctx context.Context, ref string) (*Image, error) {
	path, want, err := parseRef(ref)
	if err != nil {
		return nil, err
	}
	if s.Dir == "" {
		if err := os.MkdirAll(filepath.Dir(DefaultDir), 0o755); err != nil {
			return nil, fmt.Errorf("make image store: %w", err)
		}
	}
	if err := os.Mkdir(s.dir(), 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, fmt.Errorf("make image store: %w", err)
	}
	faults.Here("image.dir")
	d, err := openStoreDir(s.dir())
	if err != nil {
		return nil, err
	}
	defer d.Close()
	if err := d.sweep(ctx); err != nil {
		return nil, err
	}
	src, err := openSource(path)
	if err != nil {
		return nil, err
	}
	defer src.Close()

	u := &unpacker{ctx: ctx, limits: s.limits, progress: s.Progress}
	if u.limits == (limits{}) {
		u.limits = defaultLimits
	}
	memo := ""
	if src.compressed() {
		memo = memoName(src.id, want)
		if name := d.recall(memo); name != "" {
			if img, err := d.lookup(ctx, name); img != nil || err != nil {
				return img, err
			}
		}
		if err := u.spool(d, src); err != nil {
			return nil, err
		}
	}
	t, err := src.resolve(want)
	if err != nil {
		return nil, err
	}
	name := imagePrefix + t.digest.Hex
	img, err := s.obtain(d, name, u, src, t)
	if err == nil && memo != "" && src.unchanged() {
		d.memorize(memo, name)
		faults.Here("image.memo")
	}
	return img, err
}

// obtain returns the image of that name, unpacked by whom it may be.
func (s *Store) obtain(d *storeDir, name string, u *unpacker, src *source, t *target) (*Image, error) {
	for unpacked := 0; ; {
		img, err := d.lookup(u.ctx, name)
		if img != nil || err != nil {
			return img, err
		}
		if unpacked == 3 {
			return nil, fmt.Errorf("store %s: image %s is removed as often as it is unpacked", d.path, name)
		}
		fd, err := d.reserve(u.ctx, name)
		if err != nil {
			return nil, err
		}
		if fd < 0 { // somebody else's: look again in a while
			if err := pause(u.ctx, 20*time.Millisecond); err != nil {
				return nil, err
			}
			continue
		}
		err = u.unpack(fd, src, t)
		if err == nil {
			faults.Here("image.unpack")
			err = os.NewSyscallError("rename unpacked image", unix.Renameat2(d.fd, halfPrefix+name, d.fd, name, unix.RENAME_NOREPLACE))
		}
		if err != nil {
			err = errors.Join(err, removeAll(d.fd, halfPrefix+name))
		}
		faults.Here("image.publish")
		// The lock goes with it; lookup takes a shared one.
		unix.Close(fd)
		if err != nil {
			return nil, err
		}
		unpacked++
	}
}

// Drop removes the images that nobody has open, and what killed launchers left
// half-made. It returns the digests of the images that it removed. A store that
// does not exist has none.
func (s *Store) Drop() ([]string, error) {
	if _, err := os.Lstat(s.dir()); errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	ctx := context.Background()
	d, err := openStoreDir(s.dir())
	if err != nil {
		return nil, err
	}
	defer d.Close()
	var dropped []string
	names, err := d.names(imagePrefix)
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		faults.Here("image.drop")
		gone, err := d.discard(ctx, name)
		if err != nil {
			return dropped, err
		}
		if gone {
			dropped = append(dropped, "sha256:"+strings.TrimPrefix(name, imagePrefix))
		}
	}
	memos, err := d.names(memoPrefix)
	if err != nil {
		return dropped, err
	}
	for _, memo := range memos {
		var st unix.Stat_t
		if unix.Fstatat(d.fd, d.recall(memo), &st, unix.AT_SYMLINK_NOFOLLOW) != nil {
			_ = unix.Unlinkat(d.fd, memo, 0)
		}
	}
	faults.Here("image.drop.memo")
	return dropped, d.sweep(ctx)
}

// What a store holds.
//
//	sha256-<hex>           an image: rootfs/ and image.json; a shared lock on
//	                       the directory for each Image that is open
//	half-sha256-<hex>      an image in the making; locked by its maker
//	half-gone-<n>          an image in the removing; locked likewise
//	half-spool             a decompressed archive, for a moment
//	seen-<hex>             a link: the compressed archive of that identity holds
//	                       the image that the link names
//
// Something half- without a lock is a killed launcher's. The lock of the store
// itself is held while half- things are made and looked for, so that none is
// seen before it is locked.
const (
	imagePrefix = "sha256-"
	halfPrefix  = "half-"
	memoPrefix  = "seen-"
	rootName    = "rootfs"
	trashName   = "trash"
	recordName  = "image.json"
)

// storeDir is an open store. Everything below it is reached through the handle.
type storeDir struct {
	fd   int
	path string
}

func openStoreDir(path string) (*storeDir, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open image store", Path: path, Err: err}
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		unix.Close(fd)
		return nil, &os.PathError{Op: "stat image store", Path: path, Err: err}
	}
	if st.Uid != 0 || st.Mode&0o7777 != 0o700 {
		unix.Close(fd)
		return nil, fmt.Errorf("image store %s has owner %d and mode %#o, want 0 and 0700: remove it or set another", path, st.Uid, st.Mode&0o7777)
	}
	return &storeDir{fd: fd, path: path}, nil
}

// Close gives up the handle and the lock.
func (d *storeDir) Close() { unix.Close(d.fd) }

func (d *storeDir) lock(ctx context.Context) error {
	for {
		busy, err := flock(d.fd, unix.LOCK_EX)
		if err != nil || !busy {
			return err
		}
		if err := pause(ctx, time.Millisecond); err != nil {
			return err
		}
	}
}

func (d *storeDir) unlock() { _ = unix.Flock(d.fd, unix.LOCK_UN) }

// flock tries to lock a descriptor, without waiting.
func flock(fd, how int) (busy bool, err error) {
	for {
		err := unix.Flock(fd, how|unix.LOCK_NB)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EWOULDBLOCK):
			return true, nil
		}
		return false, os.NewSyscallError("lock image store", err)
	}
}

func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}

// names lists the entries of the store that begin so.
func (d *storeDir) names(prefix string) ([]string, error) {
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
		if strings.HasPrefix(n, prefix) {
			names = append(names, n)
		}
	}
	return names, nil
}

// claim opens a directory of the store and locks it. fd is -1 if there is none,
// or if it is busy: locked by another, or exchanged meanwhile.
func (d *storeDir) claim(name string, how int) (fd int, busy bool, err error) {
	fd, err = unix.Openat(d.fd, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) {
		return -1, false, nil
	}
	if err != nil {
		return -1, false, &os.PathError{Op: "open", Path: filepath.Join(d.path, name), Err: err}
	}
	busy, err = d.lockAs(fd, name, how)
	if err != nil || busy {
		unix.Close(fd)
		return -1, busy, err
	}
	return fd, false, nil
}

// lockAs locks an open directory, if it still has its name once that is done.
func (d *storeDir) lockAs(fd int, name string, how int) (busy bool, err error) {
	busy, err = flock(fd, how)
	if err != nil || busy {
		return busy, err
	}
	var mine, there unix.Stat_t
	if err := unix.Fstat(fd, &mine); err != nil {
		return false, &os.PathError{Op: "stat", Path: filepath.Join(d.path, name), Err: err}
	}
	gone := unix.Fstatat(d.fd, name, &there, unix.AT_SYMLINK_NOFOLLOW)
	return gone != nil || mine.Ino != there.Ino, nil
}

// lookup returns the unpacked image of that name with a shared lock on it, nil
// if there is none. One that is damaged is removed.
func (d *storeDir) lookup(ctx context.Context, name string) (*Image, error) {
	for {
		fd, busy, err := d.claim(name, unix.LOCK_SH)
		if err != nil {
			return nil, err
		}
		if busy { // being removed
			if err := pause(ctx, 5*time.Millisecond); err != nil {
				return nil, err
			}
			continue
		}
		if fd < 0 {
			return nil, nil
		}
		img, err := d.read(name, fd)
		if err == nil {
			img.unlock = sync.OnceValue(func() error { return os.NewSyscallError("close", unix.Close(fd)) })
			return img, nil
		}
		unix.Close(fd)
		gone, discardErr := d.discard(ctx, name)
		if discardErr != nil || !gone {
			return nil, errors.Join(fmt.Errorf("unpacked image %s is damaged and in use: %w", filepath.Join(d.path, name), err), discardErr)
		}
	}
}

// record is what the store keeps beside an unpacked root.
type record struct {
	Digest     string
	Env        []string
	WorkingDir string
}

func (d *storeDir) read(name string, fd int) (*Image, error) {
	if err := checkOwn(fd, "", unix.S_IFDIR|0o700); err != nil {
		return nil, err
	}
	if err := checkOwn(fd, rootName, unix.S_IFDIR|0o755); err != nil {
		return nil, err
	}
	if err := checkOwn(fd, recordName, unix.S_IFREG|0o600); err != nil {
		return nil, err
	}
	rfd, err := unix.Openat(fd, recordName, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: recordName, Err: err}
	}
	f := os.NewFile(uintptr(rfd), recordName)
	defer f.Close()
	// Escapes make it longer than the configuration it came from.
	text, err := readCapped(f, 8*maxJSON)
	if err != nil {
		return nil, err
	}
	var r record
	if err := json.Unmarshal(text, &r); err != nil {
		return nil, fmt.Errorf("%s: %w", recordName, err)
	}
	if r.Digest != "sha256:"+strings.TrimPrefix(name, imagePrefix) {
		return nil, fmt.Errorf("%s: digest %q", recordName, r.Digest)
	}
	return &Image{Dir: filepath.Join(d.path, name, rootName), Env: r.Env, WorkingDir: r.WorkingDir, Digest: r.Digest}, nil
}

// checkOwn refuses what is not root's with exactly this kind and mode.
func checkOwn(at int, name string, mode uint32) error {
	var st unix.Stat_t
	if err := unix.Fstatat(at, name, &st, unix.AT_SYMLINK_NOFOLLOW|unix.AT_EMPTY_PATH); err != nil {
		return &os.PathError{Op: "stat", Path: name, Err: err}
	}
	if st.Uid != 0 || st.Mode != mode {
		return fmt.Errorf("%q has owner %d and mode %#o, want 0 and %#o", name, st.Uid, st.Mode, mode)
	}
	return nil
}

// reserve makes the directory in which an image is unpacked and locks it. It
// returns -1 if another is at it, or was and is done.
func (d *storeDir) reserve(ctx context.Context, name string) (int, error) {
	if err := d.lock(ctx); err != nil {
		return -1, err
	}
	defer d.unlock()
	var st unix.Stat_t
	if unix.Fstatat(d.fd, name, &st, unix.AT_SYMLINK_NOFOLLOW) == nil {
		return -1, nil
	}
	half := halfPrefix + name
	err := unix.Mkdirat(d.fd, half, 0o700)
	if errors.Is(err, unix.EEXIST) {
		fd, busy, err := d.claim(half, unix.LOCK_EX)
		if err != nil || busy || fd < 0 {
			return -1, err
		}
		// Its maker was killed after the sweep at the start of this Open.
		defer unix.Close(fd)
		return -1, removeAll(d.fd, half)
	}
	if err != nil {
		return -1, &os.PathError{Op: "make", Path: filepath.Join(d.path, half), Err: err}
	}
	faults.Here("image.reserve")
	fd, busy, err := d.claim(half, unix.LOCK_EX)
	if err != nil || busy || fd < 0 {
		return -1, errors.Join(fmt.Errorf("lock %s: busy %t: %w", half, busy, err), unix.Unlinkat(d.fd, half, unix.AT_REMOVEDIR))
	}
	faults.Here("image.reserve.lock")
	return fd, nil
}

// discard removes an unpacked image unless somebody has it open.
func (d *storeDir) discard(ctx context.Context, name string) (gone bool, err error) {
	if err := d.lock(ctx); err != nil {
		return false, err
	}
	defer d.unlock()
	fd, busy, err := d.claim(name, unix.LOCK_EX)
	if err != nil || busy {
		return false, err
	}
	if fd < 0 {
		return true, nil
	}
	// Whoever opens the store from now on sees it as gone, at once.
	defer unix.Close(fd)
	var away string
	for n := 0; ; n++ {
		away = fmt.Sprintf("%sgone-%d", halfPrefix, n)
		err := unix.Renameat2(d.fd, name, d.fd, away, unix.RENAME_NOREPLACE)
		if err == nil {
			break
		}
		if !errors.Is(err, unix.EEXIST) {
			return false, &os.PathError{Op: "remove", Path: filepath.Join(d.path, name), Err: err}
		}
	}
	faults.Here("image.discard")
	d.unlock()
	return true, removeAll(d.fd, away)
}

// sweep removes what killed launchers left.
func (d *storeDir) sweep(ctx context.Context) error {
	names, err := d.names(halfPrefix)
	if err != nil || len(names) == 0 {
		return err
	}
	if err := d.lock(ctx); err != nil {
		return err
	}
	defer d.unlock()
	stale := map[string]int{}
	defer func() {
		for _, fd := range stale {
			unix.Close(fd)
		}
	}()
	for _, name := range names {
		fd, _, err := d.claim(name, unix.LOCK_EX)
		if errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
			// A spool file has no name outside of the store's lock.
			err = unix.Unlinkat(d.fd, name, 0)
		}
		if err != nil {
			return err
		}
		if fd >= 0 {
			stale[name] = fd
		}
	}
	faults.Here("image.sweep")
	d.unlock()
	for name := range stale {
		if err := removeAll(d.fd, name); err != nil {
			return err
		}
	}
	return nil
}

// scratch returns a file of the store without a name.
func (d *storeDir) scratch(ctx context.Context) (*os.File, error) {
	if err := d.lock(ctx); err != nil {
		return nil, err
	}
	defer d.unlock()
	const name = halfPrefix + "spool"
	fd, err := unix.Openat(d.fd, name, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, &os.PathError{Op: "make", Path: filepath.Join(d.path, name), Err: err}
	}
	faults.Here("image.spool")
	if err := unix.Unlinkat(d.fd, name, 0); err != nil {
		unix.Close(fd)
		return nil, &os.PathError{Op: "unlink", Path: filepath.Join(d.path, name), Err: err}
	}
	faults.Here("image.spool.unlink")
	return os.NewFile(uintptr(fd), name), nil
}

// memoName names what the store remembers of a compressed archive. The change
// time is the kernel's: whoever may write to the file cannot set it.
func memoName(id unix.Stat_t, want selection) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%d %d %d %v %v %s %q %v", id.Dev, id.Ino, id.Size, id.Mtim, id.Ctim, runtime.GOARCH, want.tag, want.digest))
	return memoPrefix + hex.EncodeToString(sum[:16])
}

// recall returns the name of an image, "" if nothing fit is remembered.
func (d *storeDir) recall(memo string) string {
	buf := make([]byte, 256)
	n, err := unix.Readlinkat(d.fd, memo, buf)
	if err != nil || n == len(buf) {
		return ""
	}
	name := string(buf[:n])
	if !strings.HasPrefix(name, imagePrefix) || strings.Contains(name, "/") {
		return ""
	}
	return name
}

// memorize is best effort: what is not remembered is decompressed again.
func (d *storeDir) memorize(memo, name string) {
	if d.recall(memo) != name {
		_ = unix.Unlinkat(d.fd, memo, 0)
		faults.Here("image.memo.unlink")
		_ = unix.Symlinkat(name, d.fd, memo)
	}
}
