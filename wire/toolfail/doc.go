// Package toolfail is the closed set of failure classes that cross the call
// protocol, and the policy that belongs to each of them.
//
// The trap first: a class that may be retried is not thereby safe to send again
// unchanged. A call that ran into its deadline is [Transient], so trying again
// may succeed, but the first attempt may have taken effect. [Class.Retryable]
// and [Class.ResubmitSafe] are two questions; ask both.
//
// The package promises that [Parse] never returns a value outside of the set,
// that a class never comes from the text of an error, and that [CapText] returns
// valid UTF-8 of at most [MaxText] bytes. It does not retry anything, and it
// does not take secrets out of a text: what a host puts in an error text is
// shown to the program and to its model.
package toolfail
