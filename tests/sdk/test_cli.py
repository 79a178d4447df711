"""The reference's own command line, `osb`, group by group."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from conftest import KEY, URL

OSB = pathlib.Path(sys.executable).with_name("osb")


class Osb:
    """`osb` as a user has it: with its own home, and the server from its environment."""

    def __init__(self, home):
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "NO_COLOR": "1",
            "OPEN_SANDBOX_DOMAIN": URL.split("://", 1)[1],
            "OPEN_SANDBOX_PROTOCOL": "http",
            **({"OPEN_SANDBOX_API_KEY": KEY} if KEY else {}),
        }

    def call(self, *words, **more):
        return subprocess.run(
            [OSB, *words], env=self.env, capture_output=True, text=True, timeout=60, **{"input": "", **more}
        )

    def text(self, *words, **more):
        done = self.call(*words, **more)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def json(self, *words):
        # Arguments after `--` belong to the sandbox.
        own = words.index("--") if "--" in words else len(words)
        return json.loads(self.text(*words[:own], "-o", "json", *words[own:]))


@pytest.fixture(scope="module")
def osb(tmp_path_factory):
    return Osb(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def made(osb):
    """A sandbox that `osb` itself has made."""
    waits = [word for part in ("tail", "-f", "/dev/null") for word in ("--entrypoint", part)]
    sandbox = osb.json("sandbox", "create", "-i", "python:3.12", "-t", "10m", "-m", "made-by=osb", *waits)["id"]
    yield sandbox
    osb.text("sandbox", "kill", sandbox)
    assert osb.call("sandbox", "get", sandbox).returncode != 0


def test_a_sandbox_is_listed_described_and_healthy(osb, made):
    listed = osb.json("sandbox", "list", "-m", "made-by=osb")
    items = listed["items"] if isinstance(listed, dict) else listed
    assert [item["id"] for item in items] == [made]
    shown = osb.json("sandbox", "get", made)
    assert shown["id"] == made
    assert "running" in json.dumps(shown).lower()
    assert "true" in osb.text("sandbox", "health", made, "-o", "json").lower()


def test_expiry_and_endpoints(osb, made):
    before = osb.json("sandbox", "get", made)["expires_at"]
    osb.text("sandbox", "renew", made, "-t", "30m")
    assert osb.json("sandbox", "get", made)["expires_at"] > before
    assert f"/sandboxes/{made}/proxy/8080" in osb.json("sandbox", "endpoint", made, "-p", "8080")["endpoint"]


def test_metrics_once_and_watched(osb, made):
    assert osb.json("sandbox", "metrics", made)["cpu_count"] > 0
    watching = subprocess.Popen(
        [OSB, "sandbox", "metrics", made, "--watch", "-o", "raw"], env=osb.env, text=True, stdout=subprocess.PIPE
    )
    try:
        lines = [watching.stdout.readline() for _ in range(2)]
    finally:
        watching.kill()
        watching.communicate()
    assert all("cpu" in line for line in lines), lines


def test_command_output_and_failure_are_passed_on(osb, made):
    assert osb.text("command", "run", made, "-o", "raw", "--", "printf", "a\\n\\nb\\n") == "a\n\nb\n"
    words = ["--argv", "-o", "raw", "--", "printf", "%s|", "$HOME", "a b", ""]
    assert osb.text("command", "run", made, *words) == "$HOME|a b||\n"
    assert "/tmp" in osb.text("command", "run", made, "-w", "/tmp", "-o", "raw", "--", "pwd")
    failed = osb.call("command", "run", made, "--", "sh", "-c", "exit 3")
    assert failed.returncode != 0
    assert "3" in failed.stdout + failed.stderr


def test_a_command_in_the_background_is_found_read_and_interrupted(osb, made):
    started = osb.json("command", "run", made, "-d", "--", "sh", "-c", "echo begun; sleep 600")
    execution = started["execution_id"]
    assert osb.json("command", "status", made, execution)["running"] is True
    osb.text("command", "interrupt", made, execution)
    assert osb.json("command", "status", made, execution)["running"] is False
    assert "begun" in osb.text("command", "logs", made, execution, "-o", "raw")


def test_a_session_keeps_its_state(osb, made):
    session = osb.json("command", "session", "create", made)["session_id"]
    osb.text("command", "session", "run", made, session, "--", "export", "WORD=kept")
    kept = osb.text("command", "session", "run", made, session, "-o", "raw", "--", "printenv", "WORD")
    assert kept == "kept\n"
    osb.text("command", "session", "delete", made, session)
    assert osb.call("command", "session", "run", made, session, "--", "true").returncode != 0


def test_files(osb, made, tmp_path):
    osb.text("file", "mkdir", made, "/data/deep")
    osb.text("file", "write", made, "/data/deep/a.txt", "-c", "one two", "--mode", "0640")
    assert osb.text("file", "cat", made, "/data/deep/a.txt") == "one two"
    assert "640" in json.dumps(osb.json("file", "info", made, "/data/deep/a.txt"))
    osb.text("file", "replace", made, "/data/deep/a.txt", "--old", "two", "--new", "three")
    osb.text("file", "mv", made, "/data/deep/a.txt", "/data/b.txt")
    osb.text("file", "chmod", made, "/data/b.txt", "--mode", "0600")
    assert "/data/b.txt" in osb.text("file", "search", made, "/data", "-p", "*.txt", "-o", "json")
    here = tmp_path / "here"
    osb.text("file", "download", made, "/data/b.txt", str(here))
    assert here.read_text() == "one three"
    osb.text("file", "upload", made, str(here), "/data/c.txt")
    assert osb.text("file", "cat", made, "/data/c.txt") == "one three"
    osb.text("file", "rm", made, "/data/b.txt", "/data/c.txt")
    osb.text("file", "rmdir", made, "/data")
    assert osb.call("file", "info", made, "/data").returncode != 0


def test_pause_and_resume(osb, made):
    osb.text("sandbox", "pause", made)
    assert "paused" in osb.text("sandbox", "get", made, "-o", "json").lower()
    osb.text("sandbox", "resume", made)
    assert "here" in osb.text("command", "run", made, "-o", "raw", "--", "echo", "here")


def test_snapshots(osb, made, api):
    osb.text("command", "run", made, "--", "sh", "-c", "echo kept > /root/kept")
    snapshot = osb.json("snapshot", "create", made, "--name", "by-osb")["id"]
    try:
        while "creating" in osb.text("snapshot", "get", snapshot, "-o", "json").lower():
            pass
        assert snapshot in osb.text("snapshot", "list", "--sandbox-id", made, "-o", "json")
        restored = osb.json("sandbox", "create", "--snapshot-id", snapshot, "-t", "5m")["id"]
        try:
            assert osb.text("file", "cat", restored, "/root/kept") == "kept\n"
        finally:
            osb.text("sandbox", "kill", restored)
    finally:
        osb.text("snapshot", "delete", snapshot)


def test_diagnostics_in_both_forms(osb, made):
    assert made in osb.text("diagnostics", "events", made, "--scope", "lifecycle", "-o", "json")
    assert made in osb.text("diagnostics", "logs", made, "--scope", "container", "-o", "json")
    for form in ("logs", "events", "inspect", "summary"):
        osb.text("devops", form, made)
    assert made in osb.text("devops", "inspect", made)


def test_policy_is_shown_and_changed_and_unsupported_features_are_reported(osb, made):
    assert "deny" in osb.text("egress", "get", made, "-o", "json")
    osb.text("egress", "patch", made, "--rule", "allow=example.org")
    assert "example.org" in osb.text("egress", "get", made, "-o", "json")
    refused = osb.call("egress", "patch", made, "--rule", "allow=not a name")
    assert refused.returncode != 0
    assert osb.call("template", "list").returncode != 0
