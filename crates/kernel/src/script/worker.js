// Runs cells in node, one after the other, for the process that started it.
//
//   orders      {"key", "count", "source", "code", "names", "waits", "positions", "types"}, a line each
//   reports     `ready`, `tell KEY JSON`, `done KEY`, sent directly to the agent
//   interrupts  the number of the cell that each is meant for, read by a separate thread
//
// Cells share this realm, so every builtin that is needed later is saved first.
'use strict';
(() => {
const fs = require('fs');
const net = require('net');
const path = require('path');
const stream = require('stream');
const util = require('util');
const vm = require('vm');
const { createRequire } = require('module');
const { pathToFileURL } = require('url');
const { Worker } = require('worker_threads');

const [orders, reports, interrupts] = process.argv.splice(1, 3).map(Number);
const LONGEST_LINE = 8 * 1024 * 1024 - 1024;
const LONGEST_TEXT = 256 * 1024;
// The tables of this many cells are kept, to map lines of functions that are called later.
const KEPT_CELLS = 500;
const DISPLAY = Symbol.for('Jupyter.display');
const { parse, stringify } = JSON;
const { from: bufferFrom, byteLength } = Buffer;
const writeSync = fs.writeSync;
const nothing = new Int32Array(new SharedArrayBuffer(4));
const { nextTick } = process;

// ---- writing

function writeAll(fd, bytes) {
  let written = 0;
  while (written < bytes.length) {
    try {
      written += writeSync(fd, bytes, written);
    } catch (error) {
      if (error.code !== 'EAGAIN') throw error;
      // The reader is slow. There is nothing else to do meanwhile: output stays in order, and an
      // interrupt ends this wait.
      Atomics.wait(nothing, 0, 0, 1);
    }
  }
}

// An interrupt stops a cell between any two instructions, also inside the code of node's streams.
// Their state would then say for ever that a write is in progress, and all later output would wait
// for its end. So output is written without any state.
function makeStateless(stream, fd) {
  const checked = stream.write;
  const write = (chunk, encoding) => writeAll(fd, typeof chunk === 'string' ? bufferFrom(chunk, encoding) : chunk);
  stream.write = function (chunk, encoding, callback) {
    if (typeof encoding === 'function') [encoding, callback] = [undefined, encoding];
    if (typeof chunk !== 'string' && !(chunk instanceof Uint8Array)) return checked.call(this, chunk, encoding, callback);
    let failed = null;
    try {
      write(chunk, encoding);
    } catch (error) {
      failed = error;
    }
    if (typeof callback === 'function') nextTick(callback, failed);
    return true;
  };
  stream._write = (chunk, encoding, done) => {
    try {
      write(chunk, encoding);
      done();
    } catch (error) {
      done(error);
    }
  };
  stream._writev = null;
  return stream.write.bind(stream);
}

makeStateless(process.stdout, 1);
const write = makeStateless(process.stderr, 2);

function report(line) {
  try {
    writeAll(reports, bufferFrom(line + '\n'));
  } catch {
    process.exit(1);
  }
}

function tell(key, kind, value) {
  const line = `tell ${key} ${stringify({ [kind]: value })}`;
  if (byteLength(line) <= LONGEST_LINE) return report(line);
  const text = `a value of ${byteLength(line)} bytes is too large to be shown`;
  const smaller = kind === 'error' ? { ...value, traceback: [text] } : { 'text/plain': text };
  return report(`tell ${key} ${stringify({ [kind]: smaller })}`);
}

// ---- values as the representations that a client may choose from

function inspect(value) {
  try {
    return util.inspect(value, { depth: 4, maxStringLength: LONGEST_TEXT, breakLength: 100 });
  } catch (error) {
    return `[a value that cannot be shown: ${error && error.message}]`;
  }
}

function representation(value) {
  if (typeof value === 'string') return value;
  if (ArrayBuffer.isView(value)) {
    return bufferFrom(value.buffer, value.byteOffset, value.byteLength).toString('base64');
  }
  const text = stringify(value);
  return text === undefined ? String(value) : text;
}

function flat(bundle) {
  const flattened = {};
  for (const [mime, value] of Object.entries(bundle)) flattened[mime] = representation(value);
  return flattened;
}

async function describe(value) {
  const own = value !== null && (typeof value === 'object' || typeof value === 'function') && value[DISPLAY];
  if (typeof own === 'function') {
    const bundle = flat(await own.call(value));
    if (Object.keys(bundle).length > 0) return bundle;
  }
  return { 'text/plain': inspect(value) };
}

const shown = (bundle) => ({ [DISPLAY]: () => bundle });
const joined = (parts, values) => (Array.isArray(parts) ? String.raw({ raw: parts }, ...values) : String(parts));

function imageType(bytes) {
  if (bytes[0] === 0x89 && bytes[1] === 0x50) return 'image/png';
  if (bytes[0] === 0xff && bytes[1] === 0xd8) return 'image/jpeg';
  if (bytes[0] === 0x47 && bytes[1] === 0x49) return 'image/gif';
  throw new TypeError('display.image takes the bytes of a PNG, JPEG or GIF image, or the path of one');
}

function image(source) {
  const bytes = typeof source === 'string' ? fs.readFileSync(source) : source;
  return shown({ [imageType(bytes)]: bytes });
}

async function display(value, options = {}) {
  const key = current ? current.key : null;
  const bundle = options.raw ? flat(value) : await describe(value);
  if (key !== null && current && current.key === key) tell(key, 'display', bundle);
  else write(`display() was called while no cell runs: ${inspect(value)}\n`);
}
Object.assign(display, {
  bundle: shown,
  html: (parts, ...values) => shown({ 'text/html': joined(parts, values) }),
  markdown: (parts, ...values) => shown({ 'text/markdown': joined(parts, values) }),
  svg: (parts, ...values) => shown({ 'image/svg+xml': joined(parts, values) }),
  json: (value) => shown({ 'application/json': stringify(value), 'text/plain': inspect(value) }),
  image,
});

// ---- errors, in lines of the cell

const cells = new Map();

function look(table, line, column) {
  let low = 0;
  let high = table.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    const [l, c] = table[middle];
    if (l < line || (l === line && c <= column)) low = middle + 1;
    else high = middle;
  }
  if (low === 0) return [line, column];
  const [l, c, toLine, toColumn] = table[low - 1];
  return l === line ? [toLine, toColumn + (column - c)] : [toLine, toColumn];
}

function locate(name, line, column) {
  const cell = cells.get(name);
  if (!cell) return [line, column];
  let place = look(cell.positions, line, column - 1);
  if (cell.types.length > 0) place = look(cell.types, ...place);
  const last = cell.lines.length;
  return place[0] > last ? [last, 1] : [place[0], place[1] + 1];
}

const OURS = /\(?(\[eval\]|\[worker eval\]|node:vm|node:internal\/)[^\s]*:\d+(:\d+)?\)?$/;
const PLACE = /(cell\[\d+\]):(\d+)(?::(\d+))?/g;

function trace(text) {
  const lines = text.split('\n').filter((line) => !(/^\s+at /.test(line) && OURS.test(line)));
  const named = lines.map((line) => line.replace(PLACE, (whole, name, row, column) => {
    const [toRow, toColumn] = locate(name, Number(row), Number(column || 1));
    return column === undefined ? `${name}:${toRow}` : `${name}:${toRow}:${toColumn}`;
  }));
  return named.map((line) => line.replace(/^(\s+at )eval \(/, '$1('));
}

// The line of the cell where the error occurred, with a caret below it.
function excerpt(lines) {
  const place = lines.map((line) => /^\s+at .*?(cell\[\d+\]):(\d+):(\d+)/.exec(line)).find(Boolean);
  const cell = place && cells.get(place[1]);
  const line = cell && cell.lines[Number(place[2]) - 1];
  if (line === undefined || line === '' || line.length > 200) return [];
  return [`${place[1]}:${place[2]}`, line, `${' '.repeat(Math.min(Number(place[3]) - 1, line.length))}^`, ''];
}

function cut(text) {
  return text.length > LONGEST_TEXT ? `${text.slice(0, LONGEST_TEXT)}…` : text;
}

function isInterrupt(error) {
  return error === INTERRUPTED || (util.types.isNativeError(error) && error.code === 'ERR_SCRIPT_EXECUTION_INTERRUPTED');
}

function failure(error) {
  if (isInterrupt(error)) {
    const evalue = 'the execution was interrupted';
    return { ename: 'KeyboardInterrupt', evalue, traceback: [`KeyboardInterrupt: ${evalue}`] };
  }
  const text = cut(inspect(error));
  if (!util.types.isNativeError(error) && !(error instanceof Error)) {
    return { ename: 'Uncaught', evalue: text, traceback: [`Uncaught ${text}`] };
  }
  let [ename, evalue] = ['Error', ''];
  try {
    ename = String(error.name || 'Error');
    evalue = String(error.message);
  } catch { /* Its getters throw, so it stays an error without a text. */ }
  const lines = trace(text);
  return { ename, evalue: cut(evalue), traceback: [...excerpt(lines), ...lines] };
}

function complain(error) {
  if (isInterrupt(error)) return;
  write(`Uncaught ${failure(error).traceback.join('\n')}\n`);
}

// ---- interrupts
//
// A separate thread receives them, stores the number of the cell that is meant, and then
//   - lets V8 stop the cell if its first synchronous part is running (`breakOnSigint`): a signal
//     is sent only then, and the cell does not leave that state before a sent signal has arrived;
//   - wakes this thread, where the cell may be awaiting something.
// A cell that was interrupted before it began checks first; code after an `await` checks in its
// loops.

const INTERRUPTED = new Error('the execution was interrupted');
INTERRUPTED.name = 'KeyboardInterrupt';
// The last cell to interrupt, the one that runs or is next, and whether a signal can stop it.
const [MEANT, ACTIVE, PHASE] = [0, 1, 2];
const [ELSEWHERE, AT_FIRST, SIGNALLED] = [0, 1, 2];
const state = new Int32Array(new SharedArrayBuffer(12));

function listen() {
  const code = `
    const { Socket } = require('net');
    const { parentPort, workerData: { fd, state } } = require('worker_threads');
    const input = new Socket({ fd, readable: true, writable: false });
    input.on('data', (counts) => {
      Atomics.store(state, ${MEANT}, counts.readInt32LE(counts.length - 4));
      if (Atomics.compareExchange(state, ${PHASE}, ${AT_FIRST}, ${SIGNALLED}) === ${AT_FIRST}) {
        if (Atomics.load(state, ${MEANT}) >= Atomics.load(state, ${ACTIVE})) process.kill(process.pid, 'SIGINT');
        else Atomics.store(state, ${PHASE}, ${AT_FIRST});
      }
      parentPort.postMessage(null);
    });
    input.on('close', () => process.kill(process.pid, 'SIGKILL'));`;
  const listener = new Worker(code, { eval: true, workerData: { fd: interrupts, state }, env: {}, execArgv: [] });
  listener.on('message', interrupt);
  listener.on('error', complain);
  listener.unref();
}

const isMeant = () => Atomics.load(state, MEANT) >= Atomics.load(state, ACTIVE);

function interrupt() {
  if (isMeant() && current && current.interrupt) current.interrupt(INTERRUPTED);
}

process.on('SIGINT', () => {
  if (current) Atomics.store(state, MEANT, current.count);
  interrupt();
});

let entered = null;

// Runs inside the script that a signal can stop.
function enter() {
  Atomics.store(state, PHASE, AT_FIRST);
  try {
    if (isMeant()) throw INTERRUPTED;
    return entered.runInThisContext({ displayErrors: false });
  } finally {
    // A signal that was sent must arrive while we are here.
    while (Atomics.compareExchange(state, PHASE, AT_FIRST, ELSEWHERE) === SIGNALLED) Atomics.wait(nothing, 0, 0, 1);
  }
}

// ---- what cells find beside the globals of node

function resolve(specifier) {
  if (/^\.{0,2}\//.test(specifier)) return pathToFileURL(path.resolve(specifier)).href;
  return specifier;
}

async function load(specifier, options) {
  const name = resolve(String(specifier));
  try {
    return await (options === undefined ? import(name) : import(name, options));
  } catch (error) {
    // Modules that `require` finds from the current directory are accepted too.
    if (!error || error.code !== 'ERR_MODULE_NOT_FOUND' || name !== String(specifier)) throw error;
    let file;
    try { file = cellRequire.resolve(name); } catch { throw error; }
    return import(pathToFileURL(file).href);
  }
}

async function module(specifier, names, attributes) {
  const hasAttributes = Object.keys(attributes).length > 0;
  const loaded = await load(specifier, hasAttributes ? { with: attributes, assert: attributes } : undefined);
  for (const name of names) {
    if (!(name in loaded) && !current.typed) {
      throw new SyntaxError(`The requested module '${specifier}' does not provide an export named '${name}'`);
    }
  }
  return loaded;
}

const hidden = (target, name, value) => Object.defineProperty(target, name, {
  value, writable: true, configurable: true, enumerable: false,
});

Object.defineProperty(globalThis, '__coracle', {
  value: Object.freeze({
    check() {
      if (isMeant()) throw INTERRUPTED;
    },
    enter,
    load,
    module,
    meta: Object.freeze({
      get url() { return pathToFileURL(`${process.cwd()}/cell`).href; },
      get dirname() { return process.cwd(); },
      resolve: (specifier) => resolve(specifier),
    }),
  }),
});

// The helpers that the translation of TypeScript's decorators uses.
hidden(globalThis, 'babelHelpers', {
  decorate(decorators, target, key, descriptor) {
    const count = arguments.length;
    let result = count < 3 ? target : descriptor === null
      ? (descriptor = Object.getOwnPropertyDescriptor(target, key)) : descriptor;
    for (let i = decorators.length - 1; i >= 0; i -= 1) {
      const one = decorators[i];
      if (one) result = (count < 3 ? one(result) : count > 3 ? one(target, key, result) : one(target, key)) || result;
    }
    return count > 3 && result && Object.defineProperty(target, key, result), result;
  },
  decorateParam: (index, decorator) => (target, key) => decorator(target, key, index),
  decorateMetadata: () => undefined,
});
hidden(globalThis, 'display', display);
const cellRequire = createRequire(path.join(process.cwd(), 'cell.js'));
hidden(globalThis, 'require', cellRequire);
hidden(globalThis, 'module', { exports: {} });
hidden(globalThis, 'exports', globalThis.module.exports);
hidden(globalThis, '__dirname', process.cwd());
hidden(globalThis, '__filename', path.join(process.cwd(), 'cell.js'));

function refuseInput() {
  throw new Error('stdin is not available: code that runs here cannot ask for input');
}
const stdin = new stream.Readable({ read() {} });
for (const name of ['read', 'resume', 'pipe', 'setRawMode', Symbol.asyncIterator]) stdin[name] = refuseInput;
for (const name of ['on', 'once', 'addListener', 'prependListener']) {
  const usual = stdin[name];
  stdin[name] = function on(event, ...rest) {
    if (['data', 'readable', 'keypress'].includes(event)) refuseInput();
    return usual.call(this, event, ...rest);
  };
}
Object.assign(stdin, { fd: 0, isTTY: false });
Object.defineProperty(process, 'stdin', { value: stdin, configurable: true, enumerable: true });

// ---- running

let current = null;

// Some globals of node are read-only; a cell that declares one of these names means its own
// variable.
function makeAssignable(name) {
  const found = Object.getOwnPropertyDescriptor(globalThis, name);
  if (!found || !found.configurable || found.writable || found.set) return;
  Object.defineProperty(globalThis, name, {
    value: undefined, writable: true, configurable: true, enumerable: true,
  });
}

const ENTRANCE = new vm.Script('__coracle.enter()', { filename: '[eval]' });
const turned = () => new Promise((go) => setImmediate(go));

async function evaluate(order) {
  order.names.forEach(makeAssignable);
  entered = new vm.Script(order.code, { filename: order.name });
  let value;
  try {
    value = ENTRANCE.runInThisContext({ breakOnSigint: true, displayErrors: false });
  } finally {
    Atomics.store(state, PHASE, ELSEWHERE);
  }
  if (!order.waits) return value;
  const interrupted = new Promise((_, reject) => { order.interrupt = reject; });
  return Promise.race([value, interrupted]);
}

async function run(order) {
  const { key } = order;
  order.name = `cell[${order.count}]`;
  cells.set(order.name, { lines: order.source.split('\n'), positions: order.positions, types: order.types });
  cells.delete(`cell[${order.count - KEPT_CELLS}]`);
  order.typed = order.types.length > 0;
  Atomics.store(state, ACTIVE, order.count);
  current = order;
  try {
    const value = await evaluate(order);
    if (value !== undefined) tell(key, 'result', await describe(value));
  } catch (error) {
    // Code that the cell left behind may still be looping; it is stopped before the next turn.
    if (isInterrupt(error)) await turned();
    tell(key, 'error', failure(error));
  }
  current = null;
  Atomics.store(state, ACTIVE, order.count + 1);
  report(`done ${key}`);
}

let turn = Promise.resolve();
let pieces = [];

function take(line) {
  const order = parse(line);
  turn = turn.then(() => run(order));
}

process.on('uncaughtException', complain);
process.on('unhandledRejection', complain);
const input = new net.Socket({ fd: orders, readable: true, writable: false });
input.setEncoding('utf8');
input.on('data', (piece) => {
  const lines = piece.split('\n');
  pieces.push(lines[0]);
  for (const line of lines.slice(1)) {
    take(pieces.join(''));
    pieces = [line];
  }
});
input.on('end', () => process.exit(0));
input.on('error', () => process.exit(1));
report('ready');
listen();
})();
