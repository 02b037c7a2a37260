"""OpenAI's API as the server (endpoints.py) and the server of agents (envs/agent) speak it: bodies
of requests, errors, messages with tool calls, and the frames of answers.

Bodies are pydantic models shaped like openai.types.chat, with docs/guide/serving.md's extensions.
An unsupported field is refused by name if it would change the output; otherwise it is accepted and
ignored. Validated as `lenient`, a model ignores what an agent's framework adds. Answers are plain
dicts: which fields they have depends on the request, and a text may be half a surrogate pair, which
pydantic does not write. Knows no HTTP server and no engine.
"""

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

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
IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
# fields that are not supported, with the values that ask for nothing
NEUTRAL: dict[str, tuple[object, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
}
# what a template is given besides chat_template_kwargs, and what it is
RESERVED = ("messages", "tools", "add_generation_prompt", "chat_template")
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
        self.status, self.code, self.headers = status, code, dict(headers or {})
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


# ---------------------------------------------------------------- reading


class Strict(BaseModel):
    """An object of a request; a null counts as a missing field."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _select_fields(cls, fields: object, info: ValidationInfo) -> object:
        """Leave out nulls, which clients send back as they got them, and unknown fields but one for
        the error to name: a million errors would fill the memory."""
        if not isinstance(fields, dict):
            return fields
        given = {name: value for name, value in fields.items() if value is not None}
        unknown = [name for name in given if name not in cls.model_fields]
        for name in unknown if info.context else unknown[1:]:
            del given[name]
        return given


M = TypeVar("M", bound=Strict)


def read_object(raw: bytes) -> Json:
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "the body is not a JSON object")
    return fields


def first_unsupported(fields: Json, neutral: Mapping[str, tuple[object, ...]]) -> str | None:
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
        first = error.errors(include_url=False, include_input=False)[0]
    message = str(first["msg"]).removeprefix("Value error, ")
    if not first["loc"]:  # a check over several fields; its text begins with the field's name
        raise ApiError(400, message, param=message.split()[0])
    field, *inner = first["loc"]
    if field in _EXPECTED and first["type"] != "missing":
        raise ApiError(400, f"{field}: expected {_EXPECTED[str(field)]}", param=str(field))
    param = f"{field}" + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in inner)
    if first["type"] == "extra_forbidden":
        message = f"{param} is not a field that this server knows"
        raise ApiError(400, message, param=param, code="unknown_parameter")
    raise ApiError(400, f"{param}: {message}", param=param)


B = TypeVar("B", bound="Body")


def parse(kind: type[B], raw: bytes, model: str) -> B:
    """Parse the body of a request to the server of a model. Raises ApiError, which names the
    field."""
    fields = read_object(raw)
    neutral = {name: NEUTRAL[name] for name in NEUTRAL.keys() - kind.model_fields.keys()}
    if (name := first_unsupported(fields, neutral)) is not None:
        message = f"{name} is not supported by this server"
        raise ApiError(400, message, param=name, code="unsupported_parameter")
    ignored = IGNORED | neutral.keys()
    body = validate(kind, {name: fields[name] for name in fields if name not in ignored})
    if body.model not in (None, model):
        message = f"the model {body.model!r} does not exist; this server has {model!r}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return body


# ---------------------------------------------------------------- messages and tools


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
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
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


class _ToolName(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: _ToolName


# ---------------------------------------------------------------- bodies


TokenId = Annotated[int, Field(ge=0, lt=2**31)]  # requests.py checks it against the vocabulary
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]


class _StreamOptions(Strict):
    include_usage: bool = False


def _schema_of(response_format: object) -> Json | None:
    """Return the JSON schema that an answer is to have, None for any text."""
    match response_format:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return schema
    raise ValueError(
        'expected {"type": "text"}, {"type": "json_object"}, or {"type": "json_schema", '
        '"json_schema": {"name": ..., "schema": {...}}}'
    )


class Body(Strict):
    """Fields of both endpoints."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    n: Annotated[int, Field(ge=1)] = 1
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=1024)]],
        Field(fail_fast=True, max_length=16, default_factory=list),
        BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
    ]
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    top_k: Annotated[int, BeforeValidator(lambda k: 0 if k == -1 else k), Field(ge=0)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    stop_token_ids: Annotated[TokenIds, Field(max_length=1024, default_factory=list)]
    min_tokens: Annotated[int, Field(ge=0)] = 0
    ignore_eos: bool = False
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: Annotated[Json | None, BeforeValidator(_schema_of)] = None  # its schema
    return_token_ids: bool = False
    # the address of the draws instead of a seed, and the number of the first of them
    draw_key: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    draw_start: Annotated[int, Field(ge=0, lt=2**31)] = 0

    @model_validator(mode="after")
    def _check_both(self) -> Self:
        if self.draw_key is not None and (self.n > 1 or self.seed is not None):
            raise ValueError("draw_key is of one sequence, without n and seed")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs come with a whole answer, not with stream")
        if 0 < self.temperature < 0.01:
            raise ValueError(
                "temperature is 0 (greedy) or at least 0.01: logits divided by less overflow"
            )
        return self

    @property
    @abstractmethod
    def top_logprobs_wanted(self) -> int | None:
        """Number of the likeliest tokens to report with each log-prob; None: no log-probs."""


class CompletionBody(Body):
    """POST /v1/completions"""

    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(fail_fast=True)]
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def top_logprobs_wanted(self) -> int | None:
        return self.logprobs


