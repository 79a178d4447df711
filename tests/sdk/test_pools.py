"""Pools: by plain HTTP, since no SDK manages them, and claims with the SDK."""

import time

import pytest
from opensandbox import SandboxSync

CAPACITY = {"bufferMax": 1, "bufferMin": 0, "poolMax": 10, "poolMin": 0}


@pytest.fixture
def pool(api, mark):
    template = {"spec": {"containers": [{"name": "main", "image": "python:3.12"}]}}
    answer = api.post("/v1/pools", json={"name": mark, "template": template, "capacitySpec": CAPACITY})
    assert answer.status_code == 201, answer.text
    assert answer.json()["name"] == mark and answer.json()["capacitySpec"] == CAPACITY
    until_warm(api, mark, 1)
    yield mark
    assert api.delete(f"/v1/pools/{mark}").status_code == 204


def until_warm(api, pool, count):
    end = time.monotonic() + 20
    while api.get(f"/v1/pools/{pool}").json()["status"]["available"] != count:
        assert time.monotonic() < end, "the pool did not reach its level"


def test_a_pool_is_shown_changed_and_removed(api, pool):
    shown = api.get(f"/v1/pools/{pool}").json()
    assert set(shown["status"]) >= {"total", "allocated", "available", "revision"} and shown["createdAt"]
    assert pool in [item["name"] for item in api.get("/v1/pools").json()["items"]]
    changed = {**CAPACITY, "bufferMax": 0}
    answer = api.put(f"/v1/pools/{pool}", json={"capacitySpec": changed})
    assert (answer.status_code, answer.json()["capacitySpec"]) == (200, changed)
    until_warm(api, pool, 0)


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"name": "Not A Name"}, 400, "SANDBOX::INVALID_PARAMETER"),
        ({"template": {}}, 400, "SANDBOX::INVALID_PARAMETER"),
        ({"capacitySpec": {**CAPACITY, "bufferMin": 2}}, 400, "SANDBOX::INVALID_PARAMETER"),
        ({"capacitySpec": {"bufferMax": 1}}, 400, "SANDBOX::INVALID_PARAMETER"),
        ({}, 409, "KUBERNETES::POOL_ALREADY_EXISTS"),
    ],
)
def test_invalid_pool_is_refused_with_its_code(api, pool, change, status, code):
    template = {"spec": {"containers": [{"image": "host"}]}}
    request = {"name": pool, "template": template, "capacitySpec": CAPACITY, **change}
    answer = api.post("/v1/pools", json=request)
    assert (answer.status_code, answer.json()["code"]) == (status, code)


def test_missing_pool_is_not_found(api):
    for method in ["GET", "PUT", "DELETE"]:
        answer = api.request(method, "/v1/pools/none", json={"capacitySpec": CAPACITY})
        assert (answer.status_code, answer.json()["code"]) == (404, "KUBERNETES::POOL_NOT_FOUND"), method


def test_the_sdk_takes_from_a_pool(api, pool, config):
    # The SDK requires an image; the pool decides which one is used.
    sandbox = SandboxSync.create(
        "anything",
        connection_config=config,
        extensions={"poolRef": pool},
        env={"GREETING": "hello"},
        metadata={"team": "x"},
        resource={"cpu": "1", "memory": "256Mi"},
    )
    try:
        shown = api.get(f"/v1/sandboxes/{sandbox.id}").json()
        assert shown["allocation"] == {"mode": "pool", "poolRef": pool, "state": "allocated"}
        assert shown["image"] == {"uri": "python:3.12"} and shown["metadata"] == {"team": "x"}
        execution = sandbox.commands.run("echo $GREETING; ls -A /root")
        assert "".join(message.text for message in execution.logs.stdout) == "hello\n"
        assert sandbox.get_info().status.state == "Running"
    finally:
        sandbox.destroy()


def test_create_from_a_pool_may_omit_other_fields(api, pool):
    answer = api.post("/v1/sandboxes", json={"extensions": {"poolRef": pool}})
    assert answer.status_code == 202, answer.text
    assert answer.json()["allocation"]["poolRef"] == pool
    assert api.delete(f"/v1/sandboxes/{answer.json()['id']}").status_code == 204
