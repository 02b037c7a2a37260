"""`tandem sft`, `tandem dpo` and `tandem rm`: jobs that learn from fixed data."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from tandem.choices import Report
from tandem.config.schema import Config
from tandem.config.training import SFT, Preference
from tandem.data.mixture import problems_of_step
from tandem.jobs.engines import make_room
from tandem.jobs.models import build_learner, build_reference
from tandem.jobs.stage import open_stage
from tandem.plugins.offline.inputs import Pairs
from tandem.plugins.offline.supervised import (
    pair_metrics,
    preference_step,
    reward_model_step,
    score_metrics,
    sft_step,
)
from tandem.registry import find
from tandem.rl.losses import Metrics
from tandem.run_folder.folder import RunFolder
from tandem.run_folder.journal import Journal
from tandem.runtime import signals
from tandem.runtime.timer import Timer
from tandem.train_loop import TrainJob
from tandem.trainer.learner import Learner
from tandem.trainer.pack import pack
from tandem.trainer.ranks import Ranks
from tandem.types import Microbatch, Row, StepResult
from tandem.weights.in_process import InlineSync


class OfflineJob(TrainJob):
    """A job for train_loop.py over fixed items, in addressed shuffles. update: makes one optimizer
    step. data, sync and evaluator are rank 0's, the last two of the engine that evaluates, if there
    is one."""

    def __init__(
        self,
        config: Config,
        settings: SFT | Preference,
        learner: Learner,
        items: Sequence[Any],
        update: Callable[[list[Microbatch]], Metrics],
    ):
        self.config, self.settings, self.learner, self.items = config, settings, learner, items
        self.learners, self.data, self.update = {learner.name: learner}, {}, update
        self.steps, self.eval_every = settings.steps, config.eval.every
        self.journal: Journal | None = None
        self.sync: InlineSync | None = None
        self.evaluator: Callable[[int], Row] | None = None
        self.make_room: Callable[[], None] = lambda: None  # on the device, for an update

    def pack(self, items: Sequence[Any], *, keep_groups: bool = False) -> list[Microbatch]:
        """Pack items, here samples, for an update."""
        budget, shares = self.config.train.tokens_per_microbatch, self.learner.ranks.shares
        return pack(items, budget, keep_groups=keep_groups, shares=shares)

    def start(self, done: int) -> None:
        if self.journal is not None:
            self.journal.drop_other_meshes(done, 0)
        self._publish(done)

    def _publish(self, version: int) -> None:
        self.learner.publish()
        if self.sync is not None:
            self.sync.publish(version)

    def step(self, done: int) -> StepResult:
        timer = Timer()
        with timer("learn_s"):
            self.make_room()
            self.learner.ranks.order("learn", done=done)
            metrics = self.learn_step(done)
        self._publish(done + 1)
        return StepResult(metrics=metrics, timings=timer.timings(tokens=0), state={})

    def learn_step(self, done: int) -> Metrics:
        """Make the optimizer step after `done` others, on any rank."""
        config, size = self.config, self.settings.batch_size
        items = problems_of_step(self.items, done, size, config.run.seed, config.data.shuffle)
        return self.update(self.pack(items))

    def orders(self) -> dict[str, Callable[..., object]]:
        """Return what a rank after 0 does on each order."""
        return {"learn": self.learn_step}

    def evaluate(self, done: int) -> Row:
        return {} if self.evaluator is None else self.evaluator(done)


class PairJob(OfflineJob):
    """A job that learns from whole pairs: `tandem dpo` and `tandem rm`.

    measure: returns the metrics of each microbatch, as sums; test: held-out pairs.
    """

    def __init__(
        self, *arguments: Any, measure: Callable[[list[Microbatch]], list[Metrics]], test: Pairs
    ):
        super().__init__(*arguments)
        self.measure, self.test = measure, test

    def pack(self, items: Sequence[Any], *, keep_groups: bool = True) -> list[Microbatch]:
        return super().pack([sample for pair in items for sample in pair], keep_groups=keep_groups)

    def orders(self) -> dict[str, Callable[..., object]]:
        return {**super().orders(), "evaluate": self.pair_means}

    def evaluate(self, done: int) -> Row:
        """Return means over the held-out pairs, under "eval/", and the evaluation on eval.data."""
        ranks = self.learner.ranks
        together = signals.defer_interrupts(signals.EXIT_S) if ranks.size > 1 else nullcontext()
        with together:  # the others could not save an interrupted one
            ranks.order("evaluate")
            means = self.pair_means()
        return {**means, **super().evaluate(done)}

    def pair_means(self) -> Row:
        """Return means over the held-out pairs, on any rank."""
        sums: Row = {}
        for metrics in self.measure(self.pack(self.test)):
            for name, part in metrics.items():
                sums[name] = sums.get(name, 0.0) + part
        return {f"eval/{name}": part / len(self.test) for name, part in sums.items()}


def sft_job(config: Config, inputs: Any, ranks: Ranks) -> OfflineJob:
    policy = build_learner(config, config.model.path, config.sft, config.sft.steps, ranks)
    job = OfflineJob(config, config.sft, policy, inputs.samples, partial(sft_step, policy))
    job.eval_every = 0
    return job


def dpo_job(config: Config, inputs: Any, ranks: Ranks) -> OfflineJob:
    settings = config.preference
    policy = build_learner(config, config.model.path, settings, settings.steps, ranks)
    reference = build_reference(config, policy.model, ranks)
    return PairJob(
        config,
        settings,
        policy,
        inputs.train,
        lambda batches: preference_step(policy, reference, batches, settings),
        measure=lambda batches: pair_metrics(policy, reference, batches, settings),
        test=inputs.test,
    )


def rm_job(config: Config, inputs: Any, ranks: Ranks) -> OfflineJob:
    """Make the job of a sequence classifier with one label, its score read at the last token."""
    path, settings = config.model.path, config.preference
    scorer = build_learner(
        config, path, settings, settings.steps, ranks, name="scorer", head="value"
    )
    # stock transformers finds the last token by it
    scorer.whole.config.pad_token_id = inputs.renderer.tokenizer.pad_token_id
    return PairJob(
        config,
        settings,
        scorer,
        inputs.train,
        partial(reward_model_step, scorer),
        measure=partial(score_metrics, scorer),
        test=inputs.test,
    )


@contextmanager
def open_offline_job(config: Config, run: RunFolder, report: Report) -> Iterator[OfflineJob]:
    """Open the job of `tandem sft`, `dpo` or `rm`; with eval.data an engine over its model
    evaluates."""
    with open_stage(config, run, report) as stage:
        make_job = find("fixed_data", run.command, key="command")
        job: OfflineJob = make_job(config, stage.inputs, stage.ranks)
        job.data = stage.data
        stage.probe(job.learner.whole)
        if stage.workers is not None:
            engine, runner = stage.open_engine(job.learner.whole)
            job.journal = stage.journal(stage.inputs.held_out)
            job.journal.clean()
            job.sync, job.make_room = InlineSync(engine), make_room(config, engine)
            job.evaluator = stage.evaluation(runner)
        yield job
