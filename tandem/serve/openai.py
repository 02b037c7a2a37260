"""OpenAI's API as the server (endpoints.py) and that of plugins/agents speak it: bodies of
requests, errors, messages with tool calls, and the frames of answers.

Bodies are pydantic models shaped like openai.types.chat, with docs/guide/serving.md's extensions. A
field that is not supported has the type of the values that ask for nothing, so any other value is
refused by the field's name. Answers are plain dicts: which fields they have depends on the request.
Knows no HTTP server and no engine.
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
    model_validator,
)

from tandem.types import Tool

Json = dict[str, Any]

# what a template is given besides chat_template_kwargs, and what it is
RESERVED = ("messages", "tools", "add_generation_prompt", "chat_template")
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


class _ToolName(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: _ToolName


# ---------------------------------------------------------------- bodies


TokenId = Annotated[int, Field(ge=0, lt=2**31)]  # requests.py checks it against the vocabulary
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]

# values that ask for nothing
Zero = Annotated[float, Field(ge=0, le=0)]
NoList = Annotated[list[Any], Field(max_length=0)]
NoObject = Annotated[dict[str, Any], Field(max_length=0)]
NoChoice = Literal["none", "auto"]


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


MaxTokens = Annotated[int, Field(ge=1)] | None
Stops = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=1024)]],
    Field(max_length=16, default_factory=list),
    BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
]


class Body(Strict):
    """Fields of both endpoints."""

    model: str | None = None
    max_tokens: MaxTokens = None
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    n: Annotated[int, Field(ge=1)] = 1
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stops
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

    # ignored
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    # not supported
    presence_penalty: Zero | None = None
    frequency_penalty: Zero | None = None
    logit_bias: NoObject | None = None
    best_of: Literal[1] | None = None
    echo: bool = False
    suffix: Literal[""] | None = None
    functions: NoList | None = None
    function_call: NoChoice | None = None
    modalities: list[Literal["text"]] | None = None

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
    def source(self) -> str:
        """The field of the prompts."""

    @property
    @abstractmethod
    def top_logprobs_wanted(self) -> int | None:
        """Number of the likeliest tokens to report with each log-prob; None: no log-probs."""


def _as_prompts(prompt: object) -> object:
    """Return a list of prompts: of one text or of one list of token ids, it alone."""
    several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    return prompt if several else [prompt]


class CompletionBody(Body):
    """POST /v1/completions"""

    prompt: Annotated[list[str] | list[TokenIds], BeforeValidator(_as_prompts)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: NoList | None = None
    tool_choice: NoChoice | None = None
    chat_template_kwargs: NoObject | None = None

    @model_validator(mode="after")
    def _score_echo(self) -> Self:
        if self.echo and self.stream:
            raise ValueError("echo comes with a whole answer, not with stream")
        if self.echo and self.logprobs is not None:  # as vLLM has it
            self.prompt_logprobs = max(self.logprobs, self.prompt_logprobs or 0)
        return self

    @property
    def source(self) -> str:
        return "prompt"

    @property
    def top_logprobs_wanted(self) -> int | None:
        return self.logprobs


class ChatBody(Body):
    """POST /v1/chat/completions; prompt_token_ids takes the place of the rendered messages."""

    messages: Annotated[list[ChatMessage], Field(default_factory=list)]
    prompt_token_ids: TokenIds | None = None
    tools: Annotated[list[FunctionTool], Field(default_factory=list)]
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: Annotated[dict[str, Any], Field(default_factory=dict)]
    max_completion_tokens: MaxTokens = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    echo: Literal[False] = False

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if reserved := next((name for name in RESERVED if name in self.chat_template_kwargs), ""):
            raise ValueError(f"chat_template_kwargs may not have {reserved}")
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
    def source(self) -> str:
        return "messages" if self.prompt_token_ids is None else "prompt_token_ids"

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
