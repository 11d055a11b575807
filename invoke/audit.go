package invoke

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"sync"
	"time"
	"unicode/utf16"
	"unicode/utf8"

	"example.com/jail/wire/toolfail"
)

const (
	// stageAudit is the name of Audit's stage.
	stageAudit = "audit"
	// defaultAuditArgs is the default of AuditOptions.MaxArgs.
	defaultAuditArgs = 4 << 10
	// maxAuditText bounds every other text of a line.
	maxAuditText = 512
)

// AuditOptions of an Audit.
type AuditOptions struct {
	// MaxArgs bounds how many bytes of the arguments a line shows; 0 is 4 KiB,
	// negative shows none. A line tells their full length in any case.
	MaxArgs int
	// ContinueOnError lets calls run whose line could not be written. The next
	// line that can be written tells how many are missing. The default refuses
	// them, class unknown (E15).
	ContinueOnError bool
}

// Audit writes every call to a log of JSON lines: one line before anything else
// decides on the call, and one with its outcome. The first is a stage, so a sink
// that fails can deny the call; the second is a recorder, whose failure comes
// too late for its own call and is told by the next line and by Err.
//
// Lines are pure ASCII, whatever the program sent. Arguments are cut at MaxArgs
// bytes and every other text at 512. Fields: v (1), seq (1, 2, ... of this Audit), time
// (RFC 3339, UTC), event ("call" or "end"), lost (lines before this one that
// could not be written), caller, server, tool; with "call": args and args_bytes;
// with "end": call (the seq of its "call" line), allowed (the tool was reached),
// class and error (absent on success), duration_ns, out_bytes and stages.
//
// Safe for concurrent use. A writer that blocks holds up every call.
type Audit struct {
	maxArgs int
	goOn    bool

	mu   sync.Mutex
	w    io.Writer
	seq  int64
	lost int64
	torn bool
	err  error
}

// NewAudit makes an Audit that writes to w one line a Write. Give it to Options,
// or put Stage before every other stage of a chain and Record into WithRecorder.
func NewAudit(w io.Writer, o AuditOptions) *Audit {
	a := &Audit{w: w, maxArgs: o.MaxArgs, goOn: o.ContinueOnError}
	if a.maxArgs == 0 {
		a.maxArgs = defaultAuditArgs
	}
	return a
}

// Err is the first error of the writer, nil if every line was written.
func (a *Audit) Err() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.err
}

type auditLine struct {
	V      int       `json:"v"`
	Seq    int64     `json:"seq"`
	Time   time.Time `json:"time"`
	Event  string    `json:"event"`
	Lost   int64     `json:"lost,omitempty"`
	Call   int64     `json:"call,omitempty"`
	Caller string    `json:"caller,omitempty"`
	Server string    `json:"server,omitempty"`
	Tool   string    `json:"tool"`
	// ToolBytes is the length of a name that was cut.
	ToolBytes int     `json:"tool_bytes,omitempty"`
	Args      *string `json:"args,omitempty"`
	ArgsBytes *int    `json:"args_bytes,omitempty"`

	Allowed    *bool          `json:"allowed,omitempty"`
	Class      toolfail.Class `json:"class,omitempty"`
	Error      string         `json:"error,omitempty"`
	DurationNS int64          `json:"duration_ns,omitempty"`
	OutBytes   int            `json:"out_bytes,omitempty"`
	Stages     []auditStage   `json:"stages,omitempty"`
}

type auditStage struct {
	Stage  string `json:"stage"`
	Allow  bool   `json:"allow"`
	Reason string `json:"reason,omitempty"`
	Note   string `json:"note,omitempty"`
	Error  string `json:"error,omitempty"`
}

func (a *Audit) line(event string, call Call) auditLine {
	l := auditLine{V: 1, Time: time.Now().UTC(), Event: event,
		Caller: cutText(call.Caller, maxAuditText), Server: cutText(call.Server, maxAuditText), Tool: cutText(call.Name, maxAuditText)}
	if len(call.Name) > maxAuditText {
		l.ToolBytes = len(call.Name)
	}
	return l
}

func (l *auditLine) args(call Call, max int) {
	n := len(call.Args)
	l.ArgsBytes = &n
	if max > 0 {
		text := cutText(call.Args, max)
		l.Args = &text
	}
}

// Stage writes the "call" line and allows the call if that worked, or if
// ContinueOnError is set.
func (a *Audit) Stage() Stage {
	return StageFunc{StageName: stageAudit, Fn: func(_ context.Context, call Call) (Verdict, error) {
		l := a.line("call", call)
		l.args(call, a.maxArgs)
		seq, err := a.write(l)
		if err != nil && !a.goOn {
			return Verdict{}, fmt.Errorf("write audit line: %w", err)
		}
		return Verdict{Allow: true, Note: strconv.FormatInt(seq, 10)}, nil
	}}
}

// Record writes the "end" line. A call that a stage before the audit's denied
// has its arguments in this line, since it has no other.
func (a *Audit) Record(r Record) {
	l := a.line("end", r.Call)
	l.Allowed = &r.Allowed
	l.DurationNS, l.OutBytes = int64(r.Duration), r.OutBytes
	if r.Err != nil {
		l.Class, l.Error = toolfail.Of(r.Err), cutText(r.Err.Error(), maxAuditText)
	}
	for _, s := range r.Stages {
		if s.Stage == stageAudit && l.Call == 0 {
			l.Call, _ = strconv.ParseInt(s.Verdict.Note, 10, 64)
			if s.Err == nil {
				continue
			}
		}
		line := auditStage{Stage: cutText(s.Stage, maxAuditText), Allow: s.Verdict.Allow,
			Reason: cutText(s.Verdict.Reason, maxAuditText), Note: cutText(s.Verdict.Note, maxAuditText)}
		if s.Err != nil {
			line.Error = cutText(s.Err.Error(), maxAuditText)
		}
		l.Stages = append(l.Stages, line)
	}
	if l.Call == 0 {
		l.args(r.Call, a.maxArgs)
	}
	_, _ = a.write(l) // counted as lost, and kept in Err
}

func (a *Audit) write(l auditLine) (seq int64, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.seq++
	l.Seq, l.Lost = a.seq, a.lost
	var buf bytes.Buffer
	enc := json.NewEncoder(&buf)
	enc.SetEscapeHTML(false)
	var n int
	if err = enc.Encode(l); err == nil {
		line := ascii(buf.Bytes())
		if a.torn {
			line = append([]byte("\n"), line...)
		}
		if n, err = a.w.Write(line); err == nil && n < len(line) {
			err = io.ErrShortWrite
		}
	}
	if err != nil {
		a.lost++
		a.torn = a.torn || n > 0
		if a.err == nil {
			a.err = err
		}
		return l.Seq, err
	}
	a.lost, a.torn = 0, false
	return l.Seq, nil
}

// ascii writes every character of a JSON text beyond ASCII as an escape, and DEL
// too, so that no look-alike and no terminal command stands in a log as itself.
func ascii(text []byte) []byte {
	out := make([]byte, 0, len(text)+16)
	for len(text) > 0 {
		if c := text[0]; c < 0x7f {
			out = append(out, c)
			text = text[1:]
			continue
		}
		r, n := utf8.DecodeRune(text)
		text = text[n:]
		if hi, lo := utf16.EncodeRune(r); hi != utf8.RuneError {
			out = fmt.Appendf(out, `\u%04x\u%04x`, hi, lo)
		} else {
			out = fmt.Appendf(out, `\u%04x`, r)
		}
	}
	return out
}
