"""The environment `verifiers`: an installed environment of Prime Intellect's hub plays the episode,
unchanged.

    env = {name = "verifiers", options = {id = "my-env", args = {num_tasks = 100}}}
    reward.function = "env"

Its agent speaks to the same server as the environment `agent` does, and its own rewards are the
reward. The problem is one of its tasks, by the columns that `rows` writes. host.py, which imports
verifiers, is imported when an environment is made. Knows neither the tasks nor their scoring.
"""

import importlib.util
import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from tandem.plugins.agents.env import AgentDrivenEnv
from tandem.runtime.errors import UserError, not_installed
from tandem.types import Problem

if TYPE_CHECKING:
    from tandem.plugins.agents.verifiers_host import Host

Options = Mapping[str, Any]


class VerifiersEnv(AgentDrivenEnv):
    """One episode of a task. Parts: the environment's rewards, weighted, and its metrics."""

    def __init__(self, id: str, *, args: Options | None = None, env: Options | None = None):
        """Take the options.

        id: the installed package, as `vf-eval` takes it, e.g. `my-env` or `owner/my-env`.
        args: the configuration of its taskset.
        env: further configuration, as the [env] block of verifiers: {agent = {harness = {id =
            "bash"}}}. A taskset without a harness is played by a plain chat with its tools, in this
            process.
        """
        super().__init__(host_of(id, args, env).play)

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
    id: str, *, args: Options | None = None, env: Options | None = None, limit: int | None = None
) -> Iterator[dict[str, Any]]:
    """Return the first `limit` tasks as rows of a data file: uid, prompt, answer, task and
    task_hash.

    The prompt is for a reader: the environment itself asks the model.
    """
    yield from host_of(id, args, env).rows(limit)


def host_of(id: str, args: Options | None = None, env: Options | None = None) -> "Host":
    """Return the host of this environment in this process. Raises UserError."""
    if importlib.util.find_spec("verifiers") is None:
        raise not_installed("verifiers", "verifiers", where="env.name = verifiers")
    return _host(id, json.dumps(args or {}, sort_keys=True), json.dumps(env or {}, sort_keys=True))


@cache
def _host(id: str, args: str, env: str) -> "Host":
    from tandem.plugins.agents.verifiers_host import Host

    return Host(id, json.loads(args), json.loads(env))
