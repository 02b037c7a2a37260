"""Bugs that the field has had, each handed into a small real training run as a wrong part; what
stops it, and in which step.

A wrong part stands where the right one would: an engine, a sync, a renderer, a reward, an observer
of the loss, an optimizer, what restores a run, what lies between rollouts and learning, a file, a
config. Model, engine, journal, checkpoints and driver are real.

    fired    the first step in which the wrong part did something wrong, seen by a Witness
    stopped  the step in which the run ended; the weights must then still be those of the last good
             step

docs/concepts/tripwires.md has the table. It does not know how the tripwires work.
"""

import re
import shutil
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from chaos.results import Case, Result, tally
from tandem.config.recipe import load_config
from tandem.config.schema import Config
from tandem.engine.engine import Engine
from tandem.jobs.input_hashes import input_hashes
from tandem.jobs.rl import RLJob
from tandem.model.load import ExactModel, make_exact
from tandem.model.lora import Lora
from tandem.rewards.pool import RewardPool
from tandem.rl.algorithms import ALGORITHMS
from tandem.rollout.collect import RolloutBatch, step_metrics
from tandem.rollout.env_pool import EnvPool
from tandem.run_folder.folder import open_run
from tandem.run_folder.metrics import read_metrics
from tandem.runtime.errors import UserError
from tandem.runtime.timer import Timer
from tandem.step import Stages, learn_step, rollout_step
from tandem.step_async import RolloutPrefetcher
from tandem.train_loop import run_training
from tandem.trainer.batch import Models, pack_batch
from tandem.trainer.learner import Learner
from tandem.trainer.optimizer import Optimizer, Settings
from tandem.types import Env, Observation, Problem, SamplingParams, Score, StepResult
from tandem.weights.hashing import weight_hash
from tandem.weights.in_process import InlineSync
from tests.support.scripted import DigitRenderer, ScriptedReward
from tests.support.stages import PARAMS, config, stages_in, with_runner, without_evaluation
from tests.support.tiny import exact_model, stock_model, tiny_config, value_twins

# of a run; the step, counted from 0, from which a part is wrong where it can be right before
STEPS, AT = 5, 2
CLEAN_STEPS = 1000
STOPS = tuple(range(30))  # of 97 tokens: about every other completion of 6 tokens ends by itself
LONG = "".join(str(n % 10) for n in range(140))  # a prompt of more than a page of the cache


class Witness:
    """now: the step under way; fired: that in which a wrong part first did what is wrong."""

    def __init__(self) -> None:
        self.now, self.fired, self.model = 0, -1, None

    def fire(self) -> None:
        if self.fired < 0:
            self.fired = self.now


Change = Callable[[Stages, Witness], Stages]
Inject = Callable[[Path, Witness], None]


@dataclass(frozen=True, kw_only=True)
class Bug:
    """inject: runs until something stops it; stopped_by: what the error must match; after: steps
    from fired to stopped."""

    issue: str
    what: str
    inject: Inject
    stopped_by: str
    after: int = 0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    fired: int
    stopped: int
    error: str
    problem: str  # what is wrong with the end, or ""


def outcome(bug: Bug, folder: Path) -> Outcome:
    witness, error, problem = Witness(), "", ""
    try:
        bug.inject(folder, witness)
        problem = "nothing stopped it"
    except (UserError, RuntimeError) as raised:
        error = str(raised)
    if error and not re.search(bug.stopped_by, error):
        problem = f"stopped by something else: {error}"
    if error and witness.now - witness.fired != bug.after:
        problem = problem or f"fired in step {witness.fired + 1}, stopped in step {witness.now + 1}"
    if witness.model is not None and error:
        problem = problem or touched(folder, witness.model)
    return Outcome(fired=witness.fired, stopped=witness.now, error=error, problem=problem)


def touched(folder: Path, model: ExactModel) -> str:
    """The weights must be those of the last step that is told, or, in a start that came to nothing,
    those it began with."""
    told = {
        row["weights"]
        for row in read_metrics(folder, "ledger.jsonl")
        if row["step"] in (0, last_step(folder))
    }
    return "" if weight_hash(model.merged()) in told else "a weight had been touched"


def last_step(folder: Path) -> int:
    return max((row["step"] for row in read_metrics(folder)), default=0)


# A small run
# --------------------------------------------------------------------------------


class TextReward(ScriptedReward):
    """A function of the text, other in most episodes of a group."""

    def score(self, problem: Problem, attempt: object) -> Score:
        return Score(reward=zlib.crc32(attempt.text.encode()) % 3 / 2, parts={})


