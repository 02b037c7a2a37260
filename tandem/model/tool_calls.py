"""The tool calls in a model's text, in the formats of Qwen, Hermes, Llama and Mistral.

    hermes       <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>
                 Hermes, Qwen2.5 and Qwen3
    qwen3_coder  <tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n
                 </tool_call>
    llama3       {"name": "add", "parameters": {"a": 1}}
                 several with `;` between; may follow <|python_tag|>
    pythonic     [add(a=1), add(a=2)]
                 Llama 3.2 and 4
    mistral      [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]
                 the marker is a special token, which a decoded text lacks
    auto         the format whose markers the text has; a call without one must name a known tool

No error is raised: a malformed call is a BadCall with a reason for the model. Thoughts, up to the
last </think>, are not read. Environments and the server share this reader, so training and
serving agree. Of tools it knows the names and, for arguments written as text, the types of the
schema. No text is evaluated.
"""

import ast
import json
import math
import re
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NoReturn

from tandem.types import Tool

Format = Literal["auto", "hermes", "qwen3_coder", "llama3", "pythonic", "mistral"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG, MISTRAL_TAG = "<|python_tag|>", "[TOOL_CALLS]"
NOT_CLOSED = f"the call is not closed by {CLOSE}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call that could be read. Example: Call(name="add", arguments={"a": 1, "b": 2})"""

    name: str
    arguments: dict[str, Any]
    # false (qwen3_coder): the values are text as written, whose types only the tool's schema knows
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


def read_calls(text: str, format: Format = "auto", tools: Collection[str] = ()) -> Reading:
    """Read the calls of a text.

    tools: the known names, by which "auto" tells a bare call from an answer in JSON.
    """
    # the opening tag may be in the prompt, put there by the chat template
    thoughts, end, spoken = text.rpartition("</think>")
    if spoken.lstrip().startswith("<think>"):
        return Reading(before=text)
    chosen = _detect_format(spoken, tools) if format == "auto" else format
    reading = READERS[chosen](spoken)
    return replace(reading, before=thoughts + end + reading.before)


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


def _argument_types(tool: Tool) -> dict[str, object]:
    """Look up the JSON type of each of a tool's parameters that its schema gives one."""
    match tool:
        case {"function": {"parameters": {"properties": dict(properties)}}}:
            schemas = {name: own for name, own in properties.items() if isinstance(own, dict)}
            return {name: schema.get("type") for name, schema in schemas.items()}
    return {}


def _with_types(call: Call, types: dict[str, object]) -> Call:
    """Turn arguments written as text into JSON values, unless the schema wants text."""
    if call.typed:
        return call
    wanted = {n: t for n, t in call.arguments.items() if types.get(n) not in (None, "string")}
    values: dict[str, Any] = {}
    for name, text in wanted.items():
        with suppress(ValueError, RecursionError):
            values[name] = json.loads(text)
    return Call(name=call.name, arguments=call.arguments | values)


def write_calls(calls: Sequence[Call]) -> str:
    """Write calls in the hermes format; read_calls gives them back."""
    objects = ({"name": call.name, "arguments": call.arguments} for call in calls)
    return "\n".join(f"{OPEN}\n{json.dumps(o, ensure_ascii=False)}\n{CLOSE}" for o in objects)


# ---------------------------------------------------------------- which format

_BARE = re.compile(
    r"""\s*(?: (?P<list>\[\s*)? \{ \s* (?:"type"\s*:\s*"function"\s*,\s*)?
               "name"\s*:\s*"(?P<json>[^"]*)"
             | \[ \s* (?P<python>[A-Za-z_][\w.]*) \s* \( )""",
    re.VERBOSE,
)


def _detect_format(text: str, tools: Collection[str]) -> Format:
    if OPEN in text or CLOSE in text:
        return "qwen3_coder" if re.search(OPEN + r"\s*<function=", text) else "hermes"
    if MISTRAL_TAG in text:
        return "mistral"
    if PYTHON_TAG in text:
        return "llama3"
    bare = _BARE.match(text)
    if bare is None or (bare["json"] or bare["python"]) not in tools:
        return "auto"
    if bare["python"]:
        return "pythonic"
    return "mistral" if bare["list"] else "llama3"


# ---------------------------------------------------------------- between tags


def _read_tagged(body: Callable[[str], tuple[Call | BadCall, str]], text: str) -> Reading:
    """Read calls between tags. body: reads the text behind an opening tag into (call, text behind
    the closing tag)."""
    before, tag, rest = text.partition(OPEN)
    if not tag and CLOSE in text:
        before, _, after = text.partition(CLOSE)
        unopened = BadCall(reason=f"{CLOSE} without {OPEN} before it")
        return Reading(before=before, calls=(unopened,), after=after)
    calls, after = [], ""
    while tag:
        call, rest = body(rest)
        calls.append(call)
        between, tag, rest = rest.partition(OPEN)
        after += between
    return Reading(before=before, calls=tuple(calls), after=after)


def _json_body(rest: str) -> tuple[Call | BadCall, str]:
    start = rest.lstrip()
    _, closed, following = _split_at_close(start)
    try:
        value, end = _DECODER.raw_decode(start)
    except (ValueError, RecursionError) as error:
        return BadCall(reason=_json_error(error) if closed else NOT_CLOSED), following
    behind = start[end:].lstrip()
    if behind.startswith(CLOSE):  # a closing tag inside the JSON's own text does not count
        return _call(value), behind[len(CLOSE) :]
    reason = "there is text behind the JSON object" if closed else NOT_CLOSED
    return BadCall(reason=reason), following


def _split_at_close(rest: str) -> tuple[str, bool, str]:
    """Split into (text of the call, whether it is closed, text behind it).

    A tag that opens another call ends this one.
    """
    close, another = rest.find(CLOSE), rest.find(OPEN)
    if close >= 0 and not 0 <= another < close:
        return rest[:close], True, rest[close + len(CLOSE) :]
    end = another if another >= 0 else len(rest)
    return rest[:end], False, rest[end:]


_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>(.*?)</parameter>", re.DOTALL)


def _xml_body(rest: str) -> tuple[Call | BadCall, str]:
    inner, closed, following = _split_at_close(rest)
    function = _FUNCTION.fullmatch(inner)
    if not closed or function is None:
        reason = "not <function=NAME>...</function>" if closed else NOT_CLOSED
        return BadCall(reason=reason), following
    name, parameters = function.groups()
    pairs = _PARAMETER.findall(parameters)
    if _PARAMETER.sub("", parameters).strip() or len(dict(pairs)) < len(pairs):
        reason = "not one <parameter=NAME>...</parameter> for each argument"
        return BadCall(reason=reason), following
    arguments = {key: text.removeprefix("\n").removesuffix("\n") for key, text in pairs}
    return Call(name=name, arguments=arguments, typed=False), following


# ---------------------------------------------------------------- bare JSON

_BROKEN_CALL = re.compile(r'\[?\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:')


def _read_bare(tag: str, opening: str, text: str) -> Reading:
    """Read JSON of calls behind the tag, or a whole text that begins as one: objects, or a list if
    `opening` is a bracket."""
    before, tag, body = text.partition(tag) if tag in text else ("", "", text)
    body, calls = body.strip(), list[Call | BadCall]()
    if not tag and not body.startswith(opening):
        return Reading(before=text)
    while not calls or (opening == "{" and body.startswith("{")):
        try:
            value, end = _DECODER.raw_decode(body)
        except (ValueError, RecursionError) as error:
            if not (tag or calls or _BROKEN_CALL.match(body)):
                return Reading(before=text)
            calls.append(BadCall(reason=_json_error(error)))
            return Reading(before=before, calls=tuple(calls))
        values = value if opening == "[" and isinstance(value, list) else [value]
        if not (tag or calls) and not (values and all(map(_looks_like_call, values))):
            return Reading(before=text)  # an answer that happens to be JSON
        listed = opening == "{" or (isinstance(value, list) and values)
        calls += map(_call, values) if listed else [BadCall(reason="not a JSON list of calls")]
        body = body[end:].lstrip(" \n;,") if opening == "{" else body[end:]
    return Reading(before=before, calls=tuple(calls), after=body)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _json_error(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"broken JSON: {error.msg} at character {error.pos + 1}"
    return f"broken JSON: {'nested too deeply' if isinstance(error, RecursionError) else error}"


def _looks_like_call(value: Any) -> bool:
    match value:
        case {"name": str(), "arguments": _} | {"name": str(), "parameters": _}:
            return True
    return False


def _call(value: Any) -> Call | BadCall:
    if not isinstance(value, dict):
        return BadCall(reason="the call is not a JSON object")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return BadCall(reason='the call has no "name"')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            return BadCall(reason=f"the arguments are {_json_error(error)}")
    if not isinstance(arguments, dict):
        return BadCall(reason="the arguments are not a JSON object")
    return Call(name=name, arguments=arguments)


# ---------------------------------------------------------------- a Python list

_JSON_NAMES = {"true": True, "false": False, "null": None}  # Llama 4 sometimes writes them


class _Names(ast.NodeTransformer):
    """Puts values in place of JSON's names for them."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node


def _read_pythonic(text: str) -> Reading:
    body = text.strip().removeprefix("<|python_start|>").removesuffix("<|python_end|>").strip()
    bare = _BARE.match(body)
    if bare is None or not bare["python"]:
        return Reading(before=text)
    try:
        tree = ast.parse(body, mode="eval").body
        calls = tuple(map(_python_call, tree.elts)) if isinstance(tree, ast.List) else ()
    # too deep a nesting raises any of them
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        calls = ()
    return Reading(before="", calls=calls or (BadCall(reason="not a Python list of calls"),))


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


READERS: dict[Format, Callable[[str], Reading]] = {
    "auto": lambda text: Reading(before=text),  # no format was detected
    "hermes": partial(_read_tagged, _json_body),
    "qwen3_coder": partial(_read_tagged, _xml_body),
    "llama3": partial(_read_bare, PYTHON_TAG, "{"),
    "mistral": partial(_read_bare, MISTRAL_TAG, "["),
    "pythonic": _read_pythonic,
}
