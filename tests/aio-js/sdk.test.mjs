// The JavaScript SDK of AIO Sandbox, unmodified, against a sandbox of the provisioner. `cargo xtask aio-js CHECKOUT` builds
// the SDK from a checkout of its repository and runs this. Numbers are those of the contract.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";

const { SandboxClient } = await import(process.env.AIO_SDK);

const server = process.env.CORACLE_URL;
const headers = { "X-API-Key": process.env.CORACLE_API_KEY, "Content-Type": "application/json" };
const id = `js-${process.pid}`;

let client;

before(async () => {
  const body = JSON.stringify({ sandbox_id: id });
  const made = await fetch(new URL("/api/sandboxes", server), { method: "POST", headers, body });
  assert.equal(made.status, 200, await made.clone().text());
  const { sandbox_url: environment } = await made.json();
  client = new SandboxClient({ environment, maxRetries: 0 });
});

after(async () => {
  const removed = await fetch(new URL(`/api/sandboxes/${id}`, server), { method: "DELETE", headers });
  assert.equal(removed.status, 200);
});

/** The `data` of a call that succeeds. */
const data = async (call) => {
  const response = await call;
  assert.ok(response.ok, JSON.stringify(response.error));
  assert.equal(response.body.success, true, JSON.stringify(response.body));
  return response.body.data;
};

/** The status of a call that fails. */
const refusal = async (call) => {
  const response = await call;
  assert.equal(response.ok, false, "the call succeeded");
  return response.rawResponse.status;
};

test("J1: context and packages", async () => {
  const context = await client.sandbox.getContext();
  assert.ok(context.ok);
  assert.equal(context.body.home_dir, "/home/gem");
  await data(client.sandbox.getPythonPackages());
});

test("J2, J3: outputs are exact and never mixed", async () => {
  const done = await data(client.shell.execCommand({ command: "echo hi; exit 3" }));
  assert.deepEqual([done.status, done.output, done.exit_code], ["completed", "hi", 3]);
  const numbers = [...Array(50).keys()];
  const run = (number) => data(client.shell.execCommand({ command: `echo a ${number}; sleep 0.02; echo b ${number}` }));
  const outputs = (await Promise.all(numbers.map(run))).map(({ output }) => output);
  assert.deepEqual(outputs, numbers.map((number) => `a ${number}\nb ${number}`));
});

test("J4, J5: sessions", async () => {
  assert.equal(await refusal(client.shell.execCommand({ command: "true", id: "none" })), 404);
  const { session_id } = await data(client.shell.createSession({ id: "the session", exec_dir: "/tmp" }));
  assert.equal(session_id, "the session");
  await data(client.shell.execCommand({ command: "cd /usr; export A=1", id: session_id }));
  const done = await data(client.shell.execCommand({ command: "pwd; echo $A", id: session_id }));
  assert.equal(done.output, "/usr\n1");
  assert.ok(session_id in (await data(client.shell.listSessions())).sessions);
  assert.ok((await data(client.shell.getSessionStats())).total_sessions > 0);
  await data(client.shell.updateSession({ id: session_id, no_change_timeout: 9 }));
  await data(client.shell.cleanupSession(session_id));
  assert.equal((await client.shell.cleanupSession(session_id)).body.success, false);
});

test("J6, J7, J8: limits, input and kill", async () => {
  const quiet = await data(client.shell.execCommand({ command: "read x; echo got $x", no_change_timeout: 1 }));
  assert.equal(quiet.status, "no_change_timeout");
  const session = { id: quiet.session_id };
  await data(client.shell.writeToProcess({ ...session, input: "this", press_enter: true }));
  assert.equal((await data(client.shell.waitForProcess({ ...session, seconds: 10 }))).status, "completed");
  assert.match((await data(client.shell.view(session))).output, /got this/);
  const hard = await data(client.shell.execCommand({ command: "sleep 60", hard_timeout: 1 }));
  assert.equal(hard.status, "hard_timeout");
  await data(client.shell.execCommand({ command: "sleep 60", ...session, async_mode: true }));
  await data(client.shell.killProcess(session));
  assert.equal(await refusal(client.shell.view(session)), 404);
  assert.match(await data(client.shell.getTerminalUrl()), /\/terminal\?session_id=/);
  await data(client.shell.cleanupAllSessions());
});

