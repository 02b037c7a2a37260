"""`make models only=calls [templates=FOLDER]`: whether the tool calls that chat templates write are
read back, byte for byte; results/tool_calls.md.

Templates are trl's, which `make setup-dev` installs, and those in a folder of *.jinja files, such as
models/templates of llama.cpp (in the source of llama-cpp-python) or axolotl's. Rows of templates that
are not at hand stay as they are. Exit code 1 if a row that was read is not any more.

Two libraries read the same turns: transformers, by trl's response templates, and `renderers`, where it is
installed (`pip install --no-deps renderers tiktoken openai-harmony prime-pydantic-config`).
"""

import json
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import date
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken
from trl.chat_template_utils import add_response_schema

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT)]

from tandem.data.own_calls import EXAMPLE, NAME, TOOL, sampled_turn, unread_calls  # noqa: E402
from tandem.data.renderer import first_difference  # noqa: E402
from tandem.runtime.errors import UserError  # noqa: E402
from tests.support.call_templates import call_marks, call_templates, template_renderer  # noqa: E402

JSON, PAGE = ROOT / "results" / "tool_calls.json", ROOT / "results" / "tool_calls.md"
TYPED = {"text": "\n'x'\\ \"y\"{}[1]é", "count": -3, "exact": False, "fields": {"k": [1, 'b"']}}
MARKS = {"</parameter>", "</function>", "<tool_call>", "</tool_call>"}
LIBRARIES = ("transformers", "renderers")
# templates of which `renderers` has a class
CLASSES = """
trl/qwen3=qwen3 trl/qwen3_vl=qwen3-vl trl/qwen3_5_think=qwen3.5 trl/qwen3_6=qwen3.6 trl/qwen3_8=qwen3.8
trl/llama3_2=llama-3 trl/gemma4_v5=gemma4 trl/gptoss=gpt-oss trl/deepseekv3=deepseek-v3 trl/glm4moe=glm-4.5
trl/nemotron_3_nano=nemotron-3 trl/nemotron_3_ultra=nemotron-3-ultra trl/nemotron_3_5_lightning=nemotron-3.5
llama.cpp/GLM-4.7-Flash=glm-5 llama.cpp/MiniMax-M2=minimax-m2 llama.cpp/moonshotai-Kimi-K2=kimi-k2
llama.cpp/deepseek-ai-DeepSeek-V4-Flash-0731=deepseek-v4 llama.cpp/poolside-Laguna-XS.2=laguna-xs.2
llama.cpp/poolside-Laguna-XS-2.1=laguna-xs-2.1 llama.cpp/poolside-Laguna-S-2.1=laguna-s-2.1
llama.cpp/tencent-Hy3=hy3
"""
CLASSES = dict(pair.split("=") for pair in CLASSES.split())


def main(arguments: list[str]) -> int:
    sources = {"trl": None} | {Path(folder).name: folder for folder in arguments}
    rows = json.loads(JSON.read_text()) if JSON.exists() else {}
    before = {name for name, found in rows.items() if found["one"] == "read"}
    for source, folder in sources.items():
        for name, template in call_templates(folder).items():
            old = rows.get(f"{source}/{name}", {})
            libraries = {own: old[own] for own in LIBRARIES if own in old}
            found = try_out(f"{source}/{name}", template)
            rows[f"{source}/{name}"] = {**libraries, **found, "on": str(date.today())}
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
        **by_libraries(name, template, marks),
    }


def by_libraries(name: str, template: str, marks: list[str]) -> dict[str, str]:
    """Return what other libraries lose of the same turns, "read" if nothing."""
    found = {}
    tokenizer = (renderer := template_renderer(name, template)).tokenizer
    tokenizer.chat_template = template
    with suppress(ValueError):  # trl has no response template for it
        add_response_schema(tokenizer)

        def parse(prompt, turn):
            parsed = tokenizer.parse_response(turn, prefix=prompt, tools=[TOOL])
            return [call["function"]["arguments"] for call in parsed.get("tool_calls") or []]

        found["transformers"] = losses(renderer, parse, marks)
    if name in CLASSES and find_spec("renderers"):
        found["renderers"] = by_renderers(name, template, marks)
    return found


