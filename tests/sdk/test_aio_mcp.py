"""The tools of a sandbox, driven by the unmodified MCP client of PyPI and by `agent-sandbox`."""

import asyncio
import json
import urllib.parse
from contextlib import asynccontextmanager

import httpx
import pytest
from agent_sandbox.core.api_error import ApiError
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client

from test_aio import Provisioned

TOOLS = {
    "sandbox_execute_bash",
    "sandbox_execute_code",
    "sandbox_file_operations",
    "sandbox_str_replace_editor",
    "sandbox_get_context",
    "sandbox_get_packages",
}


@pytest.fixture(scope="module")
def aio():
    provisioned = Provisioned()
    yield provisioned
    provisioned.remove()


class Tools:
    """A connected client."""

    def __init__(self, session):
        self.session = session
        self.used = set()

    async def call(self, name, **arguments):
        """Calls a tool that must succeed."""
        self.used.add(name)
        result = await self.session.call_tool(name, arguments)
        assert not failed(result), result
        return result

    async def data(self, name, **arguments):
        return json.loads((await self.call(name, **arguments)).content[0].text)

    async def failure(self, name, **arguments):
        """The text of a call that must fail."""
        result = await self.session.call_tool(name, arguments)
        assert failed(result), result
        return result.content[0].text


def failed(result):
    """The name of the field differs between versions of the protocol's package."""
    return getattr(result, "is_error", None) or getattr(result, "isError", None)


@asynccontextmanager
async def connect(url):
    async with streamable_http_client(url) as streams:
        async with ClientSession(streams[0], streams[1]) as session:
            await session.initialize()
            yield Tools(session)


@pytest.mark.parametrize("path", ["/mcp", "/v1/mcp"])
async def test_every_tool(aio, path, mark):
    """The address of the sandbox is a prefix of the path."""
    assert urllib.parse.urlsplit(aio.url).path != "/"
    directory, file = f"/tmp/{mark}", f"/tmp/{mark}/a.py"
    async with connect(aio.url + path) as tools:
        assert {tool.name for tool in (await tools.session.list_tools()).tools} == TOOLS

        async def bash(cmd, **more):
            return await tools.data("sandbox_execute_bash", cmd=cmd, **more)

        async def files(action, path=directory, **more):
            return await tools.data("sandbox_file_operations", action=action, path=path, **more)

        async def editor(command, **more):
            return await tools.data("sandbox_str_replace_editor", command=command, path=file, **more)

        done = await bash(f"mkdir {directory}; cd {directory}; export A={mark}; (exit 3)")
        assert (done["status"], done["exit_code"], done["cwd"]) == ("completed", 3, directory)
        assert (await bash("pwd; echo $A"))["output"] == f"{directory}\n{mark}"
        assert (await bash("echo \"<$A>\"", new_session=True))["output"] == "<>"
        assert (await bash("whoami"))["output"] == "gem"

        assert (await files("write", file, content="def one():\n    return 1\n"))["bytes_written"] == 24
        await files("write", file, content="# end\n", append=True)
        assert (await files("read", file, start_line=0, end_line=1))["content"] == "def one():"
        assert (await files("replace", file, content="return 1", target="return 2"))["replaced_count"] == 1
        assert (await files("search", file, content="ret.rn"))["line_numbers"] == [1]
        assert (await files("find", pattern="*.py"))["files"] == [file]
        assert [entry["name"] for entry in (await files("list"))["files"]] == ["a.py"]
        assert (await files("grep", pattern="DEF", case_insensitive=True))["matches"][0]["line_number"] == 1
        assert (await files("glob", pattern="**/*.py"))["files"][0]["path"] == file

        assert "return 2" in (await editor("view"))["output"]
        await editor("str_replace", old_str="return 2", new_str="return 3")
        await editor("insert", insert_line=0, new_str="# top\n")
        assert "# top" not in (await editor("undo_edit"))["new_content"]

        code = await tools.data("sandbox_execute_code", code="print(20); 2 ** 10", language="python")
        assert (code["status"], code["stdout"], code["result"]) == ("ok", "20\n", "1024")
        context = await tools.data("sandbox_get_context")
        assert (context["home_dir"], "Python: 3" in context["info"]) == ("/home/gem", True)
        if "Node.js: none" not in context["info"]:
            script = await tools.data("sandbox_execute_code", code="console.log(10 + 20)", language="javascript")
            assert (script["status"], script["stdout"]) == ("ok", "30\n")
        packages = (await tools.call("sandbox_get_packages")).content[0].text
        assert "Python Packages:" in packages and "Node.js Packages:" in packages
        assert "Node.js" not in (await tools.call("sandbox_get_packages", language="python")).content[0].text
        assert tools.used == TOOLS


async def test_failures_are_texts_for_the_model(aio):
    async with connect(aio.url + "/mcp") as tools:
        missing = await tools.failure("sandbox_file_operations", action="read", path="/no/such")
        assert "No such file or directory" in missing
        assert "Missing argument `cmd`" in await tools.failure("sandbox_execute_bash")
        assert "Unknown argument `command`" in await tools.failure("sandbox_execute_bash", command="true")
        assert "1 to 300" in await tools.failure("sandbox_execute_code", code="1", timeout=0)
        with pytest.raises(Exception, match="unknown tool `browser_navigate`"):
            await tools.session.call_tool("browser_navigate", {})
        # The client goes on after all of them.
        assert (await tools.data("sandbox_execute_bash", cmd="echo on"))["output"] == "on"


async def test_parallel_calls_do_not_mix(aio):
    async with connect(aio.url + "/mcp") as tools:

        async def run(number):
            command = f"echo {number}; sleep 0.05; echo {number}"
            done = await tools.data("sandbox_execute_bash", cmd=command, new_session=number % 2 == 0, timeout=60)
            return done["output"]

        outputs = await asyncio.gather(*(run(number) for number in range(12)))
        assert outputs == [f"{number}\n{number}" for number in range(12)]


def test_tools_by_the_sdk(aio):
    mcp = aio.sdk.mcp
    assert mcp.list_mcp_servers().data == ["sandbox"]
    assert {tool.name for tool in mcp.list_mcp_tools("sandbox").data.tools} == TOOLS
    done = mcp.execute_mcp_tool("sandbox", "sandbox_execute_bash", request={"cmd": "echo hi"})
    assert json.loads(done.data.content[0].text)["output"] == "hi"
    wrong = mcp.execute_mcp_tool("sandbox", "sandbox_execute_bash", request={})
    assert not wrong.success and "Missing argument `cmd`" in wrong.data.content[0].text
    for server, tool in [("browser", "navigate"), ("sandbox", "navigate")]:
        with pytest.raises(ApiError) as caught:
            mcp.execute_mcp_tool(server, tool, request={})
        assert (caught.value.status_code, caught.value.body["success"]) == (404, False)


def test_wrong_address_reveals_nothing(aio):
    address, _ = aio.url.rsplit(".", 1)
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    headers = {"accept": "application/json, text/event-stream"}
    answer = httpx.post(f"{address}.{'a' * 20}/mcp", json=message, headers=headers)
    assert (answer.status_code, answer.json()["message"]) == (404, "Not Found")
