"""Evaluation: means, intervals, categories and pass@k, each against its definition."""

from itertools import combinations

import numpy as np
import pytest

from tandem.config.schema import Env as EnvConfig
from tandem.config.schema import Eval, Rollout
from tandem.rollout.episodes import EnvPool
from tandem.rollout.evaluate import evaluate
from tandem.rollout.score import RolloutRunner
from tandem.types import Completion, Env, Problem, Score
from tests.support.scripted import DigitRenderer, ScriptedEngine, ScriptedReward

PROBLEMS = [
    Problem(
        uid=f"p{n}",
        messages=({"role": "user", "content": str(n)},),
        answer=str(n),
        category="ab"[n % 2],
    )
    for n in range(5)
]


class KeyEngine(ScriptedEngine):
    """Its text is the request's key; the greedy pass says 0."""

    def generate(self, requests):
        return [
            Completion(
                tokens=np.array([1]),
                logprobs=np.zeros(1, np.float32),
                weight_versions=np.zeros(1, np.int32),
                stop_reason="stop",
                text=str(r.key if r.params.temperature else 0),
            )
            for r in requests
        ]


class ThirdReward(ScriptedReward):
    """1 for every third key, else 0.5 or 0."""

    def score(self, problem, attempt):
        return Score(reward=(1.0, 0.5, 0.0)[int(attempt.text) % 3], parts={})


def evaluated(samples, **how):
    world = EnvPool(make=Env, limits=EnvConfig())
    player = RolloutRunner(
        engine=KeyEngine(), renderer=DigitRenderer(), world=world, reward=ThirdReward()
    )
    how = Eval(samples=samples, **how)
    return evaluate(player, PROBLEMS, seed=0, how=how, rollout=Rollout(), stop_token_ids=(91,))


def rewards(groups):
    return [[e.reward for e in group.episodes] for group in groups["sampled"]]


@pytest.mark.parametrize("samples", [1, 4, 7])
@pytest.mark.parametrize("success", [1.0, 0.5])
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_in_which_one_passes(samples, success):
    metrics, groups = evaluated(samples, success=success)
    named = {int(name.partition("@")[2]) for name in metrics if "pass@" in name}
    assert named == {k for k in (1, 2, 4) if k <= samples}
    for k in named:
        shares = [
            np.mean([max(chosen) >= success for chosen in combinations(row, k)])
            for row in rewards(groups)
        ]
        assert metrics[f"eval/pass@{k}"] == pytest.approx(np.mean(shares))


def test_the_mean_its_interval_and_its_categories_are_those_of_the_problems():
    metrics, groups = evaluated(4)
    means = [np.mean(row) for row in rewards(groups)]
    assert metrics["eval/sampled"] == pytest.approx(np.mean(means))
    assert metrics["eval/sampled_interval"] == pytest.approx(
        1.96 * np.std(means, ddof=1) / np.sqrt(5)
    )
    assert metrics["eval/sampled/a"] == pytest.approx(np.mean(means[0::2]))
    assert metrics["eval/sampled/b"] == pytest.approx(np.mean(means[1::2]))
    assert metrics["eval/greedy"] == 1.0 and not any(
        "greedy" in name and "pass" in name for name in metrics
    )


def test_without_a_greedy_pass_there_is_none():
    metrics, groups = evaluated(2, greedy=False)
    assert set(groups) == {"sampled"} and "eval/greedy" not in metrics
