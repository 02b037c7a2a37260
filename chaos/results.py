"""The results of the chaos harness: a `Result` is a row of results/chaos.md; `tally` counts
cases into one.

A case is (was the fault seen to fire, what is wrong afterwards or ""); a bar is met when every
fault fired and all survived.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass

Case = tuple[bool, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One row of results/chaos.md.

    injected: faults; witnessed: of these, those seen to have fired; survived: cases with the right
    end, of which expected is the least; note: other findings, and the first wrong cases.

    Example: Result(what="kill -9 in a run", injected=25, witnessed=25, survived=25, expected=25,
    seconds=80.1)
    """

    what: str
    injected: int
    witnessed: int
    survived: int
    expected: int
    seconds: float
    note: str = ""

    @property
    def met(self) -> bool:
        return self.witnessed == self.injected and self.survived >= self.expected


def tally(what: str, cases: Iterable[Case], at_least: int = 1) -> Result:
    """Run the cases and count them; fewer than at_least is a bar missed."""
    start = time.perf_counter()
    ended = list(cases)
    wrong = [problem for _, problem in ended if problem]
    return Result(
        what=what,
        injected=len(ended),
        witnessed=sum(fired for fired, _ in ended),
        survived=len(ended) - len(wrong),
        expected=max(len(ended), at_least),
        seconds=time.perf_counter() - start,
        note="; ".join(wrong[:3]),
    )
