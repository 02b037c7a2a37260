"""Tasksets and environments of verifiers since 0.3, played against a base URL.

    harness (its agent) --> verifiers' interception, in this process --> the episode's base URL --> AgentEnv

Everything of verifiers runs in the agents' loop. Servers that its episodes share (interception,
tools) are there as long as episodes are under way. Knows nothing of tokens; of an episode it
returns the reward and its parts.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from threading import Lock
from typing import Any

from openai import AsyncOpenAI
from pydantic import ValidationError

from tandem.envs.agent.run import AgentFailed
from tandem.envs.verifiers.api import (
    NO_KEY,
    NullHarness,
    call_mcp,
    connect_mcp,
    env_config_type,
    environment_class,
    resolve_env_config,
    vf,
)
from tandem.runtime.errors import UserError
from tandem.types import Problem

Json = dict[str, Any]

CHAT = {"id": "null"}  # the harness that Chat stands in for
DEFAULT_HARNESS = "bash"  # gives the model a shell: nobody asked for that
LOCAL = "subprocess"
REMOTE = "prime"  # the runtime that verifiers takes if none is named: a rented machine


class Chat(NullHarness):  # type: ignore[misc]
    """verifiers' plain chat with tools as coroutines of this process: the original starts a Python
    for each episode."""

    SUPPORTS_TOOL_INTERCEPTION = False

    async def setup(self, runtime: Any) -> None:
        pass

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> Any:
        servers = {
            name: {"url": url, "timeout": self.config.tool_timeout}
            for name, url in mcp_urls.items()
        }
        async with AsyncExitStack() as stack:
            api = await stack.enter_async_context(
                AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=None)
            )
            tools, names, connections = await connect_mcp({"mcpServers": servers}, stack)
            given = {"tools": tools} if tools else {}
            messages = self._messages(data)
            while calls := await _turn(api, ctx.model, messages, given):
                messages += [await _result(call, names, connections) for call in calls]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    def _messages(self, data: Any) -> list[Json]:
        system, prompt = self.resolve_prompt(data)
        opening = (
            [{"role": "user", "content": prompt}]
            if isinstance(prompt, str)
            else [_wire(m) for m in prompt or ()]
        )
        return [{"role": "system", "content": system}, *opening] if system else opening


async def _turn(api: AsyncOpenAI, model: str, messages: list[Json], given: Json) -> list[Any]:
    """One turn of the model, appended to messages; returns its tool calls."""
    reply = await api.chat.completions.create(model=model, messages=messages, **given)  # type: ignore[arg-type]
    message = reply.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    return list(message.tool_calls or ())


async def _result(call: Any, names: dict[str, Any], connections: dict[str, Any]) -> Json:
    answer = {"role": "tool", "tool_call_id": call.id, "name": call.function.name}
    if call.function.name not in names:
        return {**answer, "content": f"error: unknown tool {call.function.name!r}"}
    # a call whose arguments are no object was never made one
    arguments = json.loads(call.function.arguments)
    return {**answer, "content": await call_mcp(connections, names, call.function.name, arguments)}


def _wire(message: Any) -> Json:
    return {
        k: v
        for k, v in message.model_dump(exclude_none=True).items()
        if k in ("role", "content", "tool_call_id")
    }


def _chatting(cls: type[Any], seats: list[str]) -> type[Any]:
    """The environment, in which these seats are played by Chat."""

    class Chatting(cls):  # type: ignore[misc]
        async def setup(self, agents: Any) -> None:
            await super().setup(agents)
            for new_groups in seats:
                agent = getattr(agents, new_groups)
                agent.harness = Chat(agent.config.harness)

    return Chatting


class V1Host:
    """An environment with its configuration; plays its tasks."""

    def __init__(self, id: str, args: Json, env: Json):
        self.id = id
        try:
            self._config, self._class = _configured(id, args, env)
            self._taskset = self._class(self._config).taskset
        # as its own commands take them
        except (ModuleNotFoundError, AttributeError, TypeError, ValueError) as error:
            what = (
                "verifiers refuses the configuration"
                if isinstance(error, ValidationError)
                else "no such environment"
            )
            raise UserError(
                what,
                where=f"env.options.id = {id}",
                found=str(error),
                expected="an installed package that exports a Taskset, and the args that it takes",
                next=f"vf-eval {id} -n 1",
            ) from error
        self._tasks: list[Any] = []
        self._source: Iterator[Any] = iter(self._taskset)
        self._lock = Lock()
        self._serving: _Serving | None = None
        self._users = 0

    async def play(self, problem: Problem, base_url: str, api_key: str) -> Json:
        """An agent, as the environment `agent` has it."""
        task = await asyncio.to_thread(self._task_of, problem)
        context = vf.ModelContext(
            model="policy",
            client=vf.EvalClientConfig(base_url=base_url, api_key_var=NO_KEY),
            sampling=vf.SamplingConfig(),
        )
        async with self._open() as env:
            episode = await env.run_episode(task, context)
        return _verdict(episode)

    def rows(self, limit: int | None) -> Iterator[Json]:
        if limit is None and not self._taskset.bounded:
            raise UserError(
                "the environment's tasks never end", where=self.id, next="say how many are wanted"
            )
        for task in itertools.islice(iter(self._taskset), limit):
            yield _row(self.id, task)

    def _task_of(self, problem: Problem) -> Any:
        """The task that the problem was made of; a taskset is read as far as it is needed, once."""
        number, hash_ = problem.metadata["task"], problem.metadata["task_hash"]
        with self._lock:
            while len(self._tasks) <= number:
                task = next(self._source, None)
                if task is None:
                    raise AgentFailed(
                        f"{self.id} has {len(self._tasks)} tasks, and the problem is of number {number}"
                    )
                self._tasks.append(task)
        if self._tasks[number].hash != hash_:
            raise AgentFailed(
                f"task {number} of {self.id} is another than when the data was written; write it again"
            )
        return self._tasks[number]

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Any]:
        """The environment with its servers; the first episode starts them and the last one ends
        them."""
        self._users += 1
        if self._serving is None:
            self._serving = _Serving(self._class(self._config))
        serving = self._serving
        try:
            await asyncio.shield(serving.ready)
            yield serving.env
        finally:
            self._users -= 1
            if not self._users:
                self._serving = None
                await serving.end()


class _Serving:
    """An environment's servers, held by a task of their own: what is entered in one task must be
    left there."""

    def __init__(self, env: Any):
        self.env = env
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._idle = asyncio.Event()
        self._task = asyncio.create_task(self._hold())

    async def end(self) -> None:
        self._idle.set()
        await asyncio.shield(self._task)

    async def _hold(self) -> None:
        try:
            async with self.env.serving():
                self.ready.set_result(None)
                await self._idle.wait()
        # a server that does not start costs the episodes that wait for it
        except Exception as error:
            if self.ready.done():
                raise
            self.ready.set_exception(error)


def _configured(id: str, args: Json, env: Json) -> tuple[Any, type[Any]]:
    """The configuration and the class of the environment. A seat runs on this machine unless told
    otherwise, and is played by Chat where neither the user nor the environment nor its taskset
    names a harness."""
    kind, chatting = env_config_type(id, env.get("id", "")), []
    bundled = vf.default_agent_harness(id).id != DEFAULT_HARNESS
    seats = {
        name: field.default
        for name, field in kind.model_fields.items()
        if isinstance(field.default, vf.AgentConfig)
    }
    given = {name: dict(env.get(name, {})) for name in seats}
    for name, new_groups in seats.items():
        if new_groups.runtime.type == REMOTE:
            given[name].setdefault("runtime", {"type": LOCAL})
        if new_groups.harness is None and "harness" not in given[name] and not bundled:
            given[name]["harness"] = CHAT
            if given[name].get("runtime", new_groups.runtime.model_dump())["type"] == LOCAL:
                # in a container, the original: there this process is at another address
                chatting.append(name)
    cls = environment_class(id, env.get("id", ""))
    return resolve_env_config({**env, **given, "taskset": {**args, "id": id}}), _chatting(
        cls, chatting
    )


def _verdict(episode: Any) -> Json:
    """The reward of the one seat that is trained. Raises AgentFailed, with the first error."""
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise AgentFailed(
            f"{errors[0].type}: {errors[0].message}" if errors else "the episode was not completed"
        )
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    if len(trained) != 1:
        raise AgentFailed(
            f"{len(trained)} trained agents ran in one episode, expected one; pin the others to a client"
        )
    [trace] = trained
    parts = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    parts |= {name: value for name, value in trace.metrics.items() if value is not None}
    return {"reward": trace.reward, "parts": parts}


def _row(id: str, task: Any) -> Json:
    data = task.data
    asked = [_wire(m) for m in data.prompt] if isinstance(data.prompt, list) else data.prompt
    # of a user who speaks first in the environment, and of pictures
    opening = f"(task {data.idx} of {id})"
    texts = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked or []
    is_text = (
        all(isinstance(m["content"], str) for m in texts)
        and bool(texts)
        and texts[-1]["role"] == "user"
    )
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    prompt = [*system, *(texts if is_text else [{"role": "user", "content": opening}])]
    answer = data.model_dump().get("answer")
    return {
        "uid": f"{id}/{data.idx}",
        "prompt": prompt,
        "answer": answer if isinstance(answer, str) else "",
        "task": data.idx,
        "task_hash": task.hash,
    }
