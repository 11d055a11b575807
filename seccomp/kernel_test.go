//go:build amd64

package seccomp

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// helper gives a command that runs this binary as the helper mode under the
// filter of that name.
func helper(t *testing.T, mode, filter string, args ...string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, self, args...)
	cmd.Env = append(os.Environ(), helperEnv+"="+mode, filterEnv+"="+filter)
	return cmd
}

// sysCalls makes calls in a new process under a filter.
func sysCalls(t *testing.T, filter string, calls []sysCall) []sysResult {
	t.Helper()
	in, err := json.Marshal(calls)
	if err != nil {
		t.Fatal(err)
	}
	cmd := helper(t, "calls", filter)
	cmd.Stdin = bytes.NewReader(in)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("helper: %v\n%s", err, stderr.Bytes())
	}
	var res []sysResult
	if err := json.Unmarshal(out, &res); err != nil || len(res) != len(calls) {
		t.Fatalf("helper wrote %q: %v", out, err)
	}
	return res
}

const (
	badFD  = ^uint64(0) // -1
	badPtr = 8          // not mapped
)

// TestKernelRefuses makes the calls of the abuse table in a real kernel. Under
// the default profile each gets its documented errno; under a copy of the
// profile whose EPERM is a number that no kernel code returns, each EPERM turns
// into that number, which proves that it was the filter that refused, also
// where the kernel would refuse by itself.
func TestKernelRefuses(t *testing.T) {
	const hi = uint64(0xabcd) << 32
	sys := func(nr uint64, args ...uint64) sysCall {
		c := sysCall{NR: nr}
		copy(c.Args[:], args)
		return c
	}
	tests := []struct {
		name string // the first word is the row of the abuse table
		call sysCall
		want unix.Errno
	}{
		{"A13 mount", sys(unix.SYS_MOUNT, badPtr, badPtr, badPtr), unix.EPERM},
		{"A13 umount2", sys(unix.SYS_UMOUNT2, badPtr, 0), unix.EPERM},
		{"A13 fsopen", sys(unix.SYS_FSOPEN, badPtr, 0), unix.EPERM},
		{"A13 fsconfig", sys(unix.SYS_FSCONFIG, badFD), unix.EPERM},
		{"A13 fsmount", sys(unix.SYS_FSMOUNT, badFD), unix.EPERM},
		{"A13 fspick", sys(unix.SYS_FSPICK, badFD, badPtr), unix.EPERM},
		{"A13 move_mount", sys(unix.SYS_MOVE_MOUNT, badFD, badPtr, badFD, badPtr), unix.EPERM},
		{"A13 open_tree", sys(unix.SYS_OPEN_TREE, badFD, badPtr), unix.EPERM},
		{"A13 open_tree_attr", sys(unix.SYS_OPEN_TREE_ATTR, badFD, badPtr), unix.EPERM},
		{"A13 mount_setattr", sys(unix.SYS_MOUNT_SETATTR, badFD, badPtr), unix.EPERM},
		{"A13 pivot_root", sys(unix.SYS_PIVOT_ROOT, badPtr, badPtr), unix.EPERM},
		{"A13 chroot", sys(unix.SYS_CHROOT, badPtr), unix.EPERM},
		{"A13 statmount", sys(unix.SYS_STATMOUNT, badPtr), unix.ENOSYS},
		{"A13 listmount", sys(unix.SYS_LISTMOUNT, badPtr), unix.ENOSYS},

		{"A14 unshare user", sys(unix.SYS_UNSHARE, unix.CLONE_NEWUSER), unix.EPERM},
		{"A14 unshare nothing", sys(unix.SYS_UNSHARE, 0), unix.EPERM},
		{"A14 setns", sys(unix.SYS_SETNS, badFD, 0), unix.EPERM},
		{"A14 clone user", sys(unix.SYS_CLONE, unix.CLONE_NEWUSER|uint64(unix.SIGCHLD)), unix.EPERM},
		{"A14 clone mount", sys(unix.SYS_CLONE, unix.CLONE_NEWNS|uint64(unix.SIGCHLD)), unix.EPERM},
		{"A14 clone pid, upper half set", sys(unix.SYS_CLONE, unix.CLONE_NEWPID|hi), unix.EPERM},
		{"A14 clone net", sys(unix.SYS_CLONE, unix.CLONE_NEWNET), unix.EPERM},
		{"A14 clone3", sys(unix.SYS_CLONE3, badPtr, 88), unix.ENOSYS},

		{"A16 mknod character device", sysCall{NR: unix.SYS_MKNOD, Args: [6]uint64{0, unix.S_IFCHR | 0o600, 0x101}, Path: "/nonexistent/x"}, unix.EPERM},
		{"A16 mknodat block device, upper half set", sysCall{NR: unix.SYS_MKNODAT, Args: [6]uint64{badFD, 0, hi | unix.S_IFBLK | 0o600}, Path: "x", PathArg: 1}, unix.EPERM},

		{"A18 open_by_handle_at", sys(unix.SYS_OPEN_BY_HANDLE_AT, badFD, badPtr, 0), unix.EPERM},
		{"A18 name_to_handle_at", sys(unix.SYS_NAME_TO_HANDLE_AT, badFD, badPtr), unix.EPERM},

		{"A19 AF_ALG", sys(unix.SYS_SOCKET, unix.AF_ALG, unix.SOCK_SEQPACKET, 0), unix.EAFNOSUPPORT},
		{"A19 AF_ALG, upper half set", sys(unix.SYS_SOCKET, hi|unix.AF_ALG, unix.SOCK_SEQPACKET, 0), unix.EAFNOSUPPORT},
		{"A19 ptrace poke", sys(unix.SYS_PTRACE, unix.PTRACE_POKEDATA, 1, badPtr, 0), unix.EPERM},
		{"A19 vmsplice", sys(unix.SYS_VMSPLICE, badFD, badPtr, 1), unix.EPERM},

		{"A20 TIOCSTI", sys(unix.SYS_IOCTL, badFD, unix.TIOCSTI, badPtr), unix.EPERM},
		{"A20 TIOCSTI, upper half set", sys(unix.SYS_IOCTL, badFD, hi|unix.TIOCSTI, badPtr), unix.EPERM},
		{"A20 TIOCLINUX, upper half set", sys(unix.SYS_IOCTL, badFD, 1<<63|0x541c, badPtr), unix.EPERM},
		{"A20 TIOCSETD, upper half set", sys(unix.SYS_IOCTL, badFD, 0xffffffff<<32|unix.TIOCSETD, badPtr), unix.EPERM},
		{"A20 TIOCCONS", sys(unix.SYS_IOCTL, badFD, 0x541d, badPtr), unix.EPERM},

		{"B1 io_uring_setup", sys(unix.SYS_IO_URING_SETUP, 1, badPtr), unix.EPERM},
		{"B1 io_uring_enter", sys(unix.SYS_IO_URING_ENTER, badFD), unix.EPERM},
		{"B1 io_uring_register", sys(unix.SYS_IO_URING_REGISTER, badFD), unix.EPERM},

		{"B2 AF_VSOCK", sys(unix.SYS_SOCKET, unix.AF_VSOCK, unix.SOCK_STREAM, 0), unix.EAFNOSUPPORT},
		{"B2 AF_PACKET", sys(unix.SYS_SOCKET, unix.AF_PACKET, unix.SOCK_RAW, 0), unix.EAFNOSUPPORT},
		{"B2 AF_NETLINK audit", sys(unix.SYS_SOCKET, unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_AUDIT), unix.EAFNOSUPPORT},
		{"B2 AF_NETLINK xfrm", sys(unix.SYS_SOCKET, unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_XFRM), unix.EAFNOSUPPORT},
		{"B2 AF_XDP", sys(unix.SYS_SOCKET, unix.AF_XDP, unix.SOCK_RAW, 0), unix.EAFNOSUPPORT},
		{"B2 raw IPv4", sys(unix.SYS_SOCKET, unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_ICMP), unix.EPROTONOSUPPORT},
		{"B2 packet type of IPv4", sys(unix.SYS_SOCKET, unix.AF_INET, unix.SOCK_PACKET, 3), unix.EPROTONOSUPPORT},
		{"B2 SCTP", sys(unix.SYS_SOCKET, unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_SCTP), unix.EPROTONOSUPPORT},
		{"B2 DCCP", sys(unix.SYS_SOCKET, unix.AF_INET6, unix.SOCK_DCCP, 0), unix.EPROTONOSUPPORT},
		{"B2 socketpair of TIPC", sys(unix.SYS_SOCKETPAIR, unix.AF_TIPC, unix.SOCK_STREAM, 0, badPtr), unix.EAFNOSUPPORT},

		{"B4 bpf", sys(unix.SYS_BPF, 0, badPtr, 0), unix.EPERM},
		{"B4 perf_event_open", sys(unix.SYS_PERF_EVENT_OPEN, badPtr), unix.EPERM},
		{"B4 userfaultfd", sys(unix.SYS_USERFAULTFD, 0), unix.EPERM},
		{"B4 ptrace", sys(unix.SYS_PTRACE, unix.PTRACE_ATTACH, 1), unix.EPERM},
		{"B4 ptrace traceme", sys(unix.SYS_PTRACE, unix.PTRACE_TRACEME), unix.EPERM},
		{"B4 process_vm_readv", sys(unix.SYS_PROCESS_VM_READV, 1), unix.EPERM},
		{"B4 process_vm_writev", sys(unix.SYS_PROCESS_VM_WRITEV, 1), unix.EPERM},
		{"B4 process_madvise", sys(unix.SYS_PROCESS_MADVISE, badFD), unix.EPERM},
		{"B4 process_mrelease", sys(unix.SYS_PROCESS_MRELEASE, badFD), unix.EPERM},
		{"B4 move_pages", sys(unix.SYS_MOVE_PAGES, 1), unix.EPERM},
		{"B4 migrate_pages", sys(unix.SYS_MIGRATE_PAGES, 1), unix.EPERM},
		{"B4 kcmp", sys(unix.SYS_KCMP, 1, 1), unix.EPERM},
		{"B4 pidfd_getfd", sys(unix.SYS_PIDFD_GETFD, badFD), unix.EPERM},
		{"B4 keyctl", sys(unix.SYS_KEYCTL, 0, 0), unix.EPERM},
		{"B4 add_key", sys(unix.SYS_ADD_KEY, badPtr), unix.EPERM},
		{"B4 request_key", sys(unix.SYS_REQUEST_KEY, badPtr), unix.EPERM},
		{"B4 lookup_dcookie", sys(unix.SYS_LOOKUP_DCOOKIE, 0), unix.EPERM},
		{"B4 kexec_load", sys(unix.SYS_KEXEC_LOAD, 0, 17, badPtr), unix.EPERM},
		{"B4 kexec_file_load", sys(unix.SYS_KEXEC_FILE_LOAD, badFD), unix.EPERM},
		{"B4 init_module", sys(unix.SYS_INIT_MODULE, badPtr), unix.EPERM},
		{"B4 finit_module", sys(unix.SYS_FINIT_MODULE, badFD), unix.EPERM},
		{"B4 delete_module", sys(unix.SYS_DELETE_MODULE, badPtr), unix.EPERM},
		{"B4 reboot", sys(unix.SYS_REBOOT, 0, 0), unix.EPERM},
		{"B4 swapon", sys(unix.SYS_SWAPON, badPtr), unix.EPERM},
		{"B4 swapoff", sys(unix.SYS_SWAPOFF, badPtr), unix.EPERM},
		{"B4 acct", sys(unix.SYS_ACCT, badPtr), unix.EPERM},
		{"B4 quotactl", sys(unix.SYS_QUOTACTL, badPtr), unix.EPERM},
		{"B4 quotactl_fd", sys(unix.SYS_QUOTACTL_FD, badFD), unix.EPERM},
		{"B4 nfsservctl", sys(unix.SYS_NFSSERVCTL, 0), unix.EPERM},
		{"B4 personality(READ_IMPLIES_EXEC)", sys(unix.SYS_PERSONALITY, 0x400000), unix.EPERM},
		{"B4 personality, upper half set", sys(unix.SYS_PERSONALITY, hi|0x400000), unix.EPERM},
		{"B4 modify_ldt", sys(unix.SYS_MODIFY_LDT, 0, 0, 0), unix.EPERM},
		{"B4 uselib", sys(unix.SYS_USELIB, badPtr), unix.EPERM},
		{"B4 iopl", sys(unix.SYS_IOPL, 0), unix.EPERM},
		{"B4 ioperm", sys(unix.SYS_IOPERM, 0, 1, 0), unix.EPERM},
		{"B4 syslog", sys(unix.SYS_SYSLOG, 10), unix.EPERM},
		{"B4 fanotify_init", sys(unix.SYS_FANOTIFY_INIT, ^uint64(0)), unix.EPERM},
		{"B4 settimeofday", sys(unix.SYS_SETTIMEOFDAY, badPtr), unix.EPERM},
		{"B4 clock_settime", sys(unix.SYS_CLOCK_SETTIME, 0, badPtr), unix.EPERM},
		{"B4 clock_adjtime", sys(unix.SYS_CLOCK_ADJTIME, 0, badPtr), unix.EPERM},
		{"B4 adjtimex", sys(unix.SYS_ADJTIMEX, badPtr), unix.EPERM},
		{"B4 sethostname", sys(unix.SYS_SETHOSTNAME, badPtr, 1), unix.EPERM},
		{"B4 setdomainname", sys(unix.SYS_SETDOMAINNAME, badPtr, 1), unix.EPERM},
		{"B4 vhangup", sys(unix.SYS_VHANGUP), unix.EPERM},

		{"B5 openat2", sys(unix.SYS_OPENAT2, badFD, badPtr), unix.ENOSYS},
		{"B7 seccomp listener", sys(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_NEW_LISTENER, badPtr), unix.EPERM},
		{"B7 prctl(PR_SET_SECCOMP)", sys(unix.SYS_PRCTL, unix.PR_SET_SECCOMP, 2, badPtr), unix.EPERM},
		{"B7 prctl(PR_SET_SECCOMP), upper half set", sys(unix.SYS_PRCTL, hi|unix.PR_SET_SECCOMP, 2, badPtr), unix.EPERM},
		{"C6 memfd_secret", sys(unix.SYS_MEMFD_SECRET, 0), unix.ENOSYS},
	}
	calls := make([]sysCall, len(tests))
	for i, tt := range tests {
		calls[i] = tt.call
	}
	got, marked := sysCalls(t, "default", calls), sysCalls(t, "marked", calls)
	for i, tt := range tests {
		if unix.Errno(got[i].Errno) != tt.want {
			t.Errorf("%s: %v (value %d), want %v", tt.name, unix.Errno(got[i].Errno), got[i].Value, tt.want)
		}
		want := tt.want
		if want == unix.EPERM {
			want = marker
		}
		if unix.Errno(marked[i].Errno) != want {
			t.Errorf("%s: not the filter refuses: errno %d, want %d", tt.name, marked[i].Errno, int(want))
		}
	}
}

