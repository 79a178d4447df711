"""Known mistakes of other servers, one test each, by plain HTTP."""

import http.client
import json
import socket
import time

import pytest
from conftest import CREATE, events, texts


def walk(value):
    yield value
    for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else []:
        yield from walk(child)


def test_a_create_is_answered_202_and_running(new_box):
    box = new_box(metadata={"team": "search"})
    assert box.created["status"]["state"] == "Running"
    assert box.created["entrypoint"] == CREATE["entrypoint"]
    assert box.created["metadata"] == {"team": "search"}


def test_no_response_contains_a_null(api, new_box):
    box = new_box(timeout=None)
    bodies = [
        box.created,
        api.get(f"/v1/sandboxes/{box.id}").json(),
        api.get("/v1/sandboxes").json(),
        box.endpoint(44772),
        box.execd.get("/files/info", params={"path": "/tmp"}).json(),
    ]
    for body in bodies:
        assert None not in list(walk(body)), body
    assert "expiresAt" not in box.created


def test_nulls_in_requests_are_accepted(new_box):
    absent = ["timeout", "env", "metadata", "extensions", "platform", "volumes", "networkPolicy", "lifecycle"]
    box = new_box(**{name: None for name in absent})
    answer = box.execd.post("/command", json={"command": "true", "cwd": None, "envs": None, "timeout": None, "uid": None})
    assert events(answer.text)[-1]["type"] == "execution_complete"


def test_every_event_has_type_and_timestamp(box):
    now = time.time() * 1000
    for event in box.run("echo a; echo b >&2; exit 2"):
        assert isinstance(event["type"], str)
        assert isinstance(event["timestamp"], int) and abs(event["timestamp"] - now) < 60_000


def test_a_stream_is_an_event_stream(box):
    answer = box.execd.post("/command", json={"command": "true"})
    assert answer.headers["content-type"].split(";")[0] == "text/event-stream"
    assert answer.headers["cache-control"] == "no-cache"
    assert not answer.text.startswith("data:")


def test_events_come_in_order_and_the_end_comes_once(box):
    happened = [event["type"] for event in box.run("echo a; echo b; exit 3")]
    assert happened == ["init", "ping", "stdout", "stdout", "error"]
    happened = [event["type"] for event in box.run("echo a")]
    assert happened == ["init", "ping", "stdout", "execution_complete"]


def test_the_reserved_ports_resolve_for_every_sandbox(box):
    for port, header in [(44772, "X-EXECD-ACCESS-TOKEN"), (18080, "OPENSANDBOX-EGRESS-AUTH")]:
        endpoint = box.endpoint(port)
        assert f"/sandboxes/{box.id}/proxy/{port}" in endpoint["endpoint"]
        assert "://" not in endpoint["endpoint"] and endpoint["endpoint"].endswith(f"/{port}")
        assert endpoint["headers"][header]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/sandboxes/aaaaaaaaaaaaaaaaaaaa", 404),
        ("GET", "/v1/sandboxes/not-an-id", 404),
        ("DELETE", "/v1/sandboxes/aaaaaaaaaaaaaaaaaaaa", 404),
        ("POST", "/v1/sandboxes", 400),
        ("GET", "/v1/sandboxes?page=0", 400),
        ("GET", "/v1/nothing/here", 404),
        ("GET", "/nothing", 404),
        ("PUT", "/v1/sandboxes", 405),
        ("GET", "/v1/snapshots/x", 404),
        ("GET", "/v1/pools/none", 404),
        ("GET", "/v1/templates/x", 501),
    ],
)
def test_an_error_has_a_code_and_a_message(api, method, path, status):
    answer = api.request(method, path)
    assert answer.status_code == status
    body = answer.json()
    assert set(body) == {"code", "message"} and body["code"] and body["message"]


def test_execution_errors_have_a_code_and_a_message(box):
    for method, path, status in [
        ("GET", "/files/info?path=/never/there", 404),
        ("GET", "/files/download", 400),
        ("POST", "/command", 400),
        ("GET", "/command/status/nothing", 404),
        ("DELETE", "/command", 400),
        ("GET", "/nothing", 404),
        ("PUT", "/ping", 405),
        ("POST", "/code", 400),
        ("DELETE", "/code", 400),
        ("GET", "/code/contexts/nothing", 404),
        ("POST", "/v1/isolated/session", 503),
    ]:
        answer = box.execd.request(method, path)
        assert answer.status_code == status, (path, answer.text)
        assert answer.json()["code"] and answer.json()["message"], path


