package image

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"example.com/jail/rootfs"
	"golang.org/x/sys/unix"
)

// system is an archive with a program that runs without any library.
func system(t testing.TB) []byte {
	t.Helper()
	b, err := os.ReadFile("/usr/bin/busybox")
	if err != nil {
		t.Fatalf("%v: install busybox-static", err)
	}
	return archive(t, dir("bin/"), file("bin/busybox", string(b)).mode(0o755), symlink("bin/sh", "busybox"), hardlink("bin/cat", "bin/busybox"))
}

func TestOpenRunsWhatItUnpacked(t *testing.T) {
	lower, upper := system(t), archive(t, file("work/hello", "hello from the image\n"))
	oci := func(p packing) *layout {
		l := newLayout(t)
		return l.put(tagged(l.image(p, lower, upper), "v1"))
	}
	docker := dockerArchive(t, []string{"example/busy:v1"}, lower, upper, upper)
	for name, ref := range map[string]func(dir string) string{
		"layout":                    func(dir string) string { return oci(plain).directory(dir) },
		"layout, gzip layers":       func(dir string) string { return oci(gzipped).directory(dir) },
		"layout, zstd layers":       func(dir string) string { return oci(zstdPacked).directory(dir) },
		"layout, tag":               func(dir string) string { return oci(gzipped).directory(dir) + ":v1" },
		"OCI archive":               func(dir string) string { return write(t, dir, oci(gzipped).archive()) },
		"OCI archive, gzip":         func(dir string) string { return write(t, dir, pack(t, gzipped, oci(plain).archive())) },
		"OCI archive, zstd":         func(dir string) string { return write(t, dir, pack(t, zstdPacked, oci(plain).archive())) },
		"docker archive":            func(dir string) string { return write(t, dir, docker) },
		"docker archive, gzip":      func(dir string) string { return write(t, dir, pack(t, gzipped, docker)) },
		"docker archive, tag":       func(dir string) string { return write(t, dir, docker) + ":v1" },
		"docker archive, name":      func(dir string) string { return write(t, dir, docker) + ":busy:v1" },
		"docker archive, all of it": func(dir string) string { return write(t, dir, docker) + ":example/busy:v1" },
	} {
		t.Run(name, func(t *testing.T) {
			p := newPlace(t)
			at := ref(filepath.Join(p.dir, "image"))
			p.forget()
			calls, last, total := 0, int64(0), int64(0)
			p.store.Progress = func(d, n int64) { calls, last, total = calls+1, d, n }
			img := p.open(at)
			if calls == 0 || last != total || total == 0 {
				t.Errorf("progress: %d calls, last %d of %d", calls, last, total)
			}
			if !slices.Equal(img.Env, []string{"PATH=/bin", "A=b=c"}) || img.WorkingDir != "/work" {
				t.Errorf("environment %q, working directory %q", img.Env, img.WorkingDir)
			}
			if img.Dir != filepath.Join(p.store.Dir, strings.Replace(img.Digest, ":", "-", 1), "rootfs") {
				t.Errorf("%s is at %s", img.Digest, img.Dir)
			}
			cmd := exec.Command("/bin/sh", "-c", "cat hello")
			cmd.SysProcAttr, cmd.Dir = &syscall.SysProcAttr{Chroot: img.Dir}, img.WorkingDir
			out, err := cmd.CombinedOutput()
			if err != nil || string(out) != "hello from the image\n" {
				t.Errorf("ran: %q, %v", out, err)
			}

			calls = 0
			again := p.open(at)
			if calls != 0 || again.Dir != img.Dir || again.Digest != img.Digest || !slices.Equal(again.Env, img.Env) || again.WorkingDir != img.WorkingDir {
				t.Errorf("second open: progress %d, %+v, first %+v", calls, again, img)
			}
		})
	}
}

