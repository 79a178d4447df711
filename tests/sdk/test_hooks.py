"""Hooks with the official client."""

import time

import pytest
from opensandbox import SandboxSync
from opensandbox.exceptions import SandboxApiException
from opensandbox.models.sandboxes import LifecycleHook, PeriodicLifecycleHook, SandboxLifecycle

RESOURCE = {"cpu": "1", "memory": "512Mi"}


def test_hooks_run_before_the_entrypoint_and_periodically(config):
    lifecycle = SandboxLifecycle(
        pre_start=LifecycleHook(command=["sh", "-c", "echo ready > /root/ready"], timeout_seconds=30),
        periodic=[
            PeriodicLifecycleHook(
                name="beat", schedule="@every 1s", command=["sh", "-c", "echo beat >> /root/beats"], timeout_seconds=5
            )
        ],
    )
    sandbox = SandboxSync.create("python:3.12", connection_config=config, resource=RESOURCE, lifecycle=lifecycle)
    try:
        assert sandbox.commands.run("cat /root/ready").text.strip() == "ready"
        deadline = time.monotonic() + 30
        while "beat" not in sandbox.commands.run("cat /root/beats 2>/dev/null").text:
            assert time.monotonic() < deadline, "the hook never ran"
    finally:
        sandbox.destroy()


def test_a_hook_that_fails_fails_the_create(config):
    lifecycle = SandboxLifecycle(pre_start=LifecycleHook(command=["sh", "-c", "echo because; exit 9"]))
    with pytest.raises(SandboxApiException, match="because"):
        SandboxSync.create("python:3.12", connection_config=config, resource=RESOURCE, lifecycle=lifecycle)
