"""TaskThread: what the threads of all pools of calls share, whoever serves these (scheduler.py; on
a cluster cluster/node_pool.py). Tasks come from any thread, a pipe wakes this one, and however it
ends, no future is left waiting.
"""

import selectors
import threading
from collections import deque
from concurrent.futures import Future
from typing import Any, Generic, Protocol, Self, TypeVar

from tandem.runtime import watchdog
from tandem.runtime.errors import UserError
from tandem.runtime.worker_channel import Channel, Waker


class Task(Protocol):
    """A call on its way. interrupted: how often who served it was lost."""

    index: int
    future: Future[Any]
    interrupted: int


T = TypeVar("T", bound=Task)


class Process(Protocol):
    """A process with a channel to it."""

    @property
    def channel(self) -> Channel: ...


class TaskThread(Generic[T]):
    """The thread of a pool; a subclass has `_step` and `_give_up`."""

    what = "reward pool"

    def __init__(self) -> None:
        self._todo: deque[T] = deque()  # no worker has them
        self._lock = threading.Lock()  # of _closing
        self._closing = False
        self._broken: BaseException | None = None  # what has ended the thread
        self._waker, self._selector = Waker(), selectors.DefaultSelector()
        self._selector.register(self._waker, selectors.EVENT_READ)
        # has the thread look at its tasks and deadlines now
        self.wake = self._waker.wake

    def add(self, task: T, *, first: bool = False) -> None:
        """Take a task. first: before those that wait. Raises RuntimeError if the thread has ended,
        or soon will, or the UserError that has ended it."""
        with self._lock:
            if self._closing:
                if isinstance(self._broken, UserError):
                    raise self._broken
                raise RuntimeError(f"the {self.what} is closed") from self._broken
            (self._todo.appendleft if first else self._todo.append)(task)
            self.wake()

    def stop(self) -> None:
        """Have run return; tasks not done by then fail."""
        with self._lock:
            self._closing = True
        self.wake()

    def status(self) -> list[dict[str, Any]]:
        """Describe the workers on other nodes, for `tandem status`."""
        return []

    def run(self) -> None:
        """Serve until stop is called. However it ends, no future is left waiting."""
        error: BaseException = RuntimeError(f"the {self.what} is closed")
        try:
            while not self._closing:
                self._step()
        except BaseException as broken:
            error = self._broken = broken
        finally:
            with self._lock:
                self._closing = True
            self._give_up(error)
            self._selector.close()
            self._waker.close()

    def _step(self) -> None:
        """Give out tasks, wait for something to happen, and handle it."""
        raise NotImplementedError

    def _give_up(self, error: BaseException) -> None:
        """End every process and fail the tasks that are left with the error."""
        raise NotImplementedError

    def _flush(self, process: Process) -> None:
        process.channel.flush()
        unsent = selectors.EVENT_WRITE if process.channel.has_unsent else 0
        self._selector.modify(process.channel.socket, selectors.EVENT_READ | unsent, process)


class RunningTasks:
    """A TaskThread that runs, as its caller holds it: a context. name: of the thread, for the
    watchdog."""

    def __init__(self, tasks: TaskThread[Any], name: str):
        self.status, self._stop = tasks.status, tasks.stop
        self._thread = threading.Thread(target=tasks.run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Kill the workers and free everything; a second call does nothing."""
        self._stop()
        with watchdog.waiting_for(self._thread.name, "the end of its workers"):
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
