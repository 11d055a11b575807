package seccomp

import (
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// Load gives the filter for a name, or for a file in the form of ParseOCI:
//
//   - "default" is Compile(Default()), which costs nothing at run time if the
//     build made it ahead (command gen).
//   - "none" is a Filter without a program.
//   - anything else is a path. A file that bears one of these names is reached
//     as "./default" or "./none".
//
// The file must be a regular file of at most 1 MiB. An error wraps ErrProfile
// if the profile is wrong, else the error of the file.
func Load(nameOrFile string) (*Filter, error) {
	switch nameOrFile {
	case "none":
		return &Filter{}, nil
	case "default":
		if len(defaultProgram) > 0 {
			return &Filter{prog: defaultProgram}, nil
		}
		return Compile(Default())
	}
	b, err := readProfile(nameOrFile)
	if err != nil {
		return nil, fmt.Errorf("read seccomp profile: %w", err)
	}
	p, err := ParseOCI(b)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", nameOrFile, err)
	}
	f, err := Compile(p)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", nameOrFile, err)
	}
	return f, nil
}

func readProfile(path string) ([]byte, error) {
	// Without O_NONBLOCK, opening a FIFO would wait for a writer.
	file, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	st, err := file.Stat()
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() {
		return nil, fmt.Errorf("%s: %w: not a regular file", path, ErrProfile)
	}
	b, err := io.ReadAll(io.LimitReader(file, maxProfileBytes+1))
	if err != nil {
		return nil, err
	}
	return b, nil
}
