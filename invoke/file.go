package invoke

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

const (
	// maxFileBytes bounds a tools file.
	maxFileBytes = 1 << 20
	// connectTimeout bounds how long one MCP server may take to answer at the
	// start.
	connectTimeout = 30 * time.Second
)

// File is a tools file that was read and checked. Nothing is running yet.
type File struct {
	tools []fileTool
	mcp   []mcpServer
}

type fileTool struct {
	name string
	spec ToolSpec
	cmd  command
}

// LoadFile reads a tools file in YAML or JSON. An error begins with the path and
// the line: "tools.yaml:7: tool orders: unknown key "comand"".
//
// The file has two lists, tools and mcp; a file that is a list itself is that of
// tools. Each of tools is a command of the host: name and
// command (a list of strings, or one string that is split at spaces), and
// optionally description, signature, schema, dir, env, timeout, idempotent and early_read.
// Each of mcp is an MCP server: command, or url for one that speaks streamable
// HTTP, and optionally name, env, dir, prefix and tools, the list of its tools
// to offer.
//
// A program without a slash is looked up in PATH when the file is loaded; one
// with a slash, and dir, are relative to the file's folder, which is also the
// default of dir. No shell is involved, and a tool's command may write 1 MiB of
// output. A command gets PATH, HOME, TMPDIR, TZ,
// LANG, LC_*, TERM, USER and LOGNAME of this process and what env sets; an env
// entry without a value is taken from this process, and missing there it is an
// error.
//
// Refused are unknown and repeated keys, repeated names, values of the wrong
// type, schemas that do not compile or refer to other files, programs that do
// not exist, and files over 1 MiB.
func LoadFile(path string) (*File, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open tools file: %w", err)
	}
	defer f.Close()
	dir, err := filepath.Abs(filepath.Dir(path))
	if err != nil {
		return nil, fmt.Errorf("open tools file: %w", err)
	}
	return load(f, dir, path)
}

// Load is LoadFile for a text that is not a file: dir stands for the folder, and
// errors begin with "tools".
func Load(r io.Reader, dir string) (*File, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("load tools: %w", err)
	}
	return load(r, dir, "tools")
}

func load(r io.Reader, dir, name string) (*File, error) {
	text, err := io.ReadAll(io.LimitReader(r, maxFileBytes+1))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	if len(text) > maxFileBytes {
		return nil, fmt.Errorf("read %s: more than %d bytes", name, maxFileBytes)
	}
	if !utf8.Valid(text) {
		return nil, fmt.Errorf("read %s: not UTF-8", name)
	}
	root, err := parseFile(text)
	if err == nil {
		l := loader{dir: dir}
		if err = l.file(root); err == nil {
			return &l.out, nil
		}
	}
	var at *lineError
	if errors.As(err, &at) {
		return nil, fmt.Errorf("%s:%w", name, err)
	}
	return nil, fmt.Errorf("%s: %w", name, err)
}

// Open starts the file's MCP servers and puts all tools behind stages, as
// NewTools does. ctx bounds the start; one server has 30 s for it. End the tools
// with Close, which ends the servers and then calls o.OnClose.
func (f *File) Open(ctx context.Context, stages []Stage, o Options) (*Tools, error) {
	m, stop, err := f.Connect(ctx)
	if err != nil {
		return nil, err
	}
	then := o.OnClose
	o.OnClose = func() error {
		err := stop()
		if then != nil {
			err = errors.Join(err, then())
		}
		return err
	}
	t, err := NewTools(m, stages, o)
	if err != nil {
		return nil, errors.Join(err, stop())
	}
	return t, nil
}

