"""Keywords, rows, functions and classes of a caller from Python, made into the values of a recipe
that the commands read.

    {"group_size": 8, "reward": score, "data": [{...}]}
    {"rl": {"group_size": 8}, "reward": {"function": "runs/inputs/score-1f2e.pkl:score"},
     "data": {"train": "runs/inputs/data.train-9ab3.jsonl"}}

Rows and pickled objects are files named by their content, so a changed one is another file, and a
run that began with the old one still has it. An object of a module is named by the module. Only
what is defined in a notebook, in the script itself or inside of a function is pickled. Knows no
command but its sections.
"""

import hashlib
import io
import json
import marshal
import os
import pickle
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from tandem.config.recipe import describe, keys_like, toml_value
from tandem.config.schema import SHORTHANDS, Config, is_read
from tandem.runtime.errors import UserError

# the section of a command, and its key with the rows
SECTIONS = {
    "train": ("rl", "data.train"),
    "distill": ("distill", "data.train"),
    "sft": ("sft", "sft.train"),
    "dpo": ("preference", "preference.train"),
    "rm": ("preference", "preference.train"),
    "eval": ("eval", "eval.data"),
}
ROWS = {"eval.data", "preference.test", *(key for _, key in SECTIONS.values())}


def values_of(command: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of keywords by their keys in the configuration.

    A keyword is a section (`rl={"group_size": 8}`), a key ("rl.group_size"), the name of a key
    alone, of those that the command reads, its own section's first, or one of these: `model` (a
    path), `data` and `eval_data` (rows or a source), `reward` (functions), `env` (a class), `tools`
    (functions). Raises UserError for an unknown one.
    """
    short = {name: f"{name}.{key}" for name, key in SHORTHANDS.items()}
    short |= {"model": "model.path", "data": SECTIONS[command][1], "eval_data": "eval.data"}
    values: dict[str, Any] = {}
    for name, value in keys.items():
        if name == "tools":
            found = {"env.name": "tools", "env.options": {"tools": value}}
        elif name in Config.model_fields and isinstance(value, Mapping):
            found = {f"{name}.{field}": one for field, one in value.items()}
        else:
            found = {short.get(name) or _key(name, command): value}
        if twice := values.keys() & found.keys():
            raise UserError("a key has two values", where=min(twice), found=f"{value!r:.60}")
        values |= found
    return values


def overrides_of(values: Mapping[str, Any], folder: Path) -> list[str]:
    """Return values by key as overrides of a recipe, `section.key=value`; rows and objects become
    files in `folder`. Raises UserError for what is neither."""
    overrides = []
    for key, value in values.items():
        try:
            overrides.append(f"{key}={toml_value(_value(key, value, folder))}")
        except (TypeError, ValueError) as error:
            raise UserError(
                "a value cannot be used",
                where=key,
                found=f"{value!r:.60}: {error}",
                expected="a text, a number, a list, a dict or a function; of data, rows of these",
                next="write images and other objects to files, and name these in the rows",
            ) from None
    return overrides


def _key(name: str, command: str) -> str:
    """Find the key that a keyword means, among those that the command reads."""
    if "." in name:
        return name
    order = (SECTIONS[command][0], "run", "model", "train")
    named = [key for key, *_ in describe() if key.partition(".")[2] == name]
    if read := [key for key in named if is_read(command, key)]:
        best = min(read, key=lambda key: [key.partition(".")[0] != section for section in order])
        if len(read) == 1 or best.partition(".")[0] in order:
            return best
        given = f'**{{"{best}": VALUE}}'
        raise UserError(f"{name!r} is a key of several sections", found=", ".join(read), next=given)
    if name in Config.model_fields and is_read(command, name):
        raise UserError("this key is a section", where=name, expected="a dict of its keys")
    others = "" if command == "eval" else ", callbacks, fresh"
    raise UserError(
        f"`tandem {command}` reads no key {name!r}",
        where="the keywords",
        found=", ".join(named),
        expected=f"a key, a section's dict, model, data, eval_data, reward, env, tools{others}",
        next="" if named else keys_like(name, command=command)[2:],
    )


def _value(key: str, value: Any, folder: Path) -> Any:
    """Return a value as the recipe has it."""
    if key in ROWS:
        return source(value, key, folder)
    if isinstance(value, Mapping):
        return {name: _value("", one, folder) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_value("", one, folder) for one in value]
    if callable(value):
        return named(value, folder)
    return value if isinstance(value, str | int | float) else _plain(value)


# ---- rows


def source(rows: Any, key: str, folder: Path) -> Any:
    """Return the source of rows: a name as it is, and a list of dicts, a `datasets.Dataset` or a
    DataFrame as a file, its missing cells as null."""
    if isinstance(rows, str | Path):
        return str(rows)
    if hasattr(rows, "iloc"):  # a DataFrame, whose iteration gives its columns
        rows = rows.astype(object).where(rows.notna(), None).to_dict("records")
    listed = list(rows)
    if listed and all(isinstance(row, str | Path) for row in listed):
        return [str(row) for row in listed]
    lines = [json.dumps(row, allow_nan=False, default=_plain) + "\n" for row in listed]
    return kept(folder, key, ".jsonl", "".join(lines).encode())


def _plain(value: Any) -> Any:
    """Return a number or an array of numpy as Python's, and a path as its text."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a {type(value).__name__}: {value!r:.60}")


