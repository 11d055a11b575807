// Command jail runs programs that nobody trusts.
//
// It is a thin layer over package jail: it turns flags into a Spec, the Spec
// into one run, and the run's report into an exit code. Whatever a script needs
// to know is in the report (--report); exit codes are for people, since a
// program can exit with any of them itself.
package main
