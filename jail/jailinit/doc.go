// Package jailinit holds the program that becomes pid 1 of a jail, and speaks
// to it.
//
// The program is init.c of this folder: static, without libc, built by make
// and embedded. [Image] gives it as a sealed memfd, so that no file of the host
// has to be trusted and nothing in a jail can write to it (CVE-2019-5736).
//
// The package starts nothing. Package jail executes the image once, as its
// forker, asks it for an init by what [Fork] returns, writes that one a [Request]
// and reads [Message] values until the socket ends.
package jailinit
