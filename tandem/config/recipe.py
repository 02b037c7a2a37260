"""Recipes: TOML over the defaults of schema.py, with `key=value` overrides; and the tree written
back as TOML.

Reports all mistakes together, each with its key and file, and an unknown key with the nearest real
one.
"""

import difflib
import json
import re
import tomllib
from contextlib import suppress
from itertools import chain, zip_longest
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tandem.config.algorithm import settings_of
from tandem.config.schema import SHORTHANDS, Config, is_read
from tandem.config.section import OR_FUNCTION, Section
from tandem.registry import names
from tandem.rl.algorithms import settings_of_parts
from tandem.runtime.errors import UserError
from tandem.runtime.wording import look_for


def load_config(recipe: str | Path | None, overrides: list[str]) -> Config:
    """Read a TOML recipe (None: an empty one), apply `key=value` overrides, and validate.

    An override of rl.algorithm also replaces the keys of an algorithm that the file sets, so that
    one value changes the algorithm. Raises UserError with every mistake.
    """
    tree, origin = merged(recipe, overrides)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise _explain(error, str(recipe or "command line"), origin) from None


def merged(
    recipe: str | Path | None, overrides: list[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the tree of a recipe under its overrides, not validated, and the keys that these set,
    each as {key: "command line"}."""
    tree = {} if recipe is None else _read(Path(recipe))
    if isinstance(rollout := tree.get("rollout"), dict):  # an earlier name
        ranks = rollout.pop("tensor_parallel", 1)
        old = {} if ranks == 1 else {"tensor_parallel_size": ranks}
        rollout |= {"vllm": old | rollout.get("vllm", {})} if old else {}
    tree |= {
        name: {key: tree[name]}
        for name, key in SHORTHANDS.items()
        if isinstance(tree.get(name), str | list)
    }
    origin: dict[str, str] = {}
    in_file = set(tree["rl"]) if isinstance(tree.get("rl"), dict) else set()
    for text, after in zip_longest(overrides, overrides[1:], fillvalue="VALUE"):
        _apply(tree, text, origin, after)
    if "rl.algorithm" in origin:
        of_all = {*settings_of_parts(), *chain(*map(settings_of, names("algorithms")))}
        for name in in_file & of_all:
            if f"rl.{name}" not in origin:
                del tree["rl"][name]
    return tree, origin


CURES = {  # by the first words of tomllib
    ("Expected '='", "Invalid statement"): 'no YAML or JSON: path = "model" below a line [model]',
    ("Cannot",): "put both parts together, each key once",
    ("",): 'a text has quotes, path = "model"; with a backslash single ones; true is small',
}


def _read(path: Path) -> dict[str, Any]:
    text = ""
    try:
        if not path.is_file():
            what, near = "does not exist", look_for(path)
            if path.is_dir():
                what, near = (
                    "is a folder",
                    f"did you mean {path / 'config.toml'}? A model is model.path",
                )
            elif "=" in str(path):
                what, near = "is missing before an override", f"name it first: RECIPE {path}"
            raise UserError(
                f"the recipe {what}",
                where=str(path),
                expected="a TOML file",
                next=f"{near}; or write one, tandem plan --keys lists its keys",
            )
        text = path.read_text(encoding="utf-8-sig")
        return tomllib.loads(text)
    except OSError as error:
        found = error.strerror or str(error)
        raise UserError(
            "the recipe cannot be read", where=str(path), found=found, next=f"ls -l {path}"
        ) from None
    # ValueError: not TOML, not UTF-8, or a number of 5,000 digits
    except (ValueError, RecursionError) as error:
        message, rows = str(error), text.splitlines()
        number = int(at[1]) if (at := re.search(r"\(at line (\d+)", message)) else 0
        row = f"{rows[number - 1].strip():.60}: " if number else ""
        raise UserError(
            "the recipe is not valid TOML",
            where=f"{path}:{number}" if number else str(path),
            found=row + message.partition(" (at line")[0],
            expected="TOML: [section] and key = value, each once, in UTF-8",
            next=next(cure for words, cure in CURES.items() if message.startswith(words)),
        ) from None


def _apply(tree: dict[str, Any], text: str, origin: dict[str, str], after: str) -> None:
    """Put one `section.field=value` into the tree. The value is TOML, and a bare word is a string.
    A key may reach into a table: env.options.limit=3. after: the next text, for the error."""
    if re.search("[\ud800-\udfff]", text):  # Python's form of a shell's other bytes
        raise UserError(
            "a value cannot be used", where="command line", found=f"{text!r:.80}", expected="UTF-8"
        )
    key, sign, raw = text.partition("=")
    key = f"{key}.{SHORTHANDS[key]}" if key in SHORTHANDS else key
    section, _, field = key.partition(".")
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except (ValueError, RecursionError):  # not TOML, or a number of 5,000 digits
        value = raw
    if not (sign and section and field):
        advice = keys_like(key, sign + raw)[2:]
        if key in Config.model_fields:
            advice = f"{key} is a section; write {key}.{_main_key(key, value)}={raw}"
        elif not sign:
            is_key = section in Config.model_fields and field in _section(section).model_fields
            given = "VALUE" if "=" in after else after
            advice = f"write {text}={given}" if is_key else f"put a key before it: KEY={text}"
        raise UserError(
            "an override cannot be read",
            where="command line",
            found=text,
            expected="section.field=value, e.g. rl.group_size=8",
            next=advice,
        )
    if not isinstance(tree.setdefault(section, {}), dict):
        return  # the validation names it
    table, reaches_in = tree[section], field.startswith(("options.", "vllm."))
    path = field.split(".") if reaches_in else [field]
    for name in path[:-1]:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise UserError(
                "an override reaches into what is no table",
                where=key,
                found=repr(table),
                expected=f"{name} = {{...}}",
            )
    table[path[-1]] = value
    origin[f"{section}.{field}"] = "command line"
    if section not in Config.model_fields:  # it is told without its field
        origin[section] = "command line"


def _section(name: str) -> type[Section]:
    return Config.model_fields[name].annotation  # type: ignore[return-value]


def _main_key(section: str, value: Any) -> str:
    """Return the first key of a section that takes a value; its first one if none does."""
    for field in _section(section).model_fields:
        with suppress(ValidationError):
            _section(section).model_validate({field: value})
            return field
    return next(iter(_section(section).model_fields))


def _explain(error: ValidationError, path: str, origin: dict[str, str]) -> UserError:
    lines: list[str] = []
    expected: dict[str, list[str]] = {}  # of a key with several types, a mistake for each
    for mistake in error.errors():
        place = mistake["loc"]
        key = ".".join(str(part) for part in place[: 2 if _has_types(place) else None])
        source = origin.get(".".join(map(str, place[:2])), path)
        if mistake["type"] == "extra_forbidden":
            lines.append(f"{key} ({source}): unknown key{keys_like(key)}")
        elif not key:
            reasons = mistake["msg"].removeprefix("Value error, ").splitlines()
            lines += [f"{r} ({origin.get(r.partition(':')[0], path)})" for r in reasons]
        else:
            found = f"{key} ({source}): found {mistake['input']!r}"
            expected.setdefault(found, []).append(_expected(key, mistake))
    lines += [f"{found}, {', or '.join(reasons)}" for found, reasons in expected.items()]
    return UserError(
        f"the configuration has {len(lines)} mistake{'s' * (len(lines) > 1)}\n"
        + "\n".join(f"  - {line}" for line in lines),
        next="tandem plan --keys lists every key, as docs/reference/config.md does",
    )


def _has_types(place: tuple[int | str, ...]) -> bool:
    """Tell whether a mistake is of a key that takes one of several types, e.g. ("rollout",
    "release_cache", "bool")."""
    if len(place) < 3 or place[0] not in Config.model_fields:
        return False
    field = _section(str(place[0])).model_fields.get(str(place[1]))
    return field is not None and get_origin(field.annotation) in (Union, UnionType)


def _expected(key: str, mistake: ErrorDetails) -> str:
    found = mistake["input"]
    match mistake["type"]:
        case "model_type":
            line = f"{_main_key(key, found)} = {toml_value(found)}"
            return f"{key} is a section; write [{key}], and {line} below it"
        case "list_type":
            return f"""expected a list; on the command line {key}='["a", "b"]'"""
        case "literal_error":
            choices = re.findall(r"'([^']*)'", mistake["msg"])
            near = difflib.get_close_matches(str(found).lower(), choices, 1, 0.5)
            advice = f"; did you mean {near[0]}?" if near else ""
            section, field = key.split(".")[:2]
            own = OR_FUNCTION in _section(section).model_fields[field].metadata
            return f"expected one of {', '.join(choices)}{', or my.py:NAME' * own}{advice}"
    reason = mistake["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    return reason[0].lower() + reason[1:]


# names of TRL's GRPOConfig that no key here resembles; all are in docs/guide/migrate.md
OF_TRL = {
    "num_generations": "rl.group_size",
    "num_iterations": "rl.epochs",
    "max_completion_length": "rollout.max_new_tokens",
    "max_steps": "run.steps",
    "steps_per_generation": "rl.minibatches",
    "per_device_train_batch_size": "rl.prompts_per_step times rl.group_size",
    "train_dataset": "data.train",
    "reward_funcs": "reward.function",
    "beta": "rl.kl_coef",
    "epsilon": "rl.clip_low",
    "epsilon_high": "rl.clip_high",
    "loss_type": "rl.algorithm",
    "report_to": "run.trackers",
    "peft_config": "lora.rank",
}


def keys_like(key: str, value: str = "", command: str = "") -> str:
    """Offer the keys that may be meant, with "=VALUE": of a bare name, those of all sections that
    the command reads, "" for any."""
    section, _, field = key.partition(".")
    keys = [f"{s}.{f}" for s in Config.model_fields for f in _section(s).model_fields]
    keys = [known for known in keys if is_read(command, known)]
    if (of_trl := OF_TRL.get(field or section, "")).partition(" ")[0] in keys:
        return f"; TRL's {field or section} is {of_trl}{value} here"
    keys.sort(key=lambda known: not known.startswith("train."))  # which is meant most often
    names = {known: known.partition(".")[2] for known in keys}
    meant = {name: {name, "".join(word[0] for word in name.split("_"))} for name in names.values()}
    near = [known for known in keys if (field or section) in meant[names[known]]]
    own = [known for known in keys if known.startswith(f"{section}.")]
    close = difflib.get_close_matches(key, own, 1, 0.85)
    near = [known for known in near if known in own] or close or near
    if not near and field:
        near = difflib.get_close_matches(key, keys, 1, 0.5)
    elif not near:
        close = difflib.get_close_matches(section, [*Config.model_fields, *meant], 1, 0.7)
        near = [k for k in (*Config.model_fields, *keys) if {k, names.get(k)} & {*close}]
    if near:
        return f"; did you mean {' or '.join(known + value for known in near)}?"
    of_others = "docs/guide/migrate.md has the names of TRL and verl"
    return f"; sections are {', '.join(Config.model_fields)}; {of_others}"


def to_toml(config: Config) -> str:
    """Write every leaf of the tree as TOML that load_config reads back to an equal Config."""
    lines = []
    for section, fields in config.model_dump().items():
        lines.append(f"[{section}]")
        lines += [f"{name} = {toml_value(value)}" for name, value in fields.items()]
        lines.append("")
    return "\n".join(lines)


def toml_value(value: Any) -> str:
    """Write a value as TOML: [True, "a\\b"] becomes [true, "a\\\\b"]."""
    match value:
        case bool():
            return str(value).lower()
        case str():  # JSON escapes as TOML does, all but one character
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case dict():
            pairs = [f"{toml_value(str(k))} = {toml_value(v)}" for k, v in value.items()]
            return "{" + ", ".join(pairs) + "}"
        case list():
            return "[" + ", ".join(toml_value(v) for v in value) + "]"
        case _:
            return repr(value)


def changed(config: Config) -> list[tuple[str, str, str]]:
    """List (key, value, default) of every leaf that differs from its default, in order."""
    defaults, tree = Config().model_dump(), config.model_dump()
    return [
        (f"{section}.{name}", toml_value(value), toml_value(defaults[section][name]))
        for section, fields in tree.items()
        for name, value in fields.items()
        if value != defaults[section][name]
    ]


def describe() -> list[tuple[str, str, str]]:
    """List (key, default, help) of every leaf, in order."""
    return [
        (f"{section}.{name}", toml_value(field.get_default()), field.description or "")
        for section in Config.model_fields
        for name, field in _section(section).model_fields.items()
    ]
