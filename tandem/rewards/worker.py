"""The worker process: loads the reward functions and answers one JSON line for each JSON line.

    python -m tandem.rewards.worker '["answer"]' [WEIGHTS [MEMORY_MB [PARENT_PID]]]

The first argument is a JSON list of FUNCTIONs, WEIGHTS one of numbers, empty for "as they are". A FUNCTION is `answer`,
`module:function` or `path/file.py:function`, and a user's function is

    score(problem: Problem, completion: str) -> float | dict[str, float]

A float is the reward. A dict holds the reward's parts: the reward is the value of "reward" if that key is there, else
the sum of the values. Metadata arrives as JSON has it (tuples are lists, keys are strings). Several functions, or one
with a weight, give the sum of weight x reward; see weigh.

    in   {"id": 7, "problem": {"uid", "messages", "answer", "category", "metadata"}, "text": "Answer: 3"}
    out  {"id": -1, "ready": true}  or  {"id": -1, "failed": "ModuleNotFoundError: ...", "where": "rewards.py:3"}
         {"id": 7, "at": 1}               the second function is running (for id -1: is being loaded), and so on
         {"id": 7, "loading": true}       Math-Verify is being imported (false: it is); the clock may allow for it, once
         {"id": 7, "reward": 1.0, "parts": {"answer": 1.0}, "error": "", "kind": "", "last": false}

It does not know the time: the parent kills it. It has no other defence against hostile code than a memory limit and
its own process group; it is a fuse, not a sandbox. Threads that a reward function leaves running are its own risk.
"""

import ctypes
import importlib
import importlib.util
import inspect
import json
import math
import os
import resource
import signal
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from numbers import Real
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tandem.errors import UserError
from tandem.rewards import answer
from tandem.types import Problem

HELLO = -1  # the id of the first message
MAX_PARTS = 64
ERROR_CHARS = 500
_PR_SET_PDEATHSIG = 1

RewardFunction = Callable[[Problem, str], Any]
Functions = Mapping[str, RewardFunction]  # by name, in the order of the config
Result = tuple[float, dict[str, float]]  # (reward, parts)
Send = Callable[[dict[str, Any]], None]


class BadFunction(Exception):
    """FUNCTION names nothing that can be called as score(problem, completion)."""


class BadValue(Exception):
    """A reward function returned something that is not a reward."""


def main(functions: str, weights: str = "[]", memory_mb: str = "2048", parent: str = "") -> None:
    """Serve until standard input ends."""
    requests, send = _private_pipes()
    _die_with(int(parent or os.getppid()))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    _limit(int(memory_mb) * 2**20)
    try:
        loaded = load_all(json.loads(functions), send)
    except BaseException as error:  # the user's module may raise anything, SystemExit included
        send({"id": HELLO, "failed": _describe(error), "where": _place(error)})
        return
    send({"id": HELLO, "ready": True})
    alike = [1.0] * len(loaded) if len(loaded) > 1 else []
    serve(loaded, json.loads(weights) or alike, requests, send)


# ---------------------------------------------------------------- the process


def _private_pipes() -> tuple[BinaryIO, Send]:
    """Keep the protocol's pipes to ourselves: a user's print goes to stderr and a user's input() reads nothing."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout = sys.stderr

    def send(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message).encode() + b"\n")
        answers.flush()

    return requests, send


def _die_with(parent: int) -> None:
    """Have the kernel kill us when the thread that started us ends; elsewhere than Linux, standard input's end does."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def _limit(memory_bytes: int) -> None:
    """Bound the address space (Linux honours it) and leave no core files."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


# ---------------------------------------------------------------- the functions


def part_name(function: str) -> str:
    """What FUNCTION is called in parts and errors: "score" for "my.py:score"."""
    return function.rpartition(":")[2]


def check_functions(functions: Sequence[str], weights: Sequence[float]) -> None:
    """Refuse functions whose parts could not be told apart, and weights that are not theirs, before any is loaded."""
    names = [part_name(function) for function in functions]
    if len(set(names)) < max(1, len(names)):
        what, found = "the reward functions cannot be told apart", ", ".join(functions) or "no function"
        expected = "one function or more, each with a name of its own behind the colon"
        raise UserError(what, where="reward.function", found=found, expected=expected, next="rename one, or remove it")
    if weights and (len(weights) != len(names) or not all(map(math.isfinite, weights))):
        what, found = "the reward weights do not fit the reward functions", ", ".join(map(str, weights))
        expected = f"one finite number for each of {', '.join(functions)}"
        raise UserError(what, where="reward.weights", found=found, expected=expected)


def load_all(functions: Sequence[str], send: Send) -> Functions:
    """The callables by their names: "score" of "my.py:score". Raises what load raises."""
    loaded = {}
    for at, function in enumerate(functions):
        if at:
            send({"id": HELLO, "at": at})
        loaded[part_name(function)] = load(function)
    return loaded


def load(function: str) -> RewardFunction:
    """The callable that FUNCTION names. Raises BadFunction, or whatever importing the user's module raises."""
    if function == "answer":
        return answer_reward
    source, colon, name = function.rpartition(":")
    if not (colon and source and name):
        raise BadFunction(f"cannot read {function!r}: neither `answer` nor `module:function` nor `file.py:function`")
    module = _load_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    found = vars(module).get(name)
    if not callable(found):
        functions = [value for value in vars(module).values() if inspect.isfunction(value)]
        known = [value.__name__ for value in functions if value.__module__ == module.__name__]
        raise BadFunction(f"no function {name!r} in {source}; it has {', '.join(known) or 'none'}")
    score: RewardFunction = found
    _check_signature(score, function)
    return score


