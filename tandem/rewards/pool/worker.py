"""A reward worker: scores one attempt after another with the reward functions, until it is killed.

It is a process forked by fork_server.py, in a process group of its own; protocol.py has the
messages. It does not know the time: RewardPool kills it. Its only defence against hostile code is a
memory limit and its own process group; it is a fuse, not a sandbox. A reward function leaves
threads running at its own risk.

    python -m tandem.rewards.pool.worker answer      (requests of protocol.py on standard input)
"""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

from tandem.rewards.load import Scorer, load_all
from tandem.rewards.parts import BadValue, Result, as_it_is, weigh
from tandem.rewards.pool.protocol import read_problem
from tandem.runtime.user_code import describe, user_line
from tandem.runtime.worker_channel import Message
from tandem.types import Attempt, Problem

ERROR_CHARS = 500

Send = Callable[[Message], None]
Functions = Mapping[str, Scorer]  # by name, in the order of the config


def serve(
    functions: Functions, weights: Sequence[float], requests: Iterable[bytes], send: Send
) -> None:
    """Answer the requests in order, to their end or until the process should not go on.

    weights: one for each function; empty if the only function's reward and parts are sent as they
    are.
    """
    for line in requests:
        answer = score(functions, weights, line, send)
        send(answer)
        if answer["last"]:
            return


def score(functions: Functions, weights: Sequence[float], line: bytes, send: Send) -> Message:
    """Answer one request, unless a function ends the process. The failure of one function fails the
    attempt."""
    index = json.loads(line)["id"]
    results: dict[str, Result | None] = {}
    running = ""  # the function to name in an error, if there are several
    try:
        for at, (name, function) in enumerate(functions.items()):
            running = f"{name}: " if weights else ""
            if at:
                send({"id": index, "at": at})
            # parsed again for each: the function before may have changed its problem
            results[name] = function(
                *read_request(json.loads(line)),
                lambda loading: send({"id": index, "loading": loading}),
            )
        running = ""
        reward, parts = weigh(results, weights) if weights else results[name] or (0.0, {})
    except BadValue as error:
        return _failure(index, "bad_value", f"{running}{error}")
    except BaseException as error:  # one exception costs one attempt
        # After a MemoryError the memory may be held for good: this process scores nothing more.
        text = " at ".join(filter(None, (describe(error), user_line(error))))
        return _failure(index, "exception", running + text, last=isinstance(error, MemoryError))
    return {"id": index, "reward": reward, "parts": parts, "error": "", "kind": "", "last": False}


def read_request(request: Message) -> tuple[Problem, Attempt]:
    """Return what a request asks to score."""
    attempt = request["attempt"]
    # protocol.py left out a single message that repeats the text
    messages = attempt.get("messages") or [{"role": "assistant", "content": attempt["text"]}]
    return (
        read_problem(request["problem"]),
        Attempt(**{**attempt, "messages": tuple(messages), "tokens": tuple(attempt["tokens"])}),
    )


def _failure(index: int, kind: str, error: str, last: bool = False) -> Message:
    return {
        "id": index,
        "reward": 0.0,
        "parts": {},
        "error": error[:ERROR_CHARS],
        "kind": kind,
        "last": last,
    }


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
