"""Access to the server: for clients with the key or, without one, for this machine but no web page.
Knows no HTTP server.

Every page in a browser on this machine can reach a server without a key. So a POST must be JSON (a
page cannot send it to another site without asking first, and no such question is answered here). A
Host that is not this machine's is refused (a page may have its own name point here), and so is a
request that a browser marks as cross-site.
"""

import hmac
import ipaddress
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from tandem.serve.openai_api import ApiError

OPEN_PATHS = ("/health",)  # without a key
MAX_HEADERS, MAX_HEADER_BYTES = 100, 16 << 10  # of all names and values together


def is_loopback(host: str) -> bool:
    """Tell whether host is localhost, 127.0.0.0/8 or ::1, not a name resolving to them."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_headers(headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Raise ApiError 431 for too many or too large ones."""
    size = sum(len(name) + len(value) for name, value in headers)
    if len(headers) > MAX_HEADERS or size > MAX_HEADER_BYTES:
        raise ApiError(
            431,
            f"a request has at most {MAX_HEADERS} headers, and {MAX_HEADER_BYTES:,} bytes of them",
        )


def check_access(method: str, path: str, headers: Mapping[str, str], api_key: str) -> None:
    """Raise ApiError 401, 403 or 415. headers have lower-case names; api_key is empty if none is
    needed."""
    if api_key:
        if path not in OPEN_PATHS:
            _check_key(headers, api_key)
    else:
        _check_local(headers)
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if method == "POST" and content_type != "application/json":
        raise ApiError(415, "the Content-Type of a POST must be application/json")


def _check_key(headers: Mapping[str, str], api_key: str) -> None:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    sent = key.strip().encode("latin-1")  # the bytes that were sent: headers are decoded as latin-1
    if scheme.lower() != "bearer" or not hmac.compare_digest(sent, api_key.encode()):
        message = "the API key is missing or wrong; send it as Authorization: Bearer KEY"
        raise ApiError(401, message, code="invalid_api_key")


def _check_local(headers: Mapping[str, str]) -> None:
    host = headers.get("host", "")
    if not is_loopback(_name(host)):
        raise ApiError(
            403,
            f"the Host header {host!r} is not this machine's; a server without an API key is for "
            "it alone",
        )
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise ApiError(403, "a web page of another site may not use a server without an API key")


def _name(host: str) -> str:
    """Read the name in a Host header, without its port; empty if there is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
