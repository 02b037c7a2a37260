"""Requests for completions in OpenAI's shape, with the extensions of docs/serving.md.

An unsupported field is refused by name if it would change the output; otherwise it is accepted and
ignored. Knows no HTTP server and no engine.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, Self, TypeVar

import numpy as np
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from tandem.serve.json_masks import JsonMask, calls_schema
from tandem.serve.openai_api import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ApiError,
    ChatMessage,
    FunctionTool,
    Json,
    Strict,
    first_unsupported,
    read_object,
    validate,
)
from tandem.types import Array, Message, Tool

IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
# fields that this server does not support, with the values that ask for nothing
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

# A body is parsed in one uninterruptible piece; these counts bound it to 0.1 s.
MAX_COMMAS, MAX_OPENINGS = 1 << 18, 1 << 16  # openings: colons, and opening brackets and braces
_COUNTED = 1 << 20  # bytes, in one piece


class ChatTokenizer(Protocol):
    """A tokenizer with a chat template. byte_tokens: see Detokenizer."""

    stop_token_ids: tuple[int, ...]
    byte_tokens: frozenset[int]

    def encode(self, text: str) -> Array: ...

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool], variables: Json
    ) -> str: ...

    def encode_chat(self, text: str) -> Array: ...

    def json_mask(self, schema: Json, vocabulary: int, field: str) -> JsonMask: ...

    def decode(self, tokens: Array) -> str: ...

    def token_text(self, token: int) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The served model's name and limits. Example: Served(name="demo", context=4096,
    vocabulary=151936, ...)"""

    name: str
    context: int  # tokens, prompt and completion
    longest_text: int  # characters of a prompt: the context full of the longest token
    vocabulary: int  # token ids are below it
    default_max_tokens: int
    max_choices: int  # of one request, over all its prompts

    @property
    def longest_body(self) -> int:
        """Bytes of the largest body: 16 of the longest prompts, at least 1 and at most 16 MiB."""
        return min(max(16 * self.longest_text, 1 << 20), 16 << 20)


# ---- bodies


TokenId = Annotated[int, Field(ge=0, lt=2**31)]  # to_requests checks it against the vocabulary


class _StreamOptions(Strict):
    include_usage: bool = False


def _list_of_one(stop: object) -> object:
    return [stop] if isinstance(stop, str) else stop


