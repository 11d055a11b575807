package invoke

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"
)

// maxSignature bounds a generated signature in bytes, maxDefaultShown one default
// in it, maxParams its parameters. What is longer is shown as name(...).
const (
	maxSignature    = 1024
	maxDefaultShown = 40
	maxParams       = 100
)

// signature writes the call form of a tool as Python writes it, from the JSON
// Schema of its arguments: required ones first, in the order of "required",
// then the others in the order of "properties". It is empty for a schema that
// does not describe an object's properties.
func signature(name string, schema json.RawMessage) string {
	var s struct {
		Properties json.RawMessage `json:"properties"`
		Required   []string        `json:"required"`
		Type       any             `json:"type"`
	}
	if json.Unmarshal(schema, &s) != nil {
		return ""
	}
	if s.Type == "object" && len(s.Properties) == 0 {
		return name + "()"
	}
	order, props := orderedObject(s.Properties)
	if props == nil {
		return ""
	}
	if len(order) > maxParams || len(s.Required) > maxParams {
		return name + "(...)"
	}
	names := make([]string, 0, len(order))
	for _, r := range s.Required {
		if _, ok := props[r]; ok && !slices.Contains(names, r) {
			names = append(names, r)
		}
	}
	required := len(names)
	for _, p := range order {
		if !slices.Contains(names, p) {
			names = append(names, p)
		}
	}

	var params, odd []string
	for i, p := range names {
		var prop struct {
			Type    any             `json:"type"`
			Default json.RawMessage `json:"default"`
		}
		// A property's schema may also be true or false; then it has no type.
		_ = json.Unmarshal(props[p], &prop)
		typ := pythonType(prop.Type)
		if !isIdent(p) || reservedWords[p] {
			odd = append(odd, p+": "+typ)
			continue
		}
		param := p + ": " + typ
		if i >= required {
			param += " = " + pythonLiteral(prop.Default)
		}
		params = append(params, param)
	}
	if len(odd) > 0 {
		// Names that no keyword argument can have, as an annotation.
		params = append(params, "**arguments: "+Quote(strings.Join(odd, ", "), maxSignature))
	}
	sig := name + "(" + strings.Join(params, ", ") + ")"
	if len(sig) > maxSignature {
		return name + "(...)"
	}
	return sig
}

// orderedObject gives the keys of a JSON object in the order of the text.
func orderedObject(raw json.RawMessage) ([]string, map[string]json.RawMessage) {
	var m map[string]json.RawMessage
	if json.Unmarshal(raw, &m) != nil || m == nil {
		return nil, nil
	}
	var keys []string
	dec := json.NewDecoder(bytes.NewReader(raw))
	depth := 0
	for {
		tok, err := dec.Token()
		if err != nil {
			return keys, m
		}
		switch tok := tok.(type) {
		case json.Delim:
			if tok == '{' || tok == '[' {
				depth++
			} else {
				depth--
			}
		case string:
			if depth == 1 {
				keys = append(keys, tok)
				var skip json.RawMessage
				if dec.Decode(&skip) != nil {
					return keys, m
				}
			}
		}
	}
}

func pythonType(t any) string {
	switch t := t.(type) {
	case string:
		switch t {
		case "string":
			return "str"
		case "integer":
			return "int"
		case "number":
			return "float"
		case "boolean":
			return "bool"
		case "array":
			return "list"
		case "object":
			return "dict"
		case "null":
			return "None"
		}
	case []any:
		var parts []string
		for _, one := range t {
			parts = append(parts, pythonType(one))
		}
		if len(parts) > 0 {
			return strings.Join(parts, " | ")
		}
	}
	return "object"
}

// pythonLiteral shows a default. An optional argument without one has "...",
// since leaving it out is not the same as passing None.
func pythonLiteral(raw json.RawMessage) string {
	text := string(raw)
	switch {
	case len(raw) == 0 || len(raw) > maxDefaultShown:
		return "..."
	case text == "null":
		return "None"
	case text == "true":
		return "True"
	case text == "false":
		return "False"
	case text[0] == '[' || text[0] == '{':
		if text == "[]" || text == "{}" {
			return text
		}
		return "..."
	case text[0] == '"':
		var s string
		if json.Unmarshal(raw, &s) != nil {
			return "..."
		}
		return Quote(s, maxDefaultShown)
	}
	return text
}
