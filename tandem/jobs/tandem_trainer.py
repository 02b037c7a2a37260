"""Tandem's own trainer: exact layers, which train/parallel divides: train.backend = tandem."""

from typing import TYPE_CHECKING

from tandem.choices import Trainer

if TYPE_CHECKING:
    from tandem.train.parallel.mesh import Mesh
    from tandem.train.parallel.processes import Processes
    from tandem.train.ranks import Ranks


class TandemTrainer(Trainer):
    """Every model that Tandem can load; of several processes, what check_shape lets pass."""

    def make_ranks(self, mesh: "Mesh", processes: "Processes") -> "Ranks":
        from tandem.train.parallel.ranks import ParallelRanks

        return ParallelRanks(mesh, processes)
