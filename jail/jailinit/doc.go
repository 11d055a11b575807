// Package jailinit holds the program that becomes pid 1 of a jail, and speaks
// to it.
//
// The program is init.c of this folder: static, without libc, built by make
// and embedded. [Image] gives it as a sealed memfd, so that no file of the host
// has to be trusted and nothing in a jail can write to it (CVE-2019-5736).
//
// The package starts nothing. Package jail forks the image with the descriptors
// that [FDControl] and its neighbours name, writes one [Request] and reads
// [Message] values until the socket ends.
package jailinit
