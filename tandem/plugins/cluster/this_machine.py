"""This machine, as a cluster needs it: a folder, an address, variables, an end. Does not
import ray."""

import functools
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tandem.runtime.errors import UserError
from tandem.runtime.processes import descendants, kill_descendants

LISTENER_S = 10.0
START_TRIES = 3  # of a cluster here: Ray gives up when a loaded machine is slow
MAX_FOLDER = 23  # characters, and 17 more: the path of a Unix socket below has at most 107
# run by an orphan: the pipe closes when this process has ended, however it does
REMOVE = (
    'exec 3<&0 >&- 2>&-; (read _ <&3; for n in 1 2 3; do sleep 1; rm -rf "$0" && break; done) &'
)


def last_line(text: str) -> str:
    """Return the last line of what Ray says of an actor's end, without its guesses at causes."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].split(" Some common causes")[0] if lines else ""


def not_joined(address: str, found: str) -> UserError:
    """Report a cluster that cannot be joined. found: what Ray says, any number of lines."""
    lines = [line for line in found.splitlines() if line.strip()]
    return UserError(
        "the Ray cluster cannot be joined",
        where=f"cluster.address = {address}",
        found=" ".join(lines[:3])[:300],
        expected="the address that `ray start --head` printed, a node of the cluster on this "
        "machine, and its token (RAY_AUTH_TOKEN, or `ray get-auth-token --generate`)",
        next="look with `ray status`; a cluster without tokens needs RAY_AUTH_MODE=disabled; or "
        "leave cluster.address out for a cluster on this machine",
    )


@functools.cache
def own_token() -> str:
    """Return the token of this process's own clusters; Ray reads it once a process."""
    return secrets.token_hex(32)


def require_listener(address: str) -> None:
    """Raise UserError unless somebody listens there: Ray itself would try for a minute."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), LISTENER_S).close()
    except (OSError, OverflowError) as error:  # a port above 65535
        raise not_joined(address, str(error)) from None


@contextmanager
def short_folder() -> Iterator[Path]:
    """Make a folder for this user alone, in /tmp if the temporary folder's path is long. It goes
    when this process ends, by `os._exit` or a signal too."""
    parent = tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp" if len(parent) > MAX_FOLDER else None)
    command = ["/bin/sh", "-c", REMOVE, folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as shell:
        shell.wait()  # from now on it is no descendant, which an end of this process kills first
        try:
            yield Path(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, and put back what was there."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def keeping_sigterm() -> Iterator[None]:
    """Put back the handler of SIGTERM, which Ray replaces. In the main thread."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def start_nodes(nodes: int, make: Callable[[], Any]) -> Any:
    """Make LocalNodes (ray_cluster.py) and start nodes; again if Ray gives up. Raises UserError."""
    standing = [process.pid for process in descendants(os.getpid())]
    for tries_left in reversed(range(START_TRIES)):
        try:
            local = make()
            for _ in range(nodes):
                local.add()
            return local
        except Exception as error:  # Ray raises bare Exceptions
            kill_descendants(os.getpid(), standing)
            if not tries_left:
                first = str(error).partition("\n")[0][:300]
                raise UserError(
                    "Ray does not start on this machine",
                    where="cluster.nodes",
                    found=first or type(error).__name__,
                    next="try again when the machine is less busy, or cluster.nodes=0",
                ) from error
    raise AssertionError("unreachable")
