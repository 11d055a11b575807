package execwire

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"syscall"
	"time"
	"unicode/utf8"
)

// Names of events.
const (
	Stdout    = "stdout"
	Stderr    = "stderr"
	Exit      = "exit"
	Heartbeat = "heartbeat"
)

const (
	// MaxLine bounds one line in bytes without its newline, on read and on write.
	MaxLine = 16 << 20

	// maxChunk bounds the output in one event. The worst escaping makes six
	// bytes of one, which stays far below MaxLine.
	maxChunk = 64 << 10

	// maxID bounds the id of an execution, which every line repeats.
	maxID = 128

	// maxExtra bounds cause and usage together, encoded.
	maxExtra = 1 << 20
)

// ErrEnded is returned for an event after the exit event (E25).
var ErrEnded = errors.New("execution has ended")

// Event is one decoded line. Which fields are set depends on Name.
type Event struct {
	ID   string
	Seq  int64
	Name string

	// Data is the output of stdout or stderr. Text tells that it came as text
	// (enc utf8) and is valid UTF-8.
	Data []byte
	Text bool

	// Code, Cause and Usage belong to exit. Usage is JSON, nil if absent.
	Code  int
	Cause string
	Usage json.RawMessage

	// Beat belongs to heartbeat.
	Beat Beat
}

// Beat tells that an execution lives. Times are measured by the launcher and
// cross the wire in whole milliseconds.
type Beat struct {
	PID        int
	Elapsed    time.Duration // since the start
	LastOutput time.Duration // from the start to the last output; 0 if none
}

// Extra is what an exit event carries besides the code (E35).
type Extra struct {
	// Cause is why the execution ended, a word of the launcher's report. Empty
	// leaves the key out.
	Cause string
	// Usage is encoded with encoding/json; nil leaves the key out.
	Usage any
}

// ExitCode is the value of an exit event for a program that ended with a code,
// or by a signal if sig is not 0: 143, 137, 130 and 129 for SIGTERM, SIGKILL,
// SIGINT and SIGHUP, and -1 for any other (E28). A program that never started
// has -1 too, after one stderr event with the reason.
func ExitCode(code int, sig syscall.Signal) int {
	switch sig {
	case 0:
		return code
	case syscall.SIGTERM, syscall.SIGKILL, syscall.SIGINT, syscall.SIGHUP:
		return 128 + int(sig)
	}
	return -1
}

// framer turns what happens to one execution into lines. It is not safe for
// concurrent use.
type framer struct {
	id    []byte // quoted
	text  bool
	seq   int64
	ended bool
	// held are the first bytes of a character whose rest has not come, for
	// stdout and stderr.
	held [2]struct {
		b [utf8.UTFMax - 1]byte
		n int
	}
	buf, join []byte
}

// streams gives the names of held.
var streams = [2]string{Stdout, Stderr}

func newFramer(id string, text bool) (*framer, error) {
	switch {
	case id == "":
		return nil, errors.New("id of the execution is empty")
	case len(id) > maxID:
		return nil, fmt.Errorf("id of the execution has %d bytes, more than %d", len(id), maxID)
	case !utf8.ValidString(id):
		return nil, fmt.Errorf("id of the execution %q is not UTF-8", id)
	}
	return &framer{id: appendQuoted(nil, []byte(id)), text: text}, nil
}

// output gives the lines for a piece of output to emit, one for each 64 KiB. A
// line is valid until emit returns.
func (f *framer) output(name string, p []byte, emit func(line []byte) error) error {
	stream := slices.Index(streams[:], name)
	if stream < 0 {
		return fmt.Errorf("output has name %q, not stdout or stderr", name)
	}
	if f.ended {
		return ErrEnded
	}
	if len(p) == 0 {
		return emit(f.outputLine(name, nil))
	}
	for len(p) > 0 {
		n := min(len(p), maxChunk)
		chunk := p[:n]
		p = p[n:]
		if f.text {
			if chunk = f.whole(stream, chunk); len(chunk) == 0 {
				continue
			}
		}
		if err := emit(f.outputLine(name, chunk)); err != nil {
			return err
		}
	}
	return nil
}

// whole puts the bytes that were held back before chunk and holds back what may
// be the start of a character (E8). The result is valid until the next call.
func (f *framer) whole(stream int, chunk []byte) []byte {
	h := &f.held[stream]
	if h.n > 0 {
		f.join = append(append(f.join[:0], h.b[:h.n]...), chunk...)
		chunk = f.join
	}
	h.n = partial(chunk)
	cut := len(chunk) - h.n
	copy(h.b[:], chunk[cut:])
	return chunk[:cut]
}

