package seccomp

import "golang.org/x/sys/unix"

// Default is the profile for programs that nobody trusts. Each call makes a new
// one, which the caller may change.
//
// It allows what shells, compilers, interpreters and language runtimes use. It
// refuses with EPERM what would give power over the kernel, other processes or
// the file tree, and large kernel interfaces that those programs can do without.
// Everything else, and whatever the kernel may learn later, gets ENOSYS, on
// which libc falls back to older calls; EPERM there would break programs (B5).
//
// Some calls depend on their arguments:
//
//   - clone: no new namespaces. clone3 and openat2 have their flags behind a
//     pointer and get ENOSYS, after which libc uses clone and openat.
//   - socket, socketpair: Unix sockets; TCP and UDP by IPv4 and IPv6 for socket.
//   - open with O_CREAT, creat, mkdir, mknod and the chmod family: no set-user-ID
//     and set-group-ID bits. mknod makes files, FIFOs and sockets, no devices.
//   - personality: the values that change nothing but the reported kernel name.
//   - ioctl: no TIOCSTI, TIOCLINUX, TIOCSETD, TIOCCONS.
//   - prctl: no PR_SET_SECCOMP.
func Default() *Profile {
	p := &Profile{Default: Errno(unix.ENOSYS)}
	add := func(a Action, names []string, args ...Arg) {
		p.Rules = append(p.Rules, Rule{Names: names, Args: args, Action: a})
	}
	one := func(name string) []string { return []string{name} }
	eperm := Errno(unix.EPERM)

	add(Allow, []string{
		// Files.
		"access", "chdir", "chown", "close", "close_range", "copy_file_range",
		"dup", "dup2", "dup3", "faccessat", "faccessat2", "fadvise64",
		"fallocate", "fchdir", "fchown", "fchownat", "fcntl", "fdatasync",
		"fgetxattr", "flistxattr", "flock", "fremovexattr", "fsetxattr",
		"fstat", "fstatfs", "fsync", "ftruncate", "futimesat", "getcwd",
		"getdents", "getdents64", "getxattr", "inotify_add_watch",
		"inotify_init", "inotify_init1", "inotify_rm_watch", "lchown",
		"lgetxattr", "link", "linkat", "listxattr", "llistxattr",
		"lremovexattr", "lseek", "lsetxattr", "lstat", "memfd_create",
		"newfstatat", "pread64", "preadv", "preadv2", "pwrite64", "pwritev",
		"pwritev2", "read", "readahead", "readlink", "readlinkat", "readv",
		"removexattr", "rename", "renameat", "renameat2", "rmdir", "sendfile",
		"setxattr", "splice", "stat", "statfs", "statx", "symlink",
		"symlinkat", "sync", "sync_file_range", "syncfs", "tee", "truncate",
		"umask", "unlink", "unlinkat", "utime", "utimensat", "utimes",
		"write", "writev",
		// Landlock lets a program confine itself further; it takes nothing away
		// from this filter.
		"landlock_add_rule", "landlock_create_ruleset", "landlock_restrict_self",
		// Waiting and pipes.
		"epoll_create", "epoll_create1", "epoll_ctl", "epoll_pwait",
		"epoll_pwait2", "epoll_wait", "eventfd", "eventfd2", "pipe", "pipe2",
		"poll", "ppoll", "pselect6", "select", "signalfd", "signalfd4",
		"timerfd_create", "timerfd_gettime", "timerfd_settime",
		// Memory. The NUMA calls place the caller's own memory within its cpuset;
		// numerical libraries call them and print warnings where they fail.
		// move_pages and migrate_pages, which reach other processes, are below.
		"brk", "get_mempolicy", "madvise", "map_shadow_stack", "mbind",
		"mincore", "mlock", "mlock2", "mlockall", "mmap", "mprotect",
		"mremap", "mseal", "msync", "munlock", "munlockall", "munmap",
		"pkey_alloc", "pkey_free", "pkey_mprotect", "set_mempolicy",
		// Processes and threads.
		"arch_prctl", "execve", "execveat", "exit", "exit_group", "fork",
		"futex", "futex_waitv", "get_robust_list", "getcpu", "getpgid",
		"getpgrp", "getpid", "getppid", "getpriority", "getrlimit",
		"getrusage", "getsid", "gettid", "ioprio_get", "ioprio_set", "kill",
		"membarrier", "pause", "pidfd_open", "pidfd_send_signal", "prlimit64",
		"restart_syscall", "rseq", "rt_sigaction", "rt_sigpending",
		"rt_sigprocmask", "rt_sigqueueinfo", "rt_sigreturn",
		"rt_sigsuspend", "rt_sigtimedwait", "rt_tgsigqueueinfo",
		"sched_get_priority_max", "sched_get_priority_min",
		"sched_getaffinity", "sched_getattr", "sched_getparam",
		"sched_getscheduler", "sched_rr_get_interval", "sched_setaffinity",
		"sched_setattr", "sched_setparam", "sched_setscheduler",
		"sched_yield", "set_robust_list", "set_tid_address", "setpgid",
		"setpriority", "setrlimit", "setsid", "sigaltstack", "tgkill",
		"tkill", "vfork", "wait4", "waitid",
		// Identities. Without capabilities they change nothing.
		"capget", "capset", "getegid", "geteuid", "getgid", "getgroups",
		"getresgid", "getresuid", "getuid", "setfsgid", "setfsuid", "setgid",
		"setgroups", "setregid", "setresgid", "setresuid", "setreuid",
		"setuid",
		// Time and facts.
		"alarm", "clock_getres", "clock_gettime", "clock_nanosleep",
		"getitimer", "getrandom", "gettimeofday", "nanosleep", "setitimer",
		"sysinfo", "time", "timer_create", "timer_delete",
		"timer_getoverrun", "timer_gettime", "timer_settime", "times",
		"uname",
		// Sockets, once made, and the interprocess calls of an own namespace.
		"accept", "accept4", "bind", "connect", "getpeername",
		"getsockname", "getsockopt", "listen", "recvfrom", "recvmmsg",
		"recvmsg", "sendmmsg", "sendmsg", "sendto", "setsockopt", "shutdown",
		"mq_getsetattr", "mq_notify", "mq_open", "mq_timedreceive",
		"mq_timedsend", "mq_unlink", "msgctl", "msgget", "msgrcv", "msgsnd",
		"semctl", "semget", "semop", "semtimedop", "shmat", "shmctl",
		"shmdt", "shmget",
	})

	add(eperm, []string{
		// The file tree (A13). statmount, listmount and listns, which would tell
		// about it, are left to ENOSYS.
		"chroot", "fsconfig", "fsmount", "fsopen", "fspick", "mount",
		"mount_setattr", "move_mount", "open_tree", "open_tree_attr",
		"pivot_root", "umount", "umount2",
		// File handles open files past the tree's boundary (A18). Without the
		// opening half, making them has no use.
		"name_to_handle_at", "open_by_handle_at",
		// Namespaces (A14).
		"setns", "unshare",
		// Other processes (B4).
		"kcmp", "migrate_pages", "move_pages", "pidfd_getfd",
		"process_madvise", "process_mrelease", "process_vm_readv",
		"process_vm_writev", "ptrace",
		// Large kernel interfaces with a record of exploits (B1, B4). userfaultfd
		// and vmsplice also let a program stop or change a copy that the kernel
		// or the launcher is about to read (D11).
		"bpf", "fanotify_init", "fanotify_mark", "io_uring_enter",
		"io_uring_register", "io_uring_setup", "perf_event_open", "seccomp",
		"userfaultfd", "vmsplice",
		// Key rings are not bound to a namespace of ours (B9).
		"add_key", "keyctl", "request_key",
		// The machine.
		"_sysctl", "acct", "adjtimex", "clock_adjtime", "clock_settime",
		"create_module", "delete_module", "finit_module", "get_kernel_syms",
		"init_module", "ioperm", "iopl", "kexec_file_load", "kexec_load",
		"lookup_dcookie", "modify_ldt", "nfsservctl", "query_module",
		"quotactl", "quotactl_fd", "reboot", "setdomainname", "sethostname",
		"settimeofday", "swapoff", "swapon", "syslog", "uselib", "vhangup",
		"vm86", "vm86old",
	})

	// These are the default's anyway. They stand here so that a changed default
	// does not open them: their flags are behind a pointer (A14), and secret
	// memory cannot be swapped out or reclaimed (C6).
	// Left to the default for another reason: io_setup and its family, because
	// fs.aio-max-nr is one number for the whole machine.
	add(Errno(unix.ENOSYS), []string{"clone3", "openat2", "memfd_secret"})

	// The kernel takes the low 32 bits of clone's flags. CLONE_NEWTIME shares
	// its bit with the exit signal and exists only for clone3 and unshare.
	const newAny = unix.CLONE_NEWNS | unix.CLONE_NEWCGROUP | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC |
		unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNET
	add(Allow, one("clone"), masked(0, newAny, 0))
	add(eperm, one("clone"))

	// The kernel reads family, type and protocol as int, and above the low four
	// bits of the type only SOCK_CLOEXEC and SOCK_NONBLOCK. A raw or packet type
	// reaches other families through AF_INET; odd protocols load modules.
	socket := func(name string, family, typ, protocol uint64) {
		add(Allow, one(name), low32(0, family), masked(1, 0xf, typ), low32(2, protocol))
	}
	for _, name := range []string{"socket", "socketpair"} {
		for _, typ := range []uint64{unix.SOCK_STREAM, unix.SOCK_DGRAM, unix.SOCK_SEQPACKET} {
			socket(name, unix.AF_UNIX, typ, 0)
			socket(name, unix.AF_UNIX, typ, unix.AF_UNIX)
		}
	}
	for _, family := range []uint64{unix.AF_INET, unix.AF_INET6} {
		socket("socket", family, unix.SOCK_STREAM, 0)
		socket("socket", family, unix.SOCK_STREAM, unix.IPPROTO_TCP)
		socket("socket", family, unix.SOCK_DGRAM, 0)
		socket("socket", family, unix.SOCK_DGRAM, unix.IPPROTO_UDP)
	}
	for _, family := range []uint64{unix.AF_UNIX, unix.AF_INET, unix.AF_INET6} {
		add(Errno(unix.EPROTONOSUPPORT), one("socket"), low32(0, family))
	}
	add(Errno(unix.EPROTONOSUPPORT), one("socketpair"), low32(0, unix.AF_UNIX))
	add(Errno(unix.EAFNOSUPPORT), []string{"socket", "socketpair"})

	// A file with a set-ID bit outlives the jail and its no_new_privs. The mode
	// counts only if the call creates a file; otherwise its register is garbage.
	const (
		setID   = unix.S_ISUID | unix.S_ISGID
		creates = unix.O_CREAT | unix.O_TMPFILE&^unix.O_DIRECTORY
	)
	add(Allow, one("open"), masked(1, creates, 0))
	add(Allow, one("open"), masked(2, setID, 0))
	add(Allow, one("openat"), masked(2, creates, 0))
	add(Allow, one("openat"), masked(3, setID, 0))
	add(Allow, []string{"chmod", "creat", "fchmod", "mkdir"}, masked(1, setID, 0))
	add(Allow, []string{"fchmodat", "fchmodat2", "mkdirat"}, masked(2, setID, 0))
	for _, typ := range []uint64{0, unix.S_IFREG, unix.S_IFIFO, unix.S_IFSOCK} {
		add(Allow, one("mknod"), masked(1, unix.S_IFMT|setID, typ))
		add(Allow, one("mknodat"), masked(2, unix.S_IFMT|setID, typ))
	}
	add(eperm, []string{"open", "openat", "chmod", "creat", "fchmod", "mkdir",
		"fchmodat", "fchmodat2", "mkdirat", "mknod", "mknodat"})

	// PER_LINUX, PER_LINUX32, both with UNAME26, and the query. The others turn
	// off a protection: READ_IMPLIES_EXEC, MMAP_PAGE_ZERO, ADDR_NO_RANDOMIZE.
	for _, v := range []uint64{0, 8, 0x20000, 0x20008, 0xffffffff} {
		add(Allow, one("personality"), low32(0, v))
	}
	add(eperm, one("personality"))

	// Typing into, or taking over, a terminal that was inherited (A20).
	for _, cmd := range []uint64{unix.TIOCSTI, tiocLinux, unix.TIOCSETD, unix.TIOCCONS} {
		add(eperm, one("ioctl"), low32(1, cmd))
	}
	add(Allow, one("ioctl"))

	add(eperm, one("prctl"), low32(0, unix.PR_SET_SECCOMP))
	add(Allow, one("prctl"))
	return p
}

// tiocLinux is missing from x/sys/unix.
const tiocLinux = 0x541c

// low32 compares an argument that the kernel reads as an int.
func low32(index uint, v uint64) Arg { return masked(index, 0xffffffff, v) }

func masked(index uint, mask, v uint64) Arg {
	return Arg{Index: index, Op: MaskedEqual, Mask: mask, Value: v}
}
