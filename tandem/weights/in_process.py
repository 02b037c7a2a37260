"""Weight publication on one device: the engine runs the trainer's own tensors, so a sync moves zero
bytes.

Linear packs follow the weights' version counters, so only the number of the version is published.
The interface for other transports is `WeightSync` of types.py.
"""

from tandem.runtime.errors import UserError
from tandem.types import Generate, Row


class InlineSync:
    """Publication to an engine that shares the trainer's memory, with the newest version alone."""

    def __init__(self, engine: Generate):
        self.engine = engine

    def publish(self, version: int) -> None:
        self.engine.apply(version)

    def sync_to(self, version: int) -> None:
        """Raise UserError unless the engine runs that version."""
        if version != self.engine.weight_version:
            raise weights_gone(
                version, found=f"version {self.engine.weight_version} in the trainer's memory"
            )

    def stats(self) -> Row:
        return {"sync_bytes": 0}


def weights_gone(version: int, *, found: str) -> UserError:
    return UserError(
        "the weights of a rollout are gone",
        where=f"version {version}",
        found=found,
        expected="the journal's file of that rollout, or rollouts by these weights",
        next="restore the files of episodes/, or start over with --fresh",
    )
