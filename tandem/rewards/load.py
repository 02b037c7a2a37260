"""Finds the reward function that a name names, and calls it the way it wants to be called.

A FUNCTION is a built-in (builtin.py), `module:function` or `path/file.py:function`. Plain or
`async`, a user's function has one of three signatures, told apart by the names of its parameters;
any other is refused:

    score(problem, completion)  or  score(problem, completion, attempt)  -> float | dict of parts       Tandem's
    reward(completions, completion_ids, **columns) -> list[float | None]                                TRL's
    compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float | dict             verl's
                               (or predict_str, or model_output)

A float is the reward. A dict holds the reward's parts: the reward is the value of "reward" (verl's:
"score") if that key is there, else the sum of the values. Further keyword arguments come from
reward.options. It knows no process.

    python -c "from tandem.rewards.load import load; print(load('my_reward.py:score', {}))"
"""

import importlib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, get_origin

import numpy as np

from tandem.rewards import builtin
from tandem.rewards.answer_compare import Loading
from tandem.rewards.parts import (
    BadFunction,
    BadValue,
    Options,
    Result,
    number,
    part_name,
    read_value,
)
from tandem.runtime.user_code import load_file
from tandem.types import Attempt, Problem

Function = Callable[..., Any]
# None: the function does not apply to this problem
Scorer = Callable[[Problem, Attempt, Loading], Result | None]
Given = Mapping[str, Any]  # the options of one function

RAW_ANSWER = "raw_answer"  # in a problem's metadata: the row's own answer where it was no text
# verl's names for the completion's text
_VERL_TEXTS = ("solution_str", "predict_str", "model_output")
# the names of the first two parameters; a leading underscore is let pass
_OWN = ("problem", "completion")
_KNOWN_FORMS = "(problem, completion), or TRL's (completions, ...), or verl's (solution_str, ground_truth, ...)"
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_NOT_COLUMNS = ("prompt", "prompts", "completion", "completions", "completion_ids")


def load_all(
    functions: Sequence[str], options: Options, announce: Callable[[int], None], alone: bool
) -> dict[str, Scorer]:
    """The scorers by their names: "score" of "my.py:score". Raises what load raises.

    announce: which one comes next. alone: a lone float is a part; else weigh makes it one.
    """
    loaded = {}
    for at, function in enumerate(functions):
        if at:
            announce(at)
        name = part_name(function)
        loaded[name] = load(function, options.get(name, {}), part=name if alone else "")
    return loaded


def load(function: str, options: Given, part: str = "") -> Scorer:
    """The scorer that FUNCTION names. Raises BadFunction, or whatever importing the user's module
    raises.

    part: what a lone float is called among the parts; empty: it is none.
    """
    source, colon, name = function.rpartition(":")
    if not colon:
        found = builtin.find(function)
        _check_types(found, function, options)
        scorer = _adapted(found, part, function, options)
        builtin.check(function, options)
        return scorer
    if not (source and name):
        raise BadFunction(
            f"cannot read {function!r}: expected `module:function` or `file.py:function`"
        )
    if not source.endswith(".py"):
        return _adapted(
            _member(importlib.import_module(source), name, source), part, function, options
        )
    if not Path(source).is_file():
        raise BadFunction(f"no file {source!r} in {os.getcwd()}")
    module = load_file(Path(source))
    return _adapted(_member(module, name, source), part, function, options)


def _member(module: Any, name: str, source: str) -> Function:
    try:
        # not vars(): a package may import its members when they are asked for
        found = getattr(module, name)
    except AttributeError:
        found = None
    if not callable(found):
        functions = [value for value in vars(module).values() if inspect.isfunction(value)]
        known = [value.__name__ for value in functions if value.__module__ == module.__name__]
        raise BadFunction(f"no function {name!r} in {source}; it has {', '.join(known) or 'none'}")
    return found


# ---------------------------------------------------------------- how a function is called


