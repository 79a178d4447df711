"""Fixtures that the suites expect: a directory of the host and a named volume, each with markers."""

import requests

CREATE = {
    "image": {"uri": "python:3.12"},
    "timeout": 600,
    "resourceLimits": {"cpu": "1", "memory": "512Mi"},
    "entrypoint": ["tail", "-f", "/dev/null"],
}


class Box:
    """A sandbox, and the address of its execution API."""

    def __init__(self, url, **more):
        self.url = url
        answer = requests.post(f"{url}/v1/sandboxes", json={**CREATE, **more}, timeout=60)
        answer.raise_for_status()
        self.id = answer.json()["id"]
        endpoint = requests.get(f"{url}/v1/sandboxes/{self.id}/endpoints/44772", timeout=60).json()
        self.execd = "http://" + endpoint["endpoint"]
        self.token = endpoint["headers"]["X-EXECD-ACCESS-TOKEN"]

    def run(self, command):
        headers = {"X-EXECD-ACCESS-TOKEN": self.token}
        answer = requests.post(f"{self.execd}/command", json={"command": command}, headers=headers, timeout=60)
        answer.raise_for_status()
        if "execution_complete" not in answer.text:
            raise SystemExit(f"`{command}` failed: {answer.text}")

    def remove(self):
        requests.delete(f"{self.url}/v1/sandboxes/{self.id}", timeout=60).raise_for_status()


def host_directory(path):
    path.mkdir(parents=True, exist_ok=True)
    (path / "marker.txt").write_text("opensandbox-e2e-marker\n")


def volume(url, name):
    box = Box(url, volumes=[{"name": "seed", "pvc": {"claimName": name}, "mountPath": "/seed"}])
    try:
        box.run("mkdir -p /seed/datasets/train && echo pvc-marker-data > /seed/marker.txt")
        box.run("echo pvc-subpath-marker > /seed/datasets/train/marker.txt")
    finally:
        box.remove()
