"""Runs the black-box suites of the reference project against a server of ours.

    run.py CHECKOUT WORK URL [SUITE...]

CHECKOUT is a copy of the reference's repository, which is only read; WORK is a directory for what has to be
built from it; URL is a server without keys, with dialect `S`, that may mount what lies below SHARED.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import model
import results
import seed
import shared
from known import reason

#: One of the suites has this path hard-coded.
SHARED = pathlib.Path("/tmp/opensandbox-e2e")
VOLUME = "opensandbox-e2e-pvc-test"
PNPM = ["npx", "--yes", "pnpm@9.15.0"]
MINUTE = 60
PUBLISHED = ["opensandbox==1.1.1", "opensandbox-code-interpreter==1.1.1"]

#: Suites that need a credential vault, a cluster, microVMs or an API that no client has yet are left out.
PYTHON = [
    "sandbox_e2e",
    "sandbox_e2e_sync",
    "sandbox_manager_e2e",
    "sandbox_manager_e2e_sync",
    "sandbox_pool_e2e_async",
    "sandbox_pool_e2e_sync",
    "code_interpreter_e2e",
    "code_interpreter_e2e_sync",
    "command_stream_e2e",
    "execd_set_env_e2e",
    "execd_envs_session_e2e",
    "isolated_session_e2e",
]
JAVASCRIPT = ["sandbox_e2e", "sandbox_manager_e2e", "code_interpreter_e2e", "wait_until_ready_diagnostics"]


class Run:
    """One run: where the suites are, and how they find the server."""

    def __init__(self, checkout, work, url):
        self.checkout, self.work, self.url = pathlib.Path(checkout), pathlib.Path(work), url.rstrip("/")
        self.env = {
            **os.environ,
            "OPENSANDBOX_TEST_DOMAIN": self.url.split("://")[1],
            "OPENSANDBOX_TEST_PROTOCOL": "http",
            "OPENSANDBOX_TEST_HOST_VOLUME_DIR": str(SHARED / "host-volume-test"),
            "OPENSANDBOX_TEST_PVC_NAME": VOLUME,
            "OPENSANDBOX_URL": self.url,
            "RUN_CODE_INTERPRETER_E2E": "true",
            "CI": "true",
        }

    def copy(self, *parts):
        """Suites build and write beside themselves, so they get copies."""
        for part in parts:
            shutil.rmtree(self.work / part, ignore_errors=True)
            shutil.copytree(self.checkout / part, self.work / part, symlinks=True)

    def call(self, words, directory, minutes, **more):
        """Runs a program to its end and returns its output; the caller checks how it ended."""
        env = {**self.env, **more}
        done = subprocess.run(
            words, cwd=directory, env=env, timeout=minutes * MINUTE, text=True, errors="replace",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        return done.returncode, done.stdout

    def must(self, words, directory, minutes=10):
        code, text = self.call(words, directory, minutes)
        if code != 0:
            raise SystemExit(f"`{' '.join(map(str, words))}` failed:\n{text[-4000:]}")


def smoke(run):
    home = seed.Box(run.url)
    try:
        script = run.checkout / "components/execd/tests/smoke_api.py"
        more = {"BASE_URL": home.execd, "API_TOKEN": home.token, "HOME": "/root"}
        code, text = run.call([sys.executable, str(script)], run.work, 5, **more)
    finally:
        home.remove()
    last = text.strip().splitlines()[-1:] or [""]
    yield results.Case("smoke_api.py", "all of it", "passed" if code == 0 else "failed", last[0])


def python(run):
    run.copy("tests/python")
    run.must([sys.executable, "-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps", *clients(run)], run.work)
    directory = run.work / "tests/python"
    for name in PYTHON:
        file = directory / f"tests/test_{name}.py"
        if not file.exists():
            yield results.Case(file.name, "", "absent", "this checkout has no such file")
            continue
        report = run.work / f"{name}.xml"
        report.unlink(missing_ok=True)
        words = [sys.executable, "-m", "pytest", "-q", "-o", "log_cli=false", f"--junit-xml={report}", str(file)]
        code, text = run.call(words, directory, 15)
        if not report.exists():
            raise SystemExit(f"{file.name} did not run ({code}):\n{text[-4000:]}")
        yield from results.from_junit(file.name, report)


def clients(run):
    """The checkout's own SDKs, or the published ones where it has none."""
    parts = ["sdks/sandbox/python", "sdks/code-interpreter/python"]
    if not all((run.checkout / part).exists() for part in parts):
        return PUBLISHED
    run.copy(*parts)
    return [str(run.work / part) for part in parts]


def with_pools(run):
    """The pools of clients can share a Redis; those tests run if one can be started."""
    with shared.redis() as url:
        if url:
            run.env["OPENSANDBOX_TEST_REDIS_URL"] = url
        yield from python(run)


def javascript(run):
    run.copy("tests/javascript", "sdks", "specs")
    directory = run.work / "tests/javascript"
    run.must([*PNPM, "install"], run.work / "sdks")
    run.must([*PNPM, "run", "build:js"], run.work / "sdks")
    run.must([*PNPM, "install"], directory)
    for name in JAVASCRIPT:
        report = run.work / f"{name}.json"
        report.unlink(missing_ok=True)
        test = f"tests/test_{name}.test.ts"
        words = [*PNPM, "exec", "vitest", "run", "--reporter=json", f"--outputFile={report}", test]
        code, text = run.call(words, directory, 15)
        if not report.exists():
            raise SystemExit(f"{test} did not run ({code}):\n{text[-4000:]}")
        yield from results.from_vitest(pathlib.Path(test).name, report)


def go(run):
    run.copy("tests/go", "sdks/sandbox/go")
    with model.serving() as endpoint:
        words = ["go", "test", "-count=1", "-json", "-timeout", "14m", "./..."]
        _, text = run.call(words, run.work / "tests/go", 15, LLM_ENDPOINT=endpoint)
    yield from results.from_go(text)


SUITES = {"smoke": smoke, "python": with_pools, "javascript": javascript, "go": go}


def main(checkout, work, url, *names):
    run = Run(checkout, work, url)
    run.work.mkdir(parents=True, exist_ok=True)
    seed.host_directory(SHARED / "host-volume-test")
    seed.volume(run.url, VOLUME)
    cases = []
    for name in names or SUITES:
        print(f"== {name}", flush=True)
        cases += SUITES[name](run)
    (run.work / "results.json").write_text(json.dumps([case.__dict__ for case in cases], indent=1))
    print(results.table(cases))
    surprises = [case for case in cases if case.outcome == "failed" and not reason(case)]
    print(results.failures(cases, reason))
    counted = {outcome: sum(case.outcome == outcome for case in cases) for outcome in ("passed", "failed", "skipped")}
    print(", ".join(f"{count} {outcome}" for outcome, count in counted.items()))
    return 1 if surprises else 0


if __name__ == "__main__":
    if len(sys.argv) < 4:
        raise SystemExit(__doc__)
    sys.exit(main(*sys.argv[1:]))
