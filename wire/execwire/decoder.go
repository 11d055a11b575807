package execwire

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"math"
	"strconv"
	"time"
	"unicode/utf16"
	"unicode/utf8"
)

// ErrMalformed is wrapped by every error of a stream that is not what this
// package describes, in contrast to an error of the reader.
var ErrMalformed = errors.New("malformed event stream")

// maxDepth bounds the nesting of a value whose key is not known.
const maxDepth = 64

// Decoder reads the stream of one execution. It may face a producer that nobody
// trusts: it holds one line at a time, grows its buffer with what has come, and
// gives up at the first line that is wrong. It is not safe for concurrent use.
type Decoder struct {
	r     io.Reader
	buf   []byte // what was read and not decoded
	start int    // of the line that is next
	seen  int    // no newline before this
	eof   error  // what ended the reader
	err   error  // what ended this decoder

	line  int64
	id    string
	seq   int64 // of the last event, -1 at first
	any   bool  // an event was decoded
	ended bool  // the exit event was decoded
}

// NewDecoder makes a decoder for the stream from r. Reads may end anywhere, also
// within a character or an escape (E11).
func NewDecoder(r io.Reader) *Decoder {
	return &Decoder{r: r, seq: -1}
}

// Next gives the next event. Its Data and Usage are valid until the next call.
//
// At the end of the stream it returns io.EOF after the exit event, and for a
// stream without events; io.ErrUnexpectedEOF for a stream that was cut, that is,
// which has no exit event. A last line without a newline is an event like any
// other (E13); empty lines are skipped (E14).
//
// An error that wraps ErrMalformed names the line: it has more than MaxLine
// bytes, is not one JSON object, lacks a key or repeats one, has an unknown name
// or enc or a value of the wrong kind, belongs to another execution, has a seq
// that does not grow, or follows the exit event. Keys that are not known are
// ignored. Every error is final.
func (d *Decoder) Next() (Event, error) {
	if d.err != nil {
		return Event{}, d.err
	}
	for {
		line, err := d.readLine()
		if err != nil {
			if err == io.EOF && d.any && !d.ended {
				err = io.ErrUnexpectedEOF
			}
			d.err = err
			return Event{}, err
		}
		d.line++
		if len(line) == 0 {
			continue
		}
		e, err := d.decode(line)
		if err != nil {
			d.err = fmt.Errorf("%w: line %d: %w", ErrMalformed, d.line, err)
			return Event{}, d.err
		}
		return e, nil
	}
}

// readLine gives the next line without its newline, valid until the next call.
func (d *Decoder) readLine() ([]byte, error) {
	for {
		if i := bytes.IndexByte(d.buf[d.seen:], '\n'); i >= 0 {
			line := d.buf[d.start : d.seen+i]
			d.start = d.seen + i + 1
			d.seen = d.start
			if len(line) > MaxLine {
				return nil, d.tooLong()
			}
			return line, nil
		}
		d.seen = len(d.buf)
		if d.seen-d.start > MaxLine {
			return nil, d.tooLong()
		}
		if d.eof != nil {
			line := d.buf[d.start:]
			d.start = len(d.buf)
			if d.eof == io.EOF && len(line) > 0 {
				return line, nil
			}
			return nil, d.eof
		}
		d.fill()
	}
}

func (d *Decoder) tooLong() error {
	return fmt.Errorf("%w: line %d has more than %d bytes", ErrMalformed, d.line+1, MaxLine)
}

// fill reads once, after making room: by moving the line to the front if there
// is something before it, else by doubling.
func (d *Decoder) fill() {
	const first = 32 << 10
	if d.start > 0 {
		n := copy(d.buf, d.buf[d.start:])
		d.buf = d.buf[:n]
		d.seen -= d.start
		d.start = 0
	}
	if len(d.buf) == cap(d.buf) {
		// One byte more than a line and its newline tells that it is too long.
		size := min(max(2*cap(d.buf), first), MaxLine+2)
		d.buf = append(make([]byte, 0, size), d.buf...)
	}
	for range 100 {
		n, err := d.r.Read(d.buf[len(d.buf):cap(d.buf)])
		d.buf = d.buf[:len(d.buf)+n]
		if err != nil {
			d.eof = err
			return
		}
		if n > 0 {
			return
		}
	}
	d.eof = io.ErrNoProgress
}

// fields tells which keys of a line have come.
type fields uint16

const (
	hasID fields = 1 << iota
	hasSeq
	hasName
	hasEnc
	hasValue
	hasCause
	hasUsage
	hasPID
	hasElapsed
	hasLastOutput
)