// TestImageIsARootOfRootfs: what Open makes passes the checks of the package
// that mounts it.
func TestImageIsARootOfRootfs(t *testing.T) {
	fds := openFiles(t)
	l := newLayout(t)
	s := &Store{Dir: filepath.Join(t.TempDir(), "store")}
	img, err := s.Open(context.Background(), l.put(l.image(plain, system(t))).directory(filepath.Join(t.TempDir(), "layout")))
	if err != nil {
		t.Fatal(err)
	}
	cache := &rootfs.Cache{Dir: filepath.Join(t.TempDir(), "pins")}
	template, err := cache.Open(rootfs.Config{Dir: img.Dir})
	if err != nil {
		t.Fatal(err)
	}
	if template.OwnerID() == 0 {
		t.Error("the image's owner is not mapped to the program")
	}
	if err := template.Namespace().Close(); err != nil {
		t.Error(err)
	}
	if _, err := cache.Drop(); err != nil {
		t.Error(err)
	}
	if err := img.Close(); err != nil {
		t.Error(err)
	}
	// The helper of package rootfs cleans up after its answer.
	for range 500 {
		if slices.Equal(fds, openFiles(t)) {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
	t.Errorf("descriptors before: %v\nafter: %v", fds, openFiles(t))
}

func TestStoreIsRootsAlone(t *testing.T) {
	l := newLayout(t)
	ref := l.put(l.image(plain)).directory(filepath.Join(t.TempDir(), "layout"))
	for name, make := range map[string]func(dir string) error{
		"readable by others": func(dir string) error { return os.Chmod(dir, 0o755) },
		"sticky":             func(dir string) error { return os.Chmod(dir, 0o700|os.ModeSticky) },
		"another's":          func(dir string) error { return os.Chown(dir, 1, 1) },
		"a file": func(dir string) error {
			return errors.Join(os.Remove(dir), os.WriteFile(dir, nil, 0o700))
		},
		"a link": func(dir string) error {
			return errors.Join(os.Rename(dir, dir+"2"), os.Symlink(dir+"2", dir))
		},
		"a link to nothing": func(dir string) error {
			return errors.Join(os.Remove(dir), os.Symlink(dir+"2", dir))
		},
		"without a parent": func(dir string) error {
			return os.RemoveAll(filepath.Dir(dir))
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "parent", "store")
			if err := os.MkdirAll(dir, 0o700); err != nil {
				t.Fatal(err)
			}
			if err := make(dir); err != nil {
				t.Fatal(err)
			}
			s := &Store{Dir: dir}
			if img, err := s.Open(context.Background(), ref); err == nil {
				_ = img.Close()
				t.Error("opened")
			} else if errors.Is(err, ErrInvalid) {
				t.Errorf("error %v blames the image", err)
			}
			if _, err := s.Drop(); err == nil && name != "without a parent" {
				t.Error("dropped")
			}
		})
	}
}

func TestOpenMakesTheStore(t *testing.T) {
	p := newPlace(t)
	if err := os.Remove(p.store.Dir); err != nil {
		t.Fatal(err)
	}
	if dropped, err := p.store.Drop(); err != nil || dropped != nil {
		t.Errorf("dropped %v, %v", dropped, err)
	}
	p.unpacked()
	info, err := os.Lstat(p.store.Dir)
	if err != nil || info.Mode() != os.ModeDir|0o700 {
		t.Errorf("store: %v, %v", info, err)
	}
}

// TestRace: of those who open an image at once, one unpacks it.
func TestRace(t *testing.T) {
	p := newPlace(t)
	l := newLayout(t)
	ref := l.put(l.image(gzipped, system(t), archive(t, file("work/a", "a")))).directory(filepath.Join(p.dir, "layout"))
	p.forget()
	const openers = 6
	var unpackers atomic.Int32
	var wg sync.WaitGroup
	images := make([]*Image, openers)
	for i := range images {
		wg.Go(func() {
			var once sync.Once
			s := &Store{Dir: p.store.Dir, Progress: func(_, _ int64) { once.Do(func() { unpackers.Add(1) }) }}
			img, err := s.Open(context.Background(), ref)
			if err != nil {
				t.Error(err)
				return
			}
			images[i] = img
		})
	}
	wg.Wait()
	if n := unpackers.Load(); n != 1 {
		t.Errorf("%d unpacked it", n)
	}
	for _, img := range images {
		if img == nil {
			continue
		}
		if img.Dir != images[0].Dir {
			t.Errorf("%s and %s", img.Dir, images[0].Dir)
		}
		if err := img.Close(); err != nil {
			t.Error(err)
		}
	}
	if have := p.stored(); len(have) != 1 {
		t.Errorf("store has %v", have)
	}
}

