"""Episodes played and scored: environments, engine and reward workers side by side. Training and
evaluation share it.

It knows no step and no weights. The times of its parts go into a Clock.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from tandem.config.schema import Reward
from tandem.rl.filters import overlong_penalty
from tandem.rollout.episodes import EnvPool, run_episodes
from tandem.run_folder.journal import Parts
from tandem.runtime import watchdog
from tandem.runtime.errors import UserError
from tandem.types import (
    Attempt,
    Episode,
    Generate,
    Group,
    Problem,
    Renderer,
    Row,
    SamplingParams,
    Score,
)
from tandem.types import Reward as Scorer

Grade = Callable[[Sequence[Problem], Sequence[tuple[Episode, ...]]], list[tuple[Episode, ...]]]


@dataclass(frozen=True, kw_only=True)
class RolloutRunner:
    """What plays episodes and has them scored: training, evaluation and `tandem rollout` share
    it."""

    engine: Generate
    renderer: Renderer
    world: EnvPool
    reward: Scorer
    # a reward model: writes its word into the episodes' `given`, before they are scored
    grade: Grade | None = None


class Timer:
    """Wall seconds of the parts of a step; they go to timings.jsonl and never into a decision."""

    def __init__(self) -> None:
        self.parts: Row = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.parts[name] = self.parts.get(name, 0.0) + time.perf_counter() - start

    def timings(self, *, tokens: int) -> Row:
        seconds = sum(self.parts.values())
        return {
            **self.parts,
            "step_s": seconds,
            "generated_tokens_per_s": tokens / self.parts["rollout_s"]
            if self.parts.get("rollout_s")
            else 0.0,
        }


def generate_and_score(
    player: RolloutRunner,
    groups: Sequence[Group],
    *,
    params: SamplingParams,
    shaping: Reward,
    clock: Timer,
    budget: int = 0,
    parts: Parts | None = None,
) -> list[Group]:
    """The groups with their paused episodes played on, to their end or through the budget, and
    those that end scored.

    An episode is scored while the others are still generated; one whose scoring fails costs its
    reward only, and says so. What has ended is kept in `parts`, and what stands there already is
    not played again.
    """
    groups = [_recalled(group, parts) for group in groups]
    problems = [group.problem for group in groups]
    open_ = {
        (row, e.sample_index)
        for row, group in enumerate(groups)
        for e in group.episodes
        if e.stop_reason == "paused"
    }
    verdicts: dict[tuple[int, int], Future[Episode]] = {}

    def submit(row: int, episode: Episode) -> None:
        verdict = player.reward.submit(problems[row], attempt_of(episode))
        verdicts[row, episode.sample_index] = then(
            verdict, lambda score: finish(row, episode, score)
        )

    def finish(row: int, episode: Episode, score: Score) -> Episode:
        ended = scored(episode, score, shaping, params.max_new_tokens)
        if parts is not None:
            parts.add(row, ended)
        return ended

    with clock("rollout_s"):
        attempts = run_episodes(
            groups,
            engine=player.engine,
            renderer=player.renderer,
            world=player.world,
            params=params,
            ended=None if player.grade else submit,
            budget=budget,
        )
    new = [
        tuple(e for e in group if (row, e.sample_index) in open_ and e.stop_reason != "paused")
        for row, group in enumerate(attempts)
    ]
    _refuse_if_all_failed(
        [e.env_error for group in attempts for e in group],
        "failed in its environment",
        where=f"env.name = {player.world.limits.name}",
    )
    with clock("reward_s"):
        if player.grade:
            for row, episodes in enumerate(player.grade(problems, new)):
                for episode in episodes:
                    submit(row, episode)
        with watchdog.waits(of="rewards", what="the last scores"):
            final = {place: verdict.result() for place, verdict in verdicts.items()}
    played = [
        replace(group, episodes=tuple(final.get((row, e.sample_index), e) for e in attempts[row]))
        for row, group in enumerate(groups)
    ]
    _refuse_if_all_failed(
        [e.reward_error for group in played for e in group.episodes],
        "could not be scored",
        where="reward.function",
    )
    return played


def _recalled(group: Group, parts: Parts | None) -> Group:
    ended = {} if parts is None else parts.ended
    return replace(
        group,
        episodes=tuple(
            ended.get(e.key, e) if e.stop_reason == "paused" else e for e in group.episodes
        ),
    )


def then(score: Future[Score], make: Callable[[Score], Episode]) -> Future[Episode]:
    """What is made of the score, as soon as it is there."""
    made: Future[Episode] = Future()

    def settle(done: Future[Score]) -> None:
        try:
            made.set_result(make(done.result()))
        except Exception as error:  # whoever waits for the episode gets it
            made.set_exception(error)

    score.add_done_callback(settle)
    return made


def _refuse_if_all_failed(errors: Sequence[str], what: str, where: str) -> None:
    """One failure costs an episode; where nothing works, going on would cost the run."""
    if len(errors) > 1 and all(errors):
        raise UserError(
            f"every episode {what}",
            where=where,
            found=errors[0],
            expected="some that work",
            next="mend it (`tandem try` runs it alone); the same command resumes",
        )


def attempt_of(episode: Episode) -> Attempt:
    return Attempt(
        text=episode.text,
        messages=episode.messages,
        opening=episode.opening,
        stop_reason=episode.stop_reason,
        tokens=tuple(episode.tokens[episode.num_prompt_tokens :].tolist()),
        given=episode.given,
    )


def scored(episode: Episode, verdict: Score, shaping: Reward, max_tokens: int) -> Episode:
    """The episode with its reward; one that failed in its environment has reward 0, whatever its
    text is worth."""
    if episode.env_error:
        return replace(episode, reward=0.0)
    value, parts = verdict.reward, dict(verdict.parts)
    cut = episode.stop_reason == "length"
    length = max_tokens if cut else _last_turn(episode)
    if cost := shaping.overlong_penalty * (
        cut or overlong_penalty(length, max_tokens, shaping.overlong_buffer)
    ):
        value, parts["overlong"] = value - cost, -cost
    return replace(episode, reward=value, reward_parts=parts, reward_error=verdict.error)


def _last_turn(episode: Episode) -> int:
    """Tokens sampled in it."""
    return int(np.argmin(np.append(episode.loss_mask[::-1], False)))
