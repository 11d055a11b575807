package seccomp

import "golang.org/x/sys/unix"

// defaultProgram is Compile(Default()), and defaultProgramBy the version of
// libseccomp that compiled it, if the build made them ahead (command gen, run
// by make): compiling takes about as long as starting a jail. A build without
// compiles when it is first asked.
var (
	defaultProgram   []unix.SockFilter
	defaultProgramBy string
)
