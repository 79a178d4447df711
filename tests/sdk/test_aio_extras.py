"""Hooks, observe, documents and skills of AIO sandboxes, with the unmodified `agent-sandbox` SDK where it has them."""

import gzip
import io
import json
import time
import zipfile

import pytest
from agent_sandbox.core.api_error import ApiError

from test_aio import Provisioned, aio  # noqa: F401 (a fixture)

SKILL = "---\nname: report-writer\ndescription: Writes reports.\n---\n\n# Report\n"


def archive(entries):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, text in entries.items():
            packed.writestr(name, text)
    return content.getvalue()


def test_hooks_are_registered_listed_and_removed(aio):
    added = aio.sdk.sandbox.register_hook(name="save", command="sync", timeout=3, priority=5).data
    assert (added.name, added.timeout, added.priority, added.source) == ("save", 3, 5, "api")
    assert [hook.name for hook in aio.sdk.sandbox.list_hooks().data] == ["save"]
    aio.sdk.sandbox.remove_hook("save")
    assert aio.sdk.sandbox.list_hooks().data == []


def test_skills_are_registered_read_and_deleted(aio):
    skills = aio.sdk.skills
    packed = archive({"SKILL.md": SKILL, "scripts/run.py": "print('hi')\n"})
    added = skills.register_skills(file=("report.zip", packed, "application/zip")).data
    assert added.count == 1 and added.registered[0].path == "/home/gem/skills/report-writer"
    assert added.registered[0].metadata["description"] == "Writes reports."
    ran = aio.sdk.shell.exec_command(command="python3 ~/skills/report-writer/scripts/run.py; stat -c %U ~/skills/report-writer")
    assert ran.data.output.split() == ["hi", "gem"]
    assert [skill.name for skill in skills.list_metadata().data.skills] == ["report-writer"]
    assert skills.get_content("report-writer").data.content == "\n# Report\n"
    assert skills.delete_skill("report-writer").data.name == "report-writer"
    with pytest.raises(ApiError) as refused:
        skills.register_skills(file=("bad.zip", archive({"SKILL.md": SKILL, "../evil": "x"}), "application/zip"))
    assert refused.value.status_code == 400 and "leads out" in refused.value.body["message"]
    assert skills.clear_skills().data["count"] == 0


def test_observed_usage_is_real(aio):
    live = aio.http.get("/v1/sandbox/observe/live").json()["data"]
    memory = live["cgroup"]["mem_current_bytes"]
    assert memory is None or memory > 0
    session = aio.http.post("/v1/sandbox/observe/start", json={"duration_seconds": 60}).json()["data"]
    stopped = aio.http.post("/v1/sandbox/observe/stop", json={}).json()["data"]
    assert stopped["session_id"] == session["session_id"]
    report = aio.http.post("/v1/sandbox/observe/export", json={}).json()["data"]
    content = json.loads(gzip.decompress(aio.http.get(report["path"].lstrip("/")).content))
    assert content["session_id"] == session["session_id"]


def test_documents_describe_the_sandbox(aio):
    document = aio.http.get("/v1/openapi.json").json()
    assert "/v1/shell/exec" in document["paths"] and "/v1/browser/{path}" not in document["paths"]
    assert "POST /v1/shell/exec" in aio.http.get("/llms.txt").text


def test_hook_runs_at_removal():
    one = Provisioned()
    # The hook keeps the removal waiting, which shows that it ran to its end.
    one.sdk.sandbox.register_hook(name="slow", command="sleep 2", timeout=5)
    began = time.monotonic()
    one.remove()
    assert 2 <= time.monotonic() - began < 9
