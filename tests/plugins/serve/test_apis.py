"""The three APIs of chats, by each one's client: the same prompts, the same answers, and errors in
each one's own form."""

import json

import pytest

from tests.support.fake_engine import FAKE, FakeEngine, FakeTexts
from tests.support.serving import ASK, CALCULATOR, SAID, answering, post, running
from tests.support.talks import TALKS, MessagesTalk

MESSAGES = {"model": "fake", "messages": [ASK], "max_tokens": 9}
RESPONSES = {"model": "fake", "input": ASK["content"]}
IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
ONE_CALL = {"type": "auto", "disable_parallel_tool_use": True}


class Heard(FakeTexts):
    """Keeps the prompts."""

    def __init__(self):
        self.prompts = []

    def encode_chat(self, text):
        self.prompts.append(text)
        return super().encode_chat(text)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("talk", TALKS)
def test_a_conversation_is_the_same_in_every_api(talk, stream):
    texts = Heard()
    with answering(SAID, texts) as url:
        own = talk(f"{url}/v1", ASK, model="fake")
        text, [(id, *call)], reason, used = own.ask(stream=stream, tools=[CALCULATOR], limit=400)
        own.result(id, "42")
        again = own.ask(stream=stream, tools=[CALCULATOR], limit=9)
    first = f"tool:calculator\nuser:{ASK['content']}\n"
    assert texts.prompts == [first, f"{first}assistant:I see.\ntool:42\n"]
    assert (text, call, reason) == ("I see.", ["calculator", {"expression": "6*7"}], "tool_calls")
    assert used == (len(first), len(SAID) + 1)
    assert again == (SAID[:9], [], own.cut, (len(texts.prompts[1]), 9))


@pytest.mark.parametrize("talk", TALKS)
def test_errors_have_the_form_of_their_api(talk):
    long = ASK | {"content": "x" * 5000}
    with running(FakeEngine("abc", room=0), FakeTexts(), FAKE, api_key="x") as url:
        for model, ask, key, status, kind, words in (
            ("other", ASK, "x", 404, "not_found_error", "'other' does not exist"),
            ("fake", long, "x", 400, "invalid_request_error", "5006 tokens leave no room"),
            ("fake", ASK, "x", 429, "rate_limit_error", "busy"),
            ("fake", ASK, "no", 401, "authentication_error", "token is missing or wrong"),
        ):
            own = talk(f"{url}/v1", ask, model=model)
            own.client.api_key = key
            with pytest.raises(own.errors, match=words) as caught:
                own.ask()
            assert caught.value.status_code == status
            if talk is MessagesTalk:
                assert caught.value.body["type"] == "error"
                assert caught.value.body["error"]["type"] == kind
            elif status == 400:
                assert caught.value.code == "context_length_exceeded"
                own_name = "input" if own.cut == "incomplete" else "messages"
                assert caught.value.param == own_name and own_name in str(caught.value)


@pytest.mark.parametrize("talk", TALKS)
def test_an_engine_that_dies_ends_a_stream_with_an_error(talk):
    with running(FakeEngine("abc", fails_at=3), FakeTexts(), FAKE) as url:
        own = talk(f"{url}/v1", ASK, model="fake")
        with pytest.raises(Exception, match="out of numbers"):
            own.ask(stream=True)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("messages", {"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking"),
        ("messages", {"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0]"),
        ("messages", {"tool_choice": {"type": "some"}}, "tool_choice"),
        ("messages", {"tool_choice": ONE_CALL}, "tool_choice"),
        ("messages", {"messages": [ASK | {"content": [IMAGE]}]}, "messages[0][0].content"),
        ("messages", {"stop_sequences": [""]}, "stop_sequences[0]"),
        ("responses", {"previous_response_id": "resp_1"}, "previous_response_id"),
        ("responses", {"background": True}, "background"),
        ("responses", {"tools": [{"type": "web_search"}]}, "tools[0]"),
        ("responses", {"reasoning": {"effort": "low"}}, "reasoning"),
        ("responses", {"max_output_tokens": 9999}, "max_output_tokens"),
        ("responses", {"input": [{"type": "reasoning", "summary": []}]}, "input[0]"),
        ("responses", {"n": 2}, "n"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(url, path, fields, param):
    body = MESSAGES if path == "messages" else RESPONSES
    answer = post(f"{url}/v1/{path}", json=body | {"model": "tiny"} | fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(f"{param}: ")
    assert answer.json()["error"].get("param", param) == param


def test_tokens_of_messages_are_counted():
    with answering("ab") as url:
        answer = post(f"{url}/v1/messages/count_tokens", json=MESSAGES | {"max_tokens": None})
    assert answer.json() == {"input_tokens": len(f"user:{ASK['content']}\n")}


@pytest.mark.parametrize("path", ["messages", "responses"])
def test_events_come_as_the_tokens_do(path):
    with answering("abc") as url:
        body = MESSAGES if path == "messages" else RESPONSES
        events = post(f"{url}/v1/{path}", json=body | {"stream": True}).text.split("\n\n")
    named = [event.split("\n") for event in events if event]
    data = [json.loads(line.removeprefix("data: ")) for _, line in named]
    assert [name.removeprefix("event: ") for name, _ in named] == [one["type"] for one in data]
    deltas = [one["delta"] for one in data if "delta" in one["type"] and "usage" not in one]
    assert [delta if isinstance(delta, str) else delta["text"] for delta in deltas] == [*"abc"]
    if path == "responses":
        assert [one["sequence_number"] for one in data] == [*range(len(data))]
