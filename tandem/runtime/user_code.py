"""A user's own Python: reward functions, environments and tools, named `file.py:NAME` or
`module:NAME`; what was handed over from Python, `file.pkl:NAME`.

A file is found from the working directory, loaded once in a process, and may import its neighbours.
Knows neither rewards nor environments.
"""

import importlib
import importlib.util
import inspect
import pickle
import sys
import traceback
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from tandem.runtime.errors import UserError
from tandem.runtime.wording import look_for

ERROR_CHARS = 500
FILES = (".py", ".pkl")


def load_user_object(spec: str, *, key: str) -> Any:
    """Load the object named by spec. Raises UserError for every exception of the user's module.

    key: the config key that holds spec, e.g. "env.name".
    """
    try:
        return find_user_object(spec, key=key)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        source, line = spec.rpartition(":")[0], user_line(error)
        raise UserError(
            f"{source} cannot be loaded",
            where=f"{key} = {spec}" + (f" ({line})" if line else ""),
            found=f"{type(error).__name__}: {error}",
            next=run_by_hand(source),
        ) from error


def find_user_object(spec: str, *, key: str) -> Any:
    """Load the object named by spec. Raises UserError if there is none, and its module's
    exceptions."""
    source, colon, name = spec.rpartition(":")
    if not (colon and source and name):
        raise UserError(
            "nothing can be loaded by this name",
            where=key,
            found=repr(spec),
            expected="file.py:NAME or module:NAME",
        )
    module: Any
    if not source.endswith(FILES):
        module = importlib.import_module(source)
    elif Path(source).is_file():
        load = load_file if source.endswith(".py") else load_pickle
        module = load(Path(source))
    else:
        raise UserError(
            f"there is no file {source}",
            where=f"{key} = {spec}",
            found=f"nothing at {Path(source).absolute()}, from the working directory",
            expected="a Python file",
            next=look_for(Path(source)),
        )
    try:
        return getattr(module, name)  # not vars(): a package may import its members on demand
    except AttributeError:
        own = [
            n
            for n, value in vars(module).items()
            if (inspect.isclass(value) or inspect.isfunction(value))
            and value.__module__ == module.__name__
        ]
        raise UserError(
            f"no {name!r} in {source}",
            where=f"{key} = {spec}",
            found=", ".join(own) or "nothing to call",
            expected="a name that is defined there",
            next=run_by_hand(source),
        ) from None


@cache  # two functions of one file share its module, as those of a module do
def load_file(path: Path) -> ModuleType:
    """Execute an existing file, once in a process, and return its module. Raises the file's
    exceptions.

    The file may import its neighbours, and shadows nothing: if it is named like a package, e.g.
    math_verify.py, its module gets another name, so that the package is still found.
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


@cache
def load_pickle(path: Path) -> Any:
    """Return the namespace of a pickle that given.py wrote; it holds one object."""
    return pickle.loads(path.read_bytes())


def _is_free(path: Path) -> bool:
    """Check that nothing else is imported by the file's name."""
    try:
        module_spec = importlib.util.find_spec(path.stem)
    except (ImportError, ValueError):  # ValueError: a module without a spec has the name
        return path.stem not in sys.modules
    return module_spec is None or (
        module_spec.origin is not None and Path(module_spec.origin).resolve() == path.resolve()
    )


def source_file(spec: str) -> Path | None:
    """Find the file that holds spec, without loading it; None for a built-in name."""
    source = spec.rpartition(":")[0]
    if not source or source.endswith(FILES):
        return Path(source) if source else None
    try:
        module_spec = importlib.util.find_spec(source)
    except (ImportError, ValueError):
        return None
    return (
        Path(module_spec.origin)
        if module_spec is not None and module_spec.origin and module_spec.has_location
        else None
    )


def user_line(error: BaseException) -> str:
    """Find file:line of the deepest frame outside of Tandem and the import system; "" if none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        is_ours = Path(__file__).parents[1] in Path(frame.filename).parents
        if not (is_ours or frame.filename.startswith("<frozen")):
            return f"{frame.filename}:{frame.lineno}"
    return ""


def describe(error: BaseException) -> str:
    """Return the type and text of an error, in characters that can be written."""
    try:
        text = str(error)
    except Exception:  # a user's __str__
        text = "(its text cannot be read)"
    return f"{type(error).__name__}: {text}"[:ERROR_CHARS].encode(errors="replace").decode()


def run_by_hand(source: str) -> str:
    """Return the command that shows the whole error of a file or module."""
    if source.endswith(".pkl"):
        return "define it in a file.py, and name it file.py:NAME"
    return f"python {source}" if source.endswith(".py") else f'python -c "import {source}"'
