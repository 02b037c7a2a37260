"""Chat completions in OpenAI's shape, as an agent asks for them and gets them; and whether a
request goes on where the one before ended.

What only changes how tokens are sampled (temperature, top_p, stop, seed, max_tokens) is accepted
and ignored: sampling is the trainer's. What would change what is answered is refused. Knows no
HTTP, no agent and no tokens.
"""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from tandem.model.tool_calls import split_calls
from tandem.types import Message, Tool

Json = dict[str, Any]

SHORT = 60  # characters of a text that are shown
ONE_LINE = "an episode is one conversation that only grows"

# Fields that are not done here, and the values with which they ask for nothing.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "functions": ([],),
    "tool_choice": ("auto", "none"),
    "modalities": (["text"],),
}


class Refused(Exception):
    """A request that gets an error for an answer."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status

    def body(self) -> Json:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": None}}


class ConversationBroken(Exception):
    """A request that does not continue the conversation: the episode would not be one sequence of
    tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """A tool call; arguments: JSON with sorted keys, or the text that is none."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A message, as far as two are compared. Example: Said(role="user", content="Hi")"""

    role: str
    content: str
    calls: tuple[Called, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request for a completion. Example: Asked(messages=(Said(role="user", content="Hi"),))"""

    messages: tuple[Said, ...]
    tools: tuple[Tool, ...] = ()
    stream: bool = False
    model: str = "policy"

    @property
    def chat(self) -> list[Message]:
        return [_plain(said) for said in self.messages]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The model's turn as it is given to the agent. text: all of it, tool calls included; content:
    without them."""

    text: str
    content: str
    calls: tuple[Called, ...] = ()
    turn: int = 0  # numbers the ids of calls, so that they are the same in every run

    @classmethod
    def to(cls, asked: Asked, text: str, turn: int) -> "Reply":
        """The model's text as the answer to a request: calls are made of it where it holds some,
        and all can be read."""
        content, read = split_calls(text, asked.tools)
        calls = tuple(Called(name=call.name, arguments=_canonical(call.arguments)) for call in read)
        return cls(text=text, content=content, calls=calls, turn=turn)

    def is_said(self, said: Said) -> bool:
        """Whether an agent's message is this reply; space around it, and how arguments are written,
        do not count."""
        if said.role != "assistant":
            return False
        whole = not said.calls and said.content.strip() == self.text.strip()
        return whole or (said.calls == self.calls and said.content.strip() == self.content.strip())


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What an agent makes of its episode. Example: Verdict(reward=1.0, parts={"format": 1.0})"""

    reward: float
    parts: dict[str, float] = field(default_factory=dict)


# ---- requests


def _text_of_parts(content: object) -> object:
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in ("text", "input_text"):
            raise ValueError("only parts of type text can be read")
    return "".join(str(part.get("text", "")) for part in content)


class _Function(BaseModel):
    name: str
    arguments: str | Json = ""


class _Call(BaseModel):
    function: _Function


class _Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_text_of_parts)] = None
    tool_calls: list[_Call] | None = None

    def said(self) -> Said:
        calls = [
            Called(name=c.function.name, arguments=_canonical(c.function.arguments))
            for c in self.tool_calls or []
        ]
        role = "system" if self.role == "developer" else self.role
        return Said(role=role, content=self.content or "", calls=tuple(calls))


class _ToolFunction(BaseModel):
    name: str


class _Tool(BaseModel):
    function: _ToolFunction


class _Body(BaseModel):
    messages: Annotated[list[_Message], Field(min_length=1)]
    tools: list[_Tool] | None = None
    stream: bool | None = None
    model: str | None = None


def read_request(raw: bytes) -> Asked:
    """The body of POST /chat/completions. Raises Refused."""
    fields = read_json(raw)
    for name, harmless in NEUTRAL.items():
        if fields.get(name) is not None and fields[name] not in harmless:
            raise Refused(
                400, f"{name} = {fields[name]!r} is not possible in an episode; leave it out"
            )
    try:
        body = _Body.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise Refused(400, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    messages = tuple(message.said() for message in body.messages)
    tools = tuple(fields.get("tools") or ())  # whole: the model only checks that they have names
    return Asked(
        messages=messages, tools=tools, stream=bool(body.stream), model=body.model or "policy"
    )


def read_reward(raw: bytes) -> Verdict:
    """The body of POST /reward. Raises Refused."""
    try:
        return verdict(read_json(raw))
    except ValueError as error:
        raise Refused(400, str(error)) from None


def verdict(value: object) -> Verdict:
    """A number, or {"reward": number, "parts": {name: number}}. Raises ValueError."""
    match value:
        case Real():
            return Verdict(reward=_number(value))
        case {"reward": _, "parts": {"env": _}}:
            raise ValueError(
                "a part of a reward cannot be called env: that is the reward's own name"
            )
        case {"reward": reward, "parts": dict(parts), **rest} if not rest:
            return Verdict(
                reward=_number(reward),
                parts={str(name): _number(part) for name, part in parts.items()},
            )
        case {"reward": reward, **rest} if not rest:
            return Verdict(reward=_number(reward))
    raise ValueError(f"a reward is a number or {{reward, parts}}, found {str(value)[:SHORT]!r}")


def _number(value: object) -> float:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"a reward and its parts are finite numbers, found {str(value)[:SHORT]!r}")
    return float(value)


def read_json(raw: bytes) -> Json:
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise Refused(400, "the body is not a JSON object")
    return fields


def _canonical(arguments: str | Json) -> str:
    try:
        return json.dumps(
            json.loads(arguments) if isinstance(arguments, str) else arguments, sort_keys=True
        )
    except ValueError:
        return str(arguments)


# ---- the conversation


def opening(asked: Asked) -> list[Message]:
    """The chat that an episode starts with. Raises ConversationBroken where a turn in it called
    tools."""
    if any(said.calls for said in asked.messages):
        raise ConversationBroken(
            "the first request holds an assistant's tool calls, which the model never made"
        )
    return asked.chat


def continuation(before: Asked, reply: Reply, now: Asked) -> list[Message]:
    """The messages with which `now` goes on after `before` was answered. Raises ConversationBroken,
    and says where."""
    known = len(before.messages)
    for place, (was, found) in enumerate(zip(before.messages, now.messages, strict=False)):
        if was != found:
            raise ConversationBroken(
                f"message {place + 1} of a later request is {_short(found)}, and was {_short(was)}: {ONE_LINE}"
            )
    if len(now.messages) <= known:
        raise ConversationBroken(
            f"a later request has {len(now.messages)} messages, and {known} were said before: {ONE_LINE}"
        )
    if not reply.is_said(now.messages[known]):
        wrong = f"message {known + 1} of a later request is {_short(now.messages[known])}"
        raise ConversationBroken(
            f"{wrong}, and the model had said {reply.text[:SHORT]!r}: {ONE_LINE}"
        )
    new = now.messages[known + 1 :]
    if not new or any(said.role == "assistant" for said in new):
        found_roles = ", ".join(said.role for said in new) or "nothing"
        raise ConversationBroken(
            f"what follows the model's turn is {found_roles}; expected no assistant, and something"
        )
    if now.tools and now.tools != before.tools:
        raise ConversationBroken(
            "a later request has other tools than the first: they stand in the prompt"
        )
    return [_plain(said) for said in new]


def _short(said: Said) -> str:
    return f"{said.role}'s {said.content[:SHORT]!r}{' with tool calls' if said.calls else ''}"


def _plain(said: Said) -> Message:
    return {"role": said.role, "content": said.content}


# ---- answers


def whole(reply: Reply, asked: Asked) -> Json:
    """The answer to a request that does not stream. Without `usage`: an environment knows no
    tokens."""
    choice = {
        "index": 0,
        "message": _message(reply),
        "logprobs": None,
        "finish_reason": _finish(reply),
    }
    return {**_head(reply, asked, "chat.completion"), "choices": [choice]}


def events(reply: Reply, asked: Asked) -> bytes:
    """The answer to a request that streams, as server-sent events: the whole turn is one of
    them."""
    delta = _message(reply)
    for index, call in enumerate(delta.get("tool_calls", ())):
        call["index"] = index
    choices: list[Json] = [
        {"index": 0, "delta": delta, "finish_reason": None},
        {"index": 0, "delta": {}, "finish_reason": _finish(reply)},
    ]
    head = _head(reply, asked, "chat.completion.chunk")
    pieces = [json.dumps({**head, "choices": [choice]}) for choice in choices]
    return "".join(f"data: {piece}\n\n" for piece in [*pieces, "[DONE]"]).encode()


def models(names: Sequence[str] = ("policy",)) -> Json:
    return {
        "object": "list",
        "data": [
            {"id": name, "object": "model", "created": 0, "owned_by": "tandem"} for name in names
        ],
    }


def _head(reply: Reply, asked: Asked, kind: str) -> Json:
    return {
        "id": f"chatcmpl-{reply.turn}",
        "object": kind,
        "created": int(time.time()),
        "model": asked.model,
    }


def _message(reply: Reply) -> Json:
    if not reply.calls:
        return {"role": "assistant", "content": reply.text}
    calls = [
        {
            "id": f"call_{reply.turn}_{number}",
            "type": "function",
            "function": {"name": c.name, "arguments": c.arguments},
        }
        for number, c in enumerate(reply.calls)
    ]
    return {"role": "assistant", "content": reply.content or None, "tool_calls": calls}


def _finish(reply: Reply) -> str:
    return "tool_calls" if reply.calls else "stop"
