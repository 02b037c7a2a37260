"""Symptoms: rows that show one name it and the key to turn; rows that do not are silent."""

import math
import re
from typing import get_args

import pytest

from tandem.config.recipe import describe
from tandem.run_folder.symptoms import Name, symptoms

HEALTHY = {
    "reward": 0.5,
    "entropy": 1.0,
    "completion_tokens": 100.0,
    "groups_without_signal": 0.5,
    "truncated": 0.1,
    "reward_errors": 0.0,
    "logprob_gap": 0.0,
    "rollout_s": 8.0,
    "wait_s": 2.0,
    "step_s": 9.0,
}
KEYS = {key for key, _, _ in describe()}


def rows(*phases):
    """Rows of phases, each (how many, what differs from HEALTHY)."""
    return [HEALTHY | change for count, change in phases for _ in range(count)]


def pairs(loss, warmup, steps):
    """Rows of learning from pairs."""
    rates = [n / warmup for n in range(1, warmup)] + [1.0] * (steps + 1)
    return [{"loss": loss, "accuracy": 0.5, "learning_rate": rate, "step_s": 1.0} for rate in rates]


SICK = {
    "skipped_update": rows((9, {}), (1, {"bad/loss": 1.0})),
    "unscored": rows((9, {}), (1, {"reward_errors": 2.0})),
    "failed_environments": rows((9, {}), (1, {"env_timeouts": 1.0})),
    "truncated": rows((9, {}), (1, {"truncated": 0.51})),
    "inexact_engine": rows((9, {}), (1, {"logprob_gap": 1e-9})),
    "no_signal": rows((5, {"groups_without_signal": 0.95})),
    "falling_reward": rows((5, {"reward": 0.75}), (5, {})),
    "entropy_collapse": rows((5, {}), (5, {"entropy": 0.19})),
    "length_explosion": rows((5, {}), (5, {"completion_tokens": 201.0, "reward": 0.54})),
    "starved_trainer": rows((5, {"wait_s": 5.0})),
    "starved_engine": rows((5, {"rollout_s": 4.0, "wait_s": 0.1})),
    "stuck_pairs": pairs(0.6931, 3, 9),
}
SOUND = {
    "none": rows((60, {})),
    "offline": [{"loss": 0.7, "step_s": 1.0}] * 60,
    "pairs in their warm-up": pairs(0.6931, 12, 8),
    "pairs whose loss moves": pairs(0.6931, 0, 9) + pairs(0.68, 0, 2),
    "one flat step": rows((4, {"groups_without_signal": 1.0}), (1, {})),
    "few rows": rows((4, {"wait_s": 5.0})),
    "a flat first step": rows((1, {"groups_without_signal": 1.0})),
    "entropy falls as the reward rises": rows((5, {}), (5, {"entropy": 0.1, "reward": 0.6})),
    "entropy falls little": rows((5, {}), (5, {"entropy": 0.3})),
    "longer and better": rows((5, {}), (5, {"completion_tokens": 300.0, "reward": 0.6})),
    "long ago": rows((5, {"entropy": 9.0}), (50, {})),
    "no workers": rows((5, {"wait_s": 8.5})),  # the wait has the rollout in it
    "another engine": rows((5, {"logprob_gap": 0.1, "logprob_gap_mean": 0.01})),
    "not a number": rows((5, {}), (5, {"entropy": math.nan, "reward": None})),
}


@pytest.mark.parametrize("name", SICK)
def test_symptom_is_named_with_a_key_to_turn(name):
    found = symptoms(SICK[name])
    assert found.keys() == {name}
    told = set(re.findall(r"\b[a-z]+\.[a-z_]+\b", found[name]))
    assert told and told <= KEYS


def test_a_begin_without_any_signal_is_told_at_the_second_step():
    assert symptoms(rows((2, {"groups_without_signal": 1.0}))).keys() == {"no_signal"}


@pytest.mark.parametrize(("reward", "word"), [(0.95, "solved,"), (0.5, "nothing"), (0.0, "sft")])
def test_flat_groups_near_the_top_are_solved_ones(reward, word):
    flat = symptoms(rows((5, {"groups_without_signal": 0.95, "reward": reward})))["no_signal"]
    assert word in flat and f"mean of {reward:g}" in flat


def test_gap_of_another_engine_has_a_bound_of_its_own():
    found = symptoms(rows((5, {"logprob_gap": 0.3, "logprob_gap_mean": 0.03})))
    assert "0.03 nats" in found["inexact_engine"] and "rl.correction" in found["inexact_engine"]


@pytest.mark.parametrize("name", SOUND)
def test_sound_rows_show_no_symptom(name):
    assert symptoms(SOUND[name]) == {}


def test_every_symptom_is_tested_and_described():
    assert list(get_args(Name)) == list(SICK)
    assert symptoms([]) == {}
