"""Interpreter host for Python programs under `jail script`.

It reads one Start frame from fd 3, runs the program in it, answers with one
Result on fd 3, and carries the program's tool calls over fd 4.

Nothing in this file is a security boundary. The program shares this process:
it can read and write fds 3 and 4 and change anything here. What holds it is
the jail around the process and the host's end of both channels. The care
taken below is for honest programs that close, fork, patch or recurse by
accident.

The launcher enforces every budget before this file starts (C12), so the
budget in Start is checked for its form and otherwise not used.
"""

# A program that rebinds a builtin (`builtins.len = ...`) must not change what
# this file does: its globals hold copies, and os functions come from posix.
globals().update((k, v) for k, v in vars(__import__("builtins")).items() if k[0] != "_")

import _ast
import sys
from _thread import allocate_lock, start_new_thread
from posix import (
    _exit, close, fstat, listdir, read, register_at_fork, set_blocking,
    set_inheritable, write,
)

try:
    # Not the json package: it costs 7 ms of start-up (re, enum) and recurses.
    from _json import encode_basestring as quote, make_scanner
except ImportError:
    from json.encoder import py_encode_basestring as quote
    from json.scanner import py_make_scanner as make_scanner

# ---------------------------------------------------------------- constants
# A Go test runs `guest.py --describe` and compares all of these with package
# wire (L40).

VERSION = 1
MAX_FRAME_BYTES = 16 << 20
MAX_ERROR_BYTES = 4096
MAX_ID_BYTES = 128
START_FD = 3
CALL_FD = 4
PREPARE = "$prepare"
RESOLVE = "$resolve"
KINDS = (
    "transient", "rate_limited", "quota", "invalid", "denied", "auth",
    "canceled", "permanent", "unknown",
)

# field: (type, required)
FRAMES = {
    "Request": {
        "v": (int, True), "id": (str, True), "tool": (str, True),
        "args": (str, True), "deadline_ms": (int, False),
    },
    "Response": {
        "v": (int, True), "id": (str, True), "ok": (bool, True),
        "value": (str, False), "kind": (str, False), "error": (str, False),
    },
    "Start": {
        "v": (int, True), "program": (str, True), "bindings": (list, True),
        "budget": (dict, True), "result_id": (str, True),
    },
    "StartBinding": {
        "name": (str, True), "signature": (str, False),
        "description": (str, False),
    },
    "StartBudget": {
        "wall_clock": (int, False), "max_calls": (int, False),
        "max_bytes": (int, False), "max_memory": (int, False),
    },
    "Result": {
        "v": (int, True), "result_id": (str, True), "ok": (bool, True),
        "value": (str, False), "kind": (str, False), "error": (str, False),
        "calls": (int, False), "bytes": (int, False),
    },
}

_JSON_TYPES = {int: "integer", str: "string", bool: "boolean", list: "array",
               dict: "object"}

PROGRAM = "program.py"  # the program's name in tracebacks
EXIT_PROTOCOL = 70  # no Start, a Start that is refused, or a lost Result


class ProtocolError(Exception):
    """A frame that is not one of protocol version 1."""


class VersionError(ProtocolError):
    """A frame of another protocol version."""


class TooLarge(Exception):
    """A text that does not fit in one frame."""


class NotJSON(Exception):
    """A value that JSON cannot carry without loss."""


# --------------------------------------------------------------------- JSON

