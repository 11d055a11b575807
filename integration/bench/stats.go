package main

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"example.com/jail/integration/internal/measure"
)

// sample is what was measured of one thing, in the order of measuring.
type sample []time.Duration

func (s sample) at(p float64) time.Duration { return measure.Percentile(s, p) }

func (s sample) mean() time.Duration {
	var sum time.Duration
	for _, d := range s {
		sum += d
	}
	return sum / time.Duration(len(s))
}

// quantiles are the columns of most tables; columns has their values.
var quantiles = []string{"min", "p50", "p95", "p99", "max"}

func (s sample) columns(unit time.Duration) []string {
	var cells []string
	for _, p := range []float64{0, 50, 95, 99, 100} {
		cells = append(cells, in(unit, s.at(p)))
	}
	return cells
}

func in(unit, d time.Duration) string { return fmt.Sprintf("%.2f", float64(d)/float64(unit)) }
func ms(d time.Duration) string       { return in(time.Millisecond, d) }

// table prints rows of cells in columns.
type table struct{ w *tabwriter.Writer }

func newTable(w io.Writer, header ...string) *table {
	t := &table{tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)}
	t.row(header...)
	return t
}

func (t *table) row(cells ...string) { fmt.Fprintln(t.w, strings.Join(cells, "\t")) }
func (t *table) end()                { t.w.Flush() }

// times prints the times of turns, one line for each kind of them.
func (b *bench) times(title string, unit time.Duration, turns []*turn) {
	t := newTable(b.out, append(append([]string{title}, quantiles...), "")...)
	for _, r := range turns {
		if r.err != nil {
			t.row(r.name, "-", "-", "-", "-", "-", "failed: "+oneLine(r.err))
			continue
		}
		for i, s := range r.times {
			name := r.name
			if i < len(r.kinds) {
				name += ": " + r.kinds[i]
			}
			t.row(append(append([]string{name}, s.columns(unit)...), r.does)...)
		}
	}
	t.end()
}

func oneLine(err error) string { return strings.Join(strings.Fields(err.Error()), " ") }
