"""The HTTP server for agents during a rollout: chat completions and rewards, under a base URL for
each episode.

    POST BASE/chat/completions   waits for the model's turn
    POST BASE/reward             {"reward": 1.0, "parts": {"format": 1.0}}
    GET  BASE/models

    a request's thread                     the environment, in its event loop
    ------------------                     ----------------------------------
    Session.ask    -- arrived(Pending) --> AgentEnv waits for it
    waits          <- pending.answer ----  AgentEnv.step, or Session.close: a 503

One server on loopback, of the standard library, serves every episode of the process; it starts with
the first one. The base URL is the key: it cannot be guessed. A connection carries one request, so
that a thread ends with it. Does not know problems or tokens.
"""

import json
import logging
import secrets
import socketserver
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler
from typing import Any

from tandem.envs.agent import chat
from tandem.envs.agent.chat import MODEL, AgentReward, ChatRequest, Reply
from tandem.serve.openai_api import ApiError, model_list

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
LONGEST_BODY = 16 << 20  # bytes
READ_S = 60.0  # for a client to send its request
ALIVE_CHECK_S = 1.0  # between two checks that the rollout still runs
PREFIX = "/episodes/"
# where OpenAI's clients count their retries of a request
RETRY_HEADER = "x-stainless-retry-count"
JSON, EVENTS = "application/json", "text/event-stream"


@dataclass(eq=False, slots=True, kw_only=True)
class Pending:
    """A request waiting for its answer."""

    request: ChatRequest
    is_retry: bool  # the client did not get the answer to the same request before
    answer: "Future[Reply]" = field(default_factory=Future)


class Session:
    """An episode as the server sees it. arrived: takes a request, in the request's thread; alive:
    whether the rollout still runs."""

    def __init__(self, arrived: Callable[[Pending], None], alive: Callable[[], bool]):
        self.posted: AgentReward | None = None  # the last reward
        self._arrived, self._alive = arrived, alive
        self._waiting: set[Pending] = set()
        self._over = ""  # why, once it is
        self._lock = threading.Lock()

    def ask(self, request: ChatRequest, is_retry: bool) -> Reply:
        """Wait for the answer. Raises ApiError when the episode ends first."""
        pending = Pending(request=request, is_retry=is_retry)
        with self._lock:
            if self._over:
                raise ApiError(503, self._over)
            self._waiting.add(pending)
        try:
            self._arrived(pending)
            return self._answer(pending)
        finally:
            with self._lock:
                self._waiting.discard(pending)

    def _answer(self, pending: Pending) -> Reply:
        while True:
            try:
                return pending.answer.result(timeout=ALIVE_CHECK_S)
            except TimeoutError:
                if not self._alive():
                    raise ApiError(503, "the rollout is over") from None

    def close(self, reason: str) -> None:
        """Refuse all requests, waiting and later ones."""
        with self._lock:
            self._over, waiting = reason, list(self._waiting)
        for pending in waiting:
            if not pending.answer.done():
                pending.answer.set_exception(ApiError(503, reason))


class AgentServer(socketserver.ThreadingTCPServer):
    """An HTTP server of the open sessions, in threads."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024  # hundreds of agents start at once

    def __init__(self) -> None:
        self.by_key: dict[str, Session] = {}
        super().__init__((HOST, 0), _Handler)
        threading.Thread(target=self.serve_forever, name="agent server", daemon=True).start()

    def open(self, session: Session) -> str:
        """Serve an episode; returns its base URL."""
        key = secrets.token_urlsafe(16)
        self.by_key[key] = session
        return f"http://{HOST}:{self.server_address[1]}{PREFIX}{key}/v1"

    def close(self, base_url: str) -> None:
        del self.by_key[base_url.partition(PREFIX)[2].partition("/")[0]]

    @property
    def sessions(self) -> int:
        """The number of open sessions."""
        return len(self.by_key)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a request of an agent was not answered", exc_info=True)  # it has gone


@cache
def the_server() -> AgentServer:
    return AgentServer()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = READ_S
    server: AgentServer

    def do_POST(self) -> None:
        self._respond()

    def do_GET(self) -> None:
        self._respond()

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)

    def _respond(self) -> None:
        try:
            kind, body = self._route()
            self._send(200, kind, body)
        except ApiError as error:
            self._send(error.status, JSON, json.dumps(error.body()).encode())

    def _route(self) -> tuple[str, bytes]:
        raw = self._body()  # first, so that a refusal leaves nothing unread
        key, _, path = self.path.partition("?")[0].removeprefix(PREFIX).partition("/v1/")
        session = self.server.by_key.get(key)
        if session is None:
            raise ApiError(404, "there is no such episode, or it is over")
        match self.command, path.strip("/"):
            case "POST", "chat/completions":
                return self._chat(session, raw)
            case "POST", "reward":
                session.posted = chat.read_reward(raw)
                return JSON, b"{}"
            case "GET", "models":
                return JSON, json.dumps(model_list(MODEL)).encode()
        raise ApiError(
            404, f"{self.command} {path}: an episode has chat/completions, reward and models"
        )

    def _chat(self, session: Session, raw: bytes) -> tuple[str, bytes]:
        request = chat.read_request(raw)
        reply = session.ask(request, is_retry=self.headers.get(RETRY_HEADER, "0") != "0")
        if request.stream:
            return EVENTS, chat.completion_events(reply, request)
        return JSON, json.dumps(chat.chat_completion(reply, request)).encode()

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers or not length.isdecimal():
            raise ApiError(411, "a body needs a Content-Length")
        if int(length) > LONGEST_BODY:
            raise ApiError(413, f"the body is larger than {LONGEST_BODY:,} bytes")
        return self.rfile.read(int(length))

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        if status >= 500:
            self.send_header("x-should-retry", "false")  # OpenAI's clients would ask again
        self.end_headers()
        self.wfile.write(body)
