"""Addresses that a server of this package may listen on, taken before anything is loaded.

Knows no HTTP.
"""

import ipaddress
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tandem.runtime.errors import UserError


def is_loopback(host: str) -> bool:
    """Tell whether host is localhost, 127.0.0.0/8 or ::1, not a name resolving to them."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_token(host: str, token: str, variable: str) -> None:
    """Raise UserError for an address that other machines reach without a token. variable: of the
    environment, may hold it."""
    if not token and not is_loopback(host):
        raise UserError(
            "a server that other machines can reach needs a token",
            where=f"--host {host}",
            expected="a token, or a loopback host such as 127.0.0.1",
            next=f"export {variable}=$(openssl rand -hex 24)",
        )


def bound(host: str, port: int) -> socket.socket:
    """Take the port now, before minutes of loading; connections are refused until the server
    listens. Raises UserError."""
    with address_errors(host, port), ExitStack() as undo:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = min(infos, key=lambda info: info[0] != socket.AF_INET)
        sock = undo.enter_context(socket.socket(family, kind, protocol))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        undo.pop_all()
    return sock


@contextmanager
def address_errors(host: str, port: int) -> Iterator[None]:
    """Raise UserError for the system's refusal of an address."""
    try:
        yield
    except (OSError, UnicodeError) as error:  # UnicodeError: of a name that is no host's
        raise UserError(
            "the server cannot use this address",
            where=f"--host {host} --port {port}",
            found=str(error),
            next="choose another --port; 0 takes any",
        ) from None


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
