"""Engines behind OpenAI-compatible servers (http_api.py). Implements types.Generate.

    caller's thread                                       one thread a request
    ---------------                                       --------------------
    submit(request)  -> a queue
    step()  _dispatch    queue -> tickets of a server --> POST /v1/completions
            _on_answer   completion                  <--  the answer, or why there is none
            _lose        its requests back in front
            _check       GET /v1/models: BEATS times in deadline_s of a server at work, every
                         CHECK_S of a lost one until it is back

step waits for answers, at most WAIT_S, as its caller may have more to submit. A completion comes
whole, so that it may take as long as its tokens (TOKEN_S each, and deadline_s). A server is lost
when it refuses a connection, fails, does not answer a check within deadline_s or a request in its
time; its requests go to the others unchanged. A UserError ends the run if all are lost for
deadline_s, which it names, or if more are lost than there are restarts: a request may be what makes
servers fail. worker_pool/dispatch.py decides which server gets which request. One thread calls
this.

The weights are the servers' own; Tandem's are told to `load` new ones.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue

from tandem.engine import http_errors as errors
from tandem.engine.dispatch import Dispatcher, Ticket, cancelled_completion
from tandem.engine.http_api import (
    Call,
    Json,
    ServedModel,
    ServerBusy,
    ServerLost,
    api_key,
    check_request,
    completion_body,
    load_weights,
    read_completion,
    served_model,
)
from tandem.runtime import watchdog
from tandem.runtime.errors import UserError
from tandem.types import Array, Completion, Request
from tandem.workers.pool import RestartLimit

WAIT_S = 0.05  # in one step
CHECK_S, BUSY_S = 2.0, 0.5  # until a lost server is asked again, and a busy one
BEATS = 4  # checks of a server at work in deadline_s
TOKEN_S = 1.0  # that a token of a completion may take; a request may wait for others before

Published = tuple[str, int, str]  # file, version and hash of new weights


@dataclass(eq=False, slots=True)
class Server:
    """A server, with the requests that it has, and their calls. Implements dispatch.Worker."""

    number: int
    url: str  # of its API, ends in /v1
    target: int = 0  # the version that its weights count as
    is_ready: bool = False  # it serves, and does not rest
    served: ServedModel | None = None
    lost: str = ""  # why it was lost; empty: it serves
    rests_until: float = 0.0  # gets no request before, by the clock
    busy_since: float | None = None  # it has completed nothing since, by the clock
    tickets: dict[int, Ticket] = field(default_factory=dict)
    calls: dict[int, Call] = field(default_factory=dict)  # by the ticket's number
    check: Call | None = None  # under way
    checked_with: Published | None = None  # the weights that it was given before the check
    check_at: float = 0.0  # when the next one begins, by the clock

    @property
    def started(self) -> bool:
        return not self.lost

    def __str__(self) -> str:
        return f"the server {self.url}"


# The server, the ticket or None for a check, the call, and its result or error.
Answer = tuple[Server, Ticket | None, Call, Json | ServedModel | Exception]


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
        self._key = api_key(os.environ)
        self._published: Published | None = None
        self._ended: list[Ticket] = []
        self._answers: SimpleQueue[Answer] = SimpleQueue()
        # of the completions by these weights the one with the least key
        self.to_check: tuple[Request, Completion] | None = None
        for server in self.servers:
            self._take_up(server, self._describe(server, None))
        if not self.serving:
            raise self._none_left()
        self._last_served = clock()  # for servers that are all lost
        self.longest = min([longest, *(s.served.longest or longest for s in self._known)])  # type: ignore[union-attr]
        self._dispatcher: Dispatcher[Server] = Dispatcher(max_batch, self.longest)
        self._queue = self._dispatcher.open(0)

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
                found = self._describe(server, self._published)
            if isinstance(found, ServerLost | ServerBusy):
                self._lose(server, str(found))
            else:
                self._take_up(server, found)

    def submit(self, request: Request) -> Ticket:
        """Take a request. Raises UserError for one that no server can run as Tandem does."""
        ticket = self._dispatcher.ticket(request, self._queue)
        for server in self._known:
            assert server.served is not None
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
        if ticket.completion is not None:
            return
        ticket.completion = cancelled_completion()
        with suppress(ValueError):  # a server has it
            self._queue.waiting.remove(ticket)
        for server in self.servers:
            if server.tickets.pop(ticket.number, None):
                server.calls.pop(ticket.number).abort()

    # ---------------------------------------------------------------- servers

    @property
    def serving(self) -> list[Server]:
        return [server for server in self.servers if not server.lost]

    @property
    def _known(self) -> list[Server]:
        return [server for server in self.servers if server.served is not None]

    def call(self, url: str, *, answer_s: float = 0.0) -> Call:
        """Make a call to an address of a server. answer_s: for its answer; 0: deadline_s."""
        return Call(url, self._key, self.deadline_s, answer_s or self.deadline_s)

    def _describe(self, server: Server, published: Published | None) -> ServedModel | Exception:
        """Ask a server what it serves, after it was given the published weights, if there are
        any."""
        try:
            if published is not None:
                load_weights(self.call(server.url), *published)
            return served_model(self.call, server.url)
        except (ServerLost, ServerBusy, UserError) as error:
            return error

    def _take_up(self, server: Server, found: ServedModel | Exception) -> None:
        """Let a server serve, if its answer says that it has the weights that are published, or
        those of the others."""
        if isinstance(found, ServerLost | ServerBusy):
            if server.served is None and not server.lost:
                self._report(f"{server} does not answer: {found}")
            server.lost, server.check_at = str(found), self._clock() + CHECK_S
            return
        if isinstance(found, Exception):
            raise found
        if self._published is not None:
            expected = {self._published[1:]}
        else:
            expected = {one.served.weights for one in self._known if one.served is not None}
        for weights in expected - {found.weights}:
            raise errors.other_weights(server.url, found.weights, weights)
        if server.lost:
            self._report(f"{server} serves again")
        server.served, server.lost, server.rests_until = found, "", 0.0

    def _lose(self, server: Server, reason: str) -> None:
        """Give a server's requests to the others. Raises UserError if no restart is left."""
        back = self._dispatcher.put_back(server)
        self._abort(server)
        server.busy_since = None
        self._last_served = self._clock()
        server.lost, server.check_at = reason, self._last_served + CHECK_S
        if not self.restarts.spend():
            raise errors.lost_too_often(server.url, reason, self.restarts.limit)
        self._report(
            f"{server} was lost: {reason}; loss {self.restarts.used} of {self.restarts.limit}, "
            f"{back} of its requests go to another"
        )

    def _abort(self, server: Server) -> None:
        for call in (*server.calls.values(), server.check):
            if call is not None:
                call.abort()
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
                server.check, server.checked_with = self.call(server.url), self._published
                is_there = partial(server.check.send, "/models")
                is_back = partial(self._describe, server, self._published)
                self._start(server, None, server.check, is_back if server.lost else is_there)

    def _on_check(self, server: Server, found: Json | ServedModel | Exception) -> None:
        server.check, server.check_at = None, self._clock() + self.deadline_s / BEATS
        if server.lost and server.checked_with != self._published:
            server.check_at = 0.0  # it has outdated weights, or was refused their file: once more
        elif server.lost:
            assert not isinstance(found, dict)
            self._take_up(server, found)
        elif isinstance(found, ServerLost):
            self._lose(server, str(found))
        elif isinstance(found, Exception) and not isinstance(found, ServerBusy):
            raise found

    def _none_left(self) -> UserError:
        reasons = {server.url: server.lost for server in self.servers}
        return errors.none_left(reasons, self.deadline_s)

    # ---------------------------------------------------------------- requests

    def _dispatch(self) -> None:
        """Give requests to the servers that are ready."""
        now = self._clock()
        for server in self.servers:
            server.is_ready = not server.lost and now >= server.rests_until
        ready = [server for server in self.servers if server.is_ready]
        for server, ticket in self._dispatcher.assign(ready):
            assert server.served is not None
            body = completion_body(ticket.request, server.served)
            answer_s = self.deadline_s + TOKEN_S * body["max_tokens"]
            call = server.calls[ticket.number] = self.call(server.url, answer_s=answer_s)
            self._start(server, ticket, call, partial(call.send, "/completions", body))

    def _start(
        self,
        server: Server,
        ticket: Ticket | None,
        call: Call,
        work: Callable[[], Json | ServedModel | Exception],
    ) -> None:
        def run() -> None:
            try:
                found: Json | ServedModel | Exception = work()
            except Exception as error:  # a bug too: raised where the answer is read
                found = error
            self._answers.put((server, ticket, call, found))

        threading.Thread(target=run, name=f"http {server.url}", daemon=True).start()

    def _on_answer(
        self,
        server: Server,
        ticket: Ticket | None,
        call: Call,
        found: Json | ServedModel | Exception,
    ) -> None:
        watchdog.heartbeat()
        if call is not (server.check if ticket is None else server.calls.get(ticket.number)):
            return  # cancelled, or the server was lost
        if ticket is None:
            self._on_check(server, found)
        elif isinstance(found, ServerLost):
            self._lose(server, str(found))
        else:
            del server.calls[ticket.number], server.tickets[ticket.number]
            self._on_completion(server, ticket, call, found)

    def _on_completion(
        self, server: Server, ticket: Ticket, call: Call, found: Json | ServedModel | Exception
    ) -> None:
        if isinstance(found, ServerBusy):
            self._queue.waiting.appendleft(ticket)
            self._let_rest(server, call.answer_s, str(found))
            return
        if isinstance(found, Exception):
            raise found
        assert isinstance(found, dict) and server.served is not None
        request, version = ticket.request, self.weight_version
        completion = read_completion(
            found, request, server.served, version, self._decode, server.url
        )
        server.busy_since, ticket.completion = None, completion
        self._ended.append(ticket)
        if self.to_check is None or request.key < self.to_check[0].key:
            self.to_check = request, completion

    def _let_rest(self, server: Server, longest_s: float, reason: str) -> None:
        """Give a busy server no request for a moment; it is lost once it was busy for longest_s."""
        now = self._clock()
        server.rests_until = now + BUSY_S
        if server.busy_since is None:
            server.busy_since = now
        elif now - server.busy_since > longest_s:
            self._lose(server, f"{reason} for {longest_s:g} s")
