"""The way of a step's groups from the rollouts to the processes that train, and the one within a
process.

    rollouts (rank 0)                            each rank
    -----------------                            ---------
    put(step, groups)    a step's groups  ---->  take(step, kept, plan)     as the batch is learned
    put, when it is full     <-- room ---------  clear(step)                rank 0, after the update
"""

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from tandem.types import Group

Place = tuple[int, int]  # (group of the step, episode of the group)
# Returns of which episodes a process needs the arrays, by the groups' metadata: lengths, loss
# counts, rewards and outcomes are real, the arrays are not.
Plan = Callable[[Sequence[Group]], Collection[Place]]


class StreamReader(Protocol):
    """The data plane of a run, as a rank after 0 sees it."""

    def take(self, step: int, kept: list[Group], plan: Plan) -> list[Group]:
        """Return all groups of a step, in order, with at least the arrays that the plan asks for.
        kept: what `put` returned on rank 0, [] on the others."""


class Stream(StreamReader, Protocol):
    """The data plane of a run. A step's groups are put once and taken once by every rank."""

    def put(self, step: int, groups: list[Group]) -> list[Group]:
        """Hand over the groups of a step; return what of them this process keeps for `take`. Waits
        while the stream is full; nothing is ever dropped."""

    def clear(self, step: int) -> None:
        """Forget a step that every rank has taken."""


class MemoryStream:
    """The stream within one process: the groups themselves."""

    def put(self, step: int, groups: list[Group]) -> list[Group]:
        return groups

    def take(self, step: int, kept: list[Group], plan: Plan) -> list[Group]:
        return kept

    def clear(self, step: int) -> None:
        """Do nothing: the caller held the groups."""
