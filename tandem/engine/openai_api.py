"""Requests in OpenAI's shape, with the extensions of docs/serving.md, as the engine's requests.

What would change the output and is not done here is refused by name; what would not is accepted and ignored. Answers are
written by openai_answers. Knows no HTTP server and no engine.
"""

import itertools
import json
import secrets
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, Self, TypeVar

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from tandem.draws import address
from tandem.types import Array, Message, Request, SamplingParams

IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
# Fields that this server does not do, and the values with which they ask for nothing.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "presence_penalty": (0,), "frequency_penalty": (0,), "logit_bias": ({},), "best_of": (1,), "echo": (False,),
    "suffix": ("",), "tools": ([],), "functions": ([],), "tool_choice": ("none", "auto"), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "chat_template": (), "chat_template_kwargs": ({},),
}  # fmt: skip
WANTED = {
    "prompt": "text, a list of texts, a list of token ids, or a list of such lists",
    "stop": "a text that is not empty, or a list of at most 16 of them",
}


class ApiError(Exception):
    """An answer that is an error, in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_s: int = 0
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_s = status, message, param, code, retry_s

    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class Texts(Protocol):
    """A tokenizer with a chat template. byte_tokens: see Detokenizer."""

    stop_token_ids: tuple[int, ...]
    byte_tokens: frozenset[int]

    def encode(self, text: str) -> Array: ...

    def prompt(self, messages: Sequence[Message]) -> Array: ...

    def decode(self, tokens: Array) -> str: ...

    def token_text(self, token: int) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What is served, and its limits. Example: Served(name="demo", context=4096, vocabulary=151936, ...)"""

    name: str
    context: int  # tokens, prompt and completion
    vocabulary: int  # token ids are below it
    default_max_tokens: int
    max_choices: int  # of one request, over all its prompts


# ---- what clients send


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


TokenId = Annotated[int, Field(ge=0, lt=2**31)]  # to_requests checks it against the vocabulary


class _StreamOptions(_Strict):
    include_usage: bool = False


def _text_of_parts(content: object) -> object:
    """Parts such as {"type": "text", "text": "Hi"}, joined; anything else is the field's own business."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, dict) or part.keys() != {"type", "text"} or part["type"] != "text":
            raise ValueError("only parts of type text are supported")
    return "".join(str(part["text"]) for part in content)


class _ChatMessage(_Strict):
    role: str
    content: Annotated[str | None, BeforeValidator(_text_of_parts)] = None
    name: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, message: object) -> object:
        """Clients send back the messages that they got, with a null for all that they lack."""
        return {k: v for k, v in message.items() if v is not None} if isinstance(message, dict) else message


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
    stop: Annotated[list[Annotated[str, Field(min_length=1, max_length=1024)]],
                    BeforeValidator(_list_of_one), Field(max_length=16)] = []  # fmt: skip
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    top_k: Annotated[int, BeforeValidator(_off), Field(ge=0)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] = []
    return_token_ids: bool = False

    @model_validator(mode="after")
    def _no_tiny_temperature(self) -> Self:
        if 0 < self.temperature < 0.01:
            raise ValueError("temperature is 0 (greedy) or at least 0.01: logits divided by less overflow")
        return self

    @abstractmethod
    def top_logprobs_wanted(self) -> int | None:
        """How many of the likeliest tokens to report beside each token's log-prob; None: no log-probs at all."""

    @abstractmethod
    def source(self) -> tuple[str, int]:
        """The field that the prompts are in, and how many they are."""

    @abstractmethod
    def prompts(self, texts: Texts) -> list[Array]:
        """int64 [T] each. Raises UserError when the chat template refuses the messages."""


class CompletionBody(Body):
    """POST /v1/completions"""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def top_logprobs_wanted(self) -> int | None:
        return self.logprobs

    def source(self) -> tuple[str, int]:
        return "prompt", len(self._several())

    def prompts(self, texts: Texts) -> list[Array]:
        return [texts.encode(p) if isinstance(p, str) else np.array(p, np.int64) for p in self._several()]

    def _several(self) -> Sequence[str | Sequence[int]]:
        match self.prompt:
            case [str() | list(), *_]:
                return self.prompt  # type: ignore[return-value]
            case _:
                return [self.prompt]  # type: ignore[list-item]


