"""Access to the page: this machine, or whoever has the token; never a page of another site.

Every page in a browser can send requests to this machine. So a Host that is not this machine's is
refused (a page may have its own name point here), an Origin must be the Host, and a browser's mark
of another site is refused. With a token other machines may look too: it comes once in the address,
`/?token=...`, and then in a cookie that no script reads. Knows no HTTP server.
"""

import hmac
from collections.abc import Mapping
from urllib.parse import SplitResult, urlsplit

from tandem.serve.auth import is_loopback

COOKIE = "tandem_view"
# No script, style or address but this server's own; no text becomes markup (trusted types).
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def refusal(
    method: str, headers: Mapping[str, str], sent_token: str, token: str
) -> tuple[int, str] | None:
    """Return the status and the reason for which a request is refused, or None. headers have
    lower-case names; token is empty if none is needed."""
    host, origin = headers.get("host", ""), headers.get("origin", "")
    if method not in ("GET", "HEAD"):
        return 405, "this server is only read"
    if not token and not is_loopback(host_name(host)):
        return 403, f"the Host header {host!r} is not this machine's; start with --token for others"
    if origin and (not host or _split(origin).netloc != host):
        return 403, "a page of another site may not read this one"
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return 403, "a page of another site may not read this one"
    if token and not hmac.compare_digest(sent_token.encode(), token.encode()):
        return 401, "the token is missing or wrong; open the address that `tandem view` has printed"
    return None


def host_name(host: str) -> str:
    """Read the name in a Host header, without its port; empty if there is none."""
    return _split(f"//{host}").hostname or ""


def _split(address: str) -> SplitResult:
    """Split an address; one that cannot be split is empty."""
    try:
        return urlsplit(address)
    except ValueError:
        return urlsplit("")
