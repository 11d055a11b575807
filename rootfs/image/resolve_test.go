package image

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestSelection(t *testing.T) {
	const other = "mips"
	own := runtime.GOARCH
	text := func(name string) []byte { return archive(t, file("work/name", name)) }
	foreign := func(l *layout, name string) object {
		c := config(nil, "", digest(text(name)))
		c["architecture"] = other
		return l.manifest(c, []any{l.blob(layerType, text(name))})
	}
	for name, c := range map[string]struct {
		build func(l *layout) (suffix string)
		want  string   // what /work/name says
		words []string // or of the error
	}{
		"the only one": {func(l *layout) string { l.put(l.image(plain, text("a"))); return "" }, "a", nil},
		"by tag": {func(l *layout) string {
			l.put(tagged(l.image(plain, text("a")), "a"), tagged(l.image(plain, text("b")), "b"))
			return ":b"
		}, "b", nil},
		"by a tag that is a name": {func(l *layout) string {
			l.put(tagged(l.image(plain, text("a")), "a"), tagged(l.image(plain, text("b")), "registry:5000/x/b:1.0"))
			return ":registry:5000/x/b:1.0"
		}, "b", nil},
		"by the end of a name": {func(l *layout) string {
			l.put(tagged(l.image(plain, text("a")), "registry:5000/x/b"), tagged(l.image(plain, text("b")), "registry:5000/x/b:1.0"))
			return ":1.0"
		}, "b", nil},
		"a port is no tag": {func(l *layout) string {
			l.put(tagged(l.image(plain, text("a")), "registry:5000/x/b"))
			return ":5000/x/b"
		}, "", []string{`with tag "5000/x/b"`}},
		"by digest": {func(l *layout) string {
			b := l.image(plain, text("b"))
			l.put(l.image(plain, text("a")), b)
			return "@" + b["digest"].(string)
		}, "b", nil},
		"by the digest of an index": {func(l *layout) string {
			b := l.index(on(foreign(l, "x"), other), on(l.image(plain, text("b")), own))
			l.put(l.image(plain, text("a")), b)
			return "@" + b["digest"].(string)
		}, "b", nil},
		"by a digest in an index": {func(l *layout) string {
			b := l.image(plain, text("b"))
			l.put(l.index(on(l.image(plain, text("a")), own), on(b, own)))
			return "@" + b["digest"].(string)
		}, "b", nil},
		"by platform": {func(l *layout) string {
			l.put(l.index(on(foreign(l, "x"), other), on(l.image(plain, text("a")), own)))
			return ""
		}, "a", nil},
		"by platform of the configuration": {func(l *layout) string {
			l.put(foreign(l, "x"), l.image(plain, text("a")))
			return ""
		}, "a", nil},
		"signatures aside": {func(l *layout) string {
			l.put(l.index(on(l.image(plain, text("a")), own), with(l.image(plain, text("s")), "platform", object{"os": "unknown", "architecture": "unknown"})))
			return ""
		}, "a", nil},
		"the same one twice": {func(l *layout) string {
			a := l.image(plain, text("a"))
			l.put(tagged(a, "1"), tagged(a, "2"))
			return ""
		}, "a", nil},
		"indexes in indexes": {func(l *layout) string {
			l.put(tagged(l.index(l.index(l.index(l.index(on(l.image(plain, text("a")), own))))), "deep"))
			return ":deep"
		}, "a", nil},
		"other tags need not be whole": {func(l *layout) string {
			gone := l.index(l.image(plain, text("x")))
			delete(l.files, "blobs/sha256/"+gone["digest"].(string)[7:])
			l.put(tagged(gone, "x"), tagged(l.image(plain, text("a")), "a"))
			return ":a"
		}, "a", nil},

		"too many": {func(l *layout) string {
			l.put(tagged(l.image(plain, text("a")), "one"), tagged(l.image(plain, text("b")), "two"))
			return ""
		}, "", []string{"several images", `"one"`, `"two"`, "sha256:", "linux/" + own}},
		"no such tag": {func(l *layout) string {
			l.put(tagged(l.image(plain, text("a")), "one"))
			return ":two"
		}, "", []string{`no image with tag "two"`, `"one"`}},
		"empty tag": {func(l *layout) string { l.put(l.image(plain)); return ":" }, "", []string{"empty tag"}},
		"no such digest": {func(l *layout) string {
			l.put(tagged(l.image(plain, text("a")), "one"))
			return "@sha256:" + strings.Repeat("0", 64)
		}, "", []string{"with digest sha256:000", `"one"`}},
		"no digest":     {func(l *layout) string { l.put(l.image(plain)); return "@sha256:123" }, "", []string{`digest "sha256:123"`}},
		"other digests": {func(l *layout) string { l.put(l.image(plain)); return "@md5:" + strings.Repeat("0", 32) }, "", []string{"digest", "md5"}},
		"no such platform": {func(l *layout) string {
			l.put(tagged(l.index(on(foreign(l, "x"), other)), "one"))
			return ""
		}, "", []string{"no image for linux/" + own, "linux/" + other, `"one"`}},
		"platform that is a lie": {func(l *layout) string {
			l.put(on(foreign(l, "x"), own))
			return ""
		}, "", []string{"linux/" + other, "want linux/" + own}},
		"nothing": {func(l *layout) string { l.put(); return "" }, "", []string{"there is: nothing"}},
		"hostile names": {func(l *layout) string {
			var all []any
			for i := range 100 {
				all = append(all, tagged(l.image(plain, text(fmt.Sprint(i))), strings.Repeat("\x1b[2J\n", 1000)))
			}
			l.put(all...)
			return ""
		}, "", []string{`\x1b[2J\n`, "and 84 more"}},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPlace(t)
			l := newLayout(t)
			suffix := c.build(l)
			ref := l.directory(filepath.Join(p.dir, "layout"))
			p.forget()
			if c.words != nil {
				err := p.refused(ref+suffix, c.words...)
				if strings.ContainsAny(err.Error(), "\x1b\n") {
					t.Errorf("error has control characters: %q", err)
				}
				return
			}
			img := p.open(ref + suffix)
			if b, err := os.ReadFile(filepath.Join(img.Dir, "work/name")); err != nil || string(b) != c.want {
				t.Errorf("opened %q (%v), want %q", b, err, c.want)
			}
		})
	}
}

