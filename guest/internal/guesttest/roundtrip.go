package guesttest

import (
	"encoding/json"
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"reflect"
	"strconv"
	"strings"
	"testing"

	"example.com/jail/wire"
)

// CheckRoundTrip sends random JSON texts as answers. The program calls echo
// with {"i": 0} to {"i": n-1} and gives the list of what it got, which must be
// what was sent: same members in the same order, same strings, and numbers of
// the same exact value (L17, L20, L24).
func CheckRoundTrip(t *testing.T, argv []string, program func(n int) string) {
	t.Helper()
	const n = 400
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 1))
	texts := make([]string, n)
	for i := range texts {
		texts[i] = randomJSON(r, 6)
	}
	o := Run(t, Options{
		Argv: argv, Program: program(n), Bindings: []wire.StartBinding{{Name: "echo"}},
		Handler: func(h *Calls, req wire.Request) {
			var args struct{ I int }
			if err := json.Unmarshal([]byte(req.Args), &args); err != nil {
				t.Errorf("args %q: %v", req.Args, err)
			}
			h.Answer(req, texts[args.I])
		},
	})
	if !o.Result.OK {
		t.Fatalf("seed %d: %s", seed, o.Result.Error)
	}
	var got []json.RawMessage
	if err := json.Unmarshal([]byte(o.Result.Value), &got); err != nil || len(got) != n {
		t.Fatalf("seed %d: %d values, %v", seed, len(got), err)
	}
	for i, text := range texts {
		if a, b := tokens(t, text), tokens(t, string(got[i])); !reflect.DeepEqual(a, b) {
			t.Errorf("seed %d: sent %s\nback %s", seed, text, got[i])
		}
	}
}

// tokens returns the tokens of JSON text, numbers as exact fractions.
func tokens(t *testing.T, text string) []any {
	t.Helper()
	var all []any
	dec := json.NewDecoder(strings.NewReader(text))
	dec.UseNumber()
	for {
		tok, err := dec.Token()
		if err != nil {
			return all
		}
		if num, ok := tok.(json.Number); ok {
			rat, ok := new(big.Rat).SetString(num.String())
			if !ok {
				t.Fatalf("number %s", num)
			}
			tok = rat.RatString()
		}
		all = append(all, tok)
	}
}

// randomJSON writes a value without negative zeros and duplicate keys. Doubles
// are written with all their digits, so that what comes back can be compared
// exactly.
func randomJSON(r *rand.Rand, depth int) string {
	blank := []string{"", "", " ", "\n\t "}[r.IntN(4)]
	switch kind := r.IntN(9); {
	case kind < 2 && depth > 0:
		parts := make([]string, r.IntN(5))
		for i := range parts {
			parts[i] = randomJSON(r, depth-1)
		}
		return "[" + blank + strings.Join(parts, blank+",") + "]"
	case kind < 4 && depth > 0:
		parts := make([]string, r.IntN(5))
		for i := range parts {
			// Keys that look like integers would change their order in JavaScript.
			parts[i] = quoted(fmt.Sprintf("k%d%s", i, randomText(r))) + blank + ":" + randomJSON(r, depth-1)
		}
		return "{" + strings.Join(parts, ","+blank) + blank + "}"
	case kind < 6:
		return quoted(randomText(r))
	case kind < 7:
		n := new(big.Int).SetUint64(r.Uint64() >> r.IntN(64))
		n.Lsh(n, uint(r.IntN(3)*r.IntN(100)))
		if r.IntN(2) == 0 {
			n.Neg(n)
		}
		return n.String()
	case kind < 8:
		f := math.Float64frombits(r.Uint64())
		if r.IntN(2) == 0 {
			f = float64(r.IntN(1<<30)) / 1024
		}
		if math.IsNaN(f) || math.IsInf(f, 0) || f == 0 || math.Abs(f) < 1e-300 {
			f = 0.5
		}
		if f == math.Trunc(f) {
			return new(big.Float).SetFloat64(f).Text('f', 0)
		}
		return strconv.FormatFloat(f, 'g', -1, 64)
	default:
		return []string{"true", "false", "null"}[r.IntN(3)]
	}
}

func randomText(r *rand.Rand) string {
	var b strings.Builder
	for range r.IntN(6) {
		b.WriteRune([]rune("a\\\"/\b\n\x00\x1f\x7fé世😀\u2028<'1")[r.IntN(16)])
	}
	return b.String()
}

// quoted writes s as JSON with escapes that encoders rarely use.
func quoted(s string) string {
	text, err := json.Marshal(s)
	if err != nil {
		panic(err)
	}
	return strings.ReplaceAll(string(text), "/", `\/`)
}
