// Package rootfs builds the root of a jail once and keeps it as a template: a
// mount namespace without any process in it, from which every jail of the same
// shape takes a private copy.
//
// Trap: importing this package adds an init function that takes over the
// process when it is the package's own helper (see below). A program that
// embeds the launcher gets it for free and needs no call; it must not call
// os.Exit or block in an init of its own before.
//
// A template is built by libcontainer, in a helper process (the running binary
// re-executed) whose own mount namespace is private, so that no thread of the
// embedding program ever enters another namespace. What the helper leaves behind
// is one descriptor of the finished namespace. [Cache.Open] keeps it for the
// life of the process and pins it by a bind mount in a root-only directory, so
// that later processes need not build it again.
//
// Promised: everything of the host in a template is read-only (recursively),
// nosuid and nodev unless a bind was asked to be writable; nothing is created
// in a directory that is used as root or as bind source; a root that would lead
// a mount astray (a /proc that is a symbolic link) is refused; a pin whose
// owner, mode, kind or identity is off is rebuilt, not used.
//
// Not promised: a template is a snapshot of the mount table. A host file that is
// bound and later replaced by rename stays the old one until the template is
// rebuilt (its name holds the inode of each source, so the next [Cache.Open]
// builds anew). /proc, /tmp and /dev/shm are mounted per jail by the init and
// are not part of a template.
package rootfs
