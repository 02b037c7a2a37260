"""Run a job's steps in a run folder: resume, metrics, evaluation, checkpoints. The same for every command that trains.

Order at a step: train, evaluate if due, write the metrics row, save if due. A kill anywhere loses at most the steps
since the last checkpoint, and the same command makes them again with the same bits.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tandem.checkpoint import checkpoint_step, latest_checkpoint, load_checkpoint, save_checkpoint
from tandem.errors import UserError
from tandem.metrics import MetricsWriter, peak_rss_mb
from tandem.model.hashing import weight_hash
from tandem.model.load import ExactModel
from tandem.run import RunFolder
from tandem.stream.journal import cut_episodes
from tandem.train.learner import Learner
from tandem.types import Row


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is repeated. Every function takes the number of steps already done."""

    learners: dict[str, Learner]  # by their name in checkpoints; the first is what the run is for
    steps: int
    eval_every: int  # 0: only before the first step and after the last
    step: Callable[[int], tuple[Row, Row]]  # metrics, timings
    evaluate: Callable[[int], Row]
    publish: Callable[[int], None]
    data: dict[str, str]  # SHA-256 of data files and starting weights by key: the run is a function of them too
    state: Callable[[], dict[str, Any]] = dict  # what else a step leaves to the next, as JSON
    restore: Callable[[int, dict[str, Any]], None] = lambda done, state: None

    @property
    def model(self) -> ExactModel:
        return next(iter(self.learners.values())).model


def drive(run: RunFolder, job: Job, show: Callable[[int, Row, Row], None]) -> str:
    """Take the job from its last checkpoint to its last step; returns the hash of the final weights."""
    done, bad_steps = resume(run, job)
    cut_episodes(run.episodes, max(done, 0))
    with MetricsWriter(run.path, done) as writer:
        if done < 0:
            done = 0
            start = time.perf_counter()
            metrics = job.evaluate(0)
            timings = {"eval_s": time.perf_counter() - start, "rss_mb": peak_rss_mb()}
            writer.write(0, metrics, timings)
            show(0, metrics, timings)
        job.publish(done)
        while done < job.steps:
            metrics, timings = job.step(done)
            done += 1
            bad_steps = bad_steps + 1 if _what_is_bad(metrics) else 0
            last = done == job.steps
            if last or (job.eval_every and done % job.eval_every == 0):
                start = time.perf_counter()
                metrics |= job.evaluate(done)
                timings["eval_s"] = time.perf_counter() - start
            timings["rss_mb"] = peak_rss_mb()
            writer.write(done, metrics, timings)
            if bad_steps > run.config.train.max_bad_steps:
                raise _too_many(run, bad_steps, done, metrics)
            if last or done % run.config.run.save_every == 0:
                save(run, job, done, bad_steps)
            show(done, metrics, timings)
    return weight_hash(job.model.merged_weights())


def save(run: RunFolder, job: Job, done: int, bad_steps: int) -> None:
    tensors = {}
    for name, learner in job.learners.items():
        tensors[name] = {key: p.detach() for key, p in learner.model.trainable().items()}
        tensors[f"{name}_optimizer"] = learner.optimizer.state()
    steps = {name: learner.optimizer.step for name, learner in job.learners.items()}
    state = {"step": done, "optimizer_steps": steps, "bad_steps": bad_steps, "data": job.data, "progress": job.state()}
    save_checkpoint(run.checkpoints, done, tensors, state, run.config.run.keep_checkpoints)


def resume(run: RunFolder, job: Job) -> tuple[int, int]:
    """Load the newest whole checkpoint; returns its step, or -1 where the run has none yet, and the bad steps up to it."""
    path = latest_checkpoint(run.checkpoints, run.log)
    if path is None:
        return -1, 0
    tensors, state = load_checkpoint(path, verify=False)  # latest_checkpoint has just verified it
    _same_data(state["data"], job.data)
    for name, learner in job.learners.items():
        learner.model.load_weights(tensors[name])
        learner.optimizer.load_state(tensors[f"{name}_optimizer"], state["optimizer_steps"][name])
    job.restore(checkpoint_step(path), state["progress"])
    run.log(f"resumed from {path.name}")
    return checkpoint_step(path), state["bad_steps"]


def _what_is_bad(metrics: Row) -> list[str]:
    return sorted(name.removeprefix("bad/") for name in metrics if name.startswith("bad/"))


def _too_many(run: RunFolder, bad_steps: int, done: int, metrics: Row) -> UserError:
    """No weight has been touched by what was not finite, so every checkpoint is good."""
    saved = sorted(path.name for path in run.checkpoints.glob("step_*"))
    return UserError(
        "training stops: NaN or infinity, step after step", where=f"step {done} and the {bad_steps - 1} before it",
        found=f"not finite: {', '.join(_what_is_bad(metrics))}",
        expected=f"at most {run.config.train.max_bad_steps} such steps in a row (train.max_bad_steps)",
        next=f"the weights are as before them; last checkpoint: {saved[-1] if saved else 'none yet'}. "
        "Look at metrics.jsonl; go on with a larger train.max_bad_steps, or in a new run.folder with other settings",
    )  # fmt: skip


def _same_data(saved: dict[str, str], now: dict[str, str]) -> None:
    changed = [key for key in {**saved, **now} if saved.get(key) != now.get(key)]
    if changed:
        raise UserError(
            "a data file, the reward function or the starting model has changed since the run began",
            where=", ".join(changed),
            expected="the same bytes: the rest of the run would not be the same run",
            next="restore it, take another run.folder=PATH, or start over with --fresh (the old run is kept beside it)",
        )
