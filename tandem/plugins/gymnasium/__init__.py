"""The environment `gymnasium`: a text environment of the gymnasium package, by its id. Needs the
extra `gymnasium`.

    [env]
    name = "gymnasium"
    options = {id = "FrozenLake-v1", actions = ["left", "down", "right", "up"]}

The problem's messages state the task; the first observation is appended to the last of them, and
every later one is a user's message. The model's turn is the action: in a Text space the whole turn,
in a Discrete space the last choice named in the turn, by number or by `actions`. Knows no tokens
and no task.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from tandem.runtime.errors import UserError, not_installed
from tandem.runtime.rng import address
from tandem.types import Env, Message, Observation, Problem

try:
    import gymnasium
    from gymnasium import spaces
except ModuleNotFoundError as error:
    raise not_installed("gymnasium", "gymnasium", where="env.name = gymnasium") from error

# as gymnasium names 30-37 and 40-47
COLOURS = ("gray", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_COLOURED = re.compile(r"\x1b\[(?:[34]([0-7])|[0-9]+)(?:;[0-9]+)*m(.*?)\x1b\[0m", re.DOTALL)
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


class GymEnv(Env):
    """One episode of a gymnasium environment.

    All samples of a problem begin alike: with the `seed` of its metadata, or one made of its uid.
    The reward is the sum of all rewards. Parts: `turns`, and `bad_actions`, turns without an
    action, which change nothing.
    """

    def __init__(
        self,
        id: str,
        *,
        kwargs: Mapping[str, Any] | None = None,
        actions: Sequence[str] = (),
        render: bool | None = None,
        invalid_action_penalty: float = 0.0,
    ):
        """Take the options.

        id, kwargs: as gymnasium.make takes them; `my_module:My-v0` imports the module first.
        actions: names of a Discrete space's actions, in order; without them, their numbers.
        render: show the ansi picture and not the observation; default: if there is a picture and
        the observation is not text.
        invalid_action_penalty: of a turn that names no action.
        """
        if invalid_action_penalty < 0:
            where, found = "env.options.invalid_action_penalty", str(invalid_action_penalty)
            raise UserError("a penalty below 0", where=where, found=found)
        self.invalid_action_penalty, self.turns, self.bad_actions = invalid_action_penalty, 0, 0
        self._id, self._kwargs = id, dict(kwargs or {})
        self._draws, self._choices = _inspect_env(
            id, json.dumps(self._kwargs), tuple(actions), render
        )
        self._world: Any = None

    def reset(self, problem: Problem) -> Sequence[Message]:  # type: ignore[override]  # plain, as worlds may block
        drawn = {"render_mode": "ansi"} if self._draws else {}
        self._world = gymnasium.make(self._id, **{**self._kwargs, **drawn})
        match problem.metadata:
            case {"seed": int(seed)}:
                pass
            case _:
                seed = address("gymnasium", problem.uid) % 2**31
        observation, _ = self._world.reset(seed=seed)
        *before, last = problem.messages
        return *before, {**last, "content": f"{last['content']}\n\n{self._shown(observation)}"}

    def step(self, text: str) -> Observation:  # type: ignore[override]
        self.turns += 1
        action = self._action(text)
        if action is None:
            self.bad_actions += 1
            choices = f"one of {', '.join(self._choices)}" if self._choices else ""
            help = f"That is no action. An action is {choices or self._world.action_space}."
            penalty = self.invalid_action_penalty
            return Observation(messages=_user(help), parts=self._parts(), penalty=penalty)
        observation, reward, terminated, truncated, _ = self._world.step(action)
        if terminated or truncated:
            return Observation(done=True, reward=float(reward), parts=self._parts())
        return Observation(
            messages=_user(self._shown(observation)), reward=float(reward), parts=self._parts()
        )

    def close(self) -> None:  # type: ignore[override]
        if self._world is not None:
            self._world.close()

    def _action(self, text: str) -> Any:
        if not self._choices:
            spoken = text.strip()
            return spoken if self._world.action_space.contains(spoken) else None
        names = "|".join(re.escape(name) for name in sorted(self._choices, key=len, reverse=True))
        mentions = re.findall(rf"(?<![\w.-])(?:{names})(?![\w-]|\.\d)", text.casefold())
        return self._choices[mentions[-1]] if mentions else None

    def _shown(self, observation: Any) -> str:
        return plain(str(self._world.render())) if self._draws else str(observation)

    def _parts(self) -> dict[str, float]:
        return {"turns": float(self.turns), "bad_actions": float(self.bad_actions)}


def plain(picture: str) -> str:
    """Return an ansi picture without escapes; colours are named, "[red S]FFF"."""
    named = _COLOURED.sub(lambda m: f"[{COLOURS[int(m[1])]} {m[2]}]" if m[1] else m[2], picture)
    return _ESCAPE.sub("", named).strip("\n")


def _user(text: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": text},)


@cache  # one environment is made to look at; the others are made for episodes
def _inspect_env(
    id: str, kwargs: str, actions: tuple[str, ...], render: bool | None
) -> tuple[bool, dict[str, Any]]:
    """Return whether the environment is shown as a picture, and its choices, {"left": 0}; none if
    actions are text. Raises UserError."""
    try:
        world = gymnasium.make(id, **json.loads(kwargs))
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        raise UserError(
            "gymnasium has no such environment",
            where="env.options.id",
            found=f"{type(error).__name__}: {error}",
            expected="an id such as FrozenLake-v1, and the kwargs that it takes",
            next='python -c "import gymnasium; gymnasium.pprint_registry()"',
        ) from None
    has_picture = "ansi" in world.metadata.get("render_modes", ())
    is_text = isinstance(world.observation_space, spaces.Text)
    if render and not has_picture:
        found = f"{id}: {world.metadata}, without ansi"
        raise UserError("the environment draws no text", where="env.options.render", found=found)
    choices = {}
    if not isinstance(world.action_space, spaces.Text):
        choices = _choices(id, world.action_space, actions)
    world.close()
    return has_picture and not is_text if render is None else render, choices


def _choices(id: str, space: Any, actions: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(space, spaces.Discrete):
        raise UserError(
            "a model cannot act in this environment",
            where=f"env.options.id = {id}",
            found=f"actions {space}",
            expected="actions that are Text or Discrete",
            next="wrap it in a gymnasium.ActionWrapper",
        )
    values = range(int(space.start), int(space.start + space.n))
    if actions and len(set(map(str.casefold, actions))) != len(values):
        expected, found = f"{len(values)} different names", ", ".join(actions)
        where = "env.options.actions"
        raise UserError("the actions have other names", where=where, found=found, expected=expected)
    return dict(zip([name.casefold() for name in actions] or map(str, values), values, strict=True))
