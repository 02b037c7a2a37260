"""The HTTP server for agents during a rollout: chat completions and rewards, under a base URL for
each episode.

    POST BASE/chat/completions   waits for the model's turn
    POST BASE/reward             {"reward": 1.0, "parts": {"format": 1.0}}
    GET  BASE/models

    the server's thread                    the environment, in its event loop
    -------------------                    ----------------------------------
    Session.ask    -- arrived(Pending) --> AgentEnv waits for it
    waits          <- pending.answer ----  AgentEnv.step, or Session.close: a 503

One server on loopback, of serve/app.py, serves every episode of the process; it starts with the
first one. The base URL is the key: it cannot be guessed. Does not know problems or tokens.
"""

import asyncio
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tandem.envs.agent import chat
from tandem.envs.agent.chat import MODEL, AgentReward, ChatRequest, Reply
from tandem.serve.app import JsonResponse, Server, make_app, read_body
from tandem.serve.listen import bound, url_of
from tandem.serve.openai import ApiError, model_list, read_object

LONGEST_BODY = 16 << 20  # bytes
ALIVE_CHECK_S = 1.0  # between two checks that the rollout still runs
PREFIX = "/episodes/"
# where OpenAI's clients count their retries of a request
RETRY_HEADER = "x-stainless-retry-count"


@dataclass(eq=False, slots=True, kw_only=True)
class Pending:
    """A request waiting for its answer."""

    request: ChatRequest
    is_retry: bool  # the client did not get the answer to the same request before
    answer: "Future[Reply]" = field(default_factory=Future)


class Session:
    """An episode as the server sees it. arrived: takes a request, in the server's thread; alive:
    whether the rollout still runs."""

    def __init__(self, arrived: Callable[[Pending], None], alive: Callable[[], bool]):
        self.posted: AgentReward | None = None  # the last reward
        self._arrived, self._alive = arrived, alive
        self._waiting: set[Pending] = set()
        self._over = ""  # why, once it is

    async def ask(self, request: ChatRequest, is_retry: bool) -> Reply:
        """Wait for the answer. Raises ApiError when the episode ends first."""
        pending = Pending(request=request, is_retry=is_retry)
        self._waiting.add(pending)  # before the look: close may come in between
        try:
            if self._over:
                raise _over(self._over)
            self._arrived(pending)
            answer = asyncio.wrap_future(pending.answer)
            while not (await asyncio.wait([answer], timeout=ALIVE_CHECK_S))[0]:
                if not self._alive():
                    raise _over("the rollout is over")
            return answer.result()
        finally:
            self._waiting.discard(pending)

    def close(self, reason: str) -> None:
        """Refuse all requests, waiting and later ones."""
        self._over = reason
        for pending in list(self._waiting):
            if not pending.answer.done():
                pending.answer.set_exception(_over(reason))


def _over(reason: str) -> ApiError:
    return ApiError(503, reason, headers={"x-should-retry": "false"})  # OpenAI's clients would


class AgentServer:
    """An HTTP server of the open sessions, in a thread."""

    def __init__(self) -> None:
        self._by_key: dict[str, Session] = {}
        base, ready, sock = f"{PREFIX}{{key}}/v1", threading.Event(), bound("127.0.0.1", 0)
        app = make_app(
            [
                Route(f"{base}/chat/completions", self._complete, methods=["POST"]),
                Route(f"{base}/reward", self._reward, methods=["POST"]),
                Route(f"{base}/models", self._models),
            ]
        )
        server = Server(app, ready=ready.set, connections=None)
        threading.Thread(
            target=lambda: server.run(sockets=[sock]), name="agent server", daemon=True
        ).start()
        ready.wait()
        self._url = url_of(sock)

    def open(self, session: Session) -> str:
        """Serve an episode; returns its base URL."""
        key = secrets.token_urlsafe(16)
        self._by_key[key] = session
        return f"{self._url}{PREFIX}{key}/v1"

    def close(self, base_url: str) -> None:
        del self._by_key[base_url.partition(PREFIX)[2].partition("/")[0]]

    @property
    def sessions(self) -> int:
        """The number of open sessions."""
        return len(self._by_key)

    def _session(self, request: Request) -> Session:
        if session := self._by_key.get(request.path_params["key"]):
            return session
        raise ApiError(404, "there is no such episode, or it is over")

    async def _complete(self, http: Request) -> Response:
        session = self._session(http)
        request = chat.read_request(await read_body(http, LONGEST_BODY))
        reply = await session.ask(request, is_retry=http.headers.get(RETRY_HEADER, "0") != "0")
        if request.stream:
            events = chat.completion_events(reply, request)
            return Response(events, media_type="text/event-stream")
        return JsonResponse(chat.chat_completion(reply, request))

    async def _reward(self, http: Request) -> Response:
        session = self._session(http)
        body = read_object(await read_body(http, LONGEST_BODY))
        try:
            session.posted = chat.parse_reward(body)
        except ValueError as error:
            raise ApiError(400, str(error)) from None
        return JsonResponse({})

    async def _models(self, http: Request) -> Response:
        self._session(http)
        return JsonResponse(model_list(MODEL))


@cache
def the_server() -> AgentServer:
    return AgentServer()
