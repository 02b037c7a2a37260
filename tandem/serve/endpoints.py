"""The endpoints: OpenAI's completions and chat completions over an EngineService, on starlette.

    request --> _AccessCheck: headers, key or loopback, JSON
            --> body --> lane: parse, render, tokenize, a slice at a time
            --> service.submit --> updates --> slices of JSON, or server-sent events
                                      ^
                a client that leaves cancels its preparation and its generation, only here

A lane is a thread in which requests take turns. Small bodies have a lane of their own, so they do
not wait for large ones. No piece of work, on the event loop or with the interpreter to itself,
takes much longer than 0.1 s. Knows no sockets.
"""

import asyncio
import ctypes
import gc
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.engine.scheduler import QueueFull
from tandem.runtime.errors import UserError
from tandem.serve.auth import check_access, check_headers
from tandem.serve.openai_api import DONE, ApiError, event, model_list, read_object, validate
from tandem.serve.openai_prompts import SLICE, DrawKeys, to_requests
from tandem.serve.openai_requests import (
    Body,
    ChatBody,
    ChatTokenizer,
    CompletionBody,
    Served,
    WeightsBody,
    parse,
)
from tandem.serve.openai_responses import Answer, new_answer
from tandem.serve.prometheus import ServerMetrics
from tandem.serve.service import EngineService, EngineStopped, Generation, ServedEngine, Update
from tandem.types import Request

SENT = 1 << 14  # characters of an answer that are sent in one piece, 1 ms of work
PAUSE_S = 0.001  # after it: the engine needs the interpreter a hundred times a pass
TRIMMED, TRIM_S = 1 << 20, 2.0  # bytes of a body, and seconds after which no part of it is in use
CLIENT_LEFT = 499  # never read; for the metrics

T = TypeVar("T")
# Reads the weights of a file; returns what has an engine run them as a version. Raise UserError.
ReadWeights = Callable[[str], Callable[[ServedEngine, int], None]]


def make_app(api: "Endpoints", api_key: str) -> Starlette:
    routes = [
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/chat/completions", api.chat_completions, methods=["POST"]),
        Route("/v1/models", api.models),
        Route("/health", api.health),
        Route("/metrics", api.metrics),
        Route("/weights", api.weights),
        Route("/v1/weights", api.update_weights, methods=["POST"]),
    ]
    errors = (ApiError, ClientDisconnect, EngineStopped, HTTPException, Exception)
    return Starlette(
        routes=routes,
        exception_handlers=dict.fromkeys(errors, _error_response),
        middleware=[
            Middleware(
                _AccessCheck,
                api_key=api_key,
                counts=api.counts,
                paths={route.path for route in routes},
            )
        ],
    )


class _AccessCheck:
    """ASGI middleware: checks access, and counts every answer."""

    def __init__(self, app: ASGIApp, *, api_key: str, counts: ServerMetrics, paths: set[str]):
        self._app, self._api_key, self._counts, self._paths = app, api_key, counts, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["path"] in self._paths else "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._counts.requests[path, message["status"]] += 1
            await send(message)

        try:
            check_headers(scope["headers"])
            check_access(scope["method"], scope["path"], Headers(scope=scope), self._api_key)
        except ApiError as error:
            await _error_answer(error)(scope, receive, counted)
        else:
            await self._app(scope, receive, counted)


def _error_response(request: HttpRequest, error: Exception) -> Response:
    match error:
        case ClientDisconnect():
            return Response(status_code=CLIENT_LEFT)
        case ApiError():
            answer = error
        case EngineStopped():
            answer = ApiError(503, str(error))
        case HTTPException():
            message = f"{request.method} {request.url.path}: {error.detail}"
            answer = ApiError(error.status_code, message)
        case _:
            answer = ApiError(500, "the server failed on this request; its log says how")
    return _error_answer(answer)


def _error_answer(error: ApiError) -> Response:
    headers = {"Retry-After": str(error.retry_s)} if error.retry_s else None
    return _JsonResponse(error.body(), error.status, headers)


class _JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: object) -> bytes:
        # in ASCII, so half a surrogate pair that a client sent can be quoted
        return json.dumps(content).encode()


