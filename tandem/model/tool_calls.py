"""The tool calls in a model's text, in each family's own format.

A format is a row of FORMATS: the mark that announces a call, what opens its arguments, how these
are read, and what closes the call. "auto" takes the row whose mark the text has. Marks may be
special tokens; decode_text (tokenizer.py) keeps them. A call without a mark must name a known tool,
and begin a line.

    hermes       <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>
    qwen3_coder  <tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n
                 </tool_call>
    mistral      [TOOL_CALLS]add[ARGS]{"a": 1}, or [TOOL_CALLS][{"name": "add", "arguments": ...}]
    llama3       {"name": "add", "parameters": {"a": 1}}; several with `;` between
    pythonic     [add(a=1), add(a=2)]

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
from functools import cache, partial
from typing import Any, NoReturn

from tandem.types import Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"
Format = str  # "auto", or the name of a row of FORMATS


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


# reads the arguments behind what opened a call: (its calls, where they end). Raises ValueError
# with a reason for the model
Body = Callable[[str, "re.Match[str]"], tuple[Sequence[Call | BadCall], int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """A way to write calls; `opening` (behind `mark`) and `closing` are regular expressions.

    opening: has the group `name` if the name stands before the arguments. wrappers: texts that may
    stand around calls and say nothing.
    """

    name: str
    mark: str
    opening: str
    body: Body
    closing: str = ""
    wrappers: tuple[str, ...] = ()


def read_calls(text: str, format: Format = "auto", tools: Collection[str] = ()) -> Reading:
    """Read the calls of a text.

    tools: the known names, by which "auto" tells a bare call from an answer in JSON.
    """
    rows = tuple(row for row in FORMATS if format in ("auto", row.name))
    start = _end_of_thoughts(text, rows)
    spoken = text[start:]
    if spoken.lstrip().startswith("<think>"):
        return Reading(before=text)
    known, bare = (None, (format,)) if format in _BARE_BODIES else (tools, _BARE_BODIES)
    reading = _read_bare(spoken, bare, known) or _read_marked(spoken, rows)
    if not reading.calls and CLOSE in spoken:
        before, _, after = spoken.partition(CLOSE)
        unopened = BadCall(reason=f"{CLOSE} without {OPEN} before it")
        reading = Reading(before=before, calls=(unopened,), after=after)
    return replace(reading, before=text[:start] + reading.before)


def split_calls(text: str, tools: Sequence[Tool]) -> tuple[str, list[Call]]:
    """Split a turn into content and calls, with arguments in the types of the tools' schemas.

    If there is no call, or one that cannot be read, the content is the whole text.
    """
    types = {tool["function"]["name"]: _argument_types(tool) for tool in tools}
    reading = read_calls(text, tools=types) if types else Reading(before=text)
    calls = [
        _with_types(call, types.get(call.name, {}))
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
    return _literal(text.strip())


def _argument_types(tool: Tool) -> dict[str, frozenset[str]]:
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


def _with_types(call: Call, types: dict[str, frozenset[str]]) -> Call:
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
def _marks(rows: tuple[CallFormat, ...]) -> "re.Pattern[str]":
    return re.compile("|".join(dict.fromkeys(row.mark for row in rows)) or r"(?!)")


@cache
def _wrappers(rows: tuple[CallFormat, ...]) -> "re.Pattern[str]":
    texts = [re.escape(text) for row in rows for text in row.wrappers]
    return re.compile("|".join(texts) or r"(?!)")


@dataclass(frozen=True, slots=True)
class _Found:
    """A call, or what looks like one, at text[start:end]."""

    start: int
    end: int
    calls: Sequence[Call | BadCall]

    @property
    def good(self) -> bool:
        return all(isinstance(call, Call) for call in self.calls)


def _find(text: str, at: int, rows: tuple[CallFormat, ...]) -> _Found | None:
    """Find the next call from a position on; None without one."""
    mark = _marks(rows).search(text, at)
    if mark is None:
        return None
    marked = [row for row in rows if re.compile(row.mark).match(text, mark.start())]
    opened = ((row, re.compile(row.opening).match(text, mark.start())) for row in marked)
    row, opening = next(((row, found) for row, found in opened if found), (marked[-1], None))
    closing = re.compile(row.closing)
    try:
        if opening is None:
            raise ValueError(f"not a call in the form that {mark[0]} opens")
        calls, end = row.body(text, opening)
        if (closed := closing.match(text, end)) is None:
            raise ValueError(_not_closed(text, end, closing))
        return _Found(mark.start(), closed.end(), calls)
    except (ValueError, RecursionError) as error:
        deep = isinstance(error, RecursionError)
        reason = "broken JSON: nested too deeply" if deep else str(error)
        # it ends at its last tag, or where the next call begins
        another = re.compile(row.mark).search(text, mark.end())
        end = another.start() if another else len(text)
        if row.closing and opening is not None:
            tag = re.compile(row.closing.rpartition(r"\s*")[2])
            closed = tag.search(text, mark.end(), end)
            reason = reason if closed else _not_closed(text, len(text), closing)
            end = closed.end() if closed else end
        return _Found(mark.start(), end, [BadCall(reason=reason)])


def _not_closed(text: str, end: int, closing: "re.Pattern[str]") -> str:
    tag = re.sub(r"\\s\*|\\|\(\?:.*?\)\?", "", closing.pattern)
    if closing.search(text, end):
        return f"there is text between the arguments and {tag}"
    return f"the call is not closed by {tag}"


def _read_marked(text: str, rows: tuple[CallFormat, ...]) -> Reading:
    calls: list[Call | BadCall] = []
    outside, at = [], 0
    while found := _find(text, at, rows):
        outside.append(text[at : found.start])
        calls += found.calls
        at = found.end
    outside.append(text[at:])
    if not calls:
        return Reading(before=text)
    before, *between = [_wrappers(rows).sub("", part) for part in outside]
    return Reading(before=before, calls=tuple(calls), after="".join(between))


_THOUGHT = re.compile(
    r"</think>|<\|close\|>think<\|sep\|>|<\|channel\|>analysis<\|message\|>.*?(?:<\|end\|>|\Z)",
    re.DOTALL,
)


def _end_of_thoughts(text: str, rows: tuple[CallFormat, ...]) -> int:
    """Return where thoughts end: behind the last </think> that is no part of a call's string. The
    opening tag may be in the prompt, put there by the chat template."""
    start = 0
    for thought in _THOUGHT.finditer(text):
        at, inside = start, False
        while (found := _find(text, at, rows)) and found.start < thought.start():
            inside = found.good and thought.end() <= found.end
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


def _json_body(
    text: str, opening: "re.Match[str]", listed: bool = False
) -> tuple[Sequence[Call | BadCall], int]:
    """Read the arguments of a call whose name is known, or one or several whole calls.

    listed: they are a list.
    """
    value, end = _decode(text, opening.end())
    if name := opening.groupdict().get("name"):
        return [_named(name, value)], end
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
        except (ValueError, RecursionError) as error:
            return BadCall(reason=str(error))
    if not isinstance(arguments, dict):
        return BadCall(reason="the arguments are not a JSON object")
    return Call(name=name, arguments=arguments)


# ---------------------------------------------------------------- XML


def _xml_body(argument: str, end: str, closing: str) -> Body:
    """Make the reader of arguments between tags.

    argument: the opening tag, with the group `key`, and `text` (or `json`) if it says that the
    value is text (or JSON); end: the closing tag. A value ends where another argument or `closing`
    follows, so that a tag inside of it is text.
    """
    opened = re.compile(rf"\s*{argument}")
    ended = re.compile(
        rf"(?P<line>\n)?{end}(?=\s*(?:{re.sub('[(][?]P<[a-z]+>', '(?:', argument)}|{closing}))"
    )

    def read(text: str, opening: "re.Match[str]") -> tuple[Sequence[Call | BadCall], int]:
        values: dict[str, Any] = {}
        at, typed = opening.end(), False
        while start := opened.match(text, at):
            key, groups = start["key"], start.groupdict()
            stop = ended.search(text, start.end())
            if stop is None:
                raise ValueError(f"the argument {key!r} is not closed by {end}")
            if key in values:
                raise ValueError(f"the argument {key!r} stands there twice")
            value: Any = text[start.end() : stop.start()]
            if not groups.get("line") and stop["line"]:
                value += "\n"
            if value.startswith("<![CDATA[") and value.endswith("]]>"):
                value = value[9:-3]
            typed = typed or bool(groups.get("text") or groups.get("json"))
            values[key] = plain_value(value) if groups.get("json") else value
            at = stop.end()
        return [Call(name=opening["name"], arguments=values, typed=typed)], at

    return read


# ---------------------------------------------------------------- Python and Gemma

_JSON_NAMES = {"true": True, "false": False, "null": None}  # Llama 4 sometimes writes them
_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}  # Gemma 4's, in some versions
_PYTHON = re.compile(r""" "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*' | [\[\](){}] """, re.X | re.DOTALL)
_GEMMA = re.compile(r"<\|\"\|>(?P<string>.*?)<\|\"\|>|[\[\]{}]", re.DOTALL)


