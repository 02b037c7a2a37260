"""Tandem's own engine and trainer, as choices.

The engine samples over the trainer's own model code: in the trainer's process on the same tensors,
or in rollout workers (worker_rollouts.py). trainer/parallel divides the trainer's exact layers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tandem.choices import RolloutBackend, Trainer
from tandem.config.schema import Config
from tandem.types import ParityCheck

if TYPE_CHECKING:
    from tandem.jobs.rollouts import Rollouts, RolloutStage
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
