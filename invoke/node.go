package invoke

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/lexer"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"

	"example.com/jail/wire/strictjson"
)

const (
	// maxDepth bounds the nesting of a tools file. Its parser recurses.
	maxDepth = 100
	// maxNestedInLine bounds "- - - -", the one way to nest that takes no depth
	// of brackets and no indentation.
	maxNestedInLine = 20
)

type kind string

const (
	kindNull   kind = "null"
	kindBool   kind = "true or false"
	kindNumber kind = "a number"
	kindString kind = "a string"
	kindList   kind = "a list"
	kindMap    kind = "a mapping"
)

// node is a value of a tools file with the line where it stands, whether the
// file was YAML or JSON.
type node struct {
	kind    kind
	line    int
	text    string // scalars: the text; numbers as JSON writes them
	list    []*node
	entries []entry // mappings, in the order of the file
	lines   map[string]int
}

type entry struct {
	key   string
	line  int
	value *node
}

// lineError is an error at a line of a tools file.
type lineError struct {
	line int
	text string
}

func (e *lineError) Error() string { return strconv.Itoa(e.line) + ": " + e.text }

func errorAt(line int, format string, args ...any) error {
	return &lineError{line, fmt.Sprintf(format, args...)}
}

// parseFile reads one YAML document, or one JSON text if the first character is
// that of a JSON object. Anchors, aliases, tags, merge keys and complex keys are
// refused: no tools file needs them, and they let a small file expand without
// bound.
func parseFile(text []byte) (*node, error) {
	if trimmed := bytes.TrimLeft(text, " \t\r\n"); len(trimmed) > 0 && trimmed[0] == '{' {
		return parseJSON(text)
	}
	return parseYAML(string(text))
}

func parseYAML(text string) (n *node, err error) {
	// The parser is somebody else's, and a host must not die of a file.
	defer func() {
		if recover() != nil {
			n, err = nil, errorAt(1, "not YAML: its parser gave up")
		}
	}()
	tokens := lexer.Tokenize(text)
	if err := checkTokens(tokens); err != nil {
		return nil, err
	}
	file, err := parser.Parse(tokens, 0)
	if err != nil {
		var syntax *yaml.SyntaxError
		if errors.As(err, &syntax) && syntax.Token != nil && syntax.Token.Position != nil {
			return nil, errorAt(syntax.Token.Position.Line, "%s", cutText(syntax.Message, maxReason))
		}
		return nil, errorAt(1, "%s", cutText(err.Error(), maxReason))
	}
	if len(file.Docs) > 1 {
		return nil, errorAt(1, "%d YAML documents: want one", len(file.Docs))
	}
	if len(file.Docs) == 0 || file.Docs[0].Body == nil {
		return &node{kind: kindNull, line: 1}, nil
	}
	return fromAST(file.Docs[0].Body, 0)
}

func checkTokens(tokens token.Tokens) error {
	flow, line, inLine := 0, 0, 0
	for _, t := range tokens {
		at := t.Position.Line
		if at != line {
			line, inLine = at, 0
		}
		switch t.Type {
		case token.SequenceStartType, token.MappingStartType:
			flow++
		case token.SequenceEndType, token.MappingEndType:
			flow--
		case token.SequenceEntryType:
			inLine++
		case token.AnchorType, token.AliasType, token.TagType, token.MergeKeyType, token.MappingKeyType, token.DirectiveType:
			return errorAt(at, "%s: not used in a tools file (put a text that begins with it in quotes)", Quote(t.Value, 16))
		}
		if flow > maxDepth || inLine > maxNestedInLine {
			return errorAt(at, "nested too deep (more than %d levels, or %d in one line)", maxDepth, maxNestedInLine)
		}
	}
	return nil
}

func fromAST(n ast.Node, depth int) (*node, error) {
	line := 1
	if t := n.GetToken(); t != nil && t.Position != nil {
		line = t.Position.Line
	}
	if depth > maxDepth {
		return nil, errorAt(line, "nested deeper than %d levels", maxDepth)
	}
	out := &node{line: line}
	switch n := n.(type) {
	case *ast.NullNode:
		out.kind = kindNull
	case *ast.BoolNode:
		out.kind, out.text = kindBool, strconv.FormatBool(n.Value)
	case *ast.IntegerNode, *ast.FloatNode:
		out.kind, out.text = kindNumber, n.GetToken().Value
		if !isJSONNumber(out.text) {
			return nil, errorAt(line, "number %s: write it as JSON does, or in quotes if it is a text", Quote(out.text, 32))
		}
	case *ast.StringNode:
		out.kind, out.text = kindString, n.Value
		if n.Token.Type == token.StringType && isJSONNumber(n.Value) {
			out.kind = kindNumber // the parser takes 1e3 and long integers for text
		}
	case *ast.LiteralNode:
		out.kind, out.text = kindString, n.Value.Value
	case *ast.SequenceNode:
		out.kind = kindList
		for _, v := range n.Values {
			item, err := fromAST(v, depth+1)
			if err != nil {
				return nil, err
			}
			out.list = append(out.list, item)
		}
	case *ast.MappingNode:
		out.kind = kindMap
		for _, v := range n.Values {
			if err := out.addAST(v, depth); err != nil {
				return nil, err
			}
		}
		if len(out.entries) > 0 {
			out.line = out.entries[0].line
		}
	case *ast.MappingValueNode:
		out.kind = kindMap
		if err := out.addAST(n, depth); err != nil {
			return nil, err
		}
		out.line = out.entries[0].line
	default:
		return nil, errorAt(line, "%s: not used in a tools file", Quote(n.String(), 32))
	}
	return out, nil
}

