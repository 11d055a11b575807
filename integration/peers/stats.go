package main

import (
	"math"

	"example.com/jail/integration/internal/measure"
)

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
	if s == nil || len(s.NS) == 0 {
		return math.NaN()
	}
	return float64(measure.Percentile(s.NS, p)) / 1e6
}
