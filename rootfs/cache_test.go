package rootfs

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) {
	if os.Geteuid() != 0 {
		fmt.Fprintln(os.Stderr, "the tests of templates need root: nothing was tested")
		os.Exit(1)
	}
	code := m.Run()
	// Other packages' tests mount, too, in directories of their own.
	b, _ := os.ReadFile("/proc/thread-self/mountinfo")
	if n := strings.Count(string(b), fmt.Sprintf("/run/jail-test-%d-", os.Getpid())); n != 0 {
		fmt.Fprintf(os.Stderr, "%d mounts are left\n", n)
		code = 1
	}
	os.Exit(code)
}

// cacheDir returns a directory for pins that is dropped at the end.
func cacheDir(t *testing.T) string {
	t.Helper()
	dir := filepath.Join("/run", fmt.Sprintf("jail-test-%d-%s", os.Getpid(), strings.ReplaceAll(t.Name(), "/", "-")))
	t.Cleanup(func() {
		if _, err := (&Cache{Dir: dir}).Drop(); err != nil {
			t.Error(err)
		}
		if _, err := os.Lstat(dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s still exists: %v", dir, err)
		}
	})
	return dir
}

func open(t *testing.T, dir string, cfg Config) *Template {
	t.Helper()
	tpl, err := (&Cache{Dir: dir}).Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tpl.ns.Close() })
	return tpl
}

