"""`tandem sft`, `tandem dpo` and `tandem rm`: jobs that learn from fixed data.

Data is checked first, then models are loaded, then workers start.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tandem.config.schema import SFT, Config, Preference
from tandem.data.mixture import problems_of_step
from tandem.jobs.engines import (
    Report,
    build_engine,
    load_reward_model,
    make_room,
    open_envs_and_rewards,
    prepare_process,
    probe_exactness,
)
from tandem.jobs.inputs import KEYS, Inputs, Pairs, dpo_inputs, input_hashes, rm_inputs, sft_inputs
from tandem.jobs.models import build_learner, build_model, build_reference
from tandem.jobs.rl import note_machine
from tandem.model.load import ExactModel
from tandem.rl.losses import Metrics
from tandem.rollout.evaluate import Evaluator
from tandem.rollout.score import RolloutRunner
from tandem.run_folder.folder import RunFolder, identity
from tandem.run_folder.journal import Journal
from tandem.runtime.timer import Timer
from tandem.step import StepResult
from tandem.train.learner import Learner
from tandem.train.pack import pack
from tandem.train.supervised import (
    pair_loss,
    preference_step,
    reward_model_step,
    score_loss,
    sft_step,
)
from tandem.types import Microbatch, Row, Sample
from tandem.weights.in_process import InlineSync


class OfflineJob:
    """A job for train_loop.py over fixed items, in addressed shuffles; a subclass learns from them.
    sync and evaluator: of the engine that evaluates, if there is one."""

    learner_name = "policy"

    def __init__(
        self,
        config: Config,
        settings: SFT | Preference,
        learner: Learner,
        items: Sequence[Any],
        data: dict[str, str],
    ):
        self.config, self.settings, self.learner, self.items = config, settings, learner, items
        self.learners, self.data = {self.learner_name: learner}, data
        self.steps, self.eval_every = settings.steps, config.eval.every
        self.sync: InlineSync | None = None
        self.evaluator: Evaluator | None = None
        self.make_room: Callable[[], None] = lambda: None  # on the device, for an update

    def learn(self, items: list[Any]) -> Metrics:
        """Make one optimizer step on a batch of items."""
        raise NotImplementedError

    def start(self, done: int) -> None:
        self._publish(done)

    def _publish(self, version: int) -> None:
        if self.sync is not None:
            self.sync.publish(version)

    def step(self, done: int) -> StepResult:
        timer, seed, shuffle = Timer(), self.config.run.seed, self.config.data.shuffle
        with timer("learn_s"):
            self.make_room()
            size = self.settings.batch_size
            metrics = self.learn(problems_of_step(self.items, done, size, seed, shuffle))
        self._publish(done + 1)
        return StepResult(metrics=metrics, timings=timer.timings(tokens=0), state={})

    def evaluate(self, done: int) -> Row:
        return {} if self.evaluator is None else self.evaluator(done)

    def restore(self, done: int, state: dict[str, Any]) -> None:
        """Do nothing: the only state is the number of the step."""

    def wait_until_durable(self, done: int) -> None:
        """Return at once: a checkpoint needs no other file."""

    def stop_soon(self) -> None:
        """Do nothing: no thread waits."""


class SFTJob(OfflineJob):
    """`tandem sft`."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.eval_every = 0

    def learn(self, items: list[Sample]) -> Metrics:
        return sft_step(self.learner, pack(items, self.config.train.tokens_per_microbatch))


class PairJob(OfflineJob):
    """A job that learns from pairs. test: held-out pairs."""

    settings: Preference

    def __init__(self, *arguments: Any, test: Pairs, report: Report):
        super().__init__(*arguments)
        self.test = test
        self._loss_watch = LossWatch(
            self.settings.learning_rate, self.settings.warmup_steps, report
        )

    def update(self, batches: list[Microbatch]) -> Metrics:
        """Make one optimizer step on whole pairs."""
        raise NotImplementedError

    def pair_losses(self, batch: Microbatch) -> Metrics:
        """Return the metrics of whole pairs, as sums."""
        raise NotImplementedError

    def learn(self, items: Pairs) -> Metrics:
        return self._loss_watch(self.update(self._pack(items)))

    def evaluate(self, done: int) -> Row:
        """Return means over the held-out pairs, under "eval/", and the evaluation on eval.data."""
        return {**self._pair_means(), **super().evaluate(done)}

    @torch.no_grad()
    def _pair_means(self) -> Row:
        sums: Row = {}
        for batch in self._pack(self.test):
            for name, part in self.pair_losses(batch).items():
                sums[name] = sums.get(name, 0.0) + part
        return {f"eval/{name}": part / len(self.test) for name, part in sums.items()}

    def _pack(self, pairs: Pairs) -> list[Microbatch]:
        samples = [sample for pair in pairs for sample in pair]
        return pack(samples, self.config.train.tokens_per_microbatch, keep_groups=True)


