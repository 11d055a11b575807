package invoke_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"example.com/jail/invoke"
	"example.com/jail/wire"
	"example.com/jail/wire/toolfail"
)

// A host gives its own Go functions to a jailed program. A launcher does the
// last part: it takes the requests from the call channel.
func ExampleNewTools() {
	stock := map[string]int{"A-1": 12}
	tools, err := invoke.NewTools(invoke.Manifest{
		"stock": {
			Description: "Units of an article on the shelf.",
			Schema:      json.RawMessage(`{"type":"object","properties":{"sku":{"type":"string"}},"required":["sku"]}`),
			Idempotent:  true,
			Call: func(_ context.Context, args json.RawMessage) (any, error) {
				var in struct{ SKU string }
				if err := json.Unmarshal(args, &in); err != nil {
					return nil, err
				}
				n, ok := stock[in.SKU]
				if !ok {
					return nil, &toolfail.Error{Class: toolfail.Permanent, Text: "no article " + in.SKU}
				}
				return map[string]int{"units": n}, nil
			},
		},
	}, nil, invoke.Options{})
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, b := range tools.Bindings() {
		fmt.Println(b.Signature, "-", b.Description)
	}

	run := tools.NewRun(context.Background(), "run-1")
	defer run.Close()
	for _, args := range []string{`{"sku":"A-1"}`, `{"sku":"B-9"}`, `{"sku":5}`} {
		resp, _ := run.Handle(context.Background(), wire.Request{V: wire.Version, ID: "1", Tool: "stock", Args: args})
		fmt.Printf("ok %v, value %q, kind %q, error %q\n", resp.OK, resp.Value, resp.Kind, resp.Error)
	}
	// Output:
	// stock(sku: str) - Units of an article on the shelf.
	// ok true, value "{\"units\":12}", kind "", error ""
	// ok false, value "", kind "permanent", error "no article B-9"
	// ok false, value "", kind "invalid", error "stock: arguments do not match the tool's schema: type: 5 has type \"integer\", want \"string\" at /sku"
}

