"""Environments of verifiers up to 0.2, `load_environment(**args)`, played against a base URL.

Their dataset's rows are the tasks, their rubric gives the reward. Knows nothing of tokens.
"""

import hashlib
import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

from tandem.envs.agent.run import AgentFailed
from tandem.plugins.verifiers.api import NO_KEY, ClientConfig, load_environment, resolve_client
from tandem.plugins.verifiers.env import changed_task, missing_task
from tandem.runtime.errors import UserError
from tandem.types import Problem

Json = dict[str, Any]


class ClassicHost:
    """An environment with its arguments, for playing the rows of its dataset."""

    def __init__(self, id: str, args: Json, env: Json):
        if env:
            raise UserError(
                "an environment of this version of verifiers has only args",
                where="env.options.env",
                found=", ".join(env),
                next="leave it out, or pip install -U verifiers",
            )
        self.id = id
        try:
            self._env = load_environment(id, **args)
            self._rows = self._env.get_dataset()
        # load_environment raises these for anything
        except (ValueError, RuntimeError) as error:
            raise UserError(
                "verifiers cannot load the environment",
                where=f"env.options.id = {id}",
                found=str(error),
                expected="an installed package, and the args that it takes",
                next=f"vf-eval {id} -n 1",
            ) from error

    async def play(self, problem: Problem, base_url: str, api_key: str) -> Json:
        """Play one row, as an agent of the environment `agent` does."""
        row = self._row_of(problem)
        client = resolve_client(
            ClientConfig(api_base_url=base_url, api_key_var=NO_KEY, max_retries=0)
        )
        try:
            output = await self._env.run_rollout(row, client, "policy", {})
        finally:
            await client.close()
        if output["error"]:
            raise AgentFailed(str(output["error"]))
        return {"reward": output["reward"], "parts": dict(output["metrics"])}

    def rows(self, limit: int | None) -> Iterator[Json]:
        for number, row in enumerate(islice(self._rows, limit)):
            answer = row.get("answer")
            yield {
                "uid": f"{self.id}/{number}",
                "prompt": _chat(row["prompt"]),
                "answer": answer if answer is not None else "",
                "task": number,
                "task_hash": _hash(row),
            }

    def _row_of(self, problem: Problem) -> Json:
        number = problem.metadata["task"]
        if number >= len(self._rows):
            raise AgentFailed(missing_task(number, self.id, len(self._rows)))
        row: Json = self._rows[number]
        if _hash(row) != problem.metadata["task_hash"]:
            raise AgentFailed(changed_task(number, self.id))
        return row


def _chat(prompt: Any) -> list[Json]:
    """Return the prompt as text, for a reader: the environment asks by itself."""
    texts = [
        {"role": m["role"], "content": m["content"] if isinstance(m["content"], str) else "..."}
        for m in prompt
    ]
    ends_with_user = bool(texts) and texts[-1]["role"] == "user"
    return texts if ends_with_user else [*texts, {"role": "user", "content": "..."}]


def _hash(row: Json) -> str:
    return hashlib.sha256(json.dumps(row, sort_keys=True, default=str).encode()).hexdigest()
