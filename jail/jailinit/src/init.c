// The init of a jail: a static program without libc that turns a clone of
// itself into one jail and then is its pid 1.
//
// It runs as four tasks. The forker, one for each launcher, clones a stager for
// each jail that the launcher asks for: it is small and has no descriptors to
// copy, however many jails the launcher holds. The stager has the host's root
// rights and begins before the launcher has made the rest of the jail; it enters
// the template's mount namespace, clones pid 1 into new namespaces, writes its id
// maps and exits. Pid 1 mounts /proc and /tmp, drops everything it may do, starts
// the program and reports its exact wait status. The program is pid 2. Stagers
// and pids 1 are children of the launcher.
//
// A jail of a pool waits in between: held right before the program is started,
// or parked with a program that waits for its Start.
//
// jail.go of this package mirrors the request and the messages. Everything
// here is single-threaded and allocates nothing but the request's pages.

#include <asm/ioctls.h>
#include <asm/signal.h>
#include <asm/unistd.h>
#include <linux/audit.h>
#include <linux/capability.h>
#include <linux/close_range.h>
#include <linux/errno.h>
#include <linux/fcntl.h>
#include <linux/filter.h>
#include <linux/keyctl.h>
#include <linux/magic.h>
#include <linux/mman.h>
#include <linux/mount.h>
#include <linux/openat2.h>
#include <linux/poll.h>
#include <linux/prctl.h>
#include <linux/resource.h>
#include <linux/socket.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <linux/time.h>
#include <linux/wait.h>
#include <stddef.h>
#include <stdint.h>

#if !defined(__x86_64__)
#error "the init's system call stubs are written for x86_64"
#endif

typedef uint32_t u32;
typedef int32_t s32;
typedef uint64_t u64;

// Descriptors of the stager.
enum {
	FD_PROGRAM_END = 5, // 0 to 4 are the program's
	FD_CONTROL = 5,
};

// The forker's socket to the launcher, and how long nothing is asked for before
// it makes the network namespace of the next jail: the most expensive one, 0.6
// ms of a start.
enum {
	FD_FORKS = 0,
	AHEAD_NS = 2000000,
};

enum {
	FLAG_LEAF = 1,     // a cgroup v2 directory, to clone pid 1 into
	FLAG_CHANNELS = 2, // the program keeps fds 3 and 4
	FLAG_HOLD = 4,     // wait for a second request before the program is started
	FLAG_PARK = 8,     // the wall clock begins with a message of the launcher
	FLAG_YIELD = 16,   // until the launcher raises it, at the lowest priority
};

enum {
	FILES_MAX = 8, // passed with a request
	REQUEST_MAGIC = 0x314c494a, // "JIL1"
	REQUEST_MAX = 4 << 20,
};

struct request {
	u32 magic;
	u32 size; // header, filter and strings
	u32 flags;
	u32 reserved;
	u32 argc;
	u32 envc;
	u32 uid, gid; // of the program, inside
	u32 init_id;  // uid and gid of pid 1, inside
	u32 nofile;
	u32 cpu_seconds; // RLIMIT_CPU, 0 for none
	u32 filter_len;  // instructions
	u64 wall_ns;     // 0 for none
	u32 late;        // binds below /tmp and /dev/shm
	u32 files; // passed along: template, directory of the leaf, tasks files
	// struct sock_filter filter[filter_len]
	// NUL-terminated: uid_map gid_map hostname tmp_options workdir, then late
	// times from and to (from with 'd' or 'f' before it), argv, env
};

enum {
	MSG_CHILD = 1,    // a: pid of pid 1 as the launcher sees it
	MSG_HELD = 2,     // u: bytes of /tmp
	MSG_STARTED = 3,  // t: CLOCK_MONOTONIC before the exec, u: bytes of /tmp
	MSG_EXITED = 4,   // a: wait status, b: processes left alive, t: CLOCK_MONOTONIC
	MSG_DEADLINE = 5, // the wall clock ran out in pid 1
	MSG_FAILED = 6,   // a: stage, b: index, c: errno
	MSG_FORKED = 7,   // a: pid of the stager
};

struct message {
	u32 kind;
	s32 a, b, c;
	u64 t, u;
};

