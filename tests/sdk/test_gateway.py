"""Ports addressed by a host or a header, secure access and signed routes, with the SDK too."""

import os
import socket
import subprocess
import tempfile
import time
from datetime import timedelta

import httpx
import pytest
from conftest import CREATE, KEY, URL, remember
from opensandbox.config import ConnectionConfigSync
from opensandbox.models.sandboxes import SandboxImageSpec
from opensandbox.sync.sandbox import SandboxSync

BINARY = os.environ.get("CORACLE_TEST_BINARY", "")
OWN_KEY = "key-of-the-gateway-tests"
DOMAIN = "boxes.test"
SERVE = ["python3", "-m", "http.server", "--bind", "127.0.0.1", "--directory", "/", "7000"]

needs_binary = pytest.mark.skipif(not BINARY, reason="CORACLE_TEST_BINARY names no binary")


class Anywhere(httpx.HTTPTransport):
    """Connects to one server for any host name, as a wildcard DNS entry would."""

    def __init__(self, address):
        super().__init__()
        self.host, port = address.rsplit(":", 1)
        self.port = int(port)

    def handle_request(self, request):
        request.url = request.url.copy_with(host=self.host, port=self.port)
        return super().handle_request(request)


class Server:
    """A private server with some settings."""

    def __init__(self, **settings):
        self.directory = tempfile.TemporaryDirectory(prefix="gateway")
        os.chmod(self.directory.name, 0o755)
        aliases = self.directory.name + "/coracle.toml"
        with open(aliases, "w") as file:
            file.write('[images]\naliases = { "python:3.12" = "host" }\n')
        own = {"CORACLE_API_KEY": OWN_KEY, "CORACLE_CONFIG": aliases, "CORACLE_NETWORK_DEFAULT": "off"}
        environment = {**own, **settings}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("CORACLE_")}
        self.environment = {**inherited, **environment}
        command = [BINARY, "serve", "--listen", "127.0.0.1:0", "--state-dir", self.directory.name + "/state"]
        log = open(self.directory.name + "/log", "wb")
        self.process = subprocess.Popen(command, env=self.environment, stdout=subprocess.PIPE, stderr=log, text=True)
        line = self.process.stdout.readline()
        assert "listening on http://" in line, open(log.name).read()
        self.address = line.split("://")[1].strip()
        self.client = httpx.Client(transport=Anywhere(self.address), timeout=30)
        self.api = httpx.Client(base_url="http://" + self.address, headers={"OPEN-SANDBOX-API-KEY": OWN_KEY}, timeout=30)

    def create(self, **change):
        answer = self.api.post("/v1/sandboxes", json={**CREATE, "entrypoint": SERVE, **change})
        assert answer.status_code == 202, answer.text
        return answer.json()["id"]

    def endpoint(self, sandbox, port, **query):
        answer = self.api.get(f"/v1/sandboxes/{sandbox}/endpoints/{port}", params=query)
        assert answer.status_code == 200, answer.text
        remember(answer.json().get("headers", {}).values())
        return answer.json()

    def get(self, endpoint, path="/", **headers):
        """Sends the request of an SDK; until the service listens it gets an error."""
        return ask(self.client, endpoint, path, **headers)

    def config(self, **more):
        return ConnectionConfigSync(
            api_key=OWN_KEY, domain=self.address, request_timeout=timedelta(seconds=30),
            transport=Anywhere(self.address), **more,
        )

    def stop(self):
        subprocess.run([BINARY, "rm", "--all", "--url", "http://" + self.address], env={**self.environment}, check=True)
        self.process.terminate()
        assert self.process.wait(timeout=30) == 0
        self.directory.cleanup()


def ask(client, endpoint, path="/", **headers):
    given = {**endpoint.get("headers", {}), **{name.replace("_", "-"): value for name, value in headers.items()}}
    url = "http://" + endpoint["endpoint"] + path
    while (answer := client.get(url, headers=given)).status_code == 502:
        time.sleep(0.02)
    return answer


@pytest.fixture(scope="module")
def wildcard():
    server = Server(CORACLE_GATEWAY_MODE="wildcard", CORACLE_GATEWAY_DOMAIN=DOMAIN, CORACLE_RENEWAL_INTERVAL="1ms")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def header():
    keys = "b=MDEyMzQ1Njc4OWFiY2RlZg==,a=QUJDREVGR0hJSktMTU5PUA=="
    server = Server(CORACLE_GATEWAY_MODE="header", CORACLE_GATEWAY_KEYS=keys, CORACLE_GATEWAY_SHORT_SIGNATURES="true")
    yield server
    server.stop()


def soon(seconds=600):
    return int(time.time()) + seconds


