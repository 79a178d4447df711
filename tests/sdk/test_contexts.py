"""Code contexts through the official code interpreter SDK, in direct and in server-proxy mode."""

import asyncio
import base64
import os
import threading

import httpx
import pytest
from code_interpreter import CodeInterpreter, CodeInterpreterSync, SupportedLanguage
from code_interpreter.models.code import CodeContext
from conftest import KEYLESS_URL, Box
from opensandbox import Sandbox, SandboxSync
from opensandbox.exceptions import SandboxApiException
from opensandbox.models.execd import ExecutionHandlers
from opensandbox.models.execd_sync import ExecutionHandlersSync

RESOURCE = {"cpu": "1", "memory": "512Mi"} if os.geteuid() == 0 else {}

#: Matplotlib and pandas for the interpreter inside, in a directory that the server without a key may mount.
LIBRARIES = os.environ.get("CORACLE_TEST_LIBRARIES", "")
needs_libraries = pytest.mark.skipif(
    not (LIBRARIES and KEYLESS_URL), reason="CORACLE_TEST_LIBRARIES names no directory"
)


#: The entrypoint in the interpreter's own examples, for any image.
ENTRYPOINT = ["/opt/code-interpreter/code-interpreter.sh"]


@pytest.fixture
def codes(config):
    sandbox = SandboxSync.create(
        "opensandbox/code-interpreter:latest",
        connection_config=config,
        resource=RESOURCE,
        entrypoint=ENTRYPOINT,
        env={"JUPYTER_PORT": "9999"},
    )
    assert sandbox.get_info().entrypoint == ENTRYPOINT
    yield CodeInterpreterSync.create(sandbox).codes
    sandbox.destroy()


@pytest.fixture
async def async_codes(async_config):
    sandbox = await Sandbox.create(
        "opensandbox/code-interpreter:latest", connection_config=async_config, resource=RESOURCE
    )
    yield (await CodeInterpreter.create(sandbox)).codes
    await sandbox.destroy()


def stdout(execution):
    return "".join(message.text for message in execution.logs.stdout)


def test_interpreter_is_available_at_once_and_counts_executions(codes):
    execution = codes.run("print('hi')\nresult = 2 + 2\nresult")
    assert (execution.result[0].text, stdout(execution), execution.error) == ("4", "hi\n", None)
    assert (execution.execution_count, execution.exit_code) == (1, None)
    assert execution.complete is not None and execution.id
    again = codes.run("result + 1", language=SupportedLanguage.PYTHON)
    assert (again.result[0].text, again.execution_count, again.id) == ("5", 2, execution.id)


def test_errors_have_name_and_traceback(codes):
    execution = codes.run("def f():\n    return 1 / 0\n\nf()")
    assert (execution.error.name, execution.error.value) == ("ZeroDivisionError", "division by zero")
    assert "    return 1 / 0" in execution.error.traceback
    assert execution.complete is None
    assert codes.run("print(undefined)").error.name == "NameError"
    assert codes.run("if").error.name == "SyntaxError"
    assert codes.run("input()").error.name == "StdinNotImplementedError"


def test_contexts_are_isolated_listed_and_deleted(codes):
    one, two = (codes.create_context(SupportedLanguage.PYTHON) for _ in range(2))
    codes.run("secret = 'one'", context=one)
    assert codes.run("secret", context=one).result[0].text == "'one'"
    assert codes.run("secret", context=two).error.name == "NameError"
    assert {context.id for context in codes.list_contexts("python")} == {one.id, two.id}
    assert codes.get_context(one.id) == one
    codes.delete_context(one.id)
    with pytest.raises(SandboxApiException) as caught:
        codes.get_context(one.id)
    assert caught.value.status_code == 404
    with pytest.raises(SandboxApiException):
        codes.run("1", context=one)
    codes.delete_contexts("python")
    assert codes.list_contexts("python") == []


def test_bash_keeps_state_and_reports_its_status(codes):
    context = codes.create_context(SupportedLanguage.BASH)
    codes.run("cd /usr; f() { echo f $1; }", context=context)
    execution = codes.run("pwd; f 1; (exit 7)", context=context)
    assert (stdout(execution), execution.error.value) == ("/usr\nf 1\n", "7")
    assert execution.execution_count == 2


def test_unavailable_language_is_refused(codes):
    with pytest.raises(SandboxApiException) as caught:
        codes.create_context("cobol")
    assert caught.value.status_code == 400
    with pytest.raises(SandboxApiException):
        codes.run("1", context=CodeContext(id="0" * 32, language="python"))


def test_output_comes_while_code_runs_and_an_interrupt_ends_it(codes):
    context = codes.create_context(SupportedLanguage.PYTHON)
    printed = threading.Event()
    handlers = ExecutionHandlersSync(on_stdout=lambda message: printed.set())
    ended = []
    code = "import time\nprint('on')\ntime.sleep(600)"
    thread = threading.Thread(target=lambda: ended.append(codes.run(code, context=context, handlers=handlers)))
    thread.start()
    assert printed.wait(30)
    assert "busy" in codes.run("1", context=context).error.value
    codes.interrupt(context.id)
    thread.join(30)
    assert ended[0].error.name == "KeyboardInterrupt"
    assert codes.run("2 + 2", context=context).result[0].text == "4"


