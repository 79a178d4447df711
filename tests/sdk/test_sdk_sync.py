"""The synchronous SDK, in direct and in server-proxy mode."""

import os
import time
from datetime import datetime, timedelta, timezone

import pytest
from opensandbox import SandboxManagerSync, SandboxSync
from opensandbox.exceptions import SandboxApiException
from opensandbox.models.execd import RunCommandOpts
from opensandbox.models.filesystem import (
    ContentReplaceEntry,
    DirectoryListEntry,
    MoveEntry,
    SearchEntry,
    SetPermissionEntry,
    WriteEntry,
)
from opensandbox.models.sandboxes import SandboxFilter


@pytest.fixture
def sandbox(config):
    sandbox = SandboxSync.create(
        "python:3.12", connection_config=config, resource={"cpu": "1", "memory": "512Mi"}, env={"GREETING": "hello"}
    )
    yield sandbox
    sandbox.destroy()


def output(execution, stream="stdout"):
    return "".join(message.text for message in getattr(execution.logs, stream))


def status_of(call, *args, **kwargs):
    with pytest.raises(SandboxApiException) as caught:
        call(*args, **kwargs)
    return caught.value.status_code


def test_a_command_streams_and_its_exit_code_is_known(sandbox):
    execution = sandbox.commands.run("echo $GREETING; echo oops >&2; exit 7")
    assert output(execution) == "hello\n"
    assert output(execution, "stderr") == "oops\n"
    assert execution.exit_code == 7
    assert execution.error.value == "7"
    assert sandbox.commands.run("true").exit_code == 0


def test_output_of_any_kind_arrives_whole(sandbox):
    # Characters that some line splitters treat as line ends.
    odd = "a\u2028b\u0085c\x0b\x0cd é€😀\t\"\\"
    execution = sandbox.commands.run(f"printf '%s\\n' '{odd}'; seq 1 20000")
    assert output(execution) == odd + "\n" + "".join(f"{n}\n" for n in range(1, 20001))


def test_argv_runs_without_a_shell(sandbox):
    execution = sandbox.commands.run(["printf", "%s|", "a b", "$HOME", "*"])
    assert output(execution) == "a b|$HOME|*|"


def test_options_of_a_command_are_honoured(sandbox):
    opts = RunCommandOpts(working_directory="/tmp", envs={"EXTRA": "x y"}, uid=65534, gid=65534)
    execution = sandbox.commands.run("pwd; echo $EXTRA; id -u; id -g", opts=opts)
    assert output(execution) == "/tmp\nx y\n65534\n65534\n"


def test_a_timeout_ends_the_whole_tree(sandbox):
    started = time.monotonic()
    execution = sandbox.commands.run(
        "(setsid sleep 60 &) ; sleep 60", opts=RunCommandOpts(timeout=timedelta(milliseconds=300))
    )
    assert time.monotonic() - started < 10
    assert execution.exit_code == -1
    left = sandbox.commands.run("for p in /proc/[0-9]*; do cat $p/comm 2>/dev/null; done | grep -c '^sleep$'")
    assert output(left) == "0\n"


def test_a_background_command_is_found_again(sandbox):
    execution = sandbox.commands.run("echo one; sleep 0.2; echo two >&2; exit 3", opts=RunCommandOpts(background=True))
    assert execution.id and execution.exit_code is None
    status = sandbox.commands.get_command_status(execution.id)
    while status.running:
        status = sandbox.commands.get_command_status(execution.id)
    assert status.exit_code == 3
    logs = sandbox.commands.get_background_command_logs(execution.id)
    assert logs.content == "one\ntwo\n" and logs.cursor == 8
    assert sandbox.commands.get_background_command_logs(execution.id, cursor=4).content == "two\n"
    assert sandbox.commands.get_background_command_logs(execution.id, cursor=999).content == ""


def test_a_running_command_can_be_interrupted(sandbox):
    execution = sandbox.commands.run("exec sleep 600", opts=RunCommandOpts(background=True))
    sandbox.commands.interrupt(execution.id)
    assert not sandbox.commands.get_command_status(execution.id).running


def test_a_session_keeps_directory_and_exports(sandbox):
    session = sandbox.commands.create_session(working_directory="/tmp/made/by/session")
    run = sandbox.commands.run_in_session
    assert output(run(session, "pwd; cd /; export WORD=kept")) == "/tmp/made/by/session\n"
    assert output(run(session, "pwd; echo $WORD")) == "/\nkept\n"
    assert run(session, "(exit 7)").exit_code == 7
    assert output(run(session, "pwd", working_directory="/tmp")) == "/tmp\n"
    sandbox.commands.delete_session(session)
    assert status_of(sandbox.commands.delete_session, session) == 404


