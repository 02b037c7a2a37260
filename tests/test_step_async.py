"""Rollouts ahead of the training, and partial ones: which weights sample what; neither threads nor
pauses change a bit."""

from collections import Counter
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from tandem.rollout.env_pool import EnvPool
from tandem.rollout.episode_builder import new_groups
from tandem.rollout.episodes import run_episodes
from tandem.run_folder.episode_files import read_episodes
from tandem.runtime.errors import InvariantError, UserError
from tandem.step import train_step
from tandem.step_async import RolloutPrefetcher
from tandem.trainer.parity import ExactCheck
from tandem.types import Env, Observation
from tests.support.ahead import STEPS, SlowSync, VersionedEngine, journal_of, ran, versions
from tests.support.episodes import own_logprobs
from tests.support.playing import user
from tests.support.stages import (
    PARAMS,
    KeyReward,
    config,
    groups_of_step,
    stages_in,
    weights_of,
    with_runner,
)


@pytest.mark.parametrize("staleness", [1, 2, 7])
def test_step_is_sampled_by_weights_of_its_staleness_only(staleness, tmp_path):
    stages, rows = ran(tmp_path, staleness, 1)
    behind = [float(min(t, staleness)) for t in range(STEPS)]
    assert [row["staleness/max"] for row in rows] == behind
    assert [row["staleness/mean"] for row in rows] == behind
    sampled_by = [max(0, t - staleness) for t in range(STEPS)]
    assert [versions(tmp_path, step) for step in range(STEPS)] == [{v} for v in sampled_by]
    assert stages.sync.synced == [(version, "rollouts") for version in sampled_by]


@pytest.mark.parametrize(
    "changes", [{}, {"rl__max_gen_batches": 50}, {"rl__curriculum": True}], ids=str
)
def test_thread_or_not_the_same_bits_come_out(changes, tmp_path):
    inline, rows = ran(tmp_path / "inline", 2, 0, **changes)
    threaded, others = ran(tmp_path / "threaded", 2, 1, **changes)
    assert rows == others and weights_of(inline) == weights_of(threaded)
    assert len(journal_of(tmp_path / "inline")) == STEPS
    assert journal_of(tmp_path / "inline") == journal_of(tmp_path / "threaded")


def test_staleness_0_is_the_synchronous_step(tmp_path):
    stages_ahead, rows = ran(tmp_path / "ahead", 0, 0)
    stages = stages_in(tmp_path / "sync", config(), engine=VersionedEngine(), reward=KeyReward())
    assert rows == [train_step(stages, step).metrics for step in range(STEPS)]
    assert not [name for row in rows for name in row if "staleness" in name]
    assert weights_of(stages_ahead) == weights_of(stages)


class GappyEngine(VersionedEngine):
    """It does not agree with the trainer on what it sampled, from some version on."""

    gap, first = 1e-7, 2

    def logprob_gap(self):
        return self.gap if self.weight_version >= self.first else 0.0


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("gap", [1e-7, float("nan")])
def test_sampled_logprobs_are_checked_before_they_are_kept(gap, workers, tmp_path):
    settings = config(rollout__staleness=1, rollout__workers=workers)
    stages = stages_in(tmp_path, settings, engine=(engine := GappyEngine()), reward=KeyReward())
    engine.gap, sync = gap, SlowSync(engine)
    stages = replace(stages, sync=sync, parity=ExactCheck())
    with closing(RolloutPrefetcher(stages, STEPS)) as prefetcher:
        sync.publish(0)
        prefetcher.start(0)
        for version in (1, 2):  # nothing is learned: the scripted log-probs are no model's
            prefetcher.get(version - 1)
            prefetcher.publish(version)
        differs = r"(?s)do not agree on a completion just sampled.*rollouts of step 4"
        with pytest.raises(InvariantError, match=differs):
            for step in (2, 3):
                prefetcher.get(step)
    assert len(list(tmp_path.glob("train_step_*.parquet"))) == 3  # those before it


def test_rollout_by_weights_that_are_gone_is_refused(tmp_path):
    stages = stages_in(tmp_path, config(rollout__staleness=1))
    stages.sync.publish(3)
    gone = pytest.raises(UserError, match="the weights of a rollout are gone")
    with closing(RolloutPrefetcher(stages, STEPS)) as prefetcher, gone:
        prefetcher.start(3)  # the journal of step 4, sampled by version 2, is not there
        prefetcher.get(3)


# Partial rollouts
# --------------------------------------------------------------------------------


def partial_stages(folder, budget, sampling=PARAMS, **changes):
    changes |= {"rollout__token_budget": budget, "rl__correction": "tis"}
    return stages_in(folder, config(rollout__max_new_tokens=6, **changes), sampling=sampling)


def test_partial_rollout_has_each_tokens_version_trains_once(tmp_path):
    stages = partial_stages(tmp_path, 4)
    seen, mixed = {}, 0
    for step in range(STEPS):
        train_step(stages, step)
        groups = groups_of_step(tmp_path, step)
        assert sum(g.outcome == "train" for g in groups) == stages.config.rl.prompts_per_step
        for group in groups:
            seen.setdefault(tuple(e.key for e in group.episodes), []).append(group.outcome)
            for episode in group.episodes:
                tokens = episode.weight_versions[episode.loss_mask]
                assert (np.diff(tokens) >= 0).all()
                assert (len(tokens) == 6) == (episode.stop_reason != "paused")
                mixed += len(set(tokens.tolist())) > 1
    assert mixed  # weights did change in the middle of sequences
    for fates in seen.values():
        assert fates[-1] in ("train", "carry", "unfinished") and fates.count("train") <= 1


