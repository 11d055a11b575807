package invoke

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/google/jsonschema-go/jsonschema"
)

const (
	// maxNumberText and maxExponent bound the numbers that are compared with a
	// schema: the validator computes with exact fractions, whose cost grows with
	// the square of the digits.
	maxNumberText = 400
	maxExponent   = 400
	// maxReason bounds the text of a refusal.
	maxReason = 512
	// schemaSlots is how many arguments are decoded for validation at once. One
	// decoded value takes up to 50 times its text.
	schemaSlots = 4
)

// argSchema is a JSON Schema for the arguments of one tool, ready to validate.
type argSchema struct{ resolved *jsonschema.Resolved }

// noLoader refuses every reference that leaves the schema, so that compiling a
// schema reads no file and makes no connection.
func noLoader(u *url.URL) (*jsonschema.Schema, error) {
	return nil, fmt.Errorf("reference to %s: a schema must be whole in itself", Quote(u.String(), maxArgsShown))
}

func compileSchema(raw json.RawMessage) (*argSchema, error) {
	if len(raw) == 0 || raw[0] != '{' {
		return nil, errors.New("schema is not an object")
	}
	var s jsonschema.Schema
	if err := json.Unmarshal(raw, &s); err != nil {
		return nil, err
	}
	if err := checkTypes(&s); err != nil {
		return nil, err
	}
	resolved, err := s.Resolve(&jsonschema.ResolveOptions{Loader: noLoader})
	if err != nil {
		return nil, err
	}
	return &argSchema{resolved}, nil
}

// jsonTypes are the values of "type".
var jsonTypes = []string{"array", "boolean", "integer", "null", "number", "object", "string"}

// checkTypes refuses what the library takes in silence and can never match:
// unknown types and steps that are not positive.
func checkTypes(s *jsonschema.Schema) error {
	if s == nil {
		return nil
	}
	for _, t := range append(s.Types, s.Type) {
		if t != "" && !slices.Contains(jsonTypes, t) {
			return fmt.Errorf("type %s is none of %s", Quote(t, 32), strings.Join(jsonTypes, ", "))
		}
	}
	if s.MultipleOf != nil && *s.MultipleOf <= 0 {
		return fmt.Errorf("multipleOf %v is not positive", *s.MultipleOf)
	}
	return eachSubschema(s, checkTypes)
}

// eachSubschema calls f for the schemas directly inside of s. Its depth is that
// of the tools file, which is the host's.
func eachSubschema(s *jsonschema.Schema, f func(*jsonschema.Schema) error) error {
	v := reflect.ValueOf(s).Elem()
	for i := range v.NumField() {
		switch x := v.Field(i).Interface().(type) {
		case *jsonschema.Schema:
			if err := f(x); err != nil {
				return err
			}
		case []*jsonschema.Schema:
			for _, sub := range x {
				if err := f(sub); err != nil {
					return err
				}
			}
		case map[string]*jsonschema.Schema:
			for _, sub := range x {
				if err := f(sub); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// check returns the reason why args, a valid JSON text, does not match; empty
// means that it matches.
func (s *argSchema) check(args string) (reason string) {
	if reason := scanNumbers(args); reason != "" {
		return reason
	}
	// As doubles, for judging only: the tool gets the text. Integers from 2^53
	// up are compared with the bounds of a schema as the nearest double.
	var v any
	if err := json.Unmarshal([]byte(args), &v); err != nil {
		return cutText("arguments: "+err.Error(), maxReason)
	}
	if err := s.resolved.Validate(v); err != nil {
		return cutText("arguments do not match the tool's schema: "+explain(err), maxReason)
	}
	return ""
}

// scanNumbers refuses a JSON text with a number that is too long to compute
// with.
func scanNumbers(text string) (reason string) {
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case c == '"':
			for i++; i < len(text) && text[i] != '"'; i++ {
				if text[i] == '\\' {
					i++
				}
			}
		case c == '-' || '0' <= c && c <= '9':
			start := i
			for i < len(text) && strings.IndexByte("+-.0123456789eE", text[i]) >= 0 {
				i++
			}
			token := text[start:i]
			i--
			if len(token) > maxNumberText {
				return fmt.Sprintf("arguments: number of %d characters: longer than %d", len(token), maxNumberText)
			}
			if e := strings.IndexAny(token, "eE"); e >= 0 {
				if n, err := strconv.Atoi(token[e+1:]); err != nil || n > maxExponent || n < -maxExponent {
					return fmt.Sprintf("arguments: number %s: exponent beyond %d", Quote(token, 32), maxExponent)
				}
			}
		}
	}
	return ""
}

// explain says what does not match and where, in the arguments' terms rather than
// the schema's as far as the validator tells.
func explain(err error) string {
	text := err.Error()
	if i := strings.LastIndex(text, "validating "); i >= 0 {
		text = text[i+len("validating "):]
	}
	where, what, ok := strings.Cut(text, ": ")
	if !ok || where == "root" || !strings.HasPrefix(where, "/") {
		return strings.TrimPrefix(text, "root: ")
	}
	return what + " at " + strings.ReplaceAll(where, "/properties/", "/")
}

// argChecker validates the arguments of several tools and bounds how many it
// decodes at once.
type argChecker struct {
	schemas map[string]*argSchema
	slots   chan struct{}
}

func newArgChecker(schemas map[string]json.RawMessage) (*argChecker, error) {
	c := &argChecker{schemas: make(map[string]*argSchema, len(schemas)), slots: make(chan struct{}, schemaSlots)}
	for name, raw := range schemas {
		s, err := compileSchema(raw)
		if err != nil {
			return nil, fmt.Errorf("tool %s: schema: %w", quoteBare(name, maxNameShown), err)
		}
		c.schemas[name] = s
	}
	return c, nil
}

func (c *argChecker) check(ctx context.Context, name, args string) (reason string, err error) {
	s, ok := c.schemas[name]
	if !ok {
		return "", nil
	}
	select {
	case c.slots <- struct{}{}:
	case <-ctx.Done():
		return "", ctx.Err()
	}
	defer func() { <-c.slots }()
	return s.check(args), nil
}