@cache  # two functions of one file share its module, as those of a module do
def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise BadFunction(f"no file {str(path)!r} in {os.getcwd()}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise BadFunction(f"{str(path)!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickle look their module up here
    sys.path.append(str(path.resolve().parent))  # its neighbours can be imported, and shadow nothing
    spec.loader.exec_module(module)
    return module


def _check_signature(function: RewardFunction, name: str) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have none
        return
    try:
        signature.bind(None, None)
    except TypeError:
        raise BadFunction(f"{name} takes {signature}, expected (problem, completion)") from None


def answer_reward(problem: Problem, completion: str, loading: answer.Loading = answer.ignore_loading) -> float:
    """The `answer` verifier as a reward function."""
    return answer.score(completion, problem.answer, loading)


# ---------------------------------------------------------------- one item


def serve(functions: Functions, weights: Sequence[float], requests: BinaryIO, send: Send) -> None:
    """Answer every request, in order, until there are no more or the process should not go on.

    weights: one for each function; none where the only function's reward and parts are given as they are.
    """
    for line in requests:
        verdict = judge(functions, weights, line, send)
        send(verdict)
        if verdict["last"]:
            return


def _announce(send: Send, index: int) -> answer.Loading:
    return lambda loading: send({"id": index, "loading": loading})


def judge(functions: Functions, weights: Sequence[float], line: bytes, send: Send) -> dict[str, Any]:
    """The answer to one request, whatever the functions do short of ending the process. One failure is everyone's."""
    request = json.loads(line)
    results: dict[str, Result] = {}
    running = ""  # whom to blame, where there is a choice
    try:
        for at, (name, function) in enumerate(functions.items()):
            running = f"{name}: " if weights else ""
            if at:
                send({"id": request["id"], "at": at})
                request = json.loads(line)  # the function before may have written in its problem
            value = _call(function, request, send)
            results[name] = read_value(value, "" if weights else name)
        running = ""
        reward, parts = weigh(results, weights) if weights else results[name]
    except BadValue as error:
        return _failure(request["id"], "bad_value", f"{running}{error}")
    except BaseException as error:  # recovery is the feature: one exception costs one sample
        # After a MemoryError the memory may be held for good, so this process scores nothing more.
        text = " at ".join(filter(None, (_describe(error), _place(error))))
        return _failure(request["id"], "exception", running + text, last=isinstance(error, MemoryError))
    return {"id": request["id"], "reward": reward, "parts": parts, "error": "", "kind": "", "last": False}


def _call(function: RewardFunction, request: dict[str, Any], send: Send) -> Any:
    call = partial(answer_reward, loading=_announce(send, request["id"])) if function is answer_reward else function
    problem = request["problem"]
    return call(Problem(**{**problem, "messages": tuple(problem["messages"])}), request["text"])


def read_value(value: Any, part: str) -> Result:
    """(reward, parts) of what a function returned; raises BadValue. part names a lone float; empty: it is no part."""
    if not isinstance(value, dict):
        reward = _number(value, "the reward")
        return reward, {part: reward} if part else {}
    if not value or len(value) > MAX_PARTS or not all(isinstance(key, str) and len(key) <= MAX_PARTS for key in value):
        raise BadValue(f"expected a dict of 1 to {MAX_PARTS} parts with short names, found {len(value)} parts")
    parts = {key: _number(number, f"part {key!r}") for key, number in value.items()}
    reward = parts.pop("reward") if "reward" in parts else _number(sum(parts.values()), "the sum of the parts")
    return reward, parts


def weigh(results: Mapping[str, Result], weights: Sequence[float]) -> Result:
    """The weighted sum of the functions' rewards, and the parts of all; raises BadValue.

    The parts are each function's reward, unweighted and under the function's name, and the parts of its dict, which
    keep their names. Where another function has the name too, or is called so, a part becomes `function.part`.
    Example: weigh({"a": (0.5, {}), "b": (3.0, {"x": 1.0, "a": 2.0})}, [1.0, 0.1]) gives
    (0.8, {"a": 0.5, "b": 3.0, "x": 1.0, "b.a": 2.0})
    """
    total = 0.0
    for weight, (reward, _) in zip(weights, results.values(), strict=True):
        total += weight * reward  # not sum(), which gives other bits since Python 3.12
    parts = {name: reward for name, (reward, _) in results.items()}
    owners = Counter([*parts, *(part for _, own in results.values() for part in own)])
    for name, (_, own) in results.items():
        for part, value in own.items():
            label = part if owners[part] == 1 else f"{name}.{part}"
            if label in parts:
                raise BadValue(f"two parts are named {label!r}, expected one")
            parts[label] = value
    return _number(total, "the weighted sum of the rewards"), parts


def _number(value: Any, what: str) -> float:
    if not isinstance(value, (Real, np.bool_)):
        raise BadValue(f"{what} is of type {type(value).__name__}, expected a float")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise BadValue(f"{what} is {number}, expected a finite number")
    return number


def _failure(index: int, kind: str, error: str, last: bool = False) -> dict[str, Any]:
    return {"id": index, "reward": 0.0, "parts": {}, "error": error[:ERROR_CHARS], "kind": kind, "last": last}


def _describe(error: BaseException) -> str:
    """The last line of the traceback."""
    try:
        text = str(error)
    except Exception:  # a user's __str__
        text = "(its text cannot be read)"
    return f"{type(error).__name__}: {text}"[:ERROR_CHARS]


def _place(error: BaseException) -> str:
    """file:line of the deepest frame that is neither ours nor the import system's; empty if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    place, frame = "", error.__traceback__
    while frame is not None:
        file = frame.tb_frame.f_code.co_filename
        if file != __file__ and not file.startswith("<frozen"):
            place = f"{file}:{frame.tb_lineno}"
        frame = frame.tb_next
    return place


if __name__ == "__main__":
    main(*sys.argv[1:])
