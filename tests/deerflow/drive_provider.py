"""Drives DeerFlow's own `AioSandboxProvider`, unmodified, against a server's provisioner.

    drive_provider.py CHECKOUT URL KEY [--state-root DIR]

CHECKOUT is a working tree of DeerFlow. It needs Python 3.12 or later and the packages of requirements.txt.
With --state-root, the server must mount user data of the operator below that directory (`deerflow.user_data = "host"`).
"""

import argparse
import logging
import os
import pathlib
import sys
import tempfile
import threading
import traceback

import httpx

CONFIG = """
models:
  - {{name: dummy, use: "langchain_openai:ChatOpenAI", model: dummy, api_key: x}}
sandbox:
  use: deerflow.community.aio_sandbox:AioSandboxProvider
  provisioner_url: {url}
  provisioner_api_key: {key}
  idle_timeout: {idle_timeout}
  replicas: {replicas}
  thread_data_mounts: {mounted}
"""

CHECKS = []


class Skipped(Exception):
    """A check that cannot run here, with the reason."""


def check(function):
    """Registers a function that is called with the suite."""
    CHECKS.append(function)
    return function


class Suite:
    """A provider of DeerFlow, and the provisioner behind it."""

    def __init__(self, url, key, state, mounted):
        self.url, self.key, self.state, self.mounted = url, key, state, mounted
        self.api = httpx.Client(base_url=url, headers={"X-API-Key": key}, timeout=30, trust_env=False)

    def provider(self, idle_timeout=600, replicas=3):
        from deerflow.community.aio_sandbox import AioSandboxProvider
        from deerflow.config.app_config import reload_app_config

        config = self.state / "config.yaml"
        mounted = "true" if self.mounted else "false"
        config.write_text(
            CONFIG.format(url=self.url, key=self.key, idle_timeout=idle_timeout, replicas=replicas, mounted=mounted)
        )
        os.environ["DEER_FLOW_CONFIG_PATH"] = str(config)
        reload_app_config(str(config))
        return AioSandboxProvider()

    def listed(self):
        answer = self.api.get("/api/sandboxes")
        answer.raise_for_status()
        return {entry["sandbox_id"]: entry for entry in answer.json()["sandboxes"]}


def expect(condition, message):
    if not condition:
        raise AssertionError(message)


def refuses(kind, call, *words):
    try:
        call()
    except kind as error:
        expect(all(word in str(error) for word in words), f"unexpected text of {error!r}")
    else:
        raise AssertionError(f"the call did not raise {kind.__name__}")


@check
def commands_run_and_keep_their_output(suite):
    provider = suite.provider()
    try:
        sandbox = provider.get(provider.acquire("thread-1", user_id="alice"))
        expect(sandbox.execute_command("echo hello") == "hello", "output")
        expect(sandbox.execute_command("true") == "(no output)", "no output")
        expect("not found" in sandbox.execute_command("no-such-program"), "standard error is part of the output")
        expect(sandbox.execute_command("cd /mnt/user-data/workspace; pwd") == "/mnt/user-data/workspace", "workspace")
        text = sandbox.execute_command("echo out; echo err >&2; echo $A", env={"A": "b c"})
        expect(text == "out\nb c\n\nStd Error:\nerr\n" or text == "out\nb c\nStd Error:\nerr", f"env: {text!r}")
        expect(sandbox.execute_command("echo [$A]") == "[]", "variables of one command do not stay")
        long = sandbox.execute_command("head -c 5000 /dev/zero | tr '\\0' x")
        expect(long == "x" * 5000, "a long line is not wrapped")
        results, threads = {}, []
        for number in range(8):
            command = f"sleep 0.1; echo {number}"
            threads.append(threading.Thread(target=lambda n=number, c=command: results.update({n: sandbox.execute_command(c)})))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        expect(results == {number: str(number) for number in range(8)}, f"mixed outputs: {results}")
    finally:
        provider.shutdown()