class Endpoints:
    """Answers to requests that passed the access check."""

    def __init__(
        self,
        service: EngineService,
        tokenizer: ChatTokenizer,
        served: Served,
        update: ReadWeights | None = None,
    ):
        self.counts, self._update = ServerMetrics(), update
        self._service, self._tokenizer, self._served = service, tokenizer, served
        self._keys, self._created = DrawKeys(), int(time.time())
        self._small, self._large, self._hashing, self._reading = (
            ThreadPoolExecutor(1, name)
            for name in ("small bodies", "large bodies", "hashing", "reading")
        )

    async def completions(self, request: HttpRequest) -> Response:
        return await self._generate(request, CompletionBody)

    async def chat_completions(self, request: HttpRequest) -> Response:
        return await self._generate(request, ChatBody)

    async def models(self, request: HttpRequest) -> Response:
        served = self._served
        return _JsonResponse(model_list(served.name, self._created, max_model_len=served.context))

    async def health(self, request: HttpRequest) -> Response:
        stopped = bool(self._service.stopped)
        return _JsonResponse({"status": "stopped" if stopped else "ok"}, 503 if stopped else 200)

    async def metrics(self, request: HttpRequest) -> Response:
        stopped = self._service.stopped
        stats = {} if stopped else await self._service.ask(lambda engine: engine.stats())
        media_type = "text/plain; version=0.0.4; charset=utf-8"
        return PlainTextResponse(self.counts.text(stats), media_type=media_type)

    async def weights(self, request: HttpRequest) -> Response:
        """Hash the weights while the engine goes on, and again if they changed meanwhile."""
        hashed, sha256, loop = -1, "", asyncio.get_running_loop()
        while True:
            version, weight_hash = await self._service.ask(
                lambda engine: (engine.weight_version, engine.weight_hash)
            )
            if version == hashed:
                weights = {"weight_version": version, "sha256": sha256}
                return _JsonResponse({**weights, "takes_updates": self._update is not None})
            hashed, sha256 = version, await loop.run_in_executor(self._hashing, weight_hash)

    async def update_weights(self, request: HttpRequest) -> Response:
        """Load the weights of a file, read beside the passes, between two of them, after the
        running sequences have ended; return the hash."""
        if self._update is None:
            message = "this server keeps its weights; start it with --allow-weight-updates"
            raise ApiError(403, message)
        raw, loop = await _read_body(request, self._served.longest_body), asyncio.get_running_loop()
        body = validate(WeightsBody, read_object(raw))
        try:
            apply = await loop.run_in_executor(self._reading, self._update, body.path)
            await self._service.ask(lambda engine: apply(engine, body.version))
        except UserError as error:
            raise _bad_request(error, "path") from None
        return await self.weights(request)

    async def _generate(self, request: HttpRequest, kind: type[Body]) -> Response:
        arrival = time.monotonic()
        start = self._start(kind, await _read_body(request, self._served.longest_body))
        started = await _unless_gone(request.receive, start)
        if started is None:
            return self._client_left()
        body, generation = started
        answer = new_answer(body, generation.requests, self._tokenizer, self._served)
        updates = self._timed(generation, arrival)
        if body.stream:
            events, media_type = _events(answer, updates), "text/event-stream; charset=utf-8"
            return _Stream(generation, events, media_type, self._client_left)
        try:
            if await _unless_gone(request.receive, _collect(answer, updates)) is None:
                return self._client_left()
        finally:
            generation.cancel()
        return _Stream(generation, _slices(answer), "application/json", self._client_left)

    def _client_left(self) -> Response:
        self.counts.disconnects += 1
        return Response(status_code=CLIENT_LEFT)

    async def _start(self, kind: type[Body], raw: bytes) -> tuple[Body, Generation]:
        lane, large = self._small if len(raw) <= SLICE else self._large, len(raw) > TRIMMED
        work, loop = self._prepare(kind, raw), asyncio.get_running_loop()
        del raw
        try:
            while (prepared := await loop.run_in_executor(lane, _next_slice, work)) is None:
                pass
        finally:
            if large:
                loop.call_later(TRIM_S, self._large.submit, _trim_memory)
        body, requests = prepared
        return body, await self._submit(requests)

    def _prepare(
        self, kind: type[Body], raw: bytes
    ) -> Generator[None, None, tuple[Body, list[Request]]]:
        body = parse(kind, raw, self._served)
        del raw
        yield
        try:
            return body, (yield from to_requests(body, self._tokenizer, self._served, self._keys))
        except UserError as error:
            raise _bad_request(error, body.source()[0]) from None

    async def _submit(self, requests: list[Request]) -> Generation:
        try:
            return await self._service.submit(requests)
        except QueueFull as error:
            message = f"the server is busy: {error}"
            raise ApiError(429, message, code="queue_full", retry_s=1) from None
        except UserError as error:
            raise _bad_request(error, "max_tokens") from None

    async def _timed(self, generation: Generation, arrival: float) -> AsyncIterator[list[Update]]:
        first = True
        async for updates in generation:
            if first:
                self.counts.first_token.add(time.monotonic() - arrival)
                first = False
            yield updates
        self.counts.request_time.add(time.monotonic() - arrival)


