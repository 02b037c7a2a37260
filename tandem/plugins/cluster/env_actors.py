"""Env workers on the nodes of a cluster: a NodePool whose calls are those of episodes'
environments. Does not know Ray.

    environments' thread                         the thread of EnvActors           a node
    --------------------                         -----------------------           ------
    RemoteEnv.reset, step, close  -- submit -->  to the worker that holds it  -->  EnvWorker
    waits for the future          <------------  _on_answer                   <--

    {"id", "episode": 3, "problem": {...}, "texts": []}     make it, reset: its opening chat
    {"id", "episode": 3, "problem": null, "texts": [".."]}  step
    {"id", "episode": 3, "problem": {...}, "texts": [".."]} of one that was lost: all of these
    {"id", "episode": 3, "closes": true}                    close; what it does meanwhile ends
    answers: {"messages", "tools", "stateless"}, or an Observation's fields, or {},
             or {"failed": "ValueError: ..."}, or {"late": true}

A worker holds the environments that began there, until they are closed. If it is lost, the next
call of each goes to another worker with the problem and all turns so far: an environment is a
function of these, so it comes to where it was. An episode has `timeout_s` in its worker, as on the
driver, so neither a worker's start nor its loss is counted. Environments share the event loop and
threads of envs/calls.py.
"""

import asyncio
import itertools
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from tandem.config.episodes import Env as EnvConfig
from tandem.config.episodes import Sandbox
from tandem.envs.calls import (
    ALIVE_S,
    CLOSE_S,
    Caller,
    EnvironmentFailed,
    LoopPulse,
    close_env,
    environment_loop,
    make_env,
)
from tandem.envs.load import load_env
from tandem.envs.observations import check_observation, check_opening
from tandem.plugins.cluster.node_pool import NodePool
from tandem.plugins.cluster.node_worker import CallNode
from tandem.rewards.protocol import encode_request, problem_fields, read_problem
from tandem.runtime.errors import UserError
from tandem.types import Env, Observation, Problem
from tandem.workers.calls import Call, CallWorker
from tandem.workers.channel import Message, encode
from tandem.workers.host import OpenHost

DEPTH = 32  # calls that a worker has, and still takes new episodes


class RemoteEnv(Env):
    """The environment of an episode, in a worker. call: has a worker serve a call of it."""

    def __init__(self, number: int, call: Callable[["RemoteEnv"], "Future[Message]"]):
        self.number, self._call = number, call
        self.problem: Problem | None = None
        self.texts: list[str] = []  # the model's turns
        self.closed = False
        self.holder: CallWorker | None = None  # the thread of EnvActors sets it

    async def reset(self, problem: Problem) -> Sequence[Any]:
        self.problem = problem
        answer = await self._answer()
        self.tools, self.stateless = answer["tools"], answer["stateless"]
        chat: Sequence[Any] = answer["messages"]
        return chat

    async def step(self, text: str) -> Observation:
        self.texts.append(text)
        return Observation(**await self._answer())

    async def close(self) -> None:
        self.closed = True
        with suppress(RuntimeError, UserError):  # the workers are gone
            async with asyncio.timeout(CLOSE_S + ALIVE_S):
                await self._answer()

    async def _answer(self) -> Message:
        answer = await asyncio.wrap_future(self._call(self))
        match answer:
            case {"late": True}:
                raise TimeoutError
            case {"failed": str(reason)}:
                raise EnvironmentFailed(reason)
        return answer


class RemoteCaller(Caller):
    """A caller of a RemoteEnv, whose worker takes the time and names the failures."""

    async def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        return await method(*arguments)


@dataclass(slots=True, eq=False)
class EnvCall:
    """A call of an environment, behind these turns of the model."""

    env: RemoteEnv
    texts: tuple[str, ...]
    closes: bool


class EnvActors(NodePool[EnvCall]):
    """The pool of env workers. env, sandbox: sections of the config. folder: where relative names
    are looked for. options: of NodePool."""

    role, thread = "env worker", "env calls"

    def __init__(
        self, open_host: OpenHost, *, env: Message, sandbox: Message, folder: str, **options: Any
    ):
        self._episodes = itertools.count()
        start = {"env": env, "sandbox": sandbox, "folder": folder}
        super().__init__(open_host, start=start, depth=DEPTH, **options)

    def make(self) -> RemoteEnv:
        """Make the environment of an episode, which begins with `reset`."""
        return RemoteEnv(next(self._episodes), self._ask)

    def _ask(self, env: RemoteEnv) -> Future[Message]:
        asked = EnvCall(env, tuple(env.texts), env.closed)
        # the worker of an episode that has begun has it already
        return self.submit_call(asked, first=bool(env.texts) or env.closed)

    def _is_over(self, call: Call[EnvCall]) -> bool:
        env = call.asked.env
        over = env.closed and (env.holder is None or not call.asked.closes)
        if over:
            call.future.set_result(OVER)
        return over

    def _choose(self, call: Call[EnvCall]) -> CallWorker | None:
        return call.asked.env.holder or super()._choose(call)

    def _give(self, worker: CallWorker, call: Call[EnvCall]) -> None:
        super()._give(worker, call)
        call.asked.env.holder = worker
        worker.held.add(call.asked.env)

    def _encode(self, worker: CallWorker, call: Call[EnvCall]) -> bytes:
        env, texts, is_new = call.asked.env, call.asked.texts, call.asked.env.holder is None
        assert env.problem is not None  # reset comes first
        problem = problem_fields(env.problem) if is_new else None
        texts = texts if is_new and not env.stateless else texts[-1:]
        fields = {"episode": env.number, "problem": problem, "texts": texts}
        return encode_request({"id": call.index, **fields, "closes": call.asked.closes})

    def _result(self, message: Message) -> Message:
        return {name: value for name, value in message.items() if name != "id"}

    def _on_answer(self, worker: CallWorker, call: Call[EnvCall], message: Message) -> None:
        if call.asked.closes:
            worker.held.discard(call.asked.env)
            call.asked.env.holder = None
        super()._on_answer(worker, call, message)

    def _end(self, worker: CallWorker) -> None:
        super()._end(worker)
        for env in worker.held:
            env.holder = None

    def _fail(self, worker: CallWorker | None, call: Call[EnvCall], kind: str, error: str) -> None:
        call.future.set_result({"failed": error})


# ---------------------------------------------------------------- on a node


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
            if (under_way := self._calls.get(episode)) is not None:
                under_way.cancel()
                await asyncio.wait([under_way])
            if episode in self._open:
                await close_env(*self._open.pop(episode))
            return {}
        self._calls[episode] = asyncio.current_task()
        try:
            return _sendable(await self._play(episode, call["problem"], call["texts"]))
        except TimeoutError:
            return {"late": True}
        except EnvironmentFailed as failure:
            return {"failed": str(failure)}
        except asyncio.CancelledError:  # it is to be closed
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
            observation = check_observation(await caller.call(env.step, text))
            answer = {  # numpy's numbers are no JSON
                "messages": list(observation.messages),
                "done": bool(observation.done),
                "reward": float(observation.reward),
                "parts": {name: float(value) for name, value in observation.parts.items()},
                "penalty": float(observation.penalty),
            }
        return answer


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