def test_a_command_can_run_as_soon_as_the_create_is_answered(new_box):
    box = new_box()
    assert box.execd.get("/ping").status_code == 200
    assert box.output("echo now") == "now\n"


def test_a_session_is_opened_by_an_empty_body(box):
    answer = box.execd.post("/session", content=b"", headers={"Content-Type": "application/json"})
    assert answer.status_code == 200 and answer.json()["session_id"]
    assert box.execd.post("/session", json={}).status_code == 200


def test_a_plus_in_a_query_is_a_space(box):
    box.upload("/tmp/a b+c.txt", b"x")
    for query in ["path=%2Ftmp%2Fa+b%2Bc.txt", "path=/tmp/a%20b%2Bc.txt"]:
        answer = box.execd.get(f"/files/info?{query}")
        assert list(answer.json()) == ["/tmp/a b+c.txt"], query


def test_metadata_in_a_query_is_encoded_once_or_twice(api, new_box, mark):
    box = new_box(metadata={"mark": mark, "odd.key": "v_1"})
    for query in [f"metadata=mark%3D{mark}%26odd.key%3Dv_1", f"metadata=mark%3D{mark}%2526%26odd.key%3Dv_1"]:
        listed = api.get(f"/v1/sandboxes?{query}").json()
        expected = [] if "%2526" in query else [box.id]
        assert [item["id"] for item in listed["items"]] == expected, query
    wrong = api.get("/v1/sandboxes?metadata=nopair")
    assert wrong.status_code == 400 and wrong.json()["code"] == "INVALID_METADATA_FORMAT"


def test_modes_are_octal_digits_in_a_decimal_number(box):
    box.upload("/tmp/mode", b"x", mode=640)
    assert box.output("stat -c %a /tmp/mode") == "640\n"
    assert box.execd.get("/files/info", params={"path": "/tmp/mode"}).json()["/tmp/mode"]["mode"] == 640
    assert box.execd.post("/files/permissions", json={"/tmp/mode": {"mode": 4755}}).status_code == 200
    assert box.output("stat -c %a /tmp/mode") == "4755\n"
    assert box.execd.post("/files/permissions", json={"/tmp/mode": {"mode": 0}}).status_code == 200
    assert box.output("stat -c %a /tmp/mode") == "4755\n"
    assert box.execd.post("/files/permissions", json={"/tmp/mode": {"mode": 689}}).status_code == 400


def test_a_new_file_without_a_mode_can_be_executed(box):
    box.upload("/tmp/unsaid", b"#!/bin/sh\necho ran")
    assert box.output("stat -c %a /tmp/unsaid; /tmp/unsaid") == "755\nran\n"
    box.run("chmod 600 /tmp/unsaid")
    box.upload("/tmp/unsaid", b"y", mode=0)
    assert box.output("stat -c %a /tmp/unsaid; cat /tmp/unsaid") == "600\ny"


def test_many_files_come_in_one_chunked_upload(box):
    def body():
        for n in range(10):
            metadata = json.dumps({"path": f"/tmp/chunked/{n}", "owner": None, "group": None, "mode": 644})
            yield b"--B\r\nContent-Disposition: form-data; name=\"metadata\"; filename=\"metadata\"\r\n"
            yield b"Content-Type: application/json\r\n\r\n" + metadata.encode() + b"\r\n"
            yield b"--B\r\nContent-Disposition: form-data; name=\"file\"; filename=\"f\"\r\n\r\n"
            yield b"\r\n--" + bytes([n]) * 100_000
            yield b"\r\n"
        yield b"--B--\r\n"

    answer = box.execd.post("/files/upload", content=body(), headers={"Content-Type": "multipart/form-data; boundary=B"})
    assert answer.status_code == 200, answer.text
    for n in range(10):
        assert box.execd.get("/files/download", params={"path": f"/tmp/chunked/{n}"}).content == b"\r\n--" + bytes([n]) * 100_000


def part(name, content):
    return f'--B\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{content}\r\n'


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ([], "INVALID_FILE_METADATA"),
        ([("file", "x")], "INVALID_FILE_METADATA"),
        ([("metadata", "not json")], "INVALID_FILE_METADATA"),
        ([("metadata", '{"path":"/tmp/m"}')], "INVALID_FILE_CONTENT"),
        ([("metadata", '{"path":"/tmp/m"}'), ("file", "x"), ("metadata", '{"path":"/tmp/n"}')], "INVALID_FILE"),
    ],
)
def test_an_upload_that_does_not_pair_up_is_refused(box, parts, code):
    body = "".join(part(*p) for p in parts) + "--B--\r\n"
    answer = box.execd.post("/files/upload", content=body, headers={"Content-Type": "multipart/form-data; boundary=B"})
    assert answer.status_code == 400 and answer.json()["code"] == code


