package main

import (
	"bytes"
	"context"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestSeriesCountsFailuresApart(t *testing.T) {
	var s series
	if ms := s.ms(50); !math.IsNaN(ms) {
		t.Errorf("%g ms of no start", ms)
	}
	s.add(3e6, nil)
	s.add(1e6, errors.New("first"))
	s.add(1e6, nil)
	s.add(9e6, errors.New("second"))
	if s.Fails != 2 || s.Error != "first" || s.ms(0) != 1 || s.ms(99) != 3 {
		t.Errorf("%+v, min %g, p99 %g", s, s.ms(0), s.ms(99))
	}
}

// liar starts the real program and changes what it answered.
type liar struct {
	starter
	lie func(*output)
}

func (l liar) start(slot int, argv []string, out *output) error {
	err := l.starter.start(slot, argv, out)
	l.lie(out)
	return err
}

func TestWrongAnswersAreFailures(t *testing.T) {
	s := testSetup(t)
	honest, err := openExec(s)
	if err != nil {
		t.Fatal(err)
	}
	shell := func(text string) starter { return newCommand(s, "/bin/sh", "-c", text, "sh") }
	for _, test := range []struct {
		name    string
		starter starter
		work    *work
		want    string // "" for a right answer
	}{
		{"true", honest, nothing, ""},
		{"python", honest, script, ""},
		{"stream", honest, stream, ""},
		{"exit code", shell("exit 3"), nothing, "exit status 3"},
		{"message of a tool", shell("echo no such root >&2; exit 3"), nothing, "no such root"},
		{"signal", shell("kill -9 $$"), nothing, "signal: killed"},
		{"output without need", shell("echo x"), nothing, "2 bytes of output, want 0"},
		{"no output", shell("exit 0"), script, "0 bytes of output, want 2"},
		{"other output", shell("echo 2"), script, "wrong checksum"},
		{"endless output", shell("exec cat /dev/zero"), stream, errTooLong.Error()},
		{"exit code of a library", liar{honest, func(o *output) { o.exit = 1 }}, nothing, "exit code 1"},
		{"lost block", liar{honest, func(o *output) { o.bytes = o.bytes[blockSize:] }}, stream, "bytes of output"},
		{"blocks out of order", liar{honest, func(o *output) {
			first := slices.Clone(o.bytes[:blockSize])
			copy(o.bytes, o.bytes[blockSize:2*blockSize])
			copy(o.bytes[blockSize:], first)
		}}, stream, "wrong checksum"},
		{"one byte", liar{honest, func(o *output) { o.bytes[12345678]++ }}, stream, "wrong checksum"},
		{"answer that cannot be decoded", liar{honest, func(o *output) { o.decode = func() error { return decodeJudge(o) } }}, nothing, "JSON"},
		{"missing tool", newCommand(s, "/nonexistent/tool"), nothing, "no such file"},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := once(test.starter, 0, test.work, newOutput(2*stream.size))
			if test.want == "" {
				if err != nil {
					t.Fatal(err)
				}
			} else if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want one with %q", err, test.want)
			}
		})
	}
}

func TestAnswersOfTheServerAreDecoded(t *testing.T) {
	for _, test := range []struct {
		body, want, bytes string
		exit              int
	}{
		{`[{"status":"Accepted","exitStatus":0,"files":{"stdout":"a\n\u00e9"}}]`, "", "a\né", 0},
		{`[{"status":"Nonzero Exit Status","exitStatus":3,"files":{"stderr":"why"}}]`, "why", "", 3},
		{`[{"status":"Memory Limit Exceeded","exitStatus":9}]`, "Memory Limit", "", 9},
		{`[]`, "0 results", "", 0},
		{`{"error":1}`, "cannot unmarshal", "", 0},
	} {
		o := newOutput(1024)
		o.bytes = append(o.bytes, test.body...)
		err := decodeJudge(o)
		if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: error %v, want %q", test.body, err, test.want)
		}
		if err == nil && (string(o.bytes) != test.bytes || o.exit != test.exit) {
			t.Errorf("%s: %q, exit %d", test.body, o.bytes, o.exit)
		}
	}
}

