package invoke

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"example.com/jail/wire/toolfail"
)

// command is a tool that is a host command: arguments as JSON on its standard
// input, value as JSON on its standard output.
type command struct {
	// program is an absolute path, args are what follows it.
	program string
	args    []string
	dir     string
	env     []string
	timeout time.Duration
	maxOut  int
}

// call runs the command once, without a shell. Its process group ends with the
// call. Exit status 0 means that standard output is the value, nothing at all
// being null; any other status is class permanent with the end of standard error
// as the text; the tool's own timeout is class transient.
func (c *command) call(ctx context.Context, args json.RawMessage) (any, error) {
	limit := ctx
	if c.timeout > 0 {
		var cancel context.CancelFunc
		limit, cancel = context.WithTimeout(ctx, c.timeout)
		defer cancel()
	}
	out := &capped{max: c.maxOut, over: make(chan struct{})}
	errs := &tail{keep: toolfail.MaxText - 64}
	cmd := exec.Command(c.program, c.args...)
	cmd.Dir, cmd.Env = c.dir, c.env
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(args), out, errs
	p, err := startProcess(cmd)
	if err != nil {
		class := toolfail.Permanent
		if errors.Is(err, syscall.EAGAIN) || errors.Is(err, syscall.ENOMEM) {
			class = toolfail.Transient
		}
		// The error names the path on the host, which is none of the program's
		// business (K7).
		return nil, &toolfail.Error{Class: class, Text: "the tool's command cannot be started"}
	}
	killed := false
	select {
	case <-p.exited:
	case <-out.over:
	case <-limit.Done():
		select {
		case <-p.exited: // both: what it did counts
		default:
			killed = true
		}
	}
	err = p.end()
	select {
	case <-out.over:
		return nil, &toolfail.Error{Class: toolfail.Permanent, Text: fmt.Sprintf("the tool's command wrote more than %d bytes", c.maxOut)}
	default:
	}
	if killed {
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("command killed: %w", err)
		}
		return nil, &toolfail.Error{Class: toolfail.Transient, Text: fmt.Sprintf("the tool's command did not end within %v", c.timeout)}
	}
	var status *exec.ExitError
	switch {
	case errors.As(err, &status):
		text := errs.String()
		if text == "" {
			text = "the tool's command ended with " + status.Error()
		}
		return nil, &toolfail.Error{Class: toolfail.Permanent, Text: text}
	case errors.Is(err, exec.ErrWaitDelay):
		// It ended well, and something that left its group still holds the pipes.
	case err != nil:
		return nil, &toolfail.Error{Class: toolfail.Permanent, Text: "the output of the tool's command cannot be read"}
	}
	text := bytes.TrimSpace(out.buf)
	if len(text) == 0 {
		return nil, nil
	}
	value, err := compactJSON(text, c.maxOut)
	if err != nil {
		return nil, &toolfail.Error{Class: toolfail.Permanent, Text: strings.TrimSpace("the tool's command did not write JSON: " + err.Error())}
	}
	return value, nil
}
