"""Requests in OpenAI's shape, with the extensions of docs/serving.md.

What would change the output and is not done here is refused by name; what would not is accepted and
ignored. The engine's requests are made of them by openai_prompts, answers are written by
openai_answers. Knows no HTTP server and no engine.
"""

import json
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, Self, TypeVar

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from tandem.types import Array, Message, Tool

IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
# Fields that this server does not do, and the values with which they ask for nothing.
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
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "parallel_tool_calls": (True,),
}
WANTED = {
    "prompt": "text, a list of texts, a list of token ids, or a list of such lists",
    "stop": "a text that is not empty, or a list of at most 16 of them",
    "tool_choice": "none or auto: the server cannot make a model call a tool",
}

# A body is parsed in one piece that nothing can interrupt, and what it holds of these costs time:
# 0.1 s at most.
MOST_COMMAS, MOST_OPENINGS = 1 << 18, 1 << 16  # openings: colons, and opening brackets and braces
MOST_MESSAGES, MOST_TOOLS = 2048, 128  # as OpenAI has them
LONGEST_WORDS = 1000  # characters of an error's message
_COUNTED = 1 << 20  # bytes, in one piece


class ApiError(Exception):
    """An answer that is an error, in OpenAI's shape: {"error": {"message", "type", "param",
    "code"}}."""

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
        self.status, self.message, self.code, self.retry_s = (
            status,
            _shortened(message),
            code,
            retry_s,
        )
        self.param = param and _shortened(param)

    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        }


def _shortened(text: str) -> str:
    """Cut a text that quotes what a client sent."""
    return text if len(text) <= LONGEST_WORDS else f"{text[:LONGEST_WORDS]}..."


class Texts(Protocol):
    """A tokenizer with a chat template. byte_tokens: see Detokenizer."""

    stop_token_ids: tuple[int, ...]
    byte_tokens: frozenset[int]

    def encode(self, text: str) -> Array: ...

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str: ...

    def encode_chat(self, text: str) -> Array: ...

    def decode(self, tokens: Array) -> str: ...

    def token_text(self, token: int) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What is served, and its limits. Example: Served(name="demo", context=4096, vocabulary=151936,
    ...)"""

    name: str
    context: int  # tokens, prompt and completion
    # characters of a prompt: those of as many of the longest tokens as the context has
    longest_text: int
    vocabulary: int  # token ids are below it
    default_max_tokens: int
    max_choices: int  # of one request, over all its prompts

    @property
    def longest_body(self) -> int:
        """Bytes of the largest body: 16 of the longest prompts, and within 1 and 16 MiB."""
        return min(max(16 * self.longest_text, 1 << 20), 16 << 20)


# ---- what clients send


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _given(cls, fields: object) -> object:
        """Leave out nulls: clients send back what they got. Of unknown fields one is left, for the
        refusal to name."""
        if not isinstance(fields, dict):
            return fields
        given = {name: value for name, value in fields.items() if value is not None}
        known = given.keys() & cls.model_fields.keys()
        first = next((name for name in given if name not in known), "")
        return {name: value for name, value in given.items() if name in known or name == first}


TokenId = Annotated[int, Field(ge=0, lt=2**31)]  # to_requests checks it against the vocabulary


class _StreamOptions(_Strict):
    include_usage: bool = False


def _text_of_parts(content: object) -> object:
    """Parts such as {"type": "text", "text": "Hi"}, joined; anything else is the field's own
    business."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, dict) or part.keys() != {"type", "text"} or part["type"] != "text":
            raise ValueError("only parts of type text are supported")
    return "".join(str(part["text"]) for part in content)


def _arguments(arguments: object) -> object:
    """The arguments of a call, which OpenAI writes as JSON in a text."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except RecursionError:
        raise ValueError("nested too deeply") from None


class _Function(_Strict):
    name: Annotated[str, Field(min_length=1)]
    arguments: Annotated[dict[str, Any], BeforeValidator(_arguments)]


class _ToolCall(_Strict):
    id: str | None = None
    type: Literal["function"] = "function"
    function: _Function


class _ChatMessage(_Strict):
    role: Annotated[
        str,
        Field(max_length=64),
        AfterValidator(lambda role: "system" if role == "developer" else role),
    ]
    content: Annotated[str, BeforeValidator(_text_of_parts)] = ""
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: (
        Annotated[list[_ToolCall], Field(fail_fast=True, min_length=1, max_length=MOST_TOOLS)]
        | None
    ) = None
    tool_call_id: str | None = None


def _function_tool(tool: Tool) -> Tool:
    """The tool as it came, so that the template writes what it writes in training."""
    match tool:
        case {"type": "function", "function": {"name": str(name), **rest}} if name:
            if isinstance(rest.get("parameters") or {}, dict):
                return tool
    raise ValueError(
        'expected {"type": "function", "function": {"name": ..., "parameters": {...}}}'
    )


def _list_of_one(stop: object) -> object:
    return [stop] if isinstance(stop, str) else stop


def _off(top_k: object) -> object:
    return 0 if top_k == -1 else top_k


class Body(_Strict):
    """The fields that both endpoints have; a null is a field that is not given."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    n: Annotated[int, Field(ge=1)] = 1
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=1024)]],
        Field(fail_fast=True, max_length=16),
        BeforeValidator(_list_of_one),
    ] = []
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    top_k: Annotated[int, BeforeValidator(_off), Field(ge=0)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=1024)] = []
    return_token_ids: bool = False

    @model_validator(mode="after")
    def _no_tiny_temperature(self) -> Self:
        if 0 < self.temperature < 0.01:
            raise ValueError(
                "temperature is 0 (greedy) or at least 0.01: logits divided by less overflow"
            )
        return self

    @abstractmethod
    def top_logprobs_wanted(self) -> int | None:
        """How many of the likeliest tokens to report beside each token's log-prob; None: no
        log-probs at all."""

    @abstractmethod
    def source(self) -> tuple[str, int]:
        """The field that the prompts are in, and how many they are."""

    @abstractmethod
    def prompts(self, texts: Texts) -> Sequence[str | Array]:
        """The prompts, each a text for `encode` or token ids, int64 [T]. Raises UserError when the
        chat template refuses the messages."""

    @abstractmethod
    def encode(self, text: str, texts: Texts) -> Array:
        """The tokens of such a text, int64 [T]."""


