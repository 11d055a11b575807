package image

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// layers are the archives of an image.
func layers(t *testing.T, of ...[]entry) [][]byte {
	var all [][]byte
	for _, entries := range of {
		all = append(all, archive(t, entries...))
	}
	return all
}

func TestLayersMakeOneTree(t *testing.T) {
	lower := []entry{
		dir("a/"), file("a/one", "1"), file("a/two", "2"), dir("a/sub/"), file("a/sub/x", "x"),
		dir("usr/"), dir("usr/lib/"), file("usr/lib/libc", "c"), symlink("lib", "usr/lib"), file("f", "f"),
	}
	whole := map[string]string{
		"/a": "dir 755", "/a/one": "file 644 1", "/a/two": "file 644 2", "/a/sub": "dir 755", "/a/sub/x": "file 644 x",
		"/usr": "dir 755", "/usr/lib": "dir 755", "/usr/lib/libc": "file 644 c", "/lib": "link usr/lib", "/f": "file 644 f",
	}
	for name, c := range map[string]struct {
		upper, third []entry
		less         []string
		more         map[string]string
	}{
		"nothing":       {},
		"a file hidden": {upper: []entry{file("a/.wh.one", "")}, less: []string{"/a/one"}},
		"a directory hidden": {
			upper: []entry{file(".wh.a", "")},
			less:  []string{"/a", "/a/one", "/a/two", "/a/sub", "/a/sub/x"},
		},
		"a whiteout of any type": {upper: []entry{dir("a/.wh.one/"), symlink("a/.wh.two", "one"), node("a/.wh.sub", tar.TypeChar)}, less: []string{"/a/one", "/a/two", "/a/sub", "/a/sub/x"}},
		"a directory emptied": {
			upper: []entry{file("a/.wh..wh..opq", "")},
			less:  []string{"/a/one", "/a/two", "/a/sub", "/a/sub/x"},
		},
		"emptied and filled, in either order": {
			upper: []entry{file("a/new", "n"), file("a/sub/y", "y"), file("a/.wh..wh..opq", ""), file("a/two", "22")},
			less:  []string{"/a/one", "/a/sub/x"},
			more:  map[string]string{"/a/new": "file 644 n", "/a/two": "file 644 22", "/a/sub/y": "file 644 y"},
		},
		"hidden and made again, in either order": {
			upper: []entry{file("a/.wh.one", ""), file("a/one", "11"), file("a/two", "22"), file("a/.wh.two", "")},
			more:  map[string]string{"/a/one": "file 644 11", "/a/two": "file 644 22"},
		},
		"a directory hidden and made again": {
			upper: []entry{dir("a/"), file("a/new", "n"), file(".wh.a", "")},
			less:  []string{"/a/one", "/a/two", "/a/sub", "/a/sub/x"},
			more:  map[string]string{"/a/new": "file 644 n"},
		},
		"the whole root emptied": {
			upper: []entry{file(".wh..wh..opq", ""), file("g", "g")},
			less:  []string{"/a", "/a/one", "/a/two", "/a/sub", "/a/sub/x", "/usr", "/usr/lib", "/usr/lib/libc", "/lib", "/f"},
			more:  map[string]string{"/g": "file 644 g"},
		},
		"nothing to hide": {upper: []entry{file("none/.wh.one", ""), file("a/.wh.none", ""), file("f/.wh.one", ""), file("f/.wh..wh..opq", "")}},
		"books of aufs":   {upper: []entry{dir(".wh..wh.plnk/"), file(".wh..wh.plnk/1.2", "x"), file(".wh..wh.aufs", ""), file("a/.wh..wh.orph", "")}},
		"hidden for a while": {
			upper: []entry{file(".wh.a", "")}, third: []entry{file("a/one", "3")},
			less: []string{"/a/two", "/a/sub", "/a/sub/x"}, more: map[string]string{"/a/one": "file 644 3"},
		},
		"a link replaced by a directory keeps what it led to": {
			upper: []entry{dir("lib/"), file("lib/.wh..wh..opq", ""), file("lib/.wh.libc", ""), file("lib/own", "o")},
			more:  map[string]string{"/lib": "dir 755", "/lib/own": "file 644 o"},
		},
		"a file below a link lands where it leads": {
			upper: []entry{file("lib/more", "m"), file("lib/deep/er/x", "x")},
			more:  map[string]string{"/usr/lib/more": "file 644 m", "/usr/lib/deep": "dir 755", "/usr/lib/deep/er": "dir 755", "/usr/lib/deep/er/x": "file 644 x"},
		},
		"a file replaced by a directory": {
			upper: []entry{dir("f/"), file("f/g", "g")}, more: map[string]string{"/f": "dir 755", "/f/g": "file 644 g"},
		},
		"a directory replaced by a file": {
			upper: []entry{file("a", "a")}, less: []string{"/a/one", "/a/two", "/a/sub", "/a/sub/x"}, more: map[string]string{"/a": "file 644 a"},
		},
		"a directory replaced by a link": {
			upper: []entry{symlink("a", "usr"), file("a/x", "x")},
			less:  []string{"/a/one", "/a/two", "/a/sub", "/a/sub/x"}, more: map[string]string{"/a": "link usr", "/usr/x": "file 644 x"},
		},
		"a link replaced by a file": {upper: []entry{file("lib", "l")}, more: map[string]string{"/lib": "file 644 l"}},
		"a directory's mode": {
			upper: []entry{dir("a/").mode(0o700), dir("usr/").mode(0), dir("usr/lib").mode(0o7777)},
			more:  map[string]string{"/a": "dir 700", "/usr": "dir 700", "/usr/lib": "dir 777"},
		},
		"a device in place of a file": {upper: []entry{node("f", tar.TypeChar)}, less: []string{"/f"}},
		"the same entry twice": {
			upper: []entry{file("f", "1"), file("f", "2"), dir("d/"), dir("d/"), symlink("s", "1"), symlink("s", "2"), hardlink("h", "f"), hardlink("h", "f"), hardlink("f", "f"), hardlink("f", "h")},
			more:  map[string]string{"/f": "file 644 2", "/d": "dir 755", "/s": "link 2", "/h": "file 644 2"},
		},
		"a hard link is not written through": {
			upper: []entry{hardlink("h", "f"), file("h", "new")}, more: map[string]string{"/h": "file 644 new"},
		},
		"a hard link in place of the directory with its target": {
			upper: []entry{hardlink("a", "a/one")}, less: []string{"/a/one", "/a/two", "/a/sub", "/a/sub/x"}, more: map[string]string{"/a": "file 644 1"},
		},
		"absolute and dotted names": {
			upper: []entry{file("/abs", "1"), file("./dot", "2"), file("a/./sub//x", "3"), dir("./"), dir("/"), hardlink("h", "/f"), hardlink("h2", "./a/one")},
			more:  map[string]string{"/abs": "file 644 1", "/dot": "file 644 2", "/a/sub/x": "file 644 3", "/h": "file 644 f", "/h2": "file 644 1"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPlace(t)
			all := layers(t, lower, c.upper)
			if c.third != nil {
				all = append(all, archive(t, c.third...))
			}
			img := p.unpacked(all...)
			want := maps.Clone(whole)
			for _, gone := range c.less {
				delete(want, gone)
			}
			maps.Copy(want, c.more)
			wantTree(t, img.Dir, want)
		})
	}
}

