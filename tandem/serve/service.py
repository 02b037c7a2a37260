"""The engine for many clients at once: one thread steps it, an event loop waits for its updates.

    event loop                                                  engine thread
    ----------                                                  -------------
    submit(requests) --admit--+                            +--> _run_commands: waits there
    ask(question) ------------+--> inbox (a SimpleQueue) --+    while the engine has no work
    Generation.cancel --------+                            |    |
    stop --None---------------+                                 v
                                                                engine.step()
    async for updates in generation <-+                         |
    await ask(...)                  <-+- call_soon_threadsafe --+ _deliver, one call a pass

    who            takes                    waits for             unblocked by
    submit, ask    the answer               its future            the thread's answer; _end
    Generation     the updates of a pass    its queue             _deliver; _end
    engine thread  commands, then one step  the inbox, when idle  any command; None ends it
    stop           -                        the thread, join_s    the end of the pass that runs

Everything but the inbox belongs to one side: the engine and `_live` to the thread, the rest to the
loop. Data that crosses is copied. When the engine raises, or the server stops, _end gives
EngineStopped to every client that waits, and to all later ones.
"""

import asyncio
import logging
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from tandem.engine.prompt_scores import PromptScores
from tandem.engine.scheduler import RunningSequence
from tandem.serve.openai import ApiError
from tandem.types import Completion, Request

logger = logging.getLogger(__name__)

JOIN_S = 5.0

T = TypeVar("T")


class ServedEngine(Protocol):
    """The engine of a service. Its methods are called from the engine thread, weight_hash from any
    thread."""

    weight_version: int

    @property
    def has_work(self) -> bool: ...

    def submit(self, request: Request) -> RunningSequence: ...

    def cancel(self, sequence: RunningSequence) -> None: ...

    def step(self) -> list[RunningSequence]: ...

    def stats(self) -> dict[str, float]: ...

    def weight_hash(self) -> str: ...