def _zero_if_off(top_k: object) -> object:
    return 0 if top_k == -1 else top_k


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
        BeforeValidator(_list_of_one),
    ]
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    top_k: Annotated[int, BeforeValidator(_zero_if_off), Field(ge=0)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    stop_token_ids: Annotated[
        list[TokenId], Field(fail_fast=True, max_length=1024, default_factory=list)
    ]
    min_tokens: Annotated[int, Field(ge=0)] = 0
    ignore_eos: bool = False
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: Annotated[Json | None, BeforeValidator(_schema_of)] = None  # its schema
    return_token_ids: bool = False
    # the address of the draws instead of a seed, and the number of the first of them
    draw_key: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    draw_start: Annotated[int, Field(ge=0, lt=2**31)] = 0

    @model_validator(mode="after")
    def _check_draws(self) -> Self:
        if self.draw_key is not None and (self.n > 1 or self.seed is not None):
            raise ValueError("draw_key is of one sequence, without n and seed")
        return self

    @model_validator(mode="after")
    def _check_response_format(self) -> Self:
        if (json := self.json_wanted()) and (self.ignore_eos or self.min_tokens):
            raise ValueError(
                f"{json[0]} ends an answer with its JSON, without ignore_eos and min_tokens"
            )
        return self

    @model_validator(mode="after")
    def _check_prompt_logprobs(self) -> Self:
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs come with a whole answer, not with stream")
        return self

    @model_validator(mode="after")
    def _check_temperature(self) -> Self:
        if 0 < self.temperature < 0.01:
            raise ValueError(
                "temperature is 0 (greedy) or at least 0.01: logits divided by less overflow"
            )
        return self

    def json_wanted(self) -> tuple[str, Json] | None:
        """Return the field that wants JSON as the answer, and its schema; None: any text."""
        return None if self.response_format is None else ("response_format", self.response_format)

    @abstractmethod
    def top_logprobs_wanted(self) -> int | None:
        """Return how many of the likeliest tokens to report with each log-prob; None: no
        log-probs."""

    @abstractmethod
    def source(self) -> tuple[str, int]:
        """Return the field of the prompts, and their number."""

    @abstractmethod
    def prompts(self, tokenizer: ChatTokenizer) -> Sequence[str | Array]:
        """Return the prompts: texts for `encode`, or token ids int64 [T]. Raises UserError if the
        chat template refuses the messages."""

    @abstractmethod
    def encode(self, text: str, tokenizer: ChatTokenizer) -> Array:
        """Tokenize such a text to int64 [T]."""


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
        return "prompt", len(self._prompts())

    def prompts(self, tokenizer: ChatTokenizer) -> Sequence[str | Array]:
        return [
            prompt if isinstance(prompt, str) else np.array(prompt, np.int64)
            for prompt in self._prompts()
        ]

    def encode(self, text: str, tokenizer: ChatTokenizer) -> Array:
        return tokenizer.encode(text)

    def _prompts(self) -> Sequence[str | Sequence[int]]:
        match self.prompt:
            case [str() | list(), *_]:
                return self.prompt  # type: ignore[return-value]
            case _:
                return [self.prompt]  # type: ignore[list-item]


def _check_variables(variables: Json) -> Json:
    if reserved := next((name for name in RESERVED if name in variables), ""):
        raise ValueError(f"{reserved} is not for a request to set")
    return variables


class _ToolName(Strict):
    name: str


class _NamedTool(Strict):
    type: Literal["function"]
    function: _ToolName


class ChatBody(Body):
    """POST /v1/chat/completions; prompt_token_ids takes the place of the rendered messages."""

    messages: Annotated[
        list[ChatMessage], Field(fail_fast=True, max_length=MAX_MESSAGES, default_factory=list)
    ]
    prompt_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] | None = None
    tools: Annotated[
        list[FunctionTool], Field(fail_fast=True, max_length=MAX_TOOLS, default_factory=list)
    ]
    tool_choice: Literal["none", "auto", "required"] | _NamedTool = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: Annotated[
        dict[str, Any], Field(default_factory=dict), AfterValidator(_check_variables)
    ]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
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
        """Tell whether the answer is to be calls and nothing else: JSON, as `calls_schema` has
        it."""
        return self.tool_choice not in ("none", "auto")

    @property
    def forced_tools(self) -> Sequence[Tool]:
        """Tools that such calls may be of."""
        match self.tool_choice:
            case _NamedTool(function=named):
                return [tool for tool in self.tools if tool["function"]["name"] == named.name]
        return self.tools

    def json_wanted(self) -> tuple[str, Json] | None:
        if not self.forces_calls:
            return super().json_wanted()
        single = isinstance(self.tool_choice, _NamedTool) or not self.parallel_tool_calls
        return "tool_choice", calls_schema(self.forced_tools, single=single)

    def top_logprobs_wanted(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    def source(self) -> tuple[str, int]:
        return "messages" if self.prompt_token_ids is None else "prompt_token_ids", 1

    def prompts(self, tokenizer: ChatTokenizer) -> Sequence[str | Array]:
        if self.prompt_token_ids is not None:
            return [np.array(self.prompt_token_ids, np.int64)]
        messages = [message.model_dump(exclude_none=True) for message in self.messages]
        return [tokenizer.render(messages, self.callable_tools, self.chat_template_kwargs)]

    def encode(self, text: str, tokenizer: ChatTokenizer) -> Array:
        return tokenizer.encode_chat(text)


class WeightsBody(Strict):
    """POST /v1/weights, an extension."""

    path: str  # of a safetensors file that the server can read
    version: Annotated[int, Field(ge=0, lt=2**31)]  # int32 in every completion


B = TypeVar("B", bound=Body)


def parse(kind: type[B], raw: bytes, served: Served) -> B:
    """Parse the body of a request. Raises ApiError, which names the field."""
    _check_size(raw)
    fields = read_object(raw)
    neutral = {name: NEUTRAL[name] for name in NEUTRAL.keys() - kind.model_fields.keys()}
    if (name := first_unsupported(fields, neutral)) is not None:
        message = f"{name} is not supported by this server"
        raise ApiError(400, message, param=name, code="unsupported_parameter")
    ignored = IGNORED | neutral.keys()
    body = validate(kind, {name: fields[name] for name in fields if name not in ignored})
    if body.model not in (None, served.name):
        message = f"the model {body.model!r} does not exist; this server has {served.name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return body


def _check_size(raw: bytes) -> None:
    pieces = [raw[at : at + _COUNTED] for at in range(0, len(raw), _COUNTED)]
    commas, openings = (
        sum(piece.count(mark) for piece in pieces for mark in marks) for marks in (b",", b":[{")
    )
    if commas > MAX_COMMAS or openings > MAX_OPENINGS:
        raise ApiError(
            413,
            f"the body has more than {MAX_COMMAS:,} commas, or more than {MAX_OPENINGS:,} colons "
            "and opening brackets; send fewer prompts in one request",
        )
