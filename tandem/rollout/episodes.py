"""Act: problems -> episodes, token in, token out. Knows the engine as `Generate` and the chat as
`Renderer` only.

    environments' thread: an episode, a coroutine each   caller's thread: _pump
    --------------------------------------------------   ----------------------
    env.reset -> the prompt's tokens
    _generate: asks for a completion    -- inbox ->      engine.submit, engine.step(): one pass for all who generate
    waits for it                        <- future --     set when it has ended
    env.step(text) -> Observation, while others generate
    tokens += renderer.turn(messages), again from _generate; until done, or a limit

    The pump waits for the inbox when nobody generates, and before each pass lets the episodes that can go on do so (at most
    SETTLE_S). An episode waits for the pump, for its environment (at most env.timeout_s in all), and at first for its place
    among env.concurrency.

What is sampled is never tokenized again: a turn only appends. What an episode becomes depends on
its address, the weights and its environment, never on who else is under way or came first.

With a budget an episode pauses after so many tokens and is given back as it is; a later call goes
on with it (`begun`), in its environment if that is still there, otherwise in a new one brought to
the same place.
"""

import asyncio
import math
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tandem.config.schema import Env as EnvConfig
from tandem.envs.calls import Caller, EnvironmentFailed, describe, environment_loop, where_it_is
from tandem.rollout.episode_builder import Record
from tandem.runtime import watchdog
from tandem.runtime.errors import InvariantError, UserError
from tandem.types import (
    Array,
    Completion,
    Env,
    Episode,
    Generate,
    Group,
    Message,
    Observation,
    Problem,
    Renderer,
    Request,
    SamplingParams,
    Ticket,
)

CLOSE_S = 5.0  # for an environment to give back what it holds
ALIVE_S = 1.0  # between looks whether the environments' loop still answers
SETTLE_S = 0.05  # longest wait for episodes that can go on, before a pass without them
FAILED = ("error", "time")  # stop reasons of an episode whose environment failed

Ended = Callable[[int, Episode], None]  # (row of the problem, the episode), as soon as it has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvPool:
    """Where episodes play: a maker of environments, and the limits. Example: World(make=Env,
    limits=config.env)"""

    make: Callable[[], Env]
    limits: EnvConfig
    # of paused episodes, by their key
    alive: dict[int, tuple[Env, Caller]] = field(default_factory=dict)

    def close(self) -> None:
        """Give up the environments of episodes that will not go on."""
        closing = [
            asyncio.run_coroutine_threadsafe(_close(*self.alive.popitem()[1]), environment_loop())
            for _ in list(self.alive)
        ]
        for future in closing:
            with suppress(TimeoutError):  # the loop is blocked: it ends with the process
                future.result(CLOSE_S + ALIVE_S)


def run_episodes(
    groups: Sequence[Group],
    *,
    engine: Generate,
    renderer: Renderer,
    world: EnvPool,
    params: SamplingParams,
    ended: Ended | None = None,
    budget: int = 0,
) -> list[tuple[Episode, ...]]:
    """The groups' episodes, the paused ones played on; new_groups makes groups whose episodes have
    not begun.

    ended is called in the environments' thread, with each that ends now. budget: tokens that an
    episode samples before it pauses; 0: to its end. Raises UserError where the episodes of a
    problem begin differently.
    """
    rollout = _Rollout(
        [group.problem for group in groups], engine, renderer, world, params, ended, budget
    )
    episodes = iter(
        rollout.run(
            [(row, episode) for row, group in enumerate(groups) for episode in group.episodes]
        )
    )
    return [tuple(next(episodes) for _ in group.episodes) for group in groups]


Asked = tuple[Request, "asyncio.Future[Completion]"]


