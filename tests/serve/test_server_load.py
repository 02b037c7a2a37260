"""The server under requests that are large, slow or malformed: nobody else waits, and nobody gets
anything but an answer."""

import json
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tandem.serve.openai_api import ApiError
from tandem.serve.openai_prompts import SLICE, DrawKeys, to_requests
from tandem.serve.openai_requests import MAX_COMMAS, MAX_OPENINGS, CompletionBody, parse
from tandem.serve.openai_responses import ROWS, write_json
from tests.support.fake_engine import FAKE, FakeEngine, FakeTexts
from tests.support.serving import get, post, running
from tests.support.waiting import WAIT_S, eventually, given_time

LARGE = replace(FAKE, context=1 << 20, longest_text=1 << 20)
SOON_S = 1.0
ROOT = Path(__file__).parent.parent.parent
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


class CountingTexts(FakeTexts):
    """Keeps the length of every text that is tokenized; `waits` is called with it before."""

    def __init__(self, waits=lambda size: None):
        self.sizes, self.waits = [], waits

    def encode(self, text):
        self.sizes.append(len(text))
        self.waits(len(text))
        return super().encode(text)


def refused(body, served, texts):
    with pytest.raises(ApiError) as caught:
        for _ in to_requests(CompletionBody(**body), texts, served, DrawKeys()):
            pass
    return caught.value


# ---- large requests


def test_small_request_does_not_wait_for_a_large_one():
    begun, answered = threading.Event(), threading.Event()

    def wait(size):
        if size > 100:
            begun.set()
            assert answered.wait(WAIT_S)

    answers = []
    with running(FakeEngine("abc"), CountingTexts(wait), LARGE) as url:
        body = {"prompt": "x" * 100_000, "max_tokens": 2}
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


def test_large_requests_take_turns():
    """The second is tokenized while prompts of the first are still to come."""

    def sizes(seconds):
        begun, queued = threading.Event(), threading.Event()

        def wait(size):
            if size == 20_000:
                begun.set()
                assert queued.wait(WAIT_S)

        texts = CountingTexts(wait)
        with running(FakeEngine("abc"), texts, LARGE) as url:

            def ask(prompt):
                post(
                    f"{url}/v1/completions", json={"prompt": prompt, "max_tokens": 1}
                ).raise_for_status()

            clients = [
                threading.Thread(target=ask, args=(prompt,))
                for prompt in (["x" * 20_000] * 8, "y" * 65_530)
            ]
            clients[0].start()
            assert begun.wait(WAIT_S)
            clients[1].start()
            time.sleep(seconds)  # in which the second has come
            queued.set()
            for client in clients:
                client.join(WAIT_S)
        return texts.sizes

    *_, last = given_time(sizes, lambda sizes: sizes[-1] == 20_000, 0.1)
    assert sorted(last) == [20_000] * 8 + [65_530] and last[-1] == 20_000


def test_every_slice_of_work_tokenizes_one_text_at_most():
    texts, prompts = CountingTexts(), ["abc", "x" * (2 * SLICE), "de"]
    work = to_requests(CompletionBody(prompt=prompts), texts, LARGE, DrawKeys())
    made = []
    with pytest.raises(StopIteration) as ended:
        while True:
            next(work)
            made.append(len(texts.sizes))
    assert made == list(range(len(made))) and texts.sizes == [3, SLICE, SLICE, 2 * SLICE, 2]
    assert [len(request.prompt) for request in ended.value.value] == [3, 2 * SLICE, 2]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ["a"] * 9}, "prompt"),
        ({"prompt": ["a"] * 3, "n": 3}, "n"),
        ({"prompt": ["a", "b" * 4097]}, "prompt"),
        ({"prompt": ["a", "\ud83e"]}, "prompt"),
        ({"prompt": "a", "stop_token_ids": [300]}, "stop_token_ids"),
    ],
)
def test_mistakes_are_refused_before_the_tokenizer_runs(body, param):
    texts = CountingTexts()
    assert refused(body, FAKE, texts).param == param and texts.sizes == []


def test_log_probs_of_several_prompts_are_bounded():
    several = {"prompt": ["a" * 4000] * 4, "prompt_logprobs": 20, "max_tokens": 1}
    assert refused(several, FAKE, CountingTexts()).param == "prompt_logprobs"
    work = to_requests(
        CompletionBody(prompt="a" * 4000, prompt_logprobs=20), CountingTexts(), FAKE, DrawKeys()
    )
    with pytest.raises(StopIteration):
        next(work), next(work)


def test_a_hopeless_text_is_given_up_after_a_slice():
    texts = CountingTexts()
    error = refused({"prompt": "x" * (8 * SLICE)}, replace(FAKE, longest_text=8 * SLICE), texts)
    assert error.code == "context_length_exceeded" and texts.sizes == [SLICE]


@pytest.mark.parametrize(
    "raw",
    [
        b'{"prompt": [' + b'"a",' * (MAX_COMMAS + 1) + b'"a"]}',
        b'{"prompt": [' + b"1," * (MAX_COMMAS + 1) + b"1]}",
        b'{"prompt": ' + b"[" * (MAX_OPENINGS + 1),
        b"{" + b",".join(b'"f%d":1' % n for n in range(MAX_OPENINGS + 1)) + b"}",
    ],
    ids=["texts", "token ids", "brackets", "fields"],
)
def test_body_of_too_many_values_is_refused_unparsed(raw):
    with pytest.raises(ApiError, match="send fewer prompts") as caught:
        parse(CompletionBody, raw, FAKE)
    assert caught.value.status == 413


