"""A reward worker: scores one attempt after another with the reward functions, until it is killed.

It is forked by a process that has loaded the functions (workers/fork_server.py), in a process group
of its own; protocol.py has the messages. It does not know the time: RewardPool kills it. Its only
defence against hostile code is a memory limit and its own process group; it is a fuse, not a
sandbox. A reward function leaves threads running at its own risk, and connections that its module
opens when it is imported are shared by all workers.
"""

import copy
import json
import os
import resource
import sys
from collections.abc import Callable, Mapping, Sequence

from tandem.rewards.load import Scorer, load
from tandem.rewards.parts import BadValue, Result, as_it_is, cannot_load, part_name, weigh
from tandem.rewards.protocol import read_request
from tandem.runtime.errors import UserError
from tandem.runtime.user_code import describe, user_line
from tandem.workers.channel import Channel, Message
from tandem.workers.fork_server import close_input, start
from tandem.workers.serve import serve_from_start

ERROR_CHARS = 500

Functions = Mapping[str, Scorer]  # by name, in the order of the config


def load_functions(spec: Message) -> Functions:
    """Limit this process's memory and load the functions, by name. Raises UserError. spec: the
    message that starts a worker."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # which honours a bound of the address space
        limit, hard = spec["memory_mb"] * 2**20, resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    lone, loaded = as_it_is(spec["functions"], spec["weights"]), {}
    for function in spec["functions"]:
        name = part_name(function)
        try:
            options = spec["options"].get(name, {})
            loaded[name] = load(function, options, part=name if lone else "")
        except UserError:
            raise
        except BaseException as error:  # the user's module may raise anything, SystemExit included
            raise cannot_load(function, describe(error), user_line(error)) from None
    return loaded


def run(channel: Channel, loaded: Functions | None) -> None:
    """Serve the pool of a channel. loaded: the functions, if the fork server has them."""
    close_input()

    def load_rest(spec: Message) -> Callable[[], None]:
        functions = load_functions(spec) if loaded is None else loaded
        weights = spec["weights"] or ([1.0] * len(functions) if len(functions) > 1 else [])

        def serve() -> None:  # until the pool is gone or the process should not go on
            while True:
                channel.wait(None)
                for request in channel.receive():
                    answer = score(functions, weights, request, channel.send)
                    channel.send(answer)
                    if answer["last"]:
                        return

        return serve

    serve_from_start(channel, load_rest)


def score(
    functions: Functions,
    weights: Sequence[float],
    request: Message,
    send: Callable[[Message], None],
) -> Message:
    """Answer one request, unless a function ends the process. The failure of one function fails the
    attempt. weights: one for each function; empty if the only function's reward and parts are sent
    as they are."""
    index = request["id"]
    results: dict[str, Result | None] = {}
    running = ""  # the function to name in an error, if there are several
    try:
        for at, (name, function) in enumerate(functions.items()):
            running = f"{name}: " if weights else ""
            if at:
                send({"id": index, "at": at})
            # a copy for each: the function before may have changed its problem
            own = copy.deepcopy(request) if len(functions) > 1 else request
            results[name] = function(*read_request(own))
        running = ""
        reward, parts = weigh(results, weights) if weights else results[name] or (0.0, {})
    except BadValue as error:
        return _failure(index, "bad_value", f"{running}{error}")
    except BaseException as error:  # one exception costs one attempt
        # After a MemoryError the memory may be held for good: this process scores nothing more.
        text = " at ".join(filter(None, (describe(error), user_line(error))))
        return _failure(index, "exception", running + text, last=isinstance(error, MemoryError))
    return {"id": index, "reward": reward, "parts": parts, "error": "", "kind": "", "last": False}


def _failure(index: int, kind: str, error: str, last: bool = False) -> Message:
    fields = {"kind": kind, "error": error[:ERROR_CHARS], "last": last}
    return {"id": index, "reward": 0.0, "parts": {}, **fields}


if __name__ == "__main__":
    # last: -P kept it from the front, where a user's file would hide a module of Python's
    sys.path.append(os.getcwd())
    start(run, lambda spec: load_functions(json.loads(spec)))
