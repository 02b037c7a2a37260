"""Tool use: plain Python functions that a model calls, and whose results it reads. The built-in
environment `tools`.

    [env]
    name = "tools"
    options = {tools = ["calculator", "my_tools.py:add"], format = "hermes"}

A function's type hints and docstring become its JSON schema; the arguments of a call are checked
against the hints, and strictly: "8" is no int. What is wrong with a call (unreadable, unknown,
wrong arguments, an exception) is told to the model as the tool's answer. A turn without a call is
the final answer and ends the episode; rewards score it.

A call's text is read by tool_calls.py. Knows neither tokens nor chat templates: those show the
schemas to the model.
"""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, get_args, get_type_hints

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from tandem.envs.calculator import calculator
from tandem.envs.calls import in_thread
from tandem.model.tool_calls import BadCall, Call, Format, Reading, read_calls
from tandem.runtime.errors import UserError
from tandem.runtime.user_code import load_user_object
from tandem.types import Env, Message, Observation, Tool

# may be `async def`; a plain one runs in a thread of its own, so it may block
ToolFunction = Callable[..., Any]

MAX_CALLS = 16  # of a turn
MAX_ERROR_CHARS = 200
VARIADIC = (
    inspect.Parameter.VAR_POSITIONAL,
    inspect.Parameter.VAR_KEYWORD,
    inspect.Parameter.POSITIONAL_ONLY,
)


class ToolUnavailable(Exception):
    """A tool cannot do its work, and the model has no part in it: raised by a tool, it costs the
    episode (env.on_error)."""


class ToolEnv(Env):
    """Calls are run in their order, and answered by one message each, of the role `tool`.

    Its own tools a subclass names in code, methods too: super().__init__(tools=[self.price, add]).
    The parts of an episode are `tool_calls`, those that were answered, and `bad_calls`, those that
    were not.
    """

    def __init__(
        self,
        tools: str | ToolFunction | Sequence[str | ToolFunction] = (),
        *,
        format: Format = "auto",
        show_tools: bool = True,
        invalid_call_penalty: float = 0.0,
        max_result_chars: int = 2000,
    ):
        """tools: functions, `file.py:function`, `module:function` or `calculator`. format: how the
        model writes a call. show_tools: tell the model about the tools, through the chat template;
        one may know them from its training. invalid_call_penalty: of a turn with a call that could
        not be answered. max_result_chars: what is longer is cut before the model reads it."""
        self._described = _describe_all(
            [tools] if isinstance(tools, str) or callable(tools) else list(tools)
        )
        self.tools = (
            [described.schema() for described in self._described.values()] if show_tools else ()
        )
        if format not in get_args(Format):
            raise UserError(
                "there is no such format of tool calls",
                where="env.options.format",
                found=repr(format),
                expected=", ".join(get_args(Format)),
            )
        if invalid_call_penalty < 0:
            raise UserError(
                "a penalty below 0",
                where="env.options.invalid_call_penalty",
                found=str(invalid_call_penalty),
                expected="at least 0: it is subtracted",
            )
        self.format, self.invalid_call_penalty, self.max_result_chars = (
            format,
            invalid_call_penalty,
            max_result_chars,
        )
        self.num_calls = self.num_bad_calls = 0

    def read(self, text: str) -> Reading:
        """The text's calls."""
        return read_calls(text, self.format, self._described)

    async def step(self, text: str) -> Observation:
        calls = self.read(text).calls
        messages, bad = [], self.num_bad_calls
        for call in calls[:MAX_CALLS]:
            messages.append(await self._answer(call))
        if len(calls) > MAX_CALLS:
            messages.append(
                self._refuse(
                    f"at most {MAX_CALLS} calls a turn, {len(calls) - MAX_CALLS} were not run"
                )
            )
        penalty = self.invalid_call_penalty if self.num_bad_calls > bad else 0.0
        return Observation(messages=messages, done=not calls, parts=self.parts(), penalty=penalty)

    def parts(self) -> dict[str, float]:
        return {"tool_calls": float(self.num_calls), "bad_calls": float(self.num_bad_calls)}

    async def _answer(self, call: Call | BadCall) -> Message:
        if isinstance(call, BadCall):
            return self._refuse(call.reason)
        tool = self._described.get(call.name)
        if tool is None:
            return self._refuse(f"no tool {call.name!r}; there is {', '.join(self._described)}")
        try:
            text = _text(await tool.call(call))
        except ToolUnavailable:
            raise
        except (Exception, SystemExit) as error:  # recovery is the feature: the model is told
            words = isinstance(error, ValueError) and str(error)
            return self._refuse(words or f"{type(error).__name__}: {error}")
        self.num_calls += 1
        return {"role": "tool", "name": call.name, "content": _cut(text, self.max_result_chars)}

    def _refuse(self, reason: str) -> Message:
        self.num_bad_calls += 1
        return {"role": "tool", "content": _cut(f"error: {reason}", MAX_ERROR_CHARS)}


def _text(result: Any) -> str:
    return (
        result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
    )


def _cut(text: str, longest: int) -> str:
    text = text.encode("utf-8", "replace").decode("utf-8")  # half of a surrogate pair has no tokens
    return (
        text
        if len(text) <= longest
        else f"{text[:longest]}... ({len(text) - longest} more characters)"
    )


