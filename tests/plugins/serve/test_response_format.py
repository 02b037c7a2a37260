"""JSON on demand: a model that knows nothing of it writes what the schema wants, and its other
answers stay what they were."""

import json

import httpx
import numpy as np
import pytest
from jsonschema import validate

from tandem.data.renderer import load_renderer
from tandem.model.tiny import CHARACTERS, make_tiny
from tandem.plugins.serve.json_masks import json_mask
from tandem.plugins.serve.texts import RendererTexts
from tandem.serve.openai import ApiError
from tests.support.byte_models import make_model
from tests.support.serving import post
from tests.support.waiting import WAIT_S

HELLO = [{"role": "user", "content": "Solve 2x = 6."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": 0, "maximum": 99},
        "unit": {"enum": ["m", "kg", "s"]},
        "note": {"type": "string", "maxLength": 5},
    },
    "required": ["x", "unit", "note"],
    "additionalProperties": False,
}
# its tokens run out of llguidance's work after the first
HEAVY = {"type": "string", "pattern": "^(a?){5000}a{5000}$"}


def wanted(schema):
    named = {"name": "answer", "schema": schema, "strict": True}
    return {"type": "json_schema", "json_schema": named}


def chat(url, **fields):
    body = {"messages": HELLO, "max_tokens": 200, "seed": 1, "return_token_ids": True, **fields}
    headers = {"Content-Type": "application/json"}
    return post(f"{url}/v1/chat/completions", content=json.dumps(body), headers=headers)


def streamed(url, **fields):
    body = {"messages": HELLO, "max_tokens": 200, "seed": 1, "stream": True, **fields}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=WAIT_S) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize(
    "way", [{}, {"temperature": 0.0}, {"top_k": 3}, {"repetition_penalty": 1.5}]
)
def test_every_answer_is_of_the_schema(tiny, url, way):
    choices = chat(url, n=16, response_format=wanted(SCHEMA), **way).json()["choices"]
    for choice in choices:
        assert choice["finish_reason"] == "stop"
        assert choice["token_ids"][-1] in tiny.renderer.stop_token_ids
        validate(json.loads(choice["message"]["content"]), SCHEMA)
    several = len({choice["message"]["content"] for choice in choices}) > 8
    assert several != (way == {"temperature": 0.0})


def test_json_object_is_any_object_and_a_cut_one_says_so(url):
    answer = chat(url, n=8, response_format={"type": "json_object"}, max_tokens=60).json()
    for choice in answer["choices"]:
        text = choice["message"]["content"]
        assert text.startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(text), dict)
    assert {choice["finish_reason"] for choice in answer["choices"]} <= {"stop", "length"}


def test_plain_answers_are_the_same_with_and_without_the_field(tiny, url):
    [choice] = chat(url, response_format={"type": "text"}, max_tokens=20).json()["choices"]
    expected = tiny.complete(tiny.renderer.prompts([HELLO])[0], seed=1, max_new_tokens=20)
    assert choice["token_ids"] == expected.tokens.tolist()
    body = {"prompt": "x", "max_tokens": 200, "response_format": wanted(SCHEMA)}
    completion = post(f"{url}/v1/completions", json=body).json()["choices"][0]
    validate(json.loads(completion["text"]), SCHEMA)


def tool(name, parameters):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


MEASURE = {
    "type": "object",
    "properties": {
        "unit": {"$ref": "#/$defs/Unit"},
        "other": {"$ref": "#/properties/unit"},
        "$ref": {"enum": ["a name as any other"]},
    },
    "required": ["unit"],
    "additionalProperties": False,
    "$defs": {"Unit": {"enum": ["m", "kg"]}},
}
SHORT = {"prompt_token_ids": [5, 6, 7]}  # tools in a prompt are longer than this model's context
NAMED = {"type": "function", "function": {"name": "answer"}}