@check
def files_are_written_read_and_found(suite):
    provider = suite.provider()
    try:
        sandbox = provider.get(provider.acquire("thread-2", user_id="alice"))
        base = "/mnt/user-data/workspace"
        sandbox.write_file(f"{base}/notes/a.txt", "one\r\ntwo\nthree")
        expect(sandbox.read_file(f"{base}/notes/a.txt") == "one\r\ntwo\nthree", "bytes are kept")
        expect(sandbox.read_file(f"{base}/notes/a.txt", 2, 3) == "two\nthree", "range")
        sandbox.write_file(f"{base}/notes/a.txt", "\nfour", append=True)
        expect(sandbox.read_file(f"{base}/notes/a.txt").endswith("three\nfour"), "append")
        expect(sandbox.read_file(f"{base}/missing").startswith("Error:"), "a missing file is an error")
        sandbox.write_file("/mnt/user-data/workspace/文件 ü.md", "字 🙂")
        expect(sandbox.read_file("/mnt/user-data/workspace/文件 ü.md") == "字 🙂", "any text")
        binary = bytes(range(256)) * 1000
        sandbox.update_file("/mnt/user-data/uploads/data.bin", binary)
        expect(sandbox.download_file("/mnt/user-data/uploads/data.bin") == binary, "binary")
        sandbox.update_file("/mnt/user-data/uploads/empty", b"")
        expect(sandbox.download_file("/mnt/user-data/uploads/empty") == b"", "empty")
        refuses(PermissionError, lambda: sandbox.download_file("/etc/passwd"), "must be under")
        refuses(PermissionError, lambda: sandbox.download_file("/mnt/user-data/../etc/passwd"), "traversal")
        refuses(OSError, lambda: sandbox.download_file("/mnt/user-data/missing"))
        sandbox.execute_command(f"truncate -s 105906176 {base}/large")
        refuses(OSError, lambda: sandbox.download_file(f"{base}/large"))
        refuses(Exception, lambda: sandbox.write_file("/proc/version", "x"))
        listed = sandbox.list_dir(base)
        expect(f"{base}/notes/a.txt" in listed and f"{base}/notes" in listed, f"list: {listed}")
        sandbox.write_file(f"{base}/src/main.py", "import os\nprint('Needle')\n")
        found, truncated = sandbox.glob(base, "**/*.py")
        expect(found == [f"{base}/src/main.py"] and not truncated, f"glob: {found}")
        found, _ = sandbox.glob(base, "**", include_dirs=True)
        expect(f"{base}/src" in found, f"glob with directories: {found}")
        matches, truncated = sandbox.grep(base, "needle")
        expect([(m.path, m.line_number) for m in matches] == [(f"{base}/src/main.py", 2)], f"grep: {matches}")
        matches, _ = sandbox.grep(f"{base}/src/main.py", "(?<=print\\(')Need", case_sensitive=True)
        expect(len(matches) == 1, f"grep with look-behind in one file: {matches}")
        matches, _ = sandbox.grep(base, "print(", literal=True, glob="**/*.py")
        expect(len(matches) == 1, f"grep for a literal: {matches}")
    finally:
        provider.shutdown()


@check
def a_released_sandbox_is_found_again(suite):
    provider = suite.provider()
    try:
        first = provider.acquire("thread-3", user_id="bob")
        url = provider.get(first).base_url
        provider.get(first).write_file("/mnt/user-data/workspace/kept", "yes")
        provider.release(first)
        second = provider.acquire("thread-3", user_id="bob")
        expect((first, url) == (second, provider.get(second).base_url), "the same sandbox")
        expect(provider.get(second).read_file("/mnt/user-data/workspace/kept") == "yes", "with its files")
        other = provider.acquire("thread-3", user_id="carol")
        expect(other != second, "each user has an own sandbox")
        expect(provider.get(other).read_file("/mnt/user-data/workspace/kept").startswith("Error"), "and own files")
    finally:
        provider.shutdown()
    expect(first not in suite.listed() and other not in suite.listed(), "shutdown leaves nothing")