@needs_binary
def test_port_is_served_on_its_own_host(wildcard):
    sandbox = wildcard.create()
    endpoint = wildcard.endpoint(sandbox, 7000)
    assert endpoint["endpoint"] == f"{sandbox}-7000.{DOMAIN}"
    answer = wildcard.get(endpoint)
    assert answer.status_code == 200 and "Directory listing" in answer.text
    # The token is required, the sandbox must exist, and the API is not served on that host.
    assert wildcard.get({"endpoint": endpoint["endpoint"]}).status_code == 401
    missing = {"endpoint": f"abcdefghij0123456789-7000.{DOMAIN}"}
    assert wildcard.get(missing).status_code == 404
    assert wildcard.get(endpoint, "/health").status_code == 404
    assert wildcard.get(endpoint, "/v1/sandboxes", OPEN_SANDBOX_API_KEY=OWN_KEY).status_code == 404
    assert wildcard.client.get(f"http://{DOMAIN}/health").json() == {"status": "healthy"}
    assert wildcard.client.get(f"http://{DOMAIN}/status.ok").text == "OK"


@needs_binary
def test_nothing_listens_and_not_running_are_distinguished(wildcard):
    sandbox = wildcard.create()
    endpoint = wildcard.endpoint(sandbox, 9)
    answer = wildcard.client.get("http://" + endpoint["endpoint"], headers=endpoint["headers"])
    assert (answer.status_code, answer.json()["code"]) == (502, "BACKEND_CONNECTION_FAILED")
    assert wildcard.api.post(f"/v1/sandboxes/{sandbox}/pause").status_code == 202
    answer = wildcard.client.get("http://" + endpoint["endpoint"], headers=endpoint["headers"])
    assert (answer.status_code, answer.json()["code"]) == (503, "DOCKER::SANDBOX_NOT_RUNNING")


@needs_binary
@pytest.mark.parametrize("secure", [False, True])
def test_the_sdk_works_through_a_host(wildcard, secure):
    sandbox = SandboxSync.create(
        SandboxImageSpec("python:3.12"), entrypoint=SERVE, secure_access=secure, connection_config=wildcard.config()
    )
    try:
        assert sandbox.commands.run("echo through").logs.stdout[0].text.strip() == "through"
        sandbox.files.write_file("/tmp/x", "text")
        assert sandbox.files.read_file("/tmp/x") == "text"
        signed = sandbox.get_signed_endpoint(7000, soon())
        assert signed.endpoint.startswith(f"{sandbox.id}-7000-") and signed.endpoint.endswith("." + DOMAIN)
        assert len(signed.endpoint.split(".")[0]) <= 63 and not signed.headers
        assert wildcard.get({"endpoint": signed.endpoint}).status_code == 200
        execution = sandbox.get_signed_endpoint(44772, soon())
        assert wildcard.get({"endpoint": execution.endpoint}, "/ping").status_code == 200
    finally:
        sandbox.kill()
        sandbox.close()


@needs_binary
def test_the_sdk_works_through_a_header(header):
    sandbox = SandboxSync.create(SandboxImageSpec("python:3.12"), entrypoint=SERVE, connection_config=header.config())
    try:
        assert sandbox.commands.run("echo through").logs.stdout[0].text.strip() == "through"
        endpoint = header.endpoint(sandbox.id, 7000)
        assert endpoint["endpoint"] == header.address
        assert endpoint["headers"]["OpenSandbox-Ingress-To"] == f"{sandbox.id}-7000"
        assert header.get(endpoint).status_code == 200
        older = {"endpoint": header.address, "headers": dict(endpoint["headers"])}
        older["headers"]["OPEN-SANDBOX-INGRESS"] = older["headers"].pop("OpenSandbox-Ingress-To")
        assert header.get(older).status_code == 200
        # The reference's short signature: eight digits and the name of the first key.
        signed = sandbox.get_signed_endpoint(7000, soon())
        route = signed.headers["OpenSandbox-Ingress-To"]
        assert len(route.split("-")[3]) == 9 and route.endswith("b")
        assert header.get({"endpoint": signed.endpoint, "headers": signed.headers}).status_code == 200
    finally:
        sandbox.kill()
        sandbox.close()


