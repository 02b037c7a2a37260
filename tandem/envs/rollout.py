"""Act: problems -> episodes, token in, token out. Knows the engine as `Generate` and the chat as `Renderer` only.

    an episode, a coroutine each                         the pump, in the caller's thread
    ----------------------------                         --------------------------------
    env.reset -> the prompt's tokens
    submit(request)                     -- ticket ->     engine.step(): one pass for all who generate
    waits for its completion            <- completion    set on those that ended, then the episodes get their turn
    env.step(text) -> Observation, in a thread or as a coroutine, while the others generate
    tokens += renderer.turn(messages), again from submit; until done, or a limit

    The pump waits for an episode to submit when nobody generates; an episode waits for the pump, for its environment (at
    most env.timeout_s in all), and at first for its place among env.concurrency.

What is sampled is never tokenized again: a turn only appends. What an episode becomes depends on its address, the weights
and its environment, never on who else is under way or came first.
"""

import asyncio
import inspect
import math
import re
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tandem.config import Env as EnvConfig
from tandem.draws import address
from tandem.errors import UserError
from tandem.types import (
    Array,
    Completion,
    Env,
    Episode,
    Generate,
    Message,
    Observation,
    Problem,
    Renderer,
    Request,
    SamplingParams,
    Ticket,
)

CLOSE_S = 5.0  # for an environment to give back what it holds
ERROR_CHARS = 500
FAILED = ("error", "time")  # stop reasons of an episode whose environment failed

Ended = Callable[[int, Episode], None]  # (row of the problem, the episode), as soon as it has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Where episodes play: a maker of environments, and the limits. Example: World(make=Env, limits=config.env)"""

    make: Callable[[], Env]
    limits: EnvConfig


def run_episodes(
    problems: Sequence[Problem], *, group_size: int, place: tuple[int | str, ...], engine: Generate, renderer: Renderer,
    world: World, params: SamplingParams, ended: Ended | None = None,
) -> list[tuple[Episode, ...]]:  # fmt: skip
    """G episodes of each problem. Their draws are addressed by (place, row, uid, sample), so a problem that occurs
    twice in a step is sampled anew.

    Raises UserError where every episode's environment failed, and where the episodes of a problem begin differently.
    """
    rollout = _Rollout(problems, place, engine, renderer, world, params, ended)
    episodes = asyncio.run(rollout.run(group_size))
    if episodes and all(episode.stop_reason in FAILED for episode in episodes):
        raise UserError("every episode failed in its environment", where=f"env.name = {world.limits.name}",
                        found=episodes[0].env_error, expected="episodes that can be played",
                        next="mend the environment; `tandem try` plays it alone")  # fmt: skip
    return [tuple(episodes[start : start + group_size]) for start in range(0, len(episodes), group_size)]


class EnvironmentFailed(Exception):
    """The environment raised, or answered what is no Observation."""


@dataclass(kw_only=True)
class _Record:
    """An episode as it grows."""

    uid: str
    sample: int
    parts: list[tuple[Array, Array, Array, float]] = field(default_factory=list)  # tokens, log-probs, versions, penalty
    messages: list[Message] = field(default_factory=list)
    given: dict[str, float] = field(default_factory=dict)
    prompt_tokens: int = 0
    length: int = 0
    drawn: int = 0

    def read(self, tokens: Array) -> None:
        """Tokens that the model did not sample."""
        self._append(tokens, np.zeros(len(tokens), np.float32), np.full(len(tokens), -1, np.int32))

    def say(self, completion: Completion) -> None:
        self._append(completion.tokens, completion.logprobs, completion.weight_versions)
        self.messages.append({"role": "assistant", "content": completion.text})
        self.drawn += len(completion.tokens)

    def hear(self, observation: Observation, penalty: float) -> None:
        """What the environment makes of the turn just said."""
        self.messages += observation.messages
        if self.given:
            self.given["env"] += float(observation.reward)
        self.given |= {name: float(value) for name, value in observation.parts.items()}
        self.parts[-1] = (*self.parts[-1][:3], float(observation.penalty) + penalty)

    def _append(self, tokens: Array, logprobs: Array, versions: Array) -> None:
        self.parts.append((tokens, logprobs, versions, 0.0))
        self.length += len(tokens)

    def tokens(self) -> Array:
        return np.concatenate([np.zeros(0, np.int64), *(tokens for tokens, *_ in self.parts)])

    def episode(self, stop_reason: str, error: str) -> Episode:
        versions = np.concatenate([np.zeros(0, np.int32), *(versions for *_, versions, _ in self.parts)])
        penalties = [np.full(len(tokens), penalty, np.float32) for tokens, *_, penalty in self.parts]
        return Episode(
            uid=self.uid, sample_index=self.sample, tokens=self.tokens(), loss_mask=versions >= 0,
            engine_logprobs=np.concatenate([np.zeros(0, np.float32), *(logprobs for _, logprobs, *_ in self.parts)]),
            weight_versions=versions, penalties=np.concatenate([np.zeros(0, np.float32), *penalties]),
            num_prompt_tokens=self.prompt_tokens, messages=tuple(self.messages), stop_reason=stop_reason,
            given=dict(self.given), env_error=error,
        )  # fmt: skip


