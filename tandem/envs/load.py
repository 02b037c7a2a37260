"""From `[env]` to a maker of environments: the built-in ones, and a user's own `file.py:Class` or
`module:Class`.

    python -c "from tandem.envs.load import *; print(load_env(EnvConfig(name='guess', options={'limit': 5}), Sandbox())())"

env.options are the keyword arguments of the class, checked against its signature and type hints by
making one instance, before any model is loaded. A class whose constructor has a parameter `sandbox`
is also given the section of that name.
"""

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from tandem.config.schema import Env as EnvConfig
from tandem.config.schema import Sandbox
from tandem.envs.agent.env import AgentEnv
from tandem.envs.guess import GuessTheNumber
from tandem.envs.gym import GymEnv
from tandem.envs.python import PythonEnv
from tandem.envs.tools import ToolEnv
from tandem.envs.verifiers.env import VerifiersEnv
from tandem.runtime.errors import UserError
from tandem.runtime.user_code import load_user_object, place, source_file
from tandem.types import Env

BUILT_IN = ("single_turn", "tools", "python", "guess", "gymnasium", "verifiers", "agent")


def load_env(config: EnvConfig, sandbox: Sandbox) -> Callable[[], Env]:
    """A maker of the environments that config names, one for each episode. Raises UserError."""
    cls = _class(config.name)
    options = _checked_options(cls, config, sandbox)

    def make() -> Env:
        return cls(**copy.deepcopy(options))  # what an episode does to its options, no other sees

    try:
        make()
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # a user's constructor may raise anything
        at = place(error)
        raise UserError(
            "the environment cannot be made",
            where=f"env.name = {config.name}" + (f" ({at})" if at else ""),
            found=f"{type(error).__name__}: {error}",
            expected=f"{cls.__name__}{_signature(cls)}, which costs little: what is dear belongs into reset",
            next="set env.options, or mend the constructor",
        ) from error
    return make


def source_files(config: EnvConfig) -> list[Path]:
    """The user's files that an environment is made of: of its class, and of the tools in its
    options."""
    option = {"tools": "tools", "agent": "run"}  # those that name code
    named = config.options.get(option[config.name], []) if config.name in option else []
    specs = [config.name, *([named] if isinstance(named, str) else named)]
    return [file for spec in specs if (file := source_file(str(spec))) is not None]


def _class(name: str) -> type[Env]:
    match name:
        case "single_turn":
            return Env
        case "tools":
            return ToolEnv
        case "python":
            return PythonEnv
        case "guess":
            return GuessTheNumber
        case "gymnasium":
            return GymEnv
        case "verifiers":
            return VerifiersEnv
        case "agent":
            return AgentEnv
        case _ if ":" in name:
            return _own(name)
    raise UserError(
        "there is no such environment",
        where="env.name",
        found=repr(name),
        expected=f"one of {', '.join(BUILT_IN)}, or your own as file.py:Class or module:Class",
        next=f'tandem plan RECIPE env.name="{BUILT_IN[0]}"',
    )


def _own(name: str) -> type[Env]:
    found = load_user_object(name, key="env.name")
    if inspect.isclass(found) and issubclass(found, Env):
        return found
    kind = (
        f"the class {found.__name__}"
        if inspect.isclass(found)
        else f"{type(found).__name__} {found!r}"
    )
    source, _, own = name.rpartition(":")
    raise UserError(
        "this is not an environment",
        where=f"env.name = {name}",
        found=kind,
        expected="a subclass of tandem.types.Env",
        next=f"write `class {own}(Env):` in {source}",
    )


def _checked_options(cls: type[Env], config: EnvConfig, sandbox: Sandbox) -> dict[str, Any]:
    """The keyword arguments, in the types of the class's hints. Raises UserError that names the
    option."""
    signature = _signature(cls)
    options = dict(config.options)
    if "sandbox" in signature.parameters:
        options.setdefault("sandbox", sandbox)
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
    unknown = [] if takes_any else [name for name in options if name not in signature.parameters]
    missing = [
        p.name for p in signature.parameters.values() if p.name not in options and _is_required(p)
    ]
    if unknown or missing:
        what = f"has no option {unknown[0]!r}" if unknown else f"needs the option {missing[0]!r}"
        raise UserError(
            f"the environment {config.name} {what}",
            where="env.options",
            expected=f"{cls.__name__}{signature}",
            found=", ".join(config.options) or "no options",
        )
    hints = _hints(cls)
    return {
        name: _typed(name, value, hints[name]) if name in hints else value
        for name, value in options.items()
    }


def _is_required(parameter: inspect.Parameter) -> bool:
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return parameter.default is inspect.Parameter.empty and parameter.kind not in variadic


def _signature(cls: type[Env]) -> inspect.Signature:
    """What the constructor takes; `object` itself takes nothing, which inspect does not say."""
    return inspect.Signature() if cls.__init__ is object.__init__ else inspect.signature(cls)


def _hints(cls: type[Env]) -> dict[str, Any]:
    if cls.__init__ is object.__init__:
        return {}
    try:
        return get_type_hints(cls.__init__)
    except (NameError, TypeError):  # a hint for the type checker only
        return {}


def _typed(name: str, value: Any, hint: Any) -> Any:
    try:
        return TypeAdapter(hint).validate_python(value)
    except PydanticUserError:  # a type of the user's own, which only the constructor can judge
        return value
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]["msg"]
        raise UserError(
            "an option of the environment has the wrong type",
            where=f"env.options.{name}",
            found=repr(value),
            expected=f"{inspect.formatannotation(hint)}: {reason}",
        ) from None