def encode(root):
    """Return root as compact JSON text that loses nothing.

    Integers keep all digits. Refused with NotJSON: NaN, infinities, negative
    zero (L20), lone surrogates, keys that are no str, cycles, other types.
    It does not recurse (L17). More than MAX_FRAME_BYTES raises TooLarge.
    """
    out, size = [], 0
    stack = []  # one [iterator, closing bracket, id, key] per open container
    inside = set()  # ids of the open containers

    def no(text):
        keys = "".join("[%.40s]" % ("..." if s[3] is None else quote(s[3]))
                       for s in stack[:10])
        return NotJSON("%s%s" % (keys and keys + ": ", text))

    item = root
    while True:
        # issubclass, not isinstance: __class__ can be forged (mocks do).
        kind = type(item)
        if issubclass(kind, str):
            piece = quote(item)
        elif item is None:
            piece = "null"
        elif kind is bool:
            piece = "true" if item else "false"
        elif issubclass(kind, int):
            piece = int.__repr__(item)
        elif issubclass(kind, float):
            piece = _float(item)
            if piece is None:
                raise no("%s is not a JSON number" % float.__repr__(item))
        elif issubclass(kind, (list, tuple, dict)):
            piece = None if issubclass(kind, dict) else _flat(item)
            if piece is None:
                if id(item) in inside:
                    raise no("%s contains itself" % kind.__name__)
                inside.add(id(item))
                if issubclass(kind, dict):
                    piece = "{"
                    stack.append([iter(item.items()), "}", id(item), None])
                else:
                    piece = "["
                    stack.append([iter(item), "]", id(item), None])
        else:
            raise no("%s is not a JSON value" % kind.__name__)
        out.append(piece)
        size += len(piece)
        while stack:
            members, closing, ident, _ = top = stack[-1]
            try:
                item = next(members)
            except StopIteration:
                stack.pop()
                inside.discard(ident)
                out.append(closing)
                size += 1
                continue
            except RuntimeError as e:
                raise no(str(e))  # changed by a thread meanwhile
            # The piece before tells whether this is the first member.
            if out[-1] not in ("[", "{"):
                out.append(",")
                size += 1
            if closing == "}":
                key, item = item
                if not issubclass(type(key), str):
                    stack.pop()
                    raise no("dict key %.40r is not a str" % (key,))
                top[3] = key
                piece = quote(key)
                out.append(piece)
                out.append(":")
                size += len(piece) + 1
            break
        if size > MAX_FRAME_BYTES:
            raise TooLarge("more than %d bytes" % MAX_FRAME_BYTES)
        if not stack:
            text = "".join(out)
            if not text.isascii() and not _clean(text):
                raise NotJSON("str holds a lone surrogate")
            return text


def placed(what, e):
    """Return the text of an error of encode, with what it is in."""
    text = str(e)
    return what + text if text[0] == "[" else "%s: %s" % (what, text)


def _float(number):
    """Return the text of a float, None for one that JSON cannot carry."""
    text = float.__repr__(number)
    if "n" in text or text == "-0.0":
        return None
    # L24: integral values print exact digits; ".0" keeps them floats.
    return "%d.0" % number if "e+" in text else text


def _flat(items):
    """Return a list whose members are all of one scalar type as text, or None."""
    kinds = set(map(type, items))
    if len(kinds) == 1:
        kind = kinds.pop()
        if kind is int:
            return "[" + ",".join(map(repr, items)) + "]"
        if kind is str:
            return "[" + ",".join(map(quote, items)) + "]"
        if kind is float:
            texts = list(map(_float, items))
            if None not in texts:
                return "[" + ",".join(texts) + "]"
    return None


def _refuse(name):
    raise ValueError("%s is not JSON" % name)


class _Rules:
    """What the scanner of _json asks of its decoder."""

    def __init__(self, pairs=None):
        self.strict = True
        self.object_hook = None
        self.object_pairs_hook = pairs
        self.parse_float = float
        self.parse_int = int
        self.parse_constant = _refuse
        self.memo = {}


def _unique(pairs):
    object = dict(pairs)
    if len(object) != len(pairs):
        raise ProtocolError("a key appears twice")
    return object


_scan = make_scanner(_Rules())
_scan_frame = make_scanner(_Rules(_unique))


def decode(text):
    """Return the value of JSON text. ValueError says it is not JSON."""
    try:
        return _whole(_scan, text)
    except (StopIteration, SystemError):
        # _json raises SystemError where it cannot find json.JSONDecodeError.
        raise ValueError("not JSON") from None
    except RecursionError:
        return _whole(_deep, text)


def _blank(text, at):
    while text[at:at + 1] and text[at] in " \t\n\r":
        at += 1
    return at


def _deep(text, at):
    """Scan one value with a stack of its own; _scan reads the scalars."""
    holder = root = []
    key = None
    stack = []

    def name(at):
        at = _blank(text, at)
        if text[at:at + 1] != '"':
            raise ValueError("not JSON")
        key, at = _scan(text, at)
        at = _blank(text, at)
        if text[at:at + 1] != ":":
            raise ValueError("not JSON")
        return key, at + 1

    while True:
        at = _blank(text, at)
        char = text[at:at + 1]
        if char in ("[", "{"):
            value, at = ([] if char == "[" else {}), _blank(text, at + 1)
        else:
            try:
                value, at = _scan(text, at)
            except (StopIteration, SystemError):
                raise ValueError("not JSON") from None
        if type(holder) is list:
            holder.append(value)
        else:
            holder[key] = value
        if char in ("[", "{"):
            stack.append(holder)
            holder = value
            if text[at:at + 1] != ("]" if char == "[" else "}"):
                if char == "{":
                    key, at = name(at)
                continue
        while True:
            at = _blank(text, at)
            if not stack:
                return root[0], at
            char = text[at:at + 1]
            at += 1
            if char == ("]" if type(holder) is list else "}"):
                holder = stack.pop()
            elif char == ",":
                if type(holder) is dict:
                    key, at = name(at)
                break
            else:
                raise ValueError("not JSON")


