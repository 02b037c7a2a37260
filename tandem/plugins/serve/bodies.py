"""The bodies of requests that `tandem serve` takes, with docs/guide/serving.md's extensions.

A field that is not supported has the type of the values that ask for nothing, so any other value is
refused by the field's name. Knows no HTTP server and no engine.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from tandem.serve.openai import (
    ChatMessage,
    FunctionTool,
    Json,
    MaxTokens,
    NoChoice,
    NoList,
    NoObject,
    Stops,
    Strict,
)
from tandem.types import Tool

# what a template is given besides chat_template_kwargs, and what it is
RESERVED = ("messages", "tools", "add_generation_prompt", "chat_template")
TokenId = Annotated[int, Field(ge=0, lt=2**31)]  # requests.py checks it against the vocabulary
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Zero = Literal[0]  # 0.0 too


class _ToolName(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: _ToolName


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
