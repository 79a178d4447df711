"""A server of its own in the test internet, into which `test-internet` has brought this process."""

import os
import pathlib
import subprocess
import sys
import tempfile

import pytest
from opensandbox.config import ConnectionConfig, ConnectionConfigSync

BINARY = os.environ.get("CORACLE_TEST_BINARY", "")
CERTIFICATE = os.environ.get("CORACLE_TEST_CERTIFICATE", "")
#: The name server of the test internet.
RESOLVER = "203.0.113.1"
KEY = "key-of-the-network-tests"
OSB = pathlib.Path(sys.executable).with_name("osb")

#: Prints what the HTTPS server of a name says of one request.
FETCH = """
import ssl, sys, urllib.request
context = ssl.create_default_context(cafile=sys.argv[2] if len(sys.argv) > 2 else None)
request = urllib.request.Request(sys.argv[1], headers={"X-Own": "of the client"})
print(urllib.request.urlopen(request, timeout=10, context=context).read().decode())
"""


def pytest_configure(config):
    if not BINARY or not CERTIFICATE:
        pytest.exit("CORACLE_TEST_BINARY and CORACLE_TEST_CERTIFICATE are needed", returncode=2)


class Server:
    def __init__(self):
        self.directory = tempfile.TemporaryDirectory(prefix="network")
        os.chmod(self.directory.name, 0o755)
        settings = self.directory.name + "/coracle.toml"
        with open(settings, "w") as file:
            file.write(f'[images]\naliases = {{ "python:3.12" = "host" }}\n[network]\ndefault = "off"\nresolvers = ["{RESOLVER}"]\n')
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("CORACLE_")}
        environment = {**inherited, "CORACLE_API_KEY": KEY, "CORACLE_CONFIG": settings, "CORACLE_LOG": "debug"}
        command = [BINARY, "serve", "--listen", "127.0.0.1:0", "--state-dir", self.directory.name + "/state"]
        self.log = self.directory.name + "/log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
        line = self.process.stdout.readline()
        assert "listening on http://" in line, open(self.log).read()
        self.domain = line.split("://")[1].strip()

    def end(self):
        self.process.terminate()
        assert self.process.wait(60) == 0, open(self.log).read()[-4000:]
        self.directory.cleanup()


@pytest.fixture(scope="session")
def server():
    server = Server()
    yield server
    server.end()


@pytest.fixture
def config(server):
    return ConnectionConfigSync(api_key=KEY, domain=server.domain)


@pytest.fixture
def async_config(server):
    return ConnectionConfig(api_key=KEY, domain=server.domain)