// TestHostileLayouts: digests, sizes and kinds are checked, and JSON is bounded
// before it is parsed.
func TestHostileLayouts(t *testing.T) {
	data := archive(t, file("x", "x"))
	index := func(l *layout, manifests ...any) { l.put(manifests...) }
	blobFile := func(desc object) string { return "blobs/sha256/" + desc["digest"].(string)[7:] }
	for name, c := range map[string]struct {
		build func(l *layout)
		words []string
	}{
		"no index":         {func(l *layout) {}, []string{"no file", "index.json"}},
		"index is no JSON": {func(l *layout) { l.files[indexFile] = []byte("{") }, []string{"index.json"}},
		"index is a list":  {func(l *layout) { l.files[indexFile] = []byte("[]") }, []string{"index.json"}},
		"another version":  {func(l *layout) { l.put(l.image(plain)).files[layoutFile] = []byte(`{"imageLayoutVersion":"2.0.0"}`) }, []string{"version"}},
		"no version":       {func(l *layout) { l.put(l.image(plain)).files[layoutFile] = nil }, []string{"version"}},
		"huge version":     {func(l *layout) { l.put(l.image(plain)).files[layoutFile] = bytes.Repeat([]byte("1"), maxJSON+1) }, []string{"more than 4194304 bytes"}},
		"index too large":  {func(l *layout) { l.files[indexFile] = append(bytes.Repeat([]byte(" "), maxJSON), "{}"...) }, []string{"more than 4194304 bytes"}},
		"too many in index": {func(l *layout) {
			l.files[indexFile] = []byte(`{"manifests":[{}` + strings.Repeat(",{}", maxElements+1) + `]}`)
		}, []string{"elements"}},
		"many in index": {func(l *layout) { l.files[indexFile] = []byte(`{"manifests":[{}` + strings.Repeat(",{}", 2000) + `]}`) }, []string{"1024 images"}},
		"deep JSON":     {func(l *layout) { l.files[indexFile] = []byte(`{"x":` + strings.Repeat("[", 1<<20)) }, []string{"index.json"}},
		"deep JSON, closed": {func(l *layout) {
			l.files[indexFile] = []byte(`{"x":` + strings.Repeat("[", 20_000) + strings.Repeat("]", 20_000) + `}`)
		}, []string{"index.json"}},
		"manifest too large": {func(l *layout) { index(l, l.blob(manifestType, bytes.Repeat([]byte(" "), maxJSON+1))) }, []string{"more than 4194304 bytes"}},
		"sum of all too large": {func(l *layout) {
			var all []any
			for i := range 9 {
				all = append(all, l.blob(indexType, append(bytes.Repeat([]byte(" "), maxJSON-100), fmt.Sprintf(`{"schemaVersion":%d}`, i)...)))
			}
			index(l, all...)
		}, []string{"limits 33554432"}},
		"index of itself": {func(l *layout) {
			// A digest that holds its own is not to be had: the same index
			// over and over is the next best.
			d := l.index(l.image(plain))
			for range 5 {
				d = l.index(d, d)
			}
			index(l, d)
		}, []string{"indexes within each other"}},
		"indexes that fan out": {func(l *layout) {
			d := l.image(plain, data)
			for range 3 {
				var all []any
				for range 100 {
					all = append(all, d)
				}
				d = l.index(all...)
			}
			index(l, d)
		}, []string{"1024 images"}},
		"index that names a file of the host": {func(l *layout) {
			index(l, object{"mediaType": manifestType, "digest": "sha256:../../../../etc/passwd", "size": 1})
		}, []string{"index.json"}},
		"no digest":       {func(l *layout) { index(l, object{"mediaType": manifestType, "size": 1}) }, []string{"no file"}},
		"digest of nulls": {func(l *layout) { index(l, object{"mediaType": manifestType, "digest": nil, "size": 1}) }, nil},
		"sha512":          {func(l *layout) { index(l, with(l.image(plain), "digest", "sha512:"+strings.Repeat("a", 128))) }, []string{"sha512"}},
		"no media type":   {func(l *layout) { index(l, with(l.image(plain), "mediaType", "")) }, []string{"there is: nothing"}},
		"other media type": {func(l *layout) {
			index(l, with(l.image(plain), "mediaType", "application/vnd.docker.distribution.manifest.v2+json"))
		}, []string{"descriptor says"}},
		"no manifest":   {func(l *layout) { d := l.image(plain); delete(l.files, blobFile(d)); index(l, d) }, []string{"no file"}},
		"manifest size": {func(l *layout) { d := l.image(plain); index(l, with(d, "size", 7)) }, []string{"descriptor says 7"}},
		"negative size": {func(l *layout) { d := l.image(plain); index(l, with(d, "size", -1)) }, []string{"descriptor says -1"}},
		"manifest digest": {func(l *layout) {
			d := l.image(plain)
			l.files[blobFile(d)][0] = ' '
			index(l, d)
		}, []string{"has the digest"}},
		"nested index digest": {func(l *layout) {
			d := l.index(l.image(plain))
			l.files[blobFile(d)][0] = ' '
			index(l, d)
		}, []string{"has the digest"}},
		"config digest": {func(l *layout) {
			c := l.blob(configType, toJSON(t, config(nil, "")))
			index(l, l.blob(manifestType, toJSON(t, object{"config": c, "layers": []any{}})))
			l.files[blobFile(c)][0] = ' '
		}, []string{"configuration", "has the digest"}},
		"config is no JSON":   {func(l *layout) { index(l, l.manifest("x", nil)) }, []string{"configuration"}},
		"config of no system": {func(l *layout) { index(l, l.manifest(object{}, nil)) }, []string{"no image for"}},
		"manifest is no JSON": {func(l *layout) { index(l, l.blob(manifestType, []byte("x"))) }, []string{"manifest"}},
		"layer digest": {func(l *layout) {
			d := l.blob(layerType, bytes.Clone(data))
			index(l, l.manifest(config(nil, "", digest(data)), []any{d}))
			l.files[blobFile(d)][512] ^= 1
		}, []string{"layer 0", "digest"}},
		"layer digest, behind the archive's end": {func(l *layout) {
			d := l.blob(layerType, append(bytes.Clone(data), 1, 2, 3))
			index(l, l.manifest(config(nil, "", digest(append(bytes.Clone(data), 1, 2, 3))), []any{d}))
			l.files[blobFile(d)][len(data)] ^= 1
		}, []string{"layer 0", "digest"}},
		"layer cut short": {func(l *layout) {
			d := l.blob(layerType, data)
			index(l, l.manifest(config(nil, "", digest(data)), []any{d}))
			l.files[blobFile(d)] = data[:700]
		}, []string{"layer 0", "descriptor says"}},
		"layer with more behind it": {func(l *layout) {
			d := l.blob(layerType, data)
			index(l, l.manifest(config(nil, "", digest(data)), []any{d}))
			l.files[blobFile(d)] = append(bytes.Clone(data), 0)
		}, []string{"layer 0", "descriptor says"}},
		"compressed layer, packed otherwise": {func(l *layout) {
			d := l.blob(layerType+"+gzip", pack(t, gzipped, data))
			index(l, l.manifest(config(nil, "", digest(data)), []any{d}))
			l.files[blobFile(d)][9] ^= 1 // the system that it was made on
		}, []string{"layer 0", "has the digest"}},
		"compressed layer cut short": {func(l *layout) {
			cut := pack(t, gzipped, data)
			cut = cut[:len(cut)-20]
			index(l, l.manifest(config(nil, "", digest(data)), []any{l.blob(layerType+"+gzip", cut)}))
		}, []string{"layer 0", "unexpected EOF"}},
		"rubbish behind a compressed layer": {func(l *layout) {
			index(l, l.manifest(config(nil, "", digest(data)), []any{l.blob(layerType+"+gzip", append(pack(t, gzipped, data), "rubbish rubbish"...))}))
		}, []string{"layer 0"}},
		"layer that is not the configuration's": {func(l *layout) {
			index(l, l.manifest(config(nil, "", digest(nil)), []any{l.blob(layerType, data)}))
		}, []string{"layer 0", "configuration says"}},
		"fewer layers than configured": {func(l *layout) { index(l, l.manifest(config(nil, "", digest(data)), nil)) }, []string{"0 layers", "tells of 1"}},
		"more layers than configured":  {func(l *layout) { index(l, l.manifest(config(nil, ""), []any{l.blob(layerType, data)})) }, []string{"1 layers", "tells of 0"}},
		"missing layer": {func(l *layout) {
			d := l.blob(layerType, data)
			index(l, l.manifest(config(nil, "", digest(data)), []any{d}))
			delete(l.files, blobFile(d))
		}, []string{"layer 0", "no file"}},
		"layer of a foreign kind": {func(l *layout) {
			index(l, l.manifest(config(nil, "", digest(data)), []any{l.blob("application/vnd.oci.image.layer.v1.tar+encrypted", data)}))
		}, []string{"+encrypted"}},
		"environment without a name":        {func(l *layout) { index(l, l.manifest(config([]string{"=x"}, ""), nil)) }, []string{"environment"}},
		"environment without a value":       {func(l *layout) { index(l, l.manifest(config([]string{"x"}, ""), nil)) }, []string{"environment"}},
		"environment with a zero":           {func(l *layout) { index(l, l.manifest(config([]string{"x=\x00"}, ""), nil)) }, []string{"environment"}},
		"working directory with a zero":     {func(l *layout) { index(l, l.manifest(config(nil, "/\x00"), nil)) }, []string{"working directory"}},
		"working directory too long":        {func(l *layout) { index(l, l.manifest(config(nil, strings.Repeat("/x", 3000)), nil)) }, []string{"working directory"}},
		"working directory too long a name": {func(l *layout) { index(l, l.manifest(config(nil, "/"+strings.Repeat("x", 300)), nil)) }, []string{"working directory"}},
	} {
		t.Run(name, func(t *testing.T) {
			for _, form := range []string{"layout", "archive"} {
				p := newPlace(t)
				l := newLayout(t)
				c.build(l)
				at := filepath.Join(p.dir, "image")
				if form == "layout" {
					l.directory(at)
				} else {
					write(t, at, l.archive())
				}
				p.forget()
				p.refused(at, c.words...)
			}
		})
	}
}

