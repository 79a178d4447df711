"""Commands, sessions and files by plain HTTP, where the SDK hides details of the protocol."""

import json

import pytest
from conftest import events, texts


def test_dialect_s_strips_line_ends_and_shows_empty_lines(new_box):
    box = new_box(extensions={"coracle.lines": "S"})
    assert texts(box.run("printf 'a\\n\\nb\\n\\n\\nc\\n'")) == ["a", "\n", "b", "\n", "\n", "c"]
    assert texts(box.run("printf 'x\\r\\ny\\rtail'")) == ["x", "y", "tail"]


def test_dialect_p_keeps_every_byte(box):
    assert texts(box.run("printf 'a\\n\\nb\\r\\ntail'")) == ["a\n", "\n", "b\r\n", "tail"]


def test_one_echo_is_one_event(box):
    assert texts(box.run("echo Hello OpenSandbox E2E")) == ["Hello OpenSandbox E2E\n"]


def test_an_unfinished_line_is_shown_when_the_command_pauses(box):
    body = {"command": "printf 'Password: '; exec sleep 600"}
    with box.execd.stream("POST", "/command", json=body) as answer:
        seen = ""
        for piece in answer.iter_text():
            seen += piece
            if "Password: " in seen:
                break
    process = json.loads(seen.split("\n\n")[0])["text"]
    assert box.execd.delete("/command", params={"id": process}).status_code == 200


def test_a_silent_command_is_kept_alive_by_pings(box):
    happened = [event["type"] for event in box.run("sleep 4.5")]
    assert happened == ["init", "ping", "ping", "execution_complete"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"command": "  "},
        {"command": "a", "argv": ["a"]},
        {"argv": []},
        {"command": "true", "gid": 0},
        {"command": "true", "timeout": 0},
        {"command": "true", "cwd": "/never/there"},
        {"command": "true", "uid": -1},
    ],
)
def test_a_wrong_command_is_refused_before_it_runs(box, body):
    answer = box.execd.post("/command", json=body)
    assert (answer.status_code, answer.json()["code"]) == (400, "INVALID_REQUEST_BODY")


def test_missing_program_is_reported_as_an_event(box):
    answer = box.execd.post("/command", json={"argv": ["no-such-program"]})
    happened = events(answer.text)
    assert [event["type"] for event in happened] == ["init", "ping", "error"]


def test_the_directory_is_expanded(box):
    assert box.output("pwd", cwd="~") == box.output("pwd", cwd="$HOME") == "/root\n"
    assert box.output("pwd", cwd="$PLACE", envs={"PLACE": "/tmp"}) == "/tmp\n"


def test_variables_of_a_create_come_before_those_of_the_account(new_box):
    box = new_box(env={"HOME": "/srv/own", "USER": "me"})
    assert box.output("echo $HOME $USER $LOGNAME") == "/srv/own me root\n"
    box.upload("~/file", b"x")
    assert box.output("cat /srv/own/file; pwd; cd ~; pwd", cwd="~") == "x/srv/own\n/srv/own\n"
    assert box.output("echo $HOME $USER", uid=65534) == "/nonexistent nobody\n"
    assert box.output("echo $HOME", envs={"HOME": "/tmp"}) == "/tmp\n"


def test_an_end_by_signal_is_minus_one(box):
    failure = box.run("kill -9 $$")[-1]["error"]
    assert failure["ename"] == "CommandExecError" and failure["evalue"] == "-1"


def test_logs_serve_foreground_commands_and_any_offset(box):
    process = box.run("printf '0123456789'")[0]["text"]

    def logs(cursor):
        answer = box.execd.get(f"/command/{process}/logs", params={"cursor": cursor})
        return answer.text, answer.headers["execd-commands-tail-cursor"]

    assert logs(0) == ("0123456789", "10")
    assert logs(7) == ("789", "10")
    assert logs(99) == ("", "10")
    assert box.execd.get(f"/command/{process}/logs", params={"cursor": -1}).status_code == 400
    assert box.execd.get("/command/" + "0" * 32 + "/logs").status_code == 404


def test_dropped_output_is_reported(box):
    process = box.run("head -c 20000000 /dev/zero | tr '\\0' x", background=True)[0]["text"]
    while box.execd.get(f"/command/status/{process}").json()["running"]:
        pass
    for more in [{}, {"follow": "true"}]:
        answer = box.execd.get(f"/command/{process}/logs", params={"cursor": 1000, **more})
        begin, end = map(int, answer.headers["coracle-output-gap"].split("-"))
        assert begin == 1 << 20 and begin < end
        assert len(answer.text) == 20_000_000 - 1000 - (end - begin)
    rest = box.execd.get(f"/command/{process}/logs", params={"cursor": end})
    assert "coracle-output-gap" not in rest.headers and len(rest.text) == 20_000_000 - end


