"""The forms in which model families write tool calls.

A form is a call as text with {places}: its {name}, an {id} that is not used, and its arguments as
{json}, {gemma} or {xml}. {xml} are arguments in the form of the third column, with {key}, {value}
and the {kind} of the value, text or JSON. {calls} are whole calls in JSON, {list} is a list of
them, {python} a list in Python, or a call a line. A space between two words is a space; any other
one is any white space, or none. tool_calls.py reads by this table.
"""

import re
from dataclasses import dataclass

# name, form, form of an argument, texts around calls that say nothing. Of forms that begin alike
# the first that fits is taken, else the last
_TABLE: tuple[tuple[str, ...], ...] = (
    (
        "qwen3_coder",
        "<tool_call> <function={name}>{xml} </function> </tool_call>",
        "<parameter={key}>\n{value}\n</parameter>",
    ),
    (
        "glm",
        "<tool_call> {name} {xml} </tool_call>",
        "<arg_key>{key}</arg_key> <arg_value>{value}</arg_value>",
    ),
    (
        "glm",  # Hunyuan 3
        "<tool_call:opensource> {name} <tool_sep:opensource>{xml} </tool_call:opensource>",
        "<arg_key:opensource>{key}</arg_key:opensource> "
        "<arg_value:opensource>{value}</arg_value:opensource>",
        *("<tool_calls:opensource>", "</tool_calls:opensource>"),
    ),
    ("hermes", "<tool_call> {calls} </tool_call>"),
    (
        "seed",
        "<seed:tool_call> <function={name}>{xml} </function> </seed:tool_call>",
        "<parameter={key}>{value}</parameter>",
    ),
    (
        "minimax",
        '<invoke name="{name}">{xml} </invoke>',
        '<parameter name="{key}">{value}</parameter>',
        *("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    (
        "muse",
        '<atem:invoke name="{name}">{xml} </atem:invoke>',
        '<atem:parameter name="{key}">{value}</atem:parameter>',
        *("<atem:function_calls>", "</atem:function_calls>"),
    ),
    (
        "deepseek",  # 3.2 and 4
        '<｜DSML｜invoke name="{name}">{xml} </｜DSML｜invoke>',
        '<｜DSML｜parameter name="{key}" string="{kind}">{value}</｜DSML｜parameter>',
        *("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
        *("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
    ),
    (
        "deepseek",  # R1 and V3
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name} ```json {json} ``` <｜tool▁call▁end｜>",
    ),
    (
        "deepseek",  # 3.1
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜> {json} <｜tool▁call▁end｜>",
        "",
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    ("minicpm", '<function name="{name}">{xml} </function>', '<param name="{key}">{value}</param>'),
    (
        "kimi_k3",
        '<|open|>call tool="{name}" index="{id}"<|sep|>{xml} <|close|>call<|sep|>',
        '<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>',
        *("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
        *("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    (
        "kimi_k2",
        "<|tool_call_begin|> {name} <|tool_call_argument_begin|> {json} <|tool_call_end|>",
        "",
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    ("gpt_oss", "to=functions.{name}<|channel|>commentary json<|message|> {json}"),
    ("gpt_oss", "<|channel|>commentary to={name} <|constrain|>json<|message|> {json}"),
    ("gpt_oss", "<|channel|>commentary to={name} <|message|> {json}"),
    (
        "solar",
        "<|tool_call:begin|>{id}<|tool_call:name|>{name}<|tool_call:args|> {json}"
        " <|tool_call:end|>",
        "",
        "<|tool_calls|>",
    ),
    ("mistral", "[TOOL_CALLS] {name}[CALL_ID]{id}[ARGS] {json}"),
    ("mistral", "[TOOL_CALLS] {name}[ARGS] {json}"),
    ("mistral", "[TOOL_CALLS] {name} {json}"),
    ("mistral", "[TOOL_CALLS] {list}"),
    ("functionary", "<function={name}> {json} </function>"),
    ("gemma4", "<|tool_call>call:{name}{gemma}<tool_call|>"),
    ("lfm2", "<|tool_call_start|> {python} <|tool_call_end|>"),
    ("olmo3", "<function_calls> {python} </function_calls>"),
    ("cohere", "<|START_ACTION|> {list} <|END_ACTION|>"),
    ("apertus", "<|tools_prefix|> {list} <|tools_suffix|>"),
    ("jamba", "<tool_calls> {calls} </tool_calls>"),  # Apriel and MiniMax M1, too
    ("nemotron", "<TOOLCALL> {list} </TOOLCALL>"),
    ("phi4", "<|tool_call|> {list}", "", "<|/tool_call|>"),  # Granite 3, too
    ("gigachat", "<|function_call|> {calls}"),
    ("gigachat", "function call<|role_sep|> {calls}"),
    ("llama3", "<|python_tag|> {calls}", "", "<|python_start|>", "<|python_end|>"),
)
# of forms without a mark, which begin a line with the name of a known tool
UNMARKED = ("llama3", "pythonic")

_LOOSE = r"(?<!\w) | (?!\w)"  # a space that is any white space, or none
_PLACES = {
    "name": r"(?:functions\.)?(?P<name>[\w.\-]+)(?::\d+)?",
    "id": r"\w*",
    "key": r"(?P<key>[^<>\"]+?)",
    "kind": r"(?P<kind>\w+)",
    " ": r"\s*",
}


@dataclass(frozen=True, kw_only=True)
class CallForm:
    """A row of the table, as regular expressions. Example: FORMS[0]"""

    name: str
    mark: str  # what it begins with, whatever is called
    body: str  # the kind of its arguments: calls, list, json, python, gemma or xml
    opening: str
    closing: str
    close_text: str
    argument: str  # what opens an argument
    end: str  # what closes it
    end_text: str
    around: tuple[str, ...]  # texts around calls that say nothing


def _form(name: str, form: str, argument: str = "", *around: str) -> CallForm:
    opening, body, closing = re.split(r"\{(calls|list|json|python|gemma|xml)\}", form)
    begin, _, end = argument.partition("{value}")
    return CallForm(
        name=name,
        mark=re.split(rf"\{{|{_LOOSE}", form)[0],
        body=body,
        opening=_pattern(opening),
        closing=_pattern(closing),
        argument=_pattern(begin),
        end=_pattern(end),
        end_text=end.strip(),
        close_text=closing.replace(" ", ""),
        around=around,
    )


def _pattern(text: str) -> str:
    """Return the regular expression of a part of a form."""
    parts = re.split(rf"\{{(\w+)\}}|({_LOOSE})", text)
    return "".join(
        _PLACES.get(part, re.escape(part).replace("\\\n", "(?P<line>\\n)?"))
        for part in parts
        if part
    )


FORMS = tuple(_form(*row) for row in _TABLE)
_ALL = " ".join(part for row in _TABLE for part in row[1:])
# marks of thoughts and of channels, under the names that a text has for them
_THOUGHTS = {
    **{own: own for own in ("<think>", "</think>", "<|channel>", "<channel|>", '<|"|>')},
    "[THINK]": "<think>",
    "[/THINK]": "</think>",
    "<|START_THINKING|>": "<think>",
    "<|END_THINKING|>": "</think>",
    "<seed:think>": "<think>",
    "</seed:think>": "</think>",
}


def spoken(token: str) -> str:
    """Return what a special token says in a text; "" if nothing."""
    return _THOUGHTS.get(token) or (token if token in _ALL else "")


NAMES = tuple(dict.fromkeys(("auto", *(form.name for form in FORMS), *UNMARKED)))
