package jail_test

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"example.com/jail/jail"
	"example.com/jail/rootfs"
)

// attempt is a Python program in which try_(name, f) prints "name errno" or
// "name OK"; want holds what each line has to be.
const attempt = `
import ctypes, errno, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
def try_(name, f):
    try:
        f()
        print(name, "OK")
    except OSError as e:
        print(name, errno.errorcode.get(e.errno, e.errno))
    except ValueError as e:
        print(name, "ValueError")
def call(name, *args):
    def f():
        ctypes.set_errno(0)
        if getattr(libc, name)(*args) < 0:
            raise OSError(ctypes.get_errno(), name)
    return f
def syscall(nr, *args):
    return call("syscall", nr, *args)
`

func attempts(program string) jail.Spec {
	return command("/usr/bin/python3", "-I", "-S", "-c", attempt+program)
}

// Each attempt fails with the error that it should, from a real process in a
// real jail. The same calls succeed, or fail for want of rights only, outside.
func TestHostileAttemptsFail(t *testing.T) {
	for _, c := range []struct{ name, program, want string }{
		{"writes to the kernel's switches (A11)", `
for p in ["/proc/sys/kernel/core_pattern", "/proc/sys/vm/drop_caches", "/proc/sysrq-trigger", "/sys/kernel/uevent_helper",
          "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/release_agent", "/proc/1/oom_score_adj", "/proc/1/attr/exec"]:
    try_(p, lambda: os.write(os.open(p, os.O_WRONLY), b"exec x"))
`, `/proc/sys/kernel/core_pattern ENOENT
/proc/sys/vm/drop_caches ENOENT
/proc/sysrq-trigger ENOENT
/sys/kernel/uevent_helper ENOENT
/sys/fs/cgroup/memory.max ENOENT
/sys/fs/cgroup/release_agent ENOENT
/proc/1/oom_score_adj EACCES
/proc/1/attr/exec EPERM
`},
		{"changes mounts (A13)", `
try_("mount", call("mount", b"x", b"/tmp", b"tmpfs", 0, b""))
try_("umount proc", call("umount2", b"/proc", 0))
try_("umount tmp", call("umount2", b"/tmp", 2))
try_("remount", call("mount", b"", b"/", b"", 32 | 4096, b""))
try_("pivot_root", syscall(155, b"/", b"/tmp"))
try_("open_tree", syscall(428, -100, b"/", 1))
try_("fsopen", syscall(430, b"tmpfs", 0))
try_("mount_setattr", syscall(442, -100, b"/", 0, 0, 0))
try_("chroot", call("chroot", b"/tmp"))
`, `mount EPERM
umount proc EPERM
umount tmp EPERM
remount EPERM
pivot_root EPERM
open_tree EPERM
fsopen EPERM
mount_setattr EPERM
chroot EPERM
`},
		{"makes namespaces (A14)", `
try_("unshare user", call("unshare", 0x10000000))
try_("unshare mnt", call("unshare", 0x00020000))
try_("clone user", syscall(56, 0x10000000 | 17, 0, 0, 0, 0))
try_("clone3", syscall(435, 0, 0))
try_("setns", call("setns", 0, 0))
`, `unshare user EPERM
unshare mnt EPERM
clone user EPERM
clone3 ENOSYS
setns EPERM
`},
		{"makes and opens devices (A16)", `
import stat
try_("mknod", lambda: os.mknod("/tmp/d", stat.S_IFBLK | 0o600, os.makedev(254, 0)))
try_("mknod null", lambda: os.mknod("/tmp/n", stat.S_IFCHR | 0o666, os.makedev(1, 3)))
for p in ["/dev/mem", "/dev/kmsg", "/dev/fuse", "/dev/tty", "/dev/ptmx", "/dev/vda"]:
    try_(p, lambda: open(p))
try_("write to dev", lambda: open("/dev/x", "w"))
`, `mknod EPERM
mknod null EPERM
/dev/mem ENOENT
/dev/kmsg ENOENT
/dev/fuse ENOENT
/dev/tty ENOENT
/dev/ptmx ENOENT
/dev/vda ENOENT
write to dev EROFS
`},
		{"reads the kernel's secrets (A17)", `
for p in ["/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/kallsyms", "/proc/cmdline", "/proc/sched_debug",
          "/sys/firmware", "/proc/1/environ", "/proc/1/root", "/proc/1/mem", "/proc/1/map_files", "/proc/self/root/../../root/x"]:
    try_(p, lambda: os.open(p, os.O_RDONLY))
`, `/proc/kcore ENOENT
/proc/keys ENOENT
/proc/timer_list ENOENT
/proc/kallsyms ENOENT
/proc/cmdline ENOENT
/proc/sched_debug ENOENT
/sys/firmware ENOENT
/proc/1/environ EACCES
/proc/1/root EACCES
/proc/1/mem EACCES
/proc/1/map_files EACCES
/proc/self/root/../../root/x ENOENT
`},
		{"attacks pid 1 (A1, B4, B7)", `
import signal
for s in ["SIGKILL", "SIGTERM", "SIGSTOP", "SIGHUP"]:
    try_(s, lambda: os.kill(1, getattr(signal, s)))
try_("ptrace", call("ptrace", 16, 1, 0, 0))
try_("process_vm_readv", syscall(310, 1, 0, 0, 0, 0, 0))
try_("pidfd_getfd", syscall(438, 0, 0, 0))
try_("kcmp", syscall(312, 1, 1, 0, 0, 0))
try_("exe", lambda: open("/proc/1/exe", "r+b"))
try_("rlimit of 1", call("prlimit", 1, 7, 0, ctypes.create_string_buffer(16)))
try_("affinity of 1", lambda: os.sched_setaffinity(1, {0}))
`, `SIGKILL EPERM
SIGTERM EPERM
SIGSTOP EPERM
SIGHUP EPERM
ptrace EPERM
process_vm_readv EPERM
pidfd_getfd EPERM
kcmp EPERM
exe EACCES
rlimit of 1 EPERM
affinity of 1 EPERM
`},
		{"becomes another (A15, C19)", `
import resource
try_("setuid", lambda: os.setuid(0))
try_("setgroups", lambda: os.setgroups([0]))
try_("su", lambda: print(os.system("su -c id </dev/null >/dev/null 2>&1") != 0))
try_("raise nofile", lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096)) )
try_("nice", lambda: os.nice(-5))
try_("sethostname", lambda: socket.sethostname("x"))
try_("settime", lambda: __import__("time").clock_settime(0, 0))
`, `setuid EINVAL
setgroups EPERM
True
su OK
raise nofile ValueError
nice EPERM
sethostname EPERM
settime EPERM
`},
		{"uses the network (B2, B3, B12)", `
def connect(family, address, kind=socket.SOCK_STREAM):
    def f():
        s = socket.socket(family, kind)
        s.settimeout(3)
        s.connect(address)
    return f
try_("metadata", connect(socket.AF_INET, ("169.254.169.254", 80)))
try_("loopback", connect(socket.AF_INET, ("127.0.0.1", 22)))
try_("loopback6", connect(socket.AF_INET6, ("::1", 22)))
try_("dns", connect(socket.AF_INET, ("8.8.8.8", 53), socket.SOCK_DGRAM))
try_("abstract", connect(socket.AF_UNIX, "\0jail-test-abstract"))
try_("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
try_("packet", lambda: socket.socket(17, socket.SOCK_RAW))
try_("netlink", lambda: socket.socket(16, socket.SOCK_RAW, 0))
try_("alg", lambda: socket.socket(38, socket.SOCK_SEQPACKET))
try_("vsock", lambda: socket.socket(40, socket.SOCK_STREAM))
try_("io_uring", syscall(425, 8, 0))
`, `metadata ENETUNREACH
loopback ENETUNREACH
loopback6 EADDRNOTAVAIL
dns ENETUNREACH
abstract ECONNREFUSED
raw NET
packet EAFNOSUPPORT
netlink EAFNOSUPPORT
alg EAFNOSUPPORT
vsock EAFNOSUPPORT
io_uring NOSYS
`},
		{"keeps keys (B9)", `
try_("add_key", syscall(248, b"user", b"x", b"y", 1, -3))
try_("keyctl", syscall(250, 0, -3, 0))
try_("request_key", syscall(249, b"user", b"x", 0, -3))
`, `add_key EPERM
keyctl EPERM
request_key EPERM
`},
		{"fills tmp (C8, J6)", `
def many():
    for i in range(10**6):
        os.close(os.open("/tmp/%d" % i, os.O_CREAT | os.O_WRONLY))
try_("inodes", many)
for f in os.listdir("/tmp"):
    os.unlink("/tmp/" + f)
def big():
    with open("/dev/shm/big", "wb", 0) as f:
        while True:
            f.write(bytes(1 << 20))
try_("bytes", big)
try_("the other mount is full, too", lambda: open("/tmp/y", "wb", 0).write(bytes(1 << 20)))
`, `inodes ENOSPC
bytes ENOSPC
the other mount is full, too ENOSPC
`},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := attempts(c.program)
			r := run(t, s)
			if r.Cause != jail.CauseOK {
				t.Fatalf("cause %q: %s\n%s", r.Cause, r.Error, r.stderr)
			}
			got := strings.NewReplacer("EPROTONOSUPPORT", "NET", "raw EPERM", "raw NET", "ESOCKTNOSUPPORT", "NET", "io_uring ENOSYS", "io_uring NOSYS", "io_uring EPERM", "io_uring NOSYS").Replace(r.stdout)
			if got != c.want {
				t.Errorf("printed\n%s", lineDiff(c.want, got))
			}
		})
	}
}