def by_renderers(name: str, template: str, marks: list[str]) -> str:
    package = import_module("renderers")
    renderer = template_renderer(name, template)
    while True:
        try:
            config = package.config_from_name(CLASSES[name])
            library = package.create_renderer(renderer.tokenizer, config)
            break
        except Exception as error:  # it asks for the family's special tokens, one after the other
            if not (token := re.search(r"(?:oken|for) '([^']+)'", str(error))):
                return f"does not start: {error}"
            special = AddedToken(token[1], special=True, normalized=False)
            renderer.tokenizer.add_tokens([special])

    def parse(prompt, turn):
        parsed = library.parse_response(turn, prompt_ids=prompt, tools=[TOOL])
        return [call.arguments for call in parsed.tool_calls]

    return losses(renderer, parse, marks)


def losses(renderer: Any, parse: Callable[[list[int], list[int]], Any], marks: list[str]) -> str:
    """Return the names of what is not read as it was written."""
    question = {"role": "user", "content": "a"}
    [prompt] = renderer.prompts([[question]], [TOOL])

    def is_read(arguments):
        called = {"name": NAME, "arguments": arguments}
        calls = [{"type": "function", "id": "call00000", "function": called}]
        turn = {"role": "assistant", "content": "", "tool_calls": calls}
        [whole] = renderer.chats([[question, turn]], [TOOL])
        said = whole[first_difference(prompt, whole) :]
        ends = np.flatnonzero(np.isin(said, renderer.stop_token_ids))
        said = said[: ends[-1] + 1] if len(ends) else said
        with suppress(Exception):  # of a library; it has not read the call
            return parse(prompt.tolist(), said.tolist()) == [arguments]

    if not is_read(EXAMPLE):
        return "one call"
    lost = [mark for mark in marks if not is_read({"text": f"a {mark} b", "count": 1})]
    return " ".join([*([] if is_read(TYPED) else ["hard values,"]), *lost]) or "read"


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
    compared = {n: found for n, found in written.items() if found.keys() & set(LIBRARIES)}
    exact = {
        n: found for n, found in compared.items() if {found["typed"], found["marks"]} == {"read"}
    }
    best = [
        f"{sum(found.get(library) == 'read' for found in compared.values())} of "
        f"{sum(library in found for found in compared.values())} templates by {library}"
        for library in LIBRARIES
    ]
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
            "## Libraries that read calls",
            "",
            "The same turns with one call, read by transformers' response parsing with trl's response "
            "templates, and by renderers 0.1.12. Both get prompt, tokens and schemas. A cell names what "
            "is lost: *one call* is every call. Nothing is lost of "
            f"{best[0]}, {best[1]}, and {len(exact)} of {len(compared)} by Tandem.",
            "",
            "So Tandem reads by a table of its own, `tandem/model/call_forms.py`: a line or two a form, "
            "for every template, also one in `data.chat_template`. What the libraries lack:",
            "",
            "- A mark of the form inside a string argument ends the call, and spaces or line ends at the "
            "ends of a string are cut. Code that a model writes into a file has both.",
            "- `True`, `False` and `None`, which Qwen3.5's and Nemotron 3's templates write, are no values "
            "for renderers.",
            "- transformers needs a response template, which most models do not ship. renderers finds the "
            "family by the model's name on the hub, which a directory does not have.",
            "- renderers needs openai, tiktoken, openai-harmony and prime-pydantic-config; gpt-oss, a file "
            "from the network too.",
            "",
            "| template | Tandem | transformers | renderers |",
            "|---|---|---|---|",
            *(
                f"| {name} | {cell(lost(f))} | {cell(f.get('transformers', ''))} |"
                f" {cell(f.get('renderers', ''))} |"
                for name, f in compared.items()
            ),
            "",
        ]
    )


def lost(found: dict[str, str]) -> str:
    """Return what Tandem loses, in the words of `losses`."""
    if found["one"] != "read":
        return "one call"
    marks = [] if found["marks"] == "read" else [found["marks"]]
    return " ".join([*([] if found["typed"] == "read" else ["hard values,"]), *marks]) or "read"


def cell(text: str) -> str:
    words = ("read", "", "one call", "hard values,")
    return text.rstrip(",") if text in words else "`" + text.replace("|", "\\|") + "`"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
