"""Engines behind OpenAI-compatible servers (api.py). Implements types.Generate.

    caller's thread                                       the client's thread (runtime/http.py)
    ---------------                                       -------------------------------------
    submit(request)  -> a queue
    step()  _dispatch    queue -> tickets of a server --> POST /v1/completions
            _on_answer   completion                  <--  the answer, or why there is none
            _lose        its requests back in front
            _check       GET /v1/models: BEATS times in deadline_s of a server at work, every
                         CHECK_S of a lost one until it is back

step waits for answers, at most WAIT_S, as its caller may have more to submit. A completion comes
whole, so that it may take as long as its tokens (TOKEN_S each, and deadline_s). A server is lost
when it refuses a connection, fails, does not answer a check within deadline_s or a request in its
time, for which a busy one is asked again; its requests go to the others unchanged. A UserError ends
the run if all are lost for deadline_s, which it names, or if more are lost than there are restarts:
a request may be what makes servers fail. engine/dispatch.py decides which server gets which
request. One thread calls this.

The weights are the servers' own; Tandem's are told to `load` new ones.
"""

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from tandem.engine.dispatch import Dispatcher, Ticket
from tandem.engine.engine import Engine
from tandem.engine.packed import packed_gap
from tandem.plugins.servers.api import (
    ServedModel,
    check_request,
    completion_body,
    load_weights,
    max_tokens,
    read_completion,
    served_model,
)
from tandem.runtime import watchdog
from tandem.runtime.errors import UserError
from tandem.runtime.http import Json, Refused, ServerBusy, ServerLost, ask, start
from tandem.types import Array, Completion, Request
from tandem.workers.pool import RestartLimit

WAIT_S = 0.05  # in one step
CHECK_S, BUSY_S = 2.0, 0.5  # until a lost server is asked again, and a busy one
BEATS = 4  # checks of a server at work in deadline_s
TOKEN_S = 1.0  # that a token of a completion may take; a request may wait for others before

Published = tuple[str, int, str]  # file, version and hash of new weights
UNKNOWN = ServedModel(name="", is_tandem=False, longest=0)  # by a server that never answered


@dataclass(eq=False, slots=True)
class Server:
    """A server, with the requests that it has, and their calls. Implements dispatch.Worker."""

    number: int
    url: str  # of its API, ends in /v1
    target: int = 0  # the version that its weights count as
    served: ServedModel = UNKNOWN
    lost: str = ""  # why it was lost; empty: it serves
    tickets: dict[int, Ticket] = field(default_factory=dict)
    calls: dict[int, "Future[Any]"] = field(default_factory=dict)  # by the ticket's number
    check: "Future[Any] | None" = None  # under way
    checked_with: Published | None = None  # the weights that it was given before the check
    check_at: float = 0.0  # when the next one begins, by the clock

    @property
    def ready(self) -> bool:
        return not self.lost

    runs_target = ready

    def __str__(self) -> str:
        return f"the server {self.url}"


# The server, the ticket or None for a check, and the call, which has ended.
Answer = tuple[Server, Ticket | None, "Future[Any]"]