def as_it_is(stages: Stages, witness: Witness) -> Stages:
    return stages


Learn = Callable[[Stages, RolloutBatch], dict[str, float]]


class WitnessedJob:
    """A job of jobs/rl.py that tells the witness of its steps, with another learn_step or another
    restore in place of its own where they are given. rows: metrics of the steps of this start."""

    def __init__(self, job: RLJob, witness: Witness, learn: Learn | None, restore: Callable | None):
        self.job, self.witness, self.learn, self.restore_with = job, witness, learn, restore
        self.rows: list[dict[str, float]] = []

    def __getattr__(self, name: str):
        return getattr(self.job, name)

    def step(self, done: int) -> StepResult:
        self.witness.now = done
        result = self.job.step(done) if self.learn is None else self.split_step(done, self.learn)
        self.rows.append(result.metrics)
        return result

    def split_step(self, done: int, learn: Learn) -> StepResult:
        """A step by its parts, with another learn_step."""
        stages = self.job.stages
        if self.job.ahead is not None:
            batch, _ = self.job.ahead.get(done)
        else:
            batch = rollout_step(stages, done, Timer())
        metrics = step_metrics(batch, learn(stages, batch), stages.config)
        (self.job.ahead or stages.sync).publish(done + 1)
        return StepResult(metrics=metrics, timings={}, state=batch.state)

    def restore(self, done: int, state: dict) -> None:
        if self.restore_with is None:
            self.job.restore(done, state)
        else:
            self.restore_with(self.job, done, state)


def train(
    folder: Path,
    witness: Witness,
    change: Change = as_it_is,
    *,
    settings: Config | None = None,
    learn: Learn | None = None,
    restore: Callable | None = None,
    sampling: SamplingParams = PARAMS,
    steps: int = STEPS,
    data: dict[str, str] | None = None,
) -> list[dict[str, float]]:
    """A run up to that many steps, or on with the one in the folder; returns the metrics of the
    steps of this start."""
    settings = settings or config()
    with open_run(folder, settings, fresh=False, command="train") as run:
        stages = stages_in(run.episodes, settings, reward=TextReward(), sampling=sampling)
        stages = change(stages, witness)
        witness.model = stages.models.policy.model
        with closing(RolloutPrefetcher(stages, steps)) as prefetcher:
            ahead = prefetcher if settings.rollout.staleness else None
            job = RLJob(stages, without_evaluation, data or {}, ahead=ahead)
            job.steps, job.eval_every = steps, 0
            witnessed = WitnessedJob(job, witness, learn, restore)
            run_training(run, witnessed, lambda done, metrics, timings: None)
    return witnessed.rows


def learner_of(model: ExactModel, optimizer: type[Optimizer] = Optimizer) -> Learner:
    settings = Settings(learning_rate=1e-4, schedule="linear", warmup_steps=2, total_steps=50)
    return Learner(model, optimizer(model.trainable(), settings))


def with_policy(stages: Stages, policy: Learner) -> Stages:
    """With its engine, which runs the policy's own tensors."""
    engine = engine_of(policy.model)
    stages = replace(stages, models=replace(stages.models, policy=policy))
    return with_engine(stages, engine)


def with_engine(stages: Stages, engine: Engine, sync: InlineSync | None = None) -> Stages:
    return replace(with_runner(stages, engine=engine), sync=sync or InlineSync(engine))


def engine_of(model: ExactModel, kind: type[Engine] = Engine) -> Engine:
    return kind(model, str, cache_bytes=1 << 24, max_batch=8)


def policy_copy() -> ExactModel:
    """The weights that the policy begins with, in tensors of their own."""
    return exact_model("qwen3")


# Wrong engines and syncs
# ---------------------------------------------------------------------------------------------


class Relay:
    """An engine whose completions are changed on the way, from step AT on."""

    def __init__(self, engine: Engine, witness: Witness, change: Callable):
        self.engine, self.witness, self.change = engine, witness, change

    @property
    def weight_version(self) -> int:
        return self.engine.weight_version

    @property
    def longest(self) -> int:
        return self.engine.longest

    def apply(self, version: int) -> None:
        self.engine.apply(version)

    def submit(self, request):
        return self.engine.submit(request)

    def cancel(self, ticket) -> None:
        self.engine.cancel(ticket)

    def logprob_gap(self) -> float:
        return self.engine.logprob_gap()

    def step(self):
        tickets = self.engine.step()
        if self.witness.now >= AT:
            self.change(
                [ticket for ticket in tickets if ticket.completion is not None], self.witness
            )
        return tickets