def _check_variables(variables: Json) -> Json:
    if reserved := next((name for name in RESERVED if name in variables), ""):
        raise ValueError(f"{reserved} is not for a request to set")
    return variables


class ChatBody(Body):
    """POST /v1/chat/completions; prompt_token_ids takes the place of the rendered messages."""

    messages: Annotated[
        list[ChatMessage], Field(fail_fast=True, max_length=MAX_MESSAGES, default_factory=list)
    ]
    prompt_token_ids: TokenIds | None = None
    tools: Annotated[
        list[FunctionTool], Field(fail_fast=True, max_length=MAX_TOOLS, default_factory=list)
    ]
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: Annotated[
        dict[str, Any], Field(default_factory=dict), AfterValidator(_check_variables)
    ]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if not self.messages and self.prompt_token_ids is None:
            raise ValueError("messages is empty, and there are no prompt_token_ids")
        if self.response_format is not None and self.callable_tools:
            raise ValueError("response_format leaves no room for calls; with tool_choice: none")
        if not self.parallel_tool_calls and self.callable_tools and not self.forces_calls:
            raise ValueError("parallel_tool_calls false needs a tool_choice that forces a call")
        if self.forces_calls and not self.forced_tools:
            raise ValueError("tool_choice wants a call of a tool that is not among the tools")
        return self

    @property
    def callable_tools(self) -> Sequence[Tool]:
        """Tools that the model is shown; calls of them are read in its answer."""
        return () if self.tool_choice == "none" else self.tools

    @property
    def forces_calls(self) -> bool:
        """Tell whether the answer is to be calls and nothing else: JSON, as
        json_masks.calls_schema has it."""
        return self.tool_choice not in ("none", "auto")

    @property
    def forced_tools(self) -> Sequence[Tool]:
        """Tools that such calls may be of."""
        if not isinstance(self.tool_choice, NamedTool):
            return self.tools
        name = self.tool_choice.function.name
        return [tool for tool in self.tools if tool["function"]["name"] == name]

    @property
    def top_logprobs_wanted(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


class WeightsBody(Strict):
    """POST /v1/weights, an extension."""

    path: str  # of a safetensors file that the server can read
    version: Annotated[int, Field(ge=0, lt=2**31)]  # int32 in every completion


# ---------------------------------------------------------------- answers


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
