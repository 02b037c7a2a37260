"""A server on a free loopback port, in a thread, for tests."""

import socket
import threading
from contextlib import contextmanager

from tests.support.waiting import WAIT_S


@contextmanager
def listening(make):
    """The URL of the server that make(ready) gives; it is stopped on the way out."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        ready = threading.Event()
        server = make(ready.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            assert ready.wait(WAIT_S)
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(WAIT_S)
            assert not thread.is_alive()