// raw is a line whose keys were read and not yet judged: value depends on name
// and enc, which may come later.
type raw struct {
	has                      fields
	id, name, enc            []byte
	seq                      int64
	text                     []byte // value as a string
	code                     int64  // value as a number
	isText                   bool
	cause                    []byte
	usage                    []byte
	pid, elapsed, lastOutput int64
}

func (d *Decoder) decode(line []byte) (Event, error) {
	var r raw
	if err := r.parse(line); err != nil {
		return Event{}, err
	}
	if missing := (hasID | hasSeq | hasName) &^ r.has; missing != 0 {
		return Event{}, errors.New("id, seq or name is missing")
	}
	if len(r.id) == 0 || len(r.id) > maxID {
		return Event{}, fmt.Errorf("id has %d bytes, not 1 to %d", len(r.id), maxID)
	}
	if d.ended {
		return Event{}, errors.New("an event follows the exit event")
	}
	e := Event{ID: d.id, Seq: r.seq}
	if string(r.id) != d.id {
		if d.any {
			return Event{}, fmt.Errorf("id changes from %q to %q", d.id, r.id)
		}
		e.ID = string(r.id)
	}
	var err error
	switch string(r.name) {
	case Stdout, Stderr:
		err = r.output(&e)
	case Exit:
		err = r.exit(&e)
	case Heartbeat:
		err = r.heartbeat(&e)
	default:
		err = fmt.Errorf("unknown name %q", r.name)
	}
	if err != nil {
		return Event{}, err
	}
	if r.seq < d.seq || r.seq == d.seq && e.Name != Heartbeat {
		return Event{}, fmt.Errorf("seq %d follows %d", r.seq, d.seq)
	}
	d.id, d.seq, d.any = e.ID, r.seq, true
	d.ended = e.Name == Exit
	return e, nil
}

func (r *raw) output(e *Event) error {
	e.Name = Stdout
	if string(r.name) == Stderr {
		e.Name = Stderr
	}
	if r.has&(hasEnc|hasValue) != hasEnc|hasValue || !r.isText {
		return errors.New("output needs enc and a value that is a string")
	}
	switch string(r.enc) {
	case "utf8":
		e.Text, e.Data = true, r.text
		return nil
	case "b64":
		// The package base64 skips line ends.
		if bytes.IndexByte(r.text, '\n') >= 0 || bytes.IndexByte(r.text, '\r') >= 0 {
			return errors.New("base64 has a line end")
		}
		// What is decoded never gets ahead of what is read.
		n, err := base64.StdEncoding.Strict().Decode(r.text, r.text)
		if err != nil {
			return err
		}
		e.Data = r.text[:n]
		return nil
	}
	return fmt.Errorf("unknown enc %q", r.enc)
}

func (r *raw) exit(e *Event) error {
	e.Name = Exit
	switch {
	case r.has&hasValue == 0 || r.isText:
		return errors.New("exit needs a value that is a number")
	case r.has&hasEnc != 0:
		return errors.New("exit has enc")
	case r.code < math.MinInt32 || r.code > math.MaxInt32:
		return fmt.Errorf("exit code %d has more than 32 bits", r.code)
	}
	e.Code, e.Cause = int(r.code), string(r.cause)
	if len(r.usage) > 0 {
		e.Usage = r.usage
	}
	return nil
}

func (r *raw) heartbeat(e *Event) error {
	e.Name = Heartbeat
	const limit = math.MaxInt64 / int64(time.Millisecond)
	switch {
	case r.has&(hasPID|hasElapsed|hasLastOutput) != hasPID|hasElapsed|hasLastOutput:
		return errors.New("heartbeat needs pid, elapsedMs and lastOutputMs")
	case r.has&(hasEnc|hasValue) != 0:
		return errors.New("heartbeat has enc or value")
	case r.pid < 0 || r.pid > math.MaxInt32:
		return fmt.Errorf("pid %d is out of range", r.pid)
	case r.elapsed < 0 || r.elapsed > limit || r.lastOutput < 0 || r.lastOutput > limit:
		return errors.New("time of a heartbeat is out of range")
	}
	e.Beat = Beat{PID: int(r.pid), Elapsed: time.Duration(r.elapsed) * time.Millisecond,
		LastOutput: time.Duration(r.lastOutput) * time.Millisecond}
	return nil
}

