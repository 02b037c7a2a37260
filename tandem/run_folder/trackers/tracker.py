"""A tracker: a service or a database that shows metrics of many runs, such as Weights & Biases.

Each runs in a thread of its own (links.py). Those of tandem/registry.py are in plugins/trackers.
"""

from dataclasses import dataclass
from typing import Any, Protocol

COLUMNS = ("step", "sample", "prompt", "completion", "reward")  # of a table of samples

SampleRow = dict[str, Any]  # by COLUMNS


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """A run as a tracker has it. Example: TrackedRun(id="5f0c...", name="demo-train", config={})"""

    id: str  # the same after a resume
    name: str
    config: dict[str, Any]  # by section


class Tracker(Protocol):
    """An open run of a tracker. May raise anything, and may hang: the training goes on."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Add the metrics of a step; a resumed run adds some again, with the same values."""

    def log_samples(self, step: int, rows: list[SampleRow]) -> None: ...

    def close(self) -> None: ...
