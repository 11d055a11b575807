package image

import (
	"archive/tar"
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"
)

const (
	// maxJSON bounds each index, manifest and configuration, in bytes.
	maxJSON = 4 << 20
	// maxDocuments bounds all of them together, in bytes, and maxElements what
	// they become in memory: a descriptor takes some 140 bytes, and 3 bytes of
	// JSON are enough for one.
	maxDocuments = 32 << 20
	maxElements  = 200_000
	// maxMembers and maxMemberName bound the table of an archive. Longer names
	// are no part of an image.
	maxMembers    = 1 << 16
	maxMemberName = 256
)

const layoutFile, indexFile, dockerFile = "oci-layout", "index.json", "manifest.json"

// IsImage tells whether ref, with or without a tag or digest, names something
// that [Store.Open] could open: a directory with an oci-layout file in it, or a
// regular file, which no plain root directory is. It reads no content.
func IsImage(ref string) bool {
	file, _, err := parseRef(ref)
	if err != nil {
		return false
	}
	info, err := os.Stat(file)
	if err != nil || !info.IsDir() {
		return err == nil && info.Mode().IsRegular()
	}
	info, err = os.Lstat(file + "/" + layoutFile)
	return err == nil && info.Mode().IsRegular()
}

// selection is the part of a ref behind the path.
type selection struct {
	tag    string
	digest v1.Hash
}

// parseRef splits a ref where its path ends, which is known by what exists:
// a path may have colons of its own, and a tag may be a whole name with them.
func parseRef(ref string) (file string, want selection, err error) {
	if ref == "" {
		return "", want, fmt.Errorf("%w: empty path", ErrInvalid)
	}
	_, missing := os.Stat(ref)
	if missing == nil {
		return ref, want, nil
	}
	if i := strings.LastIndexByte(ref, '@'); i > 0 && exists(ref[:i]) {
		want.digest, err = v1.NewHash(ref[i+1:])
		if err != nil {
			return "", want, fmt.Errorf("%w: digest %q: %v", ErrInvalid, ref[i+1:], err)
		}
		return ref[:i], want, nil
	}
	for i := strings.LastIndexByte(ref, ':'); i > 0; i = strings.LastIndexByte(ref[:i], ':') {
		if !exists(ref[:i]) {
			continue
		}
		want.tag = ref[i+1:]
		if want.tag == "" {
			return "", want, fmt.Errorf("%w: empty tag", ErrInvalid)
		}
		return ref[:i], want, nil
	}
	return "", want, missing
}

func exists(file string) bool {
	_, err := os.Stat(file)
	return err == nil
}

// source is where an image's blobs are: a layout directory, or an archive with
// a table of its members.
type source struct {
	file    *os.File
	id      unix.Stat_t
	packing packing
	spooled *os.File
	members map[string]member // nil for a directory

	documents, elements int // read so far, by document
}

type member struct {
	offset, size int64
	link         string // name of another member
}

func openSource(file string) (*source, error) {
	// O_NONBLOCK: a FIFO must not block the open.
	fd, err := unix.Open(file, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: file, Err: err}
	}
	s := &source{file: os.NewFile(uintptr(fd), file)}
	if err := s.identify(); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

func (s *source) identify() error {
	if err := unix.Fstat(int(s.file.Fd()), &s.id); err != nil {
		return &os.PathError{Op: "stat", Path: s.file.Name(), Err: err}
	}
	switch s.id.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		return nil
	case unix.S_IFREG:
	default:
		return fmt.Errorf("%w: neither directory nor regular file", ErrInvalid)
	}
	magic := make([]byte, 4)
	n, err := s.file.ReadAt(magic, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	s.packing = packingOf(magic[:n])
	if s.packing == plain {
		s.members, err = readMembers(s.file)
	}
	return err
}

func (s *source) Close() {
	s.file.Close()
	if s.spooled != nil {
		s.spooled.Close()
	}
}

// compressed tells that the archive has to be decompressed into a spool before
// anything can be found in it.
func (s *source) compressed() bool { return s.packing != plain }

// unchanged tells whether the file is what it was when it was opened.
func (s *source) unchanged() bool {
	var now unix.Stat_t
	err := unix.Fstat(int(s.file.Fd()), &now)
	return err == nil && now.Size == s.id.Size && now.Mtim == s.id.Mtim && now.Ctim == s.id.Ctim
}

// readMembers makes the table of an archive. Of two members with one name the
// later counts, as for tar itself; each is checked by its digest when it is
// used.
func readMembers(f *os.File) (map[string]member, error) {
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	members := map[string]member{}
	tr := tar.NewReader(f)
	for n := 0; ; n++ {
		hdr, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return members, nil
		}
		if err != nil && !errors.Is(err, tar.ErrInsecurePath) {
			var host *os.PathError
			if errors.As(err, &host) {
				return nil, err
			}
			return nil, fmt.Errorf("%w: not a tar archive: %v", ErrInvalid, err)
		}
		if n == maxMembers {
			return nil, fmt.Errorf("%w: archive has more than %d members", ErrInvalid, maxMembers)
		}
		if len(hdr.Name) > maxMemberName || len(hdr.Linkname) > maxMemberName {
			continue
		}
		name := path.Clean(hdr.Name)
		switch hdr.Typeflag {
		case tar.TypeReg:
			// The reader takes whole blocks and no more.
			offset, err := f.Seek(0, io.SeekCurrent)
			if err != nil {
				return nil, err
			}
			members[name] = member{offset: offset, size: hdr.Size}
		case tar.TypeSymlink:
			// Old versions of docker save write a layer once, and links.
			members[name] = member{link: path.Join(path.Dir(name), hdr.Linkname)}
		}
	}
}

