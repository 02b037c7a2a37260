"""One step, stage by stage: what is paired with what, what is written when, and what the metrics
say."""

import json
import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from tandem.config.schema import Config
from tandem.config.schema import Reward as RewardConfig
from tandem.engine.engine import Engine
from tandem.jobs.commands import _restore
from tandem.model.forward import batch_logprobs
from tandem.model.logprobs import SamplingDistribution
from tandem.rl.advantages import group_advantages
from tandem.rollout.episode_metrics import episode_metrics
from tandem.rollout.episodes import EnvPool
from tandem.rollout.evaluate import evaluate
from tandem.rollout.score import RolloutRunner, Timer, scored
from tandem.run_folder.episode_files import read_episodes, read_groups
from tandem.run_folder.journal import Journal
from tandem.runtime.errors import UserError
from tandem.step import Stages, begin_batch, collect, distill_step, update
from tandem.step import train_step as whole_step
from tandem.train.learn import Models, learn, start, token_advantages
from tandem.train.learner import Learner
from tandem.train.optimizer import Optimizer
from tandem.types import Completion, Env, Episode, Group, Problem, SamplingParams, Score
from tandem.weights.in_process import InlineSync
from tests.support.scripted import DigitRenderer, ScriptedEngine, ScriptedReward
from tests.support.tiny import exact_model

PROBLEMS = [
    Problem(uid=f"p{n}", messages=({"role": "user", "content": str(n)},), answer=str(n))
    for n in range(5)
]
BY_UID = {problem.uid: problem for problem in PROBLEMS}
PARAMS = SamplingParams(max_new_tokens=6)
BROKEN = "text 4"


class NumberedEngine(ScriptedEngine):
    """Answers the n-th request of a pass with tokens [n + 1] * (n % 3 + 1). Log-probs are -0.5."""

    def generate(self, requests):
        return [self.completion(n, n % 3 + 1) for n in range(len(requests))]

    def completion(self, number, count):
        return Completion(
            tokens=np.full(count, number + 1),
            logprobs=np.full(count, -0.5, np.float32),
            weight_versions=np.full(count, self.weight_version, np.int32),
            text=f"text {number}",
            stop_reason="length" if number % 2 else "stop",
        )


class AddressedEngine(NumberedEngine):
    """What it answers is a function of the request's key and the version alone; the text is that
    key."""

    def generate(self, requests):
        return [
            replace(self.completion(r.key % 80, r.key % 3 + 1), text=str(r.key)) for r in requests
        ]


class NumberedReward(ScriptedReward):
    """The n-th item it scores gets reward n % 3, but it fails on the text BROKEN."""

    def score(self, problem, attempt):
        value = (len(self.items) - 1) % 3
        if attempt.text == BROKEN:
            return Score(reward=0.0, parts={}, error="it broke")
        return Score(reward=value, parts={"answer": value})


class KeyReward(ScriptedReward):
    """0, 1/2 or 1, by the key: of the groups of two, a third has no signal."""

    def score(self, problem, attempt):
        return Score(reward=int(attempt.text) % 3 / 2, parts={})


class ConstantReward(ScriptedReward):
    def __init__(self, reward):
        super().__init__()
        self.reward = reward

    def score(self, problem, attempt):
        return Score(reward=self.reward, parts={})


class WatchingLearner(Learner):
    """Notes at every update which files are there, the engine's version, and the tokens that carry
    loss."""

    def __init__(self, model, optimizer, folder, engine):
        super().__init__(model, optimizer)
        self.folder, self.engine, self.saw, self.targets = folder, engine, [], []

    def update(self, batches, loss, **more):
        self.saw.append((sorted(p.name for p in self.folder.glob("*")), self.engine.weight_version))
        self.targets.append(sorted(token for batch in batches for token in batch.targets.tolist()))
        return super().update(batches, loss, **more)


def config(**changes):
    """config(rl__group_size=3)"""
    tree = Config().model_dump()
    tree["rl"] |= {"prompts_per_step": 2, "group_size": 3}
    for key, value in changes.items():
        section, field = key.split("__")
        tree[section][field] = value
    return Config.model_validate(tree)


