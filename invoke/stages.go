package invoke

import (
	"context"
	"encoding/json"
	"fmt"
	"math"

	"golang.org/x/time/rate"

	"example.com/jail/wire/toolfail"
)

// AllowOnly makes a stage that allows the named tools and denies every other.
// Names are compared byte by byte: another case or a look-alike is denied (D9).
func AllowOnly(names ...string) Stage {
	allowed := set(names)
	return StageFunc{StageName: "allow-list", Fn: func(_ context.Context, call Call) (Verdict, error) {
		if !allowed[call.Name] {
			return Verdict{Reason: "not on the list of allowed tools"}, nil
		}
		return Verdict{Allow: true}, nil
	}}
}

// RateLimit makes a stage that allows perSecond calls a second on average and
// burst at once, over all runs that share the stage. A call above that is denied
// at once as Retryable, class rate_limited; it is not held back. With tools, only
// calls of those tools are counted and denied. perSecond must be positive and
// finite, burst at least 1.
func RateLimit(perSecond float64, burst int, tools ...string) (Stage, error) {
	if !(perSecond > 0) || math.IsInf(perSecond, 0) || burst < 1 {
		return nil, fmt.Errorf("rate limit of %v calls a second, burst %d: want both positive", perSecond, burst)
	}
	limiter := rate.NewLimiter(rate.Limit(perSecond), burst)
	counted := set(tools)
	return StageFunc{StageName: "rate-limit", Fn: func(_ context.Context, call Call) (Verdict, error) {
		if len(counted) > 0 && !counted[call.Name] || limiter.Allow() {
			return Verdict{Allow: true}, nil
		}
		return Verdict{Reason: fmt.Sprintf("more than %v calls a second", perSecond), Retryable: true}, nil
	}}, nil
}

// CheckArgs makes a stage that validates the arguments of the named tools
// against their JSON Schemas, and denies with class invalid what does not match.
// Other tools pass. Tools has such a check of its own; this one is for a Chain
// without Tools.
func CheckArgs(schemas map[string]json.RawMessage) (Stage, error) {
	checker, err := newArgChecker(schemas)
	if err != nil {
		return nil, fmt.Errorf("check arguments: %w", err)
	}
	return StageFunc{StageName: "schema", Fn: func(ctx context.Context, call Call) (Verdict, error) {
		if _, ok := checker.schemas[call.Name]; !ok {
			return Verdict{Allow: true}, nil
		}
		if err := checkJSON(call.Args, maxArgsDepth); err != nil {
			return Verdict{Reason: cutText("arguments: "+err.Error(), maxReason), Class: toolfail.Invalid}, nil
		}
		reason, err := checker.check(ctx, call.Name, call.Args)
		return Verdict{Allow: reason == "", Reason: reason, Class: toolfail.Invalid}, err
	}}, nil
}

// Approve makes a stage that asks a person, through ask, about every call of
// the named tools, or of all tools if none is named. ask gets one call at a time
// of each caller goroutine, so it may run concurrently with itself, and has to
// return when ctx ends: the call's deadline runs on while the person thinks.
// What ask allows after that is denied. Show a call by its String, since name
// and arguments are hostile; put who decided into Verdict.Note.
func Approve(ask func(ctx context.Context, call Call) (Verdict, error), tools ...string) Stage {
	asked := set(tools)
	s := StageFunc{StageName: "approval"}
	if ask == nil {
		return s // NewChain refuses it
	}
	s.Fn = func(ctx context.Context, call Call) (Verdict, error) {
		if len(asked) > 0 && !asked[call.Name] {
			return Verdict{Allow: true}, nil
		}
		v, err := ask(ctx, call)
		if err == nil && v.Allow {
			err = ctx.Err()
		}
		return v, err
	}
	return s
}

func set(names []string) map[string]bool {
	m := make(map[string]bool, len(names))
	for _, n := range names {
		m[n] = true
	}
	return m
}
