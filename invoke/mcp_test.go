package invoke

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	"github.com/modelcontextprotocol/go-sdk/mcp"

	"example.com/jail/wire/toolfail"
)

func init() {
	helpers["mcp-server"] = func([]string) int {
		// A child of the server's own, which has to end with it.
		if path := os.Getenv("CHILD_PID_FILE"); path != "" {
			cmd := exec.Command("/bin/sleep", "1000")
			if err := cmd.Start(); err != nil {
				return 2
			}
			if err := os.WriteFile(path, []byte(fmt.Sprint(cmd.Process.Pid)), 0o600); err != nil {
				return 2
			}
		}
		if err := testServer().Run(context.Background(), &mcp.StdioTransport{}); err != nil {
			return 1
		}
		return 0
	}
	helpers["mcp-stubborn"] = func([]string) int {
		_ = testServer().Run(context.Background(), &mcp.StdioTransport{})
		select {} // does not end when its standard input does
	}
	helpers["mcp-silent"] = func([]string) int {
		fmt.Fprintln(os.Stderr, "cannot reach\x1b the database")
		return 3
	}
	helpers["mcp-flood"] = func([]string) int {
		for {
			if _, err := os.Stdout.WriteString(strings.Repeat("a", 1<<16)); err != nil {
				return 0
			}
		}
	}
}

// testServer is an MCP server whose tools show one way to answer each.
func testServer() *mcp.Server {
	s := mcp.NewServer(&mcp.Implementation{Name: "test", Version: "1"}, nil)
	type ordersIn struct {
		Customer string `json:"customer" jsonschema:"who ordered"`
		Limit    int    `json:"limit,omitempty"`
	}
	type ordersOut struct {
		Customer string  `json:"customer"`
		Total    float64 `json:"total"`
	}
	mcp.AddTool(s, &mcp.Tool{Name: "orders", Description: "Orders of a customer."}, func(_ context.Context, _ *mcp.CallToolRequest, in ordersIn) (*mcp.CallToolResult, ordersOut, error) {
		if in.Customer == "nobody" {
			return nil, ordersOut{}, errors.New("no such customer")
		}
		return nil, ordersOut{in.Customer, 1.5}, nil
	})
	raw := func(name string, do func(ctx context.Context, req *mcp.CallToolRequest) (*mcp.CallToolResult, error)) {
		s.AddTool(&mcp.Tool{Name: name, InputSchema: json.RawMessage(`{"type":"object"}`), Annotations: &mcp.ToolAnnotations{IdempotentHint: true, ReadOnlyHint: true}}, do)
	}
	text := func(texts ...string) *mcp.CallToolResult {
		r := &mcp.CallToolResult{Content: []mcp.Content{}}
		for _, t := range texts {
			r.Content = append(r.Content, &mcp.TextContent{Text: t})
		}
		return r
	}
	raw("echo-args", func(_ context.Context, req *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
		return text(string(req.Params.Arguments)), nil
	})
	raw("two.texts", func(context.Context, *mcp.CallToolRequest) (*mcp.CallToolResult, error) { return text("a", "b"), nil })
	raw("nothing", func(context.Context, *mcp.CallToolRequest) (*mcp.CallToolResult, error) { return text(), nil })
	raw("image", func(context.Context, *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
		return &mcp.CallToolResult{Content: []mcp.Content{&mcp.ImageContent{Data: []byte("x"), MIMEType: "image/png"}}}, nil
	})
	raw("inexact", func(context.Context, *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
		r := text("about 9e15")
		r.StructuredContent = json.RawMessage(`{"n":[9007199254740993]}`)
		return r, nil
	})
	raw("big", func(context.Context, *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
		r := text(`{ "n": 1152921504606846976 }`)
		r.StructuredContent = json.RawMessage(`{"n":1152921504606846976}`)
		return r, nil
	})
	raw("structured", func(context.Context, *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
		r := text("one and a half")
		r.StructuredContent = json.RawMessage(`{"n":[1.5,9007199254740991]}`)
		return r, nil
	})
	raw("fails", func(context.Context, *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
		r := text("first", "second")
		r.IsError = true
		return r, nil
	})
	raw("bad-params", func(context.Context, *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
		return nil, &jsonrpc.Error{Code: jsonrpc.CodeInvalidParams, Message: "customer must be a name"}
	})
	raw("breaks", func(context.Context, *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
		return nil, &jsonrpc.Error{Code: jsonrpc.CodeInternalError, Message: "internal"}
	})
	raw("waits", func(ctx context.Context, _ *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
		// A stateless HTTP server is not told that its caller is gone.
		select {
		case <-ctx.Done():
		case <-time.After(time.Second):
		}
		return text("late"), nil
	})
	raw("exits", func(context.Context, *mcp.CallToolRequest) (*mcp.CallToolResult, error) { os.Exit(0); return nil, nil })
	return s
}

// stdioFile is a tools file for a helper as an MCP server.
func stdioFile(helper, more string) string {
	argv, env := helperCommand(helper)
	name, value, _ := strings.Cut(env, "=")
	return fmt.Sprintf("mcp:\n- name: shop\n  command: [%q]\n%s  env:\n    GORACE: atexit_sleep_ms=0\n    %s: %q\n", argv[0], more, name, value)
}

