package image

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"strings"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"

	"example.com/jail/internal/faults"
)

// packing is how an archive is compressed. Its first bytes tell, whatever its
// media type says.
type packing int

const (
	plain packing = iota
	gzipped
	zstdPacked
)

func packingOf(magic []byte) packing {
	switch {
	case bytes.HasPrefix(magic, []byte{0x1f, 0x8b}):
		return gzipped
	case bytes.HasPrefix(magic, []byte{0x28, 0xb5, 0x2f, 0xfd}):
		return zstdPacked
	}
	return plain
}

// maxWindow bounds the memory of a zstd decoder; zstd --ultra --long makes 128
// MiB at most.
const maxWindow = 128 << 20

func (p packing) open(r io.Reader) (in io.Reader, end func(), err error) {
	switch p {
	case gzipped:
		in, err = gzip.NewReader(r)
		return in, func() {}, err
	case zstdPacked:
		d, err := zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(maxWindow))
		if err != nil {
			return nil, nil, err
		}
		return d, d.Close, nil
	}
	return r, func() {}, nil
}

// meter reads the bytes of an image as they are on disk.
type meter struct {
	u    *unpacker
	r    io.Reader
	hash hash.Hash // nil: nothing to check
	err  error     // what is not the image's fault
}

func (m *meter) Read(p []byte) (int, error) {
	if m.err == nil {
		m.err = m.u.ctx.Err()
	}
	if m.err != nil {
		return 0, m.err
	}
	n, err := m.r.Read(p)
	if m.hash != nil {
		m.hash.Write(p[:n])
	}
	m.u.done += int64(n)
	if m.u.progress != nil && n > 0 {
		m.u.progress(min(m.u.done, m.u.total), m.u.total)
	}
	if err != nil && !errors.Is(err, io.EOF) {
		m.err = err
	}
	return n, err
}

// blame returns what went wrong: the host's error if there was one, else that
// of the image, which may well follow from it.
func (m *meter) blame(err error) error {
	if m.err != nil {
		return m.err
	}
	return err
}

// counter reads what a decompressor makes of it, up to a limit.
type counter struct {
	r     io.Reader
	hash  hash.Hash
	left  *int64
	limit int64
}

func (c *counter) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	if c.hash != nil {
		c.hash.Write(p[:n])
	}
	*c.left -= int64(n)
	if *c.left < 0 {
		return 0, fmt.Errorf("%w: unpacks to more than %d bytes", ErrInvalid, c.limit)
	}
	return n, err
}

// patient makes a read fail when the context has ended: a file with holes
// reads on without any from the disk.
type patient struct {
	ctx context.Context
	r   io.Reader
}

func (p patient) Read(b []byte) (int, error) {
	if err := p.ctx.Err(); err != nil {
		return 0, err
	}
	return p.r.Read(b)
}

// unpacker unpacks one image.
type unpacker struct {
	ctx         context.Context
	limits      limits
	progress    func(done, total int64)
	done, total int64
}

// unpack makes the root directory and the record of an image in an empty
// directory. What it leaves on failure is the caller's to remove.
func (u *unpacker) unpack(at int, src *source, t *target) error {
	sizes, err := u.measure(src, t)
	if err != nil {
		return err
	}
	u.done, u.total = 0, 0
	for i, size := range sizes {
		u.total += size
		if i > 0 {
			u.total += size
		}
	}

	made, written := u.limits.entries, u.limits.bytes
	tr := &tree{left: &made, limit: u.limits.entries}
	for name, fd := range map[string]*int{rootName: &tr.root, trashName: &tr.trash} {
		if err := tr.mkdir(at, name, 0o755); err != nil {
			return &os.PathError{Op: "make", Path: name, Err: err}
		}
		*fd, err = unix.Openat(at, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			return &os.PathError{Op: "open", Path: name, Err: err}
		}
		defer unix.Close(*fd)
	}

	faults.Here("image.root")
	x := &extractor{tree: tr, left: &written, limit: u.limits.bytes}
	// Each of the two readings may see as much as the image may have.
	scan, apply := u.limits, u.limits
	for i, l := range t.layers {
		// What a layer hides are files of the layers below it, never its own:
		// all of that happens first. The lowest one has nothing to hide.
		if i > 0 {
			if err := u.layer(src, i, l, &scan, x.whiteout); err != nil {
				return err
			}
		}
		if err := u.layer(src, i, l, &apply, x.entry); err != nil {
			return err
		}
		faults.Here("image.layer")
	}
	if err := x.finish(t.config.Config.WorkingDir); err != nil {
		return err
	}
	faults.Here("image.finish")
	if err := removeAll(at, trashName); err != nil {
		return err
	}
	faults.Here("image.trash")
	return writeRecord(at, record{Digest: t.digest.String(), Env: t.config.Config.Env, WorkingDir: t.config.Config.WorkingDir})
}

