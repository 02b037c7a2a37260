"""Blame for waits of the trainer's processes, by what each of them waits for.

waits: by rank, its innermost wait: in which collective ("what"), with which ranks ("ranks"), and
since how many seconds ("for_s"); {} if it waits for nobody. A rank of which nothing new is known is
left out, and not blamed. Knows neither processes nor clocks.
"""

from collections.abc import Mapping
from typing import Any

Waits = Mapping[int, Mapping[str, Any]]
STALE_S = 2.0  # after which a sign of life does not tell any more what its process waits for


def waits_of(seen: Mapping[int, tuple[Any, float]], now: float) -> Waits:
    """Return what ranks wait for. seen: by rank, its last sign of life and when it came, in
    seconds."""
    return {rank: sign[1]["wait"] for rank, (sign, at) in seen.items() if now - at <= STALE_S}


def find_absent(waits: Waits, stall_s: float) -> tuple[list[int], str]:
    """Return the ranks that are not in the collective in which one has waited longest, and what it
    waits for; none if that is less than `stall_s`. In later ones others may wait for those who wait
    here. An order is no collective: its rank waits for as long as rank 0 has none."""
    collectives = [rank for rank, wait in waits.items() if wait and rank in wait["ranks"]]
    first = max(collectives, key=lambda rank: waits[rank]["for_s"], default=None)
    if first is None or waits[first]["for_s"] < stall_s:
        return [], ""
    own = waits[first]["what"], waits[first]["ranks"]
    known = [rank for rank in own[1] if rank in waits]
    absent = [r for r in known if not waits[r] or (waits[r]["what"], waits[r]["ranks"]) != own]
    return absent, f"`{own[0]}`, where rank {first} waits,"
