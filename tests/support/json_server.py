"""A server of JSON in a thread, which says what a function says.

with JsonServer(lambda path, body: (200, {"told": body})) as server: post(server.url + "/v1", ...)
"""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


class JsonServer(ThreadingHTTPServer):
    """answer: (path, body) -> (status, value). asked: path, headers and body of each request."""

    daemon_threads = True

    def __init__(self, answer):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer, self.asked = answer, []
        self.url = f"http://127.0.0.1:{self.server_port}"

    @property
    def requests(self):
        return [body for _, _, body in self.asked]

    def __enter__(self):
        Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, self.headers, body))
        status, value = self.server.answer(self.path, body)
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass
