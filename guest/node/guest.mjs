// Interpreter host for Node.js programs under `jail script`.
//
// It reads one Start frame from fd 3, runs the program in it as an ES module,
// answers with one Result on fd 3, and carries the program's tool calls over
// fd 4.
//
// Nothing in this file is a security boundary. The program shares this
// process: it can read and write fds 3 and 4 and change anything here. What
// holds it is the jail around the process and the host's end of both channels.
// The care taken below is for honest programs.
//
// The launcher enforces every budget before this file starts (C12), so the
// budget in Start is checked for its form and otherwise not used.

import { fstatSync, readSync, writeSync } from 'node:fs';
import { Socket } from 'node:net';

// A program that rebinds a global (`globalThis.Buffer = ...`) must not change
// what this file does.
const {
  Array, Atomics, BigInt, Buffer, Error, Map, Math, Number, Object, Promise, Set,
  String, SyntaxError, TypeError, process,
} = globalThis;

// ------------------------------------------------------------------ constants
// A Go test runs `guest.mjs --describe` and compares all of these with package
// wire (L40).

const VERSION = 1;
const MAX_FRAME_BYTES = 16 << 20;
const MAX_ERROR_BYTES = 4096;
const MAX_ID_BYTES = 128;
const START_FD = 3;
const CALL_FD = 4;
const PREPARE = '$prepare';
const RESOLVE = '$resolve';
const KINDS = [
  'transient', 'rate_limited', 'quota', 'invalid', 'denied', 'auth',
  'canceled', 'permanent', 'unknown',
];

// field: [type, required]
const FRAMES = {
  Request: {
    v: ['integer', true], id: ['string', true], tool: ['string', true],
    args: ['string', true], deadline_ms: ['integer', false],
  },
  Response: {
    v: ['integer', true], id: ['string', true], ok: ['boolean', true],
    value: ['string', false], kind: ['string', false], error: ['string', false],
  },
  Start: {
    v: ['integer', true], program: ['string', true], bindings: ['array', true],
    budget: ['object', true], result_id: ['string', true],
  },
  StartBinding: {
    name: ['string', true], signature: ['string', false],
    description: ['string', false],
  },
  StartBudget: {
    wall_clock: ['integer', false], max_calls: ['integer', false],
    max_bytes: ['integer', false], max_memory: ['integer', false],
  },
  Result: {
    v: ['integer', true], result_id: ['string', true], ok: ['boolean', true],
    value: ['string', false], kind: ['string', false], error: ['string', false],
    calls: ['integer', false], bytes: ['integer', false],
  },
};

const PROGRAM = 'program.mjs'; // the program's name in stacks
const EXIT_PROTOCOL = 70; // no Start, a Start that is refused, or a lost Result
const EXIT_UNSETTLED = 13; // Node's own code for a top-level await without end

const { parse: parseFast, stringify: quote } = JSON;

class ProtocolError extends Error {} // a frame that is not one of version 1
class VersionError extends ProtocolError {} // a frame of another version
class TooLarge extends Error {} // a text that does not fit in one frame
class NotJSON extends Error {} // a value that JSON cannot carry without loss

// ----------------------------------------------------------------------- JSON

// LONE finds a surrogate without its other half.
const LONE = /\p{Surrogate}/u;

