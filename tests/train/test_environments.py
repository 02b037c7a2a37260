"""What environments leave for training: penalties of single turns, and episodes that carry no
loss."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tandem.config.schema import Env
from tandem.rl.advantages import penalize
from tandem.train.learn import Models, learn, penalized, start, token_advantages
from tandem.types import Group
from tests.support import dense
from tests.support.episodes import (
    HOW,
    MAX_NEW_TOKENS,
    bits,
    changed,
    engine_of,
    sampled_groups,
    settings,
    trained,
)
from tests.support.tiny import exact_model, twins
from tests.train.test_learn import grpo_of, learn_once, stock_logprobs


def with_env(config, **env):
    return config.model_copy(update={"env": Env(**env)})


def second_turn(episode):
    """bool [T]: the tokens sampled after the model was first answered."""
    own = np.flatnonzero(episode.loss_mask)
    return episode.loss_mask & (
        np.arange(len(episode.tokens)) > own[np.flatnonzero(np.diff(own) > 1)[0]]
    )


def penalizing(groups, *places):
    for (row, place), penalty in places:
        mask = second_turn(groups[row].episodes[place])
        groups = changed(
            groups, (row, place), penalties=np.where(mask, np.float32(penalty), np.float32(0))
        )
    return groups


PLACES = [((0, 1), 0.5), ((2, 0), 2.0)]


def expected_advantages(groups, mode):
    """float64 by episode and token, by hand."""
    columns = []
    for episode, advantage in zip(
        [e for g in groups for e in g.episodes], grpo_of(groups), strict=True
    ):
        column = np.full(int(episode.loss_mask.sum()), float(advantage))
        penalties = episode.penalties[episode.loss_mask]
        columns.append(
            np.where(penalties > 0, -penalties if mode == "set" else column - penalties, column)
        )
    return columns


@pytest.mark.parametrize("mode", ["lower", "set"])
def test_the_penalty_of_a_turn_changes_the_advantage_of_its_tokens_and_of_no_others(mode):
    exact, stock = twins("qwen3")
    groups = penalizing(sampled_groups(exact, turns=2), *PLACES)
    config = with_env(settings(), penalty_mode=mode)
    _, gradients = learn_once(exact, groups, config, exact=True)
    terms, changed_tokens = [], 0
    for episode, column in zip(
        [e for g in groups for e in g.episodes], expected_advantages(groups, mode), strict=True
    ):
        logprobs = stock_logprobs(stock, episode)
        terms.append(
            dense.policy_terms(
                config.rl, logprobs, engine_of(episode), torch.tensor(column, dtype=logprobs.dtype)
            )
        )
        changed_tokens += len(np.unique(column)) - 1
    # two turns of one episode differ, in exactly these episodes
    assert changed_tokens == len(PLACES)
    dense.aggregate("sequence_mean", terms, MAX_NEW_TOKENS).backward()
    dense.assert_gradients(gradients, stock)


@pytest.mark.parametrize("algorithm", ["reinforce_pp", "gspo", "cispo"])
def test_a_penalty_counts_whatever_the_algorithm(algorithm):
    groups = penalizing(sampled_groups(exact_model("qwen3"), turns=2), *PLACES)
    config = settings(algorithm=algorithm)
    step = start(groups, config)
    step.advantages, _ = token_advantages(step, config, 0.0)
    found = penalized(step, "set")
    for sample, place in enumerate(step.places):
        penalty = dict(PLACES).get(place)
        wanted = step.advantages[sample].copy()
        if penalty:
            episode = step.episode(sample)
            wanted[second_turn(episode)[episode.loss_mask]] = -penalty
        assert np.array_equal(found[sample], wanted)


def test_without_penalties_no_bit_of_an_advantage_changes():
    advantages = np.random.default_rng(0).normal(size=9).astype(np.float32)
    for mode in ("lower", "set"):
        assert penalize(advantages, np.zeros(9, np.float32), mode).tobytes() == advantages.tobytes()


def test_a_masked_episode_carries_no_loss_and_moves_no_other_advantage_but_in_scale():
    """Left out of the group entirely, the others' centred rewards are the same."""
    model = exact_model("qwen3")
    groups = sampled_groups(model)
    failed = changed(groups, (1, 2), masked=True, reward=-50.0, stop_reason="error")
    config = settings(advantage="grpo_no_std")
    step = start(failed, config)
    assert (1, 2) not in step.places and len(step.places) == 8
    advantages, _ = token_advantages(step, config, 0.0)
    others = Group(problem=groups[1].problem, episodes=groups[1].episodes[:2])
    wanted = others.rewards - others.rewards.mean()
    found = [advantages[step.places.index((1, place))][0] for place in (0, 1)]
    assert found == pytest.approx(wanted.tolist(), abs=1e-6) and failed[1].rewards[
        2
    ] == pytest.approx(others.rewards.mean())


def test_an_episode_without_a_sampled_token_and_a_group_of_failures_are_left_out():
    policy = trained(exact_model("qwen3"))
    groups = sampled_groups(policy.model)
    silent = replace(
        groups[0].episodes[0],
        loss_mask=np.zeros(len(groups[0].episodes[0].tokens), bool),
        stop_reason="error",
    )
    groups = [
        Group(problem=groups[0].problem, episodes=(silent, *groups[0].episodes[1:])),
        *groups[1:],
    ]
    for place in range(3):
        groups = changed(groups, (2, place), masked=True, stop_reason="time")
    assert groups[2].rewards.tolist() == [0.0] * 3
    before = bits(policy)
    row = learn(Models(policy=policy), groups, settings(), HOW, version=0)
    tokens = sum(int(e.loss_mask.sum()) for g in groups[:2] for e in g.episodes)
    assert row["num_loss_tokens"] == tokens and row["logprob_gap"] == 0.0 and bits(policy) != before


def test_an_episode_cut_by_its_token_limit_is_truncated_too():
    groups = changed(sampled_groups(exact_model("qwen3")), (0, 0), stop_reason="tokens")
    assert len(start(groups, settings(mask_truncated=True)).places) == 8
