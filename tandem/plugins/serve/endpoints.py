"""The endpoints of `tandem serve`: completions, and chats in three APIs, over an EngineService.

    request --> Access --> body --> a thread: translate, parse, render, tokenize
            --> service.submit --> updates --> JSON, or server-sent events
                                      ^
                a client that leaves cancels its preparation and its generation, only here

Knows no sockets.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from safetensors import SafetensorError
from safetensors.torch import load_file
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from torch import Tensor

from tandem.engine.engine import Engine
from tandem.engine.scheduler import QueueFull
from tandem.plugins.serve.bodies import Body, ChatBody, CompletionBody, WeightsBody
from tandem.plugins.serve.requests import Served, to_requests
from tandem.plugins.serve.responses import Answer, new_answer
from tandem.plugins.serve.service import EngineService, Generation, Update
from tandem.plugins.serve.texts import RendererTexts
from tandem.runtime.errors import UserError
from tandem.serve.apis import APIS, Api, Chunks, Messages
from tandem.serve.app import JsonResponse, Server, make_app, read_json
from tandem.serve.openai import ApiError, model_list, read_body
from tandem.types import Request

T = TypeVar("T")
# seconds
BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
# of Engine.stats
COUNTERS = ("generated_tokens", "prompt_tokens", "prompt_tokens_cached", "preemptions")


class ServerMetrics:
    """The server's own numbers as Prometheus has them; `text` adds those of the engine."""

    def __init__(self) -> None:
        self._registry, self._stats = CollectorRegistry(), dict[str, float]()
        own: Any = {"namespace": "tandem", "registry": self._registry}
        self.requests = Counter("requests", "Answered requests.", ("path", "status"), **own)
        self.disconnects = Counter("disconnects", "Clients that left before their answer.", **own)
        self.first_token, self.request_time = (
            Histogram(name, f"From a request's arrival to its {end} token.", buckets=BOUNDS, **own)
            for name, end in (("time_to_first_token_seconds", "first"), ("request_seconds", "last"))
        )
        self._registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the engine's numbers. Implements prometheus_client's Collector."""
        running = int(bool(self._stats))
        yield GaugeMetricFamily("tandem_engine_up", "Whether the engine runs.", value=running)
        for name, value in self._stats.items():
            family = CounterMetricFamily if name in COUNTERS else GaugeMetricFamily
            meaning = f"{name.replace('_', ' ').capitalize()} of the engine."
            yield family(f"tandem_{name}", meaning, value=value)

    def text(self, stats: Mapping[str, float]) -> bytes:
        """Write the exposition; stats: of the engine, empty if it has stopped."""
        self._stats = dict(stats)
        return generate_latest(self._registry)


class Endpoints:
    """Answers to requests. takes_updates: of weights that a client names."""

    def __init__(
        self, service: EngineService, tokenizer: RendererTexts, served: Served, takes_updates: bool
    ):
        self.counts, self._takes_updates = ServerMetrics(), takes_updates
        self._service, self._tokenizer, self._served = service, tokenizer, served
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        def post(path: str, answer: Callable[[HttpRequest], Awaitable[Response]]) -> Route:
            return Route(f"/v1/{path}", answer, methods=["POST"])

        return [
            post("completions", partial(self._generate, CompletionBody, Api)),
            *(post(path, partial(self._generate, ChatBody, api)) for path, api in APIS.items()),
            post("messages/count_tokens", self.count_tokens),
            Route("/v1/models", self.models),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/weights", self.weights),
            post("weights", self.update_weights),
        ]

    async def models(self, request: HttpRequest) -> Response:
        served = self._served
        return JsonResponse(model_list(served.name, self._created, max_model_len=served.context))

    async def health(self, request: HttpRequest) -> Response:
        stopped = bool(self._service.stopped)
        return JsonResponse({"status": "stopped" if stopped else "ok"}, 503 if stopped else 200)

    async def metrics(self, request: HttpRequest) -> Response:
        stopped = self._service.stopped
        stats = {} if stopped else await self._service.ask(lambda engine: engine.stats())
        return Response(self.counts.text(stats), media_type=CONTENT_TYPE_LATEST)

    async def weights(self, request: HttpRequest) -> Response:
        """Hash the weights while the engine goes on, and again if they changed meanwhile."""
        hashed, sha256 = -1, ""
        while True:
            version, weight_hash = await self._service.ask(
                lambda engine: (engine.weight_version, engine.weight_hash)
            )
            if version == hashed:
                weights = {"weight_version": version, "sha256": sha256}
                return JsonResponse({**weights, "takes_updates": self._takes_updates})
            hashed, sha256 = version, await asyncio.to_thread(weight_hash)

    async def update_weights(self, request: HttpRequest) -> Response:
        """Load the weights of a file, read beside the passes, between two of them, after the
        running sequences have ended; return the hash."""
        if not self._takes_updates:
            message = "this server keeps its weights; start it with --allow-weight-updates"
            raise ApiError(403, message)
        body = read_body(WeightsBody, await read_json(request))
        try:
            weights = await asyncio.to_thread(_read_weights, body.path)
            await self._service.ask(
                lambda engine: engine.apply(
                    body.version, lambda: engine.model.load_weights(weights)
                )
            )
        except UserError as error:
            raise _bad_request(error, "path") from None
        return await self.weights(request)

    async def count_tokens(self, request: HttpRequest) -> Response:
        """Count the tokens of a prompt of Messages."""
        raw = await read_json(request)
        *_, (counted,) = await asyncio.to_thread(self._prepare, ChatBody, Messages, raw)
        return JsonResponse({"input_tokens": len(counted.prompt)})

    async def _generate(self, kind: type[Body], speak: type[Api], request: HttpRequest) -> Response:
        arrival = time.monotonic()
        raw = await read_json(request)
        api, body, generation = await self.while_there(
            request.receive, self._start(kind, speak, raw)
        )
        answer = new_answer(body, generation.requests, self._tokenizer, self._served.name)
        updates = self._timed(generation, arrival)
        if body.stream:
            return _Stream(_events(api, _chunks(answer, updates)), generation, self.while_there)

        async def collect() -> None:
            async for several in updates:
                for update in several:
                    answer.add(update)

        try:
            await self.while_there(request.receive, collect())
        finally:
            generation.cancel()
        # in a thread: log-probs may be many megabytes
        return await asyncio.to_thread(lambda: JsonResponse(api.answer(answer.full())))

    async def while_there(self, receive: Receive, work: Awaitable[T]) -> T:
        """Await work; cancel it and raise ClientDisconnect if the client leaves first."""

        async def disconnected() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        tasks = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                return tasks[0].result()
            self.counts.disconnects.inc()
            raise ClientDisconnect
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _prepare(
        self, kind: type[Body], speak: type[Api], raw: bytes
    ) -> tuple[Api, Body, list[Request]]:
        api, name = speak(raw), self._served.name
        body = read_body(kind, api.chat)
        if body.model not in (None, name):
            message = f"the model {body.model!r} does not exist; this server has {name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        try:
            return api, body, to_requests(body, self._tokenizer, self._served)
        except UserError as error:
            raise _bad_request(error, body.source) from None

    async def _start(
        self, kind: type[Body], speak: type[Api], raw: bytes
    ) -> tuple[Api, Body, Generation]:
        # in a thread: a large one holds up no small one
        api, body, requests = await asyncio.to_thread(self._prepare, kind, speak, raw)
        try:
            return api, body, await self._service.submit(requests)
        except QueueFull as error:
            message, headers = f"the server is busy: {error}", {"Retry-After": "1"}
            raise ApiError(429, message, code="queue_full", headers=headers) from None
        except UserError as error:
            raise _bad_request(error, "max_tokens") from None

    async def _timed(self, generation: Generation, arrival: float) -> AsyncIterator[list[Update]]:
        first = True
        async for updates in generation:
            if first:
                self.counts.first_token.observe(time.monotonic() - arrival)
                first = False
            yield updates
        self.counts.request_time.observe(time.monotonic() - arrival)


def _bad_request(error: UserError, param: str) -> ApiError:
    """Report the error without its `where` and `next`, which are for the owner of the server."""
    found = f"; found {error.found}" if error.found else ""
    expected = f"; expected {error.expected}" if error.expected else ""
    return ApiError(400, error.what + found + expected, param=param)


def _read_weights(path: str) -> dict[str, Tensor]:
    """Read a safetensors file. Raises UserError."""
    try:
        if not Path(path).is_file():  # to open a pipe would wait for who writes it
            raise OSError("no regular file")
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(
            "the weights cannot be read",
            where=path,
            found=str(error),
            expected="a safetensors file on a disk that trainer and server share",
        ) from None


async def _chunks(answer: Answer, updates: AsyncIterator[list[Update]]) -> Chunks:
    async for several in updates:
        yield [*answer.chunks(several)]
    if (chunk := answer.usage_chunk()) is not None:
        yield [chunk]


async def _events(api: Api, chunks: Chunks) -> AsyncIterator[str]:
    """Yield server-sent events, those of a pass together; the last one reports an engine that
    stops, or an answer that cannot be finished."""
    try:
        async for text in api.events(chunks):
            yield text
    except ApiError as error:
        yield api.fail(error)


class _Stream(StreamingResponse):
    """Response that sends events, and always cancels its generation at the end."""

    def __init__(
        self,
        events: AsyncIterator[str],
        generation: Generation,
        while_there: Callable[[Receive, Awaitable[None]], Awaitable[None]],
    ):
        headers = {"cache-control": "no-cache"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._generation, self._while_there = generation, while_there

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._while_there(receive, self.stream_response(send))
        except ClientDisconnect:
            pass  # it is counted
        finally:
            self._generation.cancel()


class _Counted:
    """ASGI middleware: counts every answer by its path and status."""

    def __init__(self, app: ASGIApp, *, counts: ServerMetrics, paths: set[str]):
        self._app, self._counts, self._paths = app, counts, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["path"] in self._paths else "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._counts.requests.labels(path, message["status"]).inc()
            await send(message)

        await self._app(scope, receive, counted)


class EngineServer(Server):
    """Server of one engine. takes_updates: of weights that a client names."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: RendererTexts,
        served: Served,
        *,
        ready: Callable[[], None],
        api_key: str = "",
        takes_updates: bool = False,
    ):
        service = EngineService(engine)
        endpoints = Endpoints(service, tokenizer, served, takes_updates)
        routes = endpoints.routes()
        paths = {route.path for route in routes}
        counted = Middleware(_Counted, counts=endpoints.counts, paths=paths)
        app = make_app(routes, [counted], token=api_key, open_paths=("/health",))
        super().__init__(app, ready=ready, start=service.start, stop=service.stop)
