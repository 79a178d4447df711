"""Network policies by the Python SDK, as its own end-to-end tests drive them, and by `osb`."""

import json
import os
import subprocess

import pytest
from conftest import FETCH, KEY, OSB
from opensandbox import Sandbox
from opensandbox.exceptions import SandboxApiException
from opensandbox.models.sandboxes import NetworkPolicy, NetworkRule
from opensandbox.sync.sandbox import SandboxSync

IMAGE = "python:3.12"


def allow(*targets, default="deny"):
    rules = [NetworkRule(action="allow", target=target) for target in targets]
    return NetworkPolicy(defaultAction=default, egress=rules)


def targets(policy):
    return [(rule.action, rule.target) for rule in policy.egress or []]


def fetch_command(url):
    return f"/usr/bin/python3 -c '{FETCH}' {url}"


def reached(execution):
    """The host of the test internet that answered, if one did."""
    text = "".join(message.text for message in execution.logs.stdout)
    return json.loads(text)["at"] if text.startswith("{") else None


def test_a_policy_is_set_read_and_changed_by_the_synchronous_sdk(config):
    sandbox = SandboxSync.create(IMAGE, connection_config=config, network_policy=allow("web.example"))
    try:
        policy = sandbox.get_egress_policy()
        assert (policy.default_action, targets(policy)) == ("deny", [("allow", "web.example")])
        assert reached(sandbox.commands.run(fetch_command("http://web.example/"))) == "web.example"
        assert reached(sandbox.commands.run(fetch_command("http://other.example/"))) is None
        flip = [NetworkRule(action="allow", target="other.example"), NetworkRule(action="deny", target="web.example")]
        sandbox.patch_egress_rules(flip)
        assert reached(sandbox.commands.run(fetch_command("http://web.example/"))) is None
        assert reached(sandbox.commands.run(fetch_command("http://other.example/"))) == "other.example"
        assert {("allow", "other.example"), ("deny", "web.example")} <= set(targets(sandbox.get_egress_policy()))
        sandbox.delete_egress_rules(["other.example"])
        assert reached(sandbox.commands.run(fetch_command("http://other.example/"))) is None
        with pytest.raises(SandboxApiException):
            sandbox.patch_egress_rules([NetworkRule(action="allow", target="a.*.example")])
    finally:
        sandbox.destroy()


async def test_a_policy_is_set_read_and_changed_by_the_asynchronous_sdk(async_config):
    policy = allow("*.packages.example")
    sandbox = await Sandbox.create(IMAGE, connection_config=async_config, network_policy=policy)
    try:
        assert targets(await sandbox.get_egress_policy()) == [("allow", "*.packages.example")]
        assert reached(await sandbox.commands.run(fetch_command("http://a.packages.example/"))) == "packages.example"
        assert reached(await sandbox.commands.run(fetch_command("http://packages.example/"))) is None
        await sandbox.patch_egress_rules([NetworkRule(action="allow", target="packages.example")])
        assert reached(await sandbox.commands.run(fetch_command("http://packages.example/"))) == "packages.example"
        await sandbox.delete_egress_rules(["packages.example", "never.example"])
        assert reached(await sandbox.commands.run(fetch_command("http://packages.example/"))) is None
    finally:
        await sandbox.destroy()


def test_a_policy_of_addresses_and_one_that_allows_the_rest(config):
    sandbox = SandboxSync.create(IMAGE, connection_config=config, network_policy=allow("93.184.216.0/24"))
    try:
        assert reached(sandbox.commands.run(fetch_command("http://93.184.216.34/"))) == "web.example"
        assert reached(sandbox.commands.run(fetch_command("http://93.184.217.10/"))) is None
    finally:
        sandbox.destroy()
    policy = NetworkPolicy(defaultAction="allow", egress=[NetworkRule(action="deny", target="other.example")])
    sandbox = SandboxSync.create(IMAGE, connection_config=config, network_policy=policy)
    try:
        assert sandbox.get_egress_policy().default_action == "allow"
        assert reached(sandbox.commands.run(fetch_command("http://web.example/"))) == "web.example"
        assert reached(sandbox.commands.run(fetch_command("http://other.example/"))) is None
    finally:
        sandbox.destroy()


def test_an_invalid_policy_is_refused_at_create(config):
    with pytest.raises(SandboxApiException) as refused:
        SandboxSync.create(IMAGE, connection_config=config, network_policy=allow("a.*.example"))
    assert refused.value.status_code == 400


def test_osb_reads_and_patches_rules(config, server, tmp_path):
    def osb(*words):
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "NO_COLOR": "1",
            "OPEN_SANDBOX_DOMAIN": server.domain,
            "OPEN_SANDBOX_PROTOCOL": "http",
            "OPEN_SANDBOX_API_KEY": KEY,
        }
        done = subprocess.run([OSB, *words], env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    sandbox = SandboxSync.create(IMAGE, connection_config=config, network_policy=allow("web.example"))
    try:
        assert "web.example" in osb("egress", "get", sandbox.id, "-o", "json")
        osb("egress", "patch", sandbox.id, "--rule", "allow=other.example", "-o", "json")
        assert reached(sandbox.commands.run(fetch_command("http://other.example/"))) == "other.example"
    finally:
        sandbox.destroy()
