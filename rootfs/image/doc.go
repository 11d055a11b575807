// Package image turns an OCI image on disk into a root directory, unpacked once
// per image into a store that belongs to root alone.
//
// Trap: an [Image] holds a lock on its directory until [Image.Close] or the end
// of the process. A launcher that closes it while jails still run from it lets
// [Store.Drop] take the files away under them.
//
// An image is a directory in OCI image layout, or a tar archive of one, or an
// archive as docker save writes it; archives and layers may be plain, gzip or
// zstd. Nothing is fetched: no network, no registries.
//
// Promised: an image is hostile input. Whatever it holds, nothing outside of
// the store is created, changed or removed, and a failed unpack leaves nothing.
// Every blob that is used has the size and digest that its referrer says, and
// every layer the digest that the image's configuration says. All that is
// unpacked belongs to root:root, has no set-uid, set-gid or sticky bit and no
// extended attribute; device nodes, FIFOs and sockets are left out. A directory
// has at least the mode 0700. At most 8 GiB, 1,000,000 files and directories,
// and 512 layers are unpacked. The root has the directories /proc, /sys, /dev
// and /tmp, and the image's working directory.
//
// Symbolic links are kept as they are, absolute ones too, and mean what they
// mean inside of the root. An entry whose directory is such a link lands where
// the link leads inside of the root; an entry with ".." in its name is refused.
//
// Not promised: owners other than root and times of directories are lost.
// Nothing is written through to the disk (no fsync): after a power failure, run
// Drop. An archive that is itself compressed has no index, so the store
// remembers which image it held by inode, size and times of the file.
package image