func open(t *testing.T, text string) (*Tools, error) {
	t.Helper()
	f, err := Load(strings.NewReader(text), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel() // the tools outlive the context they were opened with
	return f.Open(ctx, nil, Options{})
}

func mustOpen(t *testing.T, text string) *Tools {
	t.Helper()
	tools, err := open(t, text)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := tools.Close(); err != nil {
			t.Error(err)
		}
		if n := children(); len(n) != 0 {
			t.Errorf("processes left: %v", n)
		}
	})
	return tools
}

func httpServer(t *testing.T, o *mcp.StreamableHTTPOptions) string {
	t.Helper()
	s := httptest.NewServer(mcp.NewStreamableHTTPHandler(func(*http.Request) *mcp.Server { return testServer() }, o))
	t.Cleanup(s.Close)
	return s.URL
}

func TestMCPTools(t *testing.T) { // W24, L24, L28, K5, C13
	files := map[string]func(t *testing.T) string{
		"stdio": func(*testing.T) string { return stdioFile("mcp-server", "") },
		"http with events": func(t *testing.T) string {
			return "mcp:\n- name: shop\n  url: " + httpServer(t, nil) + "\n"
		},
		"http with JSON": func(t *testing.T) string {
			return "mcp:\n- name: shop\n  url: " + httpServer(t, &mcp.StreamableHTTPOptions{JSONResponse: true, Stateless: true}) + "\n"
		},
	}
	for transport, file := range files {
		t.Run(transport, func(t *testing.T) {
			tools := mustOpen(t, file(t))
			names := map[string]string{}
			for _, b := range tools.Bindings() {
				names[b.Name] = b.Signature + " " + b.Description
			}
			if got, want := names["orders"], "orders(customer: str, limit: int = ...) Orders of a customer."; got != want {
				t.Errorf("binding %q, want %q", got, want)
			}
			if tools.Idempotent("echo_args") {
				t.Error("the server's own hint was believed")
			}
			run := newRun(t, tools)
			for _, c := range []struct {
				tool, args string
				kind       toolfail.Class
				want       string
			}{
				{"orders", `{"customer":"ada"}`, "", `{"customer":"ada","total":1.5}`},
				{"big", `{}`, "", `{"n":1152921504606846976}`},
				{"orders", `{"customer":"nobody"}`, toolfail.Permanent, "no such customer"},
				{"orders", `{}`, toolfail.Invalid, "customer"},
				{"orders", `{"customer":5}`, toolfail.Invalid, "customer"},
				{"echo_args", `{"n":1152921504606846976,"f":1.50,"s":"<\u00e9>"}`, "", `"{\"n\":1152921504606846976,\"f\":1.50,\"s\":\"<`},
				{"echo_args", `[1]`, toolfail.Invalid, "arguments"},
				{"echo-args", `{}`, toolfail.Invalid, "no such tool"},
				{"two_texts", `{}`, "", `["a","b"]`},
				{"nothing", `{}`, "", `null`},
				{"image", `{}`, "", `"mimeType":"image/png"`},
				{"inexact", `{}`, toolfail.Permanent, "beyond 2^53"},
				{"structured", `{}`, "", `{"n":[1.5,9007199254740991]}`},
				{"fails", `{}`, toolfail.Permanent, "first\nsecond"},
				{"bad_params", `{}`, toolfail.Invalid, "customer must be a name"},
				{"breaks", `{}`, toolfail.Unknown, "internal"},
			} {
				resp := handle(t, run, c.tool, c.args)
				got := resp.Value
				if !resp.OK {
					got = resp.Error
				}
				if resp.Kind != string(c.kind) || !strings.Contains(got, c.want) {
					t.Errorf("%s(%s) = %+v, want %q", c.tool, c.args, resp, c.want)
				}
			}
			ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
			defer cancel()
			_, err := tools.Do(ctx, Call{Name: "waits", Args: "{}"})
			if toolfail.Of(err) != toolfail.Transient {
				t.Errorf("call past its deadline: %v", err)
			}
			if resp := handle(t, run, "nothing", "{}"); !resp.OK {
				t.Errorf("the next call: %+v", resp)
			}
			if got := tools.specs["orders"].Server; got != "shop" {
				t.Errorf("server %q", got)
			}
		})
	}
}

func TestMCPToolsAreChosenByName(t *testing.T) { // B18
	tools := mustOpen(t, stdioFile("mcp-server", "  tools: [orders, echo-args]\n  prefix: shop_\n"))
	var names []string
	for _, b := range tools.Bindings() {
		names = append(names, b.Name)
	}
	if got := strings.Join(names, " "); got != "shop_echo_args shop_orders" {
		t.Errorf("tools %s", got)
	}
	if resp := handle(t, newRun(t, tools), "shop_nothing", "{}"); resp.Kind != "invalid" {
		t.Errorf("a tool that was left out: %+v", resp)
	}
}

