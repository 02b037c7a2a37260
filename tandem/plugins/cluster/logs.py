"""Logs of processes on other nodes, gathered in the run folder. Does not know Ray.

    driver                                              a node
    ------                                              ------
    LogFiles.expect(name)    its way, as a message -->  connect_log: proves the token
    thread "logs"            accepts, answers      -->  waits for the answer, then writes
    a thread of each  -> folder/<name>.log         <--  stdout and stderr of the process itself

The connection is the process's stderr, so its last words come too, however it ends. Waits: for the
next bytes, as long as the process lives, and END_S for what one that has ended wrote.
"""

import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

from tandem.plugins.cluster.listener import CONNECT_S, Listener
from tandem.runtime.disk import disk_errors
from tandem.workers.channel import Message, encode

LOOK_S, END_S = 0.2, 1.0  # between two looks for new connections
CHUNK, TAIL_BYTES = 1 << 16, 1 << 14
BEGIN = "--- a process on "  # the line before its first


class LogFiles:
    """Files of a folder, one for each name; `close` it. host: that other nodes connect to."""

    def __init__(self, host: str, folder: Path):
        with disk_errors(folder):
            folder.mkdir(exist_ok=True)
        self.folder, self._listener, self._over = folder, Listener(host), Event()
        self._threads: dict[str, Thread] = {}  # the newest of each name
        self._accepting = Thread(target=self._accept, name="logs", daemon=True)
        self._accepting.start()

    def expect(self, name: str, node: str) -> Message:
        """Return the way of a new process on a node to the file of a name, "trainer rank 1"."""

        def start(connection: socket.socket, _: Message) -> None:
            arguments = (connection, self.path(name), node)
            self._threads[name] = Thread(target=_gather, args=arguments, name=name, daemon=True)
            self._threads[name].start()

        self._threads.pop(name, None)
        return {"address": self._listener.address, "handshake": self._listener.expect(start)}

    def path(self, name: str) -> Path:
        return self.folder / f"{name.replace(' ', '_')}.log"

    def last_lines(self, name: str, count: int) -> str:
        """Return what the newest process of that name wrote last; "" for nothing."""
        if name not in self._threads:
            return ""
        self._threads[name].join(END_S)
        with suppress(OSError), self.path(name).open("rb") as file:
            file.seek(-min(TAIL_BYTES, self.path(name).stat().st_size), os.SEEK_END)
            _, _, text = file.read().decode(errors="replace").rpartition(BEGIN)
            return "\n".join(text.splitlines()[1:][-count:])
        return ""

    def _accept(self) -> None:
        while not self._over.wait(LOOK_S):
            self._listener.accept()

    def close(self) -> None:
        self._over.set()
        for thread in (self._accepting, *self._threads.values()):
            thread.join(END_S)
        self._listener.close()


def _gather(connection: socket.socket, path: Path, node: str) -> None:
    connection.setblocking(True)
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    with suppress(OSError), connection, path.open("ab", buffering=0) as file:
        file.write(f"{BEGIN}{node}, {when}\n".encode())
        connection.sendall(b"\n")
        while data := connection.recv(CHUNK):
            with suppress(OSError):  # a full disk: the process goes on
                file.write(data)


def connect_log(way: Message) -> socket.socket:
    """Connect to the file of LogFiles.expect. Raises OSError if nobody answers."""
    connection = socket.create_connection(tuple(way["address"]), CONNECT_S)
    connection.sendall(encode(way["handshake"]))
    if not connection.recv(1):
        raise ConnectionError("the driver cannot write the log")
    connection.settimeout(None)
    return connection


def redirect_output(way: Message) -> None:
    """Send what this process writes from now on to the file of LogFiles.expect."""
    with connect_log(way) as connection:
        for descriptor in (1, 2):
            os.dup2(connection.fileno(), descriptor)
