"""The engine for many clients at once: one thread steps it, an event loop waits for its updates.

    event loop                            engine thread, one call after the other
    ----------                            ---------------------------------------
    submit(requests) ----- _admit ------> engine.submit
    ask(question) -----------------------> question(engine)
    Generation.cancel ---- drop --------> engine.cancel
    _step, as long as      _pass -------> engine.step()
    there is work    <---- updates -----
    async for updates in generation <- _step

    who            takes                    waits for             unblocked by
    submit, ask    the answer               its future            the thread's answer
    Generation     the updates of a pass    its queue             _step; _end
    _step          updates                  an event, when idle   submit and ask
    stop           -                        the thread, JOIN_S    the end of the pass that runs

The engine and `_live` belong to the thread, the rest to the loop; but any thread may take its
weight_hash. Data that crosses is copied. When
the engine raises, or the server stops, _end gives EngineStopped to every client that waits, and to
all later ones.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

from tandem.engine.engine import Engine
from tandem.engine.prompt_scores import PromptScores
from tandem.engine.scheduler import RunningSequence
from tandem.runtime.threads import CallThread
from tandem.serve.openai import ApiError
from tandem.types import Completion, Request

logger = logging.getLogger(__name__)

JOIN_S = 5.0  # that `stop` waits for the pass under way

T = TypeVar("T")


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
        self.updates: asyncio.Queue[list[Update] | str] = asyncio.Queue()

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> list[Update]:
        """Return the updates of a pass, at least one. Raises EngineStopped."""
        if not self._unfinished:
            raise StopAsyncIteration
        updates = await self.updates.get()
        if isinstance(updates, str):
            raise EngineStopped(updates)
        self._unfinished -= sum(update.completion is not None for update in updates)
        return updates

    def cancel(self) -> None:
        """Free the requests that still run."""
        self._service.cancel(self)


class EngineService:
    """Engine in a thread of its own. The event loop that started it calls every method."""

    def __init__(self, engine: Engine):
        self.stopped = ""  # the reason, once it has
        self._engine = engine
        self._thread, self._work = CallThread("engine"), asyncio.Event()
        self._live: dict[RunningSequence, _Live] = {}
        self._generations: set[Generation] = set()

    # ---- event loop

    async def start(self) -> None:
        self._stepping = asyncio.create_task(self._step())

    async def stop(self) -> None:
        """Refuse new requests, end the running ones, and wait for the thread."""
        self._end("the server is stopping")
        self._stepping.cancel()
        self._thread.run(self._drop, lambda live: True)
        if not await asyncio.to_thread(self._thread.end, JOIN_S):
            logger.warning(
                "the engine is still in a pass after %g seconds and is left behind", JOIN_S
            )

    async def submit(self, requests: Sequence[Request]) -> Generation:
        """Take all of the requests or none. Raises EngineStopped and the errors of
        engine.submit."""
        generation = Generation(self, requests)
        self._generations.add(generation)
        with ExitStack() as undo:  # also when the client left before the answer came
            undo.callback(self.cancel, generation)
            await self.ask(lambda engine: self._admit(generation, engine))
            if self.stopped:  # meanwhile
                raise EngineStopped(self.stopped)
            undo.pop_all()
        return generation

    def cancel(self, generation: Generation) -> None:
        if generation in self._generations:
            self._generations.remove(generation)
            self._thread.run(self._drop, lambda live: live.generation is generation)

    async def ask(self, question: Callable[[Engine], T]) -> T:
        """Call question(engine) between two passes. Raises its errors, and EngineStopped."""
        if self.stopped:
            raise EngineStopped(self.stopped)
        answer: asyncio.Future[T] = self._thread.run(question, self._engine)
        try:
            return await answer
        finally:
            self._work.set()

    async def _step(self) -> None:
        """Run passes and hand out their updates. Calls that came meanwhile run between two
        passes."""
        while True:
            await self._work.wait()
            self._work.clear()
            try:
                updates = await self._thread.run(self._pass)
            # clients must not wait for ever after a failure of the engine
            except Exception as error:
                logger.exception("the engine failed")
                return self._end(f"the engine failed: {type(error).__name__}: {error}")
            if updates is None:
                continue
            self._work.set()
            for generation, new in updates.items():
                if generation in self._generations:  # not cancelled meanwhile
                    generation.updates.put_nowait(new)

    def _end(self, reason: str) -> None:
        """Raise EngineStopped in every client, now and later; the first reason stands."""
        if self.stopped:
            return
        self.stopped = reason
        for generation in self._generations:
            generation.updates.put_nowait(reason)
        self._generations.clear()

    # ---- engine thread

    def _pass(self) -> dict[Generation, list[Update]] | None:
        """Return the updates of a pass; None without work."""
        if not self._engine.has_work:
            return None
        updates: defaultdict[Generation, list[Update]] = defaultdict(list)
        for sequence in self._engine.step():
            if sequence not in self._live:
                continue  # the engine's owner runs requests of its own beside ours
            live = self._live[sequence]
            updates[live.generation].append(live.update(sequence))
            if sequence.completion is not None:
                del self._live[sequence]
        return updates

    def _admit(self, generation: Generation, engine: Engine) -> None:
        with ExitStack() as undo:
            sequences = []
            for request in generation.requests:
                sequences.append(engine.submit(request))
                undo.callback(engine.cancel, sequences[-1])
            undo.pop_all()
        for choice, sequence in enumerate(sequences):
            self._live[sequence] = _Live(generation, choice)

    def _drop(self, which: Callable[[_Live], bool]) -> None:
        for sequence, live in list(self._live.items()):
            if which(live):
                del self._live[sequence]
                self._engine.cancel(sequence)
