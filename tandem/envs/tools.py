"""Tool use, the built-in environment `tools`: a model calls Python functions and reads their
results.

    [env]
    name = "tools"
    options = {tools = ["calculator", "my_tools.py:add"], format = "hermes"}

A function's type hints and docstring become its JSON schema; the arguments of a call are checked
against the hints, and strictly: "8" is no int. A mistake in a call (unreadable, unknown, wrong
arguments, an exception) is the tool's answer to the model. A turn without a call is the final
answer and ends the episode; rewards score it.

model/tool_calls.py reads the text of a call. Knows neither tokens nor chat templates: those show
the schemas to the model.
"""

import inspect
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, get_type_hints

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from tandem.envs.calls import in_thread
from tandem.model.call_forms import NAMES
from tandem.model.tool_calls import BadCall, Call, Reading, plain_value, read_calls
from tandem.registry import find
from tandem.runtime.errors import UserError
from tandem.runtime.user_code import load_user_object
from tandem.types import Env, Message, Observation, Tool

# may be `async def`; a plain one runs in a thread of its own, so it may block
ToolFunction = Callable[..., Any]

MAX_CALLS = 16  # of a turn
MAX_ERROR_CHARS = 200
BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTool:
    """A tool as an environment calls it; of a plugin, one that is no function here."""

    name: str
    schema: Callable[[], Tool]
    call: Callable[[Call], Awaitable[Any]]  # ValueError is told to the model in its words


class ToolUnavailable(Exception):
    """A tool's failure through no fault of the model; raised by a tool, it costs the episode
    (env.on_error)."""


class ToolEnv(Env):
    """The environment `tools`: runs calls in order, and answers each with a message of the role
    `tool`.

    A subclass names its own tools, methods too: super().__init__(tools=[self.price, add]). The
    parts of an episode are `tool_calls`, the answered ones, and `bad_calls`, the others.
    """

    def __init__(
        self,
        tools: str | ToolFunction | Sequence[str | ToolFunction | NamedTool] = (),
        *,
        format: str = "auto",
        show_tools: bool = True,
        invalid_call_penalty: float = 0.0,
        max_result_chars: int = 2000,
    ):
        """Take the options.

        tools: functions, `file.py:function`, `module:function` or `calculator`.
        format: how the model writes a call.
        show_tools: describe the tools in the chat template; a model may know them from training.
        invalid_call_penalty: of a turn with a call that could not be answered.
        max_result_chars: a longer result is truncated before the model reads it.
        """
        if format not in NAMES:
            raise UserError(
                "there is no such format of tool calls",
                where="env.options.format",
                found=repr(format),
                expected=", ".join(NAMES),
            )
        alone = isinstance(tools, str) or callable(tools)
        self._tools = _read_tools([tools] if alone else tools)  # type: ignore[list-item, arg-type]
        self.tools = [tool.schema() for tool in self._tools.values()] if show_tools else ()
        if invalid_call_penalty < 0:
            where, found = "env.options.invalid_call_penalty", str(invalid_call_penalty)
            raise UserError("a penalty below 0", where=where, found=found)
        self.format, self.invalid_call_penalty = format, invalid_call_penalty
        self.max_result_chars = max_result_chars
        self.num_calls = self.num_bad_calls = 0

    def read(self, text: str) -> Reading:
        """Read the calls in a text."""
        return read_calls(text, self.format, self._tools)

    async def step(self, text: str) -> Observation:
        calls, bad = self.read(text).calls, self.num_bad_calls
        messages = [await self._answer(call) for call in calls[:MAX_CALLS]]
        if (more := len(calls) - MAX_CALLS) > 0:
            messages.append(self._refuse(f"at most {MAX_CALLS} calls a turn, {more} were not run"))
        penalty = self.invalid_call_penalty if self.num_bad_calls > bad else 0.0
        return Observation(messages=messages, done=not calls, parts=self.parts(), penalty=penalty)

    def parts(self) -> dict[str, float]:
        return {"tool_calls": float(self.num_calls), "bad_calls": float(self.num_bad_calls)}

    async def _answer(self, call: Call | BadCall) -> Message:
        if isinstance(call, BadCall):
            return self._refuse(call.reason)
        tool = self._tools.get(call.name)
        if tool is None:
            return self._refuse(f"no tool {call.name!r}; there is {', '.join(self._tools)}")
        try:
            text = _text(await tool.call(call))
        except ToolUnavailable:
            raise
        except (Exception, SystemExit) as error:  # recovery is the feature: the model is told
            reason = str(error) if isinstance(error, ValueError) else ""
            return self._refuse(reason or f"{type(error).__name__}: {error}")
        self.num_calls += 1
        content = _truncated(text, self.max_result_chars)
        return {"role": "tool", "name": call.name, "content": content}

    def _refuse(self, reason: str) -> Message:
        self.num_bad_calls += 1
        return {"role": "tool", "content": _truncated(f"error: {reason}", MAX_ERROR_CHARS)}


def _text(result: Any) -> str:
    if isinstance(result, str):
        return result
    return json.dumps(result, ensure_ascii=False, default=str)