// TestLayoutsLeadNowhere: blobs are regular files of the layout.
func TestLayoutsLeadNowhere(t *testing.T) {
	for name, to := range map[string]func(p *place, blob string) error{
		"absolute link":   func(p *place, blob string) error { return os.Symlink(filepath.Join(p.dir, "blob"), blob) },
		"relative link":   func(p *place, blob string) error { return os.Symlink("../../../blob", blob) },
		"link to nothing": func(p *place, blob string) error { return os.Symlink("nothing", blob) },
		"link to itself":  func(p *place, blob string) error { return os.Symlink(blob, blob) },
		"magic link":      func(p *place, blob string) error { return os.Symlink("/proc/self/exe", blob) },
		"FIFO":            func(p *place, blob string) error { return unix.Mkfifo(blob, 0o600) },
		"device":          func(p *place, blob string) error { return unix.Mknod(blob, unix.S_IFCHR|0o600, int(unix.Mkdev(1, 5))) },
		"directory":       func(p *place, blob string) error { return os.Mkdir(blob, 0o700) },
		"link for a folder": func(p *place, blob string) error {
			return errors.Join(os.Rename(filepath.Dir(blob), filepath.Join(p.dir, "moved")), os.Symlink(filepath.Join(p.dir, "moved"), filepath.Dir(blob)))
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPlace(t)
			l := newLayout(t)
			d := l.image(plain)
			ref := l.put(d).directory(filepath.Join(p.dir, "layout"))
			blob := filepath.Join(ref, "blobs/sha256", d["digest"].(string)[7:])
			if err := os.Rename(blob, filepath.Join(p.dir, "blob")); err != nil {
				t.Fatal(err)
			}
			if err := to(p, blob); err != nil {
				t.Fatal(err)
			}
			p.forget()
			p.refused(ref)
		})
	}
	t.Run("link within", func(t *testing.T) {
		p := newPlace(t)
		l := newLayout(t)
		d := l.image(plain)
		ref := l.put(d).directory(filepath.Join(p.dir, "layout"))
		blob := filepath.Join(ref, "blobs/sha256", d["digest"].(string)[7:])
		if err := errors.Join(os.Rename(blob, filepath.Join(ref, "blob")), os.Symlink("../../blob", blob)); err != nil {
			t.Fatal(err)
		}
		p.forget()
		p.open(ref)
	})
}

