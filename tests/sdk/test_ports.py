"""Services that answer oddly, slowly or not at all, through the proxy."""

import socket
from pathlib import Path

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

SERVICE = Path(__file__).with_name("raw_service.py").read_bytes()


@pytest.fixture(scope="module")
def process(box):
    box.upload("/tmp/raw_service.py", SERVICE)
    return box.start("exec python3 /tmp/raw_service.py", until="ready")


@pytest.fixture(scope="module")
def service(box, process):
    with box.port(8002) as client:
        yield client


@pytest.fixture
def raw(box, process):
    """Sends bytes to a path of the service and reads until they end, or until some have arrived."""
    endpoint = box.endpoint(8002)
    address, mount = endpoint["endpoint"].split("/", 1)
    name, port = address.rsplit(":", 1)
    tokens = "".join(f"{name}: {value}\r\n" for name, value in endpoint["headers"].items())
    connections = []

    class Raw:
        def __init__(self, method, path, headers="", version="1.1"):
            self.connection = socket.create_connection((name, int(port)), timeout=30)
            connections.append(self.connection)
            self.seen = b""
            head = f"{method} /{mount}{path} HTTP/{version}\r\nHost: {address}\r\n{tokens}{headers}\r\n"
            self.send(head.encode())

        def send(self, data):
            self.connection.sendall(data)

        def until(self, awaited=None):
            while awaited is None or awaited not in self.seen:
                piece = self.connection.recv(65536)
                if not piece:
                    assert awaited is None, self.seen
                    break
                self.seen += piece
            return self.seen

    yield Raw
    for connection in connections:
        connection.close()


def test_http_1_0_service_is_answered_in_http_1_1(service, raw):
    answer = service.get("/old")
    assert (answer.status_code, answer.text, answer.http_version) == (200, "to the end", "HTTP/1.1")
    assert answer.headers["x-old"] == "yes"
    # An HTTP/1.0 client gets a response that it can read.
    seen = raw("GET", "/echo", "Transfer-Encoding: chunked\r\n", version="1.0").until()
    assert seen.startswith(b"HTTP/1.0") or seen.startswith(b"HTTP/1.1 4"), seen


def test_a_service_on_ipv6_alone_is_reached(box, process):
    assert box.port(8001).get("/six").text == "/six"


def test_invalid_service_response_is_a_bad_gateway(service):
    answer = service.get("/rubbish")
    assert (answer.status_code, answer.json()["code"]) == (502, "BACKEND_RESPONSE_FAILED")


@pytest.mark.parametrize("path", ["/half", "/bad-chunk"])
def test_truncated_response_is_not_taken_for_complete(service, path):
    with pytest.raises(httpx.RemoteProtocolError):
        service.get(path)


def test_headers_of_the_inner_connection_stay_inside(service):
    answer = service.get("/hop")
    assert not {"x-private", "keep-alive", "clear-site-data", "alt-svc"} & set(answer.headers)
    assert answer.headers["x-public"] == "1"
    assert answer.headers.get_list("x-twice") == ["a", "b"]


def test_headers_of_the_outer_connection_stay_outside(service):
    sent = [
        ("Connection", "X-Named, Keep-Alive"), ("X-Named", "1"), ("TE", "gzip, trailers"), ("Proxy-Connection", "x"),
        ("X-Twice", "a"), ("X-Twice", "b"), ("X-Forwarded-For", "6.6.6.6"), ("Forwarded", "for=6.6.6.6"),
        ("OpenSandbox-Ingress-To", "x"), ("OpenSandbox-Secure-Access", "x"), ("OpenSandbox-Access-Renew", "skip"),
    ]
    head = service.get("/head", headers=sent).text.lower()
    for gone in ["x-named", "te: gzip", "proxy-connection", "6.6.6.6", "opensandbox", "x-coracle-access-token"]:
        assert gone not in head, head
    assert "te: trailers\r\n" in head and "x-twice: a\r\nx-twice: b\r\n" in head


def test_trailers_pass_to_clients_that_accept_them(raw):
    seen = raw("GET", "/trailers", "TE: trailers\r\nConnection: TE, close\r\n").until()
    assert seen.lower().endswith(b"4\r\nbody\r\n0\r\nx-sum: 42\r\n\r\n"), seen
    seen = raw("GET", "/trailers", "Connection: close\r\n").until()
    assert seen.endswith(b"4\r\nbody\r\n0\r\n\r\n"), seen