// TestOpenAndDropRace: whoever has an image has it whole.
func TestOpenAndDropRace(t *testing.T) {
	p := newPlace(t)
	l := newLayout(t)
	ref := l.put(l.image(plain, archive(t, file("work/a", "a")))).directory(filepath.Join(p.dir, "layout"))
	p.forget()
	stop := make(chan struct{})
	var openers, dropper sync.WaitGroup
	dropper.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			if _, err := p.store.Drop(); err != nil {
				t.Error(err)
				return
			}
		}
	})
	for range 3 {
		openers.Go(func() {
			for range 40 {
				img, err := (&Store{Dir: p.store.Dir}).Open(context.Background(), ref)
				if err != nil {
					if strings.Contains(err.Error(), "as often as it is unpacked") {
						continue // starved by the dropper, which is what it says
					}
					t.Error(err)
					return
				}
				if b, err := os.ReadFile(filepath.Join(img.Dir, "work/a")); err != nil || string(b) != "a" {
					t.Errorf("read %q, %v", b, err)
				}
				if err := img.Close(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	openers.Wait()
	close(stop)
	dropper.Wait()
	if _, err := p.store.Drop(); err != nil {
		t.Error(err)
	}
	if have := p.stored(); len(have) != 0 {
		t.Errorf("store has %v", have)
	}
}

// TestKilled is E1 for the unpacking: what a killed launcher leaves is removed
// by the next Open of any image, and by Drop.
func TestKilled(t *testing.T) {
	for _, percent := range []string{"1", "60", "100"} {
		for _, next := range []string{"same", "other", "drop"} {
			t.Run(percent+" "+next, func(t *testing.T) {
				p := newPlace(t)
				l := newLayout(t)
				ref := l.put(l.image(plain, archive(t, file("big", strings.Repeat("0123456789abcdef", 1<<16))), archive(t, file("work/a", "a")))).directory(filepath.Join(p.dir, "layout"))
				m := newLayout(t)
				other := m.put(m.image(plain)).directory(filepath.Join(p.dir, "other"))
				p.forget()

				cmd := exec.Command("/proc/self/exe")
				cmd.Env = append(os.Environ(), helperEnv+"="+p.store.Dir+" "+ref+" "+percent)
				var stderr strings.Builder
				cmd.Stderr = &stderr
				err := cmd.Run()
				var exit *exec.ExitError
				if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
					t.Fatalf("helper: %v: %s", err, stderr.String())
				}
				left := p.stored()
				if len(left) != 1 || !strings.HasPrefix(left[0], halfPrefix) {
					t.Fatalf("killed launcher left %v", left)
				}

				switch next {
				case "same":
					img := p.open(ref)
					if b, err := os.ReadFile(filepath.Join(img.Dir, "work/a")); err != nil || string(b) != "a" {
						t.Errorf("read %q, %v", b, err)
					}
				case "other":
					p.open(other)
				case "drop":
					if dropped, err := p.store.Drop(); err != nil || len(dropped) != 0 {
						t.Errorf("dropped %v, %v", dropped, err)
					}
				}
				for _, name := range p.stored() {
					if strings.HasPrefix(name, halfPrefix) {
						t.Errorf("%s is left", name)
					}
				}
			})
		}
	}
}

// TestSweepLeavesOthersWork: an unpack that is under way is not swept away.
func TestSweepLeavesOthersWork(t *testing.T) {
	p := newPlace(t)
	l := newLayout(t)
	ref := l.put(l.image(plain, archive(t, file("work/a", strings.Repeat("a", 1<<20))))).directory(filepath.Join(p.dir, "layout"))
	p.forget()
	var once sync.Once
	p.store.Progress = func(_, _ int64) {
		once.Do(func() {
			if _, err := (&Store{Dir: p.store.Dir}).Drop(); err != nil {
				t.Error(err)
			}
			ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
			defer cancel()
			if img, err := (&Store{Dir: p.store.Dir}).Open(ctx, ref); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("second opener: %v, %v", img, err)
			}
		})
	}
	img := p.open(ref)
	if _, err := os.Stat(filepath.Join(img.Dir, "work/a")); err != nil {
		t.Error(err)
	}
}

func TestDropLeavesOpenImages(t *testing.T) {
	p := newPlace(t)
	l, m := newLayout(t), newLayout(t)
	one := l.put(l.image(plain, archive(t, file("work/a", "a")))).directory(filepath.Join(p.dir, "one"))
	two := write(t, filepath.Join(p.dir, "two"), pack(t, gzipped, m.put(m.image(plain)).archive()))
	p.forget()
	kept, closed := p.open(one), p.open(two)
	if err := errors.Join(closed.Close(), closed.Close()); err != nil {
		t.Errorf("close twice: %v", err)
	}
	dropped, err := p.store.Drop()
	if err != nil || !slices.Equal(dropped, []string{closed.Digest}) {
		t.Errorf("dropped %v, %v, want %s", dropped, err, closed.Digest)
	}
	if b, err := os.ReadFile(filepath.Join(kept.Dir, "work/a")); err != nil || string(b) != "a" {
		t.Errorf("open image: %q, %v", b, err)
	}
	if have := p.stored(); len(have) != 1 {
		t.Errorf("store has %v", have)
	}
	if err := kept.Close(); err != nil {
		t.Error(err)
	}
	if dropped, err := p.store.Drop(); err != nil || !slices.Equal(dropped, []string{kept.Digest}) {
		t.Errorf("dropped %v, %v", dropped, err)
	}
	if have := p.stored(); len(have) != 0 {
		t.Errorf("store has %v", have)
	}
}

// TestDamagedImageIsUnpackedAgain: nothing in the store is used unless it is as
// Open made it.
func TestDamagedImageIsUnpackedAgain(t *testing.T) {
	for name, damage := range map[string]func(dir string) error{
		"no record":     func(dir string) error { return os.Remove(filepath.Join(dir, recordName)) },
		"record is cut": func(dir string) error { return os.Truncate(filepath.Join(dir, recordName), 5) },
		"record of other": func(dir string) error {
			return os.WriteFile(filepath.Join(dir, recordName), []byte(`{"Digest":"sha256:00"}`), 0o600)
		},
		"record mode": func(dir string) error { return os.Chmod(filepath.Join(dir, recordName), 0o644) },
		"record is a link": func(dir string) error {
			f := filepath.Join(dir, recordName)
			return errors.Join(os.Rename(f, f+"2"), os.Symlink(f+"2", f))
		},
		"record is a FIFO": func(dir string) error {
			f := filepath.Join(dir, recordName)
			return errors.Join(os.Remove(f), unix.Mkfifo(f, 0o600))
		},
		"no root":     func(dir string) error { return os.RemoveAll(filepath.Join(dir, rootName)) },
		"another's":   func(dir string) error { return os.Chown(filepath.Join(dir, rootName), 1, 1) },
		"open to all": func(dir string) error { return os.Chmod(dir, 0o777) },
		"root is link": func(dir string) error {
			return errors.Join(os.RemoveAll(filepath.Join(dir, rootName)), os.Symlink("/", filepath.Join(dir, rootName)))
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPlace(t)
			img := p.unpacked(archive(t, file("work/a", "a")))
			if err := img.Close(); err != nil {
				t.Fatal(err)
			}
			if err := damage(filepath.Dir(img.Dir)); err != nil {
				t.Fatal(err)
			}
			again := p.open(filepath.Join(p.dir, "layout"))
			wantTree(t, again.Dir, map[string]string{"/work/a": "file 644 a"})
			if again.WorkingDir != "/work" || again.Digest != img.Digest {
				t.Errorf("%+v", again)
			}
		})
	}
}

func TestDamagedImageInUseIsRefused(t *testing.T) {
	p := newPlace(t)
	img := p.unpacked()
	if err := os.Remove(filepath.Join(filepath.Dir(img.Dir), recordName)); err != nil {
		t.Fatal(err)
	}
	if again, err := p.store.Open(context.Background(), filepath.Join(p.dir, "layout")); err == nil || !strings.Contains(err.Error(), "damaged and in use") {
		t.Errorf("%v, %v", again, err)
	}
}

func TestCancelLeavesNothing(t *testing.T) {
	for name, ref := range map[string]func(p *place) string{
		"unpacking": func(p *place) string {
			l := newLayout(t)
			return l.put(l.image(plain, system(t))).directory(filepath.Join(p.dir, "image"))
		},
		"spooling": func(p *place) string {
			l := newLayout(t)
			return write(t, filepath.Join(p.dir, "image"), pack(t, gzipped, l.put(l.image(plain, system(t))).archive()))
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPlace(t)
			at := ref(p)
			p.forget()
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			p.store.Progress = func(done, total int64) {
				if done > total/2 {
					cancel()
				}
			}
			img, err := p.store.Open(ctx, at)
			if !errors.Is(err, context.Canceled) || errors.Is(err, ErrInvalid) {
				t.Errorf("%v, %v", img, err)
			}
			if have := p.stored(); len(have) != 0 {
				t.Errorf("store has %v", have)
			}
		})
	}
}

