"use strict";
// A plain terminal: lines of text, no colours and no cursor movement except within the last line.
const screen = document.getElementById("screen");
const MAX_LINES = 5000;
let lines = [""], column = 0, partial = "", socket;
function write(text) {
  text = partial + text;
  partial = "";
  // An escape sequence may continue in the next message.
  const tail = text.match(/\x1b(?:\[[0-?]*[ -\/]*|\][^\x07\x1b]*|[ -\/]*)?$/);
  if (tail && tail[0].length < 4096) {
    partial = tail[0];
    text = text.slice(0, tail.index);
  }
  const pattern = /\x1b\[([0-?]*)[ -\/]*([@-~])|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[ -\/]*[0-~]|[\x00-\x1f\x7f]|[^\x00-\x1f\x7f]+/g;
  for (const found of text.matchAll(pattern)) control(found[0], found[1], found[2]);
  if (lines.length > MAX_LINES) lines = lines.slice(-MAX_LINES);
  screen.textContent = lines.join("\n");
  window.scrollTo(0, document.body.scrollHeight);
}
function control(text, parameters, final) {
  const last = lines.length - 1, line = lines[last], count = parseInt(parameters, 10) || 0;
  if (text === "\n") { lines.push(" ".repeat(column)); }
  else if (text === "\r") column = 0;
  else if (text === "\b") column = Math.max(0, column - 1);
  else if (text === "\t") put(" ".repeat(8 - column % 8));
  else if (final === "K") {
    if (count === 0) lines[last] = line.slice(0, column);
    else if (count === 1) lines[last] = " ".repeat(column) + line.slice(column);
    else lines[last] = "";
  }
  else if (final === "J" && count >= 2) { lines = [""]; column = 0; }
  else if (final === "C") column = Math.min(9999, column + Math.max(1, count));
  else if (final === "D") column = Math.max(0, column - Math.max(1, count));
  else if (final === "G") column = Math.min(9999, Math.max(0, count - 1));
  else if (final === "P") lines[last] = line.slice(0, column) + line.slice(column + Math.max(1, count));
  else if (final === "@") lines[last] = line.slice(0, column) + " ".repeat(Math.min(999, Math.max(1, count))) + line.slice(column);
  else if (text >= " ") put(text);
}
function put(text) {
  if (text.charCodeAt(0) === 27) return;
  const last = lines.length - 1, line = lines[last].padEnd(Math.min(column, 9999));
  lines[last] = line.slice(0, column) + text + line.slice(column + text.length);
  column += text.length;
}
function send(message) {
  if (socket && socket.readyState === WebSocket.OPEN) socket.send(JSON.stringify(message));
}
function type(data) { send({ type: "input", data }); }
function resize() {
  const probe = document.createElement("span");
  probe.textContent = "x".repeat(100);
  screen.append(probe);
  const { width, height } = probe.getBoundingClientRect();
  probe.remove();
  const cols = Math.max(20, Math.floor((screen.clientWidth - 20) / (width / 100)));
  send({ type: "resize", data: { cols, rows: Math.max(5, Math.floor(window.innerHeight / height)) } });
}
function connect() {
  const address = new URL(location.href);
  address.protocol = address.protocol === "https:" ? "wss:" : "ws:";
  address.pathname = address.pathname.replace(/\/terminal\/?$/, "/v1/shell/ws");
  address.hash = "";
  // The ticket with which this page was opened is used up.
  const ticket = document.querySelector("meta[name=ticket]");
  if (ticket) {
    address.searchParams.delete("api_key");
    address.searchParams.set("ticket", ticket.content);
  }
  socket = new WebSocket(address);
  socket.onmessage = (event) => {
    const message = JSON.parse(event.data);
    if (message.type === "session_id") {
      const page = new URL(location.href);
      page.searchParams.set("session_id", message.data);
      history.replaceState(null, "", page);
    } else if (message.type === "restore_output") { lines = [""]; column = 0; partial = ""; write(message.data); }
    else if (message.type === "output") write(message.data);
    else if (message.type === "error") write("\r\n[" + message.data + "]\r\n");
    else if (message.type === "ping") send({ type: "pong", timestamp: message.timestamp });
    else if (message.type === "ready" || message.type === "terminal_restored") resize();
  };
  socket.onclose = () => write("\r\n[disconnected; reload the page to connect again]\r\n");
}
const KEYS = {
  Enter: "\r", Backspace: "\x7f", Tab: "\t", Escape: "\x1b", Delete: "\x1b[3~", Home: "\x1b[H", End: "\x1b[F",
  ArrowUp: "\x1b[A", ArrowDown: "\x1b[B", ArrowRight: "\x1b[C", ArrowLeft: "\x1b[D",
};
document.addEventListener("keydown", (event) => {
  if (event.metaKey || event.isComposing) return;
  let data = KEYS[event.key];
  if (event.ctrlKey && !event.altKey && /^[a-z@\[\\\]^_]$/i.test(event.key)) {
    if (/^[cv]$/i.test(event.key) && (event.shiftKey || (event.key === "c" && String(getSelection())))) return;
    if (event.key === "v") return;
    data = String.fromCharCode(event.key.toUpperCase().charCodeAt(0) & 31);
  } else if (data === undefined && event.key.length === 1 && !event.ctrlKey) {
    data = (event.altKey ? "\x1b" : "") + event.key;
  }
  if (data !== undefined) { event.preventDefault(); type(data); }
});
document.addEventListener("paste", (event) => type(event.clipboardData.getData("text").replace(/\r?\n/g, "\r")));
window.addEventListener("resize", resize);
connect();
