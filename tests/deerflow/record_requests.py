"""Records the requests of DeerFlow's client as bytes, for the replay in `tests/e2e/aio/recorded_requests.rs`.

    record_requests.py OUTPUT URL KEY --checkout DIR    2.1: the provider of a checkout
    record_requests.py OUTPUT URL KEY                   2.2: the calls that its client makes, through the same SDK

It needs the packages of requirements.txt and a server at URL. What a server decides is replaced by a name in braces: its
address, the key and the address of the sandbox. Each request follows a line with the status of the response and the
fields that DeerFlow reads of it.
"""

import argparse
import json
import logging
import os
import pathlib
import re
import socket
import sys
import tempfile
import threading
import uuid

import provider_config

#: The fields of responses that DeerFlow's client reads and that are the same in every run.
READ_FIELDS = {
    "output", "exit_code", "status", "stdout", "stderr", "content", "files", "matches", "truncated", "path", "is_directory",
    "file", "line_number", "line_content", "sandbox_id", "sandboxes", "count", "ok", "exists", "max_shell_sessions",
    "lark_cli_broker", "lark_cli_init_image", "lark_cli_broker_image", "home_dir", "success", "message",
    "detail",
}
#: The path of the state directory as the host sees it; it is a part of requests.
HOST_STATE = "/srv/deer-flow"


class Recorder:
    """A proxy that keeps each request and its response."""

    def __init__(self, server):
        self.server = server
        self.exchanges = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = "127.0.0.1:%d" % self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            client, _ = self.listener.accept()
            upstream = socket.create_connection(self.server)
            threading.Thread(target=self.copy_requests, args=(client, upstream), daemon=True).start()
            threading.Thread(target=self.copy_responses, args=(upstream, client), daemon=True).start()

    def copy_requests(self, client, upstream):
        pending = b""
        while piece := client.recv(1 << 16):
            pending += piece
            head, end, body = pending.partition(b"\r\n\r\n")
            length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
            if end and len(body) >= int(length[1] if length else 0):
                self.exchanges.append([pending, b""])
                message, pending = pending, b""
                upstream.sendall(message)
        upstream.shutdown(socket.SHUT_WR)

    def copy_responses(self, upstream, client):
        while piece := upstream.recv(1 << 16):
            # The client sends one request after the other.
            self.exchanges[-1][1] += piece
            client.sendall(piece)
        client.close()

    def write(self, output, key):
        with open(output, "w", newline="") as recording:
            for request, response in self.exchanges:
                text = request.decode().replace(self.address, "{host}").replace(key, "{key}").replace("\r\n", "\n")
                text = re.sub(r"^(\w+) /aio/[^/]+", r"\1 {sandbox}", text)
                recording.write(f"### {expectation(response)}\n{text}\n\n")


def expectation(response):
    """The status and what is read of a response, as JSON."""
    head, _, body = response.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    if b"transfer-encoding: chunked" in head.lower():
        body = join_chunks(body)
    if b"application/json" not in head.lower():
        return json.dumps({"status": status, "body": body.decode()})
    found = json.loads(body)
    return json.dumps({"status": status, "json": kept(found)}, ensure_ascii=False)


def join_chunks(body):
    joined = b""
    while length := int(body.partition(b"\r\n")[0], 16):
        _, _, rest = body.partition(b"\r\n")
        joined, body = joined + rest[:length], rest[length + 2 :]
    return joined


def kept(value):
    if isinstance(value, list):
        return [kept(item) for item in value]
    if isinstance(value, dict):
        # The text that describes a sandbox depends on its image.
        data = {"data": kept(value["data"])} if "data" in value and not isinstance(value["data"], str) else {}
        return {name: kept(item) for name, item in value.items() if name in READ_FIELDS} | data
    return value


def drive_checkout(checkout, url, key, state):
    """DeerFlow 2.1: everything goes through its provider."""
    for package in ("packages/harness", "packages/extension-api"):
        sys.path.insert(0, str(checkout.absolute() / "backend" / package))
    config = state / "config.yaml"
    config.write_text(provider_config.aio_config(url, key))
    os.environ.update(DEER_FLOW_HOME=str(state), DEER_FLOW_CONFIG_PATH=str(config), DEER_FLOW_HOST_BASE_DIR=HOST_STATE)
    from deerflow.community.aio_sandbox import AioSandboxProvider

    provider = AioSandboxProvider()
    name = provider.acquire("thread-1", user_id="alice")
    sandbox, base = provider.get(name), "/mnt/user-data/workspace"
    sandbox.execute_command("echo hello")
    sandbox.execute_command("cd /tmp; export KEPT=1; echo no >&2; exit 3")
    sandbox.execute_command('echo "[$A]"; echo err >&2', env={"A": "b c"})
    sandbox.write_file(f"{base}/notes.txt", "one\r\ntwo\nthree ü")
    sandbox.write_file(f"{base}/notes.txt", "\nfour", append=True)
    sandbox.read_file(f"{base}/notes.txt", 2, 3)
    sandbox.read_file(f"{base}/missing")
    sandbox.update_file("/mnt/user-data/uploads/data.bin", b"plain bytes\n")
    sandbox.download_file("/mnt/user-data/uploads/data.bin")
    sandbox.list_dir(base)
    sandbox.glob(base, "**/*.txt")
    sandbox.glob(base, "**", include_dirs=True)
    sandbox.grep(base, "t[wh]")
    provider.release(name)
    provider.acquire("thread-1", user_id="alice")
    provider.get(name).execute_command("echo again")
    provider.shutdown()