def test_a_character_is_not_cut_between_two_reads(box):
    process = box.start("echo begun; printf '\\342\\202'; exec sleep 600", until="begun")
    content, cursor = "", "0"
    while cursor != "6":
        answer = box.execd.get(f"/command/{process}/logs", params={"cursor": cursor})
        content, cursor = content + answer.text, answer.headers["execd-commands-tail-cursor"]
    assert content == "begun\n"
    box.execd.delete("/command", params={"id": process})


def test_status_shows_the_command(box):
    process = box.run("exit 5")[0]["text"]
    status = box.execd.get(f"/command/status/{process}").json()
    assert (status["content"], status["running"], status["exit_code"]) == ("exit 5", False, 5)
    assert status["started_at"] and status["finished_at"]


def test_interrupt_kills_commands_that_ignore_signals(box):
    process = box.start("trap '' TERM; echo ready; while :; do sleep 0.1; done", until="ready")
    assert box.execd.delete("/command", params={"id": process}).status_code == 200
    status = box.execd.get(f"/command/status/{process}").json()
    while status["running"]:
        status = box.execd.get(f"/command/status/{process}").json()
    assert status["exit_code"] == -1
    assert box.execd.delete("/command", params={"id": process}).status_code == 404


def test_options_end_with_their_run(box):
    session = box.execd.post("/session").json()["session_id"]
    for command, expected in [("set -eu; echo set", "set"), ("false; echo after $NONE", "after")]:
        happened = events(box.execd.post(f"/session/{session}/run", json={"command": command}).text)
        assert [text.strip() for text in texts(happened)] == [expected], happened


def test_a_session_runs_one_thing_at_a_time(box):
    session = box.execd.post("/session").json()["session_id"]
    with box.execd.stream("POST", f"/session/{session}/run", json={"command": "echo on; sleep 600"}) as first:
        seen = ""
        for piece in first.iter_text():
            seen += piece
            if "on" in texts_of(seen):
                break
        second = box.execd.post(f"/session/{session}/run", json={"command": "true"})
        assert second.status_code == 409
    assert events_of(seen)[0]["text"] == session
    assert box.execd.delete("/command", params={"id": session}).status_code == 200
    again = events(box.execd.post(f"/session/{session}/run", json={"command": "echo healed"}).text)
    assert texts(again) == ["healed\n"]


def events_of(seen):
    return [json.loads(frame) for frame in seen.split("\n\n") if frame.endswith("}")]


def texts_of(seen):
    return [event["text"].strip() for event in events_of(seen) if event["type"] == "stdout"]


def test_missing_session_is_not_found(box):
    for answer in [box.execd.post(f"/session/{'0' * 32}/run", json={"command": "true"}), box.execd.delete("/session/x")]:
        assert (answer.status_code, answer.json()["code"]) == (404, "CONTEXT_NOT_FOUND")


def test_ranges_of_a_download(box):
    box.upload("/tmp/digits", b"0123456789")

    def read(value):
        answer = box.execd.get("/files/download", params={"path": "/tmp/digits"}, headers={"Range": value})
        return answer.status_code, answer.content if answer.status_code == 206 else b"", answer.headers.get("content-range")

    assert read("bytes=2-4") == (206, b"234", "bytes 2-4/10")
    assert read("bytes=7-") == (206, b"789", "bytes 7-9/10")
    assert read("bytes=-3") == (206, b"789", "bytes 7-9/10")
    assert read("bytes=5-18446744073709551615") == (206, b"56789", "bytes 5-9/10")
    assert read("bytes=10-") == (416, b"", "bytes */10")
    whole = box.execd.get("/files/download", params={"path": "/tmp/digits"})
    assert whole.headers["content-length"] == "10"
    assert whole.headers["content-disposition"] == 'attachment; filename="digits"'


def test_names_that_are_not_ascii_are_encoded(box):
    box.upload("/tmp/é.txt", b"x")
    answer = box.execd.get("/files/download", params={"path": "/tmp/é.txt"})
    assert "filename*=UTF-8''%C3%A9.txt" in answer.headers["content-disposition"]


def test_a_window_of_lines(box):
    box.upload("/tmp/lines", b"one\ntwo\nthree\n")

    def read(**query):
        return box.execd.get("/files/download", params={"path": "/tmp/lines", **query})

    assert read(offset=2, limit=1).text == "two"
    assert read(offset=2, limit=9).text == "two\nthree"
    assert read(offset=2, limit=1).headers["content-type"].startswith("text/plain")
    assert read(offset=0, limit=1).status_code == 400
    combined = box.execd.get(
        "/files/download", params={"path": "/tmp/lines", "offset": 1, "limit": 1}, headers={"Range": "bytes=0-1"}
    )
    assert combined.status_code == 400


