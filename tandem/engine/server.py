"""The HTTP server: OpenAI's completions and chat completions over an EngineService, on starlette and uvicorn.

request --> gate: key or loopback, JSON --> body, at most 16 MiB --> worker thread: parse, render, tokenize
        --> service.submit --> updates --> one JSON answer, or server-sent events
                                  ^
                   a client that leaves cancels its generation, here and nowhere else

tandem serve MODEL
"""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.engine.gate import check_access
from tandem.engine.openai_answers import Answer, new_answer
from tandem.engine.openai_api import (
    ApiError,
    Body,
    ChatBody,
    CompletionBody,
    DrawKeys,
    Served,
    Texts,
    parse,
    to_requests,
)
from tandem.engine.prometheus import ServerMetrics
from tandem.engine.scheduler import QueueFull
from tandem.engine.service import EngineService, EngineStopped, Generation, ServedEngine, Update
from tandem.errors import UserError
from tandem.types import Request

LONGEST_BODY = 16 << 20  # bytes
GRACE_S = 3  # for answers on their way out when the server stops
CLIENT_LEFT = 499  # nobody reads it; for the metrics

T = TypeVar("T")


class Server:
    """Serves one engine on one socket."""

    def __init__(self, engine: ServedEngine, texts: Texts, served: Served, *, api_key: str = ""):
        self._service = EngineService(engine)
        self._app = make_app(_Api(self._service, texts, served), api_key)
        self._uvicorn: _Uvicorn | None = None

    def run(self, sock: socket.socket, ready: Callable[[], None]) -> None:
        """Until `stop`, SIGINT or SIGTERM; sock is bound, and ready is called when it is listened to."""
        config = uvicorn.Config(
            self._app, loop="asyncio", http="h11", ws="none", lifespan="off", log_config=None, access_log=False,
            proxy_headers=False, server_header=False, timeout_graceful_shutdown=GRACE_S,
        )  # fmt: skip
        self._uvicorn = _Uvicorn(config, self._service, ready)
        self._uvicorn.run(sockets=[sock])

    def stop(self) -> None:
        """From any thread."""
        assert self._uvicorn is not None, "the server does not run"
        self._uvicorn.should_exit = True


class _Uvicorn(uvicorn.Server):
    """Starts the engine before the first request and ends it before waiting for the last answers."""

    def __init__(self, config: uvicorn.Config, service: EngineService, ready: Callable[[], None]):
        super().__init__(config)
        self._service, self._ready = service, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.start()
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        await self._service.stop()
        await super().shutdown(sockets)


def make_app(api: "_Api", api_key: str) -> Starlette:
    routes = [
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/chat/completions", api.chat_completions, methods=["POST"]),
        Route("/v1/models", api.models),
        Route("/health", api.health),
        Route("/metrics", api.metrics),
        Route("/weights", api.weights),
    ]
    errors = (ApiError, EngineStopped, HTTPException, Exception)
    return Starlette(
        routes=routes, exception_handlers=dict.fromkeys(errors, _error_response),
        middleware=[Middleware(_Gate, api_key=api_key, counts=api.counts, paths={route.path for route in routes})],
    )  # fmt: skip


class _Gate:
    """ASGI middleware: access, and a count of every answer."""

    def __init__(self, app: ASGIApp, *, api_key: str, counts: ServerMetrics, paths: set[str]):
        self._app, self._api_key, self._counts, self._paths = app, api_key, counts, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["path"] in self._paths else "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._counts.requests[path, message["status"]] += 1
            await send(message)

        try:
            check_access(scope["method"], scope["path"], Headers(scope=scope), self._api_key)
        except ApiError as error:
            await _error_answer(error)(scope, receive, counted)
        else:
            await self._app(scope, receive, counted)


def _error_response(request: HttpRequest, error: Exception) -> Response:
    match error:
        case ApiError():
            return _error_answer(error)
        case EngineStopped():
            return _error_answer(ApiError(503, str(error)))
        case HTTPException():
            return _error_answer(ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}"))
        case _:
            return _error_answer(ApiError(500, "the server failed on this request; its log says how"))


def _error_answer(error: ApiError) -> Response:
    headers = {"Retry-After": str(error.retry_s)} if error.retry_s else None
    return JSONResponse(error.body(), error.status, headers)


