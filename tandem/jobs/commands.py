"""The commands that train, as jobs for train_loop.py: first their jobs/inputs.py, then the model,
and only then workers.

training_job   problems -> episodes -> rewards -> updates     tandem train     step.py
distill_job    problems -> episodes -> teacher -> updates     tandem distill   step.py
sft_job        chats -> updates                               tandem sft
dpo_job        pairs -> updates                               tandem dpo
rm_job         pairs -> updates of a reward model             tandem rm
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from tandem.config.schema import Config
from tandem.data.mixture import problems_of_step
from tandem.jobs.inputs import (
    KEYS,
    Inputs,
    ProblemInputs,
    distill_inputs,
    dpo_inputs,
    rm_inputs,
    sft_inputs,
    training_inputs,
)
from tandem.jobs.parts import (
    Report,
    build_engine,
    build_learner,
    build_model,
    build_reference,
    evaluator,
    input_hashes,
    learning_models,
    playground,
    prepare_process,
    require_parity,
    rollout_side,
    student_and_teacher,
    tell_exactness,
)
from tandem.model.load import ExactModel
from tandem.model.probe import Exactness
from tandem.rl.losses import Metrics
from tandem.rollout.evaluate import sampling_params
from tandem.rollout.score import Timer
from tandem.run_folder.folder import RunFolder, identity
from tandem.run_folder.journal import Journal
from tandem.runtime import numerics
from tandem.runtime.errors import UserError
from tandem.step import Stages, Update, distill_step, train_step, update
from tandem.step_async import open_prefetcher, train_step_async
from tandem.train.learn import Models
from tandem.train.pack import pack
from tandem.train.supervised import (
    pair_loss,
    preference_step,
    reward_model_step,
    score_loss,
    sft_step,
)
from tandem.train_loop import StepResult, TrainJob
from tandem.types import Microbatch, Row, Sample
from tandem.weights.in_process import InlineSync

T = TypeVar("T")


@contextmanager
def training_job(config: Config, run: RunFolder, report: Report) -> Iterator[TrainJob]:
    """`tandem train`."""
    with _problems_job(config, run, report, training_inputs, learning_models, update) as job:
        yield job


@contextmanager
def distill_job(config: Config, run: RunFolder, report: Report) -> Iterator[TrainJob]:
    """`tandem distill`."""
    with _problems_job(
        config, run, report, distill_inputs, student_and_teacher, distill_step
    ) as job:
        yield job


@contextmanager
def _problems_job(
    config: Config,
    run: RunFolder,
    report: Report,
    read: Callable[[Config], ProblemInputs],
    make: Callable[[Config], Models],
    update: Update,
) -> Iterator[TrainJob]:
    """A job whose episodes are sampled on the way."""
    prepare_process(config)
    given = read(config)
    problems, held_out, renderer = given.problems, given.held_out, given.renderer
    inputs = input_hashes(config, *KEYS[run.command])
    journal, eval_journal = (
        Journal(run.episodes, identity(config, inputs), of) for of in (problems, held_out)
    )
    with playground(config) as player_of:
        models = make(config)
        found = tell_exactness(
            config,
            models.policy.model,
            report,
            workers=config.rollout.workers,
            beside=models.others,
        )
        exact = require_parity(config, found)
        _note_machine(run, found, report)
        engine = build_engine(config, models.policy.model, renderer)
        local = player_of(engine, renderer)
        with rollout_side(config, engine, local, report) as (player, sync, stop_workers):
            stages = Stages(
                config=config,
                problems=problems,
                player=player,
                models=models,
                sync=sync,
                journal=journal,
                exact=exact,
                params=sampling_params(config.rollout, renderer.stop_token_ids),
            )
            critic = {} if models.critic is None else {"critic": models.critic}
            job = TrainJob(
                learners={"policy": models.policy, **critic},
                data=inputs,
                steps=config.run.steps,
                eval_every=config.eval.every,
                publish=sync.publish,
                step=lambda done: train_step(stages, done, update),
                evaluate=evaluator(config, held_out, local, renderer.stop_token_ids, eval_journal),
                restore=lambda done, state: _restore(stages, done, state),
            )
            journal.clean()
            if not config.rollout.staleness:
                yield job
                return
            with open_prefetcher(stages, config.run.steps, stop_workers) as ahead:
                yield replace(
                    job,
                    begin=ahead.begin,
                    wait_until_durable=ahead.wait_until_durable,
                    stop_soon=ahead.stop_soon,
                    step=lambda done: train_step_async(ahead, done, update),
                )


def _note_machine(run: RunFolder, found: Exactness, report: Report) -> None:
    """Write the processor to machine.json, and report it if it has changed."""
    if news := run.note_machine(numerics.processor(), not found.thread_dependent):
        report(news)


def _restore(stages: Stages, done: int, state: dict[str, Any]) -> None:
    """Groups that a step left to the next are read back from its file in the journal."""
    leaves = stages.config.rl.max_gen_batches or stages.config.rollout.token_budget
    known = stages.journal.read(done) if leaves and done else None
    if leaves and done and known is None:
        raise UserError(
            "the journal does not have what the checkpoint's step left to the next",
            where=str(stages.journal.folder),
            found=f"no file of this run for step {done}",
            expected=f"train_step_{done:06d}.parquet",
            next="restore it from a copy, or start over with --fresh (the old run is kept beside it)",
        )
    stages.progress.restore(state, known[0] if known else [])


@contextmanager
def sft_job(config: Config, run: RunFolder, report: Report) -> Iterator[TrainJob]:
    """`tandem sft`."""
    prepare_process(config)
    settings, given = config.sft, sft_inputs(config)
    policy = build_learner(config, build_model(config, config.model.path), settings, settings.steps)
    _note_machine(run, tell_exactness(config, policy.model, report), report)

    def step(picked: list[Sample]) -> Metrics:
        return sft_step(policy, pack(picked, config.train.tokens_per_microbatch))

    inputs = input_hashes(config, *KEYS["sft"])
    with _generating(config, policy.model, given, run, inputs) as (publish, evaluate):
        yield TrainJob(
            learners={"policy": policy},
            data=inputs,
            steps=settings.steps,
            eval_every=0,
            publish=publish,
            step=_step(config, given.samples, settings.batch_size, step, publish),
            evaluate=evaluate,
        )


@contextmanager
def dpo_job(config: Config, run: RunFolder, report: Report) -> Iterator[TrainJob]:
    """`tandem dpo`."""
    prepare_process(config)
    settings, given = config.preference, dpo_inputs(config)
    policy = build_learner(config, build_model(config, config.model.path), settings, settings.steps)
    reference = build_reference(config, policy.model)
    _note_machine(run, tell_exactness(config, policy.model, report), report)

    watch = LossWatch(settings.learning_rate, settings.warmup_steps, report)

    def step(picked: list[list[Sample]]) -> Metrics:
        return watch(preference_step(policy, reference, _pack_pairs(picked, config), settings))

    def accuracy() -> Row:
        return _pair_accuracy(
            given.test, config, lambda batch: pair_loss(policy.model, reference, batch, settings)
        )

    inputs = input_hashes(config, *KEYS["dpo"])
    with _generating(config, policy.model, given, run, inputs) as (publish, evaluate):
        yield TrainJob(
            learners={"policy": policy},
            data=inputs,
            steps=settings.steps,
            eval_every=config.eval.every,
            publish=publish,
            step=_step(config, given.train, settings.batch_size, step, publish),
            evaluate=lambda done: {**accuracy(), **evaluate(done)},
        )


@contextmanager
def rm_job(config: Config, run: RunFolder, report: Report) -> Iterator[TrainJob]:
    """`tandem rm`: a sequence classifier with one label, its score read at the last token."""
    prepare_process(config)
    settings, given = config.preference, rm_inputs(config)
    scorer = build_learner(
        config, build_model(config, config.model.path, head="value"), settings, settings.steps
    )
    _note_machine(run, tell_exactness(config, scorer.model, report), report)
    scorer.model.config.pad_token_id = (
        given.renderer.tokenizer.pad_token_id
    )  # by which stock transformers finds the last token

    watch = LossWatch(settings.learning_rate, settings.warmup_steps, report)

    def step(picked: list[list[Sample]]) -> Metrics:
        return watch(reward_model_step(scorer, _pack_pairs(picked, config)))

    yield TrainJob(
        learners={"scorer": scorer},
        data=input_hashes(config, *KEYS["rm"]),
        steps=settings.steps,
        eval_every=config.eval.every,
        publish=_to_nobody,
        step=_step(config, given.train, settings.batch_size, step, _to_nobody),
        evaluate=lambda done: _pair_accuracy(
            given.test, config, lambda batch: score_loss(scorer.model, batch)
        ),
    )


@contextmanager
def _generating(
    config: Config, model: ExactModel, given: Inputs, run: RunFolder, inputs: dict[str, str]
) -> Iterator[tuple[Callable[[int], None], Callable[[int], Row]]]:
    """(publish, evaluate on eval.data) of an engine over the model, for jobs that sample nothing
    else."""
    engine = build_engine(config, model, given.renderer)
    with playground(config) as player_of:
        player = player_of(engine, given.renderer)
        journal = Journal(run.episodes, identity(config, inputs), given.held_out)
        journal.clean()
        yield (
            InlineSync(engine).publish,
            evaluator(config, given.held_out, player, given.renderer.stop_token_ids, journal),
        )


class LossWatch:
    """Warns once if the loss of pairs has not moved: at a learning rate too small for the model it
    stays at ln 2 = 0.693."""

    STEPS, MOVED = 10, 1e-3  # steps behind the warm-up, and share of the first loss

    def __init__(self, learning_rate: float, warmup_steps: int, report: Report):
        self._rate, self._report, self._warmup = learning_rate, report, warmup_steps
        self._losses: list[float] = []

    def __call__(self, metrics: Metrics) -> Metrics:
        self._losses.append(metrics["loss"])
        if len(self._losses) == self._warmup + self.STEPS:
            first, farthest = (
                self._losses[0],
                max(abs(loss - self._losses[0]) for loss in self._losses),
            )
            if farthest < self.MOVED * abs(first):
                self._report(
                    f"warning: the loss is still {first:.3f} after {len(self._losses)} steps; preference.learning_rate = "
                    f"{self._rate:g} is probably too small for this model (docs/algorithms.md, learning rates)"
                )
        return metrics


def _to_nobody(version: int) -> None:
    """No engine runs a reward model."""


def _step(
    config: Config,
    items: Sequence[T],
    batch_size: int,
    update: Callable[[list[T]], Metrics],
    publish: Callable[[int], None],
) -> Callable[[int], StepResult]:
    """A job's step over fixed items, in addressed shuffles; the weights after it are published."""

    def step(done: int) -> StepResult:
        clock = Timer()
        with clock("learn_s"):
            metrics = update(
                problems_of_step(items, done, batch_size, config.run.seed, config.data.shuffle)
            )
        publish(done + 1)
        return metrics, clock.timings(tokens=0), {}

    return step


def _pack_pairs(pairs: Sequence[Sequence[Sample]], config: Config) -> list[Microbatch]:
    return pack(
        [sample for pair in pairs for sample in pair],
        config.train.tokens_per_microbatch,
        keep_groups=True,
    )


@torch.no_grad()
def _pair_accuracy(
    pairs: Sequence[Sequence[Sample]],
    config: Config,
    loss: Callable[[Microbatch], tuple[Tensor, Metrics]],
) -> Row:
    """Means over held-out pairs, under "eval/"."""
    sums: Row = {}
    for batch in _pack_pairs(pairs, config):
        for name, part in loss(batch)[1].items():
            sums[name] = sums.get(name, 0.0) + part
    return {f"eval/{name}": part / len(pairs) for name, part in sums.items()}
