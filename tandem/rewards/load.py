"""The reward function of a name: found here, and called by its signature.

A FUNCTION is a built-in (builtin.py), `module:function` or `path/file.py:function`. Plain or
`async`, a user's function has one of three signatures, told apart by the names of its parameters;
any other is refused:

    Tandem  score(problem, completion)  or  score(problem, completion, attempt) -> float | dict
    TRL     reward(completions, completion_ids, **columns) -> list[float | None]
    verl    compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float | dict
            (or predict_str, or model_output)

A float is the reward. A dict holds the reward's parts: the reward is the value of "reward" (verl's:
"score") if that key is there, else the sum of the values. Further keyword arguments come from
reward.options. Knows no process.

    python -c "from tandem.rewards.load import load; print(load('my_reward.py:score', {}))"
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from numbers import Real
from types import UnionType
from typing import Any, get_args, get_origin

import numpy as np

from tandem.rewards import builtin
from tandem.rewards.parts import BadFunction, BadValue, Result, number, read_value
from tandem.runtime.user_code import find_user_object
from tandem.types import Attempt, Problem

Function = Callable[..., Any]
Arguments = Mapping[str, Any]
# None: the function does not apply to this problem
Scorer = Callable[[Problem, Attempt], Result | None]

RAW_ANSWER = "raw_answer"  # in a problem's metadata: the row's own answer if it was not text
# verl's names for the completion's text
_VERL_TEXTS = ("solution_str", "predict_str", "model_output")
_VERL_NAMES = frozenset({*_VERL_TEXTS, "data_source", "ground_truth", "extra_info"})
_VERL_FORM = "(data_source, solution_str, ground_truth, extra_info)"
_OWN_FORM = "(problem, completion)"
_FORMS = f"{_OWN_FORM}, or TRL's (completions, ...), or verl's (solution_str, ground_truth, ...)"
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NOT_COLUMNS = ("prompt", "prompts", "completion", "completions", "completion_ids")


def load(name: str, options: Arguments, part: str = "") -> Scorer:
    """Load the scorer of FUNCTION `name`. Raises BadFunction, UserError if it is not there, and the
    exceptions of importing the user's module.

    part: the name of a lone float among the parts; empty: it is not a part.
    """
    if ":" in name:
        function = find_user_object(name, key="reward.function")
    else:
        function = builtin.find(name)
        _check_types(function, name, options)
    if not callable(function):
        raise BadFunction(f"{name} is not a function, found {function!r}")
    scorer = _adapt(function, part, name, options)
    getattr(function, "check_options", lambda _: None)(options)
    return scorer


# ---------------------------------------------------------------- how a function is called


def _adapt(function: Function, part: str, name: str, options: Arguments) -> Scorer:
    """Make a scorer of a function by its signature. Raises BadFunction for an unknown one."""
    call = _Call(function, part, options)
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have none
        return call.own
    parameters, expected = signature.parameters, _OWN_FORM
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    names = None if takes_any else frozenset(parameters)
    try:
        if "completions" in parameters or "completion_ids" in parameters:
            expected = "(completions, prompts)"
            signature.bind_partial(**options)
            return replace(call, names=names).trl
        if not parameters.keys().isdisjoint(_VERL_TEXTS):
            expected = _VERL_FORM
            given = _VERL_NAMES if names is None else _VERL_NAMES & names
            signature.bind(**{**dict.fromkeys(given), **options})
            return replace(call, names=names).verl
        positional = [p.name for p in parameters.values() if p.kind in _POSITIONAL]
        first = zip(positional, ("problem", "completion"), strict=False)
        if any(found.strip("_") not in ("", own) for found, own in first):  # "_x" is let pass
            expected = _FORMS
            raise TypeError
        extras = frozenset(parameters) & {"attempt"}
        signature.bind(None, None, **dict.fromkeys(extras), **options)
    except TypeError:
        also = f" and the options {', '.join(options)}" if options else ""
        found = f"{name} takes ({', '.join(parameters)})"
        raise BadFunction(f"{found}, expected {expected}{also}") from None
    return replace(call, names=extras).own


def _check_types(function: Function, name: str, options: Arguments) -> None:
    """Refuse a built-in's options of another type than its annotations, before the first item."""
    hints = inspect.get_annotations(function, eval_str=True)
    for option, value in options.items():
        hint: Any = hints.get(option, object)  # binding the signature refuses unknown options
        alternatives = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        kinds = [get_origin(kind) or kind for kind in alternatives]
        is_number = kinds[0] in (int, float)
        wanted = (int, float) if kinds == [float] else tuple(kinds)
        if not isinstance(value, wanted) or (isinstance(value, bool) and is_number):
            expected = kinds[0].__name__
            raise BadFunction(f"option {option!r} of {name} is {value!r}, expected {expected}")