// Connect is Open for a caller that adds tools of its own to the manifest or
// changes it before NewTools. stop ends the MCP servers and can be called again.
func (f *File) Connect(ctx context.Context) (m Manifest, stop func() error, err error) {
	m = make(Manifest, len(f.tools))
	for _, t := range f.tools {
		cmd := t.cmd
		spec := t.spec
		spec.Call = cmd.call
		m[t.name] = spec
	}
	var sessions []*mcpSession
	stop = func() error {
		var errs []error
		for _, s := range sessions {
			errs = append(errs, s.close())
		}
		return errors.Join(errs...)
	}
	for _, server := range f.mcp {
		s, specs, err := server.connect(ctx)
		if err != nil {
			return nil, nil, errors.Join(fmt.Errorf("mcp server %s: %w", server.name, err), stop())
		}
		sessions = append(sessions, s)
		for name, spec := range specs {
			if other, taken := m[name]; taken {
				from := "the tools list"
				if other.Server != "" {
					from = "mcp server " + other.Server
				}
				return nil, nil, errors.Join(fmt.Errorf("mcp server %s: tool %s: also in %s: set prefix, or leave it out by tools", server.name, name, from), stop())
			}
			m[name] = spec
		}
	}
	return m, stop, nil
}

// loader turns nodes into a File. A method that reads one thing reports where
// it stands in the file.
type loader struct {
	dir string
	out File
}

// fields reads a mapping: every key must be in known, and in the file once.
func fields(n *node, what string, known ...string) (map[string]*node, error) {
	if n.kind != kindMap {
		return nil, errorAt(n.line, "%s: want a mapping, got %s", what, n.kind)
	}
	out := make(map[string]*node, len(n.entries))
	for _, e := range n.entries {
		if !slices.Contains(known, e.key) {
			return nil, errorAt(e.line, "%s: unknown key %s (known: %s)", what, Quote(e.key, maxNameShown), strings.Join(known, ", "))
		}
		out[e.key] = e.value
	}
	return out, nil
}

func (l *loader) file(root *node) error {
	top := map[string]*node{"tools": root} // a file that is the list of tools
	if root.kind != kindList {
		var err error
		if top, err = fields(root, "tools file", "tools", "mcp"); err != nil {
			return err
		}
	}
	tools, err := list(top["tools"], "tools")
	if err != nil {
		return err
	}
	seen := make(map[string]int)
	for i, n := range tools {
		t, err := l.tool(n, fmt.Sprintf("tool %d", i+1))
		if err != nil {
			return err
		}
		if line, twice := seen[t.name]; twice {
			return errorAt(n.line, "tool %s: already declared in line %d", t.name, line)
		}
		seen[t.name] = n.line
		l.out.tools = append(l.out.tools, t)
	}
	servers, err := list(top["mcp"], "mcp")
	if err != nil {
		return err
	}
	clear(seen)
	for i, n := range servers {
		s, err := l.server(n, fmt.Sprintf("mcp server %d", i+1))
		if err != nil {
			return err
		}
		if line, twice := seen[s.name]; twice {
			return errorAt(n.line, "mcp server %s: already declared in line %d", quoteBare(s.name, maxNameShown), line)
		}
		seen[s.name] = n.line
		l.out.mcp = append(l.out.mcp, s)
	}
	if len(tools) == 0 && len(servers) == 0 {
		return errorAt(root.line, "neither tools nor mcp has an entry")
	}
	return nil
}

