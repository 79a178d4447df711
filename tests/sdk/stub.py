"""A server that does nothing: it answers the SDK's calls at once with the expected responses.

The cost of a call against it is the cost of the client and the connection; `bench_sdk.py` compares."""

import asyncio
import json
import re
import time

CREATED = {
    "id": "stub",
    "status": {"state": "Running"},
    "createdAt": "2026-01-01T00:00:00Z",
    "entrypoint": ["tail", "-f", "/dev/null"],
}


class Stub(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport, self.heard = transport, b""

    def data_received(self, data):
        self.heard += data
        while (end := self.heard.find(b"\r\n\r\n")) >= 0:
            head = self.heard[:end].decode("latin-1")
            length = re.search(r"(?i)content-length: *(\d+)", head)
            whole = end + 4 + (int(length[1]) if length else 0)
            if len(self.heard) < whole:
                return
            self.heard = self.heard[whole:]
            method, path, _ = head.split(" ", 2)
            self.answer(method, path)

    def answer(self, method, path):
        if path.startswith("/command"):
            self.stream()
        elif "/endpoints/" in path:
            address = "%s:%s" % self.transport.get_extra_info("sockname")[:2]
            self.send(200, {"endpoint": address})
        elif method == "POST" and path == "/v1/sandboxes":
            self.send(202, CREATED)
        elif method == "DELETE" or path.endswith("/metrics/events"):
            self.send(204, None)
        else:
            self.send(200, {})

    def send(self, status, content):
        body = b"" if content is None else json.dumps(content).encode()
        head = f"HTTP/1.1 {status} OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self.transport.write(head.encode() + body)

    def stream(self):
        now = int(time.time() * 1000)
        events = [
            {"type": "init", "text": "0123456789abcdef", "timestamp": now},
            {"type": "execution_complete", "execution_time": 1, "timestamp": now},
        ]
        body = "".join(json.dumps(event) + "\n\n" for event in events).encode()
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        self.transport.write(head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))


async def main():
    server = await asyncio.get_running_loop().create_server(Stub, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
