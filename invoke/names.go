package invoke

import (
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

const (
	maxNameShown = 64
	maxArgsShown = 256
	// maxNameBytes bounds the name of a tool.
	maxNameBytes = 64
)

// Quote makes hostile text fit for a log line, an error or a terminal: at most
// max bytes of it, in double quotes, with everything but printable ASCII
// escaped, and the number of bytes left out behind it.
func Quote(s string, max int) string {
	rest := ""
	if len(s) > max {
		cut := max
		for cut > 0 && !utf8.RuneStart(s[cut]) {
			cut--
		}
		rest = "...(" + strconv.Itoa(len(s)-cut) + " bytes more)"
		s = s[:cut]
	}
	return strconv.QuoteToASCII(s) + rest
}

// quoteBare is Quote, without the quotes where s is a plain name.
func quoteBare(s string, max int) string {
	if len(s) > max || s == "" {
		return Quote(s, max)
	}
	for i := 0; i < len(s); i++ {
		c := s[i]
		if !isIdentByte(c, false) && c != '$' && c != '-' && c != '.' {
			return Quote(s, max)
		}
	}
	return s
}

func isIdentByte(c byte, first bool) bool {
	return c == '_' || 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || !first && '0' <= c && c <= '9'
}

func isIdent(s string) bool {
	for i := 0; i < len(s); i++ {
		if !isIdentByte(s[i], i == 0) {
			return false
		}
	}
	return s != ""
}

// checkName refuses a tool name that some guest could not show as
// host.<name>(...) (L29).
func checkName(name string) error {
	shown := Quote(name, maxNameShown)
	switch {
	case name == "":
		return fmt.Errorf("tool name is empty")
	case len(name) > maxNameBytes:
		return fmt.Errorf("tool name %s: longer than %d bytes", shown, maxNameBytes)
	case name == prepareName || name == resolveName:
		return fmt.Errorf("tool name %s: reserved by the call channel", shown)
	case !isIdent(name):
		return fmt.Errorf("tool name %s: not an identifier ([A-Za-z_][A-Za-z0-9_]*)", shown)
	case strings.HasPrefix(name, "__"):
		// Both languages give such names a meaning (__class__, __proto__).
		return fmt.Errorf("tool name %s: two leading underscores are the guest language's own", shown)
	case reservedWords[name]:
		return fmt.Errorf("tool name %s: reserved word of Python or JavaScript", shown)
	case runtimeSlots[name]:
		return fmt.Errorf("tool name %s: owned by the guest's runtime", shown)
	}
	return nil
}

func wordSet(words string) map[string]bool {
	set := make(map[string]bool)
	for _, w := range strings.Fields(words) {
		set[w] = true
	}
	return set
}

var reservedWords = wordSet(`
	False None True and as assert async await break class continue def del elif
	else except finally for from global if import in is lambda nonlocal not or
	pass raise return try while with yield

	arguments await case catch const debugger default delete do enum eval export
	extends false function implements instanceof interface let new null package
	private protected public static super switch this throw true typeof undefined
	var void NaN Infinity`)

// runtimeSlots are names that the host object of a guest, or the language's own
// object model, gives a meaning: "then" would make the object a thenable, and
// "toString" and its kind are called without the program knowing.
var runtimeSlots = wordSet(`
	host aio prepare ToolError _tools result console global globalThis process require
	module exports
	constructor prototype hasOwnProperty isPrototypeOf propertyIsEnumerable
	toString toLocaleString toJSON valueOf then`)
