"""The critic and its advantages: GAE over sampled tokens only, value clipping, and two optimizers
that do not meet."""

import numpy as np
import pytest
import torch

from tandem.config.schema import Critic
from tandem.trainer.batch import Models, pack_batch
from tandem.trainer.learn import update_critic
from tests.support import dense
from tests.support.episodes import (
    MAX_NEW_TOKENS,
    actor_and_critic,
    bits,
    dense_loss,
    episodes_of,
    learn,
    recorded,
    sampled_groups,
    settings,
)
from tests.support.tiny import exact_model, twins, value_twins

PPO = {"algorithm": "ppo", "gamma": 0.95, "gae_lambda": 0.9}


def stock_values(stock, groups):
    return [dense.values(stock, e.tokens, e.loss_mask) for e in episodes_of(groups)]


def gae_of(groups, values):
    """(whitened advantages, returns) of every episode, in Python floats."""
    pairs = []
    for episode, column in zip(episodes_of(groups), values, strict=True):
        rewards = [0.0] * (len(column) - 1) + [episode.reward]
        pairs.append(dense.gae(rewards, column.tolist(), 0.95, 0.9))
    return dense.whitened([a for a, _ in pairs]), [r for _, r in pairs]


@pytest.mark.parametrize("turns", [1, 3])
def test_policy_and_critic_have_gradients_of_gae_without_answers(turns):
    (exact, stock), (value, stock_value) = twins("qwen3"), value_twins("qwen3")
    models = Models(policy=recorded(exact), critic=recorded(value))
    groups, config = sampled_groups(exact, turns=turns), settings(**PPO)
    row = learn(models, groups, config)
    values = stock_values(stock_value, groups)
    advantages, returns = gae_of(groups, [v.detach() for v in values])
    dense_loss(config.rl, stock, episodes_of(groups), advantages).backward()
    errors = [(v - torch.tensor(r)).square() / 2 for v, r in zip(values, returns, strict=True)]
    loss = dense.aggregate("token_mean", errors, MAX_NEW_TOKENS)
    loss.backward()
    dense.assert_gradients(models.policy.optimizer.updates[0], stock)
    dense.assert_gradients(models.critic.optimizer.updates[0], stock_value)
    tokens = sum(e.loss_mask.sum() for e in episodes_of(groups))
    assert row["num_loss_tokens"] == row["critic/num_loss_tokens"] == tokens
    assert row["critic/value_loss"] == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize("clip", [0.2, 0.0])
def test_clipped_value_loss_has_the_gradient_of_its_formula(clip):
    value, stock_value = value_twins("qwen3")
    groups = sampled_groups(exact_model("qwen3"))
    batch, rng = pack_batch(groups, settings(**PPO)), np.random.default_rng(0)
    values = stock_values(stock_value, groups)
    # far from the rollout's and near to them, on both sides of the returns
    batch.values = [
        (v.detach().numpy() + rng.normal(0, 0.3, len(v))).astype(np.float32) for v in values
    ]
    batch.returns = [
        (v.detach().numpy() + rng.normal(0, 0.3, len(v))).astype(np.float32) for v in values
    ]
    critic = recorded(value)
    metrics = update_critic(critic, batch, batch.minibatches[0], clip)
    errors, clipped = [], 0
    for new, old, goal in zip(values, batch.values, batch.returns, strict=True):
        for v, o, r in zip(new, old.tolist(), goal.tolist(), strict=True):
            near = min(max(v, o - clip), o + clip) if clip else v
            errors.append(max((v - r) ** 2, (near - r) ** 2) / 2)
            clipped += bool((near - r) ** 2 > (v - r) ** 2)
    loss = sum(errors) / len(errors)
    loss.backward()
    dense.assert_gradients(critic.optimizer.updates[0], stock_value)
    assert metrics["value_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["value"] == pytest.approx(torch.cat(values).mean().item(), rel=1e-4)
    assert metrics["return"] == pytest.approx(float(np.concatenate(batch.returns).mean()), rel=1e-5)
    assert (0 < clipped < len(errors)) == bool(clip)


def test_critic_warmup_leaves_the_policy_as_it_is():
    models = actor_and_critic()
    before = bits(models.policy), bits(models.critic)
    groups = sampled_groups(models.policy.model)
    config = settings(algorithm="ppo", epochs=2)
    row = learn(models, groups, config.model_copy(update={"critic": Critic(warmup_steps=1)}))
    assert bits(models.policy) == before[0] and models.policy.optimizer.step == 0
    assert bits(models.critic) != before[1] and models.critic.optimizer.step == 2
    tokens = 2 * sum(e.loss_mask.sum() for e in episodes_of(groups))
    assert row["critic/num_loss_tokens"] == row["num_loss_tokens"] == tokens
    assert row["critic/skipped_updates"] == 0.0 and "policy_loss" not in row


def test_values_and_advantages_are_those_of_the_steps_start():
    """The critic's first update must not reach the policy's second: a critic that stands still
    gives the same policy."""
    policies = []
    for rate in (0.0, 0.1):
        models = actor_and_critic(rate)
        learn(models, sampled_groups(models.policy.model), settings(algorithm="ppo", epochs=2))
        policies.append(bits(models.policy))
    assert policies[0] == policies[1]