// B3: an abstract socket of the host is not there, although it is outside.
func TestAbstractSocketsOfTheHostAreOutOfReach(t *testing.T) {
	l, err := net.Listen("unix", "@jail-test-abstract-2")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	r := run(t, attempts(`
s = socket.socket(socket.AF_UNIX)
try_("connect", lambda: s.connect("\0jail-test-abstract-2"))
`))
	if r.stdout != "connect ECONNREFUSED\n" {
		t.Errorf("printed %q", r.stdout)
	}
}

// A19: a file of the host that a jail may only read stays as it is.
func TestReadOnlyBindStaysUnchanged(t *testing.T) {
	file := filepath.Join(t.TempDir(), "sentinel")
	if err := os.WriteFile(file, []byte(strings.Repeat("sentinel", 1000)), 0o644); err != nil {
		t.Fatal(err)
	}
	// Writable for all: where the file system has no idmapped mounts, its mode
	// would refuse the program before the read-only bind does.
	if err := os.Chmod(file, 0o666); err != nil {
		t.Fatal(err)
	}
	before := sum(t, file)
	s := attempts(`
f = "/opt/sentinel"
try_("open", lambda: open(f, "r+b"))
try_("truncate", lambda: os.truncate(f, 0))
try_("chmod", lambda: os.chmod(f, 0o777))
try_("unlink", lambda: os.unlink(f))
try_("rename", lambda: os.rename(f, "/opt/x"))
try_("utime", lambda: os.utime(f))
try_("link", lambda: os.link(f, "/tmp/l"))
import mmap
fd = os.open(f, os.O_RDONLY)
try_("shared writable mapping", lambda: mmap.mmap(fd, 100, mmap.MAP_SHARED, mmap.PROT_WRITE))
def force():
    m = mmap.mmap(fd, 4096, mmap.MAP_PRIVATE, mmap.PROT_READ)
    a = int([l for l in open("/proc/self/maps") if "sentinel" in l][0].split("-")[0], 16)
    with open("/proc/self/mem", "r+b", 0) as mem:
        mem.seek(a)
        mem.write(b"X" * 100)
    # Copied on write: the private page changed, never the file.
try_("proc mem", force)
r, w = os.pipe()
def spliced():
    os.splice(fd, w, 1, offset_src=0)
    os.write(w, b"Y" * 4096)
if hasattr(os, "splice"):
    try_("splice and write", spliced)
`)
	s.Root.Binds = []rootfs.Bind{{Source: file, Target: "/opt/sentinel"}}
	r := run(t, s)
	if !strings.Contains(r.stdout, "open EROFS") || !strings.Contains(r.stdout, "shared writable mapping EACCES") {
		t.Errorf("printed\n%s%s", r.stdout, r.stderr)
	}
	if after := sum(t, file); after != before {
		t.Error("the file of the host changed")
	}
}