// TestHostileEntriesStayInside is A4, A5, A10, A16, A21 for what an image may
// bring and Open takes: it lands in the root, as something harmless.
func TestHostileEntriesStayInside(t *testing.T) {
	outside := "/outside" // taken from the root, whatever the image thinks
	for name, c := range map[string]struct {
		entries []entry
		want    map[string]string
	}{
		"through an absolute link": {
			[]entry{symlink("out", outside), dir("outside/"), file("out/victim", "mine")},
			map[string]string{"/out": "link " + outside, "/outside": "dir 755", "/outside/victim": "file 644 mine"},
		},
		"through a relative link": {
			[]entry{symlink("out", "../../../../outside"), dir("outside/"), file("out/victim", "mine"), dir("out/deep/"), symlink("out/l", "x"), hardlink("out/h", "out/victim")},
			map[string]string{
				"/out": "link ../../../../outside", "/outside": "dir 755", "/outside/victim": "file 644 mine",
				"/outside/deep": "dir 755", "/outside/l": "link x", "/outside/h": "file 644 mine",
			},
		},
		"through links to links": {
			[]entry{symlink("l1", "l2"), symlink("l2", "d/../l3"), symlink("l3", "/d/up"), dir("d/"), symlink("d/up", ".."), file("l1/x", "x")},
			map[string]string{"/l1": "link l2", "/l2": "link d/../l3", "/l3": "link /d/up", "/d": "dir 755", "/d/up": "link ..", "/x": "file 644 x"},
		},
		"a link over a link": {
			[]entry{symlink("l", outside), symlink("l", "/etc"), file("l", "mine")},
			map[string]string{"/l": "file 644 mine"},
		},
		"a directory over a link": {
			[]entry{symlink("l", outside), dir("l/").mode(0o7777), file("l/victim", "mine")},
			map[string]string{"/l": "dir 777", "/l/victim": "file 644 mine"},
		},
		"hard link to a link out": {
			[]entry{symlink("l", outside+"/victim"), hardlink("h", "l")},
			map[string]string{"/l": "link " + outside + "/victim", "/h": "link " + outside + "/victim"},
		},
		"hard link through a link out": {
			[]entry{symlink("l", outside), dir("outside/"), file("outside/victim", "mine"), hardlink("h", "l/victim")},
			map[string]string{"/l": "link " + outside, "/outside": "dir 755", "/outside/victim": "file 644 mine", "/h": "file 644 mine"},
		},
		"links that lead nowhere": {
			[]entry{symlink("self", "self"), symlink("proc1", "/proc/1/root"), symlink("fd", "/proc/self/fd/0"), symlink("long", strings.Repeat("a/", 2000))},
			map[string]string{"/self": "link self", "/proc1": "link /proc/1/root", "/fd": "link /proc/self/fd/0", "/long": "link " + strings.Repeat("a/", 2000)},
		},
		"devices, FIFOs": {
			[]entry{dir("dev/"), node("dev/sda", tar.TypeBlock), node("dev/mem", tar.TypeChar), node("fifo", tar.TypeFifo), node("d/null", tar.TypeChar)},
			map[string]string{"/d": "dir 755"},
		},
		"set-uid and sticky": {
			[]entry{file("su", "x").mode(0o6755), dir("d/").mode(0o7777), file("none", "x").mode(0), hardlink("su2", "su").mode(0o4755), file("bits", "x").mode(0o7777777)},
			map[string]string{"/su": "file 755 x", "/d": "dir 777", "/none": "file 0 x", "/su2": "file 755 x", "/bits": "file 777 x"},
		},
		"attributes": {
			[]entry{
				{tar.Header{Name: "cap", Typeflag: tar.TypeReg, Mode: 0o755, PAXRecords: map[string]string{
					"SCHILY.xattr.security.capability":    "\x01\x00\x00\x02\xff\xff\xff\xff\x00\x00\x00\x00\xff\xff\xff\xff\x00\x00\x00\x00",
					"SCHILY.xattr.trusted.overlay.opaque": "y", "SCHILY.xattr.user.x": "y", "SCHILY.xattr.security.selinux": "system_u:object_r:bin_t:s0",
					"SCHILY.acl.access": "user::rwx,user:1:rwx", "LIBARCHIVE.xattr.user.y": "eQ",
				}}, ""},
				{tar.Header{Name: "d/", Typeflag: tar.TypeDir, Mode: 0o755, PAXRecords: map[string]string{"SCHILY.xattr.trusted.overlay.opaque": "y"}}, ""},
			},
			map[string]string{"/cap": "file 755 ", "/d": "dir 755"},
		},
		"owners": {
			[]entry{
				{tar.Header{Name: "o", Typeflag: tar.TypeReg, Mode: 0o644, Uid: 1000, Gid: 1000, Uname: "daemon", Gname: "daemon"}, ""},
				{tar.Header{Name: "huge", Typeflag: tar.TypeReg, Mode: 0o644, Uid: 1 << 40, Gid: -1}, ""},
				{tar.Header{Name: "s", Typeflag: tar.TypeSymlink, Linkname: "o", Uid: 1000}, ""},
				{tar.Header{Name: "d/", Typeflag: tar.TypeDir, Mode: 0o755, Uid: 1000}, ""},
			},
			map[string]string{"/o": "file 644 ", "/huge": "file 644 ", "/s": "link o", "/d": "dir 755"},
		},
		"strange names": {
			[]entry{file("new\nline", "1"), file("\xff\xfe", "2"), file("-rf", "3"), file(" ", "4"), file("\x1b[31m", "5"), file("...", "6"), file("a\\..\\b", "7"), file(strings.Repeat("n", 255), "8")},
			map[string]string{
				"/new\nline": "file 644 1", "/\xff\xfe": "file 644 2", "/-rf": "file 644 3", "/ ": "file 644 4", "/\x1b[31m": "file 644 5", "/...": "file 644 6",
				"/a\\..\\b": "file 644 7", "/" + strings.Repeat("n", 255): "file 644 8",
			},
		},
		"the root itself": {
			[]entry{dir("/").mode(0o7777), dir(".").mode(0), dir("./").mode(0o7000), dir("////")},
			nil,
		},
		"what every root has": {
			[]entry{dir("proc/").mode(0o555), file("proc/x", "x"), dir("tmp/").mode(0o1777)},
			map[string]string{"/proc": "dir 755", "/proc/x": "file 644 x", "/tmp": "dir 777"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPlace(t)
			img := p.unpacked(archive(t, c.entries...))
			wantTree(t, img.Dir, c.want)
		})
	}
}