def kept(folder: Path, name: str, suffix: str, content: bytes) -> str:
    """Write a file named by its content, and return its path."""
    path = folder / f"{name}-{hashlib.sha256(content).hexdigest()[:12]}{suffix}"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}-{os.getpid()}-{threading.get_ident()}")
        temporary.write_bytes(content)
        temporary.replace(path)
    return str(path)


# ---- functions and classes


def named(value: Any, folder: Path) -> str:
    """Return the name of a function or class in a recipe: `file.py:NAME` or `module:NAME` of what a
    module holds, else that of a pickle of it. Raises UserError for what cannot be pickled."""
    if isinstance(value, str):
        return value
    name = getattr(value, "__name__", type(value).__name__)
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    if module and module.__name__ != "__main__" and getattr(module, name, None) is value:
        file = Path(getattr(module, "__file__", None) or "")
        is_package = "." in module.__name__ or hasattr(module, "__path__") or file.suffix != ".py"
        return f"{module.__name__ if is_package else file}:{name}"
    name = name if name.isidentifier() else "function"  # a lambda
    buffer = io.BytesIO()
    try:
        pickler = _Pickler(buffer)
        pickler.globals_ref = {}
        pickler.dump(SimpleNamespace(**{name: value}))
    except Exception as error:  # an object's own __reduce__ may raise anything
        raise UserError(
            "a function or class cannot be handed to another process",
            where=name,
            found=f"{type(error).__name__}: {error}",
            expected="one that needs no open file, lock or connection of this process",
            next="make these inside of it, or define it in a file.py and name it file.py:NAME",
        ) from None
    return f"{kept(folder, name, '.pkl', buffer.getvalue())}:{name}"


class _Pickler(pickle._Pickler):  # in Python: that in C asks nobody about a set
    """Pickles objects by value, as cloudpickle does. The same code gives the same bytes in another
    process, whose notebook has another temporary file and whose sets have another order."""

    dispatch_table = cloudpickle.Pickler.dispatch_table
    _dynamic_function_reduce = cloudpickle.Pickler._dynamic_function_reduce
    _function_reduce = cloudpickle.Pickler._function_reduce
    globals_ref: dict[int, Any]

    def _function_getnewargs(self, func: Any) -> Any:
        names = ("__name__", "__package__", "__path__")  # without __file__: a script may move
        kept = {name: func.__globals__[name] for name in names if name in func.__globals__}
        self.globals_ref.setdefault(id(func.__globals__), kept)
        return cloudpickle.Pickler._function_getnewargs(self, func)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, CodeType):  # version 2: without marks of how often an object is used
            return marshal.loads, (marshal.dumps(_of_notebook(obj), 2),)
        if type(obj) in (set, frozenset):
            return type(obj), (sorted(obj, key=repr),)
        reduced = cloudpickle.Pickler.reducer_override(self, obj)
        if isinstance(obj, type) and reduced is not NotImplemented and len(reduced[1]) > 2:
            make, (*arguments, _, extra), *more = reduced
            return make, (*arguments, None, extra), *more  # None: a random number
        return reduced


def _of_notebook(code: CodeType) -> CodeType:
    """Return the code without its file and its place in it; lines count from its first."""
    constants = (_of_notebook(c) if isinstance(c, CodeType) else c for c in code.co_consts)
    return code.replace(co_filename=code.co_qualname, co_firstlineno=1, co_consts=tuple(constants))
