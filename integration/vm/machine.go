package main

import (
	"bytes"
	"context"
	"debug/elf"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"time"
)

// A machine is one boot.
type machine struct {
	cache   string
	timeout time.Duration
	memory  int // MiB
	cpus    int
	results string
	init    string      // the executable to be the guest's init
	files   [][2]string // host path, guest path
	job     job
}

// A job is what the guest's init is told.
type job struct {
	Args   []string
	Env    []string
	Dir    string
	Cgroup string
	Clean  bool // what the program leaves behind makes it fail
}

const (
	guestBinary = "/opt/vm/program"
	resultDir   = "/result"

	initrdInit    = "init"
	initrdJob     = "job.json"
	initrdModules = "modules"

	resultSize  = 256 << 20 // what may come back, sparse
	swapSize    = 512 << 20
	consoleTail = 8 << 10
)

// exitName is the file among the results that has the program's exit code. A
// machine that leaves none has not come to the program's end.
const exitName = ".exit"

// hangError tells that the machine gave no result, with its last words.
type hangError struct {
	reason  string
	console []byte
}

func (e *hangError) Error() string { return e.reason }

// run boots the machine and returns the program's exit code, once the program
// has written its output to w and its files to m.results.
func (m *machine) run(ctx context.Context, w io.Writer) (int, error) {
	kernel, image := filepath.Join(m.cache, "vmlinuz"), filepath.Join(m.cache, "root.img")
	for _, p := range []string{kernel, image} {
		if _, err := os.Stat(p); err != nil {
			return 0, fmt.Errorf("%w: run scripts/integration.sh setup", err)
		}
	}
	work, err := os.MkdirTemp("", "vm-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(work)
	path := func(name string) string { return filepath.Join(work, name) }

	if err := writeFile(path("initrd"), m.initrd); err != nil {
		return 0, err
	}
	if err := writeFile(path("in"), func(w io.Writer) error { return pack(w, m.files) }); err != nil {
		return 0, err
	}
	for name, size := range map[string]int64{"out": resultSize, "swap": swapSize} {
		if err := writeFile(path(name), func(io.Writer) error { return nil }); err != nil {
			return 0, err
		}
		if err := os.Truncate(path(name), size); err != nil {
			return 0, err
		}
	}

	limited, cancel := context.WithTimeout(ctx, m.timeout)
	defer cancel()
	args := []string{
		"-machine", "pc", "-smp", strconv.Itoa(m.cpus), "-m", strconv.Itoa(m.memory),
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-serial", "file:" + path("console"), "-serial", "stdio",
		"-kernel", kernel, "-initrd", path("initrd"),
		"-append", "console=ttyS0 quiet panic=-1 cgroup_no_v1=all",
		"-drive", "if=virtio,format=raw,snapshot=on,file=" + image,
		"-drive", "if=virtio,format=raw,read-only=on,file=" + path("in"),
		"-drive", "if=virtio,format=raw,cache=unsafe,file=" + path("out"),
		"-drive", "if=virtio,format=raw,cache=unsafe,file=" + path("swap"),
	}
	cmd := exec.CommandContext(limited, "qemu-system-x86_64", append(args, accelerator("/proc/cpuinfo", "/dev/kvm")...)...)
	cmd.Env = append(os.Environ(), "TMPDIR="+work) // snapshots go there
	cmd.Stdout = w
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	cmd.WaitDelay = 5 * time.Second
	err = cmd.Run()

	hang := func(reason string) error {
		return &hangError{reason, tail(path("console"), consoleTail)}
	}
	switch {
	case ctx.Err() != nil:
		return 0, ctx.Err()
	case limited.Err() != nil:
		return 0, hang(fmt.Sprintf("the machine was killed after %v", m.timeout))
	case err != nil:
		return 0, fmt.Errorf("qemu-system-x86_64: %w: %s", err, bytes.TrimSpace(stderr.Bytes()))
	}
	code, err := m.collect(path("out"), path("unpacked"))
	if err != nil {
		return 0, hang("the machine ended without a result: " + err.Error())
	}
	return code, nil
}

// collect unpacks what came back, first to temp, and returns the exit code.
// Files of earlier runs in m.results are replaced by those of the same name.
func (m *machine) collect(out, temp string) (int, error) {
	f, err := os.Open(out)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	if err := unpack(f, temp); err != nil {
		return 0, err
	}
	text, err := os.ReadFile(filepath.Join(temp, exitName))
	if err != nil {
		return 0, err
	}
	code, err := strconv.Atoi(string(text))
	if err != nil || m.results == "" {
		return code, err
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return 0, err
	}
	if err := unpack(f, m.results); err != nil {
		return 0, err
	}
	return code, os.Remove(filepath.Join(m.results, exitName))
}

// accelerator asks for KVM only of a processor that has virtualisation. There
// are hosts whose /dev/kvm can be opened and makes machines that never boot.
func accelerator(cpuinfo, device string) []string {
	info, _ := os.ReadFile(cpuinfo)
	if regexp.MustCompile(`(?m)^flags\s*:.*\b(vmx|svm)\b`).Match(info) {
		if f, err := os.OpenFile(device, os.O_RDWR, 0); err == nil {
			f.Close()
			return []string{"-accel", "kvm", "-cpu", "host"}
		}
	}
	return []string{"-accel", "tcg,thread=multi", "-cpu", "max"}
}

// initrd writes the first file system: this program, the job, the modules.
func (m *machine) initrd(w io.Writer) error {
	if err := checkStatic(m.init); err != nil {
		return err
	}
	program, err := os.ReadFile(m.init)
	if err != nil {
		return err
	}
	data, err := json.Marshal(m.job)
	if err != nil {
		return err
	}
	var a archive
	a.file(initrdInit, 0o755, program)
	a.file(initrdJob, 0o644, data)
	a.dir(initrdModules)
	dir := filepath.Join(m.cache, "modules")
	modules, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("%w: run scripts/integration.sh setup", err)
	}
	for _, e := range modules {
		data, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			return err
		}
		a.file(initrdModules+"/"+e.Name(), 0o644, data)
	}
	_, err = w.Write(a.end())
	return err
}

func checkStatic(name string) error {
	f, err := elf.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			return errors.New("this program is also the guest's init and has to be static: build it with CGO_ENABLED=0 and without -race")
		}
	}
	return nil
}

func writeFile(name string, write func(io.Writer) error) error {
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	return errors.Join(write(f), f.Close())
}

// tail returns the last n bytes of a file.
func tail(name string, n int64) []byte {
	f, err := os.Open(name)
	if err != nil {
		return nil
	}
	defer f.Close()
	if st, err := f.Stat(); err == nil && st.Size() > n {
		_, _ = f.Seek(-n, io.SeekEnd)
	}
	b, _ := io.ReadAll(io.LimitReader(f, n))
	return b
}