class _Rollout:
    """One call of run_episodes."""

    def __init__(
        self, problems: Sequence[Problem], place: tuple[int | str, ...], engine: Generate, renderer: Renderer, world: World,
        params: SamplingParams, ended: Ended | None,
    ):  # fmt: skip
        self.problems, self.place, self.engine, self.renderer = problems, place, engine, renderer
        self.make, self.limits, self.params, self.ended = world.make, world.limits, params, ended
        self.longest = min(self.limits.max_tokens or engine.longest, engine.longest)
        self._generating: dict[Ticket, asyncio.Future[Completion]] = {}
        self._prompts: dict[str, Array] = {}  # of chats that were rendered before
        self._beginnings: dict[int, Array] = {}  # by row
        self._under_way = 0
        self._failure: BaseException | None = None

    async def run(self, group_size: int) -> list[Episode]:
        self._changed, places = asyncio.Event(), asyncio.Semaphore(self.limits.concurrency)
        wanted = [(row, sample) for row in range(len(self.problems)) for sample in range(group_size)]
        tasks = [asyncio.create_task(self._play(row, sample, places)) for row, sample in wanted]
        self._under_way = len(tasks)
        for task in tasks:
            task.add_done_callback(self._done)
        try:
            await self._pump()
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for ticket in self._generating:
                self.engine.cancel(ticket)

    async def _pump(self) -> None:
        while self._under_way and self._failure is None:
            if self._generating:
                for ticket in self.engine.step():
                    if ticket.completion is not None and ticket in self._generating:
                        self._generating.pop(ticket).set_result(ticket.completion)
                await asyncio.sleep(0)
            else:
                self._changed.clear()
                await self._changed.wait()
        if self._failure is not None:
            raise self._failure

    def _done(self, task: "asyncio.Task[Episode]") -> None:
        self._under_way -= 1
        self._failure = self._failure or (None if task.cancelled() else task.exception())
        self._changed.set()

    async def _play(self, row: int, sample: int, places: asyncio.Semaphore) -> Episode:
        record = _Record(uid=self.problems[row].uid, sample=sample)
        async with places:
            episode = await self._episode(row, record)
        if self.ended is not None:
            self.ended(row, episode)
        return episode

    async def _episode(self, row: int, record: _Record) -> Episode:
        caller = _Caller(self.limits.timeout_s)
        stop_reason, error, env = "error", "", None
        try:
            env = self.make()
            stop_reason = await self._turns(env, row, record, caller)
        except TimeoutError:
            stop_reason, error = "time", f"the environment took more than {self.limits.timeout_s} s (env.timeout_s)"
        except EnvironmentFailed as failure:
            error = str(failure)
        finally:  # also when the rollout is given up
            if env is not None:
                with suppress(EnvironmentFailed, TimeoutError):  # the episode is over and stays what it was
                    await _Caller(CLOSE_S).call(env.close)
        episode = record.episode(stop_reason, error)
        return replace(episode, masked=stop_reason in FAILED and self.limits.on_error == "mask")

    async def _turns(self, env: Env, row: int, record: _Record, caller: "_Caller") -> str:
        """Play until the end; returns the stop reason. Raises EnvironmentFailed, and TimeoutError past its time."""
        problem, params = self.problems[row], self.params
        if type(env) is not Env:  # a single turn gives nothing
            record.given["env"] = 0.0
        self._begin(row, record, await caller.call(env.reset, problem), env)
        key = address(*self.place, row, problem.uid, record.sample)
        for turn in range(1, self.limits.max_turns + 1):
            room = min(params.max_new_tokens, self.longest - record.length)
            if room < 1:
                return "tokens"
            request = Request(
                key=key, prompt=record.tokens(), params=replace(params, max_new_tokens=room), drawn=record.drawn
            )
            completion = await self._generate(request)
            record.say(completion)
            if completion.stop_reason != "stop":
                return "length" if room == params.max_new_tokens else "tokens"
            observation = _checked(await caller.call(env.step, completion.text))
            record.hear(observation, self.limits.bad_thinking * malformed_thinking(completion.text))
            if observation.done:
                return "stop"
            if turn < self.limits.max_turns:
                record.read(self._answer(completion, observation.messages))
        return "turns"

    def _begin(self, row: int, record: _Record, chat: Any, env: Env) -> None:
        if not _is_chat(chat):
            raise EnvironmentFailed(f"reset returned {_short(chat)}, expected a chat: messages with role and content")
        cached = repr((chat, env.tools))
        if cached not in self._prompts:
            self._prompts[cached] = self.renderer.prompts([chat], env.tools)[0]
        prompt = self._prompts[cached]
        if not np.array_equal(prompt, self._beginnings.setdefault(row, prompt)):
            raise UserError("the episodes of a problem begin differently", where=f"{type(env).__name__}.reset",
                            found=f"two different prompts for problem {record.uid!r}",
                            expected="one: advantages compare episodes that began alike",
                            next="take randomness from the problem (its uid or metadata), not from a generator")  # fmt: skip
        record.prompt_tokens = len(prompt)
        record.read(prompt)

    async def _generate(self, request: Request) -> Completion:
        ticket = self.engine.submit(request)
        future = self._generating[ticket] = asyncio.get_running_loop().create_future()
        self._changed.set()
        return await future

    def _answer(self, completion: Completion, messages: Sequence[Message]) -> Array:
        """The tokens that come after a completion: the end of its turn only where it did not sample that itself."""
        tokens = self.renderer.turn(messages)
        return tokens[1:] if completion.tokens[-1] in self.renderer.stop_token_ids else tokens


