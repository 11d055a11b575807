package wire

import "sync"

// keepBytes bounds the buffers that a connection keeps between frames. Larger
// ones go back to the pool, so that one large frame does not pin memory for the
// rest of a run (L7); the garbage collector empties the pool.
const keepBytes = 8 << 10

var pool sync.Pool // of *[]byte

// grow returns buf with room for n more bytes, in memory of the pool if more than
// keepBytes are needed. buf must not be used afterwards.
func grow(buf []byte, n int) []byte {
	need := len(buf) + n
	if need <= cap(buf) {
		return buf
	}
	var larger []byte
	if need <= keepBytes {
		larger = make([]byte, len(buf), max(need, 2*cap(buf)))
	} else {
		if p, _ := pool.Get().(*[]byte); p != nil && cap(*p) >= need {
			larger = (*p)[:len(buf)]
		} else {
			// Rounded up, so that frames of similar sizes find each other's buffers.
			const unit = 32 << 10
			larger = make([]byte, len(buf), (need+unit-1)/unit*unit)
		}
	}
	copy(larger, buf)
	keep(buf)
	return larger
}

// keep returns what a connection may hold on to of a buffer that is free: nil if
// it went to the pool.
func keep(buf []byte) []byte {
	if cap(buf) <= keepBytes {
		return buf[:0]
	}
	large := buf // so that only this case costs an allocation
	pool.Put(&large)
	return nil
}
