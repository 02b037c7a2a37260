"""Weight publication to rollout workers: through shared memory (shared.py), one version after the
other, on demand.

The trainer's thread publishes, the rollouts' thread brings. It does not know how workers load
weights (engine/worker_pool).
"""

from collections.abc import Callable

from torch import Tensor

from tandem.runtime.errors import UserError
from tandem.types import Generate, RolloutEngine
from tandem.weights.shared import SharedWeights


class ProcessSync:
    """workers run the versions that rollouts ask for; `local`, the engine of evaluations, runs the
    trainer's own tensors.

    keep: how many versions before the newest may still be asked for.
    """

    def __init__(
        self,
        workers: RolloutEngine,
        local: Generate,
        shared: SharedWeights,
        weights: Callable[[], dict[str, Tensor]],
        keep: int,
    ):
        self.workers, self.local, self.shared, self.weights, self.keep = (
            workers,
            local,
            shared,
            weights,
            keep,
        )

    def publish(self, version: int) -> None:
        self.shared.publish(version, self.weights())
        self.shared.release(below=version - self.keep)
        self.local.apply(version)

    def sync_to(self, version: int) -> None:
        """Raises UserError where the version is gone, and where a worker runs other weights than
        were published."""
        if self.workers.weight_version == version:
            return
        if version not in self.shared.versions:
            raise UserError(
                "the weights of a rollout are gone",
                where=f"version {version}",
                found=f"versions {self.shared.versions}",
                expected="the journal's file of that rollout, or rollouts by these weights",
                next="restore the files of episodes/, or start over with --fresh",
            )
        self.workers.apply(version)

    def logprob_gap(self) -> float:
        return self.workers.logprob_gap()
