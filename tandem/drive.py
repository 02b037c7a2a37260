"""Run a job's steps in a run folder: resume, metrics, evaluation, checkpoints. The same for `train` and `sft`.

Order at a step: train, evaluate if due, write the metrics row, save if due. A kill anywhere loses at most the steps
since the last checkpoint, and the same command makes them again with the same bits.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from tandem.checkpoint import checkpoint_step, latest_checkpoint, load_checkpoint, save_checkpoint
from tandem.errors import UserError
from tandem.metrics import MetricsWriter, peak_rss_mb
from tandem.model.hashing import weight_hash
from tandem.run import RunFolder
from tandem.stream.journal import cut_episodes
from tandem.train.policy import Policy
from tandem.types import Row


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is repeated. Every function takes the number of steps already done."""

    policy: Policy
    steps: int
    eval_every: int  # 0: only before the first step and after the last
    step: Callable[[int], tuple[Row, Row]]  # metrics, timings
    evaluate: Callable[[int], Row]
    publish: Callable[[int], None]
    data: dict[str, str]  # SHA-256 of data files and starting weights by key: the run is a function of them too


def drive(run: RunFolder, job: Job, show: Callable[[int, Row, Row], None]) -> str:
    """Take the job from its last checkpoint to its last step; returns the hash of the final weights."""
    done = resume(run, job.policy, job.data)
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
            last = done == job.steps
            if last or (job.eval_every and done % job.eval_every == 0):
                start = time.perf_counter()
                metrics |= job.evaluate(done)
                timings["eval_s"] = time.perf_counter() - start
            timings["rss_mb"] = peak_rss_mb()
            writer.write(done, metrics, timings)
            if last or done % run.config.run.save_every == 0:
                save(run, job, done)
            show(done, metrics, timings)
    return weight_hash(job.policy.model.named_weights())


def save(run: RunFolder, job: Job, done: int) -> None:
    policy = job.policy
    tensors = {"policy": policy.model.named_weights(), "optimizer": policy.optimizer.state()}
    state = {"step": done, "optimizer_step": policy.optimizer.step, "data": job.data}
    save_checkpoint(run.checkpoints, done, tensors, state, run.config.run.keep_checkpoints)


def resume(run: RunFolder, policy: Policy, data: dict[str, str]) -> int:
    """Load the newest whole checkpoint; returns its step, or -1 where the run has none yet."""
    path = latest_checkpoint(run.checkpoints, run.log)
    if path is None:
        return -1
    tensors, state = load_checkpoint(path, verify=False)  # latest_checkpoint has just verified it
    _same_data(state["data"], data)
    policy.model.load_weights(tensors["policy"])
    policy.optimizer.load_state(tensors["optimizer"], state["optimizer_step"])
    run.log(f"resumed from {path.name}")
    return checkpoint_step(path)


def _same_data(saved: dict[str, str], now: dict[str, str]) -> None:
    changed = [key for key in {**saved, **now} if saved.get(key) != now.get(key)]
    if changed:
        raise UserError(
            "a data file or the starting model has changed since the run began",
            where=", ".join(changed),
            expected="the same bytes: the rest of the run would not be the same run",
            next="restore it, take another run.folder=PATH, or start over with --fresh (the old run is kept beside it)",
        )