func TestHostileArchives(t *testing.T) {
	data := archive(t, file("x", "x"))
	many := make([]byte, 0, (maxMembers+3)*512)
	for range maxMembers + 1 {
		many = append(many, raw("x", '0', "")...)
	}
	manifest := func(entries ...object) entry { return file(dockerFile, string(toJSON(t, entries))) }
	text := string(toJSON(t, config(nil, "", digest(data))))
	name := digest([]byte(text))[7:] + ".json"
	for title, c := range map[string]struct {
		data  []byte
		words []string
	}{
		"empty file":                 {nil, []string{"neither"}},
		"a few bytes":                {[]byte("x"), []string{"not a tar archive"}},
		"text":                       {bytes.Repeat([]byte("text "), 1000), []string{"not a tar archive"}},
		"empty archive":              {archive(t), []string{"neither", layoutFile, dockerFile}},
		"archive of no image":        {data, []string{"neither", layoutFile, dockerFile}},
		"many members":               {many, []string{"65536 members"}},
		"gzip of rubbish":            {pack(t, gzipped, bytes.Repeat([]byte("text "), 1000)), []string{"not a tar archive"}},
		"gzip in gzip":               {pack(t, gzipped, pack(t, gzipped, data)), []string{"not a tar archive"}},
		"rubbish of gzip":            {[]byte("\x1f\x8b\x08rubbish rubbish rubbish"), []string{"archive"}},
		"gzip cut short":             {pack(t, gzipped, bytes.Repeat(data, 10))[:60], []string{"unexpected EOF"}},
		"link out":                   {archive(t, symlink(dockerFile, "/etc/passwd")), []string{"neither"}},
		"links in a ring":            {archive(t, symlink(dockerFile, "a"), symlink("a", dockerFile)), []string{"neither"}},
		"docker: no JSON":            {archive(t, file(dockerFile, "{")), []string{dockerFile}},
		"docker: nothing":            {archive(t, manifest()), []string{"there is: nothing"}},
		"docker: many":               {archive(t, file(dockerFile, `[{}`+strings.Repeat(",{}", maxImages)+`]`)), []string{"1024 images"}},
		"docker: config of the host": {archive(t, manifest(object{"Config": "/etc/passwd"})), []string{`no file "/etc/passwd"`}},
		"docker: config outside":     {archive(t, manifest(object{"Config": "../../etc/passwd"})), []string{"no file"}},
		"docker: layer of the host":  {archive(t, manifest(object{"Config": name, "Layers": []string{"/etc/passwd"}}), file(name, text)), []string{`no file "/etc/passwd"`}},
		"docker: config digest":      {archive(t, manifest(object{"Config": name, "Layers": []string{"l"}}), file(name, " "+text), file("l", string(data))), []string{"has the digest"}},
		"docker: layer digest":       {archive(t, manifest(object{"Config": name, "Layers": []string{"l"}}), file(name, text), file("l", string(archive(t, file("y", ""))))), []string{"layer 0", "configuration says"}},
		"docker: number of layers":   {archive(t, manifest(object{"Config": name, "Layers": []string{"l", "l"}}), file(name, text), file("l", string(data))), []string{"2 layers", "tells of 1"}},
		"docker: several":            {archive(t, manifest(object{"Config": name, "Layers": []string{"l"}, "RepoTags": []string{"a:1", "a:2"}}, object{"Config": "c", "RepoTags": []string{"b:1"}}), file(name, text), file("c", string(toJSON(t, config(nil, "")))), file("l", string(data))), []string{"several images", `"a:1"`, `"b:1"`}},
		"docker: one config, often": {func() []byte {
			entries := []entry{file("c", strings.Repeat(" ", maxJSON-2)+"{}")}
			var list []object
			for range 20 {
				list = append(list, object{"Config": "c"})
			}
			return archive(t, append(entries, manifest(list...))...)
		}(), []string{"limits 33554432"}},
		"member with holes": {func() []byte {
			b := archive(t, entry{tar.Header{Name: layoutFile, Typeflag: tar.TypeReg, Size: 512, PAXRecords: map[string]string{
				"GNU.xparse.major": "1", "GNU.xparse.minor": "0", "GNU.xparse.realsize": "1099511627776",
			}}, "0\n" + strings.Repeat("\x00", 510)})
			return bytes.ReplaceAll(b, []byte("GNU.xparse"), []byte("GNU.sparse"))
		}(), nil},
	} {
		t.Run(title, func(t *testing.T) {
			p := newPlace(t)
			ref := write(t, filepath.Join(p.dir, "image"), c.data)
			p.forget()
			p.refused(ref, c.words...)
		})
	}
}