# ------------------------------------------------------------------- frames

def pack(fields):
    """Return one frame. TooLarge before any byte of it exists elsewhere (W4)."""
    parts = []
    for name, value in fields.items():
        if type(value) is str:
            value = quote(value)
        elif type(value) is bool:
            value = "true" if value else "false"
        parts.append('"%s":%s' % (name, value))
    body = ("{" + ",".join(parts) + "}").encode()
    if len(body) > MAX_FRAME_BYTES:
        raise TooLarge("frame takes %d bytes, the limit is %d"
                       % (len(body), MAX_FRAME_BYTES))
    return len(body).to_bytes(4, "big") + body


def length(header):
    """Return the body length that 4 header bytes announce."""
    size = int.from_bytes(header, "big")
    if not 0 < size <= MAX_FRAME_BYTES:
        raise ProtocolError("frame length %d is not in 1 to %d"
                            % (size, MAX_FRAME_BYTES))
    return size


def unpack(kind, body):
    """Return the known fields of the frame body (bytes) as a dict."""
    twice = ""
    try:
        text = str(body, "utf-8")
        try:
            value = _whole(_scan_frame, text)
        except ProtocolError as e:
            twice = str(e)  # told only when the version is right (W13)
            value = _whole(_scan, text)
    except (ValueError, StopIteration, SystemError, RecursionError):
        raise ProtocolError("%s frame is not JSON" % kind) from None
    if type(value) is not dict:
        raise ProtocolError("%s frame is not an object" % kind)
    version = value.get("v", 0)
    if type(version) is not int or version != VERSION:
        raise VersionError("%s frame has protocol version %.40r, this guest speaks %d"
                           % (kind, version, VERSION))
    if twice:
        raise ProtocolError("%s frame: %s" % (kind, twice))
    if "\\ud" in text or "\\uD" in text:
        todo = [value]
        for item in todo:
            if type(item) is dict:
                todo += item
                todo += item.values()
            elif type(item) is list:
                todo += item
            elif type(item) is str and not _clean(item):
                raise ProtocolError("%s frame holds a lone surrogate" % kind)
    fields = _fields(kind, value)
    if kind == "Start":
        fields["bindings"] = [_fields("StartBinding", b) for b in fields["bindings"]]
        fields["budget"] = _fields("StartBudget", fields["budget"])
    return fields


def _whole(scan, text):
    value, end = scan(text, _blank(text, 0))
    if _blank(text, end) != len(text):
        raise ValueError("text after the JSON value")
    return value


def _clean(text):
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _fields(kind, value):
    if type(value) is not dict:
        raise ProtocolError("%s is not an object" % kind)
    table, fields = FRAMES[kind], {}
    for name in value:
        if name not in table and name.casefold() in table:
            raise ProtocolError("%s has field %r in another case" % (kind, name))
    for name, (type_, required) in table.items():
        if name in value:
            field = fields[name] = value[name]
            if type(field) is not type_:
                raise ProtocolError("%s: %s has the wrong type" % (kind, name))
            if type_ is int and not 0 <= field < 1 << 63:
                raise ProtocolError("%s: %s is out of range" % (kind, name))
            if field == "" and name in ("id", "tool", "result_id", "name"):
                raise ProtocolError("%s: %s is empty" % (kind, name))
            if name in ("id", "result_id") and len(field.encode()) > MAX_ID_BYTES:
                raise ProtocolError("%s: %s has more than %d bytes"
                                    % (kind, name, MAX_ID_BYTES))
        elif required:
            raise ProtocolError("%s: %s is missing" % (kind, name))
    return fields


def answer_of(fields):
    """Return (ok, text, kind) of a Response; ok alone decides (C20)."""
    if fields["ok"]:
        return True, fields.get("value", ""), ""
    kind = fields.get("kind", "")
    return False, fields.get("error", ""), kind if kind in KINDS else "unknown"


