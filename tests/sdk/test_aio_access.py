"""J21: the credentials of a `coracle aio` with a key and a public key, over HTTP and with the unmodified SDK."""

import base64
import time

import httpx
import jwt
import pytest
from agent_sandbox import Sandbox
from agent_sandbox.core.api_error import ApiError
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from test_aio import Own, make_state_directory

API_KEY = "key-of-the-access-tests"


class Guarded(Own):
    """A sandbox that needs credentials, and what signs its tokens."""

    def __init__(self, state):
        self.private_key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        public_key = self.private_key.public_key()
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        self.pem = public_key.public_bytes(serialization.Encoding.PEM, form)
        super().__init__(state, SANDBOX_API_KEY=API_KEY, JWT_PUBLIC_KEY=base64.b64encode(self.pem).decode())

    def token(self, **claims):
        return jwt.encode({"sub": "test", "exp": time.time() + 60, **claims}, self.private_key, algorithm="RS256")

    def status(self, headers=None, **parameters):
        return httpx.get(f"{self.url}/v1/sandbox", headers=headers, params=parameters, timeout=20).status_code


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    sandbox = Guarded(make_state_directory(tmp_path_factory))
    yield sandbox
    sandbox.remove()


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


def test_j21_key_is_accepted_in_three_places(guarded):
    accepted = [({"X-AIO-API-Key": API_KEY}, {}), (bearer(API_KEY), {}), (None, {"api_key": API_KEY})]
    for headers, parameters in accepted:
        assert guarded.status(headers, **parameters) == 200, (headers, parameters)
        wrong = {name: value + "x" for name, value in (headers or {}).items()}
        assert guarded.status(wrong, **{name: value + "x" for name, value in parameters.items()}) == 401
    refused = httpx.get(f"{guarded.url}/v1/sandbox", timeout=20)
    assert (refused.status_code, refused.json()["success"], refused.json()["data"]) == (401, False, None)
    with pytest.raises(ApiError) as caught:
        guarded.sdk.shell.exec_command(command="true")
    assert caught.value.status_code == 401


def test_j21_the_sdk_works_with_each_credential(guarded):
    for headers in ({"X-AIO-API-Key": API_KEY}, bearer(API_KEY), bearer(guarded.token())):
        sdk = Sandbox(base_url=guarded.url, headers=headers)
        assert sdk.shell.exec_command(command="echo in").data.output == "in"
        assert sdk.auth.authenticate()["status"] == "ok"


def test_j21_tokens_are_accepted_only_if_signed_and_in_time(guarded):
    assert guarded.status(bearer(guarded.token())) == 200
    other = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    claims = {"sub": "test", "exp": time.time() + 60}
    # The usual library refuses to sign with a public key, so that token is made by hand.
    head, body, _ = jwt.encode(claims, "x" * 32, algorithm="HS256").split(".")
    confused = jwt.api_jws.PyJWS()._algorithms["HS256"].sign(f"{head}.{body}".encode(), guarded.pem)
    confused = f"{head}.{body}.{base64.urlsafe_b64encode(confused).decode().rstrip('=')}"
    for why, token in {
        "expired": guarded.token(exp=time.time() - 1),
        "not yet valid": guarded.token(nbf=time.time() + 60),
        "signed by another key": jwt.encode(claims, other, algorithm="RS256"),
        "not signed": jwt.encode(claims, None, algorithm="none"),
        "signed with the public key": confused,
    }.items():
        assert guarded.status(bearer(token)) == 401, why


def test_j21_ticket_works_once(guarded):
    sdk = Sandbox(base_url=guarded.url, headers=bearer(guarded.token()))
    ticket = sdk.auth.create_ticket()
    assert ticket["expires_in"] == 30
    assert guarded.status(ticket=ticket["ticket"]) == 200
    assert guarded.status(ticket=ticket["ticket"]) == 401, "it was used"
    assert guarded.status(ticket="x" * 43) == 401
    # A proxy asks about the request that it was sent.
    asked = {"X-Original-URI": f"/v1/sandbox?ticket={sdk.auth.create_ticket()['ticket']}"}
    for expected in (200, 401):
        assert httpx.get(f"{guarded.url}/auth", headers=asked, timeout=20).status_code == expected
    # A ticket does not lead to further tickets, and nothing leads to one without credentials.
    unused = sdk.auth.create_ticket()["ticket"]
    for parameters in ({"ticket": unused}, {}):
        assert httpx.post(f"{guarded.url}/tickets", params=parameters, timeout=20).status_code == 401
