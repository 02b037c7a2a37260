"""TaskThread: what the threads of all reward pools share, whoever scores for them (scheduler.py; on
a cluster cluster/reward_actors.py). Tasks come from any thread, a pipe wakes this one, and however
it ends, no future is left waiting.
"""

import selectors
import threading
from collections import deque
from typing import Any, Protocol

from tandem.rewards.pool.processes import ScoringTask
from tandem.runtime.worker_channel import Channel, Waker


class Process(Protocol):
    """A process with a channel to it."""

    @property
    def channel(self) -> Channel: ...


class TaskThread:
    """The thread of a pool; a subclass has `_step` and `_give_up`."""

    def __init__(self) -> None:
        self._todo: deque[ScoringTask] = deque()  # no worker has them
        self._lock = threading.Lock()  # of _closing
        self._closing = False
        self._broken: BaseException | None = None  # what has ended the thread
        self._waker, self._selector = Waker(), selectors.DefaultSelector()
        self._selector.register(self._waker, selectors.EVENT_READ)
        # has the thread look at its tasks and deadlines now
        self.wake = self._waker.wake

    def add(self, task: ScoringTask) -> None:
        """Take a task. Raises RuntimeError if the thread has ended, or soon will."""
        with self._lock:
            if self._closing:
                raise RuntimeError("the reward pool is closed") from self._broken
            self._todo.append(task)
            self.wake()

    def stop(self) -> None:
        """Have run return; tasks not scored by then fail."""
        with self._lock:
            self._closing = True
        self.wake()

    def status(self) -> list[dict[str, Any]]:
        """Describe the workers on other nodes, for `tandem status`."""
        return []

    def run(self) -> None:
        """Serve until stop is called. However it ends, no future is left waiting."""
        error: BaseException = RuntimeError("the reward pool is closed")
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
        """End every process and fail the unscored tasks with the error."""
        raise NotImplementedError

    def _flush(self, process: Process) -> None:
        process.channel.flush()
        unsent = selectors.EVENT_WRITE if process.channel.has_unsent else 0
        self._selector.modify(process.channel.socket, selectors.EVENT_READ | unsent, process)
