"""A queue that Tandem does not have, by hand: groups are trained in the order in which they end.
Shows what order costs.

    rollouts   begin groups while fewer than (staleness + 1) steps of them are begun and not
               trained; the first prompts_per_step groups that have ended are the next step
    trainer    as in step_async.py

Its weights stay those of the first step, whatever its tokens are labelled: the cost of changing
them is left out, in its favor. Problems, draws, workers, rewards, journal, updates and publication
are those of the ordered run. `measure_ordered` and `measure_unordered` run before the run itself
(tests/support/runs.py, Forks.start); they write the seconds from the first step's groups to the
last publication into a file.
"""

import json
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tandem.rollout.collect import RolloutBatch, make_rollout_batch
from tandem.rollout.episode_builder import EpisodeBuilder
from tandem.rollout.score import with_reward
from tandem.runtime.timer import Timer
from tandem.step_async import RolloutPrefetcher
from tandem.types import Episode, Group, Request, Score, Ticket

PAUSE_S = 0.002  # between looks whether the last scores of a group have come


def measure_ordered(file: str) -> None:
    _measure(Timed, file)


def measure_unordered(file: str) -> None:
    _measure(Unordered, file)


def _measure(prefetcher: "type[Timed]", file: str) -> None:
    from tandem import step_async

    Timed.file = Path(file)
    step_async.RolloutPrefetcher = prefetcher  # type: ignore[misc]


class Timed(RolloutPrefetcher):
    """Rollouts in order, with the moments of the first step's groups and of the last publication.

    num_tokens: of the steps after the first.
    """

    file: Path
    began = ended = 0.0
    num_tokens = 0

    def get(self, step: int) -> tuple[RolloutBatch, Timer]:
        batch, timer = super().get(step)
        if step == 0:
            self.began = time.perf_counter()
        else:
            self.num_tokens += batch.num_tokens
        return batch, timer

    def publish(self, version: int) -> None:
        super().publish(version)
        self.ended = time.perf_counter()

    def close(self) -> None:
        super().close()
        times = {"seconds": self.ended - self.began, "tokens": self.num_tokens}
        self.file.write_text(json.dumps(times))


@dataclass
class RunningGroup:
    """A group that has begun and not ended."""

    group: Group
    scores: list[Future[Score]] = field(default_factory=list)
    episodes: list[Episode] = field(default_factory=list)

    @property
    def has_ended(self) -> bool:
        return len(self.scores) == len(self.group.episodes) and all(
            score.done() for score in self.scores
        )


class Unordered(Timed):
    """Rollouts in the order in which they end."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._waiting: deque[Group] = deque()  # to be begun
        self._tickets: dict[Ticket, tuple[RunningGroup, EpisodeBuilder]] = {}
        self._running: list[RunningGroup] = []
        self._done: list[Group] = []
        self._num_begun = 0

    def _run(self, first: int) -> None:
        if first:  # one thread is enough
            return
        try:
            self.stages.sync.sync_to(0)
            while self._next < self.num_steps and not self._closed:
                self._begin()
                if self._tickets:
                    self._generate()
                else:
                    time.sleep(PAUSE_S)
                self._end()
        except Exception as error:  # raised again by `get`
            with self._change:
                self._failed = self._next, error
                self._change.notify_all()

    def _begin(self) -> None:
        collector, size = self.stages.collector, self.stages.config.rl.prompts_per_step
        runner = collector.runner
        while self._num_begun < min(self._version + self.staleness + 1, self.num_steps) * size:
            if not self._waiting:
                self._waiting += collector.begin_batch()
            running = RunningGroup(self._waiting.popleft())
            self._running.append(running)
            [prompt] = runner.renderer.prompts([running.group.problem.messages])
            for episode in running.group.episodes:
                builder = EpisodeBuilder(replace(episode, num_prompt_tokens=len(prompt)))
                builder.append_prompt_tokens(prompt)
                request = Request(key=builder.key, prompt=prompt, params=collector.sampling)
                self._tickets[runner.engine.submit(request)] = running, builder
            self._num_begun += 1

    def _generate(self) -> None:
        runner = self.stages.collector.runner
        for ticket in runner.engine.step():
            if ticket.completion is None:
                continue
            running, builder = self._tickets.pop(ticket)
            builder.append_completion(ticket.completion)
            episode = builder.build(ticket.completion.stop_reason, "")
            running.scores.append(runner.rewards.submit(running.group.problem, episode.attempt()))
            running.episodes.append(episode)

    def _end(self) -> None:
        """Take the groups whose scores have come, in that order; a step as soon as there are
        enough."""
        config = self.stages.config
        for running in [running for running in self._running if running.has_ended]:
            episodes = [
                with_reward(episode, score.result(), config.reward, config.rollout.max_new_tokens)
                for episode, score in zip(running.episodes, running.scores, strict=True)
            ]
            episodes.sort(key=lambda episode: episode.sample_index)
            self._done.append(replace(running.group, episodes=tuple(episodes), outcome="train"))
            self._running.remove(running)
        if len(self._done) >= config.rl.prompts_per_step:
            self._deliver(config.rl.prompts_per_step)

    def _deliver(self, size: int) -> None:
        timer, progress = Timer(), self.stages.collector.progress
        groups = [self._relabeled(group) for group in self._done[:size]]
        del self._done[:size]
        with timer("rollout_s"):
            self.stages.journal.write(self._next + 1, groups, state=progress.state())
        batch = make_rollout_batch(self._next, groups, 0, 0.0, progress)
        with self._change:
            self._ready[self._next] = batch, timer
            self._next += 1
            self._change.notify_all()

    def _relabeled(self, group: Group) -> Group:
        """Label the tokens with the version that the step requires; the trainer refuses others."""
        version = max(0, self._next - self.staleness)
        episodes = (
            replace(e, weight_versions=np.where(e.loss_mask, version, -1).astype(np.int32))
            for e in group.episodes
        )
        return replace(group, episodes=tuple(episodes))