// encode returns root as compact JSON text that loses nothing (L20, L24):
// a BigInt and an integral number have all their digits. It throws NotJSON for
// NaN, infinities, negative zero, lone surrogates, undefined members of
// arrays, cycles, and objects that are neither plain nor arrays; a property
// that is undefined is left out. It does not recurse (L17).
function encode(root) {
  const out = [];
  let size = 0;
  const stack = []; // {value, keys, next} of each open container
  const inside = new Set();
  const emit = (piece) => {
    size += piece.length;
    if (size > MAX_FRAME_BYTES) throw new TooLarge(`more than ${MAX_FRAME_BYTES} bytes`);
    out.push(piece);
  };
  const bad = (text) => {
    let path = '';
    for (let i = 0; i < stack.length && i < 10; i++) {
      const { keys, next } = stack[i];
      path += `[${keys ? quote(keys[next - 1]).slice(0, 40) : next - 1}]`;
    }
    return new NotJSON(path ? `${path}: ${text}` : `: ${text}`);
  };
  const text = (string) => {
    if (LONE.test(string)) throw bad('string holds a lone surrogate');
    return quote(string);
  };
  const value = (item) => {
    switch (typeof item) {
      case 'string': return emit(text(item));
      case 'boolean': return emit(item ? 'true' : 'false');
      case 'bigint': return emit(item.toString());
      case 'number':
        if (!Number.isFinite(item) || Object.is(item, -0)) {
          throw bad(`${Object.is(item, -0) ? '-0' : item} is not a JSON number`);
        }
        return emit(Number.isInteger(item) ? BigInt(item).toString() : String(item));
      case 'object': {
        if (item === null) return emit('null');
        const array = Array.isArray(item);
        const parent = Object.getPrototypeOf(item);
        if (!array && parent !== Object.prototype && parent !== null) {
          throw bad(`${parent.constructor?.name || 'object'} is not a JSON value`);
        }
        if (inside.has(item)) throw bad(`${array ? 'array' : 'object'} contains itself`);
        inside.add(item);
        stack.push({ value: item, keys: array ? null : Object.keys(item), next: 0, empty: true });
        return emit(array ? '[' : '{');
      }
      default: throw bad(`${typeof item} is not a JSON value`);
    }
  };
  value(root);
  while (stack.length > 0) {
    const top = stack[stack.length - 1];
    const { keys } = top;
    if (top.next >= (keys ?? top.value).length) {
      stack.pop();
      inside.delete(top.value);
      emit(keys ? '}' : ']');
      continue;
    }
    const name = keys ? keys[top.next] : top.next;
    top.next++;
    const item = top.value[name];
    if (keys && item === undefined) continue;
    if (!top.empty) emit(',');
    top.empty = false;
    if (keys) emit(`${text(name)}:`);
    value(item);
  }
  return out.join('');
}

// decode returns the value of JSON text; integers beyond 2^53-1 are BigInt.
function decode(text) {
  // Below 16 digits every integer is exact, so the built-in parser will do.
  return /\d{16}/.test(text) ? parse(text, exact) : parseFast(text);
}

function exact(token, plain) {
  const number = Number(token);
  return plain && !Number.isSafeInteger(number) ? BigInt(token) : number;
}

// For frames: 1.0 is no integer there, so it must not become 1.
function integral(token, plain) {
  return plain ? exact(token, plain) : NaN;
}

const BLANK = /[ \t\n\r]*/y;
const NUMBER = /-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/y;

// parse reads JSON with a stack of its own. number makes the value of a number
// token; twice is called for a key that an object has already.
function parse(text, number, twice = () => {}) {
  let at = 0;
  let holder = null;
  let key = null;
  let root;
  const stack = [];
  const bad = () => new SyntaxError(`not JSON at character ${at}`);
  const blank = () => {
    BLANK.lastIndex = at;
    BLANK.exec(text);
    at = BLANK.lastIndex;
  };
  const string = () => {
    let end = at;
    for (;;) {
      end = text.indexOf('"', end + 1);
      if (end < 0) throw bad();
      let before = end;
      while (text[before - 1] === '\\') before--;
      if ((end - before) % 2 === 0) break;
    }
    const value = parseFast(text.slice(at, end + 1));
    at = end + 1;
    return value;
  };
  const name = () => {
    blank();
    if (text[at] !== '"') throw bad();
    key = string();
    blank();
    if (text[at++] !== ':') throw bad();
    if (Object.hasOwn(holder, key)) twice();
  };
  const put = (value) => {
    if (holder === null) root = value;
    else if (Array.isArray(holder)) holder.push(value);
    else if (key === '__proto__') {
      Object.defineProperty(holder, key, { value, enumerable: true, writable: true, configurable: true });
    } else holder[key] = value;
  };
  for (;;) {
    blank();
    const char = text[at];
    if (char === '[' || char === '{') {
      const value = char === '[' ? [] : {};
      put(value);
      stack.push(holder);
      holder = value;
      at++;
      blank();
      if (text[at] !== (char === '[' ? ']' : '}')) {
        if (char === '{') name();
        continue;
      }
    } else if (char === '"') {
      put(string());
    } else if (text.startsWith('true', at)) {
      put(true);
      at += 4;
    } else if (text.startsWith('false', at)) {
      put(false);
      at += 5;
    } else if (text.startsWith('null', at)) {
      put(null);
      at += 4;
    } else {
      NUMBER.lastIndex = at;
      const match = NUMBER.exec(text);
      if (!match) throw bad();
      put(number(match[0], match[1] === undefined && match[2] === undefined));
      at = NUMBER.lastIndex;
    }
    for (;;) {
      blank();
      if (stack.length === 0) {
        if (at !== text.length) throw bad();
        return root;
      }
      const next = text[at];
      if (next === (Array.isArray(holder) ? ']' : '}')) {
        at++;
        holder = stack.pop();
      } else if (next === ',') {
        at++;
        if (!Array.isArray(holder)) name();
        break;
      } else throw bad();
    }
  }
}

