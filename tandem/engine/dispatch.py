"""Decision which rollout worker gets which request, and which weights it runs. Pure: it knows no
process, no clock and no weights, so a simulation can drive it (benchmarks/cluster_model.py).

    a step's thread                     Dispatcher                         the pool, or servers
    ---------------                     ----------                         --------------------
    open(version)   a queue
    add(ticket)     --------------->    switches: who loads which version  ->   target
                                        assign: who gets which ticket      ->   tickets
    close(queue)    no request is to come

A queue is the requests of one step, by one version of the weights; several may be open. A worker
runs one version at a time, and takes up another when it has no tickets left. Older versions come
first: what waits for them gets the workers that are free. The version of each open queue keeps one
worker, as long as there are enough, so that the next turn of its last episode need not wait for
newer requests; the others go where tickets wait. So a step's straggler holds the worker that it is
on, and no other.

Within a version older queues come first. Tickets are spread evenly over its workers, and no worker
has more than it runs at once; those with the same prefix go to one worker as long as that is even.
"""

import hashlib
import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from tandem.runtime.errors import InvariantError, UserError
from tandem.types import Completion, Request


class Ticket:
    """A request on its way, in a queue; `completion` is set once it has ended.

    prefixes: by what a worker with its prefix is found, its episode's key and its prompt's hash.
    """

    __slots__ = ("completion", "identity", "number", "prefixes", "queue", "request")

    def __init__(self, number: int, request: Request, identity: str, queue: "RequestQueue"):
        self.number, self.request, self.identity, self.queue = number, request, identity, queue
        self.prefixes = request.key, hash(request.prompt.tobytes())
        self.completion: Completion | None = None


class Worker(Protocol):
    """A worker, as far as its requests and weights go."""

    number: int
    target: int  # the version that it runs or was told to load; -1: none
    tickets: dict[int, Ticket]  # by number: given to it and not ended

    @property
    def ready(self) -> bool:
        """Tell whether it can load weights."""

    @property
    def runs_target(self) -> bool:
        """Tell whether it runs its target."""


W = TypeVar("W", bound=Worker)


@dataclass(eq=False)
class RequestQueue:
    """Requests of one step, by one version of the weights. number: orders queues of a version;
    ended: gets its tickets once they have, where the caller is another thread."""

    version: int
    number: int = 0
    ended: SimpleQueue[Ticket] | None = None
    waiting: deque[Ticket] = field(default_factory=deque)
    has_begun: bool = False  # it has had a ticket
    affinity: dict[int, Any] = field(default_factory=dict)  # prefix -> the worker that has it


