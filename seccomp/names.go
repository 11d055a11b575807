package seccomp

import (
	"strings"

	"golang.org/x/sys/unix"

	libseccomp "github.com/seccomp/libseccomp-golang"
)

// newer holds the calls that libseccomp 2.5 does not know by name. From Linux
// 5.1 on a new call has one number on all architectures that are supported here.
var newer = map[string]int{
	"cachestat":         unix.SYS_CACHESTAT,
	"fchmodat2":         unix.SYS_FCHMODAT2,
	"map_shadow_stack":  unix.SYS_MAP_SHADOW_STACK,
	"futex_wake":        unix.SYS_FUTEX_WAKE,
	"futex_wait":        unix.SYS_FUTEX_WAIT,
	"futex_requeue":     unix.SYS_FUTEX_REQUEUE,
	"statmount":         unix.SYS_STATMOUNT,
	"listmount":         unix.SYS_LISTMOUNT,
	"lsm_get_self_attr": unix.SYS_LSM_GET_SELF_ATTR,
	"lsm_set_self_attr": unix.SYS_LSM_SET_SELF_ATTR,
	"lsm_list_modules":  unix.SYS_LSM_LIST_MODULES,
	"mseal":             unix.SYS_MSEAL,
	"setxattrat":        unix.SYS_SETXATTRAT,
	"getxattrat":        unix.SYS_GETXATTRAT,
	"listxattrat":       unix.SYS_LISTXATTRAT,
	"removexattrat":     unix.SYS_REMOVEXATTRAT,
	"open_tree_attr":    unix.SYS_OPEN_TREE_ATTR,
	"file_getattr":      unix.SYS_FILE_GETATTR,
	"file_setattr":      unix.SYS_FILE_SETATTR,
	"listns":            unix.SYS_LISTNS,
	"rseq_slice_yield":  unix.SYS_RSEQ_SLICE_YIELD,
}

// number resolves a name. A negative number is a call that this architecture
// does not have; ok is false for a name that nobody knows.
func number(name string) (nr int, ok bool) {
	if nr, ok := newer[name]; ok {
		return nr, true
	}
	return libNumber(name)
}

func libNumber(name string) (nr int, ok bool) {
	// A C string would end at the first NUL and mean something else.
	if strings.IndexByte(name, 0) >= 0 {
		return 0, false
	}
	s, err := libseccomp.GetSyscallFromName(name)
	return int(s), err == nil
}
