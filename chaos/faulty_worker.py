"""A real rollout worker with faults on demand.

SIGHUP     raises an exception, wherever it is
SIGALRM    writes GARBAGE to its socket and goes on
SLEEP_S    environment variable: seconds, of which it sleeps a random part between two passes

python -m chaos.faulty_worker PARENT_PID < SOCKET
"""

import os
import random
import signal
import sys
import time
from types import FrameType
from typing import TYPE_CHECKING, Any

from tandem.rollout_workers.worker import load_engine, preload, run
from tandem.workers.channel import Channel
from tandem.workers.fork_server import start
from tandem.workers.host import LocalHosts

if TYPE_CHECKING:
    from tandem.engine.engine import Engine
    from tandem.engine.scheduler import RunningSequence

COMMAND = (sys.executable, "-m", "chaos.faulty_worker")
SLEEP_S = "TANDEM_ODD_SLEEP_S"
GARBAGE = (
    b"\xff\xfe no message\n",
    b'{"completion": 4711000, "identity": "0"}\n',
    b'{"applied": 4711, "hash": "0"}\n',
)


class Injected(BaseException):
    """The injected fault; no Exception, which would be an error of the model while it loads."""


def _crash(number: int, frame: FrameType | None) -> None:
    raise Injected


def _babble(number: int, frame: FrameType | None) -> None:
    os.write(0, random.choice(GARBAGE))


def load(start: dict[str, Any]) -> "Engine":
    engine, longest = load_engine(start), float(os.environ.get(SLEEP_S, "0"))
    step = engine.step

    def sleep_and_step() -> "list[RunningSequence]":
        time.sleep(random.uniform(0, longest))
        return step()

    if longest:
        engine.step = sleep_and_step  # type: ignore[method-assign]
    return engine


def faulty_hosts(_: object, *options: Any) -> LocalHosts:
    """Start faulty workers, whatever the command is."""
    return LocalHosts(COMMAND, *options)


def serve(channel: Channel, _: object) -> None:
    signal.signal(signal.SIGHUP, _crash)
    signal.signal(signal.SIGALRM, _babble)
    run(channel, load)


if __name__ == "__main__":
    start(serve, preload)
