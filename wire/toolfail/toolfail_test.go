package toolfail

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// K1: the contract. Every class of the set has exactly this row; a class that
// is added without one fails here, since the lists are compared whole.
func TestEveryClassHasItsPolicyRow(t *testing.T) {
	rows := []struct {
		class                        Class
		word                         string
		retry, resubmit, human, mayH bool
	}{
		{Transient, "transient", true, false, false, false},
		{RateLimited, "rate_limited", true, true, false, false},
		{Quota, "quota", false, false, false, true},
		{Invalid, "invalid", false, true, false, false},
		{Denied, "denied", false, false, false, true},
		{Auth, "auth", false, false, true, true},
		{Canceled, "canceled", false, false, false, false},
		{Permanent, "permanent", false, false, false, false},
		{Unknown, "unknown", false, false, false, true},
	}
	var listed []Class
	for _, r := range rows {
		listed = append(listed, r.class)
		if string(r.class) != r.word {
			t.Errorf("%q crosses the wire as %q", r.word, string(r.class))
		}
		if got := Parse(r.word); got != r.class {
			t.Errorf("Parse(%q) = %q", r.word, got)
		}
		if !r.class.Valid() {
			t.Errorf("%s is not valid", r.class)
		}
		if got := r.class.Retryable(); got != r.retry {
			t.Errorf("%s.Retryable() = %v", r.class, got)
		}
		if got := r.class.ResubmitSafe(false); got != r.resubmit {
			t.Errorf("%s.ResubmitSafe(false) = %v", r.class, got)
		}
		if !r.class.ResubmitSafe(true) { // K5
			t.Errorf("%s.ResubmitSafe(true) = false, but the host declared the tool idempotent", r.class)
		}
		if got := r.class.NeedsHuman(); got != r.human {
			t.Errorf("%s.NeedsHuman() = %v", r.class, got)
		}
		if got := r.class.MayNeedHuman(); got != r.mayH {
			t.Errorf("%s.MayNeedHuman() = %v", r.class, got)
		}
		if a := r.class.Advice(); a == "" || strings.ContainsAny(a, "/\n") {
			t.Errorf("%s.Advice() = %q, want one line without a path", r.class, a)
		}
	}
	if all := All(); !slices.Equal(all, listed) {
		t.Errorf("All() = %q, the contract lists %q", all, listed)
	}
}

func TestAllReturnsACopy(t *testing.T) {
	All()[0] = "forged"
	if got := All()[0]; got != Transient {
		t.Errorf("All()[0] = %q after a caller wrote to its slice", got)
	}
}

// K2, K3.
func TestForeignClassesAreUnknown(t *testing.T) {
	for _, s := range []string{
		"", "Transient", "TRANSIENT", " transient", "transient ", "transient\x00", "tränsient",
		"UNAVAILABLE", "deadline_exceeded", "rate-limited", "rate_limited,quota", "\xff", strings.Repeat("a", 1<<16),
	} {
		if got := Parse(s); got != Unknown {
			t.Errorf("Parse(%.20q) = %q", s, got)
		}
		c := Class(s)
		if c.Valid() || c.Retryable() || c.ResubmitSafe(false) || c.NeedsHuman() {
			t.Errorf("Class(%.20q) has a better policy than unknown", s)
		}
	}
	if Unknown.Retryable() {
		t.Error("unknown is retryable")
	}
}

// K4: the two answers differ in both directions.
func TestRetryableDoesNotImplyResubmitSafe(t *testing.T) {
	var retryUnsafe, safeNoRetry bool
	for _, c := range All() {
		retryUnsafe = retryUnsafe || c.Retryable() && !c.ResubmitSafe(false)
		safeNoRetry = safeNoRetry || !c.Retryable() && c.ResubmitSafe(false)
	}
	if !retryUnsafe || !safeNoRetry {
		t.Errorf("retryable but unsafe: %v, safe but not retryable: %v, want both", retryUnsafe, safeNoRetry)
	}
}