// MCP servers are named in a tools file, here one at a URL; one that is a
// command has command instead of url. Only the tools of the list are offered.
func ExampleFile_Open() {
	server := mcp.NewServer(&mcp.Implementation{Name: "weather", Version: "1"}, nil)
	type in struct {
		City string `json:"city"`
	}
	type out struct {
		Celsius int `json:"celsius"`
	}
	mcp.AddTool(server, &mcp.Tool{Name: "get-forecast", Description: "Tomorrow's weather."},
		func(context.Context, *mcp.CallToolRequest, in) (*mcp.CallToolResult, out, error) {
			return nil, out{21}, nil
		})
	http := httptest.NewServer(mcp.NewStreamableHTTPHandler(func(*http.Request) *mcp.Server { return server }, nil))
	defer http.Close()

	file, err := invoke.Load(strings.NewReader(`
mcp:
- name: weather
  url: `+http.URL+`
  tools: [get-forecast]
`), ".")
	if err != nil {
		fmt.Println(err)
		return
	}
	tools, err := file.Open(context.Background(), []invoke.Stage{invoke.AllowOnly("get_forecast")}, invoke.Options{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer tools.Close()
	fmt.Println(tools.Bindings()[0].Signature)
	res, err := tools.Do(context.Background(), invoke.Call{Name: "get_forecast", Args: `{"city":"Oslo"}`})
	fmt.Println(string(res.Structured), err)
	// Output:
	// get_forecast(city: str)
	// {"celsius":21} <nil>
}

// A person is asked before money moves. The call is shown escaped and cut, since
// a hostile program wrote it.
func ExampleApprove() {
	ask := func(_ context.Context, call invoke.Call) (invoke.Verdict, error) {
		fmt.Println("approve?", call)
		if strings.Contains(call.Args, `"amount":5}`) {
			return invoke.Verdict{Allow: true, Note: "approved by alice"}, nil
		}
		return invoke.Verdict{Reason: "alice said no"}, nil
	}
	pay := func(context.Context, json.RawMessage) (any, error) { return "paid", nil }
	tools, err := invoke.NewTools(invoke.Manifest{"pay": {Call: pay}}, []invoke.Stage{invoke.Approve(ask, "pay")}, invoke.Options{})
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, args := range []string{`{"amount":5}`, `{"amount":5000,"to":"` + "\u202e\x7f" + `eve"}`} {
		res, err := tools.Do(context.Background(), invoke.Call{Name: "pay", Args: args})
		fmt.Println(string(res.Structured), err)
	}
	// Output:
	// approve? pay "{\"amount\":5}"
	// "paid" <nil>
	// approve? pay "{\"amount\":5000,\"to\":\"\u202e\x7feve\"}"
	//  call of pay denied by stage approval: alice said no
}

// Every attempt is in the log before it may run, the denied ones too. A sink
// that cannot be written denies the call.
func ExampleAudit() {
	var log bytes.Buffer
	read := func(context.Context, json.RawMessage) (any, error) { return 1, nil }
	tools, err := invoke.NewTools(invoke.Manifest{"read": {Call: read}}, nil, invoke.Options{Audit: invoke.NewAudit(&log, invoke.AuditOptions{})})
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, name := range []string{"read", "re\u0430d"} { // the second has a Cyrillic letter
		_, _ = tools.Do(context.Background(), invoke.Call{Name: name, Caller: "run-1", Args: "{}"})
	}
	dec := json.NewDecoder(&log)
	for dec.More() {
		var line struct {
			Seq, Call int
			Event     string
			Tool      string
			Allowed   bool
			Class     string
		}
		if err := dec.Decode(&line); err != nil {
			fmt.Println(err)
			return
		}
		fmt.Printf("%d %s %d %s allowed=%v class=%q\n", line.Seq, line.Event, line.Call, invoke.Quote(line.Tool, 20), line.Allowed, line.Class)
	}

	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer full.Close()
	tools, err = invoke.NewTools(invoke.Manifest{"read": {Call: read}}, nil, invoke.Options{Audit: invoke.NewAudit(full, invoke.AuditOptions{})})
	if err != nil {
		fmt.Println(err)
		return
	}
	_, err = tools.Do(context.Background(), invoke.Call{Name: "read", Args: "{}"})
	fmt.Println(err)
	// Output:
	// 1 call 0 "read" allowed=false class=""
	// 2 end 1 "read" allowed=true class=""
	// 3 call 0 "re\u0430d" allowed=false class=""
	// 4 end 3 "re\u0430d" allowed=false class="invalid"
	// call of read denied by stage audit: write audit line: write /dev/full: no space left on device
}

// Nothing in this package retries. A host that wants to asks two questions: may
// it succeed later, and may the same arguments be sent twice?
func ExampleTools_Idempotent() {
	attempts := 0
	busy := func(context.Context, json.RawMessage) (any, error) {
		if attempts++; attempts%3 != 0 {
			return nil, &toolfail.Error{Class: toolfail.Transient, Text: "upstream is restarting"}
		}
		return "done", nil
	}
	tools, err := invoke.NewTools(invoke.Manifest{
		"read":  {Call: busy, Idempotent: true},
		"order": {Call: busy},
	}, nil, invoke.Options{})
	if err != nil {
		fmt.Println(err)
		return
	}
	call := func(name string) {
		for try := 1; ; try++ {
			res, err := tools.Do(context.Background(), invoke.Call{Name: name, Args: "{}"})
			class := toolfail.Of(err)
			if err == nil || try == 5 || !class.Retryable() || !class.ResubmitSafe(tools.Idempotent(name)) {
				fmt.Printf("%s: try %d: value %q, class %q\n", name, try, res.Structured, class)
				return
			}
			time.Sleep(time.Millisecond)
		}
	}
	call("read")
	call("order")
	// Output:
	// read: try 3: value "\"done\"", class ""
	// order: try 1: value "", class "transient"
}

// A chain without tools around it, for a host that has its own kind of calls.
func ExampleNewChain() {
	weekdays := invoke.StageFunc{StageName: "weekdays", Fn: func(_ context.Context, call invoke.Call) (invoke.Verdict, error) {
		if call.Name == "deploy" {
			return invoke.Verdict{Reason: "it is Sunday", Retryable: true}, nil
		}
		return invoke.Verdict{Allow: true}, nil
	}}
	chain, err := invoke.NewChain(func(_ context.Context, call invoke.Call) (invoke.Result, error) {
		return invoke.Result{Text: "ran " + call.Name}, nil
	}, []invoke.Stage{weekdays}, invoke.WithRecorder(func(r invoke.Record) {
		fmt.Println("record:", r.Call.Name, r.Allowed, len(r.Stages))
	}))
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, name := range []string{"test", "deploy"} {
		res, err := chain.Do(context.Background(), invoke.Call{Name: name})
		fmt.Println(res.Text, err)
		var denied *invoke.DenyError
		if errors.As(err, &denied) {
			fmt.Println("a gate decided:", denied.Cause == nil, "- try later:", denied.Retryable)
		}
	}
	// Output:
	// record: test true 1
	// ran test <nil>
	// record: deploy false 1
	//  call of deploy denied by stage weekdays: it is Sunday
	// a gate decided: true - try later: true
}