# ---------------------------------------------------------------- functions


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parameters:
    """What a function takes. Example: add(a: int, b: int = 0) has `required` {"a"} and `text` "(a:
    int, b: int = 0)"."""

    text: str
    types: Mapping[str, TypeAdapter[Any]] = field(default_factory=dict)
    required: frozenset[str] = frozenset()

    def read(self, call: Call) -> dict[str, Any]:
        """The arguments in the types of the hints; raises ValueError in the model's terms."""
        missing, unknown = (
            self.required - call.arguments.keys(),
            call.arguments.keys() - self.types.keys(),
        )
        if missing or unknown:
            problem = (
                f"no argument {min(unknown)!r}"
                if unknown
                else f"argument {min(missing)!r} is missing"
            )
            raise ValueError(f"{problem}; it is {call.name}{self.text}")
        return {
            name: _value(name, self.types[name], value, call.typed)
            for name, value in call.arguments.items()
        }


def _value(name: str, type_: TypeAdapter[Any], value: Any, typed: bool) -> Any:
    try:
        # as JSON, where a list may be a tuple
        return type_.validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        if not typed:  # text that is not wanted as text is JSON
            try:
                return type_.validate_json(value, strict=True)
            except ValidationError:
                pass
        problem = error.errors(include_url=False, include_input=False)[0]["msg"]
        raise ValueError(
            f"argument {name!r}: {problem[:1].lower()}{problem[1:]}, found {_text(value)[:40]!r}"
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Described:
    """A tool: the function as it is called, and what is known of it."""

    function: ToolFunction  # bound to its environment if it is a method
    plain: ToolFunction  # not bound

    def schema(self) -> Tool:
        return _schema(self.plain)

    async def call(self, call: Call) -> Any:
        arguments = _parameters(self.plain).read(call)
        if inspect.iscoroutinefunction(self.function):
            return await self.function(**arguments)
        return await in_thread(partial(self.function, **arguments))


def _describe_all(tools: Sequence[str | ToolFunction]) -> dict[str, _Described]:
    described: dict[str, _Described] = {}
    for tool in tools:
        function = _load(tool) if isinstance(tool, str) else tool
        plain = function.__func__ if inspect.ismethod(function) else function
        if not inspect.isfunction(plain):
            raise UserError(
                "a tool is not a function",
                where="env.options.tools",
                found=repr(tool),
                expected="a function or a method, plain or `async def`",
            )
        if plain.__name__ in described:
            raise UserError(
                "two tools have the same name",
                where="env.options.tools",
                found=repr(plain.__name__),
                expected="a name of its own for each",
                next="rename one of the functions",
            )
        _parameters(plain)
        described[plain.__name__] = _Described(function=function, plain=plain)
    if not described:
        raise UserError(
            "the environment has no tools",
            where="env.options.tools",
            next='env.options.tools="calculator"',
            expected="`calculator`, file.py:function, module:function, or a list of them",
        )
    return described


def _load(name: str) -> ToolFunction:
    match name:
        case "calculator":
            return calculator
        case _ if ":" in name:
            return load_user_object(name, key="env.options.tools")
    raise UserError(
        "there is no such built-in tool",
        where="env.options.tools",
        found=repr(name),
        expected="`calculator`, or your own as file.py:function or module:function",
    )


@cache  # environments are made by the hundred, of a few functions
def _parameters(function: ToolFunction) -> _Parameters:
    """Raises UserError for a function that a model cannot call by names and values."""
    signature = inspect.signature(function)
    try:
        hints = get_type_hints(function, include_extras=True)
    except Exception as error:  # a hint is any expression
        raise _unfit(
            function, f"type hints that cannot be read: {error}", "type hints that Python can read"
        ) from None
    types: dict[str, TypeAdapter[Any]] = {}
    taken = [p for at, p in enumerate(signature.parameters.values()) if at or p.name != "self"]
    for parameter in taken:
        if parameter.kind in VARIADIC:
            raise _unfit(
                function, f"argument {str(parameter)!r}", "arguments that can be given by name"
            )
        if parameter.name not in hints:
            raise _unfit(
                function,
                f"argument {parameter.name!r} without a type hint",
                "a type hint for every argument",
            )
        try:
            types[parameter.name] = TypeAdapter(hints[parameter.name])
        except PydanticUserError:
            raise _unfit(
                function, f"argument {str(parameter)!r}", "types that JSON can carry"
            ) from None
    text = str(signature.replace(parameters=taken, return_annotation=inspect.Signature.empty))
    required = frozenset(p.name for p in taken if p.default is inspect.Parameter.empty)
    return _Parameters(text=text, types=types, required=required)


@cache
def _schema(function: ToolFunction) -> Tool:
    """What the chat template shows of it, as transformers writes it; raises UserError. Imports
    torch, which that asks for."""
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
    )

    try:
        return get_json_schema(function)
    except DocstringParsingException as error:
        reason, expected = (
            str(error),
            "a docstring with an `Args:` section that has a line `name: what it is` for each",
        )
    except (TypeHintParsingException, ValueError) as error:
        reason, expected = (
            str(error).splitlines()[0],
            "int, float, str, bool, Literal, Enum, or list, dict and Optional of them",
        )
    raise _unfit(function, reason, expected)


def _unfit(function: ToolFunction, found: str, expected: str) -> UserError:
    where = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}, {function.__qualname__}"
    return UserError(
        "a function cannot be a tool",
        where=where,
        found=found,
        expected=expected,
        next="mend its signature",
    )
