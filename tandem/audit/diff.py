"""Where two runs part: the first step, and in it the first episode and token, or the first number
of learning.

    config.toml, inputs     what was asked of them; told, not judged
    ledger.jsonl            weights; and whether the files of each run are still those that it wrote
    episodes/, metrics      of the first step where they are not: who, where, both values

Reads two run folders, also of runs in progress and of different length. It does not know why:
`tandem why` and `replay` do.

    tandem diff runs/a runs/b
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from tandem.config.schema import Config
from tandem.run_folder.past_run import Altered, PastRun, altered, read_step
from tandem.runtime.disk import file_hash
from tandem.runtime.errors import UserError
from tandem.types import Array, Episode, Group

_ARRAYS = {
    "tokens": "token",
    "loss_mask": "sampled or read",
    "weight_versions": "weight version",
    "engine_logprobs": "log-prob",
    "penalties": "penalty",
}
_OTHERS = (
    "num_prompt_tokens",
    "opening",
    "tools",
    "messages",
    "stop_reason",
    "given",
    "env_error",
    "masked",
    "reward",
    "reward_parts",
    "reward_error",
)
_NONE = "none"


@dataclass(frozen=True, kw_only=True)
class Parting:
    """Something with two values. In a step, what learning or an episode has first otherwise."""

    what: str
    a: str
    b: str


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Of two runs; `parted` is None where all `steps` both have are equal."""

    config: list[Parting]
    inputs: list[Parting]
    steps: int  # compared, up to the one where they part
    last: tuple[int, int]  # step of each run
    step: int  # where they part, else the last that both have
    parted: Parting | None
    altered: list[tuple[str, Altered]]  # what is not as a run wrote it, of run "A" or "B"
    # steps whose files hold equal episodes in other bytes: they name the run's settings too
    other_bytes: list[int]


def compare(a: PastRun, b: PastRun) -> Comparison:
    """Raises UserError where there is no step to compare, or a file of one is damaged."""
    both = sorted(set(a.metrics) & set(b.metrics))
    if not both:
        raise UserError(
            "there is nothing to compare yet",
            where=f"{a.folder}, {b.folder}",
            found="no step that both have ended",
            expected="a row in both of metrics.jsonl",
            next="wait for them",
        )
    other_bytes: list[int] = []
    parted, step = None, both[-1]
    for step in both:
        parted = (
            _episodes_part(a, b, step, other_bytes)
            or _metrics_part(a, b, step)
            or _weights_part(a, b, step)
        )
        if parted:
            break
    else:  # an evaluation leaves nothing to the steps after it
        for step in both:
            if parted := _evaluations_part(a, b, step):
                break
    return Comparison(
        config=_changes(_leaves(a), _leaves(b)),
        inputs=_changes(a.inputs() or b.inputs() or {}, b.inputs() or a.inputs() or {}),
        steps=sum(0 < s <= step for s in both),
        last=(max(a.metrics), max(b.metrics)),
        step=step,
        parted=parted,
        other_bytes=other_bytes,
        altered=[
            (name, one)
            for name, past in (("A", a), ("B", b))
            for one in altered(past.folder, both[-1])
            # of episodes that are gone the hash is left
            if one.found or not one.what.startswith("episodes/")
        ],
    )


def _leaves(past: PastRun) -> dict[str, Any]:
    """Where the runs lie is no difference."""
    config: Config = past.config
    tree = {
        f"{section}.{name}": value
        for section, fields in config.model_dump().items()
        for name, value in fields.items()
    }
    return {
        "command": past.command,
        **{key: value for key, value in tree.items() if key != "run.folder"},
    }


def _changes(a: dict[str, Any], b: dict[str, Any]) -> list[Parting]:
    return [
        Parting(
            what=key, a=repr(a[key]) if key in a else _NONE, b=repr(b[key]) if key in b else _NONE
        )
        for key in {**a, **b}
        if key not in a or key not in b or a[key] != b[key]
    ]


# One step
# -------------------------------------------------------------------------------------------------------------


def _weights_part(a: PastRun, b: PastRun, step: int) -> Parting | None:
    pair = [str(past.ledger[step]["weights"]) if step in past.ledger else "" for past in (a, b)]
    if "" in pair or pair[0] == pair[1]:
        return None
    return Parting(
        what="weights after the step" if step else "starting weights", a=pair[0], b=pair[1]
    )


