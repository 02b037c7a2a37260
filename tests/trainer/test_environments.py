"""Traces of environments in training: penalties of single turns, and episodes that carry no
loss."""

from dataclasses import replace

import numpy as np
import pytest

from tandem.config.schema import Env
from tandem.trainer.batch import Models, pack_batch
from tandem.trainer.learn import token_advantages
from tandem.types import Group
from tests.support import dense
from tests.support.episodes import (
    bits,
    changed,
    dense_loss,
    episodes_of,
    grpo_of,
    learn,
    learn_once,
    sampled_groups,
    settings,
    trained,
)
from tests.support.tiny import exact_model, twins

PLACES = [((0, 1), 0.5), ((2, 0), 2.0)]


def penalizing(groups):
    """Penalize the tokens of PLACES that were sampled after the model was first answered."""
    for (row, place), penalty in PLACES:
        mask = groups[row].episodes[place].loss_mask
        own = np.flatnonzero(mask)
        later = mask & (np.arange(len(mask)) > own[np.flatnonzero(np.diff(own) > 1)[0]])
        penalties = np.where(later, np.float32(penalty), np.float32(0))
        groups = changed(groups, (row, place), penalties=penalties)
    return groups


def expected_advantages(groups, mode):
    """float64 by episode and token, by hand."""
    columns = []
    for episode, advantage in zip(episodes_of(groups), grpo_of(groups), strict=True):
        column = np.full(int(episode.loss_mask.sum()), float(advantage))
        penalties = episode.penalties[episode.loss_mask]
        columns.append(
            np.where(penalties > 0, -penalties if mode == "set" else column - penalties, column)
        )
    return columns


@pytest.mark.parametrize("mode", ["lower", "set"])
def test_penalty_of_a_turn_changes_its_tokens_and_no_others(mode):
    exact, stock = twins("qwen3")
    groups = penalizing(sampled_groups(exact, turns=2))
    config = settings().model_copy(update={"env": Env(penalty_mode=mode)})
    _, gradients = learn_once(exact, groups, config, exact=True)
    columns = expected_advantages(groups, mode)
    # two turns of one episode differ, in exactly these episodes
    assert sum(len(np.unique(column)) - 1 for column in columns) == len(PLACES)
    dense_loss(config.rl, stock, episodes_of(groups), columns).backward()
    dense.assert_gradients(gradients, stock)


def test_masked_episode_has_no_loss_and_moves_no_other_advantage():
    """Left out of the group entirely, the others' centred rewards are the same."""
    groups = sampled_groups(exact_model("qwen3"))
    failed = changed(groups, (1, 2), masked=True, reward=-50.0, stop_reason="error")
    config = settings(advantage="grpo_no_std")
    batch = pack_batch(failed, config)
    assert (1, 2) not in batch.sample_index and len(batch.sample_index) == 8
    advantages, _ = token_advantages(batch, config, 0.0)
    others = Group(problem=groups[1].problem, episodes=groups[1].episodes[:2])
    wanted = others.rewards - others.rewards.mean()
    found = [advantages[batch.sample_index.index((1, place))][0] for place in (0, 1)]
    assert found == pytest.approx(wanted.tolist(), abs=1e-6)
    assert failed[1].rewards[2] == pytest.approx(others.rewards.mean())


def test_episode_without_samples_and_failed_group_are_left_out():
    policy = trained(exact_model("qwen3"))
    groups = sampled_groups(policy.model)
    size = len(groups[0].episodes[0].tokens)
    silent = replace(
        groups[0].episodes[0],
        loss_mask=np.zeros(size, bool),
        weight_versions=np.full(size, -1, np.int32),
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
    row = learn(Models(policy=policy), groups, settings())
    tokens = sum(int(e.loss_mask.sum()) for g in groups[:2] for e in g.episodes)
    assert row["num_loss_tokens"] == tokens and row["logprob_gap"] == 0.0 and bits(policy) != before
