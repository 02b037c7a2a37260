"""Weight publication on one device: the engine runs the trainer's own tensors, so a sync moves zero
bytes.

Linear packs follow the weights' version counters, so all that is published is the number of the
version. The seam for other transports is `Sync` of types.py.
"""

from tandem.runtime.errors import UserError
from tandem.types import RolloutEngine


class InlineSync:
    """Publishes to engines that share the trainer's memory."""

    def __init__(self, engine: RolloutEngine):
        self.engine = engine

    def publish(self, version: int) -> None:
        self.engine.apply(version)

    def sync_to(self, version: int) -> None:
        """There is only the newest one."""
        if version != self.engine.weight_version:
            raise UserError(
                "the weights of a rollout are gone",
                where=f"version {version}",
                found=f"version {self.engine.weight_version} in the trainer's memory",
                expected="the journal's file of that rollout, or rollouts by these weights",
                next="restore the files of episodes/, or start over with --fresh",
            )

    def logprob_gap(self) -> float:
        return self.engine.logprob_gap()