// TestFullDisk is E9 for the unpacking.
func TestFullDisk(t *testing.T) {
	for _, p := range []packing{plain, gzipped} {
		place := newPlace(t)
		l := newLayout(t)
		data := l.put(l.image(plain, archive(t, file("a", strings.Repeat("a", 4<<20))))).archive()
		ref := write(t, filepath.Join(place.dir, "image"), pack(t, p, data))
		place.forget()
		if err := unix.Mount("tmpfs", place.store.Dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "size=1m,mode=0700"); err != nil {
			t.Fatal(err)
		}
		img, err := place.store.Open(context.Background(), ref)
		if !errors.Is(err, unix.ENOSPC) || errors.Is(err, ErrInvalid) {
			t.Errorf("%v, %v", img, err)
		}
		if have := place.stored(); len(have) != 0 {
			t.Errorf("store has %v", have)
		}
		if err := unix.Unmount(place.store.Dir, 0); err != nil {
			t.Fatal(err)
		}
	}
}

// TestCompressedArchiveIsReadOnce: the store knows the file again, and another
// file, tag or content as another.
func TestCompressedArchiveIsReadOnce(t *testing.T) {
	p := newPlace(t)
	l := newLayout(t)
	a, b := l.image(plain, archive(t, file("work/a", "a"))), l.image(plain, archive(t, file("work/b", "b")))
	ref := write(t, filepath.Join(p.dir, "image"), pack(t, gzipped, l.put(tagged(a, "a"), tagged(b, "b")).archive()))
	p.forget()
	read := false
	p.store.Progress = func(_, _ int64) { read = true }
	for i, step := range []struct {
		ref  string
		want any
		read bool
	}{
		{":a", a["digest"], true}, {":a", a["digest"], false}, {":b", b["digest"], true}, {":b", b["digest"], false}, {":a", a["digest"], false},
		{"@" + b["digest"].(string), b["digest"], true}, {"@" + b["digest"].(string), b["digest"], false},
	} {
		read = false
		if img := p.open(ref + step.ref); img.Digest != step.want || read != step.read {
			t.Errorf("step %d: opened %s, read %t", i, img.Digest, read)
		}
	}
}

