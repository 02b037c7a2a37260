"""Chats of an agent: its requests, their answers, and the check that a request continues the one
before.

Fields that only change how tokens are sampled (temperature, top_p, stop, seed, max_tokens) are
ignored, as sampling is the trainer's; those that would change the answer are refused. Does not know
HTTP, agents or tokens.
"""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from tandem.model.tool_calls import Call, split_calls
from tandem.serve.apis import Chunks
from tandem.serve.openai import (
    ChatMessage,
    FunctionCall,
    FunctionTool,
    Json,
    Lenient,
    NoChoice,
    NoList,
    NoObject,
    assistant_message,
    call_deltas,
    call_json,
)
from tandem.types import Message, Observation

ROLES = ("system", "user", "assistant", "tool")
MODEL = "policy"
SHORT = 60  # characters of a text that are shown
KEPT = {"role", "content"}  # of a message
ONE_CONVERSATION = "an episode is one conversation that only grows"


class ConversationBroken(Exception):
    """A request that does not continue the conversation: the episode would not be one sequence of
    tokens."""


# ---- requests


def _check_role(message: ChatMessage) -> ChatMessage:
    if message.role not in ROLES:
        raise ValueError(f"role: expected one of {', '.join(ROLES)}")
    return message


class _TextFormat(Lenient):
    type: Literal["text"]


class ChatRequest(Lenient):
    """The body of POST /chat/completions. Example: ChatRequest(messages=[ChatMessage(role="user",
    content="Hi")])"""

    messages: Annotated[
        list[Annotated[ChatMessage, AfterValidator(_check_role)]], Field(min_length=1)
    ]
    tools: Annotated[list[FunctionTool], Field(default_factory=list)]
    stream: bool = False
    model: str = MODEL
    # would change the answer
    n: Literal[1] | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None
    prompt_logprobs: None = None
    chat_template_kwargs: NoObject | None = None
    response_format: _TextFormat | None = None
    functions: NoList | None = None
    tool_choice: NoChoice | None = None
    modalities: list[Literal["text"]] | None = None


# ---- rewards


def last_observation(value: object) -> Observation:
    """Read an agent's reward, a number or {"reward": number, "parts": {name: number}}, as its
    episode's last observation. Raises ValueError."""
    fields: dict[str, Any] = value if isinstance(value, dict) else {"reward": value}
    parts = fields.get("parts", {})
    if "reward" in fields and fields.keys() <= {"reward", "parts"} and isinstance(parts, dict):
        numbers = [fields["reward"], *parts.values()]
        if "env" not in parts and all(isinstance(n, Real) and math.isfinite(n) for n in numbers):
            named = {str(name): float(part) for name, part in parts.items()}
            return Observation(done=True, reward=float(fields["reward"]), parts=named)
    raise ValueError(
        "a reward is a finite number, or {reward, parts} of finite numbers, no part of them called "
        f"env (the reward's own name); found {str(value)[:SHORT]!r}"
    )


# ---- answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The model's turn as the agent gets it."""

    text: str  # all of it, tool calls included
    content: str  # without the calls
    calls: tuple[Call, ...] = ()
    turn: int = 0  # numbers the ids of calls, so that they are the same in every run

    @classmethod
    def to(cls, request: ChatRequest, text: str, turn: int) -> "Reply":
        """Answer a request with the model's text; its calls are read if all of them can be."""
        content, calls = split_calls(text, request.tools)
        return cls(text=text, content=content, calls=tuple(calls), turn=turn)

    @property
    def written_calls(self) -> list[Json]:
        """The calls as a message holds them."""
        return [
            call_json(f"call_{self.turn}_{number}", call.name, call.arguments)
            for number, call in enumerate(self.calls)
        ]

    def is_message(self, message: ChatMessage) -> bool:
        """Tell whether an agent's message is this reply, up to surrounding space and the spelling
        of arguments."""
        content, calls = message.content.strip(), _calls_of(message)
        if message.role != "assistant":
            return False
        if not calls and content == self.text.strip():
            return True
        return _keys(calls) == _keys(self.calls) and content == self.content.strip()


def chat_completion(reply: Reply, request: ChatRequest) -> Json:
    """Return the answer to a request that does not stream, without `usage`: no tokens are known."""
    message = assistant_message(reply.content, reply.written_calls)
    reason = "tool_calls" if reply.calls else "stop"
    choice = {"message": message, "logprobs": None, "finish_reason": reason}
    head = {"id": f"chatcmpl-{reply.turn}", "object": "chat.completion", "model": request.model}
    return head | {"created": int(time.time()), "choices": [{"index": 0, **choice}]}


async def completion_chunks(reply: Reply, request: ChatRequest) -> Chunks:
    """Yield the answer to a streaming request: the whole turn in one chunk."""
    full = chat_completion(reply, request)
    delta = full["choices"][0].pop("message")
    if reply.calls:
        delta["tool_calls"] = call_deltas(reply.written_calls)
    choice = full["choices"][0] | {"delta": delta}
    yield [full | {"object": "chat.completion.chunk", "choices": [choice]}]


# ---- the conversation


def opening(request: ChatRequest) -> list[Message]:
    """Return the first chat of an episode. Raises ConversationBroken if a turn in it called
    tools."""
    if any(message.tool_calls for message in request.messages):
        raise ConversationBroken(
            "the first request holds an assistant's tool calls, which the model never made"
        )
    return [message.model_dump(include=KEPT) for message in request.messages]


def continuation(before: ChatRequest, reply: Reply, now: ChatRequest) -> list[Message]:
    """Return the messages that `now` adds after the answer to `before`. Raises ConversationBroken,
    which says where they differ."""
    num_before = len(before.messages)
    for place, (old, new) in enumerate(zip(before.messages, now.messages, strict=False)):
        if _key(old) != _key(new):
            raise _broken(place, f"{_short(new)}, and was {_short(old)}")
    if len(now.messages) <= num_before:
        raise ConversationBroken(
            f"a later request has {len(now.messages)} messages, and {num_before} were said before: "
            + ONE_CONVERSATION
        )
    answer, *added = now.messages[num_before:]
    if not reply.is_message(answer):
        difference = f"{_short(answer)}, and the model had said {reply.text[:SHORT]!r}"
        raise _broken(num_before, difference)
    if not added or any(message.role == "assistant" for message in added):
        roles = ", ".join(message.role for message in added) or "nothing"
        raise ConversationBroken(
            f"what follows the model's turn is {roles}; expected no assistant, and something"
        )
    if now.tools and now.tools != before.tools:
        raise ConversationBroken(
            "a later request has other tools than the first: they stand in the prompt"
        )
    return [message.model_dump(include=KEPT) for message in added]


def _broken(place: int, difference: str) -> ConversationBroken:
    return ConversationBroken(
        f"message {place + 1} of a later request is {difference}: {ONE_CONVERSATION}"
    )


def _short(message: ChatMessage) -> str:
    calls = " with tool calls" if message.tool_calls else ""
    return f"{message.role}'s {message.content[:SHORT]!r}{calls}"


def _key(message: ChatMessage) -> tuple[object, ...]:
    """Return the part of a message that is compared: all but names and ids."""
    return message.role, message.content, _keys(_calls_of(message))


def _calls_of(message: ChatMessage) -> list[FunctionCall]:
    return [call.function for call in message.tool_calls or ()]


def _keys(calls: Sequence[Call | FunctionCall]) -> list[tuple[str, str]]:
    return [(call.name, _sorted(call.arguments)) for call in calls]


def _sorted(arguments: Json) -> str:
    return json.dumps(arguments, sort_keys=True)