def _metrics_part(a: PastRun, b: PastRun, step: int) -> Parting | None:
    """The first metric of the step itself."""
    return _rows_part(
        *(
            {k: v for k, v in past.metrics[step].items() if not k.startswith("eval/")}
            for past in (a, b)
        )
    )


def _evaluations_part(a: PastRun, b: PastRun, step: int) -> Parting | None:
    """Of evaluations, which need not fall on the same steps, what both have."""
    x, y = a.metrics[step], b.metrics[step]
    return _rows_part(
        *({k: row[k] for k in x if k.startswith("eval/") and k in y} for row in (x, y))
    )


def _rows_part(x: dict[str, Any], y: dict[str, Any]) -> Parting | None:
    return next(iter(_changes(x, y)), None)


def _episodes_part(a: PastRun, b: PastRun, step: int, other_bytes: list[int]) -> Parting | None:
    """The first episode, and what of it; None where the files, or all that they say of episodes,
    are equal."""
    hashes = [_journal_hash(past, step) for past in (a, b)]
    if hashes[0] == hashes[1]:
        return None
    if "" in hashes:
        return Parting(what="episodes", a=hashes[0] or _NONE, b=hashes[1] or _NONE)
    parted = groups_part(read_step(a.journal(step)), read_step(b.journal(step)))
    if parted is None:
        other_bytes.append(step)
    return parted


def _journal_hash(past: PastRun, step: int) -> str:
    """Hash the journal file of a step; where it is gone, return the ledger's hash of it."""
    if past.journal(step).is_file():
        return file_hash(past.journal(step))
    return str(past.ledger[step]["episodes"]) if step in past.ledger else ""


def groups_part(a: Sequence[Group], b: Sequence[Group]) -> Parting | None:
    """The first difference of two steps' groups, in their order."""
    for number, (x, y) in enumerate(zip_longest(a, b)):
        names = [_NONE if group is None else group.problem.uid for group in (x, y)]
        if names[0] != names[1]:
            return Parting(what=f"problem of group {number}", a=names[0], b=names[1])
        for mine, other in zip_longest(x.episodes, y.episodes):
            if mine is None or other is None:
                return Parting(
                    what=f"episodes of {names[0]}", a=str(len(x.episodes)), b=str(len(y.episodes))
                )
            if parted := episode_part(mine, other):
                return parted
        if x.outcome != y.outcome:
            return Parting(what=f"outcome of the group of {names[0]}", a=x.outcome, b=y.outcome)
    return None


def episode_part(a: Episode, b: Episode) -> Parting | None:
    """The first token where two attempts at a problem part, else the first other thing."""
    who = f"episode {a.uid}:{a.sample_index}"
    if a.sample_index != b.sample_index:
        return Parting(what=f"sample_index of {who}", a=str(a.sample_index), b=str(b.sample_index))
    firsts = {name: _first(getattr(a, name), getattr(b, name)) for name in _ARRAYS}
    parted = {name: at for name, at in firsts.items() if at is not None}
    if parted:
        at = min(parted.values())
        name = next(name for name, place in parted.items() if place == at)
        pair = [_entry(getattr(side, name), at) for side in (a, b)]
        return Parting(what=f"{who}, position {at}: {_ARRAYS[name]}", a=pair[0], b=pair[1])
    for name in _OTHERS:
        mine, other = repr(getattr(a, name)), repr(getattr(b, name))
        if mine != other:
            return Parting(what=f"{who}: {name}", a=mine, b=other)
    return None


def _first(a: Array, b: Array) -> int | None:
    """The first place where the bits are not the same, or where one ends."""
    shorter = min(len(a), len(b))
    bits = [np.ascontiguousarray(side[:shorter]).view(f"V{side.dtype.itemsize}") for side in (a, b)]
    differing = np.flatnonzero(bits[0] != bits[1])
    return int(differing[0]) if len(differing) else None if len(a) == len(b) else shorter


def _entry(column: Array, at: int) -> str:
    return repr(column[at].item()) if at < len(column) else "its end"
