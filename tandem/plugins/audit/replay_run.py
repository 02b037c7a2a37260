"""The steps of a past run, learned again from its folder.

    journal (train, distill)      groups of episodes/train_step_N.parquet -> update
    data (sft, dpo, rm)           the command's own job, in a folder that is thrown away

Nothing is generated and nothing written in the run's folder. It does not know the run's record of
a step: that is replay.py.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tandem.choices import Report
from tandem.config.parallel import Parallel
from tandem.data.renderer import load_renderer
from tandem.jobs.engines import prepare_process, probe_exactness
from tandem.jobs.exactness import require_parity
from tandem.jobs.input_hashes import IMAGES, input_hashes
from tandem.jobs.models import check_models
from tandem.registry import find
from tandem.rollout.collect import Progress, make_rollout_batch, step_metrics
from tandem.rollout.score import sampling_params
from tandem.run_folder.episode_files import read_groups
from tandem.run_folder.folder import MACHINE, RunFolder
from tandem.run_folder.read import PastRun
from tandem.runtime.errors import UserError
from tandem.step import learn_step
from tandem.train_loop import TrainJob
from tandem.trainer.learn import LearnStage, Observe
from tandem.trainer.ranks import ALONE
from tandem.types import Row
from tandem.weights.hashing import weight_hash

# inputs that a replay does not need: their results are in the journal
_MAY_DIFFER = ("reward.function/", "env/", "rl.filter/", "eval.metric/")


class ReplayRun:
    """A run of sft, dpo or rm, whose steps are functions of the data. `done` is the number of steps
    already done; notes: the inputs that are no longer the run's."""

    learning: LearnStage | None = None  # None without episodes

    def __init__(self, past: PastRun, job: TrainJob):
        self._job, self.learners = job, job.learners
        self.notes = changed_inputs(past, job.data)

    def step(self, done: int, observe: Observe | None) -> Row:
        return self._job.step(done).metrics

    def restore(self, done: int, state: dict[str, Any]) -> None:
        self._job.restore(done, state)

    def rollout_state(self) -> dict[str, Any]:
        """Return the state that the rollouts of the last step leave to the next."""
        return {}

    def weight_hash(self) -> str:
        return weight_hash(next(iter(self.learners.values())).model.merged())


class JournalReplayRun(ReplayRun):
    """A run of train or distill, whose steps are functions of the episodes in its journal."""

    learning: LearnStage

    def __init__(self, past: PastRun, report: Report):
        self._past, self._progress = past, Progress()
        config, distills = past.config, past.command == "distill"
        prepare_process(config)
        # before a model is loaded
        self.notes = changed_inputs(past, input_hashes(config, "data.train", "eval.data"))
        check_models(
            config,
            "distill.teacher" if distills else "model.reference",
            *["critic.path"] * bool(config.critic.path),
        )
        models = find("models", past.command, key="command")(config, ALONE)
        self.learning = LearnStage(
            config=config,
            models=models,
            sampling=sampling_params(
                config.rollout, load_renderer(config.model.path, config.data.chat_template)
            ),
            parity=require_parity(
                config, probe_exactness(config, models.policy.model, report, folder=past.folder)
            ),
        )
        self.learners = models.learners

    def step(self, done: int, observe: Observe | None) -> Row:
        progress, config = self._progress, self._past.config
        groups = read_groups(self._past.journal(done + 1))
        carried, baseline = len(progress.carried), progress.baseline
        new = len(groups) - carried - len(progress.unfinished)
        progress.batches += new // config.rl.prompts_per_step
        progress.advance(groups, carried, config)
        batch = make_rollout_batch(done, groups, carried, baseline, progress)
        return step_metrics(batch, learn_step(self.learning, batch, observe), config)

    def restore(self, done: int, state: dict[str, Any]) -> None:
        config = self._past.config
        # groups that the step left to the next one
        leaves = config.rl.max_gen_batches or config.rollout.token_budget
        self._progress.restore(state, read_groups(self._past.journal(done)) if leaves else [])

    def rollout_state(self) -> dict[str, Any]:
        return self._progress.state()


@contextmanager
def open_replay_run(past: PastRun, report: Report) -> Iterator[ReplayRun]:
    """Load the models of a run at its starting weights. Raises UserError if an input is not the
    run's."""
    match past.command:
        case "train" | "distill":
            yield JournalReplayRun(past, report)
        case "sft" | "dpo" | "rm":
            config = past.config.model_copy(update={"parallel": Parallel()})
            with TemporaryDirectory() as place:
                if (machine := past.folder / MACHINE).exists():  # the matmul kernel of its steps
                    shutil.copy(machine, place)
                folder = RunFolder(path=Path(place), config=config, command=past.command)
                opens = find("jobs", past.command, key="command")
                with opens(config, folder, report) as job:
                    yield ReplayRun(past, job)
        case other:
            raise UserError(
                "this command has no steps to replay",
                where=str(past.folder),
                found=f"a run of `tandem {other}`",
                expected="train, distill, sft, dpo or rm",
            )


def changed_inputs(past: PastRun, now: dict[str, str]) -> list[str]:
    """Name the reward functions and environments that are no longer the run's. now: SHA-256 of the
    inputs by key.

    Raises UserError if data or a starting model has changed: nothing that follows would be the
    run's step.
    """
    recorded = past.inputs()
    if recorded is None:
        return ["no checkpoint: whether data and starting weights are the run's is not checked"]
    keys = {**recorded, **now}.keys() - {IMAGES}  # those in the run folder are taken
    changed = {key: key in now for key in sorted(keys) if recorded.get(key) != now.get(key)}
    needed = [
        f"{key} ({'changed' if present else 'not there'})"
        for key, present in changed.items()
        if not key.startswith(_MAY_DIFFER)
    ]
    if needed:
        raise UserError(
            "a data file or a starting model is not the one that the run began with",
            where=", ".join(needed),
            expected="the same bytes, under the paths in config.toml, seen from the working "
            "directory of the run",
            next="restore it, or replay where it is",
        )
    return [
        f"{key} is {'not the file' if present else 'not there'} that the run began with"
        for key, present in changed.items()
    ]
