"""Episodes as metadata and arrays apart: a step planned from metadata, and trained by ranks that
have the arrays of their own share, ends in the same bits."""

import numpy as np
import pytest

from tandem.plugins.cluster.rows import ARRAYS, groups_of
from tandem.rollout.checks import check_groups
from tandem.rollout.collect import RolloutBatch
from tandem.runtime.errors import InvariantError
from tandem.trainer.batch import Models, not_finite, pack_batch, plan_share
from tandem.trainer.learner import Learner
from tandem.trainer.ranks import Ranks
from tests.support.episodes import changed, episodes_of
from tests.support.meshes import on_mesh
from tests.support.streams import (
    config_of,
    groups_to_learn,
    tags_of,
    through_memory_on,
    through_rows_on,
)

TIMES = {"correction": "tis", "max_logprob_error": 1.2}
CONFIGS = {
    "grpo": {"minibatches": 2},
    "corrected": TIMES,
    "other engine": {**TIMES, "engine": "vllm"},
}


class Half(Ranks):
    shares, size = 2, 2

    def __init__(self, rank):
        self.rank = rank

    def own(self, microbatches):
        return microbatches[self.rank :: 2]


def placeholders(groups):
    return groups_of(tags_of(groups), {})


def shares_of(groups, config):
    models = [Models(policy=Learner(None, None, Half(rank))) for rank in range(2)]
    return [plan_share(placeholders(groups), config, m) for m in models]


def test_placeholders_pass_for_the_episodes_in_all_but_their_values():
    groups = groups_to_learn()
    found = placeholders(groups)
    assert [group.outcome for group in found] == [group.outcome for group in groups]
    for group, other in zip(groups, found, strict=True):
        assert (group.rewards == other.rewards).all() and (group.valid == other.valid).all()
    for episode, other in zip(episodes_of(groups), episodes_of(found), strict=True):
        for name in ARRAYS:
            own, stood = getattr(episode, name), getattr(other, name)
            assert own.dtype == stood.dtype and own.shape == stood.shape
        assert other.loss_mask.sum() == episode.loss_mask.sum()
        assert (other.trainable, other.stop_reason) == (episode.trainable, episode.stop_reason)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_groups_are_packed_alike_by_lengths_alone(minibatches):
    config = config_of(minibatches=minibatches)
    trained = [g for g in groups_to_learn() if g.outcome == "train"]
    plans = [
        [[(b.samples.tolist(), len(b.tokens), len(b.targets)) for b in m] for m in batch]
        for batch in (
            pack_batch(groups, config, Half(0)).minibatches
            for groups in (trained, placeholders(trained))
        )
    ]
    assert plans[0] == plans[1] and len(plans[0]) == minibatches


def test_shares_are_all_episodes_that_carry_loss_and_none_of_a_group_left_out():
    groups = groups_to_learn()
    first, second = shares_of(groups, config_of())
    everything = {(row, n) for row in (0, 2, 3, 4, 5, 6) for n in range(3)} - {(4, 1)}
    assert first | second == everything
    assert first and second and len(first & second) == 0
    alone = plan_share(groups, config_of(), Models(policy=Learner(None, None)))
    assert alone == everything
    # where the whole step is compared
    assert shares_of(groups, config_of(**TIMES)) == [everything, everything]


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
def test_two_ranks_with_the_arrays_of_their_own_share_learn_the_bits_of_two_with_all(changes):
    (rows, weights), (others, _) = on_mesh(through_memory_on, changes, data=2)
    (found, same, fetched), (_, _, more) = on_mesh(through_rows_on, changes, data=2)
    assert found == rows == others and same == weights
    shares, own_only = ({*fetched}, {*more}), "minibatches" in changes
    assert len(shares[0] | shares[1]) == 17
    assert [len(share) < 17 for share in shares] == [own_only, own_only]
    gaps = ["logprob_gap_mean" in row for row in rows]
    assert gaps == [changes.get("engine") == "vllm", False]


def test_a_placeholder_has_no_prompt_of_another_group_whose_checksum_is_the_same():
    groups = groups_to_learn()
    tags = tags_of(groups)
    for place in ((2, 0), (2, 1), (3, 0)):
        tags[place]["prompt"] = 7
    fetched = groups[2].episodes[0]
    found = groups_of(tags, {(2, 0): {name: getattr(fetched, name) for name in ARRAYS}})
    prompt = fetched.tokens[: fetched.num_prompt_tokens]
    assert (found[2].episodes[1].tokens[: len(prompt)] == prompt).all()
    assert set(found[3].episodes[0].tokens.tolist()) == {7}


@pytest.mark.parametrize("name", ["engine_logprobs", "penalties"])
def test_a_value_that_is_not_finite_is_seen_by_a_rank_that_has_not_fetched_it(name):
    groups = groups_to_learn()
    wrong = getattr(groups[0].episodes[0], name).copy()
    wrong[-1] = np.nan
    found = placeholders(changed(groups, (0, 0), **{name: wrong}))
    assert np.isnan(getattr(found[0].episodes[0], name)).any()
    batch = pack_batch(found[:1], config_of(prompts_per_step=1))
    assert bool(not_finite(batch)) == (name == "engine_logprobs")
    assert not np.isnan(getattr(placeholders(groups)[0].episodes[0], name)).any()


def test_a_prompt_that_is_not_the_groups_is_seen_without_its_tokens():
    groups = groups_to_learn()
    other = groups[0].episodes[1].tokens.copy()
    other[0] += 1
    for wrong, fails in ((groups, False), (changed(groups, (0, 1), tokens=other), True)):
        first = {n: getattr(wrong[0].episodes[0], n) for n in ARRAYS}
        for arrays in ({}, {(0, 0): first}):
            found = groups_of(tags_of(wrong), arrays)
            batch = RolloutBatch(step=0, groups=found, num_carried=0, baseline=0.0, state={})
            try:
                check_groups(batch, 1.0)
            except InvariantError:
                assert fails
            else:
                assert not fails
