package main

import (
	"errors"
	"fmt"
	"io"
	"syscall"

	"example.com/jail/jail"
	"example.com/jail/wire/execwire"
)

// eventsValue is how --events writes output: "" (not at all), b64 or utf8.
type eventsValue string

func (v *eventsValue) Type() string   { return "b64|utf8" }
func (v *eventsValue) String() string { return string(*v) }
func (v *eventsValue) Set(s string) error {
	if s != "b64" && s != "utf8" {
		return errors.New("want b64 or utf8")
	}
	*v = eventsValue(s)
	return nil
}

// eventStream is the run as JSON lines on standard output. The streams wait
// until the run has its name, which is the events' id.
type eventStream struct {
	w     io.Writer
	text  bool
	named chan struct{}
	enc   *execwire.Encoder
}

func newEventStream(w io.Writer, v eventsValue) *eventStream {
	return &eventStream{w: w, text: v == "utf8", named: make(chan struct{})}
}

// name starts the stream. A run that was refused before it had a name is
// called "none".
func (s *eventStream) name(id string) {
	if id == "" {
		id = "none"
	}
	s.enc = execwire.NewEncoder(s.w, id, execwire.Options{Text: s.text})
	close(s.named)
}

// output returns the writer of one of the program's streams.
func (s *eventStream) output(name string) io.Writer { return eventOutput{s, name} }

type eventOutput struct {
	s    *eventStream
	name string
}

func (o eventOutput) Write(p []byte) (int, error) {
	<-o.s.named
	if err := o.s.enc.Output(o.name, p); err != nil {
		return 0, err
	}
	return len(p), nil
}

// usage is what the exit event tells beside code and cause.
type usage struct {
	WallNS      int64            `json:"wall_ns"`
	CPUUserNS   int64            `json:"cpu_user_ns"`
	CPUSystemNS int64            `json:"cpu_system_ns"`
	Memory      jail.MemoryUsage `json:"memory"`
	PIDs        jail.PIDUsage    `json:"pids"`
	Stdout      jail.StreamUsage `json:"stdout"`
	Stderr      jail.StreamUsage `json:"stderr"`
	Calls       jail.CallUsage   `json:"calls"`
	Leftovers   jail.Leftovers   `json:"leftovers"`
}

// exit ends the stream with its one exit event. A run that never started says
// why in one event of stderr before it (E33).
func (s *eventStream) exit(r *jail.Report, startErr error) error {
	if startErr != nil {
		if err := s.enc.Output(execwire.Stderr, fmt.Appendf(nil, "jail: %s\n", oneLine(startErr.Error()))); err != nil {
			return err
		}
	}
	return s.enc.Exit(eventCode(r), execwire.Extra{
		Cause: string(r.Cause),
		Usage: usage{r.WallNS, r.CPUUserNS, r.CPUSystemNS, r.Memory, r.PIDs, r.Stdout, r.Stderr, r.Calls, r.Leftovers},
	})
}

// eventCode is the exit event's value (E28). What the launcher killed before it
// could end by itself died of SIGKILL; what never ran has -1.
func eventCode(r *jail.Report) int {
	switch {
	case r.Cause == jail.CauseRefused || r.Cause == jail.CauseSetup:
		return -1
	case r.ExitCode != nil:
		return *r.ExitCode
	case r.Signal != nil:
		return execwire.ExitCode(0, syscall.Signal(*r.Signal))
	}
	return execwire.ExitCode(0, syscall.SIGKILL)
}
