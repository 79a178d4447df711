"""Variables that are saved for later commands, with the official client."""

import pytest
from opensandbox import Sandbox, SandboxSync
from opensandbox.models.execd import RunCommandOpts

RESOURCE = {"cpu": "1", "memory": "512Mi"}

VALUES = ["plain", "two words", "it's", 'say "so"', "a\nb\tc", "$HOME", "back\\slash", "", "ünï"]


def test_set_env_is_seen_by_commands_and_sessions(config):
    sandbox = SandboxSync.create("python:3.12", connection_config=config, resource=RESOURCE)
    try:
        for number, value in enumerate(VALUES):
            sandbox.commands.set_env(f"V{number}", value)
        for number, value in enumerate(VALUES):
            shown = sandbox.commands.run(f'printf %s "$V{number}"').text
            assert shown == value, value
        session = sandbox.commands.create_session()
        assert sandbox.commands.run_in_session(session, 'echo "$V1"').text.strip() == "two words"
        sandbox.commands.set_env("V1", "later")
        assert sandbox.commands.run("echo $V1").text.strip() == "later"
        assert sandbox.commands.run("echo $OPENSANDBOX_ID").text.strip() == sandbox.id
    finally:
        sandbox.destroy()


def test_saved_variables_expand_in_working_directories(config):
    sandbox = SandboxSync.create("python:3.12", connection_config=config, resource=RESOURCE)
    try:
        sandbox.commands.set_env("PLACE", "/tmp/a place")
        session = sandbox.commands.create_session(working_directory="$PLACE/new")
        run = sandbox.commands.run_in_session
        assert run(session, "pwd").text.strip() == "/tmp/a place/new"
        assert run(session, "pwd", working_directory="${PLACE}").text.strip() == "/tmp/a place"
        assert run(session, "pwd", working_directory="$PLACE/none").exit_code == 1
        opts = RunCommandOpts(working_directory="$PLACE")
        assert sandbox.commands.run("pwd", opts=opts).text.strip() == "/tmp/a place"
        opts = RunCommandOpts(working_directory="$PLACE", envs={"PLACE": "/usr"})
        assert sandbox.commands.run("pwd", opts=opts).text.strip() == "/usr"
    finally:
        sandbox.destroy()


@pytest.mark.asyncio
async def test_set_env_with_the_async_client(async_config):
    sandbox = await Sandbox.create("python:3.12", connection_config=async_config, resource=RESOURCE)
    try:
        await sandbox.commands.set_env("KEPT", "yes")
        assert (await sandbox.commands.run("echo $KEPT")).text.strip() == "yes"
    finally:
        await sandbox.destroy()