func (l *loader) tool(n *node, what string) (fileTool, error) {
	t := fileTool{cmd: command{maxOut: defaultMaxText}}
	f, err := fields(n, what, "name", "description", "signature", "schema", "command", "dir", "env", "timeout", "idempotent", "early_read")
	if err != nil {
		return t, err
	}
	if t.name, err = text(f["name"], what+": name"); err != nil {
		return t, err
	}
	if f["name"] == nil {
		return t, errorAt(n.line, "%s: name is missing", what)
	}
	if err := checkName(t.name); err != nil {
		return t, errorAt(f["name"].line, "%s", err)
	}
	what = "tool " + t.name
	if t.spec.Description, err = text(f["description"], what+": description"); err != nil {
		return t, err
	}
	if t.spec.Signature, err = text(f["signature"], what+": signature"); err != nil {
		return t, err
	}
	if s := f["schema"]; s != nil {
		if s.kind != kindMap {
			return t, errorAt(s.line, "%s: schema: want a mapping, got %s", what, s.kind)
		}
		var buf bytes.Buffer
		s.json(&buf)
		t.spec.Schema = json.RawMessage(buf.Bytes())
		if _, err := compileSchema(t.spec.Schema); err != nil {
			return t, errorAt(s.line, "%s: schema: %s", what, cutText(err.Error(), maxReason))
		}
	}
	if f["command"] == nil {
		return t, errorAt(n.line, "%s: command is missing", what)
	}
	if t.cmd.program, t.cmd.args, err = l.program(f["command"], what); err != nil {
		return t, err
	}
	if t.cmd.dir, err = l.folder(f["dir"], what); err != nil {
		return t, err
	}
	if t.cmd.env, err = environ(f["env"], what); err != nil {
		return t, err
	}
	if t.cmd.timeout, err = duration(f["timeout"], what+": timeout"); err != nil {
		return t, err
	}
	if t.spec.Idempotent, err = boolean(f["idempotent"], what+": idempotent"); err != nil {
		return t, err
	}
	t.spec.AllowEarlyRead, err = boolean(f["early_read"], what+": early_read")
	return t, err
}

func (l *loader) server(n *node, what string) (mcpServer, error) {
	var s mcpServer
	f, err := fields(n, what, "name", "command", "env", "dir", "url", "prefix", "tools")
	if err != nil {
		return s, err
	}
	if s.name, err = text(f["name"], what+": name"); err != nil {
		return s, err
	}
	if f["name"] == nil {
		s.name = strings.TrimPrefix(what, "mcp server ")
	} else if s.name == "" || len(s.name) > maxNameBytes || quoteBare(s.name, maxNameBytes) != s.name {
		return s, errorAt(f["name"].line, "%s: name %s: want 1 to %d letters, digits and . _ - $", what, Quote(s.name, maxNameShown), maxNameBytes)
	}
	what = "mcp server " + s.name
	if (f["command"] == nil) == (f["url"] == nil) {
		return s, errorAt(n.line, "%s: want either command or url", what)
	}
	if c := f["command"]; c != nil {
		if s.program, s.args, err = l.program(c, what); err != nil {
			return s, err
		}
		if s.dir, err = l.folder(f["dir"], what); err != nil {
			return s, err
		}
		if s.env, err = environ(f["env"], what); err != nil {
			return s, err
		}
	} else {
		for _, key := range []string{"env", "dir"} {
			if f[key] != nil {
				return s, errorAt(f[key].line, "%s: %s: only for a server that is a command", what, key)
			}
		}
		if s.url, err = text(f["url"], what+": url"); err != nil {
			return s, err
		}
		if err := checkURL(s.url); err != nil {
			return s, errorAt(f["url"].line, "%s: url %s: %s", what, Quote(s.url, maxArgsShown), err)
		}
	}
	if s.prefix, err = text(f["prefix"], what+": prefix"); err != nil {
		return s, err
	}
	if s.prefix != "" && !isIdent(s.prefix) {
		return s, errorAt(f["prefix"].line, "%s: prefix %s: not an identifier", what, Quote(s.prefix, maxNameShown))
	}
	if f["tools"] != nil {
		if s.allow, err = texts(f["tools"], what+": tools"); err != nil {
			return s, err
		}
	}
	return s, nil
}

// program reads a command and finds its program.
func (l *loader) program(n *node, what string) (program string, args []string, err error) {
	what += ": command"
	words := strings.Fields(n.text) // no quoting: what has spaces is written as a list
	if n.kind != kindString {
		if words, err = texts(n, what); err != nil {
			return "", nil, err
		}
	}
	if len(words) == 0 || words[0] == "" {
		return "", nil, errorAt(n.line, "%s: no program", what)
	}
	for _, w := range words {
		if strings.IndexByte(w, 0) >= 0 {
			return "", nil, errorAt(n.line, "%s: NUL byte in %s", what, Quote(w, maxArgsShown))
		}
	}
	program = words[0]
	if strings.Contains(program, "/") && !filepath.IsAbs(program) {
		program = filepath.Join(l.dir, program)
	}
	found, err := exec.LookPath(program)
	if err != nil {
		var e *exec.Error
		if errors.As(err, &e) {
			err = e.Err
		}
		return "", nil, errorAt(n.line, "%s %s: %s", what, Quote(words[0], maxArgsShown), err)
	}
	if !filepath.IsAbs(found) {
		return "", nil, errorAt(n.line, "%s %s: found in a relative folder of PATH", what, Quote(words[0], maxArgsShown))
	}
	return found, words[1:], nil
}