func sum(t *testing.T, file string) string {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%x", sha256.Sum256(b))
}

// C1: a program that grows slowly, whose own code nobody else has in the page
// cache: the kernel drops and reads it again rather than to kill, for 10 s and more
// if it is left alone.
func TestMemoryOfAProgramWithColdCode(t *testing.T) {
	code, err := os.ReadFile("/usr/bin/python3")
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("/var/tmp", "jail-test") // never a tmpfs, whose pages stay
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	if err := errors.Join(os.Chmod(dir, 0o755), os.WriteFile(dir+"/python", code, 0o755)); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(dir + "/python")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	s := command("/mnt/python", "-I", "-B", "-c", "x = [bytes(100) for i in range(10**7)]")
	s.Root.Binds = []rootfs.Bind{{Source: dir, Target: "/mnt"}}
	s.Budget.MaxMemory, s.Budget.WallClock = 64<<20, time.Minute
	for range 3 {
		if err := errors.Join(f.Sync(), unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)); err != nil {
			t.Fatal(err)
		}
		r := run(t, s)
		if r.Cause != jail.CauseMemory || r.Memory.Scope != "self" || r.Memory.PeakBytes > 64<<20+64<<10 {
			t.Errorf("cause %q, scope %q, peak %d: %s", r.Cause, r.Memory.Scope, r.Memory.PeakBytes, r.Error)
		}
		t.Logf("%v: %s", r.elapsed.Round(time.Millisecond), r.Error)
		if r.elapsed > 8*time.Second {
			t.Errorf("took %v", r.elapsed)
		}
	}
}