// badResults are rows as a bad day makes them.
func badResults() []*result {
	failing := &series{Fails: 5, Error: "exit status 1:\n<no> & \"none\""}
	good := &series{NS: []int64{3e6, 1e6, 2e6}}
	return []*result{
		{Row: "never measured", Unavailable: "not\tinstalled"},
		{Row: "without a success", Times: map[string]*series{nothing.name: failing}, Posture: &posture{Memory: none},
			Rates: []rate{{AtOnce: 1, series: *failing}}, CPU: &cpuTime{PerMS: math.NaN(), Error: "x"}, Memory: &footprint{Charge: -1}},
		{Row: "interrupted before anything", Times: map[string]*series{}},
		{Row: `<&"odd">`, Times: map[string]*series{nothing.name: good}, Posture: &posture{Memory: "cgroup 64 MiB"}},
		{Row: "mine", Ours: true, Times: map[string]*series{nothing.name: {NS: []int64{0, 0}}}},
		{Row: "huge", Times: map[string]*series{nothing.name: {NS: []int64{int64(time.Hour)}}}, Posture: &posture{Memory: addressSpace + "64 MiB"}},
	}
}

func TestTablesTellWhatIsMissing(t *testing.T) {
	var b bytes.Buffer
	if err := writeReport(&b, machine{Rounds: 3, Seed: 42}, badResults()); err != nil {
		t.Fatal(err)
	}
	text := b.String()
	if strings.Contains(text, "NaN") || strings.Contains(text, "Inf") {
		t.Error("a figure that is none is printed")
	}
	for _, want := range []string{"seed 42", "not\tinstalled", `<no> & "none"`, "1 at once: 5 of 5", `<&"odd">`} {
		if !strings.Contains(text, want) && !strings.Contains(strings.Join(strings.Fields(text), " "), strings.Join(strings.Fields(want), " ")) {
			t.Errorf("the report does not tell %q:\n%s", want, text)
		}
	}
}

func TestChartIsWellFormedWhateverTheResults(t *testing.T) {
	var many []*result
	for i := range 40 {
		many = append(many, &result{Row: fmt.Sprint("row ", i), Times: map[string]*series{nothing.name: {NS: []int64{int64(i+1) * 1e6}}}})
	}
	for name, results := range map[string][]*result{"nothing": nil, "bad": badResults(), "many": many} {
		svg := chart(machine{CPU: "A & B <fast>"}, results)
		if len(svg) > 20<<10 {
			t.Errorf("%s: %d bytes", name, len(svg))
		}
		d := xml.NewDecoder(strings.NewReader(svg))
		bars := 0
		for {
			token, err := d.Token()
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatalf("%s: %v\n%s", name, err, svg)
			}
			if e, ok := token.(xml.StartElement); ok && e.Name.Local == "rect" && strings.HasPrefix(e.Attr[0].Value, "bar") {
				bars++
			}
		}
		want := map[string]int{"nothing": 0, "bad": 2, "many": 40}[name]
		if bars != want || strings.Contains(svg, "NaN") || strings.Contains(svg, "Inf") {
			t.Errorf("%s: %d bars, want %d\n%s", name, bars, want, svg)
		}
	}
}

func TestOwnRowsHaveToSucceed(t *testing.T) {
	for _, test := range []struct {
		name string
		r    result
		fail bool
	}{
		{"good", result{Ours: true, Times: map[string]*series{nothing.name: {NS: []int64{1}}}}, false},
		{"not measured", result{Ours: true, Unavailable: "x"}, true},
		{"one failure", result{Ours: true, Times: map[string]*series{nothing.name: {NS: []int64{1}, Fails: 1}}}, true},
		{"failure at once", result{Ours: true, Rates: []rate{{series: series{Fails: 1}}}}, true},
		{"a peer's", result{Unavailable: "x"}, false},
	} {
		if err := oursFailed([]*result{&test.r}); (err != nil) != test.fail {
			t.Errorf("%s: %v", test.name, err)
		}
	}
}

func TestPostureIsReadFromTheProbe(t *testing.T) {
	var p posture
	p.Memory, p.PIDs = none, none
	own, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	p.inside("ns.user user:[1]\nns.mnt mnt:[2]\nns.net " + own + "\nnnp \t1\nseccomp\t2\ncapeff 0000\ncapbnd 00ff\nuid 7\n" +
		"rlimit.as 67108864\nrlimit.nproc 5\nroot EROFS\nprocesses 2\nhost unseen\nkernel Linux version other\n")
	want := posture{
		Kernel: "Linux version other", Namespaces: []string{"user", "mnt"}, Root: "EROFS", NNP: "1", CapEff: "0000", CapBnd: "00ff", UID: "7",
		Memory: "RLIMIT_AS 64 MiB", PIDs: "RLIMIT_NPROC 5", Processes: "2",
	}
	got, _ := json.Marshal(p)
	wanted, _ := json.Marshal(want)
	if !bytes.Equal(got, wanted) {
		t.Errorf("\n got %s\nwant %s", got, wanted)
	}
}