// K6: the classes of the three refusals that the parent itself makes.
func TestClassesOfTheParentsOwnRefusals(t *testing.T) {
	if c := Of(context.DeadlineExceeded); c != Transient || c.ResubmitSafe(false) {
		t.Errorf("deadline expiry is %s, resubmit %v", c, c.ResubmitSafe(false))
	}
	if !RateLimited.Retryable() || !RateLimited.ResubmitSafe(false) {
		t.Error("an in-flight refusal must be retryable and safe to send again")
	}
	if Quota.Retryable() {
		t.Error("a used-up total must not be retryable")
	}
}

// K2: types and sentinels decide, never the text.
func TestOf(t *testing.T) {
	denied := &Error{Class: Denied, Text: "no"}
	for _, tc := range []struct {
		name string
		err  error
		want Class
	}{
		{"nil", nil, ""},
		{"plain", errors.New("boom"), Unknown},
		{"text that reads like a class", errors.New("transient"), Unknown},
		{"text of a deadline", errors.New(context.DeadlineExceeded.Error()), Unknown},
		{"typed", denied, Denied},
		{"typed, wrapped", fmt.Errorf("call: %w", denied), Denied},
		{"typed, joined", errors.Join(errors.New("x"), denied), Denied},
		{"typed with a foreign class", &Error{Class: "retry_me"}, Unknown},
		{"typed with no class", &Error{}, Unknown},
		{"deadline, wrapped", fmt.Errorf("call: %w", context.DeadlineExceeded), Transient},
		{"canceled, wrapped", fmt.Errorf("call: %w", context.Canceled), Canceled},
		{"class beats deadline", errors.Join(context.DeadlineExceeded, denied), Denied},
	} {
		if got := Of(tc.err); got != tc.want {
			t.Errorf("%s: Of = %q, want %q", tc.name, got, tc.want)
		}
	}
}

func TestErrorText(t *testing.T) {
	for _, tc := range []struct {
		err  *Error
		want string
	}{
		{&Error{Denied, "not on the list"}, "denied: not on the list"},
		{&Error{Class: Denied}, "denied"},
		{&Error{"forged", "x"}, "unknown: x"},
	} {
		if got := tc.err.Error(); got != tc.want {
			t.Errorf("Error() = %q, want %q", got, tc.want)
		}
	}
}

// K7, L35.
func TestCapText(t *testing.T) {
	full := strings.Repeat("a", MaxText)
	for _, tc := range []struct{ name, in, want string }{
		{"empty", "", ""},
		{"short", "x", "x"},
		{"exactly at the limit", full, full},
		{"one byte over", full + "a", full[:MaxText-len(cutMark)] + cutMark},
		{"two-byte characters", strings.Repeat("é", MaxText), strings.Repeat("é", (MaxText-len(cutMark))/2) + cutMark},
		{"three-byte characters", strings.Repeat("€", MaxText), strings.Repeat("€", (MaxText-len(cutMark))/3) + cutMark},
		{"invalid byte", "a\xffb", "a\uFFFDb"},
		{"lone surrogate in UTF-8", "a\xed\xa0\x80b", "a\uFFFDb"},
	} {
		if got := CapText(tc.in); got != tc.want {
			t.Errorf("%s: CapText of %d bytes = %d bytes, want %d", tc.name, len(tc.in), len(got), len(tc.want))
		}
	}
}

func FuzzCapText(f *testing.F) {
	for _, s := range []string{"", "é", "\xff", strings.Repeat("€", 1400), strings.Repeat("a\xff", 2100), strings.Repeat("\xf0\x9f", 3000)} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got := CapText(s)
		if len(got) > MaxText || !utf8.ValidString(got) {
			t.Fatalf("CapText(%q) has %d bytes, valid %v", s, len(got), utf8.ValidString(got))
		}
		if changed, must := got != s, len(s) > MaxText || !utf8.ValidString(s); changed != must {
			t.Fatalf("CapText(%q) changed %v, want %v", s, changed, must)
		}
		if CapText(got) != got {
			t.Fatalf("CapText is not stable on %q", s)
		}
	})
}