class _Api:
    """The endpoints."""

    def __init__(self, service: EngineService, texts: Texts, served: Served):
        self.counts = ServerMetrics()
        self._service, self._texts, self._served = service, texts, served
        self._keys, self._created = DrawKeys(), int(time.time())
        # One thread, so that a long prompt holds up those behind it and not the tokens of all others.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="tokenize")

    async def completions(self, request: HttpRequest) -> Response:
        return await self._generate(request, CompletionBody)

    async def chat_completions(self, request: HttpRequest) -> Response:
        return await self._generate(request, ChatBody)

    async def models(self, request: HttpRequest) -> Response:
        model = {"id": self._served.name, "object": "model", "created": self._created, "owned_by": "tandem"}
        return JSONResponse({"object": "list", "data": [model | {"max_model_len": self._served.context}]})

    async def health(self, request: HttpRequest) -> Response:
        stopped = bool(self._service.stopped)
        return JSONResponse({"status": "stopped" if stopped else "ok"}, 503 if stopped else 200)

    async def metrics(self, request: HttpRequest) -> Response:
        stats = {} if self._service.stopped else await self._service.ask(lambda engine: engine.stats())
        return PlainTextResponse(self.counts.text(stats), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def weights(self, request: HttpRequest) -> Response:
        version, sha256 = await self._service.ask(lambda engine: (engine.weight_version, engine.weight_hash()))
        return JSONResponse({"weight_version": version, "sha256": sha256})

    async def _generate(self, request: HttpRequest, kind: type[Body]) -> Response:
        arrival = time.monotonic()
        raw = await _read_body(request)
        loop = asyncio.get_running_loop()
        body, requests = await loop.run_in_executor(self._worker, self._prepare, kind, raw)
        generation = await self._submit(requests)
        answer = new_answer(body, requests, self._texts, self._served)
        updates = self._timed(generation, arrival)
        if body.stream:
            return _EventStream(generation, _events(answer, updates), self.counts)
        try:
            whole = await _unless_gone(request.receive, _whole(answer, updates))
        finally:
            generation.cancel()
        if whole is None:
            self.counts.disconnects += 1
            return Response(status_code=CLIENT_LEFT)
        return JSONResponse(whole)

    def _prepare(self, kind: type[Body], raw: bytes) -> tuple[Body, list[Request]]:
        body = parse(kind, raw, self._served)
        try:
            return body, to_requests(body, self._texts, self._served, self._keys)
        except UserError as error:
            raise _users_mistake(error, body.source()[0]) from None

    async def _submit(self, requests: list[Request]) -> Generation:
        try:
            return await self._service.submit(requests)
        except QueueFull as error:
            raise ApiError(429, f"the server is busy: {error}", code="queue_full", retry_s=1) from None
        except UserError as error:
            raise _users_mistake(error, "max_tokens") from None

    async def _timed(self, generation: Generation, arrival: float) -> AsyncIterator[list[Update]]:
        first = True
        async for updates in generation:
            if first:
                self.counts.first_token.add(time.monotonic() - arrival)
                first = False
            yield updates
        self.counts.whole.add(time.monotonic() - arrival)


def _users_mistake(error: UserError, param: str) -> ApiError:
    """Without the error's place and advice, which are for whoever started the server."""
    parts = [error.what, error.found and f"found {error.found}", error.expected and f"expected {error.expected}"]
    return ApiError(400, "; ".join(part for part in parts if part), param=param)


async def _read_body(request: HttpRequest) -> bytes:
    length = request.headers.get("content-length", "0")
    parts, size = [], int(length) if length.isdecimal() else 0
    if size <= LONGEST_BODY:
        size = 0
        async for part in request.stream():
            parts.append(part)
            size += len(part)
            if size > LONGEST_BODY:
                break
    if size > LONGEST_BODY:
        raise ApiError(413, f"the body is larger than {LONGEST_BODY:,} bytes")
    return b"".join(parts)


async def _whole(answer: Answer, updates: AsyncIterator[list[Update]]) -> dict[str, Any]:
    async for several in updates:
        for update in several:
            answer.take(update)
    return answer.whole()


async def _events(answer: Answer, updates: AsyncIterator[list[Update]]) -> AsyncIterator[str]:
    """Server-sent events; an engine that stops is told in the last one."""
    try:
        async for several in updates:
            if (piece := answer.piece(several)) is not None:
                yield json.dumps(piece)
        if (piece := answer.last_piece()) is not None:
            yield json.dumps(piece)
        yield "[DONE]"
    except EngineStopped as error:
        yield json.dumps(ApiError(503, str(error)).body())


class _EventStream(Response):
    """Sends the events of a generation, which it cancels in the end, however that comes."""

    def __init__(self, generation: Generation, events: AsyncIterator[str], counts: ServerMetrics):
        self._generation, self._events, self._counts = generation, events, counts
        self.status_code, self.background = 200, None
        self.init_headers({"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if await _unless_gone(receive, self._send_all(send)) is None:
                self._counts.disconnects += 1
        finally:
            self._generation.cancel()

    async def _send_all(self, send: Send) -> bool:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": f"data: {event}\n\n".encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return True


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """What work returns; None when the client left first, and work is cancelled."""
    tasks = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _gone(receive: Callable[[], Awaitable[Message]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
