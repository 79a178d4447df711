"""Measures the cost of a command through the Python SDK, beside the same SDK against a server that does nothing.

Prints a report of the same form as `coracle bench --json`. The three are measured in turns, so that other load on the
machine affects all of them."""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from datetime import timedelta

from opensandbox import SandboxSync
from opensandbox.config import ConnectionConfigSync

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "200"))
WARM_UP = 10
SPAWNS = 3


@contextmanager
def sandbox(domain, key):
    config = ConnectionConfigSync(domain=domain, api_key=key, request_timeout=timedelta(seconds=60))
    with SandboxSync.create("python:3.12", connection_config=config, timeout=timedelta(minutes=10)) as made:
        try:
            yield made
        finally:
            made.kill()


@contextmanager
def stub():
    script = pathlib.Path(__file__).with_name("stub.py")
    process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    try:
        yield f"127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        process.kill()
        process.communicate()


def timed(action):
    begun = time.perf_counter()
    action()
    return (time.perf_counter() - begun) * 1000


def spawn():
    os.waitpid(os.posix_spawn("/bin/true", ["true"], os.environ), 0)


def run_true(box):
    ran = box.commands.run("true")
    if ran.error is not None or ran.complete is None:
        raise SystemExit(f"`true` failed: {ran}")


def main():
    domain, key = os.environ["CORACLE_URL"].split("://")[1], os.environ.get("CORACLE_API_KEY")
    with stub() as nothing, sandbox(domain, key) as ours, sandbox(nothing, None) as idle:
        actions = {"ours": lambda: run_true(ours), "stub": lambda: run_true(idle), "spawn": spawn}
        times = {name: [] for name in actions}
        for turn in range(WARM_UP + ROUNDS):
            for name, action in actions.items():
                took = timed(action)
                if turn >= WARM_UP:
                    times[name].append(took)
    middle = {name: statistics.median(values) for name, values in times.items()}
    allowed = middle["stub"] + SPAWNS * middle["spawn"]
    bar = {
        "name": "`commands.run(\"true\")` through the Python SDK",
        "value": middle["ours"] / allowed,
        "bound": 1.0,
        "unit": "times a stub and three bare spawns",
        "kept": middle["ours"] <= allowed,
    }
    shown = [{"name": name, "median_ms": value} for name, value in middle.items()]
    print(json.dumps({"times": shown, "bars": [bar], "absent": []}, indent=1))


if __name__ == "__main__":
    main()