class _Rollout:
    """One call of run_episodes."""

    def __init__(
        self,
        problems: Sequence[Problem],
        engine: Generate,
        renderer: Renderer,
        world: EnvPool,
        params: SamplingParams,
        ended: Ended | None,
        budget: int,
    ):
        self.problems, self.engine, self.renderer, self.world = problems, engine, renderer, world
        self.limits, self.params, self.ended, self.budget = world.limits, params, ended, budget
        self.longest = min(self.limits.max_tokens or engine.longest, engine.longest)
        self._loop = environment_loop()
        # None: look whether all have ended
        self._inbox: queue.SimpleQueue[Asked | None] = queue.SimpleQueue()
        self._generating: dict[Ticket, asyncio.Future[Completion]] = {}
        self._prompts: dict[str, Array] = {}  # of chats that were rendered before
        self._beginnings: dict[int, Array] = {}  # by row
        # whether the loop has answered, and since when that is asked
        self._pulse, self._asked = threading.Event(), 0.0
        self._pulse.set()

    # ---- caller's thread

    def run(self, wanted: Sequence[tuple[int, Episode]]) -> list[Episode]:
        """The episodes, by (row of the problem, where it stands), at their end or at the next
        pause."""
        over = threading.Event()
        episodes = asyncio.run_coroutine_threadsafe(self._all(wanted, over), self._loop)
        episodes.add_done_callback(lambda _: self._inbox.put(None))
        try:
            self._pump(episodes)
            return episodes.result()
        finally:  # after Ctrl-C, too
            if not episodes.done():
                episodes.cancel()
                over.wait(CLOSE_S + ALIVE_S)
            for ticket in self._generating:
                self.engine.cancel(ticket)

    def _pump(self, episodes: "Future[list[Episode]]") -> None:
        while not episodes.done():
            self._take()
            if not self._generating:
                continue
            for ticket in self.engine.step():
                if ticket.completion is not None and ticket in self._generating:
                    self._loop.call_soon_threadsafe(
                        _settle, self._generating.pop(ticket), ticket.completion
                    )

    def _take(self) -> None:
        """Submit what was asked for, after the episodes that can go on have done so; waits for
        something to do."""
        if self._generating:
            settled = threading.Event()
            # twice soon: behind those whose completion is only being set
            self._loop.call_soon_threadsafe(self._loop.call_soon, settled.set)
            if not settled.wait(SETTLE_S):
                self._require_life()
        elif (asked := self._next()) is None:
            return
        else:
            self._submit(*asked)
            self._take()  # the others that ask at this moment
        with suppress(queue.Empty):
            while True:
                if (asked := self._inbox.get_nowait()) is not None:
                    self._submit(*asked)

    def _next(self) -> Asked | None:
        with watchdog.waits(
            of="environments", what="a turn to generate, or the end of the last episode"
        ):
            while True:
                try:
                    return self._inbox.get(timeout=ALIVE_S)
                except queue.Empty:
                    self._require_life()

    def _require_life(self) -> None:
        """The environments' loop must answer within env.timeout_s: what is `async` must not block.
        Raises UserError."""
        now = time.monotonic()
        if self._pulse.is_set():
            self._pulse.clear()
            self._asked = now
            self._loop.call_soon_threadsafe(self._pulse.set)
        elif now - self._asked > self.limits.timeout_s + ALIVE_S:
            raise UserError(
                "an environment blocks the event loop that all environments share",
                where=where_it_is(),
                found=f"no life for {now - self._asked:.0f} s, longer than env.timeout_s",
                expected="`async def` methods that await what takes time",
                next="make the method a plain `def`, which runs in a thread",
            )

    def _submit(self, request: Request, future: "asyncio.Future[Completion]") -> None:
        self._generating[self.engine.submit(request)] = future

    # ---- environments' thread

    async def _all(
        self, wanted: Sequence[tuple[int, Episode]], over: threading.Event
    ) -> list[Episode]:
        places = asyncio.Semaphore(self.limits.concurrency)
        tasks = [asyncio.create_task(self._play(row, episode, places)) for row, episode in wanted]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            over.set()

    async def _play(self, row: int, begun: Episode, places: asyncio.Semaphore) -> Episode:
        if begun.stop_reason != "paused":
            return begun
        async with places:
            episode = await self._episode(row, Record(begun))
        self._inbox.put(None)  # a sign of life for whoever waits for the environments
        if self.ended is not None and episode.stop_reason != "paused":
            self.ended(row, episode)
        return episode

    async def _episode(self, row: int, record: Record) -> Episode:
        stop_reason, error = "error", ""
        env, caller = self.world.alive.pop(record.key, (None, Caller(self.limits.timeout_s)))
        try:
            if env is None:
                env = self._made()
                await self._take_up(env, row, record, caller)
            stop_reason = await self._turns(env, row, record, caller)
        except TimeoutError:
            stop_reason, error = (
                "time",
                f"the environment took more than {self.limits.timeout_s} s (env.timeout_s)",
            )
        except EnvironmentFailed as failure:
            error = str(failure)
        finally:  # also when the rollout is given up
            if env is not None and stop_reason == "paused":
                self.world.alive[record.key] = (env, caller)
            elif env is not None:
                await _close(env, caller)
        episode = record.episode(stop_reason, error)
        return replace(episode, masked=stop_reason in FAILED and self.limits.on_error == "mask")

    def _made(self) -> Env:
        try:
            return self.world.make()
        except (Exception, SystemExit) as error:  # a user's constructor
            raise EnvironmentFailed(describe(error)) from error

    async def _take_up(self, env: Env, row: int, record: Record, caller: Caller) -> None:
        """Begin, or bring a new environment to where the episode stands: what was answered then
        counts, not what is now."""
        problem = self.problems[row]
        chat = await caller.call(env.reset, problem)
        if not record.length:
            if type(env) is not Env:  # a single turn gives nothing
                record.given["env"] = 0.0
            self._begin(row, record, chat, env)
        elif not env.stateless:
            for text in record.turns:
                await caller.call(env.step, text)

    async def _turns(self, env: Env, row: int, record: Record, caller: Caller) -> str:
        """Play until the end; returns the stop reason. Raises EnvironmentFailed, and TimeoutError
        past its time."""
        params, left = self.params, self.budget
        for turn in range(len(record.turns) + 1, self.limits.max_turns + 1):
            if self.budget and not left:
                return "paused"
            room = min(params.max_new_tokens, self.longest - record.length)
            before = len(record.began.tokens) if record.began else 0
            completion = await self._generate(record, room, left)
            left -= len(completion.tokens) - before
            if completion.stop_reason == "paused":
                record.began = completion
                return "paused"
            record.say(completion)
            if completion.stop_reason != "stop":
                return "length" if room == params.max_new_tokens else "tokens"
            observation = _checked(await caller.call(env.step, completion.text))
            record.hear(observation, self.limits.bad_thinking * malformed_thinking(completion.text))
            if observation.done:
                return "stop"
            if turn < self.limits.max_turns:
                answer = self._answer(completion, observation.messages)
                if record.length + len(answer) >= self.longest:
                    return "tokens"
                record.read(answer)
        return "turns"

    def _begin(self, row: int, record: Record, chat: Any, env: Env) -> None:
        if not _is_chat(chat):
            raise EnvironmentFailed(
                f"reset returned {_short(chat)}, expected a chat: messages with role and content"
            )
        if type(env) is not Env:
            record.opening, record.tools = tuple(chat), tuple(env.tools)
        cached = repr((chat, env.tools))
        if cached not in self._prompts:
            with _template_errors():
                self._prompts[cached] = self.renderer.prompts([chat], env.tools)[0]
        prompt = self._prompts[cached]
        if len(prompt) >= self.longest:
            raise EnvironmentFailed(
                f"a prompt of {len(prompt):,} tokens, where an episode has at most {self.longest:,}"
            )
        if not np.array_equal(prompt, self._beginnings.setdefault(row, prompt)):
            raise UserError(
                "the episodes of a problem begin differently",
                where=f"{type(env).__name__}.reset",
                found=f"two different prompts for problem {record.uid!r}",
                expected="one: advantages compare episodes that began alike",
                next="take randomness from the problem (its uid or metadata), not from a generator",
            )
        record.prompt_tokens = len(prompt)
        record.read(prompt)

    async def _generate(self, record: Record, room: int, max_tokens_now: int) -> Completion:
        """The record's next turn, or what comes of it before it pauses."""
        request = Request(
            key=record.key,
            prompt=record.tokens(),
            params=replace(self.params, max_new_tokens=room),
            drawn=record.drawn,
            begun=record.began,
            max_tokens_now=max_tokens_now,
        )
        future: asyncio.Future[Completion] = self._loop.create_future()
        self._inbox.put((request, future))
        completion = await future
        if record.began and not np.array_equal(
            completion.tokens[: len(record.began.tokens)], record.began.tokens
        ):
            raise InvariantError(
                "a turn that was paused went on with other tokens",
                where=f"problem {record.uid}",
                found="another beginning",
                expected="the tokens it had",
                next="report this",
            )
        return completion

    def _answer(self, completion: Completion, messages: Sequence[Message]) -> Array:
        """The tokens that come after a completion: the end of its turn only where it did not sample
        that itself."""
        with _template_errors():
            tokens = self.renderer.turn(messages)
        if tokens[0] not in self.renderer.stop_token_ids:
            raise UserError(
                "a turn of the model would not be ended",
                where="the chat template",
                found=f"token {tokens[0]} behind it",
                expected=f"one of {self.renderer.stop_token_ids}",
                next="report this, with the model's chat template",
            )
        return tokens[1:] if completion.tokens[-1] in self.renderer.stop_token_ids else tokens


