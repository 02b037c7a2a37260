"""The environment `verifiers`: an installed environment of Prime Intellect's hub plays the episode,
unchanged.

    env = {name = "verifiers", options = {id = "my-env", args = {num_tasks = 100}}}
    reward.function = "env"

Its agent speaks to the same server as the environment `agent` does, and its own rewards are the
reward. The problem is one of its tasks, by the columns that `rows` writes. verifiers has two
generations with little in common; the installed one is imported when an environment is made. Knows
neither the tasks nor their scoring.
"""

import importlib.util
import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Protocol

from tandem.envs.agent.env import AgentDrivenEnv
from tandem.runtime.errors import UserError
from tandem.types import Problem


class Host(Protocol):
    """An environment with its configuration."""

    async def play(self, problem: Problem, base_url: str, api_key: str) -> dict[str, Any]: ...

    def rows(self, limit: int | None) -> Iterator[dict[str, Any]]: ...


class VerifiersEnv(AgentDrivenEnv):
    """One episode of a task. Parts: the environment's rewards, weighted, and its metrics."""

    def __init__(
        self,
        id: str,
        *,
        args: Mapping[str, Any] | None = None,
        env: Mapping[str, Any] | None = None,
    ):
        """Take the options.

        id: the installed package, as `vf-eval` takes it, e.g. `my-env` or `owner/my-env`.
        args: the configuration of its taskset.
        env: further configuration, as the [env] block of verifiers: {agent = {harness = {id =
            "bash"}}}. A taskset without a harness is played by a plain chat with its tools, in this
            process.
        """
        host = _host(id, args or {}, env or {})
        super().__init__(host.play)

    async def reset(self, problem: Problem) -> Any:
        if not {"task", "task_hash"} <= problem.metadata.keys():
            raise UserError(
                "a problem names no task of the environment",
                where=f"problem {problem.uid!r}",
                found=", ".join(problem.metadata) or "no columns",
                expected="the columns task and task_hash",
                next="write the data with `tandem generate verifiers:ENVIRONMENT`",
            )
        return await super().reset(problem)


def rows(
    id: str,
    *,
    args: Mapping[str, Any] | None = None,
    env: Mapping[str, Any] | None = None,
    limit: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Return the first `limit` tasks as rows of a data file: uid, prompt, answer, task and
    task_hash.

    The prompt is for a reader: the environment itself asks the model.
    """
    yield from _host(id, args or {}, env or {}).rows(limit)


def _host(id: str, args: Mapping[str, Any], env: Mapping[str, Any]) -> Host:
    """Return the host of this id in this process. Raises UserError."""
    if importlib.util.find_spec("verifiers") is None:
        raise UserError(
            "verifiers is not installed",
            where="env.name = verifiers",
            next="pip install 'tandem-rl[verifiers]'",
        )
    return _cached(id, json.dumps(args, sort_keys=True), json.dumps(env, sort_keys=True))


@cache
def _cached(id: str, args: str, env: str) -> Host:
    from tandem.plugins.verifiers.api import CLASSIC

    if CLASSIC:
        from tandem.plugins.verifiers.classic import ClassicHost

        return ClassicHost(id, json.loads(args), json.loads(env))
    from tandem.plugins.verifiers.v1 import V1Host

    return V1Host(id, json.loads(args), json.loads(env))


def missing_task(number: int, id: str, count: int) -> str:
    return f"{id} has {count} tasks, and the problem is of number {number}"


def changed_task(number: int, id: str) -> str:
    return f"task {number} of {id} is another than when the data was written; write it again"
