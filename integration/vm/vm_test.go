package main

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func writeTree(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		p := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestPackedTreesAreUnpacked(t *testing.T) {
	from := writeTree(t, map[string]string{"a": "1", "d/b": "22", ".exit": "0"})
	if err := os.Symlink("a", filepath.Join(from, "link")); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(filepath.Join(from, "a"), 0o755); err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := pack(&b, [][2]string{{from, "/src/x"}, {filepath.Join(from, "link"), "/program"}, {from, "/"}}); err != nil {
		t.Fatal(err)
	}
	to := writeTree(t, map[string]string{"src/x/a": "an older one"})
	if err := unpack(&b, to); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"src/x/a": "1", "src/x/d/b": "22", "src/x/link": "1", "program": "1", "d/b": "22", ".exit": "0"} {
		if got, err := os.ReadFile(filepath.Join(to, name)); err != nil || string(got) != want {
			t.Errorf("%s = %q, %v; want %q", name, got, err, want)
		}
	}
	for _, name := range []string{"src/x/a", "program"} {
		if st, err := os.Lstat(filepath.Join(to, name)); err != nil || st.Mode() != 0o755 {
			t.Errorf("%s: %v, %v", name, st.Mode(), err)
		}
	}
}

// What comes back was written by a guest that had hostile programs in it.
func TestUnpackStaysInItsDirectory(t *testing.T) {
	for _, c := range []struct {
		name    string
		entries []tar.Header
	}{
		{"dots", []tar.Header{{Name: "../out", Typeflag: tar.TypeReg}}},
		{"dots inside", []tar.Header{{Name: "a/../../out", Typeflag: tar.TypeReg}}},
		{"over a link", []tar.Header{{Name: "l", Linkname: "..", Typeflag: tar.TypeSymlink}, {Name: "l/out", Typeflag: tar.TypeReg}}},
		{"absolute", []tar.Header{{Name: "/out", Typeflag: tar.TypeReg}}},
		{"device", []tar.Header{{Name: "in", Typeflag: tar.TypeChar}}},
		{"hard link", []tar.Header{{Name: "in", Linkname: "/etc/passwd", Typeflag: tar.TypeLink}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var b bytes.Buffer
			w := tar.NewWriter(&b)
			for _, h := range c.entries {
				if err := w.WriteHeader(&h); err != nil {
					t.Fatal(err)
				}
			}
			if err := w.Close(); err != nil {
				t.Fatal(err)
			}
			dir := t.TempDir()
			if err := unpack(&b, filepath.Join(dir, "in")); err == nil {
				t.Error("unpacked")
			}
			if _, err := os.Lstat(filepath.Join(dir, "out")); err == nil {
				t.Error("a file is outside")
			}
		})
	}
}

func TestAnEmptyDiskIsNoArchive(t *testing.T) {
	if err := unpack(bytes.NewReader(make([]byte, 1<<20)), t.TempDir()); err == nil {
		t.Error("unpacked")
	}
}

// staticELF is an executable without an interpreter, as far as its header goes.
func staticELF() string {
	h := make([]byte, 64)
	copy(h, "\x7fELF\x02\x01\x01")
	h[16], h[18], h[20] = 2, 62, 1   // executable, x86-64, version
	h[52], h[54], h[58] = 64, 56, 64 // sizes
	return string(h)
}

