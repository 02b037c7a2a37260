"""Daemon threads beside an event loop: for calls that block, and for a loop of its own."""

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def loop_in_thread(name: str) -> asyncio.AbstractEventLoop:
    """Return a new event loop that runs in a thread of that name to the process's end."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=name, daemon=True).start()
    return loop


class CallThread:
    """A thread for one call after the other, in order. A call that never returns holds up its own
    caller only."""

    def __init__(self, name: str):
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def run(self, function: Callable[..., Any], *arguments: Any) -> "asyncio.Future[Any]":
        """Call the function after those before; the future has its result, or its exception."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def work() -> None:
            try:
                settle, value = future.set_result, function(*arguments)
            except StopIteration:  # a future cannot hold it
                settle, value = future.set_exception, RuntimeError("StopIteration")
            except (Exception, SystemExit) as error:
                settle, value = future.set_exception, error
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(lambda: None if future.done() else settle(value))

        self._work.put(work)
        return future

    def end(self, wait_s: float = 0.0) -> bool:
        """End the thread after the calls before, unless it is stuck; tell whether it has ended."""
        self._work.put(None)
        if wait_s:
            self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
