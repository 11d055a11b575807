package wire

import (
	"errors"
	"fmt"
	"strconv"
	"time"
	"unicode/utf8"

	"example.com/jail/wire/strictjson"
	"example.com/jail/wire/toolfail"
)

// MaxIDBytes bounds a call id and a result id: both are kept and echoed (W53).
const MaxIDBytes = 128

// maxToolBytes bounds a tool's name in a request. A longer one names no tool.
const maxToolBytes = 1024

// The members of each frame; v is the first everywhere.
var (
	requestNames  = []string{"v", "id", "tool", "args", "deadline_ms"}
	responseNames = []string{"v", "id", "ok", "value", "kind", "error"}
	startNames    = []string{"v", "program", "bindings", "budget", "result_id"}
	bindingNames  = []string{"name", "signature", "description"}
	budgetNames   = []string{"wall_clock", "max_calls", "max_bytes", "max_memory"}
	resultNames   = []string{"v", "result_id", "ok", "value", "kind", "error", "calls", "bytes"}
)

// fields is one object split into its members. The first member that is wrong
// stops the decoding: all later calls return zero values.
type fields struct {
	names  []string
	values [8]strictjson.Value
	err    error
}

// split reads a frame's object and its version. Another version, none included,
// is the error before anything but the syntax is (W11, W13).
func (f *fields) split(text []byte, names []string) {
	f.names = names
	err := strictjson.Members(text, names, f.values[:len(names)])
	if errors.Is(err, strictjson.ErrInvalid) || errors.Is(err, strictjson.ErrType) {
		f.err = err
		return
	}
	// Only the token 1 is this version: neither 1.0 nor "1" is.
	if v := f.values[0]; string(v) != "1" {
		got := "absent"
		if v != nil {
			got = string(v[:min(len(v), 32)])
		}
		f.err = &VersionError{Got: got, Want: Version}
		return
	}
	f.err = err
}

func (f *fields) wrong(i int, err error) {
	if err != nil && f.err == nil {
		f.err = fmt.Errorf("field %s: %w", f.names[i], err)
	}
}

// text returns a string member. limit 0 is no limit beyond the frame's.
func (f *fields) text(i int, limit int) (s string) {
	if f.err == nil {
		var err error
		s, err = f.values[i].Text(limit)
		f.wrong(i, err)
	}
	return s
}

func (f *fields) optionalText(i int) string {
	if f.values[i] == nil {
		return ""
	}
	return f.text(i, 0)
}

// id returns a string member that is not empty and has at most MaxIDBytes.
func (f *fields) id(i int) string {
	s := f.text(i, MaxIDBytes)
	if s == "" {
		f.wrong(i, errEmpty)
	}
	return s
}

func (f *fields) bool(i int) (b bool) {
	if f.err == nil {
		var err error
		b, err = f.values[i].Bool()
		f.wrong(i, err)
	}
	return b
}

// count returns an integer member that is absent or not negative (W29).
func (f *fields) count(i int) (n int64) {
	if f.err == nil && f.values[i] != nil {
		var err error
		n, err = f.values[i].Int64()
		f.wrong(i, err)
		if n < 0 {
			f.wrong(i, errNegative)
			return 0
		}
	}
	return n
}

// size is count for a member that is an int here, whose size the machine decides.
func (f *fields) size(i int) int {
	n := f.count(i)
	if int64(int(n)) != n {
		f.wrong(i, strictjson.ErrType)
	}
	return int(n)
}

var (
	errEmpty    = errors.New("empty")
	errNegative = errors.New("negative")
	errUTF8     = errors.New("invalid UTF-8")
)

// decodeRequest also returns why the request cannot be accepted although it
// breaks no rule of the protocol, or "" (W51).
func decodeRequest(text []byte, maxArgs int) (req Request, tooLarge string, err error) {
	var f fields
	f.split(text, requestNames)
	req.V = Version
	req.ID = f.id(1)
	req.DeadlineMS = f.count(4)
	bounded := func(i, limit int) string {
		if f.err != nil {
			return ""
		}
		s, err := f.values[i].Text(limit)
		if errors.Is(err, strictjson.ErrOverBudget) {
			tooLarge = f.names[i] + " longer than " + strconv.Itoa(limit) + " bytes"
			return ""
		}
		f.wrong(i, err)
		return s
	}
	if req.Tool = bounded(2, maxToolBytes); req.Tool == "" && tooLarge == "" {
		f.wrong(2, errEmpty) // W18
	}
	req.Args = bounded(3, maxArgs)
	if f.err != nil {
		return Request{}, "", f.err
	}
	return req, tooLarge, nil
}

