package rootfs

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/runc/libcontainer"
	"github.com/opencontainers/runc/libcontainer/configs"
	_ "github.com/opencontainers/runc/libcontainer/nsenter" // runs before Go in libcontainer's own child
	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"example.com/jail/internal/faults"
)

// How the helper knows itself: by argv[0] and by an environment variable, both.
const (
	helperName = "jail-template"
	helperEnv  = "_JAIL_TEMPLATE"
	helperWork = "_JAIL_TEMPLATE_WORK"
)

// helperSocket is the descriptor on which the helper sends its reply.
const helperSocket = 3

func init() {
	if os.Getenv("_LIBCONTAINER_INITPIPE") != "" && len(os.Args) > 1 && os.Args[1] == "init" {
		runtime.GOMAXPROCS(1)
		runtime.LockOSThread()
		// It will wait for its exec: for ever, if the helper is killed.
		_ = unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0)
		libcontainer.Init()
	}
	if os.Getenv(helperEnv) != "1" {
		return
	}
	if os.Args[0] == helperName {
		// libcontainer moves a thread into the template for good; it must
		// not be the main one, whose /proc/self links others would follow.
		// ptrace, too, wants one thread.
		runtime.LockOSThread()
		helper()
		os.Exit(0)
	}
}

// reply is what the helper sends, with the template's descriptor if Err is "".
type reply struct {
	Err string
	// Bad says that the root that was asked for is at fault, not the host.
	Bad bool
}

// helperTimeout bounds the building of a template: a source on a dead network
// file system must not hang the launcher.
const helperTimeout = 30 * time.Second

// build runs the helper and returns the finished mount namespace.
func (p *plan) build(work string) (ns *os.File, err error) {
	in, err := json.Marshal(p)
	if err != nil {
		return nil, fmt.Errorf("encode root: %w", err)
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("socket for the template helper: %w", err)
	}
	ours, theirs := pair[0], os.NewFile(uintptr(pair[1]), "template helper")
	defer unix.Close(ours)

	var stderr limitedBuffer
	cmd := exec.Cmd{
		Path:       "/proc/self/exe",
		Args:       []string{helperName},
		Env:        append(faults.Env(), helperEnv+"=1", helperWork+"="+work, "GOMAXPROCS=2", "GOGC=off"),
		Stdin:      strings.NewReader(string(in)),
		Stderr:     &stderr,
		ExtraFiles: []*os.File{theirs},
		// Everything that the helper mounts stays in a namespace of its own. The
		// cgroup namespace is for a mount of cgroup2: in the initial one it
		// would set the options of the host's hierarchy (nsdelegate and others,
		// cgroups(7)).
		SysProcAttr: &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNS | unix.CLONE_NEWCGROUP, Setpgid: true},
		WaitDelay:   time.Second,
	}
	if err := cmd.Start(); err != nil {
		theirs.Close()
		return nil, fmt.Errorf("start template helper: %w", err)
	}
	theirs.Close()
	faults.Here("rootfs.helper")
	ended := make(chan error, 1)
	go func() {
		kill := time.AfterFunc(helperTimeout, func() { _ = unix.Kill(-cmd.Process.Pid, unix.SIGKILL) })
		defer kill.Stop()
		ended <- cmd.Wait()
	}()

	r, fd, err := receiveReply(ours)
	faults.Here("rootfs.reply")
	switch {
	case err != nil:
		err = fmt.Errorf("template helper: %w (%v): %s", err, <-ended, stderr.String())
	case r.Err != "" && r.Bad:
		err = fmt.Errorf("%w: %s", ErrInvalid, r.Err)
	case r.Err != "":
		err = errors.New(r.Err)
	case fd < 0:
		err = errors.New("template helper sent no namespace")
	default:
		// The helper has its clean-up to do; nobody has to wait for that.
		return os.NewFile(uintptr(fd), "template"), nil
	}
	if fd >= 0 {
		unix.Close(fd)
	}
	return nil, err
}

// receiveReply reads the helper's one message. A helper that dies without it
// shows as an end of file.
func receiveReply(socket int) (r reply, fd int, err error) {
	buf, oob := make([]byte, 64<<10), make([]byte, unix.CmsgSpace(4))
	var n, oobn int
	for {
		n, oobn, _, _, err = unix.Recvmsg(socket, buf, oob, unix.MSG_CMSG_CLOEXEC)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		return r, -1, os.NewSyscallError("recvmsg", err)
	}
	fd = parseFD(oob[:oobn])
	if n == 0 {
		return r, fd, io.ErrUnexpectedEOF
	}
	return r, fd, json.Unmarshal(buf[:n], &r)
}

