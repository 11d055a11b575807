package image

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
)

// entry is one of a layer: a header and what follows it.
type entry struct {
	tar.Header
	body string
}

var modified = time.Unix(1_700_000_000, 0)

func file(name, body string) entry {
	return entry{tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(body)), ModTime: modified}, body}
}

func dir(name string) entry {
	return entry{tar.Header{Name: name, Typeflag: tar.TypeDir, Mode: 0o755}, ""}
}

func symlink(name, to string) entry {
	return entry{tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: to, Mode: 0o777}, ""}
}

func hardlink(name, to string) entry {
	return entry{tar.Header{Name: name, Typeflag: tar.TypeLink, Linkname: to, Mode: 0o644}, ""}
}

func node(name string, kind byte) entry {
	return entry{tar.Header{Name: name, Typeflag: kind, Mode: 0o666, Devmajor: 1, Devminor: 3}, ""}
}

func (e entry) mode(m int64) entry {
	e.Mode = m
	return e
}

func archive(t testing.TB, entries ...entry) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		if e.PAXRecords != nil {
			e.Format = tar.FormatPAX
		}
		if err := w.WriteHeader(&e.Header); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(e.body)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// raw is a tar header with what the library would not write.
func raw(name string, kind byte, link string) []byte { return rawSized(name, kind, link, 0) }

func rawSized(name string, kind byte, link string, size int64) []byte {
	b := make([]byte, 512)
	copy(b, name)
	copy(b[100:], "0000644\x000000000\x000000000\x0000000000000\x0000000000000\x00")
	// In base 256, which holds any size.
	clear(b[124:136])
	binary.BigEndian.PutUint64(b[128:], uint64(size))
	b[124] = 0x80
	b[156] = kind
	copy(b[157:257], link)
	copy(b[257:], "ustar\x0000")
	copy(b[148:], "        ")
	sum := 0
	for _, c := range b {
		sum += int(c)
	}
	copy(b[148:], fmt.Sprintf("%06o\x00 ", sum))
	return b
}

func pack(t testing.TB, p packing, data []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	switch p {
	case gzipped:
		w := gzip.NewWriter(&b)
		if _, err := w.Write(data); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
	case zstdPacked:
		w, err := zstd.NewWriter(&b, zstd.WithEncoderConcurrency(1))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(data); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
	default:
		return data
	}
	return b.Bytes()
}

func digest(data []byte) string {
	sum := sha256.Sum256(data)
	return "sha256:" + hex.EncodeToString(sum[:])
}

type object = map[string]any

func toJSON(t testing.TB, v any) []byte {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

const (
	indexType    = "application/vnd.oci.image.index.v1+json"
	manifestType = "application/vnd.oci.image.manifest.v1+json"
	configType   = "application/vnd.oci.image.config.v1+json"
	layerType    = "application/vnd.oci.image.layer.v1.tar"
)

var layerTypes = map[packing]string{plain: layerType, gzipped: layerType + "+gzip", zstdPacked: layerType + "+zstd"}

// layout is an OCI image layout that is being built.
type layout struct {
	t     testing.TB
	files map[string][]byte
}

func newLayout(t testing.TB) *layout {
	return &layout{t: t, files: map[string][]byte{layoutFile: []byte(`{"imageLayoutVersion":"1.0.0"}`)}}
}

func (l *layout) blob(mediaType string, data []byte) object {
	d := digest(data)
	l.files["blobs/sha256/"+d[len("sha256:"):]] = data
	return object{"mediaType": mediaType, "digest": d, "size": len(data)}
}

func config(env []string, workingDir string, diffIDs ...string) object {
	return object{
		"os": "linux", "architecture": runtime.GOARCH,
		"config": object{"Env": env, "WorkingDir": workingDir},
		"rootfs": object{"type": "layers", "diff_ids": append([]string{}, diffIDs...)},
	}
}

// image adds an image of these archives to the blobs and returns its
// descriptor.
func (l *layout) image(p packing, archives ...[]byte) object {
	var layers []any
	var diffIDs []string
	for _, a := range archives {
		layers = append(layers, l.blob(layerTypes[p], pack(l.t, p, a)))
		diffIDs = append(diffIDs, digest(a))
	}
	return l.manifest(config([]string{"PATH=/bin", "A=b=c"}, "/work", diffIDs...), layers)
}

func (l *layout) manifest(config any, layers []any) object {
	return l.blob(manifestType, toJSON(l.t, object{
		"schemaVersion": 2, "mediaType": manifestType,
		"config": l.blob(configType, toJSON(l.t, config)), "layers": append([]any{}, layers...),
	}))
}

func (l *layout) index(of ...any) object {
	return l.blob(indexType, toJSON(l.t, object{"schemaVersion": 2, "mediaType": indexType, "manifests": of}))
}

// with returns a copy of a descriptor with more in it.
func with(desc object, key string, value any) object {
	c := object{key: value}
	for k, v := range desc {
		if k != key {
			c[k] = v
		}
	}
	return c
}

func tagged(desc object, tag string) object {
	return with(desc, "annotations", object{"org.opencontainers.image.ref.name": tag})
}

func on(desc object, platform string) object {
	return with(desc, "platform", object{"os": "linux", "architecture": platform})
}

// put names the images of the layout.
func (l *layout) put(descs ...any) *layout {
	l.files[indexFile] = toJSON(l.t, object{"schemaVersion": 2, "manifests": append([]any{}, descs...)})
	return l
}

// directory writes the layout to a directory.
func (l *layout) directory(name string) string {
	l.t.Helper()
	for file, data := range l.files {
		file = filepath.Join(name, file)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			l.t.Fatal(err)
		}
		if err := os.WriteFile(file, data, 0o644); err != nil {
			l.t.Fatal(err)
		}
	}
	return name
}

// archive returns the layout as an archive.
func (l *layout) archive() []byte {
	l.t.Helper()
	var entries []entry
	for name, data := range l.files {
		entries = append(entries, file(name, string(data)))
	}
	return archive(l.t, entries...)
}

// dockerArchive is what docker save writes, of old, of one image.
func dockerArchive(t testing.TB, tags []string, archives ...[]byte) []byte {
	t.Helper()
	var entries []entry
	var names, diffIDs []string
	at := map[string]string{}
	for i, a := range archives {
		d := digest(a)
		name := fmt.Sprintf("layer%d/layer.tar", i)
		if first, ok := at[d]; ok {
			entries = append(entries, symlink(name, "../"+first))
		} else {
			at[d] = name
			entries = append(entries, dir(filepath.Dir(name)+"/"), file(name, string(a)))
		}
		names, diffIDs = append(names, name), append(diffIDs, d)
	}
	text := toJSON(t, config([]string{"PATH=/bin", "A=b=c"}, "/work", diffIDs...))
	configName := digest(text)[len("sha256:"):] + ".json"
	entries = append(entries, file(configName, string(text)),
		file(dockerFile, string(toJSON(t, []object{{"Config": configName, "RepoTags": tags, "Layers": names}}))))
	return archive(t, entries...)
}

func write(t testing.TB, name string, data []byte) string {
	t.Helper()
	if err := os.WriteFile(name, data, 0o644); err != nil {
		t.Fatal(err)
	}
	return name
}