func writeRecord(at int, r record) error {
	text, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("encode image record: %w", err)
	}
	fd, err := unix.Openat(at, recordName, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return &os.PathError{Op: "make", Path: recordName, Err: err}
	}
	f := os.NewFile(uintptr(fd), recordName)
	faults.Here("image.record")
	defer f.Close()
	if _, err := f.Write(text); err != nil {
		return err
	}
	if err := own(at, recordName, 0o600); err != nil {
		return &os.PathError{Op: "set owner of", Path: recordName, Err: err}
	}
	faults.Here("image.record.owner")
	return f.Close()
}

// measure finds every layer and its size before the first is unpacked.
func (u *unpacker) measure(src *source, t *target) ([]int64, error) {
	var sizes []int64
	for i, l := range t.layers {
		b, err := src.open(l.blob)
		if err != nil {
			return nil, fmt.Errorf("layer %d: %w", i, err)
		}
		_ = b.close()
		if l.size >= 0 && b.size != l.size {
			return nil, fmt.Errorf("%w: layer %d: %s has %d bytes, its descriptor says %d", ErrInvalid, i, l.digest, b.size, l.size)
		}
		sizes = append(sizes, b.size)
	}
	return sizes, nil
}

// layer reads a layer from end to end, shows each entry to visit, and checks
// digest and size of what it has read. left counts down what may come out of
// it.
func (u *unpacker) layer(src *source, i int, l layer, left *limits, visit func(*tar.Header, io.Reader) error) error {
	b, err := src.open(l.blob)
	if err != nil {
		return fmt.Errorf("layer %d: %w", i, err)
	}
	defer b.close()
	raw := &meter{u: u, r: b}
	if l.size >= 0 {
		raw.r, raw.hash = io.LimitReader(b, l.size), sha256.New()
	}
	if err := u.archive(raw, l, left, visit); err != nil {
		return fmt.Errorf("layer %d: %w", i, raw.blame(err))
	}
	if l.size >= 0 {
		if got := hex.EncodeToString(raw.hash.Sum(nil)); got != l.digest.Hex {
			return fmt.Errorf("%w: layer %d: %s has the digest %s", ErrInvalid, i, l.digest, got)
		}
	}
	return nil
}

func (u *unpacker) archive(raw *meter, l layer, left *limits, visit func(*tar.Header, io.Reader) error) error {
	buffered := bufio.NewReaderSize(raw, 64<<10)
	// A short one is a short layer, whatever else: the rest of it is checked.
	magic, _ := buffered.Peek(4)
	in, end, err := packingOf(magic).open(buffered)
	if err != nil {
		return fmt.Errorf("%w: %v", ErrInvalid, err)
	}
	defer end()
	out := &counter{r: in, hash: sha256.New(), left: &left.bytes, limit: u.limits.bytes}
	tr := tar.NewReader(out)
	for {
		hdr, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil && !errors.Is(err, tar.ErrInsecurePath) {
			return (&readError{err}).invalid("tar archive")
		}
		left.entries--
		if left.entries < 0 {
			return fmt.Errorf("%w: more than %d entries", ErrInvalid, u.limits.entries)
		}
		if hdr.Typeflag == tar.TypeXGlobalHeader {
			continue
		}
		if err := visit(hdr, patient{u.ctx, tr}); err != nil {
			var bad *readError
			if errors.As(err, &bad) {
				err = bad.invalid("tar archive")
			}
			return fmt.Errorf("entry %.128q: %w", hdr.Name, imageFault(err))
		}
	}
	// Digests count to the end of the file, whatever the archive ends with. The
	// decompressors read on to it as well.
	if err := copyAll(io.Discard, out); err != nil {
		return err.(*readError).invalid("rest of it")
	}
	if got := hex.EncodeToString(out.hash.Sum(nil)); got != l.diffID.Hex {
		return fmt.Errorf("%w: unpacks to the digest %s, the configuration says %s", ErrInvalid, got, l.diffID)
	}
	return nil
}

// imageFault marks what no host would allow.
func imageFault(err error) error {
	for _, errno := range []error{unix.ENAMETOOLONG, unix.ENOTDIR, unix.ELOOP, unix.EMLINK, unix.EINVAL, unix.EFBIG, unix.EILSEQ} {
		if errors.Is(err, errno) && !errors.Is(err, ErrInvalid) {
			return fmt.Errorf("%w: %w", ErrInvalid, err)
		}
	}
	return err
}

// extractor applies the entries of layers to a tree.
type extractor struct {
	*tree
	left  *int64 // how many bytes of files may still be written
	limit int64
}

