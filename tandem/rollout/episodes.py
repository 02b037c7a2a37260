"""Rollouts: problems in, token sequences out. Knows the engine as `Generate` and the chat as
`Renderer` only.

    environments' thread: a coroutine for each episode   caller's thread: run_episodes
    --------------------------------------------------   -----------------------------
    env.reset -> the prompt's tokens
    asks for a completion              -- inbox ->       engine.submit, engine.step(): one pass
    waits for it                       <- future --      set when it has ended
    env.step(text) -> Observation, while others generate
    tokens += renderer.turn(messages), and asks again; until done, or a limit (turns.py)

    The caller's thread waits for the inbox if no episode generates, and before each pass lets the
    episodes that can go on do so (at most SETTLE_S). An episode waits for that thread, for its
    environment (at most env.timeout_s in all), and at first for its place among env.concurrency.

With a token budget an episode pauses after so many tokens; a later call goes on with it, in its
environment if that is still there, otherwise in a new one brought to the same place.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from tandem.envs.calls import ALIVE_S, CLOSE_S, LoopPulse, environment_loop
from tandem.rollout.env_pool import EnvPool
from tandem.rollout.episode_builder import EpisodeBuilder
from tandem.rollout.turns import Turns
from tandem.runtime import watchdog
from tandem.types import (
    Completion,
    Episode,
    Generate,
    Group,
    Renderer,
    Request,
    SamplingParams,
    Ticket,
)

SETTLE_S = 0.05  # longest wait for episodes that can go on, before a pass without them

OnEnd = Callable[[int, Episode], None]  # (row of the group, the episode)
Rows = Sequence[tuple[int, Episode]]  # each episode with the row of its group


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

    on_end: called with each episode that ends now, in the thread that runs it. token_budget: tokens
    that an episode samples before it pauses; 0: run to the end. Raises UserError if the episodes of
    a problem begin differently.
    """
    max_tokens = min(envs.limits.max_tokens or engine.longest, engine.longest)
    turns = Turns(groups, renderer, envs, sampling, max_tokens, token_budget)
    episodes = [(row, episode) for row, group in enumerate(groups) for episode in group.episodes]
    rollout = _Rollout(episodes, engine, turns, on_end or (lambda row, episode: None))
    try:
        while not rollout.episodes.done():
            rollout.submit_requests()
            for ticket in engine.step() if rollout.generating else ():
                if ticket.completion is not None and ticket in rollout.generating:
                    rollout.deliver(ticket, ticket.completion)
        results = iter(rollout.episodes.result())
    finally:  # after Ctrl-C, too
        rollout.cancel()
    return [tuple(next(results) for _ in group.episodes) for group in groups]


class _Rollout:
    """Episodes in the environments' thread, while the caller's has the engine generate."""

    def __init__(self, episodes: Rows, engine: Generate, turns: Turns, on_end: OnEnd):
        self.engine, self.turns, self.on_end = engine, turns, on_end
        self.limits, turns.ask = turns.envs.limits, self._ask
        self.generating: dict[Ticket, asyncio.Future[Completion]] = {}
        # None wakes the caller's thread: look whether all episodes have ended
        self._inbox: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._loop, self._over = environment_loop(), threading.Event()
        self._pulse = LoopPulse(self.limits.timeout_s)
        # its result is every episode; it raises what the first one to fail has raised
        self.episodes = asyncio.run_coroutine_threadsafe(self._run_all(episodes), self._loop)
        self.episodes.add_done_callback(lambda _: self._inbox.put(None))

    # The caller's thread.

    def cancel(self) -> None:
        """Cancel the episodes that have not ended."""
        if not self.episodes.done():
            self.episodes.cancel()
            self._over.wait(CLOSE_S + ALIVE_S)
        for ticket in self.generating:
            self.engine.cancel(ticket)

    def deliver(self, ticket: Ticket, completion: Completion) -> None:
        """Hand a completion to its episode."""
        future = self.generating.pop(ticket)
        self._loop.call_soon_threadsafe(
            lambda: None if future.done() else future.set_result(completion)
        )

    def submit_requests(self) -> None:
        """Submit the requests of episodes, after those that can go on have done so. If none
        generates, wait for a request or the end of the last episode."""
        what, asked = "a turn to generate, or the end of the last episode", list[_Asked | None]()
        if not self.generating:
            with watchdog.waiting_for("environments", what):
                while not asked:
                    try:
                        asked.append(self._inbox.get(timeout=ALIVE_S))
                    except queue.Empty:
                        self._pulse.require()
        # the others that ask at this moment: twice soon, behind those whose completion is being set
        settled = threading.Event()
        self._loop.call_soon_threadsafe(self._loop.call_soon, settled.set)
        if not settled.wait(SETTLE_S):
            self._pulse.require()
        with suppress(queue.Empty):
            while True:
                asked.append(self._inbox.get_nowait())
        for request, future in filter(None, asked):
            self.generating[self.engine.submit(request)] = future

    # The environments' thread.

    async def _run_all(self, episodes: Rows) -> list[Episode]:
        places = asyncio.Semaphore(self.limits.concurrency)

        async def run(row: int, episode: Episode) -> Episode:
            if episode.stop_reason != "paused":
                return episode
            async with places:
                episode = await self.turns.run(row, EpisodeBuilder(episode))
            self._inbox.put(None)  # a sign of life for the thread that waits
            if episode.stop_reason != "paused":
                self.on_end(row, episode)
            return episode

        tasks = [asyncio.create_task(run(*each)) for each in episodes]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._over.set()

    def _ask(self, request: Request) -> "asyncio.Future[Completion]":
        future: asyncio.Future[Completion] = self._loop.create_future()
        self._inbox.put((request, future))
        return future


_Asked = tuple[Request, "asyncio.Future[Completion]"]
