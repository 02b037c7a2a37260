"""Tasksets and environments of verifiers, played against a base URL.

    harness (its agent) --> verifiers' interception, in this process
                        --> the episode's base URL --> AgentEnv

Everything of verifiers runs in the agents' loop. Servers that its episodes share (interception,
tools) live as long as episodes are under way. Knows nothing of tokens: an episode gives its reward
and its parts.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from threading import Lock
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from pydantic import ValidationError
from verifiers.v1.harnesses.null import NullHarness
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.utils.loaders import env_config_type, environment_class, resolve_env_config

from tandem.plugins.agents.env import AgentFailed
from tandem.runtime.errors import UserError
from tandem.types import Problem

Json = dict[str, Any]

# an environment variable that nobody sets: a real key must not be sent along
NO_KEY = "TANDEM_EPISODE_KEY"
CHAT = {"id": "null"}  # the harness that Chat stands in for
DEFAULT_HARNESS = "bash"  # gives the model a shell, which nobody asked for
LOCAL = "subprocess"
REMOTE = "prime"  # the runtime that verifiers takes if none is named: a rented machine


class Chat(NullHarness):  # type: ignore[misc]
    """verifiers' plain chat with tools, as coroutines of this process; the original starts a Python
    process for each episode."""

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
            options: Json = {"tools": tools} if tools else {}
            create: Any = api.chat.completions.create
            messages = self._messages(data)
            while True:
                reply = await create(model=ctx.model, messages=messages, **options)
                message = reply.choices[0].message
                if not message.tool_calls:
                    break
                messages.append(message.model_dump(exclude_none=True))
                for call in message.tool_calls:
                    name = call.function.name
                    content: Any = f"error: unknown tool {name!r}"
                    if name in names:
                        # the server makes no call of arguments that are not an object
                        given = json.loads(call.function.arguments)
                        content = await call_mcp(connections, names, name, given)
                    answer = {"role": "tool", "tool_call_id": call.id, "name": name}
                    messages.append({**answer, "content": content})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    def _messages(self, data: Any) -> list[Json]:
        system, prompt = self.resolve_prompt(data)
        if isinstance(prompt, str):
            opening = [{"role": "user", "content": prompt}]
        else:
            opening = [_wire(m) for m in prompt or ()]
        return [{"role": "system", "content": system}, *opening] if system else opening


def _wire(message: Any) -> Json:
    fields = message.model_dump(exclude_none=True).items()
    return {key: value for key, value in fields if key in ("role", "content", "tool_call_id")}


def _with_chat(cls: type[Any], names: list[str]) -> type[Any]:
    """Make a subclass of the environment in which Chat plays the agents of these names."""

    class WithChat(cls):  # type: ignore[misc]
        async def setup(self, agents: Any) -> None:
            await super().setup(agents)
            for name in names:
                agent = getattr(agents, name)
                agent.harness = Chat(agent.config.harness)

    return WithChat


class Host:
    """An environment with its configuration, for playing its tasks."""

    def __init__(self, id: str, args: Json, env: Json):
        self.id = id
        try:
            self._config, self._class = _configured(id, args, env)
            self._taskset = self._class(self._config).taskset
        # as its own commands take them
        except (ModuleNotFoundError, AttributeError, TypeError, ValueError) as error:
            refused = isinstance(error, ValidationError)
            raise UserError(
                "verifiers refuses the configuration" if refused else "no such environment",
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
        """Play one task, as an agent of the environment `agent` does."""
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
        """Return the problem's task. The taskset is read once, and only as far as needed."""
        number, hash_ = problem.metadata["task"], problem.metadata["task_hash"]
        with self._lock:
            while len(self._tasks) <= number:
                task = next(self._source, None)
                if task is None:
                    count = len(self._tasks)
                    raise AgentFailed(
                        f"{self.id} has {count} tasks, and the problem is of number {number}"
                    )
                self._tasks.append(task)
        if self._tasks[number].hash != hash_:
            raise AgentFailed(
                f"task {number} of {self.id} is another than when the data was written; "
                "write it again"
            )
        return self._tasks[number]

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Any]:
        """Yield the environment with its servers; the first episode starts them, the last ends
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
    """An environment's servers, in a task of their own: a context must be left in the task that
    entered it."""

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
    """Return the configuration and the class of the environment.

    An agent runs on this machine unless configured otherwise, and is played by Chat unless the
    user, the environment or its taskset names a harness.
    """
    kind, chatting = env_config_type(id, env.get("id", "")), []
    bundled = vf.default_agent_harness(id).id != DEFAULT_HARNESS
    defaults = {
        name: field.default
        for name, field in kind.model_fields.items()
        if isinstance(field.default, vf.AgentConfig)
    }
    agents = {name: dict(env.get(name, {})) for name in defaults}
    for name, default in defaults.items():
        agent = agents[name]
        if default.runtime.type == REMOTE:
            agent.setdefault("runtime", {"type": LOCAL})
        if default.harness is None and "harness" not in agent and not bundled:
            agent["harness"] = CHAT
            if agent.get("runtime", default.runtime.model_dump())["type"] == LOCAL:
                # in a container, the original: there this process is at another address
                chatting.append(name)
    config = resolve_env_config({**env, **agents, "taskset": {**args, "id": id}})
    return config, _with_chat(environment_class(id, env.get("id", "")), chatting)


def _verdict(episode: Any) -> Json:
    """Return the reward of the one trained agent. Raises AgentFailed, with the first error."""
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise AgentFailed(
            f"{errors[0].type}: {errors[0].message}" if errors else "the episode was not completed"
        )
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    if len(trained) != 1:
        raise AgentFailed(
            f"{len(trained)} trained agents ran in one episode, expected one; "
            "pin the others to a client"
        )
    [trace] = trained
    parts = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    parts |= {name: value for name, value in trace.metrics.items() if value is not None}
    return {"reward": trace.reward, "parts": parts}


def _row(id: str, task: Any) -> Json:
    data = task.data
    question = [_wire(m) for m in data.prompt] if isinstance(data.prompt, list) else data.prompt
    texts = [{"role": "user", "content": question}] if isinstance(question, str) else question or []
    is_text = all(isinstance(m["content"], str) for m in texts)
    is_text = is_text and bool(texts) and texts[-1]["role"] == "user"
    # for a user who speaks first in the environment, and for pictures
    opening = f"(task {data.idx} of {id})"
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
