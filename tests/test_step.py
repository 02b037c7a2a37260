"""One step, stage by stage: what is paired with what, what is written when, and what the metrics
say."""

import json
import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from tandem.config.schema import Reward as RewardConfig
from tandem.rollout.collect import step_metrics
from tandem.rollout.episode_metrics import episode_metrics
from tandem.rollout.evaluate import Evaluator
from tandem.rollout.score import with_reward
from tandem.run_folder.episode_files import read_episodes
from tandem.run_folder.journal import Journal
from tandem.runtime.errors import UserError
from tandem.runtime.timer import Timer
from tandem.step import learn_step, rollout_step, train_step
from tandem.types import Group, Score
from tests.support.attempts import attempt
from tests.support.stages import (
    PARAMS,
    PROBLEMS,
    AddressedEngine,
    ConstantReward,
    KeyReward,
    NumberedEngine,
    config,
    groups_of_step,
    resumed,
    stages_in,
    weights_of,
)


def episode(uid="p", sample=0, *, prompt=2, count=3, error="", parts=None, text="t", **fields):
    messages = ({"role": "assistant", "content": text},)
    own = {"reward_error": error, "reward_parts": parts or {}, "messages": messages}
    return attempt(uid, sample, range(prompt + count), prompt, 3, **own, **fields)


def groups_with(*rewards, **more):
    return [
        Group(
            problem=PROBLEMS[row],
            episodes=tuple(episode(f"p{row}", n, reward=r, **more) for n, r in enumerate(group)),
        )
        for row, group in enumerate(rewards)
    ]


def test_step_pairs_every_answer_with_its_own_problem(tmp_path):
    engine = NumberedEngine()
    stages = stages_in(tmp_path, config(data__shuffle=False), engine=engine)
    stages.collector.progress.batches = 1
    train_step(stages, 0)
    digits = [2] * 3 + [3] * 3  # of the problems
    assert [r.prompt.tolist() for r in engine.requests] == [[90, digit] for digit in digits]
    assert len({r.key for r in engine.requests}) == 6
    assert {r.params for r in engine.requests} == {PARAMS}
    scored = [(problem.uid, text) for problem, text in stages.collector.runner.rewards.items]
    assert scored == [(f"p{digit}", f"text {n}") for n, digit in enumerate(digits)]
    episodes = read_episodes(tmp_path / "train_step_000001.parquet")
    for n, (digit, found) in enumerate(zip(digits, episodes, strict=True)):
        count = n % 3 + 1
        assert (found.uid, found.sample_index) == (f"p{digit}", n % 3)
        assert found.tokens.tolist() == [90, digit] + [n + 1] * count
        assert found.loss_mask.tolist() == [False, False] + [True] * count
        assert found.engine_logprobs.tolist() == [0, 0] + [-0.5] * count
        assert found.weight_versions.tolist() == [-1, -1] + [0] * count
        assert (found.reward, found.reward_error) == ((0, "it broke") if n == 4 else (n % 3, ""))


def test_step_writes_journal_before_learning_publishes_after(tmp_path):
    stages = stages_in(tmp_path, config(), engine=NumberedEngine())
    for step in range(2):
        train_step(stages, step)
        assert stages.collector.runner.engine.weight_version == step + 1
    first, second = "train_step_000001.parquet", "train_step_000002.parquet"
    assert stages.models.policy.optimizer.saw == [([first], 0), ([first, second], 1)]


def test_step_on_real_engine_has_gap_0_and_moves_weights(tmp_path):
    stages = stages_in(tmp_path, config())
    before = weights_of(stages)
    for step in range(3):
        result = train_step(stages, step)
        metrics, timings = result.metrics, result.timings
        assert (metrics["logprob_gap"], metrics["ratio"], metrics["clip_share"]) == (0.0, 1.0, 0.0)
        assert metrics["num_loss_tokens"] == 6 * PARAMS.max_new_tokens and metrics["grad_norm"] > 0
    assert not any(weight == before[name] for name, weight in weights_of(stages).items())
    told = "rollout_s reward_s apply_s check_s journal_s learn_s sync_s step_s sync_bytes"
    assert timings.keys() == {*told.split(), "generated_tokens_per_s"}


def test_overlong_penalty_is_a_part_of_the_reward():
    verdict = Score(reward=2.0, parts={"answer": 2.0})
    made = [
        with_reward(episode(stop_reason=r), verdict, RewardConfig(overlong_penalty=0.25), 6)
        for r in ("stop", "length")
    ]
    assert [(e.reward, e.reward_parts) for e in made] == [
        (2.0, {"answer": 2.0}),
        (1.75, {"answer": 2.0, "overlong": -0.25}),
    ]