// TestHostileEntriesAreRefused: nothing can be made of these, so nothing is.
func TestHostileEntriesAreRefused(t *testing.T) {
	one := func(e ...entry) [][]byte { return [][]byte{archive(t, e...)} }
	end := make([]byte, 1024)
	deep := strings.Repeat("d/", 257)
	for name, c := range map[string]struct {
		archives [][]byte
		word     string
	}{
		"name that leads out":              {one(file("../../outside/victim", "mine")), "leads out"},
		"name that leads out and back":     {one(file("a/../../x", "mine")), "leads out"},
		"name that does not":               {one(file("a/../b", "mine")), "leads out"},
		"absolute name that leads out":     {one(file("/../outside/victim", "mine")), "leads out"},
		"directory that leads out":         {one(dir("../")), "leads out"},
		"the parent":                       {one(dir("..")), "leads out"},
		"hard link that leads out":         {one(hardlink("h", "../../../etc/passwd")), "leads out"},
		"hard link to an absolute path":    {one(hardlink("h", "/etc/passwd")), "hard link to nothing"},
		"hard link through a link out":     {one(symlink("l", "/etc"), hardlink("h", "l/passwd")), "hard link to nothing"},
		"hard link to the root":            {one(hardlink("h", "/")), "hard link to the root"},
		"hard link to a directory":         {one(dir("d/"), hardlink("h", "d")), "hard link to a directory"},
		"hard link to nothing":             {one(hardlink("h", "")), "hard link"},
		"hard link of the root":            {one(file("x", ""), hardlink("/", "x")), "root is no directory"},
		"symbolic link in place of root":   {one(symlink(".", "/outside")), "root is no directory"},
		"file in place of the root":        {[][]byte{append(raw("./", '7', ""), end...)}, "root is no directory"},
		"device in place of the root":      {one(node(".", tar.TypeChar)), "root is no directory"},
		"through a dangling link":          {one(symlink("l", "none"), file("l/x", "")), "symbolic link in its path"},
		"through a loop":                   {one(symlink("l", "l"), file("l/x", "")), "symbolic link in its path"},
		"through a long loop":              {one(symlink("a", "b/x"), symlink("b", "a/x"), file("a/y/z", "")), "symbolic link in its path"},
		"through a link into /proc":        {one(symlink("l", "/proc/self/root/outside"), file("l/victim", "mine")), "symbolic link in its path"},
		"through a link to a magic link":   {one(symlink("l", "/proc/self/fd/0"), file("l/x", "mine")), "symbolic link in its path"},
		"through a file":                   {one(file("f", ""), file("f/x", "")), "not a directory"},
		"symbolic link to nothing":         {[][]byte{append(raw("l", '2', ""), end...)}, "symbolic link"},
		"symbolic link too long":           {one(symlink("l", strings.Repeat("l", 4096))), "too long"},
		"name too long":                    {one(file(strings.Repeat("n", 256), "")), "too long"},
		"directory name too long":          {one(file(strings.Repeat("n", 256)+"/x", "")), "too long"},
		"path too long":                    {one(file(strings.Repeat("n/", 2048)+"x", "")), "limit 4095"},
		"path of a megabyte":               {one(file(strings.Repeat("n", 1<<20-100), "")), "limit 4095"},
		"path too deep":                    {one(dir(deep)), "limit 256"},
		"hard link too deep":               {one(hardlink("x", deep+"x")), "limit 256"},
		"unknown type":                     {[][]byte{append(raw("x", 'V', ""), end...)}, "unknown type"},
		"whiteout of nothing":              {layers(t, nil, []entry{file("a/.wh.", "")}), "whiteout of"},
		"whiteout of the directory":        {layers(t, nil, []entry{file("a/.wh..", "")}), "whiteout of"},
		"whiteout of the parent":           {layers(t, []entry{dir("a/")}, []entry{file("a/.wh...", "")}), "whiteout of"},
		"whiteout of root's parent":        {one(file(".wh...", "")), "whiteout of"},
		"whiteout that leads out":          {layers(t, nil, []entry{file("../.wh.outside", "")}), "leads out"},
		"opaque that leads out":            {layers(t, nil, []entry{file("../outside/.wh..wh..opq", "")}), "leads out"},
		"file in a whiteout":               {one(file("a/.wh.b/c", "")), "lies in a whiteout"},
		"file in an opaque":                {one(file("a/.wh..wh..opq/../c", "")), "leads out"},
		"link for /proc":                   {one(symlink("proc", "etc")), "/proc is no directory"},
		"link to root for /proc":           {one(symlink("proc", ".")), "/proc is no directory"},
		"link for /sys":                    {one(symlink("sys", "/etc")), "/sys is no directory"},
		"link for /dev":                    {one(symlink("dev", "/outside")), "/dev is no directory"},
		"link for /tmp":                    {one(symlink("tmp", "../../outside")), "/tmp is no directory"},
		"link for /proc in a later layer":  {layers(t, []entry{dir("proc/")}, []entry{symlink("proc", "etc")}), "/proc is no directory"},
		"file for /dev":                    {one(file("dev", "")), "/dev is no directory"},
		"hard link for /tmp":               {one(file("f", ""), hardlink("tmp", "f")), "/tmp is no directory"},
		"link for the working directory":   {one(symlink("work", "../../none")), "working directory"},
		"file for the working directory":   {one(file("work", "")), "working directory"},
		"not a tar archive":                {[][]byte{bytes.Repeat([]byte("hello "), 200)}, "tar archive"},
		"half a header":                    {[][]byte{raw("x", '0', "")[:300]}, "tar archive"},
		"a body cut short":                 {[][]byte{archive(t, file("x", strings.Repeat("x", 4000)))[:2048]}, "tar archive"},
		"an endless header":                {[][]byte{append(rawSized("x", 'x', "", 2<<20), make([]byte, 3<<20)...)}, "too long"},
		"compressed rubbish":               {[][]byte{[]byte("\x1f\x8b rubbish, with the first bytes of gzip")}, "gzip"},
		"compressed rubbish, zstd":         {[][]byte{[]byte("\x28\xb5\x2f\xfd rubbish, with the first bytes of zstd")}, "layer 0"},
		"compressed twice":                 {[][]byte{pack(t, gzipped, pack(t, gzipped, archive(t, file("x", ""))))}, "tar archive"},
		"zstd with a window of a gigabyte": {[][]byte{{0x28, 0xb5, 0x2f, 0xfd, 0x00, 0xa0, 0x01, 0x00, 0x00}}, "window"},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPlace(t)
			l := newLayout(t)
			// The digest of what is in a layer counts last, so any is good.
			ref := l.put(l.image(plain, c.archives...)).directory(filepath.Join(p.dir, "layout"))
			p.forget()
			p.refused(ref, c.word)
		})
	}
}

