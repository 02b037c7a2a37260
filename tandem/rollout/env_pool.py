"""The environments of a run: their maker, and those whose episodes are paused."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tandem.config.episodes import Env as EnvConfig
from tandem.envs.calls import ALIVE_S, CLOSE_S, Caller, close_env, environment_loop
from tandem.types import Env


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvPool:
    """A maker of environments, its limits, and the environments of paused episodes.

    renders: the chat template renders each turn's prompt (rollout.history). caller: makes what
    calls an environment for so many seconds in all. status: describes the workers on other nodes,
    for `tandem status`. Example: EnvPool(make=Env, limits=config.env)
    """

    make: Callable[[], Env]
    limits: EnvConfig
    renders: bool = False
    caller: Callable[[float], Caller] = Caller
    status: Callable[[], list[dict[str, Any]]] = list
    paused: dict[int, tuple[Env, Caller]] = field(default_factory=dict)  # by episode key

    def close(self) -> None:
        """Close the environments of episodes that will not go on."""
        closing = [
            asyncio.run_coroutine_threadsafe(
                close_env(*self.paused.popitem()[1]), environment_loop()
            )
            for _ in list(self.paused)
        ]
        for future in closing:
            with suppress(TimeoutError):  # the loop is blocked: it ends with the process
                future.result(CLOSE_S + ALIVE_S)
