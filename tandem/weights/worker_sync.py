"""Weight publication to rollout workers, by any transport, on demand.

The trainer's thread calls publish, the rollouts' thread sync_to; rollouts of several steps at once
have a ProcessSync each, over one SharedWeights. `keep` versions before the newest are kept, and
that is all that rollouts may still need: with staleness k the version before them is trained on
already. So k + 1 versions take memory, and one more while it is published. Does not know how
workers load weights (rollout_workers).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tandem.types import Generate, Row
from tandem.weights.in_process import weights_gone
from tandem.weights.shared import SharedWeights


@dataclass(eq=False)
class ProcessSync:
    """Publication to rollout workers, and to the engine of evaluations.

    workers: run the versions that rollouts ask for; local: the engine of evaluations, which runs
    the trainer's own tensors; weights: returns those to publish, and what workers compare
    themselves with by them, or None; keep: how many versions before the newest may still be asked
    for.
    """

    workers: Generate
    local: Generate
    shared: SharedWeights
    weights: Callable[[], tuple[dict[str, Tensor], dict[str, Any] | None]]
    keep: int
    version: int = -1  # that rollouts have asked for last

    def publish(self, version: int) -> None:
        self.shared.publish(version, *self.weights())
        self.shared.release(below=version - self.keep)
        self.local.apply(version)

    def sync_to(self, version: int) -> None:
        """Have the workers run a version. Raises UserError if it is gone, or a worker runs other
        weights than the published ones."""
        if self.workers.weight_version != version:
            if version not in self.shared.versions:
                raise weights_gone(version, found=f"versions {self.shared.versions}")
            self.workers.apply(version)
        self.version = version

    def stats(self) -> Row:
        return self.shared.stats(self.version)
