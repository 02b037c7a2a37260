"""The environment `agent`: any program that speaks OpenAI's or Anthropic's API plays the episode,
and gives its reward.

    tandem train RECIPE env.name=agent 'env.options={run = "my_agent.py:run"}' reward.function=env

    def run(problem, base_url, api_key) -> float | dict | None: ...       # or `async def`

The agent asks under BASE_URL as often as it likes (server.py). `reset` returns its first request;
`step` answers it with the model's turn, and returns the next request, which must continue the
conversation, as the observation. Only the new messages are tokenized. The episode is over when
`run` returns. Its reward is the value that `run` returned or, if that is None, the one last posted
to BASE_URL/reward. Knows neither tokens nor agents.
"""

import asyncio
import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache
from typing import Any

from tandem.envs.calls import in_thread
from tandem.plugins.agents.chat import (
    ConversationBroken,
    Reply,
    continuation,
    last_observation,
    opening,
)
from tandem.plugins.agents.server import Pending, Session, the_server
from tandem.runtime.errors import UserError
from tandem.runtime.threads import loop_in_thread
from tandem.runtime.user_code import load_user_object
from tandem.types import Env, Message, Observation, Problem, Tool

API_KEY = "episode"  # OpenAI's clients insist on one; the secret is in the URL

# (problem, base URL, API key) -> reward; may be `async def`
Run = Callable[[Problem, str, str], Any]


class AgentFailed(Exception):
    """The agent raised, ended without a request, or returned something other than a reward."""


class AgentDrivenEnv(Env):
    """An episode that a program drives from outside, through the server: an `async def` in a loop
    that all agents share, a plain function in a thread of its own.

    The agents' loop is not the environments' loop: an agent that blocks would stop the clock that
    ends its episode.
    """

    tools: tuple[Tool, ...] = ()

    def __init__(self, run: Run):
        self._run_agent = run
        self._turn = 0
        self._session: Session | None = None  # from reset to close

    async def reset(self, problem: Problem) -> Sequence[Message]:
        session = self._session = the_server().open()
        put, loop = session.events.put_nowait, asyncio.get_running_loop()
        playing = asyncio.run_coroutine_threadsafe(self._play(problem, session), agents_loop())
        playing.add_done_callback(lambda ended: loop.call_soon_threadsafe(put, ended))
        event = await session.events.get()
        if isinstance(event, Future):
            event.result()
            raise AgentFailed("the agent ended without asking for a completion")
        self._pending, self.tools = event, tuple(event.request.tools)
        return opening(event.request)

    async def step(self, text: str) -> Observation:
        assert self._session is not None, "reset comes first"
        self._turn += 1
        request = self._pending.request
        # the tools of the first request stand in the prompt; later requests may leave them out
        before = request.model_copy(update={"tools": list(self.tools)})
        reply = Reply.to(before, text, self._turn)
        self._pending.answer.set_result(reply)
        while isinstance(event := await self._session.events.get(), Pending):
            if not (event.is_retry and event.request == request):
                break
            event.answer.set_result(reply)  # the agent lost the last answer, and asks again
        if isinstance(event, Future):
            returned = event.result()
            if returned is not None:
                return last_observation(returned)
            return self._session.posted or Observation(done=True)
        self._pending = event
        try:
            return Observation(messages=continuation(before, reply, event.request))
        except ConversationBroken as broken:
            self._session.close(str(broken))  # the agent gets the error too
            raise

    async def close(self) -> None:
        if self._session is not None:
            the_server().close(self._session, "the episode is over")
            self._session = None
            stopped = asyncio.run_coroutine_threadsafe(self._stop_agent(), agents_loop())
            await asyncio.wrap_future(stopped)

    async def _play(self, problem: Problem, session: Session) -> Any:
        """Run the agent, in the agents' loop. Raises AgentFailed."""
        self._agent = asyncio.current_task()
        try:
            if inspect.iscoroutinefunction(self._run_agent):
                return await self._run_agent(problem, session.base_url, API_KEY)
            return await in_thread(self._run_agent, problem, session.base_url, API_KEY)
        # a failure costs one episode, and never the loop
        except (Exception, SystemExit) as error:
            raise AgentFailed(f"{type(error).__name__}: {error}") from error

    async def _stop_agent(self) -> None:
        """Cancel an `async def` and wait for it, in the agents' loop, so `_play` has begun. A
        thread ends only at its next request, which is refused."""
        assert self._agent is not None
        self._agent.cancel()
        await asyncio.wait([self._agent])


class AgentEnv(AgentDrivenEnv):
    """The built-in environment `agent`."""

    def __init__(self, run: str):
        """Take the agent `run`, a function of (problem, base_url, api_key), as `file.py:function`
        or `module:function`."""
        function = load_user_object(run, key="env.options.run")
        if not callable(function):
            found = f"{run} = {function!r}"
            raise UserError("the agent is no function", where="env.options.run", found=found)
        super().__init__(function)


@cache
def agents_loop() -> asyncio.AbstractEventLoop:
    """Return the loop of all agents, in a daemon thread from its first use to the process's end."""
    return loop_in_thread("agents")
