"""Loads a user's own Python: reward functions, environments and tools, named `file.py:NAME` or
`module:NAME`.

A file is found from the working directory, loaded once in a process, and may import its neighbours.
`load_user_object` turns whatever goes wrong into a UserError; `load_file` raises what the file
raises. Knows neither rewards nor environments.
"""

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from tandem.runtime.errors import UserError


@cache  # two functions of one file share its module, as those of a module do
def load_file(path: Path) -> ModuleType:
    """The module of a file that is there, executed once in a process. Raises whatever the file
    raises.

    It may import its neighbours, and shadows nothing: a file that is named like a package, e.g.
    math_verify.py, is a module of another name, so that the package is still found.
    """
    name = path.stem if _is_free(path) else f"{path.stem}_py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path  # it ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(name, module)  # dataclasses and pickle look their module up here
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # behind all others
    spec.loader.exec_module(module)
    return module


def _is_free(path: Path) -> bool:
    """Check that nothing else is imported by the file's name."""
    try:
        found = importlib.util.find_spec(path.stem)
    except (ImportError, ValueError):  # ValueError: a module without a spec has the name
        return path.stem not in sys.modules
    return found is None or (
        found.origin is not None and Path(found.origin).resolve() == path.resolve()
    )


def load_user_object(spec: str, *, key: str) -> Any:
    """The object that spec names. key: the config key that says so, e.g. "env.name"."""
    source, colon, name = spec.rpartition(":")
    if not (colon and source and name):
        raise UserError(
            "nothing can be loaded by this name",
            where=key,
            found=repr(spec),
            expected="file.py:NAME or module:NAME",
        )
    module = _load(source, spec, key)
    if name not in vars(module):
        own = [
            n for n, value in vars(module).items() if callable(value) and _is_from(value, module)
        ]
        raise UserError(
            f"no {name!r} in {source}",
            where=f"{key} = {spec}",
            found=", ".join(own) or "nothing to call",
            expected="a name that is defined there",
            next=_by_hand(source),
        )
    return vars(module)[name]


def source_file(spec: str) -> Path | None:
    """The file that spec is loaded from, if it can be told without loading it; None for a built-in
    name."""
    source = spec.rpartition(":")[0]
    if not source or source.endswith(".py"):
        return Path(source) if source else None
    try:
        found = importlib.util.find_spec(source)
    except (ImportError, ValueError):
        return None
    return Path(found.origin) if found is not None and found.origin and found.has_location else None


def place(error: BaseException) -> str:
    """file:line of the deepest frame of the user's own; empty if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_ours(f.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _is_ours(file: str) -> bool:
    return file.startswith("<frozen") or Path(__file__).parents[1] in Path(file).parents


def _is_from(value: Any, module: ModuleType) -> bool:
    return (
        inspect.isclass(value) or inspect.isfunction(value)
    ) and value.__module__ == module.__name__


def _load(source: str, spec: str, key: str) -> ModuleType:
    if source.endswith(".py") and not Path(source).is_file():
        raise UserError(
            f"there is no file {source}",
            where=f"{key} = {spec}",
            found=f"the working directory {os.getcwd()}",
            expected="a Python file, named from there",
            next=f"ls {Path(source).parent}",
        )
    try:
        return (
            load_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
        )
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        at = place(error)
        raise UserError(
            f"{source} cannot be loaded",
            where=f"{key} = {spec}" + (f" ({at})" if at else ""),
            found=f"{type(error).__name__}: {error}",
            next=_by_hand(source),
        ) from error


def _by_hand(source: str) -> str:
    return f"python {source}" if source.endswith(".py") else f'python -c "import {source}"'
