"""The server under requests that are large or malformed: nobody else waits, and nobody gets
anything but an answer."""

import json
import socket
import threading

import httpx
import pytest

from tests.support.fake_engine import FAKE, FakeEngine, FakeTexts
from tests.support.serving import get, post, running
from tests.support.waiting import WAIT_S, eventually

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


class WaitingTexts(FakeTexts):
    """`waits` is called with the length of every text before it is tokenized."""

    def __init__(self, waits):
        self.waits = waits

    def encode(self, text):
        self.waits(len(text))
        return super().encode(text)


# ---- large requests


def test_small_request_does_not_wait_for_a_large_one():
    begun, answered = threading.Event(), threading.Event()

    def wait(size):
        if size > 1:
            begun.set()
            assert answered.wait(WAIT_S)

    answers = []
    with running(FakeEngine("abc"), WaitingTexts(wait), FAKE) as url:
        body = {"prompt": "x" * 1000, "max_tokens": 2}
        large = threading.Thread(
            target=lambda: answers.append(post(f"{url}/v1/completions", json=body))
        )
        large.start()
        assert begun.wait(WAIT_S)
        try:
            small = httpx.post(
                f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 2}, timeout=WAIT_S / 4
            )
        finally:
            answered.set()
        large.join(WAIT_S)
    assert small.json()["choices"][0]["text"] == answers[0].json()["choices"][0]["text"] == "ab"


class HashedLate(FakeEngine):
    """Its hash is there when `hashed` is set, and its weights have changed by then."""

    hashed = threading.Event()

    def weight_hash(self):
        assert self.hashed.wait(WAIT_S)
        self.weight_version = 8
        return super().weight_hash()


def test_generation_goes_on_while_weights_are_hashed():
    answers, engine = [], HashedLate("abc")
    with running(engine, FakeTexts(), FAKE) as url:
        asking = threading.Thread(target=lambda: answers.append(get(f"{url}/weights").json()))
        asking.start()
        try:
            assert (
                httpx.post(
                    f"{url}/v1/completions", json={"prompt": "x"}, timeout=WAIT_S / 4
                ).status_code
                == 200
            )
        finally:
            engine.hashed.set()
        asking.join(WAIT_S)
    assert answers == [{"weight_version": 8, "sha256": "f" * 64, "takes_updates": False}]


def test_client_that_leaves_within_a_body_is_no_error(caplog):
    with running(FakeEngine("abc"), FakeTexts(), FAKE) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as sock:
            sock.sendall(HEAD + b"Content-Length: 20\r\n\r\n{")
        counted = 'tandem_requests_total{path="/v1/completions",status="499"} 1'
        assert eventually(lambda: counted in get(f"{url}/metrics").text)
    assert not caplog.records


def test_deep_json_in_a_tool_is_an_answer_and_not_a_failure(caplog):
    deep = json.loads("[" * 900 + "]" * 900)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"x": deep}}}
    with running(FakeEngine("abc"), FakeTexts(), FAKE) as url:
        body = {"messages": [{"role": "user", "content": "a"}], "tools": [tool]}
        assert post(f"{url}/v1/chat/completions", json=body).status_code in (200, 400)
    assert not caplog.records


# ---- several answers


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "plain"])
def test_an_event_is_of_one_choice(chat):
    body = (
        {"messages": [{"role": "user", "content": "a"}], "logprobs": True}
        if chat
        else {"prompt": "a", "logprobs": 1}
    )
    body |= {"n": 3, "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
    with running(FakeEngine("abcd"), FakeTexts(), FAKE) as url:
        answer = post(f"{url}/v1/chat/completions" if chat else f"{url}/v1/completions", json=body)
    *events, done = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    *pieces, last = map(json.loads, events)
    assert done == "[DONE]" and last["choices"] == [] and last["usage"]["completion_tokens"] == 12
    assert [len(piece["choices"]) for piece in pieces] == [1] * 12 and all(
        piece["usage"] is None for piece in pieces
    )
    for index in range(3):
        own = [piece["choices"][0] for piece in pieces if piece["choices"][0]["index"] == index]
        assert "".join(c["delta"]["content"] if chat else c["text"] for c in own) == "abcd"
        assert [c["finish_reason"] for c in own] == [None] * 3 + ["length"]
        assert all(len(c["logprobs"]["content" if chat else "tokens"]) == 1 for c in own)
