"""`tandem sft`, `tandem dpo` and `tandem rm`: jobs that learn from fixed data.

Data is checked first, then models are loaded, then workers start.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from tandem.choices import Report, machine_of
from tandem.config.schema import SFT, Config, Preference
from tandem.data.mixture import problems_of_step
from tandem.jobs.engines import (
    build_engine,
    build_runner,
    make_room,
    open_envs_and_rewards,
    prepare_process,
    probe_exactness,
)
from tandem.jobs.input_hashes import KEYS, input_hashes
from tandem.jobs.inputs import Inputs
from tandem.jobs.models import build_learner, build_reference
from tandem.jobs.offline_inputs import Pairs
from tandem.jobs.ranks import open_ranks
from tandem.jobs.rl import note_machine
from tandem.registry import find
from tandem.rl.losses import Metrics
from tandem.rollout.evaluate import Evaluator
from tandem.run_folder.folder import RunFolder, identity
from tandem.run_folder.journal import Journal
from tandem.runtime import signals
from tandem.runtime.timer import Timer
from tandem.train.learner import Learner
from tandem.train.pack import pack
from tandem.train.ranks import Ranks
from tandem.train.supervised import (
    pair_metrics,
    preference_step,
    reward_model_step,
    score_metrics,
    sft_step,
)
from tandem.types import Microbatch, Row, Sample, StepResult
from tandem.weights.in_process import InlineSync


class OfflineJob:
    """A job for train_loop.py over fixed items, in addressed shuffles; a subclass learns from them.
    sync and evaluator: of the engine that evaluates, if there is one."""

    def __init__(
        self,
        config: Config,
        settings: SFT | Preference,
        learner: Learner,
        items: Sequence[Any],
        data: dict[str, str],
    ):
        self.config, self.settings, self.learner, self.items = config, settings, learner, items
        self.learners, self.data = {learner.name: learner}, data
        self.steps, self.eval_every = settings.steps, config.eval.every
        self.sync: InlineSync | None = None
        self.evaluator: Evaluator | None = None
        self.make_room: Callable[[], None] = lambda: None  # on the device, for an update

    def learn(self, items: list[Any]) -> Metrics:
        """Make one optimizer step on a batch of items."""
        raise NotImplementedError

    def start(self, done: int) -> None:
        if self.evaluator is not None and self.evaluator.journal is not None:
            self.evaluator.journal.drop_other_meshes(done, 0)
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
        return self.learn(
            problems_of_step(self.items, done, size, config.run.seed, config.data.shuffle)
        )

    def evaluate(self, done: int) -> Row:
        return {} if self.evaluator is None else self.evaluator(done)

    def restore(self, done: int, state: dict[str, Any]) -> None:
        """Do nothing: the only state is the number of the step."""

    def wait_until_durable(self, done: int) -> None:
        """Return at once: a checkpoint needs no other file."""

    def workers(self) -> list[dict[str, Any]]:
        """Return none: the ranks do all of it."""
        return []

    def stop_soon(self) -> None:
        """Do nothing: no thread waits."""


class SFTJob(OfflineJob):
    """`tandem sft`."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.eval_every = 0

    def learn(self, items: list[Sample]) -> Metrics:
        budget, shares = self.config.train.tokens_per_microbatch, self.learner.ranks.shares
        return sft_step(self.learner, pack(items, budget, shares=shares))


class PairJob(OfflineJob):
    """A job that learns from whole pairs: `tandem dpo` and `tandem rm`.

    update: makes one optimizer step; measure: returns the metrics of each microbatch, as sums;
    test: held-out pairs; watch: looks at each step's metrics.
    """

    def __init__(
        self,
        *arguments: Any,
        update: Callable[[list[Microbatch]], Metrics],
        measure: Callable[[list[Microbatch]], list[Metrics]],
        test: Pairs,
        watch: "LossWatch",
    ):
        super().__init__(*arguments)
        self.update, self.measure, self.test, self.watch = update, measure, test, watch

    def learn(self, items: Pairs) -> Metrics:
        return self.watch(self.update(self._pack(items)))

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
        for metrics in self.measure(self._pack(self.test)):
            for name, part in metrics.items():
                sums[name] = sums.get(name, 0.0) + part
        return {f"eval/{name}": part / len(self.test) for name, part in sums.items()}

    def _pack(self, pairs: Pairs) -> list[Microbatch]:
        samples = [sample for pair in pairs for sample in pair]
        budget, shares = self.config.train.tokens_per_microbatch, self.learner.ranks.shares
        return pack(samples, budget, keep_groups=True, shares=shares)


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
                    "model (docs/guide/algorithms.md, learning rates)"
                )
        return metrics


def sft_job(config: Config, inputs: Any, ranks: Ranks, report: Report) -> OfflineJob:
    policy = build_learner(config, config.model.path, config.sft, config.sft.steps, ranks)
    data = input_hashes(config, *KEYS["sft"]) | inputs.images
    return SFTJob(config, config.sft, policy, inputs.samples, data)


def dpo_job(config: Config, inputs: Any, ranks: Ranks, report: Report) -> OfflineJob:
    settings = config.preference
    policy = build_learner(config, config.model.path, settings, settings.steps, ranks)
    reference = build_reference(config, policy.model, ranks)
    return PairJob(
        config,
        settings,
        policy,
        inputs.train,
        input_hashes(config, *KEYS["dpo"]),
        update=lambda batches: preference_step(policy, reference, batches, settings),
        measure=lambda batches: pair_metrics(policy, reference, batches, settings),
        test=inputs.test,
        watch=LossWatch(settings.learning_rate, settings.warmup_steps, report),
    )


def rm_job(config: Config, inputs: Any, ranks: Ranks, report: Report) -> OfflineJob:
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
        input_hashes(config, *KEYS["rm"]),
        update=partial(reward_model_step, scorer),
        measure=partial(score_metrics, scorer),
        test=inputs.test,
        watch=LossWatch(settings.learning_rate, settings.warmup_steps, report),
    )


OFFLINE = {"sft": sft_job, "dpo": dpo_job, "rm": rm_job}  # what loads models on every rank


@contextmanager
def open_offline_job(config: Config, run: RunFolder, report: Report) -> Iterator[OfflineJob]:
    """Open the job of `tandem sft`, `dpo` or `rm`."""
    prepare_process(config)
    inputs = find("inputs", run.command, key="command")(config)
    with (
        machine_of(config).open(config, run.path, only_ranks=True) as machine,
        open_ranks(config, run, report, machine) as ranks,
    ):
        job = OFFLINE[run.command](config, inputs, ranks, report)
        found = probe_exactness(config, job.learner.whole, report, folder=run.path)
        note_machine(run, found, report)
        with nullcontext() if run.command == "rm" else _evaluating(job, inputs, run):
            yield job


@contextmanager
def _evaluating(job: OfflineJob, inputs: Inputs, run: RunFolder) -> Iterator[None]:
    """Give the job an engine over its model that evaluates on eval.data."""
    config, renderer = job.config, inputs.renderer
    engine = build_engine(config, job.learner.whole, renderer)
    with open_envs_and_rewards(config) as (envs, rewards):
        runner = build_runner(config, engine, renderer, envs, rewards)
        run_id, mesh = identity(config, job.data), config.parallel.mesh
        journal = Journal(run.episodes, run_id, inputs.held_out, mesh)
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