test("J11, J12: bash", async () => {
  const { session_id } = await data(client.bash.createSession({ session_id: "b" }));
  const command = "echo $A; echo err >&2";
  const ran = await data(client.bash.exec({ session_id, command, env: { A: "b c" } }));
  assert.deepEqual([ran.stdout, ran.stderr, ran.exit_code], ["b c\n", "err\n", 0]);
  assert.equal((await data(client.bash.exec({ session_id, command: "echo [$A]" }))).stdout, "[]\n");
  assert.equal(await refusal(client.bash.exec({ session_id, command, env: { "A-B": "x" } })), 400);
  const started = await data(client.bash.exec({ session_id, command: "cat", async_mode: true }));
  const reference = { session_id, command_id: started.command_id };
  await data(client.bash.write({ ...reference, input: "typed\n" }));
  const read = await data(client.bash.output({ ...reference, offset: 0, wait: true, wait_timeout: 10 }));
  assert.equal(read.stdout, "typed\n");
  await data(client.bash.kill({ session_id, signal: "SIGINT" }));
  await data(client.bash.sessions());
  await data(client.bash.closeSession(session_id));
});

test("J10, J13, J14: files keep their bytes", async () => {
  const file = "/home/gem/ordner/Tïtel 标题 🚣.txt";
  const content = "a\r\nb 标题 🚣";
  await data(client.file.writeFile({ file, content }));
  await data(client.file.writeFile({ file, content: "\nc", append: true }));
  assert.equal((await data(client.file.readFile({ file }))).content, `${content}\nc`);
  assert.equal((await data(client.file.readFile({ file, start_line: 2, end_line: 3 }))).content.trim(), "c");
  await data(client.file.replaceInFile({ file, old_str: "c", new_str: "d" }));
  assert.equal(await refusal(client.file.readFile({ file: "/home/gem/missing" })), 404);
});

test("J15: find, search, grep, glob and list", async () => {
  await data(client.file.writeFile({ file: "/home/gem/tree/deep/x.py", content: "one\ntwo\n" }));
  const found = await data(client.file.findFiles({ path: "/home/gem/tree", glob: "**/*.py" }));
  assert.deepEqual(found.files, ["/home/gem/tree/deep/x.py"]);
  const searched = await data(client.file.searchInFile({ file: "/home/gem/tree/deep/x.py", regex: "tw." }));
  assert.deepEqual(searched.matches, ["two"]);
  const grepped = await data(client.file.grepFiles({ path: "/home/gem/tree", pattern: "two" }));
  assert.equal(grepped.matches[0].line_number, 2);
  assert.equal((await data(client.file.globFiles({ path: "/home/gem/tree", pattern: "**/*.py" }))).files.length, 1);
  assert.equal((await data(client.file.listPath({ path: "/home/gem/tree", recursive: true }))).files.length, 2);
});

test("J16: upload and download", async () => {
  const bytes = new Uint8Array(3 << 20).map((_, index) => index * 7);
  await data(client.file.uploadFile({ file: new Blob([bytes]), path: "/home/gem/blob" }));
  const downloaded = await client.file.downloadFile({ path: "/home/gem/blob" });
  assert.ok(downloaded.ok);
  assert.deepEqual(new Uint8Array(await downloaded.body.arrayBuffer()), bytes);
  assert.equal(await refusal(client.file.downloadFile({ path: "/home/gem/missing" })), 404);
});

test("J17: editor", async () => {
  const path = "/home/gem/edited";
  await data(client.file.strReplaceEditor({ command: "create", path, file_text: "a\nb\n" }));
  await data(client.file.strReplaceEditor({ command: "str_replace", path, old_str: "b", new_str: "c" }));
  await data(client.file.strReplaceEditor({ command: "undo_edit", path }));
  assert.equal((await data(client.file.readFile({ file: path }))).content, "a\nb\n");
});

test("watches", async () => {
  const { watcher_id } = await data(client.file.watchCreate({ path: "/home/gem" }));
  await data(client.file.writeFile({ file: "/home/gem/seen", content: "x" }));
  const { events } = await data(client.file.watchPoll(watcher_id, { timeout: 5 }));
  assert.ok(events.some((event) => event.path.endsWith("/seen")), JSON.stringify(events));
  await data(client.file.watchList());
  await data(client.file.watchStop(watcher_id));
});

test("J18, J19: code", async () => {
  const first = await data(client.jupyter.executeCode({ code: "x = 20", session_id: "k" }));
  assert.equal(first.status, "ok");
  const second = await data(client.jupyter.executeCode({ code: "x + 1", session_id: "k" }));
  assert.match(JSON.stringify(second.outputs), /21/);
  await data(client.jupyter.getInfo());
  await data(client.jupyter.listSessions());
  await data(client.jupyter.deleteSession("k"));
  const node = await data(client.nodejs.executeCode({ code: "console.log(6 * 7)" }));
  assert.match(JSON.stringify(node), /42/);
  const python = await data(client.code.executeCode({ language: "python", code: "3 * 5" }));
  assert.match(JSON.stringify(python.outputs), /15/);
  await data(client.code.getInfo());
});

test("J20, J21: bad requests and what is not offered", async () => {
  assert.equal(await refusal(client.shell.execCommand({})), 422);
  assert.equal(await refusal(client.shell.execCommand({ command: 7 })), 422);
  assert.equal(await refusal(client.browser.getInfo()), 501);
});
