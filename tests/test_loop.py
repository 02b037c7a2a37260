"""One step, stage by stage: what is paired with what, what is written when, and what the metrics say."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tandem.config import Config
from tandem.engine.engine import Engine
from tandem.envs.single_turn import SingleTurn
from tandem.loop import Clock, Stages, describe, learn, score, to_samples, train_step
from tandem.model.logprobs import Filter
from tandem.rl.advantages import advantages
from tandem.stream.journal import read_episodes
from tandem.train.optimizer import Optimizer
from tandem.train.pack import pack
from tandem.train.policy import Policy
from tandem.types import Completion, Episode, Group, Problem, SamplingParams, Score
from tandem.weights.inline import InlineSync
from tests.tiny import exact_model

PROBLEMS = [Problem(uid=f"p{n}", messages=({"role": "user", "content": str(n)},), answer=str(n)) for n in range(5)]
PARAMS = SamplingParams(max_new_tokens=6)
BROKEN = "text 4"


class DigitRenderer:
    """A chat is its digits, each a token, after token 90 for every message."""

    def prompts(self, chats):
        return [np.array([t for m in chat for t in (90, *map(int, m["content"]))], np.int64) for chat in chats]


class ScriptedEngine:
    """Answers the n-th request with tokens [n + 1] * (n % 3 + 1); keeps what it was asked. Log-probs are -0.5."""

    def __init__(self):
        self.weight_version, self.requests = 0, []

    def apply(self, version):
        self.weight_version = version

    def generate(self, requests):
        self.requests += requests
        return [self.completion(n, n % 3 + 1) for n in range(len(requests))]

    def completion(self, number, count):
        return Completion(
            tokens=np.full(count, number + 1), logprobs=np.full(count, -0.5, np.float32),
            weight_versions=np.full(count, self.weight_version, np.int32), text=f"text {number}",
            stop_reason="length" if number % 2 else "stop",
        )  # fmt: skip


class ScriptedReward:
    """The n-th item it scores gets reward n % 3; keeps what it was given, and fails on the text BROKEN."""

    def __init__(self):
        self.items = []

    def score_all(self, items):
        self.items += items
        return [
            Score(reward=0.0, parts={}, error="it broke")
            if text == BROKEN
            else Score(reward=n % 3, parts={"answer": n % 3})
            for n, (_, text) in enumerate(items)
        ]


class WatchingPolicy(Policy):
    """A policy that notes which files were there when it began to learn, and the engine's version then."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.saw = []

    def learn(self, *arguments):
        self.saw.append((sorted(p.name for p in self.folder.glob("*")), self.engine.weight_version))
        return super().learn(*arguments)


def config(**changes):
    """config(rl__group_size=3)"""
    tree = Config().model_dump()
    tree["rl"] |= {"prompts_per_step": 2, "group_size": 3}
    for key, value in changes.items():
        section, field = key.split("__")
        tree[section][field] = value
    return Config.model_validate(tree)


def stages_in(folder, how, *, engine=None, seed=0):
    """The stages with fakes where there is no model; engine=None runs the real one on the policy's model."""
    model = exact_model("qwen3", seed=seed)
    optimizer = Optimizer(
        dict(model.module.named_parameters()), learning_rate=1e-3, schedule="constant", warmup_steps=0, total_steps=10,
        weight_decay=0.0, betas=(0.9, 0.95), max_grad_norm=1.0,
    )  # fmt: skip
    policy = WatchingPolicy(model, optimizer)
    engine = engine or Engine(model, lambda tokens: str(tokens), cache_bytes=1 << 24, max_batch=8)
    policy.folder, policy.engine = folder, engine
    return Stages(
        config=how, problems=PROBLEMS, renderer=DigitRenderer(), env=SingleTurn(), engine=engine, reward=ScriptedReward(),
        policy=policy, sync=InlineSync(engine), params=PARAMS, episodes=folder,
    )  # fmt: skip


def episode(uid="p", sample=0, *, prompt=2, count=3, stop_reason="stop", reward=0.0, error="", parts=None, text="t"):
    total = prompt + count
    mask = np.arange(total) >= prompt
    return Episode(
        uid=uid, sample_index=sample, tokens=np.arange(total), loss_mask=mask, num_prompt_tokens=prompt, text=text,
        engine_logprobs=np.where(mask, np.float32(-0.5), np.float32(0)), weight_versions=np.where(mask, 3, -1).astype(np.int32),
        stop_reason=stop_reason, reward=reward, reward_parts=parts or {}, reward_error=error,
    )  # fmt: skip


def groups_with(*rewards, **more):
    return [
        Group(
            problem=PROBLEMS[row], episodes=tuple(episode(f"p{row}", n, reward=r, **more) for n, r in enumerate(group))
        )
        for row, group in enumerate(rewards)
    ]