func parseFD(oob []byte) int {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil || len(msgs) != 1 {
		return -1
	}
	fds, err := unix.ParseUnixRights(&msgs[0])
	if err != nil || len(fds) != 1 {
		return -1
	}
	return fds[0]
}

// limitedBuffer keeps the first 4 KiB of what a helper complains about.
type limitedBuffer struct{ strings.Builder }

func (b *limitedBuffer) Write(p []byte) (int, error) {
	if room := 4096 - b.Len(); room > 0 {
		b.Builder.Write(p[:min(len(p), room)])
	}
	return len(p), nil
}

// ---- the helper's own side ----

func helper() {
	logrus.SetOutput(io.Discard)
	// As the launcher does, which may be gone by then.
	time.AfterFunc(helperTimeout, func() { os.Exit(1) })
	var p plan
	var r reply
	ns, end := -1, func() {}
	err := json.NewDecoder(os.Stdin).Decode(&p)
	if err == nil {
		ns, end, err = p.construct(os.Getenv(helperWork))
		faults.Here("helper.construct")
	}
	// After the reply: nobody waits for the clean-up.
	defer end()
	var oob []byte
	if err != nil {
		r.Err, r.Bad = err.Error(), errors.Is(err, ErrInvalid)
		if r.Bad {
			r.Err = strings.TrimPrefix(r.Err, ErrInvalid.Error()+": ")
		}
	} else {
		oob = unix.UnixRights(ns)
	}
	b, _ := json.Marshal(r) // strings and booleans only
	// A launcher that is gone wants no reply.
	_ = unix.Sendmsg(helperSocket, b, oob, nil, unix.MSG_NOSIGNAL)
	faults.Here("helper.send")
	unix.Close(helperSocket)
}

// construct builds the root below work, an existing directory that a private
// tmpfs covers, and returns a descriptor of the namespace that holds it. The
// caller calls end once it has made use of that.
func (p *plan) construct(work string) (ns int, end func(), err error) {
	end = func() {}
	if err := mount("tmpfs", work, "tmpfs", unix.MS_NOSUID|unix.MS_NOEXEC, "mode=0700"); err != nil {
		return -1, end, err
	}
	faults.Here("helper.work")
	root, dev, state := filepath.Join(work, "root"), filepath.Join(work, "dev"), filepath.Join(work, "state")
	for _, d := range []string{root, dev, state} {
		if err := os.Mkdir(d, 0o755); err != nil {
			return -1, end, err
		}
	}
	if err := p.layDev(dev); err != nil {
		return -1, end, fmt.Errorf("make /dev: %w", err)
	}
	faults.Here("helper.dev")
	if err := p.layRoot(root); err != nil {
		return -1, end, err
	}
	faults.Here("helper.root")
	if err := p.checkTargets(root); err != nil {
		return -1, end, err
	}
	for i := range p.Binds {
		var err error
		if p.Binds[i].IDMap, err = p.idmapWorks(p.Binds[i]); err != nil {
			return -1, end, err
		}
		faults.Here("helper.idmap")
	}

	if err := readOnlyCgroups(); err != nil {
		return -1, end, err
	}
	faults.Here("helper.cgroups")
	c, err := libcontainer.Create(state, "template", p.config(root, dev))
	if err != nil {
		return -1, end, fmt.Errorf("create template: %w", err)
	}
	faults.Here("helper.create")
	no := false
	process := &libcontainer.Process{Args: []string{"/proc/self/exe"}, Env: []string{}, Cwd: "/", Init: true, NoNewPrivileges: &no}
	if err := c.Start(process); err != nil {
		return -1, end, fmt.Errorf("build template: %w", err)
	}
	faults.Here("helper.start")
	// It waits at its exec fifo with the root complete, and is never let on.
	end = func() {
		_ = process.Signal(unix.SIGKILL)
		_, _ = process.Wait()
		faults.Here("helper.end")
	}
	pid, err := process.Pid()
	if err != nil {
		return -1, end, fmt.Errorf("build template: %w", err)
	}
	name := fmt.Sprintf("/proc/%d/ns/mnt", pid)
	ns, err = unix.Open(name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, end, &os.PathError{Op: "open", Path: name, Err: err}
	}
	return ns, end, nil
}