// TestRefIsNeitherFileNorDirectory: a FIFO does not block, a device is not
// read.
func TestRefIsNeitherFileNorDirectory(t *testing.T) {
	p := newPlace(t)
	fifo := filepath.Join(p.dir, "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	p.forget()
	for _, ref := range []string{fifo, "/dev/zero", "/dev/null"} {
		p.refused(ref, "neither directory nor regular file")
	}
	p.refused("", "empty path")
	if err := os.Mkdir(filepath.Join(p.dir, "plain"), 0o700); err != nil {
		t.Fatal(err)
	}
	p.forget()
	p.refused(filepath.Join(p.dir, "plain"), "directory has no oci-layout")
}

// TestConfigurationIsKept: what the second Open reads back is what the image
// said.
func TestConfigurationIsKept(t *testing.T) {
	p := newPlace(t)
	l := newLayout(t)
	env := []string{"A=<&>\u2028", "B=" + strings.Repeat("<", 600_000), "C=", "D= = \n"}
	ref := l.put(l.manifest(config(env, "work/../work/./x/"), nil)).directory(filepath.Join(p.dir, "layout"))
	p.forget()
	for range 2 {
		img := p.open(ref)
		if strings.Join(img.Env, "\x00") != strings.Join(env, "\x00") || img.WorkingDir != "/work/x" {
			t.Errorf("working directory %q, environment %.100q", img.WorkingDir, img.Env)
		}
		if info, err := os.Stat(filepath.Join(img.Dir, img.WorkingDir)); err != nil || !info.IsDir() {
			t.Errorf("working directory: %v", err)
		}
	}
	m := newLayout(t)
	ref = m.put(m.manifest(config(nil, ""), nil)).directory(filepath.Join(p.dir, "bare"))
	p.forget()
	if img := p.open(ref); img.WorkingDir != "" || len(img.Env) != 0 {
		t.Errorf("%+v", img)
	}
}

// FuzzLayer: whatever a layer is, it either becomes a tree that keeps the
// promises, or nothing at all. An entry is a line of script: its type, its name,
// and after a "|" where it links to or what it holds. What is in tail follows
// as it is.
func FuzzLayer(f *testing.F) {
	f.Add("5a/\n0a/x|x\n2l|a\n0l/y|y\n1h|l/y\n0a/.wh..wh..opq", []byte{})
	f.Add("2out|../../outside\n0out/victim|x\n3dev/null\n0.wh.a\n5.\n1a/x|out/victim", archive(f, file("x", "x")))
	f.Add("2proc|/etc\n0../x\n0.wh...\n6fifo\n2l|l\n0l/x", rawSized("x", '0', "", 1<<40))
	// In memory: a disk makes some ten runs a second of it.
	memory := f.TempDir()
	if err := unix.Mount("tmpfs", memory, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "size=64m,mode=0700"); err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() {
		if err := unix.Unmount(memory, unix.MNT_DETACH); err != nil {
			f.Error(err)
		}
	})
	f.Fuzz(func(t *testing.T, script string, tail []byte) {
		var data []byte
		for line := range strings.SplitSeq(script, "\n") {
			name, rest, _ := strings.Cut(line, "|")
			if name == "" {
				continue
			}
			if name[0] != '0' {
				data = append(data, raw(name[1:], name[0], rest)...)
				continue
			}
			data = append(data, rawSized(name[1:], '0', "", int64(len(rest)))...)
			data = append(data, rest...)
			data = append(data, make([]byte, -len(data)&511)...)
		}
		data = append(data, tail...)
		defer func() {
			if err := os.RemoveAll(filepath.Join(memory, "place")); err != nil {
				t.Error(err)
			}
		}()
		p := newPlaceIn(t, filepath.Join(memory, "place"))
		defer p.check()
		p.store.limits = limits{bytes: 1 << 20, entries: 100}
		l := newLayout(t)
		lower := archive(t, dir("a/"), file("a/x", "x"), symlink("l", "/a"))
		ref := l.put(l.image(plain, lower, data)).directory(filepath.Join(p.dir, "layout"))
		p.forget()
		img, err := p.store.Open(context.Background(), ref)
		stored := p.stored()
		if err != nil {
			if !errors.Is(err, ErrInvalid) {
				t.Errorf("error %v does not blame the image", err)
			}
			if img != nil || len(stored) != 0 {
				t.Errorf("error %v, and %v, store has %v", err, img, stored)
			}
			return
		}
		defer img.Close()
		if len(stored) != 1 || len(describeTree(t, img.Dir)) > 100 {
			t.Errorf("store has %v", stored)
		}
		for _, name := range []string{"", "proc", "sys", "dev", "tmp", "work"} {
			if info, err := os.Lstat(filepath.Join(img.Dir, name)); err != nil || name != "work" && !info.IsDir() {
				t.Errorf("/%s: %v, %v", name, info, err)
			}
		}
	})
}
