"""A server of JSON in a thread, which says what a function says.

with JsonServer(lambda path, body: (200, {"told": body})) as server: post(server.url + "/v1", ...)
"""

import json
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


class JsonServer(ThreadingHTTPServer):
    """answer: (path, body) -> (status, value). asked: path, headers and body of each request."""

    daemon_threads = True

    def __init__(self, answer=None):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer, self.asked = answer, []
        self.url = f"http://127.0.0.1:{self.server_port}"

    def take(self, method, path, headers, body):
        """(status, value) of a request, or None to close."""
        self.asked.append((path, headers, json.loads(body)))
        return self.answer(path, self.requests[-1])

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
    def respond(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        reply = self.server.take(self.command, self.path, self.headers, body)
        if reply is None:
            return self.connection.close()
        data = json.dumps(reply[1]).encode()
        with suppress(OSError):  # the client has left
            self.send_response(reply[0])
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    do_GET = do_POST = do_PUT = do_HEAD = respond

    def log_message(self, *_):
        pass
