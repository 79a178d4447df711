"""The asynchronous SDK, in direct and in server-proxy mode."""

import asyncio
import os
from datetime import timedelta

import pytest
from opensandbox import Sandbox, SandboxManager
from opensandbox.exceptions import SandboxApiException
from opensandbox.models.execd import ExecutionHandlers, RunCommandOpts
from opensandbox.models.filesystem import SearchEntry, WriteEntry
from opensandbox.models.sandboxes import SandboxFilter

RESOURCE = {"cpu": "1", "memory": "256Mi"}


@pytest.fixture
async def sandbox(async_config):
    sandbox = await Sandbox.create("python:3.12", connection_config=async_config, resource=RESOURCE)
    yield sandbox
    await sandbox.destroy()


def output(execution):
    return "".join(message.text for message in execution.logs.stdout)


async def test_output_reaches_handlers_as_it_comes(sandbox):
    seen = []

    async def take(message):
        seen.append(message.text)

    handlers = ExecutionHandlers(on_stdout=take, on_stderr=take)
    execution = await sandbox.commands.run("echo a; echo b >&2; exit 3", handlers=handlers)
    assert sorted(seen) == ["a\n", "b\n"]
    assert execution.exit_code == 3


async def test_many_commands_at_once(sandbox):
    runs = [sandbox.commands.run(f"echo {n}; exit {n}") for n in range(20)]
    executions = await asyncio.gather(*runs)
    assert [(output(e), e.exit_code) for e in executions] == [(f"{n}\n", n) for n in range(20)]


async def test_a_background_command_and_its_logs(sandbox):
    execution = await sandbox.commands.run("echo started; exec sleep 600", opts=RunCommandOpts(background=True))
    cursor, content = 0, ""
    while content != "started\n":
        logs = await sandbox.commands.get_background_command_logs(execution.id, cursor=cursor)
        cursor, content = logs.cursor, content + logs.content
    assert (await sandbox.commands.get_command_status(execution.id)).running
    await sandbox.commands.interrupt(execution.id)
    assert not (await sandbox.commands.get_command_status(execution.id)).running


async def test_sessions_are_isolated(sandbox):
    one, two = await asyncio.gather(sandbox.commands.create_session(), sandbox.commands.create_session())
    await sandbox.commands.run_in_session(one, "export X=one; cd /tmp")
    assert output(await sandbox.commands.run_in_session(one, "echo $X $PWD")) == "one /tmp\n"
    assert output(await sandbox.commands.run_in_session(two, "echo ${X:-none}")) == "none\n"
    limited = await sandbox.commands.run_in_session(two, "sleep 60", timeout=timedelta(milliseconds=200))
    assert limited.exit_code == -1


async def test_files_stream_in_and_out(sandbox):
    content = os.urandom(1 << 20)
    await sandbox.files.write_files([WriteEntry(path=f"/tmp/many/{n}.bin", data=content) for n in range(5)])
    pieces = [piece async for piece in await sandbox.files.read_bytes_stream("/tmp/many/3.bin")]
    assert b"".join(pieces) == content
    found = await sandbox.files.search(SearchEntry(path="/tmp/many", pattern="*.bin"))
    assert len(found) == 5


async def test_pause_resume_renew_and_kill(async_config):
    sandbox = await Sandbox.create("python:3.12", connection_config=async_config, resource=RESOURCE)
    await sandbox.pause()
    assert (await sandbox.get_info()).status.state == "Paused"
    again = await Sandbox.resume(sandbox.id, connection_config=async_config)
    assert (await again.commands.run("true")).exit_code == 0
    await again.renew(timedelta(minutes=30))
    await again.kill()
    with pytest.raises(SandboxApiException) as caught:
        await again.get_info()
    assert caught.value.status_code == 404
    await again.close()
    await sandbox.close()


async def test_sandboxes_made_at_once_are_all_listed(async_config, mark):
    made = await asyncio.gather(
        *(
            Sandbox.create("python:3.12", connection_config=async_config, resource=RESOURCE, metadata={"mark": mark})
            for _ in range(5)
        )
    )
    manager = await SandboxManager.create(async_config)
    try:
        listed = await manager.list_sandbox_infos(SandboxFilter(metadata={"mark": mark}))
        assert {info.id for info in listed.sandbox_infos} == {sandbox.id for sandbox in made}
    finally:
        await asyncio.gather(*(sandbox.destroy() for sandbox in made))
    listed = await manager.list_sandbox_infos(SandboxFilter(metadata={"mark": mark}))
    assert listed.sandbox_infos == []
    await manager.close()


async def test_the_request_id_is_known_to_exceptions(async_config):
    with pytest.raises(SandboxApiException) as caught:
        await Sandbox.create("python:3.12", connection_config=async_config, resource={"memory": "lots"})
    assert caught.value.status_code == 400
    assert caught.value.request_id
    assert "lots" in str(caught.value)
