"""Drives DeerFlow's own `AioSandboxProvider`, unmodified, against a server's provisioner.

    drive_provider.py CHECKOUT URL KEY [--state-root DIR]

CHECKOUT is a working tree of DeerFlow. It needs Python 3.12 or later and the packages of requirements.txt.
With --state-root, the server must mount user data of the operator below that directory (`deerflow.user_data = "host"`).
"""

import argparse
import importlib.util
import json
import logging
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback

import httpx

import provider_config
import ready_stub

CHECKS = []


class Skipped(Exception):
    """A check that cannot run here, with the reason."""


def check(function):
    """Registers a function that is called with the suite."""
    CHECKS.append(function)
    return function


class Suite:
    """A provider of DeerFlow, and the provisioner behind it."""

    def __init__(self, checkout, url, key, state, mounted):
        self.checkout, self.url, self.key, self.state, self.mounted = checkout, url, key, state, mounted
        self.api = httpx.Client(base_url=url, headers={"X-API-Key": key}, timeout=30, trust_env=False)

    def provider(self, idle_timeout=600, replicas=3):
        from deerflow.community.aio_sandbox import AioSandboxProvider

        mounted = "true" if self.mounted else "false"
        settings = {"idle_timeout": idle_timeout, "replicas": replicas, "thread_data_mounts": mounted}
        self.configure(provider_config.aio_config(self.url, self.key, **settings))
        return AioSandboxProvider()

    def configure(self, text):
        from deerflow.config.app_config import reload_app_config

        # Gateways in other processes share the directory.
        config = self.state / f"config-{os.getpid()}.yaml"
        config.write_text(text)
        os.environ["DEER_FLOW_CONFIG_PATH"] = str(config)
        reload_app_config(str(config))

    def listed(self):
        answer = self.api.get("/api/sandboxes")
        answer.raise_for_status()
        return {entry["sandbox_id"]: entry for entry in answer.json()["sandboxes"]}

    def kill_sandbox(self, sandbox):
        """Kills the first process of a sandbox, which runs on this host."""
        container = self.listed()[sandbox]["container_id"]
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                fields = (process / "status").read_text().split("\nNSpid:")[1].splitlines()[0].split()
                is_first = fields[1:2] == ["1"] and container in (process / "cgroup").read_text()
            except (OSError, IndexError):
                continue
            if is_first:
                os.kill(int(process.name), signal.SIGKILL)
                return
        raise Skipped("the sandbox has no process that can be seen from here")


def expect(condition, message):
    if not condition:
        raise AssertionError(message)


def until(happened, what):
    """Waits for something that has no notification."""
    end = time.monotonic() + 30
    while not happened():
        expect(time.monotonic() < end, f"timed out: {what}")
        time.sleep(0.05)


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