def test_wrong_kinds_of_files_are_refused(box):
    box.upload("/tmp/kind/file", b"x")
    status = lambda method, path, **more: box.execd.request(method, path, **more).status_code
    assert status("GET", "/files/download?path=/tmp/kind") == 400
    assert status("GET", "/files/download?path=/tmp/never") == 404
    assert status("GET", "/directories/list?path=/tmp/kind/file") == 400
    assert status("GET", "/directories/list?path=/tmp/never") == 404
    assert status("GET", "/files/search?path=/tmp/never&pattern=*") == 404
    assert status("DELETE", "/files?path=/tmp/kind") == 500
    assert status("DELETE", "/files?path=/tmp/never&path=/tmp/kind/file") == 200
    assert status("DELETE", "/directories?path=/tmp/never") == 200
    assert box.execd.get("/directories/list?path=/tmp&depth=0").json() == []
    box.output("ln -sfn /tmp /tmp/kind/link")
    for link in ["/tmp/kind/link", "/tmp/kind/link/"]:
        assert status("GET", f"/directories/list?path={link}") == 400
        assert status("GET", f"/directories/list?path={link}&depth=0") == 400
    assert status("GET", "/directories/list?path=/tmp/never&depth=0") == 404
    assert status("GET", "/directories/list?path=/") == 200


def test_no_path_at_all_is_nothing_to_do(box):
    assert box.execd.get("/files/info").json() == {}
    for path in ["/files", "/directories"]:
        assert box.execd.delete(path).status_code == 200
        assert box.execd.delete(path, params={"path": ""}).status_code == 400
    assert box.execd.get("/files/info", params={"path": ""}).json()["code"] == "MISSING_QUERY"


def test_a_replacement_that_is_left_out_is_nothing(box):
    for number, change in enumerate([{"old": "b"}, {"old": "b", "new": None}, {"old": "b", "new": ""}]):
        box.upload(f"/tmp/replaced-{number}", b"abc")
        assert box.execd.post("/files/replace", json={f"/tmp/replaced-{number}": change}).status_code == 200
        assert box.output(f"cat /tmp/replaced-{number}") == "ac"


def test_a_move_never_overwrites(box):
    box.upload("/tmp/from", b"1")
    box.upload("/tmp/to", b"2")
    answer = box.execd.post("/files/mv", json=[{"src": "/tmp/from", "dest": "/tmp/to"}])
    assert answer.status_code == 500 and answer.json()["code"] == "RUNTIME_ERROR"
    assert box.execd.post("/files/mv", json=[{"src": "/tmp/never", "dest": "/tmp/x"}]).status_code == 404
    assert box.execd.get("/files/download?path=/tmp/to").content == b"2"


def test_replacing_counts_only_if_asked(box):
    box.upload("/tmp/words", b"x y x")
    plain = box.execd.post("/files/replace?verbose=false", json={"/tmp/words": {"old": "y", "new": "z"}})
    assert (plain.status_code, plain.content) == (200, b"")
    counted = box.execd.post("/files/replace?verbose=true", json={"/tmp/words": {"old": "x", "new": "xx"}})
    assert counted.json() == {"/tmp/words": {"replacedCount": 2}}
    assert box.execd.post("/files/replace", json={"/tmp/words": {"old": "", "new": "z"}}).status_code == 400


def test_paths_may_start_at_home(box):
    box.upload("~/at-home", b"x")
    assert box.output("cat /root/at-home") == "x"
    assert box.execd.get("/files/info?path=~/at-home").json()["~/at-home"]["path"] == "/root/at-home"
    assert box.execd.delete("/files?path=~/at-home").status_code == 200


def test_a_new_file_has_times_close_together(box):
    from datetime import datetime

    box.upload("/tmp/fresh", b"x")
    info = box.execd.get("/files/info?path=/tmp/fresh").json()["/tmp/fresh"]
    times = [datetime.fromisoformat(info[name].replace("Z", "+00:00")) for name in ("created_at", "modified_at")]
    assert abs((times[0] - times[1]).total_seconds()) < 2
    assert info["type"] == "file"


def test_measurements_are_watched(box):
    with box.execd.stream("GET", "/metrics/watch") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        seen = ""
        for piece in answer.iter_text():
            seen += piece
            if seen.count("\n\n") == 2:
                break
    first, second = events(seen)
    assert second["timestamp"] - first["timestamp"] > 500
    assert {"cpu_count", "cpu_used_pct", "mem_total_mib", "mem_used_mib"} < set(first)


def test_isolated_sessions_are_reported_as_unavailable(box):
    assert box.execd.get("/v1/isolated/capabilities").json()["available"] is False
