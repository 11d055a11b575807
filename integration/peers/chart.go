package main

import (
	"fmt"
	"html"
	"math"
	"strings"
)

// The chart's measures, in pixels.
const (
	chartWidth = 760
	labelWidth = 130
	barsWidth  = 530
	barHeight  = 18
	barStep    = 26
	chartTop   = 74
)

// chart draws the median start of the static program in each row as an SVG of
// horizontal bars on a logarithmic scale. It brings a background of its own, so
// it can be read on any.
func chart(m machine, results []*result) string {
	type bar struct {
		r     *result
		value float64
	}
	var bars []bar
	low, high := 1.0, 10.0 // milliseconds
	for _, r := range byTime(results) {
		v := r.Times[nothing.name].ms(50)
		if math.IsNaN(v) || v <= 0 || r.Unavailable != "" {
			continue
		}
		bars = append(bars, bar{r, v})
		low, high = min(low, v), max(high, v)
	}
	// The shortest bar has to be seen.
	low, high = low*0.5, high*1.05
	x := func(v float64) float64 {
		return labelWidth + barsWidth*(math.Log10(v)-math.Log10(low))/(math.Log10(high)-math.Log10(low))
	}
	bottom := chartTop + barStep*len(bars)
	height := bottom + 66

	var b strings.Builder
	text := func(class string, x, y float64, s string) {
		fmt.Fprintf(&b, `<text class="%s" x="%.1f" y="%.1f">%s</text>`+"\n", class, x, y, html.EscapeString(s))
	}
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" role="img" aria-label="Start to exit of a static program from idle, median, by launcher">
<style>
text { font: 13px system-ui, sans-serif; fill: #24292f }
.title { font-size: 16px; font-weight: 600 }
.small { font-size: 11px; fill: #57606a }
.axis { font-size: 11px; fill: #57606a; text-anchor: middle }
.row { text-anchor: end }
.mine { font-weight: 600 }
.row.mine { text-anchor: end }
.card { fill: #ffffff; stroke: #d0d7de }
.grid { stroke: #d0d7de }
.bar { fill: #8c959f }
.bar.mine { fill: #1a7f37 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 }
.small, .axis { fill: #9198a1 }
.card { fill: #151b23; stroke: #3d444d }
.grid { stroke: #3d444d }
.bar { fill: #656c76 }
.bar.mine { fill: #3fb950 }
}
</style>
<rect class="card" x="0.5" y="0.5" width="%d" height="%d" rx="6"/>
`, chartWidth, height, chartWidth, height, chartWidth-1, height-1)
	text("title", 16, 28, "Starting a sandbox: a static program from start to exit")
	text("small", 16, 46, fmt.Sprintf("median from idle in milliseconds (%d rounds), logarithmic scale; green: this project", m.Rounds))

	for _, tick := range []float64{0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000} {
		if tick < low || tick > high {
			continue
		}
		fmt.Fprintf(&b, `<line class="grid" x1="%.1f" y1="%d" x2="%.1f" y2="%d"/>`+"\n", x(tick), chartTop-6, x(tick), bottom)
		text("axis", x(tick), float64(bottom)+14, fmt.Sprintf("%g ms", tick))
	}
	for i, bar := range bars {
		y := float64(chartTop + i*barStep)
		mine := ""
		if bar.r.Ours {
			mine = " mine"
		}
		text("row"+mine, labelWidth-8, y+14, bar.r.Row)
		fmt.Fprintf(&b, `<rect class="bar%s" x="%d" y="%.1f" width="%.1f" height="%d" rx="2"/>`+"\n", mine, labelWidth, y, max(x(bar.value)-labelWidth, 1), barHeight)
		mark := " *"
		if limit := bar.r.Posture.limit(); strings.HasPrefix(limit, "cgroup") {
			mark = ""
		} else if strings.HasPrefix(limit, addressSpace) {
			mark = " †"
		}
		text("value"+mine, x(bar.value)+6, y+14, fmt.Sprintf("%.2f%s", bar.value, mark))
	}
	text("small", 16, float64(bottom)+36, "* no memory limit; † limits only the address space of each process")
	text("small", 16, float64(bottom)+54, fmt.Sprintf("%s, commit %s, Linux %s, %s, %d cores", m.Date, m.Commit, m.Kernel, m.CPU, m.Cores))
	b.WriteString("</svg>\n")
	return b.String()
}
