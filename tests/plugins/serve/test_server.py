"""The server as clients see it, on loopback: with a tiny model through OpenAI's own client, and
with a hand-written engine."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import numpy as np
import openai
import pytest

from tandem.data.renderer import load_renderer
from tandem.plugins.serve import service
from tandem.plugins.serve.texts import RendererTexts
from tests.support.byte_models import CHATML, make_model
from tests.support.fake_engine import FAKE, FakeEngine, FakeTexts
from tests.support.serving import get, metric, openai_client, post, running
from tests.support.waiting import WAIT_S, eventually

HELLO = [{"role": "user", "content": "Solve 2x = 6."}]


@pytest.fixture(scope="module")
def client(url):
    with openai_client(url) as client:
        yield client


def extras(**fields):
    return {"return_token_ids": True, **fields}


# ---- a tiny model


def test_a_completion_is_the_engines_own(tiny, client):
    ends = [token for token in range(100) if token not in tiny.renderer.stop_token_ids]
    fields = {"top_k": 30, "min_p": 0.001, "min_tokens": 9, "stop_token_ids": ends}
    ask = {"model": "tiny", "prompt": "1 + 1 =", "max_tokens": 20, "seed": 5}
    answer = client.completions.create(**ask, extra_body=extras(**fields))
    prompt = tiny.texts.encode("1 + 1 =")
    fields["stop_token_ids"] = (*range(100),)  # with the model's own
    expected = tiny.complete(prompt, seed=5, max_new_tokens=20, **fields)
    [choice] = answer.choices
    assert (answer.object, answer.model) == ("text_completion", "tiny")
    assert answer.model_extra["weight_version"] == 0
    assert answer.model_extra["prompt_token_ids"] == prompt.tolist()
    assert choice.model_extra["token_ids"] == expected.tokens.tolist()
    assert choice.model_extra["weight_versions"] == [0] * len(expected.tokens)
    assert (choice.text, choice.finish_reason) == (expected.text, expected.stop_reason)
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(expected.tokens)


def test_chat_is_rendered_by_its_template_or_given_as_tokens(tiny, client):
    ask = {"model": "tiny", "max_tokens": 12, "seed": 1}
    first = client.chat.completions.create(messages=HELLO, **ask, extra_body=extras())
    prompt = tiny.renderer.prompts([HELLO])[0].tolist()
    expected = tiny.complete(prompt, seed=1, max_new_tokens=12)
    assert first.model_extra["prompt_token_ids"] == prompt
    assert first.choices[0].message.content == expected.text
    assert first.choices[0].model_extra["token_ids"] == expected.tokens.tolist()
    so_far = prompt + expected.tokens.tolist()
    ids = extras(prompt_token_ids=so_far)
    second = client.chat.completions.create(messages=[], **ask, extra_body=ids)
    assert second.model_extra["prompt_token_ids"] == so_far
    expected = tiny.complete(so_far, seed=1, max_new_tokens=12)
    assert second.choices[0].model_extra["token_ids"] == expected.tokens.tolist()


def test_prompt_may_be_text_token_ids_or_lists_of_them(tiny, client):
    ids = tiny.texts.encode("ab").tolist()
    ask = {"model": "tiny", "max_tokens": 6, "seed": 3}
    alone = client.completions.create(prompt="ab", **ask).choices[0].text
    assert client.completions.create(prompt=ids, **ask).choices[0].text == alone
    for prompts in (["ab", "cd"], [ids, tiny.texts.encode("cd").tolist()]):
        answer = client.completions.create(prompt=prompts, n=2, **ask, extra_body=extras())
        assert [c.index for c in answer.choices] == [0, 1, 2, 3]
        assert answer.choices[0].text == alone
        assert answer.model_extra["prompt_token_ids"] == [ids, tiny.texts.encode("cd").tolist()]
        assert len({c.text for c in answer.choices}) == 4


@pytest.mark.parametrize("stop", [None, "e", ["zz", "E", "9"]])
def test_a_streamed_completion_is_the_whole_one_in_pieces(client, stop):
    for seed in range(6):
        ask = {"model": "tiny", "prompt": "x", "max_tokens": 40, "logprobs": 2}
        ask |= {"seed": seed, "stop": stop}
        [whole] = client.completions.create(**ask, extra_body=extras()).choices
        pieces = list(client.completions.create(**ask, stream=True, extra_body=extras()))
        assert "".join(p.choices[0].text for p in pieces) == whole.text
        *before, last = [p.choices[0].finish_reason for p in pieces]
        assert not any(before) and last == whole.finish_reason
        ids = [token for p in pieces for token in p.choices[0].model_extra["token_ids"]]
        assert ids == whole.model_extra["token_ids"]
        for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            parts = [item for p in pieces for item in getattr(p.choices[0].logprobs, field)]
            assert parts == getattr(whole.logprobs, field)


def test_a_streamed_chat_is_the_whole_one_in_pieces(client):
    ask = {"model": "tiny", "messages": HELLO, "max_tokens": 20, "seed": 2, "n": 2}
    ask |= {"logprobs": True, "top_logprobs": 1}
    whole = client.chat.completions.create(**ask)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *pieces, last = client.chat.completions.create(**ask, **options, extra_body=extras())
    has_prompt = ["prompt_token_ids" in piece.model_extra for piece in pieces]
    assert has_prompt == [True] + [False] * (len(pieces) - 1)
    for choice in whole.choices:
        deltas = [c for p in pieces for c in p.choices if c.index == choice.index]
        assert "".join(c.delta.content for c in deltas) == choice.message.content
        assert [c.delta.role for c in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
        assert [entry for c in deltas for entry in c.logprobs.content] == choice.logprobs.content
    assert last.choices == [] and last.usage == whole.usage


def test_logprobs_are_the_engines_with_the_likeliest_tokens(tiny, client):
    expected = tiny.complete(tiny.texts.encode("x"), seed=0, max_new_tokens=9, top_logprobs=3)
    answer = client.completions.create(model="tiny", prompt="x", max_tokens=9, seed=0, logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == [tiny.texts.token_text(t) for t in expected.tokens.tolist()]
    assert np.array_equal(np.array(logprobs.token_logprobs, np.float32), expected.logprobs)
    for ids, top in zip(expected.top_tokens.tolist(), logprobs.top_logprobs, strict=True):
        assert {tiny.texts.token_text(token) for token in ids} <= set(top)
    assert logprobs.text_offset == np.cumsum([0, *map(len, logprobs.tokens[:-1])]).tolist()

    ask = {"model": "tiny", "messages": HELLO, "max_tokens": 9, "seed": 0, "logprobs": True}
    for entry in client.chat.completions.create(**ask, top_logprobs=2).choices[0].logprobs.content:
        first, second = entry.top_logprobs
        assert first.logprob >= second.logprob and entry.bytes == list(entry.token.encode())
    assert client.chat.completions.create(**ask).choices[0].logprobs.content[0].top_logprobs == []


def test_prompt_logprobs_are_the_trainers_by_token_id(tiny, client):
    prompts = [tiny.texts.encode("Solve 2x = 6."), tiny.texts.encode("x")[:1]]
    ask = {"model": "tiny", "prompt": [p.tolist() for p in prompts], "max_tokens": 2, "n": 2}
    answer = client.completions.create(**ask, extra_body={"prompt_logprobs": 2})
    rows = [choice.model_extra["prompt_logprobs"] for choice in answer.choices]
    assert rows[0] == rows[1] and rows[2] == rows[3] == [None] and rows[0][0] is None
    expected = tiny.twin.score(prompts[0])
    for token, logprob, row in zip(prompts[0][1:].tolist(), expected, rows[0][1:], strict=True):
        own = row[str(token)]
        assert np.float32(own["logprob"]) == logprob
        assert own["decoded_token"] == tiny.texts.token_text(token)
        assert {score["rank"] for score in row.values()} == {1, 2, own["rank"]}
        assert all((s["rank"] < own["rank"]) == (s["logprob"] > logprob) for s in row.values())

    ask |= {"prompt": ["Solve 2x = 6.", "x"], "logprobs": 1}
    choices = client.completions.create(**ask, echo=True, seed=2).choices
    plain = client.completions.create(**ask, seed=2).choices
    for choice, alone, prompt in zip(choices[::2], plain[::2], prompts, strict=True):
        found, own = choice.logprobs, alone.logprobs
        assert choice.text == tiny.texts.decode(prompt) + alone.text
        assert found.tokens == [*map(tiny.texts.token_text, prompt.tolist()), *own.tokens]
        scores = [None, *(tiny.twin.score(prompt).tolist() if len(prompt) > 1 else ())]
        assert found.token_logprobs == [*scores, *own.token_logprobs]
        assert found.top_logprobs[len(prompt) :] == own.top_logprobs
        for logprob, top in zip(scores[1:], found.top_logprobs[1:], strict=False):
            assert 1 <= len(top) <= 2 and logprob in top.values()

    ask = {"model": "tiny", "messages": HELLO, "max_tokens": 1}
    chat = client.chat.completions.create(**ask, extra_body={"prompt_logprobs": 0})
    prompt = tiny.renderer.prompts([HELLO])[0]
    first, *others = chat.model_extra["prompt_logprobs"]
    assert first is None and [[*row] for row in others] == [[str(t)] for t in prompt[1:].tolist()]
    found = np.float32([score["logprob"] for row in others for score in row.values()])
    assert np.array_equal(found, tiny.twin.score(prompt))


def test_ignore_eos_passes_the_models_ends_only(tiny, client):
    [eos] = tiny.renderer.stop_token_ids
    ask = {"model": "tiny", "prompt": "x", "max_tokens": 40, "seed": 1, "n": 32}

    def reasons(token, **fields):
        answer = client.completions.create(**ask, extra_body=extras(**fields))
        return {c.finish_reason for c in answer.choices if token in c.model_extra["token_ids"]}

    assert reasons(eos) == {"stop"} and reasons(eos, ignore_eos=True) == {"length"}
    assert reasons(7, ignore_eos=True, stop_token_ids=[7]) == {"stop"}


def test_chat_template_kwargs_reach_the_template(tmp_path):
    template = CHATML + "{% if enable_thinking is false %}<think></think>{% endif %}"
    template += "{% if more %}{{ more.x }}{% endif %}"
    renderer = load_renderer(make_model(tmp_path, template))
    served = replace(FAKE, vocabulary=len(renderer.tokenizer))
    with running(FakeEngine("a"), RendererTexts(renderer), served) as url:
        for variables, tail in (
            ({}, ""),
            ({"enable_thinking": False}, "<think></think>"),
            ({"enable_thinking": None, "more": {"x": [1]}}, "[1]"),
        ):
            body = {"messages": HELLO, "return_token_ids": True, "chat_template_kwargs": variables}
            answer = post(f"{url}/v1/chat/completions", json=body).raise_for_status().json()
            plain = renderer.prompts([HELLO])[0].tolist()
            assert answer["prompt_token_ids"] == plain + renderer.encode(tail).tolist()


def test_models_health_weights_and_metrics(tiny, url, client):
    [model] = client.models.list().data
    assert (model.id, model.model_extra["max_model_len"]) == ("tiny", 256)
    assert get(f"{url}/health").json() == {"status": "ok"}
    weights = get(f"{url}/weights").json()
    expected = {"weight_version": 0, "sha256": tiny.twin.weight_hash(), "takes_updates": False}
    assert weights == expected
    before = metric(url, "tandem_generated_tokens_total")
    client.completions.create(model="tiny", prompt="x", max_tokens=5, seed=0)
    assert metric(url, "tandem_generated_tokens_total") == before + 5
    assert metric(url, "tandem_time_to_first_token_seconds_count") > 0
    text = get(f"{url}/metrics").text
    assert 'tandem_requests_total{path="/v1/completions",status="200"}' in text
    types = [line for line in text.splitlines() if "# TYPE" in line]
    assert len(set(types)) == len(types) == text.count("# HELP")


def test_a_completion_without_max_tokens_fits_the_context(client):
    for length, most in ((250, 6), (3, 24)):
        ask = {"prompt": [9] * length, "extra_body": {"stop_token_ids": None}}
        answer = client.completions.create(model="tiny", seed=0, **ask)
        assert answer.usage.completion_tokens <= most


def test_request_that_cannot_fit_is_refused_by_field(client):
    for ask, param in [
        ({"prompt": [9] * 256}, "prompt"),
        ({"prompt": [9] * 200, "max_tokens": 57}, "max_tokens"),
    ]:
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="tiny", **ask)
        assert (caught.value.param, caught.value.code) == (param, "context_length_exceeded")
    for token in (-1, 10**6, 10**30):
        with pytest.raises(openai.BadRequestError, match="prompt"):
            client.completions.create(model="tiny", prompt=[token])


def test_the_templates_refusal_is_a_bad_request(client):
    ahoy = [{"role": "pirate", "content": "ahoy"}]
    with pytest.raises(openai.BadRequestError, match="unknown role: pirate") as caught:
        client.chat.completions.create(model="tiny", messages=ahoy)
    assert caught.value.param == "messages"


# ---- bad requests


@pytest.fixture(scope="module")
def fake():
    with running(FakeEngine("hé🦀llo "), FakeTexts(), FAKE) as url:
        yield url


def connected(url):
    """A socket, for bytes."""
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=WAIT_S)


def refusal(answer, status):
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


CHAT, PLAIN = {"messages": [{"role": "user", "content": "hi"}]}, {"prompt": "hi"}
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (PLAIN | {"temprature": 1}, "temprature"),
        (PLAIN | {"echo": True, "stream": True}, "echo"),
        (CHAT | {"echo": True}, "echo"),
        (PLAIN | {"presence_penalty": 0.5}, "presence_penalty"),
        (CHAT | {"tools": [{"type": "function"}]}, "tools[0]"),
        (CHAT | {"chat_template": "{{ messages }}"}, "chat_template"),
        (PLAIN | {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        (CHAT | {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        (PLAIN | {"min_tokens": 17}, "min_tokens"),
        (PLAIN | {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (CHAT | {"top_logprobs": 2}, "top_logprobs"),
        (CHAT | {"prompt_token_ids": [1, -1]}, "prompt_token_ids[1]"),
        (CHAT | {"prompt_token_ids": [256]}, "prompt_token_ids"),
        ({}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content"),
        (PLAIN | {"max_tokens": "5"}, "max_tokens"),
        (PLAIN | {"max_tokens": 10**9}, "max_tokens"),
        (PLAIN | {"temperature": 1e-9}, "temperature"),
        (PLAIN | {"n": 9}, "n"),
        (PLAIN | {"stop": ""}, "stop"),
        (PLAIN | {"stop_token_ids": [300]}, "stop_token_ids"),
        (PLAIN | {"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": ["a"] * 9}, "prompt"),
    ],
)
def test_a_bad_field_is_named(fake, body, param):
    path = "completions" if "prompt" in body else "chat/completions"
    error = refusal(post(f"{fake}/v1/{path}", json=body), 400)
    assert error["param"] == param and param.split("[")[0].split(".")[0] in error["message"]


def test_fields_that_change_nothing_are_accepted(fake):
    nothing = {"user": "me", "metadata": {"a": "b"}, "store": True, "top_k": -1}
    nothing |= {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "tools": []}
    nothing |= {"tool_choice": "none", "response_format": {"type": "text"}}
    nothing |= dict.fromkeys(("stop", "seed", "stream_options", "model", "chat_template"))
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "a", "tool_calls": None, "refusal": None},
    ]
    body = {"messages": messages, "return_token_ids": True, **nothing}
    answer = post(f"{fake}/v1/chat/completions", json=body).raise_for_status().json()
    assert bytes(answer["prompt_token_ids"]) == b"user:hi\nassistant:a\n"
    assert answer["weight_version"] == 7


HALF = b'{"prompt": "\\ud83e"}'


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize(
    "body",
    [b"{", b"", b"[1]", b'{"prompt": "a\xff"}', HALF, b"[" * 60_000, b'{"temperature": NaN}'],
)
def test_a_body_that_is_no_json_object_is_refused(fake, body):
    headers = {"Content-Type": "application/json"}
    refusal(post(f"{fake}/v1/completions", content=body, headers=headers), 400)


def test_unknown_model_route_or_method_has_the_error_shape(fake):
    error = refusal(post(f"{fake}/v1/completions", json=PLAIN | {"model": "gpt-4"}), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "/v1/nothing" in refusal(get(f"{fake}/v1/nothing"), 404)["message"]
    refusal(get(f"{fake}/v1/completions"), 405)


# ---- access


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Host: evil.com:8000", 403),
        ("Host: 192.168.0.1", 403),
        ("Host: localhost.evil.com", 403),
        ("Host: 127.0.0.1@evil.com", 403),
        ("Host: [", 403),
        ("Host: ", 403),
        ("Host: LOCALHOST:80", 200),
        ("Host: 127.8.9.1:80", 200),
        ("Host: [::1]", 200),
        ("Sec-Fetch-Site: cross-site", 403),
        ("Sec-Fetch-Site: same-site", 403),
        ("Sec-Fetch-Site: same-origin", 200),
    ],
)
def test_without_a_key_only_this_machines_own_names_and_pages_are_accepted(fake, header, status):
    name, _, value = header.partition(": ")
    assert get(f"{fake}/health", headers={name: value}).status_code == status


def test_what_a_web_page_can_send_is_refused(fake):
    content = json.dumps(PLAIN)
    for kind in ("", "text/plain", "text/plain; application/json"):
        headers = {"Content-Type": kind} if kind else {}
        refusal(post(f"{fake}/v1/completions", content=content, headers=headers), 415)
    preflight = httpx.options(
        f"{fake}/v1/completions", headers={"Origin": "http://evil.com"}, timeout=WAIT_S
    )
    assert preflight.status_code == 405 and "access-control-allow-origin" not in preflight.headers


def test_a_key_opens_everything_and_health_needs_none():
    with running(FakeEngine("a"), FakeTexts(), FAKE, api_key="sécret") as url:
        assert get(f"{url}/health").status_code == 200
        for path in ("/v1/models", "/metrics", "/weights", "/nothing"):
            assert refusal(get(url + path), 401)["code"] == "invalid_api_key"
            for sent in ("Bearer wrong", "sécret"):
                answer = get(url + path, headers={"Authorization": sent.encode()})
                assert refusal(answer, 401)["code"] == "invalid_api_key"
        right = {"Authorization": "Bearer sécret".encode(), "Host": "models.example.com"}
        assert get(f"{url}/v1/models", headers=right).status_code == 200
        refusal(post(f"{url}/v1/completions", json=PLAIN), 401)


# ---- with an engine that does as it is told


def test_no_half_character_is_ever_sent(fake):
    body = PLAIN | {"max_tokens": 35, "stream": True, "logprobs": 1}
    with httpx.stream("POST", f"{fake}/v1/completions", json=body, timeout=WAIT_S) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert events.pop() == "[DONE]"
    texts = [json.loads(event)["choices"][0]["text"] for event in events]
    assert "".join(texts) == "hé🦀llo " * 3 + "h\ufffd", "the last token is the first half of é"
    assert not any("\ufffd" in text for text in texts[:-1])
    whole = post(f"{fake}/v1/completions", json=body | {"stream": False}).json()["choices"][0]
    assert "".join(texts) == whole["text"]
    assert whole["logprobs"]["top_logprobs"][0] == {"\x00": -9999.0, "h": -0.5}


def test_a_full_queue_is_429_and_nothing_of_the_request_stays():
    engine = FakeEngine("abc", room=1)
    with running(engine, FakeTexts(), FAKE) as url:
        answer = post(f"{url}/v1/completions", json=PLAIN | {"n": 2})
        assert refusal(answer, 429)["type"] == "rate_limit_error"
        assert answer.headers["retry-after"] == "1"
        assert not engine.running and len(engine.cancelled) == 1
        assert post(f"{url}/v1/completions", json=PLAIN).status_code == 200


class Unhurried(FakeEngine):
    """An answer of 4,000 tokens takes it 40 s at least."""

    def step(self):
        time.sleep(0.01)
        return super().step()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_cancelled_at_once(stream):
    engine = Unhurried("abc")
    with running(engine, FakeTexts(), FAKE) as url:
        content = json.dumps(PLAIN | {"max_tokens": 4000, "n": 2, "stream": stream}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        head += b"Content-Type: application/json\r\n"
        with connected(url) as sock:
            sock.sendall(head + b"Content-Length: %d\r\n\r\n%s" % (len(content), content))
            assert eventually(lambda: len(engine.running) == 2)
        assert eventually(lambda: len(engine.cancelled) == 2)
        assert metric(url, "tandem_disconnects_total") == 1
        assert not engine.running


@pytest.mark.parametrize("stream", [True, False])
def test_an_engine_that_dies_fails_every_client_and_the_health(stream):
    with running(FakeEngine("abc", fails_at=5), FakeTexts(), FAKE) as url:
        body = PLAIN | {"max_tokens": 9, "n": 2, "stream": stream}
        answer = post(f"{url}/v1/completions", json=body)
        last = answer.text.rpartition("data: ")[2] if stream else answer.text
        assert answer.status_code == (200 if stream else 503)
        assert "out of numbers" in json.loads(last)["error"]["message"]
        assert get(f"{url}/health").status_code == 503
        assert metric(url, "tandem_engine_up") == 0
        refusal(post(f"{url}/v1/completions", json=PLAIN), 503)
        refusal(get(f"{url}/weights"), 503)


def test_a_server_that_stops_ends_its_answers_soon(monkeypatch):
    """Before the pass that runs has ended: that does when the answer is there."""
    monkeypatch.setattr(service, "JOIN_S", WAIT_S)
    engine = FakeEngine("abc")
    with running(engine, FakeTexts(), FAKE) as url:
        engine.go.clear()
        answers = []
        body = PLAIN | {"max_tokens": 4000}

        def client():
            answers.append((post(f"{url}/v1/completions", json=body), engine.steps))
            engine.go.set()

        waiting = threading.Thread(target=client)
        waiting.start()
        assert eventually(lambda: engine.running)
    waiting.join(WAIT_S)
    [(answer, steps)] = answers
    assert "stopping" in refusal(answer, 503)["message"] and steps == 0
    assert len(engine.cancelled) == 1 and len(engine.threads) == 1


# ---- nobody else waits, and nobody gets anything but an answer


class WaitingTexts(FakeTexts):
    """`waits` is called with the length of every text before it is tokenized."""

    def __init__(self, waits):
        self.waits = waits

    def encode(self, text):
        self.waits(len(text))
        return super().encode(text)


def test_small_request_does_not_wait_for_a_large_one():
    begun, answered = threading.Event(), threading.Event()

    def wait(size):
        if size > 1:
            begun.set()
            assert answered.wait(WAIT_S)

    with running(FakeEngine("abc"), WaitingTexts(wait), FAKE) as url, ThreadPoolExecutor() as pool:

        def ask(size, wait_s):
            body = {"prompt": "x" * size, "max_tokens": 2}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=wait_s)
            return answer.json()["choices"][0]["text"]

        large = pool.submit(ask, 1000, WAIT_S)
        assert begun.wait(WAIT_S)
        try:
            assert ask(1, WAIT_S / 4) == "ab"
        finally:
            answered.set()
        assert large.result(WAIT_S) == "ab"
