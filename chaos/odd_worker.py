"""A rollout worker as it is, that can be told to fail: by signals, and by the environment variable
SLEEP_S.

SIGHUP     an exception, wherever it is        SIGALRM    writes GARBAGE to its socket and goes on
SLEEP_S    seconds, of which it sleeps a random part between two passes of the engine

python -m chaos.odd_worker PARENT_PID < SOCKET
"""

import os
import random
import signal
import sys
import time
from types import FrameType
from typing import TYPE_CHECKING, Any

from tandem.engine.worker_pool.worker import load_engine, prepare, run

if TYPE_CHECKING:
    from tandem.engine.engine import Engine
    from tandem.engine.scheduler import RunningSequence

COMMAND = (sys.executable, "-m", "chaos.odd_worker")
SLEEP_S = "TANDEM_ODD_SLEEP_S"
GARBAGE = (
    b"\xff\xfe no message\n",
    b'{"completion": 4711000, "identity": "0"}\n',
    b'{"applied": 4711, "hash": "0"}\n',
)


class Injected(Exception):
    """The fault."""


def _crash(number: int, frame: FrameType | None) -> None:
    raise Injected


def _babble(number: int, frame: FrameType | None) -> None:
    os.write(0, random.choice(GARBAGE))


def load(start: dict[str, Any]) -> "Engine":
    engine, most = load_engine(start), float(os.environ.get(SLEEP_S, "0"))
    step = engine.step

    def slowly() -> "list[RunningSequence]":
        time.sleep(random.uniform(0, most))
        return step()

    if most:
        engine.step = slowly  # type: ignore[method-assign]
    return engine


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, _crash)
    signal.signal(signal.SIGALRM, _babble)
    run(prepare(int(sys.argv[1])), load)