def _truncated(text: str, limit: int) -> str:
    text = text.encode("utf-8", "replace").decode("utf-8")  # half of a surrogate pair has no tokens
    rest = len(text) - limit
    return text if rest <= 0 else f"{text[:limit]}... ({rest} more characters)"


# ---------------------------------------------------------------- functions


def _value(name: str, type_: TypeAdapter[Any], value: Any, typed: bool) -> Any:
    try:
        # as JSON, where a list may be a tuple
        return type_.validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        if not typed:  # text for a hint of another type is a value
            with suppress(ValueError):
                return type_.validate_json(json.dumps(plain_value(value)), strict=True)
        problem = error.errors(include_url=False, include_input=False)[0]["msg"]
        raise ValueError(
            f"argument {name!r}: {problem[:1].lower()}{problem[1:]}, found {_text(value)[:40]!r}"
        ) from None


def _read_tools(tools: Sequence[str | ToolFunction | NamedTool]) -> dict[str, NamedTool]:
    """Return the tools by name. Raises UserError for one that a model could not call."""
    by_name: dict[str, NamedTool] = {}
    for tool in tools:
        named = tool if isinstance(tool, NamedTool) else _named(tool)
        if named.name in by_name:
            found, where = repr(named.name), "env.options.tools"
            raise UserError("two tools have the same name", where=where, found=found)
        by_name[named.name] = named
    if not by_name:
        what, next = "the environment has no tools", 'env.options.tools="calculator"'
        raise UserError(what, where="env.options.tools", next=next)
    return by_name


def _named(tool: str | ToolFunction) -> NamedTool:
    function: Any = tool
    if isinstance(tool, str):
        load = load_user_object if ":" in tool else partial(find, "tools")
        function = load(tool, key="env.options.tools")
    plain = function.__func__ if inspect.ismethod(function) else function
    if not inspect.isfunction(plain):
        raise UserError("a tool is not a function", where="env.options.tools", found=repr(tool))
    read = _reader(plain)

    async def call(call: Call) -> Any:
        arguments = read(call)
        if inspect.iscoroutinefunction(function):
            return await function(**arguments)
        return await in_thread(partial(function, **arguments))

    return NamedTool(name=plain.__name__, schema=partial(_schema, plain), call=call)


@cache  # environments are made by the hundred, of a few functions
def _reader(function: ToolFunction) -> Callable[[Call], dict[str, Any]]:
    """Return what gives the arguments of a call in the types of the function's hints, and raises
    ValueError in the model's terms. Raises UserError if a model cannot call the function by names
    and values."""
    signature = inspect.signature(function)
    try:
        hints = get_type_hints(function, include_extras=True)
    except Exception as error:  # a hint is any expression
        found = f"type hints that cannot be read: {error}"
        raise _not_a_tool(function, found, "type hints that Python can read") from None
    types: dict[str, TypeAdapter[Any]] = {}
    taken = [p for at, p in enumerate(signature.parameters.values()) if at or p.name != "self"]
    for parameter in taken:
        found = f"argument {str(parameter)!r}"
        if parameter.kind not in BY_NAME:
            raise _not_a_tool(function, found, "arguments that can be given by name")
        if parameter.name not in hints:
            found = f"argument {parameter.name!r} without a type hint"
            raise _not_a_tool(function, found, "a type hint for every argument")
        try:
            types[parameter.name] = TypeAdapter(hints[parameter.name])
        except PydanticUserError:
            raise _not_a_tool(function, found, "types that JSON can carry") from None
    text = str(signature.replace(parameters=taken, return_annotation=inspect.Signature.empty))
    required = {p.name for p in taken if p.default is inspect.Parameter.empty}

    def read(call: Call) -> dict[str, Any]:
        missing, unknown = required - call.arguments.keys(), call.arguments.keys() - types.keys()
        if missing or unknown:
            problem = f"argument {min(missing)!r} is missing" if missing else ""
            problem = f"no argument {min(unknown)!r}" if unknown else problem
            raise ValueError(f"{problem}; it is {call.name}{text}")
        return {
            name: _value(name, types[name], value, call.typed)
            for name, value in call.arguments.items()
        }

    return read


@cache
def _schema(function: ToolFunction) -> Tool:
    """Return the JSON schema for the chat template, as transformers writes it, which imports torch.
    Raises UserError."""
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
    )

    try:
        return get_json_schema(function)
    except DocstringParsingException as error:
        found = str(error)
        expected = "a docstring with an `Args:` section that has a line `name: what it is` for each"
    except (TypeHintParsingException, ValueError) as error:
        found = str(error).splitlines()[0]
        expected = "int, float, str, bool, Literal, Enum, or list, dict and Optional of them"
    raise _not_a_tool(function, found, expected)


# ---------------------------------------------------------------- errors


def _not_a_tool(function: ToolFunction, found: str, expected: str) -> UserError:
    code = function.__code__
    return UserError(
        "a function cannot be a tool",
        where=f"{code.co_filename}:{code.co_firstlineno}, {function.__qualname__}",
        found=found,
        expected=expected,
        next="mend its signature",
    )
