"""Every method of the `agent-sandbox` SDK that the server serves, with its sync and its async client. A method that no check
below calls fails the test, so a new version of the SDK cannot bring one that is forgotten. Numbers are those of the contract."""

import asyncio
import inspect
import io
import threading
import uuid
import zipfile

import httpx
import pytest
from agent_sandbox import AsyncSandbox, Sandbox
from agent_sandbox.core.api_error import ApiError

from test_aio import aio  # noqa: F401 (a fixture)

#: Parts of the SDK that sandboxes do not have; their requests get 501.
UNSERVED_PARTS = {
    "browser", "browser_captcha", "browser_cookies", "browser_network", "browser_page", "browser_state", "browser_tabs",
    "display", "proxy", "util",
}  # fmt: skip
PARTS = {name for name, value in inspect.getmembers(Sandbox) if isinstance(value, property)}


def methods_of(part):
    """The methods of a part, by name."""
    client = type(getattr(Sandbox(base_url="http://127.0.0.1:1"), part))
    return {name: method for name, method in inspect.getmembers(client, inspect.isfunction) if not name.startswith("_")}


class RecordingClient:
    """Calls either client of the SDK as `client.part.method(...)`, and records the names of the methods. A stream is
    collected as bytes."""

    def __init__(self, url):
        self.url, self.called = url, set()
        #: Called when the response to a watch's stream has begun.
        self.on_stream = lambda: None

    def __getattr__(self, part):
        client = self

        class Part:
            def __getattr__(self, method):
                def call(*args, **kwargs):
                    client.called.add(f"{part}.{method}")
                    return client.finish(getattr(getattr(client.sdk, part), method)(*args, **kwargs))

                return call

        return Part()

    def note_response(self, response):
        if response.request.url.path.endswith("/events"):
            threading.Thread(target=self.on_stream).start()


class SyncClient(RecordingClient):
    def __init__(self, url):
        super().__init__(url)
        self.http = httpx.Client(timeout=60, event_hooks={"response": [self.note_response]})
        self.sdk = Sandbox(base_url=url, httpx_client=self.http)

    def finish(self, result):
        return b"".join(result) if inspect.isgenerator(result) else result

    def close(self):
        self.http.close()


class AsyncClient(RecordingClient):
    def __init__(self, url):
        super().__init__(url)

        async def note(response):
            self.note_response(response)

        self.loop = asyncio.new_event_loop()
        self.http = httpx.AsyncClient(timeout=60, event_hooks={"response": [note]})
        self.sdk = AsyncSandbox(base_url=url, httpx_client=self.http)

    def finish(self, result):
        async def collect():
            return b"".join([piece async for piece in result])

        return self.loop.run_until_complete(collect() if inspect.isasyncgen(result) else result)

    def close(self):
        self.loop.run_until_complete(self.http.aclose())
        self.loop.close()


def new_name():
    return "n" + uuid.uuid4().hex[:12]


def check_sandbox(sdk):
    assert sdk.sandbox.get_context().home_dir == "/home/gem"
    assert isinstance(sdk.sandbox.get_python_packages().data, list)
    assert isinstance(sdk.sandbox.get_nodejs_packages().data, list)
    name = new_name()
    assert sdk.sandbox.register_hook(name=name, command="true", timeout=1).data.name == name
    assert name in [hook.name for hook in sdk.sandbox.list_hooks(event="shutdown").data]
    assert sdk.sandbox.remove_hook(name).success
    assert name not in [hook.name for hook in sdk.sandbox.list_hooks().data]


def check_shell(sdk):
    name = new_name()
    assert sdk.shell.create_session(id=name, exec_dir="/tmp").data.session_id == name
    assert sdk.shell.exec_command(id=name, command="pwd").data.output == "/tmp"
    assert sdk.shell.update_session(id=name, no_change_timeout=1).success
    quiet = sdk.shell.exec_command(id=name, command="sleep 2; read answer; echo got $answer").data
    assert quiet.status == "no_change_timeout", "the updated limit applies"
    assert sdk.shell.write_to_process(id=name, input="it", press_enter=True).data.status
    assert sdk.shell.wait_for_process(id=name, seconds=20).data.status == "completed"
    assert "got it" in sdk.shell.view(id=name).data.output
    assert name in sdk.shell.list_sessions().data.sessions
    stats = sdk.shell.get_session_stats().data
    assert stats.total_sessions >= 1, stats
    assert sdk.shell.get_terminal_url().data.startswith("http")
    assert sdk.shell.cleanup_session(name).success
    assert sdk.shell.create_session(id=name).success
    assert sdk.shell.kill_process(id=name).data.status == "terminated"
    other = sdk.shell.create_session().data.session_id
    assert sdk.shell.cleanup_all_sessions().success
    assert other not in sdk.shell.list_sessions().data.sessions


