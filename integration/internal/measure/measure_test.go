package measure

import (
	"testing"
	"time"
)

func TestPercentileIsTheNearestRank(t *testing.T) {
	hundred := make([]int64, 100)
	for i := range hundred {
		hundred[i] = int64(100 - i)
	}
	for _, test := range []struct {
		values []int64
		p      float64
		want   int64
	}{
		{[]int64{7}, 0, 7},
		{[]int64{7}, 99, 7},
		{[]int64{2, 1}, 50, 1},
		{[]int64{3, 1, 2}, 50, 2},
		{[]int64{1, 3, 2}, 99, 3},
		{hundred, 0, 1},
		{hundred, 50, 50},
		{hundred, 99, 99},
		{hundred, 100, 100},
	} {
		if got := Percentile(test.values, test.p); got != test.want {
			t.Errorf("percentile %g of %d values: %d, want %d", test.p, len(test.values), got, test.want)
		}
	}
	if hundred[0] != 100 {
		t.Error("the values were put in another order")
	}
}

func TestIdleTimeIsIdleAndWaitAndSteal(t *testing.T) {
	const stat = "cpu  1 2 3 400 50 6 7 8 9 10\ncpu0 0 0 0 0 0 0 0 0 0 0\ncpu1 0 0 0 0 0 0 0 0 0 0\nintr 5\n"
	idle, processors, err := parseIdle(stat)
	if idle != 4580*time.Millisecond || processors != 2 || err != nil {
		t.Errorf("%s, %d processors, %v", idle, processors, err)
	}
	for _, bad := range []string{"", "cpu 1 2 3\n", "cpu  1 2 3 x 50 6 7 8 9 10\n"} {
		if _, _, err := parseIdle(bad); err == nil {
			t.Errorf("%q was read", bad)
		}
	}
}