def relayed(change: Callable) -> Change:
    def make(stages: Stages, witness: Witness) -> Stages:
        return with_engine(stages, Relay(stages.collector.runner.engine, witness, change))

    return make


def each(change: Callable) -> Callable:
    """Turn a change of one completion, or None to leave it, into a change of all."""

    def change_all(ended, witness: Witness) -> None:
        for ticket in ended:
            if (changed := change(ticket.completion)) is not None:
                ticket.completion = changed
                witness.fire()

    return change_all


def swap_two_prompts(ended, witness: Witness) -> None:
    for ticket in ended[1:]:
        if not np.array_equal(ticket.request.prompt, ended[0].request.prompt):
            ended[0].completion, ticket.completion = ticket.completion, ended[0].completion
            witness.fire()
            return


class Slots:
    """A buffer for each episode, in which its next turn is written over the one that the episode
    stands on."""

    def __init__(self) -> None:
        self.buffers: dict[int, np.ndarray] = {}

    def __call__(self, ended, witness: Witness) -> None:
        for ticket in ended:
            tokens = ticket.completion.tokens
            buffer = self.buffers.setdefault(
                ticket.request.key, np.zeros(PARAMS.max_new_tokens, np.int64)
            )
            if buffer.any():
                witness.fire()
            buffer[: len(tokens)] = tokens
            ticket.completion = replace(ticket.completion, tokens=buffer[: len(tokens)])


class OtherCopySync(InlineSync):
    """For an engine with tensors of its own; load says which of the policy's reach it, and tells
    the witness."""

    def __init__(self, engine: Engine, load: Callable[[int], dict[str, torch.Tensor]]):
        super().__init__(engine)
        self.load = load

    def publish(self, version: int) -> None:
        self.engine.apply(version, lambda: self.engine.model.load_weights(self.load(version)))


def other_copy(which: Callable[[dict, int], dict], since: int = 0) -> Change:
    """which: of the policy's weights, those that arrive, from version `since` + 1 on; all of them
    before."""

    def make(stages: Stages, witness: Witness) -> Stages:
        policy, engine = stages.models.policy.model, engine_of(policy_copy())

        def load(version: int) -> dict[str, torch.Tensor]:
            weights = policy.merged_weights()
            if version <= since:
                return weights
            witness.fire()
            return which(weights)

        return with_engine(stages, engine, OtherCopySync(engine, load))

    return make


def nothing(weights: dict) -> dict:
    return {}


def all_but_one(weights: dict) -> dict:
    return {
        name: weight for name, weight in weights.items() if "layers.1.mlp.down_proj" not in name
    }


class KeepsItsCache(Engine):
    """Goes over to new weights with the keys and values of the old ones."""

    witness: Witness

    def _forget(self) -> None:
        if self.weight_version:
            self.witness.fire()
        self._stamp = self._weights_stamp()


def stale_cache(stages: Stages, witness: Witness) -> Stages:
    engine = engine_of(stages.models.policy.model, KeepsItsCache)
    engine.witness = witness
    problems = [
        replace(p, messages=({"role": "user", "content": LONG + p.uid[1:]},))
        for p in stages.collector.problems
    ]
    stages = replace(stages, collector=replace(stages.collector, problems=problems))
    return with_engine(stages, engine)


class Padded(ExactModel):
    """Counts positions from the padding on the left."""

    def hidden(self, tokens, positions, plan, choices=None):
        return super().hidden(tokens, positions + 3, plan, choices)


class TwoKernels(ExactModel):
    """Another order of additions where gradients are wanted."""

    def hidden(self, tokens, positions, plan, choices=None):
        hidden = super().hidden(tokens, positions, plan, choices)
        return (hidden * 3.0) / 3.0 if torch.is_grad_enabled() else hidden


def padded_positions(stages: Stages, witness: Witness) -> Stages:
    policy = stages.models.policy.model
    engine = engine_of(Padded(policy.module))
    witness.fire()
    return with_engine(stages, engine)


def two_kernels(stages: Stages, witness: Witness) -> Stages:
    witness.fire()
    return with_policy(stages, learner_of(TwoKernels(stages.models.policy.model.module)))


def adapter_not_merged(stages: Stages, witness: Witness) -> Stages:
    """The engine gets the base weights, which an adapter leaves as they are."""
    lora = Lora(rank=2, alpha=16.0, targets=("all-linear",), seed=0)
    model = make_exact(stock_model(tiny_config("qwen3")), lora)
    stages = replace(stages, models=Models(policy=learner_of(model)))

    def base_only(weights: dict) -> dict:
        adapter = model.adapter_weights()
        return {
            name: weight for name, weight in model.named_weights().items() if name not in adapter
        }

    return other_copy(base_only)(stages, witness)