func (l *loader) folder(n *node, what string) (string, error) {
	dir, err := text(n, what+": dir")
	if err != nil || dir == "" {
		return l.dir, err
	}
	if !filepath.IsAbs(dir) {
		dir = filepath.Join(l.dir, dir)
	}
	if info, err := os.Stat(dir); err != nil || !info.IsDir() {
		return "", errorAt(n.line, "%s: dir %s: no such folder", what, Quote(dir, maxArgsShown))
	}
	return dir, nil
}

// environ makes the environment of a command: the allow-listed part of this
// process's, and what the file declares.
func environ(n *node, what string) ([]string, error) {
	env := hostEnviron()
	if n == nil {
		return env, nil
	}
	what += ": env"
	if n.kind != kindMap {
		return nil, errorAt(n.line, "%s: want a mapping, got %s", what, n.kind)
	}
	for _, e := range n.entries {
		value := e.value.text
		switch {
		case e.key == "" || strings.ContainsAny(e.key, "=\x00") || strings.IndexByte(value, 0) >= 0:
			return nil, errorAt(e.line, "%s: %s: not a variable", what, Quote(e.key, maxNameShown))
		case e.value.kind == kindNull:
			var set bool
			if value, set = os.LookupEnv(e.key); !set {
				return nil, errorAt(e.line, "%s: %s has no value here, and is not set in the environment", what, Quote(e.key, maxNameShown))
			}
		case e.value.kind != kindString:
			return nil, errorAt(e.line, "%s: %s: want a string (put it in quotes), got %s", what, Quote(e.key, maxNameShown), e.value.kind)
		}
		env = append(env, e.key+"="+value)
	}
	return env, nil
}

func list(n *node, what string) ([]*node, error) {
	if n == nil {
		return nil, nil
	}
	if n.kind != kindList {
		return nil, errorAt(n.line, "%s: want a list, got %s", what, n.kind)
	}
	return n.list, nil
}

func text(n *node, what string) (string, error) {
	if n == nil {
		return "", nil
	}
	if n.kind != kindString {
		return "", errorAt(n.line, "%s: want a string, got %s", what, n.shown())
	}
	return n.text, nil
}

func texts(n *node, what string) ([]string, error) {
	items, err := list(n, what)
	if err != nil {
		return nil, err
	}
	out := make([]string, 0, len(items))
	for _, item := range items {
		s, err := text(item, what)
		if err != nil {
			return nil, err
		}
		out = append(out, s)
	}
	return out, nil
}

func boolean(n *node, what string) (bool, error) {
	if n == nil {
		return false, nil
	}
	if n.kind != kindBool {
		return false, errorAt(n.line, "%s: want true or false, got %s", what, n.shown())
	}
	return n.text == "true", nil
}

func duration(n *node, what string) (time.Duration, error) {
	s, err := text(n, what)
	if err != nil || n == nil {
		return 0, err
	}
	d, err := time.ParseDuration(s)
	if err != nil || d <= 0 {
		return 0, errorAt(n.line, "%s: %s: want a duration such as 500ms, 30s or 2m", what, Quote(s, maxNameShown))
	}
	return d, nil
}

// shown is the kind and, where there is one, the text.
func (n *node) shown() string {
	if n.text == "" || n.kind == kindBool {
		if n.text != "" {
			return n.text
		}
		return string(n.kind)
	}
	return string(n.kind) + " " + Quote(n.text, maxNameShown)
}
