"""Loop over the steps of a run folder: resume, evaluate, step, log, save. All training commands
share it.

A kill anywhere loses at most the updates since the last checkpoint; the same command makes them
again with the same bits. Ctrl-C and SIGTERM save first.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tandem.choices import Report
from tandem.config.recipe import to_toml
from tandem.model.load import ExactModel
from tandem.run_folder.checkpoint import Contents, Saver, checkpoint_step
from tandem.run_folder.episode_files import episode_file
from tandem.run_folder.folder import RunFolder
from tandem.run_folder.metrics import MetricsWriter, metrics_row, peak_rss_mb, read_metrics
from tandem.run_folder.resume import check_weights, resumable
from tandem.run_folder.samples import as_markdown, brief, page, read_samples, sample_file
from tandem.run_folder.shards import Boxes, Entries, SavedTensors, Shard, Tensors, unfinished_name
from tandem.run_folder.status import write_status
from tandem.runtime import signals, watchdog
from tandem.runtime.disk import file_hash
from tandem.runtime.errors import InvariantError, UserError
from tandem.trainer.learner import Learner
from tandem.trainer.ranks import Ranks
from tandem.types import Row, StepResult
from tandem.weights.hashing import weight_hash

if TYPE_CHECKING:
    from tandem.run_folder.best import Best, BestTracker

SHOWN = 10  # times that a run without evaluation shows samples
EPISODE_FILES = {"episodes": "train", "eval_sampled": "eval_sampled", "eval_greedy": "eval_greedy"}

Show = Callable[[int, Row, Row], None]  # (step, metrics, timings)


class TrainJob:
    """A command that trains, repeated step by step. Every method takes the number of steps done;
    here those that a job may do without."""

    learners: dict[str, Learner]  # by their name in checkpoints; the run is for the first
    data: dict[str, str]  # SHA-256 by key of data files and starting weights
    steps: int
    eval_every: int  # 0: only before the first step and after the last
    evaluate: Callable[[int], Row]

    def start(self, done: int) -> None:
        """Publish the weights, and start threads beside the training."""
        raise NotImplementedError

    def step(self, done: int) -> StepResult:
        raise NotImplementedError

    def restore(self, done: int, state: dict[str, Any]) -> None:
        """Take up the state that step `done` has left."""

    def wait_until_durable(self, done: int) -> None:
        """Wait until all that a checkpoint of that step needs is durable."""

    def workers(self) -> list[dict[str, Any]]:
        """Describe who works for the run beside the ranks, for its status."""
        return []

    def stop_soon(self) -> None:
        """Let `wait_until_durable` give up soon, with a UserError: the run is being left."""


def trained_model(job: TrainJob) -> ExactModel:
    """Return the model that the run is for."""
    return next(iter(job.learners.values())).whole


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingEnd:
    """The end of a run."""

    step: int  # below the job's steps if eval.patience has stopped it
    weights: str  # their hash
    best: "Best | None"  # with eval.keep_best or eval.patience


def run_training(
    run: RunFolder, job: TrainJob, show: Show, report: Report | None = None
) -> TrainingEnd:
    """Take a job from its last checkpoint to its last step, or until eval.patience is exhausted.

    show: called with every row of metrics; report: with lines for the user, by default run.log.
    """
    log = run.path / "log.txt"
    # several processes end a step together: the others of an interrupted one could not save
    limit_s = signals.EXIT_S if _ranks(job).size > 1 else signals.DEFER_S
    with watchdog.watching(run.config.run.stall_s, log=log), signals.handle_signals():
        loop = _TrainLoop(run, job, show, report or run.log)
        run.note_start()
        with loop.writing(), loop.saving_on_interrupt():
            # without an evaluation that is due, nothing is rolled out any more
            if loop.out_of_patience and loop.pending_metrics is None:
                next(iter(job.learners.values())).publish()
            else:
                job.start(loop.done)
            check_weights(run.path, loop.done, trained_model(job), loop.report)
            loop.write_status()
            if loop.pending_metrics is not None:
                with signals.defer_interrupts(limit_s):
                    loop.finish_step(loop.pending_metrics, {})
            while not loop.is_over:
                with signals.defer_interrupts(limit_s):
                    result = job.step(loop.done)
                    loop.record_step(result)
                    loop.finish_step(result.metrics, result.timings)
    digest = weight_hash(trained_model(job).merged())
    return TrainingEnd(
        step=loop.done, weights=digest, best=None if loop.best is None else loop.best.best
    )


@dataclass
class _TrainLoop:
    """State of one training run.

    pending_metrics: metrics of step `done` without a row yet, as its evaluation is due or was
    interrupted.
    """

    run: RunFolder
    job: TrainJob
    show: Show
    report: Report
    bad_steps: int = 0  # in a row, with NaN or infinity
    flat_steps: int = 0  # in a row, in which no episode had an advantage
    best: "BestTracker | None" = None  # with eval.keep_best or eval.patience
    done: int = 0
    state: dict[str, Any] = field(default_factory=dict)
    pending_metrics: Row | None = field(default_factory=dict)  # of step 0: its evaluation only

    def __post_init__(self) -> None:
        """Resume from the newest whole checkpoint, if the run has one."""
        run, job = self.run, self.job
        found = resumable(run.path, run.config, job.data, self.report)
        if found is not None:
            path, tensors, state = found
            _ranks(job).order("load", checkpoint=str(path))
            load_learners(job.learners, tensors, state["optimizer_steps"])
            self.done, self.state = checkpoint_step(path), state["progress"]
            self.bad_steps, self.flat_steps = state["bad_steps"], state["flat_steps"]
            self.pending_metrics = json.loads(state["pending_metrics"])
            job.restore(self.done, self.state)
            self.report(f"resumed from {path.name}")
        self.saved_step, self.fingerprint = self.done, self._fingerprint()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Open the writers of metrics and checkpoints."""
        logged = self.done if self.pending_metrics is None else self.done - 1
        trackers: AbstractContextManager[Any] = nullcontext()
        if self.run.config.run.trackers:
            from tandem.run_folder.tracking import Trackers

            trackers = Trackers(self.run.config, self.run.path, self.report)
        with (
            trackers as self.trackers,
            MetricsWriter(self.run.path, logged) as self.writer,
            Saver() as self.saver,
        ):
            keep, patience = self.run.config.eval.keep_best, self.run.config.eval.patience
            if self.job.eval_every and (keep or patience):
                from tandem.run_folder import best

                self.best = best.BestTracker(self.run.path, keep, patience)
                self.best.update(read_metrics(self.run.path))
            yield

    @property
    def is_over(self) -> bool:
        return self.done >= self.job.steps or self.out_of_patience

    @property
    def out_of_patience(self) -> bool:
        return self.best is not None and self.best.out_of_patience

    @contextmanager
    def saving_on_interrupt(self) -> Iterator[None]:
        """On Ctrl-C and SIGTERM save the last step done, unless an update of the next one has
        begun."""
        try:
            yield
        except KeyboardInterrupt:
            self.job.stop_soon()
            if self.done > self.saved_step and self._fingerprint() == self.fingerprint:
                ahead = " once the rollouts that it owes are there"
                wait = ahead * bool(self.run.config.rollout.staleness)
                self.report(f"interrupted; step {self.done} is being saved{wait}")
                self._save()
            raise
        except Exception:
            self.job.stop_soon()
            raise

    def record_step(self, result: StepResult) -> None:
        """Count a step that is done."""
        self.done, self.state, self.pending_metrics = self.done + 1, result.state, result.metrics
        self.fingerprint = self._fingerprint()
        metrics, rl = result.metrics, self.run.config.rl
        bad = any(name.startswith("bad/") for name in metrics)
        # elsewhere equal rewards are an advantage, or nothing
        compares = self.run.command == "train" and rl.estimator.equal_is_zero
        flat = compares and metrics.get("groups_without_signal") == 1.0
        self.bad_steps = self.bad_steps + 1 if bad else 0
        self.flat_steps = self.flat_steps + 1 if flat else 0

    def finish_step(self, metrics: Row, timings: Row) -> None:
        """Evaluate if due, log, show samples, save if due."""
        run, steps, every = self.run.config.run, self.job.steps, self.job.eval_every
        is_end = self.done in (0, steps)
        evaluates = is_end or bool(every and self.done % every == 0)
        if evaluates:
            start = time.perf_counter()
            with signals.allow_interrupts():
                metrics = metrics | self.job.evaluate(self.done)
            timings = timings | {"eval_s": time.perf_counter() - start}
        self._log(metrics, timings)
        best = self.best
        is_best = best is not None and best.update([metrics_row(self.done, metrics)])
        self.write_status()
        never_evaluates = not (self.run.config.eval.data or every)
        if evaluates or (never_evaluates and self.done % max(1, steps // SHOWN) == 0):
            self._show_samples()
        is_kept = bool(self.done and best is not None and is_best and best.keep)
        if is_kept:
            self._save()
        self._stop_if_hopeless(metrics)
        if self.done and not is_kept and (self.is_over or self.done % run.save_every == 0):
            self._save()

    def _log(self, metrics: Row, timings: Row) -> None:
        start = time.perf_counter()
        ledger = {"weights": weight_hash(trained_model(self.job).merged()), "episodes": ""}
        for name, kind in EPISODE_FILES.items():
            if (path := episode_file(self.run.episodes, self.done, kind)).exists():
                ledger[name] = file_hash(path)
        timings |= {"ledger_s": time.perf_counter() - start, "rss_mb": peak_rss_mb()}
        timings["processes"] = float(_ranks(self.job).size)
        self.writer.write(self.done, metrics, timings, ledger)
        self.pending_metrics = None
        if self.trackers is not None:
            self.trackers.log(self.done, metrics, timings)
        self.show(self.done, metrics, timings)

    def write_status(self) -> None:
        """Write who runs where and does what, for `tandem status`."""
        steps = self.done if self.is_over else self.job.steps
        state = "done" if self.is_over else "training"
        ranks = [
            {"role": f"trainer rank {rank}", "node": node, "pid": pid, "state": state}
            for rank, (node, pid) in enumerate(_ranks(self.job).where())
        ]
        write_status(self.run.path, self.done, steps, [*ranks, *self.job.workers()])

    def _show_samples(self) -> None:
        """Show held-out episodes of the step, else of training, each time of the same problems."""
        count = self.run.config.run.show_samples
        path = sample_file(self.run.episodes, self.done, held_out=True)
        if count and path is not None:
            samples = read_samples(path)[:count]
            for sample in samples:
                self.report(brief(sample))
            pages = as_markdown([page(sample) for sample in samples])
            self.writer.events.append_text(self.done, "samples", pages)
            if self.trackers is not None:
                self.trackers.log_samples(self.done, samples)

    def _save(self) -> None:
        job, done, ranks = self.job, self.done, _ranks(self.job)
        tensors, shard = saved_tensors(job.learners), None
        if ranks.size > 1:
            self.saver.wait()  # before others write into the folder that the save before cleans
            name = unfinished_name(done)
            ranks.order("save", step=done, folder=name)
            boxes = saved_boxes(job.learners)
            shard = Shard(rank=ranks.rank, size=ranks.size, folder=name, boxes=boxes)
        state = {
            "step": done,
            "optimizer_steps": {n: learner.optimizer.step for n, learner in job.learners.items()},
            "bad_steps": self.bad_steps,
            "flat_steps": self.flat_steps,
            "data": job.data,
            "progress": self.state,
            # as text: the order is the row's, and NaN may be in it
            "pending_metrics": json.dumps(self.pending_metrics),
        }
        contents = Contents(
            step=done,
            tensors=tensors,
            state=state,
            config=to_toml(self.run.config),
            keep=self.run.config.run.keep_checkpoints,
            best=None if self.best is None else self.best.kept_step,
            shard=shard,
            before_write=lambda: job.wait_until_durable(done),
            wait_for_others=lambda: {} if shard is None else _wait_for_others(ranks, shard.folder),
        )
        self.saver.save(self.run.checkpoints, contents)
        self.saved_step = done

    def _fingerprint(self) -> list[int]:
        """Return numbers that change whenever a weight or an optimizer changes."""
        learners = self.job.learners.values()
        return [n for one in learners for n in (one.model.changes(), one.optimizer.step)]

    def _stop_if_hopeless(self, metrics: Row) -> None:
        """Raise UserError after too many steps without an update. None of them has touched a
        weight, so every checkpoint is good."""
        config, bad, flat = self.run.config, self.bad_steps, self.flat_steps
        too_bad = bad > config.train.max_bad_steps
        too_flat = flat and flat == config.rl.max_flat_steps
        if not (too_bad or too_flat):
            return
        self.saver.wait()  # the error names the last checkpoint
        saved = sorted(path.name for path in self.run.checkpoints.glob("step_*"))
        last = f"last checkpoint: {saved[-1] if saved else 'none yet'}"
        if too_bad:
            names = sorted(n.removeprefix("bad/") for n in metrics if n.startswith("bad/"))
            raise UserError(
                "training stops: NaN or infinity, step after step",
                where=f"step {self.done} and the {bad - 1} before it",
                found=f"not finite: {', '.join(names)}",
                expected=f"at most {config.train.max_bad_steps} such steps in a row "
                "(train.max_bad_steps)",
                next=f"the weights are as before them; {last}. Look at metrics.jsonl; go on with a "
                "larger train.max_bad_steps, or in a new run.folder with other settings",
            )
        raise UserError(
            "training stops: no episode has had an advantage",
            where=f"step {self.done} and the {flat - 1} before it",
            found=f"equal rewards in every group, mean {metrics['reward']:.3g}",
            expected="some groups whose rewards differ (rl.max_flat_steps)",
            next=f"{last}. Look at episodes/ and at the reward (`tandem try`), take problems that "
            "are sometimes solved, or go on with a larger rl.max_flat_steps",
        )


def _ranks(job: TrainJob) -> Ranks:
    return next(iter(job.learners.values())).ranks


def saved_tensors(learners: Mapping[str, Learner]) -> Tensors:
    """Return what this process saves of its learners, by the stems of files."""
    stems = {}
    for name, learner in learners.items():
        stems[name], stems[f"{name}_optimizer"] = learner.saved()
    return stems


def saved_boxes(learners: Mapping[str, Learner]) -> Boxes:
    """Return which parts of them this process holds; empty: all of each."""
    stems = {}
    for name, learner in learners.items():
        if (boxes := learner.boxes()) is not None:
            stems[name], stems[f"{name}_optimizer"] = boxes
    return stems


def load_learners(
    learners: Mapping[str, Learner],
    tensors: Mapping[str, SavedTensors],
    optimizer_steps: Mapping[str, int],
) -> None:
    """Load learners from a checkpoint, of divided models the parts of this process.

    Raises InvariantError unless weights, moments and places in the schedules are then the
    checkpoint's.
    """
    boxes = saved_boxes(learners)
    for name, learner in learners.items():
        optimizer, steps = learner.optimizer, optimizer_steps[name]
        weights, moments = (
            tensors[stem].parts(boxes[stem]) if stem in boxes else tensors[stem]
            for stem in (name, f"{name}_optimizer")
        )
        learner.load(weights, moments, steps)
        same = {
            "weights": weight_hash(optimizer.weights().items()) == weight_hash(weights.items()),
            "moments of the optimizer": weight_hash(optimizer.state().items())
            == weight_hash(moments.items()),
            "steps of the schedule": optimizer.step == steps,
        }
        if lost := [what for what, is_same in same.items() if not is_same]:
            raise InvariantError(
                "a resumed run would not be the run that was saved",
                where=name,
                found=f"other {', '.join(lost)} than the checkpoint's",
                expected="the same bits",
                next="report this",
            )


def _wait_for_others(ranks: Ranks, folder: str) -> Entries:
    """Wait until the other processes' files are durable; return their entries in the manifest."""
    entries: Entries = {}
    for rank in range(1, ranks.size):
        found = ranks.take(f"{folder}/{rank}") or {"what": "no word of it"}
        if (what := found.pop("what", None)) is not None:  # the fields of its UserError
            raise UserError(f"rank {rank} could not write its part: {what}", **found)
        entries |= found
    return entries
