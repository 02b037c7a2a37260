"""Weight publication on one device: the engine runs the trainer's own tensors, so a sync moves zero bytes.

Linear packs follow the weights' version counters, so all that is published is the number of the version. The
seam for other transports is `publish(version)`; an engine is at version v or v + 1, never between.
"""

from tandem.types import Generate


class InlineSync:
    """Publishes to engines that share the trainer's memory."""

    def __init__(self, engine: Generate):
        self.engine = engine

    def publish(self, version: int) -> None:
        self.engine.apply(version)