// readOnlyCgroups shows libcontainer a cgroup tree in which it can make nothing.
// It has no say in cgroups: told to tolerate that (Rootless), it neither leaves
// a directory behind nor moves its child, which would wait for a grace period.
// The mount is the helper's private one, on every kind of host.
func readOnlyCgroups() error {
	const dir = "/sys/fs/cgroup"
	// A bind of what is mounted already takes 0.05 ms, a mount of its own 6 to
	// 10 (measured on Linux 6.18).
	tree := ""
	for _, at := range []string{dir, dir + "/unified"} {
		var fs unix.Statfs_t
		if unix.Statfs(at, &fs) == nil && fs.Type == unix.CGROUP2_SUPER_MAGIC {
			tree = at
		}
	}
	var err error
	if tree != "" {
		err = mount(tree, dir, "", unix.MS_BIND, "")
	} else {
		err = mount("cgroup2", dir, "cgroup2", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
	}
	if err != nil {
		return err
	}
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}
	if err := unix.MountSetattr(unix.AT_FDCWD, dir, 0, &attr); err != nil {
		return &os.PathError{Op: "mount_setattr", Path: dir, Err: err}
	}
	return nil
}

func mount(source, target, fstype string, flags uintptr, data string) error {
	if err := unix.Mount(source, target, fstype, flags, data); err != nil {
		return &os.PathError{Op: "mount " + fstype + " on", Path: target, Err: err}
	}
	return nil
}

// layDev fills dev with the few nodes that a jail has. The tmpfs of the work
// directory allows device nodes; the template mounts it read-only.
func (p *plan) layDev(dev string) error {
	for name, id := range map[string]uint32{"null": 3, "zero": 5, "full": 7, "random": 8, "urandom": 9} {
		file := filepath.Join(dev, name)
		if err := unix.Mknod(file, unix.S_IFCHR|0o666, int(unix.Mkdev(1, id))); err == nil {
			err = os.Chmod(file, 0o666) // the umask is not the helper's to trust
			if err != nil {
				return err
			}
			continue
		}
		// Inside a container that may not make nodes, the host's are bound.
		if err := os.WriteFile(file, nil, 0o600); err != nil {
			return err
		}
		if err := mount("/dev/"+name, file, "", unix.MS_BIND, ""); err != nil {
			return err
		}
	}
	for name, to := range map[string]string{
		"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2",
	} {
		if err := os.Symlink(to, filepath.Join(dev, name)); err != nil {
			return err
		}
	}
	own := filepath.Join(dev, filepath.Base(FilesDir))
	for _, d := range []string{filepath.Join(dev, "shm"), own, filepath.Join(own, "bind")} {
		if err := os.Mkdir(d, 0o755); err != nil {
			return err
		}
	}
	for _, f := range p.Files {
		if err := os.WriteFile(filepath.Join(own, f.Name), f.Data, 0o444); err != nil {
			return err
		}
	}
	for i, b := range p.Binds {
		if b.Late {
			if err := placeholder(filepath.Join(own, "bind", strconv.Itoa(i)), b.Directory); err != nil {
				return err
			}
		}
	}
	return nil
}

