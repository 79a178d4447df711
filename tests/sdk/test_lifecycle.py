"""The lifecycle API by plain HTTP: statuses, filters, expiry, refusals and their codes."""

from datetime import datetime, timedelta, timezone

import pytest
from conftest import CREATE, KEY


def when(text):
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def test_the_api_is_mounted_with_and_without_its_prefix(api, box):
    assert api.get(f"/sandboxes/{box.id}").json()["id"] == box.id
    assert api.get(f"/v1/sandboxes/{box.id}").json()["id"] == box.id


def test_a_sandbox_shows_its_image_as_it_was_named(api, box):
    shown = api.get(f"/v1/sandboxes/{box.id}").json()
    assert shown["image"] == {"uri": "python:3.12"}
    assert shown["extensions"]["coracle.image"] == "host"
    assert "image" not in box.created


def test_a_stand_in_is_named_in_a_header(api):
    answer = api.post("/v1/sandboxes", json=CREATE)
    assert answer.status_code == 202, answer.text
    assert "`host`" in answer.headers["coracle-image-stand-in"] and "python:3.12" in answer.headers["coracle-image-stand-in"]
    api.delete(f"/v1/sandboxes/{answer.json()['id']}")


def test_extensions_with_their_prefix_are_echoed(api, new_box):
    box = new_box(extensions={"opensandbox.extensions.team": "x", "other": "y"})
    for shown in [box.created, api.get(f"/v1/sandboxes/{box.id}").json()]:
        assert shown["extensions"]["opensandbox.extensions.team"] == "x"
        assert "other" not in shown["extensions"]




@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"timeout": 59}, 400, "SANDBOX::INVALID_PARAMETER"),
        ({"entrypoint": []}, 400, "SANDBOX::INVALID_PARAMETER"),
        ({"resourceLimits": {"memory": "-1Gi"}}, 400, "SANDBOX::INVALID_PARAMETER"),
        ({"resourceLimits": {"cpu": "NaN"}}, 400, "SANDBOX::INVALID_PARAMETER"),
        ({"metadata": {"opensandbox.io/id": "x"}}, 400, "SANDBOX::INVALID_METADATA_LABEL"),
        ({"metadata": {"a": "has space"}}, 400, "SANDBOX::INVALID_METADATA_LABEL"),
        ({"env": {"OPENSANDBOX_EGRESS_EVIL": "1"}}, 400, "SANDBOX::INVALID_PARAMETER"),
        ({"volumes": [{"name": "v", "mountPath": "/v", "host": {"path": "/"}}]}, 400, "VOLUME::HOST_PATH_NOT_ALLOWED"),
        ({"volumes": [{"name": "v", "mountPath": "v", "host": {"path": "/"}}]}, 400, "VOLUME::INVALID_MOUNT_PATH"),
        ({"volumes": [{"name": "v", "mountPath": "/v"}]}, 400, "VOLUME::INVALID_BACKEND"),
        ({"networkPolicy": {"defaultAction": "ask"}}, 400, "SANDBOX::INVALID_PARAMETER"),
        ({"extensions": {"coracle.network": "some"}}, 400, "SANDBOX::INVALID_PARAMETER"),
        ({"credentialProxy": {"enabled": True}}, 400, "SANDBOX::API_NOT_SUPPORTED"),
        ({"extensions": {"coracle.lines": "Q"}}, 400, "SANDBOX::INVALID_PARAMETER"),
        ({"extensions": {"poolRef": "none"}}, 404, "KUBERNETES::POOL_NOT_FOUND"),
        ({"snapshotId": "s", "image": None}, 404, "SNAPSHOT::NOT_FOUND"),
        ({"image": None}, 400, "SANDBOX::INVALID_PARAMETER"),
        ({"image": {"uri": "no/such:image"}}, 400, "DOCKER::SANDBOX_IMAGE_PULL_FAILED"),
        ({"entrypoint": ["/no/such/program"]}, 400, "DOCKER::SANDBOX_START_FAILED"),
    ],
)
def test_invalid_create_is_refused_with_its_code(api, change, status, code):
    answer = api.post("/v1/sandboxes", json={**CREATE, **change})
    assert (answer.status_code, answer.json()["code"]) == (status, code)


