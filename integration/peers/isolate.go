package main

import (
	"fmt"
	"os/exec"
	"slices"
)

// boxes are isolate's: number firstBox and up, which a usual configuration
// has and others seldom use.
const firstBox = 900

// isolateRow starts programs in isolate's boxes.
type isolateRow struct {
	command
	path string
	keep bool // a box is used again

	made [maxAtOnce]bool
}

// openIsolate makes and removes a box for each start.
func openIsolate(s *setup) (starter, error) { return newIsolate(s, false) }

// openIsolateRun makes a box for each slot once, and uses it again.
func openIsolateRun(s *setup) (starter, error) { return newIsolate(s, true) }

func newIsolate(s *setup, keep bool) (starter, error) {
	path, err := s.look("isolate")
	if err != nil {
		return nil, err
	}
	i := &isolateRow{path: path, keep: keep}
	i.setup = s
	i.argv = func(slot int, argv []string) ([]string, error) {
		return slices.Concat([]string{path, "--run", i.box(slot), "-s", "-D", "--dir=box=./box:rw",
			"--dir=bin=" + s.root + "/bin", "--dir=usr", "--dir=lib=/usr/lib", "--dir=lib64=/usr/lib64",
			"--dir=proc=proc:fs", "--dir=tmp:tmp", fmt.Sprintf("--mem=%d", memoryLimit>>10), "--"}, argv), nil
	}
	return i, nil
}

func (i *isolateRow) box(slot int) string {
	n := firstBox + slot
	if i.keep {
		n += maxAtOnce
	}
	return fmt.Sprintf("--box-id=%d", n)
}

func (i *isolateRow) start(slot int, argv []string, out *output) error {
	// A slot is one caller's at a time.
	if !i.made[slot] {
		if err := i.tell(slot, "--init"); err != nil {
			return err
		}
		i.made[slot] = true
	}
	err := i.command.start(slot, argv, out)
	if !i.keep {
		if e := i.cleanup(slot); err == nil {
			err = e
		}
	}
	return err
}

func (i *isolateRow) cleanup(slot int) error {
	i.made[slot] = false
	return i.tell(slot, "--cleanup")
}

func (i *isolateRow) tell(slot int, what string) error {
	if b, err := exec.Command(i.path, what, "-s", i.box(slot)).CombinedOutput(); err != nil {
		return fmt.Errorf("isolate %s: %w: %s", what, err, b)
	}
	return nil
}

func (i *isolateRow) close() error {
	var err error
	for slot := range i.made {
		if i.made[slot] {
			if e := i.cleanup(slot); err == nil {
				err = e
			}
		}
	}
	return err
}