def test_killed_kernel_is_reported_and_replaced(codes):
    context = codes.create_context(SupportedLanguage.PYTHON)
    codes.run("x = 1", context=context)
    assert codes.run("import os; os.kill(os.getpid(), 9)", context=context).error.name == "KernelDied"
    assert codes.run("x", context=context).error.name == "NameError"


async def test_contexts_run_side_by_side(async_codes):
    contexts = await asyncio.gather(*(async_codes.create_context("python") for _ in range(5)))
    code = "import asyncio\nawait asyncio.sleep(1)\n{}"
    runs = (async_codes.run(code.format(n), context=context) for n, context in enumerate(contexts))
    executions = await asyncio.gather(*runs)
    assert [execution.result[0].text for execution in executions] == ["0", "1", "2", "3", "4"]


async def test_handlers_see_all_events_in_order(async_codes):
    seen = []

    def note(kind):
        async def handler(event):
            seen.append(kind)

        return handler

    handlers = ExecutionHandlers(
        on_init=note("init"),
        on_stdout=note("stdout"),
        on_stderr=note("stderr"),
        on_result=note("result"),
        on_execution_complete=note("complete"),
        on_error=note("error"),
    )
    code = "import sys\nprint(1)\ndisplay(2)\nprint(3, file=sys.stderr)\n4"
    execution = await async_codes.run(code, language="python", handlers=handlers)
    assert seen == ["init", "stdout", "result", "stderr", "result", "complete"]
    assert [result.text for result in execution.result] == ["2", "4"]


@pytest.fixture
def forms():
    """Runs code where matplotlib and pandas are available, and returns the formats of all results."""
    with httpx.Client(base_url=KEYLESS_URL, timeout=httpx.Timeout(60)) as api:
        volume = {"name": "libraries", "host": {"path": LIBRARIES}, "mountPath": "/opt/libraries", "readOnly": True}
        env = {"PYTHONPATH": "/opt/libraries", "MPLCONFIGDIR": "/tmp/matplotlib"}
        box = Box(api, {"volumes": [volume], "env": env, "resourceLimits": RESOURCE})

        def run(code):
            answer = box.execd.post("/code", json={"code": code, "context": {"language": "python"}}, timeout=120)
            assert answer.status_code == 200, answer.text
            happened = [httpx.Response(200, text=line).json() for line in answer.text.split("\n\n") if line]
            assert happened[-1]["type"] == "execution_complete", happened[-1]
            return [event["results"] for event in happened if event["type"] == "result"]

        yield run
        box.remove()


@needs_libraries
def test_figures_come_as_png_and_frames_as_html(forms):
    plot = "import matplotlib.pyplot as plt\nfigure, axes = plt.subplots()\naxes.plot([1, 2, 4])\n"
    for code in [plot + "plt.show()", plot + "pass", plot + "figure"]:
        [picture] = forms(code)
        assert base64.b64decode(picture["image/png"]).startswith(b"\x89PNG\r\n")
        assert picture["text"].startswith("<Figure size")
    two = forms("for n in 1, 2:\n    plt.figure()\n    plt.plot([n])")
    assert len(two) == 2
    assert forms("plt.close('all')") == []
    [frame] = forms("import pandas\npandas.DataFrame({'a': [1, 2]})")
    assert "<table" in frame["text/html"] and frame["text"] == frame["text/plain"]
    assert frame["text"].split() == ["a", "0", "1", "1", "2"]


PICTURE = """
class Picture:
    def _repr_png_(self):
        return b"\\x89PNG\\r\\n" + bytes(range(256))
    def __repr__(self):
        return "a picture"
"""
PNG = b"\x89PNG\r\n" + bytes(range(256))


def test_pictures_reach_sdk_users_as_text_and_as_files(config):
    """The SDK keeps only the text of a result; a file that the code wrote is downloaded byte for byte."""
    sandbox = SandboxSync.create("opensandbox/code-interpreter:latest", connection_config=config, resource=RESOURCE)
    codes = CodeInterpreterSync.create(sandbox).codes
    shown = codes.run(PICTURE + "open('/tmp/p.png', 'wb').write(Picture()._repr_png_());\nPicture()", language="python")
    assert [result.text for result in shown.result] == ["a picture"]
    assert sandbox.files.read_bytes("/tmp/p.png") == PNG
    sandbox.destroy()


def test_pictures_are_in_the_event_stream(box):
    answer = box.execd.post("/code", json={"code": PICTURE + "Picture()", "context": {"language": "python"}})
    assert answer.status_code == 200, answer.text
    events = [httpx.Response(200, text=line).json() for line in answer.text.split("\n\n") if line]
    [results] = [event["results"] for event in events if event["type"] == "result"]
    assert base64.b64decode(results["image/png"]) == PNG and results["text/plain"] == "a picture"
