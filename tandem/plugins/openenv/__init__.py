"""Environments that run as OpenEnv servers: the environment `openenv`.

For anyone who has an OpenEnv environment, in a container or elsewhere. Start it, then name it:

    env.name = "openenv"
    env.options = {url = "http://127.0.0.1:8000", action = "message", observation = "reply"}
    env.concurrency = 64       # no more than the sessions that the server holds at once
    reward.function = "env"

An episode is a WebSocket session: reset, then a step for each turn of the model. Without `action`
a turn is the action as a JSON object; without `observation` all of an observation is shown as JSON.
The first observation follows the problem's messages, and rewards are added up. A reset gets a seed
made of the problem's uid, and what the row has in a column `reset`. An action that the server
refuses is told to the model; a lost connection costs the episode.

It plugs in as envs of tandem/registry.py. Extra: `openenv`, which is websockets; OpenEnv's own
package is not needed, and wants another mcp than the extra `mcp`.
"""

import json
from collections.abc import Sequence
from typing import Any

from tandem.runtime.errors import not_installed
from tandem.runtime.rng import address
from tandem.types import Env, Message, Observation, Problem

try:
    from websockets.asyncio.client import connect
except ModuleNotFoundError as error:
    raise not_installed("websockets", "openenv", where="env.name = openenv") from error

REFUSED = "VALIDATION_ERROR", "EXECUTION_ERROR"  # codes of an action, not of the session


class OpenEnv(Env):
    """One session. Parts: `turns`, and `bad_actions`, which the server refused."""

    def __init__(self, url: str, *, action: str = "", observation: str = ""):
        """Take the options. action, observation: the fields for a turn, and for its answer."""
        self._url = url.replace("http", "ws", 1).rstrip("/") + "/ws"
        self._action, self._observation = action, observation
        self._socket: Any = None
        self.turns = self.bad_actions = 0

    async def reset(self, problem: Problem) -> Sequence[Message]:
        self._socket = await connect(self._url, max_size=None)
        seed = {"seed": address("openenv", problem.uid) % 2**31}
        first = await self._ask("reset", seed | problem.metadata.get("reset", {}))
        *before, last = problem.messages
        return *before, {**last, "content": f"{last['content']}\n\n{self._shown(first)}"}

    async def step(self, text: str) -> Observation:
        self.turns += 1
        spoken = text.rpartition("</think>")[2].strip()
        try:
            found = spoken[spoken.find("{") : spoken.rfind("}") + 1]
            action = {self._action: spoken} if self._action else json.loads(found)
            result = await self._ask("step", action)
        except ValueError as error:
            self.bad_actions += 1
            result = {"done": False, "reward": 0.0, "error": f"error: no action: {error}"}
        return Observation(
            messages=({"role": "user", "content": self._shown(result)},),
            done=result["done"],
            reward=float(result["reward"] or 0.0),
            parts={"turns": float(self.turns), "bad_actions": float(self.bad_actions)},
        )

    async def close(self) -> None:
        if self._socket is not None:
            await self._socket.close()

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Return `observation`, `reward`, `done`. Raises ValueError for an action refused."""
        await self._socket.send(json.dumps({"type": kind, "data": data}))
        answer: dict[str, Any] = json.loads(await self._socket.recv())
        match answer:
            case {"type": "observation", "data": dict(result)}:
                return result
            case {"data": {"code": code, "message": message}} if code in REFUSED:
                flaws = [f"{one['loc']}: {one['msg']}" for one in answer["data"].get("errors", ())]
                raise ValueError("; ".join([str(message), *flaws]))
            case other:
                raise RuntimeError(f"{self._url}: {other}")

    def _shown(self, result: dict[str, Any]) -> str:
        if "error" in result:
            return str(result["error"])
        if self._observation:
            return str(result["observation"][self._observation])
        shown = {name: one for name, one in result["observation"].items() if name != "metadata"}
        return json.dumps(shown, ensure_ascii=False)
