"""How an environment's methods are called: in one event loop of the process, plain ones in threads,
with a clock.

The loop runs in a thread of its own, so an environment's time goes on while the engine computes, a
client that an environment keeps stays valid from step to step, and nothing that hangs in there can
hold up the run. It knows neither episodes nor engines.
"""

import asyncio
import inspect
import queue
import sys
import sysconfig
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import cache
from types import FrameType
from typing import Any

ERROR_CHARS = 500
LOOP = "environments"  # name of the loop's thread


class EnvironmentFailed(Exception):
    """An environment raised, or answered what is no answer."""


@cache
def environment_loop() -> asyncio.AbstractEventLoop:
    """The loop in which all environments of this process live; it is started when it is first asked
    for."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=LOOP, daemon=True).start()
    return loop


def where_it_is() -> str:
    """The innermost line of Python, not of the standard library, at which the loop's thread is
    now."""
    thread = next(thread for thread in threading.enumerate() if thread.name == LOOP)
    frame: FrameType | None = sys._current_frames()[thread.ident or 0]
    while frame is not None:
        if not frame.f_code.co_filename.startswith(sysconfig.get_path("stdlib")):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}, {frame.f_code.co_name}"
        frame = frame.f_back
    return "the environments' loop"


class Caller:
    """Calls the methods of one environment, which may take seconds_left in all. Plain methods run
    in one thread, theirs."""

    def __init__(self, seconds: float):
        self.seconds_left = seconds
        self._thread: _Thread | None = None

    async def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """What the method returns. Raises EnvironmentFailed for what it raises, and TimeoutError
        when the time is over."""
        clock = asyncio.get_running_loop().time
        start = clock()
        try:
            async with asyncio.timeout(self.seconds_left) as limit:
                result = await (
                    method(*arguments)
                    if inspect.iscoroutinefunction(method)
                    else self._plain(method, *arguments)
                )
                return await result if inspect.isawaitable(result) else result
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # it is the episode that was cancelled
                raise
            raise EnvironmentFailed(
                "CancelledError, of something that the environment waited for"
            ) from None
        except (Exception, SystemExit) as error:  # recovery is the feature: it costs one episode
            if isinstance(error, TimeoutError) and limit.expired():
                raise
            raise EnvironmentFailed(describe(error)) from error
        finally:
            self.seconds_left -= clock() - start

    def close(self) -> None:
        """Let the thread end, if it is not stuck."""
        if self._thread is not None:
            self._thread.end()

    def _plain(self, method: Callable[..., Any], *arguments: Any) -> Awaitable[Any]:
        self._thread = self._thread or _Thread()
        return self._thread.run(method, *arguments)


def describe(error: BaseException) -> str:
    """Its type and text, such as can be written down."""
    return f"{type(error).__name__}: {error}"[:ERROR_CHARS].encode(errors="replace").decode()


async def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """What the function returns or raises, from a thread of its own; StopIteration comes as
    EnvironmentFailed."""
    thread = _Thread()
    try:
        return await thread.run(function, *arguments)
    finally:
        thread.end()


class _Thread:
    """A daemon thread that does one thing after the other. One that never returns holds up nobody
    but who waits for it."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="environment", daemon=True).start()

    def run(self, function: Callable[..., Any], *arguments: Any) -> Awaitable[Any]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def work() -> None:
            try:
                settle, value = future.set_result, function(*arguments)
            except (Exception, SystemExit) as error:
                stop = isinstance(error, StopIteration)  # a future cannot hold it
                settle, value = (
                    future.set_exception,
                    EnvironmentFailed("StopIteration") if stop else error,
                )
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(lambda: None if future.done() else settle(value))

        self._work.put(work)
        return future

    def end(self) -> None:
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
