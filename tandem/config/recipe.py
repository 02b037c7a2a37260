"""Recipes: TOML over the defaults of schema.py, with `key=value` overrides; and the tree written
back as TOML.

Reports all mistakes together, each with its key and file, and an unknown key with the nearest real
one.
"""

import difflib
import re
import tomllib
from contextlib import suppress
from itertools import chain
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tandem.config.algorithm import settings_of
from tandem.config.schema import SHORTHANDS, Config, Section
from tandem.config.section import OR_FUNCTION
from tandem.registry import names
from tandem.rl.algorithms import settings_of_parts
from tandem.runtime.errors import UserError
from tandem.runtime.wording import look_for

MAX_DEPTH = 20  # of tables and lists in a recipe
# formats that are not TOML: by the name of the file, else by its first line
_SUFFIXES = {".yaml": "YAML", ".yml": "YAML", ".json": "JSON", ".py": "Python"}
_LOOKS = {"YAML": r"---|- |[\w.'\"-]+ *:( |$)", "JSON": r"\{"}
# words of tomllib, and what mends it
_CURES = {
    "twice|overwrite|Duplicate|mutate": "a section and a key stand once in a recipe: join the two",
    "Invalid value": 'a text has quotes, path = "model"; true and false are small',
    "Unclosed|Unterminated|Illegal|initial character|Expected (\"|'])": "close the quote or the "
    "bracket; a list may have several lines, {...} has one",
    r"\\|scalar": "a text with a backslash has single quotes, 'C:\\data'",
    "codec": "save it as UTF-8",
    "newline": "a key ends with its line: one value, and no comma behind it",
    "": "write key = value, below its [section]; a comment begins with #",
}
_KINDS = {bool: "true, false", str: "text", list[str]: "a list of texts"}


def load_config(recipe: str | Path | None, overrides: list[str]) -> Config:
    """Read a TOML recipe (None: an empty one), apply `key=value` overrides, and validate.

    An override of rl.algorithm also replaces the keys of an algorithm that the file sets, so that
    one value changes the algorithm. Raises UserError with every mistake.
    """
    tree, origin = merged(recipe, overrides)
    source = str(recipe or "command line")
    rest = [(tree, "", 0)]
    while rest:
        value, key, depth = rest.pop()
        if isinstance(value, dict | list):
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            rest += [(child, f"{key}.{name}".lstrip("."), depth + 1) for name, child in pairs]
        # a lone surrogate is Python's form of a shell's other bytes
        bad = isinstance(value, str) and re.search("[\0\ud800-\udfff]", value)
        if bad or depth > MAX_DEPTH:
            found = f"{value!r:.80}" if bad else f"more than {MAX_DEPTH} levels of nesting"
            expected = "text in UTF-8 without a zero character" if bad else "a flatter value"
            raise UserError(
                "a value cannot be used",
                where=f"{key[:80]} ({source})",
                found=found,
                expected=expected,
            )
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise _explain(error, source, origin) from None