def drive_client(url, key):
    """DeerFlow 2.2, whose code is not released: the calls that its client makes."""
    import requests
    from agent_sandbox import Sandbox
    from agent_sandbox.core.api_error import ApiError

    name, headers = "5f1e0c9ad3b27486", {"X-API-Key": key}

    def provisioner(method, path, body=None):
        return requests.request(method, f"{url}{path}", json=body, headers=headers, timeout=30)

    provisioner("GET", "/api/capabilities")
    provisioner("GET", "/api/sandboxes")
    provisioner("GET", f"/api/sandboxes/{name}")
    mounts = [("acp-workspace", "/mnt/acp-workspace")]
    mounts += [(f"skills_view/{part}", f"/mnt/skills/{part}") for part in ("public", "custom", "integrations")]
    create = {
        "sandbox_id": name, "thread_id": "thread-1", "user_id": "alice", "include_legacy_skills": False,
        "provision_lark_cli_runtime": False, "provision_lark_cli_broker": False, "max_shell_sessions": 4,
        "skills_container_path": "/mnt/skills",
        "extra_mounts": [
            {"host_path": f"{HOST_STATE}/users/alice/{path}", "container_path": target, "read_only": True} for path, target in mounts
        ],
    }  # fmt: skip
    address = provisioner("POST", "/api/sandboxes", create).json()["sandbox_url"]
    requests.get(f"{address}/v1/sandbox", timeout=5)
    sdk, base = Sandbox(base_url=address, timeout=600), "/mnt/user-data/workspace"

    def execute(command, timeout=600.0, **more):
        limits = {"hard_timeout": timeout, "no_change_timeout": max(600, int(timeout + 5))}
        options = {"timeout_in_seconds": int(timeout + 5), "max_retries": 0}
        return sdk.shell.exec_command(command=command, **limits, request_options=options, **more)

    execute("echo hello")
    execute("echo hi; exit 3")
    execute("echo late; sleep 30", timeout=1.0)
    execute("echo on")
    # A command with variables.
    session = str(uuid.UUID(int=1, version=4))
    sdk.bash.create_session(session_id=session)
    sdk.bash.exec(command='exec < /dev/null\ncat; echo "[$A]"; echo err >&2', session_id=session, env={"A": "b c"}, hard_timeout=600.0)
    sdk.bash.close_session(session)
    # The session of a sub-agent, also after it was lost.
    scope = str(uuid.UUID(int=2, version=4))
    sdk.shell.create_session(id=scope)
    execute("cd /tmp; export KEPT=1", id=scope)
    execute("pwd; echo $KEPT", id=scope)
    sdk.shell.cleanup_session(scope)
    try:
        execute("true", id=scope)
    except ApiError as error:
        assert error.status_code == 404, error
    sdk.file.write_file(file=f"{base}/notes.txt", content="one\r\ntwo\nthree ü")
    sdk.file.write_file(file=f"{base}/notes.txt", content="\nfour", append=True)
    sdk.file.read_file(file=f"{base}/notes.txt", start_line=1, end_line=3)
    sdk.file.write_file(file="/mnt/user-data/uploads/data.bin", content="cGxhaW4gYnl0ZXMK", encoding="base64")
    b"".join(sdk.file.download_file(path="/mnt/user-data/uploads/data.bin"))
    execute(f"set +e; find -H {base} -maxdepth 2; status=$?; printf '\\n%s\\n' $status; exit \"$status\"", timeout=60.0)
    sdk.file.find_files(path=base, glob="**/*.txt")
    sdk.file.list_path(path=base, recursive=True, show_hidden=False)
    sdk.file.grep_files(
        path=base, pattern="t[wh]", case_insensitive=True, fixed_strings=False, max_results=400, max_file_size="1M", recursive=True
    )
    provisioner("GET", f"/api/sandboxes/{name}/presence")
    provisioner("GET", f"/api/sandboxes/{name}")
    execute("echo again")
    provisioner("DELETE", f"/api/sandboxes/{name}")
    provisioner("GET", f"/api/sandboxes/{name}/presence")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("url")
    parser.add_argument("key")
    parser.add_argument("--checkout", type=pathlib.Path)
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    host, _, port = given.url.split("://")[1].partition(":")
    recorder = Recorder((host, int(port)))
    url = f"http://{recorder.address}"
    if given.checkout:
        with tempfile.TemporaryDirectory() as state:
            drive_checkout(given.checkout, url, given.key, pathlib.Path(state))
    else:
        drive_client(url, given.key)
    recorder.write(given.output, given.key)


main()
