package invoke

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"golang.org/x/text/language"
	"golang.org/x/text/message"
)

const (
	// maxNumberText and maxExponent bound the numbers that are compared with a
	// schema: the validator computes with exact fractions, whose cost grows with
	// the square of the digits.
	maxNumberText = 400
	maxExponent   = 400
	// maxExplained is how many separators arguments may have for a refusal to
	// name the places that do not match. Beyond it the list itself would cost
	// the host more memory than the arguments do.
	maxExplained = 2000
	// maxReason bounds the text of a refusal.
	maxReason = 512
	// schemaSlots is how many arguments are decoded for validation at once. One
	// decoded value takes up to 50 times its text.
	schemaSlots = 4
)

// argSchema is a compiled JSON Schema for the arguments of one tool.
type argSchema struct {
	// fast only tells yes or no and stops at the first mismatch; full collects
	// every mismatch.
	fast, full *jsonschema.Schema
}

// noLoader refuses every reference that leaves the schema, so that compiling a
// schema reads no file and makes no connection.
type noLoader struct{}

func (noLoader) Load(url string) (any, error) {
	return nil, fmt.Errorf("reference to %s: a schema must be whole in itself", Quote(url, maxArgsShown))
}

func compileSchema(raw json.RawMessage) (*argSchema, error) {
	const full, fast = "mem:///args.json", "mem:///fast.json"
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(raw))
	if err != nil {
		return nil, err
	}
	if _, ok := doc.(map[string]any); !ok {
		return nil, errors.New("schema is not an object")
	}
	c := jsonschema.NewCompiler()
	c.DefaultDraft(jsonschema.Draft2020)
	c.UseLoader(noLoader{})
	if err := c.AddResource(full, doc); err != nil {
		return nil, err
	}
	// Inside of "not" the validator collects no errors.
	not := map[string]any{"not": map[string]any{"not": map[string]any{"$ref": full}}}
	if err := c.AddResource(fast, not); err != nil {
		return nil, err
	}
	var s argSchema
	if s.full, err = c.Compile(full); err != nil {
		return nil, err
	}
	if s.fast, err = c.Compile(fast); err != nil {
		return nil, err
	}
	return &s, nil
}

// check returns the reason why args, a valid JSON text, does not match; empty
// means that it matches.
func (s *argSchema) check(args string) (reason string) {
	separators, reason := scanNumbers(args)
	if reason != "" {
		return reason
	}
	v, err := jsonschema.UnmarshalJSON(strings.NewReader(args))
	if err != nil {
		return cutText("arguments: "+err.Error(), maxReason)
	}
	if s.fast.Validate(v) == nil {
		return ""
	}
	if separators > maxExplained {
		return "arguments do not match the tool's schema"
	}
	return explain(s.full.Validate(v))
}

// scanNumbers counts the commas and colons of a JSON text outside of its
// strings, and refuses a number that is too long to compute with.
func scanNumbers(text string) (separators int, reason string) {
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case c == '"':
			for i++; i < len(text) && text[i] != '"'; i++ {
				if text[i] == '\\' {
					i++
				}
			}
		case c == ',' || c == ':':
			separators++
		case c == '-' || '0' <= c && c <= '9':
			start := i
			for i < len(text) && strings.IndexByte("+-.0123456789eE", text[i]) >= 0 {
				i++
			}
			token := text[start:i]
			i--
			if len(token) > maxNumberText {
				return separators, fmt.Sprintf("arguments: number of %d characters: longer than %d", len(token), maxNumberText)
			}
			if e := strings.IndexAny(token, "eE"); e >= 0 {
				if n, err := strconv.Atoi(token[e+1:]); err != nil || n > maxExponent || n < -maxExponent {
					return separators, fmt.Sprintf("arguments: number %s: exponent beyond %d", Quote(token, 32), maxExponent)
				}
			}
		}
	}
	return separators, ""
}

// explain names up to three places that do not match.
func explain(err error) string {
	var top *jsonschema.ValidationError
	if !errors.As(err, &top) {
		return "arguments do not match the tool's schema"
	}
	printer := message.NewPrinter(language.English)
	var parts []string
	queue := []*jsonschema.ValidationError{top}
	for len(queue) > 0 && len(parts) < 3 {
		e := queue[0]
		queue = queue[1:]
		if len(e.Causes) > 0 {
			queue = append(queue, e.Causes...)
			continue
		}
		at := ""
		if len(e.InstanceLocation) > 0 {
			at = " at /" + strings.Join(e.InstanceLocation, "/")
		}
		parts = append(parts, e.ErrorKind.LocalizedString(printer)+at)
	}
	return cutText("arguments do not match the tool's schema: "+strings.Join(parts, "; "), maxReason)
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