func placeholder(file string, directory bool) error {
	if directory {
		return os.MkdirAll(file, 0o755)
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return err
	}
	f, err := os.OpenFile(file, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	if errors.Is(err, os.ErrExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return f.Close()
}

// layRoot puts the root at root: the host view's skeleton, or a read-only view
// of a directory.
func (p *plan) layRoot(root string) error {
	if p.Dir == "" {
		if err := layHost(root, p.Host); err != nil {
			return fmt.Errorf("lay out the host view: %w", err)
		}
		for _, b := range p.Binds {
			if b.Late || p.coveredBy(b.Target) != "" {
				continue
			}
			if err := placeholder(filepath.Join(root, b.Target), b.Directory); err != nil {
				return fmt.Errorf("make bind target: %w", err)
			}
		}
		// The work directory's tmpfs allows devices, for /dev alone.
		if err := mount(root, root, "", unix.MS_BIND, ""); err != nil {
			return err
		}
		attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_NODEV}
		if err := unix.MountSetattr(unix.AT_FDCWD, root, 0, &attr); err != nil {
			return &os.PathError{Op: "mount_setattr", Path: root, Err: err}
		}
		return nil
	}
	fd, err := unix.OpenTree(unix.AT_FDCWD, p.Dir, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return &os.PathError{Op: "open_tree", Path: p.Dir, Err: err}
	}
	defer unix.Close(fd)
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV, Propagation: unix.MS_PRIVATE}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return &os.PathError{Op: "mount_setattr", Path: p.Dir, Err: err}
	}
	userns, err := p.ownerNamespace(p.DirID)
	if err != nil {
		return err
	}
	defer unix.Close(userns)
	// Where the file system has no idmapped mounts, the program has the rights
	// of "others" in it.
	_ = setIDMap(fd, userns)
	if err := unix.MoveMount(fd, "", unix.AT_FDCWD, root, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return &os.PathError{Op: "move_mount", Path: root, Err: err}
	}
	return nil
}

func setIDMap(mnt, userns int) error {
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(userns)}
	return unix.MountSetattr(mnt, "", unix.AT_EMPTY_PATH, &attr)
}

// coveredBy returns the part of the host that is mounted where target lies, so
// that the target has to exist there.
func (p *plan) coveredBy(target string) string {
	for _, e := range p.Host {
		if e.Kind == hostBind && below(target, e.Path) {
			return e.Path
		}
		if e.Kind == hostLink && (below(target, e.Path) || target == e.Path) {
			return e.Path
		}
	}
	for _, b := range p.Binds {
		if b.Target == target {
			break
		}
		if below(target, b.Target) {
			return b.Target
		}
	}
	return ""
}

// checkTargets proves that everything will be mounted where it should: no
// symbolic link on the way, nothing to be created in a directory of the host.
// libcontainer checks most of it again by handle (CVE-2019-19921,
// CVE-2021-30465); this one runs first, so that nothing has been mounted yet
// and the error says what to mend.
func (p *plan) checkTargets(root string) error {
	dir, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: root, Err: err}
	}
	defer unix.Close(dir)
	need := func(at int, inside, target string, directory bool, fix string) error {
		fd, err := unix.Openat2(at, "."+inside, &unix.OpenHow{
			Flags:   unix.O_PATH | unix.O_CLOEXEC,
			Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
		})
		switch {
		case errors.Is(err, unix.ELOOP):
			return fmt.Errorf("%w: %s of the root leads over a symbolic link", ErrInvalid, target)
		case err != nil:
			return fmt.Errorf("%w: %s of the root: %v; %s", ErrInvalid, target, err, fix)
		}
		defer unix.Close(fd)
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			return &os.PathError{Op: "stat", Path: target, Err: err}
		}
		if is := st.Mode&unix.S_IFMT == unix.S_IFDIR; is != directory {
			return fmt.Errorf("%w: %s of the root: want directory %t, have %t", ErrInvalid, target, directory, is)
		}
		return nil
	}
	for _, d := range []string{"/proc", "/dev", "/tmp"} {
		if err := need(dir, d, d, true, "make the directory in it"); err != nil {
			return err
		}
	}
	covers := p.covers()
	for _, b := range p.Binds {
		if b.Late {
			continue
		}
		at, inside := dir, b.Target
		for _, cover := range covers {
			if !below(b.Target, cover.target) {
				continue
			}
			fd, err := unix.Open(cover.source, unix.O_PATH|unix.O_CLOEXEC, 0)
			if err != nil {
				return &os.PathError{Op: "open", Path: cover.source, Err: err}
			}
			defer unix.Close(fd)
			at, inside = fd, strings.TrimPrefix(b.Target, cover.target)
		}
		if err := need(at, inside, b.Target, b.Directory, "make it there first, or bind to another path"); err != nil {
			return err
		}
		if b.Directory {
			covers = append(covers, cover{b.Target, b.Source})
		}
	}
	return nil
}

type cover struct{ target, source string }

// covers lists what of the host view is mounted over the root before the binds.
func (p *plan) covers() []cover {
	var list []cover
	for _, e := range p.Host {
		if e.Kind == hostBind {
			list = append(list, cover{e.Path, e.Path})
		}
	}
	return list
}

