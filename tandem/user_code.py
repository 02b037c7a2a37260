"""Loads a user's Python file as a module: reward functions, environments, tools.

It does not know what is wanted of the module, nor how a mistake in it is told.
"""

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType


@cache  # two functions of one file share its module, as those of a module do
def load_file(path: Path) -> ModuleType:
    """The module of a file that is there, executed once in a process. Raises whatever the file raises.

    It may import its neighbours, and shadows nothing: a file that is named like a package, e.g. math_verify.py, is a module
    of another name, so that the package is still found.
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
    return found is None or (found.origin is not None and Path(found.origin).resolve() == path.resolve())