// A program that works on a file larger than its memory is at its limit all the
// time, reads again what was dropped, and is not out of memory.
func TestMemoryIsEnoughForALargerFile(t *testing.T) {
	dir, err := os.MkdirTemp("/var/tmp", "jail-test")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	if err := errors.Join(os.Chmod(dir, 0o755), os.WriteFile(dir+"/file", make([]byte, 96<<20), 0o644)); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(dir + "/file")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := errors.Join(f.Sync(), unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)); err != nil {
		t.Fatal(err)
	}
	s := command("/usr/bin/python3", "-I", "-B", "-c", `
import mmap, time
f = open("/mnt/file", "rb")
m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)
keep = bytearray(24 << 20)
end, n = time.monotonic() + 4, 0
while time.monotonic() < end:
    for i in range(0, len(m), 4096): n += m[i]
print(n)
`)
	s.Root.Binds = []rootfs.Bind{{Source: dir, Target: "/mnt"}}
	s.Budget.MaxMemory, s.Budget.WallClock = 64<<20, time.Minute
	r := run(t, s)
	if r.Cause != jail.CauseOK || r.stdout != "0\n" {
		t.Errorf("cause %q: %s, %q", r.Cause, r.Error, r.stdout)
	}
	if r.Memory.PeakBytes < 60<<20 {
		t.Errorf("peak %d: it was not at its limit", r.Memory.PeakBytes)
	}
}

