package image

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// helperEnv makes the test binary open an image and die in the middle of it:
// "STORE REF PERCENT".
const helperEnv = "JAIL_IMAGE_TEST_KILL"

func TestMain(m *testing.M) {
	if job := os.Getenv(helperEnv); job != "" {
		var store, ref string
		var percent int64
		if _, err := fmt.Sscan(job, &store, &ref, &percent); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(2)
		}
		s := &Store{Dir: store, Progress: func(done, total int64) {
			if done*100 >= total*percent {
				_ = unix.Kill(os.Getpid(), unix.SIGKILL)
				select {}
			}
		}}
		_, err := s.Open(context.Background(), ref)
		fmt.Fprintln(os.Stderr, "not killed:", err)
		os.Exit(3)
	}
	os.Exit(m.Run())
}

// place is a directory with a store in it, whose neighbours must stay as they
// are and no descriptor of which may stay open.
type place struct {
	t      testing.TB
	dir    string
	store  *Store
	before map[string]string
	fds    []string
}

func newPlace(t testing.TB) *place {
	t.Helper()
	p := newPlaceIn(t, t.TempDir())
	t.Cleanup(p.check)
	return p
}

func newPlaceIn(t testing.TB, dir string) *place {
	t.Helper()
	p := &place{t: t, dir: dir}
	p.store = &Store{Dir: filepath.Join(p.dir, "store")}
	for _, d := range []string{"etc", "outside/deep", "store"} {
		if err := os.MkdirAll(filepath.Join(p.dir, d), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for _, f := range []string{"etc/passwd", "outside/victim", "outside/deep/victim"} {
		write(t, filepath.Join(p.dir, f), []byte("as it was: "+f))
	}
	p.before = p.picture()
	p.fds = openFiles(t)
	return p
}

// forget takes what the test itself has put beside the store as it is now.
func (p *place) forget() { p.before = p.picture() }

func (p *place) check() {
	p.t.Helper()
	if now := p.picture(); !maps.Equal(p.before, now) {
		p.t.Errorf("changed outside of the store:\nbefore %v\nafter  %v", p.before, now)
	}
	if now := openFiles(p.t); !slices.Equal(p.fds, now) {
		p.t.Errorf("descriptors before: %v\nafter: %v", p.fds, now)
	}
}

// picture describes everything beside the store, content included.
func (p *place) picture() map[string]string {
	p.t.Helper()
	seen := map[string]string{}
	err := filepath.WalkDir(p.dir, func(name string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if name == p.store.Dir {
			return fs.SkipDir
		}
		if name == p.dir {
			return nil
		}
		var st unix.Stat_t
		if err := unix.Lstat(name, &st); err != nil {
			return err
		}
		text := fmt.Sprintf("mode %o owner %d:%d links %d modified %v", st.Mode, st.Uid, st.Gid, st.Nlink, st.Mtim)
		if e.Type().IsRegular() {
			b, err := os.ReadFile(name)
			if err != nil {
				return err
			}
			text += fmt.Sprintf(" %x", sha256.Sum256(b))
		}
		seen[strings.TrimPrefix(name, p.dir)] = text
		return nil
	})
	if err != nil {
		p.t.Fatal(err)
	}
	return seen
}

func openFiles(t testing.TB) []string {
	t.Helper()
	d, err := os.Open("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	names, err := d.Readdirnames(-1)
	if err != nil {
		t.Fatal(err)
	}
	var open []string
	for _, n := range names {
		to, err := os.Readlink("/proc/self/fd/" + n)
		if err == nil && !strings.HasPrefix(to, "/proc/") && !strings.HasPrefix(to, "anon_inode:") {
			open = append(open, n+" "+to)
		}
	}
	slices.Sort(open)
	return open
}

// stored lists what is in the store.
func (p *place) stored() []string {
	p.t.Helper()
	list, err := os.ReadDir(p.store.Dir)
	if err != nil {
		p.t.Fatal(err)
	}
	var names []string
	for _, e := range list {
		names = append(names, e.Name())
	}
	return names
}

// open opens an image and closes it at the end of the test.
func (p *place) open(ref string) *Image {
	p.t.Helper()
	img, err := p.store.Open(context.Background(), ref)
	if err != nil {
		p.t.Fatal(err)
	}
	// Before check, which looks for descriptors.
	p.t.Cleanup(func() {
		if err := img.Close(); err != nil {
			p.t.Error(err)
		}
	})
	return img
}

// unpacked opens a layout with one image of these archives.
func (p *place) unpacked(archives ...[]byte) *Image {
	p.t.Helper()
	l := newLayout(p.t)
	ref := l.put(l.image(plain, archives...)).directory(filepath.Join(p.dir, "layout"))
	p.forget()
	return p.open(ref)
}

// refused opens a ref that must fail, and looks whether anything is left.
func (p *place) refused(ref string, words ...string) error {
	p.t.Helper()
	before := p.stored()
	img, err := p.store.Open(context.Background(), ref)
	if err == nil {
		_ = img.Close()
		p.t.Fatalf("opened, want an error with %q", words)
	}
	if !errors.Is(err, ErrInvalid) {
		p.t.Errorf("error %v does not blame the image", err)
	}
	// The directory has the name of the test.
	text := strings.ReplaceAll(err.Error(), p.dir, "")
	for _, w := range words {
		if !strings.Contains(text, w) {
			p.t.Errorf("error %q does not have %q", err, w)
		}
	}
	if len(err.Error()) > 16<<10 {
		p.t.Errorf("error of %d bytes", len(err.Error()))
	}
	if after := p.stored(); !slices.Equal(before, after) {
		p.t.Errorf("store had %v, has %v", before, after)
	}
	return err
}

// tree describes an unpacked root: for each path its kind and mode, and what a
// file or link holds.
func describeTree(t testing.TB, root string) map[string]string {
	t.Helper()
	seen := map[string]string{}
	err := filepath.WalkDir(root, func(name string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		st := info.Sys().(*syscall.Stat_t)
		if st.Uid != 0 || st.Gid != 0 {
			t.Errorf("%s belongs to %d:%d", name, st.Uid, st.Gid)
		}
		if mode := st.Mode & 0o7000; mode != 0 {
			t.Errorf("%s has mode bits %#o", name, mode)
		}
		if n, err := unix.Llistxattr(name, nil); err != nil || n != 0 {
			t.Errorf("%s has %d bytes of attribute names (%v)", name, n, err)
		}
		text := ""
		switch {
		case e.IsDir():
			text = fmt.Sprintf("dir %o", st.Mode&0o777)
		case e.Type().IsRegular():
			b, err := os.ReadFile(name)
			if err != nil {
				return err
			}
			text = fmt.Sprintf("file %o %.40s", st.Mode&0o777, b)
		case e.Type() == fs.ModeSymlink:
			to, err := os.Readlink(name)
			if err != nil {
				return err
			}
			text = "link " + to
		default:
			t.Errorf("%s is a %v", name, e.Type())
		}
		seen[strings.TrimPrefix(name, root)] = text
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return seen
}

// base is what every root has beside the image's own.
var base = map[string]string{"": "dir 755", "/proc": "dir 755", "/sys": "dir 755", "/dev": "dir 755", "/tmp": "dir 755", "/work": "dir 755"}

func wantTree(t testing.TB, root string, want map[string]string) {
	t.Helper()
	all := maps.Clone(base)
	maps.Copy(all, want)
	have := describeTree(t, root)
	for name, text := range all {
		if have[name] != text {
			t.Errorf("%q is %q, want %q", name, have[name], text)
		}
	}
	for name, text := range have {
		if _, ok := all[name]; !ok {
			t.Errorf("%q is %q, want nothing", name, text)
		}
	}
}
