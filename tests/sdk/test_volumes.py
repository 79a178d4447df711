"""Volumes through the official SDK: host directories and named volumes."""

import os
import uuid
from pathlib import Path

import pytest
from conftest import KEYLESS_URL
from opensandbox import SandboxSync
from opensandbox.config import ConnectionConfigSync
from opensandbox.exceptions import SandboxApiException
from opensandbox.models.sandboxes import OSSFS, PVC, Host, Volume

#: A directory of this host that the server without a key may mount.
SHARED = os.environ.get("CORACLE_TEST_SHARED", "")

pytestmark = pytest.mark.skipif(not (SHARED and KEYLESS_URL), reason="CORACLE_TEST_SHARED names no directory")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user's server keeps no volumes")


@pytest.fixture
def create():
    made = []

    def create(*volumes):
        config = ConnectionConfigSync(domain=KEYLESS_URL.removeprefix("http://"), use_server_proxy=True)
        resource = {"cpu": "1", "memory": "256Mi"} if os.geteuid() == 0 else {}
        made.append(SandboxSync.create("python:3.12", connection_config=config, resource=resource, volumes=list(volumes)))
        return made[-1]

    yield create
    for sandbox in made:
        sandbox.destroy()


def run(sandbox, command):
    execution = sandbox.commands.run(command)
    assert execution.exit_code == 0, execution.error
    return "".join(message.text for message in execution.logs.stdout)


def refused(create, volume):
    with pytest.raises(SandboxApiException) as caught:
        create(volume)
    assert caught.value.status_code == 400
    return caught.value.error.code


def test_a_directory_of_the_host_is_read_and_written(create):
    directory = Path(SHARED) / uuid.uuid4().hex
    directory.mkdir()
    (directory / "marker.txt").write_text("from outside")
    sandbox = create(Volume(name="data", host=Host(path=str(directory)), mount_path="/mnt/data"))
    assert run(sandbox, "cat /mnt/data/marker.txt") == "from outside"
    run(sandbox, "echo from inside > /mnt/data/reply")
    assert (directory / "reply").read_text() == "from inside\n"
    reader = create(Volume(name="data", host=Host(path=str(directory)), mount_path="/mnt/data", read_only=True))
    assert reader.commands.run("echo no > /mnt/data/marker.txt").exit_code != 0
    part = create(Volume(name="data", host=Host(path=str(directory)), mount_path="/mnt/data", sub_path="a/b"))
    run(part, "echo deep > /mnt/data/deep")
    assert (directory / "a" / "b" / "deep").read_text() == "deep\n"


def test_unlisted_host_directory_is_refused(create):
    assert refused(create, Volume(name="v", host=Host(path="/etc"), mount_path="/v")) == "VOLUME::HOST_PATH_NOT_ALLOWED"


def test_object_storage_is_refused_by_name(create):
    bucket = OSSFS(bucket="bucket-name", endpoint="oss.example.org", accessKeyId="id", accessKeySecret="secret")
    assert refused(create, Volume(name="v", ossfs=bucket, mount_path="/v")) == "VOLUME::UNSUPPORTED_BACKEND"


@needs_root
def test_a_volume_with_a_name_outlives_its_sandbox(create):
    name = f"sdk-{uuid.uuid4().hex[:8]}"
    claim = PVC(claim_name=name, storage="32Mi", delete_on_sandbox_termination=True)
    first = create(Volume(name="data", pvc=claim, mount_path="/mnt/data"))
    run(first, "mkdir /mnt/data/sub && echo kept > /mnt/data/sub/file")
    existing = PVC(claim_name=name, create_if_not_exists=False)
    second = create(Volume(name="data", pvc=existing, mount_path="/mnt/data", sub_path="sub", read_only=True))
    assert run(second, "cat /mnt/data/file") == "kept\n"
    assert second.commands.run("touch /mnt/data/no").exit_code != 0


@needs_root
def test_claim_of_a_missing_volume_is_refused(create):
    claim = PVC(claim_name=f"sdk-{uuid.uuid4().hex[:8]}", create_if_not_exists=False)
    assert refused(create, Volume(name="v", pvc=claim, mount_path="/v")) == "VOLUME::PVC_NOT_FOUND"
