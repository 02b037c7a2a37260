"""Blame for waits of the trainer's processes, by what each of them waits for.

waits: by rank, its innermost wait: in which collective ("what"), with which ranks ("ranks"), and
since how many seconds ("for_s"); {} if it waits for nobody. A rank of which nothing new is known is
left out, and not blamed. Knows neither processes nor clocks.
"""

from collections.abc import Iterator, Mapping
from typing import Any

Waits = Mapping[int, Mapping[str, Any]]
STALE_S = 2.0  # after which a sign of life does not tell any more what its process waits for


def waits_of(seen: Mapping[int, tuple[Any, float]], now: float) -> Waits:
    """Return what ranks wait for. seen: by rank, its last sign of life and when it came, in
    seconds."""
    return {rank: sign[1]["wait"] for rank, (sign, at) in seen.items() if now - at <= STALE_S}


def find_circle(waits: Waits) -> str:
    """Return the members of a circle of waits, which are out of step; "" if there is none."""

    def blocking(rank: int) -> Iterator[int]:
        """Yield those that a rank waits for, and that wait in another collective themselves."""
        yield from (other for other in absent_from(waits, waits[rank]) if waits[other])

    without = set[int]()  # those that no circle can be reached from

    def circle(path: tuple[int, ...]) -> tuple[int, ...]:
        for other in blocking(path[-1]):
            if other in path:
                return path[path.index(other) :]
            if other not in without and (found := circle((*path, other))):
                return found
        without.add(path[-1])
        return ()

    for first in filter(waits.get, waits):
        if found := circle((first,)):
            reasons = ", ".join(f"rank {rank} waits for `{waits[rank]['what']}`" for rank in found)
            *most, last = map(str, found)
            return f"ranks {', '.join(most)} and {last} are out of step: {reasons}"
    return ""


def find_absent(waits: Waits, stall_s: float) -> tuple[list[int], str]:
    """Return the ranks that are not in the collective in which one has waited longest, and its
    name; none if that is less than `stall_s`. In later ones others may wait for those who wait
    here. An order is no collective: its rank waits for as long as rank 0 has none."""
    collectives = [rank for rank, wait in waits.items() if wait and rank in wait["ranks"]]
    first = max(collectives, key=lambda rank: waits[rank]["for_s"], default=None)
    if first is None or waits[first]["for_s"] < stall_s:
        return [], ""
    return absent_from(waits, waits[first]), waits[first]["what"]


def absent_from(waits: Waits, wait: Mapping[str, Any]) -> list[int]:
    """Return the ranks of a collective that are not in it."""
    own = wait["what"], wait["ranks"]
    known = [rank for rank in wait["ranks"] if rank in waits]
    return [r for r in known if not waits[r] or (waits[r]["what"], waits[r]["ranks"]) != own]