@check
def a_deleted_sandbox_is_created_again(suite):
    provider = suite.provider()
    try:
        one = provider.acquire("thread-4", user_id="bob")
        before = suite.listed()[one]["container_id"]
        answer = suite.api.request("POST", "/api/sandboxes", json={"sandbox_id": one, "user_id": "bob", "thread_id": "thread-4"})
        expect(answer.json()["container_id"] == before, "a create finds the sandbox")
        suite.api.delete(f"/api/sandboxes/{one}").raise_for_status()
        provider.release(one)
        again = provider.acquire("thread-4", user_id="bob")
        expect(again == one, "the id stays")
        expect(suite.listed()[one]["container_id"] != before, "it is another incarnation")
        expect(provider.get(again).execute_command("echo back") == "back", "it works")
    finally:
        provider.shutdown()


@check
def two_gateways_share_one_sandbox(suite):
    one, two = suite.provider(), suite.provider()
    try:
        ids, threads = [], []
        for provider in (one, two):
            threads.append(threading.Thread(target=lambda p=provider: ids.append((p.acquire("thread-5", user_id="dan"), p))))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (first, p1), (second, p2) = ids
        expect(first == second and p1.get(first).base_url == p2.get(second).base_url, "one sandbox, one address")
    finally:
        one.shutdown()
        two.shutdown()


@check
def replicas_are_limited_and_idle_ones_removed(suite):
    provider = suite.provider(replicas=2)
    try:
        ids = []
        for number in range(4):
            ids.append(provider.acquire(f"thread-6-{number}", user_id="erin"))
            provider.release(ids[-1])
        alive = set(suite.listed()) & set(ids)
        expect(len(alive) <= 2, f"{len(alive)} sandboxes although two replicas are allowed")
    finally:
        provider.shutdown()
    expect(not set(suite.listed()) & set(ids), "shutdown leaves nothing")


@check
def user_data_is_shared_with_the_gateway(suite):
    if not suite.mounted:
        raise Skipped("--state-root is not given")
    provider = suite.provider()
    try:
        sandbox = provider.get(provider.acquire("thread-7", user_id="frank"))
        outside = suite.state / "users/frank/threads/thread-7/user-data"
        sandbox.write_file("/mnt/user-data/outputs/from-inside", "inside")
        expect((outside / "outputs/from-inside").read_text() == "inside", "the gateway reads")
        (outside / "uploads/from-outside").write_text("outside")
        expect(sandbox.read_file("/mnt/user-data/uploads/from-outside") == "outside", "the sandbox reads")
        removed = sandbox.execute_command("rm /mnt/user-data/uploads/from-outside && echo gone")
        expect(removed == "gone", f"the sandbox deletes: {removed}")
        (outside / "outputs/from-inside").unlink()
    finally:
        provider.shutdown()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=pathlib.Path)
    parser.add_argument("url")
    parser.add_argument("key")
    parser.add_argument("--state-root", type=pathlib.Path)
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    for package in ("packages/harness", "packages/extension-api"):
        sys.path.insert(0, str(given.checkout.absolute() / "backend" / package))
    failed = skipped = 0
    with tempfile.TemporaryDirectory() as scratch:
        state = given.state_root or pathlib.Path(scratch)
        os.environ["DEER_FLOW_HOME"] = str(state)
        suite = Suite(given.url, given.key, state, given.state_root is not None)
        for function in CHECKS:
            try:
                function(suite)
                print(f"ok      {function.__name__}")
            except Skipped as reason:
                skipped += 1
                print(f"SKIPPED {function.__name__}: {reason}")
            except Exception:
                failed += 1
                print(f"FAILED  {function.__name__}\n{traceback.format_exc()}")
    print(f"{len(CHECKS) - failed - skipped} passed, {failed} failed, {skipped} skipped")
    sys.exit(1 if failed else 0)


main()
