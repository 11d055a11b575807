package main

import (
	"context"
	"fmt"
	"time"
)

// sequence runs many jails after each other: the last ones have to be as quick as
// the first, and nothing may stay.
func (b *bench) sequence(ctx context.Context) error {
	n := b.size(1000, 40)
	edge := n / 10
	one := b.library(target, "true")
	before, err := held()
	if err != nil {
		return err
	}
	dying := dyingGroups()
	var s sample
	for range n {
		t := time.Now()
		if err := one(ctx); err != nil {
			return err
		}
		s = append(s, time.Since(t))
	}
	after, err := before.backTo(ctx)
	if err != nil {
		return err
	}
	b.method("%d jails after each other, without pauses: start to report, leaf removed", n)
	t := newTable(b.out, append([]string{"in sequence, ms"}, quantiles...)...)
	for _, part := range []struct {
		name string
		s    sample
	}{{"all", s}, {fmt.Sprintf("first %d", edge), s[:edge]}, {fmt.Sprintf("last %d", edge), s[n-edge:]}} {
		t.row(append([]string{part.name}, part.s.columns(time.Millisecond)...)...)
	}
	t.end()
	line, err := awaitDying(ctx, dying, n)
	fmt.Fprintf(b.out, "%s\n%s\n", after.against(before), line)
	return err
}