def read_start(fd):
    """Read exactly one Start and not one byte more (W62). None at clean EOF."""
    def exactly(size):
        data = bytearray()
        while len(data) < size:
            more = read(fd, min(size - len(data), 1 << 16))
            if not more:
                break
            data += more
        return data

    header = exactly(4)
    if not header:
        return None
    size = length(header) if len(header) == 4 else 1
    body = exactly(size)
    if len(header) < 4 or len(body) < size:
        raise ProtocolError("fd %d closed inside a frame" % fd)
    return unpack("Start", body)


# ------------------------------------------------------------- call channel

class ToolError(Exception):
    """A tool call that failed. kind is its failure class, tool its name."""

    __module__ = "host"

    def __init__(self, text="", kind="unknown", tool=""):
        super().__init__(text)
        self.kind = kind
        self.tool = tool


class _Outbox:
    """Frames for the writer. put is reentrant and never waits.

    As queue.SimpleQueue, which is a file to be loaded at each start.
    """

    def __init__(self):
        self.frames = []
        self.wake = allocate_lock()  # free when there may be a frame
        self.wake.acquire()

    def put(self, frame):
        self.frames.append(frame)
        try:
            self.wake.release()
        except RuntimeError:
            pass  # it was free

    def get(self):
        while not self.frames:
            self.wake.acquire()
        return self.frames.pop(0)


_calls = {}  # id: Call, those without an answer
_ids = iter(range(1, 1 << 62))  # next is atomic
_outgoing = _Outbox()
_lost = None  # (kind, text) once no call can be made any more
_written = 0  # changed by the writer thread alone
_received = 0  # changed by the reader thread alone


class Call:
    """One request on fd 4 and the wait for its answer. Thread-safe.

    A caller never writes fd 4 itself: a signal handler or __del__ that calls
    a tool may interrupt another call at any byte, so frames go through a
    queue whose put is reentrant.
    """

    __slots__ = ("tool", "id", "answer", "lock", "wake")

    def __init__(self, tool, args, on_wire=None):
        self.tool = tool
        self.answer = None  # (ok, text, kind)
        self.lock = allocate_lock()  # held until the answer is there
        self.lock.acquire()
        self.wake = []
        self.id = str(next(_ids))
        try:
            frame = pack({"v": VERSION, "id": self.id, "tool": on_wire or tool,
                          "args": args})
        except UnicodeEncodeError:
            raise ToolError("arguments: str holds a lone surrogate", "invalid",
                            tool) from None
        except TooLarge as e:
            raise ToolError("arguments: %s" % e, "invalid", tool) from None
        try:
            _start_threads()
        except RuntimeError as e:  # max_pids
            raise ToolError("start the threads of the call channel: %s" % e,
                            "permanent", tool) from None
        _calls[self.id] = self
        # After the entry: whoever sets _lost then fails every entry.
        if _lost:
            _calls.pop(self.id, None)
            raise ToolError(_lost[1], _lost[0], tool)
        _outgoing.put(frame)

    def wait(self, timeout=-1):
        """Block until the answer is there. False after timeout seconds."""
        if not self.lock.acquire(True, timeout):
            return False
        self.lock.release()
        return True

    async def wait_async(self):
        from asyncio import get_running_loop
        loop = get_running_loop()
        future = loop.create_future()

        def arrived():
            if not future.done():
                future.set_result(None)

        def wake():
            try:
                loop.call_soon_threadsafe(arrived)
            except RuntimeError:
                pass  # that loop is closed: nobody waits in it

        self.wake.append(wake)
        if self.answer is None:
            await future

    def drop(self):
        """Forget the call; a late answer is dropped (W57)."""
        _calls.pop(self.id, None)

    def settle(self, answer):
        self.answer = answer
        self.lock.release()
        for wake in self.wake:
            wake()

    def value(self):
        """Return the value of the answered call, or raise its ToolError.

        A value that is no JSON text, the empty one too, is returned as str.
        """
        ok, text, kind = self.answer
        if not ok:
            raise ToolError(text, kind, self.tool)
        try:
            return decode(text)
        except ValueError:
            return text


def _start_threads():
    # pop is atomic: each thread is started by one caller.
    while _idle:
        try:
            thread = _idle.pop()
        except IndexError:
            return
        try:
            start_new_thread(thread, ())
        except BaseException:
            _idle.append(thread)
            raise


