package main

import "testing"

// A scope of its own stays below the limits of the slice that it came from.
func TestSliceOf(t *testing.T) {
	for group, want := range map[string]string{
		"/user.slice/user-1000.slice/session-3.scope":               "user-1000.slice",
		"/system.slice/ssh.service":                                 "system.slice",
		"/system.slice":                                             "system.slice",
		"/user.slice/user-0.slice/user@0.service/app.slice/x.scope": "user-0.slice",
		"/init.scope":                                               "-.slice",
		"/":                                                         "-.slice",
	} {
		if got := sliceOf(group); got != want {
			t.Errorf("%s: %s, want %s", group, got, want)
		}
	}
}
