"""The items that a step takes, from one list or from several in fixed shares.

They depend on (seed, step) alone: the step's number is the whole data cursor, and a resume cannot
skip or repeat data. Does not know what the items are, nor where they come from.
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import TypeVar

import numpy as np

from tandem.runtime import rng
from tandem.runtime.errors import UserError
from tandem.types import Array

T = TypeVar("T")  # a problem, or another item that a step takes


class Mixture(list[T]):
    """Several lists that each have a share in the items of a step. As a list: one after the other.

    Example: Mixture([few, many], weights=[1, 3], names=["few.jsonl", "many.jsonl"]). Of any four
    consecutive items one is from `few`, and each list has its own epochs.
    """

    def __init__(
        self, parts: Sequence[Sequence[T]], weights: Sequence[float], names: Sequence[str]
    ):
        super().__init__(item for part in parts for item in part)
        self.parts, self.names = list(parts), list(names)
        self.weights = [Fraction(str(weight)) for weight in weights]  # of the decimal: 0.7 is 7/10


def only(items: Sequence[T], kept: Sequence[T]) -> Sequence[T]:
    """Return the items that were kept, in their order; a Mixture stays a Mixture. Raises UserError
    if a part of it keeps none."""
    if not isinstance(items, Mixture):
        return kept
    chosen = {id(item) for item in kept}
    parts = [[item for item in part if id(item) in chosen] for part in items.parts]
    for name, part in zip(items.names, parts, strict=True):
        if not part:
            raise UserError(
                "nothing of a source is left to train on",
                where=name,
                found="every row dropped",
                expected="at least one row of each source",
                next="leave the source out, or accept its rows",
            )
    return Mixture(parts, [float(weight) for weight in items.weights], items.names)


def problems_of_step(
    problems: Sequence[T], step: int, per_step: int, seed: int, shuffle: bool
) -> list[T]:
    """Return the problems of a step, counted from 0. Epochs follow each other without a gap, also
    within a step.

    A problem comes twice in one step if per_step exceeds the number of problems, and may come twice
    if the step spans the end of an epoch, because each epoch has its own shuffle. In a mixture this
    holds for each part, and the parts alternate within the step.
    """
    first, end = step * per_step, (step + 1) * per_step
    if not isinstance(problems, Mixture):
        return [problems[i] for i in _visits(len(problems), first, end, seed, shuffle, 0)]
    taken = [taken_by(slots, problems.weights) for slots in range(first, end + 1)]
    ahead = [
        iter(_visits(len(part), taken[0][number], taken[-1][number], seed, shuffle, number))
        for number, part in enumerate(problems.parts)
    ]
    return [problems.parts[owner][next(ahead[owner])] for owner in owners(taken)]


def _visits(size: int, first: int, end: int, seed: int, shuffle: bool, part: int) -> list[int]:
    """Return the indices of visits first to end - 1 in a list's endless epochs."""
    chosen: list[int] = []
    for epoch in range(first // size, -(-end // size)):
        order = epoch_order(size, seed, epoch, shuffle, part)
        chosen += order[max(0, first - epoch * size) : end - epoch * size].tolist()
    return chosen


@lru_cache(maxsize=8)  # each step of an epoch asks for it: 50 ms for a million rows
def epoch_order(size: int, seed: int, epoch: int, shuffle: bool, part: int = 0) -> Array:
    """Return int64 [size], not to be changed: the indices in the order of the epoch. Parts of equal
    size have different orders."""
    if not shuffle:
        return np.arange(size, dtype=np.int64)
    return rng.permutation(size, seed, "epoch order", epoch, *([part] if part else []))


def taken_by(slots: int, weights: Sequence[Fraction]) -> list[int]:
    """Count the items of each part among the first `slots`: its share of what earlier parts leave,
    rounded down.

    Each count grows by 0 or 1 from one slot to the next, so a step can begin anywhere.
    """
    counts, left, rest = [], slots, sum(weights)
    for weight in weights:
        counts.append(int(left * weight // rest))
        left, rest = left - counts[-1], rest - weight
    return counts


def owners(taken: Sequence[Sequence[int]]) -> list[int]:
    """Return the part of each slot: the one whose count grows."""
    return [
        next(part for part, (a, b) in enumerate(zip(before, after, strict=True)) if b > a)
        for before, after in pairwise(taken)
    ]