class _Names(ast.NodeTransformer):
    """Puts values in place of JSON's names for them."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node


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


def _python_body(text: str, opening: "re.Match[str]") -> tuple[Sequence[Call | BadCall], int]:
    try:
        # LFM2 writes line ends into strings as they are
        source, end = _balanced(
            text, opening.end(), _PYTHON, lambda found: found[0].replace("\n", r"\n")
        )
        tree = ast.parse(source.strip(), mode="eval").body
        calls = list(map(_python_call, tree.elts)) if isinstance(tree, ast.List) else []
    # too deep a nesting raises any of them
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError("not a Python list of calls") from None
    if not calls:
        raise ValueError("not a Python list of calls")
    return calls, end


def _python_call(node: ast.expr) -> Call | BadCall:
    if not isinstance(node, ast.Call):
        return BadCall(reason="not a call: name(argument=value)")
    name = ast.unparse(node.func) if isinstance(node.func, ast.Name | ast.Attribute) else ""
    named = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
    if not re.fullmatch(r"[\w.]+", name) or node.args or len(named) < len(node.keywords):
        return BadCall(reason="arguments must have names: name(argument=value)")
    try:
        values = {key: ast.literal_eval(_Names().visit(value)) for key, value in named.items()}
        return Call(name=name, arguments=_plain(values))
    except (ValueError, TypeError):
        return BadCall(reason=f"an argument of {name} is not a plain value")


def _literal(text: str) -> Any:
    """Return a Python literal as JSON has it. Raises ValueError."""
    try:
        return _plain(ast.literal_eval(text))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{text[:40]!r} is no value") from None


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


def _gemma_body(text: str, opening: "re.Match[str]") -> tuple[Sequence[Call | BadCall], int]:
    """Read {a:1,b:<|"|>text<|"|>}: strings between special tokens, keys without quotes."""
    strings: list[str] = []

    def write(found: "re.Match[str]") -> str:
        if found["string"] is None:
            return found[0]
        strings.append(found["string"])
        return f'"{len(strings) - 1}"'

    source, end = _balanced(text, opening.end(), _GEMMA, write)
    source = re.sub(r"([{,]\s*)([^\s\"{}\[\],:]+)\s*:", r'\1"k\2":', source)
    source = re.sub(r"\b(?:None|True|False)\b", lambda found: _PYTHON_NAMES[found[0]], source)
    value, _ = _decode(source, 0)
    return [Call(name=opening["name"], arguments=_gemma_value(value, strings))], end


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

_BARE = re.compile(
    r"""^[^\S\n]* (?:<\|python_(?:start|end)\|>)*
                      (?: (?P<json>\[?\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?
                          "name"\s*:\s*"(?P<of_json>[^"]*)")
                    | (?P<python>\[\s*(?P<of_python>[A-Za-z_][\w.]*)\s*\() )""",
    re.VERBOSE | re.MULTILINE,
)
_BARE_BODIES = ("llama3", "pythonic")


def _read_bare(
    text: str, formats: Collection[str], tools: Collection[str] | None
) -> Reading | None:
    """Read calls that begin a line, before any mark; None without one. tools: those that may be
    called; None: any."""
    mark = _marks(FORMATS).search(text)
    for found in _BARE.finditer(text, 0, mark.start() if mark else len(text)):
        kind, name = (
            ("llama3", found["of_json"]) if found["json"] else ("pythonic", found["of_python"])
        )
        if kind not in formats or (tools is not None and name not in tools):
            continue
        start = re.compile(r"\s*(?:<\|python_\w+\|>)*\s*").match(text, found.start())
        assert start is not None
        calls: Sequence[Call | BadCall]
        try:
            if found["json"]:
                value, _ = _decode(text, start.end())
                items = value if isinstance(value, list) else [value]
                if not all(
                    isinstance(i, dict) and {"arguments", "parameters"} & {*i} for i in items
                ):
                    continue  # an answer that happens to be JSON
                calls, end = _json_body(text, start)
            else:
                calls, end = _python_body(text, start)
        except (ValueError, RecursionError) as error:
            deep = isinstance(error, RecursionError)
            reason = "broken JSON: nested too deeply" if deep else str(error)
            calls, end = [BadCall(reason=reason)], len(text)
        before = _wrappers(FORMATS).sub("", text[: found.start()])
        return Reading(before=before, calls=tuple(calls), after=text[end:])
    return None


# ---------------------------------------------------------------- the table

_NAME = r"(?P<name>[\w.\-]+)"


def _json_row(
    name: str, mark: str, closing: str = "", listed: bool = False, wrappers: Sequence[str] = ()
) -> CallFormat:
    """Make the row of a format whose mark is followed by whole calls in JSON."""
    return CallFormat(
        name=name,
        mark=mark,
        opening=rf"{mark}\s*",
        body=partial(_json_body, listed=listed),
        closing=closing,
        wrappers=tuple(wrappers),
    )


def _xml_row(
    name: str,
    mark: str,
    opening: str,
    argument: str,
    end: str,
    closing: str,
    wrappers: Sequence[str] = (),
) -> CallFormat:
    return CallFormat(
        name=name,
        mark=mark,
        opening=opening,
        body=_xml_body(argument, end, closing.split(r"\s*", 2)[1]),
        closing=closing,
        wrappers=tuple(wrappers),
    )


# rows with the same mark: the first whose opening fits, else the last
FORMATS = (
    _xml_row(
        "qwen3_coder",
        "<tool_call>",
        rf"<tool_call>\s*<function={_NAME}>",
        r"<parameter=(?P<key>[^>\s]+)>(?P<line>\n)?",
        "</parameter>",
        r"\s*</function>\s*</tool_call>",
    ),
    _xml_row(
        "glm",
        "<tool_call(?::\\w+)?>",
        rf"<tool_call(?::\w+)?>\s*{_NAME}\s*(?:<tool_sep:\w+>)?(?=\s*</?(?:arg_key|tool_call))",
        r"<arg_key(?::\w+)?>(?P<key>.*?)</arg_key(?::\w+)?>\s*<arg_value(?::\w+)?>",
        r"</arg_value(?::\w+)?>",
        r"\s*</tool_call(?::\w+)?>",
        wrappers=("<tool_calls:opensource>", "</tool_calls:opensource>"),
    ),
    _json_row("hermes", "<tool_call>", r"\s*</tool_call>"),
    _xml_row(
        "seed",
        "<seed:tool_call>",
        rf"<seed:tool_call>\s*<function={_NAME}>",
        r"<parameter=(?P<key>[^>\s]+)>",
        "</parameter>",
        r"\s*</function>\s*</seed:tool_call>",
    ),
    *(
        _xml_row(
            "invoke",
            f"<{space}invoke name=",
            rf"<{space}invoke name=\"(?P<name>[^\"]+)\">",
            rf"<{space}parameter name=\"(?P<key>[^\"]+)\""
            r"(?: string=\"(?:(?P<text>true)|(?P<json>false))\")?>",
            f"</{space}parameter>",
            rf"\s*</{space}invoke>",
            wrappers=wrappers,
        )
        for space, *wrappers in (  # MiniMax M2, Muse, DeepSeek V3.2 and 4
            ("", "<minimax:tool_call>", "</minimax:tool_call>"),
            ("atem:", "<atem:function_calls>", "</atem:function_calls>"),
            (
                "｜DSML｜",
                *("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
                *("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
            ),
        )
    ),
    _xml_row(
        "minicpm",
        "<function name=",
        r"<function name=\"(?P<name>[^\"]+)\">",
        r"<param name=\"(?P<key>[^\"]+)\">",
        "</param>",
        r"\s*</function>",
    ),
    _xml_row(
        "kimi_k3",
        r"<\|open\|>call tool=",
        r"<\|open\|>call tool=\"(?P<name>[^\"]+)\"[^<]*<\|sep\|>",
        r"<\|open\|>argument key=\"(?P<key>[^\"]+)\""
        r" type=\"(?:(?P<text>string)|(?P<json>\w+))\"<\|sep\|>",
        r"<\|close\|>argument<\|sep\|>",
        r"\s*<\|close\|>call<\|sep\|>",
        wrappers=tuple(
            f"<|{kind}|>{part}<|sep|>"
            for kind in ("open", "close")
            for part in ("tools", "response", "message")
        ),
    ),
    CallFormat(
        name="mistral",
        mark=r"\[TOOL_CALLS\]",
        opening=rf"\[TOOL_CALLS\]\s*{_NAME}(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{{)",
        body=_json_body,
    ),
    _json_row("mistral", r"\[TOOL_CALLS\]", listed=True),
    CallFormat(
        name="deepseek",
        mark="<｜tool▁call▁begin｜>",
        opening=rf"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?{_NAME}"
        r"(?:<｜tool▁sep｜>|\s*```json)\s*",
        body=_json_body,
        closing=r"\s*(?:```)?<｜tool▁call▁end｜>",
        wrappers=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    CallFormat(
        name="kimi_k2",
        mark=r"<\|tool_call_begin\|>",
        opening=r"<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[\w.\-]+?)(?::\d+)?\s*"
        r"<\|tool_call_argument_begin\|>\s*",
        body=_json_body,
        closing=r"\s*<\|tool_call_end\|>",
        wrappers=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    *(
        CallFormat(
            name="gpt_oss",
            mark=mark,
            opening=rf"{mark}{_NAME}[^<]*(?:<\|c\w+\|>[^<]*)*<\|message\|>\s*",
            body=_json_body,
        )
        for mark in (r"<\|channel\|>commentary to=functions\.", r" to=functions\.")
    ),
    CallFormat(
        name="solar",
        mark=r"<\|tool_call:begin\|>",
        opening=rf"<\|tool_call:begin\|>[^<]*<\|tool_call:name\|>{_NAME}<\|tool_call:args\|>\s*",
        body=_json_body,
        closing=r"\s*<\|tool_call:end\|>",
        wrappers=("<|tool_calls|>",),
    ),
    CallFormat(
        name="functionary",
        mark="<function=",
        opening=rf"<function={_NAME}>\s*",
        body=_json_body,
        closing=r"\s*</function>",
    ),
    CallFormat(
        name="gemma4",
        mark=r"<\|tool_call>",
        opening=rf"<\|tool_call>call:{_NAME}(?=\{{)",
        body=_gemma_body,
        closing=r"<tool_call\|>",
    ),
    CallFormat(
        name="lfm2",
        mark=r"<\|tool_call_start\|>",
        opening=r"<\|tool_call_start\|>\s*(?=\[)",
        body=_python_body,
        closing=r"\s*<\|tool_call_end\|>",
    ),
    _json_row("cohere", r"<\|START_ACTION\|>", r"\s*<\|END_ACTION\|>", listed=True),
    _json_row("cohere", "Action:\\s*```json", r"\s*```", listed=True),
    _json_row("apertus", r"<\|tools_prefix\|>", r"\s*<\|tools_suffix\|>", listed=True),
    _json_row("tool_calls", "<tool_calls>", r"\s*</tool_calls>"),
    _json_row("nemotron", "<TOOLCALL>", r"\s*</TOOLCALL>", listed=True),
    _json_row("phi4", r"<\|tool_call\|>", r"(?:\s*<\|/tool_call\|>)?", listed=True),
    _json_row("gigachat", r"<\|function_call\|>"),
    _json_row("gigachat", r"function call<\|role_sep\|>"),
    _json_row("firefunction", r"functools(?=\[)", listed=True),
    _json_row("llama3", r"<\|python_tag\|>", wrappers=("<|python_start|>", "<|python_end|>")),
    # its calls have no mark; see _read_bare
    CallFormat(name="pythonic", mark="(?!)", opening="(?!)", body=_python_body),
)


def _literal_start(pattern: str) -> str:
    """Return what every text that the regular expression matches begins with."""
    literal = re.match(r"(?:\\[^\w]|[^\\\[\](){}?*+|.^$])*", pattern)
    assert literal is not None
    return literal[0].replace("\\", "")


# how what is no content begins: calls, and what stands around them
MARKERS = tuple(
    {
        *(_literal_start(row.mark) for row in FORMATS if row.mark != "(?!)"),
        *(text for row in FORMATS for text in row.wrappers),
        CLOSE,
    }
)
