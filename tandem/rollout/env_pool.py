"""The environments of a run: their maker, and those whose episodes are paused."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from tandem.config.schema import Env as EnvConfig
from tandem.envs.calls import Caller, EnvironmentFailed, environment_loop
from tandem.types import Env

CLOSE_S = 5.0  # for an environment to release its resources
ALIVE_S = 1.0  # between looks whether the environments' loop still answers


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvPool:
    """A maker of environments, its limits, and the environments of paused episodes.

    Example: EnvPool(make=Env, limits=config.env)
    """

    make: Callable[[], Env]
    limits: EnvConfig
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


async def close_env(env: Env, caller: Caller) -> None:
    """Let an environment release its resources, for CLOSE_S at most."""
    caller.seconds_left = CLOSE_S
    with suppress(EnvironmentFailed, TimeoutError):  # the episode is over and stays what it was
        await caller.call(env.close)
    caller.close()