func TestMCPServersThatCannotBeUsed(t *testing.T) { // L29
	busy, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer busy.Close()
	go func() {
		for {
			c, err := busy.Accept()
			if err != nil {
				return
			}
			c.Close()
		}
	}()
	huge := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write([]byte(`{"jsonrpc":"2.0","id":1,"result":"`))
		for range 40 {
			if _, err := w.Write([]byte(strings.Repeat("a", 1<<20))); err != nil {
				return
			}
		}
	}))
	defer huge.Close()
	for _, c := range []struct{ name, text, want string }{
		{"ends at once", stdioFile("mcp-silent", ""), `cannot reach\x1b the database`},
		{"writes no MCP", stdioFile("mcp-flood", ""), "mcp server shop: connect"},
		{"is no MCP server", "mcp:\n- command: [/bin/cat, /etc/hostname]\n", "mcp server 1: "},
		{"closes connections", "mcp:\n- url: http://" + busy.Addr().String() + "/\n", "mcp server 1: connect"},
		{"answers without end", "mcp:\n- url: " + huge.URL + "\n", "mcp server 1: "},
		{"lacks a tool of the list", stdioFile("mcp-server", "  tools: [orders, rates]\n"), `has no tool "rates"`},
		{"clashes with a command", "tools:\n- name: orders\n  command: /bin/true\n" + stdioFile("mcp-server", ""), "tool orders: also in the tools list"},
		{"clashes with another server", stdioFile("mcp-server", "") + strings.ReplaceAll(strings.TrimPrefix(stdioFile("mcp-server", ""), "mcp:\n"), "name: shop", "name: other"), "also in mcp server shop"},
	} {
		t.Run(c.name, func(t *testing.T) {
			tools, err := open(t, c.text)
			if err == nil || tools != nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("Open = %v, %v; want error with %q", tools, err, c.want)
			}
			if n := children(); len(n) != 0 {
				t.Errorf("processes left: %v", n)
			}
		})
	}
}

func TestMCPServerThatHangsAtTheStart(t *testing.T) { // E10
	f, err := Load(strings.NewReader("mcp:\n- command: [/bin/sleep, \"1000\"]\n"), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	if _, err := f.Open(ctx, nil, Options{}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Open = %v", err)
	}
	if n := children(); len(n) != 0 {
		t.Errorf("processes left: %v", n)
	}
}

func TestMCPServerThatDiesFailsItsCalls(t *testing.T) { // W55, K7
	tools := mustOpen(t, stdioFile("mcp-server", ""))
	run := newRun(t, tools)
	for i := range 3 {
		resp := handle(t, run, "exits", "{}")
		if resp.Kind != "unknown" || resp.Error != "the tool's server did not answer" {
			t.Errorf("call %d: %+v", i, resp)
		}
	}
}

func TestCloseEndsMCPServersAndTheirChildren(t *testing.T) { // B9, J4
	for _, helper := range []string{"mcp-server", "mcp-stubborn"} {
		t.Run(helper, func(t *testing.T) {
			goroutines, fds := runtime.NumGoroutine(), openFDs(t)
			pid := filepath.Join(t.TempDir(), "pid")
			text := stdioFile(helper, "")
			if helper == "mcp-server" {
				text += fmt.Sprintf("    CHILD_PID_FILE: %q\n", pid)
			}
			tools, err := open(t, text)
			if err != nil {
				t.Fatal(err)
			}
			if err := tools.Close(); err != nil {
				t.Error(err)
			}
			if err := tools.Close(); err != nil {
				t.Errorf("second Close: %v", err)
			}
			if n := children(); len(n) != 0 {
				t.Errorf("processes left: %v", n)
			}
			if helper == "mcp-server" {
				eventually(t, "end of the server's child", func() bool { return !alive(t, pid) })
			}
			eventually(t, "end of goroutines", func() bool { return runtime.NumGoroutine() <= goroutines })
			if n := openFDs(t); n > fds {
				t.Errorf("%d descriptors, %d before", n, fds)
			}
		})
	}
}

func TestCloseAlsoCallsTheHosts(t *testing.T) {
	f, err := Load(strings.NewReader(stdioFile("mcp-server", "")), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	bad := errors.New("host's own")
	tools, err := f.Open(context.Background(), nil, Options{OnClose: func() error { return bad }})
	if err != nil {
		t.Fatal(err)
	}
	if err := tools.Close(); !errors.Is(err, bad) {
		t.Errorf("Close = %v", err)
	}
	// A chain that cannot be made leaves no server behind.
	if _, err := f.Open(context.Background(), []Stage{nil}, Options{}); !errors.Is(err, ErrNilStage) {
		t.Errorf("Open = %v", err)
	}
	if n := children(); len(n) != 0 {
		t.Errorf("processes left: %v", n)
	}
}

func TestMCPResultThatAsksForInput(t *testing.T) {
	var res mcp.CallToolResult
	if err := json.Unmarshal([]byte(`{"content":[],"resultType":"input_required","requestState":"x"}`), &res); err != nil {
		t.Fatal(err)
	}
	if _, err := mcpValue(&res); toolfail.Of(err) != toolfail.Permanent {
		t.Errorf("err = %v", err)
	}
}
