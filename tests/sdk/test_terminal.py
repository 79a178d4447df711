"""Terminals over WebSocket."""

import json
import struct
import time

import pytest
from conftest import Box
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect


class Client:
    def __init__(self, box, session, query="pty=1"):
        endpoint = box.endpoint(44772)
        url = f"ws://{endpoint['endpoint']}/pty/{session}/ws?{query}"
        self.connection = connect(url, additional_headers=endpoint["headers"], open_timeout=20)
        self.socket = self.connection.__enter__()
        self.seen = b""

    def word(self):
        """The next text frame; output that arrives before it is collected."""
        while True:
            frame = self.socket.recv(timeout=20)
            if isinstance(frame, str):
                return json.loads(frame)
            self.take(frame)

    def take(self, frame):
        assert frame[0] in (1, 2), frame[:1]
        self.seen += frame[1:]

    def until(self, text):
        while text not in self.seen:
            frame = self.socket.recv(timeout=20)
            assert isinstance(frame, bytes), frame
            self.take(frame)

    def replay(self):
        """The offset of the first byte that was missed, and what was missed."""
        frame = self.socket.recv(timeout=20)
        assert frame[0] == 3, frame[:9]
        return struct.unpack(">q", frame[1:9])[0], frame[9:]

    def type(self, text):
        self.socket.send(b"\0" + text.encode())

    def say(self, **word):
        self.socket.send(json.dumps(word))


@pytest.fixture
def session(box: Box):
    answer = box.execd.post("/pty", json={"cwd": "/tmp"})
    assert answer.status_code == 201
    return answer.json()["session_id"]


def test_a_shell_on_a_terminal(box, session):
    assert box.execd.get(f"/pty/{session}").json() == {"session_id": session, "running": False, "output_offset": 0}
    client = Client(box, session)
    assert client.word() == {"type": "connected", "session_id": session, "mode": "pty"}
    client.say(type="resize", cols=101, rows=33)
    client.type("tty; stty size; pwd; echo $((6*7))done\n")
    client.until(b"42done")
    assert b"/dev/pts/" in client.seen and b"33 101" in client.seen and b"/tmp" in client.seen
    assert box.execd.get(f"/pty/{session}").json()["running"] is True
    client.say(type="ping")
    assert client.word() == {"type": "pong"}
    client.say(type="stdin", data="exit 5\n")
    assert client.word() == {"type": "exit", "exit_code": 5}
    with pytest.raises(ConnectionClosed) as closed:
        client.socket.recv(timeout=20)
    assert closed.value.rcvd.code == 1000
    assert box.execd.delete(f"/pty/{session}").status_code == 200
    assert box.execd.get(f"/pty/{session}").status_code == 404


def test_a_signal_reaches_the_foreground(box, session):
    client = Client(box, session)
    client.word()
    # The word comes from the process that will be interrupted, and not from the echo of the line.
    client.type("sh -c 'echo wo''rd; exec sleep 600'\n")
    client.until(b"word\r\n")
    client.type("\x03")
    client.type("echo after-$?-it\n")
    client.until(b"after-130-it")


def test_pipes_keep_streams_apart(box):
    session = box.execd.post("/pty", json={"command": "read line; echo out:$line; echo err >&2"}).json()["session_id"]
    client = Client(box, session, "pty=0")
    assert client.word()["mode"] == "pipe"
    client.type("hello\n")
    frames, word = [], None
    while word is None:
        frame = client.socket.recv(timeout=20)
        if isinstance(frame, str):
            word = json.loads(frame)
        else:
            frames.append(frame)
    assert b"".join(f[1:] for f in frames if f[0] == 1) == b"out:hello\n"
    assert b"".join(f[1:] for f in frames if f[0] == 2) == b"err\n"
    assert word == {"type": "exit", "exit_code": 0}


