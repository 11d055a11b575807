package toolfail

// Class is a failure class. The set is closed: a value outside of it never
// leaves Parse, and code that decides on a failure decides on its Class, never
// on its text.
type Class string

// The classes, in the words that cross the wire (protocols.md 7.1).
const (
	Transient   Class = "transient"
	RateLimited Class = "rate_limited"
	Quota       Class = "quota"
	Invalid     Class = "invalid"
	Denied      Class = "denied"
	Auth        Class = "auth"
	Canceled    Class = "canceled"
	Permanent   Class = "permanent"
	Unknown     Class = "unknown"
)

// human says whether somebody has to act before another attempt makes sense.
type human uint8

const (
	humanNo human = iota
	humanMaybe
	humanYes
)

// policy is one row of the table. A class without a row is Unknown (K1).
type policy struct {
	class    Class
	retry    bool
	resubmit bool
	human    human
	advice   string
}

// The order is that of protocols.md 7.1; All returns it.
var table = [...]policy{
	{Transient, true, false, humanNo, "The call failed for now and may already have taken effect. Check before you call again."},
	{RateLimited, true, true, humanNo, "The call did not run because too much is going on. Wait for another call to end, then call again."},
	{Quota, false, false, humanMaybe, "A total of this run is used up. Further calls of this run will be refused."},
	{Invalid, false, true, humanNo, "The arguments are wrong. Change them and call again."},
	{Denied, false, false, humanMaybe, "The call is not permitted here. Do not call again."},
	{Auth, false, false, humanYes, "A credential is missing or was rejected. Somebody has to supply one."},
	{Canceled, false, false, humanNo, "The caller withdrew the call."},
	{Permanent, false, false, humanNo, "The tool ran and failed. The same call will fail again."},
	{Unknown, false, false, humanMaybe, "The call failed for a reason that is not known. It may have taken effect."},
}

// row returns the policy of c. A value outside of the set gets the row of
// Unknown, so that no forged class can be retried (K3).
func (c Class) row() policy {
	for _, p := range table {
		if p.class == c {
			return p
		}
	}
	return table[len(table)-1]
}

// Parse returns the class that s names, compared byte by byte. Anything else,
// the empty string included, is Unknown (K2).
func Parse(s string) Class { return Class(s).row().class }

// All returns the classes in the order of the table in protocols.md 7.1. The
// caller owns the slice.
func All() []Class {
	all := make([]Class, len(table))
	for i, p := range table {
		all[i] = p.class
	}
	return all
}

// Valid tells whether c is one of the set.
func (c Class) Valid() bool { return c.row().class == c }

// Retryable tells whether another attempt may succeed without anything being
// changed, after a delay. Unknown is never retryable (K3). It says nothing about
// the effects of the first attempt: see ResubmitSafe (K4).
func (c Class) Retryable() bool { return c.row().retry }

// ResubmitSafe tells whether the same arguments can be sent again without the
// risk of doing the work twice. idempotent is what the host declared for the
// tool; only the host may declare it (K5), and it makes every class safe. Pass
// false where nothing was declared.
func (c Class) ResubmitSafe(idempotent bool) bool { return idempotent || c.row().resubmit }

// NeedsHuman tells whether nothing but a person can make the call succeed.
func (c Class) NeedsHuman() bool { return c.row().human == humanYes }

// MayNeedHuman tells whether a person may be needed; it holds for every class
// for which NeedsHuman holds.
func (c Class) MayNeedHuman() bool { return c.row().human != humanNo }

// Advice returns one fixed sentence for the class that may be shown to a model
// (K7). Nothing decides on it.
func (c Class) Advice() string { return c.row().advice }
