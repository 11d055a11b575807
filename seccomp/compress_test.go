package seccomp

import (
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// The default program is small, since every jail loads it. What it means is
// tested by TestDefaultProgramMeansTheProfile, and what compressed programs mean
// by TestRandomProfilesMeanWhatTheySay.
func TestDefaultProgramIsSmall(t *testing.T) {
	f, err := Compile(Default())
	if err != nil {
		t.Fatal(err)
	}
	if f.Len() > 320 {
		t.Errorf("%d instructions", f.Len())
	}
}

// Code that libseccomp would not make is left as it is.
func TestCompressLeavesOtherCodeAlone(t *testing.T) {
	jeq := func(k uint32, jt, jf uint8) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jt: jt, Jf: jf, K: k}
	}
	ret := func(k uint32) unix.SockFilter { return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: k} }
	load := func(k uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: k}
	}
	and := unix.SockFilter{Code: unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, K: 0}
	for name, code := range map[string][]unix.SockFilter{
		"empty":                           nil,
		"no number":                       {load(4), jeq(1, 0, 1), ret(1), ret(2)},
		"one outcome":                     {load(0), ret(1)},
		"another comparison":              {load(0), {Code: unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K, Jt: 0, Jf: 1, K: 1}, ret(1), ret(2)},
		"runs off the end":                {load(0), jeq(1, 0, 5)},
		"into the middle of an idle test": {load(16), jeq(1, 1, 0), load(16), and, jeq(0, 0, 1), ret(1), ret(2)},
	} {
		if got := compress(slices.Clone(code), false); !slices.Equal(got, code) {
			t.Errorf("%s: %v became %v", name, code, got)
		}
	}
}