# What lies between rollouts and learning
# -----------------------------------------------------------------------------


def learning(folder: Path, witness: Witness, change: Callable, **more) -> None:
    """A run whose learning gets `change(stages, batch)` from step AT on."""

    def learn(stages, batch):
        if batch.step < AT:
            return learn_step(stages, batch)
        witness.fire()
        return learn_step(*change(stages, batch))

    train(folder, witness, learn=learn, **more)


def other_sampling(stages, batch, **values):
    return replace(stages, sampling=replace(stages.sampling, **values)), batch


def regrouped(change: Callable) -> Callable:
    return lambda stages, batch: (stages, replace(batch, groups=change(batch.groups)))


def mispaired(groups: list) -> list:
    first, second = groups
    return [replace(first, episodes=second.episodes), replace(second, episodes=first.episodes)]


def one_episode_lost(groups: list) -> list:
    return [replace(groups[0], episodes=groups[0].episodes[:-1]), *groups[1:]]


def one_group_lost(groups: list) -> list:
    return groups[1:]


def end_not_trained(groups: list) -> list:
    """Take the last token of a completion that ended by itself out of the loss."""

    def without(episode):
        mask = episode.loss_mask.copy()
        mask[-1] &= episode.stop_reason != "stop"
        return replace(episode, loss_mask=mask)

    return [replace(group, episodes=tuple(map(without, group.episodes))) for group in groups]


def shifted_mask(groups: list) -> list:
    def shifted(episode):
        return replace(episode, loss_mask=np.append(episode.loss_mask[1:], False))

    return [replace(group, episodes=tuple(map(shifted, group.episodes))) for group in groups]


# Turns, rewards, learners
# --------------------------------------------------------------------------------------------


class TwoTurns(Env):
    turns = 0

    def step(self, text: str) -> Observation:
        self.turns += 1
        return Observation(
            messages=({"role": "user", "content": "5"},),
            done=self.turns == 2,
            reward=float(len(text) % 2),
        )


def in_two_turns(stages: Stages, witness: Witness) -> Stages:
    limits = stages.config.env.model_copy(update={"name": "own"})
    return with_runner(stages, envs=EnvPool(make=TwoTurns, limits=limits))


class ForgetsTheEnd(DigitRenderer):
    def __init__(self, witness: Witness):
        self.witness = witness

    def turn(self, messages):
        if self.witness.now < AT:
            return super().turn(messages)
        self.witness.fire()
        return super().turn(messages)[1:]


def separator_dropped(stages: Stages, witness: Witness) -> Stages:
    stages = in_two_turns(stages, witness)
    return with_runner(stages, renderer=ForgetsTheEnd(witness))


def recycled_slots(stages: Stages, witness: Witness) -> Stages:
    return relayed(Slots())(in_two_turns(stages, witness), witness)


class WrongReward(TextReward):
    """Score from step AT on."""

    def __init__(self, witness: Witness, score: Score):
        super().__init__()
        self.witness, self.wrong = witness, score

    def score(self, problem: Problem, attempt: object) -> Score:
        if self.witness.now < AT:
            return super().score(problem, attempt)
        self.witness.fire()
        return self.wrong


def rewarded(score: Score) -> Change:
    return lambda stages, witness: with_runner(stages, rewards=WrongReward(witness, score))


def hanging_verifier(folder: Path, witness: Witness) -> None:
    """A regular expression that never ends, in one C call, in a real worker process."""
    file = folder.with_suffix(".py")
    file.write_text(
        "import re\ndef score(problem, completion):\n"
        '    return float(bool(re.match("(a+)+$", "a" * 60 + "b")))\n'
    )
    with RewardPool(f"{file}:score", timeout_s=0.3) as pool:
        witness.fire()
        train(folder, witness, lambda stages, _: with_runner(stages, rewards=pool))


def accumulation(folder: Path, witness: Witness) -> None:
    """Each microbatch's loss is a mean of its own, so that their number scales the gradient."""

    def learn(stages, batch):
        [minibatch] = pack_batch(batch.trained, stages.config).minibatches

        def scale(microbatch, tokens, logprobs):
            if len(minibatch) > 1 and batch.step >= AT:
                witness.fire()
                tokens.weights.mul_(len(minibatch))

        return learn_step(stages, batch, scale)

    train(folder, witness, learn=learn, settings=config(train__tokens_per_microbatch=16))


def reference_is_the_policy(stages: Stages, witness: Witness) -> Stages:
    witness.fire()
    return replace(stages, models=replace(stages.models, reference=stages.models.policy.model))