def stages_in(folder, how, *, engine=None, reward=None, seed=0):
    """The stages with fakes where there is no model; engine=None runs the real one on the policy's
    model."""
    model = exact_model("qwen3", seed=seed)
    optimizer = Optimizer(
        model.trainable(),
        learning_rate=1e-3,
        schedule="constant",
        warmup_steps=0,
        total_steps=10,
        weight_decay=0.0,
        betas=(0.9, 0.95),
        max_grad_norm=1.0,
    )
    exact = engine is None  # a scripted engine's log-probs are no model's
    engine = engine or Engine(model, lambda tokens: str(tokens), cache_bytes=1 << 24, max_batch=8)
    return Stages(
        config=how,
        problems=PROBLEMS,
        player=RolloutRunner(
            engine=engine,
            renderer=DigitRenderer(),
            world=EnvPool(make=Env, limits=how.env),
            reward=reward or NumberedReward(),
        ),
        models=Models(policy=WatchingLearner(model, optimizer, folder, engine)),
        sync=InlineSync(engine),
        params=PARAMS,
        journal=Journal(folder, "run", PROBLEMS),
        exact=exact,
    )


def train_step(stages, step, learning=update):
    """(metrics, timings)"""
    return whole_step(stages, step, learning)[:2]


def weights_of(stages):
    return {
        name: w.numpy().tobytes() for name, w in stages.models.policy.model.named_weights().items()
    }


def episode(
    uid="p",
    sample=0,
    *,
    prompt=2,
    count=3,
    stop_reason="stop",
    reward=0.0,
    error="",
    parts=None,
    text="t",
):
    total = prompt + count
    mask = np.arange(total) >= prompt
    return Episode(
        uid=uid,
        sample_index=sample,
        tokens=np.arange(total),
        loss_mask=mask,
        num_prompt_tokens=prompt,
        messages=({"role": "assistant", "content": text},),
        penalties=np.zeros(total, np.float32),
        engine_logprobs=np.where(mask, np.float32(-0.5), np.float32(0)),
        weight_versions=np.where(mask, 3, -1).astype(np.int32),
        stop_reason=stop_reason,
        reward=reward,
        reward_parts=parts or {},
        reward_error=error,
    )


def groups_with(*rewards, **more):
    return [
        Group(
            problem=PROBLEMS[row],
            episodes=tuple(episode(f"p{row}", n, reward=r, **more) for n, r in enumerate(group)),
        )
        for row, group in enumerate(rewards)
    ]


