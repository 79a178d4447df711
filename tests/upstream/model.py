"""A stand-in for the language model that three of the suites' scenarios call: it returns fixed replies."""

import contextlib
import http.server
import json
import threading

ANSWERS = [
    ("Fibonacci", "```python\na, b = 0, 1\nout = []\nfor _ in range(10):\n    out.append(a)\n    a, b = b, a + b\n"
     "print(', '.join(map(str, out)))\n```"),
    ("from the previous step", "```python\nprint(sum(sales) / len(sales), sales.index(max(sales)) + 1, sum(sales) > 2000)\n```"),
    ("Create a list", "```python\nsales = [120, 150, 90, 200, 180, 220, 160, 190, 210, 170, 230, 250]\nprint(sales)\n```"),
    ("What command", "echo $(uname -r) $(nproc) $(grep MemTotal /proc/meminfo)"),
    ("", "It is a Linux machine."),
]


class Model(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][-1]["content"]
        answer = next(answer for word, answer in ANSWERS if word in asked)
        body = json.dumps({"choices": [{"message": {"role": "assistant", "content": answer}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def serving():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