def test_step_is_shaped_and_evaluation_is_not(tmp_path):
    settings = config(eval__samples=2, rollout__max_new_tokens=6, reward__overlong_penalty=1.0)
    # it cuts every other one
    stages = stages_in(tmp_path, settings, engine=NumberedEngine(), reward=ConstantReward(1.0))
    assert train_step(stages, 0).metrics["reward_part/overlong"] == -0.5
    runner, journal = stages.collector.runner, Journal(tmp_path, "run", PROBLEMS)
    metrics = Evaluator(config=settings, problems=PROBLEMS, runner=runner, journal=journal)(0)
    assert metrics["eval/sampled_truncated"] == 0.5
    assert metrics["eval/sampled"] == metrics["eval/greedy"] == 1.0
    for kind in ("sampled", "greedy"):
        groups = journal.read(0, f"eval_{kind}")[0]
        assert len(groups) == len(PROBLEMS)
        assert not any(e.reward_parts for group in groups for e in group.episodes)


def test_correction_makes_ratio_relative_to_trainers_logprobs(tmp_path):
    """The scripted engine's log-probs are not the policy's: a gap, but with TIS the first ratio is
    still 1."""
    rows = []
    for kind in ("none", "tis"):
        stages = stages_in(tmp_path / kind, config(rl__correction=kind), engine=NumberedEngine())
        rows.append(train_step(stages, 0).metrics)
    assert rows[0]["logprob_gap"] == rows[1]["logprob_gap"] > 0
    assert rows[0]["ratio"] != 1.0 and rows[1]["ratio"] == 1.0


# What a step leaves to the next
# ---------------------------------------------------------------------------------------


def journal(folder, step):
    """The groups of a step by outcome."""
    groups, kinds = groups_of_step(folder, step), ("train", "carry", "no_signal")
    return {kind: [g for g in groups if g.outcome == kind] for kind in kinds}


# groups without signal do have advantages under it
EMA = {"rl__advantage": "ema", "rl__max_gen_batches": 0}


def keys_of(groups):
    """Each group by the texts of its episodes, which are the keys of their draws."""
    return [tuple(int(e.text) for e in group.episodes) for group in groups]


def dynamic(folder, limit=50, **changes):
    """Stages with dynamic sampling, three groups of two in a step; each has signal with a chance of
    2/3."""
    size = {"rl__prompts_per_step": 3, "rl__group_size": 2}
    settings = config(**{"rl__max_gen_batches": limit, **size, **changes})
    return stages_in(folder, settings, engine=AddressedEngine(), reward=KeyReward())


def observed_step(stages, step):
    """A step by its parts: (metrics, sorted tokens that carried loss)."""
    targets = []
    batch = rollout_step(stages, step, Timer())
    learned = learn_step(stages, batch, lambda microbatch, *_: targets.extend(microbatch.targets))
    stages.sync.publish(step + 1)
    return step_metrics(batch, learned, stages.config), sorted(targets)


def test_dynamic_sampling_trains_each_group_with_signal_once(tmp_path):
    stages = dynamic(tmp_path)
    progress, fates, carried = stages.collector.progress, {}, []
    for step in range(20):
        drawn_before = progress.batches
        metrics, targets = observed_step(stages, step)
        groups = journal(tmp_path, step)
        trained = [e for group in groups["train"] for e in group.episodes]
        assert targets == sorted(t for e in trained for t in e.tokens[e.loss_mask].tolist())
        now = {kind: keys_of(members) for kind, members in groups.items()}
        # those that waited come first
        assert len(now["train"]) == 3 and now["train"][: len(carried)] == carried
        for kind, members in now.items():
            for group in members:
                assert (len({key % 3 for key in group}) == 2) == (kind != "no_signal")
                fates[group] = [*fates.get(group, []), kind]
        drawn = 3 * (progress.batches - drawn_before)
        assert sum(map(len, now.values())) == len(carried) + drawn
        for kind in ("carry", "no_signal"):
            assert metrics.get(f"groups/{kind}", 0) == len(now[kind])
        assert len(now["carry"]) < 3  # no batch is drawn for a step that is full
        carried = now["carry"]
        assert keys_of(progress.carried) == carried
    requested = [r.key for r in stages.collector.runner.engine.requests]
    assert sorted(key for group in fates for key in group) == sorted(requested)
    # all have happened, and nothing else
    kinds = {("train",), ("no_signal",), ("carry", "train")}
    assert kinds <= {tuple(fate) for fate in fates.values()} <= {*kinds, ("carry",)}
    assert [group for group, fate in fates.items() if fate == ["carry"]] == carried


def test_carried_group_keeps_the_version_that_sampled_it(tmp_path):
    stages, ages = dynamic(tmp_path), set()
    for step in range(6):
        train_step(stages, step)
        for group in journal(tmp_path, step)["train"]:
            ages |= {step - int(v) for e in group.episodes for v in e.weight_versions[2:]}
    assert ages == {0, 1}


@pytest.mark.parametrize("changes", [{}, {"rl__curriculum": True}, EMA], ids=str)
def test_run_resumed_at_any_step_is_like_one_never_stopped(changes, tmp_path):
    whole = dynamic(tmp_path / "whole", **changes)
    states = []
    for step in range(5):
        train_step(whole, step)
        states.append(json.dumps(whole.collector.progress.state()))
    for done in range(1, 5):
        folder = tmp_path / f"resumed at {done}"
        shutil.copytree(tmp_path / "whole", folder)
        again = resumed(dynamic(folder, **changes), done, json.loads(states[done - 1]))
        for step in range(done, 5):
            path = folder / f"train_step_{step + 1:06d}.parquet"
            path.unlink()
            train_step(again, step)
            assert path.read_bytes() == (tmp_path / "whole" / path.name).read_bytes()
        progress, expected = again.collector.progress, whole.collector.progress
        assert progress.state() == json.loads(states[-1])
        assert keys_of(progress.carried) == keys_of(expected.carried)