class CompletionBody(Body):
    """POST /v1/completions"""

    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True)]
        | Annotated[list[TokenId], Field(fail_fast=True)]
        | Annotated[list[Annotated[list[TokenId], Field(fail_fast=True)]], Field(fail_fast=True)]
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def top_logprobs_wanted(self) -> int | None:
        return self.logprobs

    def source(self) -> tuple[str, int]:
        return "prompt", len(self._several())

    def prompts(self, texts: Texts) -> Sequence[str | Array]:
        return [
            prompt if isinstance(prompt, str) else np.array(prompt, np.int64)
            for prompt in self._several()
        ]

    def encode(self, text: str, texts: Texts) -> Array:
        return texts.encode(text)

    def _several(self) -> Sequence[str | Sequence[int]]:
        match self.prompt:
            case [str() | list(), *_]:
                return self.prompt  # type: ignore[return-value]
            case _:
                return [self.prompt]  # type: ignore[list-item]


class ChatBody(Body):
    """POST /v1/chat/completions; prompt_token_ids takes the place of the rendered messages."""

    messages: Annotated[list[_ChatMessage], Field(fail_fast=True, max_length=MOST_MESSAGES)] = []
    prompt_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] | None = None
    tools: Annotated[
        list[Annotated[Tool, AfterValidator(_function_tool)]],
        Field(fail_fast=True, max_length=MOST_TOOLS),
    ] = []
    tool_choice: Literal["none", "auto"] = "auto"
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if not self.messages and self.prompt_token_ids is None:
            raise ValueError("messages is empty, and there are no prompt_token_ids")
        return self

    @property
    def callable_tools(self) -> Sequence[Tool]:
        """Tools that the model is shown, and whose calls are read in its answer."""
        return self.tools if self.tool_choice == "auto" else ()

    def top_logprobs_wanted(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    def source(self) -> tuple[str, int]:
        return "messages" if self.prompt_token_ids is None else "prompt_token_ids", 1

    def prompts(self, texts: Texts) -> Sequence[str | Array]:
        if self.prompt_token_ids is not None:
            return [np.array(self.prompt_token_ids, np.int64)]
        return [
            texts.render(
                [message.model_dump(exclude_none=True) for message in self.messages],
                self.callable_tools,
            )
        ]

    def encode(self, text: str, texts: Texts) -> Array:
        return texts.encode_chat(text)


B = TypeVar("B", bound=Body)


def parse(kind: type[B], raw: bytes, served: Served) -> B:
    """The body of a request. Raises ApiError, which names the field."""
    fields = _read_json(raw)
    if not isinstance(fields, dict):
        raise ApiError(400, "the body is not a JSON object")
    fields = {
        name: value for name, value in fields.items() if value is not None and name not in IGNORED
    }
    for name in sorted(fields.keys() & NEUTRAL.keys() - kind.model_fields.keys()):
        if fields.pop(name) not in NEUTRAL[name]:
            raise ApiError(
                400,
                f"{name} is not supported by this server",
                param=name,
                code="unsupported_parameter",
            )
    try:
        body = kind.model_validate(fields)
    except ValidationError as error:
        raise _explained(error) from None
    if body.model not in (None, served.name):
        message = f"the model {body.model!r} does not exist; this server has {served.name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return body


def _read_json(raw: bytes) -> object:
    pieces = [raw[at : at + _COUNTED] for at in range(0, len(raw), _COUNTED)]
    commas, openings = (
        sum(piece.count(mark) for piece in pieces for mark in marks) for marks in (b",", b":[{")
    )
    if commas > MOST_COMMAS or openings > MOST_OPENINGS:
        message = f"the body has more than {MOST_COMMAS:,} commas, or more than {MOST_OPENINGS:,} colons and opening brackets"
        raise ApiError(413, f"{message}; send fewer prompts in one request")
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None


def _explained(error: ValidationError) -> ApiError:
    """The first mistake. Of a place such as ("messages", 0, "content", "str") the tags of a union
    are left out."""
    first = error.errors(include_url=False, include_input=False)[0]
    if not first["loc"]:  # a check over several fields; its text begins with the field's name
        message = str(first["msg"]).removeprefix("Value error, ")
        return ApiError(400, message, param=message.split()[0])
    field, *inner = first["loc"]
    if field in WANTED and first["type"] != "missing":
        return ApiError(400, f"{field}: expected {WANTED[str(field)]}", param=str(field))
    param = f"{field}" + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in inner)
    if first["type"] == "extra_forbidden":
        return ApiError(
            400,
            f"{param} is not a field that this server knows",
            param=param,
            code="unknown_parameter",
        )
    return ApiError(400, f"{param}: {first['msg'].removeprefix('Value error, ')}", param=param)
