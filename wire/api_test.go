package wire

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"slices"
	"strings"
	"testing"
)

// W67, W16, W19: the package exports these names and no others. There is no type
// for a connection on which both sides call, and the framing is two functions.
func TestExportedNames(t *testing.T) {
	want := strings.Fields(`
		Version MaxFrameBytes DefaultMaxInflight StartFD CallFD
		Request Response Start StartBinding StartBudget Result Handler Usage Budget
		Server NewServer Server.Serve Server.Usage ServerOption
		WithMaxInflight WithMaxCallDeadline WithBudget WithMaxArgsBytes WithMaxValueBytes WithMaxRefusals
		WithWriteTimeout WithGrace WithOnRefused
		DefaultMaxArgsBytes DefaultMaxValueBytes DefaultMaxRefusals DefaultWriteTimeout DefaultGrace
		MaxInflightBytes MaxIDBytes
		Client NewClient Client.Call Client.CallWithID Client.Close
		Starter NewStarter Starter.Start
		Runner NewRunner Runner.AwaitStart Runner.SendResult Runner.Admit
		Item ItemWallClock ItemMaxCalls ItemMaxBytes ItemMaxMemory UnbackedError UnbackedError.Error
		ReadFrame WriteFrame Pair OpenFD
		ErrInflightLimit ErrVersion ErrFrameTooLarge ErrEmptyFrame ErrDuplicateID ErrUnread ErrRefusals ErrUsed ErrClosed ErrResultID
		VersionError VersionError.Error VersionError.Is FrameSizeError FrameSizeError.Error FrameSizeError.Is
		ProtocolError ProtocolError.Error ProtocolError.Unwrap`)
	var got []string
	entries, err := os.ReadDir(".")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if !strings.HasSuffix(e.Name(), ".go") || strings.HasSuffix(e.Name(), "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), e.Name(), nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range file.Decls {
			got = append(got, exported(d)...)
		}
	}
	slices.Sort(got)
	slices.Sort(want)
	for _, name := range got {
		if !slices.Contains(want, name) {
			t.Errorf("%s is exported and not in the list", name)
		}
	}
	for _, name := range want {
		if !slices.Contains(got, name) {
			t.Errorf("%s is missing", name)
		}
	}
}

func exported(d ast.Decl) (names []string) {
	switch d := d.(type) {
	case *ast.FuncDecl:
		name := d.Name.Name
		if d.Recv != nil {
			recv := d.Recv.List[0].Type
			if star, ok := recv.(*ast.StarExpr); ok {
				recv = star.X
			}
			owner := recv.(*ast.Ident).Name
			if !ast.IsExported(owner) {
				return nil
			}
			name = owner + "." + name
		}
		if d.Name.IsExported() {
			names = append(names, name)
		}
	case *ast.GenDecl:
		for _, s := range d.Specs {
			switch s := s.(type) {
			case *ast.TypeSpec:
				if s.Name.IsExported() {
					names = append(names, s.Name.Name)
				}
			case *ast.ValueSpec:
				for _, n := range s.Names {
					if n.IsExported() {
						names = append(names, n.Name)
					}
				}
			}
		}
	}
	return names
}
