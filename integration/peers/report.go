package main

import (
	"debug/buildinfo"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"math/bits"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"example.com/jail/integration/internal/measure"
	"example.com/jail/jail"
)

// machine is where and when a run took place.
type machine struct {
	Date   string `json:"date"`
	Kernel string `json:"kernel"`
	CPU    string `json:"cpu"`
	Cores  int    `json:"cores"`
	Commit string `json:"commit"`
	Load   string `json:"load_at_start"`
	// LoadEnd tells whether something else ran beside.
	LoadEnd  string  `json:"load_at_end"`
	Seed     uint64  `json:"seed"`
	Rounds   int     `json:"rounds"`
	PauseMS  float64 `json:"pause_ms"`
	IdleBusy float64 `json:"busy_without_starts"`
}

func readMachine(o options) machine {
	return machine{
		Date: time.Now().Format("2006-01-02 15:04"), Kernel: jail.KernelRelease(), CPU: cpuModel(), Cores: runtime.NumCPU(),
		Commit: commit(), Load: measure.Load(), Seed: o.seed, Rounds: o.rounds, PauseMS: o.pause.Seconds() * 1e3,
	}
}

// idleEnough is how much of one processor may be busy without starts before the
// figures are called wrong.
const idleEnough = 0.05

func cpuModel() string {
	b, _ := os.ReadFile("/proc/cpuinfo")
	for _, line := range strings.Split(string(b), "\n") {
		if k, v, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(k) == "model name" {
			return strings.TrimSpace(v)
		}
	}
	return "unknown"
}

// commit names what was measured; "+" says that the tree has changes.
func commit() string {
	b, err := exec.Command("git", "rev-parse", "--short", "HEAD").Output()
	if err != nil {
		return "unknown"
	}
	c := strings.TrimSpace(string(b))
	if changes, err := exec.Command("git", "status", "--porcelain", "--untracked-files=no").Output(); err != nil || len(changes) > 0 {
		c += "+"
	}
	return c
}

// version asks a peer what it is. Go programs that cannot tell have it in their
// build information.
func (s *setup) version(argv []string) string {
	path, err := s.look(argv[0])
	if err != nil {
		return ""
	}
	if len(argv) > 1 {
		b, _ := exec.Command(path, argv[1:]...).Output()
		line, _, _ := strings.Cut(strings.TrimSpace(string(b)), "\n")
		return line
	}
	if info, err := buildinfo.ReadFile(path); err == nil {
		return info.Main.Path + " " + info.Main.Version
	}
	return "does not tell"
}

// byTime sorts results by the median start of the static program; those without
// one are last.
func byTime(results []*result) []*result {
	sorted := slices.Clone(results)
	slices.SortStableFunc(sorted, func(a, b *result) int {
		x, y := a.Times[nothing.name].ms(50), b.Times[nothing.name].ms(50)
		switch {
		case math.IsNaN(x) && math.IsNaN(y):
			return strings.Compare(a.Row, b.Row)
		case math.IsNaN(x):
			return 1
		case math.IsNaN(y):
			return -1
		}
		return int(math.Copysign(1, x-y))
	})
	return sorted
}

// number writes a figure for a table, - for none.
func number(format string, v float64) string {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return "-"
	}
	return fmt.Sprintf(format, v)
}

