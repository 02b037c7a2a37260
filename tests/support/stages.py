"""The stages of a small step, with fakes where there is no model, and what they leave behind."""

from dataclasses import replace

from tandem.config.schema import Config
from tandem.engine.engine import Engine
from tandem.jobs.rl import RLJob
from tandem.rollout.collect import Collector
from tandem.rollout.env_pool import EnvPool
from tandem.rollout.score import RolloutRunner
from tandem.run_folder.episode_files import read_groups
from tandem.run_folder.journal import Journal
from tandem.step import Stages
from tandem.trainer.batch import Models
from tandem.trainer.learner import Learner
from tandem.trainer.optimizer import Optimizer, Settings
from tandem.trainer.parity import ExactCheck, NoCheck
from tandem.types import Env, SamplingParams, Score
from tandem.weights.in_process import InlineSync
from tests.support.scripted import PROBLEMS, DigitRenderer, ScriptedEngine, ScriptedReward, said
from tests.support.tiny import exact_model

BY_UID = {problem.uid: problem for problem in PROBLEMS}
PARAMS = SamplingParams(max_new_tokens=6)
BROKEN = "text 4"


class NumberedEngine(ScriptedEngine):
    """Answers the n-th request of a pass with tokens [n + 1] * (n % 3 + 1). Log-probs are -0.5."""

    def generate(self, requests):
        return [self.completion(n, n % 3 + 1) for n in range(len(requests))]

    def completion(self, number, count):
        tokens, reason = [number + 1] * count, "length" if number % 2 else "stop"
        how = {"logprob": -0.5, "version": self.weight_version}
        return said(tokens, f"text {number}", reason, **how)


class AddressedEngine(NumberedEngine):
    """Its answer is a function of the request's key and the version alone; the text is that key."""

    def generate(self, requests):
        numbers = [(r.key, self.number_of(r)) for r in requests]
        return [
            replace(self.completion(key % 80, number % 3 + 1), text=str(number))
            for key, number in numbers
        ]

    def number_of(self, request):
        return request.key


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


class WatchingOptimizer(Optimizer):
    """Notes at every update which files are there, and the engine's version."""

    def __init__(self, model, folder, engine):
        super().__init__(model.trainable(), Settings(learning_rate=1e-3, total_steps=10))
        self.folder, self.engine, self.saw = folder, engine, []

    def update(self, *, skip=False):
        self.saw.append((sorted(p.name for p in self.folder.glob("*")), self.engine.weight_version))
        return super().update(skip=skip)


def config(**changes):
    """config(rl__group_size=3)"""
    tree = Config().model_dump()
    tree["rl"] |= {"prompts_per_step": 2, "group_size": 3}
    for key, value in changes.items():
        section, field = key.split("__")
        tree[section][field] = value
    return Config.model_validate(tree)


def stages_in(
    folder,
    settings,
    *,
    engine=None,
    reward=None,
    seed=0,
    sampling=PARAMS,
    run="run",
    kind="qwen3",
    decode=str,
    problems=PROBLEMS,
):
    """Stages that write to the folder in the name of a run.

    engine: None for the real one on the policy's model, whose texts are decode(tokens).
    """
    model = exact_model(kind, seed=seed)
    exact = engine is None  # a scripted engine's log-probs are no model's
    engine = engine or Engine(
        model, decode, cache_bytes=1 << 24, max_batch=8, record_experts=settings.rl.router_replay
    )
    journal = Journal(folder, run, problems)
    return Stages(
        config=settings,
        models=Models(policy=Learner(model, WatchingOptimizer(model, folder, engine))),
        sampling=sampling,
        parity=ExactCheck() if exact else NoCheck(),
        collector=Collector(
            config=settings,
            problems=problems,
            runner=RolloutRunner(
                engine=engine,
                renderer=DigitRenderer(),
                envs=EnvPool(make=Env, limits=settings.env),
                rewards=reward or NumberedReward(),
                reward_model=None,
            ),
            sampling=sampling,
            journal=journal,
        ),
        sync=InlineSync(engine),
    )


def with_runner(stages, **parts):
    """The stages with other parts that generate and score."""
    runner = replace(stages.collector.runner, **parts)
    return replace(stages, collector=replace(stages.collector, runner=runner))


def without_evaluation(done):
    return {}


def resumed(stages, done, state):
    """Return what a new process makes of the state that step `done` has left."""
    job = RLJob(stages, without_evaluation, {})
    job.start(done)
    job.restore(done, state)
    return stages


def weights_of(stages):
    return {
        name: w.numpy().tobytes() for name, w in stages.models.policy.model.named_weights().items()
    }


def groups_of_step(folder, step):
    """The groups that step `step`, counted from 0, has left in the journal."""
    return read_groups(folder / f"train_step_{step + 1:06d}.parquet", BY_UID)