// ownerNamespace returns a user namespace whose map turns one uid and gid of
// the disk into the template's host id, for idmapped mounts. It outlives the
// process that it was made with.
func (p *plan) ownerNamespace(id identity) (int, error) {
	cmd := exec.Cmd{
		Path: "/proc/self/exe", Args: []string{helperName},
		SysProcAttr: &syscall.SysProcAttr{
			Cloneflags:  unix.CLONE_NEWUSER,
			UidMappings: []syscall.SysProcIDMap{{ContainerID: int(id.UID), HostID: int(p.OwnerID), Size: 1}},
			GidMappings: []syscall.SysProcIDMap{{ContainerID: int(id.GID), HostID: int(p.OwnerID), Size: 1}},
			// Stopped at its exec: only its namespace is wanted.
			Ptrace: true,
		},
	}
	if err := cmd.Start(); err != nil {
		return -1, fmt.Errorf("start process for an idmapped mount: %w", err)
	}
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}()
	faults.Here("helper.owner")
	name := fmt.Sprintf("/proc/%d/ns/user", cmd.Process.Pid)
	fd, err := unix.Open(name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, &os.PathError{Op: "open", Path: name, Err: err}
	}
	return fd, nil
}

// idmapWorks asks the kernel whether the file system of a source allows
// idmapped mounts (FUSE and some network file systems do not). Where it does
// not, the program has the rights of "others" on the source.
func (p *plan) idmapWorks(b plannedBind) (bool, error) {
	userns, err := p.ownerNamespace(b.ID)
	if err != nil {
		return false, err
	}
	defer unix.Close(userns)
	mnt, err := unix.OpenTree(unix.AT_FDCWD, b.Source, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return false, &os.PathError{Op: "open_tree", Path: b.Source, Err: err}
	}
	defer unix.Close(mnt)
	return setIDMap(mnt, userns) == nil, nil
}

// config is the template in libcontainer's words.
func (p *plan) config(root, dev string) *configs.Config {
	const locked = unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV
	bind := func(source, target string, attrs uint64, id *configs.MountIDMapping) *configs.Mount {
		return &configs.Mount{
			Source: source, Destination: target, Device: "bind",
			Flags:            unix.MS_BIND | unix.MS_REC,
			PropagationFlags: []int{unix.MS_PRIVATE | unix.MS_REC},
			// Recursive, unlike the flags of a bind mount: what is mounted
			// below a source is as read-only as the source.
			RecAttr:   &unix.MountAttr{Attr_set: attrs},
			IDMapping: id,
		}
	}
	mounts := []*configs.Mount{
		// Stays unmasked: a jail may mount a /proc of its own only where one
		// is fully visible. It belongs to the template's dead pid namespace.
		{Source: "proc", Destination: "/proc", Device: "proc", Flags: unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC},
		bind(dev, "/dev", unix.MOUNT_ATTR_RDONLY|unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NOEXEC, nil),
	}
	for _, e := range p.Host {
		if e.Kind == hostBind {
			mounts = append(mounts, bind(e.Path, e.Path, locked|unix.MOUNT_ATTR_RDONLY, nil))
		}
	}
	for i, b := range p.Binds {
		attrs := uint64(locked)
		if !b.Writable {
			attrs |= unix.MOUNT_ATTR_RDONLY
		}
		target := b.Target
		if b.Late {
			target = fmt.Sprintf("%s/%d", lateDir, i)
		}
		var id *configs.MountIDMapping
		if b.IDMap {
			id = &configs.MountIDMapping{
				UIDMappings: []configs.IDMap{{ContainerID: int64(b.ID.UID), HostID: int64(p.OwnerID), Size: 1}},
				GIDMappings: []configs.IDMap{{ContainerID: int64(b.ID.GID), HostID: int64(p.OwnerID), Size: 1}},
			}
		}
		mounts = append(mounts, bind(b.Source, target, attrs, id))
	}
	cfg := &configs.Config{
		Rootfs:          root,
		Readonlyfs:      true,
		RootPropagation: unix.MS_PRIVATE | unix.MS_REC,
		Mounts:          mounts,
		Namespaces:      configs.Namespaces{{Type: configs.NEWNS}, {Type: configs.NEWPID}},
		Cgroups:         &cgroups.Cgroup{Name: "jail-template", Rootless: true, Resources: &cgroups.Resources{}},
	}
	return cfg
}