// TestLimits is C8 and the bombs: sizes are counted while reading, never
// believed, and before anything is made of them.
func TestLimits(t *testing.T) {
	var many, dirs, links, whiteouts, same []entry
	for i := range 300 {
		many = append(many, file(fmt.Sprintf("f%d", i), ""))
		links = append(links, symlink(fmt.Sprintf("l%d", i), "x"))
		whiteouts = append(whiteouts, file(fmt.Sprintf(".wh.%d", i), ""))
		same = append(same, file("same", "x"))
	}
	for i := range 3 {
		dirs = append(dirs, file(fmt.Sprintf("%d/", i)+strings.Repeat("d/", 100)+"x", ""))
	}
	zeros := archive(t, file("zeros", strings.Repeat("\x00", 4<<20)))
	half := archive(t, file("half", strings.Repeat("\x00", 600<<10)))
	huge := rawSized("huge", '0', "", 1<<40)
	// 1 TiB of which nothing is in the archive.
	sparse := archive(t, entry{tar.Header{Name: "big", Typeflag: tar.TypeReg, Mode: 0o644, Size: 512, PAXRecords: map[string]string{
		"GNU.xparse.major": "1", "GNU.xparse.minor": "0", "GNU.xparse.realsize": "1099511627776",
	}}, "0\n" + strings.Repeat("\x00", 510)})
	sparse = bytes.ReplaceAll(sparse, []byte("GNU.xparse"), []byte("GNU.sparse"))

	limit := limits{bytes: 1 << 20, entries: 250}
	for name, c := range map[string]struct {
		pack     packing
		archives [][]byte
		word     string
	}{
		"bytes":                  {plain, [][]byte{zeros}, "1048576 bytes"},
		"gzip bomb":              {gzipped, [][]byte{zeros}, "1048576 bytes"},
		"zstd bomb":              {zstdPacked, [][]byte{zeros}, "1048576 bytes"},
		"bytes of all layers":    {gzipped, [][]byte{half, half}, "1048576 bytes"},
		"bytes behind the end":   {gzipped, [][]byte{append(archive(t), make([]byte, 4<<20)...)}, "1048576 bytes"},
		"bytes of headers":       {gzipped, [][]byte{append(bytes.Repeat(raw("x", 'g', ""), 4096), archive(t)...)}, "250 entries"},
		"huge size, no bytes":    {plain, [][]byte{huge}, "files of more than 1048576 bytes"},
		"holes of a terabyte":    {plain, [][]byte{sparse}, "files of more than 1048576 bytes"},
		"entries":                {plain, layers(t, many), "250"},
		"symbolic links":         {plain, layers(t, links), "250"},
		"whiteouts":              {plain, layers(t, nil, whiteouts), "250"},
		"whiteouts of layer 0":   {plain, layers(t, whiteouts), "250"},
		"one name over and over": {plain, layers(t, same), "250"},
		"directories, implied":   {plain, layers(t, dirs), "250"},
		"entries of all layers":  {plain, layers(t, many[:200], many[200:]), "250"},
		"more layers than allowed": {plain, func() (all [][]byte) {
			for range maxLayers + 1 {
				all = append(all, archive(t))
			}
			return all
		}(), "513 layers"},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPlace(t)
			p.store.limits = limit
			l := newLayout(t)
			ref := l.put(l.image(c.pack, c.archives...)).directory(filepath.Join(p.dir, "layout"))
			p.forget()
			p.refused(ref, c.word)
		})
	}

	t.Run("archive bomb", func(t *testing.T) {
		p := newPlace(t)
		p.store.limits = limit
		ref := write(t, filepath.Join(p.dir, "image"), pack(t, gzipped, make([]byte, 4<<20)))
		p.forget()
		p.refused(ref, "1048576 bytes")
	})
	t.Run("up to the limit", func(t *testing.T) {
		p := newPlace(t)
		// Two directories of the unpacker's own, /work, /proc, /sys, /dev and
		// /tmp; the second layer is read for whiteouts as well.
		p.store.limits = limits{bytes: 1 << 20, entries: 300 + 7}
		l := newLayout(t)
		ref := l.put(l.image(plain, archive(t, many[:200]...), archive(t, many[200:]...))).directory(filepath.Join(p.dir, "layout"))
		p.forget()
		p.open(ref)
	})
	t.Run("defaults", func(t *testing.T) {
		if defaultLimits != (limits{bytes: 8 << 30, entries: 1e6}) {
			t.Errorf("%+v", defaultLimits)
		}
	})
}

