// The npm package of the reference, unmodified: its calls and its reading of our responses.

import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";

import {
  ConnectionConfig,
  Sandbox,
  SandboxApiException,
  SandboxManager,
} from "@alibaba-group/opensandbox";

const url = new URL(process.env.CORACLE_URL);
const key = process.env.CORACLE_API_KEY;

const config = (useServerProxy) =>
  new ConnectionConfig({ domain: url.host, protocol: "http", apiKey: key, requestTimeoutSeconds: 60, useServerProxy });

const lines = (messages) => messages.map((message) => message.text).join("");

for (const useServerProxy of [false, true]) {
  describe(useServerProxy ? "server proxy" : "direct", () => {
    let sandbox;

    before(async () => {
      const request = { image: "python:3.12", timeoutSeconds: 600, env: { WORD: "given" }, metadata: { "made-by": "npm" } };
      sandbox = await Sandbox.create({ connectionConfig: config(useServerProxy), ...request });
    });

    after(async () => {
      await sandbox.kill();
      await assert.rejects(sandbox.getInfo(), SandboxApiException);
      await sandbox.close();
    });

    test("info, health, metrics and renewal", async () => {
      const info = await sandbox.getInfo();
      assert.equal(info.id, sandbox.id);
      assert.equal(info.status.state, "Running");
      assert.equal(info.metadata["made-by"], "npm");
      assert.equal(await sandbox.isHealthy(), true);
      const used = await sandbox.getMetrics();
      assert.ok(used.cpuCount > 0 && used.memoryTotalMiB >= used.memoryUsedMiB);
      const renewed = await sandbox.renew(1800);
      assert.ok(new Date(renewed.expiresAt) > new Date(info.expiresAt));
    });

    test("metadata is merged", async () => {
      const patched = await sandbox.patchMetadata({ more: "yes", "made-by": null });
      assert.deepEqual(patched.metadata, { more: "yes" });
    });

    test("a command's output, code and environment", async () => {
      const ran = await sandbox.commands.run("echo $WORD $MORE; echo wrong >&2", { envs: { MORE: "too" } });
      assert.equal(lines(ran.logs.stdout), "given too\n");
      assert.equal(lines(ran.logs.stderr), "wrong\n");
      assert.equal(ran.exitCode, 0);
      assert.ok(ran.complete && !ran.error);
      const failed = await sandbox.commands.run("exit 7");
      assert.equal(failed.exitCode, 7);
      assert.equal(failed.error.name, "CommandExecError");
    });

    test("output arrives while a command runs", async () => {
      const seen = [];
      for await (const event of sandbox.commands.runStream("echo one; sleep 600 & echo two")) {
        seen.push(event.type);
      }
      assert.equal(seen[0], "init");
      assert.equal(seen.at(-1), "execution_complete");
      assert.equal(seen.filter((type) => type === "stdout").length, 2);
    });

    test("background command", async () => {
      const started = await sandbox.commands.run("echo begun; sleep 600", { background: true });
      assert.equal((await sandbox.commands.getCommandStatus(started.id)).running, true);
      const printed = async () => (await sandbox.commands.getBackgroundCommandLogs(started.id, 0)).content;
      while ((await printed()) !== "begun\n");
      await sandbox.commands.interrupt(started.id);
      assert.equal((await sandbox.commands.getCommandStatus(started.id)).running, false);
      assert.equal(await printed(), "begun\n");
    });

    test("a session keeps its state", async () => {
      const session = await sandbox.commands.createSession({ workingDirectory: "/tmp" });
      await sandbox.commands.runInSession(session, "export KEPT=here");
      const ran = await sandbox.commands.runInSession(session, "echo $KEPT $PWD");
      assert.equal(lines(ran.logs.stdout), "here /tmp\n");
      await sandbox.commands.deleteSession(session);
      await assert.rejects(sandbox.commands.runInSession(session, "true"));
    });

    test("files", async () => {
      const { files } = sandbox;
      await files.createDirectories([{ path: "/data/deep", mode: 755 }]);
      await files.writeFiles([
        { path: "/data/deep/a b.txt", data: "one two two", mode: 640 },
        { path: "/data/deep/bytes", data: new Uint8Array([0, 255, 128]) },
      ]);
      assert.equal(await files.readFile("/data/deep/a b.txt"), "one two two");
      assert.deepEqual([...(await files.readBytes("/data/deep/bytes"))], [0, 255, 128]);
      assert.equal(await files.readFile("/data/deep/a b.txt", { range: "bytes=4-6" }), "two");
      assert.equal((await files.getFileInfo(["/data/deep/a b.txt"]))["/data/deep/a b.txt"].mode, 640);
      const replaced = await files.replaceContentsDetailed([
        { path: "/data/deep/a b.txt", oldContent: "two", newContent: "2" },
      ]);
      assert.equal(replaced[0].replacedCount, 2);
      await files.moveFiles([{ src: "/data/deep/a b.txt", dest: "/data/new/c.txt" }]);
      await files.setPermissions([{ path: "/data/new/c.txt", mode: 600 }]);
      const found = await files.search({ path: "/data", pattern: "*.txt" });
      assert.deepEqual(found.map((file) => file.path), ["/data/new/c.txt"]);
      assert.equal((await files.listDirectory({ path: "/data", depth: 2 })).length, 4);
      // A URL that is too long is refused with a message; the client takes an error without a body for success.
      const many = Array.from({ length: 1200 }, (_, n) => `/data/${"x".repeat(80)}-${n}`);
      await assert.rejects(files.deleteFiles(many), (error) => error.statusCode === 414);
      await files.deleteFiles(["/data/new/c.txt"]);
      await files.deleteDirectories(["/data"]);
      await assert.rejects(files.getFileInfo(["/data"]), (error) => error.statusCode === 404);
    });

    test("pause and resume", async () => {
      await sandbox.pause();
      assert.equal((await sandbox.getInfo()).status.state, "Paused");
      sandbox = await sandbox.resume();
      assert.equal((await sandbox.commands.run("true")).exitCode, 0);
    });

    test("endpoints and network policy", async () => {
      assert.match((await sandbox.getEndpoint(8080)).endpoint, new RegExp(`/sandboxes/${sandbox.id}/proxy/8080$`));
      assert.match(await sandbox.getEndpointUrl(8080), /^http:\/\//);
      assert.equal((await sandbox.getEgressPolicy()).defaultAction, "deny");
      await sandbox.patchEgressRules([{ action: "allow", target: "example.org" }]);
      assert.deepEqual((await sandbox.getEgressPolicy()).egress, [{ action: "allow", target: "example.org" }]);
      await assert.rejects(sandbox.patchEgressRules([{ action: "allow", target: "not a name" }]));
    });
  });
}

test("a manager lists sandboxes and manages snapshots", async () => {
  const connectionConfig = config(false);
  const manager = SandboxManager.create({ connectionConfig });
  const mark = `n${Date.now()}`;
  const sandbox = await Sandbox.create({ connectionConfig, image: "python:3.12", metadata: { mark } });
  try {
    const listed = await manager.listSandboxInfos({ metadata: { mark }, pageSize: 10 });
    assert.deepEqual(listed.items.map((item) => item.id), [sandbox.id]);
    await sandbox.commands.run("echo kept > /root/kept");
    let snapshot = await manager.createSnapshot(sandbox.id, { name: mark });
    while (snapshot.status.state === "Creating") {
      snapshot = await manager.getSnapshot(snapshot.id);
    }
    assert.equal((await manager.listSnapshots({ sandboxId: sandbox.id })).items.length, 1);
    const restored = await Sandbox.create({ connectionConfig, snapshotId: snapshot.id });
    assert.equal(await restored.files.readFile("/root/kept"), "kept\n");
    await manager.killSandbox(restored.id);
    await manager.deleteSnapshot(snapshot.id);
  } finally {
    await manager.killSandbox(sandbox.id);
    await manager.close();
  }
});

test("a wrong key raises an API exception", { skip: key ? false : "the server needs no key" }, async () => {
  const wrong = new ConnectionConfig({ domain: url.host, protocol: "http", apiKey: "wrong" });
  const refused = Sandbox.create({ connectionConfig: wrong, image: "python:3.12" });
  await assert.rejects(refused, (error) => error instanceof SandboxApiException && error.statusCode === 401);
});
