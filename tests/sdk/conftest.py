"""Shared fixtures: the server, and a sandbox that is removed again."""

import json
import os
import uuid
from datetime import timedelta

import httpx
import pytest
from opensandbox.config import ConnectionConfig, ConnectionConfigSync

URL = os.environ.get("CORACLE_URL", "").rstrip("/")
KEY = os.environ.get("CORACLE_API_KEY", "")
SECRETS = os.environ.get("CORACLE_TEST_SECRETS", "")
KEYLESS_URL = os.environ.get("CORACLE_KEYLESS_URL", "").rstrip("/")

#: The request that the SDK sends with its defaults.
CREATE = {
    "image": {"uri": "python:3.12"},
    "timeout": 600,
    "resourceLimits": {"cpu": "1", "memory": "512Mi"},
    "entrypoint": ["tail", "-f", "/dev/null"],
    "secureAccess": False,
}


def pytest_configure(config):
    if not URL:
        pytest.exit("CORACLE_URL names no server to test", returncode=2)


def remember(tokens):
    """Records issued tokens, so that the server's log can be searched for them."""
    if SECRETS:
        with open(SECRETS, "a") as notes:
            notes.writelines(f"{token}\n" for token in tokens)


class Box:
    """A sandbox by plain HTTP: `api` is the lifecycle API, `execd` its execution API."""

    def __init__(self, api, change=None):
        self.api = api
        answer = api.post("/v1/sandboxes", json={**CREATE, **(change or {})})
        assert answer.status_code == 202, answer.text
        self.created = answer.json()
        self.id = self.created["id"]
        self.execd = self.port(44772)

    def endpoint(self, port):
        answer = self.api.get(f"/v1/sandboxes/{self.id}/endpoints/{port}", params={"use_server_proxy": "false"})
        assert answer.status_code == 200, answer.text
        remember(answer.json()["headers"].values())
        return answer.json()

    def port(self, port):
        """A client of one port that has only the sandbox's token."""
        endpoint = self.endpoint(port)
        return httpx.Client(
            base_url="http://" + endpoint["endpoint"], headers=endpoint["headers"], timeout=httpx.Timeout(30)
        )

    def run(self, command, **more):
        """Runs shell text and returns its events."""
        answer = self.execd.post("/command", json={"command": command, **more})
        assert answer.status_code == 200, answer.text
        return events(answer.text)

    def output(self, command, **more):
        """The standard output of a command that must succeed."""
        happened = self.run(command, **more)
        assert happened[-1]["type"] == "execution_complete", happened
        return "".join(event["text"] for event in happened if event["type"] == "stdout")

    def start(self, command, until, **more):
        """Starts a command in the background and returns its id once it has printed `until`."""
        process = self.run(command, background=True, **more)[0]["text"]
        seen = ""
        with self.execd.stream("GET", f"/command/{process}/logs", params={"follow": "true"}) as answer:
            for piece in answer.iter_text():
                seen += piece
                if until in seen:
                    return process
        raise AssertionError(f"the command ended without {until!r}: {seen!r}")

    def upload(self, path, content, **metadata):
        files = [
            ("metadata", ("metadata", json.dumps({"path": path, **metadata}), "application/json")),
            ("file", (os.path.basename(path), content, "application/octet-stream")),
        ]
        answer = self.execd.post("/files/upload", files=files)
        assert answer.status_code == 200, answer.text

    def remove(self):
        self.execd.close()
        answer = self.api.delete(f"/v1/sandboxes/{self.id}")
        assert answer.status_code in (204, 404), answer.text


def events(text):
    """The events of a stream, each a bare JSON object and a blank line."""
    frames = text.split("\n\n")
    assert frames.pop() == "", "the stream does not end with a whole event"
    return [json.loads(frame) for frame in frames]


def texts(happened, kind="stdout"):
    return [event["text"] for event in happened if event["type"] == kind]


@pytest.fixture(scope="session")
def api():
    headers = {"OPEN-SANDBOX-API-KEY": KEY} if KEY else {}
    with httpx.Client(base_url=URL, headers=headers, timeout=httpx.Timeout(60)) as client:
        yield client


@pytest.fixture(scope="module")
def box(api):
    """One sandbox for all tests of a file that do not end it."""
    box = Box(api)
    yield box
    box.remove()


@pytest.fixture
def new_box(api):
    """Makes sandboxes for one test."""
    made = []

    def make(**change):
        made.append(Box(api, change))
        return made[-1]

    yield make
    for box in made:
        box.remove()


@pytest.fixture
def mark():
    """A word that no other test uses."""
    return "t" + uuid.uuid4().hex[:12]


@pytest.fixture(params=[False, True], ids=["direct", "server-proxy"])
def use_server_proxy(request):
    return request.param


@pytest.fixture
def config(use_server_proxy):
    domain = URL.split("://", 1)[1]
    return ConnectionConfigSync(
        api_key=KEY or None,
        domain=domain,
        use_server_proxy=use_server_proxy,
        request_timeout=timedelta(seconds=60),
    )


@pytest.fixture
def async_config(use_server_proxy):
    domain = URL.split("://", 1)[1]
    return ConnectionConfig(
        api_key=KEY or None,
        domain=domain,
        use_server_proxy=use_server_proxy,
        request_timeout=timedelta(seconds=60),
    )
