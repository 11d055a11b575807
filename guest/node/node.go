package node

import (
	_ "embed"
	"strings"
)

// Source is the guest. Callers must not change it.
//
//go:embed guest.mjs
var Source []byte

const (
	// FileName is the name that Source should have in the jail. Node takes the
	// suffix as the sign of an ES module.
	FileName = "guest.mjs"
	// Suffix is how the names of the programs end that this guest runs.
	Suffix = ".mjs"
)

// Argv returns the command that runs the guest at path, a path in the jail.
// node is searched for by the launcher's rules.
//
// The modules of preload, built-in ones or file: URLs, are imported before the
// guest waits for its Start, as those of the Python guest are.
func Argv(path string, preload ...string) []string {
	argv := []string{"node", path}
	if len(preload) > 0 {
		argv = append(argv, "--preload="+strings.Join(preload, ","))
	}
	return argv
}