def test_reconnecting_client_gets_missed_output(box, session):
    client = Client(box, session)
    client.word()
    client.type("echo mark-$((1+1))\n")
    client.until(b"mark-2")
    client.socket.close()
    again = Client(box, session)
    offset, missed = again.replay()
    assert offset == 0 and b"mark-2" in missed
    assert again.word()["type"] == "connected"
    assert box.execd.get(f"/pty/{session}").json()["output_offset"] >= len(missed)
    again.socket.close()
    at = missed.index(b"mark-2")
    once_more = Client(box, session, f"pty=1&since={at}")
    offset, rest = once_more.replay()
    assert offset == at and rest.startswith(b"mark-2")


def test_a_shell_that_ended_is_followed_by_another(box):
    command = "echo first-$((20+1)); read line; echo second-$line"
    session = box.execd.post("/pty", json={"command": command}).json()["session_id"]
    first = Client(box, session, "pty=0")
    first.word()
    first.until(b"first-21\n")
    first.type("a\n")
    assert first.word() == {"type": "exit", "exit_code": 0}
    assert first.seen == b"first-21\nsecond-a\n"
    assert box.execd.get(f"/pty/{session}").json() == {"session_id": session, "running": False, "output_offset": 18}
    first.socket.close()
    second = Client(box, session, "pty=0&since=9")
    assert second.replay() == (9, b"second-a\n")
    assert second.word()["type"] == "connected"
    second.until(b"first-21\n")
    assert box.execd.get(f"/pty/{session}").json() == {"session_id": session, "running": True, "output_offset": 27}
    second.socket.close()
    third = Client(box, session, "pty=0")
    assert third.replay() == (0, b"first-21\nsecond-a\nfirst-21\n")
    third.word()
    third.type("b\n")
    assert third.word() == {"type": "exit", "exit_code": 0}
    assert box.execd.delete(f"/pty/{session}").status_code == 200
    assert box.execd.get(f"/pty/{session}").status_code == 404


def test_zero_size_is_ignored(box, session):
    client = Client(box, session)
    client.word()
    client.say(type="resize", cols=101, rows=33)
    client.say(type="resize", cols=0, rows=0)
    client.say(type="resize")
    client.type("stty size; echo $((6*7))done\n")
    client.until(b"42done")
    assert b"33 101" in client.seen


def test_one_client_at_a_time_unless_it_takes_over(box, session):
    first = Client(box, session)
    first.word()
    with pytest.raises(InvalidStatus) as refused:
        Client(box, session)
    assert refused.value.response.status_code == 409
    assert json.loads(refused.value.response.body)["code"] == "ALREADY_CONNECTED"
    second = Client(box, session, "pty=1&takeover=1&since=1000000")
    assert second.word()["type"] == "connected"
    with pytest.raises(ConnectionClosed) as closed:
        while True:
            first.socket.recv(timeout=20)
    assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (4001, "TAKEN_OVER")


def test_missing_terminal_is_not_found(box):
    with pytest.raises(InvalidStatus) as refused:
        Client(box, "0" * 32)
    assert refused.value.response.status_code == 404


def test_invalid_frames_are_answered_and_do_not_end_the_session(box, session):
    client = Client(box, session)
    client.word()
    for nonsense in ["not json", json.dumps({"type": "reboot"}), b"\x07x", json.dumps({"type": "signal", "signal": "SIGX"})]:
        client.socket.send(nonsense)
        assert client.word()["code"] == "INVALID_FRAME"
    client.type("echo alive-$((2+2))\n")
    client.until(b"alive-4")


def test_too_many_terminals_get_retry_after(new_box):
    box = new_box()
    answers = [box.execd.post("/pty", json={}) for _ in range(31)]
    assert {answer.status_code for answer in answers[:30]} == {201}
    assert answers[30].status_code == 429 and int(answers[30].headers["retry-after"]) >= 1
    client = Client(box, answers[0].json()["session_id"], "pty=0")
    client.word()
    client.type("exit\n")
    assert client.word()["type"] == "exit"
    client.socket.close()
    # The slot is free once the server has noticed that its client left.
    late = time.monotonic() + 20
    while box.execd.post("/pty", json={}).status_code != 201:
        assert time.monotonic() < late
