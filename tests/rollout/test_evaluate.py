"""Evaluation: means, intervals, categories and pass@k, each against its definition."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from tandem.config.schema import Config, Eval
from tandem.rollout.env_pool import EnvPool
from tandem.rollout.evaluate import Evaluator
from tandem.rollout.score import RolloutRunner
from tandem.run_folder.journal import Journal
from tandem.types import Env, Score
from tests.support import playing
from tests.support.scripted import DigitRenderer, ScriptedEngine, ScriptedReward, said

PROBLEMS = [replace(playing.PROBLEMS[0], uid=f"p{n}", category="ab"[n % 2]) for n in range(5)]


class KeyEngine(ScriptedEngine):
    """Its text is the request's key; the greedy pass says 0."""

    def generate(self, requests):
        return [said([1], str(r.key if r.params.temperature else 0)) for r in requests]


class ThirdReward(ScriptedReward):
    """1 for every third key, else 0.5 or 0."""

    def score(self, problem, attempt):
        return Score(reward=(1.0, 0.5, 0.0)[int(attempt.text) % 3], parts={})


class Interrupted(ThirdReward):
    """Scores 13 answers and ends."""

    def score(self, problem, attempt):
        if len(self.items) > 13:
            raise RuntimeError("ended it")
        return super().score(problem, attempt)


def evaluated(folder, samples, problems=PROBLEMS, reward=ThirdReward, **settings):
    """(metrics, the journal that has the episodes)"""
    config = Config(eval=Eval(samples=samples, **settings))
    journal = Journal(folder, "run", problems)
    runner = RolloutRunner(
        engine=KeyEngine(),
        renderer=DigitRenderer(),
        envs=EnvPool(make=Env, limits=config.env),
        rewards=reward(),
        reward_model=None,
    )
    return Evaluator(config=config, problems=problems, runner=runner, journal=journal)(3), journal


def rewards(journal):
    groups, _ = journal.read(3, "eval_sampled")
    return [[e.reward for e in group.episodes] for group in groups]


@pytest.mark.parametrize("samples", [1, 4, 7])
@pytest.mark.parametrize("success", [1.0, 0.5])
def test_pass_at_k_is_the_share_of_choices_with_a_success(samples, success, tmp_path):
    metrics, journal = evaluated(tmp_path, samples, success=success)
    named = {int(name.partition("@")[2]) for name in metrics if "pass@" in name}
    assert named == {k for k in (1, 2, 4) if k <= samples}
    for k in named:
        best = [[max(chosen) for chosen in combinations(row, k)] for row in rewards(journal)]
        assert metrics[f"eval/pass@{k}"] == pytest.approx(np.mean(np.array(best) >= success))


def test_mean_interval_and_categories_are_those_of_the_problems(tmp_path):
    metrics, journal = evaluated(tmp_path, 4)
    means = [np.mean(row) for row in rewards(journal)]
    assert metrics["eval/sampled"] == pytest.approx(np.mean(means))
    half = 1.96 * np.std(means, ddof=1) / np.sqrt(5)
    assert metrics["eval/sampled_interval"] == pytest.approx(half)
    assert metrics["eval/sampled/a"] == pytest.approx(np.mean(means[0::2]))
    assert metrics["eval/sampled/b"] == pytest.approx(np.mean(means[1::2]))
    assert metrics["eval/greedy"] == 1.0
    assert not any("greedy" in name and "pass" in name for name in metrics)


def test_greedy_pass_switched_off_leaves_no_metrics_and_files(tmp_path):
    metrics, journal = evaluated(tmp_path, 2, greedy=False)
    assert not any("greedy" in name for name in metrics)
    assert journal.read(3, "eval_sampled") and journal.read(3, "eval_greedy") is None


def test_a_suite_beside_others_has_numbers_of_its_own(tmp_path):
    suites = [replace(problem, metadata={"suite": problem.category}) for problem in PROBLEMS]
    metrics, journal = evaluated(tmp_path, 4, suites)
    for name, own in zip("ab", (rewards(journal)[0::2], rewards(journal)[1::2]), strict=True):
        means = np.mean(own, axis=1)
        half = 1.96 * np.std(means, ddof=1) / np.sqrt(len(means))
        assert metrics[f"eval/sampled/{name}_interval"] == pytest.approx(half)
        assert metrics[f"eval/pass@4/{name}"] == np.mean(np.max(own, axis=1) == 1)
        assert metrics[f"eval/greedy/{name}_interval"] == 0.0


def test_an_interrupted_pass_goes_on_from_its_answers(tmp_path):
    with pytest.raises(RuntimeError, match="ended it"):
        evaluated(tmp_path / "resumed", 4, reward=Interrupted)
    reward = ThirdReward()
    resumed, journal = evaluated(tmp_path / "resumed", 4, reward=lambda: reward)
    assert len(reward.items) == 4 * 5 - 13 + 5  # and the greedy pass
    straight, other = evaluated(tmp_path / "straight", 4)
    assert resumed == straight and rewards(journal) == rewards(other)
    assert not list((tmp_path / "resumed").glob("part_*"))