// --------------------------------------------------------------------- frames

// pack returns one frame. It throws TooLarge before any byte exists elsewhere (W4).
function pack(fields) {
  const body = Buffer.from(quote(fields));
  if (body.length > MAX_FRAME_BYTES) {
    throw new TooLarge(`frame takes ${body.length} bytes, the limit is ${MAX_FRAME_BYTES}`);
  }
  const header = Buffer.alloc(4);
  header.writeUInt32BE(body.length);
  return Buffer.concat([header, body]);
}

// bodyLength returns the length that a 4-byte header announces.
function bodyLength(header) {
  const size = header.readUInt32BE();
  if (size === 0 || size > MAX_FRAME_BYTES) {
    throw new ProtocolError(`frame length ${size} is not in 1 to ${MAX_FRAME_BYTES}`);
  }
  return size;
}

const utf8 = new TextDecoder('utf-8', { fatal: true, ignoreBOM: true });

// unpack returns the known fields of the frame body.
function unpack(kind, body) {
  let value;
  let text;
  let twice = false;
  try {
    text = utf8.decode(body);
    value = parse(text, integral, () => { twice = true; });
  } catch {
    throw new ProtocolError(`${kind} frame is not JSON`);
  }
  if (!isA('object', value)) throw new ProtocolError(`${kind} frame is not an object`);
  const version = Object.hasOwn(value, 'v') ? value.v : 0;
  if (version !== VERSION) {
    throw new VersionError(`${kind} frame has protocol version ${show(version)}, this guest speaks ${VERSION}`);
  }
  if (twice) throw new ProtocolError(`${kind} frame: a key appears twice`);
  if (/\\u[dD]/.test(text)) {
    const todo = [value];
    while (todo.length > 0) {
      const item = todo.pop();
      if (typeof item === 'string' && LONE.test(item)) {
        throw new ProtocolError(`${kind} frame holds a lone surrogate`);
      }
      if (item !== null && typeof item === 'object') {
        for (const name of Object.keys(item)) todo.push(name, item[name]);
      }
    }
  }
  const fields = pick(kind, value);
  if (kind === 'Start') {
    fields.bindings = fields.bindings.map((b) => pick('StartBinding', b));
    fields.budget = pick('StartBudget', fields.budget);
  }
  return fields;
}

// answerOf returns what a Response says; ok alone decides (C20).
function answerOf({ ok, value = '', kind = '', error = '' }) {
  if (ok) return { ok, text: value, kind: '' };
  return { ok, text: error, kind: KINDS.includes(kind) ? kind : 'unknown' };
}

function isA(type, value) {
  switch (type) {
    case 'integer': return Number.isInteger(value) || typeof value === 'bigint';
    case 'array': return Array.isArray(value);
    case 'object': return value !== null && typeof value === 'object' && !Array.isArray(value);
    default: return typeof value === type;
  }
}

