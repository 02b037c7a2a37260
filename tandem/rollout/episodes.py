"""Rollouts: problems in, token sequences out. Knows the engine as `Generate` and the chat as
`Renderer` only.

    environments' thread: a coroutine for each episode   caller's thread: run_episodes
    --------------------------------------------------   -----------------------------
    env.reset -> the prompt's tokens
    _generate: asks for a completion   -- inbox ->       engine.submit, engine.step(): one pass
    waits for it                       <- future --      set when it has ended
    env.step(text) -> Observation, while others generate
    tokens += renderer.turn(messages), again from _generate; until done, or a limit

    The caller's thread waits for the inbox if no episode generates, and before each pass lets the
    episodes that can go on do so (at most SETTLE_S). An episode waits for that thread, for its
    environment (at most env.timeout_s in all), and at first for its place among env.concurrency.

Sampled tokens are never tokenized again: a turn only appends. An episode depends on its address,
the weights and its environment, never on other episodes or their order.

With a token budget an episode pauses after so many tokens; a later call goes on with it, in its
environment if that is still there, otherwise in a new one brought to the same place.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from tandem.envs.calls import (
    ALIVE_S,
    CLOSE_S,
    Caller,
    EnvironmentFailed,
    LoopPulse,
    close_env,
    environment_loop,
    make_env,
)
from tandem.envs.observations import check_observation, check_opening, malformed_thinking
from tandem.rollout.env_pool import EnvPool
from tandem.rollout.episode_builder import EpisodeBuilder
from tandem.runtime import watchdog
from tandem.runtime.errors import InvariantError, UserError
from tandem.types import (
    Array,
    Completion,
    Env,
    Episode,
    EpisodeStop,
    Generate,
    Group,
    Message,
    Renderer,
    Request,
    SamplingParams,
    Ticket,
)

SETTLE_S = 0.05  # longest wait for episodes that can go on, before a pass without them

OnEnd = Callable[[int, Episode], None]  # (row of the group, the episode)


def run_episodes(
    groups: Sequence[Group],
    *,
    engine: Generate,
    renderer: Renderer,
    envs: EnvPool,
    sampling: SamplingParams,
    on_end: OnEnd | None = None,
    token_budget: int = 0,
) -> list[tuple[Episode, ...]]:
    """Run the paused episodes of the groups and return all episodes, group by group.

    on_end: called in the environments' thread with each episode that ends now. token_budget: tokens
    that an episode samples before it pauses; 0: run to the end. Raises UserError if the episodes of
    a problem begin differently.
    """
    rollout = _Rollout(groups, engine, renderer, envs, sampling, on_end, token_budget)
    episodes = rollout.start()
    try:
        while not episodes.done():
            rollout.submit_requests()
            for ticket in engine.step() if rollout.generating else ():
                if ticket.completion is not None and ticket in rollout.generating:
                    rollout.deliver(ticket, ticket.completion)
        results = iter(episodes.result())
    finally:  # after Ctrl-C, too
        rollout.cancel(episodes)
    return [tuple(next(results) for _ in group.episodes) for group in groups]


class _Rollout:
    """One call of run_episodes."""

    def __init__(
        self,
        groups: Sequence[Group],
        engine: Generate,
        renderer: Renderer,
        envs: EnvPool,
        sampling: SamplingParams,
        on_end: OnEnd | None,
        token_budget: int,
    ):
        self.groups, self.engine, self.renderer, self.envs = groups, engine, renderer, envs
        self.limits, self.sampling = envs.limits, sampling
        self.on_end, self.token_budget = on_end, token_budget
        self.max_tokens = min(self.limits.max_tokens or engine.longest, engine.longest)
        self.generating: dict[Ticket, asyncio.Future[Completion]] = {}
        # None wakes the caller's thread: look whether all episodes have ended
        self._inbox: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._loop, self._over = environment_loop(), threading.Event()
        self._prompts: dict[str, Array] = {}  # rendered chats
        self._first_prompts: dict[int, Array] = {}  # by row
        self._pulse = LoopPulse(self.limits.timeout_s)

    # The caller's thread.

    def start(self) -> "Future[list[Episode]]":
        """Start the episodes in the environments' thread."""
        episodes = asyncio.run_coroutine_threadsafe(self._run_all(), self._loop)
        episodes.add_done_callback(lambda _: self._inbox.put(None))
        return episodes

    def cancel(self, episodes: "Future[list[Episode]]") -> None:
        """Cancel the episodes that have not ended."""
        if not episodes.done():
            episodes.cancel()
            self._over.wait(CLOSE_S + ALIVE_S)
        for ticket in self.generating:
            self.engine.cancel(ticket)

    def deliver(self, ticket: Ticket, completion: Completion) -> None:
        """Hand a completion to its episode."""
        self._loop.call_soon_threadsafe(_set_result, self.generating.pop(ticket), completion)

    def submit_requests(self) -> None:
        """Submit the requests of episodes, after those that can go on have done so. If none
        generates, wait for a request or the end of the last episode."""
        if self.generating:
            self._settle()
        elif (asked := self._wait_for_request()) is None:
            return
        else:
            self._submit(asked)
            self._settle()  # the others that ask at this moment
        with suppress(queue.Empty):
            while True:
                if (asked := self._inbox.get_nowait()) is not None:
                    self._submit(asked)

    def _submit(self, asked: "_Asked") -> None:
        request, future = asked
        self.generating[self.engine.submit(request)] = future

    def _settle(self) -> None:
        """Let the episodes that can go on do so, for SETTLE_S at most."""
        settled = threading.Event()
        # twice soon: behind those whose completion is only being set
        self._loop.call_soon_threadsafe(self._loop.call_soon, settled.set)
        if not settled.wait(SETTLE_S):
            self._pulse.require()

    def _wait_for_request(self) -> "_Asked | None":
        what = "a turn to generate, or the end of the last episode"
        with watchdog.waiting_for("environments", what):
            while True:
                try:
                    return self._inbox.get(timeout=ALIVE_S)
                except queue.Empty:
                    self._pulse.require()

    # The environments' thread.

    async def _run_all(self) -> list[Episode]:
        places = asyncio.Semaphore(self.limits.concurrency)
        tasks = [
            asyncio.create_task(self._run(row, episode, places))
            for row, group in enumerate(self.groups)
            for episode in group.episodes
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._over.set()

    async def _run(self, row: int, episode: Episode, places: asyncio.Semaphore) -> Episode:
        if episode.stop_reason != "paused":
            return episode
        async with places:
            episode = await self._run_episode(row, EpisodeBuilder(episode))
        self._inbox.put(None)  # a sign of life for the thread that waits
        if self.on_end is not None and episode.stop_reason != "paused":
            self.on_end(row, episode)
        return episode

    async def _run_episode(self, row: int, builder: EpisodeBuilder) -> Episode:
        stop_reason: EpisodeStop = "error"
        error = ""
        fresh = None, self.envs.caller(self.limits.timeout_s)
        env, caller = self.envs.paused.pop(builder.key, fresh)
        try:
            if env is None:
                env = make_env(self.envs.make)
                await self._take_up(env, row, builder, caller)
            stop_reason = await self._run_turns(env, builder, caller)
        except TimeoutError:
            stop_reason = "time"
            error = f"the environment took more than {self.limits.timeout_s} s (env.timeout_s)"
        except EnvironmentFailed as failure:
            error = str(failure)
        finally:  # also when the rollout is cancelled
            if env is not None and stop_reason == "paused":
                self.envs.paused[builder.key] = (env, caller)
            elif env is not None:
                await close_env(env, caller)
        failed = stop_reason in ("error", "time")
        return builder.build(stop_reason, error, masked=failed and self.limits.on_error == "mask")

    async def _take_up(self, env: Env, row: int, builder: EpisodeBuilder, caller: Caller) -> None:
        """Begin the episode, or bring a new environment to where it stands. The environment's
        earlier answers count, not those of now."""
        chat = await caller.call(env.reset, self.groups[row].problem)
        if not builder.length:
            self._begin(row, builder, chat, env)
        elif not env.stateless:
            for text in builder.turns:
                await caller.call(env.step, text)

    def _begin(self, row: int, builder: EpisodeBuilder, chat: Any, env: Env) -> None:
        check_opening(chat)
        if type(env) is not Env:  # a single turn gives no reward
            builder.env_rewards["env"] = 0.0
            builder.opening, builder.tools = tuple(chat), tuple(env.tools)
        prompt = self._render(chat, env)
        if len(prompt) >= self.max_tokens:
            limit = f"an episode has at most {self.max_tokens:,}"
            raise EnvironmentFailed(f"a prompt of {len(prompt):,} tokens, where {limit}")
        if not np.array_equal(prompt, self._first_prompts.setdefault(row, prompt)):
            raise _different_openings(self.limits.name, builder.uid)
        builder.num_prompt_tokens = len(prompt)
        builder.append_prompt_tokens(prompt)

    def _render(self, chat: Sequence[Message], env: Env) -> Array:
        key = repr((chat, env.tools))
        if key not in self._prompts:
            with _template_errors():
                self._prompts[key] = self.renderer.prompts([chat], env.tools)[0]
        return self._prompts[key]

    async def _run_turns(self, env: Env, builder: EpisodeBuilder, caller: Caller) -> EpisodeStop:
        """Run turns to the end or the next pause; return the stop reason. Raises EnvironmentFailed,
        and TimeoutError past env.timeout_s."""
        sampling, budget = self.sampling, self.token_budget
        for turn in range(len(builder.turns) + 1, self.limits.max_turns + 1):
            if self.token_budget and not budget:
                return "paused"
            room = min(sampling.max_new_tokens, self.max_tokens - builder.length)
            resumed = builder.unfinished_turn
            completion = await self._generate(builder, room, budget)
            budget -= len(completion.tokens) - (len(resumed.tokens) if resumed else 0)
            if completion.stop_reason == "paused":
                builder.unfinished_turn = completion
                return "paused"
            builder.append_completion(completion)
            if completion.stop_reason != "stop":
                return "length" if room == sampling.max_new_tokens else "tokens"
            observation = check_observation(await caller.call(env.step, completion.text))
            cost = self.limits.bad_thinking * malformed_thinking(completion.text)
            builder.apply_observation(observation, cost)
            if observation.done:
                return "stop"
            if turn < self.limits.max_turns:
                answer = self._render_answer(completion, observation.messages)
                if builder.length + len(answer) >= self.max_tokens:
                    return "tokens"
                builder.append_prompt_tokens(answer)
        return "turns"

    async def _generate(
        self, builder: EpisodeBuilder, max_new_tokens: int, max_tokens_now: int
    ) -> Completion:
        """Generate the next turn, or as much of it as there is before it pauses."""
        resumed = builder.unfinished_turn
        request = Request(
            key=builder.key,
            prompt=builder.tokens(),
            params=replace(self.sampling, max_new_tokens=max_new_tokens),
            num_sampled=builder.num_sampled,
            resume_from=resumed,
            max_tokens_now=max_tokens_now,
        )
        future: asyncio.Future[Completion] = self._loop.create_future()
        self._inbox.put((request, future))
        completion = await future
        if resumed and not np.array_equal(completion.tokens[: len(resumed.tokens)], resumed.tokens):
            raise _other_continuation(builder.uid)
        return completion

    def _render_answer(self, completion: Completion, messages: Sequence[Message]) -> Array:
        """Return the tokens behind a completion: the end of its turn, unless it sampled that
        itself, the messages, and the header of the next turn."""
        with _template_errors():
            tokens = self.renderer.turn(messages)
        if tokens[0] not in self.renderer.stop_token_ids:
            raise _turn_without_end(int(tokens[0]), self.renderer.stop_token_ids)
        return tokens[1:] if completion.tokens[-1] in self.renderer.stop_token_ids else tokens


_Asked = tuple[Request, "asyncio.Future[Completion]"]


def _set_result(future: "asyncio.Future[Completion]", completion: Completion) -> None:
    if not future.done():
        future.set_result(completion)


@contextmanager
def _template_errors() -> Iterator[None]:
    """Turn the chat template's UserError into EnvironmentFailed: the environment wrote the chat."""
    try:
        yield
    except UserError as error:
        raise EnvironmentFailed(str(error)) from error


def _different_openings(name: str, uid: str) -> UserError:
    return UserError(
        "the episodes of a problem begin differently",
        where=f"reset of env.name = {name}",
        found=f"two different prompts for problem {uid!r}",
        expected="one: advantages compare episodes that began alike",
        next="take randomness from the problem (its uid or metadata), not from a generator",
    )


def _other_continuation(uid: str) -> InvariantError:
    return InvariantError(
        "a turn that was paused went on with other tokens",
        where=f"problem {uid}",
        found="another beginning",
        expected="the tokens it had",
        next="report this",
    )


def _turn_without_end(token: int, stop_token_ids: tuple[int, ...]) -> UserError:
    return UserError(
        "a turn of the model would not be ended",
        where="the chat template",
        found=f"token {token} behind it",
        expected=f"one of {stop_token_ids}",
        next="report this, with the model's chat template",
    )
