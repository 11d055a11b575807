package jail

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"example.com/jail/jail/jailinit"
	"example.com/jail/wire"
)

// The forker unshares namespaces: never on the thread that /proc/self shows.
func TestForkerIsNotOnTheMainThread(t *testing.T) {
	tids := make(chan int)
	for range 300 {
		offMainThread(func() { tids <- unix.Gettid() })
		if tid := <-tids; tid == os.Getpid() {
			t.Fatal("runs on the main thread")
		}
	}
}

var belowImage *os.File

// The fork of an init moves descriptors that are in each other's way to the next
// number above the highest. The image of the init must not be there: seen as
// EACCES at the exec, once in many thousand starts at once.
func TestForkKeepsTheImageWhereFilesMove(t *testing.T) {
	image, err := jailinit.Image()
	if err != nil {
		t.Fatal(err)
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	ours, theirs, err := wire.Pair()
	if err != nil {
		t.Fatal(err)
	}
	defer theirs.Close()
	// The number right below the image's is taken by a file to be passed on.
	below := int(image.Fd()) - 1
	_, err = unix.FcntlInt(uintptr(below), unix.F_GETFD, 0)
	free := err != nil
	if free {
		if err := unix.Dup3(int(null.Fd()), below, unix.O_CLOEXEC); err != nil {
			t.Fatal(err)
		}
	}
	// Whoever owns it: never closed by a finalizer in the middle of another test.
	belowImage = os.NewFile(uintptr(below), "below")
	if free {
		defer belowImage.Close()
	}
	pid, err := forkInit([]*os.File{belowImage, null, null, nil, nil, theirs}, true)
	if err != nil {
		t.Fatal(err)
	}
	theirs.Close()
	// Without a request the init ends by itself.
	ours.Close()
	if ws, _, err := reap(pid); err != nil || !ws.Exited() {
		t.Errorf("status %v, %v", ws, err)
	}
}
