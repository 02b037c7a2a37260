"""Problems from files: a row's prompt and answer, by the columns of [data], become a Problem.

Reads Tandem's own rows and verl's (docs/guide/data.md). Does not know file formats (readers.py),
tokens, templates or models.
"""

import json
from collections.abc import Sequence
from functools import partial, reduce
from operator import getitem
from typing import Any

from tandem.config.episodes import Data
from tandem.data.messages import prompt_messages, with_images
from tandem.data.mixture import Mixture
from tandem.data.prompt_columns import OF_PROBLEMS, refuse_columns, with_opening
from tandem.data.readers import (
    SUITE,
    Row,
    RowError,
    column,
    exact_number,
    read_rows,
    show,
    tell_repeats,
    uid_prefixes,
)
from tandem.runtime.image_parts import image_column, shows_images
from tandem.types import Problem

DEFAULT_ANSWER = Data.model_fields["answer_column"].default
DEFAULT_CATEGORY = Data.model_fields["category_column"].default
ANSWER_ADVICE = "set data.answer_column={}"
VERL_ANSWER = ("reward_model", "ground_truth")
# in the metadata, if the row's answer was not text: its value, for TRL's and verl's functions
RAW_ANSWER = "raw_answer"

Uids = dict[str, int]  # of a source: uid -> row


def read_problems(
    source: str | Sequence[str], config: Data, *, key: str, weights: Sequence[float] = ()
) -> Sequence[Problem]:
    """Read the problems of one source or several, in order; with weights, a Mixture of them.

    key: the config key that names them, e.g. "data.train". Raises UserError with every kind of
    mistake in a source, up to ten, and for a uid that comes twice.
    """
    names = [source] if isinstance(source, str) else list(source)
    earlier: dict[str, Uids] = {}
    parts = []
    for name, prefix in zip(names, uid_prefixes(names, key), strict=True):
        uids: Uids = {}
        columns = Data(system=config.system) if name.startswith(SUITE) else config
        build = partial(_problem, config=columns, prefix=prefix, uids=uids, earlier=dict(earlier))
        parts.append(read_rows(name, build, key=key))
        earlier[name] = uids
    problems = [problem for part in parts for problem in part]
    contents = (
        (p.answer, str(p.metadata), *(str(m["content"]) for m in p.messages)) for p in problems
    )
    tell_repeats(contents, key)
    return Mixture(parts, weights, names) if weights else problems


def _problem(
    row: Row, *, config: Data, prefix: str, uids: Uids, earlier: dict[str, Uids]
) -> Problem:
    answer = "" if "reward_model" in row.values else config.answer_column
    prompt = column(row, {config.prompt_column: "set data.prompt_column={}", answer: ANSWER_ADVICE})
    named = (config.prompt_column, config.answer_column, config.category_column)
    refuse_columns(row, OF_PROBLEMS, named)
    messages = with_images(prompt_messages(prompt, field=config.prompt_column), row)
    messages = with_opening(messages, row, named)
    if config.system and not any(message["role"] == "system" for message in messages):
        messages = ({"role": "system", "content": config.system}, *messages)
    answer_path = _answer_path(row, config.answer_column, config.prompt_column)
    uid, category = f"{prefix}/{row.number}", ""
    extra = row.values.get("extra_info")
    if row.values.get("uid") is not None:
        uid = _text(row.values["uid"], field="uid")
    elif isinstance(extra, dict) and extra.get("uid") is not None:
        uid = _text(extra["uid"], field="extra_info.uid")
    name = config.category_column
    if name != DEFAULT_CATEGORY or row.values.get(name) is not None:
        category = _text(column(row, {name: "set data.category_column={}"}), field=name)
    problem = Problem(
        uid=uid,
        messages=messages,
        answer=_answer(row, answer_path),
        category=category,
        metadata=_metadata(row, config, answer_path),
        conversational=not isinstance(prompt, str) or any(map(shows_images, messages)),
    )
    # a uid addresses the random draws of its problem: two rows of one would be sampled alike
    first = uids.setdefault(uid, row.number)
    place = "" if first == row.number else f"row {first}"
    for name, rows in earlier.items():
        place = f"row {rows[uid]} of {name}" if uid in rows else place
    if place:
        raise RowError(f"{show(uid)}, as in {place}", "a uid that no other row has", field="uid")
    return problem


def _answer_path(row: Row, name: str, prompt_column: str) -> tuple[str, ...]:
    """Return the path of the row's answer: its column, or verl's place by default; () for none."""
    if not name:
        return ()
    verl = row.values.get("reward_model")
    has_verl = isinstance(verl, dict) and verl.get("ground_truth") is not None
    if name == DEFAULT_ANSWER and has_verl and row.values.get(name) is None:
        return VERL_ANSWER
    otherwise = "set data.answer_column=NAME, or data.answer_column='' if no reward needs an answer"
    column(row, {name: ANSWER_ADVICE}, otherwise=otherwise, taken=prompt_column)
    return (name,)


def _answer(row: Row, path: tuple[str, ...]) -> str:
    if not path:
        return ""
    match value := reduce(getitem, path, row.values):
        case str():
            return value
        case dict() | list():
            return json.dumps(value, ensure_ascii=False)
        case int() | float() if not isinstance(value, bool):
            return exact_number(row, *path)
    raise RowError(
        show(value),
        "text, a number, a list or an object",
        field=".".join(path),
        next="write the answer, or remove the row; or set data.answer_column='' if no reward needs "
        "an answer",
    )


def _text(value: Any, *, field: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        found = "empty text" if value == "" else show(value)
        raise RowError(found, "text or a whole number", field=field)
    return str(value)


def _metadata(row: Row, config: Data, answer_path: tuple[str, ...]) -> dict[str, Any]:
    """Return the columns that are nowhere else in the Problem, so that a reward function has the
    whole row.

    An answer or category of a column that the config names is here as well, for functions that ask
    for columns by name; so is the answer's value if Problem.answer is its text.
    """
    elsewhere = {config.prompt_column, "uid"}
    if answer_path == (DEFAULT_ANSWER,):
        elsewhere.add(DEFAULT_ANSWER)
    if config.category_column == DEFAULT_CATEGORY:
        elsewhere.add(DEFAULT_CATEGORY)
    rest = {name: value for name, value in row.values.items() if name not in elsewhere}
    rest.pop(image_column(row.values), None)
    if answer_path == VERL_ANSWER:
        reward_model = dict(rest.pop("reward_model"))
        del reward_model["ground_truth"]
        rest |= {"reward_model": reward_model} if reward_model else {}
    raw = reduce(getitem, answer_path, row.values) if answer_path else ""
    return rest if isinstance(raw, str) else {RAW_ANSWER: raw, **rest}
