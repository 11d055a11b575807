package invoke

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/url"
	"os/exec"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	"github.com/modelcontextprotocol/go-sdk/mcp"

	"example.com/jail/wire"
	"example.com/jail/wire/toolfail"
)

const (
	// maxServerTools bounds how many tools one server may list, maxDescription
	// the text of one.
	maxServerTools = 1000
	maxDescription = 16 << 10
	// serverGrace is how long a server may take to end by itself when its
	// standard input is closed, before it is killed.
	serverGrace = 2 * time.Second
)

// mcpServer is an entry of a tools file: a command that speaks MCP on its
// standard input and output, or a URL.
type mcpServer struct {
	name    string
	program string
	args    []string
	dir     string
	env     []string
	url     string
	prefix  string
	// allow lists the tools to offer, in the server's own names; nil offers all.
	allow []string
}

// mcpSession is a connection to a server, and its process if it has one.
type mcpSession struct {
	session *mcp.ClientSession
	proc    *process
	http    *http.Transport
	once    sync.Once
}

func checkURL(text string) error {
	u, err := url.Parse(text)
	switch {
	case err != nil:
		return errors.New("not a URL")
	case u.Scheme != "http" && u.Scheme != "https":
		return errors.New("want http or https")
	case u.Host == "":
		return errors.New("no host")
	}
	return nil
}

// connect starts the server or reaches it, and makes tools of what it lists.
func (s *mcpServer) connect(ctx context.Context) (*mcpSession, Manifest, error) {
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	m := &mcpSession{}
	stderr := &tail{keep: 1 << 10}
	transport, err := s.transport(m, stderr)
	if err != nil {
		return nil, nil, err
	}
	specs, err := s.handshake(ctx, m, transport)
	if err != nil {
		closeErr := m.close()
		if text := stderr.String(); text != "" {
			err = fmt.Errorf("%w (its standard error: %s)", err, Quote(text, maxReason))
		}
		return nil, nil, errors.Join(err, closeErr)
	}
	return m, specs, nil
}

func (s *mcpServer) transport(m *mcpSession, stderr io.Writer) (mcp.Transport, error) {
	if s.url != "" {
		m.http = http.DefaultTransport.(*http.Transport).Clone()
		return &mcp.StreamableClientTransport{
			Endpoint:   s.url,
			HTTPClient: &http.Client{Transport: boundedBodies{m.http}},
			// A call that may have run is not sent again by itself (C18).
			MaxRetries:           -1,
			DisableStandaloneSSE: true,
		}, nil
	}
	cmd := exec.Command(s.program, s.args...)
	cmd.Dir, cmd.Env, cmd.Stderr = s.dir, s.env, stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if m.proc, err = startProcess(cmd); err != nil {
		return nil, err
	}
	return &mcp.IOTransport{Reader: out, Writer: in, MaxLineLength: wire.MaxFrameBytes}, nil
}

func (s *mcpServer) handshake(ctx context.Context, m *mcpSession, t mcp.Transport) (Manifest, error) {
	client := mcp.NewClient(&mcp.Implementation{Name: "jail", Version: "1"}, &mcp.ClientOptions{Capabilities: &mcp.ClientCapabilities{}})
	var err error
	if m.session, err = client.Connect(ctx, t, nil); err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	specs := make(Manifest)
	missing := slices.Clone(s.allow)
	listed := 0
	for tool, err := range m.session.Tools(ctx, nil) {
		if err != nil {
			return nil, fmt.Errorf("list tools: %w", err)
		}
		if listed++; listed > maxServerTools {
			return nil, fmt.Errorf("list tools: more than %d", maxServerTools)
		}
		if s.allow != nil && !slices.Contains(s.allow, tool.Name) {
			continue
		}
		missing = slices.DeleteFunc(missing, func(name string) bool { return name == tool.Name })
		name := s.prefix + identifier(tool.Name)
		if err := checkName(name); err != nil {
			return nil, fmt.Errorf("%w (set prefix, or leave it out by tools)", err)
		}
		if _, twice := specs[name]; twice {
			return nil, fmt.Errorf("two tools are called %s (leave one out by tools)", name)
		}
		schema, err := json.Marshal(tool.InputSchema)
		if err != nil {
			return nil, fmt.Errorf("tool %s: schema: %w", name, err)
		}
		// What a server says about its own tools being idempotent or read-only is
		// a hint that the protocol itself says not to trust; only the host
		// declares that (K5).
		specs[name] = ToolSpec{
			Call:        m.tool(tool.Name),
			Description: cutText(tool.Description, maxDescription),
			Schema:      schema,
			Server:      s.name,
		}
	}
	if len(missing) > 0 {
		return nil, fmt.Errorf("has no tool %s", Quote(missing[0], maxNameShown))
	}
	return specs, nil
}

// identifier writes a server's tool name as an identifier: MCP names may have
// dashes, dots and slashes.
func identifier(name string) string {
	b := []byte(name)
	for i, c := range b {
		if !isIdentByte(c, false) {
			b[i] = '_'
		}
	}
	return string(b)
}

