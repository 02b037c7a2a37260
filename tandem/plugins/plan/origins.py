"""Origins of a config's values, by key: the default, the line of a recipe, the command line, or the
algorithm that filled it in.

    origins("my.toml", ["rl.group_size=4"])["rl.group_size"]      "command line"

It does not know what `auto` becomes on a machine.
"""

import tomllib
from pathlib import Path

from tandem.config.algorithm import settings_of
from tandem.config.recipe import describe, merged
from tandem.config.schema import SHORTHANDS

DEFAULT = "default"


def origins(recipe: str | Path | None, overrides: list[str]) -> dict[str, str]:
    """Name where each value of load_config(recipe, overrides) is from. Example:
    {"run.steps": "my.toml:3", "rl.group_size": "command line", "rl.loss": "default", ...}"""
    tree, typed = merged(recipe, overrides)
    lines = {} if recipe is None else line_numbers(Path(recipe).read_text(encoding="utf-8-sig"))
    found = {}
    for key, _, _ in describe():
        section, _, name = key.partition(".")
        places = [f"{recipe}:{lines[key]}"] if key in lines else []
        by_hand = any(one == key or one.startswith(f"{key}.") for one in typed)
        # an override replaces the recipe's value, but for one of a table's entries
        places = places * (key not in typed) + ["command line"] * by_hand
        found[key] = ", ".join(places) if name in tree.get(section, {}) else DEFAULT
    algorithm = tree.get("rl", {}).get("algorithm", "")
    for name in settings_of(algorithm):
        if found[f"rl.{name}"] == DEFAULT:
            found[f"rl.{name}"] = f"rl.algorithm={algorithm}"
    return found


def line_numbers(text: str) -> dict[str, int]:
    """Return the first line of each key of a valid recipe. Example: {"run.steps": 2, "env.name": 5}

    A statement is the fewest lines that TOML can read after the header of their table.
    """
    header, start, found = "", 1, dict[str, int]()
    rows = text.split("\n")
    for number in range(1, len(rows) + 1):
        statement = "\n".join(rows[start - 1 : number])
        if statement.lstrip().startswith("["):
            header, statement = statement, ""
        try:
            tree = tomllib.loads(f"{header}\n{statement}")
        except tomllib.TOMLDecodeError:
            continue  # it goes on in the next line
        start = number + 1
        for section, fields in tree.items():
            names = fields if isinstance(fields, dict) else [SHORTHANDS.get(section, "")]
            for name in names:
                found.setdefault(f"{section}.{name}", number - statement.count("\n"))
    return found