def test_a_step_samples_its_problems_and_pairs_every_answer_with_its_own_problem(tmp_path):
    stages = stages_in(tmp_path, config(data__shuffle=False), engine=NumberedEngine())
    stages.progress.batches = 1
    train_step(stages, 0)  # problems 2 and 3
    assert [r.prompt.tolist() for r in stages.player.engine.requests] == [[90, 2]] * 3 + [
        [90, 3]
    ] * 3
    assert len({r.key for r in stages.player.engine.requests}) == 6 and {
        r.params for r in stages.player.engine.requests
    } == {PARAMS}
    assert [(p.uid, text) for p, text in stages.player.reward.items] == [
        (f"p{2 + n // 3}", f"text {n}") for n in range(6)
    ]
    episodes = read_episodes(tmp_path / "train_step_000001.parquet")
    assert [(e.uid, e.sample_index) for e in episodes] == [
        (f"p{2 + n // 3}", n % 3) for n in range(6)
    ]
    for n, found in enumerate(episodes):
        count = n % 3 + 1
        assert found.tokens.tolist() == [90, 2 + n // 3] + [n + 1] * count
        assert found.loss_mask.tolist() == [False, False] + [True] * count
        assert found.engine_logprobs.tolist() == [0, 0] + [-0.5] * count
        assert found.weight_versions.tolist() == [-1, -1] + [0] * count
        assert found.reward == (0 if n == 4 else n % 3) and found.reward_error == (
            "it broke" if n == 4 else ""
        )


def test_the_journal_is_written_before_learning_and_the_version_published_after(tmp_path):
    stages = stages_in(tmp_path, config(), engine=NumberedEngine())
    for step in range(2):
        train_step(stages, step)
        assert stages.player.engine.weight_version == step + 1
    first, second = "train_step_000001.parquet", "train_step_000002.parquet"
    assert stages.models.policy.saw == [([first], 0), ([first, second], 1)]


def test_the_draws_of_a_step_are_its_own_and_the_same_again(tmp_path):
    keys = []
    for batch, seed in ((0, 0), (0, 0), (1, 0), (0, 1)):
        stages = stages_in(
            tmp_path / f"{len(keys)}", config(run__seed=seed), engine=NumberedEngine()
        )
        stages.progress.batches = batch
        train_step(stages, 0)
        keys.append(tuple(r.key for r in stages.player.engine.requests))
    assert (
        keys[0] == keys[1] and not set(keys[0]) & set(keys[2]) and not set(keys[0]) & set(keys[3])
    )


def test_a_problem_that_comes_twice_in_a_step_is_sampled_anew(tmp_path):
    stages = stages_in(
        tmp_path, config(rl__prompts_per_step=10, data__shuffle=False), engine=NumberedEngine()
    )
    train_step(stages, 0)
    assert (
        len({r.key for r in stages.player.engine.requests})
        == len(stages.player.engine.requests)
        == 30
    )


def test_with_the_real_engine_a_step_is_on_policy_to_the_last_bit_and_moves_the_weights(tmp_path):
    stages = stages_in(tmp_path, config())
    before = weights_of(stages)
    for step in range(3):
        metrics, timings = train_step(stages, step)
        assert (metrics["logprob_gap"], metrics["ratio"], metrics["clip_share"]) == (0.0, 1.0, 0.0)
        assert metrics["num_loss_tokens"] == 6 * PARAMS.max_new_tokens and metrics["grad_norm"] > 0
    assert not any(weight == before[name] for name, weight in weights_of(stages).items())
    assert {
        "rollout_s",
        "reward_s",
        "check_s",
        "journal_s",
        "learn_s",
        "sync_s",
        "step_s",
        "generated_tokens_per_s",
    } == set(timings)


def test_two_runs_of_the_same_steps_have_the_same_metrics_weights_and_files(tmp_path):
    runs = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        stages = stages_in(folder, config(rl__minibatches=2))
        metrics = [train_step(stages, step)[0] for step in range(2)]
        runs.append(
            (metrics, weights_of(stages), [p.read_bytes() for p in sorted(folder.iterdir())])
        )
    assert runs[0] == runs[1]


def test_minibatches_are_that_many_updates_of_whole_groups_and_only_the_first_is_on_policy(
    tmp_path,
):
    stages = stages_in(tmp_path, config(rl__minibatches=2))
    metrics, _ = train_step(stages, 0)
    assert stages.models.policy.optimizer.step == 2
    assert metrics["num_loss_tokens"] == 6 * PARAMS.max_new_tokens
    # the gap is the first update's
    assert metrics["logprob_gap"] == 0.0 and metrics["ratio"] != 1.0


def test_scores_land_on_their_episodes_and_a_failed_one_is_written_on_it(tmp_path):
    stages = stages_in(tmp_path, config(data__shuffle=False), engine=NumberedEngine())
    groups = collect(stages, 0, Timer())
    assert [g.problem for g in groups] == PROBLEMS[:2]
    found = [
        (e.uid, e.sample_index, e.reward, e.reward_parts, e.reward_error)
        for g in groups
        for e in g.episodes
    ]
    assert found == [
        ("p0", 0, 0, {"answer": 0}, ""),
        ("p0", 1, 1, {"answer": 1}, ""),
        ("p0", 2, 2, {"answer": 2}, ""),
        ("p1", 0, 0, {"answer": 0}, ""),
        ("p1", 1, 0.0, {}, "it broke"),
        ("p1", 2, 2, {"answer": 2}, ""),
    ]


def shaped(episodes, **how):
    """What the overlong penalty leaves of a reward of 1, by episode; at most 10 tokens."""
    made = [
        scored(episode, Score(reward=1.0, parts={}), RewardConfig(**how), 10)
        for episode in episodes
    ]
    for each in made:
        assert each.reward_parts == ({} if each.reward == 1.0 else {"overlong": each.reward - 1.0})
    return [each.reward for each in made]


def test_without_a_buffer_the_overlong_penalty_is_taken_from_cut_completions_only_and_whole():
    episodes = [episode(count=3), episode(count=10), episode(count=10, stop_reason="length")]
    # the second ended by itself at the limit
    assert shaped(episodes, overlong_penalty=0.25) == [1.0, 1.0, 0.75]
    assert shaped(episodes) == [1.0, 1.0, 1.0]


def test_with_a_buffer_the_overlong_penalty_grows_linearly_over_the_last_tokens():
    episodes = [episode(count=n) for n in (3, 6, 7, 8, 10)] + [
        episode(count=10, stop_reason="length")
    ]
    rewards = shaped(episodes, overlong_penalty=0.5, overlong_buffer=4)
    assert rewards == [1.0, 1.0, 1 - 0.5 * 1 / 4, 1 - 0.5 * 2 / 4, 0.5, 0.5]


def test_the_overlong_penalty_stands_beside_the_other_parts_of_a_reward():
    verdict = Score(reward=2.0, parts={"answer": 2.0})
    made = [
        scored(episode(stop_reason=r), verdict, RewardConfig(overlong_penalty=0.25), 6)
        for r in ("stop", "length")
    ]
    assert [(e.reward, e.reward_parts) for e in made] == [
        (2.0, {"answer": 2.0}),
        (1.75, {"answer": 2.0, "overlong": -0.25}),
    ]


def test_a_step_is_shaped_and_an_evaluation_is_not(tmp_path):
    how = config(eval__samples=2, rollout__max_new_tokens=6, reward__overlong_penalty=1.0)
    # it cuts every other one
    stages = stages_in(tmp_path, how, engine=NumberedEngine(), reward=ConstantReward(1.0))
    assert train_step(stages, 0)[0]["reward_part/overlong"] == -0.5
    metrics, groups = evaluate(
        stages.player, PROBLEMS, seed=0, how=how.eval, rollout=how.rollout, stop_token_ids=()
    )
    assert (
        metrics["eval/sampled_truncated"] == 0.5
        and metrics["eval/sampled"] == metrics["eval/greedy"] == 1.0
    )
    assert not any(e.reward_parts for kind in groups.values() for g in kind for e in g.episodes)


@pytest.mark.parametrize("kind", ["grpo", "rloo", "grpo_no_std"])
def test_every_loss_token_carries_the_advantage_of_its_own_episode(kind):
    rewards = [[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
    how = config(rl__advantage=kind)
    step = start(groups_with(*rewards), how)
    advantages, _ = token_advantages(step, how, 0.0)
    table = group_advantages(kind, np.array(rewards), k=4, baseline=0.0).astype(np.float32)
    assert len(step.places) == 6 and all(column.dtype == np.float32 for column in advantages)
    assert [column.tolist() for column in advantages] == [
        [table[place]] * 3 for place in step.places
    ]
    assert [column.tolist() for column in step.engine] == [[-0.5] * 3] * 6
    assert not any(column.any() for column in advantages[3:])  # equal rewards: no signal at all


def test_groups_without_signal_change_no_weight(tmp_path):
    stages = stages_in(tmp_path, config(), engine=NumberedEngine())
    before = weights_of(stages)
    groups = groups_with([1.0, 1.0, 1.0], [0.0, 0.0, 0.0])
    assert (
        learn(stages.models, groups, stages.config, SamplingDistribution(), version=3, exact=False)[
            "grad_norm"
        ]
        == 0.0
    )
    assert weights_of(stages) == before


def test_with_a_correction_the_ratio_is_to_the_trainers_own_logprobs(tmp_path):
    """The scripted engine's log-probs are not the policy's: a gap, but with TIS the first ratio is
    still 1."""
    rows = []
    for kind in ("none", "tis"):
        stages = stages_in(tmp_path / kind, config(rl__correction=kind), engine=NumberedEngine())
        rows.append(train_step(stages, 0)[0])
    assert rows[0]["logprob_gap"] == rows[1]["logprob_gap"] > 0
    assert rows[0]["ratio"] != 1.0 and rows[1]["ratio"] == 1.0


def test_an_engine_held_to_the_policy_that_differs_from_it_stops_the_run_before_a_weight_moves(
    tmp_path,
):
    stages = replace(stages_in(tmp_path, config(), engine=NumberedEngine()), exact=True)
    before = weights_of(stages)
    with pytest.raises(UserError, match="engine and policy do not agree"):
        train_step(stages, 0)
    assert weights_of(stages) == before


def test_learning_sees_the_temperature_that_the_rollout_had(tmp_path):
    stages = stages_in(tmp_path, config())
    stages = replace(
        stages, params=SamplingParams(max_new_tokens=6, temperature=0.6, top_k=30, top_p=0.9)
    )
    assert train_step(stages, 0)[0]["logprob_gap"] == 0.0
    [batch] = start(groups_with([1.0, 0.0, 0.0]), config(rl__prompts_per_step=1)).batches
    with torch.no_grad():
        plain, tempered = (
            batch_logprobs(stages.models.policy.model, batch, how)[0]
            for how in (SamplingDistribution(), SamplingDistribution(temperature=0.6))
        )
    assert not torch.equal(plain, tempered)


def test_distillation_learns_from_every_group_of_one_batch_and_only_reports_the_reward(tmp_path):
    for reward in (0.0, 1.0):
        folder = tmp_path / str(reward)
        stages = stages_in(folder, config(), reward=ConstantReward(reward))
        models = replace(stages.models, teacher=exact_model("qwen3", seed=1))
        metrics, _ = train_step(replace(stages, models=models), 0, distill_step)
        assert (
            metrics["num_loss_tokens"] == 6 * PARAMS.max_new_tokens and metrics["reward"] == reward
        )
        assert (
            metrics["grad_norm"] > 0
            and stages.progress.batches == stages.player.engine.weight_version == 1
        )
        assert len(journal(folder, 0)["train"]) == 2


# What a step leaves to the next
# ---------------------------------------------------------------------------------------


def journal(folder, step):
    """The groups of a step by outcome."""
    groups = read_groups(folder / f"train_step_{step + 1:06d}.parquet", BY_UID)
    return {
        kind: [g for g in groups if g.outcome == kind] for kind in ("train", "carry", "no_signal")
    }


# groups without signal do have advantages under it
EMA = {"rl__advantage": "ema", "rl__max_gen_batches": 0}


def keys_of(groups):
    """Each group by the texts of its episodes, which are the keys of their draws."""
    return [tuple(int(e.text) for e in group.episodes) for group in groups]


def loss_tokens(groups):
    return sorted(
        t for group in groups for e in group.episodes for t in e.tokens[e.loss_mask].tolist()
    )


def dynamic(folder, limit=50, **changes):
    """Stages with dynamic sampling, three groups of two in a step; each has signal with a chance of
    2/3."""
    how = config(
        **{"rl__max_gen_batches": limit, "rl__prompts_per_step": 3, "rl__group_size": 2} | changes
    )
    return stages_in(folder, how, engine=AddressedEngine(), reward=KeyReward())


def resumed(stages, done, state):
    """What a new process makes of the state in a checkpoint, which is JSON text."""
    stages.sync.publish(done)
    _restore(stages, done, json.loads(state))
    return stages


def test_dynamic_sampling_fills_a_step_with_groups_that_have_signal_and_trains_each_of_them_once(
    tmp_path,
):
    stages = dynamic(tmp_path)
    fates, carried = {}, []
    for step in range(20):
        drawn_before = stages.progress.batches
        metrics, _ = train_step(stages, step)
        groups = journal(tmp_path, step)
        now = {kind: keys_of(members) for kind, members in groups.items()}
        # those that waited come first
        assert len(now["train"]) == 3 and now["train"][: len(carried)] == carried
        assert stages.models.policy.targets[step] == loss_tokens(groups["train"])
        assert all(
            (len({key % 3 for key in g}) == 2) == (kind != "no_signal")
            for kind in now
            for g in now[kind]
        )
        assert sum(map(len, now.values())) == len(carried) + 3 * (
            stages.progress.batches - drawn_before
        )
        assert [metrics.get(f"groups/{kind}", 0) for kind in ("carry", "no_signal")] == [
            len(now[kind]) for kind in ("carry", "no_signal")
        ]
        assert len(now["carry"]) < 3  # no batch is drawn for a step that is full
        for kind, members in now.items():
            for group in members:
                fates[group] = [*fates.get(group, []), kind]
        carried = now["carry"]
        assert keys_of(stages.progress.carried) == carried
    assert sorted(key for group in fates for key in group) == sorted(
        r.key for r in stages.player.engine.requests
    )
    assert all(
        fate in (["train"], ["no_signal"], ["carry", "train"], ["carry"]) for fate in fates.values()
    )
    assert [group for group, fate in fates.items() if fate == ["carry"]] == carried
    # both have happened
    assert ["carry", "train"] in fates.values() and ["no_signal"] in fates.values()


def test_a_carried_group_is_trained_as_it_was_sampled_by_the_weights_of_the_step_before(tmp_path):
    stages = dynamic(tmp_path)
    ages = set()
    for step in range(6):
        train_step(stages, step)
        ages |= {
            step - int(v)
            for g in journal(tmp_path, step)["train"]
            for e in g.episodes
            for v in e.weight_versions[2:]
        }
    assert ages == {0, 1}


@pytest.mark.parametrize("changes", [{}, {"rl__curriculum": True}, EMA], ids=str)
def test_a_run_resumed_at_any_step_goes_on_like_one_never_stopped(changes, tmp_path):
    whole = dynamic(tmp_path / "whole", **changes)
    states = []
    for step in range(5):
        train_step(whole, step)
        states.append(json.dumps(whole.progress.state()))
    for done in range(1, 5):
        folder = tmp_path / f"resumed at {done}"
        shutil.copytree(tmp_path / "whole", folder)
        again = resumed(dynamic(folder, **changes), done, states[done - 1])
        for step in range(done, 5):
            path = folder / f"train_step_{step + 1:06d}.parquet"
            path.unlink()
            train_step(again, step)
            assert path.read_bytes() == (tmp_path / "whole" / path.name).read_bytes()
        assert again.progress.state() == json.loads(states[-1])
        assert keys_of(again.progress.carried) == keys_of(whole.progress.carried)


def test_a_step_that_cannot_be_filled_stops_the_run_names_both_knobs_and_spoils_nothing(tmp_path):
    stages = dynamic(tmp_path, limit=2, run__seed=2)  # its fourth step has bad luck
    with pytest.raises(UserError, match="could not fill a step") as caught:
        for done in range(8):
            state, files = (
                json.dumps(stages.progress.state()),
                {p: p.read_bytes() for p in tmp_path.glob("train_*")},
            )
            train_step(stages, done)
    assert done > 0 and {p: p.read_bytes() for p in tmp_path.glob("train_*")} == files
    assert (
        f"step {done + 1}" in caught.value.where
        and "after 2 batches (rl.max_gen_batches)" in caught.value.where
    )
    assert (
        "rl.prompts_per_step" in caught.value.expected
        and "raise rl.max_gen_batches" in caught.value.next
    )
    roomier = resumed(dynamic(tmp_path, run__seed=2), done, state)
    train_step(roomier, done)
    other = dynamic(tmp_path / "other", run__seed=2)
    for step in range(done + 1):
        train_step(other, step)
    name = f"train_step_{done + 1:06d}.parquet"
    assert (tmp_path / name).read_bytes() == (tmp_path / "other" / name).read_bytes()


def test_a_curriculum_draws_problems_that_are_neither_solved_nor_hopeless_more_often(tmp_path):
    stages = stages_in(
        tmp_path, config(rl__curriculum=True), engine=AddressedEngine(), reward=KeyReward()
    )
    # p4 has not been seen: 1/2
    stages.progress.rates |= {"p0": 1.0, "p1": 0.0, "p2": 1.0, "p3": 0.5}
    drawn = Counter(group.problem.uid for _ in range(200) for group in begin_batch(stages))
    assert drawn["p3"] > 150 and drawn["p4"] > 150 and sum(drawn.values()) == 400
    assert all(0 < drawn[uid] < 40 for uid in ("p0", "p1", "p2"))  # they come back now and then


def test_the_draws_of_a_curriculum_are_a_function_of_seed_batch_and_rates(tmp_path):
    def problems(seed=0, batch=0, **rates):
        stages = stages_in(
            tmp_path, config(rl__curriculum=True, run__seed=seed), engine=AddressedEngine()
        )
        stages.progress.batches = batch
        stages.progress.rates |= rates
        return [[group.problem.uid for group in begin_batch(stages)] for _ in range(6)]

    assert problems() == problems()
    assert all(
        problems() != other
        for other in (problems(seed=1), problems(batch=1), problems(p0=1.0, p1=1.0))
    )
    assert problems(batch=1)[:5] == problems()[1:]


def test_a_curriculum_remembers_the_last_success_rate_of_every_problem_sampled(tmp_path):
    stages = dynamic(tmp_path, rl__curriculum=True)
    for step in range(4):
        train_step(stages, step)
    order = {r.key: n for n, r in enumerate(stages.player.engine.requests)}
    sampled = {
        keys_of([g])[0]: g
        for step in range(4)
        for groups in journal(tmp_path, step).values()
        for g in groups
    }
    last = {
        sampled[keys].problem.uid: sampled[keys].rewards.mean()
        for keys in sorted(sampled, key=lambda k: order[k[0]])
    }
    assert stages.progress.rates == last and {0.5} < set(last.values())


def test_a_success_rate_is_between_0_and_1_whatever_the_rewards(tmp_path):
    for reward, rate in ((-3.0, 0.0), (0.25, 0.25), (7.0, 1.0)):
        stages = stages_in(
            tmp_path / str(rate),
            config(rl__curriculum=True),
            engine=AddressedEngine(),
            reward=ConstantReward(reward),
        )
        train_step(stages, 0)
        assert set(stages.progress.rates.values()) == {rate}


def test_the_baseline_is_the_running_mean_of_the_steps_before_and_starts_with_the_first_steps_own(
    tmp_path,
):
    reward = ConstantReward(1.0)
    stages = stages_in(
        tmp_path,
        config(rl__advantage="ema", rl__ema_decay=0.75),
        engine=NumberedEngine(),
        reward=reward,
    )
    norms = [train_step(stages, 0)[0]["grad_norm"], train_step(stages, 1)[0]["grad_norm"]]
    assert norms == [0.0, 0.0] and stages.progress.baseline == 1.0  # always as good as expected
    reward.reward = 3.0
    assert (
        train_step(stages, 2)[0]["grad_norm"] > 0
        and stages.progress.baseline == 0.75 * 1 + 0.25 * 3
    )
    reward.reward = 1.5
    # the baseline is of the steps before, not of this one
    assert train_step(stages, 3)[0]["grad_norm"] == 0.0


def test_the_description_counts_what_the_episodes_were_like():
    cut = groups_with([1.0, 0.0], [0.5, 0.5], stop_reason="length", parts={"answer": 1.0})
    odd = Group(
        problem=PROBLEMS[2],
        episodes=(episode(count=6, error="x", parts={"style": 2.0}), episode(count=0)),
    )
    row = episode_metrics([*cut, odd])
    assert row == {
        "reward": pytest.approx(2 / 6),
        "reward_std": pytest.approx(np.std([1, 0, 0.5, 0.5, 0, 0])),
        "reward_part/answer": pytest.approx(4 / 6),
        "reward_part/style": pytest.approx(2 / 6),
        "groups_without_signal": pytest.approx(2 / 3),
        "completion_tokens": pytest.approx((4 * 3 + 6 + 0) / 6),
        "truncated": pytest.approx(4 / 6),
        "reward_errors": 1.0,
    }


def test_a_clock_adds_up_the_parts_of_a_step():
    clock = Timer()
    for _ in range(2):
        with clock("rollout_s"):
            pass
    with clock("learn_s"):
        pass
    timings = clock.timings(tokens=100)
    assert timings["step_s"] == timings["rollout_s"] + timings["learn_s"]
    assert timings["generated_tokens_per_s"] == 100 / timings["rollout_s"]
