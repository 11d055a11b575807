package python

import (
	_ "embed"
	"strings"
)

// Source is the guest. Callers must not change it.
//
//go:embed guest.py
var Source []byte

const (
	// FileName is the name that Source should have in the jail.
	FileName = "guest.py"
	// Suffix is how the names of the programs end that this guest runs.
	Suffix = ".py"
)

// Argv returns the command that runs the guest at path, a path in the jail.
// python3 is searched for by the launcher's rules.
//
// -I keeps environment variables, the user's site directory and the working
// directory out of the interpreter (L39), -B keeps it from writing .pyc files,
// and -X utf8 makes text UTF-8 whatever the locale is.
//
// The modules of preload are imported before the guest waits for its Start: for
// a pool of jails, whose programs then find them imported. A module that cannot be
// imported ends the guest with exit code 70 and the reason on stderr.
func Argv(path string, preload ...string) []string {
	argv := []string{"python3", "-I", "-B", "-X", "utf8", path}
	if len(preload) > 0 {
		argv = append(argv, "--preload="+strings.Join(preload, ","))
	}
	return argv
}
