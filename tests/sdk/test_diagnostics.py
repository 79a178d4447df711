"""Diagnostics for a sandbox that misbehaves, in both formats."""

import json
import re

import pytest
from opensandbox.models.sandboxes import SandboxImageSpec
from opensandbox.sync.sandbox import SandboxSync

LOUD = ["sh", "-c", 'echo loud "$SECRET_WORD" | tr a-z A-Z; seq 1 300; exec sleep 1000']


@pytest.fixture(scope="module")
def loud(api):
    from conftest import Box

    box = Box(api, {"entrypoint": LOUD, "env": {"SECRET_WORD": "hush-hush"}, "metadata": {"team": "a"}})
    # The first output has arrived once the last has.
    box.output("until grep -q sleep /proc/[0-9]*/comm; do :; done", timeout=20000)
    yield box
    box.remove()


def show(box, kind, **query):
    return box.api.get(f"/v1/sandboxes/{box.id}/diagnostics/{kind}", params=query)


def without_times(text):
    """Each line without the time before it, which must be there."""
    lines = [re.fullmatch(r"(\d{4}-\d\d-\d\dT[\d:.]+Z) (.*\n)", line) for line in text.splitlines(keepends=True)]
    assert all(lines), text
    return "".join(line[2] for line in lines)


@pytest.mark.parametrize("scope", ["container", "all"])
def test_logs_are_the_output_of_the_main_process(loud, scope):
    answer = show(loud, "logs", scope=scope)
    assert answer.status_code == 200, answer.text
    shown = answer.json()
    assert (shown["sandboxId"], shown["kind"], shown["scope"]) == (loud.id, "logs", scope)
    assert (shown["delivery"], shown["contentType"]) == ("inline", "text/plain; charset=utf-8")
    assert without_times(shown["content"]).split() == [str(n) for n in range(201, 301)]
    assert shown["contentLength"] == len(shown["content"]) and shown["truncated"] is True
    assert shown["warnings"] == []


@pytest.mark.parametrize("scope", ["runtime", "lifecycle", "all"])
def test_events_show_the_lifecycle(loud, scope):
    shown = show(loud, "events", scope=scope).json()
    assert (shown["kind"], shown["scope"]) == ("events", scope)
    assert ("Running" in shown["content"]) == (scope != "runtime")


def test_the_end_of_the_main_process_is_an_event(new_box):
    box = new_box(entrypoint=["sh", "-c", "echo last words; exit 7"])
    with box.api.stream("GET", "/coracle/v1/events", params={"after": 0, "follow": "true"}) as feed:
        for line in feed.iter_lines():
            if box.id in line and "exited" in line:
                break
    assert "Failed exited" in show(box, "events", scope="runtime").json()["content"]
    assert without_times(show(box, "logs", scope="container").json()["content"]) == "last words\n"


def test_paused_sandbox_gives_a_reason_for_empty_output(new_box):
    box = new_box(entrypoint=LOUD)
    assert box.api.post(f"/v1/sandboxes/{box.id}/pause").status_code == 202
    shown = show(box, "logs", scope="container").json()
    assert shown["content"] == "" and "paused" in shown["warnings"][0]


@pytest.mark.parametrize(("kind", "scope"), [("logs", "runtime"), ("logs", "x"), ("events", "container")])
def test_an_unknown_scope_is_named(loud, kind, scope):
    answer = show(loud, kind, scope=scope)
    assert (answer.status_code, answer.json()["code"]) == (400, "DIAGNOSTICS_SCOPE_UNSUPPORTED")


def test_without_a_scope_it_is_plain_text(loud):
    answer = show(loud, "logs", tail=2)
    assert (without_times(answer.text), answer.headers["deprecation"]) == ("299\n300\n", "true")
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert without_times(show(loud, "logs", tail=10000, since="1h").text).startswith("LOUD HUSH-HUSH\n1\n")
    assert "Running" in show(loud, "events", limit=500).text
    for kind, query in [("logs", {"tail": 0}), ("logs", {"tail": 10001}), ("events", {"limit": 501}),
                        ("logs", {"since": "yesterday"}), ("summary", {"event_limit": 0})]:
        assert show(loud, kind, **query).status_code == 400, (kind, query)


def test_inspect_and_summary_show_no_value_of_a_variable(loud):
    inspect = show(loud, "inspect").text
    assert loud.id in inspect and "SECRET_WORD=***" in inspect and "team=a" in inspect
    summary = show(loud, "summary", tail=3, event_limit=5).text
    for part in ["INSPECT", "EVENTS", "LOGS (last 3 lines)", "Running", "Z 300\n"]:
        assert part in summary, part
    assert "hush-hush" not in inspect + summary
    for token in loud.endpoint(44772)["headers"].values():
        assert token not in inspect + summary


def test_empty_diagnostics_say_so(box):
    assert show(box, "logs").text == "(no logs)"
    assert show(box, "logs", scope="all").json()["content"] == ""


def test_unknown_sandboxes_and_kinds_are_not_found(box, api):
    assert api.get("/v1/sandboxes/abcdefghij0123456789/diagnostics/logs").status_code == 404
    assert show(box, "other").status_code == 404


def test_sdk_reads_diagnostics(config):
    sandbox = SandboxSync.create(SandboxImageSpec("python:3.12"), entrypoint=LOUD, connection_config=config)
    try:
        logs = sandbox.get_diagnostic_logs("container")
        assert (logs.kind, logs.delivery) == ("logs", "inline")
        assert "Running" in sandbox.get_diagnostic_events("lifecycle").content
    finally:
        sandbox.kill()
        sandbox.close()


def test_measurements_are_watched_once_a_second_until_the_sandbox_ends(new_box):
    box = new_box()
    seen = []
    with box.execd.stream("GET", "/metrics/watch") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if not line:
                continue
            seen.append(json.loads(line))
            if len(seen) == 3:
                assert box.api.delete(f"/v1/sandboxes/{box.id}").status_code == 204
    for one in seen[:3]:
        assert 0 <= one["cpu_used_pct"] <= 100 and 0 <= one["mem_used_mib"] <= one["mem_total_mib"] == 512
    assert 1000 <= seen[2]["timestamp"] - seen[0]["timestamp"] <= 10_000
    # The stream ends by itself, with the reason.
    assert list(seen[-1]) == ["error"] and len(seen) <= 5
