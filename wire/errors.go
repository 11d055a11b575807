package wire

import (
	"errors"
	"fmt"
)

var (
	// ErrInflightLimit is the text of the refusal that a call above the cap on
	// calls in flight is answered with, class rate_limited (W32).
	ErrInflightLimit = errors.New("too many calls in flight")
	// ErrVersion is wrapped by every VersionError.
	ErrVersion = errors.New("unsupported protocol version")
	// ErrFrameTooLarge is wrapped by every FrameSizeError.
	ErrFrameTooLarge = errors.New("frame too large")
	// ErrEmptyFrame is a frame of no bytes, which cannot be JSON (W5).
	ErrEmptyFrame = errors.New("empty frame")
	// ErrDuplicateID is a request whose id is in flight already or, where
	// MaxCalls bounds the memory for it, was used before in the run (W51, W52).
	ErrDuplicateID = errors.New("call id used twice")
	// ErrUnread ends Serve when the peer did not take a response in time.
	ErrUnread = errors.New("peer does not read its responses")
	// ErrRefusals ends Serve when the peer goes on calling after its calls are
	// used up (C19).
	ErrRefusals = errors.New("peer goes on calling after a refusal for good")
	// ErrUsed is a second Serve, Start, AwaitStart or SendResult.
	ErrUsed = errors.New("channel already used")
	// ErrClosed is what calls of a Client fail with after its connection ended.
	ErrClosed = errors.New("call channel closed")
)

// VersionError is a frame of another version (W12). errors.Is finds ErrVersion.
type VersionError struct {
	// Got is the JSON text of the frame's field v, at most 32 bytes of it, or
	// "absent".
	Got string
	// Want is the version spoken here.
	Want int
}

// Error names both versions.
func (e *VersionError) Error() string {
	return fmt.Sprintf("%v: frame has v %q, spoken here is v %d", ErrVersion, e.Got, e.Want)
}

// Is reports whether target is ErrVersion.
func (e *VersionError) Is(target error) bool { return target == ErrVersion }

// FrameSizeError is a frame above MaxFrameBytes, to be sent or announced by the
// peer (W3, W4). errors.Is finds ErrFrameTooLarge.
type FrameSizeError struct {
	Size int64 // bytes of JSON text
}

// Error names the size and the limit.
func (e *FrameSizeError) Error() string {
	return fmt.Sprintf("%v: %d bytes, limit %d", ErrFrameTooLarge, e.Size, MaxFrameBytes)
}

// Is reports whether target is ErrFrameTooLarge.
func (e *FrameSizeError) Is(target error) bool { return target == ErrFrameTooLarge }

// ProtocolError says that the peer broke the protocol. Whoever launched the peer
// ends it.
type ProtocolError struct {
	// Offset is how many bytes of the channel came before the frame that is at
	// fault, so the frame's length field starts there. It is -1 for ErrUnread,
	// which is not about a frame that was read.
	Offset int64
	// Err is the reason: io.ErrUnexpectedEOF for a stream that ends inside of a
	// frame, else one of the errors of this package or of package strictjson.
	Err error
}

// Error returns the reason and the offset.
func (e *ProtocolError) Error() string {
	if e.Offset < 0 {
		return fmt.Sprintf("protocol error: %v", e.Err)
	}
	return fmt.Sprintf("protocol error in the frame at offset %d: %v", e.Offset, e.Err)
}

// Unwrap returns the reason.
func (e *ProtocolError) Unwrap() error { return e.Err }