// The names with which a layer hides files of those below it.
const (
	whiteoutPrefix = ".wh."
	whiteoutMeta   = ".wh..wh."
	whiteoutOpaque = ".wh..wh..opq"
)

// hides takes a whiteout's name apart. Parts that are the layer's own book
// keeping (of aufs, long ago) are told apart from files by neither.
func hides(parts []string) (is bool, hidden string, opaque bool, err error) {
	for i, part := range parts {
		if !strings.HasPrefix(part, whiteoutPrefix) {
			continue
		}
		last := i == len(parts)-1
		switch {
		case last && part == whiteoutOpaque:
			return true, "", true, nil
		case strings.HasPrefix(part, whiteoutMeta):
			return true, "", false, nil
		case !last:
			return true, "", false, fmt.Errorf("%w: lies in a whiteout", ErrInvalid)
		}
		hidden = strings.TrimPrefix(part, whiteoutPrefix)
		if hidden == "" || hidden == "." || hidden == ".." {
			return true, "", false, fmt.Errorf("%w: whiteout of %q", ErrInvalid, hidden)
		}
		return true, hidden, false, nil
	}
	return false, "", false, nil
}

// whiteout hides files of the layers below, if the entry says so. One whose
// directory is not there, or is a symbolic link that the layer is about to
// replace, has nothing to hide.
func (x *extractor) whiteout(hdr *tar.Header, _ io.Reader) error {
	parts, err := splitName(hdr.Name)
	if err != nil {
		return err
	}
	is, hidden, opaque, err := hides(parts)
	if err != nil || !is || hidden == "" && !opaque {
		return err
	}
	at, err := x.find(parts[:len(parts)-1], beneath)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ENOTDIR) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(at)
	if opaque {
		return x.clear(at)
	}
	return x.remove(at, hidden)
}

// entry puts one entry of a layer into the tree.
func (x *extractor) entry(hdr *tar.Header, content io.Reader) error {
	parts, err := splitName(hdr.Name)
	if err != nil {
		return err
	}
	if is, _, _, err := hides(parts); is || err != nil {
		return err
	}
	if len(parts) == 0 {
		if hdr.Typeflag != tar.TypeDir {
			return fmt.Errorf("%w: the root is no directory", ErrInvalid)
		}
		return nil
	}
	dir, name := parts[:len(parts)-1], parts[len(parts)-1]
	at, err := x.make(dir)
	if err != nil {
		return err
	}
	defer unix.Close(at)
	mode := uint32(hdr.Mode) & 0o777
	switch hdr.Typeflag {
	case tar.TypeDir:
		return x.directory(at, name, mode|0o700)
	case tar.TypeReg, tar.TypeGNUSparse, tar.TypeCont:
		// A file with holes is larger than what the archive has of it.
		if *x.left -= hdr.Size; *x.left < 0 {
			return fmt.Errorf("%w: files of more than %d bytes", ErrInvalid, x.limit)
		}
		return x.file(at, name, mode, hdr.ModTime, content)
	case tar.TypeSymlink:
		if hdr.Linkname == "" || strings.IndexByte(hdr.Linkname, 0) >= 0 {
			return fmt.Errorf("%w: symbolic link to %.128q", ErrInvalid, hdr.Linkname)
		}
		return x.symlink(at, name, hdr.Linkname)
	case tar.TypeLink:
		to, err := splitName(hdr.Linkname)
		if err != nil {
			return fmt.Errorf("hard link: %w", err)
		}
		return x.link(at, name, to)
	case tar.TypeChar, tar.TypeBlock, tar.TypeFifo:
		// It hides what is below it all the same.
		return x.remove(at, name)
	}
	return fmt.Errorf("%w: unknown type %q", ErrInvalid, hdr.Typeflag)
}

// finish makes what every root must have. A link in its place would lead a
// mount astray.
func (x *extractor) finish(workingDir string) error {
	for _, name := range []string{"proc", "sys", "dev", "tmp"} {
		st, err := stat(x.root, name)
		switch {
		case errors.Is(err, unix.ENOENT):
			if err := x.mkdir(x.root, name, 0o755); err != nil {
				return fmt.Errorf("make /%s of the image: %w", name, err)
			}
		case err != nil:
			return fmt.Errorf("/%s of the image: %w", name, err)
		case st.Mode&unix.S_IFMT != unix.S_IFDIR:
			return fmt.Errorf("%w: /%s is no directory", ErrInvalid, name)
		}
	}
	parts, err := splitName(workingDir)
	if err != nil {
		return err
	}
	at, err := x.make(parts)
	if err != nil {
		return fmt.Errorf("working directory %.128q: %w", workingDir, imageFault(err))
	}
	unix.Close(at)
	return nil
}