# Runs that are started again
# -----------------------------------------------------------------------------------------


class ScheduleAnew(Optimizer):
    def load_state(self, tensors, step):
        super().load_state(tensors, 0)


class MomentsLost(Optimizer):
    def load_state(self, tensors, step):
        self.step = step


def resumed(
    folder: Path,
    witness: Witness,
    *,
    between: Callable = lambda run: None,
    change: Change = as_it_is,
    first: int = 2,
    every: int = 1,
    again: dict | None = None,
    **more,
) -> None:
    """A clean run of `first` steps; then something happens, and the run is started again."""
    changes = more.pop("changes", {})
    settings = config(run__save_every=every, run__keep_checkpoints=2, **changes)
    train(
        folder,
        Witness(),
        lambda s, _: with_policy(s, learner_of(s.models.policy.model)),
        settings=settings,
        steps=first,
        **more,
    )
    between(folder)
    witness.now = first
    witness.fire()
    clean: Change = lambda s, _: with_policy(s, learner_of(s.models.policy.model))  # noqa: E731
    chosen = clean if change is as_it_is else change
    train(folder, witness, chosen, settings=settings, steps=first + 2, **{**more, **(again or {})})


def loses(optimizer: type[Optimizer]) -> Change:
    return lambda stages, witness: with_policy(
        stages, learner_of(stages.models.policy.model, optimizer)
    )


def skips_an_epoch(job: RLJob, done: int, state: dict) -> None:
    epoch = len(job.stages.collector.problems)
    job.restore(done, {**state, "batches": state["batches"] + epoch})


def no_journal(folder: Path) -> None:
    (folder / "episodes" / "train_step_000002.parquet").unlink()


def no_checkpoints(folder: Path) -> None:
    for path in (folder / "checkpoints").glob("step_*"):
        shutil.rmtree(path)


def data_in_another_order(folder: Path, witness: Witness) -> None:
    file = folder.with_suffix(".jsonl")
    rows = [f'{{"prompt": "{n} + {n}?", "answer": "{2 * n}"}}\n' for n in range(4)]
    file.write_text("".join(rows))
    hashes = partial(input_hashes, config(data__train=str(file)), "data.train")
    before = hashes()
    file.write_text("".join(reversed(rows)))
    resumed(folder, witness, data=before, again={"data": hashes()})


def unknown_key(folder: Path, witness: Witness) -> None:
    witness.fire()
    load_config(None, ["rl.prompt_per_step=8"])


# The bugs
# --------------------------------------------------------------------------------

GAP = "engine and (policy|trainer) do not agree on (the tokens|a completion) just sampled"
WHOLE = "a step would train other tokens than its own"