def test_nothing_comes_after_the_last_event(box):
    happened = box.run("for n in $(seq 500); do echo $n; echo $n >&2; done; exit 4")
    assert happened[-1]["type"] == "error" and happened[-1]["error"]["evalue"] == "4"
    assert [event["type"] for event in happened].count("error") == 1
    assert len(texts(happened)) == len(texts(happened, "stderr")) == 500


def test_the_stream_ends_at_once(box):
    def took():
        started = time.monotonic()
        box.output("true")
        return time.monotonic() - started

    assert min(took() for _ in range(10)) < 0.15


def test_children_that_hold_the_pipes_do_not_delay_the_end(box):
    started = time.monotonic()
    assert box.output("sleep 30 & echo done") == "done\n"
    assert time.monotonic() - started < 5


def test_a_client_that_leaves_does_not_end_its_command(box):
    with box.execd.stream("POST", "/command", json={"command": "echo begun; sleep 1; echo finished"}) as answer:
        first = next(answer.iter_text())
        process = json.loads(first.split("\n\n")[0])["text"]
    with box.execd.stream("GET", f"/command/{process}/logs", params={"follow": "true"}) as answer:
        assert "".join(answer.iter_text()) == "begun\nfinished\n"
    status = box.execd.get(f"/command/status/{process}").json()
    assert status["running"] is False and status["exit_code"] == 0


def test_large_interleaved_output_is_complete_and_in_order(box):
    script = "line=$(printf 'é%.0s' $(seq 2000)); for n in $(seq 512); do echo $n$line; echo $n >&2; done"
    happened = box.run(script)
    assert "".join(texts(happened)) == "".join(f"{n}{'é' * 2000}\n" for n in range(1, 513))
    assert "".join(texts(happened, "stderr")) == "".join(f"{n}\n" for n in range(1, 513))


def test_a_very_long_line_is_cut_below_the_limit_of_old_clients(box):
    answer = box.execd.post("/command", json={"command": "head -c 5000000 /dev/zero | tr '\\0' '\\001'"})
    assert max(len(line) for line in answer.text.split("\n")) < 4 << 20
    assert "".join(texts(events(answer.text))) == "\x01" * 5_000_000


def test_bytes_that_are_no_text_are_replaced(box):
    assert texts(box.run("printf 'a\\377b\\n'")) == ["a\ufffdb\n"]


def test_retrying_a_delete_is_safe(api, new_box):
    box = new_box()
    assert api.delete(f"/v1/sandboxes/{box.id}").status_code == 204
    assert api.delete(f"/v1/sandboxes/{box.id}").status_code == 404
    assert api.get(f"/v1/sandboxes/{box.id}").status_code == 404


def test_a_request_id_is_on_every_answer(api, box):
    for path in ["/health", "/v1/sandboxes", "/v1/sandboxes/aaaaaaaaaaaaaaaaaaaa", "/nothing", "/v1/pools"]:
        assert api.get(path, headers={"X-Request-ID": "mine-1"}).headers["x-request-id"] == "mine-1", path
        assert len(api.get(path).headers["x-request-id"]) == 32, path
    answer = box.execd.post("/command", json={"command": "true"}, headers={"X-Request-ID": "mine-2"})
    assert answer.headers["x-request-id"] == "mine-2"


def test_a_body_that_is_too_long_is_refused(api):
    answer = api.post("/v1/sandboxes", content=b" " * (8 << 20))
    assert answer.status_code == 413 and answer.json()["code"]


def refused(api, head):
    """The raw response to a malformed request."""
    address = (api.base_url.host, api.base_url.port)
    with socket.create_connection(address, timeout=20) as connection:
        connection.sendall(head)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        body = json.loads(answer.read())
    assert set(body) == {"code", "message"} and all(body.values()), body
    assert len(answer.headers["x-request-id"]) == 32 and answer.headers["connection"] == "close"
    return answer.status


def test_malformed_requests_get_an_error_message(api):
    start = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    assert refused(api, start + b"X-Long: " + b"x" * 200_000 + b"\r\n\r\n") == 431
    assert refused(api, b"GET /health?" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n") == 414
    assert refused(api, b"GET /health?" + b"x" * 1_000_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n") == 431
    assert refused(api, b"\x16\x03\x01 garbage\r\n\r\n") == 400
    assert api.get("/health", headers={"X-Long": "x" * 60_000}).status_code == 200
