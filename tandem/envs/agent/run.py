"""One run of a user's agent, beside the rollout: an `async def` in a loop that all agents share, a
plain function in a thread of its own.

The agents' loop is not the environments' loop: an agent that blocks would stop the clock that ends
its episode. Does not know requests or rewards.
"""

import asyncio
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from typing import Any

from tandem.types import Problem

# (problem, base URL, API key) -> reward; may be `async def`
Run = Callable[[Problem, str, str], Any]


class AgentFailed(Exception):
    """The agent raised, ended without a request, or returned something other than a reward."""


class AgentRun:
    """A running agent. ended: the function's result or AgentFailed, set in the agent's thread."""

    def __init__(self, run: Run, problem: Problem, base_url: str, api_key: str):
        self.ended: Future[Any] = Future()
        self._start = lambda: run(problem, base_url, api_key)
        self._task: asyncio.Task[None] | None = None
        self._is_async = inspect.iscoroutinefunction(run)
        if self._is_async:
            agents_loop().call_soon_threadsafe(self._start_task)
        else:
            threading.Thread(target=self._run_in_thread, name="agent", daemon=True).start()

    async def stop(self) -> None:
        """Cancel an `async def` and wait for it. A thread ends only at its next request, which is
        refused."""
        if self._is_async:
            agents_loop().call_soon_threadsafe(self._cancel)
            with suppress(AgentFailed):
                await asyncio.wrap_future(self.ended)

    def _start_task(self) -> None:
        self._task = asyncio.create_task(self._play())
        self._task.add_done_callback(self._on_done)

    def _cancel(self) -> None:
        if self._task is not None:  # started before: calls into a loop keep their order
            self._task.cancel()

    async def _play(self) -> Any:
        try:
            return await self._start()
        # a failure costs one episode, and never the loop
        except (Exception, SystemExit) as error:
            raise _failed(error) from error

    def _on_done(self, task: "asyncio.Task[Any]") -> None:
        error = AgentFailed("the agent was cancelled") if task.cancelled() else task.exception()
        if error is None:
            self.ended.set_result(task.result())
        else:
            self.ended.set_exception(error)

    def _run_in_thread(self) -> None:
        try:
            result = self._start()
        except (Exception, SystemExit) as error:  # as in _play
            self.ended.set_exception(_failed(error))
        else:
            self.ended.set_result(result)


def _failed(error: BaseException) -> AgentFailed:
    return AgentFailed(f"{type(error).__name__}: {error}")


@cache
def agents_loop() -> asyncio.AbstractEventLoop:
    """Return the loop of all agents, in a daemon thread from its first use to the process's end."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="agents", daemon=True).start()
    return loop
