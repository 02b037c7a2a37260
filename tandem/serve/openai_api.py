"""The parts of OpenAI's API that the server and the server of agents (envs/agent) share: errors,
messages with tool calls, and the frames of answers.

A model forbids unknown fields. Validated as `lenient`, it ignores those that an agent's framework
writes. Knows no HTTP server and no engine.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from tandem.types import Tool

Json = dict[str, Any]

MAX_MESSAGES, MAX_TOOLS = 2048, 128  # as OpenAI has them
MAX_ERROR_TEXT = 1000  # characters
_EXPECTED = {
    "prompt": "text, a list of texts, a list of token ids, or a list of such lists",
    "stop": "a text that is not empty, or a list of at most 16 of them",
    "tool_choice": 'none, auto, required, or {"type": "function", "function": {"name": ...}}',
}


class ApiError(Exception):
    """An error answer, in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_s: int = 0,
    ):
        super().__init__(message)
        self.status, self.code, self.retry_s = status, code, retry_s
        self.message, self.param = _shortened(message), param and _shortened(param)

    def body(self) -> Json:
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        default = "invalid_request_error" if self.status < 500 else "server_error"
        kind = kinds.get(self.status, default)
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        }


def _shortened(text: str) -> str:
    """Shorten a text that quotes a client's."""
    return text if len(text) <= MAX_ERROR_TEXT else f"{text[:MAX_ERROR_TEXT]}..."


# ---- requests


class Strict(BaseModel):
    """An object of a request; a null counts as a missing field."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _select_fields(cls, fields: object, info: ValidationInfo) -> object:
        """Leave out nulls, which clients send back as they got them, and unknown fields but one for
        the error to name."""
        if not isinstance(fields, dict):
            return fields
        given = {name: value for name, value in fields.items() if value is not None}
        known = given.keys() & cls.model_fields.keys()
        unknown = "" if info.context else next((name for name in given if name not in known), "")
        return {name: value for name, value in given.items() if name in known or name == unknown}


M = TypeVar("M", bound=Strict)


def read_object(raw: bytes) -> Json:
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "the body is not a JSON object")
    return fields


def first_unsupported(fields: Json, neutral: dict[str, tuple[object, ...]]) -> str | None:
    """Find the first field that asks for something not done here. neutral: such fields, with the
    values that ask for nothing."""
    for name in sorted(fields.keys() & neutral.keys()):
        if fields[name] is not None and fields[name] not in neutral[name]:
            return name
    return None


def validate(kind: type[M], fields: Json, *, lenient: bool = False) -> M:
    """Validate fields. Raises ApiError, which names the field."""
    try:
        return kind.model_validate(fields, context="lenient" if lenient else None)
    except ValidationError as error:
        raise _first_mistake(error) from None


def _first_mistake(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_input=False)[0]
    message = str(first["msg"]).removeprefix("Value error, ")
    if not first["loc"]:  # a check over several fields; its text begins with the field's name
        return ApiError(400, message, param=message.split()[0])
    field, *inner = first["loc"]
    if field in _EXPECTED and first["type"] != "missing":
        return ApiError(400, f"{field}: expected {_EXPECTED[str(field)]}", param=str(field))
    param = f"{field}" + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in inner)
    if first["type"] == "extra_forbidden":
        message = f"{param} is not a field that this server knows"
        return ApiError(400, message, param=param, code="unknown_parameter")
    return ApiError(400, f"{param}: {message}", param=param)


def _join_parts(content: object, info: ValidationInfo) -> object:
    """Join parts such as {"type": "text", "text": "Hi"}; leave the rest to the field."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        match part:
            case {"type": "text" | "input_text", "text": str(text), **rest} if (
                info.context or not rest
            ):
                texts.append(text)
            case _:
                raise ValueError("only parts of type text are supported")
    return "".join(texts)


def _parse_arguments(arguments: object) -> object:
    """Parse the arguments of a call: JSON in a text, which is empty if there are none."""
    try:
        return json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except RecursionError:
        raise ValueError("nested too deeply") from None


class FunctionCall(Strict):
    name: Annotated[str, Field(min_length=1)]
    # keys of any kind: a model may write half of a surrogate pair, which pydantic takes for no text
    arguments: Annotated[dict[Any, Any], BeforeValidator(_parse_arguments)]


class ToolCall(Strict):
    """A call as a message holds it, the arguments parsed."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall

    @classmethod
    def of(cls, id: str, name: str, arguments: Json) -> "ToolCall":
        """Make a call by the model; it is not validated."""
        function = FunctionCall.model_construct(name=name, arguments=arguments)
        return cls.model_construct(id=id, function=function)

    def to_json(self) -> Json:
        arguments = json.dumps(self.function.arguments)
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


def _check_count(calls: object, info: ValidationInfo) -> object:
    """Bound the calls of a request; a model in training may write any number."""
    if isinstance(calls, list) and not info.context and not 0 < len(calls) <= MAX_TOOLS:
        raise ValueError(f"expected 1 to {MAX_TOOLS} calls")
    return calls


class ChatMessage(Strict):
    """A message of a request. Example: ChatMessage(role="user", content="Hi")"""

    role: Annotated[
        str,
        Field(max_length=64),
        AfterValidator(lambda role: "system" if role == "developer" else role),
    ]
    content: Annotated[str, BeforeValidator(_join_parts)] = ""
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: (
        Annotated[list[ToolCall], Field(fail_fast=True), BeforeValidator(_check_count)] | None
    ) = None
    tool_call_id: str | None = None


def _check_tool(tool: Tool) -> Tool:
    """Keep the tool as it came, so that the template writes the same text as in training."""
    match tool:
        case {"type": "function", "function": {"name": str(name), **rest}} if name:
            if isinstance(rest.get("parameters") or {}, dict):
                return tool
    raise ValueError(
        'expected {"type": "function", "function": {"name": ..., "parameters": {...}}}'
    )


FunctionTool = Annotated[Tool, AfterValidator(_check_tool)]


# ---- answers


def assistant_message(content: str, calls: Sequence[ToolCall]) -> Json:
    if not calls:
        return {"role": "assistant", "content": content}
    written = [call.to_json() for call in calls]
    return {"role": "assistant", "content": content or None, "tool_calls": written}


def call_deltas(calls: Sequence[ToolCall]) -> list[Json]:
    """Write calls as a piece of a streamed answer holds them."""
    return [{"index": index} | call.to_json() for index, call in enumerate(calls)]


def model_list(name: str, created: int = 0, **more: object) -> Json:
    model = {"id": name, "object": "model", "created": created, "owned_by": "tandem"}
    return {"object": "list", "data": [model | more]}


def event(data: str) -> str:
    """Write a server-sent event."""
    return f"data: {data}\n\n"


DONE = event("[DONE]")
