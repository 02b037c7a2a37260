"""Rollout workers: requests go to engines in processes of their own, for callers with a Client each
(client.py), and so for several versions of the weights at once.

    the thread "rollout workers"                           worker process 0 .. count - 1 (worker.py)
    ----------------------------                           ---------------------------------------
    what clients `post`: queues, tickets                    one thread, one engine, own weights
    step    _dispatch     queue -> tickets of a worker --> {"request": 7}: submit, Engine.step
            _on_message    completion, signs of life  <--  {"completion": 7}, {"alive": true}
            _lose      silence: SIGKILL, a new worker, its tickets back in front
    _dispatch              weights of open queues     -->  receive, load, hash
            _on_applied    it must be the trainer's   <--  {"applied": 4, "hash": "9f86..."}
              or once more, then a new worker         <--  {"applied": 4, "failed": "..."}

step waits for the workers' sockets, at most WAIT_S, and is woken by `post`. It goes on after an
answer, the end of a socket, or silence beyond the limit, and then kills the worker. An error ends
the thread, and every client raises it.

A worker is starting, then syncing (it loads a version), and gets requests of that version only
after its hash was right. dispatch.py decides who runs which version and gets which request. A
request of a lost worker goes to another unchanged, with the address of its draws, so the completion
has the same bits; chance decides only which worker makes it.

On Linux workers of this machine end with the thread that started the first, which made the pool.
"""

import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from tandem.engine.dispatch import Dispatcher, Ticket, check_completion, devices_of
from tandem.model import custom_code
from tandem.rollout_workers.protocol import read_completion, request_message
from tandem.runtime.errors import UserError
from tandem.workers.channel import Message, ProtocolError, read_error
from tandem.workers.host import Host, OpenHost
from tandem.workers.pool import Limits, Pool, RestartLimit, Worker

if TYPE_CHECKING:  # nothing here needs torch
    from tandem.weights.shared import SharedWeights

WAIT_S = 0.05  # in one step
COMMAND = (sys.executable, "-P", "-m", "tandem.rollout_workers.worker")
# freed memory stays with the process, as page faults of fresh tensors cost a tenth of a small step
ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}

