package main

import (
	"math"
	"slices"
)

// percentile is the value below or at which p percent of the sorted values lie
// (nearest rank), NaN without values. Of fewer than 100 values the 99th is the
// largest.
func percentile(sorted []int64, p float64) float64 {
	if len(sorted) == 0 {
		return math.NaN()
	}
	rank := int(math.Ceil(p / 100 * float64(len(sorted))))
	return float64(sorted[min(max(rank, 1), len(sorted))-1])
}

// series is what was measured of one program in one row.
type series struct {
	NS    []int64 `json:"ns"`
	Fails int     `json:"fails"`
	// Error is that of the first failed start.
	Error string `json:"error,omitempty"`
}

func (s *series) add(ns int64, err error) {
	if err == nil {
		s.NS = append(s.NS, ns)
		return
	}
	if s.Fails++; s.Error == "" {
		s.Error = err.Error()
	}
}

// ms is a percentile in milliseconds, NaN without a success.
func (s *series) ms(p float64) float64 {
	if s == nil {
		return math.NaN()
	}
	sorted := slices.Sorted(slices.Values(s.NS))
	return percentile(sorted, p) / 1e6
}
