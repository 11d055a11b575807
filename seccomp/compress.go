package seccomp

import (
	"slices"
	"sort"

	"golang.org/x/sys/unix"
)

// loadNumber loads the number of the call.
var loadNumber = unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 0}

// x32Bit is what numbers of the x32 ABI have set, which no other does.
const x32Bit = 1 << 30

// withoutIdle drops the comparisons of a half of an argument that no bit is
// asked of: libseccomp makes them, and they always hold.
func withoutIdle(code []unix.SockFilter) []unix.SockFilter {
	first, gone := make([]bool, len(code)+1), make([]bool, len(code)+1)
	for i := 0; i+2 < len(code); i++ {
		if code[i].Code == unix.BPF_LD|unix.BPF_W|unix.BPF_ABS &&
			code[i+1] == (unix.SockFilter{Code: unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, K: 0}) &&
			code[i+2].Code == unix.BPF_JMP|unix.BPF_JEQ|unix.BPF_K && code[i+2].K == 0 && code[i+2].Jt == 0 {
			first[i], gone[i], gone[i+1], gone[i+2] = true, true, true, true
		}
	}
	place := make([]int, len(code)+1) // of what is kept, or of what follows it
	for i := range code {
		place[i+1] = place[i]
		if !gone[i] {
			place[i+1]++
		}
	}
	var out []unix.SockFilter
	for i, in := range code {
		if gone[i] {
			continue
		}
		for _, to := range jumps(in, i) {
			if to >= len(code) || gone[to] && !first[to] {
				return code // no program, or needed by somebody else
			}
		}
		switch {
		case in.Code == unix.BPF_JMP|unix.BPF_JA:
			in.K = uint32(place[i+1+int(in.K)] - place[i] - 1)
		case in.Code&7 == unix.BPF_JMP:
			in.Jt = uint8(place[i+1+int(in.Jt)] - place[i] - 1)
			in.Jf = uint8(place[i+1+int(in.Jf)] - place[i] - 1)
		}
		out = append(out, in)
	}
	return out
}

// jumps returns where an instruction may lead other than to the next.
func jumps(in unix.SockFilter, at int) []int {
	switch {
	case in.Code == unix.BPF_JMP|unix.BPF_JA:
		return []int{at + 1 + int(in.K)}
	case in.Code&7 == unix.BPF_JMP:
		return []int{at + 1 + int(in.Jt), at + 1 + int(in.Jf)}
	}
	return nil
}

// compress replaces libseccomp's choice between system calls, which has a
// comparison for each of them, by one between ranges of numbers with the same
// outcome: half of the instructions for the default profile, and each of them is
// checked and translated by the kernel whenever a jail starts, at 0.2 us. The code
// of each outcome stays as it is. Code of another shape than libseccomp's is
// returned unchanged.
//
// checked says that calls of foreign ABIs do not get here: an earlier stage
// killed them.
func compress(code []unix.SockFilter, checked bool) []unix.SockFilter {
	code = withoutIdle(code)
	begin := slices.Index(code, loadNumber) + 1
	if begin == 0 {
		return code
	}
	if checked {
		code, begin = code[begin-1:], 1
	}
	choosing := make([]bool, len(code))
	ends, ok := choices(code, begin, choosing)
	if !ok {
		return code
	}

	// Where each range begins, and which instruction decides it.
	type span struct {
		from uint32
		to   int
	}
	var spans []span
	for _, from := range ends {
		if checked && from >= x32Bit {
			break
		}
		to := follow(code, begin, from)
		if len(spans) == 0 || !same(code, spans[len(spans)-1].to, to) {
			spans = append(spans, span{from, to})
		}
	}

	out := slices.Clone(code[:begin])
	// Jumps by the instruction of the old code that they lead to, the new place
	// of which is not known yet: -1 is the next one.
	type branch struct{ at, yes, no int }
	var branches []branch
	var tree func(spans []span)
	tree = func(spans []span) {
		middle := len(spans) / 2
		at := len(out)
		out = append(out, unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K, K: spans[middle].from})
		j := branch{at: at, yes: spans[middle].to, no: spans[0].to}
		below, above := spans[:middle], spans[middle:]
		if len(below) > 1 {
			j.no = -1
			tree(below)
		}
		if len(above) > 1 {
			j.yes = -len(out) - 1 // an instruction of the new code
			tree(above)
		}
		branches = append(branches, j)
	}
	if len(spans) == 1 {
		return code
	}
	tree(spans)

	// One instruction for each outcome near the tree, then the old code.
	near := map[int]int{}
	place := make([]int, len(code))
	for i := range begin {
		place[i] = i
	}
	var far []int
	for _, s := range spans {
		rep := s.to
		for to := range near {
			if same(code, to, rep) {
				near[rep] = near[to]
			}
		}
		if _, ok := near[rep]; !ok {
			near[rep] = len(out)
			if code[rep].Code == unix.BPF_RET|unix.BPF_K {
				out = append(out, code[rep])
			} else {
				far = append(far, len(out))
				out = append(out, unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JA, K: uint32(rep)})
			}
		}
	}
	used := reached(code, begin, choosing, near)
	for i := begin; i < len(code); i++ {
		if used[i] {
			place[i] = len(out)
			out = append(out, code[i])
		}
	}
	for _, at := range far {
		out[at].K = uint32(place[out[at].K] - at - 1)
	}
	fits := true
	distance := func(at, to int) uint8 {
		d := to - at - 1
		fits = fits && d >= 0 && d <= 255
		return uint8(d)
	}
	for _, j := range branches {
		target := func(to int) int {
			switch {
			case to == -1:
				return j.at + 1
			case to < 0:
				return -to - 1
			}
			return near[to]
		}
		out[j.at].Jt, out[j.at].Jf = distance(j.at, target(j.yes)), distance(j.at, target(j.no))
	}
	for i, in := range code {
		if i >= begin && !used[i] || in.Code&7 != unix.BPF_JMP {
			continue
		}
		at := place[i]
		if in.Code == unix.BPF_JMP|unix.BPF_JA {
			to := i + 1 + int(in.K)
			fits = fits && !choosing[to]
			out[at].K = uint32(place[to] - at - 1)
			continue
		}
		for _, d := range []*uint8{&out[at].Jt, &out[at].Jf} {
			to := i + 1 + int(*d)
			if to == begin {
				*d = distance(at, begin)
				continue
			}
			fits = fits && !choosing[to]
			*d = distance(at, place[to])
		}
	}
	if !fits {
		return code
	}
	return out
}