BUGS = (
    Bug(
        issue="Open-Reasoner-Zero #28",
        what="weights never reach the engine",
        inject=partial(train, change=other_copy(nothing)),
        stopped_by=GAP,
        after=1,
    ),
    Bug(
        issue="TRL #5312",
        what="from some step on the engine wakes up with old weights",
        inject=partial(train, change=other_copy(nothing, since=AT)),
        stopped_by=GAP,
        after=1,
    ),
    Bug(
        issue="SkyRL #1680",
        what="a sync that leaves one tensor as it was",
        inject=partial(train, change=other_copy(all_but_one, since=AT)),
        stopped_by=GAP,
        after=1,
    ),
    Bug(
        issue="TRL #2698",
        what="an adapter that is not merged into what the engine gets",
        inject=partial(train, change=adapter_not_merged),
        stopped_by=GAP,
        after=1,
    ),
    Bug(
        issue="NeMo-RL #4018",
        what="cached keys of old weights used under new ones",
        inject=partial(train, change=stale_cache, settings=config(rl__prompts_per_step=5)),
        stopped_by=GAP,
        after=1,
    ),
    Bug(
        issue="AReaL #1569",
        what="tokens labelled with a version that did not sample them",
        inject=partial(
            train, change=relayed(each(lambda c: replace(c, weight_versions=c.weight_versions - 1)))
        ),
        stopped_by=WHOLE,
    ),
    Bug(
        issue="TRL #4159",
        what="the trainer's log-probs without the temperature",
        inject=partial(
            learning,
            change=partial(other_sampling, temperature=1.0),
            sampling=replace(PARAMS, temperature=0.6),
        ),
        stopped_by=GAP,
    ),
    Bug(
        issue="TRL #6789",
        what="the trainer's log-probs without top-p",
        inject=partial(
            learning, change=partial(other_sampling, top_p=1.0), sampling=replace(PARAMS, top_p=0.8)
        ),
        stopped_by=GAP,
    ),
    Bug(
        issue="TRL #5224",
        what="tokens decoded and encoded again to others",
        inject=partial(
            train,
            change=relayed(
                each(lambda c: replace(c, tokens=(c.tokens + (c.tokens % 5 == 0)) % 97))
            ),
        ),
        stopped_by=GAP,
    ),
    Bug(
        issue="OpenRLHF #238",
        what="a truncated completion ends in a token it did not sample",
        inject=partial(
            train, change=relayed(each(lambda c: replace(c, tokens=np.append(c.tokens[:-1], 91))))
        ),
        stopped_by=GAP,
    ),
    Bug(
        issue="OpenRLHF #217",
        what="positions that count the padding",
        inject=partial(train, change=padded_positions),
        stopped_by=GAP,
    ),
    Bug(
        issue="prime-rl #1525",
        what="log-probs off by one position",
        inject=partial(
            train, change=relayed(each(lambda c: replace(c, logprobs=np.roll(c.logprobs, 1))))
        ),
        stopped_by=GAP,
    ),
    Bug(
        issue="gpt-neox #1285",
        what="a loss mask off by one",
        inject=partial(learning, change=regrouped(shifted_mask)),
        stopped_by=WHOLE,
    ),
    Bug(
        issue="nanochat #810",
        what="the token that ends a completion carries no loss",
        inject=partial(
            learning,
            change=regrouped(end_not_trained),
            sampling=replace(PARAMS, stop_token_ids=STOPS),
        ),
        stopped_by=WHOLE,
    ),
    Bug(
        issue="verl #6501",
        what="the separator dropped at a turn's end",
        inject=partial(
            train, change=separator_dropped, sampling=replace(PARAMS, stop_token_ids=STOPS)
        ),
        stopped_by="a turn of the model would not be ended",
    ),
    Bug(
        issue="verl #7579",
        what="buffers used again while an episode stands on them",
        inject=partial(
            train, change=recycled_slots, sampling=replace(PARAMS, stop_token_ids=STOPS)
        ),
        stopped_by="a token of an episode has changed since it was sampled",
    ),
    Bug(
        issue="TRL #3098",
        what="completions handed to other prompts",
        inject=partial(train, change=relayed(swap_two_prompts)),
        stopped_by=GAP,
    ),
    Bug(
        issue="open-instruct #1483",
        what="groups paired with other problems",
        inject=partial(learning, change=regrouped(mispaired), settings=config(data__shuffle=False)),
        stopped_by="an episode is not of the problem it is trained for",
    ),
    Bug(
        issue="slime #1918",
        what="a group with an episode less",
        inject=partial(learning, change=regrouped(one_episode_lost)),
        stopped_by=WHOLE,
    ),
    Bug(
        issue="NanoRL data plane",
        what="a queue that overflows and drops the oldest",
        inject=partial(learning, change=regrouped(one_group_lost)),
        stopped_by=WHOLE,
    ),
    Bug(
        issue="TRL #2617",
        what="a gradient that grows with the number of microbatches",
        inject=accumulation,
        stopped_by="the gradient of the loss is not that of the algorithm",
    ),
    Bug(
        issue="TRL #2046",
        what="a reference that is the policy itself",
        inject=partial(train, change=reference_is_the_policy, settings=config(rl__kl_coef=0.1)),
        stopped_by="the reference would be trained with the policy",
    ),
    Bug(
        issue="NanoRL, troubleshooting",
        what="another kernel where gradients are wanted",
        inject=partial(train, change=two_kernels),
        stopped_by=GAP,
    ),
    Bug(
        issue="verl #747",
        what="a reward that is NaN",
        inject=partial(
            train,
            change=rewarded(Score(reward=float("nan"), parts={})),
            settings=config(train__max_bad_steps=0),
        ),
        stopped_by="training stops: NaN or infinity",
    ),
    Bug(
        issue="TRL #3452",
        what="equal rewards in every group, for ever",
        inject=partial(
            train,
            change=rewarded(Score(reward=0.0, parts={})),
            settings=config(rl__max_flat_steps=1),
        ),
        stopped_by="training stops: no episode has had an advantage",
    ),
    Bug(
        issue="TRL #5697",
        what="nearly all completions truncated",
        inject=lambda folder, witness: (
            witness.fire(),
            train(folder, witness, settings=config(rl__max_truncated=0.9)),
        ),
        stopped_by="too many completions were truncated",
    ),
    Bug(
        issue="verl #4417",
        what="a reward that raises each time",
        inject=partial(
            train, change=rewarded(Score(reward=0.0, parts={}, error="KeyError: 'answer'"))
        ),
        stopped_by="no episode could be scored",
    ),
    Bug(
        issue="Math-Verify #50",
        what="a verifier that hangs in one C call",
        inject=hanging_verifier,
        stopped_by="no episode could be scored",
    ),
    Bug(
        issue="verl #7401",
        what="a resume that skips an epoch of the data",
        inject=partial(resumed, again={"restore": skips_an_epoch}),
        stopped_by="the rollouts do not go on where they ended",
    ),
    Bug(
        issue="NeMo-RL #3599",
        what="a checkpoint whose rollouts in flight are lost",
        inject=partial(
            resumed,
            between=no_journal,
            changes={"rollout__token_budget": 3, "rl__correction": "tis"},
        ),
        stopped_by="the journal does not have what the checkpoint's step left to the next",
    ),
    Bug(
        issue="OpenRLHF #1208",
        what="no checkpoint where one was: training from scratch",
        inject=partial(resumed, between=no_checkpoints, first=3),
        stopped_by="the checkpoints of the run are gone",
    ),
    Bug(
        issue="transformers #34053",
        what="a schedule that begins anew on resume",
        inject=partial(resumed, change=loses(ScheduleAnew)),
        stopped_by="steps of the schedule",
    ),
    Bug(
        issue="torchrl #4188",
        what="an optimizer without its moments on resume",
        inject=partial(resumed, change=loses(MomentsLost)),
        stopped_by="other moments of the optimizer",
    ),
    Bug(
        issue="accelerate #4195",
        what="data in another order on resume",
        inject=data_in_another_order,
        stopped_by="a data file, .* has changed since the run began",
    ),
    Bug(
        issue="verl #3095",
        what="a batch key that nothing reads",
        inject=unknown_key,
        stopped_by="rl.prompts_per_step",
    ),
)