def _writer():
    global _written
    while True:
        frame = memoryview(_outgoing.get())
        try:
            _written += 1  # before the write, after which the answer may come
            while frame:
                frame = frame[_CHANNELS.write(CALL_FD, frame):]
        except BaseException as e:
            return _lose("write fd %d: %s" % (CALL_FD, e))


def _reader():
    global _received
    data = bytearray()
    try:
        while True:
            while len(data) >= 4:
                end = 4 + length(data[:4])
                if len(data) < end:
                    break
                fields = unpack("Response", data[4:end])
                del data[:end]
                answer = answer_of(fields)
                # The host's ledger leaves out refusals for quota, whose text
                # must get through when nothing is left (W37).
                if answer[2] != "quota":
                    text = answer[1]
                    _received += len(text if text.isascii() else text.encode())
                call = _calls.pop(fields["id"], None)
                if call:  # else a late or unknown id (W56)
                    call.settle(answer)
            more = _CHANNELS.read(CALL_FD)
            if not more:
                return _lose("the host closed the call channel")
            data += more
    except BaseException as e:
        _lose("read fd %d: %s" % (CALL_FD, e))


_idle = [_reader, _writer]


def _lose(text, kind="unknown"):
    """Fail every call without an answer, and all later ones (W55)."""
    global _lost
    _lost = _lost or (kind, text)
    while _calls:
        try:
            call = _calls.popitem()[1]
        except KeyError:
            return
        call.settle((False, _lost[1], _lost[0]))


class _Channels:
    """Knows fds 3 and 4 by inode.

    A program that closes them by accident (os.closerange) and opens a file
    at the same number must not find frames in that file.
    """

    def __init__(self):
        self.known = {}
        self.child = False

    def claim(self, fd):
        status = fstat(fd)
        self.known[fd] = (status.st_dev, status.st_ino)
        set_blocking(fd, True)
        set_inheritable(fd, False)

    def read(self, fd):
        if not self.holds(fd):
            raise OSError("the program closed it")
        return read(fd, 1 << 16)

    def write(self, fd, data):
        if not self.holds(fd):
            raise OSError("the program closed it")
        return write(fd, data)

    def holds(self, fd):
        try:
            status = fstat(fd)
        except OSError:
            return False
        return self.known.get(fd) == (status.st_dev, status.st_ino)

    def forked(self):
        """In a forked child: the channels belong to the parent alone."""
        self.child = True
        for fd in (START_FD, CALL_FD):
            if self.holds(fd):
                close(fd)
        for call in list(_calls.values()):
            call.wake = []  # their event loop's wake-up pipe is the parent's too
        _lose("host tools cannot be called in a forked process", "permanent")


_CHANNELS = _Channels()


# -------------------------------------------------------- what programs see

class Tool:
    """host.<tool>: blocks and returns the tool's value."""

    __module__ = "host"
    _prefix = "host."

    def __init__(self, name, signature, description):
        self.__name__ = self.__qualname__ = name
        self._text = signature
        form = signature or name + "(**arguments)"
        self._form = form[5:] if form.startswith("host.") else form
        self.__doc__ = "\n\n".join(filter(None, (form, description)))

    def _args(self, args, arguments):
        value = arguments
        if args:
            value = args[0]
            if len(args) > 1 or arguments or not isinstance(value, (str, dict)):
                raise TypeError("%s%s() takes keyword arguments, or one dict, or "
                                "one str of JSON" % (self._prefix, self.__name__))
            if isinstance(value, str):
                return str(value)
        try:
            return encode(value)
        except (NotJSON, TooLarge) as e:
            raise ToolError(placed("arguments", e), "invalid", self.__name__) from None

    def __call__(self, /, *args, **arguments):
        call = Call(self.__name__, self._args(args, arguments))
        try:
            call.wait()
        finally:
            call.drop()
        return call.value()

    def __repr__(self):
        return "<%s%s>" % (self._prefix, self._form)

    @property
    def __signature__(self):
        signature = _signature(self._text)
        if signature is None:
            raise AttributeError("__signature__")
        return signature


class AsyncTool(Tool):
    """host.aio.<tool>: to be awaited, for the tool's value."""

    __module__ = "host"
    _prefix = "host.aio."

    async def __call__(self, /, *args, **arguments):
        call = Call(self.__name__, self._args(args, arguments))
        try:
            await call.wait_async()
        finally:
            call.drop()
        return call.value()


class PrepareTool(Tool):
    """host.prepare.<tool>: starts an early read and returns its future."""

    __module__ = "host"
    _prefix = "host.prepare."

    def __call__(self, /, *args, **arguments):
        return Early(self.__name__, self._args(args, arguments))


