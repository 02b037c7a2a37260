"""The way from `[env]` to a maker of environments: built-in, or a user's `file.py:Class` or
`module:Class`.

env.options are the keyword arguments of the class, checked against its signature and type hints by
making one instance, before any model is loaded. A constructor with a parameter `sandbox` also gets
the section of that name.
"""

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from tandem.config.episodes import Env as EnvConfig
from tandem.config.episodes import Sandbox
from tandem.registry import find
from tandem.runtime.errors import UserError
from tandem.runtime.user_code import load_user_object, source_file, user_line
from tandem.types import Env


def load_env(config: EnvConfig, sandbox: Sandbox) -> Callable[[], Env]:
    """Find the class named in config and return a maker of its environments, one an episode.

    Raises UserError.
    """
    cls = _class(config.name)
    options = _checked_options(cls, config, sandbox)

    def make() -> Env:
        return cls(**copy.deepcopy(options))  # no episode sees what another did to its options

    try:
        make()
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # a user's constructor may raise anything
        line = user_line(error)
        raise UserError(
            "the environment cannot be made",
            where=f"env.name = {config.name}" + (f" ({line})" if line else ""),
            found=f"{type(error).__name__}: {error}",
            expected=f"{cls.__name__}{inspect.signature(cls)}, which costs little: "
            "reset may cost more",
            next="set env.options, or mend the constructor",
        ) from error
    return make


def source_files(config: EnvConfig) -> list[Path]:
    """List the user's files behind an environment: its class's, and its tools' or agent's."""
    option = {"tools": "tools", "agent": "run"}  # the options that name code
    named = config.options.get(option[config.name], []) if config.name in option else []
    specs = [config.name, *([named] if isinstance(named, str) else named)]
    return [file for spec in specs if (file := source_file(str(spec))) is not None]


def _class(name: str) -> type[Env]:
    if ":" not in name and not name.endswith(".py"):
        try:
            return find("envs", name, key="env.name")  # type: ignore[no-any-return]
        except UserError as error:
            error.expected += ", or your own as file.py:Class or module:Class"
            raise
    loaded = load_user_object(name, key="env.name")
    source, _, own = name.rpartition(":")
    if inspect.isclass(loaded) and issubclass(loaded, Env):
        return loaded  # type: ignore[no-any-return]
    raise UserError(
        "this is not an environment",
        where=f"env.name = {name}",
        found=repr(loaded),
        expected="a subclass of tandem.types.Env",
        next=f"write `class {own}(Env):` in {source}",
    )


def _checked_options(cls: type[Env], config: EnvConfig, sandbox: Sandbox) -> dict[str, Any]:
    """Return the keyword arguments, in the types of the class's hints. Raises UserError that names
    the option."""
    # object itself takes nothing, which inspect does not say
    bare = cls.__init__ is object.__init__
    signature = inspect.Signature() if bare else inspect.signature(cls)
    options = dict(config.options)
    if "sandbox" in signature.parameters:
        options.setdefault("sandbox", sandbox)
    try:
        signature.bind(**options)
    except TypeError as error:
        raise UserError(
            f"the environment {config.name} has other options",
            where="env.options",
            found=str(error),
            expected=f"{cls.__name__}{signature}",
        ) from None
    try:
        hints = {} if bare else get_type_hints(cls.__init__)
    except (NameError, TypeError):  # a hint for the type checker only
        hints = {}
    for name in options.keys() & hints.keys():
        try:
            options[name] = TypeAdapter(hints[name]).validate_python(options[name])
        except PydanticUserError:  # a type of the user's own, which only the constructor can judge
            pass
        except ValidationError as error:
            reason = error.errors(include_url=False)[0]["msg"]
            raise UserError(
                "an option of the environment has the wrong type",
                where=f"env.options.{name}",
                found=repr(options[name]),
                expected=f"{inspect.formatannotation(hints[name])}: {reason}",
            ) from None
    return options