@needs_binary
def test_short_signatures_need_a_signing_key_and_guesses_are_limited(header):
    import base64
    import hashlib
    import struct

    sandbox = header.create()
    secret = base64.b64decode("QUJDREVGR0hJSktMTU5PUA==")
    digits, moment = "", soon()
    while moment:
        moment, digit = divmod(moment, 36)
        digits = "0123456789abcdefghijklmnopqrstuvwxyz"[digit] + digits
    text = f"v1\nshort\n{sandbox}\n7000\n{digits}\n".encode()
    framed = struct.pack(">I", len(secret)) + secret + struct.pack(">I", len(text)) + text
    right = hashlib.sha256(framed).hexdigest()[:8] + "a"
    route = {"endpoint": header.address, "headers": {"OpenSandbox-Ingress-To": f"{sandbox}-7000-{digits}-{right}"}}
    assert header.get(route).status_code == 200
    statuses = []
    for guess in range(25):
        wrong = {"OpenSandbox-Ingress-To": f"{sandbox}-7000-{digits}-{guess:08x}a"}
        statuses.append(header.client.get("http://" + header.address, headers=wrong).status_code)
    assert statuses[:20] == [401] * 20 and statuses[20:] == [429] * 5


# The following tests need no gateway: the server's own paths carry signatures too.


@pytest.fixture
def serving(api):
    made = []

    def make(**change):
        answer = api.post("/v1/sandboxes", json={**CREATE, "entrypoint": SERVE, **change})
        assert answer.status_code == 202, answer.text
        made.append(answer.json()["id"])
        return made[-1]

    yield make
    for sandbox in made:
        api.delete(f"/v1/sandboxes/{sandbox}")


def resolve(api, sandbox, port, **query):
    return api.get(f"/v1/sandboxes/{sandbox}/endpoints/{port}", params={"use_server_proxy": "false", **query})


def test_signed_address_works_until_it_expires(serving, api):
    sandbox = serving()
    answer = resolve(api, sandbox, 7000, expires=soon())
    endpoint = answer.json()
    assert answer.status_code == 200 and list(endpoint) == ["endpoint"], endpoint
    assert f"/sandboxes/{sandbox}/proxy/7000-" in endpoint["endpoint"]
    remember([endpoint["endpoint"].rsplit("-", 1)[1]])
    with httpx.Client() as anybody:
        assert ask(anybody, endpoint).status_code == 200
        assert ask(anybody, endpoint).headers["referrer-policy"] == "no-referrer"
        base, tail = endpoint["endpoint"].rsplit("/", 1)
        port, expires, signature = tail.split("-")
        other = "b" if signature[0] == "a" else "a"
        for wrong in [
            f"7000-{expires}-{other}{signature[1:]}", f"7001-{expires}-{signature}", f"7000-zzzzzz-{signature}",
            f"7000-{expires}-{signature}x", f"7000-{expires}-{signature[:9]}", f"7000-{expires}-",
        ]:
            # Not even a key opens an address with a wrong signature.
            headers = {"OPEN-SANDBOX-API-KEY": KEY} if KEY else {}
            answer = anybody.get(f"http://{base}/{wrong}/", headers=headers)
            assert (answer.status_code, answer.json()["code"]) == (401, "MISSING_OR_INVALID_SECURE_ACCESS"), wrong
        short = resolve(api, sandbox, 7000, expires=soon(1)).json()
        assert ask(anybody, short).status_code == 200
        deadline = time.time() + 10
        while (status := ask(anybody, short).status_code) == 200 and time.time() < deadline:
            time.sleep(0.1)
        assert status == 401


def test_invalid_signing_requests_are_refused(serving, api):
    sandbox = serving()
    for query, code in [
        ({"expires": soon(), "use_server_proxy": "true"}, "SANDBOX::INVALID_PARAMETER"),
        ({"expires": "0"}, "SANDBOX::INVALID_PARAMETER"),
        ({"expires": "-5"}, "SANDBOX::INVALID_PARAMETER"),
        ({"expires": "soon"}, "SANDBOX::INVALID_PARAMETER"),
        ({"expires": str(1 << 62)}, "SANDBOX::INVALID_PARAMETER"),
    ]:
        answer = resolve(api, sandbox, 7000, **query)
        assert (answer.status_code, answer.json()["code"]) == (400, code), query


def test_secure_access_accepts_only_its_own_token(serving, api):
    sandbox = serving(secureAccess=True)
    endpoint = resolve(api, sandbox, 7000).json()
    remember(endpoint["headers"].values())
    token = endpoint["headers"].pop("OpenSandbox-Secure-Access")
    headers = {"OPEN-SANDBOX-API-KEY": KEY} if KEY else {}
    with httpx.Client() as anybody:
        assert ask(anybody, endpoint, OpenSandbox_Secure_Access=token).status_code == 200
        for given in [{}, headers, {"OpenSandbox-Secure-Access": "x"}, {"OpenSandbox-Secure-Access": token[:-1]}]:
            answer = anybody.get(f"http://{endpoint['endpoint']}/", headers={**endpoint["headers"], **given})
            assert (answer.status_code, answer.json()["code"]) == (401, "MISSING_OR_INVALID_SECURE_ACCESS"), given
        signed = resolve(api, sandbox, 7000, expires=soon()).json()
        assert ask(anybody, signed).status_code == 200
        # The execution API requires it too.
        execution = resolve(api, sandbox, 44772).json()
        assert anybody.get(f"http://{execution['endpoint']}/ping", headers=execution["headers"]).status_code == 200
        execution["headers"].pop("OpenSandbox-Secure-Access")
        answer = anybody.get(f"http://{execution['endpoint']}/ping", headers={**execution["headers"], **headers})
        assert (answer.status_code, answer.json()["code"]) == (401, "MISSING_OR_INVALID_SECURE_ACCESS")