def test_variables_of_the_filter_do_not_reach_the_sandbox(new_box):
    box = new_box(env={"OPENSANDBOX_EGRESS_LOG_LEVEL": "debug", "OTHER": "here"})
    assert box.output("env | grep -e EGRESS -e OTHER") == "OTHER=here\n"


def test_small_resources_are_in_force(new_box):
    box = new_box(resourceLimits={"cpu": "100m", "memory": "64Mi", "unknown": "x"})
    assert box.execd.get("/metrics").json()["mem_total_mib"] == 64


def test_states_and_pages(api, new_box, mark):
    boxes = [new_box(metadata={"mark": mark}) for _ in range(3)]
    api.post(f"/v1/sandboxes/{boxes[0].id}/pause")

    def ids(query):
        answer = api.get(f"/v1/sandboxes?metadata=mark%3D{mark}&{query}")
        return [item["id"] for item in answer.json()["items"]], answer.json()["pagination"]

    assert ids("state=PAUSED")[0] == [boxes[0].id]
    assert ids("state=paused&state=running")[0] == [box.id for box in reversed(boxes)]
    items, pagination = ids("page=2&pageSize=2")
    assert items == [boxes[0].id]
    assert pagination == {"page": 2, "pageSize": 2, "totalItems": 3, "totalPages": 2, "hasNextPage": False}
    assert ids("page=9")[0] == []
    assert ids("state=Failed") == ([], {"page": 1, "pageSize": 20, "totalItems": 0, "totalPages": 0, "hasNextPage": False})


def test_metadata_is_merged(api, new_box):
    box = new_box(metadata={"a": "1", "b": "2"})

    def patch(change):
        return api.patch(f"/v1/sandboxes/{box.id}/metadata", json=change)

    assert patch({"a": None, "c": "3"}).json()["metadata"] == {"b": "2", "c": "3"}
    assert patch({"d": "4"}).json()["metadata"] == {"b": "2", "c": "3", "d": "4"}
    assert patch({"opensandbox.io/x": "y"}).status_code == 400
    assert patch({"e": "has space"}).status_code == 400
    assert api.patch("/v1/sandboxes/aaaaaaaaaaaaaaaaaaaa/metadata", json={}).status_code == 404


def test_an_expiry_is_moved_to_any_future_time(api, new_box):
    box = new_box()
    now = datetime.now(timezone.utc)

    def renew(text):
        return api.post(f"/v1/sandboxes/{box.id}/renew-expiration", json={"expiresAt": text})

    for shift in [timedelta(hours=2), timedelta(minutes=3)]:
        answer = renew((now + shift).isoformat())
        assert answer.status_code == 200
        assert abs(when(answer.json()["expiresAt"]) - (now + shift)) < timedelta(seconds=1)
    naive = (now + timedelta(hours=1)).replace(tzinfo=None).isoformat()
    assert abs(when(renew(naive).json()["expiresAt"]) - (now + timedelta(hours=1))) < timedelta(seconds=1)
    for wrong in [(now - timedelta(seconds=5)).isoformat(), "tomorrow"]:
        assert (renew(wrong).status_code, renew(wrong).json()["code"]) == (400, "DOCKER::INVALID_EXPIRATION")


def test_pausing_and_resuming_at_the_wrong_time_is_a_conflict(api, new_box):
    box = new_box()

    def post(what):
        answer = api.post(f"/v1/sandboxes/{box.id}/{what}")
        return answer.status_code, answer.json()["code"] if answer.content else ""

    assert post("resume") == (409, "DOCKER::SANDBOX_NOT_PAUSED")
    assert post("pause") == (202, "")
    assert api.get(f"/v1/sandboxes/{box.id}").json()["status"]["state"] == "Paused"
    assert post("pause") == (409, "DOCKER::SANDBOX_NOT_RUNNING")
    assert box.execd.get("/ping").status_code == 409
    assert box.execd.post("/command", json={"command": "true"}).status_code == 409
    assert post("resume") == (202, "")
    assert box.output("echo back") == "back\n"


