/*
 * The program that every row of the benchmark starts, linked statically so that
 * it runs in any root. Its first argument says what it does.
 *
 *   true                        nothing
 *   out BLOCKS                  BLOCKS times 64 KiB on stdout; each block starts
 *                               with its number, so lost ones are noticed
 *   hold SECONDS TOKEN          sleeps, at most until SIGTERM; TOKEN is how its
 *                               process is found
 *   hog BYTES                   touches memory; "held" if it got all of it
 *   probe SECONDS TOKEN PID COMM
 *                               prints what it sees of its sandbox as lines of
 *                               "key value", then does as hold. PID and COMM
 *                               are a process of the host
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

enum { BLOCK = 64 << 10 };

static int out(long blocks)
{
	static char buf[BLOCK];
	for (int i = 0; i < BLOCK; i++)
		buf[i] = 'a' + i % 26;
	for (long n = 0; n < blocks; n++) {
		char head[17];
		snprintf(head, sizeof head, "%016lx", n);
		memcpy(buf, head, 16);
		for (size_t done = 0; done < BLOCK;) {
			ssize_t w = write(1, buf + done, BLOCK - done);
			if (w < 0 && errno == EINTR)
				continue;
			if (w < 0)
				return 1;
			done += w;
		}
	}
	return 0;
}

static void end(int signal)
{
	(void)signal;
	_exit(0);
}

static int hold(double seconds)
{
	/* A handler, since the first process of a namespace has no default. */
	signal(SIGTERM, end);
	struct timespec t = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
	while (nanosleep(&t, &t) < 0 && errno == EINTR)
		;
	return 0;
}

static int hog(size_t bytes)
{
	char *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (p == MAP_FAILED) {
		puts("refused");
		return 3;
	}
	for (size_t i = 0; i < bytes; i += 4096)
		p[i] = 1;
	puts("held");
	return 0;
}

/* line prints the first line of a file that starts with a prefix. */
static void line(const char *key, const char *file, const char *prefix)
{
	char buf[256];
	FILE *f = fopen(file, "re");
	if (!f)
		return;
	while (fgets(buf, sizeof buf, f)) {
		if (strncmp(buf, prefix, strlen(prefix)) == 0) {
			printf("%s %s", key, buf + strlen(prefix));
			break;
		}
	}
	fclose(f);
}

static void limit(const char *key, int resource)
{
	struct rlimit r;
	if (getrlimit(resource, &r) == 0 && r.rlim_cur != RLIM_INFINITY)
		printf("%s %llu\n", key, (unsigned long long)r.rlim_cur);
}

static int probe(double seconds, const char *pid, const char *comm)
{
	static const char *names[] = {"user", "pid", "mnt", "ipc", "uts", "net", "cgroup"};
	char path[PATH_MAX], got[PATH_MAX];
	for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
		snprintf(path, sizeof path, "/proc/self/ns/%s", names[i]);
		ssize_t n = readlink(path, got, sizeof got - 1);
		if (n > 0)
			printf("ns.%s %.*s\n", names[i], (int)n, got);
	}
	line("nnp", "/proc/self/status", "NoNewPrivs:");
	line("seccomp", "/proc/self/status", "Seccomp:");
	line("capeff", "/proc/self/status", "CapEff:");
	line("capbnd", "/proc/self/status", "CapBnd:");
	line("uidmap", "/proc/self/uid_map", "");
	line("kernel", "/proc/version", "");
	printf("uid %u\n", getuid());
	limit("rlimit.as", RLIMIT_AS);
	limit("rlimit.nproc", RLIMIT_NPROC);

	int fd = open("/.write-test", O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
	if (fd >= 0) {
		puts("root writable");
		close(fd);
		unlink("/.write-test");
	} else {
		printf("root %s\n", strerrorname_np(errno));
	}

	long processes = 0;
	DIR *d = opendir("/proc");
	for (struct dirent *e; d && (e = readdir(d));)
		processes += e->d_name[0] >= '1' && e->d_name[0] <= '9';
	if (d)
		closedir(d);
	printf("processes %ld\n", processes);
	snprintf(path, sizeof path, "/proc/%s/comm", pid);
	int c = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t n = c < 0 ? 0 : read(c, got, sizeof got - 1);
	got[n < 0 ? 0 : n] = 0;
	got[strcspn(got, "\n")] = 0;
	printf("host %s\n", n > 0 && strcmp(got, comm) == 0 ? "seen" : "unseen");
	fflush(stdout);
	return hold(seconds);
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "";
	if (strcmp(what, "true") == 0)
		return 0;
	if (strcmp(what, "out") == 0 && argc == 3)
		return out(atol(argv[2]));
	if (strcmp(what, "hold") == 0 && argc == 4)
		return hold(atof(argv[2]));
	if (strcmp(what, "hog") == 0 && argc == 3)
		return hog(strtoull(argv[2], NULL, 10));
	if (strcmp(what, "probe") == 0 && argc == 6)
		return probe(atof(argv[2]), argv[4], argv[5]);
	fprintf(stderr, "payload: unknown arguments\n");
	return 2;
}
