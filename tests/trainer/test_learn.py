"""A step of learning against its definition on stock transformers: every loss, aggregation,
correction and KL."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tandem.config.schema import Config, Reward
from tandem.rl.algorithms import ALGORITHMS
from tandem.rl.corrections import correction
from tandem.runtime.errors import UserError
from tandem.trainer.batch import Models, TokenTensors, compute_logprobs, pack_batch
from tandem.trainer.learn import expected_gradient, policy_loss, token_advantages
from tests.support import dense
from tests.support.episodes import (
    MAX_NEW_TOKENS,
    SAMPLING,
    adapted_model,
    bits,
    changed,
    dense_loss,
    engine_of,
    episodes_of,
    grpo_of,
    learn,
    learn_once,
    perturbed,
    recorded,
    sampled_groups,
    settings,
    stock_logprobs,
    trained,
)
from tests.support.tiny import exact_model, twins, value_twins

# ---- on policy


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_first_update_of_each_algorithm_is_exactly_on_policy(algorithm):
    policy = trained(exact_model("qwen3"))
    config = settings(algorithm=algorithm, kl_coef=0.1)
    critic = trained(value_twins("qwen3")[0]) if config.rl.advantage == "gae" else None
    models = Models(policy=policy, critic=critic, reference=exact_model("qwen3"))
    before = bits(policy)
    groups = sampled_groups(policy.model, turns=2)
    row = learn(models, groups, config, baseline=0.1)
    assert row["logprob_gap"] == row["reference_kl"] == row["skipped_updates"] == 0.0
    assert all(math.isfinite(value) for value in row.values())
    assert row["num_loss_tokens"] == sum(e.loss_mask.sum() for e in episodes_of(groups))
    assert {name: row[name] for name in ("ratio", "clip_share", "approx_kl") if name in row} == (
        {} if config.rl.loss == "reinforce" else {"ratio": 1.0, "clip_share": 0.0, "approx_kl": 0.0}
    )
    after = bits(policy)
    assert all(after[name] != before[name] for name in before)


def test_groups_without_signal_cost_no_backward_pass_and_change_no_bit(monkeypatch):
    passes, backward = [], torch.Tensor.backward
    monkeypatch.setattr(torch.Tensor, "backward", lambda x: (passes.append(x.grad_fn), backward(x)))

    def norm(*numbers):
        policy = trained(exact_model("qwen3"))
        groups = sampled_groups(policy.model, prompts=4)
        flat = [[replace(e, reward=1.0) for e in g.episodes] for g in groups]
        chosen = [groups[n] if n % 2 else replace(groups[n], episodes=flat[n]) for n in numbers]
        config = settings(algorithm="dr_grpo", budget=1000)
        assert len(pack_batch(chosen, config).minibatches[0]) == len({n % 2 for n in numbers})
        row = learn(Models(policy=policy), chosen, config)
        assert row["skipped_updates"] == row["logprob_gap"] == 0.0
        return row["grad_norm"]

    assert norm(0, 1, 2, 3) == norm(1, 3) / 2 > 0.0  # twice the sequences, each half the weight
    assert norm(0, 2) == 0.0 and [bool(graph) for graph in passes] == [True, False, True, True]


def test_engine_one_ulp_off_raises_before_a_weight_changes():
    policy = trained(exact_model("qwen3"))
    groups = sampled_groups(policy.model)
    learn(Models(policy=policy), groups, settings())
    before = bits(policy)
    groups = sampled_groups(policy.model, seed=1, version=1)
    last = groups[-1].episodes[-1]
    off = last.engine_logprobs.copy()
    off[-1] = np.nextafter(off[-1], np.float32(0))
    wrong = changed(groups, (2, 2), engine_logprobs=off)
    with pytest.raises(UserError, match="engine and policy do not agree") as error:
        learn(Models(policy=policy), wrong, settings(), version=1)
    assert "nats" in error.value.found and bits(policy) == before
    row = learn(Models(policy=policy), wrong, settings(), version=1, exact=False)
    assert 0.0 < row["logprob_gap"] < 1e-5
    # tokens of older weights are not held to these
    assert "logprob_gap" not in learn(Models(policy=policy), wrong, settings(), version=2)


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "cispo", "reinforce"])
def test_expected_gradient_is_the_one_that_arrives_bit_for_bit(loss):
    rng = np.random.default_rng(0)
    engine, advantages, weights, corrections = (
        torch.from_numpy(rng.normal(size=50).astype(np.float32)) for _ in range(4)
    )
    tokens = TokenTensors(
        engine=engine,
        proximal=engine,
        advantages=advantages,
        weights=weights.abs(),
        corrections=corrections.abs(),
        fresh=torch.ones(50, dtype=torch.bool),
        sequences=torch.zeros(50, dtype=torch.int64),
        reference=None,
    )
    rl = settings(loss=loss, dual_clip=3.0 if loss == "ppo_clip" else 0.0).rl
    logprobs = engine.clone().requires_grad_()
    policy_loss(rl, tokens, logprobs, torch.zeros(50))[0].backward()
    assert torch.equal(logprobs.grad, expected_gradient(rl, tokens))


# ---- the losses


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "cispo", "reinforce"])
def test_gradient_is_that_of_the_formula_on_whole_logits(loss):
    (exact, stock), (reference, stock_reference) = twins("qwen3"), twins("qwen3", seed=5)
    groups = perturbed(sampled_groups(exact, turns=2), 0.3)
    config = settings(
        44,
        loss=loss,
        aggregation={"ppo_clip": "sequence_mean", "cispo": "fixed_length"}.get(loss, "token_mean"),
        **({} if loss == "reinforce" else {"clip_low": 0.02, "clip_high": 0.04}),
        entropy_coef=0.2,
        kl_coef=0.3,
        dual_clip=1.2 if loss == "ppo_clip" else 0.0,
    )
    [minibatch] = pack_batch(groups, config).minibatches
    order = [number for microbatch in minibatch for number in microbatch.samples]
    assert order != sorted(order)  # what belongs to an episode must follow it
    row, gradients = learn_once(exact, groups, config, reference=reference)

    def with_entropy_and_kl(part, episode, logprobs):
        entropy = dense.entropies(stock, episode.tokens, episode.loss_mask, SAMPLING.temperature)
        held = stock_logprobs(stock_reference, episode).detach()
        return part - 0.2 * entropy + 0.3 * dense.k3(logprobs, held)

    advantages = grpo_of(groups)
    dense_loss(config.rl, stock, episodes_of(groups), advantages, with_entropy_and_kl).backward()
    dense.assert_gradients(gradients, stock)
    assert loss == "reinforce" or 0.0 < row["clip_share"] < 1.0
    assert row["reference_kl"] > 0.0 and row["logprob_gap"] > 0.1


def test_tokens_not_sampled_carry_no_loss_whatever_logprobs():
    gradients = []
    for fill in (0.0, -7.0):
        model = exact_model("qwen3")
        groups = sampled_groups(model, turns=3)
        for place, episode in enumerate(groups[0].episodes):
            column = np.where(episode.loss_mask, episode.engine_logprobs, np.float32(fill))
            groups = changed(groups, (0, place), engine_logprobs=column)
        gradients.append(learn_once(model, groups, settings(), exact=True)[1])
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


# ---- updates and microbatches


def test_minibatches_are_updates_on_their_own_groups_in_order():
    config, alone = settings(prompts_per_step=4, minibatches=2), settings(prompts_per_step=2)
    policy, twin = trained(exact_model("qwen3")), trained(exact_model("qwen3"))
    groups = sampled_groups(policy.model, prompts=4)
    row = learn(Models(policy=policy), groups, config)
    parts = [
        learn(Models(policy=twin), part, alone, exact=exact)
        for part, exact in ((groups[:2], True), (groups[2:], False))
    ]
    assert bits(policy) == bits(twin) and policy.optimizer.step == 2
    tokens = [part["num_loss_tokens"] for part in parts]
    assert row["num_loss_tokens"] == sum(tokens)
    assert row["logprob_gap"] == 0.0 < parts[1]["logprob_gap"]
    ratio = np.average([part["ratio"] for part in parts], weights=tokens)
    assert row["ratio"] == pytest.approx(ratio, rel=1e-12)
    assert parts[0]["ratio"] == 1.0 != parts[1]["ratio"]


def test_epochs_train_against_the_policy_of_the_start():
    policy, twin = trained(exact_model("qwen3")), trained(exact_model("qwen3"))
    groups = sampled_groups(policy.model)
    learn(Models(policy=policy), groups, settings(epochs=2))
    for exact in (True, False):
        learn(Models(policy=twin), groups, settings(), exact=exact)
    assert bits(policy) == bits(twin) and policy.optimizer.step == 2


# ---- truncated episodes


def truncated(groups, *places):
    """At the most tokens of a completion, or of an episode."""
    for number, place in enumerate(places):
        groups = changed(groups, place, stop_reason=("length", "tokens")[number % 2])
    return groups


def test_masked_truncated_episode_still_counts_in_the_baseline():
    exact, stock = twins("qwen3")
    groups = truncated(sampled_groups(exact), (0, 1), (2, 0), (2, 2))
    config = settings(mask_truncated=True)
    row, gradients = learn_once(exact, groups, config, exact=True)
    pairs = zip(episodes_of(groups), grpo_of(groups), strict=True)
    kept = [(episode, advantage) for episode, advantage in pairs if episode.stop_reason == "stop"]
    dense_loss(config.rl, stock, *zip(*kept, strict=True)).backward()
    dense.assert_gradients(gradients, stock)
    assert len(kept) == 6 and row["num_loss_tokens"] == sum(e.loss_mask.sum() for e, _ in kept)


def test_all_episodes_truncated_updates_nothing():
    policy = trained(exact_model("qwen3"))
    groups = sampled_groups(policy.model, size=2)
    groups = truncated(groups, *((row, place) for row in range(3) for place in range(2)))
    before = bits(policy)
    row = learn(Models(policy=policy), groups, settings(mask_truncated=True))
    assert row == {"num_loss_tokens": 0.0, "skipped_updates": 1.0} and bits(policy) == before


# ---- the reference


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("advantage", ["rloo", "reinforce_pp"])
def test_kl_to_identical_weights_is_0_and_changes_no_bit(kl_in, adapter, advantage):
    make = adapted_model if adapter else lambda: exact_model("qwen3")
    policy, twin = trained(make()), trained(make())
    reference = policy.model if adapter else exact_model("qwen3")
    groups = sampled_groups(policy.model)
    config = settings(
        kl_coef=0.5,
        kl_in=kl_in,
        kl_estimator="k3" if kl_in == "loss" else "k1",
        advantage=advantage,
    )
    row = learn(Models(policy=policy, reference=reference), groups, config)
    learn(Models(policy=twin), groups, settings(advantage=advantage))
    assert row["reference_kl"] == 0.0 and bits(policy) == bits(twin)
    # and it is a KL to where the policy was: after the update it is not zero any more
    row = learn(Models(policy=policy, reference=reference), groups, config, version=1)
    assert row["reference_kl"] != 0.0


def kl_of_episodes(stock, stock_reference, groups):
    """Each token's k1, in Python floats."""
    with torch.no_grad():
        return [
            (stock_logprobs(stock, e) - stock_logprobs(stock_reference, e)).tolist()
            for e in episodes_of(groups)
        ]