function pick(kind, value) {
  if (!isA('object', value)) throw new ProtocolError(`${kind} is not an object`);
  const table = FRAMES[kind];
  const fields = Object.create(null); // without what a program adds to Object.prototype
  for (const name of Object.keys(value)) {
    if (!Object.hasOwn(table, name) && Object.hasOwn(table, name.toUpperCase().toLowerCase())) {
      throw new ProtocolError(`${kind} has field ${quote(name)} in another case`);
    }
  }
  for (const [name, [type, required]] of Object.entries(table)) {
    if (!Object.hasOwn(value, name)) {
      if (required) throw new ProtocolError(`${kind}: ${name} is missing`);
      continue;
    }
    const field = value[name];
    if (!isA(type, field)) throw new ProtocolError(`${kind}: ${name} has the wrong type`);
    if (type === 'integer' && !(field >= 0 && field < 2n ** 63n)) {
      throw new ProtocolError(`${kind}: ${name} is out of range`);
    }
    if (['id', 'tool', 'result_id', 'name'].includes(name) && field === '') {
      throw new ProtocolError(`${kind}: ${name} is empty`);
    }
    if (['id', 'result_id'].includes(name) && Buffer.byteLength(field) > MAX_ID_BYTES) {
      throw new ProtocolError(`${kind}: ${name} has more than ${MAX_ID_BYTES} bytes`);
    }
    fields[name] = field;
  }
  return fields;
}

// pause blocks for a moment: these fds are read before an event loop runs.
function pause() {
  Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 2);
}

// readStart reads exactly one Start and not one byte more (W62). It returns
// null at a clean end of the channel.
function readStart() {
  const exactly = (size) => {
    const data = Buffer.alloc(Math.min(size, 1 << 16));
    const parts = [];
    let have = 0;
    while (have < size) {
      let n;
      try {
        n = readSync(START_FD, data, 0, Math.min(data.length, size - have), null);
      } catch (e) {
        if (e.code !== 'EAGAIN') throw e;
        pause();
        continue;
      }
      if (n === 0) break;
      parts.push(Buffer.from(data.subarray(0, n)));
      have += n;
    }
    return Buffer.concat(parts);
  };
  const header = exactly(4);
  if (header.length === 0) return null;
  const size = header.length === 4 ? bodyLength(header) : 1;
  const body = header.length === 4 ? exactly(size) : header;
  if (header.length < 4 || body.length < size) {
    throw new ProtocolError(`fd ${START_FD} closed inside a frame`);
  }
  return unpack('Start', body);
}

function writeAll(fd, data) {
  for (let at = 0; at < data.length;) {
    try {
      at += writeSync(fd, data, at);
    } catch (e) {
      if (e.code !== 'EAGAIN') throw e;
      pause();
    }
  }
}

// Fds 3 and 4 are known by inode: frames must not land in a file that got the
// number after the program closed it.
const channels = new Map();

function inode(fd) {
  const { dev, ino, mode } = fstatSync(fd);
  return `${dev} ${ino} ${mode}`;
}

function holds(fd) {
  try {
    return channels.get(fd) === inode(fd);
  } catch {
    return false;
  }
}

// --------------------------------------------------------------- call channel

// ToolError is what a failed tool call rejects with: kind is its failure
// class, tool the tool's name.
class ToolError extends Error {
  constructor(text = '', kind = 'unknown', tool = '') {
    super(text);
    this.kind = kind;
    this.tool = tool;
  }
}
Object.defineProperty(ToolError.prototype, 'name', { value: 'ToolError', configurable: true, writable: true });

const waiting = new Map(); // id: function that takes the answer
let lastId = 0;
let sent = 0;
let received = 0;
let lost = ''; // why no call can be made any more
let socket = null;
let holders = 0;

// lose fails every call without an answer, and all later ones (W55).
function lose(text) {
  lost ||= text;
  const all = [...waiting.values()];
  waiting.clear();
  for (const answer of all) answer({ ok: false, text: lost, kind: 'unknown' });
  socket?.destroy();
}

function connect() {
  if (socket !== null || lost) return;
  if (!holds(CALL_FD)) {
    lose(`fd ${CALL_FD}: the program closed it`);
    return;
  }
  socket = new Socket({ fd: CALL_FD, readable: true, writable: true });
  socket.unref();
  let parts = [];
  let have = 0;
  let size = 0; // of the body that is being read, 0 while reading a header
  socket.on('data', (data) => {
    try {
      parts.push(data);
      have += data.length;
      while (have >= (size || 4)) {
        const all = parts.length === 1 ? parts[0] : Buffer.concat(parts);
        const need = size || 4;
        const part = all.subarray(0, need);
        parts = [all.subarray(need)];
        have -= need;
        if (size === 0) {
          size = bodyLength(part);
        } else {
          size = 0;
          receive(unpack('Response', part));
        }
      }
    } catch (e) {
      lose(`read fd ${CALL_FD}: ${e.message}`);
    }
  });
  socket.on('error', (e) => lose(`fd ${CALL_FD}: ${e.message}`));
  socket.on('close', () => lose('the host closed the call channel'));
}