// C1, C3, C5, C6, C7, J3, J6: memory in whatever shape, from the first page on counts, ends the jail with cause
// memory or fails in the program, and never passes the limit.
func TestMemoryInEveryShape(t *testing.T) {
	for _, c := range []struct {
		name, program string
		mayFail       bool // an error in the program is as good as an end
	}{
		{"anonymous pages", "x = bytearray(1 << 29)", false},
		{"many small objects", "x = [bytes(100) for i in range(10**7)]", false},
		{"a child's", "os.fork() or bytearray(1 << 29); os.wait()", false},
		{"memfd", `
fd = os.memfd_create("x")
while True:
    os.write(fd, bytes(1 << 20))
`, false},
		{"files in tmp, without a limit of their own", `
with open("/tmp/x", "wb", 0) as f:
    while True:
        f.write(bytes(1 << 20))
`, false},
		{"shared anonymous mapping", `
import mmap
m = mmap.mmap(-1, 1 << 29)
for i in range(0, 1 << 29, 4096):
    m[i] = 1
`, false},
		{"full pipes", `
import fcntl
keep = []
while True:
    r, w = os.pipe()
    os.set_blocking(w, False)
    keep.append((r, w))
    try:
        fcntl.fcntl(w, 1031, 1 << 20)
        while os.write(w, bytes(65536)):
            pass
    except BlockingIOError:
        pass
`, true},
		{"queued datagrams", `
keep = []
while True:
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    a.setblocking(False)
    keep.append((a, b))
    try:
        while True:
            a.send(bytes(60000))
    except (BlockingIOError, OSError) as e:
        if e.errno not in (11, 105):
            raise
`, true},
		{"a read into memory beyond the limit", `
with open("/dev/zero", "rb", 0) as f:
    f.readinto(bytearray(1 << 29))
`, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := attempts(c.program)
			s.Budget.MaxMemory, s.Budget.MaxTmp = 64<<20, 0
			s.Budget.WallClock = 60 * time.Second
			r := run(t, s)
			if r.Cause != jail.CauseMemory && !(c.mayFail && r.Cause == jail.CauseProgram) {
				t.Errorf("cause %q: %s\n%s", r.Cause, r.Error, r.stderr)
			}
			if r.Memory.PeakBytes > 64<<20 {
				t.Errorf("peak %d bytes", r.Memory.PeakBytes)
			}
		})
	}
}

// C5: with a smaller size of its own, tmp is full before the memory is.
func TestTmpFullBeforeMemory(t *testing.T) {
	s := shell("head -c 100m /dev/zero > /tmp/x; echo $?; stat -f -c '%b %S' /tmp")
	s.Budget.MaxTmp = 8 << 20
	s.Budget.MaxMemory = 64 << 20
	r := run(t, s)
	if r.Cause != jail.CauseOK || r.stdout != "1\n2048 4096\n" {
		t.Errorf("cause %q, printed %q", r.Cause, r.stdout)
	}
	prove(t, r.Report, jail.ItemTmp)
	for _, b := range r.Budget {
		if b.Item == jail.ItemTmp && b.ReadBack != 8<<20 {
			t.Errorf("read back %v", b.ReadBack)
		}
	}
}

// Page cache at the limit is no fault: reading a large file through a small
// memory limit goes on.
func TestPageCacheAtTheLimitIsNoOOM(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "big"), make([]byte, 100<<20), 0o644); err != nil {
		t.Fatal(err)
	}
	s := shell("cat /data/big /data/big > /dev/null; echo read")
	s.Root.Binds = []rootfs.Bind{{Source: dir, Target: "/data"}}
	s.Budget.MaxMemory = 32 << 20
	if r := run(t, s); r.Cause != jail.CauseOK || r.Memory.OOMKills != 0 {
		t.Errorf("cause %q, memory %+v", r.Cause, r.Memory)
	}
}

func TestCPUsThrottle(t *testing.T) {
	s := shell("while :; do :; done")
	s.Budget.CPUs = 0.2
	s.Budget.WallClock = time.Second
	r := run(t, s)
	// Half a processor is generous for a fifth.
	if used := time.Duration(r.CPUUserNS + r.CPUSystemNS); r.Cause != jail.CauseWall || used > 500*time.Millisecond || used == 0 {
		t.Errorf("cause %q, used %s of cpu time in 1 s", r.Cause, used)
	}
	prove(t, r.Report, jail.ItemCPUs)
}
