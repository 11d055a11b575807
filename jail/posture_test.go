package jail_test

import (
	"bufio"
	"context"
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"example.com/jail/jail"
)

var update = flag.Bool("update", false, "rewrite golden files")

// postureScript prints everything that a jail gives to a program: ids,
// capabilities, seccomp, signals, descriptors, limits, namespaces, mounts,
// processes, environment, devices. It runs in the smallest possible program so
// that no runtime changes what is shown.
const postureScript = `
echo == status; cat /proc/self/status | grep -vE '^(Name|Pid|PPid|Ngid|Tgid|Vm|Rss|Hugetlb|voluntary|nonvoluntary|NS|Threads|SigQ|Cpus|Mems|Speculation|x86|Seccomp_filters|untag|State|CoreDumping|THP|FDSize|Kthread)'
echo == fds; for f in /proc/self/fd/*; do readlink $f; done
echo == limits; cat /proc/self/limits
echo == mounts; cut -d' ' -f5- /proc/self/mountinfo
echo == cgroup; cat /proc/self/cgroup
echo == processes; set -- /proc/[0-9]*; echo $*; for f in exe root cwd fd ns/mnt environ maps; do cat /proc/1/$f 2>&1; readlink /proc/1/$f; done
echo == proc; ls /proc | grep -v '^[0-9]' 
echo == environment; env | sort
echo == names; hostname; pwd; tty; umask
echo == dev; for f in /dev/*; do stat -c '%n %A %u %g %t:%T' $f; done
echo == root; ls /
echo == net; cat /proc/self/net/dev
`

var postureVolatile = []struct {
	re *regexp.Regexp
	to string
}{
	{regexp.MustCompile(`pipe:\[\d+\]`), "pipe"},
	{regexp.MustCompile(`uid=\d{8,}`), "uid=N"},
	{regexp.MustCompile(`gid=\d{8,}`), "gid=N"},
	{regexp.MustCompile(`/proc/\d+/fd`), "/proc/N/fd"},
	// What the host's own file system is called is the host's.
	{regexp.MustCompile(`(?m)^(/usr|/lib\d*|/bin|/sbin|/etc/[a-z./]+) (\S+) .*$`), "$1 $2 HOST"},
	{regexp.MustCompile(` (private|shared|master):\d+`), ""},
	{regexp.MustCompile(`size=\d+k`), "size=N"},
	{regexp.MustCompile(`,inode64\b`), ""}, // CONFIG_TMPFS_INODE64
	{regexp.MustCompile(`(?m)^(Max (processes|pending signals|msgqueue size|resident set|file locks|nice priority|realtime timeout) +).*$`), "$1HOST"},
	{regexp.MustCompile(`(?m)^\d+:([a-z_,=]*):/$`), "N:$1:/"},
}

// The whole posture, not spot checks: whatever a change gives to programs shows
// here (B15, J5, A2, A11, A14, A15, A17, A20, B11).
func TestPosture(t *testing.T) {
	checkPosture(t, run(t, shell(postureScript)))
}

// checkPosture compares the output of the postureScript.
func checkPosture(t *testing.T, r result) {
	t.Helper()
	if r.Cause != jail.CauseOK && r.Cause != jail.CauseProgram {
		t.Fatalf("cause %q: %s", r.Cause, r.Error)
	}
	got := r.stdout + "== stderr\n" + r.stderr
	for _, v := range postureVolatile {
		got = v.re.ReplaceAllString(got, v.to)
	}
	got = sortSection(got, "cgroup")
	golden := filepath.Join("testdata", "posture.txt")
	if *update {
		if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("posture differs from %s (-update rewrites it):\n%s", golden, lineDiff(string(want), got))
	}
}

// sortSection leaves only the kinds of lines of a section: hosts differ in
// their cgroup hierarchies, never in that the jail sees itself at each root.
func sortSection(s, name string) string {
	_, rest, ok := strings.Cut(s, "== "+name+"\n")
	if !ok {
		return s
	}
	body, _, _ := strings.Cut(rest, "== ")
	bad := ""
	for _, line := range strings.Split(strings.TrimSpace(body), "\n") {
		if !strings.HasSuffix(line, ":/") {
			bad += line + "\n"
		}
	}
	return strings.Replace(s, "== "+name+"\n"+body, "== "+name+"\nall at /\n"+bad, 1)
}

func lineDiff(want, got string) string {
	in := func(list []string, s string) bool {
		for _, l := range list {
			if l == s {
				return true
			}
		}
		return false
	}
	w, g := strings.Split(want, "\n"), strings.Split(got, "\n")
	var out []string
	for _, l := range w {
		if !in(g, l) {
			out = append(out, "-"+l)
		}
	}
	for _, l := range g {
		if !in(w, l) {
			out = append(out, "+"+l)
		}
	}
	return strings.Join(out, "\n")
}

// A network namespace that was made ahead is one jail's and no other's, nor the
// launcher's: jails that are alive together have different ones.
func TestNetworkNamespacesAreNotShared(t *testing.T) {
	own, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{own: true}
	var jails []*jail.Jail
	for i := range 12 {
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		s := shell("readlink /proc/self/ns/net; exec sleep 600")
		s.Stdout = w
		j, err := jail.Start(context.Background(), s)
		if err != nil {
			t.Fatal(err)
		}
		jails = append(jails, j)
		ns, err := bufio.NewReader(r).ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		if ns = strings.TrimSpace(ns); seen[ns] {
			t.Errorf("jail %d has %s, which is taken", i, ns)
		}
		seen[ns] = true
		r.Close()
		w.Close()
		// With and without the time to make one ahead.
		time.Sleep(time.Duration(i%3) * 10 * time.Millisecond)
	}
	for _, j := range jails {
		j.Kill()
		if r, _ := j.Wait(); r.Cause != jail.CauseCanceled {
			t.Errorf("cause %q: %s", r.Cause, r.Error)
		}
	}
}

// Each namespace of the jail is its own.
func TestNamespacesAreTheJailsOwn(t *testing.T) {
	r := run(t, shell(`for n in user mnt pid ipc uts net cgroup; do echo $n $(readlink /proc/self/ns/$n); done`))
	lines := strings.Split(strings.TrimSpace(r.stdout), "\n")
	if len(lines) != 7 {
		t.Fatalf("printed %q", r.stdout)
	}
	for _, line := range lines {
		name, ns, _ := strings.Cut(line, " ")
		own, err := os.Readlink("/proc/self/ns/" + name)
		if err != nil {
			t.Fatal(err)
		}
		if ns == own || !strings.HasPrefix(ns, name) {
			t.Errorf("%s: %q, the launcher has %q", name, ns, own)
		}
	}
}
