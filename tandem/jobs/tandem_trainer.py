"""Tandem's own trainer: exact layers, which trainer/parallel divides: train.backend = tandem."""

from typing import TYPE_CHECKING

from tandem.choices import Trainer

if TYPE_CHECKING:
    from tandem.trainer.parallel.mesh import Mesh
    from tandem.trainer.parallel.processes import Processes
    from tandem.trainer.ranks import Ranks


class TandemTrainer(Trainer):
    """Every model that Tandem can load; of several processes, what check_shape lets pass."""

    def make_ranks(self, mesh: "Mesh", processes: "Processes") -> "Ranks":
        from tandem.trainer.parallel.ranks import ParallelRanks

        return ParallelRanks(mesh, processes)
