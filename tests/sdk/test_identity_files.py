"""Files as a user of the sandbox: every route below `/v1/filesystem/{uid}/{gid}`, checked by the kernel."""

import json

import pytest
from opensandbox import SandboxSync
from opensandbox.exceptions import SandboxApiException


@pytest.fixture(scope="module")
def files(box):
    box.output(
        "set -e; id -u ann >/dev/null 2>&1 || { echo ann:x:1000:1000::/srv/ann:/bin/sh >> /etc/passwd;"
        " echo shared:x:2000:ann >> /etc/group; };"
        " mkdir -p /srv/ann /srv/shared /srv/closed; chown 1000:1000 /srv/ann;"
        " chgrp 2000 /srv/shared; chmod 2770 /srv/shared; chmod 700 /srv/closed; echo root > /srv/closed/f"
    )

    def ask(method, path, uid=1000, gid=1000, **more):
        return box.execd.request(method, f"/v1/filesystem/{uid}/{gid}{path}", **more)

    return ask


def upload(files, path, **who):
    parts = [
        ("metadata", ("metadata", json.dumps({"path": path, "mode": 640}), "application/json")),
        ("file", ("f", b"text old", "application/octet-stream")),
    ]
    return files("POST", "/files/upload", files=parts, **who)


def test_every_route_acts_as_that_user(box, files):
    home = "/srv/ann"
    assert files("POST", "/directories", json={f"{home}/d": {"mode": 755}}).status_code == 200
    assert upload(files, f"{home}/d/f").status_code == 200
    info = files("GET", "/files/info", params={"path": f"{home}/d/f"}).json()[f"{home}/d/f"]
    assert (info["owner"], info["mode"]) == ("ann", 640)
    assert files("GET", "/files/download", params={"path": "~/d/f"}).text == "text old"
    ranged = files("GET", "/files/download", params={"path": f"{home}/d/f"}, headers={"Range": "bytes=0-3"})
    assert (ranged.status_code, ranged.text) == (206, "text")
    replaced = files("POST", "/files/replace?verbose=true", json={f"{home}/d/f": {"old": "old", "new": "new"}})
    assert replaced.json() == {f"{home}/d/f": {"replacedCount": 1}}
    assert files("POST", "/files/permissions", json={f"{home}/d/f": {"mode": 600}}).status_code == 200
    assert files("POST", "/files/mv", json=[{"src": f"{home}/d/f", "dest": f"{home}/d/g"}]).status_code == 200
    found = files("GET", "/files/search", params={"path": home, "pattern": "g"}).json()
    assert [entry["path"] for entry in found] == [f"{home}/d/g"]
    listed = files("GET", "/directories/list", params={"path": f"{home}/d"}).json()
    assert [entry["path"] for entry in listed] == [f"{home}/d/g"]
    assert box.output(f"stat -c %u:%g {home}/d {home}/d/g") == "1000:1000\n1000:1000\n"
    assert files("DELETE", "/files", params={"path": f"{home}/d/g"}).status_code == 200
    assert files("DELETE", "/directories", params={"path": f"{home}/d"}).status_code == 200
    assert box.output(f"ls {home}") == ""


def test_a_file_may_be_written_where_its_directory_may_not(box, files):
    box.output("mkdir -p /srv/fixed; echo long old text > /srv/fixed/f; chmod 666 /srv/fixed/f; chown 0:0 /srv/fixed/f")
    metadata = ("metadata", ("metadata", json.dumps({"path": "/srv/fixed/f"}), "application/json"))
    answer = files("POST", "/files/upload", files=[metadata, ("file", ("f", b"an old", "application/octet-stream"))])
    assert answer.status_code == 200, answer.text
    assert files("POST", "/files/replace", json={"/srv/fixed/f": {"old": "old", "new": "new"}}).status_code == 200
    assert box.output("cat /srv/fixed/f; stat -c ' %a %u' /srv/fixed/f; ls -A /srv/fixed") == "an new 666 0\nf\n"
    assert upload(files, "/srv/fixed/g").status_code == 500


def test_official_client_can_act_as_a_user(config):
    sandbox = SandboxSync.create("python:3.12", connection_config=config, resource={"cpu": "1", "memory": "512Mi"})
    try:
        sandbox.commands.run("mkdir /srv/mine; chown 1000:1000 /srv/mine")
        files = sandbox.files_with_identity(1000, 1000)
        files.write_file("/srv/mine/f", "text", mode=600)
        assert files.read_file("/srv/mine/f") == "text"
        assert sandbox.commands.run("stat -c %u /srv/mine/f").text.strip() == "1000"
        with pytest.raises(SandboxApiException):
            files.write_file("/srv/f", "text")
    finally:
        sandbox.destroy()


def test_groups_of_the_account_count_and_those_of_others_do_not(box, files):
    assert upload(files, "/srv/shared/f").status_code == 200
    assert upload(files, "/srv/shared/g", uid=1001, gid=1001).status_code >= 400
    assert box.output("ls /srv/shared") == "f\n"


def test_forbidden_file_operations_have_no_effect(box, files):
    assert files("GET", "/files/download", params={"path": "/srv/closed/f"}).status_code >= 400
    assert upload(files, "/srv/closed/g").status_code >= 400
    assert files("DELETE", "/files", params={"path": "/srv/closed/f"}).status_code >= 400
    assert files("POST", "/files/permissions", json={"/srv/closed": {"mode": 777}}).status_code >= 400
    assert files("POST", "/files/mv", json=[{"src": "/srv/closed/f", "dest": "/srv/ann/f"}]).status_code >= 400
    assert box.output("cat /srv/closed/f; ls -A /srv/ann") == "root\n"


@pytest.mark.parametrize("who", [("ann", "1000"), ("-1", "0"), ("4294967295", "0"), ("0", "4294967295"), ("99999999", "5")])
def test_incomplete_or_invalid_users_are_refused(box, files, who):
    uid, gid = who
    for method, path in [("GET", "/files/info"), ("DELETE", "/files")]:
        answer = files(method, path, uid=uid, gid=gid, params={"path": "/srv/closed/f"})
        assert answer.status_code >= 400, answer.text
    assert box.output("cat /srv/closed/f") == "root\n"
