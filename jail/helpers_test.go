package jail_test

import "runtime"

func lockForever() { runtime.LockOSThread() }