def advantages_of(config, groups, exact, reference, critic=None):
    models = Models(policy=recorded(exact), reference=reference, critic=critic)
    batch = pack_batch(groups, config)
    compute_logprobs(batch, models, config.rl, SAMPLING)
    return token_advantages(batch, config, 0.0)[0]


def test_kl_in_reward_is_subtracted_before_group_is_compared():
    (exact, stock), (reference, stock_reference) = twins("qwen3"), twins("qwen3", seed=5)
    groups = sampled_groups(exact, turns=2)
    config = settings(advantage="grpo", kl_in="reward", kl_coef=0.05, kl_estimator="k1")
    kl = [sum(part) for part in kl_of_episodes(stock, stock_reference, groups)]
    found = advantages_of(config, groups, exact, reference)
    for row, group in enumerate(groups):
        own = slice(3 * row, 3 * row + 3)
        rewards = (group.rewards - 0.05 * np.array(kl[own])).tolist()
        for column, advantage in zip(found[own], dense.group_relative(rewards), strict=True):
            # sums of float32 log-probs
            np.testing.assert_allclose(column, advantage, rtol=1e-3, atol=1e-4)
    assert [len(column) for column in found] == [e.loss_mask.sum() for e in episodes_of(groups)]


def test_kl_in_reward_of_reinforce_pp_counts_at_its_own_token():
    (exact, stock), (reference, stock_reference) = twins("qwen3"), twins("qwen3", seed=5)
    groups = sampled_groups(exact, turns=3)
    config = settings(algorithm="reinforce_pp", kl_coef=0.05, gamma=0.9)
    returns = []
    kls = kl_of_episodes(stock, stock_reference, groups)
    for episode, kl in zip(episodes_of(groups), kls, strict=True):
        rewards = [-0.05 * k for k in kl]
        rewards[-1] += episode.reward
        places = range(len(kl))
        returns.append([sum(0.9 ** (u - t) * rewards[u] for u in places[t:]) for t in places])
    columns = advantages_of(config, groups, exact, reference)
    for found, expected in zip(columns, dense.whitened(returns), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


# ---- advantages of a step


def test_gdpo_compares_each_function_and_the_overlong_penalty():
    groups = sampled_groups(exact_model("qwen3"))
    rng, table = np.random.default_rng(5), {}
    for place in [(row, column) for row in range(3) for column in range(3)]:
        names = ("score", "form", "overlong", "detail")
        parts = dict(zip(names, rng.normal(size=4).tolist(), strict=True))
        # of which the first function did not apply
        table[place] = parts if place != (1, 1) else {"form": 0.5}
        groups = changed(groups, place, reward_parts=table[place])
    reward = Reward(function=["my.py:score", "form"], weights=[1.0, 0.3], overlong_penalty=0.5)
    plain = settings(aggregation="token_mean")
    config = Config(
        rl={**plain.rl.model_dump(), "advantage": "gdpo"}, reward=reward, train=plain.train
    )
    sums = np.zeros((3, 3))
    for name, weight in (("score", 1.0), ("form", 0.3), ("overlong", 1.0)):
        absent = 0.0 if name == "overlong" else None  # is not penalized, or does not apply
        for row in range(3):
            given = {n: v for n in range(3) if (v := table[row, n].get(name, absent)) is not None}
            sums[row, list(given)] += weight * np.array(dense.group_relative([*given.values()]))
    expected = (sums - sums.mean()) / (sums.std() + 1e-6)
    found = advantages_of(config, groups, exact_model("qwen3"), None)
    assert [set(column.tolist()) for column in found] == [
        {float(np.float32(a))} for a in expected.ravel()
    ]


# ---- an engine that is not exact

CAP = 1.1


@pytest.mark.parametrize(("kind", "loss"), [("tis", "ppo_clip"), ("mis", "gspo")])
def test_correction_weighs_the_policy_loss_and_neither_kl_nor_entropy_bonus(kind, loss):
    """The first ratio is 1. tests/rl/test_corrections.py has every kind by its formula."""
    (exact, stock), (reference, stock_reference) = twins("qwen3"), twins("qwen3", seed=5)
    groups = perturbed(sampled_groups(exact, turns=2), 0.1)
    config = settings(correction=kind, loss=loss, correction_cap=CAP, kl_coef=0.4, entropy_coef=0.3)
    row, gradients = learn_once(exact, groups, config, reference=reference)
    terms, factors = [], []
    for episode, advantage in zip(episodes_of(groups), grpo_of(groups), strict=True):
        logprobs = stock_logprobs(stock, episode)
        own, one_sequence = logprobs.detach(), torch.zeros(len(logprobs), dtype=torch.int64)
        factors.append(correction(kind, own, engine_of(episode), one_sequence, low=0.0, cap=CAP))
        part = dense.policy_terms(config.rl, logprobs, own, torch.full_like(logprobs, advantage))
        kl = dense.k3(logprobs, stock_logprobs(stock_reference, episode).detach())
        entropy = dense.entropies(stock, episode.tokens, episode.loss_mask, SAMPLING.temperature)
        terms.append(part * factors[-1] + 0.4 * kl - 0.3 * entropy)
    dense.aggregate("sequence_mean", terms, MAX_NEW_TOKENS).backward()
    dense.assert_gradients(gradients, stock)
    weights = torch.cat(factors)
    assert len(weights.unique()) > 3
    assert row["ratio"] == 1.0 and row["logprob_gap"] > 0.1
    assert row["correction"] == pytest.approx(float(weights.mean()), rel=1e-4)


def test_off_policy_mask_drops_bad_tokens_of_left_sequences():
    exact, stock = twins("qwen3")
    groups = perturbed(sampled_groups(exact, turns=2), 0.3, seed=2)
    config = settings(off_policy_mask=0.01)
    row, gradients = learn_once(exact, groups, config)
    advantages, dropped = grpo_of(groups), 0
    for number, episode in enumerate(episodes_of(groups)):
        off = engine_of(episode) - stock_logprobs(stock, episode).detach()
        if advantages[number] < 0 and off.mean() > 0.01:
            advantages[number] = 0.0
            dropped += len(off)
    dense_loss(config.rl, stock, episodes_of(groups), advantages).backward()
    dense.assert_gradients(gradients, stock)
    assert row["off_policy_masked"] * row["num_loss_tokens"] == pytest.approx(dropped)
    assert dropped > 0


@pytest.mark.parametrize("changes", [{"loss": "gspo"}, {"off_policy_mask": 0.001}], ids=str)
def test_sequence_with_older_tokens_is_not_held_to_ratio_1(changes):
    policy = trained(exact_model("qwen3"))
    groups = sampled_groups(policy.model, version=1, turns=2)
    for place in ((row, column) for row in range(3) for column in range(3)):
        episode = groups[place[0]].episodes[place[1]]
        first = int(np.flatnonzero(episode.loss_mask)[0])
        versions, engine = episode.weight_versions.copy(), episode.engine_logprobs.copy()
        versions[first], engine[first] = 0, engine[first] + 0.4
        groups = changed(groups, place, weight_versions=versions, engine_logprobs=engine)
    row = learn(Models(policy=policy), groups, settings(**changes), version=1)
    assert row["logprob_gap"] == 0.0 and row["ratio"] != 1.0


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "fixed_length"])
def test_sequences_with_large_logprob_error_are_not_counted(aggregation):
    exact, stock = twins("qwen3")
    groups = sampled_groups(exact)
    wrong = {(0, 2): 0.5, (1, 0): -0.6}
    for (row, place), shift in {**wrong, (2, 1): 0.1}.items():
        episode = groups[row].episodes[place]
        off = episode.engine_logprobs + np.float32(shift) * episode.loss_mask
        groups = changed(groups, (row, place), engine_logprobs=off)
    config = settings(max_logprob_error=1.2, aggregation=aggregation)
    row, gradients = learn_once(exact, groups, config)
    pairs = enumerate(zip(episodes_of(groups), grpo_of(groups), strict=True))
    kept = [pair for number, pair in pairs if divmod(number, 3) not in wrong]
    # the mask does not change the ratio
    dense_loss(config.rl, stock, *zip(*kept, strict=True)).backward()
    dense.assert_gradients(gradients, stock)
    errors = [1.0] * 6 + [math.exp(0.5), math.exp(0.6), math.exp(0.1)]
    assert row["masked_sequences"] == 2.0
    assert row["logprob_error_max"] == pytest.approx(max(errors), rel=1e-5)
    assert row["logprob_error_mean"] == pytest.approx(sum(errors) / 9, rel=1e-5)
