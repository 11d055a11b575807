package python

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"example.com/jail/jail"
	"example.com/jail/rootfs"
)

// loader runs the guest from compiledName, or else from FileName.
//
//go:embed load.py
var loader []byte

const (
	loaderName   = "load.py"
	compiledName = FileName + "c"
	place        = rootfs.FilesDir + "/"
)

// compiler is a program that a guest runs: its result is the guest as a .pyc.
const compiler = `
import marshal
from _frozen_importlib_external import MAGIC_NUMBER
path = "` + place + FileName + `"
with open(path, "rb") as file:
    code = compile(file.read(), path, "exec", dont_inherit=True)
result = (MAGIC_NUMBER + bytes(12) + marshal.dumps(code)).hex()
`

// Bounds of a compilation. It takes some 30 ms, and CPython 3.11 makes 69 KB.
const (
	compileWithin = 5 * time.Second
	maxCompiled   = 1 << 20
)

// Compile returns a spec that does what the given one does and starts its guest
// without compiling it: 6 ms of CPU less for each jail. It runs a jail of its own
// for that, within the spec's budget and at most 5 s, so it is for a [jail.Pool],
// or for many runs of one spec. The spec must have the guest as
// [rootfs.FilesDir]/[FileName] in its Args and Root.Files, and no files load.py
// and guest.pyc of its own.
//
// The code is made by the spec's own interpreter and only for the spec: a hostile
// one gains nothing that it does not have anyway. An interpreter that finds code
// of another one, after an update of the host's, say, compiles Source instead.
//
// On an error, the returned spec is the given one. It is safe for concurrent use.
func Compile(ctx context.Context, spec jail.Spec) (jail.Spec, error) {
	at, there := slices.Index(spec.Args, place+FileName), false
	for _, f := range spec.Root.Files {
		switch f.Name {
		case FileName:
			there = bytes.Equal(f.Data, Source)
		case loaderName, compiledName:
			return spec, fmt.Errorf("compile the guest: the root has a file %s already", f.Name)
		}
	}
	if at < 0 || !there {
		return spec, fmt.Errorf("compile the guest: the spec does not run %s", place+FileName)
	}
	s := spec
	s.Script = &jail.Script{Program: compiler}
	s.Stdin, s.Stdout, s.Stderr = nil, nil, nil
	if wall := &s.Budget.WallClock; *wall == 0 || *wall > compileWithin {
		*wall = compileWithin
	}
	r, err := jail.Run(ctx, s)
	if err != nil {
		return spec, fmt.Errorf("compile the guest: %w", err)
	}
	if r.Cause != jail.CauseOK {
		return spec, fmt.Errorf("compile the guest: %s: %s", r.Cause, r.Error)
	}
	code, err := decode(r.Value)
	if err != nil {
		return spec, fmt.Errorf("compile the guest: %w", err)
	}
	s = spec
	s.Args = slices.Clone(spec.Args)
	s.Args[at] = place + loaderName
	s.Root.Files = append(slices.Clone(spec.Root.Files), rootfs.File{Name: loaderName, Data: loader}, rootfs.File{Name: compiledName, Data: code})
	return s, nil
}

// decode checks the form of what a compiler gave. It looks no further: only the
// same root's interpreter reads it.
func decode(value json.RawMessage) ([]byte, error) {
	if len(value) > 2*maxCompiled+len(`""`) {
		return nil, fmt.Errorf("result of %d bytes, at most %d of code", len(value), maxCompiled)
	}
	var text string
	if err := json.Unmarshal(value, &text); err != nil {
		return nil, fmt.Errorf("result: %w", err)
	}
	code, err := hex.DecodeString(text)
	if err != nil {
		return nil, fmt.Errorf("result: %w", err)
	}
	// A .pyc is a magic number that ends with CR LF, 12 bytes of origin, code.
	if len(code) <= 16 || code[2] != '\r' || code[3] != '\n' {
		return nil, errors.New("result: no code object of Python")
	}
	return code, nil
}
