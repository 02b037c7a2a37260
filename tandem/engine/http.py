"""Engines behind OpenAI-compatible servers (http_api.py). Implements types.Generate.

    caller's thread                                       one thread a request
    ---------------                                       --------------------
    submit(request)  -> todo
    step()  _dispatch    todo -> attempts of a server --> POST /v1/completions
            _on_answer   completion                  <--  the answer, or why there is none
            _lose        its requests back in front; GET /v1/models every CHECK_S until it is back

step waits for answers, at most WAIT_S, as its caller may have more to submit. A server is lost when
it refuses a connection, fails, or sends no answer for deadline_s; its requests go to the others
unchanged. If all are lost for deadline_s, a UserError names each of them. Requests with the same
prefix go to one server as long as that is even. One thread calls this.

The weights are the servers' own; Tandem's are told to `load` new ones.
"""

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

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
from tandem.engine.worker_pool.protocol import cancelled_completion
from tandem.runtime import watchdog
from tandem.runtime.errors import UserError
from tandem.types import Array, Completion, Request

WAIT_S = 0.05  # in one step
CHECK_S, BUSY_S = 2.0, 0.5  # until a lost server is asked again, and a busy one


@dataclass(eq=False, slots=True)
class Ticket:
    """A request on its way."""

    request: Request
    completion: Completion | None = None


@dataclass(eq=False, slots=True)
class Server:
    """A server, with the calls of the requests that it has."""

    url: str  # of its API, ends in /v1
    served: ServedModel | None = None
    lost: str = ""  # why it was lost; empty: it serves
    rests_until: float = 0.0  # gets no request before, in monotonic seconds
    calls: dict[Ticket, Call] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"the server {self.url}"


# The server, the ticket or None for a check, the call, and its result or error.
Answer = tuple[Server, Ticket | None, Call, Json | ServedModel | Exception]