def test_session_without_options_is_opened(sandbox):
    session = sandbox.commands.create_session()
    assert sandbox.commands.run_in_session(session, "true").exit_code == 0


ODD_NAMES = ["plain.txt", "with space.txt", "plus+and&amp=x%20.txt", "ünï-€-😀.bin", "quote\"'`$(x).txt", "-dash", "#hash?q"]


def test_files_with_odd_names_and_binary_content(sandbox):
    content = os.urandom(1 << 20)
    paths = [f"/tmp/odd dir/{name}" for name in ODD_NAMES]
    sandbox.files.write_files([WriteEntry(path=path, data=content, mode=640) for path in paths])
    for path in paths:
        assert sandbox.files.read_bytes(path) == content, path
    infos = sandbox.files.get_file_info(paths)
    assert sorted(infos) == sorted(paths)
    assert {(info.size, info.mode, info.owner) for info in infos.values()} == {(1 << 20, 640, "root")}
    found = sandbox.files.search(SearchEntry(path="/tmp/odd dir", pattern="*"))
    assert sorted(entry.path for entry in found) == sorted(paths)


def test_text_ranges_and_streams(sandbox):
    sandbox.files.write_file("/tmp/text", "zero\none\ntwo\n")
    assert sandbox.files.read_file("/tmp/text") == "zero\none\ntwo\n"
    assert sandbox.files.read_file("/tmp/text", range_header="bytes=5-7") == "one"
    assert b"".join(sandbox.files.read_bytes_stream("/tmp/text")) == b"zero\none\ntwo\n"


def test_moving_replacing_and_permissions(sandbox):
    files = sandbox.files
    files.write_file("/tmp/a/f.txt", "one two one", mode=644)
    files.move_files([MoveEntry(src="/tmp/a/f.txt", dest="/tmp/new/parent/g.txt")])
    assert status_of(files.read_file, "/tmp/a/f.txt") == 404
    replaced = files.replace_contents_detailed(
        [ContentReplaceEntry(path="/tmp/new/parent/g.txt", old_content="one", new_content="1")]
    )
    assert [result.replaced_count for result in replaced] == [2]
    assert files.read_file("/tmp/new/parent/g.txt") == "1 two 1"
    files.set_permissions([SetPermissionEntry(path="/tmp/new/parent/g.txt", mode=600, owner="nobody", group="nogroup")])
    info = files.get_file_info(["/tmp/new/parent/g.txt"])["/tmp/new/parent/g.txt"]
    assert (info.mode, info.owner, info.group) == (600, "nobody", "nogroup")
    files.delete_files(["/tmp/new/parent/g.txt", "/tmp/never/there"])
    assert status_of(files.get_file_info, ["/tmp/new/parent/g.txt"]) == 404


def test_directories(sandbox):
    files = sandbox.files
    files.create_directories([WriteEntry(path="/tmp/tree/b/c", mode=755), WriteEntry(path="/tmp/tree/odd", mode=644)])
    files.write_file("/tmp/tree/b/file.txt", "x")
    entries = files.list_directory(DirectoryListEntry(path="/tmp/tree", depth=2))
    assert [entry.path for entry in entries] == ["/tmp/tree/b", "/tmp/tree/b/c", "/tmp/tree/b/file.txt", "/tmp/tree/odd"]
    assert files.get_file_info(["/tmp/tree/odd"])["/tmp/tree/odd"].mode == 644
    files.create_directories([WriteEntry(path="/tmp/tree/new/secret", mode=700, owner="nobody")])
    made = files.get_file_info(["/tmp/tree/new", "/tmp/tree/new/secret"])
    assert [(info.mode, info.owner) for info in made.values()] == [(755, "root"), (700, "nobody")]
    found = files.search(SearchEntry(path="/tmp/tree", pattern="*.txt"))
    assert [entry.path for entry in found] == ["/tmp/tree/b/file.txt"]
    files.delete_directories(["/tmp/tree"])
    assert status_of(files.get_file_info, ["/tmp/tree"]) == 404