// writeReport prints the tables.
func writeReport(to io.Writer, m machine, results []*result) error {
	var measured, missing []*result
	for _, r := range byTime(results) {
		if r.Unavailable == "" {
			measured = append(measured, r)
		} else {
			missing = append(missing, r)
		}
	}
	w := tabwriter.NewWriter(to, 0, 0, 2, ' ', 0)
	row := func(cells ...any) {
		for i, c := range cells {
			if i > 0 {
				fmt.Fprint(w, "\t")
			}
			fmt.Fprint(w, c)
		}
		fmt.Fprintln(w)
	}
	title := func(text string) { w.Flush(); fmt.Fprintf(to, "\n%s\n", text) }

	fmt.Fprintf(to, "%s, commit %s, Linux %s, %s, %d cores, load %s at the start, %s at the end\n",
		m.Date, m.Commit, m.Kernel, m.CPU, m.Cores, m.Load, m.LoadEnd)
	fmt.Fprintf(to, "%d rounds in random order (seed %d), slow rows in one of %d, %g ms before each start\n", m.Rounds, m.Seed, slowEvery, m.PauseMS)

	if m.IdleBusy > idleEnough {
		fmt.Fprintf(to, "THE MACHINE WAS NOT IDLE: %.0f %% of one processor were busy without any start. Times are too long and CPU times wrong.\n", m.IdleBusy*100)
	}

	title("start to exit from idle, ms")
	row("", "true: min", "p50", "p99", "python: min", "p50", "p99", "20 MiB: min", "p50", "p99", "starts", "fails", "CPU ms/start", "memory limit", "")
	for _, r := range measured {
		cells := []any{r.Row}
		starts, fails := 0, 0
		for _, work := range works {
			s := r.Times[work.name]
			for _, p := range []float64{0, 50, 99} {
				cells = append(cells, number("%.2f", s.ms(p)))
			}
			if s != nil {
				starts, fails = starts+len(s.NS), fails+s.Fails
			}
		}
		cpu := "-"
		if r.CPU != nil {
			cpu = number("%.1f", r.CPU.PerMS)
		}
		row(append(cells, starts, fails, cpu, r.Posture.limit(), r.Note)...)
	}

	title("what was on, seen from inside")
	row("", "own namespaces", "write to /", "capabilities eff/bnd", "no_new_privs", "seccomp", "uid: in, host", "memory limit", "takes "+mib(2*memoryLimit), "pids limit", "sees processes", "the host's")
	for _, r := range measured {
		p := r.Posture
		if p == nil {
			row(r.Row, "unknown")
			continue
		}
		row(r.Row, p.namespaces(), p.Root, capabilities(p.CapEff)+"/"+capabilities(p.CapBnd), p.NNP, p.Seccomp, p.UID+", "+or(p.HostUID, "not seen"),
			p.limit(), yes(p.Hog), p.PIDs, p.Processes, yes(p.HostSeen))
	}

	title("starts a second of true, without pauses (p99 of one start, ms)")
	head := []any{""}
	for _, n := range levels {
		head = append(head, fmt.Sprintf("%d at once", n))
	}
	row(append(head, "fails")...)
	for _, r := range measured {
		cells, fails := []any{r.Row}, 0
		for _, x := range r.Rates {
			cells = append(cells, fmt.Sprintf("%.0f (%s)", x.PerSecond, number("%.0f", x.ms(99))))
			fails += x.Fails
		}
		if len(r.Rates) > 0 {
			row(append(cells, fails)...)
		}
	}

	title("memory of a sandbox whose program sleeps, KiB")
	row("", "processes", "PSS", "private", "charged to its cgroup")
	for _, r := range measured {
		if f := r.Memory; f != nil {
			charge := "-"
			if f.Charge >= 0 {
				charge = fmt.Sprint(f.Charge)
			}
			row(r.Row, f.Processes, f.PSS, f.Private, charge)
		}
	}
	w.Flush()
	fmt.Fprintf(to, `
fails: wrong exit code, length or checksum. p99 of fewer than 100 starts is the slowest.
CPU: time of all processors that was not idle over a batch, in steps of 10 ms, less the %.1f %% of one processor without starts.
RLIMIT_AS bounds the address space of each process, a cgroup the memory of all of a sandbox.
Memory: the sandbox's processes up to the launcher; jail.Run's launcher and go-judge's server serve many sandboxes
and are not counted. What the kernel itself keeps for a sandbox is only in the last column.
`, m.IdleBusy*100)

	if len(missing) > 0 {
		title("not measured")
		for _, r := range missing {
			row(r.Row, r.Unavailable)
		}
	}
	title("versions")
	for _, r := range measured {
		if r.Version != "" {
			row(r.Row, r.Version)
		}
	}
	title("failed starts")
	n := 0
	for _, r := range measured {
		for _, f := range r.failures() {
			row(r.Row, f)
			n++
		}
	}
	if n == 0 {
		row("none")
	}
	return w.Flush()
}

// failures lists what went wrong in a row, one line for each figure.
func (r *result) failures() []string {
	var all []string
	add := func(what string, s *series) {
		if s != nil && s.Fails > 0 {
			all = append(all, fmt.Sprintf("%s: %d of %d: %s", what, s.Fails, s.Fails+len(s.NS), strings.Join(strings.Fields(s.Error), " ")))
		}
	}
	for _, w := range works {
		add(w.name, r.Times[w.name])
	}
	if r.CPU != nil && r.CPU.Error != "" {
		all = append(all, "CPU batch: "+r.CPU.Error)
	}
	for i := range r.Rates {
		add(fmt.Sprintf("%d at once", r.Rates[i].AtOnce), &r.Rates[i].series)
	}
	return all
}

func (p *posture) namespaces() string {
	switch {
	case p.Kernel != "":
		return "own kernel"
	case len(p.Namespaces) == len(namespaces):
		return "all 7"
	case len(p.Namespaces) == 0:
		return none
	}
	return strings.Join(p.Namespaces, " ")
}

// capabilities counts those of a set that the kernel writes as hexadecimal.
func capabilities(set string) string {
	n, err := strconv.ParseUint(set, 16, 64)
	if err != nil {
		return "?"
	}
	return strconv.Itoa(bits.OnesCount64(n))
}

func yes(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

func or(s, otherwise string) string {
	if s == "" {
		return otherwise
	}
	return s
}

// writeJSON writes everything that was measured.
func writeJSON(file string, m machine, results []*result) error {
	b, err := json.MarshalIndent(map[string]any{"machine": m, "results": results}, "", " ")
	if err != nil {
		return err
	}
	return os.WriteFile(file, append(b, '\n'), 0o644)
}