// parse reads the object of a line. Strings are unescaped in place, so r holds
// parts of line.
func (r *raw) parse(line []byte) error {
	s := scanner{b: line}
	s.space()
	if !s.take('{') {
		return errors.New("not a JSON object")
	}
	s.space()
	if s.take('}') {
		return s.end()
	}
	for {
		s.space()
		key, err := s.str()
		if err != nil {
			return err
		}
		s.space()
		if !s.take(':') {
			return s.unexpected()
		}
		s.space()
		if err := r.member(&s, key); err != nil {
			return err
		}
		s.space()
		if s.take('}') {
			return s.end()
		}
		if !s.take(',') {
			return s.unexpected()
		}
	}
}

func (r *raw) member(s *scanner, key []byte) (err error) {
	var f fields
	switch string(key) {
	case "id":
		f = hasID
		r.id, err = s.str()
	case "seq":
		f = hasSeq
		if r.seq, err = s.integer(); err == nil && r.seq < 0 {
			err = fmt.Errorf("seq %d is below 0", r.seq)
		}
	case "name":
		f = hasName
		r.name, err = s.str()
	case "enc":
		f = hasEnc
		r.enc, err = s.str()
	case "value":
		f = hasValue
		if r.isText = s.peek() == '"'; r.isText {
			r.text, err = s.str()
		} else {
			r.code, err = s.integer()
		}
	case "cause":
		f = hasCause
		r.cause, err = s.str()
	case "usage":
		f = hasUsage
		start := s.i
		err = s.skip()
		r.usage = s.b[start:s.i]
	case "pid":
		f = hasPID
		r.pid, err = s.integer()
	case "elapsedMs":
		f = hasElapsed
		r.elapsed, err = s.integer()
	case "lastOutputMs":
		f = hasLastOutput
		r.lastOutput, err = s.integer()
	default:
		return s.skip()
	}
	if err != nil {
		return err
	}
	if r.has&f != 0 {
		return fmt.Errorf("key %q is repeated", key)
	}
	r.has |= f
	return nil
}

// scanner reads JSON text, strictly by RFC 8259, without recursion.
type scanner struct {
	b []byte
	i int
}

func (s *scanner) peek() byte {
	if s.i < len(s.b) {
		return s.b[s.i]
	}
	return 0
}

func (s *scanner) take(c byte) bool {
	if s.i < len(s.b) && s.b[s.i] == c {
		s.i++
		return true
	}
	return false
}

func (s *scanner) space() {
	for s.i < len(s.b) {
		switch s.b[s.i] {
		case ' ', '\t', '\r', '\n':
			s.i++
		default:
			return
		}
	}
}

func (s *scanner) end() error {
	s.space()
	if s.i < len(s.b) {
		return s.unexpected()
	}
	return nil
}

func (s *scanner) unexpected() error {
	if s.i >= len(s.b) {
		return errors.New("line ends within the object")
	}
	return fmt.Errorf("unexpected %q at byte %d", s.b[s.i], s.i)
}

// str reads a string and unescapes it in place: no escape is shorter than what
// it stands for.
func (s *scanner) str() ([]byte, error) {
	if !s.take('"') {
		return nil, s.unexpected()
	}
	start := s.i
	// Until the first escape nothing moves.
	for s.i < len(s.b) && s.b[s.i] != '"' && s.b[s.i] != '\\' && s.b[s.i] >= ' ' {
		s.i++
	}
	out := s.i
	for s.i < len(s.b) {
		c := s.b[s.i]
		switch {
		case c == '"':
			s.i++
			if str := s.b[start:out]; utf8.Valid(str) {
				return str, nil
			}
			return nil, fmt.Errorf("string before byte %d is not UTF-8", s.i)
		case c < ' ':
			return nil, s.unexpected()
		case c != '\\':
			s.b[out] = c
			out++
			s.i++
		default:
			n, err := s.escape(s.b[out:])
			if err != nil {
				return nil, err
			}
			out += n
		}
	}
	return nil, s.unexpected()
}

// escape reads one escape, a pair of surrogates included, and writes what it
// stands for.
func (s *scanner) escape(dst []byte) (int, error) {
	bad := func() (int, error) { return 0, fmt.Errorf("bad escape at byte %d", s.i) }
	if s.i+1 >= len(s.b) {
		return bad()
	}
	switch c := s.b[s.i+1]; c {
	case '"', '\\', '/':
		dst[0] = c
	case 'b':
		dst[0] = '\b'
	case 'f':
		dst[0] = '\f'
	case 'n':
		dst[0] = '\n'
	case 'r':
		dst[0] = '\r'
	case 't':
		dst[0] = '\t'
	case 'u':
		r := s.hex(s.i)
		n := 6
		if utf16.IsSurrogate(r) {
			r = utf16.DecodeRune(r, s.hex(s.i+6))
			if r == utf8.RuneError {
				return bad()
			}
			n = 12
		}
		if r < 0 {
			return bad()
		}
		s.i += n
		return utf8.EncodeRune(dst, r), nil
	default:
		return bad()
	}
	s.i += 2
	return 1, nil
}