class _Caller:
    """Calls an environment's methods, which may take seconds_left in all."""

    def __init__(self, seconds: float):
        self.seconds_left = seconds

    async def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """What the method returns. Raises EnvironmentFailed for what it raises, and TimeoutError."""
        clock = asyncio.get_running_loop().time
        start = clock()
        try:
            async with asyncio.timeout(self.seconds_left) as limit:
                result = method(*arguments) if inspect.iscoroutinefunction(method) else _in_thread(method, *arguments)
                result = await result
                return await result if inspect.isawaitable(result) else result
        except (Exception, SystemExit) as error:  # recovery is the feature: it costs one episode
            if isinstance(error, TimeoutError) and limit.expired():
                raise
            raise EnvironmentFailed(f"{type(error).__name__}: {error}"[:ERROR_CHARS]) from error
        finally:
            self.seconds_left -= clock() - start


def _in_thread(method: Callable[..., Any], *arguments: Any) -> Awaitable[Any]:
    """In a daemon thread of its own: one that never returns holds up neither the others nor the end of the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return  # nobody waits any more
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> None:
        result, error = None, None
        try:
            result = method(*arguments)
        except (Exception, SystemExit) as raised:
            error = EnvironmentFailed("StopIteration") if isinstance(raised, StopIteration) else raised
        with suppress(RuntimeError):  # the rollout is over
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name="environment", daemon=True).start()
    return future


def _checked(observation: Any) -> Observation:
    """The observation if it is one that an episode can go on with; raises EnvironmentFailed."""
    if not isinstance(observation, Observation):
        raise EnvironmentFailed(f"step returned {_short(observation)}, expected an Observation")
    numbers = [observation.reward, observation.penalty, *observation.parts.values()]
    if not all(isinstance(n, int | float | np.number) and math.isfinite(n) for n in numbers) or observation.penalty < 0:
        raise EnvironmentFailed(f"step returned numbers that are none: {_short(observation)}")
    if "env" in observation.parts:
        raise EnvironmentFailed("step returned a part named 'env', which is the reward's own name")
    heard = all(message["role"] != "assistant" for message in observation.messages)
    if not observation.done and not (_is_chat(observation.messages) and heard):
        raise EnvironmentFailed(
            "step returned no messages and is not done; expected messages that are not the assistant's"
        )
    return observation


def _is_chat(messages: Any) -> bool:
    return isinstance(messages, list | tuple) and bool(messages) and all(
        isinstance(m, dict) and {"role", "content"} <= m.keys() and all(isinstance(text, str) for text in m.values())
        for m in messages
    )  # fmt: skip


def _short(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:80]!r}"


def malformed_thinking(text: str) -> bool:
    """Whether <think> tags are not one pair in order; a prompt may have opened it, so a lone closing tag is well formed."""
    return re.findall(r"</?think>", text) not in ([], ["</think>"], ["<think>", "</think>"])
