// Command vm runs one program, as root, on a Linux kernel that has cgroup v2
// only, in a machine that QEMU emulates, and exits with the program's code.
//
//	vm run [FLAG...] -- BINARY [ARG...]
//
// The trap: without KVM everything that computes takes several times as long as
// on the host, so timings mean nothing, and a test needs generous bounds.
//
// The guest has what a service under systemd has: a root file system on a disk,
// cgroup2 with all controllers at /sys/fs/cgroup, a cgroup of its own to start
// in, shared mounts, swap, tmpfs at /run and /tmp, loopback, no other network.
// Nothing that it writes stays, but for the files below /result.
//
// The kernel, the image and the modules come from scripts/integration.sh. The
// executable of this command is also the guest's init, so it has to be static:
// build it without cgo and without the race detector.
package main
