"""NaN and infinity, wherever they come from: named, kept out of every weight and moment, and
forgotten by the next step."""

import math

import numpy as np
import pytest
import torch

from tests.support.episodes import actor_and_critic, bits, changed, learn, sampled_groups, settings


def state(models):
    return bits(models.policy), bits(models.critic)


def step(models, groups, version, **rl):
    """One step of PPO with both models; tokens of another version are not held to exactness."""
    return learn(models, groups, settings(algorithm="ppo", **rl), version=version)


@pytest.fixture
def models():
    """After one good step, so that there are moments to spoil."""
    made = actor_and_critic()
    step(made, sampled_groups(made.policy.model), 0)
    return made


def assert_the_next_clean_step_trains(models):
    """And trains as if nothing had happened: as a twin does that never saw the bad step."""
    twin = actor_and_critic()
    step(twin, sampled_groups(twin.policy.model), 0)
    assert state(models) == state(twin)
    for each in (models, twin):
        row = step(each, sampled_groups(each.policy.model, seed=2), 0)
        assert row["skipped_updates"] == 0.0 and all(math.isfinite(value) for value in row.values())
        assert not any(name.startswith("bad/") for name in row)
    assert state(models) == state(twin)


def skipped_by(*names):
    """The metrics of a step that trains nothing."""
    bad = {f"bad/{name}": 1.0 for name in names}
    return {"num_loss_tokens": 0.0, "skipped_updates": 1.0, **bad}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_reward_not_finite_trains_nothing(models, value):
    groups = changed(sampled_groups(models.policy.model, seed=1), (0, 1), reward=value)
    assert step(models, groups, 0) == skipped_by("reward", "advantage", "return")
    assert_the_next_clean_step_trains(models)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("correction", ["none", "tis", "mis"])
def test_engine_logprob_not_finite_trains_nothing(models, value, correction):
    groups = sampled_groups(models.policy.model, seed=1)
    column = groups[1].episodes[2].engine_logprobs.copy()
    column[np.flatnonzero(groups[1].episodes[2].loss_mask)[-1]] = value
    groups = changed(groups, (1, 2), engine_logprobs=column)
    assert step(models, groups, 1, correction=correction) == skipped_by("engine_logprob")
    assert_the_next_clean_step_trains(models)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_critic_weight_not_finite_trains_neither_model(models, value):
    weight = models.critic.model.module.model.layers[0].mlp.down_proj.weight
    with torch.no_grad():
        held = weight[3, 5].clone()
        weight[3, 5] = value
    before = state(models)
    row = step(models, sampled_groups(models.policy.model, seed=1), 0)
    assert row == skipped_by("value", "advantage", "return") and state(models) == before
    with torch.no_grad():
        weight[3, 5] = held
    assert_the_next_clean_step_trains(models)
