"""Held-out evaluation: greedy and sampled, by category, with an interval.

Draws are the same at every step. Does not know training.
"""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from math import comb

import numpy as np

from tandem.config.schema import Config
from tandem.rl.advantages import sampled_lengths
from tandem.rollout.episode_builder import new_groups
from tandem.rollout.episode_metrics import TRUNCATED, env_metrics
from tandem.rollout.score import RolloutRunner, generate_and_score, sampling_params
from tandem.run_folder.journal import Journal
from tandem.runtime.errors import UserError
from tandem.runtime.timer import Timer
from tandem.types import Group, Problem, Row, SamplingDistribution, SamplingParams


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Evaluation on held-out problems. What the journal already holds is not made again."""

    config: Config
    problems: Sequence[Problem]
    runner: RolloutRunner
    journal: Journal | None = None

    def __call__(self, step: int) -> Row:
        """Return the metrics after `step` steps; none without problems.

        Sampled rewards come with a 95% interval over problems, by category, and with pass@k; and
        each known benchmark with its own.
        """
        if not self.problems:
            return {}
        config = self.config
        sampled = sampling_params(config.rollout, self.runner.renderer)
        plain = SamplingDistribution(temperature=0.0, vocabulary=sampled.vocabulary)
        greedy = replace(sampled, **asdict(plain))
        groups = self._evaluation_pass(step, "sampled", sampled, config.eval.samples)
        row = _summary("sampled", groups)
        if config.eval.greedy:
            row |= _summary("greedy", self._evaluation_pass(step, "greedy", greedy, 1))
        row |= _pass_at(groups, config.eval.success)
        for name, own in _categories(groups).items():
            if "suite" in own[0].problem.metadata:
                row |= _pass_at(own, config.eval.success, of=f"/{name}")
        return row | self._own_metrics(groups, taken=row)

    def _own_metrics(self, groups: Sequence[Group], taken: Row) -> Row:
        """Return the metrics of a user's function. Raises UserError for a name that is taken."""
        if not (function := self.config.eval.metric):
            return {}
        from tandem.rl.user_functions import user_metric

        offered = {
            "rewards": np.stack([group.rewards for group in groups]),
            "lengths": sampled_lengths(groups),
            "completions": [[episode.text for episode in g.episodes] for g in groups],
        }
        own = {f"eval/{name}": value for name, value in user_metric(function, offered).items()}
        if same := sorted(own.keys() & taken.keys()):
            raise UserError(
                "a metric of yours has the name of one of Tandem's",
                where=f"eval.metric = {function}",
                found=", ".join(same),
                expected="another name of the function",
                next="rename it, and start the same command again",
            )
        return own

    def _evaluation_pass(
        self, step: int, name: str, sampling: SamplingParams, samples: int
    ) -> list[Group]:
        kind = f"eval_{name}"
        if self.journal is not None and (recorded := self.journal.read(step, kind)) is not None:
            return recorded[0]
        kept = self.journal and self.journal.parts(step, 0, self.problems, True, "eval_part")
        with kept or nullcontext() as parts:
            groups = generate_and_score(
                self.runner,
                new_groups(self.problems, samples, (self.config.run.seed, "eval", name)),
                sampling=sampling,
                # shaping is for training
                shaping=self.config.reward.model_copy(update={"overlong_penalty": 0.0}),
                timer=Timer(),
                parts=parts,
            )
        if self.journal is not None:
            self.journal.write(step, groups, kind=kind)
        return groups


def _categories(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """Return the groups by category; {} if there is only one."""
    found: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        found[group.problem.category].append(group)
    return dict(sorted(found.items())) if len(found) > 1 else {}


def _pass_at(groups: Sequence[Group], success: float, of: str = "") -> Row:
    """Return the unbiased chance that one of k samples passes (arXiv 2107.03374)."""
    size = len(groups[0].episodes)
    passed = [
        sum(e.reward >= success and not e.env_error for e in group.episodes) for group in groups
    ]
    row: Row = {}
    for k in (2**i for i in range(size.bit_length())):
        chances = [1.0 - comb(size - n, k) / comb(size, k) for n in passed]
        row[f"eval/pass@{k}{of}"] = float(np.mean(chances))
    return row


def _mean(name: str, groups: Sequence[Group]) -> Row:
    """Return the mean over problems of their mean rewards, and half its 95% interval."""
    means = np.array([g.rewards.mean() for g in groups])
    half = 1.96 * float(means.std(ddof=1)) / np.sqrt(len(means)) if len(means) > 1 else 0.0
    return {f"eval/{name}": float(means.mean()), f"eval/{name}_interval": float(half)}


def _summary(name: str, groups: Sequence[Group]) -> Row:
    """Return the mean reward of a pass, with an interval, by category, and its failures."""
    row = _mean(name, groups)
    for category, own in _categories(groups).items():
        mean, interval = _mean(f"{name}/{category}", own).items()
        row |= [mean, interval] if "suite" in own[0].problem.metadata else [mean]
    episodes = [e for g in groups for e in g.episodes]
    for failure, value in env_metrics(episodes).items():
        if failure.startswith("env_"):
            row[f"eval/{name}_{failure}"] = value
    truncated = [e.stop_reason in TRUNCATED for e in episodes]
    return row | {f"eval/{name}_truncated": float(np.mean(truncated))}