@dataclass(frozen=True)
class _Call:
    """A function, and how it is called. names: of the keyword arguments that it takes beside
    `options`; None: any."""

    function: Function
    part: str  # as of `load`
    options: Arguments
    names: frozenset[str] | None = frozenset()

    def own(self, problem: Problem, attempt: Attempt) -> Result:
        extras = self._wanted({"attempt": attempt})
        value = self.function(problem, attempt.text, **extras, **self.options)
        return read_value(_finished(value), self.part)

    def trl(self, problem: Problem, attempt: Attempt) -> Result | None:
        """Call with a batch of one, as GRPOTrainer does: every column a list, and messages only if
        the prompt was messages.

        A None for this completion: the function does not apply. Values of log_metric are parts.
        """
        metrics: dict[str, Any] = {}
        truth = _truth(problem)
        # "solution" is TRL's own name for the answer
        row = {"answer": truth, "solution": truth, **_columns(problem)}
        columns = {key: [value] for key, value in row.items() if key not in _NOT_COLUMNS}
        chat = problem.conversational
        columns["prompts"] = [list(problem.messages) if chat else problem.messages[-1]["content"]]
        columns["completions"] = [list(attempt.messages) if chat else attempt.text]
        columns["completion_ids"] = [list(attempt.tokens)]
        logs = {"log_extra": lambda column, values: None, "log_metric": metrics.__setitem__}
        arguments = self._wanted({**columns, **logs, **self.options})
        try:
            inspect.signature(self.function).bind(**arguments)
        except TypeError as error:  # it asks for a column that is not there
            raise BadValue(f"{error}; the columns are {', '.join(columns)}") from None
        values = _finished(self.function(**arguments))
        is_list = isinstance(values, (list, tuple))
        if not is_list or len(values) != 1:
            found = f"{len(values)} values" if is_list else f"a {type(values).__name__}"
            raise BadValue(f"expected a list with one reward for one completion, found {found}")
        if values[0] is None:
            return None
        reward, parts = read_value(values[0], self.part)
        logged = {key: number(value, f"part {key!r}") for key, value in metrics.items()}
        return reward, {**logged, **parts}

    def verl(self, problem: Problem, attempt: Attempt) -> Result:
        """Call as verl's reward managers do. In a dict, "score" is the reward, other numbers
        parts."""
        arguments = {
            "data_source": problem.category,
            **dict.fromkeys(_VERL_TEXTS, attempt.text),
            "ground_truth": _truth(problem),
            # the column of verl's rows, else all
            "extra_info": problem.metadata.get("extra_info", _columns(problem)),
        }
        value = _finished(self.function(**self._wanted({**arguments, **self.options})))
        if not isinstance(value, dict):
            return read_value(value, self.part)
        if "score" not in value:
            found = ", ".join(map(str, value)) or "none"
            raise BadValue(f"expected a dict with `score`, found {found}")
        numbers = {key: item for key, item in value.items() if isinstance(item, (Real, np.bool_))}
        numbers.pop("score", None)
        return read_value({**numbers, "reward": value["score"]}, self.part)

    def _wanted(self, arguments: dict[str, Any]) -> dict[str, Any]:
        known = arguments if self.names is None else self.names
        return {name: value for name, value in arguments.items() if name in known}


def _truth(problem: Problem) -> Any:
    """Return the row's own answer: a number if the row has a number."""
    raw = problem.metadata.get(RAW_ANSWER)
    return problem.answer if raw is None else raw


def _columns(problem: Problem) -> dict[str, Any]:
    return {key: value for key, value in problem.metadata.items() if key != RAW_ANSWER}


def _finished(value: Any) -> Any:
    """Return the result of a function that may be `async def`."""
    if not inspect.isawaitable(value):
        return value
    import asyncio

    async def wait() -> Any:
        return await value

    return asyncio.run(wait())
