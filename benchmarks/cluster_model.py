"""Section "model" of results/cluster.md: rollouts of many replicas by simulation: the real dispatcher
(engine/dispatch.py) and the rules of lanes (step_async.py) on a virtual clock.

    python benchmarks/cluster_model.py [8 64 512]     prints the rows

Not real are the replicas and the trainer: a replica runs up to SLOTS sequences at a constant speed
each, takes LOAD_S to load weights, and the trainer takes as long for a step as full replicas do for
its tokens. Lengths are log-normal (a stated distribution, of no recorded run). Real are the
decisions, and their seconds of this machine's CPU, with those of the messages (protocol.py).
"""

import heapq
import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np

from tandem.engine.dispatch import Dispatcher, RequestQueue, Ticket, identity_of
from tandem.rollout_workers.protocol import completion_message, read_completion, request_message
from tandem.types import Completion, Request, SamplingParams
from tandem.workers.channel import decode, encode

REPLICAS = (8, 64, 512)
STALENESS = (0, 1, 2)
SLOTS = 64  # sequences of a replica, and episodes of a step for each replica
TOKEN_S, LOAD_S = 0.02, 5.0  # 50 tokens/s of each sequence; new weights
MEDIAN, SIGMA, LONGEST = 2_000, 0.7, 16_000  # tokens of an episode
GROUP, PROMPT = 8, 256  # episodes of a prompt, tokens of it
STEPS, WARM = 9, 3  # the first ones are left out
SEED = 0

Row = tuple[str, str, str]


