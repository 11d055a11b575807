package seccomp

import (
	"errors"
	"reflect"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestParseOCI(t *testing.T) {
	got, err := ParseOCI([]byte(`{
		"defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": 38,
		"architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"],
		"syscalls": [
			{"names": ["read", "write"], "action": "SCMP_ACT_ALLOW"},
			{"names": ["clone"], "action": "SCMP_ACT_ALLOW", "args": [
				{"index": 0, "value": 2114060288, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"},
				{"index": 5, "value": 18446744073709551615, "op": "SCMP_CMP_NE"}]},
			{"names": ["open"], "action": "SCMP_ACT_LOG", "args": []},
			{"names": ["a"], "action": "SCMP_ACT_ERRNO"},
			{"names": ["b"], "action": "SCMP_ACT_TRAP", "args": [{"index": 1, "value": 1, "op": "SCMP_CMP_LT"}]},
			{"names": ["c"], "action": "SCMP_ACT_KILL", "args": [{"index": 1, "value": 1, "op": "SCMP_CMP_LE"}]},
			{"names": ["d"], "action": "SCMP_ACT_KILL_PROCESS", "args": [{"index": 1, "value": 1, "op": "SCMP_CMP_GT"}]},
			{"names": ["e"], "action": "SCMP_ACT_KILL_THREAD", "args": [{"index": 1, "value": 1, "op": "SCMP_CMP_GE"}]},
			{"names": ["f"], "action": "SCMP_ACT_ERRNO", "errnoRet": 0, "args": [{"index": 1, "value": 0, "op": "SCMP_CMP_EQ"}]}
		]}`))
	if err != nil {
		t.Fatal(err)
	}
	arg := func(op Op) []Arg { return []Arg{{Index: 1, Op: op, Value: 1}} }
	want := &Profile{Default: Errno(unix.ENOSYS), Rules: []Rule{
		{Names: []string{"d"}, Action: KillProcess, Args: arg(Greater)},
		{Names: []string{"c"}, Action: KillThread, Args: arg(LessEqual)},
		{Names: []string{"e"}, Action: KillThread, Args: arg(GreaterEqual)},
		{Names: []string{"b"}, Action: Trap, Args: arg(Less)},
		{Names: []string{"a"}, Action: Errno(unix.EPERM)},
		{Names: []string{"f"}, Action: Errno(0), Args: []Arg{{Index: 1, Op: Equal}}},
		{Names: []string{"open"}, Action: Log},
		{Names: []string{"read", "write"}, Action: Allow},
		{Names: []string{"clone"}, Action: Allow, Args: []Arg{
			{Index: 0, Op: MaskedEqual, Mask: 2114060288}, {Index: 5, Op: NotEqual, Value: 1<<64 - 1}}},
	}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

// With libseccomp alone the refusal would be lost, in either order.
func TestOCIRefusalWinsOverAllowance(t *testing.T) {
	const deny = `{"names":["ioctl"],"action":"SCMP_ACT_ERRNO","args":[{"index":1,"value":21522,"op":"SCMP_CMP_EQ"}]}`
	const allow = `{"names":["ioctl"],"action":"SCMP_ACT_ALLOW"}`
	for _, rules := range []string{deny + "," + allow, allow + "," + deny} {
		p, err := ParseOCI([]byte(`{"defaultAction":"SCMP_ACT_KILL_PROCESS","syscalls":[` + rules + `]}`))
		if err != nil {
			t.Fatal(err)
		}
		if got := run(t, p, "ioctl", 0, unix.TIOCSTI); got != Errno(unix.EPERM) {
			t.Errorf("TIOCSTI: %v", got)
		}
		if got := run(t, p, "ioctl", 0, unix.TCGETS); got != Allow {
			t.Errorf("TCGETS: %v", got)
		}
	}
}

func TestParseOCIRefuses(t *testing.T) {
	rule := func(r string) string { return `{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[` + r + `]}` }
	arg := func(a string) string {
		return rule(`{"names":["read"],"action":"SCMP_ACT_ALLOW","args":[` + a + `]}`)
	}
	tests := []struct{ name, text, in string }{
		{"nothing", "not one JSON object", ``},
		{"array", "not one JSON object", `[]`},
		{"number", "not one JSON object", `1`},
		{"string", "not one JSON object", `"x"`},
		{"cut off", "not one JSON object", `{"defaultAction":"SCMP_ACT_ALLOW"`},
		{"two values", "more than one", `{"defaultAction":"SCMP_ACT_ALLOW"} {}`},
		{"trailing text", "more than one", `{"defaultAction":"SCMP_ACT_ALLOW"} x`},
		{"no default", `unknown action ""`, `{}`},
		{"unknown key", `unknown key "comment"`, `{"defaultAction":"SCMP_ACT_ALLOW","comment":"x"}`},
		{"key in another place", "unknown field", `{"defaultAction":"SCMP_ACT_ALLOW","names":["read"]}`},
		{"key in another case", `unknown key "DefaultAction"`, `{"DefaultAction":"SCMP_ACT_ALLOW"}`},
		{"repeated key", `repeated key "defaultAction"`, `{"defaultAction":"SCMP_ACT_KILL","defaultAction":"SCMP_ACT_ALLOW"}`},
		{"null", "null", `{"defaultAction":"SCMP_ACT_ALLOW","syscalls":null}`},
		{"deep", "deeper", `{"args":` + strings.Repeat("[", 100000)},
		{"deep objects", "deeper", strings.Repeat(`{"args":`, 100000)},
		{"invalid UTF-8 in a key", "unknown key", "{\"default\xffAction\":1}"},
		{"action in lower case", `unknown action "allow"`, `{"defaultAction":"allow"}`},
		{"notify", "needs a supervisor", `{"defaultAction":"SCMP_ACT_NOTIFY"}`},
		{"notify in a rule", "syscalls 0", rule(`{"names":["read"],"action":"SCMP_ACT_NOTIFY"}`)},
		{"trace in a rule", "needs a supervisor", rule(`{"names":["read"],"action":"SCMP_ACT_TRACE"}`)},
		{"listener path", "listener", `{"defaultAction":"SCMP_ACT_ALLOW","listenerPath":"/x"}`},
		{"listener data", "listener", `{"defaultAction":"SCMP_ACT_ALLOW","listenerMetadata":"x"}`},
		{"flag", "SECCOMP_FILTER_FLAG_LOG", `{"defaultAction":"SCMP_ACT_ALLOW","flags":["SECCOMP_FILTER_FLAG_LOG"]}`},
		{"unknown architecture", "SCMP_ARCH_VAX", `{"defaultAction":"SCMP_ACT_ALLOW","architectures":["SCMP_ARCH_X86_64","SCMP_ARCH_AARCH64","SCMP_ARCH_VAX"]}`},
		{"own architecture missing", "leave out", `{"defaultAction":"SCMP_ACT_ALLOW","architectures":["SCMP_ARCH_S390X"]}`},
		{"errno of an allowance", "takes no errno", rule(`{"names":["read"],"action":"SCMP_ACT_ALLOW","errnoRet":1}`)},
		{"errno of a default allowance", "takes no errno", `{"defaultAction":"SCMP_ACT_ALLOW","defaultErrnoRet":1}`},
		{"errno 4096", "above 4095", rule(`{"names":["read"],"action":"SCMP_ACT_ERRNO","errnoRet":4096}`)},
		{"errno below 0", "errnoRet", rule(`{"names":["read"],"action":"SCMP_ACT_ERRNO","errnoRet":-1}`)},
		{"errno with a fraction", "errnoRet", rule(`{"names":["read"],"action":"SCMP_ACT_ERRNO","errnoRet":1.5}`)},
		{"no action", `unknown action ""`, rule(`{"names":["read"]}`)},
		{"no names", "no system call", rule(`{"action":"SCMP_ACT_ALLOW"}`)},
		{"names is a string", "names", rule(`{"names":"read","action":"SCMP_ACT_ALLOW"}`)},
		{"unknown operator", `unknown operator "=="`, arg(`{"index":0,"value":1,"op":"=="}`)},
		{"no operator", "needs index, value and op", arg(`{"index":0,"value":1}`)},
		{"no value", "needs index, value and op", arg(`{"index":0,"op":"SCMP_CMP_EQ"}`)},
		{"no index", "needs index, value and op", arg(`{"value":0,"op":"SCMP_CMP_EQ"}`)},
		{"index 6", "above 5", arg(`{"index":6,"value":1,"op":"SCMP_CMP_EQ"}`)},
		{"value above 64 bits", "value", arg(`{"index":0,"value":18446744073709551616,"op":"SCMP_CMP_EQ"}`)},
		{"second value of an equality", "takes no second value", arg(`{"index":0,"value":1,"valueTwo":1,"op":"SCMP_CMP_EQ"}`)},
		{"mask without the value", "outside of mask", arg(`{"index":0,"value":1,"valueTwo":2,"op":"SCMP_CMP_MASKED_EQ"}`)},
		{"one argument twice", "compared twice", arg(`{"index":0,"value":16,"op":"SCMP_CMP_NE"},{"index":0,"value":40,"op":"SCMP_CMP_NE"}`)},
		{"too large", "more than 1048576", `{"defaultAction":"SCMP_ACT_ALLOW"}` + strings.Repeat(" ", maxProfileBytes)},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p, err := ParseOCI([]byte(tt.in))
			if p != nil || !errors.Is(err, ErrProfile) || !strings.Contains(err.Error(), tt.text) {
				t.Errorf("%+v, %v; want an error with %q", p, err, tt.text)
			}
		})
	}
}

// Parsing gives a profile or an error that wraps ErrProfile, never both, and
// what it gives passes the checks of Compile.
func FuzzParseOCI(f *testing.F) {
	f.Add([]byte(`{"defaultAction":"SCMP_ACT_ERRNO","defaultErrnoRet":1,"architectures":["SCMP_ARCH_X86_64"],` +
		`"syscalls":[{"names":["read"],"action":"SCMP_ACT_ALLOW","args":[{"index":0,"value":1,"valueTwo":0,"op":"SCMP_CMP_MASKED_EQ"}]}]}`))
	f.Add([]byte(`{"defaultAction":"SCMP_ACT_KILL"}`))
	f.Fuzz(func(t *testing.T, in []byte) {
		p, err := ParseOCI(in)
		if (p == nil) != (err != nil) || err != nil && !errors.Is(err, ErrProfile) {
			t.Fatalf("%+v, %v", p, err)
		}
		if err != nil {
			return
		}
		if q, err := ParseOCI(in); err != nil || q.Digest() != p.Digest() {
			t.Fatalf("parsed again: %v", err)
		}
		for i, r := range p.Rules {
			if i > 0 && r.Action.rank() < p.Rules[i-1].Action.rank() {
				t.Fatalf("rule %d is stricter than the one before", i)
			}
		}
		if f, err := Compile(p); (f == nil) != (err != nil) || err != nil && !errors.Is(err, ErrProfile) {
			t.Fatalf("compile %+v: %v", p, err)
		}
	})
}
