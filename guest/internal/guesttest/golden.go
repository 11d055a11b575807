package guesttest

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"reflect"
	"strings"
	"testing"
)

// golden is one entry of a file in wire/testdata, as its README tells.
type golden struct {
	Name, Kind, Error string
	OK                bool
	Text              string
	Base64            []byte
	Value             json.RawMessage
	Canonical         bool
}

// replayed is what a guest printed for one frame.
type replayed struct {
	// Error is empty, "version" or "protocol".
	Error string
	Value json.RawMessage
	// Packed is the guest's own frame text of the golden value.
	Packed string
}

// CheckGolden replays wire's golden frames through a guest's codec. argv runs a
// program that reads JSON lines from stdin, {"kind", "body" as base64, "value"},
// and prints one line for each with the fields of replayed, error and value for
// the kinds that a guest reads, packed for those that it writes.
func CheckGolden(t *testing.T, argv []string) {
	t.Helper()
	var rows []golden
	for _, kind := range []string{"start", "response", "request", "result"} {
		text, err := os.ReadFile("../../wire/testdata/" + kind + ".json")
		if err != nil {
			t.Fatal(err)
		}
		var some []golden
		if err := json.Unmarshal(text, &some); err != nil {
			t.Fatal(err)
		}
		for _, g := range some {
			if g.Kind != kind {
				t.Fatalf("%s is of kind %q in the file of %s", g.Name, g.Kind, kind)
			}
			// What a guest never reads it has to write as wire does.
			if kind == "start" || kind == "response" || g.Canonical {
				rows = append(rows, g)
			}
		}
	}
	if len(rows) < 100 {
		t.Fatalf("%d golden frames", len(rows))
	}
	var in bytes.Buffer
	enc := json.NewEncoder(&in)
	for _, g := range rows {
		body := g.Base64
		if body == nil {
			body = []byte(g.Text)
		}
		if err := enc.Encode(map[string]any{"kind": strings.ToUpper(g.Kind[:1]) + g.Kind[1:], "body": body, "value": g.Value}); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Stdin, cmd.Stderr = &in, os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	dec := json.NewDecoder(bytes.NewReader(out))
	for _, g := range rows {
		var got replayed
		if err := dec.Decode(&got); err != nil {
			t.Fatalf("%s %s: %v", g.Kind, g.Name, err)
		}
		if g.Kind == "request" || g.Kind == "result" {
			if got.Packed != g.Text {
				t.Errorf("%s %s: written %s, want %s", g.Kind, g.Name, got.Packed, g.Text)
			}
			continue
		}
		if got.Error != g.Error {
			t.Errorf("%s %s: error %q, want %q", g.Kind, g.Name, got.Error, g.Error)
			continue
		}
		if g.OK {
			if !sameJSON(t, got.Value, g.Value) {
				t.Errorf("%s %s: read %s, want %s", g.Kind, g.Name, got.Value, g.Value)
			}
		}
	}
}

// sameJSON compares without losing digits.
func sameJSON(t *testing.T, a, b []byte) bool {
	t.Helper()
	var values [2]any
	for i, text := range [][]byte{a, b} {
		dec := json.NewDecoder(bytes.NewReader(text))
		dec.UseNumber()
		if err := dec.Decode(&values[i]); err != nil {
			t.Fatalf("%s: %v", text, err)
		}
	}
	return reflect.DeepEqual(values[0], values[1])
}