func id(t *testing.T, tpl *Template) record {
	t.Helper()
	r, err := describe(int(tpl.ns.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// A pin serves later processes, which a new Cache stands for.
func TestPinIsReused(t *testing.T) {
	dir := cacheDir(t)
	a, b := open(t, dir, Config{}), open(t, dir, Config{})
	if id(t, a) != id(t, b) {
		t.Errorf("second cache built its own template: %+v, %+v", id(t, a), id(t, b))
	}
	other := open(t, dir, Config{Files: []File{{Name: "x", Data: []byte("y")}}})
	if id(t, other) == id(t, a) {
		t.Error("another Config got the same template")
	}
}

// The order of files does not make another template.
func TestNameIgnoresTheOrderOfFiles(t *testing.T) {
	var names []string
	a, b := File{Name: "a", Data: []byte("1")}, File{Name: "b", Data: []byte("2")}
	for _, files := range [][]File{{a, b}, {b, a}} {
		p, err := Config{Files: files}.resolve()
		if err != nil {
			t.Fatal(err)
		}
		n, err := p.name()
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, n)
	}
	if names[0] != names[1] {
		t.Errorf("names %q", names)
	}
}

func TestOneCacheHoldsOneTemplate(t *testing.T) {
	c := &Cache{Dir: cacheDir(t)}
	var wg sync.WaitGroup
	got := make([]*Template, 8)
	for i := range got {
		wg.Go(func() {
			tpl, err := c.Open(Config{})
			if err != nil {
				t.Error(err)
			}
			got[i] = tpl
		})
	}
	wg.Wait()
	for _, g := range got {
		if g != got[0] {
			t.Fatal("several templates of one Config in one cache")
		}
	}
	if got[0] != nil {
		got[0].ns.Close()
	}
}

// Launchers that race for one template share it, and leave one mount.
func TestRacingLaunchersShareATemplate(t *testing.T) {
	dir := cacheDir(t)
	var wg sync.WaitGroup
	got := make([]*Template, 8)
	for i := range got {
		wg.Go(func() {
			tpl, err := (&Cache{Dir: dir}).Open(Config{})
			if err != nil {
				t.Error(err)
				return
			}
			got[i] = tpl
		})
	}
	wg.Wait()
	for _, g := range got {
		if g == nil {
			t.FailNow()
		}
		defer g.ns.Close()
		if id(t, g) != id(t, got[0]) {
			t.Errorf("templates %+v and %+v", id(t, g), id(t, got[0]))
		}
	}
	b, err := os.ReadFile("/proc/thread-self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(b), " "+dir+"/"); n != 1 {
		t.Errorf("%d mounts below %s, want 1", n, dir)
	}
}

// Whatever stands at a pin's name and is not the namespace that was built is
// built anew, never used and never waited for.
func TestSpoiledPinsAreRebuilt(t *testing.T) {
	for name, spoil := range map[string]func(t *testing.T, pin string){
		"gone": func(*testing.T, string) {},
		"plain file": func(t *testing.T, pin string) {
			write(t, pin, "x")
		},
		"fifo": func(t *testing.T, pin string) {
			if err := unix.Mkfifo(pin, 0o600); err != nil {
				t.Fatal(err)
			}
		},
		"directory": func(t *testing.T, pin string) {
			if err := os.Mkdir(pin, 0o700); err != nil {
				t.Fatal(err)
			}
		},
		"link to a namespace": func(t *testing.T, pin string) {
			if err := os.Symlink("/proc/self/ns/mnt", pin); err != nil {
				t.Fatal(err)
			}
		},
		"namespace of another kind": func(t *testing.T, pin string) {
			write(t, pin, "")
			bind(t, "/proc/self/ns/uts", pin)
		},
		"another mount namespace": func(t *testing.T, pin string) {
			write(t, pin, "")
			ns := otherNamespace(t, unix.CLONE_NEWNS)
			bind(t, ns, pin)
		},
		"mount namespace of another user namespace": func(t *testing.T, pin string) {
			write(t, pin, "")
			ns := otherNamespace(t, unix.CLONE_NEWNS|unix.CLONE_NEWUSER)
			bind(t, ns, pin)
		},
		"record of another": func(t *testing.T, pin string) {
			write(t, pin, "")
			bind(t, otherNamespace(t, unix.CLONE_NEWNS), pin)
			write(t, pin+".json", `{"ID":1,"Inode":2,"Mounts":3}`)
		},
		"record readable by others": func(t *testing.T, pin string) {
			if err := os.Chmod(pin+".json", 0o644); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := cacheDir(t)
			first := id(t, open(t, dir, Config{}))
			p, err := Config{}.resolve()
			if err != nil {
				t.Fatal(err)
			}
			base, err := p.name()
			if err != nil {
				t.Fatal(err)
			}
			pin := filepath.Join(dir, base)
			if name != "record readable by others" {
				if err := unix.Unmount(pin, unix.MNT_DETACH); err != nil {
					t.Fatal(err)
				}
				if err := os.Remove(pin); err != nil {
					t.Fatal(err)
				}
			}
			spoil(t, pin)
			second := id(t, open(t, dir, Config{}))
			if second == first {
				t.Error("the spoiled pin was used")
			}
			if third := id(t, open(t, dir, Config{})); third != second {
				t.Errorf("the rebuilt pin is not used: %+v, %+v", second, third)
			}
		})
	}
}

// Ever new roots do not leave ever more mounts behind: the template that was
// not used for longest goes first.
func TestPinsAreBounded(t *testing.T) {
	dir := cacheDir(t)
	root := func(i int) Config { return Config{Files: []File{{Name: "n", Data: []byte{byte(i)}}}} }
	first := id(t, open(t, dir, root(0)))
	for i := 1; i < maxPins+5; i++ {
		open(t, dir, root(i))
		if got := id(t, open(t, dir, root(0))); got != first {
			t.Fatalf("template in use was dropped after %d others", i)
		}
	}
	b, err := os.ReadFile("/proc/thread-self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(b), " "+dir+"/"); n > maxPins || n < maxPins-1 {
		t.Errorf("%d pins, want about %d", n, maxPins)
	}
}

func write(t *testing.T, file, text string) {
	t.Helper()
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func bind(t *testing.T, from, to string) {
	t.Helper()
	if err := unix.Mount(from, to, "", unix.MS_BIND, ""); err != nil {
		t.Fatalf("bind %s: %v", from, err)
	}
}

// otherNamespace returns the path of a mount namespace that lives until the
// test ends.
func otherNamespace(t *testing.T, flags uintptr) string {
	t.Helper()
	cmd := exec.Command("/bin/sleep", "60")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: flags}
	if flags&unix.CLONE_NEWUSER != 0 {
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: 1}}
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	return fmt.Sprintf("/proc/%d/ns/mnt", cmd.Process.Pid)
}

