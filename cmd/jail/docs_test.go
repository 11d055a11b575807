package main

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"example.com/jail/rootfs"
)

// The transcripts of the README are run, and print what they show there but for
// numbers. A line that ends with "..." shows the beginning of a longer one.
func TestReadmeTranscripts(t *testing.T) {
	text, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	bin := t.TempDir()
	// By this name the test binary is the command (see TestMain).
	if err := os.Symlink(exe, filepath.Join(bin, "jail")); err != nil {
		t.Fatal(err)
	}
	cache := "/run/jail-test-readme"
	t.Cleanup(func() { _, _ = (&rootfs.Cache{Dir: cache}).Drop() })

	commands := 0
	for _, block := range regexp.MustCompile("(?s)```console\n(.*?)```").FindAllStringSubmatch(string(text), -1) {
		for _, part := range strings.Split("\n"+block[1], "\n$ ")[1:] {
			command, want, _ := strings.Cut(part, "\n")
			commands++
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			cmd := exec.CommandContext(ctx, "/bin/sh", "-c", command)
			cmd.Dir = "../.."
			cmd.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"), templatesEnv+"="+cache)
			got, _ := cmd.CombinedOutput()
			cancel()
			if !matches(strings.TrimSpace(want), strings.TrimSpace(string(got))) {
				t.Errorf("%s\nprints\n%s\nthe README shows\n%s", command, got, want)
			}
		}
	}
	if commands < 5 {
		t.Errorf("%d commands found", commands)
	}
}

var digits = regexp.MustCompile(`[0-9a-f]*[0-9]+[0-9a-f]*`)

func matches(want, got string) bool {
	w, g := strings.Split(want, "\n"), strings.Split(got, "\n")
	if len(w) != len(g) {
		return false
	}
	for i := range w {
		a, b := digits.ReplaceAllString(w[i], "N"), digits.ReplaceAllString(g[i], "N")
		if start, ok := strings.CutSuffix(a, "..."); ok {
			if !strings.HasPrefix(b, start) {
				return false
			}
		} else if a != b {
			return false
		}
	}
	return true
}