def test_files_as_another_user(sandbox):
    sandbox.files.write_file("/tmp/secret", "x", mode=600)
    nobody = sandbox.files_with_identity(65534, 65534)
    assert status_of(nobody.read_file, "/tmp/secret") in (403, 500)
    nobody.write_file("/tmp/mine", "y")
    assert sandbox.files.get_file_info(["/tmp/mine"])["/tmp/mine"].owner == "nobody"


def test_renewing_moves_the_expiry(sandbox):
    before = datetime.now(timezone.utc)
    renewed = sandbox.renew(timedelta(minutes=20))
    assert abs(renewed.expires_at - (before + timedelta(minutes=20))) < timedelta(seconds=30)
    assert abs(sandbox.get_info().expires_at - renewed.expires_at) < timedelta(seconds=1)


def test_resume_continues_a_paused_sandbox(sandbox, config):
    sandbox.files.write_file("/tmp/kept", "still here")
    counter = sandbox.commands.run(
        "while :; do echo x; sleep 0.05; done", opts=RunCommandOpts(background=True)
    )
    sandbox.pause()
    assert sandbox.get_info().status.state == "Paused"
    assert not sandbox.is_healthy()
    assert status_of(sandbox.pause) == 409
    again = SandboxSync.resume(sandbox.id, connection_config=config)
    try:
        assert again.get_info().status.state == "Running"
        assert again.files.read_file("/tmp/kept") == "still here"
        assert again.commands.get_command_status(counter.id).running
    finally:
        again.close()


def test_metadata_is_patched_and_listed_by(config, mark):
    resource = {"cpu": "1", "memory": "256Mi"}
    with SandboxManagerSync.create(config) as manager:
        sandboxes = [
            SandboxSync.create("python:3.12", connection_config=config, resource=resource, metadata={"mark": mark, "n": str(n)})
            for n in range(3)
        ]
        try:
            listed = manager.list_sandbox_infos(SandboxFilter(metadata={"mark": mark}))
            newest_first = [sandbox.id for sandbox in reversed(sandboxes)]
            assert [info.id for info in listed.sandbox_infos] == newest_first
            page = manager.list_sandbox_infos(SandboxFilter(metadata={"mark": mark}, page_size=2, page=2))
            assert [info.id for info in page.sandbox_infos] == newest_first[2:]
            assert page.pagination.total_items == 3 and page.pagination.total_pages == 2
            one = SandboxFilter(states=["running"], metadata={"mark": mark, "n": "1"})
            assert [info.id for info in manager.list_sandbox_infos(one).sandbox_infos] == [sandboxes[1].id]
            info = sandboxes[0].patch_metadata({"n": None, "team": "search"})
            assert info.metadata == {"mark": mark, "team": "search"}
            manager.kill_sandbox(sandboxes[2].id)
            left = manager.list_sandbox_infos(SandboxFilter(metadata={"mark": mark}))
            assert len(left.sandbox_infos) == 2
            assert status_of(manager.get_sandbox_info, sandboxes[2].id) == 404
        finally:
            for sandbox in sandboxes:
                try:
                    sandbox.kill()
                except SandboxApiException:
                    pass
                sandbox.close()


def test_a_killed_sandbox_is_gone(config):
    sandbox = SandboxSync.create("python:3.12", connection_config=config, resource={"cpu": "1", "memory": "256Mi"})
    sandbox.kill()
    assert status_of(sandbox.get_info) == 404
    sandbox.close()


def test_a_sandbox_without_a_timeout_never_expires(config):
    sandbox = SandboxSync.create(
        "python:3.12", connection_config=config, timeout=None, resource={"cpu": "1", "memory": "256Mi"}
    )
    try:
        assert sandbox.get_info().expires_at is None
        assert status_of(sandbox.renew, timedelta(minutes=5)) == 409
    finally:
        sandbox.destroy()


def test_metrics_are_plausible(sandbox):
    metrics = sandbox.get_metrics()
    assert metrics.cpu_count > 0 and 0 <= metrics.cpu_used_percentage <= 100
    assert 0 <= metrics.memory_used_in_mib <= metrics.memory_total_in_mib == 512
    assert abs(metrics.timestamp - time.time() * 1000) < 60_000


def test_egress_policy_matches_the_enforced_network(sandbox):
    policy = sandbox.get_egress_policy()
    assert policy.default_action == "deny" and not policy.egress


def test_another_client_connects_by_id(sandbox, config):
    other = SandboxSync.connect(sandbox.id, connection_config=config)
    assert output(other.commands.run("echo there")) == "there\n"
    other.close()