class Gateway:
    """A provider in a process of its own, which acquires one sandbox."""

    def __init__(self, suite, thread, user):
        command = [sys.executable, __file__, str(suite.checkout), suite.url, suite.key, "--gateway", thread, user]
        command += ["--state-root", str(suite.state)] if suite.mounted else []
        environment = {**os.environ, "DEER_FLOW_HOME": str(suite.state)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environment, **pipes)

    def ask(self, question=""):
        self.process.stdin.write(question + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        return self.process.wait(timeout=60)


def run_gateway(suite, thread, user):
    """The process of a gateway: it acquires when it is told to, runs the commands that it reads, and shuts down."""
    provider = suite.provider()
    sys.stdin.readline()
    name = provider.acquire(thread, user_id=user)
    print(json.dumps([name, provider.get(name).base_url]), flush=True)
    for line in sys.stdin:
        print(json.dumps(provider.get(name).execute_command(line.strip())), flush=True)
    provider.shutdown()


@check
def two_gateways_share_one_sandbox(suite):
    gateways = [Gateway(suite, "thread-5", "dan") for _ in range(2)]
    try:
        found, threads = [], []
        for gateway in gateways:
            threads.append(threading.Thread(target=lambda g=gateway: found.append(g.ask())))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        expect(len(found) == 2 and found[0] == found[1], f"one sandbox, one address: {found}")
        expect(list(suite.listed()) == [found[0][0]], "no other sandbox was made")
        expect(gateways[0].ask("echo one > /tmp/shared; echo $?") == "0", "the first gateway works")
        expect(gateways[1].ask("cat /tmp/shared") == "one", "in the same sandbox as the second")
    finally:
        codes = [gateway.close() for gateway in gateways]
    expect(codes == [0, 0], f"the gateways ended with {codes}")
    expect(not suite.listed(), "the gateways leave nothing")


@check
def a_sandbox_killed_in_mid_turn_is_restarted(suite):
    provider = suite.provider()
    try:
        name = provider.acquire("thread-8", user_id="gail")
        sandbox = provider.get(name)
        before = suite.listed()[name]["container_id"]
        expect(sandbox.execute_command("echo ready") == "ready", "it works")
        outputs = []
        turn = threading.Thread(target=lambda: outputs.append(sandbox.execute_command("touch /tmp/begun; sleep 120; echo end")))
        turn.start()
        url = sandbox.base_url
        until(lambda: httpx.post(f"{url}/v1/file/read", json={"file": "/tmp/begun"}).status_code == 200, "the command runs")
        suite.kill_sandbox(name)
        turn.join(timeout=30)
        expect(not turn.is_alive(), "the command of a dead sandbox hangs")
        expect(outputs and outputs[0].startswith("Error:"), f"the command of a dead sandbox did not fail: {outputs}")
        # The same turn goes on with the same client.
        until(lambda: sandbox.execute_command("echo back") == "back", "the client is served by a successor")
        expect(suite.listed()[name]["container_id"] != before, "it is another incarnation")
        provider.release(name)
        again = provider.acquire("thread-8", user_id="gail")
        expect(again == name and provider.get(again).execute_command("echo on") == "on", "the next turn works")
    finally:
        provider.shutdown()


@check
def idle_sandboxes_are_swept(suite):
    provider = suite.provider(idle_timeout=1)
    try:
        used = provider.acquire("thread-9-used", user_id="hal")
        idle = [provider.acquire(f"thread-9-{number}", user_id="hal") for number in range(2)]
        provider.release(idle[0])

        def swept():
            # The provider's own thread does this once a minute.
            provider.get(used)
            provider._cleanup_idle_resources(1)
            provider._reap_expired_warm(1)
            return not set(idle) & set(suite.listed())

        until(swept, "idle sandboxes are removed, released or not")
        expect(used in suite.listed(), "a sandbox in use stays")
        expect(provider.get(used).execute_command("echo on") == "on", "and works")
        again = provider.acquire("thread-9-0", user_id="hal")
        expect(provider.get(again).execute_command("echo new") == "new", "a swept sandbox is created again")
    finally:
        provider.shutdown()


@check
def closing_twice_is_the_same_as_once(suite):
    provider = suite.provider()
    try:
        name = provider.acquire("thread-10", user_id="ida")
        sandbox = provider.get(name)
        for _ in range(2):
            sandbox.close()
        for _ in range(2):
            provider.release(name)
            expect(name in suite.listed(), "a released sandbox stays")
        expect(provider.acquire("thread-10", user_id="ida") == name, "it is found again")
        expect(provider.get(name).execute_command("echo on") == "on", "and works")
        for _ in range(2):
            provider.destroy(name)
            expect(name not in suite.listed(), "a destroyed sandbox is gone")
        expect(provider.acquire("thread-10", user_id="ida") == name, "its id is free")
    finally:
        for _ in range(2):
            provider.shutdown()
            expect(not suite.listed(), "shutdown leaves nothing")


def load_benchmark(suite):
    """The benchmark of the checkout."""
    path = suite.checkout / "backend/scripts/benchmark/sandbox/bench_provider.py"
    if not path.exists():
        raise Skipped("the checkout has no benchmark")
    spec = importlib.util.spec_from_file_location("bench_provider", path)
    bench = importlib.util.module_from_spec(spec)
    sys.modules["bench_provider"] = bench
    spec.loader.exec_module(bench)
    return bench


def run_scenario(bench, suite, scenario, *more):
    """Runs one scenario, and returns its turns.

    The workload is `true`; others of the benchmark need a program `python` inside. One turn runs at a time: parallel ones
    may share a thread, and then the first release closes the client of the others.
    """

    def make_provider(config):
        provider = suite.provider(idle_timeout=config["idle_timeout"], replicas=config["replicas"])
        # One scenario prints the size of a map that only other providers have.
        provider._boxes = getattr(provider, "_boxes", provider._sandboxes)
        return provider, config

    bench.PROVIDER_FACTORIES["aio-docker"] = make_provider
    output = suite.state / f"bench-{scenario}.jsonl"
    output.unlink(missing_ok=True)
    arguments = ["--provider", "aio-docker", "--scenario", scenario, "--output", str(output), *more]
    with open(os.devnull, "w") as quiet:
        own, sys.stderr = sys.stderr, quiet
        try:
            code = bench.main(arguments)
        finally:
            sys.stderr = own
    turns = [json.loads(line) for line in output.read_text().splitlines() if not line.startswith("#")]
    expect(code == 0 and turns, f"{scenario} ended with {code} and {len(turns)} turns")
    failed = [turn["error"] for turn in turns if not turn["success"]]
    expect(not failed, f"{scenario}: {failed}")
    return turns


@check
def benchmark_scenarios_succeed(suite):
    bench = load_benchmark(suite)
    for scenario, more in {
        "warm_same_thread": ["--iterations", "5"],
        "cold_unique_thread": ["--iterations", "5"],
        "warm_miss_many_threads": ["--iterations", "8", "--replicas", "8"],
        "idle_timeout": ["--iterations", "1", "--idle-timeout", "1"],
        "replica_pressure": ["--iterations", "6", "--replicas", "2"],
    }.items():
        hits = [turn["warm_hit"] for turn in run_scenario(bench, suite, scenario, *more)]
        expected = {"warm_same_thread": [False, True, True, True, True], "cold_unique_thread": [False] * 5, "idle_timeout": [False] * 2}
        expect(hits == expected.get(scenario, hits), f"{scenario}: warm hits {hits}")
        expect(not suite.listed(), f"{scenario} leaves nothing")


@check
def time_of_a_new_thread_beside_a_stub_is_printed(suite):
    """Compares with what a new thread costs in DeerFlow itself. The bound is 1.5; a missed one is printed, not a failure."""
    bench = load_benchmark(suite)

    def median(measured):
        turns = run_scenario(bench, measured, "cold_unique_thread", "--iterations", "20")
        return statistics.median(turn["total_ms"] for turn in turns)

    with ready_stub.ReadyStub() as stub:
        alone = median(Suite(suite.checkout, stub.url, suite.key, suite.state, suite.mounted))
    ours = median(suite)
    verdict = "kept" if ours <= 1.5 * alone else "missed on this machine now"
    print(f"        new thread: {ours:.1f} ms, with a stub {alone:.1f} ms, {ours / alone:.2f} times (bound 1.50), {verdict}")


@check
def opensandbox_provider_works(suite):
    try:
        from deerflow.community.opensandbox.provider import OpenSandboxProvider
    except ImportError:
        raise Skipped("the checkout has no OpenSandbox provider") from None
    if importlib.util.find_spec("opensandbox") is None:
        raise Skipped("the package opensandbox is not installed")
    suite.configure(provider_config.opensandbox_config(suite.url.split("://")[1], suite.key))
    provider = OpenSandboxProvider()
    try:
        name = provider.acquire("thread-11", user_id="jan")
        sandbox = provider.get(name)
        expect(sandbox.execute_command("echo hello").strip() == "hello", "output")
        sandbox.write_file("/mnt/user-data/workspace/a.txt", "one\n")
        sandbox.write_file("/mnt/user-data/workspace/a.txt", "two\n", append=True)
        expect(sandbox.read_file("/mnt/user-data/workspace/a.txt") == "one\ntwo\n", "files")
        provider.release(name)
        expect(provider.acquire("thread-11", user_id="jan") == name, "warm reclaim")
    finally:
        provider.shutdown()


@check
def replicas_are_limited(suite):
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
    parser.add_argument("--gateway", nargs=2, metavar=("THREAD", "USER"), help="be one of several gateways; checks use this")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    for package in ("packages/harness", "packages/extension-api"):
        sys.path.insert(0, str(given.checkout.absolute() / "backend" / package))
    if given.gateway:
        state = pathlib.Path(os.environ["DEER_FLOW_HOME"])
        return run_gateway(Suite(given.checkout, given.url, given.key, state, given.state_root is not None), *given.gateway)
    failed = skipped = 0
    with tempfile.TemporaryDirectory() as scratch:
        state = given.state_root or pathlib.Path(scratch)
        os.environ["DEER_FLOW_HOME"] = str(state)
        suite = Suite(given.checkout, given.url, given.key, state, given.state_root is not None)
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