// Numbers, not names, cross the process boundary: they never change meaning.
enum {
	STAGE_REQUEST = 1,
	STAGE_PROC = 2,
	STAGE_TEMPLATE = 3,
	STAGE_CLONE = 4,
	STAGE_IDMAP = 5,
	STAGE_CGROUP = 6,
	STAGE_IDS = 7,
	STAGE_HOSTNAME = 8,
	STAGE_MOUNT = 9,
	STAGE_RLIMIT = 10,
	STAGE_CAPS = 11,
	STAGE_SECCOMP = 12,
	STAGE_WORKDIR = 13,
	STAGE_FORK = 14,
	STAGE_EXEC = 15,
};

// ---- system calls ----

static inline long sys6(long n, long a, long b, long c, long d, long e, long f)
{
	register long r10 __asm__("r10") = d;
	register long r8 __asm__("r8") = e;
	register long r9 __asm__("r9") = f;
	long ret;
	__asm__ volatile("syscall"
			 : "=a"(ret)
			 : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
			 : "rcx", "r11", "memory");
	return ret;
}

#define SYS(n, a, b, c, d, e, f, ...) \
	sys6(__NR_##n, (long)(a), (long)(b), (long)(c), (long)(d), (long)(e), (long)(f))
#define sys(n, ...) SYS(n, ##__VA_ARGS__, 0, 0, 0, 0, 0, 0)

static _Noreturn void die(void)
{
	for (;;)
		sys(exit_group, 1);
}

// The compiler may call these for loops and struct assignments.
void *memset(void *p, int c, size_t n)
{
	__asm__ volatile("rep stosb" : "+D"(p), "+c"(n) : "a"(c) : "memory");
	return p;
}

static size_t length(const char *s)
{
	size_t n = 0;

	while (s[n])
		n++;
	return n;
}

// ---- messages ----

static void send(u32 kind, s32 a, s32 b, s32 c, u64 t, u64 u)
{
	struct message m;

	memset(&m, 0, sizeof m);
	m.kind = kind;
	m.a = a;
	m.b = b;
	m.c = c;
	m.t = t;
	m.u = u;
	// MSG_NOSIGNAL and no retry: 40 bytes fit an empty socket buffer, and a
	// launcher that is gone needs no message.
	sys(sendto, FD_CONTROL, &m, sizeof m, 0x4000 /* MSG_NOSIGNAL */, 0, 0);
}

static _Noreturn void fail(int stage, int index, long err)
{
	send(MSG_FAILED, stage, index, (s32)-err, 0, 0);
	die();
}

static void must(int stage, int index, long ret)
{
	if (ret < 0)
		fail(stage, index, ret);
}

// receive fills a buffer from the control socket, of which got bytes are there;
// a launcher that is gone ends the jail.
static void receive(void *buf, size_t got, size_t n)
{
	while (got < n) {
		long r = sys(read, FD_CONTROL, (char *)buf + got, n - got);

		if (r == -EINTR)
			continue;
		if (r <= 0)
			die();
		got += r;
	}
}

static u64 monotonic(void)
{
	struct __kernel_timespec ts;

	sys(clock_gettime, 1 /* CLOCK_MONOTONIC */, &ts);
	return (u64)ts.tv_sec * 1000000000u + (u64)ts.tv_nsec;
}

// ---- the request, unpacked ----

static struct request *req;
static struct sock_filter *filter;
static char *uid_map, *gid_map, *hostname, *tmp_options, *workdir;
static char *late; // first of the late binds' strings
static char **argv, **envp;
static char *path_list; // value of PATH among envp
static size_t mapped;
static int files[FILES_MAX]; // that came with the request
static u32 file_count;

// receive_files takes the first bytes of a request and the descriptors that come
// with them.
static size_t receive_files(int socket, void *buf, size_t n)
{
	struct {
		size_t len;
		int level, type;
		int fd[FILES_MAX];
	} control;
	struct {
		void *base;
		size_t len;
	} part = { buf, n };
	struct {
		void *name;
		int name_len;
		void *parts;
		size_t part_count;
		void *control;
		size_t control_len;
		int flags;
	} m = { 0, 0, &part, 1, &control, sizeof control, 0 };
	long r;

	do
		r = sys(recvmsg, socket, &m, 0x40000000 /* MSG_CMSG_CLOEXEC */);
	while (r == -EINTR);
	if (r <= 0)
		die();
	file_count = 0;
	if (m.control_len > offsetof(__typeof__(control), fd))
		for (; file_count < (control.len - offsetof(__typeof__(control), fd)) / sizeof *files; file_count++)
			files[file_count] = control.fd[file_count];
	return r;
}

static char *next_string(char **p, char *end)
{
	char *s = *p;

	while (*p < end && **p)
		(*p)++;
	if (*p == end)
		fail(STAGE_REQUEST, 2, -EINVAL);
	(*p)++;
	return s;
}

static void read_request(void)
{
	struct request h;
	size_t pointers;
	char *p, *end;

	receive(&h, receive_files(FD_CONTROL, &h, sizeof h), sizeof h);
	if (h.magic != REQUEST_MAGIC || h.size < sizeof h || h.size > REQUEST_MAX || h.argc == 0 ||
	    h.argc > h.size || h.envc > h.size || h.late > h.size / 2 || h.files > FILES_MAX ||
	    h.filter_len > h.size / sizeof *filter)
		fail(STAGE_REQUEST, 0, -EINVAL);
	pointers = (h.argc + h.envc + 2) * sizeof(char *);
	mapped = ((h.size + 15) & ~(size_t)15) + pointers;
	long m = sys(mmap, 0, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	must(STAGE_REQUEST, 1, m < 0 && m > -4096 ? m : 0);
	req = (struct request *)m;
	*req = h;
	receive(req + 1, 0, h.size - sizeof h);

	p = (char *)(req + 1);
	end = (char *)req + h.size;
	filter = (struct sock_filter *)p;
	p += h.filter_len * sizeof *filter;
	uid_map = next_string(&p, end);
	gid_map = next_string(&p, end);
	hostname = next_string(&p, end);
	tmp_options = next_string(&p, end);
	workdir = next_string(&p, end);
	late = p;
	for (u32 i = 0; i < 2 * h.late; i++)
		next_string(&p, end);
	argv = (char **)((char *)req + mapped - pointers);
	envp = argv + h.argc + 1;
	for (u32 i = 0; i < h.argc; i++)
		argv[i] = next_string(&p, end);
	for (u32 i = 0; i < h.envc; i++) {
		char *e = envp[i] = next_string(&p, end);

		if (e[0] == 'P' && e[1] == 'A' && e[2] == 'T' && e[3] == 'H' && e[4] == '=')
			path_list = e + 5;
	}
}

// ---- the stager: host root, inside the launcher's pid namespace ----

static void write_map(int proc, long pid, const char *name, const char *text, int index)
{
	char path[64], digits[24];
	int n = 0, d = 0;
	long fd, r;

	for (long v = pid; v > 0; v /= 10)
		digits[d++] = '0' + v % 10;
	while (d > 0)
		path[n++] = digits[--d];
	path[n++] = '/';
	for (; *name; name++)
		path[n++] = *name;
	path[n] = 0;
	fd = sys(openat, proc, path, O_WRONLY | O_CLOEXEC | O_NOFOLLOW);
	must(STAGE_IDMAP, index, fd);
	do
		r = sys(write, fd, text, length(text));
	while (r == -EINTR);
	must(STAGE_IDMAP, index, r);
	sys(close, fd);
}

static void limits(int resource, u64 value, u64 most, int index)
{
	struct rlimit64 {
		u64 cur, max;
	} old, want = { value, most };
	long r = sys(prlimit64, 0, resource, &want, &old);

	// A launcher that is confined itself may not raise its hard limit: then
	// the lower one holds.
	if (r == -EPERM) {
		must(STAGE_RLIMIT, index, sys(prlimit64, 0, resource, 0, &old));
		want.max = old.max < most ? old.max : most;
		want.cur = want.max < value ? want.max : value;
		r = sys(prlimit64, 0, resource, &want, 0);
	}
	must(STAGE_RLIMIT, index, r);
}

static void limit(int resource, u64 value, int index) { limits(resource, value, value, index); }

static void inherit_nothing(int proc)
{
	static const unsigned char unlimited[] = { RLIMIT_CPU, RLIMIT_FSIZE, RLIMIT_DATA, RLIMIT_AS, RLIMIT_NPROC };
	long fd;

	sys(umask, 022);
	sys(personality, 0);
	// A launcher protected from the OOM killer would make its jails immune.
	fd = sys(openat, proc, "self/oom_score_adj", O_WRONLY | O_CLOEXEC);
	if (fd >= 0) {
		sys(write, fd, "0", 1);
		sys(close, fd);
	}
	limit(RLIMIT_CORE, 0, 0);
	limit(RLIMIT_MEMLOCK, 64 << 10, 2);
	limit(RLIMIT_RTPRIO, 0, 3);
	limit(RLIMIT_NICE, 0, 4);
	// The budget says what a jail may have, not what its launcher was given.
	for (u32 i = 0; i < sizeof unlimited / sizeof *unlimited; i++)
		limit(unlimited[i], RLIM64_INFINITY, 10 + i);
	limits(RLIMIT_STACK, 8 << 20, RLIM64_INFINITY, 6);
	must(STAGE_IDS, 0, sys(setgroups, 0, 0));
}

static void pid1(int released);

// network says that the forker has put the stager into a network namespace that
// no jail has been in.
static _Noreturn void stage(int network)
{
	struct {
		long type, bsize;
		u64 blocks, rest[12];
	} fs;
	struct clone_args args;
	int release[2];
	long proc, pid;

	// Cleared by no one before the clone; the read of the request below ends
	// with EOF if the launcher died earlier than this line.
	sys(prctl, PR_SET_PDEATHSIG, SIGKILL);
	sys(prctl, PR_SET_NAME, "jail-init");
	// A group of its own: one signal of the launcher reaches both tasks of a
	// set-up. A task that leads no session can always have one.
	sys(setpgid, 0, 0);
	send(MSG_FORKED, sys(getpid), 0, 0, 0, 0);

	proc = sys(openat, AT_FDCWD, "/proc", O_PATH | O_DIRECTORY | O_CLOEXEC);
	must(STAGE_PROC, 0, proc);
	// CVE-2025-52881: a tmpfs over /proc would turn a map write into nothing.
	must(STAGE_PROC, 1, sys(fstatfs, proc, &fs));
	if (fs.type != PROC_SUPER_MAGIC)
		fail(STAGE_PROC, 2, -EINVAL);

	inherit_nothing(proc);
	// While the launcher is still at work.
	if (!network)
		must(STAGE_CLONE, 2, sys(unshare, CLONE_NEWNET));

	read_request();
	limit(RLIMIT_NOFILE, req->nofile, 1);
	if (req->flags & FLAG_YIELD)
		must(STAGE_IDS, 9, sys(setpriority, 0 /* PRIO_PROCESS */, 0, 19));
	must(STAGE_TEMPLATE, 0, sys(setns, files[0], CLONE_NEWNS));
	sys(close, files[0]);
	must(STAGE_CLONE, 1, sys(pipe2, release, O_CLOEXEC));

	memset(&args, 0, sizeof args);
	args.flags = CLONE_PARENT | CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC |
		     CLONE_NEWUTS;
	if (req->flags & FLAG_LEAF) {
		args.flags |= CLONE_INTO_CGROUP;
		args.cgroup = files[1];
	}
	pid = sys(clone3, &args, sizeof args);
	must(STAGE_CLONE, 0, pid);
	if (pid == 0) {
		sys(close, release[1]);
		pid1(release[0]);
		die();
	}
	send(MSG_CHILD, pid, 0, 0, 0, 0);
	write_map(proc, pid, "gid_map", gid_map, 0);
	write_map(proc, pid, "uid_map", uid_map, 1);
	must(STAGE_IDMAP, 2, sys(write, release[1], "", 1));
	sys(exit_group, 0);
	die();
}

// ---- the program's side of the fork: shares pid 1's memory until exec ----

static volatile struct {
	int stage, index;
	long err;
} spawn_error;

static _Noreturn void spawn_fail(int stage, int index, long err)
{
	spawn_error.stage = stage;
	spawn_error.index = index;
	spawn_error.err = err;
	die();
}

static void drop_caps(int self)
{
	struct __user_cap_header_struct head = { _LINUX_CAPABILITY_VERSION_3, 0 };
	struct __user_cap_data_struct none[2];
	long r;

	memset(none, 0, sizeof none);
	r = sys(prctl, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL);
	if (r >= 0)
		r = sys(capset, &head, none);
	if (r >= 0)
		r = sys(prctl, PR_SET_NO_NEW_PRIVS, 1);
	if (r < 0) {
		if (self)
			fail(STAGE_CAPS, 1, r);
		spawn_fail(STAGE_CAPS, 2, r);
	}
}

static long try_exec(char *file)
{
	static char buf[4096];
	long worst = -ENOENT;
	char *p = path_list;
	size_t n = length(file);

	for (char *c = file; *c; c++)
		if (*c == '/')
			return sys(execve, file, argv, envp);
	if (!n || !p)
		return -ENOENT;
	for (;;) {
		size_t k = 0;
		long r;

		while (p[k] && p[k] != ':')
			k++;
		// An empty element means the working directory, which untrusted
		// programs write to: it is passed over.
		if (k > 0 && k + n + 2 <= sizeof buf) {
			for (size_t i = 0; i < k; i++)
				buf[i] = p[i];
			buf[k] = '/';
			for (size_t i = 0; i <= n; i++)
				buf[k + 1 + i] = file[i];
			r = sys(execve, buf, argv, envp);
			if (r != -ENOENT && r != -ENOTDIR && r != -EACCES)
				return r;
			if (r == -EACCES)
				worst = r;
		}
		p += k;
		if (!*p)
			return worst;
		p++;
	}
}

static _Noreturn __attribute__((noinline)) void program(void)
{
	struct sock_fprog prog = { req->filter_len, filter };
	u64 none = 0, cpu[2] = { req->cpu_seconds, req->cpu_seconds };
	long r;

	r = sys(setsid);
	if (r < 0)
		spawn_fail(STAGE_IDS, 6, r);
	r = sys(close_range, req->flags & FLAG_CHANNELS ? FD_PROGRAM_END : 3, ~0u, 0);
	if (r < 0)
		spawn_fail(STAGE_FORK, 1, r);
	if (req->cpu_seconds) {
		r = sys(prlimit64, 0, RLIMIT_CPU, cpu, 0);
		if (r < 0 && r != -EPERM) // EPERM: the launcher's own is lower
			spawn_fail(STAGE_RLIMIT, 5, r);
	}
	r = sys(setresgid, req->gid, req->gid, req->gid);
	if (r < 0)
		spawn_fail(STAGE_IDS, 4, r);
	r = sys(setresuid, req->uid, req->uid, req->uid);
	if (r < 0)
		spawn_fail(STAGE_IDS, 5, r);
	drop_caps(0);
	r = sys(chdir, workdir);
	if (r < 0)
		spawn_fail(STAGE_WORKDIR, 0, r);
	sys(rt_sigprocmask, SIG_SETMASK, &none, 0, 8);
	if (req->filter_len) {
		r = sys(seccomp, SECCOMP_SET_MODE_FILTER, 0, &prog);
		if (r < 0)
			spawn_fail(STAGE_SECCOMP, 1, r);
	}
	spawn_fail(STAGE_EXEC, 0, try_exec(argv[0]));
}

// The frame of this function is all that parent and child of the fork share of
// the stack: program never returns into it.
static __attribute__((noinline)) long spawn(void)
{
	long pid = sys(clone, CLONE_VM | CLONE_VFORK | SIGCHLD, 0);

	if (pid == 0)
		program();
	return pid;
}

// ---- pid 1 ----

#define ALLOW(nr) \
	BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_##nr, 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)

// What pid 1 still does once the program runs.
static struct sock_filter own_filter[] = {
	BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch)),
	BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AUDIT_ARCH_X86_64, 1, 0),
	BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
	BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
	ALLOW(ppoll),
	ALLOW(read),
	ALLOW(wait4),
	ALLOW(clock_gettime),
	ALLOW(sendto),
	ALLOW(openat),
	ALLOW(getdents64),
	ALLOW(close),
	ALLOW(exit_group),
	ALLOW(restart_syscall), // after a stop or a freeze
	BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
};