// reached marks what the code before the choice and the outcomes lead to.
func reached(code []unix.SockFilter, begin int, choosing []bool, outcomes map[int]int) []bool {
	used := make([]bool, len(code))
	for i := range begin {
		used[i] = true
	}
	for to := range outcomes {
		used[to] = code[to].Code != unix.BPF_RET|unix.BPF_K // which has its copy
	}
	// All jumps lead forward.
	for i, in := range code {
		if !used[i] {
			continue
		}
		next := jumps(in, i)
		if next == nil && in.Code&7 != unix.BPF_RET {
			next = []int{i + 1}
		}
		for _, to := range next {
			used[to] = used[to] || !choosing[to]
		}
	}
	return used
}

// choices marks the instructions that compare the number of the call, from the
// first on, and returns the numbers at which their outcome may change, sorted.
func choices(code []unix.SockFilter, begin int, choosing []bool) (ends []uint32, ok bool) {
	ends = []uint32{0}
	todo := []int{begin}
	for len(todo) > 0 {
		i := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		if i >= len(code) {
			return nil, false
		}
		in := code[i]
		if choosing[i] {
			continue
		}
		if in == loadNumber { // again, behind the check for the x32 ABI
			choosing[i] = true
			todo = append(todo, i+1)
			continue
		}
		switch in.Code {
		case unix.BPF_JMP | unix.BPF_JA:
			choosing[i] = true
			todo = append(todo, i+1+int(in.K))
			continue
		case unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K:
			ends = append(ends, in.K, in.K+1)
		case unix.BPF_JMP | unix.BPF_JGT | unix.BPF_K:
			ends = append(ends, in.K+1)
		case unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K:
			ends = append(ends, in.K)
		case unix.BPF_RET | unix.BPF_K, unix.BPF_LD | unix.BPF_W | unix.BPF_ABS:
			continue // an outcome, or where the arguments are looked at
		default:
			return nil, false
		}
		choosing[i] = true
		todo = append(todo, i+1+int(in.Jt), i+1+int(in.Jf))
	}
	sort.Slice(ends, func(i, j int) bool { return ends[i] < ends[j] })
	return slices.Compact(ends), choosing[begin]
}

// follow returns the instruction that a number leads to.
func follow(code []unix.SockFilter, i int, nr uint32) int {
	for {
		in := code[i]
		if in == loadNumber {
			i++
			continue
		}
		var yes bool
		switch in.Code {
		case unix.BPF_JMP | unix.BPF_JA:
			i += 1 + int(in.K)
			continue
		case unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K:
			yes = nr == in.K
		case unix.BPF_JMP | unix.BPF_JGT | unix.BPF_K:
			yes = nr > in.K
		case unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K:
			yes = nr >= in.K
		default:
			return i
		}
		if yes {
			i += 1 + int(in.Jt)
		} else {
			i += 1 + int(in.Jf)
		}
	}
}

// same tells whether two outcomes are one: the same place, or the same answer.
func same(code []unix.SockFilter, a, b int) bool {
	return a == b || code[a].Code == unix.BPF_RET|unix.BPF_K && code[a] == code[b]
}
