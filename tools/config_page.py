"""Write docs/reference/config.md: every configuration key with its default and meaning, made from the schema.

python tools/config_page.py
"""

import inspect
from functools import partial
from pathlib import Path
from typing import Literal, get_args, get_origin

from tandem.config.recipe import describe
from tandem.config.schema import SHORTHANDS, Config
from tandem.registry import built_in

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "config.md"
PIPE = r"\|"
HEAD = """# Configuration

Made from `tandem/config/` by `python tools/config_page.py`. A recipe is a TOML file with these
sections; any key can also be given on the command line as `section.key=value`, where the value is
TOML and a bare word is text:

<!-- not run: trains for hours -->
```
tandem train my.toml rl.group_size=8 data.shuffle=false 'data.train=["a.jsonl", "b.jsonl"]'
```

A key of no section, in a file or on the command line, is short for a longer one: {shorthands}.
`tandem plan RECIPE` shows which values are not the default, each with its origin: the recipe's line,
the command line, or `rl.algorithm`, which sets several at once ([algorithms.md](../guide/algorithms.md)); and
what `auto` becomes here. `tandem plan RECIPE --values` shows all of them.
"""


def page() -> str:
    """The page's text."""
    short = ", ".join(f"`{name}` for `{name}.{key}`" for name, key in SHORTHANDS.items())
    lines = [HEAD.format(shorthands=short)]
    section = ""
    for key, default, meaning in describe():
        name, _, field = key.partition(".")
        if name != section:
            section = name
            about = inspect.getdoc(Config.model_fields[name].annotation) or ""
            lines += [f"\n## [{name}]\n", about, "", "| key | default | meaning |", "|---|---|---|"]
        cells = [f"`{field}`", f"`{default}`", meaning.replace("<", "&lt;") + _choices(name, field)]
        lines.append(f"| {' | '.join(cell.replace('|', PIPE) for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _choices(section: str, field: str) -> str:
    """The values of a key that has few, e.g. "; one of `error`, `drop`"; empty for others."""
    about = Config.model_fields[section].annotation.model_fields[field]
    values = get_args(about.annotation) if get_origin(about.annotation) is Literal else ()
    for check in about.metadata:
        if isinstance(getattr(check, "func", None), partial):  # section.py: name_of
            kind, others = check.func.args
            values = (*others, *built_in(kind))
    return f"; one of {', '.join(f'`{value}`' for value in values)}" if values else ""


if __name__ == "__main__":
    PAGE.write_text(page())
