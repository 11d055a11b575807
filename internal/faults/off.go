//go:build !faults

package faults

// Here is the step of that name, a constant that no other step has.
func Here(string) {}

// Env is what a helper process has to have in its environment.
func Env() []string { return nil }
