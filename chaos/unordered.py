"""The queue that Tandem does not have, by hand: groups are trained in the order in which they end.
For what order costs.

    rollouts   begins groups as long as less than (staleness + 1) steps of them are begun and not trained;
               the first prompts_per_step groups that have ended, whichever they are, are the next step
    trainer    as in step_async.py

Its weights stay those of the first step, whatever its tokens are labelled: what changing them would
cost is given to it. Problems, draws, workers, rewards, journal, updates and publication are those
of the ordered run. `time_ordered` and `time_unordered` are what a run does first
(kills.Forks.start); they write the seconds from the first step's groups to the last publication
into a file.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tandem.rollout.episode_builder import Record
from tandem.rollout.episode_metrics import sampled_tokens
from tandem.rollout.score import Timer, attempt_of, scored
from tandem.step import RolloutBatch, Stages, begin_batch
from tandem.step_async import Made, RolloutPrefetcher
from tandem.types import Episode, Group, Request, Score, Ticket

PAUSE_S = 0.002  # between looks whether the last scores of a group have come


def time_ordered(told: str) -> None:
    _put(Timed, told)


def time_unordered(told: str) -> None:
    _put(Unordered, told)


def _put(kind: "type[Timed]", told: str) -> None:
    from tandem.jobs.commands import commands

    @contextmanager
    def ahead(
        stages: Stages, steps: int, stop_workers: Callable[[], None] = lambda: None
    ) -> Iterator[RolloutPrefetcher]:
        made = kind(stages, steps, stop_workers)
        try:
            yield made
        finally:
            made.close()
            Path(told).write_text(
                json.dumps({"seconds": made.ended - made.began, "tokens": made.tokens})
            )

    commands.open_prefetcher = ahead  # type: ignore[attr-defined]


class Timed(RolloutPrefetcher):
    """Ahead, with the moments of the first step's groups and of the last publication; tokens: of
    the steps after the first."""

    began = ended = 0.0
    tokens = 0

    def take(self, step: int) -> Made:
        made = super().take(step)
        if step == 0:
            self.began = time.perf_counter()
        else:
            self.tokens += made[0].tokens
        return made

    def publish(self, version: int) -> None:
        super().publish(version)
        self.ended = time.perf_counter()


class Unordered(Timed):
    """Rollouts without turns."""

    def __init__(self, *how: Any):
        super().__init__(*how)
        self._waiting: deque[Group] = deque()  # to be begun
        self._open: dict[Ticket, tuple[int, Record]] = {}
        # begun and not ended, by number
        self._groups: dict[int, tuple[Group, list[Future[Score]], list[Episode]]] = {}
        self._done: list[Group] = []
        self._begun = 0

    def _run(self) -> None:
        try:
            self.stages.sync.sync_to(0)
            while self._next < self.steps and not self._over:
                self._begin()
                if self._open:
                    self._generate()
                else:
                    time.sleep(PAUSE_S)
                self._end()
        except Exception as error:  # whoever takes the next step gets it
            with self._change:
                self._error = error
                self._change.notify_all()

    def _begin(self) -> None:
        size = self.stages.config.rl.prompts_per_step
        while self._begun < min(self._version + self.staleness + 1, self.steps) * size:
            self._waiting += [] if self._waiting else begin_batch(self.stages)
            group = self._waiting.popleft()
            self._groups[self._begun] = group, [], []
            [prompt] = self.stages.player.renderer.prompts([group.problem.messages])
            for episode in group.episodes:
                record = Record(replace(episode, num_prompt_tokens=len(prompt)))
                record.read(prompt)
                request = Request(key=record.key, prompt=prompt, params=self.stages.params)
                self._open[self.stages.player.engine.submit(request)] = self._begun, record
            self._begun += 1

    def _generate(self) -> None:
        for ticket in self.stages.player.engine.step():
            if ticket.completion is None:
                continue
            number, record = self._open.pop(ticket)
            record.say(ticket.completion)
            episode = record.episode(ticket.completion.stop_reason, "")
            group, scores, episodes = self._groups[number]
            scores.append(self.stages.player.reward.submit(group.problem, attempt_of(episode)))
            episodes.append(episode)

    def _end(self) -> None:
        """Groups whose scores have come, in that order; and a step as soon as there are enough."""
        config = self.stages.config
        for number, (group, scores, episodes) in list(self._groups.items()):
            if len(scores) == len(group.episodes) and all(score.done() for score in scores):
                most = config.rollout.max_new_tokens
                made = [
                    scored(e, s.result(), config.reward, most)
                    for e, s in zip(episodes, scores, strict=True)
                ]
                self._done.append(
                    replace(group, episodes=tuple(sorted(made, key=lambda e: e.sample_index)))
                )
                del self._groups[number]
        if len(self._done) >= config.rl.prompts_per_step:
            self._deliver()

    def _deliver(self) -> None:
        size, clock, state = (
            self.stages.config.rl.prompts_per_step,
            Timer(),
            self.stages.progress.state(),
        )
        groups, self._done = (
            [self._as_of_its_turn(group) for group in self._done[:size]],
            self._done[size:],
        )
        with clock("rollout_s"):
            self.stages.journal.write(self._next + 1, groups, state=state)
        rolled = RolloutBatch(
            step=self._next,
            groups=groups,
            fresh=groups,
            baseline=0.0,
            state=state,
            tokens=sampled_tokens(groups),
        )
        with self._change:
            self._made[self._next] = rolled, clock
            self._next += 1
            self._change.notify_all()

    def _as_of_its_turn(self, group: Group) -> Group:
        """With the version that the step's turn would be, as the trainer refuses all others."""
        turn = max(0, self._next - self.staleness)
        episodes = (
            replace(e, weight_versions=np.where(e.loss_mask, turn, -1).astype(np.int32))
            for e in group.episodes
        )
        return replace(group, episodes=tuple(episodes))
