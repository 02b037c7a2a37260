"""A worker: scores one attempt after another with the reward functions, until it is killed.

It is a process that template.py forked, in a process group of its own; wire.py has the messages. It
does not know the time: RewardPool kills it. It has no other defence against hostile code than a
memory limit and its own process group; it is a fuse, not a sandbox. Threads that a reward function
leaves running are its own risk.

    echo '{"id": 0, "problem": {"uid": "", "messages": [], "answer": "3"}, "attempt": {"text": "Answer: 3"}}' |
        python -m tandem.rewards.pool.worker answer
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tandem.rewards.load import Scorer, load_all
from tandem.rewards.parts import BadValue, Result, as_it_is, weigh
from tandem.types import Attempt, Problem

ERROR_CHARS = 500
HERE = os.path.dirname(__file__)

Send = Callable[[dict[str, Any]], None]
Functions = Mapping[str, Scorer]  # by name, in the order of the config


def serve(
    functions: Functions, weights: Sequence[float], requests: Iterable[bytes], send: Send
) -> None:
    """Answer every request, in order, until there are no more or the process should not go on.

    weights: one for each function; none where the only function's reward and parts are given as
    they are.
    """
    for line in requests:
        answer = verdict(functions, weights, line, send)
        send(answer)
        if answer["last"]:
            return


def verdict(
    functions: Functions, weights: Sequence[float], line: bytes, send: Send
) -> dict[str, Any]:
    """The answer to one request, whatever the functions do short of ending the process. One failure
    is everyone's."""
    index = json.loads(line)["id"]
    results: dict[str, Result | None] = {}
    running = ""  # whom to blame, where there is a choice
    try:
        for at, (name, function) in enumerate(functions.items()):
            running = f"{name}: " if weights else ""
            if at:
                send({"id": index, "at": at})
            # read again for each: the function before may have written in its problem
            results[name] = function(
                *_read(line), lambda loading: send({"id": index, "loading": loading})
            )
        running = ""
        reward, parts = weigh(results, weights) if weights else results[name] or (0.0, {})
    except BadValue as error:
        return _failure(index, "bad_value", f"{running}{error}")
    except BaseException as error:  # recovery is the feature: one exception costs one sample
        # After a MemoryError the memory may be held for good, so this process scores nothing more.
        text = " at ".join(filter(None, (describe(error), place(error))))
        return _failure(index, "exception", running + text, last=isinstance(error, MemoryError))
    return {"id": index, "reward": reward, "parts": parts, "error": "", "kind": "", "last": False}


def _read(line: bytes) -> tuple[Problem, Attempt]:
    request = json.loads(line)
    problem, attempt = request["problem"], request["attempt"]
    # wire._brief left it out
    messages = attempt.get("messages") or [{"role": "assistant", "content": attempt["text"]}]
    return (
        Problem(**{**problem, "messages": tuple(problem["messages"])}),
        Attempt(**{**attempt, "messages": tuple(messages), "tokens": tuple(attempt["tokens"])}),
    )


def _failure(index: int, kind: str, error: str, last: bool = False) -> dict[str, Any]:
    return {
        "id": index,
        "reward": 0.0,
        "parts": {},
        "error": error[:ERROR_CHARS],
        "kind": kind,
        "last": last,
    }


def describe(error: BaseException) -> str:
    """The last line of the traceback."""
    try:
        text = str(error)
    except Exception:  # a user's __str__
        text = "(its text cannot be read)"
    return f"{type(error).__name__}: {text}"[:ERROR_CHARS]


def place(error: BaseException) -> str:
    """file:line of the deepest frame that is neither ours nor the import system's; empty if there
    is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    found, frame = "", error.__traceback__
    while frame is not None:
        file = frame.tb_frame.f_code.co_filename
        if not file.startswith((HERE, "<frozen")):
            found = f"{file}:{frame.tb_lineno}"
        frame = frame.tb_next
    return found


def main(*functions: str) -> None:
    lone = as_it_is(functions, ())
    loaded = load_all(functions, {}, lambda at: None, lone)
    serve(
        loaded,
        [] if lone else [1.0] * len(loaded),
        sys.stdin.buffer,
        lambda message: print(json.dumps(message)),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
