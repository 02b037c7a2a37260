"""The beginning of a rollout worker: as a process of its own, or forked by one that has imported
all that it needs.

    python -m tandem.engine.worker_pool.worker PARENT_PID < SOCKET                   a worker
    python -m tandem.engine.worker_pool.worker fork MODEL_PATH PARENT_PID < SOCKET   a fork server

process.py starts the one, forked.py the other, which takes the messages of runtime/fork_server.py
with two descriptors: the worker's log and its channel. It imports and computes nothing, as the
threads of OpenMP or oneDNN would be lost in a fork. If it has a second thread all the same, a fork
starts its program anew.
"""

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from tandem.engine.worker_pool.protocol import MAX_LINE_BYTES
from tandem.runtime.fork_server import ForkServer, close_input, count_threads
from tandem.runtime.worker_channel import Channel, die_with_parent, encode, take_channel

FORK = "fork"
LONG_CALL_S = 600.0  # after which a long call gives no more signs of life
BEAT_S = 0.2  # between those of workers that the fork server will fork
THREAD_END_S = 0.5  # between the end of a thread's function and its own


def start(
    serve: Callable[[Channel], None], preload: Callable[[str], None] = lambda model_path: None
) -> None:
    """Be what the arguments of this process ask for: a worker, or the fork server of workers.

    serve: the life of a worker. preload: imports what it needs for a model; starts no thread.
    """
    if FORK not in sys.argv[-3:-2]:
        serve(prepare(int(sys.argv[-1])))
        return

    def work(descriptors: list[int]) -> None:
        for place, descriptor in zip((2, 0), descriptors, strict=True):
            os.dup2(descriptor, place)
            os.close(descriptor)
        if not server.alone:
            program = sys.orig_argv[1:-3]
            os.execv(sys.executable, [sys.executable, *program, str(os.getppid())])
        serve(prepare(os.getppid()))

    control = prepare(int(sys.argv[-1]))
    close_input()
    server = ForkServer(control, work, descriptors=2)
    # an error is the worker's to report, which imports the rest for itself
    with repeated(lambda: _show_life(server), BEAT_S), suppress(Exception):
        preload(sys.argv[-2])
    ends = time.monotonic() + THREAD_END_S
    while count_threads() > 1 and time.monotonic() < ends:
        time.sleep(0.001)
    server.serve()


def _show_life(server: ForkServer) -> None:
    """Give a sign of life in the name of each worker that is not forked yet."""
    with suppress(EOFError):
        server.receive()
    for _, (_, channel) in server.asked:
        with suppress(ConnectionError):
            os.write(channel, encode({"alive": True}))


def prepare(parent: int) -> Channel:
    """Make this process a worker of `parent`; return its channel. Ctrl-C in the terminal does not
    end it."""
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, file=1, all_threads=True)  # for the watchdog's report
    faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)  # for LocalProcess.stack
    return take_channel(MAX_LINE_BYTES)


@contextmanager
def repeated(action: Callable[[], None], every_s: float) -> Iterator[None]:
    """Do something again and again in another thread while this one is in a long call."""
    over = threading.Event()

    def repeat() -> None:
        ends = time.monotonic() + LONG_CALL_S
        while not over.wait(every_s) and time.monotonic() < ends:
            action()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
