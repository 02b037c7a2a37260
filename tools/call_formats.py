"""`make models only=calls [templates=FOLDER]`: whether the tool calls that chat templates write are
read back, byte for byte; results/tool_calls.md.

Templates are trl's, which `make setup-dev` installs, and those in a folder of *.jinja files, such as
models/templates of llama.cpp (in the source of llama-cpp-python) or axolotl's. Rows of templates that
are not at hand stay as they are. Exit code 1 if a row that was read is not any more.
"""

import json
import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT)]

from tandem.data.own_calls import EXAMPLE, NAME, sampled_turn, unread_calls  # noqa: E402
from tandem.runtime.errors import UserError  # noqa: E402
from tests.support.call_templates import call_marks, call_templates, template_renderer  # noqa: E402

JSON, PAGE = ROOT / "results" / "tool_calls.json", ROOT / "results" / "tool_calls.md"
TYPED = {"text": "\n'x'\\ \"y\"{}[1]é", "count": -3, "exact": False, "fields": {"k": [1, 'b"']}}
MARKS = {"</parameter>", "</function>", "<tool_call>", "</tool_call>"}


def main(arguments: list[str]) -> int:
    sources = {"trl": None} | {Path(folder).name: folder for folder in arguments}
    rows = json.loads(JSON.read_text()) if JSON.exists() else {}
    before = {name for name, found in rows.items() if found["one"] == "read"}
    for source, folder in sources.items():
        for name, template in call_templates(folder).items():
            rows[f"{source}/{name}"] = {**try_out(name, template), "on": str(date.today())}
    JSON.write_text(json.dumps(dict(sorted(rows.items())), indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(page(rows))
    read = {name for name, found in rows.items() if found["one"] == "read"}
    print(f"{len(read)} of {len(rows)} templates are read")
    print(*(f"not read any more: {name}" for name in sorted(before - read)), sep="\n")
    return int(bool(before - read))


def try_out(name: str, template: str) -> dict[str, str]:
    try:
        renderer = template_renderer(name, template)
        if NAME not in sampled_turn(renderer, [EXAMPLE]):
            raise UserError("writes no call")
    except UserError as error:
        said = str(error.found or error.what).partition(";")[0]
        return {"one": f"no call is written: {said[:90]}", "two": "", "typed": "", "marks": ""}
    marks = sorted(call_marks(template) | MARKS)
    lost = [m for m in marks if unread_calls(renderer, [{"text": f"a {m} b", "count": 1}])]
    return {
        "one": unread_calls(renderer) or "read",
        "two": two(renderer),
        "typed": unread_calls(renderer, [TYPED]) or "read",
        "marks": " ".join(lost) or "read",
    }


def two(renderer) -> str:
    try:
        text = sampled_turn(renderer, [EXAMPLE, TYPED])
    except UserError:
        return "one a turn"
    return unread_calls(renderer, [EXAMPLE, TYPED]) or "read" if "-3" in text else "one a turn"


def page(rows: dict[str, dict[str, str]]) -> str:
    written = {
        name: found for name, found in rows.items() if not found["one"].startswith("no call")
    }
    return "\n".join(
        [
            "# Tool calls in models' own forms",
            "",
            "Written by `make models only=calls` (tools/call_formats.py). Each chat template renders a "
            "turn with calls; the turn is cut out as the engine would have sampled it, decoded with "
            "the marks that are special tokens, and read. *Read* means the same calls, byte for byte. "
            "*Hard values* are quotes of both kinds, line ends, backslashes, brackets, nested objects, "
            "negative numbers and booleans. *Marks* are the template's own marks of calls inside of a "
            "string argument; those that are named are lost, as the template does not escape them.",
            "",
            f"{sum(f['one'] == 'read' for f in written.values())} of {len(written)} templates that "
            "write calls are read.",
            "",
            "| template | one call | two calls | hard values | marks in a string |",
            "|---|---|---|---|---|",
            *(
                f"| {name} | {f['one']} | {f['two']} | {f['typed']} | {cell(f['marks'])} |"
                for name, f in written.items()
            ),
            "",
            "Templates that refuse the call, or write nothing of it:",
            "",
            "| template | why |",
            "|---|---|",
            *(f"| {name} | {cell(f['one'])} |" for name, f in rows.items() if name not in written),
            "",
        ]
    )


def cell(text: str) -> str:
    return text if text in ("read", "") else "`" + text.replace("|", "\\|") + "`"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