// hex reads \uXXXX at i; -1 if it is something else.
func (s *scanner) hex(i int) rune {
	if i+6 > len(s.b) || s.b[i] != '\\' || s.b[i+1] != 'u' {
		return -1
	}
	var r rune
	for _, c := range s.b[i+2 : i+6] {
		switch {
		case c >= '0' && c <= '9':
			c -= '0'
		case c >= 'a' && c <= 'f':
			c -= 'a' - 10
		case c >= 'A' && c <= 'F':
			c -= 'A' - 10
		default:
			return -1
		}
		r = r<<4 | rune(c)
	}
	return r
}

// number reads the text of a number.
func (s *scanner) number() ([]byte, error) {
	start := s.i
	digits := func() bool {
		from := s.i
		for s.i < len(s.b) && s.b[s.i] >= '0' && s.b[s.i] <= '9' {
			s.i++
		}
		return s.i > from
	}
	s.take('-')
	if !s.take('0') && !digits() {
		return nil, s.unexpected()
	}
	if s.take('.') && !digits() {
		return nil, s.unexpected()
	}
	if s.take('e') || s.take('E') {
		if !s.take('+') {
			s.take('-')
		}
		if !digits() {
			return nil, s.unexpected()
		}
	}
	return s.b[start:s.i], nil
}

func (s *scanner) integer() (int64, error) {
	text, err := s.number()
	if err != nil {
		return 0, err
	}
	// An int64 has at most 20 characters; the error of a longer text would
	// repeat it.
	if len(text) > 20 {
		return 0, fmt.Errorf("number of %d characters is not an integer of 64 bits", len(text))
	}
	n, err := strconv.ParseInt(string(text), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("number %s is not an integer of 64 bits", text)
	}
	return n, nil
}

// skip reads any value.
func (s *scanner) skip() error {
	var open [maxDepth]byte // the closing byte of each level
	depth := 0
	for {
		s.space()
		switch c := s.peek(); c {
		case '{', '[':
			if depth == maxDepth {
				return fmt.Errorf("value is nested deeper than %d", maxDepth)
			}
			s.i++
			open[depth] = c + 2 // in ASCII the closing one is two further
			depth++
			s.space()
			if s.take(open[depth-1]) {
				depth--
				break
			}
			if c == '{' {
				if err := s.key(); err != nil {
					return err
				}
			}
			continue
		case '"':
			// Unescaping would change the text that usage keeps.
			if err := s.skipString(); err != nil {
				return err
			}
		case 't':
			if !s.word("true") {
				return s.unexpected()
			}
		case 'f':
			if !s.word("false") {
				return s.unexpected()
			}
		case 'n':
			if !s.word("null") {
				return s.unexpected()
			}
		default:
			if _, err := s.number(); err != nil {
				return err
			}
		}
		// A value is complete: close what ends here, or go to the next one.
		for {
			if depth == 0 {
				return nil
			}
			s.space()
			if s.take(open[depth-1]) {
				depth--
				continue
			}
			if !s.take(',') {
				return s.unexpected()
			}
			if open[depth-1] == '}' {
				if err := s.key(); err != nil {
					return err
				}
			}
			break
		}
	}
}

// key skips a key and its colon.
func (s *scanner) key() error {
	s.space()
	if s.peek() != '"' {
		return s.unexpected()
	}
	if err := s.skipString(); err != nil {
		return err
	}
	s.space()
	if !s.take(':') {
		return s.unexpected()
	}
	return nil
}

func (s *scanner) skipString() error {
	start := s.i
	s.i++
	var scratch [utf8.UTFMax]byte
	for s.i < len(s.b) {
		switch c := s.b[s.i]; {
		case c == '"':
			s.i++
			if !utf8.Valid(s.b[start:s.i]) {
				return fmt.Errorf("string before byte %d is not UTF-8", s.i)
			}
			return nil
		case c < ' ':
			return s.unexpected()
		case c == '\\':
			if _, err := s.escape(scratch[:]); err != nil {
				return err
			}
		default:
			s.i++
		}
	}
	return s.unexpected()
}

func (s *scanner) word(w string) bool {
	if bytes.HasPrefix(s.b[s.i:], []byte(w)) {
		s.i += len(w)
		return true
	}
	return false
}
