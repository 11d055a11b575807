// Package measure has what both benchmarks read and compute alike.
package measure

import (
	"cmp"
	"fmt"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Tick is the resolution of [Idle], the same on all architectures Go runs on.
const Tick = time.Second / 100

// Idle is the time that all processors together have not worked for this
// machine since it started: idle, waiting for a disk, or lent to another machine
// (steal). A tickless kernel measures these by the clock; times of work it counts
// by sampling, which is wrong for work as short as a start.
func Idle() (idle time.Duration, processors int, err error) {
	b, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, 0, err
	}
	return parseIdle(string(b))
}

func parseIdle(stat string) (idle time.Duration, processors int, err error) {
	first, rest, _ := strings.Cut(stat, "\n")
	f := strings.Fields(first)
	if len(f) < 9 || f[0] != "cpu" {
		return 0, 0, fmt.Errorf("/proc/stat: %q is not what was expected", first)
	}
	for _, i := range []int{4, 5, 8} {
		n, err := strconv.ParseInt(f[i], 10, 64)
		if err != nil {
			return 0, 0, fmt.Errorf("/proc/stat: %w", err)
		}
		idle += time.Duration(n) * Tick
	}
	for line := range strings.Lines(rest) {
		if strings.HasPrefix(line, "cpu") {
			processors++
		}
	}
	return idle, processors, nil
}

// Load is the machine's load average over 1, 5 and 15 minutes.
func Load() string {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "unknown"
	}
	return strings.Join(strings.Fields(string(b))[:3], " ")
}

// Percentile is the value at or below which p percent of the values lie (nearest
// rank): of fewer than 100 values the 99th is the largest. There has to be a
// value.
func Percentile[T cmp.Ordered](values []T, p float64) T {
	sorted := slices.Sorted(slices.Values(values))
	rank := int(math.Ceil(p / 100 * float64(len(sorted))))
	return sorted[min(max(rank, 1), len(sorted))-1]
}