// blob is an open part of a source.
type blob struct {
	io.Reader
	size  int64
	close func() error
}

// open opens a part of the image by its path in the layout or archive. Links
// that lead out of the layout are not followed.
func (s *source) open(name string) (*blob, error) {
	if s.members != nil {
		m, ok := s.members[name]
		for hops := 0; ok && m.link != "" && hops < 8; hops++ {
			m, ok = s.members[m.link]
		}
		if !ok || m.link != "" {
			return nil, fmt.Errorf("%w: archive has no file %q", ErrInvalid, name)
		}
		f := s.file
		if s.spooled != nil {
			f = s.spooled
		}
		return &blob{Reader: io.NewSectionReader(f, m.offset, m.size), size: m.size, close: func() error { return nil }}, nil
	}
	fd, err := openat2(int(s.file.Fd()), name, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, unix.RESOLVE_BENEATH|unix.RESOLVE_NO_MAGICLINKS)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EXDEV) || errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ENXIO) {
		return nil, fmt.Errorf("%w: layout has no file %q: %v", ErrInvalid, name, err)
	}
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path.Join(s.file.Name(), name), Err: err}
	}
	f := os.NewFile(uintptr(fd), path.Join(s.file.Name(), name))
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		f.Close()
		return nil, &os.PathError{Op: "stat", Path: f.Name(), Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		f.Close()
		return nil, fmt.Errorf("%w: %q is no regular file", ErrInvalid, name)
	}
	return &blob{Reader: f, size: st.Size, close: f.Close}, nil
}

// has tells whether the image has such a part, whatever it is.
func (s *source) has(name string) bool {
	b, err := s.open(name)
	if err == nil {
		_ = b.close()
	}
	return err == nil
}

// document reads a JSON part. Its memory is bounded before it is parsed.
func (s *source) document(name string) ([]byte, error) {
	b, err := s.open(name)
	if err != nil {
		return nil, err
	}
	defer b.close()
	text, err := readCapped(b, maxJSON)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	s.documents += len(text)
	s.elements += bytes.Count(text, []byte(","))
	if s.documents > maxDocuments || s.elements > maxElements {
		return nil, fmt.Errorf("%w: indexes, manifests and configurations of %d bytes and %d elements, limits %d and %d", ErrInvalid, s.documents, s.elements, maxDocuments, maxElements)
	}
	return text, nil
}

func readCapped(r io.Reader, limit int64) ([]byte, error) {
	text, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err == nil && int64(len(text)) > limit {
		err = fmt.Errorf("%w: more than %d bytes", ErrInvalid, limit)
	}
	return text, err
}

// verified reads the JSON part that a descriptor points to.
func (s *source) verified(d v1.Descriptor) ([]byte, error) {
	text, err := s.document(blobName(d.Digest))
	if err != nil {
		return nil, err
	}
	if int64(len(text)) != d.Size {
		return nil, fmt.Errorf("%w: %s has %d bytes, its descriptor says %d", ErrInvalid, d.Digest, len(text), d.Size)
	}
	if got := digestOf(text); got != d.Digest {
		return nil, fmt.Errorf("%w: %s has the digest %s", ErrInvalid, d.Digest, got)
	}
	return text, nil
}

// digestOf is a sha256: the parser takes no other digests.
func digestOf(text []byte) v1.Hash {
	sum := sha256.Sum256(text)
	return v1.Hash{Algorithm: "sha256", Hex: hex.EncodeToString(sum[:])}
}

func blobName(h v1.Hash) string { return "blobs/" + h.Algorithm + "/" + h.Hex }

// spool decompresses an archive into a file of the store without a name, and
// makes the table of its members.
func (u *unpacker) spool(d *storeDir, s *source) error {
	u.total = s.id.Size
	raw := &meter{u: u, r: io.NewSectionReader(s.file, 0, s.id.Size)}
	in, end, err := s.packing.open(bufio.NewReaderSize(raw, 64<<10))
	if err != nil {
		return raw.blame(fmt.Errorf("%w: archive: %v", ErrInvalid, err))
	}
	defer end()
	f, err := d.scratch(u.ctx)
	if err != nil {
		return err
	}
	s.spooled = f
	left := u.limits.bytes
	if err := copyAll(f, &counter{r: in, left: &left, limit: u.limits.bytes}); err != nil {
		var bad *readError
		if errors.As(err, &bad) {
			return raw.blame(bad.invalid("archive"))
		}
		return err
	}
	s.members, err = readMembers(f)
	return err
}
