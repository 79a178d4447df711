"""Ports of a sandbox through the server: HTTP, streams, WebSocket."""

import socket

import httpx
import pytest
from conftest import KEY, URL
from websockets.sync.client import connect

#: A service that echoes requests, streams, redirects, and echoes WebSockets.
SERVICE = r'''
import base64, hashlib, json, socket, struct, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *args): pass
    def answer(self):
        if self.headers.get("Upgrade", "").lower() == "websocket":
            return self.echo()
        if self.path.startswith("/redirect"):
            self.send_response(302); self.send_header("Location", "/target?x=1")
            self.send_header("Content-Length", "0"); self.end_headers(); return
        if self.path == "/stream":
            self.send_response(200); self.send_header("Transfer-Encoding", "chunked"); self.end_headers()
            self.wfile.write(b"5\r\nfirst\r\n"); self.wfile.flush()
            word = self.rfile.read(4)
            self.wfile.write(b"6\r\nsecond\r\n0\r\n\r\n"); return
        if self.path == "/drop":
            self.connection.shutdown(socket.SHUT_RDWR); self.close_connection = True; return
        if self.path == "/length":
            left = int(self.headers["Content-Length"]); total = 0
            while left:
                piece = self.rfile.read(min(left, 65536)); left -= len(piece); total += len(piece)
            body = str(total).encode()
        else:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.dumps({"method": self.command, "path": self.path, "body": self.rfile.read(length).decode(),
                               "headers": [[k.lower(), v] for k, v in self.headers.items()]}).encode()
        self.send_response(200)
        self.send_header("Set-Cookie", "a=1"); self.send_header("Set-Cookie", "b=2")
        self.send_header("Content-Length", str(len(body))); self.end_headers()
        if self.command != "HEAD": self.wfile.write(body)
    def echo(self):
        key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
        self.send_response(101); self.send_header("Upgrade", "websocket"); self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", accept)
        if "Sec-WebSocket-Protocol" in self.headers:
            self.send_header("Sec-WebSocket-Protocol", self.headers["Sec-WebSocket-Protocol"])
        self.end_headers()
        while True:
            first, second = self.rfile.read(2)
            length = second & 127
            if length == 126: length = struct.unpack(">H", self.rfile.read(2))[0]
            elif length == 127: length = struct.unpack(">Q", self.rfile.read(8))[0]
            mask = self.rfile.read(4)
            data = bytes(b ^ mask[i % 4] for i, b in enumerate(self.rfile.read(length)))
            head = bytes([first]) + (bytes([length]) if length < 126 else b"\x7e" + struct.pack(">H", length)
                                     if length < 65536 else b"\x7f" + struct.pack(">Q", length))
            self.wfile.write(head + data); self.wfile.flush()
            if first & 15 == 8: self.close_connection = True; return
    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = do_OPTIONS = answer

server = ThreadingHTTPServer(("127.0.0.1", 8000), Handler)
print("ready", flush=True)
server.serve_forever()
'''


@pytest.fixture(scope="module")
def service(box):
    # These tests use a python3 of the host, which image `host` contains.
    assert box.run("command -v python3")[-1]["type"] == "execution_complete"
    box.upload("/tmp/service.py", SERVICE.encode())
    box.start("exec python3 /tmp/service.py", until="ready")
    with box.port(8000) as client:
        yield client


def seen(answer):
    assert answer.status_code == 200, answer.text
    body = answer.json()
    return body, dict(body["headers"])


def test_method_path_query_and_body_pass_unchanged(service):
    for method in ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"]:
        body, _ = seen(service.request(method, "/a%2Fb//c?x=1+2&y=%20&x=3", content=b"text" if method == "POST" else None))
        assert (body["method"], body["path"]) == (method, "/a%2Fb//c?x=1+2&y=%20&x=3")
    assert seen(service.post("/", content=b"text"))[0]["body"] == "text"
    assert service.head("/").headers["content-length"]


def test_the_bare_port_is_the_root(service, box, api):
    for path in [f"/v1/sandboxes/{box.id}/proxy/8000", f"/sandboxes/{box.id}/proxy/8000/"]:
        assert seen(api.get(path, headers=service.headers))[0]["path"] == "/"