function receive(fields) {
  const answer = answerOf(fields);
  // The host's ledger leaves out refusals for quota, whose text must get
  // through when nothing is left (W37).
  if (answer.kind !== 'quota') received += Buffer.byteLength(answer.text);
  const resolve = waiting.get(fields.id);
  waiting.delete(fields.id);
  resolve?.(answer); // without one it is a late or unknown id (W56)
}

// send makes one request and resolves to its answer. It never rejects, so a
// promise that nobody looks at ends no program. It throws ToolError when
// nothing was sent.
function send(tool, args, about = tool) {
  if (LONE.test(args)) throw new ToolError('arguments: string holds a lone surrogate', 'invalid', about);
  const id = String(++lastId);
  let frame;
  try {
    frame = pack({ v: VERSION, id, tool, args });
  } catch (e) {
    throw new ToolError(`arguments: ${e.message}`, 'invalid', about);
  }
  connect();
  if (lost) throw new ToolError(lost, 'unknown', about);
  return new Promise((resolve) => {
    waiting.set(id, resolve);
    sent++;
    socket.write(frame);
  });
}

// hold keeps the event loop alive while promise is pending. A call channel
// with no waiter must not.
async function hold(promise) {
  if (holders++ === 0) socket.ref();
  try {
    return await promise;
  } finally {
    if (--holders === 0) socket.unref();
  }
}

// settle returns the value of an answer or throws its ToolError. A value that
// is no JSON text, the empty one too, is returned as string.
function settle({ ok, text, kind }, tool) {
  if (!ok) throw new ToolError(text, kind, tool);
  try {
    return decode(text);
  } catch {
    return text;
  }
}

// ---------------------------------------------------------- what programs see

function argumentText(label, tool, args) {
  const [value = {}] = args;
  const plain = isA('object', value);
  if (args.length > 1 || !(plain || typeof value === 'string')) {
    throw new TypeError(`${label}${tool}() takes one object or one string of JSON`);
  }
  if (!plain) return value;
  try {
    return encode(value);
  } catch (e) {
    if (!(e instanceof NotJSON || e instanceof TooLarge)) throw e;
    throw new ToolError(`arguments${e instanceof NotJSON ? '' : ': '}${e.message}`, 'invalid', tool);
  }
}

// Early is an early read. result(), or await, gives the value, as often as
// asked.
//
// $prepare has args {"tool": name, "args": text} and answers a handle, 0 for
// "not prepared"; $resolve has {"handle": handle, "tool": name, "args": text}.
// text is the encoded arguments as a JSON string, so that the host compares
// the same bytes in both (B12). Without a handle the call is made the ordinary
// way: that the host prepared nothing is no failure (B11).
class Early {
  #tool;
  #args;
  #about;
  #first;
  #result;

  constructor(tool, args) {
    this.#tool = tool;
    this.#args = args;
    this.#about = `"tool":${quote(tool)},"args":${quote(args)}}`;
    this.#first = send(PREPARE, `{${this.#about}`, tool);
  }

  result() {
    this.#result ??= this.#resolve();
    return this.#result;
  }

  then(resolved, rejected) {
    return this.result().then(resolved, rejected);
  }