// decodeResponse leaves a class of the set in Kind of a failure and drops what
// does not go with ok (W39, C20).
func decodeResponse(text []byte) (Response, error) {
	var f fields
	f.split(text, responseNames)
	r := Response{V: Version, ID: f.id(1), OK: f.bool(2), Value: f.optionalText(3), Kind: f.optionalText(4), Error: f.optionalText(5)}
	if f.err != nil {
		return Response{}, f.err
	}
	r.Value, r.Kind, r.Error = outcome(r.OK, r.Value, r.Kind, r.Error)
	return r, nil
}

// outcome keeps of the three fields what goes with ok, which alone decides (C20,
// L14). A failure has a class of the set and a text within its cap (K2, K7).
func outcome(ok bool, value, kind, text string) (string, string, string) {
	if ok {
		return value, "", ""
	}
	return "", string(toolfail.Parse(kind)), toolfail.CapText(text)
}

func decodeStart(text []byte) (Start, error) {
	var f fields
	f.split(text, startNames)
	s := Start{V: Version, Program: f.text(1, 0), ResultID: f.text(4, MaxIDBytes), Bindings: []StartBinding{}}
	if f.err == nil {
		f.wrong(2, f.values[2].Elements(func(v strictjson.Value) error {
			b, err := decodeBinding(v)
			s.Bindings = append(s.Bindings, b)
			return err
		}))
	}
	if f.err == nil {
		var err error
		s.Budget, err = decodeBudget(f.values[3])
		f.wrong(3, err)
	}
	if f.err != nil {
		return Start{}, f.err
	}
	return s, nil
}

func decodeBinding(v strictjson.Value) (StartBinding, error) {
	f := fields{names: bindingNames}
	f.err = strictjson.Members(v, f.names, f.values[:len(f.names)])
	b := StartBinding{Name: f.text(0, maxToolBytes), Signature: f.optionalText(1), Description: f.optionalText(2)}
	if b.Name == "" {
		f.wrong(0, errEmpty)
	}
	return b, f.err
}

func decodeBudget(v strictjson.Value) (StartBudget, error) {
	f := fields{names: budgetNames}
	f.err = strictjson.Members(v, f.names, f.values[:len(f.names)])
	b := StartBudget{WallClock: time.Duration(f.count(0)), MaxCalls: f.size(1), MaxBytes: f.size(2), MaxMemory: f.count(3)}
	return b, f.err
}

func decodeResult(text []byte) (Result, error) {
	var f fields
	f.split(text, resultNames)
	r := Result{
		V: Version, ResultID: f.text(1, MaxIDBytes), OK: f.bool(2), Value: f.optionalText(3), Kind: f.optionalText(4),
		Error: f.optionalText(5), Calls: f.size(6), Bytes: f.size(7),
	}
	if f.err != nil {
		return Result{}, f.err
	}
	r.Value, r.Kind, r.Error = outcome(r.OK, r.Value, r.Kind, r.Error)
	return r, nil
}

// envelopeBytes is room for what surrounds the long text of a frame: a guess that
// spares growing, not a limit.
const envelopeBytes = 256

// encoder appends one frame, header included, to buf.
type encoder struct {
	buf  []byte
	from int // where the frame starts
}

func newFrame(buf []byte) encoder {
	e := encoder{buf: buf, from: len(buf)}
	e.buf = append(e.buf, 0, 0, 0, 0)
	e.buf = append(e.buf, `{"v":1`...)
	return e
}

func (e *encoder) name(name string) {
	e.buf = append(e.buf, ',', '"')
	e.buf = append(e.buf, name...)
	e.buf = append(e.buf, '"', ':')
}

func (e *encoder) text(name, s string) {
	e.name(name)
	e.buf = strictjson.AppendQuote(e.buf, s)
}

