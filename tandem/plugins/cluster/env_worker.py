"""An env worker on a node of a cluster: the environments of episodes, whose calls come from the
driver (env_actors.py).

    {"id", "episode": 3, "problem": {...}, "texts": []}     make it, reset: its opening chat
    {"id", "episode": 3, "problem": null, "texts": [".."]}  step
    {"id", "episode": 3, "problem": {...}, "texts": [".."]} of one that was lost: all of these
    {"id", "episode": 3, "closes": true}                    close; what it does meanwhile ends
    answers: {"messages", "tools", "stateless"}, or an Observation's fields, or {},
             or {"failed": "ValueError: ..."}, or {"late": true}

An episode has `timeout_s` here, as on the driver, so neither a worker's start nor its loss is
counted. Environments share the event loop and threads of envs/calls.py. Does not know Ray.
"""

import asyncio
import sys
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any

from tandem.config.episodes import Env as EnvConfig
from tandem.config.episodes import Sandbox
from tandem.envs.calls import (
    Caller,
    EnvironmentFailed,
    LoopPulse,
    close_env,
    environment_loop,
    make_env,
)
from tandem.envs.load import load_env
from tandem.envs.observations import check_observation, check_opening
from tandem.plugins.cluster.node_worker import CallNode
from tandem.rewards.protocol import read_problem
from tandem.types import Env, Observation
from tandem.workers.channel import Message, encode

OVER = {"failed": "the episode is over"}


class Environments(nullcontext[None]):
    """The Service of an env worker. Its state is the loop's thread's."""

    def __init__(self, start: Message):
        super().__init__()
        sys.path.append(start["folder"])  # for `module:Class`
        limits = EnvConfig(**start["env"])
        self._make = load_env(limits, Sandbox(**start["sandbox"]))
        self._timeout_s, self._pulse = limits.timeout_s, LoopPulse(limits.timeout_s)
        self._open: dict[int, tuple[Env, Caller]] = {}  # by episode
        self._calls: dict[int, asyncio.Task[Any] | None] = {}  # under way

    def submit(self, call: Message) -> Future[Message]:
        return asyncio.run_coroutine_threadsafe(self._serve_call(call), environment_loop())

    def answer(self, result: Message) -> Message:
        return result

    def check(self) -> None:
        self._pulse.require()

    async def _serve_call(self, call: Message) -> Message:
        episode = call["episode"]
        if call["closes"]:
            await self._close(episode)
            return {}
        self._calls[episode] = asyncio.current_task()
        try:
            return _sendable(await self._play(episode, call["problem"], call["texts"]))
        except TimeoutError:
            return {"late": True}
        except EnvironmentFailed as failure:
            return {"failed": str(failure)}
        except asyncio.CancelledError:  # by _close
            return OVER
        finally:
            del self._calls[episode]

    async def _play(self, episode: int, problem: Message | None, texts: list[str]) -> Message:
        """Bring an episode behind these turns of the model; return the last answer."""
        answer: Message = {}
        if problem is not None:
            caller = Caller(self._timeout_s)
            env = make_env(self._make)
            self._open[episode] = env, caller
            chat = await caller.call(env.reset, read_problem(problem))
            check_opening(chat)
            tools, stateless = list(env.tools), bool(env.stateless)
            answer = {"messages": list(chat), "tools": tools, "stateless": stateless}
        env, caller = self._open[episode]
        for text in texts:
            answer = _fields(check_observation(await caller.call(env.step, text)))
        return answer

    async def _close(self, episode: int) -> None:
        if (call := self._calls.get(episode)) is not None:
            call.cancel()
            await asyncio.wait([call])
        if episode in self._open:
            await close_env(*self._open.pop(episode))


def _fields(observation: Observation) -> Message:
    """Return the fields of an observation, its numbers as floats: numpy's are no JSON."""
    return {
        "messages": list(observation.messages),
        "done": bool(observation.done),
        "reward": float(observation.reward),
        "parts": {name: float(value) for name, value in observation.parts.items()},
        "penalty": float(observation.penalty),
    }


def _sendable(answer: Message) -> Message:
    """Return an answer that is JSON. Raises EnvironmentFailed."""
    try:
        encode(answer)
    except (TypeError, ValueError) as error:
        raise EnvironmentFailed(f"it cannot be sent as JSON: {error}") from None
    return answer


class EnvWorker(CallNode):
    """A node's worker of environments."""

    role, service = "env worker", Environments
