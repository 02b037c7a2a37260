"""The one HTTP application here, on starlette and uvicorn: access, errors and life of a server.

    make_app(routes)      tandem serve (endpoints.py), agents (plugins/agents), tandem view
    Server(app, ...)      run(sockets=[...]) until stop, SIGINT or SIGTERM

It does not defend itself against slow clients, floods of connections, or very large headers and
bodies: a server that many can reach belongs behind a reverse proxy, which also brings TLS.
"""

import hmac
import json
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.serve.apis import api_of
from tandem.serve.listen import is_loopback
from tandem.serve.openai import ApiError

GRACE_S = 3  # for answers on their way out when the server stops
CLIENT_LEFT = 499  # never read; for the metrics


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: object) -> bytes:
        # in ASCII, so half a surrogate pair that a client sent can be quoted
        return json.dumps(content).encode()


Respond = Callable[[Request, Exception], Response]


def error_response(request: Request, error: Exception) -> Response:
    """Answer an exception in the shape of the path's API."""
    match error:
        case ClientDisconnect():
            return Response(status_code=CLIENT_LEFT)
        case ApiError():
            answer = error
        case HTTPException():
            message = f"{request.method} {request.url.path}: {error.detail}"
            answer = ApiError(error.status_code, message)
        case _:
            answer = ApiError(500, "the server failed on this request; its log says how")
    return JsonResponse(api_of(request.url.path).error_body(answer), answer.status, answer.headers)


def bearer_token(request: Request) -> bytes:
    """Return the token of the Authorization header, or of Anthropic's clients."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        token = request.headers.get("x-api-key", "")
    return token.strip().encode("latin-1")  # the bytes that were sent: headers are decoded as it


async def read_json(request: Request) -> bytes:
    """Read a body of JSON: a web page cannot send that to another site without asking first, and
    no such question is answered here. Raises ApiError."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError(415, "the Content-Type of a POST must be application/json")
    return await request.body()


class Access:
    """ASGI middleware: answers who sends the token or, without one, this machine but no page of
    another site.

    Every page in a browser on this machine can reach a server without a token. So a Host that is
    not this machine's is refused (a page may have its own name point here), as is a request that a
    browser marks as another site's.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str = "",
        open_paths: Sequence[str] = (),
        sent: Callable[[Request], bytes] = bearer_token,
        respond: Respond = error_response,
    ):
        self._app, self._token, self._open = app, token.encode(), open_paths
        self._sent, self._respond = sent, respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        if (error := self._refusal(request)) is None:
            await self._app(scope, receive, send)
        else:
            await self._respond(request, error)(scope, receive, send)

    def _refusal(self, request: Request) -> ApiError | None:
        headers = request.headers
        if self._token:
            if request.url.path in self._open:
                return None
            if hmac.compare_digest(self._sent(request), self._token):
                return None
            message = (
                "the token is missing or wrong; send it as Authorization: Bearer TOKEN, "
                "or open the address that `tandem view` has printed"
            )
            return ApiError(401, message, code="invalid_api_key")
        host = headers.get("host", "")
        if not is_loopback(host_name(host)):
            message = f"the Host header {host!r} is not this machine's; a server without an API key"
            return ApiError(403, f"{message} is for it alone")
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return ApiError(403, "a web page of another site may not use a server without a key")
        return None


def host_name(host: str) -> str:
    """Read the name in a Host header, without its port; empty if there is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def make_app(
    routes: Sequence[BaseRoute],
    outer: Sequence[Middleware] = (),
    respond: Respond = error_response,
    **access: Any,
) -> Starlette:
    """Make an application of these routes. outer: middleware around Access, which takes the
    keywords; respond: answers exceptions."""
    errors = (ApiError, ClientDisconnect, HTTPException, Exception)
    return Starlette(
        routes=routes,
        exception_handlers=dict.fromkeys(errors, respond),
        middleware=[*outer, Middleware(Access, respond=respond, **access)],
    )


async def _nothing() -> None:
    pass


class Server(uvicorn.Server):
    """uvicorn that says when it listens.

    start: before the first request; ready: once it listens; stop: before it waits for the last
    answers.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        ready: Callable[[], None] = lambda: None,
        start: Callable[[], Awaitable[None]] = _nothing,
        stop: Callable[[], Awaitable[None]] = _nothing,
    ):
        self._start, self._ready, self._stop = start, ready, stop
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=GRACE_S,
        )
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self._start()
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        await self._stop()
        await super().shutdown(sockets)