def test_only_the_first_of_many_mistakes_is_reported():
    def error(**fields):
        with pytest.raises(ApiError) as caught:
            parse(CompletionBody, json.dumps(fields).encode(), FAKE)
        return caught.value

    assert error(prompt="a", **{f"f{n}": n for n in range(60_000)}).param == "f0"
    assert (
        error(prompt="a", stream_options={f"f{n}": n for n in range(60_000)}).param
        == "stream_options.f0"
    )
    assert len(error(prompt="a", model="m" * 100_000).message) < 2000
    assert len(json.dumps(error(prompt="a", **{"f" * 100_000: 1}).body())) < 4000


@pytest.mark.parametrize(
    ("longest_text", "expected"), [(256, 1 << 20), (1 << 18, 1 << 22), (1 << 30, 16 << 20)]
)
def test_the_largest_body_follows_from_the_context(longest_text, expected):
    assert replace(FAKE, longest_text=longest_text).longest_body == expected


def test_an_answer_is_written_in_small_slices():
    rows = [{"token": str(n)} for n in range(5 * ROWS)]
    value = {"a": {"content": iter(rows), "none": iter([])}, "b": None, "c": {}, "d": [1, "é"]}
    slices = list(write_json(value))
    assert json.loads("".join(slices)) == {
        "a": {"content": rows, "none": []},
        "b": None,
        "c": {},
        "d": [1, "é"],
    }
    assert max(text.count("token") for text in slices) == ROWS


# ---- slow and malformed connections


def conversation(url, *parts):
    """Send bytes; return what comes back until the server closes."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as sock:
        for part in parts:
            sock.sendall(part)
        answer = b""
        with suppress(ConnectionResetError):  # closed before all that was sent was read
            while piece := sock.recv(1 << 16):
                answer += piece
    return answer


def error_of(answer, status):
    head, _, body = answer.partition(b"\r\n\r\n")
    assert int(head.split()[1]) == status, answer
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error["message"]


@pytest.mark.parametrize(
    "sent",
    [
        (),
        (b"POST /v1/comple",),
        (HEAD,),
        (HEAD + b"Content-Length: 20\r\n\r\n", b'{"prompt"'),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"5\r\nabc"),
    ],
    ids=["nothing", "half a line", "half a head", "half a body", "half a chunk"],
)
def test_client_that_sends_too_slowly_is_dropped(sent):
    with running(FakeEngine("abc"), FakeTexts(), FAKE, request_s=SOON_S) as url:
        assert "1 seconds" in error_of(conversation(url, *sent), 408)
        assert post(f"{url}/v1/completions", json={"prompt": "a"}).status_code == 200


def test_slow_answer_keeps_its_connection():
    engine = FakeEngine("abc")
    with (
        running(engine, FakeTexts(), FAKE, request_s=SOON_S) as url,
        httpx.Client(timeout=WAIT_S) as client,
    ):
        for _ in range(2):
            engine.go.clear()
            threading.Timer(2 * SOON_S, engine.go.set).start()
            assert client.post(f"{url}/v1/completions", json={"prompt": "a"}).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (b"".join(b"X-%d: 1\r\n" % n for n in range(200)), 431),
        (b"X: " + b"a" * 17_000 + b"\r\n", 431),
        (b"no colon\r\n", 400),
        (b"Content-Length: many\r\n", 400),
        (b"Transfer-Encoding: chunked\r\n\r\nno length\r\n", 400),
    ],
    ids=["many", "long", "no header", "no length", "no chunk"],
)
def test_bad_headers_are_refused_in_json(headers, status):
    with running(FakeEngine("abc"), FakeTexts(), FAKE) as url:
        error_of(conversation(url, HEAD + b"Connection: close\r\n" + headers + b"\r\n"), status)
        assert get(f"{url}/health").status_code == 200


def test_headers_without_an_end_are_not_read_to_the_end():
    with running(FakeEngine("abc"), FakeTexts(), FAKE) as url:
        answer = conversation(url, HEAD + b"X: " + b"a" * 200_000)
        assert not answer or error_of(answer, 431)
        assert get(f"{url}/health").status_code == 200


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


MEMORY = """
import ctypes, threading
from dataclasses import replace
from pathlib import Path
from tandem.serve import endpoints
from tests.support.fake_engine import FAKE, FakeEngine, FakeTexts
from tests.support.serving import post, running
from tests.support.waiting import eventually

def resident(most=False):
    name = "VmHWM:" if most else "VmRSS:"
    return int(Path("/proc/self/status").read_text().partition(name)[2].split()[0]) >> 10  # MiB

# as jobs.parts.prepare_process has it; and one arena, as `tandem serve` reads bodies in the main
# thread, which is not so here
for setting, value in ((-1, 1 << 30), (-3, 1 << 30), (-8, 1)):
    ctypes.CDLL(None).mallopt(setting, value)
endpoints.TRIM_S = 0.5
body = {"prompt": "x" * (12 << 20)}
with running(FakeEngine("a"), FakeTexts(), replace(FAKE, longest_text=1 << 24)) as url:
    post(f"{url}/v1/completions", json={"prompt": "x"})
    before = resident()
    send = lambda: post(f"{url}/v1/completions", json=body)
    clients = [threading.Thread(target=send) for _ in range(4)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    peak = resident(most=True)
    assert eventually(lambda: resident() < before + 64, within_s=30), (before, peak, resident())
    assert peak > before + 64, "there was something to give back"
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc, and /proc")
def test_the_memory_of_large_bodies_goes_back():
    subprocess.run([sys.executable, "-c", MEMORY], cwd=ROOT, check=True, timeout=WAIT_S)