// TestChangedArchiveIsReadAgain: in place, with the same size and the old time,
// and while it is being read.
func TestChangedArchiveIsReadAgain(t *testing.T) {
	p := newPlace(t)
	version := func(body string) []byte {
		l := newLayout(t)
		var b bytes.Buffer
		w, err := gzip.NewWriterLevel(&b, gzip.NoCompression)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(l.put(l.image(plain, archive(t, file("work/a", body)))).archive()); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		return b.Bytes()
	}
	sizes := map[int64]bool{}
	ref := filepath.Join(p.dir, "image")
	put := func(body string) {
		write(t, ref, version(body))
		info, err := os.Stat(ref)
		if err = errors.Join(err, os.Chtimes(ref, modified, modified)); err != nil {
			t.Fatal(err)
		}
		sizes[info.Size()] = true
		p.forget()
	}
	for _, body := range []string{"one", "two"} {
		put(body)
		img := p.open(ref)
		if b, err := os.ReadFile(filepath.Join(img.Dir, "work/a")); err != nil || string(b) != body {
			t.Errorf("opened %q, %v, want %q", b, err, body)
		}
	}
	if len(sizes) != 1 {
		t.Errorf("the test's archives have the sizes %v", sizes)
	}

	memos := func() (n int) {
		for _, name := range p.stored() {
			if strings.HasPrefix(name, memoPrefix) {
				n++
			}
		}
		return n
	}
	put("six")
	before := memos()
	p.store.Progress = func(_, _ int64) {
		if err := os.Chtimes(ref, modified, modified); err != nil {
			t.Error(err)
		}
	}
	p.open(ref)
	p.forget()
	if after := memos(); after != before {
		t.Errorf("%d archives were remembered, %d are: one that changed meanwhile", before, after)
	}
}

