"""A conversation by the real client of each API: what is said, replies as the client gives them,
whole or streamed, and results of tools."""

import json
from importlib.util import find_spec

import openai
import pytest

from tests.support.waiting import WAIT_S


class ChatTalk:
    """OpenAI's chat completions. base_url: with /v1 at its end."""

    errors = openai.APIStatusError
    cut = "length"

    def __init__(self, base_url, *messages, **more):
        self.said, self.more = list(messages), {"model": "policy", **more}
        self.client = self.connect(base_url, {"api_key": "x", "timeout": WAIT_S, "max_retries": 0})

    def connect(self, base_url, options):
        # to read certificates is most of a client's time
        http = openai.DefaultHttpxClient(verify=False)
        return openai.OpenAI(base_url=base_url, http_client=http, **options)

    def say(self, text):
        self.said.append({"role": "user", "content": text})

    def result(self, call, text):
        self.said.append({"role": "tool", "tool_call_id": call, "content": text})

    def ask(self, *, stream=False, tools=(), limit=None):
        """Return text, calls as (id, name, arguments), why it ended, and the counts of tokens."""
        more = self.more | ({"tools": [*tools]} if tools else {})
        more |= {"max_tokens": limit} if limit else {}
        create = self.client.chat.completions
        if stream:
            options = {"stream_options": {"include_usage": True}}
            with create.stream(messages=self.said, **more, **options) as events:
                answer = [e.snapshot for e in events if e.type == "chunk"][-1]
        else:
            answer = create.create(messages=self.said, **more)
        [choice], usage = answer.choices, answer.usage
        self.said.append(choice.message)
        calls = [(c.id, c.function) for c in choice.message.tool_calls or ()]
        calls = [(id, called.name, json.loads(called.arguments)) for id, called in calls]
        used = usage and (usage.prompt_tokens, usage.completion_tokens)
        return choice.message.content or "", calls, choice.finish_reason, used


class ResponsesTalk(ChatTalk):
    """OpenAI's Responses, without state on the server."""

    cut = "incomplete"

    def result(self, call, text):
        self.said.append({"type": "function_call_output", "call_id": call, "output": text})

    def ask(self, *, stream=False, tools=(), limit=None):
        flat = [{"type": "function", **tool["function"]} for tool in tools]
        more = self.more | ({"tools": flat} if tools else {})
        more |= {"max_output_tokens": limit} if limit else {}
        if stream:
            with self.client.responses.stream(input=self.said, **more) as events:
                answer = [event.response for event in events if hasattr(event, "response")][-1]
        else:
            answer = self.client.responses.create(input=self.said, **more)
        self.said += answer.output
        called = [item for item in answer.output if item.type == "function_call"]
        calls = [(one.call_id, one.name, json.loads(one.arguments)) for one in called]
        usage = answer.usage
        used = usage and (usage.input_tokens, usage.output_tokens)
        reason = "tool_calls" if calls else "stop"
        return answer.output_text, calls, self.cut if answer.status == self.cut else reason, used


class MessagesTalk(ChatTalk):
    """Anthropic's Messages."""

    cut = "max_tokens"

    def connect(self, base_url, options):
        import anthropic

        self.errors, http = anthropic.APIStatusError, anthropic.DefaultHttpxClient(verify=False)
        base_url = base_url.removesuffix("/v1")
        return anthropic.Anthropic(base_url=base_url, http_client=http, **options)

    def result(self, call, text):
        block = {"type": "tool_result", "tool_use_id": call, "content": text}
        self.said.append({"role": "user", "content": [block]})

    def ask(self, *, stream=False, tools=(), limit=None):
        functions = [tool["function"] for tool in tools]
        own = [{"name": f["name"], "input_schema": f["parameters"]} for f in functions]
        more = self.more | ({"tools": own} if tools else {}) | {"max_tokens": limit or 64}
        if stream:
            with self.client.messages.stream(messages=self.said, **more) as events:
                answer = events.get_final_message()
        else:
            answer = self.client.messages.create(messages=self.said, **more)
        self.said.append({"role": "assistant", "content": answer.content})
        text = "".join(block.text for block in answer.content if block.type == "text")
        calls = [(b.id, b.name, b.input) for b in answer.content if b.type == "tool_use"]
        reasons = {"end_turn": "stop", "tool_use": "tool_calls"}
        used = (answer.usage.input_tokens, answer.usage.output_tokens)
        return text, calls, reasons.get(answer.stop_reason, answer.stop_reason), used


needs_anthropic = pytest.mark.skipif(not find_spec("anthropic"), reason="pip install anthropic")
TALKS = [ChatTalk, ResponsesTalk, pytest.param(MessagesTalk, marks=needs_anthropic)]