// tool makes the Call function of the server's tool name.
func (m *mcpSession) tool(name string) func(context.Context, json.RawMessage) (any, error) {
	return func(ctx context.Context, args json.RawMessage) (any, error) {
		if trimmed := strings.TrimLeft(string(args), " \t\r\n"); !strings.HasPrefix(trimmed, "{") {
			return nil, &toolfail.Error{Class: toolfail.Invalid, Text: "arguments: want an object"}
		}
		res, err := m.session.CallTool(ctx, &mcp.CallToolParams{Name: name, Arguments: args})
		if err != nil {
			var rpc *jsonrpc.Error
			switch {
			case ctx.Err() != nil:
				return nil, fmt.Errorf("wait for the tool's server: %w", ctx.Err())
			case errors.As(err, &rpc) && rpc.Code == jsonrpc.CodeInvalidParams:
				return nil, &toolfail.Error{Class: toolfail.Invalid, Text: rpc.Message}
			case errors.As(err, &rpc):
				return nil, &toolfail.Error{Class: toolfail.Unknown, Text: rpc.Message}
			}
			// The error may name a URL or a path of the host.
			return nil, &toolfail.Error{Class: toolfail.Unknown, Text: "the tool's server did not answer"}
		}
		return mcpValue(res)
	}
}

// mcpValue makes a tool's value of an MCP result: its structured content if it
// has any, else its text, else the list of its contents.
func mcpValue(res *mcp.CallToolResult) (any, error) {
	var texts []string
	var all []any
	for _, c := range res.Content {
		if t, ok := c.(*mcp.TextContent); ok {
			texts = append(texts, t.Text)
			all = append(all, t.Text)
		} else {
			all = append(all, c)
		}
	}
	switch {
	case res.IsError:
		text := strings.Join(texts, "\n")
		if text == "" {
			text = "the tool failed"
		}
		return nil, &toolfail.Error{Class: toolfail.Permanent, Text: text}
	case res.NeedsInput():
		return nil, &toolfail.Error{Class: toolfail.Permanent, Text: "the tool asks for input, which a jail cannot give"}
	case res.StructuredContent != nil:
		return exactStructured(res.StructuredContent, texts)
	case len(all) == 1 && len(texts) == 1:
		return texts[0], nil
	case len(all) == 0:
		return nil, nil
	}
	return all, nil
}

// exactStructured keeps the digits of structured content, whose numbers the MCP
// library decodes to float64. A server that follows the protocol sends the same
// content as text too, which has them; without that text, a number at which
// float64 may have rounded is refused.
func exactStructured(v any, texts []string) (any, error) {
	for _, t := range texts {
		var same any
		if json.Unmarshal([]byte(t), &same) == nil && reflect.DeepEqual(v, same) {
			return json.RawMessage(t), nil
		}
	}
	if inexact(v) {
		return nil, &toolfail.Error{Class: toolfail.Permanent, Text: "the tool's value has an integer beyond 2^53 and comes without the text that would keep its digits"}
	}
	return v, nil
}

// inexact walks what the MCP library decoded, whose depth that library bounds.
func inexact(v any) bool {
	switch v := v.(type) {
	case float64:
		return v == math.Trunc(v) && math.Abs(v) >= 1<<53
	case []any:
		return slices.ContainsFunc(v, inexact)
	case map[string]any:
		for _, item := range v {
			if inexact(item) {
				return true
			}
		}
	}
	return false
}

// close ends the session and the server's processes. A server that is a command
// gets its standard input closed, and 2 s.
func (m *mcpSession) close() (err error) {
	m.once.Do(func() {
		closed := make(chan struct{})
		go func() {
			defer close(closed)
			if m.session != nil {
				// A server that is gone already is no news at this point.
				_ = m.session.Close()
			}
		}()
		waitFor(closed, serverGrace)
		if m.proc != nil {
			if m.session != nil {
				waitFor(m.proc.exited, serverGrace)
			}
			_ = m.proc.end() // its exit status means nothing to anybody
		}
		if m.http != nil {
			m.http.CloseIdleConnections()
		}
		if !waitFor(closed, serverGrace) {
			err = errors.New("mcp session does not close")
		}
	})
	return err
}

// boundedBodies refuses a response body larger than a frame, which the MCP
// library would read whole. It bounds events by itself.
type boundedBodies struct{ next http.RoundTripper }

func (b boundedBodies) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := b.next.RoundTrip(req)
	if err == nil && !strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream") {
		resp.Body = &boundedBody{resp.Body, wire.MaxFrameBytes}
	}
	return resp, err
}

type boundedBody struct {
	io.ReadCloser
	left int
}

func (b *boundedBody) Read(p []byte) (int, error) {
	if b.left <= 0 {
		return 0, fmt.Errorf("response of more than %d bytes", wire.MaxFrameBytes)
	}
	n, err := b.ReadCloser.Read(p[:min(len(p), b.left)])
	b.left -= n
	return n, err
}