def check_bash(sdk):
    name = new_name()
    assert sdk.bash.create_session(session_id=name, exec_dir="/tmp").data.session_id == name
    run = sdk.bash.exec(session_id=name, command="echo $A; read x; echo $x; sleep 60", env={"A": "1"}, async_mode=True).data
    first = sdk.bash.output(session_id=name, command_id=run.command_id, wait=True, wait_timeout=10).data
    assert first.stdout == "1\n"
    sdk.bash.write(session_id=name, input="two\n", command_id=run.command_id)
    assert sdk.bash.output(session_id=name, offset=first.offset, wait=True, wait_timeout=10).data.stdout == "two\n"
    assert name in [session.session_id for session in sdk.bash.sessions().data]
    sdk.bash.kill(session_id=name, signal="SIGKILL")
    assert sdk.bash.output(session_id=name, offset=6, wait=True, wait_timeout=10).data.command.status == "killed"
    sdk.bash.close_session(name)
    assert name not in [session.session_id for session in sdk.bash.sessions().data]


def check_files(sdk):
    root = f"/home/gem/{new_name()}"
    path = f"{root}/a.txt"
    sdk.file.write_file(file=path, content="one\ntwo two\nthree\n")
    assert sdk.file.read_file(file=path, start_line=1, end_line=2).data.content.strip() == "two two"
    assert sdk.file.replace_in_file(file=path, old_str="two", new_str="2").data.replaced_count == 2
    found = sdk.file.search_in_file(file=path, regex="^t.*e").data
    assert found.matches == ["three"] and len(found.line_numbers) == 1, found
    assert sdk.file.find_files(path=root, glob="*.txt").data.files == [path]
    assert sdk.file.grep_files(path=root, pattern="2 2").data.matches[0].line_number == 2
    assert [entry.path for entry in sdk.file.glob_files(path=root, pattern="**/*").data.files] == [path]
    assert [entry.path for entry in sdk.file.list_path(path=root).data.files] == [path]
    binary = bytes(range(256)) * 100
    uploaded = sdk.file.upload_file(file=("b.bin", binary, "application/octet-stream"), path=f"{root}/b.bin").data
    assert (uploaded.file_path, uploaded.file_size) == (f"{root}/b.bin", len(binary))
    assert sdk.file.download_file(path=f"{root}/b.bin") == binary
    assert "2 2" in sdk.file.str_replace_editor(command="view", path=path).data.output


def check_watches(sdk):
    root = f"/home/gem/{new_name()}"
    sdk.file.write_file(file=f"{root}/first", content="x")
    created = sdk.file.watch_create(path=root, debounce=50)["watcher_id"]
    assert created in [watch["watcher_id"] for watch in sdk.file.watch_list()["watchers"]]
    sdk.file.write_file(file=f"{root}/second", content="x")
    page = sdk.file.watch_poll(created, timeout=20)
    assert f"{root}/second" in [event["path"] for event in page["events"]], page
    assert sdk.file.watch_wait(path=f"{root}/first", timeout=20, event_types=["create"])["timed_out"] is False

    # The stream ends with its watch. This version of the SDK cannot parse it, but has all of it in its error.
    def remove():
        httpx.delete(f"{sdk.url}/v1/file/watch/{created}", timeout=20).raise_for_status()

    sdk.on_stream = remove
    with pytest.raises(ApiError) as stream:
        sdk.file.watch_events(created)
    assert stream.value.status_code == 200 and "event: file_change" in stream.value.body, stream.value
    other = sdk.file.watch_create(path=root)["watcher_id"]
    sdk.file.watch_stop(other)
    assert sdk.file.watch_list()["watchers"] == []


def check_j18_jupyter(sdk):
    name = new_name()
    assert sdk.jupyter.get_info().data.available_kernels
    assert sdk.jupyter.create_session(session_id=name, cwd="/tmp").data.session_id == name
    assert sdk.jupyter.execute_code(code="x = 20", session_id=name).data.status == "ok"
    shown = sdk.jupyter.execute_code(code="x + 1", session_id=name).data
    assert shown.outputs[0].data["text/plain"] == "21"
    raised = sdk.jupyter.execute_code(code="1/0", session_id=name)
    assert (raised.success, raised.data.status, raised.data.outputs[0].ename) == (False, "error", "ZeroDivisionError")
    picture = "class I:\n  def _repr_png_(self): return b'png'\ndisplay(I())"
    assert sdk.jupyter.execute_code(code=picture, session_id=name).data.outputs[0].data["image/png"] == "cG5n"
    late = sdk.jupyter.execute_code(code="import time; time.sleep(60)", session_id=name, timeout=1)
    assert (late.success, late.data.status) == (False, "timeout")
    assert sdk.jupyter.execute_code(code="x", session_id=name).data.outputs[0].data["text/plain"] == "20"
    assert name in sdk.jupyter.list_sessions().data.sessions
    assert sdk.jupyter.delete_session(name).success
    sdk.jupyter.create_session(session_id=name)
    assert sdk.jupyter.delete_sessions().success
    assert not sdk.jupyter.list_sessions().data.sessions