def test_secure_access_and_signed_routes_with_the_sdk(config, use_server_proxy):
    sandbox = SandboxSync.create(
        SandboxImageSpec("python:3.12"), entrypoint=SERVE, secure_access=True, connection_config=config
    )
    try:
        assert sandbox.commands.run("echo secure").logs.stdout[0].text.strip() == "secure"
        if use_server_proxy:
            with pytest.raises(Exception, match="use_server_proxy"):
                sandbox.get_signed_endpoint(7000, soon())
        else:
            signed = sandbox.get_signed_endpoint(7000, soon())
            with httpx.Client() as anybody:
                assert ask(anybody, {"endpoint": signed.endpoint}).status_code == 200
    finally:
        sandbox.kill()
        sandbox.close()


@needs_binary
def test_access_renews_by_every_route(wildcard):
    sandbox = wildcard.create(timeout=60, extensions={"access.renew.extend.seconds": "300"})

    def expires():
        return wildcard.api.get(f"/v1/sandboxes/{sandbox}").json()["expiresAt"]

    ways = [
        wildcard.endpoint(sandbox, 7000),
        wildcard.endpoint(sandbox, 7000, use_server_proxy="true"),
        wildcard.endpoint(sandbox, 44772),
    ]
    before = expires()
    for way in ways:
        wildcard.get(way, "/ping", OpenSandbox_Access_Renew="skip")
        assert expires() == before
        wildcard.get(way, "/ping")
        after = expires()
        assert after > before, way
        before = after


def test_templates_are_refused_by_every_method(api):
    for method in ["GET", "POST", "PUT", "PATCH", "DELETE"]:
        for path in ["/v1/templates", "/templates", "/v1/templates/tpl_1", "/templates/tpl_1"]:
            answer = api.request(method, path)
            assert (answer.status_code, answer.json()["code"]) == (501, "FSB::API_NOT_SUPPORTED"), (method, path)
    answer = api.post("/v1/sandboxes", json={"templateId": "tpl_1", "timeout": 60})
    assert (answer.status_code, answer.json()["code"]) == (400, "FSB::API_NOT_SUPPORTED")
    if KEY:
        assert httpx.get(URL + "/v1/templates").status_code == 401


def test_the_execution_api_forwards_ports_too(serving, api):
    sandbox = serving()
    execution = resolve(api, sandbox, 44772).json()
    remember(execution["headers"].values())
    with httpx.Client() as client:
        answer = ask(client, execution, "/proxy/7000/")
        assert answer.status_code == 200 and "Directory listing" in answer.text
        answer = ask(client, execution, "/proxy/7000/usr")
        assert answer.headers["location"].endswith(f"/v1/sandboxes/{sandbox}/proxy/44772/proxy/7000/usr/"), answer.headers
        assert client.get(f"http://{execution['endpoint']}/proxy/0/", headers=execution["headers"]).status_code == 400


def resolves_below_localhost():
    try:
        found = socket.getaddrinfo("coracle-probe.localhost", 80)
    except OSError:
        return False
    return all(address[4][0] in ("127.0.0.1", "::1") for address in found)


@needs_binary
def test_localhost_domain_serves_sdk_without_name_resolution():
    server = Server(CORACLE_GATEWAY_MODE="wildcard", CORACLE_GATEWAY_DOMAIN="localhost")
    try:
        sandbox = server.create()
        assert server.endpoint(sandbox, 7000)["endpoint"] == f"{sandbox}-7000.localhost"
        if resolves_below_localhost():
            pytest.skip("this host resolves names below localhost, so the endpoints need no other form")
        for port in (44772, 18080):
            expected = f"{server.address}/v1/sandboxes/{sandbox}/proxy/{port}"
            assert server.endpoint(sandbox, port)["endpoint"] == expected
        # The SDK connects to the names in the responses, without help from the transport.
        config = ConnectionConfigSync(api_key=OWN_KEY, domain=server.address, request_timeout=timedelta(seconds=30))
        with SandboxSync.connect(sandbox, connection_config=config) as connected:
            assert connected.commands.run("echo reached").logs.stdout[0].text.strip() == "reached"
    finally:
        server.stop()
