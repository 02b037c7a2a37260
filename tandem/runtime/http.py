"""The HTTP client of every server that a run asks: JSON out, JSON back.

    ask(...)                a coroutine: one request
    start(ask(...))         runs it in the client's thread -> Future; `cancel` closes the connection
    with_retries(call, n)   repeats a call while the server is busy or lost

All requests of a process share one httpx.AsyncClient and its event loop. A connection carries one
request: a server may close a kept one just as the next request is sent. Knows no API.
"""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

import httpx

from tandem.runtime.threads import loop_in_thread

Json = dict[str, Any]
T = TypeVar("T")

BUSY, LOST = (408, 409, 425, 429), (500, 502, 503, 504)
_starting = threading.Lock()
HERE = ("127.0.0.1", "localhost", "[::1]")  # reached without the environment's proxy


class ServerBusy(Exception):
    """A server that asks for a pause."""


class ServerLost(Exception):
    """A server that cannot be reached, or that fails; another one may do the work."""


class Refused(Exception):
    """A server's refusal of a request, with the HTTP status; the same request is refused again."""

    def __init__(self, status: int, message: str):
        super().__init__(f"HTTP {status}: {message}")
        self.status = status


async def ask(
    url: str, body: Json | None = None, *, key: str = "", connect_s: float, answer_s: float
) -> Json:
    """Send a body (POST), or none (GET); return the answer.

    key: for the Authorization header; empty: none. answer_s: without a byte from the server once
    there is a connection. Raises ServerBusy, ServerLost and Refused.
    """
    headers = {"Content-Type": "application/json"}
    headers |= {"Authorization": f"Bearer {key}"} if key else {}
    content = None if body is None else json.dumps(body).encode()
    timeout = httpx.Timeout(answer_s, connect=connect_s, pool=None)
    try:
        method = "GET" if body is None else "POST"
        response = await _client().request(
            method, url, content=content, headers=headers, timeout=timeout
        )
    except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
        raise ServerLost(f"{type(error).__name__}: {error}") from None
    status, message = response.status_code, response.text[:200]
    if status in BUSY:
        raise ServerBusy(f"HTTP {status}")
    if status in LOST:
        raise ServerLost(f"HTTP {status}: {message}")
    if status != 200:
        with suppress(ValueError, LookupError, TypeError):
            message = str(response.json()["error"]["message"])
        raise Refused(status, message)
    try:
        answer = response.json()
    except ValueError as error:
        raise ServerLost(f"an answer that is no JSON: {error}") from None
    if not isinstance(answer, dict):
        raise ServerLost("an answer that is no JSON object")
    return answer


def start(work: Coroutine[Any, Any, T]) -> "Future[T]":
    """Run a coroutine in the client's thread."""
    with _starting:
        loop = _loop()
    return asyncio.run_coroutine_threadsafe(work, loop)


def with_retries(call: Callable[[], T], retries: int, pause_s: float) -> T:
    """Call again, after pause_s, twice that, and so on, while the call raises ServerBusy or
    ServerLost; the last call's error is raised."""
    for attempt in range(retries):
        try:
            return call()
        except (ServerBusy, ServerLost):
            time.sleep(pause_s * 2**attempt)
    return call()


@cache  # start holds a lock: two threads may be the first to ask
def _loop() -> asyncio.AbstractEventLoop:
    return loop_in_thread("http client")


@cache
def _client() -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(limits=limits, mounts={f"all://{host}": None for host in HERE})