def check_j19_nodejs(sdk):
    assert sdk.nodejs.get_info().data.node_version
    files = {"lib.js": "module.exports = 5"}
    code = "console.log(require('./lib.js') + require('fs').readFileSync(0, 'utf8'))"
    alone = sdk.nodejs.execute_code(code=code, files=files, stdin="in").data
    assert (alone.status, alone.stdout.strip()) == ("ok", "5in"), alone
    name = new_name()
    assert sdk.nodejs.create_session(session_id=name, cwd="/tmp").data.session_id == name
    sdk.nodejs.execute_code(code="var kept = 20", session_id=name, stateful=True)
    shown = sdk.nodejs.execute_code(code="kept + 1", session_id=name, stateful=True).data
    assert "21" in str(shown.outputs), shown
    raised = sdk.nodejs.execute_code(code="throw new RangeError('no')", session_id=name, stateful=True)
    assert (raised.success, raised.data.status) == (False, "error")
    assert sdk.nodejs.get_session(name).data.session.session_id == name
    assert sdk.nodejs.update_session(name, cwd="/usr").success
    assert "/usr" in str(sdk.nodejs.execute_code(code="process.cwd()", session_id=name, stateful=True).data.outputs)
    assert name in str(sdk.nodejs.list_sessions().data)
    assert sdk.nodejs.delete_session(name).success
    assert name not in str(sdk.nodejs.list_sessions().data)


def check_j19_code(sdk):
    assert {info.language for info in sdk.code.get_info().data.languages} >= {"python", "javascript"}
    for language in ("python", "javascript"):
        ran = sdk.code.execute_code(language=language, code="6 * 7").data
        assert ran.status == "ok" and "42" in str(ran.outputs), ran
        name = new_name()
        keep = "kept = 1" if language == "python" else "var kept = 1"
        sdk.code.execute_code(language=language, code=keep, session_id=name, stateful=True)
        again = sdk.code.execute_code(language=language, code="kept + 1", session_id=name, stateful=True).data
        assert "2" in str(again.outputs), again


def check_skills(sdk):
    packed = io.BytesIO()
    name = new_name()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("SKILL.md", f"---\nname: {name}\ndescription: Works.\n---\nText\n")
    added = sdk.skills.register_skills(file=("skill.zip", packed.getvalue(), "application/zip")).data
    assert [skill.name for skill in added.registered] == [name]
    assert [skill.name for skill in sdk.skills.list_metadata(names=name).data.skills] == [name]
    assert sdk.skills.get_content(name).data.content == "Text\n"
    assert sdk.skills.delete_skill(name).data.name == name
    assert sdk.skills.clear_skills().data["count"] == 0


def check_mcp(sdk):
    (server,) = sdk.mcp.list_mcp_servers().data
    assert "sandbox_execute_bash" in [tool.name for tool in sdk.mcp.list_mcp_tools(server).data.tools]
    called = sdk.mcp.execute_mcp_tool(server, "sandbox_execute_bash", request={"cmd": "echo by a tool"}).data
    assert "by a tool" in str(called.content)


def check_auth(sdk):
    assert sdk.auth.authenticate()["status"] == "ok"
    assert len(sdk.auth.create_ticket()["ticket"]) > 20


CHECKS = [
    check_sandbox, check_shell, check_bash, check_files, check_watches, check_j18_jupyter, check_j19_nodejs, check_j19_code,
    check_skills, check_mcp, check_auth,
]  # fmt: skip


@pytest.mark.parametrize("client", [SyncClient, AsyncClient], ids=["sync", "async"])
def test_every_served_method_works(aio, client):
    sdk = client(aio.url)
    try:
        for check in CHECKS:
            check(sdk)
        served = {f"{part}.{method}" for part in PARTS - UNSERVED_PARTS for method in methods_of(part)}
        assert served - sdk.called == set(), "methods that no check calls"
    finally:
        sdk.close()


def test_parts_that_are_not_served_are_refused_with_501(aio):
    sdk, refused = Sandbox(base_url=aio.url), 0
    for part in sorted(UNSERVED_PARTS & PARTS):
        for name, method in methods_of(part).items():
            needs = [one for one in inspect.signature(method).parameters.values() if one.default is one.empty]
            # `self` is the only argument that can be given without knowing the method.
            if len(needs) > 1:
                continue
            with pytest.raises(ApiError) as caught:
                answer = getattr(getattr(sdk, part), name)()
                b"".join(answer) if inspect.isgenerator(answer) else None
            assert caught.value.status_code == 501, f"{part}.{name}: {caught.value}"
            assert caught.value.body["success"] is False and caught.value.body["message"], f"{part}.{name}"
            refused += 1
    assert refused > 10
