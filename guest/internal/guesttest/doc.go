// Package guesttest runs guest programs for the tests of the guests.
//
// It plays the launcher with raw frames of its own over two AF_UNIX socket
// pairs, so that a mistake in package wire cannot hide the same mistake in a
// guest. It has no sandbox: never give it a program that nobody trusts.
package guesttest