func TestFilesKeepTheirTime(t *testing.T) {
	p := newPlace(t)
	far := file("far", "x")
	far.ModTime = time.Unix(1<<60, 0)
	past := file("past", "x")
	past.ModTime = time.Unix(-1<<60, 0)
	img := p.unpacked(archive(t, file("a/b", "x"), far, past))
	var st unix.Stat_t
	if err := unix.Lstat(filepath.Join(img.Dir, "a/b"), &st); err != nil || st.Mtim.Sec != modified.Unix() {
		t.Errorf("modified %v (%v), want %v", st.Mtim, err, modified)
	}
	for _, name := range []string{"far", "past"} {
		if _, err := os.Stat(filepath.Join(img.Dir, name)); err != nil {
			t.Error(err)
		}
	}
}

// TestUmaskAndGroupDoNotMatter: modes and owners are set, not hoped for.
func TestUmaskAndGroupDoNotMatter(t *testing.T) {
	old := unix.Umask(0o077)
	defer unix.Umask(old)
	p := newPlace(t)
	if err := syscall.Setegid(1); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := syscall.Setegid(0); err != nil {
			t.Fatal(err)
		}
	}()
	img := p.unpacked(archive(t, file("implied/x", "x").mode(0o666), dir("d/").mode(0o777), symlink("l", "x")))
	wantTree(t, img.Dir, map[string]string{"/implied": "dir 755", "/implied/x": "file 666 x", "/d": "dir 777", "/l": "link x"})
}

// TestHolesCanBeCanceled: what is read of a hole comes from nowhere.
func TestHolesCanBeCanceled(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	n := 0
	zeros := readFunc(func(b []byte) (int, error) {
		if n++; n == 3 {
			cancel()
		}
		if n == 100 {
			return 0, io.EOF
		}
		return len(b), nil
	})
	if err := copyAll(io.Discard, patient{ctx, zeros}); !errors.Is(err, context.Canceled) || n != 3 {
		t.Errorf("%v after %d reads", err, n)
	}
}

type readFunc func(b []byte) (int, error)

func (f readFunc) Read(b []byte) (int, error) { return f(b) }