def merged(
    recipe: str | Path | None, overrides: list[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the tree of a recipe under its overrides, not validated, and the keys that these set,
    each as {key: "command line"}."""
    tree = {} if recipe is None else _read(Path(recipe))
    tree |= {
        name: {key: tree[name]}
        for name, key in SHORTHANDS.items()
        if isinstance(tree.get(name), str | list)
    }
    origin: dict[str, str] = {}
    in_file = set(tree["rl"]) if isinstance(tree.get("rl"), dict) else set()
    for text in overrides:
        _apply(tree, text, origin)
    if "rl.algorithm" in origin:
        for name in in_file & {
            *settings_of_parts(),
            *chain(*map(settings_of, names("algorithms"))),
        }:
            if f"rl.{name}" not in origin:
                del tree["rl"][name]
    return tree, origin


def _read(path: Path) -> dict[str, Any]:
    text = ""
    try:
        if not path.is_file():
            near = f"did you mean {path / 'config.toml'}?" if path.is_dir() else look_for(path)
            raise UserError(
                f"the recipe {'is a folder' if path.is_dir() else 'does not exist'}",
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
        raise _not_toml(path, text.splitlines(), str(error)) from None


def _not_toml(path: Path, rows: list[str], message: str) -> UserError:
    """Name another format that the recipe has, or the line of its mistake and the cure."""
    begin = next((row for row in rows if row.strip() and row.lstrip()[0] != "#"), "")
    looks = next((name for name, pattern in _LOOKS.items() if re.match(pattern, begin)), "")
    if other := _SUFFIXES.get(path.suffix, looks):
        return UserError(
            f"the recipe is {other}, and a recipe is TOML",
            where=str(path),
            found=f"{begin:.60}",
            expected="[section] and key = value",
            next='write its sections as [model], and their keys as path = "model"',
        )
    number = int(at[1]) if (at := re.search(r"\(at line (\d+)", message)) else 0
    found = message.partition(" (at line")[0]
    if number:
        row = rows[number - 1].strip()
        first = next(n for n, other in enumerate(rows, 1) if other.strip() == row)
        found = f"{row:.60}{f', as line {first}' if first < number else ''}: {found}"
    return UserError(
        "the recipe is not valid TOML",
        where=f"{path}:{number}" if number else str(path),
        found=found,
        expected="TOML: [section] and key = value",
        next=next(cure for pattern, cure in _CURES.items() if re.search(pattern, message)),
    )


def _apply(tree: dict[str, Any], text: str, origin: dict[str, str]) -> None:
    """Put one `section.field=value` into the tree. The value is TOML, and a bare word is a string.
    A key may reach into a table: env.options.limit=3."""
    key, sign, raw = text.partition("=")
    key = f"{key}.{SHORTHANDS[key]}" if key in SHORTHANDS else key
    section, _, field = key.partition(".")
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except (ValueError, RecursionError):  # not TOML, or a number of 5,000 digits
        value = raw
    if not (sign and section and field):
        advice = _nearest(key)[2:]
        if key in Config.model_fields:
            advice = f"{key} is a section; write {key}.{_main_key(key, value)}={raw}"
        raise UserError(
            "an override cannot be read",
            where="command line",
            found=text,
            expected="section.field=value, e.g. rl.group_size=8",
            next=advice if sign else "",
        )
    if value == raw and raw.startswith(("[", "{")) and _takes_list(section, field):
        raise UserError(
            "a list or table on the command line is no TOML",
            where=key,
            found=text,
            expected="quotes around its texts, and around the whole for the shell",
            next=f"{key}='{_quoted(raw)}'" if raw.startswith("[") else f"{key}='{{name = 1}}'",
        )
    if not isinstance(tree.setdefault(section, {}), dict):
        return  # the validation names it
    table, path = tree[section], field.split(".") if field.startswith("options.") else [field]
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


def _takes_list(section: str, field: str) -> bool:
    """Tell whether the key may hold a list or a table, so that text in brackets is meant as one."""
    fields = _section(section).model_fields if section in Config.model_fields else {}
    kind = str(fields[field].annotation) if field in fields else ""
    return "list" in kind or "dict" in kind


def _quoted(raw: str) -> str:
    """Put quotes around the texts of a list: [a.jsonl, 1] becomes ["a.jsonl", 1]."""
    items = filter(None, (item.strip().strip("'\"") for item in raw.strip("[]").split(",")))
    number = re.compile(r"-?[0-9]+(\.[0-9]+)?")
    quoted = [item if number.fullmatch(item) else toml_value(item) for item in items]
    return f"[{', '.join(quoted)}]"


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
    lines = list[str]()
    for mistake in error.errors():
        # Of a key that takes one of several types, pydantic reports a mistake for each.
        kinds = _kinds(mistake["loc"])
        key = ".".join(str(part) for part in mistake["loc"][: 2 if kinds else None])
        source = origin.get(".".join(map(str, mistake["loc"][:2])), path)
        place, found = f"{key} ({source})", f"found {mistake['input']!r}"
        if mistake["type"] == "extra_forbidden":
            lines.append(f"{place}: unknown key{_nearest(key)}")
        elif kinds:
            lines.append(f"{place}: {found}, expected {kinds}")
        elif not key:
            reasons = mistake["msg"].removeprefix("Value error, ").splitlines()
            lines += [f"{r} ({origin.get(r.partition(':')[0], path)})" for r in reasons]
        else:
            lines.append(f"{place}: {found}, {_expected(key, mistake)}")
    lines = list(dict.fromkeys(lines))
    return UserError(
        f"the configuration has {len(lines)} mistake{'s' * (len(lines) > 1)}\n"
        + "\n".join(f"  - {line}" for line in lines),
        next="tandem plan --keys lists every key, as docs/reference/config.md does",
    )


def _kinds(place: tuple[int | str, ...]) -> str:
    """Name what a key takes that has a type of several; "" for one of a single type. place: of a
    mistake, e.g. ("rollout", "release_cache", "bool")."""
    if len(place) < 3 or place[0] not in Config.model_fields:
        return ""
    field = _section(str(place[0])).model_fields.get(str(place[1]))
    kinds = get_args(field.annotation) if field is not None else ()
    if get_origin(field and field.annotation) not in (Union, UnionType):
        return ""
    return " or ".join(
        ", ".join(map(str, get_args(kind))) if get_origin(kind) is Literal else _KINDS[kind]
        for kind in kinds
    )


def _expected(key: str, mistake: ErrorDetails) -> str:
    found = mistake["input"]
    match mistake["type"]:
        case "model_type" if isinstance(found, list) and found and isinstance(found[0], dict):
            return f"{key} is a section once; write [{key}], in single brackets"
        case "model_type":
            line = f"{_main_key(key, found)} = {toml_value(found)}"
            return f"{key} is a section; write [{key}], and {line} below it"
        case "string_type" | "list_type" if isinstance(found, dict):
            return "expected a value, and no table"
        case "bool_type":
            advice = f"; write {key}={found.lower()}" if str(found) in ("True", "False") else ""
            return f"expected true or false{advice}"
        case "int_type":
            return "expected a whole number"
        case "float_type":
            return "expected a number"
        case "greater_than_equal":
            return f"expected at least {mistake['ctx']['ge']}"
        case "greater_than":
            return f"expected more than {mistake['ctx']['gt']}"
        case "less_than_equal":
            return f"expected at most {mistake['ctx']['le']}"
        case "less_than":
            return f"expected less than {mistake['ctx']['lt']}"
        case "string_too_short":
            return "expected text that is not empty"
        case "string_type":
            return f"expected text; write {key}='\"{found}\"'"
        case "list_type":
            return f"expected a list; write {key}='{_quoted(str(found))}'"
        case "literal_error":
            choices = re.findall(r"'([^']*)'", mistake["msg"])
            near = difflib.get_close_matches(str(found).lower(), choices, 1, 0.5)
            advice = f"; did you mean {near[0]}?" if near else ""
            section, field = key.split(".")[:2]
            own = OR_FUNCTION in _section(section).model_fields[field].metadata
            return f"expected one of {', '.join(choices)}{', or my.py:NAME' * own}{advice}"
    reason = mistake["msg"].removeprefix("Value error, ")
    return reason[0].lower() + reason[1:]


def _nearest(key: str) -> str:
    """Offer the keys that may be meant: of a bare name, those of all sections that have it."""
    section, _, field = key.partition(".")
    keys = [f"{s}.{f}" for s in Config.model_fields for f in _section(s).model_fields]
    keys.sort(key=lambda known: not known.startswith("train."))  # which is meant most often
    names = {known: known.partition(".")[2] for known in keys}
    meant = {name: {name, "".join(word[0] for word in name.split("_"))} for name in names.values()}
    near = [known for known in keys if (field or section) in meant[names[known]]]
    near = [known for known in near if known.startswith(f"{section}.")] or near
    if not near and field:
        near = difflib.get_close_matches(key, keys, 1, 0.5)
    elif not near:
        close = difflib.get_close_matches(section, [*Config.model_fields, *meant], 1, 0.7)
        near = [k for k in (*Config.model_fields, *keys) if {k, names.get(k)} & {*close}]
    if near:
        return f"; did you mean {' or '.join(near)}?"
    return f"; sections are {', '.join(Config.model_fields)}"


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
        case str():
            return '"' + "".join(_escape(c) for c in value) + '"'
        case dict():
            pairs = [f"{toml_value(str(k))} = {toml_value(v)}" for k, v in value.items()]
            return "{" + ", ".join(pairs) + "}"
        case list():
            return "[" + ", ".join(toml_value(v) for v in value) + "]"
        case _:
            return repr(value)


def _escape(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    return f"\\u{ord(char):04x}" if ord(char) < 32 or ord(char) == 127 else char


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
