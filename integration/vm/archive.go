package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
)

// An archive is a cpio archive in the form that the kernel unpacks (newc).
type archive struct {
	b     bytes.Buffer
	inode int
}

func (a *archive) file(name string, perm int, data []byte) { a.add(name, 0o100000|perm, data) }
func (a *archive) dir(name string)                         { a.add(name, 0o040755, nil) }

func (a *archive) add(name string, mode int, data []byte) {
	a.inode++
	// magic, inode, mode, uid, gid, links, mtime, size, device (2), special
	// device (2), length of the name with its NUL, checksum
	fmt.Fprintf(&a.b, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%s\x00",
		a.inode, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name)+1, 0, name)
	a.pad()
	a.b.Write(data)
	a.pad()
}

func (a *archive) pad() {
	for a.b.Len()%4 != 0 {
		a.b.WriteByte(0)
	}
}

// end returns the finished archive.
func (a *archive) end() []byte {
	a.add("TRAILER!!!", 0, nil)
	return a.b.Bytes()
}

// pack writes a tar archive of files and trees: from where, to where. Only
// plain files, directories and symbolic links are packed.
func pack(w io.Writer, files [][2]string) error {
	t := tar.NewWriter(w)
	for _, f := range files {
		root, err := filepath.EvalSymlinks(f[0])
		if err != nil {
			return err
		}
		err = filepath.WalkDir(root, func(p string, e fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			rest, err := filepath.Rel(root, p)
			if err != nil {
				return err
			}
			return packOne(t, p, e, path.Join(".", f[1], rest))
		})
		if err != nil {
			return err
		}
	}
	return t.Close()
}

func packOne(t *tar.Writer, p string, e fs.DirEntry, name string) error {
	info, err := e.Info()
	if err != nil {
		return err
	}
	link := ""
	switch {
	case info.Mode().Type() == fs.ModeSymlink:
		if link, err = os.Readlink(p); err != nil {
			return err
		}
	case !info.Mode().IsRegular() && !info.IsDir():
		return nil
	}
	h, err := tar.FileInfoHeader(info, link)
	if err != nil {
		return err
	}
	h.Name, h.Uid, h.Gid, h.Uname, h.Gname = name, 0, 0, "", ""
	if info.IsDir() {
		h.Name += "/"
	}
	if err := t.WriteHeader(h); err != nil || !info.Mode().IsRegular() {
		return err
	}
	f, err := os.Open(p)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = io.Copy(t, f)
	return err
}

// unpack extracts what pack has written into a directory, and nothing outside
// of it. An archive without any entry is an error: an empty disk is one.
func unpack(r io.Reader, dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	entries := 0
	for t := tar.NewReader(r); ; entries++ {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			if entries == 0 {
				return errors.New("no archive")
			}
			return nil
		}
		if err != nil {
			return err
		}
		if err := unpackOne(root, h, t); err != nil {
			return err
		}
	}
}

func unpackOne(root *os.Root, h *tar.Header, r io.Reader) error {
	name := path.Clean(h.Name)
	if name == "." {
		return nil
	}
	if h.Typeflag == tar.TypeDir {
		return root.MkdirAll(name, h.FileInfo().Mode().Perm())
	}
	if err := root.MkdirAll(path.Dir(name), 0o755); err != nil {
		return err
	}
	if err := root.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	switch h.Typeflag {
	case tar.TypeSymlink:
		return root.Symlink(h.Linkname, name)
	case tar.TypeReg:
		f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, h.FileInfo().Mode().Perm())
		if err != nil {
			return err
		}
		_, err = io.Copy(f, r)
		return errors.Join(err, f.Close())
	}
	return fmt.Errorf("unpack %s: entries of type %q are not known", name, h.Typeflag)
}