@dataclass(eq=False)
class Replica:
    """A worker as the dispatcher sees it."""

    number: int
    target: int = -1
    runs_target: bool = False
    ready: bool = True
    tickets: dict[int, Ticket] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Measurements of a simulation after the first steps."""

    slots_in_use: float  # share of all slots, mean over time
    trainer_at_work: float  # share of the time
    requests_per_s: float  # of virtual time
    dispatch_s: float  # of this machine's CPU, a request


class Simulation:
    """Steps of a run on a virtual clock. lanes: steps that are rolled out at once."""

    def __init__(self, replicas: int, staleness: int, lanes: int):
        self.staleness, self.lanes = staleness, lanes
        self.workers = [Replica(number) for number in range(replicas)]
        self.dispatcher: Dispatcher[Replica] = Dispatcher(SLOTS, PROMPT + LONGEST)
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.order, self.numbers, self.now = itertools.count(), itertools.count(), 0.0
        self.left: Counter[int] = Counter()  # requests of a step that have not ended
        self.step_of: dict[RequestQueue, int] = {}
        self.begun = self.ended = self.version = 0  # steps begun, ended in order; weights published
        self.rolled: set[int] = set()
        self.is_training = False
        self.draws = np.random.default_rng(SEED)
        mean = float(np.mean(self.lengths(100_000)))
        self.trainer_s = mean * TOKEN_S  # replicas * SLOTS episodes at replicas * SLOTS / TOKEN_S
        self.in_use = self.slot_s = self.train_s = self.cpu_s = 0.0
        self.requests = 0
        self.marks: list[tuple[float, float, float, int]] = []  # at each publication

    def run(self) -> Outcome:
        self.begin()
        while self.version < STEPS:
            moment, _, act, arguments = heapq.heappop(self.events)
            self.slot_s += self.in_use * (moment - self.now)
            self.now = moment
            act(*arguments)
        (t0, slots0, train0, n0), (t1, slots1, train1, n1) = self.marks[WARM - 1], self.marks[-1]
        return Outcome(
            slots_in_use=(slots1 - slots0) / (t1 - t0) / (SLOTS * len(self.workers)),
            trainer_at_work=(train1 - train0) / (t1 - t0),
            requests_per_s=(n1 - n0) / (t1 - t0),
            dispatch_s=self.cpu_s / self.requests,
        )

    def at(self, seconds: float, act: Callable[..., None], *arguments: Any) -> None:
        """Have something happen after so many seconds."""
        heapq.heappush(self.events, (self.now + seconds, next(self.order), act, arguments))

    def lengths(self, count: int) -> Any:
        return np.minimum(self.draws.lognormal(np.log(MEDIAN), SIGMA, count), LONGEST).astype(int)

    def begin(self) -> None:
        """Begin every step whose weights are there and whose lane is free."""
        while (
            self.begun < self.ended + self.lanes
            and self.version >= max(0, self.begun - self.staleness)
            and self.begun < STEPS + self.staleness
        ):
            step = self.begun
            queue = self.dispatcher.open(max(0, step - self.staleness), step % self.lanes)
            self.step_of[queue], self.begun = step, step + 1
            self.left[step] = SLOTS * len(self.workers)
            tickets = [self.ticket(queue, n // GROUP) for n in range(self.left[step])]
            start = time.process_time()
            for ticket in tickets:
                self.dispatcher.add(ticket)
            self.cpu_s += time.process_time() - start
            self.requests += len(tickets)
        self.dispatch()

    def ticket(self, queue: RequestQueue, prompt: int) -> Ticket:
        request = Request(
            key=next(self.numbers),
            prompt=np.full(PROMPT, prompt),
            params=SamplingParams(max_new_tokens=LONGEST),
        )
        return self.dispatcher.ticket(request, queue)

    def dispatch(self) -> None:
        start = time.process_time()
        moves, given = self.dispatcher.switches(self.workers), []
        for version, movers in moves.items():
            for worker in movers:
                worker.target, worker.runs_target = version, False
        given = self.dispatcher.assign(self.workers)
        self.cpu_s += time.process_time() - start
        for version, movers in moves.items():
            for worker in movers:
                self.at(LOAD_S, self.on_loaded, worker, version)
        self.in_use += len(given)
        for (worker, ticket), length in zip(given, self.lengths(len(given)), strict=True):
            self.at(length * TOKEN_S, self.on_completion, worker, ticket)

    def on_loaded(self, worker: Replica, version: int) -> None:
        if worker.target == version:
            worker.runs_target = True
            self.dispatch()

    def on_completion(self, worker: Replica, ticket: Ticket) -> None:
        del worker.tickets[ticket.number]
        self.in_use -= 1
        step = self.step_of[ticket.queue]
        self.left[step] -= 1
        if not self.left[step]:
            self.dispatcher.close(ticket.queue)
            self.rolled.add(step)
            while self.ended in self.rolled:
                self.ended += 1
            self.train()
            self.begin()
        self.dispatch()

    def train(self) -> None:
        if not self.is_training and self.version < self.ended:
            self.is_training = True
            self.at(self.trainer_s, self.on_published)

    def on_published(self) -> None:
        self.is_training, self.train_s = False, self.train_s + self.trainer_s
        self.version += 1
        self.marks.append((self.now, self.slot_s, self.train_s, self.requests))
        self.train()
        self.begin()


def message_s() -> float:
    """Measure the CPU seconds of the messages of a request of MEDIAN tokens on the driver."""
    request = Request(
        key=1, prompt=np.arange(PROMPT), params=SamplingParams(max_new_tokens=LONGEST)
    )
    completion = Completion(
        tokens=np.arange(MEDIAN),
        logprobs=np.zeros(MEDIAN, np.float32),
        weight_versions=np.zeros(MEDIAN, np.int32),
        text="x" * 4 * MEDIAN,
        stop_reason="stop",
    )
    answer, count = encode(completion_message(1, "", completion)), 300
    start = time.process_time()
    for _ in range(count):
        identity_of(request)
        encode(request_message(1, request))
        read_completion(decode(answer))
    return (time.process_time() - start) / count


def run(replicas: tuple[int, ...] = REPLICAS) -> list[Row]:
    """Return rows (what, result, how)."""
    message, rows = message_s(), list[Row]()
    busiest: dict[int, Outcome] = {}
    for count in replicas:
        outcomes = []
        for staleness in STALENESS:
            after = Simulation(count, staleness, 1).run()
            beside = Simulation(count, staleness, staleness + 1).run() if staleness else after
            outcomes.append(beside)
            rows.append(utilisation(count, staleness, beside, after))
            print(rows[-1], flush=True)
        busiest[count] = max(outcomes, key=lambda outcome: outcome.requests_per_s)
        rows.append(driver(count, busiest[count], message))
        print(rows[-1], flush=True)
    return [*rows, limit(busiest, message)] if len(busiest) > 1 else rows


def utilisation(count: int, staleness: int, beside: Outcome, after: Outcome) -> Row:
    speed = beside.requests_per_s / after.requests_per_s
    gain = f"; {speed:.2f} times the steps of step after step" if staleness else ""
    return (
        f"{count} replicas, staleness {staleness}",
        f"{beside.slots_in_use:.0%} of all slots in use, trainer at work for "
        f"{beside.trainer_at_work:.0%} of the time{gain}",
        f"{count * SLOTS:,} episodes a step, staleness is exactly {staleness}",
    )


def driver(count: int, seen: Outcome, message: float) -> Row:
    cpu_s = seen.dispatch_s + message
    return (
        f"{count} replicas: the driver",
        f"{seen.dispatch_s * 1e6:.0f} us of dispatch and {message * 1e6:.0f} us of messages a "
        f"request: {cpu_s * seen.requests_per_s:.1%} of one core at {seen.requests_per_s:,.0f} "
        "requests/s",
        "CPU time of the real code here, a decision for each message",
    )


def limit(busiest: dict[int, Outcome], message: float) -> Row:
    """Return the row of the replicas that fill the driver's core, by a line through its dispatch."""
    counts = np.array(list(busiest))
    slope, base = np.polyfit(counts, [seen.dispatch_s for seen in busiest.values()], 1)
    rate = float(np.mean([seen.requests_per_s / count for count, seen in busiest.items()]))
    full = np.roots([slope * rate, (base + message) * rate, -1.0])
    most = float(max(full))
    return (
        "the driver is the limit",
        f"at about {most:,.0f} such replicas and {most * rate:,.0f} requests/s",
        f"a line through the dispatch of {', '.join(map(str, busiest))} replicas, "
        f"{slope * 1e6:.2f} us a replica; not simulated",
    )


if __name__ == "__main__":
    run(tuple(int(count) for count in sys.argv[1:]) or REPLICAS)