def _bad_request(error: UserError, param: str) -> ApiError:
    """Report the error without its `where` and `next`, which are for the owner of the server."""
    found = f"; found {error.found}" if error.found else ""
    expected = f"; expected {error.expected}" if error.expected else ""
    return ApiError(400, error.what + found + expected, param=param)


async def _read_body(request: HttpRequest, longest: int) -> bytes:
    length, body = request.headers.get("content-length", "0"), bytearray()
    if not (length.isdecimal() and int(length) > longest):
        async for part in request.stream():
            body += part
            if len(body) > longest:
                break
        else:
            return bytes(body)
    raise ApiError(413, f"the body is larger than {longest:,} bytes")


def _trim_memory() -> None:
    """Give freed memory back to the system. glibc's malloc is told to keep it for tensors, and
    errors keep their bodies until cycles are collected."""
    gc.collect()
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _next_slice(work: Generator[None, None, T]) -> T | None:
    """Run work to its next yield; return its result once it has ended."""
    try:
        next(work)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    return None


async def _collect(answer: Answer, updates: AsyncIterator[list[Update]]) -> bool:
    async for several in updates:
        for update in several:
            answer.add(update)
    return True


async def _slices(answer: Answer) -> AsyncIterator[str]:
    """Yield a whole answer, some kilobytes at a time, with a pause for others in between."""
    text = ""
    for part in answer.full():
        text += part
        if len(text) > SENT:
            yield text
            await asyncio.sleep(PAUSE_S)
            text = ""
    yield text


async def _events(answer: Answer, updates: AsyncIterator[list[Update]]) -> AsyncIterator[str]:
    """Yield server-sent events, those of a pass together; the last one reports an engine that
    stops, or an answer that cannot be finished."""
    try:
        async for several in updates:
            if text := "".join(map(event, answer.chunks(several))):
                yield text
        if (chunk := answer.usage_chunk()) is not None:
            yield event(chunk)
        yield DONE
    except ApiError as error:
        yield event(json.dumps(error.body()))
    except EngineStopped as error:
        yield event(json.dumps(ApiError(503, str(error)).body()))


class _Stream(Response):
    """Response that sends the parts of an answer, and always cancels its generation at the end."""

    def __init__(
        self,
        generation: Generation,
        parts: AsyncIterator[str],
        content_type: str,
        client_left: Callable[[], object],
    ):
        self._generation, self._parts, self._client_left = generation, parts, client_left
        self.status_code, self.background = 200, None
        self.init_headers({"content-type": content_type, "cache-control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if await _unless_gone(receive, self._send_all(send)) is None:
                self._client_left()
        finally:
            self._generation.cancel()

    async def _send_all(self, send: Send) -> bool:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for part in self._parts:
            await send({"type": "http.response.body", "body": part.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return True


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Await work; cancel it and return None if the client leaves first."""
    tasks = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnected(receive: Callable[[], Awaitable[Message]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
