"""The reference's MCP server, driven by a real MCP client over its standard input and output."""

import json
import os
import pathlib
import sys
from contextlib import asynccontextmanager

import pytest
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

from conftest import KEY, URL

SERVER = pathlib.Path(sys.executable).with_name("opensandbox-mcp")


@asynccontextmanager
async def tools(proxied):
    words = ["--transport", "stdio", "--domain", URL.split("://", 1)[1], "--protocol", "http"]
    words += ["--use-server-proxy"] if proxied else []
    env = {"PATH": os.environ["PATH"], **({"OPEN_SANDBOX_API_KEY": KEY} if KEY else {})}
    async with stdio_client(StdioServerParameters(command=str(SERVER), args=words, env=env)) as (read, write):
        async with ClientSession(read, write) as session:
            await session.initialize()

            async def call(name, **arguments):
                result = await session.call_tool(name, arguments)
                text = "".join(part.text for part in result.content if part.type == "text")
                assert not failed(result), (name, text)
                return json.loads(text)

            yield session, call


def failed(result):
    """The name of the field differs between versions of the protocol's package."""
    return getattr(result, "is_error", None) or getattr(result, "isError", None)


@pytest.mark.parametrize("proxied", [False, True], ids=["direct", "server-proxy"])
async def test_every_tool(proxied):
    async with tools(proxied) as (session, call):
        offered = {tool.name for tool in (await session.list_tools()).tools}
        made = await call("sandbox_create", image="python:3.12", env={"WORD": "given"}, timeout_seconds=600)
        sandbox = made["sandbox_id"]
        used = {"sandbox_create"}

        async def use(name, **arguments):
            used.add(name)
            return await call(name, sandbox_id=sandbox, **arguments)

        try:
            assert (await use("sandbox_get_info"))["id"] == sandbox
            used.add("sandbox_list")
            assert sandbox in json.dumps(await call("sandbox_list"))
            assert "true" in json.dumps(await use("sandbox_healthcheck")).lower()
            await use("sandbox_renew", timeout_seconds=1200)
            assert "cpu_count" in json.dumps(await use("sandbox_get_metrics"))
            assert "/proxy/8080" in json.dumps(await use("sandbox_get_endpoint", port=8080))
            await use("sandbox_connect")

            ran = await use("command_run", command="echo $WORD")
            assert "given" in json.dumps(ran["logs"])
            running = await use("command_run", command="sleep 600", background=True)
            await use("command_interrupt", execution_id=running["id"])

            await use("file_create_directories", entries=[{"path": "/data"}])
            await use("file_write", path="/data/a.txt", content="one two")
            await use("file_replace_contents", entries=[{"path": "/data/a.txt", "old_content": "two", "new_content": "three"}])
            await use("file_move", entries=[{"source": "/data/a.txt", "destination": "/data/b.txt"}])
            assert (await use("file_read", path="/data/b.txt"))["content"] == "one three"
            assert "/data/b.txt" in json.dumps(await use("file_search", path="/data", pattern="*.txt"))
            await use("file_delete", paths=["/data/b.txt"])
            await use("file_delete_directories", paths=["/data"])
        finally:
            await use("sandbox_kill")
        assert used == offered
