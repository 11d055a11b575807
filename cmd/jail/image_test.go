package main

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"github.com/rogpeppe/go-internal/testscript"
)

// mkimageCmd makes an OCI image layout with busybox in it: mkimage DIR TAG.
func mkimageCmd(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: mkimage DIR TAG")
	}
	dir := ts.MkAbs(args[0])
	ts.Check(os.MkdirAll(filepath.Join(dir, "blobs/sha256"), 0o755))
	blob := func(b []byte, mediaType string) map[string]any {
		sum := fmt.Sprintf("%x", sha256.Sum256(b))
		ts.Check(os.WriteFile(filepath.Join(dir, "blobs/sha256", sum), b, 0o644))
		return map[string]any{"mediaType": "application/vnd.oci.image." + mediaType, "digest": "sha256:" + sum, "size": len(b)}
	}
	encode := func(v any) []byte {
		b, err := json.Marshal(v)
		ts.Check(err)
		return b
	}
	busybox, err := os.ReadFile("/usr/bin/busybox")
	ts.Check(err)
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	ts.Check(w.WriteHeader(&tar.Header{Name: "bin/busybox", Mode: 0o755, Size: int64(len(busybox))}))
	_, err = w.Write(busybox)
	ts.Check(err)
	ts.Check(w.WriteHeader(&tar.Header{Name: "bin/sh", Typeflag: tar.TypeSymlink, Linkname: "busybox"}))
	ts.Check(w.WriteHeader(&tar.Header{Name: "srv/", Typeflag: tar.TypeDir, Mode: 0o755}))
	ts.Check(w.Close())

	l := blob(layer.Bytes(), "layer.v1.tar")
	config := blob(encode(map[string]any{
		"architecture": "amd64", "os": "linux",
		"config": map[string]any{"Env": []string{"PATH=/bin", "GREETING=hi"}, "WorkingDir": "/srv"},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []any{l["digest"]}},
	}), "config.v1+json")
	manifest := blob(encode(map[string]any{"schemaVersion": 2, "config": config, "layers": []any{l}}), "manifest.v1+json")
	manifest["annotations"] = map[string]string{"org.opencontainers.image.ref.name": args[1]}
	ts.Check(os.WriteFile(filepath.Join(dir, "index.json"), encode(map[string]any{"schemaVersion": 2, "manifests": []any{manifest}}), 0o644))
	ts.Check(os.WriteFile(filepath.Join(dir, "oci-layout"), []byte(`{"imageLayoutVersion":"1.0.0"}`), 0o644))
}