// A directory that is not root's alone is never used and never repaired.
func TestPinDirectoryOfOthersIsRefused(t *testing.T) {
	for name, prepare := range map[string]func(dir string) error{
		"readable by others":  func(dir string) error { return os.Mkdir(dir, 0o755) },
		"writable by a group": func(dir string) error { return errors.Join(os.Mkdir(dir, 0o700), os.Chmod(dir, 0o770)) },
		"of another user":     func(dir string) error { return errors.Join(os.Mkdir(dir, 0o700), os.Chown(dir, 1000, 1000)) },
		"symbolic link":       func(dir string) error { return os.Symlink("/run", dir) },
		"file":                func(dir string) error { return os.WriteFile(dir, nil, 0o600) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join("/run", fmt.Sprintf("jail-test-%d-refused", os.Getpid()))
			if err := prepare(dir); err != nil {
				t.Fatal(err)
			}
			defer os.Remove(dir)
			if _, err := (&Cache{Dir: dir}).Open(Config{}); err == nil {
				t.Error("used")
			}
		})
	}
}

// A build that fails is tried again at the next call, and leaves nothing.
func TestFailedBuildIsNotRemembered(t *testing.T) {
	dir := cacheDir(t)
	root := t.TempDir()
	c := &Cache{Dir: dir}
	if _, err := c.Open(Config{Dir: root}); !errors.Is(err, ErrInvalid) {
		t.Fatalf("root without /proc: %v, want ErrInvalid", err)
	}
	for _, d := range []string{"proc", "dev", "tmp"} {
		if err := os.Mkdir(filepath.Join(root, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	tpl, err := c.Open(Config{Dir: root})
	if err != nil {
		t.Fatal(err)
	}
	tpl.ns.Close()
}

// A root whose mount points were replaced since gets a new template: the old one
// has lost its mounts there.
func TestReplacedMountPointIsNoticed(t *testing.T) {
	dir, root := cacheDir(t), t.TempDir()
	for _, d := range []string{"proc", "dev", "tmp", "data"} {
		if err := os.Mkdir(filepath.Join(root, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	name := func() string {
		t.Helper()
		p, err := Config{Dir: root, Binds: []Bind{{Source: "/usr/share", Target: "/data"}}}.resolve()
		if err != nil {
			t.Fatal(err)
		}
		n, err := p.name()
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	first := name()
	if again := name(); again != first {
		t.Error("the name changes by itself")
	}
	open(t, dir, Config{Dir: root})
	for _, d := range []string{"proc", "data"} {
		before := name()
		// A new inode for sure: the old one is still there.
		if err := errors.Join(os.Rename(filepath.Join(root, d), filepath.Join(root, "old"+d)), os.Mkdir(filepath.Join(root, d), 0o755)); err != nil {
			t.Fatal(err)
		}
		if name() == before {
			t.Errorf("/%s was replaced and the template keeps its name", d)
		}
	}
	if err := relink(root, "proc", "/etc"); err != nil {
		t.Fatal(err)
	}
	if _, err := (&Cache{Dir: dir}).Open(Config{Dir: root}); !errors.Is(err, ErrInvalid) {
		t.Errorf("root with /proc replaced by a link: %v", err)
	}
}

// A4, A5, A10 and their neighbours: roots and binds that lead astray are
// refused, and nothing is created anywhere for them.
func TestHostileRootsAreRefused(t *testing.T) {
	for name, c := range map[string]struct {
		make  func(root string) error
		binds []Bind
	}{
		"proc is a link to a directory of the host": {make: func(r string) error { return relink(r, "proc", "/etc") }},
		"proc is a link to .":                       {make: func(r string) error { return relink(r, "proc", ".") }},
		"proc is a dangling link":                   {make: func(r string) error { return relink(r, "proc", "nowhere") }},
		"dev is a link":                             {make: func(r string) error { return relink(r, "dev", "/run") }},
		"tmp is a link":                             {make: func(r string) error { return relink(r, "tmp", "/var/tmp") }},
		"proc is missing":                           {make: func(r string) error { return os.Remove(filepath.Join(r, "proc")) }},
		"dev is a file": {make: func(r string) error {
			return errors.Join(os.Remove(filepath.Join(r, "dev")), os.WriteFile(filepath.Join(r, "dev"), nil, 0o644))
		}},
		"bind over a link": {make: func(r string) error { return os.Symlink("/etc", filepath.Join(r, "data")) },
			binds: []Bind{{Source: "/usr/share", Target: "/data"}}},
		"bind below a link": {make: func(r string) error { return os.Symlink("/run", filepath.Join(r, "data")) },
			binds: []Bind{{Source: "/usr/share", Target: "/data/jail-made"}}},
		"bind to what is missing":             {binds: []Bind{{Source: "/usr/share", Target: "/missing"}}},
		"directory over a file":               {make: func(r string) error { return os.WriteFile(filepath.Join(r, "f"), nil, 0o644) }, binds: []Bind{{Source: "/usr/share", Target: "/f"}}},
		"bind to a path with dots":            {binds: []Bind{{Source: "/usr/share", Target: "/tmp/../etc/x"}}},
		"bind to a relative path":             {binds: []Bind{{Source: "/usr/share", Target: "../../etc/x"}}},
		"bind over the root":                  {binds: []Bind{{Source: "/usr/share", Target: "/"}}},
		"bind into proc":                      {binds: []Bind{{Source: "/usr/share", Target: "/proc/sys"}}},
		"bind over proc":                      {binds: []Bind{{Source: "/usr/share", Target: "/proc"}}},
		"bind into dev":                       {binds: []Bind{{Source: "/usr/share", Target: "/dev/jail/x"}}},
		"bind over the jail's tmp":            {binds: []Bind{{Source: "/usr/share", Target: "/tmp"}}},
		"bind of a device":                    {binds: []Bind{{Source: "/dev/null", Target: "/x"}}},
		"bind of nothing":                     {binds: []Bind{{Source: "/no/such/file", Target: "/x"}}},
		"two binds to one target":             {binds: []Bind{{Source: "/usr/share", Target: "/tmp/x"}, {Source: "/usr/lib", Target: "/tmp/x"}}},
		"target with a newline":               {binds: []Bind{{Source: "/usr/share", Target: "/tmp/a\nb"}}},
		"bind inside a bind that has no such": {binds: []Bind{{Source: "/usr/share", Target: "/tmp"}, {Source: "/usr/lib", Target: "/tmp/none"}}},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			for _, d := range []string{"proc", "dev", "tmp"} {
				if err := os.Mkdir(filepath.Join(root, d), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			if c.make != nil {
				if err := c.make(root); err != nil {
					t.Fatal(err)
				}
			}
			before := tree(t, root)
			_, err := (&Cache{Dir: cacheDir(t)}).Open(Config{Dir: root, Binds: c.binds})
			if err == nil {
				t.Fatal("accepted")
			}
			if !errors.Is(err, ErrInvalid) && !errors.Is(err, os.ErrNotExist) {
				t.Errorf("error %v blames the host", err)
			}
			if after := tree(t, root); after != before {
				t.Errorf("root changed from\n%s to\n%s", before, after)
			}
			for _, f := range []string{"/run/jail-made", "/etc/x"} {
				if _, err := os.Lstat(f); err == nil {
					t.Errorf("%s was created on the host", f)
				}
			}
		})
	}
}

func relink(root, name, to string) error {
	p := filepath.Join(root, name)
	return errors.Join(os.Remove(p), os.Symlink(to, p))
}

func tree(t *testing.T, dir string) string {
	t.Helper()
	var b strings.Builder
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err == nil {
			fmt.Fprintln(&b, path, d.Type())
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// The host view never shows a symbolic link's target in place of the link, and
// its name changes with each source.
func TestHostEntries(t *testing.T) {
	entries, err := hostEntries()
	if err != nil {
		t.Fatal(err)
	}
	usr := false
	for _, e := range entries {
		if e.Path == "/usr" {
			usr = e.Kind == hostBind
		}
		if info, err := os.Lstat(e.Path); err != nil || (info.Mode()&os.ModeSymlink != 0) != (e.Kind == hostLink) && e.Kind != hostCopy {
			t.Errorf("%s: kind %s, host has %v, %v", e.Path, e.Kind, info.Mode(), err)
		}
	}
	if !usr {
		t.Error("host view without /usr")
	}
}
