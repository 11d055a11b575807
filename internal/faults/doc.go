// Package faults marks the steps after which a launcher that dies leaves
// something on the host. In a build with the tag "faults", [Here] ends the
// process at the step that the environment names, as a kill from outside would;
// in every other build it is empty and the compiler leaves nothing of it. The
// tests of package jail go through all steps.
//
// JAIL_FAULT holds words in any order:
//
//	at=NAME     the step
//	n=3         the third time that a process gets there (1)
//	after=2ms   so long after it, while the process goes on (0)
//	kill=WHO    self, parent (of a helper, its launcher), both; children, or of
//	            them the forker, or the eldest or youngest of the inits (self)
//	trace=FILE  a line "PID NAME" is added for each step, and "PID NAME killed"
//
// It is for tests: a launcher built with the tag does what its environment says.
package faults