async def _close(env: Env, caller: Caller) -> None:
    caller.seconds_left = CLOSE_S
    with suppress(EnvironmentFailed, TimeoutError):  # the episode is over and stays what it was
        await caller.call(env.close)
    caller.close()


def _settle(future: "asyncio.Future[Completion]", completion: Completion) -> None:
    if not future.done():
        future.set_result(completion)


@contextmanager
def _template_errors() -> Iterator[None]:
    """What a chat template refuses, or finds too long, is what the environment said."""
    try:
        yield
    except UserError as error:
        raise EnvironmentFailed(str(error)) from error


def _checked(observation: Any) -> Observation:
    """The observation if it is one that an episode can go on with; raises EnvironmentFailed."""
    if not isinstance(observation, Observation):
        raise EnvironmentFailed(f"step returned {_short(observation)}, expected an Observation")
    if not observation.done or observation.messages:
        heard = _is_chat(observation.messages) and all(
            m["role"] != "assistant" for m in observation.messages
        )
        if not heard:
            found = _short(observation.messages) if observation.messages else "none"
            raise EnvironmentFailed(
                f"step returned messages {found}; expected some with role and content that are not the assistant's, or done"
            )
    if not isinstance(observation.parts, dict) or not all(
        isinstance(n, str) and n != "env" for n in observation.parts
    ):
        raise EnvironmentFailed(
            "step returned parts that are no names with numbers ('env' is the reward's own)"
        )
    for name, value in {
        **observation.parts,
        "reward": observation.reward,
        "penalty": observation.penalty,
    }.items():
        if not _is_number(value) or (name == "penalty" and value < 0):
            raise EnvironmentFailed(
                f"step returned {name} = {_short(value)}, expected a finite number"
                + " >= 0" * (name == "penalty")
            )
    return observation


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, int | float | np.number) and math.isfinite(value)
    except OverflowError:
        return False


def _is_chat(messages: Any) -> bool:
    return (
        isinstance(messages, list | tuple)
        and bool(messages)
        and all(
            isinstance(m, dict)
            and {"role", "content"} <= m.keys()
            and all(map(_is_text, m.values()))
            for m in messages
        )
    )


def _is_text(value: Any) -> bool:
    """Text that can be written down, which half of a surrogate pair cannot."""
    return isinstance(value, str) and (
        value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)
    )


def _short(value: Any) -> str:
    return ascii(f"{type(value).__name__} {str(value)[:80]}")


def malformed_thinking(text: str) -> bool:
    """Whether <think> tags are not one pair in order; a prompt may have opened it, so a lone
    closing tag is well formed."""
    return re.findall(r"</?think>", text) not in ([], ["</think>"], ["<think>", "</think>"])