def test_a_paused_sandbox_can_be_deleted(api, new_box):
    box = new_box()
    api.post(f"/v1/sandboxes/{box.id}/pause")
    assert api.delete(f"/v1/sandboxes/{box.id}").status_code == 204


def test_an_entrypoint_that_ended_is_seen(api, new_box):
    for entrypoint, state in [(["true"], "Terminated"), (["sh", "-c", "exit 3"], "Failed")]:
        box = new_box(entrypoint=entrypoint)
        shown = api.get(f"/v1/sandboxes/{box.id}").json()
        while shown["status"]["state"] == "Running":
            shown = api.get(f"/v1/sandboxes/{box.id}").json()
        assert shown["status"]["state"] == state
        assert shown["entrypoint"] == entrypoint


def test_endpoints_refuse_invalid_ports_and_signatures(api, box):
    def resolve(port, **query):
        answer = api.get(f"/v1/sandboxes/{box.id}/endpoints/{port}", params=query)
        return answer.status_code, answer.json().get("code")

    assert resolve(0) == resolve(65536) == resolve("x") == (400, "DOCKER::INVALID_PORT")
    assert resolve(8080, use_server_proxy="true", expires=1) == (400, "SANDBOX::INVALID_PARAMETER")
    assert resolve(8080, use_server_proxy="false", expires=1) == (400, "SANDBOX::INVALID_PARAMETER")
    assert resolve(8080)[0] == 200


def test_an_endpoint_is_named_as_the_client_named_the_server(api, box):
    answer = api.get(f"/v1/sandboxes/{box.id}/endpoints/8080", headers={"Host": "localhost:1234"})
    assert answer.json()["endpoint"] == f"localhost:1234/v1/sandboxes/{box.id}/proxy/8080"


def test_unsupported_routes_and_empty_changes_are_refused(api, box):
    for method, path, status, code in [
        ("PATCH", f"/v1/sandboxes/{box.id}/networkpolicy", 400, "SANDBOX::INVALID_PARAMETER"),
        ("POST", "/v1/templates", 501, "FSB::API_NOT_SUPPORTED"),
    ]:
        answer = api.request(method, path)
        assert (answer.status_code, answer.json()["code"]) == (status, code), path


def test_measurements_of_clients_are_taken_and_dropped(api):
    event = {"eventType": "sandbox.create", "createDurationMs": 88, "success": True, "sdkLanguage": "python"}
    answer = api.post("/v1/metrics/events", json=event)
    assert answer.status_code == 204 and not answer.content


def test_proxied_access_renews_if_asked_for(api, new_box):
    box = new_box(timeout=60, extensions={"access.renew.extend.seconds": "600"})
    before = when(api.get(f"/v1/sandboxes/{box.id}").json()["expiresAt"])
    box.execd.get("/ping", headers={"OpenSandbox-Access-Renew": "skip"})
    assert when(api.get(f"/v1/sandboxes/{box.id}").json()["expiresAt"]) == before
    box.execd.get("/ping")
    after = when(api.get(f"/v1/sandboxes/{box.id}").json()["expiresAt"])
    assert after - before > timedelta(seconds=500)