func TestRowsAreChosenByName(t *testing.T) {
	some, err := selectRows(allRows(), "bwrap, jail run")
	if err != nil || len(some) != 2 || some[0].name != "bwrap" || some[1].name != "jail run" {
		t.Errorf("%v, %v", some, err)
	}
	if _, err := selectRows(allRows(), "brwap"); err == nil || !strings.Contains(err.Error(), "bwrap") {
		t.Errorf("error %v does not name the rows", err)
	}
}

func TestMissingPeersAreListed(t *testing.T) {
	s := testSetup(t)
	t.Setenv("PATH", "/nonexistent")
	for _, r := range allRows() {
		if r.ours || r.name == "os/exec" {
			continue
		}
		if st, err := r.open(s); !errors.Is(err, errNotInstalled) {
			t.Errorf("%s: %v, %v", r.name, st, err)
		}
	}
}

// A whole run, with the floor, this project and a peer that lies.
func TestRunMeasuresAndLeavesNothing(t *testing.T) {
	s := testSetup(t)
	rows := []*row{
		{name: "os/exec", open: openExec},
		{name: "jail.Run", ours: true, open: openLibrary},
		{name: "liar", open: func(s *setup) (starter, error) {
			honest, err := openExec(s)
			return liar{honest, func(o *output) {
				if len(o.bytes) == script.size {
					o.bytes[0]++
				}
			}}, err
		}},
		{name: "refuses", open: func(s *setup) (starter, error) { return newCommand(s, "/bin/false"), nil }},
	}
	b := newBench(s, options{rounds: 3, seed: 1, cpuStarts: 2, cell: 20 * time.Millisecond}, io.Discard)
	err := b.open(context.Background(), rows)
	if err == nil {
		err = b.run(context.Background())
	}
	if err := errors.Join(err, b.close()); err != nil {
		t.Fatal(err)
	}
	by := map[string]*result{}
	for _, r := range b.results {
		by[r.Row] = r
	}
	if err := oursFailed(b.results); err != nil {
		t.Error(err)
	}
	if got := by["refuses"].Unavailable; !strings.Contains(got, "refuses this host") {
		t.Errorf("refuses: unavailable %q", got)
	}
	if got := by["liar"].Times[script.name]; got == nil || got.Fails != 3 || len(got.NS) != 0 {
		t.Errorf("liar: %+v", got)
	}
	for _, name := range []string{"os/exec", "jail.Run"} {
		r := by[name]
		for _, w := range works {
			if got := r.Times[w.name]; got == nil || len(got.NS) != 3 || got.Fails != 0 {
				t.Errorf("%s: %s: %+v", name, w.name, got)
			}
		}
		if len(r.Rates) != len(levels) || r.CPU == nil || r.Memory == nil || r.Memory.PSS <= 0 {
			t.Errorf("%s: %+v", name, r)
		}
	}
	if p := by["os/exec"].Posture; len(p.Namespaces) != 0 || !p.HostSeen || !p.Hog || p.limit() != none {
		t.Errorf("os/exec: %+v", p)
	}
	if p := by["jail.Run"].Posture; len(p.Namespaces) != len(namespaces) || p.HostSeen || p.Hog || p.limit() != "cgroup 64 MiB" ||
		p.Root != "EROFS" || p.NNP != "1" || p.Seccomp != "2" || capabilities(p.CapEff) != "0" || p.HostUID == "0" || p.HostUID == "" {
		t.Errorf("jail.Run: %+v", p)
	}

	file := filepath.Join(t.TempDir(), "raw.json")
	if err := writeJSON(file, readMachine(b.options), b.results); err != nil {
		t.Fatal(err)
	}
	if err := s.close(); err != nil {
		t.Fatal(err)
	}
	for _, left := range []string{s.work, s.cache.Dir} {
		if _, err := os.Lstat(left); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is left: %v", left, err)
		}
	}
}

func TestInterruptedRunLeavesNothing(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	c := config{options: options{rounds: 1000, seed: 1, cpuStarts: 1, cell: time.Millisecond}, only: "os/exec,jail.Run"}
	time.AfterFunc(time.Second, cancel)
	if err := c.run(ctx, io.Discard, io.Discard); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	for _, pattern := range []string{"/var/tmp/peers-%d-*", "/run/jail-peers-%d", "/sys/fs/cgroup/*/peers-%d-*"} {
		if left, _ := filepath.Glob(fmt.Sprintf(pattern, os.Getpid())); len(left) > 0 {
			t.Errorf("left: %s", left)
		}
	}
}

// testSetup is a setup that is closed with the test, if it is not before.
func testSetup(t *testing.T) *setup {
	t.Helper()
	s, err := newSetup("", "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.close(); err != nil {
			t.Error(err)
		}
	})
	return s
}