class Early:
    """An early read. result() or await gives the value, as often as asked.

    $prepare has args {"tool": name, "args": text} and answers a handle, 0 for
    "not prepared"; $resolve has {"handle": handle, "tool": name, "args": text}.
    text is the encoded arguments as a JSON string, so that the host compares
    the same bytes in both (B12). Without a handle the call is made the
    ordinary way: that the host prepared nothing is no failure (B11).
    """

    __module__ = "host"

    def __init__(self, tool, args):
        self._tool = tool
        self._args = args
        self._lock = allocate_lock()
        self._last = None
        self._about = '"tool":%s,"args":%s}' % (quote(tool), quote(args))
        self._first = Call(tool, "{" + self._about, PREPARE)

    def _call(self):
        with self._lock:
            if self._last is None:
                handle = 0
                if self._first.answer[0]:
                    handle = self._first.value()
                if type(handle) is int and handle > 0:
                    self._last = Call(self._tool, '{"handle":%d,%s'
                                      % (handle, self._about), RESOLVE)
                else:
                    self._last = Call(self._tool, self._args)
            return self._last

    def result(self, timeout=None):
        """Block for the value; TimeoutError after timeout seconds."""
        from time import monotonic
        left = -1
        end = None if timeout is None else monotonic() + timeout
        for step in (None, self._call):
            call = step() if step else self._first
            if end is not None:
                left = max(0, end - monotonic())
            if not call.wait(left):
                raise TimeoutError("host.prepare.%s: no value after %s s"
                                   % (self._tool, timeout))
        return call.value()

    async def _result(self):
        await self._first.wait_async()
        call = self._call()
        await call.wait_async()
        return call.value()

    def __await__(self):
        return self._result().__await__()


class Names:
    """Tools of this run as attributes."""

    __module__ = "host"
    __slots__ = ("_tools",)

    def __init__(self, kind, bindings):
        self._tools = {
            b["name"]: kind(b["name"], b.get("signature", ""), b.get("description", ""))
            for b in bindings
        }

    def __getattr__(self, name):
        if name == "_tools":
            raise AttributeError(name)
        try:
            return self._tools[name]
        except KeyError:
            raise AttributeError(
                "host has no tool %r; it has: %s"
                % (name, ", ".join(sorted(self._tools)) or "none")) from None

    def __dir__(self):
        return sorted(self._tools)

    def __repr__(self):
        return "<host tools: %s>" % (", ".join(sorted(self._tools)) or "none")


class Host(Names):
    """The tools that the host lends to this program.

    host.<tool>(**arguments) blocks and returns the tool's value,
    host.aio.<tool>(**arguments) is awaitable, host.prepare.<tool>(**arguments)
    starts an early read and returns its future. One dict, or one str of JSON,
    is taken instead of keyword arguments. A failed call raises host.ToolError.
    """

    __module__ = "host"
    __slots__ = ("aio", "prepare")
    ToolError = ToolError

    def __init__(self, bindings):
        super().__init__(Tool, bindings)
        self.aio = Names(AsyncTool, bindings)
        self.prepare = Names(PrepareTool, bindings)

    def __dir__(self):
        # No set of constants: 3.9 and 3.10 compile it to other bytes each time.
        return sorted({*self._tools, "aio", "prepare", "ToolError"})


def _signature(text):
    """Return inspect.Signature of a def header, None if text is none.

    The text is parsed and never run: defaults must be literals, annotations
    stay text.
    """
    import ast
    import inspect

    class Note(str):
        __repr__ = str.__str__

    head, bracket, rest = text.strip().partition("(")
    try:
        body = ast.parse("def f(" + rest.rstrip(": ") + ": pass").body
        if not bracket or len(body) != 1 or type(body[0]) is not ast.FunctionDef \
                or type(body[0].body[0]) is not ast.Pass:
            return None
        a = body[0].args
        none = inspect.Parameter.empty

        def note(node):
            return none if node is None else Note(ast.unparse(node))

        def parameter(arg, kind, default=None):
            value = none if default is None else ast.literal_eval(default)
            return inspect.Parameter(arg.arg, kind, default=value,
                                     annotation=note(arg.annotation))

        plain = a.posonlyargs + a.args
        defaults = [None] * (len(plain) - len(a.defaults)) + a.defaults
        parameters = [
            parameter(arg, inspect.Parameter.POSITIONAL_ONLY
                      if arg in a.posonlyargs
                      else inspect.Parameter.POSITIONAL_OR_KEYWORD, default)
            for arg, default in zip(plain, defaults)
        ]
        if a.vararg:
            parameters.append(parameter(a.vararg, inspect.Parameter.VAR_POSITIONAL))
        parameters += [parameter(arg, inspect.Parameter.KEYWORD_ONLY, default)
                       for arg, default in zip(a.kwonlyargs, a.kw_defaults)]
        if a.kwarg:
            parameters.append(parameter(a.kwarg, inspect.Parameter.VAR_KEYWORD))
        return inspect.Signature(parameters, return_annotation=note(body[0].returns))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


