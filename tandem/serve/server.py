"""The HTTP server: sockets, deadlines and the start and end of the engine, on uvicorn.

    bytes --> _Connection: READ_BYTES at a time, a request within request_s --> endpoints.make_app

tandem serve MODEL
"""

import asyncio
import json
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from tandem.serve.auth import MAX_HEADER_BYTES
from tandem.serve.endpoints import Endpoints, ReadWeights, make_app
from tandem.serve.openai_api import ApiError
from tandem.serve.openai_requests import ChatTokenizer, Served
from tandem.serve.service import JOIN_S, EngineService, ServedEngine

GRACE_S = 3  # for answers on their way out when the server stops
REQUEST_S = 60.0  # for a client to send a request
READ_BYTES = 1 << 14  # of a connection, before others have their turn


class Server:
    """Server of one engine on one socket. request_s: time for a client to send head and body of a
    request; update: loads weights that a client names, if it may."""

    def __init__(
        self,
        engine: ServedEngine,
        tokenizer: ChatTokenizer,
        served: Served,
        *,
        api_key: str = "",
        request_s: float = REQUEST_S,
        join_s: float = JOIN_S,
        update: ReadWeights | None = None,
    ):
        self._request_s = request_s
        self._service = EngineService(engine, join_s=join_s)
        self._app = make_app(Endpoints(self._service, tokenizer, served, update), api_key)
        self._uvicorn: _Uvicorn | None = None

    def run(self, sock: socket.socket, ready: Callable[[], None]) -> None:
        """Serve until `stop`, SIGINT or SIGTERM. sock is bound; ready is called once it listens."""
        connection: Any = partial(_Connection, request_s=self._request_s)
        config = uvicorn.Config(
            self._app,
            loop="asyncio",
            http=connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=GRACE_S,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        )
        self._uvicorn = _Uvicorn(config, self._service, ready)
        self._uvicorn.run(sockets=[sock])

    def stop(self) -> None:
        """Stop serving; any thread may call it."""
        assert self._uvicorn is not None, "the server does not run"
        self._uvicorn.should_exit = True


class _Uvicorn(uvicorn.Server):
    """uvicorn that starts the engine before the first request, and stops it before the wait for the
    last answers."""

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


class _Connection(H11Protocol, asyncio.BufferedProtocol):
    """Connection that reads a little at a time, drops a client too slow to send a request, and
    answers in JSON."""

    def __init__(self, *, request_s: float, **uvicorns: Any):
        super().__init__(**uvicorns)
        self._request_s = request_s

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._buffer = bytearray(READ_BYTES)
        self._deadline: asyncio.TimerHandle | None = None
        super().connection_made(transport)  # type: ignore[arg-type]
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._deadline is not None:
            self._deadline.cancel()

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._buffer[:nbytes]))
        self._watch()

    def _watch(self) -> None:
        """Keep a deadline while a request is being sent; between requests uvicorn keeps its
        own."""
        sending = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        if sending and self._deadline is None:
            self._deadline = self.loop.call_later(self._request_s, self._drop)
        elif not sending and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _drop(self) -> None:
        self._refuse(ApiError(408, f"the request was not sent within {self._request_s:g} seconds"))

    def send_400_response(self, msg: str) -> None:
        if len(self.conn.trailing_data[0]) > MAX_HEADER_BYTES:
            message = f"the headers are longer than {MAX_HEADER_BYTES:,} bytes"
            self._refuse(ApiError(431, message))
        else:
            self._refuse(ApiError(400, msg))

    def _refuse(self, error: ApiError) -> None:
        """Answer, unless an answer has started, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(error.body()).encode()
            headers = [
                ("content-type", "application/json"),
                ("content-length", f"{len(body)}"),
                ("connection", "close"),
            ]
            events = (
                h11.Response(status_code=error.status, headers=headers),
                h11.Data(body),
                h11.EndOfMessage(),
            )
            self.transport.writelines([self.conn.send(event) or b"" for event in events])
        self.transport.close()
