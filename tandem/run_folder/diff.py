"""The first step in which two runs differ, and in it the first episode and token, or the first
number of learning.

    config.toml, inputs     listed, not judged: many settings change no bit
    ledger.jsonl            weights; and whether the files of each run are still those that it wrote
    episodes/, metrics      of the first unequal step: who, where, both values

A comparison is a generator that yields a Divergence for each pair of values that are not equal. Its
reader takes the first one and stops, so nothing behind it is computed. Runs may be in progress, and
of different length. It does not know the cause: `tandem why` and `replay` find it.

    tandem diff runs/a runs/b
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain, zip_longest

import numpy as np

from tandem.config.recipe import to_toml
from tandem.run_folder.config_changes import toml_values
from tandem.run_folder.episode_files import read_groups
from tandem.run_folder.read import Altered, PastRun, altered, without_evaluation
from tandem.runtime.disk import file_hash
from tandem.runtime.errors import UserError
from tandem.types import Array, Episode, Group

ABSENT = "none"


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """A value that is not the same on both sides. A is the run as recorded, B the other run or the
    replay."""

    what: str
    a: str
    b: str
    also: str = ""  # the other differences


def compare(what: str, a: object, b: object) -> Iterator[Divergence]:
    """Yield a Divergence unless the values are equal. A string is shown as it is, another value by
    its repr."""
    if a != b:
        yield Divergence(what=what, a=_text(a), b=_text(b))


def compare_items(
    a: Mapping[str, object], b: Mapping[str, object], what: str = "{}"
) -> Iterator[Divergence]:
    """Compare the values of each key; what: the text of a Divergence, with {} for the key."""
    for key in {**a, **b}:
        yield from compare(what.format(key), a.get(key, ABSENT), b.get(key, ABSENT))


def _text(value: object) -> str:
    return value if isinstance(value, str) else repr(value)


_ARRAYS = {
    "tokens": "token",
    "loss_mask": "sampled or read",
    "weight_versions": "weight version",
    "engine_logprobs": "log-prob",
    "penalties": "penalty",
}
_OTHER_FIELDS = [
    field.name
    for field in fields(Episode)
    if field.name not in (*_ARRAYS, "uid", "sample_index", "key")
]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs compared. `divergence` is None if all their common `steps` are equal."""

    config: list[Divergence]
    inputs: list[Divergence]
    steps: int  # compared, up to the divergence
    last: tuple[int, int]  # step of each run
    step: int  # of the divergence, else the last that both have
    divergence: Divergence | None
    altered: list[tuple[str, Altered]]  # files and rows not as run "A" or "B" wrote them


def compare_runs(a: PastRun, b: PastRun) -> Comparison:
    """Compare the common steps of both runs. Raises UserError if there is none, or if a file is
    damaged."""
    both = sorted(set(a.metrics) & set(b.metrics))
    if not both:
        raise UserError(
            "there is nothing to compare yet",
            where=f"{a.folder}, {b.folder}",
            found="no step that both have ended",
            expected="a row in both of metrics.jsonl",
            next="wait for them",
        )
    divergences = chain(
        ((step, one) for step in both for one in _compare_step(a, b, step)),
        # last, as an evaluation leaves nothing to the steps after it
        ((step, one) for step in both for one in _compare_evaluations(a, b, step)),
    )
    step, divergence = next(divergences, (both[-1], None))
    return Comparison(
        config=list(compare_items(_config_values(a), _config_values(b))),
        inputs=list(compare_items(a.inputs() or b.inputs() or {}, b.inputs() or a.inputs() or {})),
        steps=sum(0 < s <= step for s in both),
        last=(max(a.metrics), max(b.metrics)),
        step=step,
        divergence=divergence,
        altered=[
            (name, one)
            for name, past in (("A", a), ("B", b))
            for one in altered(past.folder, both[-1])
            # the hash is enough if episodes have been removed
            if one.found or not one.what.startswith("episodes/")
        ],
    )


def _config_values(past: PastRun) -> dict[str, str]:
    """Return every key with its value as text, without the folder of the run."""
    values = {"command": past.command, **toml_values(to_toml(past.config))}
    return {key: repr(value) for key, value in values.items() if key != "run.folder"}


def _compare_step(a: PastRun, b: PastRun, step: int) -> Iterator[Divergence]:
    """Compare episodes, metrics and the weights after the step, in this order."""
    files = [  # the hash of its journal file; if that was removed, the ledger's
        file_hash(past.journal(step))
        if past.journal(step).is_file()
        else str(past.ledger.get(step, {"episodes": ""})["episodes"])
        for past in (a, b)
    ]
    if files[0] != files[1]:
        if "" in files:
            yield from compare("episodes", *(file or ABSENT for file in files))
        # the files name the settings of their runs too, so their episodes may be equal
        yield from _compare_groups(*(read_groups(past.journal(step)) for past in (a, b)))
    yield from compare_items(
        without_evaluation(a.metrics[step]), without_evaluation(b.metrics[step])
    )
    if step in a.ledger and step in b.ledger:
        what = "weights after the step" if step else "starting weights"
        yield from compare(what, a.ledger[step]["weights"], b.ledger[step]["weights"])


def _compare_evaluations(a: PastRun, b: PastRun, step: int) -> Iterator[Divergence]:
    """Compare the evaluation figures of the step that both runs have: they need not evaluate at the
    same steps."""
    x, y = a.metrics[step], b.metrics[step]
    names = [name for name in x if name.startswith("eval/") and name in y]
    yield from compare_items({name: x[name] for name in names}, {name: y[name] for name in names})


def _compare_groups(a: Sequence[Group], b: Sequence[Group]) -> Iterator[Divergence]:
    """Compare the groups of a step in their order."""
    for number, (x, y) in enumerate(zip_longest(a, b)):
        uids = [ABSENT if group is None else group.problem.uid for group in (x, y)]
        yield from compare(f"problem of group {number}", *uids)
        for one, other in zip(x.episodes, y.episodes, strict=False):
            yield from compare_episodes(one, other)
        yield from compare(f"episodes of {uids[0]}", len(x.episodes), len(y.episodes))
        yield from compare(f"outcome of the group of {uids[0]}", x.outcome, y.outcome)


def compare_episodes(a: Episode, b: Episode) -> Iterator[Divergence]:
    """Compare two attempts at a problem: the first position at which any array differs, then the
    other fields."""
    name = f"episode {a.uid}:{a.sample_index}"
    yield from compare(f"sample_index of {name}", a.sample_index, b.sample_index)
    places = {
        field: place
        for field in _ARRAYS
        if (place := _first_difference(getattr(a, field), getattr(b, field))) is not None
    }
    if places:
        field = min(places, key=lambda field: places[field])
        place, arrays = places[field], (getattr(episode, field) for episode in (a, b))
        values = [repr(x[place].item()) if place < len(x) else "its end" for x in arrays]
        what = f"{name}, position {place}: {_ARRAYS[field]}"
        yield Divergence(what=what, a=values[0], b=values[1])
    for field in _OTHER_FIELDS:
        yield from compare(f"{name}: {field}", repr(getattr(a, field)), repr(getattr(b, field)))


def _first_difference(a: Array, b: Array) -> int | None:
    """Return the first position where the bits differ or one array ends; None if there is none."""
    shorter = min(len(a), len(b))
    bits = [np.ascontiguousarray(x[:shorter]).view(f"V{x.dtype.itemsize}") for x in (a, b)]
    unequal = np.flatnonzero(bits[0] != bits[1])
    return int(unequal[0]) if len(unequal) else None if len(a) == len(b) else shorter