# ------------------------------------------------------------------ program

class Source:
    """Gives traceback and linecache the program's lines."""

    def __init__(self, text):
        self.text = text

    def get_source(self, name=None):
        return self.text


class Outcome:
    """How the program ended, as it stands in Result, and the exit code."""

    def __init__(self):
        self.value = ""
        self.kind = ""
        self.error = ""
        self.code = 0

    def fail(self, kind, error, code=1):
        if not self.kind:  # the first failure decides
            self.kind, self.error, self.code = kind, clip(error), code


def execute(source, bindings):
    """Run the program to its end, its threads included."""
    outcome = Outcome()
    module = type(sys)("__main__")
    space = module.__dict__
    space.update(__builtins__=__import__("builtins"), __loader__=Source(source),
                 host=Host(bindings))
    sys.modules["__main__"] = module
    sys.argv[:] = [PROGRAM]
    if hasattr(sys.stdout, "reconfigure"):
        # A killed program must not take its last 8 KiB of output with it.
        sys.stdout.reconfigure(line_buffering=True)
    value = nothing = object()
    try:
        tree = compile(source, PROGRAM, "exec", 0x400, True)  # 0x400: give the tree
        last = None
        if tree.body and type(tree.body[-1]) is _ast.Expr:
            last = _ast.Expression(tree.body.pop().value)
            last = compile(last, PROGRAM, "eval", 0, True)
        exec(compile(tree, PROGRAM, "exec", 0, True), space)
        if last:
            value = eval(last, space)
    except BaseException as e:
        _failed(e, source, outcome)
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
    except BaseException as e:
        _failed(e, source, outcome)
    deafen()
    try:
        value = space.get("result", value)
        if not outcome.kind and value is not nothing:
            outcome.value = encode(value)
    except NotJSON as e:
        outcome.fail("invalid", placed("result", e))
        complain(outcome.error)
    except TooLarge as e:
        outcome.fail("quota", "result: %s" % e)
        complain(outcome.error)
    except BaseException as e:
        _failed(e, source, outcome)
    if "atexit" in sys.modules:
        try:
            sys.modules["atexit"]._run_exitfuncs()
        except BaseException:
            pass  # already printed by the interpreter
    return outcome


def _failed(e, source, outcome):
    if isinstance(e, SystemExit):
        code = e.code
        if code is None:
            return
        if isinstance(code, int):
            if code != 0:
                outcome.fail("permanent", "exit status %d" % code, code & 0xFF)
            return
        complain(str(code))
        return outcome.fail("permanent", "exit status 1: %s" % code)
    text = describe(e, source)
    complain(text)
    kind = "permanent"
    if isinstance(e, ToolError) and e.kind in KINDS:
        kind = e.kind
    outcome.fail(kind, text)


def describe(e, source):
    """Return the traceback of e with the program's own frames only."""
    try:
        import linecache
        import traceback
        # No mtime: checkcache then keeps it, whatever file has this name.
        lines = source.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        linecache.cache[PROGRAM] = (
            len(source), None, [line + "\n" for line in lines], PROGRAM)
        root = traceback.TracebackException(type(e), e, e.__traceback__)
        todo = [root]
        for node in todo:
            frames = [f for f in node.stack if _own(f.filename)]
            node.stack[:] = frames
            if not frames:
                node.stack = None
            todo += filter(None, (node.__cause__, node.__context__))
            todo += getattr(node, "exceptions", None) or ()
        return "".join(root.format())
    except BaseException:
        try:
            return "%s: %s\n" % (type(e).__name__, e)
        except BaseException:
            return "%s\n" % type(e).__name__


def _own(filename):
    return filename == PROGRAM or not (
        filename == main.__code__.co_filename or filename.startswith("<frozen ")
        or "/lib/python" in filename)


