"""Snapshots with the official client: create, get, list, delete, and sandboxes made from them."""

import time
from datetime import timedelta

import httpx
import pytest
from opensandbox import Sandbox, SandboxManager, SandboxManagerSync, SandboxSync
from opensandbox.exceptions import SandboxApiException
from opensandbox.models.sandboxes import SnapshotFilter

RESOURCE = {"cpu": "1", "memory": "512Mi"}


@pytest.fixture
def sandbox(config):
    sandbox = SandboxSync.create("python:3.12", connection_config=config, resource=RESOURCE)
    yield sandbox
    sandbox.destroy()


@pytest.fixture
def manager(config):
    manager = SandboxManagerSync.create(connection_config=config)
    yield manager
    manager.close()


def ready(manager, snapshot):
    """Polls as clients do. Any state other than `Creating` is final."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        found = manager.get_snapshot(snapshot.id)
        if found.status.state != "Creating":
            assert found.status.state == "Ready", found
            return found
        time.sleep(0.02)
    raise AssertionError("the snapshot is not ready")


def test_a_snapshot_is_taken_seen_and_deleted(sandbox, manager):
    taken = sandbox.create_snapshot(name="after-setup")
    assert (taken.sandbox_id, taken.name) == (sandbox.id, "after-setup")
    assert taken.status.state == "Creating"
    assert ready(manager, taken).created_at == taken.created_at
    unnamed = ready(manager, manager.create_snapshot(sandbox.id))
    assert unnamed.name is None

    def listed(**wanted):
        return [item.id for item in manager.list_snapshots(SnapshotFilter(**wanted)).snapshot_infos]

    assert listed(sandbox_id=sandbox.id) == [unnamed.id, taken.id]
    assert listed(sandbox_id=sandbox.id, name="after-setup", states=["Ready", "Failed"]) == [taken.id]
    assert listed(sandbox_id=sandbox.id, states=["Failed"]) == []
    assert listed(sandbox_id=sandbox.id, page=2, page_size=1) == [taken.id]
    for snapshot in (taken, unnamed):
        manager.delete_snapshot(snapshot.id)
        with pytest.raises(SandboxApiException) as caught:
            manager.get_snapshot(snapshot.id)
        assert caught.value.status_code == 404


def test_a_sandbox_begins_with_the_files_of_a_snapshot(config, sandbox, manager):
    sandbox.commands.run("mkdir -p /data; echo kept > /data/file; sleep 1000 > /dev/null 2>&1 &")
    taken = ready(manager, sandbox.create_snapshot())
    sandbox.commands.run("rm -r /data")
    restored = SandboxSync.create(
        snapshot_id=taken.id, connection_config=config, resource=RESOURCE, timeout=timedelta(minutes=5)
    )
    try:
        assert restored.id != sandbox.id
        assert restored.files.read_file("/data/file") == "kept\n"
        info = restored.get_info()
        assert (info.snapshot_id, info.image) == (taken.id, None)
        # Files are kept, processes are not.
        running = restored.commands.run("cat /proc/[0-9]*/comm | grep -c '^sleep$'; true")
        assert running.logs.stdout[0].text.strip() == "0"
        manager.delete_snapshot(taken.id)
        assert restored.files.read_file("/data/file") == "kept\n"
    finally:
        restored.destroy()


def test_refusals_have_the_codes_of_the_reference(api, new_box):
    box = new_box()
    absent = "ffffffff-ffff-4fff-bfff-ffffffffffff"
    create = {"snapshotId": absent, "resourceLimits": {}}
    path = f"/v1/sandboxes/{box.id}/snapshots"
    both = {**create, "image": {"uri": "x"}}
    assert api.post(f"/v1/sandboxes/{box.id}/pause").status_code == 202
    for method, path, body, status, code in [
        ("POST", "/v1/sandboxes", create, 404, "SNAPSHOT::NOT_FOUND"),
        ("POST", "/v1/sandboxes", both, 400, "SANDBOX::INVALID_PARAMETER"),
        ("POST", path, {}, 409, "SNAPSHOT::INVALID_SOURCE_STATE"),
        ("POST", "/sandboxes/aaaaaaaaaaaaaaaaaaaa/snapshots", {}, 404, "DOCKER::SANDBOX_NOT_FOUND"),
        ("GET", f"/snapshots/{absent}", None, 404, "SNAPSHOT::NOT_FOUND"),
        ("DELETE", f"/v1/snapshots/{absent}", None, 404, "SNAPSHOT::NOT_FOUND"),
        ("GET", "/v1/snapshots?page=0", None, 400, "SANDBOX::INVALID_PARAMETER"),
    ]:
        answer = api.request(method, path, json=body)
        assert (answer.status_code, answer.json()["code"]) == (status, code), path


def test_snapshot_create_has_a_location_header_and_no_nulls(api, box):
    for body in [{}, {"name": None}, None]:
        answer = api.post(f"/v1/sandboxes/{box.id}/snapshots", **({} if body is None else {"json": body}))
        if answer.status_code == 409:
            assert answer.json()["code"] == "SNAPSHOT::RUNTIME_CREATE_CONFLICT"
            continue
        assert answer.status_code == 202
        snapshot = answer.json()
        assert answer.headers["location"] == f"/v1/snapshots/{snapshot['id']}"
        assert "name" not in snapshot and None not in snapshot["status"].values()
    refused = api.post(f"/v1/sandboxes/{box.id}/snapshots", json={"name": ""})
    assert refused.status_code == 400


async def test_the_asynchronous_client_does_the_same(async_config):
    sandbox = await Sandbox.create("python:3.12", connection_config=async_config, resource=RESOURCE)
    manager = await SandboxManager.create(connection_config=async_config)
    try:
        await sandbox.files.write_file("/root/file", "x")
        taken = await sandbox.create_snapshot("a")
        while (await manager.get_snapshot(taken.id)).status.state == "Creating":
            pass
        restored = await Sandbox.create(snapshot_id=taken.id, connection_config=async_config, resource=RESOURCE)
        assert await restored.files.read_file("/root/file") == "x"
        await restored.destroy()
        await manager.delete_snapshot(taken.id)
    finally:
        await sandbox.destroy()
        await manager.close()


def test_a_sandbox_from_a_snapshot_inherits_what_the_client_does_not_send(config, manager):
    """The client always sends a timeout and limits on cpu and memory: those come from the caller."""
    parent = SandboxSync.create(
        "python:3.12",
        connection_config=config,
        resource={"cpu": "0.5", "memory": "300Mi"},
        env={"MARK": "kept"},
        metadata={"team": "blue"},
        extensions={"coracle.pids": "50", "coracle.network": "off"},
    )
    made = [parent]
    try:
        taken = ready(manager, parent.create_snapshot())
        restored = SandboxSync.create(snapshot_id=taken.id, connection_config=config, resource=RESOURCE)
        made.append(restored)
        assert restored.get_info().metadata == {"team": "blue"}
        printed = restored.commands.run("echo $MARK; wc -l < /proc/net/dev; ulimit -u")
        assert printed.logs.stdout[0].text.strip() == "kept"
        again = ready(manager, restored.create_snapshot())
        settings = httpx.get(
            f"http://{config.domain}/v1/snapshots/{again.id}",
            headers={"OPEN-SANDBOX-API-KEY": config.api_key or ""},
        ).json()["settings"]
        limits = settings["resourceLimits"]
        assert (limits["pids"], limits["memory"], settings["network"]) == ("50", "512Mi", "off")
    finally:
        for sandbox in made:
            sandbox.destroy()