def cases(bugs: tuple[Bug, ...] = BUGS) -> Iterator[Case]:
    """Each bug in a folder of its own, told as it ends."""
    with tempfile.TemporaryDirectory() as place:
        for number, bug in enumerate(bugs):
            ended = outcome(bug, Path(place) / f"run{number}")
            when = f"step {ended.fired + 1}, stopped in step {ended.stopped + 1}"
            print(
                f"{bug.issue}: {bug.what}: {when}{f': {ended.problem}' if ended.problem else ''}",
                flush=True,
            )
            yield ended.fired >= 0, f"{bug.issue}: {ended.problem}" if ended.problem else ""


# Clean steps
# --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Clean:
    """A run in which nothing is wrong."""

    settings: Config
    change: Change = as_it_is
    sampling: SamplingParams = field(default_factory=lambda: replace(PARAMS, stop_token_ids=STOPS))


def algorithm(name: str, **changes) -> Config:
    return config(
        **{f"rl__{key}": value for key, value in ALGORITHMS[name].settings.items()}, **changes
    )


def with_reference(stages: Stages, witness: Witness) -> Stages:
    return replace(stages, models=replace(stages.models, reference=policy_copy()))


def with_critic(stages: Stages, witness: Witness) -> Stages:
    return replace(
        stages, models=replace(stages.models, critic=learner_of(value_twins("qwen3")[0]))
    )


def with_adapter(stages: Stages, witness: Witness) -> Stages:
    """Compute the policy's log-probs with the adapter as its own reference, which leaves the
    adapter out."""
    lora = Lora(rank=2, alpha=16.0, targets=("all-linear",), seed=0)
    stages = with_policy(stages, learner_of(make_exact(stock_model(tiny_config("qwen3")), lora)))
    return replace(stages, models=replace(stages.models, reference=stages.models.policy.model))


SAMPLING = replace(
    PARAMS,
    temperature=0.7,
    top_p=0.9,
    top_k=40,
    min_p=0.01,
    repetition_penalty=1.1,
    stop_token_ids=STOPS,
)
LATE = {"rl__correction": "decoupled"}