class Dispatcher(Generic[W]):
    """The open queues, oldest first. max_batch: most requests that a worker has at once; longest:
    most tokens of a sequence."""

    def __init__(self, max_batch: int, longest: int):
        self.max_batch, self.longest = max_batch, longest
        self.queues: list[RequestQueue] = []
        self._numbers = itertools.count()  # `next` is atomic

    @property
    def versions(self) -> list[int]:
        """Versions of the open queues, ascending."""
        return sorted({queue.version for queue in self.queues})

    @property
    def num_waiting(self) -> int:
        """Tickets that no worker has."""
        return sum(len(queue.waiting) for queue in self.queues)

    def open(
        self, version: int, number: int = 0, ended: SimpleQueue[Ticket] | None = None
    ) -> RequestQueue:
        """Open a queue: its requests come soon."""
        self.queues.append(queue := RequestQueue(version, number, ended))
        self.queues.sort(key=lambda one: (one.version, one.number))
        return queue

    def close(self, queue: RequestQueue) -> None:
        """Close a queue: no request of it is to come."""
        self.queues.remove(queue)

    def ticket(self, request: Request, queue: RequestQueue) -> Ticket:
        """Make the ticket of a request; any thread may. Raises UserError if it is too long."""
        needed = len(request.prompt) + request.params.max_new_tokens
        if needed > self.longest:
            raise UserError(
                "a sequence would be longer than an engine can hold",
                where="rollout.max_new_tokens",
                found=f"{needed} tokens, prompt and completion",
                expected=f"at most {self.longest}, by the model's positions and the engine's cache",
                next="lower rollout.max_new_tokens, or raise rollout.cache_mb (of servers: "
                "tandem serve --cache-mb)",
            )
        return Ticket(next(self._numbers), request, identity_of(request), queue)

    def add(self, ticket: Ticket) -> None:
        """Let a ticket wait in its queue."""
        ticket.queue.waiting.append(ticket)
        ticket.queue.has_begun = True

    def cancel(self, ticket: Ticket) -> bool:
        """End a ticket with an empty completion; tell whether it had not ended."""
        if ticket.completion is not None:
            return False
        ticket.completion = Completion(
            tokens=np.zeros(0, np.int64),
            logprobs=np.zeros(0, np.float32),
            weight_versions=np.zeros(0, np.int32),
            text="",
            stop_reason="cancelled",
        )
        with suppress(ValueError):  # a worker has it
            ticket.queue.waiting.remove(ticket)
        return True

    def put_back(self, worker: W) -> int:
        """Put a lost worker's tickets back in front, and forget it; return how many."""
        back = [ticket for ticket in worker.tickets.values() if ticket.completion is None]
        for ticket in reversed(back):
            ticket.queue.waiting.appendleft(ticket)
        for queue in self.queues:
            queue.affinity = {
                key: home for key, home in queue.affinity.items() if home is not worker
            }
        return len(back)

    def switches(self, workers: Sequence[W]) -> dict[int, list[W]]:
        """Return which workers, all without tickets, are to load which version now."""
        moves: dict[int, list[W]] = defaultdict(list)
        is_fresh = any(not queue.has_begun for queue in self.queues)
        if not (is_fresh or self.num_waiting or any(s.ready and s.target < 0 for s in workers)):
            return moves
        versions, left = self.versions, Counter(worker.target for worker in workers)
        free = [worker for worker in workers if worker.ready and not worker.tickets]
        free = [worker for worker in free if worker.runs_target or worker.target not in versions]
        free.sort(key=lambda worker: worker.target in versions)  # first those that nobody needs
        for version in versions:
            stays, missing = self._waiting(version), self._missing(version, workers)
            rest: list[W] = []
            for worker in free:
                is_last = worker.target in versions and left[worker.target] == 1
                may_leave = not is_last or (worker.target > version and not left[version])
                if worker.target == version and stays > 0:
                    stays -= 1  # it gets a ticket at once
                elif worker.target != version and missing > 0 and may_leave:
                    missing -= 1
                    left.subtract([worker.target])
                    left[version] += 1
                    moves[version].append(worker)
                else:
                    rest.append(worker)
            free = rest
        if versions:  # who has nothing to do loads what comes next
            moves[versions[-1]] += [worker for worker in free if worker.target not in versions]
        return {version: movers for version, movers in moves.items() if movers}

    def _waiting(self, version: int) -> int:
        return sum(len(queue.waiting) for queue in self.queues if queue.version == version)

    def _missing(self, version: int, workers: Sequence[W]) -> int:
        """Return how many more workers a version needs: the newest one for every ticket that waits,
        older ones for those that their workers have no room for; each has one."""
        own = [worker for worker in workers if worker.target == version]
        waiting = self._waiting(version)
        if version == self.versions[-1]:
            needed = waiting - sum(not worker.tickets for worker in own)
        else:
            room = sum(self.max_batch - len(worker.tickets) for worker in own)
            needed = -(-(waiting - room) // self.max_batch)
        return max(needed, not own)

    def assign(self, workers: Sequence[W]) -> list[tuple[W, Ticket]]:
        """Give waiting tickets to workers that run their weights; return who got which.

        A share counts the workers that still load or start, so that the first one up does not take
        all.
        """
        given: list[tuple[W, Ticket]] = []
        starting = sum(worker.target < 0 for worker in workers)  # for the oldest version that waits
        for version in self.versions:
            queues = [queue for queue in self.queues if queue.version == version and queue.waiting]
            if not queues:
                continue
            own = [worker for worker in workers if worker.target == version]
            load = self._waiting(version) + sum(len(worker.tickets) for worker in own)
            share = min(-(-load // max(1, len(own) + starting)), self.max_batch)
            starting = 0
            free = [
                (len(worker.tickets), worker.number, worker) for worker in own if worker.runs_target
            ]
            heapify(free)
            for queue in queues:
                while queue.waiting and (worker := _choose(queue, free, share)) is not None:
                    ticket = queue.waiting.popleft()
                    worker.tickets[ticket.number] = ticket
                    queue.affinity |= dict.fromkeys(ticket.prefixes, worker)
                    given.append((worker, ticket))
        return given


def _choose(queue: RequestQueue, free: list[tuple[int, int, W]], share: int) -> W | None:
    """Return the worker for the first ticket of a queue: one with its prefix, else the one with the
    fewest tickets; None if none has room. free: a heap, whose counts may be too low."""
    for key in queue.waiting[0].prefixes:
        home: W | None = queue.affinity.get(key)
        if home is None or not home.runs_target or home.target != queue.version:
            continue
        if len(home.tickets) < share:
            return home
    while free:
        count, number, worker = free[0]
        if len(worker.tickets) >= share:
            heappop(free)
        elif len(worker.tickets) > count:
            heapreplace(free, (len(worker.tickets), number, worker))
        else:
            return worker
    return None


def devices_of(number: int, ranks: int, devices: Sequence[str]) -> str:
    """Return the devices of that worker, with commas between; processors are one device."""
    places = range(number * ranks, (number + 1) * ranks)
    return ",".join(dict.fromkeys(devices[place % len(devices)] for place in places))


def check_completion(where: str, ticket: Ticket, identity: str, completion: Completion) -> None:
    """Raise an error for a completion of another request, or by weights of another version."""
    if identity != ticket.identity:
        raise InvariantError(
            "a completion was made for another request",
            where=where,
            found=identity,
            expected=ticket.identity,
            next="a bug: it is not trained; please report it",
        )
    paused, expected = ticket.request.resume_from, ticket.queue.version
    versions = completion.weight_versions[0 if paused is None else len(paused.tokens) :]
    if (versions != expected).any():
        raise UserError(
            "a completion was sampled by other weights than those applied",
            where=where,
            found=f"tokens of version {sorted(set(versions.tolist()))}",
            expected=f"version {expected}",
        )


def identity_of(request: Request) -> str:
    """Hash the prompt, the address of the draws, and the tokens to go on from, to hex."""
    sampled = np.zeros(0, np.int64) if request.resume_from is None else request.resume_from.tokens
    digest = hashlib.sha256(
        f"{request.key} {request.num_sampled} {len(request.prompt)} {len(sampled)} ".encode()
    )
    digest.update(request.prompt.astype("<i8").tobytes())
    digest.update(sampled.astype("<i8").tobytes())
    return digest.hexdigest()