@pytest.mark.parametrize(
    ("fields", "names", "single"),
    [
        ({"tool_choice": "required"}, {"answer", "measure"}, False),
        ({"tool_choice": "required", "parallel_tool_calls": False}, {"answer", "measure"}, True),
        ({"tool_choice": NAMED}, {"answer"}, True),
    ],
)
def test_forced_calls_are_calls_by_their_schemas(url, fields, names, single):
    schemas = {"answer": SCHEMA, "measure": MEASURE}
    tools = [tool(*one) for one in schemas.items()]
    choices = chat(url, n=16, tools=tools, **SHORT, **fields).json()["choices"]
    ended = [choice["message"] for choice in choices if choice["finish_reason"] == "tool_calls"]
    assert len(ended) > 8 and all(not message["content"] for message in ended)
    called = [[call["function"] for call in message["tool_calls"]] for message in ended]
    for calls in called:
        for call in calls:
            validate(json.loads(call["arguments"]), schemas[call["name"]])
    assert {call["name"] for calls in called for call in calls} == names
    assert (max(map(len, called)) == 1) == single


def test_forced_calls_of_a_stream_come_in_its_last_piece(url):
    fields = {"tools": [tool("answer", SCHEMA)], "tool_choice": NAMED, **SHORT}
    [choice] = chat(url, **fields).json()["choices"]
    *before, last = (piece["choices"][0]["delta"] for piece in streamed(url, **fields))
    assert not any(delta["content"] for delta in before)
    [whole], [piece] = choice["message"]["tool_calls"], last["tool_calls"]
    assert whole["function"] == piece["function"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"response_format": {"type": "structural_tag"}}, "json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "schema"),
        ({"response_format": wanted({"$ref": "http://127.0.0.1/x"})}, "does not fetch"),
        ({"response_format": wanted({"uniqueItems": True, "type": "array"})}, "uniqueItems"),
        ({"response_format": wanted(SCHEMA), "ignore_eos": True}, "ignore_eos"),
        ({"response_format": wanted(SCHEMA), "min_tokens": 3}, "min_tokens"),
        ({"response_format": wanted(SCHEMA), "tools": [tool("f", {})]}, "tool_choice: none"),
    ],
)
def test_format_that_cannot_be_kept_is_refused(url, fields, said):
    answer = chat(url, **fields)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "response_format"
    assert said in error["message"]


def test_schema_that_is_too_heavy_fails_its_own_request_only(url):
    answer = chat(url, response_format=wanted(HEAVY))
    assert answer.status_code == 400 and "too many" in answer.json()["error"]["message"]
    assert "too many" in streamed(url, response_format=wanted(HEAVY))[-1]["error"]["message"]
    assert chat(url, max_tokens=3).status_code == 200


def test_tokens_of_bytes_are_held_to_a_schema_too(tmp_path):
    renderer = load_renderer(make_model(tmp_path))
    texts, rng = RendererTexts(renderer), np.random.default_rng(0)
    for _ in range(20):
        mask, tokens = json_mask(texts, {"type": "string", "maxLength": 4}, 300), []
        while not tokens or tokens[-1] not in renderer.stop_token_ids:
            tokens.append(int(rng.choice(np.flatnonzero(mask.allowed(tokens)))))
        assert len(json.loads(renderer.decode(np.array(tokens)))) <= 4 and not mask.error


@pytest.mark.parametrize(
    ("missing", "schema", "said"),
    [("{", SCHEMA, "no token for '{'"), ("01", {"enum": [0, 1]}, "can follow")],
)
def test_token_that_a_tokenizer_lacks_is_named(tmp_path, missing, schema, said):
    small = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 64}
    make_tiny(tmp_path, characters=[c for c in CHARACTERS if c not in missing], **small)
    renderer = load_renderer(str(tmp_path))
    texts, rng, tokens = RendererTexts(renderer), np.random.default_rng(0), []
    with pytest.raises(ApiError, match=said):
        mask = json_mask(texts, schema, len(renderer.tokenizer))
        while not mask.error:
            tokens.append(int(rng.choice(np.flatnonzero(mask.allowed(tokens)))))
        raise ApiError(400, mask.error)