// TestKernelUnknownNumbers: B5, a number that the profile does not know gives
// ENOSYS, so that libc falls back. 512 to 547 are the x32 forms of calls and
// must not run when called without the x32 bit.
func TestKernelUnknownNumbers(t *testing.T) {
	var calls []sysCall
	for nr := uint64(472); nr < 1024; nr++ {
		calls = append(calls, sysCall{NR: nr})
	}
	calls = append(calls, sysCall{NR: 1 << 20}, sysCall{NR: ^uint64(0)})
	for i, r := range sysCalls(t, "default", calls) {
		if unix.Errno(r.Errno) != unix.ENOSYS {
			t.Errorf("number %d: %v", calls[i].NR, unix.Errno(r.Errno))
		}
	}
}

// TestKernelSocketMatrix: B2, every family by every type by a few protocols.
// The kernel must refuse with the filter's errno what the filter refuses, and
// what it lets through must be a Unix, TCP or UDP socket.
func TestKernelSocketMatrix(t *testing.T) {
	const familyHi, typeHi = uint64(0x7f) << 40, uint64(unix.SOCK_CLOEXEC)
	var calls []sysCall
	var want []unix.Errno // 0: let through
	numbers, p := allNumbers(), Default()
	for family := range uint64(51) {
		for typ := range uint64(12) {
			for _, proto := range []uint64{0, 1, 6, 17, 132, 262} {
				for _, args := range [][6]uint64{{family, typ, proto}, {family | familyHi, typ | typeHi, proto | 1<<35}} {
					a := decide(p, numbers, call{nr: unix.SYS_SOCKET, args: args})
					e, _ := a.errno()
					if a == Allow {
						e = 0
					}
					calls = append(calls, sysCall{NR: unix.SYS_SOCKET, Args: args})
					want = append(want, e)
				}
			}
		}
	}
	allowed := 0
	for i, r := range sysCalls(t, "default", calls) {
		if want[i] != 0 {
			if unix.Errno(r.Errno) != want[i] {
				t.Errorf("socket(%x): %v, want %v", calls[i].Args[:3], unix.Errno(r.Errno), want[i])
			}
			continue
		}
		allowed++
		// IPv6 may be switched off on the machine that runs the test.
		ok := r.Errno == 0 || uint32(calls[i].Args[0]) == unix.AF_INET6 && unix.Errno(r.Errno) == unix.EAFNOSUPPORT
		if !ok {
			t.Errorf("socket(%x): %v, want a socket", calls[i].Args[:3], unix.Errno(r.Errno))
		}
	}
	if allowed != 2*14 {
		t.Errorf("%d sockets allowed, want 28", allowed)
	}
}

