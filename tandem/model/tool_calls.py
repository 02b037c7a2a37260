"""The tool calls in a model's text, in each family's own form (call_forms.py).

"auto" takes the form whose mark the text has. Marks may be special tokens; decode_text
(tokenizer.py) keeps them. A call without a mark, as Llama 3's {"name": ..., "parameters": ...} and
[add(a=1)], must name a known tool and begin a line.

No error is raised: a malformed call is a BadCall with a reason for the model. Thoughts are not
read. A mark inside a call's own string is text. Environments and the server share this reader, so
training and serving agree. No text is evaluated.
"""

import ast
import json
import math
import re
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NoReturn

from tandem.model.call_forms import FORMS, UNMARKED, CallForm
from tandem.types import Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"
# how what is no content begins: calls, and what stands around them
MARKERS = tuple({mark for form in FORMS for mark in (form.mark, *form.around)} | {CLOSE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call that could be read. Example: Call(name="add", arguments={"a": 1, "b": 2})"""

    name: str
    arguments: dict[str, Any]
    # false (XML): the values are text as written, whose types only the tool's schema knows
    typed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class BadCall:
    """A call that could not be read. Example: BadCall(reason="not a Python list of calls")"""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A text and its calls, in order.

    Example: Reading(before="Let me see.\\n", calls=(Call(...),))
    """

    before: str  # the text up to the first call; the whole text if there is none
    calls: tuple[Call | BadCall, ...] = ()
    after: str = ""  # the text between and after the calls


def read_calls(text: str, format: str = "auto", tools: Collection[str] = ()) -> Reading:
    """Read the calls of a text.

    tools: the known names, by which "auto" tells a bare call from an answer in JSON.
    """
    forms = tuple(form for form in FORMS if format in ("auto", form.name))
    start = _end_of_thoughts(text, forms)
    spoken = text[start:]
    if spoken.lstrip().startswith("<think>"):
        return Reading(before=text)
    known, bare = (None, (format,)) if format in UNMARKED else (tools, UNMARKED)
    reading = _read_bare(spoken, bare, known) or _read_marked(spoken, forms)
    if not reading.calls and CLOSE in spoken:
        before, _, after = spoken.partition(CLOSE)
        unopened = BadCall(reason=f"{CLOSE} without {OPEN} before it")
        reading = Reading(before=before, calls=(unopened,), after=after)
    return replace(reading, before=text[:start] + reading.before)


def split_calls(text: str, tools: Sequence[Tool]) -> tuple[str, list[Call]]:
    """Split a turn into content and calls, with arguments in the types of the tools' schemas.

    If there is no call, or one that cannot be read, the content is the whole text.
    """
    types = {tool["function"]["name"]: argument_types(tool) for tool in tools}
    reading = read_calls(text, tools=types) if types else Reading(before=text)
    calls = [
        with_types(call, types.get(call.name, {}))
        for call in reading.calls
        if isinstance(call, Call)
    ]
    if not calls or len(calls) < len(reading.calls):
        return text, []
    return (reading.before + reading.after).strip(), calls


def write_calls(calls: Sequence[Call]) -> str:
    """Write calls in the hermes format; read_calls gives them back."""
    objects = ({"name": call.name, "arguments": call.arguments} for call in calls)
    return "\n".join(f"{OPEN}\n{json.dumps(o, ensure_ascii=False)}\n{CLOSE}" for o in objects)


# ---------------------------------------------------------------- types of arguments


def plain_value(text: str) -> Any:
    """Return the value of an argument written as text: JSON, or a Python literal, which templates
    write too. Raises ValueError."""
    with suppress(ValueError, RecursionError):
        return json.loads(text, parse_constant=_refuse_constant)
    try:
        return _plain(ast.literal_eval(text.strip()))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{text[:40]!r} is no value") from None


def argument_types(tool: Tool) -> dict[str, frozenset[str]]:
    """Look up the JSON types of each of a tool's parameters that its schema gives some."""
    match tool:
        case {"function": {"parameters": {"properties": dict(properties)}}}:
            schemas = {name: own for name, own in properties.items() if isinstance(own, dict)}
            return {name: _types(schema) for name, schema in schemas.items()}
    return {}


def _types(schema: Any) -> frozenset[str]:
    """Collect the types that a schema names, those of its `anyOf` too."""
    own = schema.get("type") if isinstance(schema, dict) else None
    named = [own] if isinstance(own, str) else own if isinstance(own, list) else []
    others = schema.get("anyOf") if isinstance(schema, dict) else None
    inner = map(_types, others if isinstance(others, list) else [])
    return frozenset(filter(lambda name: isinstance(name, str), named)).union(*inner)


def with_types(call: Call, types: dict[str, frozenset[str]]) -> Call:
    """Turn arguments written as text into values, unless the schema wants text."""
    values: dict[str, Any] = {}
    for name, text in {} if call.typed else call.arguments.items():
        wanted = types.get(name, frozenset())
        if wanted and wanted != {"string"}:
            with suppress(ValueError):
                value = plain_value(text)
                if "string" not in wanted or value is None:
                    values[name] = value
    return Call(name=call.name, arguments=call.arguments | values, typed=call.typed or bool(types))


# ---------------------------------------------------------------- where a call begins and ends


@cache
def _any_of(texts: tuple[str, ...]) -> "re.Pattern[str]":
    longest_first = sorted(set(texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _marks(forms: tuple[CallForm, ...]) -> "re.Pattern[str]":
    return _any_of(tuple(form.mark for form in forms))


def _without_around(text: str, forms: tuple[CallForm, ...]) -> str:
    return _any_of(tuple(part for form in forms for part in form.around)).sub("", text)


@dataclass(frozen=True, slots=True)
class _Found:
    """A call, or what looks like one, at text[start:end]."""

    start: int
    end: int
    calls: Sequence[Call | BadCall]


def _find(text: str, at: int, forms: tuple[CallForm, ...]) -> _Found | None:
    """Find the next call from a position on; None without one."""
    for mark in _marks(forms).finditer(text, at):
        marked = [form for form in forms if mark[0].startswith(form.mark)]
        opened = ((form, re.compile(form.opening).match(text, mark.start())) for form in marked)
        form, opening = next(((form, found) for form, found in opened if found), (marked[-1], None))
        if opening or mark[0][0] in "<[":  # other marks are words, too
            return _call_at(text, mark, form, opening)
    return None


def _call_at(
    text: str, mark: "re.Match[str]", form: CallForm, opening: "re.Match[str] | None"
) -> _Found:
    try:
        if opening is None:
            raise ValueError(f"not a call in the form that {mark[0]} opens")
        calls, end = _read_body(text, opening, form)
        if (closed := re.compile(form.closing).match(text, end)) is None:
            raise ValueError(f"there is text between the arguments and {form.close_text}")
        return _Found(mark.start(), closed.end(), calls)
    except (ValueError, RecursionError) as error:
        reason = str(error)
        # it ends at its last tag, or where the next call begins
        another = text.find(form.mark, mark.end())
        end = another if another >= 0 else len(text)
        if form.closing and opening is not None:
            tag = re.compile(form.closing.rpartition(r"\s*")[2])
            if closed := tag.search(text, mark.end(), end):
                end = closed.end()
            if not closed or form.close_text not in re.sub(r"\s", "", text[mark.end() : end]):
                reason = f"the call is not closed by {form.close_text}"
        return _Found(mark.start(), end, [BadCall(reason=reason)])


def _read_body(
    text: str, opening: "re.Match[str]", form: CallForm
) -> tuple[Sequence[Call | BadCall], int]:
    """Read the arguments behind what opened a call; return (its calls, where they end). Raises
    ValueError with a reason for the model."""
    match form.body:
        case "xml":
            return _xml_body(text, opening, form)
        case "python":
            return _python_body(text, opening.end())
        case "gemma":
            arguments, end = _gemma_body(text, opening.end())
            return [Call(name=opening["name"], arguments=arguments)], end
        case "json":
            value, end = _decode(text, opening.end())
            return [_named(opening["name"], value)], end
    return _json_body(text, opening.end(), listed=form.body == "list")


def _read_marked(text: str, forms: tuple[CallForm, ...]) -> Reading:
    calls: list[Call | BadCall] = []
    outside, at = [], 0
    while found := _find(text, at, forms):
        outside.append(text[at : found.start])
        calls += found.calls
        at = found.end
    outside.append(text[at:])
    if not calls:
        return Reading(before=text)
    before, *between = [_without_around(part, forms) for part in outside]
    return Reading(before=before, calls=tuple(calls), after="".join(between))


# gpt-oss: its channel of analysis ends where the next message begins
_THOUGHT = re.compile(
    r"</think>|<\|close\|>think<\|sep\|>"
    r"|<\|channel\|>analysis<\|message\|>.*?(?:assistant(?= to=|<\|channel\|>)|\Z)",
    re.DOTALL,
)


def _end_of_thoughts(text: str, forms: tuple[CallForm, ...]) -> int:
    """Return where thoughts end: behind the last </think> that is no part of a call's string. The
    opening tag may be in the prompt, put there by the chat template."""
    start = 0
    for thought in _THOUGHT.finditer(text):
        at, inside = start, False
        while (found := _find(text, at, forms)) and found.start < thought.start():
            good = all(isinstance(call, Call) for call in found.calls)
            inside = good and thought.end() <= found.end
            at = found.end
        if not inside:
            start = thought.end()
    return start


# ---------------------------------------------------------------- JSON


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _refuse_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("an object has the same key twice")
    return values


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_refuse_doubles)


def _decode(text: str, at: int, what: str = "") -> tuple[Any, int]:
    """Decode the JSON value at a position of a text. Raises ValueError."""
    try:
        return _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        where = f"{error.msg} at character {error.pos - at + 1}"
        raise ValueError(f"{what}broken JSON: {where}") from None
    except ValueError as error:
        raise ValueError(f"{what}broken JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"{what}broken JSON: nested too deeply") from None


def _json_body(text: str, at: int, listed: bool = False) -> tuple[Sequence[Call | BadCall], int]:
    """Read one or several whole calls; listed: they are a list."""
    value, end = _decode(text, at)
    if listed and not (isinstance(value, list) and value):
        raise ValueError("not a JSON list of calls")
    if value == []:
        raise ValueError("the call is not a JSON object")
    calls = [_call(item) for item in (value if isinstance(value, list) else [value])]
    while more := re.compile(r"[\s;,]*(?=\{)").match(text, end):
        value, end = _decode(text, more.end())
        calls.append(_call(value))
    return calls, end


def _call(value: Any) -> Call | BadCall:
    match value:
        case {"name": str(name)} | {"tool_name": str(name)} if name:
            return _named(name, value.get("arguments", value.get("parameters", {})))
        case dict() if len(value) == 1:  # Apertus: {"add": {"a": 1}}
            [(name, arguments)] = value.items()
            if isinstance(arguments, dict) and name not in ("arguments", "parameters"):
                return Call(name=name, arguments=arguments)
        case dict():
            pass
        case _:
            return BadCall(reason="the call is not a JSON object")
    return BadCall(reason='the call has no "name"')


def _named(name: str, arguments: Any) -> Call | BadCall:
    if isinstance(arguments, str):
        try:
            arguments, _ = _decode(arguments.strip(), 0, "the arguments are ")
        except ValueError as error:
            return BadCall(reason=str(error))
    if not isinstance(arguments, dict):
        return BadCall(reason="the arguments are not a JSON object")
    return Call(name=name, arguments=arguments)


# ---------------------------------------------------------------- XML


def _xml_body(
    text: str, opening: "re.Match[str]", form: CallForm
) -> tuple[Sequence[Call | BadCall], int]:
    """Read arguments between tags. A value ends where another argument or the end of the call
    follows, so that a tag inside of it is text."""
    begin = re.compile(r"\s*" + form.argument)
    another = re.sub(r"\(\?P<\w+>", "(?:", form.argument)
    stop = re.compile(rf"{form.end}(?=\s*{another}|{form.closing})")
    values: dict[str, Any] = {}
    at, typed = opening.end(), False
    while start := begin.match(text, at):
        key, found = start["key"], stop.search(text, start.end())
        if found is None:
            raise ValueError(f"the argument {key!r} is not closed by {form.end_text}")
        if key in values:
            raise ValueError(f"the argument {key!r} stands there twice")
        value = text[start.end() : found.start()]
        if found.groupdict().get("line") and not start["line"]:
            value += "\n"
        if value.startswith("<![CDATA[") and value.endswith("]]>"):
            value = value[9:-3]
        kind = start.groupdict().get("kind")
        typed = kind is not None
        values[key] = value if kind in (None, "true", "string") else plain_value(value)
        at = found.end()
    return [Call(name=opening["name"], arguments=values, typed=typed)], at


# ---------------------------------------------------------------- Python and Gemma

# Llama 4 sometimes writes JSON's names of values; Gemma 4, in some versions, Python's
_PYTHON_NAMES = {"true": "True", "false": "False", "null": "None"}
_GEMMA_NAMES = {"True": "true", "False": "false", "None": "null"}
_PYTHON = re.compile(
    r""" "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*' | [\[\](){}] | \b(?:true|false|null)\b(?!\s*=) """,
    re.X | re.DOTALL,
)
_NEXT_LINE = re.compile(r"\s*\n\s*[A-Za-z_][\w.]*\(")
_GEMMA = re.compile(
    r"<\|\"\|>(?P<string>.*?)<\|\"\|>|[\[\]{}]|\b(?:None|True|False)\b(?!:)", re.DOTALL
)


def _balanced(
    text: str, at: int, token: "re.Pattern[str]", write: Callable[["re.Match[str]"], str]
) -> tuple[str, int]:
    """Find the end of the brackets that begin at a position; return (what is written, end).

    token: brackets and strings; write: what stands for one in the result. Raises ValueError.
    """
    parts, depth, start = [], 0, at
    for found in token.finditer(text, at):
        depth += (found[0] in "[({") - (found[0] in "])}")
        parts += [text[at : found.start()], write(found)]
        at = found.end()
        if depth <= 0:
            return "".join(parts), at
    raise ValueError(f"the bracket {text[start : start + 1]} is not closed")


def _python_body(text: str, at: int) -> tuple[Sequence[Call | BadCall], int]:
    def write(found: "re.Match[str]") -> str:  # LFM2 has line ends in strings as they are
        return _PYTHON_NAMES.get(found[0]) or found[0].replace("\n", r"\n")

    calls: list[Call | BadCall] = []
    listed = text.startswith("[", at)
    try:
        while not calls or (not listed and _NEXT_LINE.match(text, at)):
            source, at = _balanced(text, at, _PYTHON, write)
            tree = ast.parse(source.strip(), mode="eval").body
            calls += map(_python_call, tree.elts if isinstance(tree, ast.List) else [tree])
    # too deep a nesting raises any of them
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError("not a Python list of calls") from None
    return calls, at


def _python_call(node: ast.expr) -> Call | BadCall:
    if not isinstance(node, ast.Call):
        return BadCall(reason="not a call: name(argument=value)")
    name = ast.unparse(node.func) if isinstance(node.func, ast.Name | ast.Attribute) else ""
    named = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
    if not re.fullmatch(r"[\w.]+", name) or node.args or len(named) < len(node.keywords):
        return BadCall(reason="arguments must have names: name(argument=value)")
    try:
        values = {key: ast.literal_eval(value) for key, value in named.items()}
        return Call(name=name, arguments=_plain(values))
    except (ValueError, TypeError):
        return BadCall(reason=f"an argument of {name} is not a plain value")


def _plain(value: Any) -> Any:
    """Return a Python value as JSON has it. Raises ValueError if it has none."""
    match value:
        case dict() if all(isinstance(key, str) for key in value):
            return {key: _plain(own) for key, own in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case str() | bool() | int() | None:
            return value
        case float() if math.isfinite(value):
            return value
    raise ValueError


def _gemma_body(text: str, at: int) -> tuple[dict[str, Any], int]:
    """Read {a:1,b:<|"|>text<|"|>}: strings between special tokens, keys without quotes."""
    strings: list[str] = []

    def write(found: "re.Match[str]") -> str:
        if found["string"] is None:
            return _GEMMA_NAMES.get(found[0], found[0])
        strings.append(found["string"])
        return f'"{len(strings) - 1}"'

    source, end = _balanced(text, at, _GEMMA, write)
    source = re.sub(r"([{,]\s*)([^\s\"{}\[\],:]+)\s*:", r'\1"k\2":', source)
    value, _ = _decode(source, 0)
    arguments: dict[str, Any] = _gemma_value(value, strings)
    return arguments, end


def _gemma_value(value: Any, strings: Sequence[str]) -> Any:
    """Put strings in the place of their numbers."""
    match value:
        case str():
            return strings[int(value)]
        case list():
            return [_gemma_value(item, strings) for item in value]
        case dict():
            return {
                key[1:] if key.startswith("k") else strings[int(key)]: _gemma_value(own, strings)
                for key, own in value.items()
            }
    return value


# ---------------------------------------------------------------- calls without a mark

_ARGUMENTS = {"arguments", "parameters"}
_BARE = re.compile(
    r"""^[^\S\n]* (?:<\|python_(?:start|end)\|>)*
                      (?: (?P<json>\[?\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?
                          "name"\s*:\s*"(?P<of_json>[^"]*)")
                    | (?P<python>\[\s*(?P<of_python>[A-Za-z_][\w.]*)\s*\() )""",
    re.VERBOSE | re.MULTILINE,
)


def _read_bare(
    text: str, formats: Collection[str], tools: Collection[str] | None
) -> Reading | None:
    """Read calls that begin a line, before any mark; None without one. tools: those that may be
    called; None: any."""
    mark = _marks(FORMS).search(text)
    for found in _BARE.finditer(text, 0, mark.start() if mark else len(text)):
        kind = "llama3" if found["json"] else "pythonic"
        name = found["of_json"] or found["of_python"]
        if kind not in formats or (tools is not None and name not in tools):
            continue
        start = found.start("json") if found["json"] else found.start("python")
        calls: Sequence[Call | BadCall]
        try:
            if found["json"]:
                value, _ = _decode(text, start)
                items = value if isinstance(value, list) else [value]
                if not all(isinstance(i, dict) and _ARGUMENTS & i.keys() for i in items):
                    continue  # an answer that happens to be JSON
            body = _json_body if found["json"] else _python_body
            calls, end = body(text, start)
        except (ValueError, RecursionError) as error:
            calls, end = [BadCall(reason=str(error))], len(text)
        before = _without_around(text[: found.start()], FORMS)
        return Reading(before=before, calls=tuple(calls), after=text[end:])
    return None
