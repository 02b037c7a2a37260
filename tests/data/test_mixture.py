"""Choice of the items of a step, from one list and from several."""

from collections import Counter
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

from tandem.data.mixture import Mixture, epoch_order, only, problems_of_step, taken_by
from tandem.runtime.errors import UserError


def some(n, name="p"):
    return [f"{name}{i}" for i in range(n)]


def mixture(*weights, sizes=(7, 3, 4)):
    parts = [some(size, name) for size, name in zip(sizes, "abc", strict=False)][: len(weights)]
    return Mixture(parts, weights, list("abc")[: len(weights)])


# ---- one list


def test_every_epoch_visits_each_problem_once_in_its_own_order():
    orders = [epoch_order(50, 3, epoch, True) for epoch in range(3)]
    assert all(sorted(order.tolist()) == list(range(50)) for order in orders)
    assert len({tuple(order.tolist()) for order in orders}) == 3
    assert not np.array_equal(orders[0], epoch_order(50, 4, 0, True))
    assert epoch_order(50, 3, 0, True) is epoch_order(50, 3, 0, True)  # made once an epoch
    assert np.array_equal(epoch_order(5, 3, 1, False), np.arange(5))


@pytest.mark.parametrize(("n", "per_step"), [(10, 5), (10, 4), (10, 10), (7, 3), (3, 8), (1, 4)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_steps_cut_the_epochs_without_gap_or_repeat(n, per_step, shuffle):
    problems = some(n)
    steps = []
    for step in range(9):
        steps += problems_of_step(problems, step, per_step, 5, shuffle)
    epochs = [problems[i] for epoch in range(80) for i in epoch_order(n, 5, epoch, shuffle)]
    assert steps == epochs[: 9 * per_step]


# ---- several


@pytest.mark.parametrize(
    "weights", [(1, 1), (0.7, 0.3), (0.9, 0.1), (1, 2, 5), (0.333, 0.333, 0.334), (1e-3, 1)]
)
def test_each_part_has_its_share_of_any_number_of_slots(weights):
    shares = [Fraction(str(weight)) for weight in weights]
    counts = [taken_by(slots, shares) for slots in range(700)]
    for slots, taken in enumerate(counts):
        assert sum(taken) == slots
        for count, share in zip(taken, shares, strict=True):
            assert abs(count - slots * share / sum(shares)) < len(shares)
    for before, after in pairwise(counts):
        more = sorted(b - a for a, b in zip(before, after, strict=True))
        assert more == [*[0] * (len(shares) - 1), 1]


@pytest.mark.parametrize("per_step", [1, 3, 8, 10])
@pytest.mark.parametrize("shuffle", [True, False])
def test_each_part_of_a_mixture_has_its_own_epochs(per_step, shuffle):
    mixed = mixture(0.5, 0.2, 0.3)
    slots = []
    for step in range(240 // per_step):
        slots += problems_of_step(mixed, step, per_step, 5, shuffle)
    assert slots == problems_of_step(mixed, 0, len(slots), 5, shuffle)
    for number, part in enumerate(mixed.parts):
        visits = [item for item in slots if item[0] == part[0][0]]
        orders = [epoch_order(len(part), 5, epoch, shuffle, number) for epoch in range(80)]
        epochs = [part[i] for order in orders for i in order]
        assert visits == epochs[: len(visits)]
    assert Counter(item[0] for item in slots) == {"a": 120, "b": 48, "c": 72}


def test_a_mixture_stays_one_when_some_of_it_is_dropped():
    mixed = mixture(1, 3)
    kept = only(mixed, [item for item in mixed if item[1] != "1"])
    assert isinstance(kept, Mixture)
    assert [len(part) for part in kept.parts] == [6, 2]
    drawn = Counter(item[0] for item in problems_of_step(kept, 0, 400, 0, True))
    assert drawn == {"a": 100, "b": 300}
    assert only(some(3), some(2)) == some(2)


def test_a_part_of_which_nothing_is_left_is_refused():
    mixed = mixture(1, 1)
    with pytest.raises(UserError) as caught:
        only(mixed, [item for item in mixed if item[0] == "a"])
    assert "where:    b" in str(caught.value)