// partial is how many bytes at the end of b start a character that is not
// complete and can still become valid.
func partial(b []byte) int {
	for n := 1; n < utf8.UTFMax && n <= len(b); n++ {
		tail := b[len(b)-n:]
		if utf8.RuneStart(tail[0]) {
			if tail[0] >= utf8.RuneSelf && !utf8.FullRune(tail) {
				return n
			}
			return 0
		}
	}
	return 0
}

func (f *framer) outputLine(name string, p []byte) []byte {
	f.seq++
	b := f.head(name)
	if f.text && utf8.Valid(p) {
		b = append(b, `,"enc":"utf8","value":`...)
		b = appendQuoted(b, p)
	} else {
		b = append(b, `,"enc":"b64","value":"`...)
		b = base64.StdEncoding.AppendEncode(b, p)
		b = append(b, '"')
	}
	return f.tail(b)
}

// exit gives what is still held back and the exit event. If usage cannot be
// encoded, the event goes without it and the error says so.
func (f *framer) exit(code int, extra Extra, emit func(line []byte) error) error {
	if f.ended {
		return ErrEnded
	}
	var usage []byte
	var usageErr error
	if extra.Usage != nil {
		if usage, usageErr = json.Marshal(extra.Usage); usageErr == nil && len(usage) > maxExtra {
			usage, usageErr = nil, fmt.Errorf("usage has %d bytes, more than %d", len(usage), maxExtra)
		}
	}
	for i := range f.held {
		// Half a character cannot be text any more: outputLine takes base64.
		if h := &f.held[i]; h.n > 0 {
			n := h.n
			h.n = 0
			if err := emit(f.outputLine(streams[i], h.b[:n])); err != nil {
				return err
			}
		}
	}
	f.ended = true
	f.seq++
	b := f.head(Exit)
	b = append(b, `,"value":`...)
	b = strconv.AppendInt(b, int64(code), 10)
	if cause := []byte(extra.Cause); len(cause) > 0 {
		b = append(b, `,"cause":`...)
		b = appendQuoted(b, cause[:min(len(cause), maxExtra/6)])
	}
	if len(usage) > 0 {
		b = append(b, `,"usage":`...)
		b = append(b, usage...)
	}
	if err := emit(f.tail(b)); err != nil {
		return err
	}
	if usageErr != nil {
		return fmt.Errorf("encode usage of the exit event: %w", usageErr)
	}
	return nil
}

func (f *framer) heartbeat(beat Beat) []byte {
	b := f.head(Heartbeat)
	b = append(b, `,"pid":`...)
	b = strconv.AppendInt(b, int64(beat.PID), 10)
	b = append(b, `,"elapsedMs":`...)
	b = strconv.AppendInt(b, max(beat.Elapsed.Milliseconds(), 0), 10)
	b = append(b, `,"lastOutputMs":`...)
	b = strconv.AppendInt(b, max(beat.LastOutput.Milliseconds(), 0), 10)
	return f.tail(b)
}

func (f *framer) head(name string) []byte {
	b := append(f.buf[:0], `{"id":`...)
	b = append(b, f.id...)
	b = append(b, `,"seq":`...)
	b = strconv.AppendInt(b, f.seq, 10)
	b = append(b, `,"name":"`...)
	b = append(b, name...)
	return append(b, '"')
}

func (f *framer) tail(b []byte) []byte {
	b = append(b, '}', '\n')
	f.buf = b
	return b
}

// appendQuoted appends s as a JSON string. Bytes that are not UTF-8 become
// U+FFFD.
func appendQuoted(b, s []byte) []byte {
	const hex = "0123456789abcdef"
	b = append(b, '"')
	start := 0
	for i := 0; i < len(s); {
		c := s[i]
		if c < utf8.RuneSelf {
			if c >= ' ' && c != '"' && c != '\\' {
				i++
				continue
			}
			b = append(b, s[start:i]...)
			switch c {
			case '"', '\\':
				b = append(b, '\\', c)
			case '\n':
				b = append(b, '\\', 'n')
			case '\r':
				b = append(b, '\\', 'r')
			case '\t':
				b = append(b, '\\', 't')
			default:
				b = append(b, '\\', 'u', '0', '0', hex[c>>4], hex[c&15])
			}
			i++
			start = i
			continue
		}
		r, n := utf8.DecodeRune(s[i:])
		if r == utf8.RuneError && n == 1 {
			b = append(b, s[start:i]...)
			b = append(b, "\ufffd"...)
			start = i + 1
		}
		i += n
	}
	b = append(b, s[start:]...)
	return append(b, '"')
}