// fake is a machine whose QEMU is a shell script.
func fake(t *testing.T, script string) *machine {
	t.Helper()
	cache := writeTree(t, map[string]string{"vmlinuz": "", "root.img": "", "modules/a.ko": "", "init": staticELF(), "program": "",
		"bin/qemu-system-x86_64": "#!/bin/sh\n" + `
for a; do case $a in
*file=*/out) out=${a##*file=} ;;
file:*) console=${a#file:} ;;
esac; done
` + script})
	if err := os.Chmod(filepath.Join(cache, "bin/qemu-system-x86_64"), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", filepath.Join(cache, "bin")+":"+os.Getenv("PATH"))
	t.Setenv("TMPDIR", t.TempDir())
	return &machine{
		cache: cache, timeout: time.Minute, memory: 64, cpus: 1, init: filepath.Join(cache, "init"),
		files: [][2]string{{filepath.Join(cache, "program"), guestBinary}}, job: job{Args: []string{guestBinary}},
	}
}

func TestTheGuestsCodeOutputAndFilesComeBack(t *testing.T) {
	results := writeTree(t, map[string]string{".exit": "0", "old": "stays", "cov": "is replaced"})
	from := writeTree(t, map[string]string{".exit": "7", "cov": "new"})
	archive := filepath.Join(t.TempDir(), "archive")
	if err := writeFile(archive, func(w io.Writer) error { return pack(w, [][2]string{{from, "/"}}) }); err != nil {
		t.Fatal(err)
	}
	m := fake(t, `echo said; dd if=`+archive+` of="$out" conv=notrunc 2>/dev/null`)
	m.results = results
	var b strings.Builder
	code, err := m.run(context.Background(), &b)
	if code != 7 || err != nil || b.String() != "said\n" {
		t.Errorf("run = %d, %v; wrote %q", code, err, &b)
	}
	for name, want := range map[string]string{"cov": "new", "old": "stays"} {
		if got, err := os.ReadFile(filepath.Join(results, name)); string(got) != want {
			t.Errorf("%s = %q, %v", name, got, err)
		}
	}
	if left, err := os.ReadDir(os.TempDir()); err != nil || len(left) > 0 {
		t.Errorf("left %v, %v", left, err)
	}
}

// A machine that hangs, crashes or dies is a failure with the console's end.
func TestAMachineWithoutAResultFails(t *testing.T) {
	for _, c := range []struct {
		name, script, want string
		timeout            time.Duration
	}{
		{"hangs", `echo last words >"$console"; exec sleep 600`, "killed after", 300 * time.Millisecond},
		{"crashes", `echo last words >"$console"`, "without a result", time.Minute},
		{"answers nonsense", `echo last words >"$console"; echo nonsense >"$out"`, "without a result", time.Minute},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := fake(t, c.script)
			m.timeout = c.timeout
			_, err := m.run(context.Background(), io.Discard)
			var hung *hangError
			if !errors.As(err, &hung) || !strings.Contains(err.Error(), c.want) || string(hung.console) != "last words\n" {
				t.Errorf("run: %v %+v", err, hung)
			}
		})
	}
	t.Run("QEMU fails", func(t *testing.T) {
		m := fake(t, `echo no such option >&2; exit 1`)
		if _, err := m.run(context.Background(), io.Discard); err == nil || !strings.Contains(err.Error(), "no such option") {
			t.Errorf("run: %v", err)
		}
	})
	t.Run("is canceled", func(t *testing.T) {
		m := fake(t, `exec sleep 600`)
		ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
		defer cancel()
		if _, err := m.run(ctx, io.Discard); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("run: %v", err)
		}
	})
}

func TestWhatIsMissingIsNamed(t *testing.T) {
	m := fake(t, ``)
	if err := os.Remove(filepath.Join(m.cache, "root.img")); err != nil {
		t.Fatal(err)
	}
	if _, err := m.run(context.Background(), io.Discard); err == nil || !strings.Contains(err.Error(), "root.img") || !strings.Contains(err.Error(), "integration.sh setup") {
		t.Errorf("run: %v", err)
	}
	m = fake(t, ``)
	m.init = "/bin/sh" // needs an interpreter
	if _, err := m.run(context.Background(), io.Discard); err == nil || !strings.Contains(err.Error(), "static") {
		t.Errorf("run: %v", err)
	}
}

// A KVM device alone says nothing.
func TestKVMIsForProcessorsThatHaveIt(t *testing.T) {
	dir := writeTree(t, map[string]string{
		"intel": "processor\t: 0\nflags\t\t: fpu vmx sse\n", "amd": "flags\t\t: fpu svm\n",
		"none": "flags\t\t: fpu vmx_like\nvmx flags\t: vnmi\nbugs\t\t: svm\n", "kvm": "",
	})
	for _, c := range []struct{ cpuinfo, device, want string }{
		{"intel", "kvm", "kvm"}, {"amd", "kvm", "kvm"}, {"none", "kvm", "tcg,thread=multi"},
		{"intel", "no-device", "tcg,thread=multi"}, {"no-cpuinfo", "kvm", "tcg,thread=multi"},
	} {
		if got := accelerator(filepath.Join(dir, c.cpuinfo), filepath.Join(dir, c.device)); got[1] != c.want {
			t.Errorf("%s, %s: %v, want %s", c.cpuinfo, c.device, got, c.want)
		}
	}
}

func TestBadArgumentsStartNothing(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	for _, args := range [][]string{
		nil, {"boot"}, {"run"}, {"run", "--"}, {"run", "-frobnicate", "--", "x"},
		{"run", "-add", "/etc/passwd", "--", "x"}, {"run", "-add", "/etc/passwd:etc", "--", "x"},
		{"run", "-cache", t.TempDir(), "--", "x"},
	} {
		if code := command(context.Background(), args); code != exitFailed {
			t.Errorf("%q: exit code %d", args, code)
		}
	}
}

func TestDifference(t *testing.T) {
	got := difference([]string{"a", "b"}, []string{"b", "c"})
	if strings.Join(got, "; ") != "gone: a; new: c" {
		t.Errorf("difference = %q", got)
	}
}
