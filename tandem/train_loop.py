"""Run a job's steps in a run folder: resume, metrics, evaluation, checkpoints. The same for every
command that trains.

Order at a step: train, evaluate if due, write the metrics row, save if due. A kill anywhere loses
at most the updates since the last checkpoint, and the same command makes them again with the same
bits. Ctrl-C and SIGTERM save first.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from tandem.config.checks import GROUP_RELATIVE
from tandem.config.recipe import to_toml
from tandem.config.schema import Config
from tandem.model.load import ExactModel
from tandem.run_folder.async_save import Saver
from tandem.run_folder.checkpoint import (
    Tensors,
    checkpoint_step,
    latest_checkpoint,
    load_checkpoint,
)
from tandem.run_folder.episode_files import episode_file
from tandem.run_folder.folder import RunFolder
from tandem.run_folder.metrics import MetricsWriter, peak_rss_mb, read_metrics
from tandem.run_folder.past_run import altered
from tandem.run_folder.samples import as_markdown, brief, page, read_samples, sample_file
from tandem.runtime import signals, watchdog
from tandem.runtime.disk import file_hash
from tandem.runtime.errors import InvariantError, UserError
from tandem.train.learner import Learner
from tandem.types import Row
from tandem.weights.hashing import weight_hash

SHOWN = 10  # times in a run that samples are shown where nothing is evaluated

# metrics, timings, what else a step leaves to the next, as JSON
StepResult = tuple[Row, Row, dict[str, Any]]


def _nothing(done: int) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """What is repeated. Every function takes the number of steps already done."""

    learners: dict[str, Learner]  # by their name in checkpoints; the first is what the run is for
    steps: int
    eval_every: int  # 0: only before the first step and after the last
    step: Callable[[int], StepResult]
    evaluate: Callable[[int], Row]
    publish: Callable[[int], None]
    # SHA-256 of data files and starting weights by key: the run is a function of them too
    data: dict[str, str]
    restore: Callable[[int, dict[str, Any]], None] = lambda done, state: None
    begin: Callable[[int], None] = _nothing  # its weights are published
    # waits until a checkpoint of that step needs nothing that could be lost
    wait_until_durable: Callable[[int], None] = _nothing
    # the run is left: `settled` gives up soon, with a UserError
    stop_soon: Callable[[], None] = lambda: None

    @property
    def model(self) -> ExactModel:
        return next(iter(self.learners.values())).model


def run_training(
    run: RunFolder,
    job: TrainJob,
    show: Callable[[int, Row, Row], None],
    report: Callable[[str], None] | None = None,
) -> str:
    """Take the job from its last checkpoint to its last step; returns the hash of the final
    weights. report is told what a user should know; without it only log.txt is."""
    with watchdog.watching(run.config.run.stall_s, log=run.path / "log.txt"), signals.on_signals():
        return _Drive(run, job, show, report or run.log).to_the_end()


class _Drive:
    """One call of drive. counts: steps in a row of which something is wrong; saved: the step of the
    newest checkpoint; untold: metrics of step `done` where it has no row yet, as its evaluation is
    still to come or was interrupted."""

    def __init__(
        self,
        run: RunFolder,
        job: TrainJob,
        show: Callable[[int, Row, Row], None],
        report: Callable[[str], None],
    ):
        self.run, self.job, self.show, self.report = run, job, show, report
        self.done, self.state, self.counts, self.untold = resume(run, job, report)
        self.saved, self.stamp = self.done, self._stamp()

    def to_the_end(self) -> str:
        run, job = self.run, self.job
        told = self.done if self.untold is None else self.done - 1
        with MetricsWriter(run.path, told) as writer, Saver() as saver, self._leaving(saver):
            job.publish(self.done)
            job.begin(self.done)
            if self.untold is not None:
                with signals.held():
                    self._finish(writer, saver, self.untold, {})
            while self.done < job.steps:
                with signals.held():
                    self._step(writer, saver)
        return weight_hash(job.model.merged_weights())

    def _step(self, writer: MetricsWriter, saver: Saver) -> None:
        metrics, timings, self.state = self.job.step(self.done)
        self.done, self.stamp, self.untold = self.done + 1, self._stamp(), metrics
        self._count(metrics)
        self._finish(writer, saver, metrics, timings)

    def _finish(self, writer: MetricsWriter, saver: Saver, metrics: Row, timings: Row) -> None:
        """What follows the updates of a step, and precedes those of the first one."""
        end = self.done in (0, self.job.steps)
        evaluates = end or bool(self.job.eval_every and self.done % self.job.eval_every == 0)
        if evaluates:
            metrics, timings = self._evaluated(metrics, timings)
        self._tell(writer, metrics, timings)
        unevaluated = not (self.run.config.eval.data or self.job.eval_every)
        if evaluates or (unevaluated and self.done % max(1, self.job.steps // SHOWN) == 0):
            self._show_samples(writer)
        stop_if_hopeless(self.run, self.done, metrics, self.counts, saver)
        if self.done and (end or self.done % self.run.config.run.save_every == 0):
            self._save(saver)

    def _evaluated(self, metrics: Row, timings: Row) -> tuple[Row, Row]:
        start = time.perf_counter()
        with signals.interruptible():
            metrics = metrics | self.job.evaluate(self.done)
        return metrics, timings | {"eval_s": time.perf_counter() - start}

    def _tell(self, writer: MetricsWriter, metrics: Row, timings: Row) -> None:
        start = time.perf_counter()
        ledger = {"weights": weight_hash(self.job.model.merged_weights()), "episodes": ""}
        for name, kind in (
            ("episodes", "train"),
            ("eval_sampled", "eval_sampled"),
            ("eval_greedy", "eval_greedy"),
        ):
            if (path := episode_file(self.run.episodes, self.done, kind)).exists():
                ledger[name] = file_hash(path)
        timings |= {"ledger_s": time.perf_counter() - start, "rss_mb": peak_rss_mb()}
        writer.write(self.done, metrics, timings, ledger)
        self.untold = None
        self.show(self.done, metrics, timings)

    def _show_samples(self, writer: MetricsWriter) -> None:
        """Held-out episodes of the step, else its training episodes, the same problems each time;
        nothing without any."""
        count, path = (
            self.run.config.run.show_samples,
            sample_file(self.run.episodes, self.done, held_out=True),
        )
        if count and path is not None:
            samples = read_samples(path)[:count]
            for sample in samples:
                self.report(brief(sample))
            writer.write_text(
                self.done, "samples", as_markdown([page(sample) for sample in samples])
            )

    def _count(self, metrics: Row) -> None:
        compares = self.run.command == "train" and self.run.config.rl.advantage in GROUP_RELATIVE
        flat = (
            compares and metrics.get("groups_without_signal") == 1.0
        )  # elsewhere equal rewards are an advantage, or nothing
        seen = {"bad_steps": bool(_what_is_bad(metrics)), "flat_steps": flat}
        self.counts = {name: self.counts[name] + 1 if now else 0 for name, now in seen.items()}

    def _save(self, saver: Saver) -> None:
        job, done, tensors = self.job, self.done, {}
        for name, learner in job.learners.items():
            tensors[name] = {key: p.detach() for key, p in learner.model.trainable().items()}
            tensors[f"{name}_optimizer"] = learner.optimizer.state()
        steps = {name: learner.optimizer.step for name, learner in job.learners.items()}
        state = {
            "step": done,
            "optimizer_steps": steps,
            **self.counts,
            "data": job.data,
            "progress": self.state,
        }
        # as text: the order is the row's, and NaN may be in it
        state["untold"] = json.dumps(self.untold)
        saver.save(
            self.run.checkpoints,
            done,
            tensors,
            state,
            self.run.config.run.keep_checkpoints,
            config=to_toml(self.run.config),
            before_write=lambda: job.wait_until_durable(done),
        )
        self.saved = done

    def _stamp(self) -> list[int]:
        """Another one after any change of a weight or an optimizer."""
        return [
            n
            for learner in self.job.learners.values()
            for n in (learner.model.changes(), learner.optimizer.step)
        ]

    @contextmanager
    def _leaving(self, saver: Saver) -> Iterator[None]:
        """On Ctrl-C and SIGTERM the last step that is done is saved, unless an update of the next
        one has begun."""
        try:
            yield
        except KeyboardInterrupt:
            self.job.stop_soon()
            if self.done > self.saved and self._stamp() == self.stamp:
                ahead = (
                    " once the rollouts that it owes are there"
                    if self.run.config.rollout.staleness
                    else ""
                )
                self.report(f"interrupted; step {self.done} is being saved{ahead}")
                self._save(saver)
            raise
        except Exception:
            self.job.stop_soon()
            raise


def resume(
    run: RunFolder, job: TrainJob, report: Callable[[str], None]
) -> tuple[int, dict[str, Any], dict[str, int], Row | None]:
    """Load the newest whole checkpoint; returns its step (0 where the run has none yet), what it
    leaves to the next one, the counts of what was wrong up to it, and its metrics where they are
    not told yet."""
    found = resumable(run.path, run.config, job.data, report)
    if found is None:
        return 0, {}, {"bad_steps": 0, "flat_steps": 0}, {}
    path, tensors, state = found
    for name, learner in job.learners.items():
        learner.model.load_weights(tensors[name])
        learner.optimizer.load_state(tensors[f"{name}_optimizer"], state["optimizer_steps"][name])
        _same_learner(name, learner, tensors, state)
    job.restore(checkpoint_step(path), state["progress"])
    report(f"resumed from {path.name}")
    counts = {name: state[name] for name in ("bad_steps", "flat_steps")}
    return checkpoint_step(path), state["progress"], counts, json.loads(state["untold"])


def resumable(
    folder: Path, config: Config, data: dict[str, str], report: Callable[[str], None]
) -> tuple[Path, Tensors, dict[str, Any]] | None:
    """Find the checkpoint to go on from, None where the run has none yet, and hold the run against
    it: data, ledger, files. Raises UserError."""
    path = latest_checkpoint(folder / "checkpoints", report)
    if path is None:
        _refuse_to_lose(folder, config)
        return None
    tensors, state = load_checkpoint(path, verify=False)  # latest_checkpoint has just verified it
    _same_data(state["data"], data)
    _same_past(folder, checkpoint_step(path) - (json.loads(state["untold"]) is not None), report)
    return path, tensors, state


def _refuse_to_lose(folder: Path, config: Config) -> None:
    """A save waits for the one before, so a run that has gone on from its second one has had a
    checkpoint."""
    rows, every = read_metrics(folder), config.run.save_every
    if rows and rows[-1]["step"] > 2 * every:
        raise UserError(
            "the checkpoints of the run are gone",
            where=str(folder / "checkpoints"),
            found="none",
            expected=f"some: metrics.jsonl ends at step {rows[-1]['step']}, with run.save_every = {every}",
            next="restore them, or set back a run.save_every that was lowered before the first save, or start over "
            "with --fresh (the old run is kept beside it)",
        )


def _same_past(folder: Path, done: int, report: Callable[[str], None]) -> None:
    """Hold what is kept of the steps up to `done` against the ledger. Raises UserError for what has
    changed; episodes that are gone are told only, as all but the last step's are not needed any
    more."""
    changed = altered(folder, done)
    gone = [one.what for one in changed if not one.found and one.what.startswith("episodes/")]
    if gone:
        report(
            f"no longer there, of steps before the checkpoint: {', '.join(gone[:3])}{' ...' * (len(gone) > 3)}"
        )
    if wrong := [one for one in changed if one.what not in gone]:
        raise UserError(
            "what the run has kept of its steps is not as it was written",
            where=str(folder),
            found="; ".join(map(str, wrong[:3])),
            expected="the bytes that ledger.jsonl has the hashes of",
            next="restore it from a copy, or start over with --fresh (the old run is kept beside it)",
        )


def _same_learner(
    name: str, learner: Learner, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any]
) -> None:
    """What was loaded is where it belongs: weights, moments of the optimizer, and its place in the
    schedule."""
    loaded = {
        "weights": weight_hash({key: p.detach() for key, p in learner.model.trainable().items()})
        == weight_hash(tensors[name]),
        "moments of AdamW": weight_hash(learner.optimizer.state())
        == weight_hash(tensors[f"{name}_optimizer"]),
        "steps of the schedule": learner.optimizer.step == state["optimizer_steps"][name],
    }
    if lost := [what for what, same in loaded.items() if not same]:
        raise InvariantError(
            "a resumed run would not be the run that was saved",
            where=name,
            found=f"other {', '.join(lost)} than the checkpoint's",
            expected="the same bits",
            next="report this",
        )


def _what_is_bad(metrics: Row) -> list[str]:
    return sorted(name.removeprefix("bad/") for name in metrics if name.startswith("bad/"))


def stop_if_hopeless(
    run: RunFolder, done: int, metrics: Row, counts: dict[str, int], saver: Saver
) -> None:
    """Raises UserError. No weight has been touched by what was not finite or had no advantage:
    every checkpoint is good."""
    config, bad, flat = run.config, counts["bad_steps"], counts["flat_steps"]
    if bad <= config.train.max_bad_steps and not (flat and flat == config.rl.max_flat_steps):
        return
    saver.wait()  # the error names the last checkpoint
    saved = sorted(path.name for path in run.checkpoints.glob("step_*"))
    last = f"last checkpoint: {saved[-1] if saved else 'none yet'}"
    if bad > config.train.max_bad_steps:
        raise UserError(
            "training stops: NaN or infinity, step after step",
            where=f"step {done} and the {bad - 1} before it",
            found=f"not finite: {', '.join(_what_is_bad(metrics))}",
            expected=f"at most {config.train.max_bad_steps} such steps in a row (train.max_bad_steps)",
            next=f"the weights are as before them; {last}. "
            "Look at metrics.jsonl; go on with a larger train.max_bad_steps, or in a new run.folder with other settings",
        )
    if flat and flat == config.rl.max_flat_steps:
        raise UserError(
            "training stops: no episode has had an advantage",
            where=f"step {done} and the {flat - 1} before it",
            found=f"equal rewards in every group, mean {metrics['reward']:.3g}",
            expected="some groups whose rewards differ (rl.max_flat_steps)",
            next=f"{last}. Look at episodes/ and at the reward (`tandem try`), take problems that are sometimes solved, or go "
            "on with a larger rl.max_flat_steps",
        )


def _same_data(saved: dict[str, str], now: dict[str, str]) -> None:
    changed = [key for key in {**saved, **now} if saved.get(key) != now.get(key)]
    if changed:
        raise UserError(
            "a data file, the reward function or the starting model has changed since the run began",
            where=", ".join(changed),
            expected="the same bytes: the rest of the run would not be the same run",
            next="restore it, take another run.folder=PATH, or start over with --fresh (the old run is kept beside it)",
        )
