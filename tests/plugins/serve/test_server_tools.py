"""Tools over the server: what is trained with tools is served with them, by the same tokens and the
same reading of calls."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest

from tandem.data.renderer import load_renderer
from tandem.envs.tools import ToolEnv
from tandem.plugins.serve.texts import RendererTexts
from tests.support.byte_models import CHATML, make_model
from tests.support.fake_engine import FAKE, FakeTexts
from tests.support.serving import ASK, CALCULATOR, SAID, answering, openai_client, post

# As the templates of Qwen2.5 and Qwen3 write tools and calls.
KNOWS_TOOLS = (
    "{% if tools %}<|im_start|>system\n"
    "{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    + CHATML.replace(
        "{{ m['content'] }}",
        "{{ m['content'] }}{% for c in m['tool_calls'] or [] %}"
        "{{ '\n' if m['content'] or not loop.first }}"
        '<tool_call>\n{"name": "{{ c.function.name }}", '
        '"arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
        "{% endfor %}",
    )
)


def ask(url, **fields):
    ours = {"model": "fake", "messages": [ASK], "tools": [CALCULATOR], "max_tokens": 400}
    fields = {**ours, **fields}
    with openai_client(url) as client:
        if not fields.get("stream"):
            return client.chat.completions.create(**fields).choices[0]
        return [piece.choices[0] for piece in client.chat.completions.create(**fields)]


def test_streamed_content_comes_at_once_and_its_call_in_the_last_piece():
    with answering(SAID) as url:
        *before, last = ask(url, stream=True)
    assert [piece.delta.content for piece in before] == [*"I", " s", "e", "e", "."]
    assert before[0].delta.role == "assistant"
    [call] = last.delta.tool_calls
    assert (last.finish_reason, last.delta.content, call.index) == ("tool_calls", "", 0)
    assert json.loads(call.function.arguments) == {"expression": "6*7"}


@pytest.mark.parametrize(
    ("said", "fields", "reason"),
    [
        ("It is 42.", {}, "stop"),
        (SAID, {"max_tokens": len(SAID) - 3}, "length"),
        (SAID + "<tool_call>{", {}, "stop"),
        (SAID, {"tool_choice": "none"}, "stop"),
        (SAID, {"tools": []}, "stop"),
    ],
    ids=["no call", "cut", "a broken call beside a whole one", "none", "no tools"],
)
@pytest.mark.parametrize("stream", [True, False])
def test_text_without_a_readable_call_is_content(said, fields, reason, stream):
    with answering(said) as url:
        got = ask(url, stream=stream, **fields)
    text = said[: fields.get("max_tokens", 400)]
    if stream:
        assert "".join(piece.delta.content for piece in got) == text
        assert not any(piece.delta.tool_calls for piece in got)
    else:
        assert (got.message.content, got.message.tool_calls) == (text, None)
    assert (got[-1] if stream else got).finish_reason == reason


def test_tools_are_shown_unless_none_is_to_be_called():
    with answering("x") as url:
        body = {"messages": [ASK], "tools": [CALCULATOR], "return_token_ids": True}
        for choice, shown in (("auto", "tool:calculator\n"), ("none", "")):
            answer = post(f"{url}/v1/chat/completions", json=body | {"tool_choice": choice}).json()
            assert bytes(answer["prompt_token_ids"]).decode() == f"{shown}user:{ASK['content']}\n"


@pytest.fixture(scope="module")
def url():
    with answering("x") as url:
        yield url


REQUIRED = {"tools": [CALCULATOR], "tool_choice": "required"}


def called(arguments):
    calls = [{"function": {"name": "f", "arguments": arguments}}]
    return {"messages": [ASK, {"role": "assistant", "tool_calls": calls}]}


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "search"}}}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": "required", "min_tokens": 3}, "tool_choice"),
        (REQUIRED | {"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [CALCULATOR], "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0]"),
        (called("{"), "messages[1].tool_calls[0].function.arguments"),
        (called("[" * 60_000), "messages[1].tool_calls[0].function.arguments"),
    ],
)
def test_unsupported_tool_field_is_named(url, fields, param):
    answer = post(f"{url}/v1/chat/completions", json={"messages": [ASK], **fields})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
    assert param.partition("[")[0] in answer.json()["error"]["message"]


@pytest.mark.parametrize("template", [CHATML, KNOWS_TOOLS], ids=["knows no tools", "knows tools"])
def test_served_conversation_with_tools_has_training_tokens(template, tmp_path):
    renderer = load_renderer(make_model(tmp_path, template))
    env = ToolEnv("calculator")
    observation = asyncio.run(env.step(SAID))
    sampled = renderer.encode(SAID)
    trained = [*renderer.prompts([[ASK]], env.tools), sampled, renderer.turn(observation.messages)]
    served = replace(FAKE, vocabulary=len(renderer.tokenizer))
    body = {"messages": [ASK], "tools": [*env.tools], "return_token_ids": True, "max_tokens": 400}
    texts = RendererTexts(renderer)
    texts.stop_token_ids = FakeTexts.stop_token_ids  # the engine's tokens are bytes
    with answering(SAID, texts, served) as url:
        first = post(f"{url}/v1/chat/completions", json=body).raise_for_status().json()
        message = first["choices"][0]["message"]
        back = observation.messages[0] | {"tool_call_id": message["tool_calls"][0]["id"]}
        body["messages"] += [message, back]
        second = post(f"{url}/v1/chat/completions", json=body).json()
    assert first["prompt_token_ids"] == trained[0].tolist()
    assert second["prompt_token_ids"] == np.concatenate(trained).tolist()
    assert observation.messages[0]["content"] == "42"