class HttpEngines:
    """Servers of one model, as one engine.

    urls: of their APIs, e.g. http://127.0.0.1:8000/v1; decode: token ids to text; longest: most
    tokens of a sequence, by the model; max_batch: most requests that a server has at once;
    report: told of losses. Raises UserError if none of them answers, or if they serve different
    models.
    """

    def __init__(
        self,
        urls: Sequence[str],
        decode: Callable[[Array], str],
        *,
        longest: int,
        max_batch: int,
        deadline_s: float,
        report: Callable[[str], None],
    ):
        self.weight_version = 0
        self.servers = [Server(url.rstrip("/")) for url in urls]
        self.deadline_s = deadline_s
        self._decode, self._max_batch, self._report = decode, max_batch, report
        self._key = api_key(os.environ)
        self._published: tuple[str, int, str] | None = None  # file, version, hash of new weights
        self._todo: deque[Ticket] = deque()
        self._ended: list[Ticket] = []
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        # the server with a prefix in its cache, by an episode's key and by a prompt's hash
        self._affinity: dict[int, Server] = {}
        # of the completions by these weights the one with the least key
        self.to_check: tuple[Request, Completion] | None = None
        for server in self.servers:
            self._take_up(server, self._describe(server))
        if not self.serving:
            raise self._none_left()
        self._last_served = time.monotonic()
        self.longest = min([longest, *(s.served.longest or longest for s in self._known)])  # type: ignore[union-attr]

    def close(self) -> None:
        """Abort every request."""
        self._todo.clear()
        for server in self.servers:
            self._abort(server)

    # ---------------------------------------------------------------- Generate

    def apply(self, version: int) -> None:
        """Count the servers' weights as that version. No request may be under way."""
        if self._todo or any(server.calls for server in self.servers):
            raise RuntimeError(f"weights of version {version} come while requests are under way")
        self.weight_version, self.to_check = version, None
        self._affinity.clear()

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
                found = self._describe(server)
            if isinstance(found, ServerLost | ServerBusy):
                self._lose(server, str(found))
            else:
                self._take_up(server, found)

    def submit(self, request: Request) -> Ticket:
        """Take a request. Raises UserError for one that no server can run as Tandem does."""
        needed = len(request.prompt) + request.params.max_new_tokens
        if needed > self.longest:
            raise _too_long(needed, self.longest)
        for server in self._known:
            assert server.served is not None
            check_request(request, server.served)
        self._todo.append(ticket := Ticket(request))
        return ticket

    def step(self) -> list[Ticket]:
        """Wait a moment for requests to end; return those that have."""
        self._dispatch()
        if not self._ended:
            with suppress(queue.Empty):
                self._on_answer(*self._answers.get(timeout=WAIT_S))
                while True:
                    self._on_answer(*self._answers.get_nowait())
        self._check_lost()
        self._dispatch()
        ended, self._ended = self._ended, []
        return ended

    def cancel(self, ticket: Ticket) -> None:
        """End a request now, with an empty completion; an ended one stays as it is."""
        if ticket.completion is not None:
            return
        ticket.completion = cancelled_completion()
        with suppress(ValueError):  # a server has it
            self._todo.remove(ticket)
        for server in self.servers:
            if ticket in server.calls:
                server.calls.pop(ticket).abort()

    # ---------------------------------------------------------------- servers

    @property
    def serving(self) -> list[Server]:
        return [server for server in self.servers if not server.lost]

    @property
    def _known(self) -> list[Server]:
        return [server for server in self.servers if server.served is not None]

    def call(self, url: str) -> Call:
        """Make a call to an address of a server."""
        return Call(url, self._key, self.deadline_s)

    def _describe(self, server: Server) -> ServedModel | Exception:
        """Ask a server what it serves, after it was given the published weights, if there are
        any."""
        try:
            if self._published is not None:
                load_weights(self.call(server.url), *self._published)
            return served_model(self.call, server.url)
        except (ServerLost, ServerBusy, UserError) as error:
            return error

    def _take_up(self, server: Server, found: ServedModel | Exception) -> None:
        """Let a server serve, if its answer says that it has the model of the others."""
        if isinstance(found, UserError):
            raise found
        if isinstance(found, Exception):
            if server.served is None and not server.lost:
                self._report(f"{server} does not answer: {found}")
            server.lost, server.rests_until = str(found), time.monotonic() + CHECK_S
            return
        # new weights were checked by `load_weights`
        for other in self._known if self._published is None else ():
            assert other.served is not None
            if (found.sha256, found.version) != (other.served.sha256, other.served.version):
                raise _other_model(server, found, other.served)
        if server.lost:
            self._report(f"{server} serves again")
        server.served, server.lost, server.rests_until = found, "", 0.0

    def _lose(self, server: Server, reason: str) -> None:
        """Give a server's requests to the others."""
        back = list(server.calls)
        self._abort(server)
        self._todo.extendleft(reversed(back))
        self._affinity = {key: home for key, home in self._affinity.items() if home is not server}
        server.lost, server.rests_until = reason, time.monotonic() + CHECK_S
        self._report(f"{server} was lost: {reason}; {len(back)} of its requests go to another")

    def _abort(self, server: Server) -> None:
        for call in server.calls.values():
            call.abort()
        server.calls.clear()

    def _check_lost(self) -> None:
        """Ask lost servers whether they are back. Raises UserError if all have been lost for
        deadline_s."""
        now = time.monotonic()
        if self.serving:
            self._last_served = now
        elif now - self._last_served > self.deadline_s:
            raise self._none_left()
        for server in self.servers:
            if server.lost and now >= server.rests_until:
                server.rests_until = now + 4 * self.deadline_s  # its answer comes before
                self._start(server, None, self.call(server.url), partial(self._describe, server))

    def _none_left(self) -> UserError:
        reasons = "; ".join(f"{server.url}: {server.lost}" for server in self.servers)
        return UserError(
            "none of the servers answers",
            where=", ".join(server.url for server in self.servers),
            found=reasons,
            expected=f"one that answers within {self.deadline_s:g} s",
            next="start one: tandem serve MODEL --port PORT",
        )

    # ---------------------------------------------------------------- requests

    def _dispatch(self) -> None:
        """Give requests to the servers evenly, and no more than they run at once."""
        now = time.monotonic()
        ready = [server for server in self.serving if now >= server.rests_until]
        if not ready or not self._todo:
            return
        load = len(self._todo) + sum(len(server.calls) for server in self.servers)
        share = min(-(-load // len(ready)), self._max_batch)
        while self._todo and (free := [server for server in ready if len(server.calls) < share]):
            ticket = self._todo.popleft()
            request = ticket.request
            keys = request.key, hash(request.prompt.tobytes())
            cached = [self._affinity[key] for key in keys if self._affinity.get(key) in free]
            server = cached[0] if cached else min(free, key=lambda server: len(server.calls))
            self._affinity |= dict.fromkeys(keys, server)
            assert server.served is not None
            call = server.calls[ticket] = self.call(server.url)
            body = completion_body(request, server.served)
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
            except (ServerLost, ServerBusy, UserError) as error:
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
        if ticket is None:
            assert not isinstance(found, dict)
            self._take_up(server, found)
        elif server.calls.get(ticket) is not call:
            return  # cancelled, or given to another server
        elif isinstance(found, ServerLost):
            self._lose(server, str(found))
        else:
            del server.calls[ticket]
            self._on_completion(server, ticket, found)

    def _on_completion(
        self, server: Server, ticket: Ticket, found: Json | ServedModel | Exception
    ) -> None:
        if isinstance(found, ServerBusy):
            server.rests_until = time.monotonic() + BUSY_S
            self._todo.appendleft(ticket)
            return
        if isinstance(found, Exception):
            raise found
        assert isinstance(found, dict) and server.served is not None
        request, version = ticket.request, self.weight_version
        completion = read_completion(
            found, request, server.served, version, self._decode, server.url
        )
        ticket.completion = completion
        self._ended.append(ticket)
        if self.to_check is None or request.key < self.to_check[0].key:
            self.to_check = request, completion


def _too_long(needed: int, longest: int) -> UserError:
    return UserError(
        "a sequence would be longer than a server can hold",
        where="rollout.max_new_tokens",
        found=f"{needed} tokens, prompt and completion",
        expected=f"at most {longest}",
        next="lower rollout.max_new_tokens, or serve with more (tandem serve --cache-mb)",
    )


def _other_model(server: Server, found: ServedModel, others: ServedModel) -> UserError:
    return UserError(
        "the servers of rollout.engine do not run the same weights",
        where=server.url,
        found=f"version {found.version}, hash {found.sha256[:16]}",
        expected=f"version {others.version}, hash {others.sha256[:16]}, as the others",
        next="serve one model directory on all of them",
    )
