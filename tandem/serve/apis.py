"""Anthropic's Messages and OpenAI's Responses over chat completions: a request becomes the chat
request that says the same, and the chat answer, whole or in chunks, becomes theirs.

    body --> Api(body).chat --> the one path of generation --> answer(full) or events(chunks)

Fields that both have, and fields unknown here, go on under their own names: the chat request takes,
refuses or ignores them. Knows no HTTP server and no engine.
"""

import json
from collections.abc import AsyncIterator, Sequence
from itertools import chain, count
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from tandem.serve.openai import (
    DONE,
    ApiError,
    ChatMessage,
    Json,
    Lenient,
    MaxTokens,
    Stops,
    assistant_message,
    call_json,
    event,
    join_parts,
    read_body,
)

STATELESS = "nothing is kept here between requests; send the whole conversation"
Chunks = AsyncIterator[Sequence[Json]]  # those of a pass together


class Api:
    """A request and its answer, here as OpenAI's completions have them. chat: the request."""

    def __init__(self, raw: bytes):
        self.chat = raw

    def answer(self, full: Json) -> Json:
        """Translate a full answer."""
        return full

    async def events(self, chunks: Chunks) -> AsyncIterator[str]:
        """Translate chunks to server-sent events."""
        async for several in chunks:
            if text := "".join(event(json.dumps(chunk)) for chunk in several):
                yield text
        yield DONE

    @staticmethod
    def error_body(error: ApiError) -> Json:
        return error.body()

    def fail(self, error: ApiError) -> str:
        """Return the event of an answer that cannot be finished."""
        return event(json.dumps(self.error_body(error)))


async def _texts(chunks: Chunks, pieces: list[Json]) -> AsyncIterator[str]:
    """Yield the new text of each chunk, which `pieces` has by then."""
    async for several in chunks:
        for chunk in several:
            pieces.append(chunk)
            yield _joined([chunk])["choices"][0]["message"]["content"] or ""


def _joined(chunks: Sequence[Json]) -> Json:
    """Return the full answer of its chunks; the last one has the usage."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    reason = choices[-1]["finish_reason"] if choices else None
    choice = {"message": assistant_message(text, calls), "finish_reason": reason}
    return chunks[-1] | {"choices": [choice]}


def _counted(full: Json) -> Json:
    """Count the tokens as both have it; 0 where the answer does not know."""
    usage = full.get("usage") or {}
    prompt, completion = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    return {"input_tokens": prompt, "output_tokens": completion}


def _event(type: str, **fields: object) -> str:
    return f"event: {type}\n" + event(json.dumps({"type": type, **fields}))


def to_tool(tool: Json) -> Json:
    """Make the chat request's tool of one, whose fields it has at the top."""
    if "input_schema" not in tool and (tool.get("type"), "name" in tool) != ("function", True):
        raise ValueError("expected a function of the client's own, with its name and schema")
    names = {"name": "name", "description": "description", "input_schema": "parameters"}
    names |= {"parameters": "parameters", "strict": "strict"}
    function = {name: tool[own] for own, name in names.items() if tool.get(own) is not None}
    return {"type": "function", "function": function}