def test_step_that_cannot_be_filled_names_both_settings(tmp_path):
    stages = dynamic(tmp_path, limit=2, run__seed=2)  # its fourth step has bad luck
    with pytest.raises(UserError, match="could not fill a step") as caught:
        for done in range(8):
            state = json.dumps(stages.collector.progress.state())
            files = {p: p.read_bytes() for p in tmp_path.glob("train_*")}
            train_step(stages, done)
    assert done > 0 and {p: p.read_bytes() for p in tmp_path.glob("train_*")} == files
    where = caught.value.where
    assert f"step {done + 1}" in where and "after 2 batches (rl.max_gen_batches)" in where
    assert "rl.prompts_per_step" in caught.value.expected
    assert "raise rl.max_gen_batches" in caught.value.next
    train_step(resumed(dynamic(tmp_path, run__seed=2), done, json.loads(state)), done)
    other = dynamic(tmp_path / "other", run__seed=2)
    for step in range(done + 1):
        train_step(other, step)
    name = f"train_step_{done + 1:06d}.parquet"
    assert (tmp_path / name).read_bytes() == (tmp_path / "other" / name).read_bytes()


def test_curriculum_prefers_neither_solved_nor_hopeless(tmp_path):
    collector = stages_in(tmp_path, config(rl__curriculum=True), engine=AddressedEngine()).collector
    # p4 has not been seen: 1/2
    collector.progress.rates |= {"p0": 1.0, "p1": 0.0, "p2": 1.0, "p3": 0.5}
    drawn = Counter(group.problem.uid for _ in range(200) for group in collector.begin_batch())
    assert drawn["p3"] > 150 and drawn["p4"] > 150 and sum(drawn.values()) == 400
    assert all(0 < drawn[uid] < 40 for uid in ("p0", "p1", "p2"))  # they come back now and then


def test_curriculum_keeps_last_success_rate_of_each_problem(tmp_path):
    stages = dynamic(tmp_path, rl__curriculum=True)
    for step in range(4):
        train_step(stages, step)
    order = [r.key for r in stages.collector.runner.engine.requests]
    by_step = [groups for step in range(4) for groups in journal(tmp_path, step).values()]
    sampled = {keys_of([group])[0]: group for groups in by_step for group in groups}
    last = {}
    for keys in sorted(sampled, key=lambda keys: order.index(keys[0])):
        last[sampled[keys].problem.uid] = sampled[keys].rewards.mean()
    assert stages.collector.progress.rates == last and {0.5} < set(last.values())


@pytest.mark.parametrize("advantage", ["ema", "examples/own_functions.py:advantage"])
def test_ema_baseline_is_from_before_the_step(advantage, tmp_path):
    reward, settings = ConstantReward(0.0), config(rl__advantage=advantage, rl__ema_decay=0.75)
    stages = stages_in(tmp_path, settings, engine=NumberedEngine(), reward=reward)
    baselines = []
    for step, reward.reward in enumerate((1.0, 3.0, 5.0)):
        baselines.append(rollout_step(stages, step, Timer()).baseline)
        stages.sync.publish(step + 1)
    assert baselines == [1.0, 1.0, 0.75 * 1 + 0.25 * 3]  # the first step's own mean starts it


def test_episode_metrics_count_what_episodes_were_like():
    cut = groups_with([1.0, 0.0], [0.5, 0.5], stop_reason="length", parts={"answer": 1.0})
    episodes = episode(count=6, error="x", parts={"style": 2.0}), episode(count=0)
    assert episode_metrics([*cut, Group(problem=PROBLEMS[2], episodes=episodes)]) == {
        "reward": pytest.approx(2 / 6),
        "reward_std": pytest.approx(np.std([1, 0, 0.5, 0.5, 0, 0])),
        "reward_part/answer": pytest.approx(4 / 6),
        "reward_part/style": pytest.approx(2 / 6),
        "groups_without_signal": pytest.approx(2 / 3),
        "completion_tokens": pytest.approx((4 * 3 + 6 + 0) / 6),
        "truncated": pytest.approx(4 / 6),
        "reward_errors": 1.0,
    }


def test_masked_episodes_move_no_reward_metric():
    [group] = groups_with([1.0, 0.5, -9.0])
    failed = replace(group.episodes[2], masked=True, env_error="it broke", stop_reason="error")
    group = replace(group, episodes=(*group.episodes[:2], failed))
    row = episode_metrics([group])
    assert (row["reward"], row["reward_std"], row["env_errors"]) == (0.75, 0.25, 1.0)
    assert episode_metrics([replace(group, episodes=(failed,) * 3)])["reward"] == 0.0