def test_no_secret_reaches_the_service(service):
    _, headers = seen(
        service.get(
            "/",
            headers={
                "OPEN-SANDBOX-API-KEY": KEY or "x",
                "X-EXECD-ACCESS-TOKEN": "t",
                "OPENSANDBOX-EGRESS-AUTH": "t",
                "Authorization": "Bearer x",
                "Cookie": "c=1",
                "X-Forwarded-For": "6.6.6.6",
                "Connection": "X-Named",
                "X-Named": "1",
                "X-Custom": "kept",
            },
        )
    )
    gone = {"open-sandbox-api-key", "x-execd-access-token", "opensandbox-egress-auth", "x-coracle-access-token"}
    assert not (gone | {"authorization", "cookie", "x-named"}) & set(headers)
    assert headers["x-custom"] == "kept"
    assert headers["x-forwarded-for"] == "127.0.0.1" and headers["x-forwarded-proto"] == "http"
    assert headers["x-forwarded-host"] == URL.split("://")[1]


def test_our_key_is_stripped_and_the_services_own_key_passes(service):
    assert seen(service.get("/", headers={"X-API-Key": "its own"}))[1]["x-api-key"] == "its own"
    if KEY:
        assert "x-api-key" not in seen(service.get("/", headers={"X-API-Key": KEY}))[1]


def test_repeated_headers_stay_apart(service):
    assert service.get("/").headers.get_list("set-cookie") == ["a=1", "b=2"]


def test_redirects_stay_below_the_port(service, box):
    answer = service.get("/redirect")
    assert answer.headers["location"] == f"/v1/sandboxes/{box.id}/proxy/8000/target?x=1"


def test_both_directions_stream(service, box):
    address, path = box.endpoint(8000)["endpoint"].split("/", 1)
    name, port = address.split(":")
    token = box.endpoint(8000)["headers"]["X-Coracle-Access-Token"]
    head = f"POST /{path}/stream HTTP/1.1\r\nHost: {address}\r\nX-Coracle-Access-Token: {token}\r\nContent-Length: 4\r\n\r\n"
    with socket.create_connection((name, int(port)), timeout=20) as connection:
        connection.sendall(head.encode())
        seen = b""
        # The second half is sent only after the first half of the answer has arrived.
        for awaited, sent in [(b"first", b"word"), (b"second", b"")]:
            while awaited not in seen:
                piece = connection.recv(4096)
                assert piece, seen
                seen += piece
            connection.sendall(sent)


def test_large_bodies_pass(service):
    assert service.post("/length", content=b"x" * (8 << 20)).text == str(8 << 20)


def test_a_port_where_nothing_listens(box):
    answer = box.port(9).get("/")
    assert (answer.status_code, answer.json()["code"]) == (502, "BACKEND_CONNECTION_FAILED")


def test_a_service_that_hangs_up(service):
    answer = service.get("/drop")
    assert (answer.status_code, answer.json()["code"]) == (502, "BACKEND_RESPONSE_FAILED")


def test_a_websocket_passes_through(service, box):
    endpoint = box.endpoint(8000)
    url = f"ws://{endpoint['endpoint']}/ws"
    with connect(url, additional_headers=endpoint["headers"], subprotocols=["chat"], max_size=None) as client:
        assert client.subprotocol == "chat"
        for message in ["text", b"\x00binary", "x" * 300_000]:
            client.send(message)
            assert client.recv(timeout=20) == message


@pytest.mark.skipif(not KEY, reason="the server has no key")
def test_a_port_needs_its_token_or_a_key(service, box):
    path = f"{URL}/v1/sandboxes/{box.id}/proxy/8000/"
    execd = box.endpoint(44772)["headers"]["X-EXECD-ACCESS-TOKEN"]
    for headers, status in [
        ({}, 401),
        ({"X-Coracle-Access-Token": "wrong"}, 401),
        ({"X-Coracle-Access-Token": execd}, 401),
        (box.endpoint(9000)["headers"], 401),
        (box.endpoint(8000)["headers"], 200),
        ({"OPEN-SANDBOX-API-KEY": KEY}, 200),
    ]:
        answer = httpx.get(path, headers=headers)
        assert answer.status_code == status, headers
        assert status == 200 or answer.json()["code"] in ("MISSING_API_KEY", "INVALID_API_KEY")