class HttpEngines:
    """Servers of one model, as one engine.

    urls: of their APIs, e.g. http://127.0.0.1:8000/v1; decode: token ids to text; longest: most
    tokens of a sequence, by the model; max_batch: most requests that a server has at once;
    restarts: most losses of servers; report: told of them; clock: in seconds. Raises UserError if
    none of them answers, or if they serve different models.
    """

    def __init__(
        self,
        urls: Sequence[str],
        decode: Callable[[Array], str],
        *,
        longest: int,
        max_batch: int,
        deadline_s: float,
        restarts: int,
        report: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self.weight_version = 0
        self.servers = [Server(number, url.rstrip("/")) for number, url in enumerate(urls)]
        self.deadline_s, self.restarts = deadline_s, RestartLimit(restarts)
        self._decode, self._report = decode, report
        self._clock = clock
        self._key = os.environ.get("TANDEM_API_KEY", "")
        self._published: Published | None = None
        self._ended: list[Ticket] = []
        self._answers: SimpleQueue[Answer] = SimpleQueue()
        # of the completions by these weights the one with the least key
        self.to_check: tuple[Request, Completion] | None = None
        self.reference: Engine | None = None  # the trainer's, whose model these are compared with
        for server in self.servers:
            self._take_up(server, _result(start(self._describe(server, None))))
        if not self.serving:
            raise self._none_left()
        self._last_served = clock()  # for servers that are all lost
        self.longest = min([longest, *(s.served.longest or longest for s in self.servers)])
        self._dispatcher: Dispatcher[Server] = Dispatcher(max_batch, self.longest)
        self._queue = self._dispatcher.open(0)

    def logprob_gap(self) -> float:
        """Return the gap of a completion to the model of `reference`; 0 if that has newer
        weights."""
        version, reference = self.weight_version, self.reference
        if self.to_check is None or reference is None or version != reference.weight_version:
            return 0.0
        return packed_gap(reference.model, *self.to_check, version)

    def close(self) -> None:
        """Abort every request."""
        self._queue.waiting.clear()
        for server in self.servers:
            self._abort(server)

    # ---------------------------------------------------------------- Generate

    def apply(self, version: int) -> None:
        """Count the servers' weights as that version. No request may be under way."""
        if self._queue.waiting or any(server.calls for server in self.servers):
            raise RuntimeError(f"weights of version {version} come while requests are under way")
        self.weight_version, self.to_check = version, None
        self._dispatcher.close(self._queue)
        self._queue = self._dispatcher.open(version)
        for server in self.servers:
            server.target = version
        self._last_served = self._clock()  # since the last rollouts nobody has asked

    def load(self, path: str, version: int, sha256: str) -> None:
        """Have every server run the weights of a safetensors file, of that version and hash. No
        request may be under way. Raises UserError if a server refuses, or has other weights then;
        one that is lost gets them when it is back."""
        if self._published == (path, version, sha256):
            return
        self.apply(version)
        self._published = path, version, sha256
        for server in self.serving:
            with watchdog.waiting_for(str(server), f"weights of version {version}"):
                found = _result(start(self._describe(server, self._published)))
            if isinstance(found, ServerLost):
                self._lose(server, str(found))
            else:
                self._take_up(server, found)

    def submit(self, request: Request) -> Ticket:
        """Take a request. Raises UserError for one that no server can run as Tandem does."""
        ticket = self._dispatcher.ticket(request, self._queue)
        for server in self.known:
            check_request(request, server.served)
        self._dispatcher.add(ticket)
        return ticket

    def step(self) -> list[Ticket]:
        """Wait a moment for requests to end; return those that have."""
        self._dispatch()
        with suppress(Empty):
            self._on_answer(*self._answers.get(timeout=WAIT_S))
            while True:
                self._on_answer(*self._answers.get_nowait())
        self._check()
        self._dispatch()
        ended, self._ended = self._ended, []
        return ended

    def cancel(self, ticket: Ticket) -> None:
        """End a request now, with an empty completion; an ended one stays as it is."""
        if self._dispatcher.cancel(ticket):
            for server in self.servers:
                if server.tickets.pop(ticket.number, None):
                    server.calls.pop(ticket.number).cancel()

    # ---------------------------------------------------------------- servers

    @property
    def serving(self) -> list[Server]:
        return [server for server in self.servers if not server.lost]

    @property
    def known(self) -> list[Server]:
        return [server for server in self.servers if server.served is not UNKNOWN]

    async def _ask(self, url: str, body: Json | None = None, *, answer_s: float = 0.0) -> Json:
        """Ask an address of a server, again while it is busy. answer_s: for its answer; 0:
        deadline_s."""
        answer_s = answer_s or self.deadline_s
        limits = {"connect_s": self.deadline_s, "answer_s": answer_s}
        until = self._clock() + answer_s
        while True:
            try:
                return await ask(url, body, key=self._key, **limits)
            except ServerBusy as error:
                if self._clock() > until:
                    raise ServerLost(f"{error} for {answer_s:g} s") from None
                await asyncio.sleep(BUSY_S)
            except Refused as error:
                hint = "set TANDEM_API_KEY to its key" if error.status == 401 else ""
                what = "a rollout server refuses a request"
                raise UserError(what, where=url, found=str(error), next=hint) from None

    async def _describe(self, server: Server, published: Published | None) -> ServedModel:
        """Ask a server what it serves, after it was given the published weights, if there are
        any."""
        if published is not None:
            await load_weights(self._ask, server.url, *published)
        return await served_model(self._ask, server.url)

    def _take_up(self, server: Server, found: ServedModel | Exception) -> None:
        """Let a server serve, if its answer says that it has the weights that are published, or
        those of the others."""
        if isinstance(found, ServerLost):
            if server.served is UNKNOWN and not server.lost:
                self._report(f"{server} does not answer: {found}")
            server.lost, server.check_at = str(found), self._clock() + CHECK_S
            return
        if isinstance(found, Exception):
            raise found
        if self._published is not None:
            expected = {self._published[1:]}
        else:
            expected = {one.served.weights for one in self.known}
        for version, sha256 in expected - {found.weights}:
            raise UserError(
                "the rollout servers do not run the same weights",
                where=server.url,
                found=f"version {found.version}, hash {found.sha256[:16]}",
                expected=f"version {version}, hash {sha256[:16]}",
                next="serve one model directory on all of them, and to this run alone",
            )
        if server.lost:
            self._report(f"{server} serves again")
        server.served, server.lost = found, ""

    def _lose(self, server: Server, reason: str) -> None:
        """Give a server's requests to the others. Raises UserError if no restart is left."""
        back = self._dispatcher.put_back(server)
        self._abort(server)
        self._last_served = self._clock()
        server.lost, server.check_at = reason, self._last_served + CHECK_S
        if not self.restarts.spend():
            raise UserError(
                "servers are lost again and again",
                where=server.url,
                found=reason,
                expected=f"at most {self.restarts.limit} losses in a run (rollout.restarts)",
                next="look at what the server wrote last; the same command resumes the run",
            )
        self._report(
            f"{server} was lost: {reason}; loss {self.restarts.used} of {self.restarts.limit}, "
            f"{back} of its requests go to another"
        )

    def _abort(self, server: Server) -> None:
        for call in (*server.calls.values(), server.check):
            if call is not None:
                call.cancel()
        server.calls.clear()
        server.tickets.clear()
        server.check = None

    def _check(self) -> None:
        """Ask lost servers whether they are back, and those at work whether they are still there.
        Raises UserError if all have been lost for deadline_s."""
        now = self._clock()
        if not self.serving and now - self._last_served > self.deadline_s:
            raise self._none_left()
        for server in self.servers:
            if server.check is None and now >= server.check_at and (server.lost or server.calls):
                server.checked_with = self._published
                if server.lost:
                    server.check = self._start(server, self._describe(server, self._published))
                else:
                    server.check = self._start(server, self._ask(f"{server.url}/models"))

    def _on_check(self, server: Server, found: Json | ServedModel | Exception) -> None:
        server.check, server.check_at = None, self._clock() + self.deadline_s / BEATS
        if server.lost and server.checked_with != self._published:
            server.check_at = 0.0  # it has outdated weights, or was refused their file: once more
        elif server.lost:
            assert not isinstance(found, dict)
            self._take_up(server, found)
        elif isinstance(found, ServerLost):
            self._lose(server, str(found))
        elif isinstance(found, Exception):
            raise found

    def _none_left(self) -> UserError:
        return UserError(
            "none of the servers answers",
            where=", ".join(server.url for server in self.servers),
            found="; ".join(f"{server.url}: {server.lost}" for server in self.servers),
            expected=f"one that answers within {self.deadline_s:g} s",
            next="start one: tandem serve MODEL --port PORT",
        )

    # ---------------------------------------------------------------- requests

    def _dispatch(self) -> None:
        """Give requests to the servers that are ready."""
        for server, ticket in self._dispatcher.assign(self.serving):
            body = completion_body(ticket.request, server.served)
            answer = self._ask(f"{server.url}/completions", body, answer_s=self.answer_s(ticket))
            server.calls[ticket.number] = self._start(server, answer, ticket)

    def answer_s(self, ticket: Ticket) -> float:
        """Return the seconds that the answer to a request may take."""
        return self.deadline_s + TOKEN_S * max_tokens(ticket.request)

    def _start(
        self, server: Server, work: Coroutine[Any, Any, Any], ticket: Ticket | None = None
    ) -> "Future[Any]":
        call = start(work)
        call.add_done_callback(lambda call: self._answers.put((server, ticket, call)))
        return call

    def _on_answer(self, server: Server, ticket: Ticket | None, call: "Future[Any]") -> None:
        watchdog.heartbeat()
        if call is not (server.check if ticket is None else server.calls.get(ticket.number)):
            return  # cancelled, or the server was lost
        found = _result(call)
        if ticket is None:
            self._on_check(server, found)
        elif isinstance(found, ServerLost):
            self._lose(server, str(found))
        else:
            del server.calls[ticket.number], server.tickets[ticket.number]
            if isinstance(found, UserError):
                raise found
            request, version, model = ticket.request, self.weight_version, server.served
            completion = read_completion(found, request, model, version, self._decode, server.url)
            ticket.completion = completion
            self._ended.append(ticket)
            if self.to_check is None or request.key < self.to_check[0].key:
                self.to_check = request, completion


def _result(call: "Future[Any]") -> Any:
    """Wait for a call; return its result or the server's failure. Raises any other error, which is
    a bug."""
    try:
        return call.result()
    except (ServerLost, UserError) as error:
        return error
