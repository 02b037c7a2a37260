"""The HTTP server for agents during a rollout: chat completions and rewards, under a base URL for
each episode.

    POST BASE/chat/completions   waits for the model's turn; also BASE/responses, BASE/messages
    POST BASE/reward             {"reward": 1.0, "parts": {"format": 1.0}}
    GET  BASE/models

    an agent's request                   its environment
    ------------------                   ---------------
    Session.ask -- events: Pending --->  AgentDrivenEnv waits for it
    waits       <- pending.answer -----  its step, or Session.close: a 503

One server on loopback, of serve/app.py, serves every episode of the process, in the loop of the
environments; it starts with the first one. The base URL is the key: it cannot be guessed. Does not
know problems or tokens.
"""

import asyncio
import secrets
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tandem.envs.calls import environment_loop
from tandem.plugins.agents import chat
from tandem.plugins.agents.chat import MODEL, ChatRequest, Reply
from tandem.serve.apis import APIS, Api
from tandem.serve.app import JsonResponse, Server, make_app, read_json
from tandem.serve.listen import bound, url_of
from tandem.serve.openai import ApiError, model_list, read_body
from tandem.types import Observation

# where OpenAI's clients count their retries of a request
RETRY_HEADER = "x-stainless-retry-count"


@dataclass(eq=False, slots=True, kw_only=True)
class Pending:
    """A request waiting for its answer."""

    request: ChatRequest
    is_retry: bool  # the client did not get the answer to the same request before
    answer: "asyncio.Future[Reply]"


class Session:
    """An episode as the server sees it.

    events: the agent's requests, and its end, which the environment puts there; posted: the last
    reward, as an observation.
    """

    def __init__(self, base_url: str):
        self.base_url = base_url
        self.events: asyncio.Queue[Pending | Future[Any]] = asyncio.Queue()
        self.posted: Observation | None = None
        self._answers: list[asyncio.Future[Reply]] = []
        self._over = ""  # why, once it is

    async def ask(self, request: ChatRequest, is_retry: bool) -> Reply:
        """Wait for the answer. Raises ApiError when the episode ends first."""
        if self._over:
            raise _over(self._over)
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._answers.append(answer)
        self.events.put_nowait(Pending(request=request, is_retry=is_retry, answer=answer))
        return await answer

    def close(self, reason: str) -> None:
        """Refuse all requests, waiting and later ones."""
        self._over = reason
        for answer in self._answers:
            if not answer.done():
                answer.set_exception(_over(reason))


def _over(reason: str) -> ApiError:
    return ApiError(503, reason, headers={"x-should-retry": "false"})  # OpenAI's clients would


class AgentServer:
    """The HTTP server of the open sessions, by their keys."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        base, sock = "/episodes/{key}/v1", bound("127.0.0.1", 0)
        app = make_app(
            [
                *(
                    Route(f"{base}/{path}", partial(self._complete, api), methods=["POST"])
                    for path, api in APIS.items()
                ),
                Route(f"{base}/reward", self._reward, methods=["POST"]),
                Route(f"{base}/models", self._models),
            ]
        )
        sock.listen()  # connections wait for the server
        self._url = url_of(sock)
        serving = Server(app).serve(sockets=[sock])
        asyncio.run_coroutine_threadsafe(serving, environment_loop())

    def open(self) -> Session:
        """Serve an episode."""
        key = secrets.token_urlsafe(16)
        return self.sessions.setdefault(key, Session(f"{self._url}/episodes/{key}/v1"))

    def close(self, session: Session, reason: str) -> None:
        session.close(reason)
        self.sessions = {key: other for key, other in self.sessions.items() if other != session}

    def _session(self, request: Request) -> Session:
        if session := self.sessions.get(request.path_params["key"]):
            return session
        raise ApiError(404, "there is no such episode, or it is over")

    async def _complete(self, speak: type[Api], http: Request) -> Response:
        session = self._session(http)
        api = speak(await read_json(http))
        request = read_body(ChatRequest, api.chat)
        reply = await session.ask(request, is_retry=http.headers.get(RETRY_HEADER, "0") != "0")
        if request.stream:
            events = api.events(chat.completion_chunks(reply, request))
            return StreamingResponse(events, media_type="text/event-stream")
        return JsonResponse(api.answer(chat.chat_completion(reply, request)))

    async def _reward(self, http: Request) -> Response:
        session = self._session(http)
        try:
            session.posted = chat.last_observation(await http.json())
        except ValueError as error:
            raise ApiError(400, str(error)) from None
        return JsonResponse({})

    async def _models(self, http: Request) -> Response:
        self._session(http)
        return JsonResponse(model_list(MODEL))


@cache
def the_server() -> AgentServer:
    return AgentServer()
