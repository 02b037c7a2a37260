"""Tandem's own engine, trainer and stream, as choices.

The engine samples over the trainer's own model code: in the trainer's process on the same tensors,
or in rollout workers (worker_rollouts.py). trainer/parallel divides the trainer's exact layers.
Rank 0 keeps a step's groups in memory, and the other ranks read the journal.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.choices import Report, RolloutBackend, StreamBackend, Trainer
from tandem.config.schema import Config
from tandem.rollout.stream import MemoryStream, Plan, Stream
from tandem.runtime.errors import UserError
from tandem.types import Group, ParityCheck

if TYPE_CHECKING:
    from tandem.jobs.rollouts import Rollouts, RolloutStage
    from tandem.run_folder.journal import Journal
    from tandem.trainer.parallel.mesh import Mesh
    from tandem.trainer.parallel.processes import Processes
    from tandem.trainer.ranks import Ranks


class TandemEngine(RolloutBackend):
    """The exact engine."""

    on_nodes = True

    def rests(self, config: Config) -> bool:
        """Tell so unless rollouts of other steps are under way in an update."""
        from tandem.jobs.models import placement, releases_cache

        return releases_cache(config, placement(config)) and not config.rollout.staleness

    def parity(self, config: Config, exact: bool, inexact: str) -> ParityCheck:
        from tandem.trainer.parity import STEPS_OF_CACHE, ExactCheck, MeasuredGap, NoCheck

        if inexact:
            return MeasuredGap(config, self.where(config), STEPS_OF_CACHE)
        return ExactCheck() if exact else NoCheck()

    @contextmanager
    def open(self, stage: "RolloutStage") -> Iterator["Rollouts"]:
        from tandem.jobs.rollouts import Rollouts
        from tandem.weights.in_process import InlineSync

        if not stage.config.rollout.workers:
            yield Rollouts(lanes=[(stage.local, InlineSync(stage.engine))])
            return
        from tandem.jobs.worker_rollouts import open_workers

        with open_workers(stage, forks=True, checks=stage.exact) as rollouts:
            yield rollouts


class TandemTrainer(Trainer):
    """Every model that Tandem can load; of several processes, what check_shape lets pass."""

    def make_ranks(self, mesh: "Mesh", processes: "Processes") -> "Ranks":
        from tandem.trainer.parallel.ranks import ParallelRanks

        return ParallelRanks(mesh, processes)


class Memory(StreamBackend):
    """The memory of rank 0. No rank joins it."""

    def open(
        self, config: Config, ranks: "Ranks", report: Report
    ) -> AbstractContextManager[Stream]:
        return nullcontext(MemoryStream())


class JournalStream:
    """The stream of a rank after 0 without a data plane: the file that rank 0 has written."""

    def __init__(self, journal: "Journal", folder: Path):
        self.journal, self.folder = journal, folder

    def take(self, step: int, kept: list[Group], plan: Plan) -> list[Group]:
        """Read the groups of a step. Raises UserError if its file is not there."""
        recorded = self.journal.read(step + 1)
        if recorded is None:
            raise UserError(
                "a rank cannot read what rank 0 has written",
                where=str(self.folder / "episodes"),
                found=f"no file of this run for step {step + 1}",
                expected="one run folder for all ranks, on a shared file system",
                next="share it, or stream.kind=transfer_queue",
            )
        return recorded[0]
