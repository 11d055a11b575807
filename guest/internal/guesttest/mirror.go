package guesttest

import (
	"encoding/json"
	"os/exec"
	"reflect"
	"slices"
	"strings"
	"testing"

	"example.com/jail/wire"
	"example.com/jail/wire/toolfail"
)

// The names of B18 as the host declares them.
const (
	Prepare = "$prepare"
	Resolve = "$resolve"
)

// MaxErrorBytes bounds the error text of a Result (K7).
const MaxErrorBytes = 4096

// CheckMirror runs the guest with --describe and compares what it prints with
// the Go declarations: constants, the closed class set, and of each frame the
// field names, types and which of them are required (L40).
func CheckMirror(t *testing.T, argv []string) {
	t.Helper()
	text, err := exec.Command(argv[0], append(argv[1:], "--describe")...).Output()
	if err != nil {
		t.Fatalf("describe: %v", err)
	}
	var got struct {
		Version       int                         `json:"version"`
		MaxFrameBytes int                         `json:"max_frame_bytes"`
		MaxErrorBytes int                         `json:"max_error_bytes"`
		MaxIDBytes    int                         `json:"max_id_bytes"`
		StartFD       int                         `json:"start_fd"`
		CallFD        int                         `json:"call_fd"`
		Prepare       string                      `json:"prepare"`
		Resolve       string                      `json:"resolve"`
		Kinds         []toolfail.Class            `json:"kinds"`
		Frames        map[string]map[string][]any `json:"frames"`
	}
	if err := json.Unmarshal(text, &got); err != nil {
		t.Fatalf("describe printed %s: %v", text, err)
	}
	for _, c := range []struct {
		name      string
		got, want any
	}{
		{"version", got.Version, wire.Version},
		{"max_frame_bytes", got.MaxFrameBytes, wire.MaxFrameBytes},
		{"max_error_bytes", got.MaxErrorBytes, MaxErrorBytes},
		{"max_id_bytes", got.MaxIDBytes, wire.MaxIDBytes},
		{"start_fd", got.StartFD, wire.StartFD},
		{"call_fd", got.CallFD, wire.CallFD},
		{"prepare", got.Prepare, Prepare},
		{"resolve", got.Resolve, Resolve},
	} {
		if c.got != c.want {
			t.Errorf("%s is %v in the guest, %v in Go", c.name, c.got, c.want)
		}
	}
	if want := toolfail.All(); !slices.Equal(got.Kinds, want) {
		t.Errorf("kinds are %v in the guest, %v in Go", got.Kinds, want)
	}
	for _, v := range []any{
		wire.Request{}, wire.Response{}, wire.Start{}, wire.StartBinding{}, wire.StartBudget{}, wire.Result{},
	} {
		name := reflect.TypeOf(v).Name()
		if want := fields(reflect.TypeOf(v)); !reflect.DeepEqual(got.Frames[name], want) {
			t.Errorf("%s is %v in the guest, %v in Go", name, got.Frames[name], want)
		}
		delete(got.Frames, name)
	}
	if len(got.Frames) != 0 {
		t.Errorf("the guest has frames that Go has not: %v", got.Frames)
	}
}

// fields returns name: [JSON type, required] of a struct, from its tags.
func fields(typ reflect.Type) map[string][]any {
	all := make(map[string][]any)
	for i := range typ.NumField() {
		name, options, _ := strings.Cut(typ.Field(i).Tag.Get("json"), ",")
		kind := map[reflect.Kind]string{
			reflect.Int: "integer", reflect.Int64: "integer", reflect.String: "string",
			reflect.Bool: "boolean", reflect.Slice: "array", reflect.Struct: "object",
		}[typ.Field(i).Type.Kind()]
		all[name] = []any{kind, !strings.Contains(options, "omitempty")}
	}
	return all
}