func (e *encoder) optionalText(name, s string) {
	if s != "" {
		e.text(name, s)
	}
}

func (e *encoder) bool(name string, b bool) {
	e.name(name)
	e.buf = strconv.AppendBool(e.buf, b)
}

func (e *encoder) optionalCount(name string, n int64) {
	if n != 0 {
		e.name(name)
		e.buf = strconv.AppendInt(e.buf, n, 10)
	}
}

// close ends the frame. On an error buf is without it.
func (e *encoder) close() ([]byte, error) {
	e.buf = append(e.buf, '}')
	if err := seal(e.buf[e.from:], len(e.buf)-e.from-headerBytes); err != nil {
		return e.buf[:e.from], err
	}
	return e.buf, nil
}

func appendRequest(buf []byte, r *Request) ([]byte, error) {
	e := newFrame(buf)
	e.text("id", r.ID)
	e.text("tool", r.Tool)
	e.text("args", r.Args)
	e.optionalCount("deadline_ms", r.DeadlineMS)
	return e.close()
}

func appendResponse(buf []byte, r *Response) ([]byte, error) {
	e := newFrame(buf)
	e.text("id", r.ID)
	e.bool("ok", r.OK)
	e.optionalText("value", r.Value)
	e.optionalText("kind", r.Kind)
	e.optionalText("error", r.Error)
	return e.close()
}

// responseSize returns the bytes of JSON text that appendResponse would write,
// or a smaller number if they are well within a frame.
func responseSize(r *Response) int {
	if n := len(r.Value) + len(r.Error); n < MaxFrameBytes/6-4<<10 {
		return n // no byte grows more than sixfold
	}
	n := len(`{"v":1,"id":,"ok":}`) + strictjson.QuotedLen(r.ID) + len(strconv.FormatBool(r.OK))
	for _, f := range [][2]string{{"value", r.Value}, {"kind", r.Kind}, {"error", r.Error}} {
		if f[1] != "" {
			n += len(`,"":`) + len(f[0]) + strictjson.QuotedLen(f[1])
		}
	}
	return n
}

func appendStart(buf []byte, s *Start) ([]byte, error) {
	e := newFrame(buf)
	e.text("program", s.Program)
	e.name("bindings")
	e.buf = append(e.buf, '[')
	for i, b := range s.Bindings {
		if i > 0 {
			e.buf = append(e.buf, ',')
		}
		e.buf = append(e.buf, `{"name":`...)
		e.buf = strictjson.AppendQuote(e.buf, b.Name)
		e.optionalText("signature", b.Signature)
		e.optionalText("description", b.Description)
		e.buf = append(e.buf, '}')
	}
	e.buf = append(e.buf, ']')
	e.name("budget")
	open := len(e.buf)
	e.optionalCount("wall_clock", s.Budget.WallClock.Nanoseconds())
	e.optionalCount("max_calls", int64(s.Budget.MaxCalls))
	e.optionalCount("max_bytes", int64(s.Budget.MaxBytes))
	e.optionalCount("max_memory", s.Budget.MaxMemory)
	if len(e.buf) == open {
		e.buf = append(e.buf, '{')
	} else {
		e.buf[open] = '{' // in place of the comma
	}
	e.buf = append(e.buf, '}')
	e.text("result_id", s.ResultID)
	return e.close()
}

func appendResult(buf []byte, r *Result) ([]byte, error) {
	e := newFrame(buf)
	e.text("result_id", r.ResultID)
	e.bool("ok", r.OK)
	e.optionalText("value", r.Value)
	e.optionalText("kind", r.Kind)
	e.optionalText("error", r.Error)
	e.optionalCount("calls", int64(r.Calls))
	e.optionalCount("bytes", int64(r.Bytes))
	return e.close()
}

// checkUTF8 refuses strings that the encoder could not carry without loss (L28).
// pairs are names and values in turn.
func checkUTF8(pairs ...string) error {
	for i := 0; i < len(pairs); i += 2 {
		if !utf8.ValidString(pairs[i+1]) {
			return fmt.Errorf("%s: %w", pairs[i], errUTF8)
		}
	}
	return nil
}
