"""A provisioner whose sandboxes are ready at once and do nothing: what DeerFlow itself costs."""

import http.server
import json
import threading

RESULT = {"success": True, "message": "", "data": {"session_id": "s", "command": "true", "status": "completed", "exit_code": 0, "output": ""}}


class StubHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Answers are small and sent in two pieces.
    disable_nagle_algorithm = True

    def answer(self, body, status=200):
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def read_body(self):
        return json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")

    def sandbox(self, name):
        return {"sandbox_id": name, "sandbox_url": self.server.url, "status": "Running", "container_id": name, "max_shell_sessions": 50}

    def do_GET(self):
        sandboxes = self.server.sandboxes
        if self.path == "/api/sandboxes":
            return self.answer({"sandboxes": [self.sandbox(name) for name in sandboxes], "count": len(sandboxes)})
        if self.path.startswith("/api/sandboxes/"):
            name = self.path.split("/")[3]
            return self.answer(self.sandbox(name)) if name in sandboxes else self.answer({"detail": "not found"}, 404)
        self.answer(RESULT)

    def do_POST(self):
        body = self.read_body()
        if self.path != "/api/sandboxes":
            return self.answer(RESULT)
        self.server.sandboxes.add(body["sandbox_id"])
        self.answer(self.sandbox(body["sandbox_id"]))

    def do_DELETE(self):
        self.read_body()
        self.server.sandboxes.discard(self.path.rsplit("/", 1)[1])
        self.answer({"ok": True})

    def log_message(self, *_):
        pass


class ReadyStub(http.server.ThreadingHTTPServer):
    """The stub on a port of its own, while it is used as a context."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), StubHandler)
        self.url, self.sandboxes = f"http://127.0.0.1:{self.server_port}", set()

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()