// TestKernelModes: no set-ID bit gets onto a file, and ordinary modes do.
func TestKernelModes(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	const atCWD = ^uint64(99) // AT_FDCWD, -100
	if int64(unix.AT_FDCWD) != -100 {
		t.Fatal("AT_FDCWD is not -100")
	}
	path := func(nr uint64, name string, index int, args ...uint64) sysCall {
		c := sysCall{NR: nr, Path: filepath.Join(dir, name), PathArg: index}
		copy(c.Args[:], args)
		return c
	}
	tests := []struct {
		name string
		call sysCall
		want unix.Errno
	}{
		{"chmod 4755", path(unix.SYS_CHMOD, "file", 0, 0, 0o4755), unix.EPERM},
		{"chmod 2755", path(unix.SYS_CHMOD, "file", 0, 0, 0o2755), unix.EPERM},
		{"chmod 4755, upper bits set", path(unix.SYS_CHMOD, "file", 0, 0, 0xffff0000|0o4755), unix.EPERM},
		{"fchmodat 6755", path(unix.SYS_FCHMODAT, "file", 1, atCWD, 0, 0o6755), unix.EPERM},
		{"fchmodat2 4755", path(unix.SYS_FCHMODAT2, "file", 1, atCWD, 0, 0o4755, 0), unix.EPERM},
		{"open creates 4755", path(unix.SYS_OPEN, "a", 0, 0, unix.O_CREAT|unix.O_RDWR, 0o4755), unix.EPERM},
		{"openat creates 2755", path(unix.SYS_OPENAT, "b", 1, atCWD, 0, unix.O_CREAT|unix.O_RDWR, 0o2755), unix.EPERM},
		{"openat temporary file 4755", path(unix.SYS_OPENAT, ".", 1, atCWD, 0, unix.O_TMPFILE|unix.O_RDWR, 0o4755), unix.EPERM},
		{"creat 4755", path(unix.SYS_CREAT, "c", 0, 0, 0o4755), unix.EPERM},
		{"mknod file 4755", path(unix.SYS_MKNOD, "d", 0, 0, unix.S_IFREG|0o4755), unix.EPERM},
		{"mkdir 2755", path(unix.SYS_MKDIR, "e", 0, 0, 0o2755), unix.EPERM},
		{"mkdirat 4755", path(unix.SYS_MKDIRAT, "f", 1, atCWD, 0, 0o4755), unix.EPERM},

		{"chmod 1755", path(unix.SYS_CHMOD, "file", 0, 0, 0o1755), 0},
		{"open, mode not used", path(unix.SYS_OPEN, "file", 0, 0, unix.O_RDWR, 0o4755), 0},
		{"openat, mode not used", path(unix.SYS_OPENAT, "file", 1, atCWD, 0, unix.O_RDONLY, ^uint64(0)), 0},
		{"openat creates 755", path(unix.SYS_OPENAT, "g", 1, atCWD, 0, unix.O_CREAT|unix.O_EXCL|unix.O_RDWR, 0o755), 0},
		{"mknod FIFO", path(unix.SYS_MKNOD, "h", 0, 0, unix.S_IFIFO|0o600), 0},
		{"mkdir 1777", path(unix.SYS_MKDIR, "i", 0, 0, 0o1777), 0},
	}
	calls := make([]sysCall, len(tests))
	for i, tt := range tests {
		calls[i] = tt.call
	}
	got := sysCalls(t, "default", calls)
	for i, tt := range tests {
		if unix.Errno(got[i].Errno) != tt.want {
			t.Errorf("%s: %v, want %v", tt.name, unix.Errno(got[i].Errno), tt.want)
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
		info, err := e.Info()
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode()&(os.ModeSetuid|os.ModeSetgid) != 0 {
			t.Errorf("%s has mode %v", e.Name(), info.Mode())
		}
	}
	if got := strings.Join(names, " "); got != "file g h i" {
		t.Errorf("entries are %q", got)
	}
}

// foreignSource calls getpid by the ABI that its argument names.
const foreignSource = `
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <sys/syscall.h>
int main(int argc, char **argv) {
	long r = -1;
	int pid = getpid();
	if (argc < 2)
		return 2;
	if (!strcmp(argv[1], "int80")) {
		int r32;
		__asm__ volatile("int $0x80" : "=a"(r32) : "a"(20) : "memory");
		r = r32;
	} else if (!strcmp(argv[1], "x32")) {
		r = syscall(0x40000000 | 39);
	} else if (!strcmp(argv[1], "native")) {
		r = syscall(39);
	}
	puts(r == pid ? "same" : "other");
	return 0;
}
`

// TestKernelForeignABI: B5, a call by int 0x80 or by an x32 number ends the
// process. The same program runs bare first: where the machine has that ABI it
// works there, and the native call works under the filter.
func TestKernelForeignABI(t *testing.T) {
	dir := t.TempDir()
	src, bin := filepath.Join(dir, "foreign.c"), filepath.Join(dir, "foreign")
	if err := os.WriteFile(src, []byte(foreignSource), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("gcc", "-O1", "-o", bin, src).CombinedOutput(); err != nil {
		t.Fatalf("gcc, which cgo needs too: %v\n%s", err, out)
	}
	run := func(filter, abi string) (string, syscall.WaitStatus) {
		cmd := helper(t, "exec", filter, bin, abi)
		var out bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &out
		err := cmd.Run()
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
		return strings.TrimSpace(out.String()), cmd.ProcessState.Sys().(syscall.WaitStatus)
	}
	if out, _ := run("default", "native"); out != "same" {
		t.Errorf("native under the filter: %q", out)
	}
	for _, abi := range []string{"int80", "x32"} {
		out, ws := run("bare", abi)
		t.Logf("%s without a filter: %q %v", abi, out, ws)
		// A kernel without i386 emulation answers int 0x80 with SIGSEGV before it
		// looks at a filter.
		noABI := ws.Signaled() && ws.Signal() == syscall.SIGSEGV
		out, ws = run("default", abi)
		if dead := ws.Signaled() && (ws.Signal() == syscall.SIGSYS || noABI && ws.Signal() == syscall.SIGSEGV); !dead || out != "" {
			t.Errorf("%s under the filter: %q %v, want SIGSYS", abi, out, ws)
		}
	}
}

const pythonProgram = `
import asyncio, concurrent.futures, hashlib, multiprocessing, os, shutil, signal, socket, sqlite3
import ssl, subprocess, sys, tempfile, threading, time, ctypes, mmap, select

def square(n):
    return n * n

async def aio():
    async def serve(r, w):
        w.write((await r.readline()).upper()); await w.drain(); w.close()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    r, w = await asyncio.open_connection(*server.sockets[0].getsockname())
    w.write(b"line\n"); await w.drain()
    assert await r.readline() == b"LINE\n"
    w.close(); server.close()
    p = await asyncio.create_subprocess_exec("cat", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    out, _ = await p.communicate(b"through cat")
    assert out == b"through cat"
    await asyncio.to_thread(time.sleep, 0.01)

def main():
    seen = []
    ts = [threading.Thread(target=seen.append, args=(i,)) for i in range(8)]
    [t.start() for t in ts]; [t.join() for t in ts]
    assert sorted(seen) == list(range(8))
    assert subprocess.run(["sh", "-c", "echo $((6*7)) | cat"], capture_output=True).stdout == b"42\n"
    assert subprocess.run(["true"], start_new_session=True, cwd="/", preexec_fn=os.getpid).returncode == 0
    for method in ("fork", "spawn", "forkserver"):
        ctx = multiprocessing.get_context(method)
        with ctx.Pool(2) as pool:
            assert pool.map(square, range(5)) == [0, 1, 4, 9, 16], method
        q = ctx.Queue(); q.put("x"); assert q.get() == "x"; q.close(); q.join_thread()
        lock = ctx.Lock()
        with lock: pass
    with concurrent.futures.ProcessPoolExecutor(2) as ex:
        assert list(ex.map(square, range(3))) == [0, 1, 4]
    asyncio.run(aio())
    with tempfile.TemporaryDirectory() as d:
        f = os.path.join(d, "a"); open(f, "w").write("x" * 100000); os.chmod(f, 0o700)
        shutil.copy(f, f + "2"); shutil.copytree(d, d + "-tree"); shutil.rmtree(d + "-tree")
        os.mkfifo(os.path.join(d, "fifo")); os.symlink(f, f + "3"); os.rename(f + "2", f + "4")
        db = sqlite3.connect(os.path.join(d, "db")); db.execute("pragma journal_mode=wal")
        db.execute("create table t(x)"); db.execute("insert into t values (7)"); db.commit()
        assert db.execute("select x from t").fetchone() == (7,); db.close()
        with open(f, "r+b") as fh, mmap.mmap(fh.fileno(), 0) as m: m[0:1] = b"y"; m.flush()
    a, b = socket.socketpair(); a.send(b"1"); assert b.recv(1) == b"1"
    u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.bind(("127.0.0.1", 0)); u.close()
    signal.signal(signal.SIGALRM, lambda *x: seen.append("alarm")); signal.setitimer(signal.ITIMER_REAL, 0.01)
    time.sleep(0.05); assert seen[-1] == "alarm"
    hashlib.sha256(os.urandom(10)).hexdigest(); ssl.create_default_context()
    ctypes.CDLL(None).getpid()
    assert socket.getaddrinfo("localhost", 80, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    try:
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW); raise SystemExit("netlink socket made")
    except OSError as e:
        assert e.errno == 97, e
    print("python ok")

if __name__ == "__main__":
    main()
`

const nodeProgram = `
const {Worker, isMainThread, parentPort} = require("worker_threads");
if (process.argv[2] === "child") { process.send(1); return; }
if (!isMainThread) { parentPort.postMessage(6 * 7); return; }
const fs = require("fs"), os = require("os"), path = require("path"), http = require("http");
const crypto = require("crypto"), cp = require("child_process"), dns = require("dns"), zlib = require("zlib");
const assert = require("assert");
(async () => {
  const dir = await fs.promises.mkdtemp(path.join(os.tmpdir(), "n-"));
  await fs.promises.writeFile(path.join(dir, "a"), "text");
  await fs.promises.cp(dir, dir + "-copy", {recursive: true});
  assert.equal(await fs.promises.readFile(path.join(dir + "-copy", "a"), "utf8"), "text");
  const w = fs.watch(dir); w.close();
  await fs.promises.rm(dir, {recursive: true}); await fs.promises.rm(dir + "-copy", {recursive: true});
  assert.equal(await new Promise(r => new Worker(__filename).on("message", r)), 42);
  assert.equal(cp.execSync("echo from shell").toString(), "from shell\n");
  const child = cp.fork(__filename, ["child"]);
  assert.equal(await new Promise(r => child.on("message", r)), 1);
  const server = http.createServer((q, s) => s.end("served")).listen(0, "127.0.0.1");
  await new Promise(r => server.on("listening", r));
  const body = await (await fetch("http://127.0.0.1:" + server.address().port)).text();
  assert.equal(body, "served"); server.closeAllConnections(); server.close();
  await new Promise(r => crypto.scrypt("p", "s", 16, r));
  zlib.gunzipSync(zlib.gzipSync("x"));
  await WebAssembly.compile(new Uint8Array([0, 97, 115, 109, 1, 0, 0, 0]));
  console.log("node ok");
})();
`

const shellProgram = `
set -e
mkdir src && echo one > src/a && echo two > src/b && ln -s a src/link && mkfifo src/fifo && chmod 750 src
tar -czf t.tgz src && mkdir out && tar -xzf t.tgz -C out && diff -r --no-dereference src/a out/src/a
cp -a src copy && mv copy moved && find moved -type f | sort | xargs cat | wc -l
(sleep 0.01 & wait); sh -c 'trap "echo trapped" TERM; kill -TERM $$' | grep -q trapped; seq 1000 | sort -rn | head -1
ls -la /proc/self/ > /dev/null; date > /dev/null; df . > /dev/null; ps > /dev/null; id > /dev/null; nice -n 5 true
timeout 5 sh -c 'yes | head -c 100000 | sha256sum'; dd if=/dev/zero of=z bs=64k count=4 2>/dev/null; truncate -s 10 z
mktemp -d -p . > /dev/null; touch -d 2020-01-01 z; flock z true; stat z > /dev/null; rm -rf moved
if chmod u+s z 2>/dev/null; then echo "set-user-ID bit set"; exit 1; fi
sqlite3 db 'create table t(x); insert into t values(42); select x from t;'
printf 'int main(void){return 7;}' > c.c && gcc -O2 -o c c.c && { ./c || test $? = 7; }
echo shell ok
`

// TestOrdinaryProgramsRun runs real programs under the default profile.
func TestOrdinaryProgramsRun(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	tests := []struct{ name, program, arg, last string }{
		{"python", "/usr/bin/python3", write("p.py", pythonProgram), "python ok"},
		{"node", "/usr/bin/node", write("n.js", nodeProgram), "node ok"},
		{"shell, tar, sqlite3, gcc", "/bin/sh", write("s.sh", shellProgram), "shell ok"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			cmd := helper(t, "exec", "default", tt.program, tt.arg)
			cmd.Dir = t.TempDir()
			cmd.Env = append(cmd.Env, "TMPDIR="+cmd.Dir, helperEnv+"=exec")
			out, err := cmd.CombinedOutput()
			if err != nil || !strings.HasSuffix(strings.TrimSpace(string(out)), tt.last) {
				t.Errorf("%s: %v\n%s", tt.program, err, out)
			}
		})
	}
}

// TestFilterReachesDescendants: the filter outlives execve and fork, and
// no_new_privs is on, which loading without privilege needs (A15).
func TestFilterReachesDescendants(t *testing.T) {
	for filter, want := range map[string]string{"default": "1 2", "none": "0 0"} {
		cmd := helper(t, "exec", filter, "/bin/sh", "-c", `cat /proc/self/status`)
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		var nnp, mode string
		for line := range strings.Lines(string(out)) {
			fmt.Sscanf(line, "NoNewPrivs: %s", &nnp)
			fmt.Sscanf(line, "Seccomp: %s", &mode)
		}
		if got := nnp + " " + mode; got != want {
			t.Errorf("%s: no_new_privs and seccomp are %q, want %q", filter, got, want)
		}
	}
}