class EngineStopped(ApiError):
    """The engine has stopped: it failed, or the server stops."""

    def __init__(self, reason: str):
        super().__init__(503, reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The new tokens of a choice (a request of a generation) since its last update."""

    choice: int
    tokens: list[int]
    logprobs: list[float]  # nats
    weight_versions: list[int]
    top: list[tuple[list[int], list[float]]]  # likeliest tokens of each position, if asked for
    completion: Completion | None  # set in the last one
    prompt_scores: Sequence[PromptScores] = ()  # in the last one, if asked for


@dataclass(slots=True)
class _Live:
    """A request that runs, on the engine thread."""

    generation: "Generation"
    choice: int
    sent: int = 0  # tokens that were delivered

    def update(self, sequence: RunningSequence) -> Update:
        new = slice(self.sent, len(sequence.tokens))
        self.sent = len(sequence.tokens)
        return Update(
            choice=self.choice,
            tokens=sequence.tokens[new],
            logprobs=sequence.logprobs[new],
            weight_versions=sequence.weight_versions[new],
            top=sequence.top[new],
            completion=sequence.completion,
            prompt_scores=sequence.prompt_scores if sequence.completion is not None else (),
        )


class Generation:
    """Requests that run together for one client. Iterate over the updates, and cancel at the end in
    any case."""

    def __init__(self, service: "EngineService", requests: Sequence[Request]):
        self.requests = requests
        self._service = service
        self._unfinished = len(requests)
        # a text: the reason why there are no more
        self._updates: asyncio.Queue[list[Update] | str] = asyncio.Queue()

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> list[Update]:
        """Return the updates of a pass, at least one. Raises EngineStopped."""
        if not self._unfinished:
            raise StopAsyncIteration
        updates = await self._updates.get()
        if isinstance(updates, str):
            raise EngineStopped(updates)
        self._unfinished -= sum(update.completion is not None for update in updates)
        return updates

    def deliver(self, updates: list[Update] | str) -> None:
        self._updates.put_nowait(updates)

    def cancel(self) -> None:
        """Free the requests that still run."""
        self._service.cancel(self)


class EngineService:
    """Engine in a thread of its own. The event loop that started it calls every method. join_s: how
    long `stop` waits for the pass under way."""

    def __init__(self, engine: ServedEngine, *, join_s: float = JOIN_S):
        self.stopped = ""  # the reason, once it has
        self._engine, self._join_s = engine, join_s
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._live: dict[RunningSequence, _Live] = {}
        self._generations: set[Generation] = set()
        self._questions: set[asyncio.Future[Any]] = set()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # ---- event loop

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Refuse new requests, end the running ones, and wait for the thread."""
        self._end("the server is stopping")
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join, self._join_s)
        if self._thread.is_alive():
            logger.warning(
                "the engine is still in a pass after %g seconds and is left behind", self._join_s
            )

    async def submit(self, requests: Sequence[Request]) -> Generation:
        """Take all of the requests or none. Raises EngineStopped and the errors of
        engine.submit."""
        generation = Generation(self, requests)
        self._generations.add(generation)
        admitted = False
        try:
            await self.ask(partial(self._admit, generation))
            admitted = True
        finally:  # also when the client left before the answer came
            if not admitted:
                self.cancel(generation)
        return generation

    def cancel(self, generation: Generation) -> None:
        if generation in self._generations:
            self._generations.remove(generation)

            def drop() -> None:  # on the engine thread
                for sequence, live in list(self._live.items()):
                    if live.generation is generation:
                        del self._live[sequence]
                        self._engine.cancel(sequence)

            self._inbox.put(drop)

    async def ask(self, question: Callable[[ServedEngine], T]) -> T:
        """Call question(engine) between two passes. Raises its errors, and EngineStopped."""
        if self.stopped:
            raise EngineStopped(self.stopped)
        future: asyncio.Future[T] = self._loop.create_future()
        self._questions.add(future)

        def answer() -> None:  # on the engine thread
            try:
                settle = partial(future.set_result, question(self._engine))
            except Exception as error:  # belongs to the client; the engine goes on
                settle = partial(future.set_exception, error)
            self._loop.call_soon_threadsafe(_settle, settle, future)

        self._inbox.put(answer)
        try:
            return await future
        finally:
            self._questions.discard(future)

    def _end(self, reason: str) -> None:
        """Raise EngineStopped in every client, now and later; the first reason stands."""
        if self.stopped:
            return
        self.stopped = reason
        for future in self._questions:
            _settle(partial(future.set_exception, EngineStopped(reason)), future)
        for generation in self._generations:
            generation.deliver(reason)
        self._generations.clear()

    # ---- engine thread

    def _run(self) -> None:
        try:
            while self._run_commands():
                self._deliver(self._engine.step())
            for sequence in self._live:
                self._engine.cancel(sequence)
        # clients must not wait for ever after a failure of the engine
        except Exception as error:
            logger.exception("the engine failed")
            reason = f"the engine failed: {type(error).__name__}: {error}"
            self._loop.call_soon_threadsafe(self._end, reason)

    def _run_commands(self) -> bool:
        """Run the waiting commands, and wait for one while the engine has no work; return False if
        told to stop."""
        # later commands wait for a pass, so that questions cannot stop generation
        waiting = self._inbox.qsize()
        while waiting or not self._engine.has_work:
            waiting = max(waiting - 1, 0)
            command = self._inbox.get()
            if command is None:
                return False
            command()
        return True

    def _admit(self, generation: Generation, engine: ServedEngine) -> None:
        with ExitStack() as undo:
            sequences = []
            for request in generation.requests:
                sequences.append(engine.submit(request))
                undo.callback(engine.cancel, sequences[-1])
            undo.pop_all()
        for choice, sequence in enumerate(sequences):
            self._live[sequence] = _Live(generation, choice)

    def _deliver(self, sequences: Sequence[RunningSequence]) -> None:
        updates: defaultdict[Generation, list[Update]] = defaultdict(list)
        for sequence in sequences:
            if sequence not in self._live:
                continue  # the engine's owner runs requests of its own beside ours
            live = self._live[sequence]
            updates[live.generation].append(live.update(sequence))
            if sequence.completion is not None:
                del self._live[sequence]

        def hand_out() -> None:  # in the event loop
            for generation, new in updates.items():
                if generation in self._generations:  # not cancelled meanwhile
                    generation.deliver(new)

        if updates:
            self._loop.call_soon_threadsafe(hand_out)


def _settle(settle: Callable[[], None], future: asyncio.Future[T]) -> None:
    """Settle a future, unless its client has left."""
    if not future.done():
        settle()