def test_partial_rollout_token_has_logprob_of_its_own_weights(tmp_path):
    """Paused after each budget and gone on with under other weights, against one go under each of
    those weights."""
    stages = partial_stages(tmp_path, 2)
    models = {}
    for step in range(4):
        models[step] = {n: w.clone() for n, w in stages.models.policy.model.named_weights().items()}
        train_step(stages, step)
    checked = 0
    for episode in read_episodes(tmp_path / "train_step_000004.parquet"):
        for version in set(episode.weight_versions[episode.loss_mask].tolist()):
            stages.models.policy.model.load_weights(models[version])
            held = stages.models.policy.model, episode.tokens, episode.loss_mask, PARAMS
            mask = episode.loss_mask & (episode.weight_versions == version)
            assert np.array_equal(own_logprobs(*held)[mask], episode.engine_logprobs[mask])
            checked += int(mask.sum())
    assert checked


def run(stages, groups, envs, budget, sampling=PARAMS):
    """The groups with what their episodes are after a tick of so many tokens."""
    runner, how = stages.collector.runner, {"sampling": sampling, "token_budget": budget}
    parts = {"engine": runner.engine, "renderer": runner.renderer, "envs": envs}
    played = run_episodes(groups, **parts, **how)
    return [replace(group, episodes=of) for group, of in zip(groups, played, strict=True)]


def test_pauses_change_nothing_while_the_weights_stay(tmp_path):
    """The same groups, whole and paused after every token or two."""
    stages = partial_stages(tmp_path, 1)
    groups, envs = new_groups(stages.collector.problems, 3, ("test",)), stages.collector.runner.envs
    whole = run(stages, groups, envs, 0)
    for budget in (1, 2, 5):
        paused, pauses = groups, 0
        while any(e.stop_reason == "paused" for group in paused for e in group.episodes):
            paused, pauses = run(stages, paused, envs, budget), pauses + 1
        assert repr(paused) == repr(whole) and pauses == -(-6 // budget)


class Falling(Env):
    """Fails where the problem's digit is 0; the others answer twice."""

    turns = 0

    def reset(self, problem):
        if problem.messages[-1]["content"] == "0":
            raise ValueError("it fell")
        return problem.messages

    def step(self, text):
        self.turns += 1
        return Observation(messages=user("1"), done=self.turns == 2, reward=0.5)


def test_episodes_that_fail_at_once_do_not_stop_paused_ones(tmp_path):
    """The first tick ends with two episodes, both of which failed."""
    size = {"rl__prompts_per_step": 5, "rl__group_size": 2}
    environment = {"reward__function": "env", "env__name": "x.py:X"}
    sampling = replace(PARAMS, max_new_tokens=5, stop_token_ids=(91,))
    stages = partial_stages(tmp_path, 2, sampling, **size, **environment)
    stages = with_runner(stages, envs=EnvPool(make=Falling, limits=stages.config.env))
    for step in range(3):
        train_step(stages, step)
    failed = [e for e in read_episodes(tmp_path / "train_step_000001.parquet") if e.env_error]
    assert len(failed) >= 2 and all("it fell" in e.env_error for e in failed)


class Counting(Env):
    """Says how often it was asked; notes every call of every instance."""

    calls = []  # noqa: RUF012
    turns = 0

    def reset(self, problem):
        self.calls.append("reset")
        return problem.messages

    def step(self, text):
        self.calls.append("step")
        self.turns += 1
        said, done = user(str(self.turns)), self.turns == 3
        return Observation(messages=said, done=done, reward=float(self.turns))


def continued(stages, make, budget, anew):
    """Two episodes of three turns, a few tokens at a time; anew: as after a kill, with no
    environment left."""
    envs = EnvPool(make=make, limits=stages.config.env)
    groups = new_groups(stages.collector.problems[:1], 2, ("test",))
    sampling = replace(PARAMS, stop_token_ids=tuple(range(0, 90, 3)))
    while any(e.stop_reason == "paused" for e in groups[0].episodes):
        groups = run(stages, groups, envs, budget, sampling)
        if anew:
            envs.close()
            assert not envs.paused
    return groups


def test_paused_episode_goes_on_in_a_new_environment_alike(tmp_path):
    stages = partial_stages(tmp_path, 1)
    whole = continued(stages, Counting, 0, anew=False)
    assert any(e.num_turns > 1 for e in whole[0].episodes)
    for budget in (1, 2, 3):
        Counting.calls.clear()
        assert repr(continued(stages, Counting, budget, anew=False)) == repr(whole)
        kept = Counter(Counting.calls)
        assert kept["reset"] == 2  # each episode kept the environment it had
        Counting.calls.clear()
        assert repr(continued(stages, Counting, budget, anew=True)) == repr(whole)
        again = Counter(Counting.calls)
        # brought to the same place
        assert again["reset"] > kept["reset"] and again["step"] > kept["step"]
