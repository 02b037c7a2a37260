"""Calls of an environment's methods, with a time limit: coroutines in one event loop of the
process, plain methods in threads.

The loop runs in a thread of its own. So an environment's time goes on while the engine computes,
its client stays valid from step to step, and a hanging method cannot hold up the run. Knows neither
episodes nor engines.
"""

import asyncio
import inspect
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

from tandem.runtime.errors import UserError
from tandem.runtime.processes import line_of_thread
from tandem.runtime.threads import CallThread, loop_in_thread
from tandem.runtime.user_code import describe
from tandem.types import Env

LOOP = "environments"  # name of the loop's thread
CLOSE_S = 5.0  # for an environment to release its resources
ALIVE_S = 1.0  # between looks whether the environments' loop still answers


class EnvironmentFailed(Exception):
    """An environment raised, or gave an invalid answer."""


@cache
def environment_loop() -> asyncio.AbstractEventLoop:
    """Return the loop of all environments in this process; the first call starts it."""
    return loop_in_thread(LOOP)


class LoopPulse:
    """A check that the loop answers. timeout_s: that an environment's `async` method may take; none
    may block the loop."""

    def __init__(self, timeout_s: float):
        self._limit_s = timeout_s + ALIVE_S
        self._answered, self._asked_at = threading.Event(), 0.0
        self._answered.set()

    def require(self) -> None:
        """Raise UserError if the loop has not answered for that time. Call it now and then."""
        now = time.monotonic()
        if self._answered.is_set():
            self._answered.clear()
            self._asked_at = now
            environment_loop().call_soon_threadsafe(self._answered.set)
        elif now - self._asked_at > self._limit_s:
            thread = next(thread for thread in threading.enumerate() if thread.name == LOOP)
            raise UserError(
                "an environment blocks the event loop that all environments share",
                where=line_of_thread(thread) or "the environments' loop",
                found=f"no life for {now - self._asked_at:.0f} s, longer than env.timeout_s",
                expected="`async def` methods that await what takes time",
                next="make the method a plain `def`, which runs in a thread",
            )


# of the single turn, which neither wait nor fail: most of an episode's time was their limits
_AT_ONCE = frozenset({Env.reset, Env.step, Env.close})


class Caller:
    """The caller of one environment's methods, within seconds_left in all; plain ones run in one
    thread of their own."""

    def __init__(self, seconds: float):
        self.seconds_left = seconds
        self._thread: CallThread | None = None

    async def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method and return its result. Raises EnvironmentFailed for its exceptions, and
        TimeoutError when the time is over."""
        if inspect.ismethod(method) and method.__func__ in _AT_ONCE:
            return await method(*arguments)
        clock = asyncio.get_running_loop().time
        start = clock()
        try:
            async with asyncio.timeout(self.seconds_left) as limit:
                if inspect.iscoroutinefunction(method):
                    result = await method(*arguments)
                else:
                    self._thread = self._thread or CallThread("environment")
                    result = await self._thread.run(method, *arguments)
                return await result if inspect.isawaitable(result) else result
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # it is the episode that was cancelled
                raise
            waited = "CancelledError, of something that the environment waited for"
            raise EnvironmentFailed(waited) from None
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


def make_env(make: Callable[[], Env]) -> Env:
    """Make the environment of an episode. Raises EnvironmentFailed."""
    try:
        return make()
    except (Exception, SystemExit) as error:  # a user's constructor
        raise EnvironmentFailed(describe(error)) from error


async def close_env(env: Env, caller: Caller) -> None:
    """Let an environment release its resources, for CLOSE_S at most."""
    caller.seconds_left = CLOSE_S
    with suppress(EnvironmentFailed, TimeoutError):  # the episode is over and stays what it was
        await caller.call(env.close)
    caller.close()


async def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a thread of its own and return its result, or raise its exception."""
    thread = CallThread("environment")
    try:
        return await thread.run(function, *arguments)
    finally:
        thread.end()
