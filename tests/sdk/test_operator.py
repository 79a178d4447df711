"""The operator's view: health, version, metrics, and the enforced limits of one sandbox."""

import re


def test_health_and_version(api):
    assert api.get("/health").json() == {"status": "healthy"}
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", api.get("/version").json()["version"])


def test_measurements_are_prometheus_text(api, box):
    box.output("true")
    answer = api.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    lines = answer.text.splitlines()
    assert any(re.fullmatch(r'coracle_sandboxes\{phase="running"\} [1-9]\d*', line) for line in lines)
    for name in ["coracle_create_seconds_bucket", "coracle_exec_seconds_bucket", "coracle_http_request_seconds_bucket"]:
        assert any(line.startswith(name) for line in lines), name


def test_no_measurement_names_a_sandbox_or_a_path(api, box):
    box.execd.get("/files/info", params={"path": "/tmp/some-secret-name"})
    text = api.get("/metrics").text
    assert box.id not in text and "some-secret-name" not in text


def test_enforced_limits_are_reported(api, box):
    report = api.get(f"/coracle/v1/sandboxes/{box.id}").json()
    assert (report["image"]["requested"], report["image"]["used"]) == ("python:3.12", "host")
    assert report["image"]["standIn"].endswith("stands in for `python:3.12`")
    assert report["phase"] == "running" and report["inForce"]
    assert api.get("/coracle/v1/sandboxes/aaaaaaaaaaaaaaaaaaaa").status_code == 404