func (n *node) addAST(v *ast.MappingValueNode, depth int) error {
	line := v.Key.GetToken().Position.Line
	key, ok := v.Key.(*ast.StringNode)
	if !ok {
		return errorAt(line, "key %s: want a string", Quote(v.Key.String(), 32))
	}
	value, err := fromAST(v.Value, depth+1)
	if err != nil {
		return err
	}
	return n.add(key.Value, line, value)
}

func (n *node) add(key string, line int, value *node) error {
	if at, ok := n.lines[key]; ok {
		return errorAt(line, "key %s: already set in line %d", Quote(key, maxNameShown), at)
	}
	if n.lines == nil {
		n.lines = make(map[string]int)
	}
	n.lines[key] = line
	n.entries = append(n.entries, entry{key, line, value})
	return nil
}

func isJSONNumber(s string) bool {
	if s == "" || s[0] != '-' && (s[0] < '0' || s[0] > '9') {
		return false
	}
	return json.Valid([]byte(s))
}

func parseJSON(text []byte) (*node, error) {
	if err := checkJSON(string(text), maxDepth); err != nil {
		return nil, errorAt(1, "%s", cutText(err.Error(), maxReason))
	}
	p := jsonParser{text: text, dec: json.NewDecoder(bytes.NewReader(text)), line: 1}
	p.dec.UseNumber()
	return p.value()
}

// jsonParser reads text that checkJSON accepted, so its depth is bounded.
type jsonParser struct {
	text []byte
	dec  *json.Decoder
	read int // bytes of text already counted in line
	line int
}

func (p *jsonParser) token() (json.Token, error) {
	t, err := p.dec.Token()
	if err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return nil, errorAt(p.line, "%s", err)
	}
	end := int(p.dec.InputOffset())
	p.line += bytes.Count(p.text[p.read:end], []byte("\n"))
	p.read = end
	return t, nil
}

func (p *jsonParser) value() (*node, error) {
	t, err := p.token()
	if err != nil {
		return nil, err
	}
	n := &node{line: p.line}
	switch t := t.(type) {
	case nil:
		n.kind = kindNull
	case bool:
		n.kind, n.text = kindBool, strconv.FormatBool(t)
	case json.Number:
		n.kind, n.text = kindNumber, t.String()
	case string:
		n.kind, n.text = kindString, t
	case json.Delim:
		n.kind = kindList
		if t == '{' {
			n.kind = kindMap
		}
		for p.dec.More() {
			key := ""
			if n.kind == kindMap {
				k, err := p.token()
				if err != nil {
					return nil, err
				}
				key = k.(string)
			}
			line := p.line
			item, err := p.value()
			if err != nil {
				return nil, err
			}
			if n.kind == kindList {
				n.list = append(n.list, item)
			} else if err := n.add(key, line, item); err != nil {
				return nil, err
			}
		}
		if _, err := p.token(); err != nil {
			return nil, err
		}
	}
	return n, nil
}

// json writes the node as JSON, numbers as their own text.
func (n *node) json(buf *bytes.Buffer) {
	switch n.kind {
	case kindNull:
		buf.WriteString("null")
	case kindBool, kindNumber:
		buf.WriteString(n.text)
	case kindString:
		buf.Write(strictjson.AppendQuote(nil, n.text))
	case kindList:
		buf.WriteByte('[')
		for i, v := range n.list {
			if i > 0 {
				buf.WriteByte(',')
			}
			v.json(buf)
		}
		buf.WriteByte(']')
	case kindMap:
		buf.WriteByte('{')
		for i, e := range n.entries {
			if i > 0 {
				buf.WriteByte(',')
			}
			buf.Write(strictjson.AppendQuote(nil, e.key))
			buf.WriteByte(':')
			e.value.json(buf)
		}
		buf.WriteByte('}')
	}
}
