"""Wall-clock times of the parts of a step, and what else is never compared: bytes that moved, and
how far engines are off."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from tandem.types import Row


class Timer:
    """A sum of wall seconds by part, for timings.jsonl and never for a decision."""

    def __init__(self) -> None:
        self.parts: Row = {}
        self.others: Row = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the seconds inside the `with` to the part `name`."""
        start = time.perf_counter()
        yield
        self.parts[name] = self.parts.get(name, 0.0) + time.perf_counter() - start

    def timings(self, *, tokens: int) -> Row:
        """Return the parts, the others, the sum `step_s` of the parts, and the speed of the
        rollouts; tokens: sampled."""
        rollout_s = self.parts.get("rollout_s", 0.0)
        speed = tokens / rollout_s if rollout_s else 0.0
        return {
            **self.parts,
            **self.others,
            "step_s": sum(self.parts.values()),
            "generated_tokens_per_s": speed,
        }