  async #resolve() {
    const { ok, text } = await hold(this.#first);
    const last = ok && /^[1-9][0-9]{0,19}$/.test(text)
      ? send(RESOLVE, `{"handle":${text},${this.#about}`, this.#tool)
      : send(this.#tool, this.#args);
    return settle(await hold(last), this.#tool);
  }
}

// Names that the language and its tools ask of any object.
const QUIET = new Set(['then', 'toJSON', 'toString', 'valueOf', 'constructor', 'inspect']);

function lookup(table) {
  return new Proxy(Object.freeze(table), {
    get(all, name) {
      if (typeof name === 'symbol' || name in all) return all[name];
      if (QUIET.has(name)) return undefined;
      const names = Object.keys(tools).sort().join(', ') || 'none';
      throw new TypeError(`host has no tool ${quote(name)}; it has: ${names}`);
    },
  });
}

const tools = Object.create(null);

function makeHost(bindings) {
  const prepare = Object.create(null);
  for (const { name, signature = `${name}({...})`, description = '' } of bindings) {
    const call = async (...args) =>
      settle(await hold(send(name, argumentText('host.', name, args))), name);
    const early = (...args) => new Early(name, argumentText('host.prepare.', name, args));
    for (const fn of [call, early]) {
      Object.defineProperty(fn, 'name', { value: name, configurable: true });
      fn.signature = signature;
      fn.description = description;
    }
    tools[name] = call;
    prepare[name] = early;
  }
  return lookup(Object.assign(Object.create(null), tools, { prepare: lookup(prepare), ToolError }));
}

// -------------------------------------------------------------------- program

let start = null;
let url = '';
let failure = null; // {kind, error, code} of the first failure
let finished = false; // the module ran to its end
let drained = false; // the event loop had nothing more to do
let value;
let spawnSync; // imported when there is a syntax error

function complain(text) {
  try {
    process.stderr.write(`${text}\n`);
  } catch {
    // Nobody reads stderr; the Result still goes out.
  }
}

function fail(kind, error, code = 1) {
  failure ??= { kind, error: clip(error), code };
}

// failed ends the run with what the program threw.
function failed(thrown) {
  if (failure) return;
  const text = describe(thrown);
  complain(text);
  let kind = 'permanent';
  if (thrown instanceof ToolError && KINDS.includes(thrown.kind)) kind = thrown.kind;
  fail(kind, text);
  process.exit(1);
}

// describe returns the text of thrown with the program's own frames only, and
// of its causes.
function describe(thrown) {
  const texts = [];
  for (let e = thrown; texts.length < 8; e = e.cause) {
    let text;
    try {
      text = e instanceof Error && typeof e.stack === 'string' ? ownStack(e) : `thrown: ${show(e)}`;
    } catch {
      text = 'thrown: a value without text';
    }
    texts.push(text);
    try {
      if (e === null || typeof e !== 'object' || e.cause === undefined) break;
    } catch {
      break;
    }
  }
  return texts.join('\ncaused by: ');
}

function show(thrown) {
  if (typeof thrown === 'string') return thrown;
  try {
    return encode(thrown);
  } catch {
    return String(thrown);
  }
}

function ownStack(e) {
  const lines = e.stack.split(url).join(PROGRAM).split('\n');
  const own = lines.filter((line) => !/^\s+at /.test(line)
    || line.includes(`${PROGRAM}:`)
    || (line.includes('file:///') && !line.includes(import.meta.url)));
  if (e instanceof SyntaxError && !lines.some((line) => line.includes(`${PROGRAM}:`))) {
    return syntaxError() || own.join('\n');
  }
  return own.join('\n');
}

// syntaxError asks a second interpreter where the program's syntax error is:
// Node tells the place of a module's error to nobody but stderr.
function syntaxError() {
  try {
    const { stderr } = spawnSync(process.execPath, ['--input-type=module', '--check', '-'], {
      input: start.program, encoding: 'utf8', timeout: 10000, env: {},
    });
    const match = /^\[stdin\](:\d+\n[^]*?\n)\n(SyntaxError: .*)/.exec(stderr);
    return match && `${PROGRAM}${match[1]}${match[2]}`;
  } catch {
    return '';
  }
}

// clip returns the end of text in at most MAX_ERROR_BYTES of UTF-8.
function clip(text) {
  const data = Buffer.from(text);
  if (data.length <= MAX_ERROR_BYTES) return data.toString();
  const mark = '[cut]\n';
  let from = data.length - MAX_ERROR_BYTES + mark.length;
  while ((data[from] & 0xc0) === 0x80) from++;
  return mark + data.subarray(from).toString();
}

// ended sends the one Result. It runs in the process's exit event, whatever
// brought that about.
function ended(code) {
  let text;
  if (!failure && code !== 0) fail('permanent', `exit status ${code}`, code);
  if (!failure && drained && !finished) {
    fail('permanent', 'the program waits at its top level for something that never comes', EXIT_UNSETTLED);
    complain(failure.error);
  }
  try {
    if (!failure) {
      const result = value === undefined ? globalThis.result : value;
      if (result !== undefined) text = encode(result);
    }
  } catch (e) {
    if (e instanceof NotJSON) fail('invalid', `result${e.message}`);
    else if (e instanceof TooLarge) fail('quota', `result: ${e.message}`);
    else fail('permanent', describe(e));
    complain(failure.error);
  }
  for (;;) {
    let frame;
    try {
      frame = pack({
        v: VERSION, result_id: start.result_id, ok: !failure,
        value: failure ? undefined : text || undefined,
        kind: failure?.kind, error: failure?.error || undefined,
        calls: sent || undefined, bytes: received || undefined,
      });
    } catch (e) {
      if (failure) throw e; // cannot be: a failure takes 4 KiB
      fail('quota', `result: ${e.message}`);
      complain(failure.error);
      continue;
    }
    try {
      if (!holds(START_FD)) throw new Error('the program closed it');
      writeAll(START_FD, frame);
    } catch (e) {
      complain(`guest: send the Result on fd ${START_FD}: ${e.message}`);
      process.exitCode = EXIT_PROTOCOL;
      return;
    }
    break;
  }
  if (failure) process.exitCode = failure.code;
}

// preload imports what a pool's programs will need before one of them is there.
async function preload(argument) {
  const [, names] = argument.match(/^--preload=(.*)$/) ?? [];
  if (names === undefined) throw new Error(`argument ${argument} is not known`);
  for (const name of names.split(',')) {
    try {
      await import(name);
    } catch (e) {
      throw new Error(`preload ${name}: ${e.message}`);
    }
  }
}

async function main() {
  if (process.argv[2] === '--describe') {
    console.log(quote({
      version: VERSION, max_frame_bytes: MAX_FRAME_BYTES, max_error_bytes: MAX_ERROR_BYTES,
      max_id_bytes: MAX_ID_BYTES,
      start_fd: START_FD, call_fd: CALL_FD, prepare: PREPARE, resolve: RESOLVE,
      kinds: KINDS, frames: FRAMES,
    }));
    return;
  }
  // A pipe that blocks: process.exit would drop what is still queued, and a
  // killed program must not take its last output with it.
  for (const stream of [process.stdout, process.stderr]) stream._handle?.setBlocking?.(true);
  try {
    for (const fd of [START_FD, CALL_FD]) channels.set(fd, inode(fd));
    for (const argument of process.argv.slice(2)) await preload(argument);
    start = readStart();
  } catch (e) {
    complain(`guest: ${e.message} (the guest is started by \`jail script\`)`);
    process.exit(EXIT_PROTOCOL);
  }
  if (start === null) {
    complain(`guest: fd ${START_FD} closed before a Start came`);
    process.exit(EXIT_PROTOCOL);
  }
  process.argv = [process.execPath, PROGRAM];
  Object.assign(globalThis, { host: makeHost(start.bindings), ToolError });
  process.on('exit', ended);
  process.on('beforeExit', () => { drained = true; });
  process.on('uncaughtException', (thrown) => {
    // A program with a handler of its own goes on.
    if (process.listenerCount('uncaughtException') === 1) failed(thrown);
  });
  const source = start.program.startsWith('\ufeff') ? start.program.slice(1) : start.program;
  // The sourceURL makes the program's name and lines stand in stacks.
  url = `data:text/javascript;base64,${Buffer.from(`${source}\n//# sourceURL=${PROGRAM}`).toString('base64')}`;
  try {
    const space = await import(url);
    value = await space.default;
    finished = true;
  } catch (e) {
    if (e instanceof SyntaxError) ({ spawnSync } = await import('node:child_process'));
    failed(e);
  }
}

// A test imports this file for its codec.
if (!globalThis[Symbol.for('jail.guest.codec')]) main();

export { VersionError, answerOf, pack, unpack };
