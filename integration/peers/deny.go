package main

import (
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"example.com/jail/seccomp"
)

// denied are the system calls that peers refuse with EPERM, if they take a
// filter: every peer the same, in its own form. The project's own rows load
// their default profile, which allows by name.
var denied = []string{
	"acct", "add_key", "adjtimex", "bpf", "chroot", "clock_adjtime", "clock_settime", "delete_module",
	"finit_module", "init_module", "ioperm", "iopl", "kcmp", "kexec_file_load", "kexec_load", "keyctl",
	"lookup_dcookie", "mbind", "migrate_pages", "mount", "move_pages", "name_to_handle_at",
	"open_by_handle_at", "perf_event_open", "personality", "pivot_root", "process_vm_readv",
	"process_vm_writev", "ptrace", "quotactl", "reboot", "request_key", "setdomainname", "sethostname",
	"setns", "settimeofday", "swapoff", "swapon", "syslog", "umount2", "unshare", "uselib",
	"userfaultfd", "ustat", "vhangup", "vmsplice",
}

// denyProgram compiles the list for tools that take a finished program.
func denyProgram() ([]byte, error) {
	p := &seccomp.Profile{Default: seccomp.Allow}
	for _, name := range denied {
		p.Rules = append(p.Rules, seccomp.Rule{Names: []string{name}, Action: seccomp.Errno(unix.EPERM)})
	}
	f, err := seccomp.Compile(p)
	if err != nil {
		return nil, fmt.Errorf("compile the list of denied system calls: %w", err)
	}
	return f.Bytes(), nil
}

// denyKafel is the list in nsjail's language, which has its own name for one.
func denyKafel() string {
	names := strings.ReplaceAll(strings.Join(denied, ", "), "umount2", "umount")
	return fmt.Sprintf("ERRNO(%d) { %s } DEFAULT ALLOW", unix.EPERM, names)
}
