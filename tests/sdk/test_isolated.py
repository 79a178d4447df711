"""Isolated sessions with the official client, both ways it can be used."""

import time

import pytest
from opensandbox import Sandbox, SandboxSync
from opensandbox.exceptions import SandboxApiException
from opensandbox.models.filesystem import (
    ContentReplaceEntry,
    DirectoryListEntry,
    MoveEntry,
    SearchEntry,
    SetPermissionEntry,
    WriteEntry,
)
from opensandbox.models.isolated import (
    BindMount,
    CreateIsolatedSessionRequest,
    IsolatedOverlaySpec,
    IsolatedRunOpts,
    IsolatedWorkspaceSpec,
)

CREATE = {
    "resource": {"cpu": "1", "memory": "512Mi"},
    "extensions": {"bootstrap.execd.isolation": "enable"},
}


def on(path, mode=None, **more):
    return CreateIsolatedSessionRequest(workspace=IsolatedWorkspaceSpec(path=path, mode=mode), **more)


@pytest.fixture
def sandbox(config):
    sandbox = SandboxSync.create("python:3.12", connection_config=config, **CREATE)
    yield sandbox
    sandbox.destroy()


def test_session_is_created_and_deleted(sandbox):
    assert sandbox.isolation.capabilities().available
    session = sandbox.isolation.create(on("/workspace", "rw"))
    assert session.info.created_at is not None
    assert int(session.run("echo $$").text) <= 2
    session.run("export KEPT=yes; echo here > /workspace/f")
    assert session.run("echo $KEPT").text.strip() == "yes"
    assert sandbox.commands.run("cat /workspace/f").text.strip() == "here"
    attached = sandbox.isolation.attach(session.session_id)
    assert (attached.info.workspace.path, attached.info.workspace.mode) == ("/workspace", "rw")
    assert attached.get().status == "active"
    assert [found.session_id for found in sandbox.isolation.list()] == [session.session_id]
    attached.delete()
    assert sandbox.isolation.list() == []
    with pytest.raises(SandboxApiException) as caught:
        session.delete()
    assert caught.value.status_code == 404


def test_runs_in_front_and_in_the_background(sandbox):
    with sandbox.isolation.session(on("/tmp", "rw")) as session:
        assert session.run("echo $V", opts=IsolatedRunOpts(envs={"V": "own"})).text.strip() == "own"
        failed = session.run("echo seen; (exit 7)")
        assert (failed.exit_code, failed.error.name) == (7, "ExitError")
        late = session.run("sleep 60", opts=IsolatedRunOpts(timeout_seconds=1))
        assert late.error is not None
        run = session.run_background("echo $V; exit 3", opts=IsolatedRunOpts(envs={"V": "behind"}))
        deadline = time.monotonic() + 30
        while (status := session.run_status(run.run_id)).running:
            assert time.monotonic() < deadline
        assert (status.exit_code, status.error) == (3, None)
        logs = session.run_logs(run.run_id)
        assert logs.text.strip() == "behind"
        assert session.run_logs(run.run_id, cursor=logs.cursor).text == ""
        with pytest.raises(SandboxApiException) as caught:
            session.run_status("no-such-run")
        assert caught.value.status_code == 404
    assert sandbox.isolation.run_once("echo once", workspace="/tmp", workspace_mode="rw").text.strip() == "once"


@pytest.mark.parametrize("mode", ["rw", "overlay"])
def test_files_of_a_session(sandbox, mode):
    sandbox.commands.run("mkdir -p /w; echo lower > /w/lower.txt")
    with sandbox.isolation.session(on("/w", mode)) as session:
        files = session.files
        files.write_files([WriteEntry(path="/w/a.txt", data="hello old", mode=644)])
        assert files.read_file("/w/a.txt") == "hello old"
        assert files.get_file_info(["/w/a.txt"])["/w/a.txt"].mode == 644
        files.set_permissions([SetPermissionEntry(path="/w/lower.txt", mode=600)])
        files.replace_contents([ContentReplaceEntry(path="/w/a.txt", old_content="old", new_content="new")])
        files.move_files([MoveEntry(source="/w/a.txt", destination="/w/b.txt")])
        assert files.read_bytes("/w/b.txt") == b"hello new"
        files.create_directories([WriteEntry(path="/w/d", mode=755)])
        found = files.search(SearchEntry(path="/w", pattern="*.txt"))
        assert sorted(entry.path for entry in found) == ["/w/b.txt", "/w/lower.txt"]
        listed = files.list_directory(DirectoryListEntry(path="/w", depth=1))
        assert "/w/d" in [entry.path for entry in listed]
        files.delete_files(["/w/lower.txt"])
        with pytest.raises(SandboxApiException):
            files.get_file_info(["/w/lower.txt"])
    outside = sandbox.commands.run("ls /w; cat /w/lower.txt 2>/dev/null").text.split()
    assert outside == (["b.txt", "d"] if mode == "rw" else ["lower.txt", "lower"])


def test_session_details_and_refusals(sandbox):
    sandbox.commands.run("mkdir -p /data/b /w; echo data > /data/b/f")
    request = CreateIsolatedSessionRequest(
        overlays=[IsolatedOverlaySpec(path="/w", persist=False)],
        binds=[BindMount(source="/data/b", dest="/mnt/b", readonly=True)],
        uid=1000,
        gid=1000,
        share_net=False,
        idle_timeout_seconds=60,
    )
    with sandbox.isolation.session(request) as session:
        assert session.run("cat /mnt/b/f; id -u").text.split() == ["data", "1000"]
        assert session.run("echo x > /mnt/b/g").exit_code != 0
        state = session.get()
        assert (state.uid, state.share_net, state.overlays[0].path) == (1000, False, "/w")
        assert 0 < state.idle_remaining_seconds <= 60
    for wrong in [on("/tmp", "rw", binds=[BindMount(source="/etc", dest="/mnt/etc")]), CreateIsolatedSessionRequest()]:
        with pytest.raises(SandboxApiException) as caught:
            sandbox.isolation.create(wrong)
        assert caught.value.status_code == 400


def test_sandbox_without_isolated_sessions_says_so(config):
    sandbox = SandboxSync.create("python:3.12", connection_config=config, resource=CREATE["resource"])
    try:
        shown = sandbox.isolation.capabilities()
        assert not shown.available and "bootstrap.execd.isolation" in shown.message
        with pytest.raises(SandboxApiException) as caught:
            sandbox.isolation.create(on("/tmp"))
        assert caught.value.status_code == 503
    finally:
        sandbox.destroy()


async def test_isolated_session_with_the_async_client(async_config):
    sandbox = await Sandbox.create("python:3.12", connection_config=async_config, **CREATE)
    try:
        async with sandbox.isolation.session(on("/workspace", "overlay")) as session:
            await session.run("echo x > /workspace/f")
            assert (await session.run("cat /workspace/f")).text.strip() == "x"
            assert (await session.files.read_file("/workspace/f")).strip() == "x"
            run = await session.run_background("echo done")
            while (await session.run_status(run.run_id)).running:
                pass
            assert (await session.run_logs(run.run_id)).text.strip() == "done"
        assert "No such file" in (await sandbox.commands.run("cat /workspace/f 2>&1")).text
    finally:
        await sandbox.destroy()
