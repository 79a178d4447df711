"""Requests that a server without a key refuses: foreign host names, other sites, web pages."""

import httpx
import pytest
from conftest import CREATE, KEYLESS_URL

pytestmark = pytest.mark.skipif(not KEYLESS_URL, reason="CORACLE_KEYLESS_URL names no server without a key")


@pytest.fixture(scope="module")
def open_api():
    with httpx.Client(base_url=KEYLESS_URL, timeout=httpx.Timeout(60)) as client:
        yield client


@pytest.fixture(scope="module")
def sandbox(open_api):
    answer = open_api.post("/v1/sandboxes", json=CREATE)
    assert answer.status_code == 202
    yield answer.json()["id"]
    open_api.delete(f"/v1/sandboxes/{answer.json()['id']}")


def test_no_key_is_required(open_api, sandbox):
    assert open_api.get("/v1/sandboxes").status_code == 200
    answer = open_api.post(f"/v1/sandboxes/{sandbox}/proxy/44772/command", json={"command": "echo hi"})
    assert '"hi\\n"' in answer.text


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8080", "localhost.evil.example", "10.1.2.3", "127.0.0.1.nip.io"])
def test_a_foreign_host_is_refused(open_api, host):
    for path in ["/v1/sandboxes", "/metrics", "/nothing"]:
        answer = open_api.get(path, headers={"Host": host})
        assert answer.status_code == 403 and answer.json()["code"], path


@pytest.mark.parametrize("host", ["localhost", "localhost:99", "127.0.0.1", "127.1.2.3:8080", "[::1]:8080"])
def test_loopback_names_are_accepted(open_api, host):
    assert open_api.get("/v1/sandboxes", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "https://localhost.evil.example", "null", "http://localhost:1"])
def test_another_site_is_refused(open_api, sandbox, origin):
    for path in ["/v1/sandboxes", f"/v1/sandboxes/{sandbox}/proxy/44772/ping", f"/v1/sandboxes/{sandbox}/proxy/8000/"]:
        answer = open_api.get(path, headers={"Origin": origin})
        assert answer.status_code == 403, path
        assert "access-control-allow-origin" not in answer.headers


def test_a_page_served_by_a_sandbox_reaches_no_api(open_api, sandbox):
    own = {"Origin": KEYLESS_URL}
    for headers in [own, {"Sec-Fetch-Site": "same-origin"}]:
        for path in ["/v1/sandboxes", f"/v1/sandboxes/{sandbox}/endpoints/44772", f"/v1/sandboxes/{sandbox}/proxy/44772/ping"]:
            assert open_api.get(path, headers=headers).status_code in (401, 403), path
    # The page can reach its own ports: the error that nothing listens comes from the port.
    assert open_api.get(f"/v1/sandboxes/{sandbox}/proxy/9/", headers=own).status_code == 502


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_another_site_may_link_to_a_port_but_not_load_from_it(open_api, sandbox, site):
    for mode, status in [("no-cors", 403), ("cors", 403), ("navigate", 502)]:
        headers = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode}
        assert open_api.get(f"/v1/sandboxes/{sandbox}/proxy/9/", headers=headers).status_code == status, mode


def test_no_page_may_ask_by_preflight(open_api):
    headers = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    answer = open_api.options("/v1/sandboxes", headers=headers)
    assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers


def test_health_is_open(open_api):
    assert open_api.get("/health", headers={"Host": "evil.example"}).status_code == 200