def _adapted(function: Function, part: str, name: str, options: Given) -> Scorer:
    """The function behind one signature."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have none
        return partial(_own, function, part, (), dict(options))
    parameters = signature.parameters
    if "completions" in parameters or "completion_ids" in parameters:
        names = _names(signature, name, options, expected="(completions, prompts)")
        return partial(_trl, function, part, names, dict(options))
    if not parameters.keys().isdisjoint(_VERL_TEXTS):
        names = _names(
            signature,
            name,
            options,
            expected="(data_source, solution_str, ground_truth, extra_info)",
        )
        _require_known(signature, name, options)
        return partial(_verl, function, part, names, dict(options))
    positional = [
        p.name
        for p in parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if any(found.strip("_") not in ("", own) for found, own in zip(positional, _OWN, strict=False)):
        raise BadFunction(_unfit(name, signature, options, _KNOWN_FORMS))
    extras = tuple(extra for extra in ("attempt", "loading") if extra in parameters)
    try:
        signature.bind(None, None, **dict.fromkeys(extras), **options)
    except TypeError:
        raise BadFunction(_unfit(name, signature, options, "(problem, completion)")) from None
    return partial(_own, function, part, extras, dict(options))


def _names(
    signature: inspect.Signature, name: str, options: Given, expected: str
) -> frozenset[str] | None:
    """Which keyword arguments the function takes; None for any. Refuses options that it does not
    take."""
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return None
    if not set(options) <= set(signature.parameters):
        raise BadFunction(_unfit(name, signature, options, expected))
    return frozenset(signature.parameters)


def _require_known(signature: inspect.Signature, name: str, options: Given) -> None:
    """Refuse a verl function with a parameter that it needs and nobody gives."""
    known = {*_VERL_TEXTS, "data_source", "ground_truth", "extra_info", *options}
    needed = [
        p.name for p in signature.parameters.values() if p.default is p.empty and p.kind in _NAMED
    ]
    if not known.issuperset(needed):
        raise BadFunction(
            _unfit(
                name, signature, options, "(data_source, solution_str, ground_truth, extra_info)"
            )
        )


def _unfit(name: str, signature: inspect.Signature, options: Given, expected: str) -> str:
    given = f" and the options {', '.join(options)}" if options else ""
    return f"{name} takes ({', '.join(signature.parameters)}), expected {expected}{given}"


def _check_types(function: Function, name: str, options: Given) -> None:
    """Options of a built-in are of the type of its annotation, so that a mistake shows before the
    first item."""
    hints = inspect.get_annotations(function, eval_str=True)
    for option, value in options.items():
        hint: Any = hints.get(option, object)  # what it does not take at all shows when it is bound
        kind = get_origin(hint) or hint
        wanted = (int, float) if kind is float else kind
        if not isinstance(value, wanted) or (isinstance(value, bool) and kind in (int, float)):
            raise BadFunction(f"option {option!r} of {name} is {value!r}, expected {kind.__name__}")


def _own(
    function: Function,
    part: str,
    extras: tuple[str, ...],
    options: Given,
    problem: Problem,
    attempt: Attempt,
    loading: Loading,
) -> Result:
    given = {"attempt": attempt, "loading": loading}
    value = _finished(
        function(problem, attempt.text, **{extra: given[extra] for extra in extras}, **options)
    )
    return read_value(value, part)


def _trl(
    function: Function,
    part: str,
    names: frozenset[str] | None,
    options: Given,
    problem: Problem,
    attempt: Attempt,
    _: Loading,
) -> Result | None:
    """A batch of one, as GRPOTrainer gives it: every column a list, messages only where the prompt
    was messages.

    None for this completion: the function does not apply. What it logs with log_metric is a part.
    """
    metrics: dict[str, Any] = {}
    truth = _truth(problem)
    # the second is TRL's own name for it
    row = {"answer": truth, "solution": truth, **_columns(problem)}
    columns = {key: [value] for key, value in row.items() if key not in _NOT_COLUMNS}
    talk = problem.conversational
    columns["prompts"] = [list(problem.messages) if talk else problem.messages[-1]["content"]]
    columns["completions"] = [list(attempt.messages) if talk else attempt.text]
    columns["completion_ids"] = [list(attempt.tokens)]
    logs = {"log_extra": lambda column, values: None, "log_metric": metrics.__setitem__}
    values = _finished(function(**_wanted({**columns, **logs, **options}, names)))
    if not isinstance(values, (list, tuple)) or len(values) != 1:
        found = (
            f"{len(values)} values"
            if isinstance(values, (list, tuple))
            else f"a {type(values).__name__}"
        )
        raise BadValue(f"expected a list with one reward for one completion, found {found}")
    if values[0] is None:
        return None
    reward, parts = read_value(values[0], part)
    return reward, {
        **{key: number(value, f"part {key!r}") for key, value in metrics.items()},
        **parts,
    }


def _verl(
    function: Function,
    part: str,
    names: frozenset[str] | None,
    options: Given,
    problem: Problem,
    attempt: Attempt,
    _: Loading,
) -> Result:
    """As verl's reward managers call it. Of a dict, "score" is the reward, other numbers are
    parts."""
    arguments = {
        "data_source": problem.category,
        **dict.fromkeys(_VERL_TEXTS, attempt.text),
        "ground_truth": _truth(problem),
        # the column of verl's rows, else all
        "extra_info": problem.metadata.get("extra_info", _columns(problem)),
    }
    value = _finished(function(**_wanted({**arguments, **options}, names)))
    if isinstance(value, dict):
        if "score" not in value:
            raise BadValue(
                f"expected a dict with `score`, found {', '.join(map(str, value)) or 'none'}"
            )
        numbers = {
            key: given
            for key, given in value.items()
            if isinstance(given, (Real, np.bool_)) and key != "score"
        }
        return read_value({**numbers, "reward": value["score"]}, part)
    return read_value(value, part)


def _truth(problem: Problem) -> Any:
    """The row's own answer: a number where the row has a number."""
    raw = problem.metadata.get(RAW_ANSWER)
    return problem.answer if raw is None else raw


def _columns(problem: Problem) -> dict[str, Any]:
    return {key: value for key, value in problem.metadata.items() if key != RAW_ANSWER}


def _wanted(arguments: dict[str, Any], names: frozenset[str] | None) -> dict[str, Any]:
    return (
        arguments
        if names is None
        else {name: value for name, value in arguments.items() if name in names}
    )


def _finished(value: Any) -> Any:
    """The result of a function that may be `async def`."""
    if not inspect.isawaitable(value):
        return value
    import asyncio

    async def wait() -> Any:
        return await value

    return asyncio.run(wait())