class ChatBody(Body):
    """POST /v1/chat/completions; prompt_token_ids takes the place of the rendered messages."""

    messages: list[_ChatMessage] = []
    prompt_token_ids: list[TokenId] | None = None
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

    def top_logprobs_wanted(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    def source(self) -> tuple[str, int]:
        return "messages" if self.prompt_token_ids is None else "prompt_token_ids", 1

    def prompts(self, texts: Texts) -> list[Array]:
        if self.prompt_token_ids is not None:
            return [np.array(self.prompt_token_ids, np.int64)]
        return [texts.prompt([message.model_dump(exclude_none=True) for message in self.messages])]


B = TypeVar("B", bound=Body)


def parse(kind: type[B], raw: bytes, served: Served) -> B:
    """The body of a request. Raises ApiError, which names the field."""
    try:
        fields = json.loads(raw)
        if b"\\u" in raw:  # half a surrogate pair is JSON, and no text
            json.dumps(fields, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "the body is not a JSON object")
    fields = {name: value for name, value in fields.items() if value is not None and name not in IGNORED}
    for name in sorted(fields.keys() & NEUTRAL.keys()):
        if fields.pop(name) not in NEUTRAL[name]:
            raise ApiError(400, f"{name} is not supported by this server", param=name, code="unsupported_parameter")
    try:
        body = kind.model_validate(fields)
    except ValidationError as error:
        raise _explained(error) from None
    if body.model not in (None, served.name):
        message = f"the model {body.model!r} does not exist; this server has {served.name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return body


def _explained(error: ValidationError) -> ApiError:
    """The first mistake. Of a place such as ("messages", 0, "content", "str") the tags of a union are left out."""
    first = error.errors()[0]
    if not first["loc"]:  # a check over several fields; its text begins with the field's name
        message = str(first["msg"]).removeprefix("Value error, ")
        return ApiError(400, message, param=message.split()[0])
    field, *inner = first["loc"]
    if field in WANTED and first["type"] != "missing":
        return ApiError(400, f"{field}: expected {WANTED[str(field)]}", param=str(field))
    param = f"{field}" + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in inner)
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{param} is not a field that this server knows", param=param, code="unknown_parameter")
    return ApiError(400, f"{param}: {first['msg'].removeprefix('Value error, ')}", param=param)


# ---- what the engine gets


class DrawKeys:
    """Addresses of random draws: repeatable with a seed, and unlike all others without."""

    def __init__(self) -> None:
        self._secret, self._count = secrets.token_hex(16), itertools.count()

    def take(self, seed: int | None, choices: int) -> list[int]:
        if seed is None:
            return [address(self._secret, "serve", next(self._count)) for _ in range(choices)]
        return [address(seed, "serve", choice) for choice in range(choices)]


def to_requests(body: Body, texts: Texts, served: Served, keys: DrawKeys) -> list[Request]:
    """n requests for each prompt, side by side. Raises ApiError and UserError for what cannot run."""
    prompts, field = body.prompts(texts), "prompt" if isinstance(body, CompletionBody) else "messages"
    if isinstance(body, ChatBody) and body.prompt_token_ids is not None:
        field = "prompt_token_ids"
    if len(prompts) * body.n > served.max_choices:
        message = (
            f"{len(prompts)} prompts with n = {body.n} are more than {served.max_choices} sequences in one request"
        )
        raise ApiError(400, message, param="n" if body.n > 1 else field)
    for prompt in prompts:
        _require_tokens(prompt, field, served)
    _require_known(body.stop_token_ids, "stop_token_ids", served)
    return [
        Request(key=key, prompt=prompt, params=_params(body, prompt, texts, served))
        for prompt in prompts
        for key in keys.take(body.seed, body.n)
    ]


def _require_tokens(prompt: Array, field: str, served: Served) -> None:
    if not len(prompt):
        raise ApiError(400, f"{field}: the prompt has no tokens", param=field)
    if len(prompt) >= served.context:
        message = f"{field}: {len(prompt)} tokens leave no room for a completion; the context is {served.context}"
        raise ApiError(400, message, param=field, code="context_length_exceeded")
    _require_known(prompt, field, served)


def _require_known(tokens: Sequence[int] | Array, field: str, served: Served) -> None:
    if len(tokens) and np.max(tokens) >= served.vocabulary:
        raise ApiError(400, f"{field}: token ids are from 0 to {served.vocabulary - 1}", param=field)


def _params(body: Body, prompt: Array, texts: Texts, served: Served) -> SamplingParams:
    room = served.context - len(prompt)
    if body.max_tokens is not None and body.max_tokens > room:
        message = f"max_tokens: {len(prompt)} tokens of prompt leave {room} of the context of {served.context}"
        raise ApiError(400, message, param="max_tokens", code="context_length_exceeded")
    return SamplingParams(
        max_new_tokens=body.max_tokens or min(served.default_max_tokens, room),
        temperature=body.temperature, top_k=min(body.top_k, served.vocabulary), top_p=body.top_p, min_p=body.min_p,
        repetition_penalty=body.repetition_penalty, stop=tuple(body.stop),
        stop_token_ids=tuple(sorted({*texts.stop_token_ids, *body.stop_token_ids})),
        top_logprobs=body.top_logprobs_wanted() or 0,
    )  # fmt: skip