// alive tells whether /proc/NAME/stat shows a process that is no zombie.
static int alive(long proc, const char *name)
{
	char path[32], buf[128];
	int n = 0, state = -1;
	long fd, r;

	for (; *name; name++)
		path[n++] = *name;
	path[n++] = '/';
	path[n++] = 's', path[n++] = 't', path[n++] = 'a', path[n++] = 't', path[n] = 0;
	fd = sys(openat, proc, path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return 0;
	r = sys(read, fd, buf, sizeof buf);
	sys(close, fd);
	// "pid (comm) S ...": comm holds at most 15 bytes, a ')' among them.
	for (int i = 0; i + 2 < r; i++)
		if (buf[i] == ')' && buf[i + 1] == ' ')
			state = buf[i + 2];
	return state != -1 && state != 'Z' && state != 'X';
}

// leftovers counts the living processes of the jail other than pid 1.
static int leftovers(void)
{
	static char buf[4096] __attribute__((aligned(8)));
	struct dirent64 {
		u64 ino, off;
		unsigned short len;
		unsigned char type;
		char name[];
	};
	long proc = sys(openat, AT_FDCWD, "/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC), n;
	int count = 0;

	if (proc < 0)
		return -1;
	while ((n = sys(getdents64, proc, buf, sizeof buf)) > 0)
		for (long at = 0; at < n;) {
			struct dirent64 *d = (struct dirent64 *)(buf + at);

			at += d->len;
			if (d->name[0] < '1' || d->name[0] > '9' || (d->name[0] == '1' && !d->name[1]))
				continue;
			count += alive(proc, d->name);
		}
	sys(close, proc);
	return count;
}

// reap collects what has died. Once the program itself is among it, it reports
// and ends the jail: the kernel kills whatever is left in the pid namespace.
static void reap(long main_pid)
{
	int main_status = 0, ended = 0;
	long pid;

	for (;;) {
		int status;

		pid = sys(wait4, -1, &status, WNOHANG | __WALL, 0);
		if (pid == -EINTR)
			continue;
		if (pid <= 0)
			break;
		if (pid == main_pid) {
			main_status = status;
			ended = 1;
		}
	}
	if (ended) {
		u64 now = monotonic();

		// ECHILD: every orphan would be a child of pid 1, so none is left.
		send(MSG_EXITED, main_status, pid == -ECHILD ? 0 : leftovers(), 0, now, 0);
		sys(exit_group, 0);
		die();
	}
}

static _Noreturn void supervise(long main_pid, long sigfd, u64 deadline, int parked)
{
	struct {
		int fd;
		short events, revents;
	} fds[2] = { { sigfd, POLLIN, 0 }, { FD_CONTROL, POLLIN, 0 } };
	char discard[128];

	for (;;) {
		struct __kernel_timespec ts, *timeout = 0;

		if (deadline) {
			u64 now = monotonic();

			if (now >= deadline) {
				send(MSG_DEADLINE, 0, 0, 0, now, 0);
				die();
			}
			ts.tv_sec = (deadline - now) / 1000000000u;
			ts.tv_nsec = (deadline - now) % 1000000000u;
			timeout = &ts;
		}
		sys(ppoll, fds, 2, timeout, 0, 8);
		// The launcher sends nothing more but the end of the parking:
		// otherwise readable means that it is gone.
		if (fds[1].revents) {
			u64 wall;

			if (!parked || sys(read, FD_CONTROL, &wall, sizeof wall) != sizeof wall)
				die();
			parked = 0;
			deadline = wall ? monotonic() + wall : 0;
		}
		if (fds[0].revents) {
			sys(read, sigfd, discard, sizeof discard);
			reap(main_pid);
		}
		fds[0].revents = fds[1].revents = 0;
	}
}

static void mounts(void)
{
	const u64 flags = MS_NOSUID | MS_NODEV;

	// The template's own /proc stays below and belongs to a dead pid
	// namespace: it shows no process. subset=pid leaves out everything that
	// runc masks one by one (/proc/kcore, /proc/keys, /proc/sys, ...).
	must(STAGE_MOUNT, 0, sys(mount, "proc", "/proc", "proc", flags | MS_NOEXEC, "subset=pid"));
	// One tmpfs for /tmp and /dev/shm, so that one size bounds both.
	must(STAGE_MOUNT, 1, sys(mount, "tmp", "/tmp", "tmpfs", flags, tmp_options));
	must(STAGE_MOUNT, 2, sys(mkdir, "/tmp/shm", 0700));
	must(STAGE_MOUNT, 3, sys(mkdir, "/tmp/tmp", 0700));
	must(STAGE_MOUNT, 4, sys(chown, "/tmp/shm", req->uid, req->gid));
	must(STAGE_MOUNT, 5, sys(chown, "/tmp/tmp", req->uid, req->gid));
	must(STAGE_MOUNT, 6, sys(chmod, "/tmp/shm", 01777));
	must(STAGE_MOUNT, 7, sys(chmod, "/tmp/tmp", 01777));
	must(STAGE_MOUNT, 8, sys(mount, "/tmp/shm", "/dev/shm", 0, MS_BIND, 0));
	must(STAGE_MOUNT, 9, sys(mount, "/tmp/tmp", "/tmp", 0, MS_BIND, 0));
}

// Binds of the template that belong below /tmp or /dev/shm, which were just
// mounted: nobody but pid 1 has written there yet.
static void late_binds(void)
{
	char *p = late;

	for (u32 i = 0; i < req->late; i++) {
		char *from = p, *to = p + length(p) + 1, *c;
		long r = 0;

		for (c = to + 1; *c; c++)
			if (*c == '/') {
				*c = 0;
				r = sys(mkdir, to, 0755);
				*c = '/';
				if (r < 0 && r != -EEXIST)
					fail(STAGE_MOUNT, 100 + i, r);
			}
		if (*from == 'd')
			r = sys(mkdir, to, 0755);
		else
			r = sys(mknod, to, 0100644, 0);
		if (r < 0 && r != -EEXIST)
			fail(STAGE_MOUNT, 100 + i, r);
		must(STAGE_MOUNT, 100 + i, sys(mount, from + 1, to, 0, MS_BIND | MS_REC, 0));
		p = c + 1;
	}
}

static u64 tmp_size(void)
{
	struct {
		long type, bsize;
		u64 blocks, rest[12];
	} fs;

	must(STAGE_MOUNT, 10, sys(statfs, "/tmp", &fs));
	return fs.blocks * (u64)fs.bsize;
}

static void pid1(int released)
{
	struct sock_fprog own = { sizeof own_filter / sizeof *own_filter, own_filter };
	struct {
		int fd;
		short events, revents;
	} gone = { FD_CONTROL, POLLIN, 0 };
	struct __kernel_timespec now = { 0, 0 };
	u64 sigchld = 1ull << (SIGCHLD - 1), wall, started, size;
	long r, sigfd, pid;
	int parked;
	char byte;

	sys(prctl, PR_SET_PDEATHSIG, SIGKILL);

	// cgroup v1: the single-threaded writer moves itself without the grace
	// period that a move by pid waits for. The limits hold from here on.
	for (u32 i = 1; i < req->files; i++) {
		if (i > 1 || !(req->flags & FLAG_LEAF))
			must(STAGE_CGROUP, i, sys(write, files[i], "0", 1));
		sys(close, files[i]);
	}

	do
		r = sys(read, released, &byte, 1);
	while (r == -EINTR);
	if (r != 1)
		die(); // the stager failed and said so
	sys(close_range, FD_CONTROL + 1, ~0u, 0);

	must(STAGE_IDS, 1, sys(setresgid, req->init_id, req->init_id, req->init_id));
	must(STAGE_IDS, 2, sys(setresuid, req->init_id, req->init_id, req->init_id));
	// Changing ids cleared the parent-death signal (prctl(2)); a launcher that
	// died before this line shows as a hang-up of the control socket.
	must(STAGE_IDS, 3, sys(prctl, PR_SET_PDEATHSIG, SIGKILL));
	// It also set the dumpable flag to fs.suid_dumpable, which may be 1.
	must(STAGE_IDS, 8, sys(prctl, PR_SET_DUMPABLE, 0));
	r = sys(ppoll, &gone, 1, &now, 0, 8);
	if (r > 0 && (gone.revents & POLLHUP))
		die();

	must(STAGE_CGROUP, 100, sys(unshare, CLONE_NEWCGROUP));
	must(STAGE_HOSTNAME, 0, sys(sethostname, hostname, length(hostname)));
	mounts();
	size = tmp_size();
	late_binds();
	// The launcher's session keyring would be the program's too. A kernel
	// without keyrings has none to share.
	r = sys(keyctl, KEYCTL_JOIN_SESSION_KEYRING, 0);
	if (r < 0 && r != -ENOSYS)
		fail(STAGE_IDS, 7, r);
	for (int cap = 0; cap < 64; cap++) {
		r = sys(prctl, PR_CAPBSET_DROP, cap);
		if (r == -EINVAL)
			break;
		must(STAGE_CAPS, 0, r);
	}
	sigfd = sys(signalfd4, -1, &sigchld, 8, O_CLOEXEC | O_NONBLOCK);
	must(STAGE_FORK, 2, sigfd);

	if (req->flags & FLAG_HOLD) {
		send(MSG_HELD, 0, 0, 0, 0, size);
		sys(munmap, req, mapped);
		read_request(); // what to run, after all
	}
	started = monotonic();
	pid = spawn();
	must(STAGE_FORK, 0, pid);
	if (spawn_error.stage)
		fail(spawn_error.stage, spawn_error.index, spawn_error.err);
	send(MSG_STARTED, 0, 0, 0, started, size);
	wall = req->wall_ns;
	parked = req->flags & FLAG_PARK;

	for (int fd = 0; fd < FD_PROGRAM_END; fd++)
		sys(close, fd);
	sys(munmap, req, mapped);
	drop_caps(1);
	must(STAGE_SECCOMP, 0, sys(seccomp, SECCOMP_SET_MODE_FILTER, 0, &own));
	supervise(pid, sigfd, wall ? started + wall : 0, parked);
}

// ---- the forker ----

// fork_stager clones the task that the descriptors are for. numbers has a bit
// for each one's number in the stager.
static void fork_stager(u32 numbers, int network)
{
	struct message failed = { MSG_FAILED, STAGE_FORK, 3, 0, 0, 0 };
	long pid = sys(clone, CLONE_PARENT, 0);

	if (pid == 0) {
		for (int fd = 0, n = 0; fd <= FD_CONTROL; fd++)
			if (numbers & (1u << fd))
				sys(dup3, files[n++], fd, 0);
			else
				sys(close, fd);
		sys(close_range, FD_CONTROL + 1, ~0u, 0);
		stage(network);
	}
	if (pid < 0) {
		failed.c = (s32)-pid;
		sys(sendto, files[file_count - 1], &failed, sizeof failed, 0x4000 /* MSG_NOSIGNAL */, 0, 0);
	}
}

static __attribute__((used)) _Noreturn void forker(void)
{
	struct {
		int fd;
		short events, revents;
	} asked = { FD_FORKS, POLLIN, 0 };
	struct {
		u64 handler, flags, restorer, mask;
	} dfl = { 0, 0, 0, 0 };
	u64 all = ~0ull;
	struct {
		u32 numbers, count;
	} fork;
	int network, started = 0;

	sys(prctl, PR_SET_NAME, "jail-forker"); // the exec was by a number
	sys(chdir, "/"); // the launcher's directory may be on a mount that goes
	// Signals ignored by the launcher would stay ignored over exec. From here
	// on none but SIGKILL is heard: the launcher decides on its jails' end.
	for (int s = 1; s <= 64; s++)
		sys(rt_sigaction, s, &dfl, 0, 8);
	sys(rt_sigprocmask, SIG_BLOCK, &all, 0, 8);
	// Everything up to FD_CONTROL is taken, so that what is received is out
	// of the way of the numbers that it gets in a stager.
	sys(close_range, FD_FORKS + 1, ~0u, 0);
	for (int fd = FD_FORKS + 1; fd <= FD_CONTROL; fd++)
		sys(dup3, FD_FORKS, fd, 0);

	// The first one is made while the launcher prepares its first jail. A
	// launcher of a single jail has no use for another.
	network = sys(unshare, CLONE_NEWNET) == 0;
	for (;;) {
		struct __kernel_timespec idle = { 0, AHEAD_NS }; // the kernel writes what is left

		if (!network && started > 1 && sys(ppoll, &asked, 1, &idle, 0, 8) == 0)
			network = sys(unshare, CLONE_NEWNET) == 0;
		receive_files(FD_FORKS, &fork, sizeof fork);
		// Fewer have come if this process may have no more: the launcher
		// sees the end of its control socket.
		if (file_count == fork.count) {
			fork_stager(fork.numbers, network);
			network = 0; // used once
			started += started < 2;
		}
		for (u32 i = 0; i < file_count; i++)
			sys(close, files[i]);
	}
}

// The kernel starts a program with the stack aligned as at a call's return.
__asm__(".globl _start\n_start:\n\tand $-16, %rsp\n\tcall forker\n");