T = TypeVar("T")
Gaps = list[Future[float]]  # one for each check that a worker was asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """The engine of each worker.

    longest: most tokens of one sequence that an engine with cache_mb places, as Engine.longest.
    Worker n is on tensor_parallel of the devices, in turn. release_cache: it rests once its step's
    check is made. options: of another engine, by its own names.
    """

    model_path: str
    devices: Sequence[str] = ("cpu",)
    dtype: str = "float32"
    splits: int = 1
    tensor_parallel: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    matmul: str = "plain"
    threads: int = 1
    cache_mb: int
    max_batch: int
    longest: int
    record_experts: bool = False
    release_cache: bool = False

    def start_of(self, number: int) -> Message:
        """Return what the worker of that number is to load."""
        return asdict(self) | {
            "device": devices_of(number, self.tensor_parallel, self.devices),
            "cache_bytes": self.cache_mb << 20,
            "trust_remote_code": custom_code.is_allowed(),
        }


class WorkerProcess(Worker):
    """A worker, and what the pool has told it. Implements dispatch.Worker. restarts: losses of
    those that had its number."""

    def __init__(self, number: int, host: Host, restarts: int = 0):
        super().__init__("rollout worker", number, host)
        self.restarts = restarts
        self.syncing: deque[int] = deque()  # versions that it was told to load and has not answered
        self.offered_at = 0.0  # the last of them, by the monotonic clock
        self.target = -1  # the version that it runs or loads
        self.version = -1  # of the weights that it runs, by its own hash
        self.retried = -1  # the version that it was offered again after a failure
        self.tickets: dict[int, Ticket] = {}  # given and not answered, cancelled ones included
        self.checks: deque[Future[float]] = deque()  # asked for and not answered

    @property
    def runs_target(self) -> bool:
        return self.ready and not self.syncing and 0 <= self.version == self.target

    @property
    def state(self) -> str:
        if self.ready and not self.runs_target:
            return "syncing"
        return "serving" if self.runs_target and self.tickets else super().state

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "version": self.version, "restarts": self.restarts}


class Workers(Pool[WorkerProcess]):
    """Pool of rollout workers and its thread, a context; weights reach them with the first
    `Client.apply`. Any thread may call the methods above "the thread".

    spec: of each one's engine. limits.restarts: most workers that may be lost; the next one ends
    the run with a UserError. Others are those of Pool.
    """

    role, thread = "rollout worker", "rollout workers"

    def __init__(
        self,
        spec: EngineSpec,
        weights: "SharedWeights",
        open_host: OpenHost,
        *,
        count: int,
        limits: Limits,
        report: Callable[[str], None],
    ):
        super().__init__(open_host, limits, report)
        self.longest, self.restarts = spec.longest, RestartLimit(limits.restarts)
        self.last_life = time.monotonic()  # of a worker at work
        self.dispatcher: Dispatcher[WorkerProcess] = Dispatcher(spec.max_batch, spec.longest)
        self._spec, self._weights = spec, weights
        # checks to make before a worker leaves a version
        self._watched: list[tuple[int, Gaps]] = []
        self._lost: Counter[int] = Counter()  # restarts, by the worker's number
        self._posted: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        for number in range(count):
            self._begin(number)
        self.start()

    def call(self, function: Callable[[], T]) -> T:
        """Have the thread call a function; return its result. Raises its error, or the pool's."""
        future = self.post(function)
        while True:
            with suppress(TimeoutError):
                return future.result(WAIT_S)
            self.require_open()

    def post(self, function: Callable[[], T]) -> "Future[T]":
        """Have the thread call a function soon."""
        future: Future[T] = Future()
        self._posted.put((future, function))
        self.wake()
        return future

    # ---------------------------------------------------------------- the thread

    def step(self) -> None:
        """Do what was posted, dispatch, and wait a moment for messages."""
        with suppress(Empty):
            while True:
                future, function = self._posted.get_nowait()
                try:
                    future.set_result(function())
                except Exception as error:  # who has posted it raises it
                    future.set_exception(error)
        self._dispatch()
        self._listen(WAIT_S)

    def cancel(self, ticket: Ticket) -> None:
        """End a request now, with an empty completion; an ended one stays as it is."""
        if self.dispatcher.cancel(ticket):
            for worker in self._workers.values():
                if ticket.number in worker.tickets:
                    self._send(worker, {"cancel": ticket.number})

    def watch(self, version: int, gaps: Gaps) -> None:
        """Have each worker make a check before it leaves that version, until `ask`."""
        self._watched.append((version, gaps))

    def ask(self, version: int, gaps: Gaps) -> None:
        """Have the workers that still run that version make a check (Engine.logprob_gap)."""
        self._watched = [one for one in self._watched if one[1] is not gaps]
        running = [one for one in self.workers if one.runs_target and one.version == version]
        gaps += map(self._check, running)

    def _check(self, worker: WorkerProcess) -> Future[float]:
        worker.checks.append(gap := Future[float]())
        self._send(worker, {"check": worker.version})
        return gap

    def forget_versions(self) -> None:
        """Have every worker load its next version, whichever that is."""
        for worker in self.workers:
            worker.target = worker.version = -1

    # ---------------------------------------------------------------- to a worker

    def _dispatch(self) -> None:
        """Have workers load the weights, and send them the requests, that are theirs now."""
        for version, movers in self.dispatcher.switches(self.workers).items():
            self._sync(version, movers)
        for worker, ticket in self.dispatcher.assign(self.workers):
            self._send(worker, request_message(ticket.number, ticket.request))

    def _sync(self, version: int, workers: Sequence[WorkerProcess]) -> None:
        """Offer the weights to workers; what they run is unknown until the hash is right."""
        for worker in workers:
            for watched, gaps in self._watched:
                if watched == worker.version:
                    gaps.append(self._check(worker))
        offers = self._weights.offer(version, workers)
        for worker, (source, descriptor) in zip(workers, offers, strict=True):
            worker.syncing.append(version)
            worker.target, worker.version, worker.offered_at = version, -1, time.monotonic()
            beside = () if descriptor < 0 else (descriptor,)
            self._send(worker, {"apply": version, "from": source}, *beside)

    # ---------------------------------------------------------------- processes

    def _make(self, number: int, host: Host) -> WorkerProcess:
        return WorkerProcess(number, host, self._lost[number])

    def _start_of(self, worker: WorkerProcess) -> Message:
        return {**self._spec.start_of(worker.number), "layout": self._weights.layout.parts}

    def _lose(self, worker: WorkerProcess, reason: str) -> None:
        """Kill a worker, start another in its place, and put its requests back in front."""
        lost = f"{worker} was lost while {worker.state}: {reason}"
        last_words = worker.host.last_words()
        self._end(worker)
        for gap in worker.checks:  # it is left out
            gap.set_result(0.0)
        back = self.dispatcher.put_back(worker)
        self._lost[worker.number] += 1
        if not self.restarts.spend():
            raise UserError(
                "rollout workers end again and again",
                where=lost,
                found=last_words,
                expected=f"at most {self.restarts.limit} restarts in a run (rollout.restarts)",
                next="look at what the worker wrote last; the same command resumes the run",
            )
        words = [line for line in last_words.splitlines() if line.strip() not in lost]
        self._report(
            f"{lost}; restart {self.restarts.used} of {self.restarts.limit}, "
            f"{back} of its requests are served again"
            + "\n".join(["; last words:", *words] if words else [])
        )
        self._begin(worker.number)

    # ---------------------------------------------------------------- from a worker

    def _on_message(self, worker: WorkerProcess, message: Message) -> None:
        if message != {"alive": False}:  # it is at work
            self.last_life = time.monotonic()
        match message:
            case {"alive": bool()}:
                pass
            case {"ready": True} if not worker.ready:
                worker.ready = True
            case {"applied": int(version)} if worker.syncing and version == worker.syncing[0]:
                worker.syncing.popleft()
                if not worker.syncing:  # else another one was sent meanwhile
                    self._on_applied(worker, version, message)
            case {"completion": int(number), "identity": str(identity)} if number in worker.tickets:
                self._on_completion(worker, worker.tickets[number], identity, message)
            case {"cancelled": int(number)} if (
                number in worker.tickets and worker.tickets[number].completion
            ):
                del worker.tickets[number]
            case {"checked": int(), "gap": float(gap)} if worker.checks:
                worker.checks.popleft().set_result(gap)
            case {"error": {"what": _}}:
                raise read_error(message)
            case _:
                raise ProtocolError(f"not an answer: {str(message)[:200]}")

    def _on_applied(self, worker: WorkerProcess, version: int, message: Message) -> None:
        if version not in self.dispatcher.versions:  # its memory may have been written again
            worker.target = -1
            return
        expected = self._weights.hash_of(version)
        match message:
            case {"hash": str(digest), "differ": list(names)}:
                if digest != expected:
                    where = f"{worker}, weight version {version}"
                    raise UserError(
                        "the engine's weights differ from the trainer's",
                        where=f"{where}: {', '.join(names)}" if names else where,
                        found=digest,
                        expected=expected,
                        next="no token was sampled with them; the same command resumes the run",
                    )
                worker.version = version
                self._weights.loaded(version, time.monotonic() - worker.offered_at)
            case {"failed": str(reason)} if worker.retried != version:
                self._report(f"{worker} did not get weights {version}, and tries again: {reason}")
                worker.retried = version
                self._sync(version, [worker])
            case _:
                reason = message.get("failed", str(message)[:200])
                self._lose(worker, f"it did not get weights {version}: {reason}")

    def _on_completion(
        self, worker: WorkerProcess, ticket: Ticket, identity: str, message: Message
    ) -> None:
        completion = read_completion(message)
        check_completion(f"{worker}, request {ticket.number}", ticket, identity, completion)
        del worker.tickets[ticket.number]
        worker.num_done += 1
        if ticket.completion is None:  # else it was cancelled meanwhile
            ticket.completion = completion
            if ticket.queue.ended is not None:
                ticket.queue.ended.put(ticket)