def test_a_step_samples_its_problems_and_pairs_every_answer_with_its_own_problem(tmp_path):
    stages = stages_in(tmp_path, config(data__shuffle=False), engine=ScriptedEngine())
    train_step(stages, 1)  # problems 2 and 3
    assert [r.prompt.tolist() for r in stages.engine.requests] == [[90, 2]] * 3 + [[90, 3]] * 3
    assert len({r.key for r in stages.engine.requests}) == 6 and {r.params for r in stages.engine.requests} == {PARAMS}
    assert [(p.uid, text) for p, text in stages.reward.items] == [(f"p{2 + n // 3}", f"text {n}") for n in range(6)]
    episodes = read_episodes(tmp_path / "train_step_000002.parquet")
    assert [(e.uid, e.sample_index) for e in episodes] == [(f"p{2 + n // 3}", n % 3) for n in range(6)]
    for n, found in enumerate(episodes):
        count = n % 3 + 1
        assert found.tokens.tolist() == [90, 2 + n // 3] + [n + 1] * count
        assert found.loss_mask.tolist() == [False, False] + [True] * count
        assert found.engine_logprobs.tolist() == [0, 0] + [-0.5] * count
        assert found.weight_versions.tolist() == [-1, -1] + [0] * count
        assert found.reward == (0 if n == 4 else n % 3) and found.reward_error == ("it broke" if n == 4 else "")


def test_the_journal_is_written_before_learning_and_the_version_published_after(tmp_path):
    stages = stages_in(tmp_path, config(), engine=ScriptedEngine())
    for step in range(2):
        train_step(stages, step)
        assert stages.engine.weight_version == step + 1
    first, second = "train_step_000001.parquet", "train_step_000002.parquet"
    assert stages.policy.saw == [([first], 0), ([first, second], 1)]


def test_the_draws_of_a_step_are_its_own_and_the_same_again(tmp_path):
    keys = []
    for step, seed in ((0, 0), (0, 0), (1, 0), (0, 1)):
        stages = stages_in(tmp_path / f"{len(keys)}", config(run__seed=seed), engine=ScriptedEngine())
        train_step(stages, step)
        keys.append(tuple(r.key for r in stages.engine.requests))
    assert keys[0] == keys[1] and not set(keys[0]) & set(keys[2]) and not set(keys[0]) & set(keys[3])


def test_a_problem_that_comes_twice_in_a_step_is_sampled_anew(tmp_path):
    stages = stages_in(tmp_path, config(rl__prompts_per_step=10, data__shuffle=False), engine=ScriptedEngine())
    train_step(stages, 0)
    assert len({r.key for r in stages.engine.requests}) == len(stages.engine.requests) == 30


def test_with_the_real_engine_a_step_is_on_policy_to_the_last_bit_and_moves_the_weights(tmp_path):
    stages = stages_in(tmp_path, config())
    before = {name: w.clone() for name, w in stages.policy.model.named_weights().items()}
    for step in range(3):
        metrics, timings = train_step(stages, step)
        assert (metrics["logprob_gap"], metrics["ratio"], metrics["clip_share"]) == (0.0, 1.0, 0.0)
        assert metrics["num_loss_tokens"] == 6 * PARAMS.max_new_tokens and metrics["grad_norm"] > 0
    assert not any(torch.equal(w, before[name]) for name, w in stages.policy.model.named_weights().items())
    assert {"rollout_s", "reward_s", "journal_s", "learn_s", "sync_s", "step_s", "generated_tokens_per_s"} == set(
        timings
    )


def test_two_runs_of_the_same_steps_have_the_same_metrics_weights_and_files(tmp_path):
    runs = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        stages = stages_in(folder, config(rl__minibatches=2))
        metrics = [train_step(stages, step)[0] for step in range(2)]
        weights = {name: w.numpy().tobytes() for name, w in stages.policy.model.named_weights().items()}
        runs.append((metrics, weights, [p.read_bytes() for p in sorted(folder.iterdir())]))
    assert runs[0] == runs[1]


def test_minibatches_are_that_many_updates_of_whole_groups_and_only_the_first_is_on_policy(tmp_path):
    stages = stages_in(tmp_path, config(rl__minibatches=2))
    metrics, _ = train_step(stages, 0)
    assert stages.policy.optimizer.step == 2
    assert metrics["num_loss_tokens"] == 6 * PARAMS.max_new_tokens
    assert metrics["logprob_gap"] == 0.0 and metrics["ratio"] != 1.0  # the gap is the first update's


def test_scores_land_on_their_episodes_and_a_failed_one_is_written_on_it():
    attempts = [[episode(f"p{row}", n, text=f"text {3 * row + n}") for n in range(3)] for row in range(2)]
    groups = score(PROBLEMS[:2], attempts, ScriptedReward(), 0.0)
    assert [g.problem for g in groups] == PROBLEMS[:2]
    found = [(e.uid, e.sample_index, e.reward, e.reward_parts, e.reward_error) for g in groups for e in g.episodes]
    assert found == [
        ("p0", 0, 0, {"answer": 0}, ""), ("p0", 1, 1, {"answer": 1}, ""), ("p0", 2, 2, {"answer": 2}, ""),
        ("p1", 0, 0, {"answer": 0}, ""), ("p1", 1, 0.0, {}, "it broke"), ("p1", 2, 2, {"answer": 2}, ""),
    ]  # fmt: skip


def test_the_overlong_penalty_is_taken_from_cut_completions_only_and_is_a_part_of_its_own():
    attempts = [[episode(stop_reason="stop"), episode(stop_reason="length"), episode(stop_reason="length")]]
    [group] = score(PROBLEMS[:1], attempts, ScriptedReward(), 0.25)
    assert [(e.reward, e.reward_parts) for e in group.episodes] == [
        (0, {"answer": 0}), (0.75, {"answer": 1, "overlong": -0.25}), (1.75, {"answer": 2, "overlong": -0.25}),
    ]  # fmt: skip


def test_scoring_refuses_attempts_that_do_not_match_the_problems():
    with pytest.raises(ValueError, match="zip"):
        score(PROBLEMS[:2], [[episode()]], ScriptedReward(), 0.0)


@pytest.mark.parametrize("kind", ["grpo", "rloo", "dr_grpo"])
def test_samples_carry_their_own_advantage_on_their_loss_tokens_and_nothing_elsewhere(kind):
    rewards = [[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
    samples = to_samples(groups_with(*rewards), config(rl__advantage=kind))
    table = advantages(kind, np.array(rewards, np.float32))
    assert len(samples) == 6
    for number, sample in enumerate(samples):
        row, column = divmod(number, 3)
        assert sample.advantages.dtype == np.float32
        assert sample.advantages.tolist() == [0, 0, *[table[row, column]] * 3]
        assert (sample.prefix, sample.group) == (2, row)
        assert sample.engine_logprobs.tolist() == [0, 0, -0.5, -0.5, -0.5]
    assert not any(s.advantages.any() for s in samples[3:])  # equal rewards: no signal at all


def test_groups_without_signal_change_no_weight(tmp_path):
    stages = stages_in(tmp_path, config(), engine=ScriptedEngine())
    before = {name: w.clone() for name, w in stages.policy.model.named_weights().items()}
    metrics = learn(stages, groups_with([1.0, 1.0, 1.0], [0.0, 0.0, 0.0]))
    assert metrics["grad_norm"] == 0.0
    assert all(torch.equal(w, before[name]) for name, w in stages.policy.model.named_weights().items())


def test_with_an_importance_cap_the_ratio_is_to_the_trainers_own_logprobs(tmp_path):
    """The scripted engine's log-probs are not the policy's: a gap, but with TIS the first ratio is still 1."""
    rows = []
    for cap in (0.0, 2.0):
        stages = stages_in(tmp_path / str(cap), config(rl__importance_cap=cap), engine=ScriptedEngine())
        rows.append(train_step(stages, 0)[0])
    assert rows[0]["logprob_gap"] == rows[1]["logprob_gap"] > 0
    assert rows[0]["ratio"] != 1.0 and rows[1]["ratio"] == 1.0


def test_learning_sees_the_temperature_that_the_rollout_had(tmp_path):
    stages = stages_in(tmp_path, config())
    stages = replace(stages, params=SamplingParams(max_new_tokens=6, temperature=0.6, top_k=30, top_p=0.9))
    assert train_step(stages, 0)[0]["logprob_gap"] == 0.0
    batches = pack(to_samples(groups_with([1.0, 0.0, 0.0]), config()), 100)
    plain, tempered = (stages.policy.proximal_logprobs(batches, f)[0] for f in (Filter(), Filter(temperature=0.6)))
    assert not torch.equal(plain, tempered)


def test_the_description_counts_what_the_episodes_were_like():
    cut = groups_with([1.0, 0.0], [0.5, 0.5], stop_reason="length", parts={"answer": 1.0})
    odd = Group(problem=PROBLEMS[2], episodes=(episode(count=6, error="x", parts={"style": 2.0}), episode(count=0)))
    row = describe([*cut, odd])
    assert row == {
        "reward": pytest.approx(2 / 6), "reward_std": pytest.approx(np.std([1, 0, 0.5, 0.5, 0, 0])),
        "reward_part/answer": pytest.approx(4 / 6), "reward_part/style": pytest.approx(2 / 6),
        "groups_without_signal": pytest.approx(2 / 3), "completion_tokens": pytest.approx((4 * 3 + 6 + 0) / 6),
        "truncated": pytest.approx(4 / 6), "reward_errors": 1.0,
    }  # fmt: skip


def test_a_clock_adds_up_the_parts_of_a_step():
    clock = Clock()
    for _ in range(2):
        with clock("rollout_s"):
            pass
    with clock("learn_s"):
        pass
    timings = clock.timings(tokens=100)
    assert timings["step_s"] == timings["rollout_s"] + timings["learn_s"]
    assert timings["generated_tokens_per_s"] == 100 / max(timings["rollout_s"], 1e-9)