// TestLockIsOfTheNameThatWasOpened: a directory that was renamed between its
// opening and its locking is not what its name says.
func TestLockIsOfTheNameThatWasOpened(t *testing.T) {
	p := newPlace(t)
	a, b := filepath.Join(p.store.Dir, "a"), filepath.Join(p.store.Dir, "b")
	d, err := openStoreDir(p.store.Dir)
	if err = errors.Join(err, os.Mkdir(a, 0o700)); err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	fd, err := unix.Open(a, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if busy, err := d.lockAs(fd, "a", unix.LOCK_EX); busy || err != nil {
		t.Errorf("as it was: busy %t, %v", busy, err)
	}
	if err := os.Rename(a, b); err != nil {
		t.Fatal(err)
	}
	if busy, err := d.lockAs(fd, "a", unix.LOCK_EX); !busy || err != nil {
		t.Errorf("gone: busy %t, %v", busy, err)
	}
	if err := os.Mkdir(a, 0o700); err != nil {
		t.Fatal(err)
	}
	if busy, err := d.lockAs(fd, "a", unix.LOCK_EX); !busy || err != nil {
		t.Errorf("another: busy %t, %v", busy, err)
	}
}

// TestMemoryOfArchivesIsNotTrusted: links of the store lead nowhere else.
func TestMemoryOfArchivesIsNotTrusted(t *testing.T) {
	p := newPlace(t)
	l := newLayout(t)
	ref := write(t, filepath.Join(p.dir, "image"), pack(t, gzipped, l.put(l.image(plain)).archive()))
	p.forget()
	img := p.open(ref)
	memo := slices.DeleteFunc(p.stored(), func(n string) bool { return !strings.HasPrefix(n, memoPrefix) })[0]
	for _, to := range []string{"../outside", "/etc", "sha256-/../../outside", "sha256-" + strings.Repeat("0", 64), strings.Repeat("x", 300)} {
		name := filepath.Join(p.store.Dir, memo)
		if err := errors.Join(os.Remove(name), os.Symlink(to, name)); err != nil {
			t.Fatal(err)
		}
		if again := p.open(ref); again.Dir != img.Dir {
			t.Errorf("link to %s: opened %s", to, again.Dir)
		}
	}
}

func TestRemoveAllOfADeepTree(t *testing.T) {
	p := newPlace(t)
	top := filepath.Join(p.store.Dir, "top")
	if err := os.Mkdir(top, 0o700); err != nil {
		t.Fatal(err)
	}
	at, err := unix.Open(top, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	for range 1500 {
		// With a sibling each, and a mode that allows nothing.
		if err := errors.Join(unix.Mkdirat(at, "d", 0o700), unix.Mkdirat(at, "moved-7", 0), unix.Symlinkat("/", at, "l")); err != nil {
			t.Fatal(err)
		}
		next, err := unix.Openat(at, "d", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		unix.Close(at)
		at = next
	}
	unix.Close(at)
	d, err := openStoreDir(p.store.Dir)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if err := removeAll(d.fd, "top"); err != nil {
		t.Error(err)
	}
	if have := p.stored(); len(have) != 0 {
		t.Errorf("store has %v", have)
	}
	if err := removeAll(d.fd, "top"); err != nil {
		t.Errorf("nothing to remove: %v", err)
	}
}

func TestIsImage(t *testing.T) {
	p := newPlace(t)
	l := newLayout(t)
	ref := l.put(l.image(plain)).directory(filepath.Join(p.dir, "layout"))
	write(t, filepath.Join(p.dir, "archive:with:colons"), l.archive())
	if err := os.MkdirAll(filepath.Join(p.dir, "linked"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Symlink("/etc/passwd", filepath.Join(p.dir, "linked", layoutFile)), unix.Mkfifo(filepath.Join(p.dir, "fifo"), 0o600)); err != nil {
		t.Fatal(err)
	}
	p.before = nil
	for name, want := range map[string]bool{
		ref: true, ref + "/": true, ref + ":tag": true, ref + "@sha256:" + strings.Repeat("a", 64): true,
		p.dir + "/archive:with:colons": true, p.dir + "/archive:with:colons:tag": true,
		ref + ":": false, ref + "@sha256:1": false, p.dir + "/archive": false,
		p.dir: false, p.dir + "/outside": false, p.dir + "/linked": false, p.dir + "/fifo": false, p.dir + "/none": false, "": false, "host": false,
	} {
		if got := IsImage(name); got != want {
			t.Errorf("IsImage(%q) = %t", name, got)
		}
	}
	p.forget()
}

func TestMissingPath(t *testing.T) {
	p := newPlace(t)
	_, err := p.store.Open(context.Background(), filepath.Join(p.dir, "none:tag"))
	if !errors.Is(err, os.ErrNotExist) || errors.Is(err, ErrInvalid) {
		t.Error(err)
	}
}

// TestReadsWhileFilesAreRenamed: the kernel gives up a resolution with ".." in
// it when anything is renamed meanwhile; that is no error.
func TestReadsWhileFilesAreRenamed(t *testing.T) {
	p := newPlace(t)
	var entries []entry
	entries = append(entries, dir("a/b/c/"), symlink("up", "a/b/../b/c/../../b"))
	want := map[string]string{"/up": "link a/b/../b/c/../../b", "/a": "dir 755", "/a/b": "dir 755", "/a/b/c": "dir 755"}
	for _, n := range "abcdefghijklmnopqrstuvwxyz" {
		for _, m := range "abcdefghijklmnopqrstuvwxyz" {
			entries = append(entries, file("up/file-"+string(n)+string(m), "x"))
			want["/a/b/file-"+string(n)+string(m)] = "file 644 x"
		}
	}
	names := [2]string{filepath.Join(t.TempDir(), "x"), filepath.Join(t.TempDir(), "y")}
	if err := os.Mkdir(names[0], 0o700); err != nil {
		t.Fatal(err)
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			if err := errors.Join(os.Rename(names[0], names[1]), os.Rename(names[1], names[0])); err != nil {
				t.Error(err)
				return
			}
		}
	})
	img := p.unpacked(archive(t, entries...))
	close(stop)
	wg.Wait()
	wantTree(t, img.Dir, want)
}

func TestImagesOfOneStoreAreApart(t *testing.T) {
	p := newPlace(t)
	l := newLayout(t)
	a, b := l.image(plain, archive(t, file("work/x", "a"))), l.image(plain, archive(t, file("work/x", "b")))
	ref := l.put(tagged(a, "a"), tagged(b, "b")).directory(filepath.Join(p.dir, "layout"))
	p.forget()
	seen := map[string]string{}
	for _, tag := range []string{"a", "b"} {
		text, err := os.ReadFile(filepath.Join(p.open(ref+":"+tag).Dir, "work/x"))
		if err != nil {
			t.Fatal(err)
		}
		seen[tag] = string(text)
	}
	if !maps.Equal(seen, map[string]string{"a": "a", "b": "b"}) {
		t.Errorf("read %v", seen)
	}
}
