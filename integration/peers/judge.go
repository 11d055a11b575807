package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// judge starts programs by a request to a go-judge server, which runs for the
// whole measurement.
type judge struct {
	cmd    *exec.Cmd
	url    string
	client *http.Client
}

func openJudge(s *setup) (starter, error) {
	path, err := s.look("go-judge")
	if err != nil {
		return nil, err
	}
	dir := filepath.Join(s.work, "go-judge")
	files := filepath.Join(dir, "files")
	if err := os.MkdirAll(files, 0o755); err != nil {
		return nil, err
	}
	mounts := filepath.Join(dir, "mount.yaml")
	if err := os.WriteFile(mounts, []byte(judgeMounts(s.root)), 0o644); err != nil {
		return nil, err
	}
	filter := filepath.Join(dir, "seccomp.yaml")
	if err := os.WriteFile(filter, []byte(judgeFilter()), 0o644); err != nil {
		return nil, err
	}
	addr, err := freeAddress()
	if err != nil {
		return nil, err
	}
	logged, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		return nil, err
	}
	defer logged.Close()
	cmd := exec.Command(path, "-release", "-silent", "-http-addr", addr, "-mount-conf", mounts, "-seccomp-conf", filter,
		"-dir", files, "-no-fallback", "-cgroup-prefix", s.name+"-judge",
		"-parallelism", fmt.Sprint(maxAtOnce), "-pre-fork", fmt.Sprint(maxAtOnce))
	cmd.Stdout, cmd.Stderr = logged, logged
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	j := &judge{cmd: cmd, url: "http://" + addr, client: &http.Client{
		Timeout: timeout, Transport: &http.Transport{MaxIdleConnsPerHost: maxAtOnce},
	}}
	for began := time.Now(); ; time.Sleep(20 * time.Millisecond) {
		r, err := j.client.Get(j.url + "/version")
		if err == nil {
			r.Body.Close()
			return j, nil
		}
		if time.Since(began) > 10*time.Second {
			return nil, errors.Join(fmt.Errorf("the server does not answer%s", lastLine(logged.Name())), j.close())
		}
	}
}

// freeAddress is one of the loopback interface that nobody listens on.
func freeAddress() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer l.Close()
	return l.Addr().String(), nil
}

type judgeFile struct {
	Content *string `json:"content,omitempty"`
	Name    string  `json:"name,omitempty"`
	Max     int64   `json:"max,omitempty"`
}

type judgeCommand struct {
	Args        []string    `json:"args"`
	Env         []string    `json:"env"`
	Files       []judgeFile `json:"files"`
	CPULimit    int64       `json:"cpuLimit"`
	ClockLimit  int64       `json:"clockLimit"`
	MemoryLimit int64       `json:"memoryLimit"`
	ProcLimit   int64       `json:"procLimit"`
}

func (j *judge) start(_ int, argv []string, out *output) error {
	empty := ""
	body, err := json.Marshal(map[string]any{"cmd": []judgeCommand{{
		Args: argv, Env: []string{"PATH=/usr/bin:/bin"},
		Files:    []judgeFile{{Content: &empty}, {Name: "stdout", Max: outputLimit}, {Name: "stderr", Max: 1 << 20}},
		CPULimit: int64(timeout), ClockLimit: int64(timeout), MemoryLimit: memoryLimit, ProcLimit: pidsLimit,
	}}})
	if err != nil {
		return err
	}
	r, err := j.client.Post(j.url+"/run", "application/json", bytes.NewReader(body))
	if err != nil {
		return err
	}
	defer r.Body.Close()
	if err := out.readAll(r.Body); err != nil {
		return err
	}
	if r.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %.200s", r.Status, out.bytes)
	}
	out.decode = func() error { return decodeJudge(out) }
	return nil
}

// decodeJudge turns a response into the program's output and exit code.
func decodeJudge(out *output) error {
	var results []struct {
		Status     string            `json:"status"`
		ExitStatus int               `json:"exitStatus"`
		Error      string            `json:"error"`
		Files      map[string]string `json:"files"`
	}
	if err := json.Unmarshal(out.bytes, &results); err != nil {
		return err
	}
	if len(results) != 1 {
		return fmt.Errorf("%d results, want 1", len(results))
	}
	r := results[0]
	out.bytes, out.exit = out.bytes[:0], r.ExitStatus
	if r.Status != "Accepted" {
		return fmt.Errorf("status %s: %s", r.Status, strings.TrimSpace(r.Error+" "+r.Files["stderr"]))
	}
	_, err := io.WriteString(out, r.Files["stdout"])
	return err
}

func (j *judge) close() error {
	j.client.CloseIdleConnections()
	_ = j.cmd.Process.Signal(syscall.SIGTERM)
	stuck := time.AfterFunc(5*time.Second, func() { _ = j.cmd.Process.Kill() })
	defer stuck.Stop()
	_ = j.cmd.Wait() // its exit code is of no use
	return nil
}

// server is the process that all sandboxes share.
func (j *judge) server() int { return j.cmd.Process.Pid }

// judgeMounts describes the same root. The server keeps output in a file below
// /w.
func judgeMounts(root string) string {
	return fmt.Sprintf(`mount:
  - {type: bind, source: %q, target: /bin, readonly: true}
  - {type: bind, source: /usr, target: /usr, readonly: true}
  - {type: bind, source: /usr/lib, target: /lib, readonly: true}
  - {type: bind, source: /usr/lib64, target: /lib64, readonly: true}
  - {type: bind, source: /dev/null, target: /dev/null}
  - {type: tmpfs, target: /tmp, data: "size=%d"}
  - {type: tmpfs, target: /w, data: "size=%d"}
proc: true
workDir: /w
hostName: peer
domainName: peer
uid: 1000
gid: 1000
`, root+"/bin", tmpLimit, outputLimit)
}

func judgeFilter() string {
	names := slices.Clone(denied)
	return "default_action: allow\nsyscalls:\n  - action: errno\n    names: [" + strings.Join(names, ", ") + "]\n"
}