CLEAN = {
    **{name: Clean(settings=algorithm(name)) for name in ALGORITHMS if name != "ppo"},
    "ppo": Clean(settings=algorithm("ppo", critic__warmup_steps=1), change=with_critic),
    "max_at_k": Clean(settings=config(rl__advantage="max_at_k", rl__k=2)),
    "minibatches and epochs": Clean(settings=config(rl__minibatches=2, rl__epochs=2)),
    "small microbatches": Clean(settings=config(train__tokens_per_microbatch=16)),
    "a reference in the loss": Clean(settings=config(rl__kl_coef=0.1), change=with_reference),
    "a reference in the reward": Clean(
        settings=config(rl__kl_coef=0.1, rl__kl_in="reward", rl__kl_estimator="k1"),
        change=with_reference,
    ),
    "an adapter": Clean(settings=config(rl__kl_coef=0.1), change=with_adapter),
    "an entropy bonus": Clean(settings=config(rl__entropy_coef=0.01)),
    "tis": Clean(settings=config(rl__correction="tis")),
    "icepop": Clean(settings=config(rl__correction="icepop", rl__max_logprob_error=4.0)),
    "a curriculum": Clean(settings=config(rl__curriculum=True)),
    "all of sampling": Clean(settings=config(), sampling=SAMPLING),
    "masked truncated": Clean(settings=config(rl__mask_truncated=True)),
    "two turns": Clean(settings=config(), change=in_two_turns),
    "one step late": Clean(settings=config(rollout__staleness=1, **LATE)),
    "two steps late": Clean(settings=config(rollout__staleness=2, rl__max_gen_batches=8, **LATE)),
    "partial rollouts": Clean(settings=config(rollout__token_budget=4, **LATE)),
    "partial rollouts, late, two turns": Clean(
        settings=config(rollout__token_budget=4, rollout__staleness=1, **LATE), change=in_two_turns
    ),
}


class Killed(Exception):
    """Ends a start of a run."""


def clean_run(folder: Path, clean: Clean, steps: int, counts: Counter) -> str:
    """A run of so many steps, ended and started again in its middle; what stopped it, or "".
    counts: how often a check looked."""
    rl, middle = clean.settings.rl, max(1, steps // 2)
    settings = clean.settings.model_copy(
        update={"run": clean.settings.run.model_copy(update={"save_every": middle})}
    )
    foretold = not rl.entropy_coef and not (rl.kl_coef and rl.kl_in == "loss")

    def learn(last: int, stages: Stages, batch: RolloutBatch) -> dict[str, float]:
        if batch.step == last:
            raise Killed
        row = learn_step(stages, batch)
        counts["steps"] += 1
        counts["episodes whole, labelled, of their problem and version"] += sum(
            len(g.episodes) for g in batch.trained
        )
        counts["rollouts go on where they ended"] += batch.step > 0
        counts["log-prob gap"] += "logprob_gap" in row
        counts["gradient"] += "logprob_gap" in row and foretold
        counts["reference frozen"] += stages.models.reference is not None
        counts["finite, and not flat"] += 1
        return row

    def slowly(stages: Stages, witness: Witness) -> Stages:
        """So that a policy with five problems does not come to say one thing only."""
        return clean.change(with_policy(stages, learner_of(stages.models.policy.model)), witness)

    for last in (middle, steps):
        try:
            train(
                folder,
                Witness(),
                slowly,
                settings=settings,
                learn=partial(learn, last),
                sampling=clean.sampling,
                steps=steps,
            )
        except Killed:
            counts["what was loaded is what was saved"] += 1
        except (UserError, RuntimeError) as error:
            return str(error)
    return "" if last_step(folder) == steps else f"{last_step(folder)} of {steps} steps"


def clean_steps(steps: int = CLEAN_STEPS) -> Result:
    """Over the algorithms and schedules, all in this process."""
    start, counts, alarms = time.perf_counter(), Counter(), []
    with tempfile.TemporaryDirectory() as place:
        for number, (name, clean) in enumerate(CLEAN.items()):
            share = (number + 1) * steps // len(CLEAN) - number * steps // len(CLEAN)
            alarm = clean_run(Path(place) / f"run{number}", clean, share, counts)
            alarms += [f"{name}: {alarm}"] if alarm else []
            print(f"clean, {name}: {share} steps{f': {alarm}' if alarm else ''}", flush=True)
    looked = "; ".join(
        f"{what} {count:,}" for what, count in sorted(counts.items()) if what != "steps"
    )
    return Result(
        what="clean steps over the algorithms and schedules, each run started again once: none "
        "stops",
        injected=steps,
        witnessed=counts["steps"],
        survived=0 if alarms else counts["steps"],
        expected=steps,
        seconds=time.perf_counter() - start,
        note="; ".join([*alarms[:3], f"looked: {looked}"]),
    )


def section(bugs: tuple[Bug, ...] = BUGS, steps: int = CLEAN_STEPS) -> list[Result]:
    what = "bugs of the field: stopped, with the cause, before a weight was touched by them"
    return [tally(what, cases(bugs), at_least=min(25, len(bugs))), clean_steps(steps)]