def to_tool_choice(choice: object) -> object:
    match choice:
        case {"disable_parallel_tool_use": True}:
            raise ValueError("disable_parallel_tool_use is not supported")
        case {"type": "auto" | "none" as kind}:
            return kind
        case {"type": "any"}:
            return "required"
        case {"type": "tool" | "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
    return choice


class _Body(Lenient):
    """Fields of both."""

    model_config = ConfigDict(extra="allow")

    stream: bool = False
    n: Literal[1] = 1
    tools: Annotated[list[Annotated[Json, AfterValidator(to_tool)]], Field(default_factory=list)]
    tool_choice: Annotated[Any, AfterValidator(to_tool_choice)] = "auto"

    def chat(self, messages: Sequence[ChatMessage], **fields: object) -> bytes:
        """Write the chat request."""
        usage = {"stream_options": {"include_usage": True}} if self.stream else {}
        own = {"stream": self.stream, "tools": self.tools, "tool_choice": self.tool_choice}
        written = [message.model_dump(exclude_none=True) for message in messages]
        for call in chain.from_iterable(message.get("tool_calls", ()) for message in written):
            # in a text, which may hold half a surrogate pair
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        chat = {**(self.model_extra or {}), **own, **usage, "messages": written, **fields}
        return json.dumps(chat).encode()


# ---------------------------------------------------------------- Anthropic's Messages


def to_chat_messages(message: object) -> object:
    """Make chat messages of one: the results of tools come before its text."""
    match message:
        case {"role": role, "content": list(blocks)}:
            own: Json = {"role": role, "content": []}
            results: list[Json] = []
            for block in blocks:
                match block:
                    case {"type": "tool_use", "id": id, "name": name, "input": arguments}:
                        own.setdefault("tool_calls", []).append(call_json(id, name, arguments))
                    case {"type": "tool_result", "tool_use_id": id}:
                        result = {"role": "tool", "content": block.get("content")}
                        results.append(result | {"tool_call_id": id})
                    case _:
                        own["content"].append(block)
            return [*results, own] if own["content"] or not results else results
    return [message]


class _MessagesBody(_Body):
    messages: list[Annotated[list[ChatMessage], BeforeValidator(to_chat_messages)]]
    system: Annotated[str, BeforeValidator(join_parts)] = ""
    stop_sequences: Stops
    thinking: Json | None = None
    thread: Any = None
    cache_control: Any = None  # ignored


class Messages(Api):
    """POST /v1/messages"""

    def __init__(self, raw: bytes):
        body = read_body(_MessagesBody, raw)
        if body.thread:  # by this code Anthropic's client knows to send whole conversations
            message = f"thread: {STATELESS}, as messages"
            raise ApiError(400, message, code="thread_unsupported_request")
        messages = [ChatMessage(role="system", content=body.system)] if body.system else []
        messages += chain.from_iterable(body.messages)
        thinking = None if body.thinking == {"type": "disabled"} else body.thinking
        super().__init__(body.chat(messages, stop=body.stop_sequences, thinking=thinking))

    def answer(self, full: Json) -> Json:
        [choice] = full["choices"]
        message, head = choice["message"], {"id": f"msg_{full['id']}", "model": full["model"]}
        content: list[Json] = []
        if message["content"]:
            content.append({"type": "text", "text": message["content"]})
        for call in message.get("tool_calls", ()):
            function = call["function"]
            block = {"type": "tool_use", "id": call["id"], "name": function["name"]}
            content.append(block | {"input": json.loads(function["arguments"])})
        reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
        reason = reasons.get(choice["finish_reason"], "end_turn")
        head |= {"type": "message", "role": "assistant", "content": content, "stop_reason": reason}
        return head | {"stop_sequence": None, "usage": _counted(full)}

    async def events(self, chunks: Chunks) -> AsyncIterator[str]:
        pieces: list[Json] = []
        spoke = False
        async for text in _texts(chunks, pieces):
            if len(pieces) == 1:
                head = self.answer(_joined(pieces)) | {"content": [], "stop_reason": None}
                yield _event("message_start", message=head)
            if text and not spoke:
                block = {"type": "text", "text": ""}
                yield _event("content_block_start", index=0, content_block=block)
                spoke = True
            if text:
                delta = {"type": "text_delta", "text": text}
                yield _event("content_block_delta", index=0, delta=delta)
        whole = self.answer(_joined(pieces))
        for index, block in enumerate(whole["content"]):
            if block["type"] == "tool_use":
                started = {**block, "input": {}}
                yield _event("content_block_start", index=index, content_block=started)
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        ended = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
        yield _event("message_delta", delta=ended, usage=whole["usage"])
        yield _event("message_stop")

    @staticmethod
    def error_body(error: ApiError) -> Json:
        kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
        kinds |= {429: "rate_limit_error", 503: "overloaded_error"}
        default = "invalid_request_error" if error.status < 500 else "api_error"
        about = {"type": kinds.get(error.status, default), "message": error.message}
        return {"type": "error", "error": about | {"details": {"error_code": error.code}}}

    def fail(self, error: ApiError) -> str:
        return _event(**self.error_body(error))


# ---------------------------------------------------------------- OpenAI's Responses


def to_chat_message(item: object) -> object:
    """Make a chat message of an item of the input."""
    match item:
        case {"type": "function_call", "call_id": id, "name": name, "arguments": arguments}:
            call = {"id": id, "function": {"name": name, "arguments": arguments}}
            return {"role": "assistant", "tool_calls": [call]}
        case {"type": "function_call_output", "call_id": id, "output": output}:
            return {"role": "tool", "tool_call_id": id, "content": output}
        case {"role": str()}:
            return item
    raise ValueError("expected a message, a function_call or a function_call_output")


def _refuse_state(value: object) -> object:
    raise ValueError(f"{STATELESS}, as input")


class _TextOptions(Lenient):
    format: Annotated[Json, Field(default_factory=lambda: {"type": "text"})]
    verbosity: Literal["medium"] = "medium"


class _ResponsesBody(_Body):
    input: Annotated[
        list[Annotated[ChatMessage, BeforeValidator(to_chat_message)]],
        BeforeValidator(lambda x: [{"role": "user", "content": x}] if isinstance(x, str) else x),
    ]
    instructions: str = ""
    max_output_tokens: MaxTokens = None
    text: Annotated[_TextOptions, Field(default_factory=_TextOptions)]
    # ignored
    include: Any = None
    stream_options: Any = None
    # not supported
    background: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"
    previous_response_id: Annotated[Any, BeforeValidator(_refuse_state)] = None
    conversation: Annotated[Any, BeforeValidator(_refuse_state)] = None


class Responses(Api):
    """POST /v1/responses"""

    def __init__(self, raw: bytes):
        body = self._body = read_body(_ResponsesBody, raw)
        messages = [ChatMessage(role="system", content=t) for t in [body.instructions] if t]
        for message in body.input:
            # a turn comes back as its text and each of its calls
            if message.tool_calls and messages and messages[-1].role == "assistant":
                messages[-1].tool_calls = (messages[-1].tool_calls or []) + message.tool_calls
            else:
                messages.append(message)
        form = body.text.format
        if form.get("type") == "json_schema":
            form = {"type": "json_schema", "json_schema": form}
        limit = body.max_output_tokens
        super().__init__(body.chat(messages, max_tokens=limit, response_format=form))

    def answer(self, full: Json) -> Json:
        [choice], used = full["choices"], _counted(full)
        message, cut = choice["message"], choice["finish_reason"] == "length"
        status, output = "incomplete" if cut else "completed", list[Json]()
        if message["content"] or "tool_calls" not in message:
            output.append(_spoken(full["id"], message["content"], status))
        for call in message.get("tool_calls", ()):
            item = {"type": "function_call", "id": f"fc_{call['id']}", "call_id": call["id"]}
            output.append(item | call["function"] | {"status": "completed"})
        head = {"id": f"resp_{full['id']}", "object": "response", "created_at": full["created"]}
        head |= {"model": full["model"], "status": status, "error": None, "output": output}
        head |= {"incomplete_details": {"reason": "max_output_tokens"} if cut else None}
        tools = [{"type": "function", **tool["function"]} for tool in self._body.tools]
        head |= {"tools": tools, "tool_choice": "auto", "parallel_tool_calls": True}
        details: Json = {"input_tokens_details": {"cached_tokens": 0}}
        details |= {"output_tokens_details": {"reasoning_tokens": 0}}
        return head | {"usage": {**details, **used, "total_tokens": sum(used.values())}}

    async def events(self, chunks: Chunks) -> AsyncIterator[str]:
        number = count()

        def write(type: str, **fields: object) -> str:
            return _event(f"response.{type}", sequence_number=next(number), **fields)

        pieces: list[Json] = []
        spoke, started = False, {"status": "in_progress"}
        async for text in _texts(chunks, pieces):
            item = _spoken(pieces[0]["id"], "", "in_progress")
            place = {"output_index": 0, "item_id": item["id"], "content_index": 0}
            if len(pieces) == 1:
                head = self.answer(_joined(pieces)) | started
                yield write("created", response={**head, "output": [], "usage": None})
            if text and not spoke:
                yield write("output_item.added", output_index=0, item={**item, "content": []})
                yield write("content_part.added", **place, part=item["content"][0])
                spoke = True
            if text:
                yield write("output_text.delta", **place, delta=text, logprobs=[])
        whole = self.answer(_joined(pieces))
        for index, item in enumerate(whole["output"]):
            if index or not spoke:
                new = item | started | ({"arguments": ""} if "arguments" in item else {})
                yield write("output_item.added", output_index=index, item=new)
            if arguments := item.get("arguments"):
                here = {"output_index": index, "item_id": item["id"]}
                yield write("function_call_arguments.delta", **here, delta=arguments)
                done = {"name": item["name"], "arguments": arguments}
                yield write("function_call_arguments.done", **here, **done)
            elif spoke:
                [part] = item["content"]
                yield write("output_text.done", **place, text=part["text"], logprobs=[])
                yield write("content_part.done", **place, part=part)
            yield write("output_item.done", output_index=index, item=item)
        yield write(whole["status"], response=whole)

    @staticmethod
    def error_body(error: ApiError) -> Json:
        names = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text"}
        body, param = error.body(), error.param or ""
        if own := names.get(param):
            body["error"] |= {"param": own, "message": error.message.replace(param, own, 1)}
        return body


def _spoken(id: str, text: str, status: str) -> Json:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    head = {"type": "message", "id": f"msg_{id}", "status": status}
    return {**head, "role": "assistant", "content": [part]}


APIS: dict[str, type[Api]] = {"chat/completions": Api, "messages": Messages, "responses": Responses}


def api_of(path: str) -> type[Api]:
    """Find the API that a path belongs to."""
    return next((api for name, api in APIS.items() if f"/{name}" in path), Api)