def test_trailers_of_a_request_reach_the_service(raw):
    request = raw("POST", "/upload", "Transfer-Encoding: chunked\r\nTrailer: X-Sum\r\nConnection: close\r\n")
    request.send(b"4\r\nbody\r\n0\r\nX-Sum: 42\r\n\r\n")
    assert request.until().lower().endswith(b"4 x-sum: 42"), request.seen


def test_chunks_go_in_while_chunks_come_out(raw):
    request = raw("POST", "/echo", "Transfer-Encoding: chunked\r\nConnection: close\r\n")
    for word in [b"one", b"two", b"three"]:
        request.send(b"%x\r\n%s\r\n" % (len(word), word))
        request.until(word)
    request.send(b"0\r\n\r\n")
    assert request.until().endswith(b"0\r\n\r\n")


def test_a_service_says_whether_it_wants_the_body(raw):
    request = raw("POST", "/continue", "Expect: 100-continue\r\nContent-Length: 4\r\nConnection: close\r\n")
    request.until(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.send(b"body")
    assert b"200 OK" in request.until() and request.seen.endswith(b"body")
    request = raw("POST", "/no-continue", "Expect: 100-continue\r\nContent-Length: 4\r\n")
    assert request.until(b"not wanted").startswith(b"HTTP/1.1 417"), request.seen


@pytest.mark.parametrize("size", [0, 1 << 20, 16 << 20])
def test_an_early_answer_arrives_although_the_body_was_not_read(service, size):
    for _ in range(5):
        answer = service.post("/early", content=b"x" * size)
        assert (answer.status_code, answer.text) == (413, "no more")


def test_redirects_stay_below_the_port_whatever_name_they_use(service, box):
    mount = f"/v1/sandboxes/{box.id}/proxy/8002"
    host = str(service.base_url).split("/")[2]
    for location, expected in [
        ("/login?a=1", f"{mount}/login?a=1"),
        ("http://localhost:8002/login", f"{mount}/login"),
        ("http://127.0.0.1:8002", mount),
        (f"http://{host}/login", f"{mount}/login"),
        (f"{mount}/login", f"{mount}/login"),
        ("https://example.com/x", "https://example.com/x"),
        ("//example.com/x", "//example.com/x"),
        ("below", "below"),
    ]:
        answer = service.get("/to/" + location)
        assert (answer.status_code, answer.headers["location"]) == (302, expected), location


def test_methods_of_every_kind_pass(service):
    for method in ["GET", "HEAD", "OPTIONS", "PROPFIND", "PURGE"]:
        assert service.request(method, "/x").status_code == 200, method


def websocket(box, path, **more):
    endpoint = box.endpoint(8002)
    return connect(f"ws://{endpoint['endpoint']}{path}", additional_headers=endpoint["headers"], **more)


@pytest.mark.parametrize(("sent", "received"), [(1000, 1000), (1001, 1001), (3333, 3333), (4999, 4999), (1005, 1005), (1006, 1011), (1015, 1011), (999, 1011)])
def test_close_codes_of_a_service_arrive_unless_they_are_reserved(box, process, sent, received):
    with websocket(box, f"/close/{sent}") as client:
        with pytest.raises(ConnectionClosed):
            client.recv(timeout=20)
    assert client.protocol.close_code == received


def test_client_is_notified_that_its_service_vanished(box, process):
    with websocket(box, "/vanish") as client:
        assert client.recv(timeout=20) == "hello"
        with pytest.raises(ConnectionClosed):
            client.recv(timeout=20)
    assert client.protocol.close_code == 1011


def test_close_codes_of_a_client_reach_the_service(box, process):
    seen = ""
    with box.execd.stream("GET", f"/command/{process}/logs", params={"follow": "true"}) as log:
        with websocket(box, "/told") as client:
            client.close(code=3456)
        for piece in log.iter_text():
            seen += piece
            if "closed with 3456" in seen:
                break
    assert "closed with 3456" in seen


def test_websocket_to_a_closed_port_is_refused_before_the_upgrade(box):
    from websockets.exceptions import InvalidStatus

    endpoint = box.endpoint(9)
    with pytest.raises(InvalidStatus) as refused:
        connect(f"ws://{endpoint['endpoint']}/", additional_headers=endpoint["headers"])
    assert refused.value.response.status_code == 502