@pytest.mark.skipif(not KEY, reason="the server has no key")
class TestKeys:
    def test_missing_and_wrong_keys_are_distinguished(self, api):
        for path in ["/v1/sandboxes", "/sandboxes", "/metrics"]:
            missing = api.get(path, headers={"OPEN-SANDBOX-API-KEY": ""})
            wrong = api.get(path, headers={"OPEN-SANDBOX-API-KEY": "wrong"})
            assert missing.status_code == wrong.status_code == 401, path
            assert wrong.json()["code"] == "INVALID_API_KEY"

    def test_no_key_at_all(self, anonymous):
        answer = anonymous.get("/v1/sandboxes")
        assert (answer.status_code, answer.json()["code"]) == (401, "MISSING_API_KEY")

    def test_alternative_key_header_is_accepted(self, anonymous):
        assert anonymous.get("/v1/sandboxes", headers={"X-API-Key": KEY}).status_code == 200

    def test_health_and_version_are_open(self, anonymous):
        assert anonymous.get("/health").json() == {"status": "healthy"}
        assert anonymous.get("/version").json()["version"]

    def test_the_execution_api_takes_its_token_or_a_key(self, anonymous, box):
        path = f"/v1/sandboxes/{box.id}/proxy/44772/ping"
        token = box.endpoint(44772)["headers"]["X-EXECD-ACCESS-TOKEN"]
        egress = box.endpoint(18080)["headers"]["OPENSANDBOX-EGRESS-AUTH"]
        for headers, status in [
            ({}, 401),
            ({"X-EXECD-ACCESS-TOKEN": "wrong"}, 401),
            ({"X-EXECD-ACCESS-TOKEN": egress}, 401),
            ({"X-Coracle-Access-Token": token}, 401),
            ({"X-EXECD-ACCESS-TOKEN": token}, 200),
            ({"X-EXECD-ACCESS-TOKEN": KEY}, 200),
            ({"OPEN-SANDBOX-API-KEY": KEY}, 200),
        ]:
            answer = anonymous.get(path, headers=headers)
            assert answer.status_code == status, headers
            if status == 401:
                assert set(answer.json()) == {"error"}

    def test_a_token_opens_only_its_own_sandbox(self, anonymous, box, new_box):
        token = box.endpoint(44772)["headers"]["X-EXECD-ACCESS-TOKEN"]
        other = new_box()
        answer = anonymous.get(
            f"/v1/sandboxes/{other.id}/proxy/44772/ping", headers={"X-EXECD-ACCESS-TOKEN": token}
        )
        assert answer.status_code == 401

    def test_the_egress_api_refuses_in_plain_text(self, anonymous, box):
        answer = anonymous.get(f"/v1/sandboxes/{box.id}/proxy/18080/policy")
        assert answer.status_code == 401 and answer.headers["content-type"].startswith("text/plain")
        egress = box.port(18080)
        assert egress.get("/policy").json()["mode"] == "deny_all"
        assert egress.get("/healthz").status_code == 200
        patched = egress.patch("/policy", json=[{"action": "allow", "target": "not a name"}])
        assert patched.status_code == 400 and patched.headers["content-type"].startswith("text/plain")

    @pytest.mark.parametrize("unknown", ["a" * 20, "7c1f0000-0000-4000-8000-000000000000"])
    def test_the_egress_api_of_no_sandbox_is_plain_text_too(self, api, unknown):
        answer = api.get(f"/v1/sandboxes/{unknown}/proxy/18080/policy")
        assert answer.status_code == 404 and answer.headers["content-type"].startswith("text/plain")
        assert unknown in answer.text


@pytest.fixture
def anonymous():
    import httpx
    from conftest import URL

    with httpx.Client(base_url=URL) as client:
        yield client


def test_reference_entrypoint_script_is_not_needed_on_a_stand_in(new_box):
    script = ["/opt/code-interpreter/code-interpreter.sh"]
    box = new_box(image={"uri": "opensandbox/code-interpreter:latest"}, entrypoint=script)
    assert box.created["entrypoint"] == script
    assert box.output("echo here") == "here\n"


def test_deny_all_policy_turns_the_network_off(new_box):
    box = new_box(networkPolicy={"defaultAction": "deny", "egress": []})
    assert box.port(18080).get("/policy").json()["mode"] == "deny_all"
