"""OpenAI's API as the server (endpoints.py) and that of plugins/agents speak it: bodies of
requests, errors, messages with tool calls, and the frames of answers.

Bodies are pydantic models shaped like openai.types.chat. Answers are plain dicts: which fields they
have depends on the request. Knows no HTTP server and no engine.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from tandem.types import Tool

Json = dict[str, Any]

# fields whose types make a message of pydantic that says too little
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
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> Json:
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        default = "invalid_request_error" if self.status < 500 else "server_error"
        kind = kinds.get(self.status, default)
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        }


# ---------------------------------------------------------------- reading


class Lenient(BaseModel):
    """An object of a request. It has more fields where a client adds some; a null, which clients
    send back as they got it, counts as a missing field."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nulls(cls, fields: object) -> object:
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value is not None}


class Strict(Lenient):
    """An object of a request without other fields."""

    model_config = ConfigDict(extra="forbid")


M = TypeVar("M", bound=Lenient)


def read_body(kind: type[M], raw: bytes) -> M:
    """Read the body of a request. Raises ApiError, which names the field."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
    message, place = str(first["msg"]).removeprefix("Value error, "), first["loc"]
    if not place:  # no JSON object, or a check over fields, whose text begins with one's name
        checked = first["type"] == "value_error"
        raise ApiError(400, message, param=message.split()[0] if checked else None)
    if place[0] in _EXPECTED and first["type"] != "missing":
        place, message = place[:1], f"expected {_EXPECTED[str(place[0])]}"
    param = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in place)[1:]
    code = "unknown_parameter" if first["type"] == "extra_forbidden" else None
    raise ApiError(400, f"{param}: {message}", param=param, code=code)


# ---------------------------------------------------------------- messages and tools


def join_parts(content: object) -> object:
    """Join parts such as {"type": "text", "text": "Hi"}; leave the rest to the field."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        match part:
            case {"type": "text" | "input_text" | "output_text", "text": str(text)}:
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


class FunctionCall(Lenient):
    name: Annotated[str, Field(min_length=1)]
    # keys of any kind: a model may write half of a surrogate pair, which pydantic takes for no text
    arguments: Annotated[dict[Any, Any], BeforeValidator(_parse_arguments)]


class ToolCall(Lenient):
    """A call as a message holds it, the arguments parsed."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Lenient):
    """A message of a request. Example: ChatMessage(role="user", content="Hi")"""

    role: Annotated[str, AfterValidator(lambda role: "system" if role == "developer" else role)]
    content: Annotated[str, BeforeValidator(join_parts)] = ""
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
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


# ---------------------------------------------------------------- fields of bodies


# values that ask for nothing
NoList = Annotated[list[Any], Field(max_length=0)]
NoObject = Annotated[dict[str, Any], Field(max_length=0)]
NoChoice = Literal["none", "auto"]


MaxTokens = Annotated[int, Field(ge=1)] | None
Stops = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=1024)]],
    Field(max_length=16, default_factory=list),
    BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
]


# ---------------------------------------------------------------- answers


def call_json(id: str, name: str, arguments: Json) -> Json:
    """Write a call of the model as a message holds it."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": id, "type": "function", "function": function}


def assistant_message(content: str, calls: Sequence[Json]) -> Json:
    if not calls:
        return {"role": "assistant", "content": content}
    return {"role": "assistant", "content": content or None, "tool_calls": [*calls]}


def call_deltas(calls: Sequence[Json]) -> list[Json]:
    """Write calls as a piece of a streamed answer holds them."""
    return [{"index": index} | call for index, call in enumerate(calls)]


def model_list(name: str, created: int = 0, **more: object) -> Json:
    model = {"id": name, "object": "model", "created": created, "owned_by": "tandem"}
    return {"object": "list", "data": [model | more]}


def event(data: str) -> str:
    """Write a server-sent event."""
    return f"data: {data}\n\n"


DONE = event("[DONE]")
