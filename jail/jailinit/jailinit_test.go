package jailinit

import (
	"errors"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// What both sides of the control socket know is the same on both sides.
func TestConstantsMirrorTheInit(t *testing.T) {
	src, err := os.ReadFile("src/init.c")
	if err != nil {
		t.Fatal(err)
	}
	in := map[string]string{}
	for _, m := range regexp.MustCompile(`(?m)^\s+((?:FD|FILES|FLAG|MSG|STAGE|REQUEST)_\w+) = ([^,]+),`).FindAllStringSubmatch(string(src), -1) {
		in[m[1]] = m[2]
	}
	want := map[string]any{
		"FD_CONTROL": FDControl, "FILES_MAX": MaxFiles,
		"FLAG_LEAF": flagLeaf, "FLAG_CHANNELS": flagChannels, "FLAG_HOLD": flagHold, "FLAG_PARK": flagPark, "FLAG_YIELD": flagYield,
		"MSG_CHILD": Child, "MSG_HELD": Held, "MSG_STARTED": Started, "MSG_EXITED": Exited, "MSG_DEADLINE": Deadline, "MSG_FAILED": Failed, "MSG_FORKED": Forked,
		"REQUEST_MAGIC": fmt.Sprintf("%#x", magic),
	}
	for name, v := range want {
		if got := in[name]; got != fmt.Sprint(v) {
			t.Errorf("%s is %q in the init, %v here", name, got, v)
		}
	}
	stages := 0
	for name, v := range in {
		if s, ok := strings.CutPrefix(name, "STAGE_"); ok {
			stages++
			var n Stage
			if _, err := fmt.Sscan(v, (*int32)(&n)); err != nil || n.String() != strings.ToLower(s) {
				t.Errorf("%s = %s is called %q here", name, v, n)
			}
		}
	}
	if stages != len(stageNames)-1 {
		t.Errorf("%d stages in the init, %d here", stages, len(stageNames)-1)
	}
	if m := regexp.MustCompile(`REQUEST_MAX = (\d+) << 20`).FindStringSubmatch(string(src)); m == nil || m[1] != "4" || MaxStrings+4096*8+headerSize > 4<<20 {
		t.Errorf("the init takes requests of %v MiB", m)
	}
	// The header: 14 fields of 4 bytes and one of 8.
	if headerSize != 14*4+8 {
		t.Errorf("header of %d bytes", headerSize)
	}
}

// B14: what is too large is refused by its size, nothing is cut.
func TestEncodeRefuses(t *testing.T) {
	ok := Request{Args: []string{"/bin/true"}}
	if b, err := ok.Encode(); err != nil || len(b) != headerSize+5+len("/bin/true")+1 {
		t.Errorf("%d bytes, %v", len(b), err)
	}
	for name, r := range map[string]Request{
		"no program":      {},
		"NUL":             {Args: []string{"a\x00b"}},
		"NUL in the map":  {Args: []string{"a"}, UIDMap: "\x00"},
		"long argument":   {Args: []string{strings.Repeat("x", MaxString+1)}},
		"long environ":    {Args: []string{"a"}, Env: []string{"K=" + strings.Repeat("x", MaxString)}},
		"many arguments":  {Args: strings.Split(strings.Repeat("x ", MaxStrings/2+1), " ")},
		"long late binds": {Args: []string{"a"}, Late: []Late{{From: strings.Repeat("x", MaxString)}}},
	} {
		_, err := r.Encode()
		if err == nil {
			t.Errorf("%s: accepted", name)
		}
		if strings.HasPrefix(name, "long") || strings.HasPrefix(name, "many") {
			if !errors.Is(err, ErrTooLarge) {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}

func TestDecodeRefuses(t *testing.T) {
	for _, b := range [][]byte{nil, make([]byte, MessageSize-1), make([]byte, MessageSize), append([]byte{8}, make([]byte, MessageSize-1)...)} {
		if m, err := Decode(b); err == nil {
			t.Errorf("%d bytes: %+v", len(b), m)
		}
	}
	if m, err := Decode(append([]byte{4}, make([]byte, MessageSize-1)...)); err != nil || m.Kind != Exited {
		t.Errorf("%+v, %v", m, err)
	}
}

// A1: nothing can write to the init's image, whatever holds a descriptor of it.
func TestImageIsSealed(t *testing.T) {
	f, err := Image()
	if err != nil {
		t.Fatal(err)
	}
	seals, err := unix.FcntlInt(f.Fd(), unix.F_GET_SEALS, 0)
	if err != nil || seals&(unix.F_SEAL_SEAL|unix.F_SEAL_WRITE|unix.F_SEAL_GROW|unix.F_SEAL_SHRINK) != unix.F_SEAL_SEAL|unix.F_SEAL_WRITE|unix.F_SEAL_GROW|unix.F_SEAL_SHRINK {
		t.Errorf("seals %#x, %v", seals, err)
	}
	if _, err := f.WriteAt([]byte("x"), 0); err == nil {
		t.Error("written")
	}
	flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFD, 0)
	if err != nil || flags&unix.FD_CLOEXEC == 0 {
		t.Errorf("flags %#x, %v: not close-on-exec", flags, err)
	}
}