class DPOJob(PairJob):
    """`tandem dpo`."""

    def __init__(self, *arguments: Any, reference: ExactModel, **pairs: Any):
        super().__init__(*arguments, **pairs)
        self.reference = reference

    def update(self, batches: list[Microbatch]) -> Metrics:
        return preference_step(self.learner, self.reference, batches, self.settings)

    def pair_losses(self, batch: Microbatch) -> Metrics:
        return pair_loss(self.learner.model, self.reference, batch, self.settings)[1]


class RewardModelJob(PairJob):
    """`tandem rm`: a sequence classifier with one label, its score read at the last token."""

    learner_name = "scorer"

    def update(self, batches: list[Microbatch]) -> Metrics:
        return reward_model_step(self.learner, batches)

    def pair_losses(self, batch: Microbatch) -> Metrics:
        return score_loss(self.learner.model, batch)[1]


class LossWatch:
    """Warning, given once, if the loss of pairs has not moved: at a learning rate too small for the
    model it stays at ln 2 = 0.693."""

    STEPS, MOVED = 10, 1e-3  # steps after the warm-up, and share of the first loss

    def __init__(self, learning_rate: float, warmup_steps: int, report: Report):
        self._rate, self._report, self._warmup = learning_rate, report, warmup_steps
        self._losses: list[float] = []

    def __call__(self, metrics: Metrics) -> Metrics:
        """Look at a step's metrics, and return them."""
        self._losses.append(metrics["loss"])
        if len(self._losses) == self._warmup + self.STEPS:
            first = self._losses[0]
            if max(abs(loss - first) for loss in self._losses) < self.MOVED * abs(first):
                self._report(
                    f"warning: the loss is still {first:.3f} after {len(self._losses)} steps; "
                    f"preference.learning_rate = {self._rate:g} is probably too small for this "
                    "model (docs/algorithms.md, learning rates)"
                )
        return metrics


@contextmanager
def open_sft_job(config: Config, run: RunFolder, report: Report) -> Iterator[OfflineJob]:
    """Open the job of `tandem sft`."""
    prepare_process(config)
    inputs = sft_inputs(config)
    model = build_model(config, config.model.path)
    policy = build_learner(config, model, config.sft, config.sft.steps)
    note_machine(run, probe_exactness(config, model, report), report)
    data = input_hashes(config, *KEYS["sft"])
    job = SFTJob(config, config.sft, policy, inputs.samples, data)
    with _evaluating(job, inputs, run):
        yield job


@contextmanager
def open_dpo_job(config: Config, run: RunFolder, report: Report) -> Iterator[OfflineJob]:
    """Open the job of `tandem dpo`."""
    prepare_process(config)
    settings, inputs = config.preference, dpo_inputs(config)
    model = build_model(config, config.model.path)
    policy = build_learner(config, model, settings, settings.steps)
    reference = build_reference(config, model)
    note_machine(run, probe_exactness(config, model, report), report)
    data = input_hashes(config, *KEYS["dpo"])
    job = DPOJob(
        config,
        settings,
        policy,
        inputs.train,
        data,
        test=inputs.test,
        report=report,
        reference=reference,
    )
    with _evaluating(job, inputs, run):
        yield job


@contextmanager
def open_rm_job(config: Config, run: RunFolder, report: Report) -> Iterator[OfflineJob]:
    """Open the job of `tandem rm`."""
    prepare_process(config)
    settings, inputs = config.preference, rm_inputs(config)
    model = build_model(config, config.model.path, head="value")
    scorer = build_learner(config, model, settings, settings.steps)
    note_machine(run, probe_exactness(config, model, report), report)
    # stock transformers finds the last token by it
    model.config.pad_token_id = inputs.renderer.tokenizer.pad_token_id
    data = input_hashes(config, *KEYS["rm"])
    yield RewardModelJob(
        config, settings, scorer, inputs.train, data, test=inputs.test, report=report
    )


@contextmanager
def _evaluating(job: OfflineJob, inputs: Inputs, run: RunFolder) -> Iterator[None]:
    """Give the job an engine over its model that evaluates on eval.data."""
    config, renderer = job.config, inputs.renderer
    engine = build_engine(config, job.learner.model, renderer)
    with open_envs_and_rewards(config) as (envs, rewards):
        runner = RolloutRunner(
            engine=engine,
            renderer=renderer,
            envs=envs,
            rewards=rewards,
            reward_model=load_reward_model(config),
        )
        journal = Journal(run.episodes, identity(config, job.data), inputs.held_out)
        journal.clean()
        job.sync, job.make_room = InlineSync(engine), make_room(config, engine)
        job.evaluator = Evaluator(
            config=config,
            problems=inputs.held_out,
            runner=runner,
            stop_token_ids=renderer.stop_token_ids,
            journal=journal,
        )
        yield