def clip(text):
    """Return the end of text in at most MAX_ERROR_BYTES of UTF-8."""
    data = text.rstrip("\n").encode("utf-8", "backslashreplace")
    if len(data) > MAX_ERROR_BYTES:
        mark = b"[cut]\n"
        data = data[len(mark) - MAX_ERROR_BYTES:]
        while data[0] & 0xC0 == 0x80:
            data = data[1:]
        data = mark + data
    return data.decode()


def complain(text):
    """Print text on stderr, whatever the program did to sys.stderr."""
    if not text.endswith("\n"):
        text += "\n"
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except BaseException:
        try:
            write(2, text.encode("utf-8", "backslashreplace"))
        except OSError:
            pass


def flush():
    """Flush all of stdout and stderr. A broken one is given up."""
    for name in ("stdout", "__stdout__", "stderr", "__stderr__"):
        stream = getattr(sys, name, None)
        if stream is not None:
            try:
                stream.flush()
            except BaseException:
                setattr(sys, name, None)


def deafen():
    """Stop the program's signal handlers: one that raises would lose the Result."""
    import _signal
    for number in range(1, _signal.NSIG):
        if callable(_signal.getsignal(number)):
            _signal.signal(number, _signal.SIG_IGN)


def send_result(result_id, outcome):
    fields = {"v": VERSION, "result_id": result_id, "ok": not outcome.kind}
    fields.update((k, v) for k, v in (
        ("value", "" if outcome.kind else outcome.value), ("kind", outcome.kind),
        ("error", outcome.error), ("calls", _written), ("bytes", _received)) if v)
    try:
        frame = memoryview(pack(fields))
    except (TooLarge, MemoryError) as e:
        outcome.fail("quota" if isinstance(e, TooLarge) else "permanent",
                     "result: %s" % (e or "MemoryError"))
        complain(outcome.error)
        return send_result(result_id, outcome)
    try:
        while frame:
            frame = frame[_CHANNELS.write(START_FD, frame):]
    except OSError as e:
        complain("guest: send the Result on fd %d: %s" % (START_FD, e))
        outcome.code = EXIT_PROTOCOL


def left_open():
    """Tell whether the program left files open; their data may be unwritten."""
    try:
        for name in listdir("/proc/self/fd"):
            if int(name) > CALL_FD:
                try:
                    fstat(int(name))
                    return True
                except OSError:
                    pass  # the one that listed
        return False
    except OSError:
        return True


def preload(argument):
    """Import what a pool's programs will need before one of them is there."""
    names = argument.removeprefix("--preload=")
    if names == argument:
        raise ProtocolError("argument %r is not known" % argument)
    for name in names.split(","):
        try:
            __import__(name)
        except Exception as e:
            raise ProtocolError("preload %s: %s: %s" % (name, type(e).__name__, e)) from None


def main():
    if sys.argv[1:] == ["--describe"]:
        print(encode({
            "version": VERSION, "max_frame_bytes": MAX_FRAME_BYTES,
            "max_error_bytes": MAX_ERROR_BYTES, "max_id_bytes": MAX_ID_BYTES,
            "start_fd": START_FD,
            "call_fd": CALL_FD, "prepare": PREPARE, "resolve": RESOLVE,
            "kinds": KINDS,
            "frames": {frame: {name: [_JSON_TYPES[type_], required]
                               for name, (type_, required) in table.items()}
                       for frame, table in FRAMES.items()},
        }))
        return 0
    try:
        for fd in (START_FD, CALL_FD):
            _CHANNELS.claim(fd)
        for argument in sys.argv[1:]:
            preload(argument)
        start = read_start(START_FD)
    except (OSError, ProtocolError) as e:
        complain("guest: %s (the guest is started by `jail script`)" % e)
        return EXIT_PROTOCOL
    if start is None:
        complain("guest: fd %d closed before a Start came" % START_FD)
        return EXIT_PROTOCOL
    register_at_fork(after_in_child=_CHANNELS.forked)
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)  # integers cross with all their digits
    source = start["program"]
    if source[:1] == "\ufeff":
        source = source[1:]
    outcome = execute(source, start["bindings"])
    flush()
    if not _CHANNELS.child:
        send_result(start["result_id"], outcome)
    if left_open():
        # The interpreter's own end closes them, and costs 2 to 10 ms.
        return outcome.code
    _exit(outcome.code)


if __name__ == "__main__":
    sys.exit(main())
