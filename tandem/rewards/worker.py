"""The worker process: loads one reward function and answers one JSON line for each JSON line.

    python -m tandem.rewards.worker FUNCTION [MEMORY_MB [PARENT_PID]]

FUNCTION is `answer`, `module:function` or `path/file.py:function`, and a user's function is

    score(problem: Problem, completion: str) -> float | dict[str, float]

A float is the reward. A dict holds the reward's parts: the reward is the value of "reward" if that key is there, else
the sum of the values. Metadata arrives as JSON has it (tuples are lists, keys are strings).

    in   {"id": 7, "problem": {"uid", "messages", "answer", "category", "metadata"}, "text": "Answer: 3"}
    out  {"id": -1, "ready": true}  or  {"id": -1, "failed": "ModuleNotFoundError: ...", "where": "rewards.py:3"}
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
from collections.abc import Callable
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tandem.rewards import answer
from tandem.types import Problem

HELLO = -1  # the id of the first message
MAX_PARTS = 64
ERROR_CHARS = 500
_PR_SET_PDEATHSIG = 1

RewardFunction = Callable[[Problem, str], Any]
Send = Callable[[dict[str, Any]], None]


class BadFunction(Exception):
    """FUNCTION names nothing that can be called as score(problem, completion)."""


class BadValue(Exception):
    """A reward function returned something that is not a reward."""


def main(function: str, memory_mb: str = "2048", parent: str = "") -> None:
    """Serve until standard input ends."""
    requests, send = _private_pipes()
    _die_with(int(parent or os.getppid()))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    _limit(int(memory_mb) * 2**20)
    try:
        score = load(function)
    except BaseException as error:  # the user's module may raise anything, SystemExit included
        send({"id": HELLO, "failed": _describe(error), "where": _place(error)})
        return
    send({"id": HELLO, "ready": True})
    serve(score, function.rpartition(":")[2], requests, send)


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


# ---------------------------------------------------------------- the function


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


def serve(score: RewardFunction, part: str, requests: BinaryIO, send: Send) -> None:
    """Answer every request, in order, until there are no more or the process should not go on."""
    for line in requests:
        request = json.loads(line)
        call = partial(answer_reward, loading=_announce(send, request["id"])) if score is answer_reward else score
        verdict = judge(call, part, request["problem"], request["text"])
        send({"id": request["id"], **verdict})
        if verdict["last"]:
            return


def _announce(send: Send, index: int) -> answer.Loading:
    return lambda loading: send({"id": index, "loading": loading})


def judge(score: RewardFunction, part: str, problem: dict[str, Any], text: str) -> dict[str, Any]:
    """The answer to one request, whatever the function does short of ending the process."""
    try:
        value = score(Problem(**{**problem, "messages": tuple(problem["messages"])}), text)
        reward, parts = read_value(value, part)
    except BadValue as error:
        return _failure("bad_value", str(error))
    except BaseException as error:  # recovery is the feature: one exception costs one sample
        # After a MemoryError the memory may be held for good, so this process scores nothing more.
        text = " at ".join(filter(None, (_describe(error), _place(error))))
        return _failure("exception", text, last=isinstance(error, MemoryError))
    return {"reward": reward, "parts": parts, "error": "", "kind": "", "last": False}


def read_value(value: Any, part: str) -> tuple[float, dict[str, float]]:
    """(reward, parts) of what a reward function returned; raises BadValue. part names a lone float."""
    if not isinstance(value, dict):
        reward = _number(value, "the reward")
        return reward, {part: reward}
    if not value or len(value) > MAX_PARTS or not all(isinstance(key, str) and len(key) <= MAX_PARTS for key in value):
        raise BadValue(f"expected a dict of 1 to {MAX_PARTS} parts with short names, found {len(value)} parts")
    parts = {key: _number(number, f"part {key!r}") for key, number in value.items()}
    reward = parts.pop("reward") if "reward" in parts else _number(sum(parts.values()), "the sum of the parts")
    return reward, parts


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


def _failure(kind: str, error: str, last: bool = False) -> dict[str, Any]:
    return {"reward": 0.0, "parts": {}, "error": error[:ERROR_CHARS], "kind": kind, "last": last}


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
