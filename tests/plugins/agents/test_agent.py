"""Agents that speak the OpenAI API as environments: what they are told, what is tokenized, what
ends them."""

import asyncio
import json
import threading
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest

from tandem.config.schema import Env as EnvConfig
from tandem.envs.calls import environment_loop
from tandem.model.tool_calls import split_calls
from tandem.plugins.agents.chat import (
    ChatRequest,
    ConversationBroken,
    Reply,
    continuation,
    last_observation,
)
from tandem.plugins.agents.env import AgentDrivenEnv, AgentEnv, AgentFailed
from tandem.plugins.agents.server import the_server
from tandem.rollout.env_pool import EnvPool
from tandem.rollout.episode_builder import new_groups
from tandem.rollout.episodes import run_episodes
from tandem.runtime.errors import UserError
from tandem.serve.openai import ApiError, ChatMessage, read_body
from tandem.types import Problem, SamplingParams
from tests.support import env_steps
from tests.support.engines import engine_of
from tests.support.scripted import DigitRenderer
from tests.support.stages import PROBLEMS
from tests.support.talks import TALKS, ChatTalk, MessagesTalk, ResponsesTalk, needs_anthropic
from tests.support.tiny import exact_model
from tests.support.waiting import WAIT_S, eventually

EXAMPLE = Path(__file__).parents[3] / "examples/environments/agent.py"
PROBLEM = Problem(uid="p", messages=({"role": "user", "content": "How much is 3+4?"},), answer="7")
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"b": 4, "a": 3}}\n</tool_call>'


CHAT = [ChatMessage(role="system", content="s"), ChatMessage(role="user", content="u")]


def user(text):
    return {"role": "user", "content": text}


def client(base_url, api_key="x"):
    return openai.OpenAI(base_url=base_url, api_key=api_key, timeout=WAIT_S)


def ask(base_url, messages, **more):
    create = client(base_url).chat.completions.create
    return create(model="policy", messages=messages, **more).choices[0].message


def play(run, *texts, problem=PROBLEM):
    env = AgentDrivenEnv(run)
    return env_steps.play(env, problem, *texts), env


@contextmanager
def raising(error, match):
    with pytest.raises(error, match=match):
        yield
    assert not the_server().sessions  # closed all the same


# ---- what an agent says and hears


def test_agent_plays_two_turns_and_returns_its_reward():
    def run(problem, base_url, api_key):
        assert threading.current_thread() is not threading.main_thread()
        first = ask(base_url, list(problem.messages), temperature=0.3, max_tokens=9)
        chat = [*problem.messages, first, user("wrong")]  # as the client's own object
        again = client(base_url).chat.completions.create(model="any", messages=chat)
        said = first.content, again.choices[0].message.content, again.model
        return 0.25 if said == ("  6 ", "8", "any") else 0.0

    (chat, first, last), _ = play(run, "  6 ", "8")
    assert chat == list(PROBLEM.messages)
    assert first.messages == [user("wrong")] and not first.done
    assert (last.done, last.reward, last.parts) == (True, 0.25, {})


def test_async_agent_has_its_own_loop_and_returns_parts():
    loops = []

    async def run(problem, base_url, api_key):
        loops.append(asyncio.get_running_loop())
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as api:
            reply = await api.chat.completions.create(model="policy", messages=problem.messages)
        return {"reward": float(reply.choices[0].message.content == "7"), "parts": {"length": 1}}

    (_, last), _ = play(run, "7")
    assert (last.done, last.reward, last.parts) == (True, 1.0, {"length": 1.0})
    assert loops[0].is_running()  # that of all agents, which the rollout's end does not end


@pytest.mark.parametrize(
    ("posted", "returned", "reward", "parts"),
    [
        ((0.1, 0.5), None, 0.5, {"a": 2.0}),  # the last one
        ((0.1, 0.5), 0.75, 0.75, {}),
        ((), None, 0.0, {}),  # the reward function's matter
    ],
)
def test_a_posted_reward_counts_where_the_agent_returns_none(posted, returned, reward, parts):
    def run(problem, base_url, api_key):
        ask(base_url, list(problem.messages))
        for value in posted:
            body = {"reward": value, "parts": {"a": 2}}
            httpx.post(f"{base_url}/reward", json=body).raise_for_status()
        return returned

    (_, last), _ = play(run, "7")
    assert (last.done, last.reward, last.parts) == (True, reward, parts)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("text", ["sieben\n", CALL, f"Hm.\n{CALL}", ""])
def test_a_reply_is_recognized_when_its_api_gives_it_back(text, talk, stream):
    """Text that is a call without tools, too."""
    heard = []

    def run(problem, base_url, api_key):
        own = talk(base_url, *problem.messages)
        for tools in ((ADD,), ()):
            said, calls, reason, _ = own.ask(stream=stream, tools=tools)
            heard.append((said, [tuple(call) for call in calls], reason))
            for id, *_ in calls:
                own.result(id, "7")
            own.say("go on")
        return 1.0

    (_, first, last), env = play(run, text, text)
    content, calls = split_calls(text, [ADD])
    called = [("add", {"a": 3, "b": 4})] if calls else []
    for turn, (said, found, reason) in enumerate(heard, 1):
        assert (said, reason) == (content, "tool_calls" if calls else "stop")
        assert found == [(f"call_{turn}_0", *call) for call in called]
    assert env.tools == (ADD,) and last.reward == 1.0
    results = [{"role": "tool", "content": "7"} for _ in called]
    assert first.messages == [*results, user("go on")]


def test_a_call_is_recognized_as_text_and_written_anew():
    reply = Reply.to(ChatRequest(messages=CHAT, tools=[ADD]), f"Hm.\n{CALL}", 1)
    call = {"id": "mine", "function": {"name": "add", "arguments": '{"b":4,"a":3}'}}
    for fields in ({"content": f"Hm.\n{CALL}"}, {"content": "Hm.", "tool_calls": [call]}):
        assert reply.is_message(ChatMessage(role="assistant", **fields))
    other = call | {"function": {"name": "add", "arguments": '{"a":3,"b":5}'}}
    for fields in ({"content": "Hm."}, {"content": "Hm.", "tool_calls": [other]}):
        assert not reply.is_message(ChatMessage(role="assistant", **fields))


@needs_anthropic
def test_the_tool_runner_of_anthropics_client_plays():
    """It asks for a conversation on the server first."""
    import anthropic

    def run(problem, base_url, api_key):
        @anthropic.beta_tool
        def add(a: int, b: int) -> str:
            return str(a + b)

        messages = MessagesTalk(base_url).client.beta.messages
        ask = {"model": "policy", "max_tokens": 9, "system": "Add.", "tools": [add]}
        last = messages.tool_runner(messages=problem.messages, **ask).until_done()
        return float(last.content[0].text == problem.answer)

    (chat, first, last), _ = play(run, f"Hm.\n{CALL}", "7")
    assert chat == [{"role": "system", "content": "Add."}, *PROBLEM.messages]
    assert first.messages == [{"role": "tool", "content": "7"}] and last.reward == 1.0


# ---- one conversation


SPOKE = ChatMessage(role="assistant", content="a")
OTHER = ChatMessage(role="system", content="S")
MORE = ChatMessage(role="user", content="v")


def test_a_conversation_goes_on_with_what_is_new():
    asked = ChatRequest(messages=[*CHAT, SPOKE, MORE, ChatMessage(role="tool", content="t")])
    for tools in ([], [ADD]):  # which may be left out later
        before = ChatRequest(messages=CHAT, tools=tools)
        new = continuation(before, Reply(text=" a\n", content=" a\n"), asked)
        assert new == [user("v"), {"role": "tool", "content": "t"}]


@pytest.mark.parametrize(
    ("now", "complaint"),
    [
        ([OTHER, CHAT[1], SPOKE, MORE], "message 1 of a later request"),
        (CHAT, "2 messages, and 2 were said before"),
        ([MORE], "message 1 of a later request is user's 'v', and was system's 's'"),
        ([*CHAT, MORE], "message 3 .* and the model had said 'a'"),
        ([*CHAT, SPOKE.model_copy(update={"content": "b"}), MORE], "message 3 .* had said 'a'"),
        ([*CHAT, SPOKE], "is nothing"),
        ([*CHAT, SPOKE, MORE, SPOKE, MORE], "is user, assistant, user"),
        ([*CHAT, SPOKE, MORE], "other tools"),
    ],
)
def test_request_that_does_not_continue_breaks_the_episode(now, complaint):
    later = ChatRequest(messages=now, tools=[ADD] if complaint == "other tools" else [])
    with pytest.raises(ConversationBroken, match=complaint):
        continuation(ChatRequest(messages=CHAT), Reply(text="a", content="a"), later)


@pytest.mark.parametrize("talk", TALKS)
def test_second_conversation_costs_the_episode_with_a_reason(talk):
    told = []

    def run(problem, base_url, api_key):
        talk(base_url, *problem.messages).ask()
        other = talk(base_url, user("Something else"))
        try:
            other.ask()
        except other.errors as error:
            told.append((error.status_code, error.message))
            raise

    with raising(ConversationBroken, match="Something else"):
        play(run, "7")
    assert eventually(lambda: told)
    assert told[0][0] == 503 and "one conversation that only grows" in told[0][1]


def test_a_request_that_a_client_repeats_is_answered_again():
    answers = []

    def run(problem, base_url, api_key):
        body = {"messages": list(problem.messages)}
        for count in ("0", "1"):
            headers = {"x-stainless-retry-count": count}
            answer = httpx.post(
                f"{base_url}/chat/completions", json=body, headers=headers, timeout=WAIT_S
            )
            answers.append(answer.json()["choices"])

    play(run, "7")
    assert answers[0] == answers[1] and answers[0][0]["message"]["content"] == "7"


# ---- what is refused


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ({"n": 2}, "^n: "),
        ({"logprobs": True}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, r"messages\[0\]: role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "parts of type text",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools"),
    ],
)
def test_a_request_that_would_need_another_answer_is_refused(body, complaint):
    with pytest.raises(ApiError, match=complaint):
        read_body(ChatRequest, json.dumps({"messages": [user("Hi")], **body}).encode())


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        "1",
        {"score": 1},
        {"reward": None},
        {"reward": 1, "parts": {"a": "b"}},
        {"reward": 1, "x": 1},
        {"reward": 1, "parts": None},
        {"reward": 1, "parts": {"env": 2}},
    ],
)
def test_reward_that_is_not_finite_is_refused(value):
    with pytest.raises(ValueError, match="reward"):
        last_observation(value)


def test_the_server_knows_its_endpoints_and_its_episodes():
    codes = {}

    def run(problem, base_url, api_key):
        root = base_url.removesuffix("/v1")
        with httpx.Client() as http:
            codes["models"] = http.get(f"{base_url}/models").json()["data"][0]["id"]
            codes["completions"] = http.post(f"{base_url}/completions", json={}).status_code
            codes["no such episode"] = http.post(
                f"{root}x/v1/chat/completions", json={}
            ).status_code
            codes["outside"] = http.get(httpx.URL(base_url).copy_with(path="/")).status_code
            foreign = {"Host": "evil.example"}
            codes["foreign name"] = http.get(f"{base_url}/models", headers=foreign).status_code
            codes["bad reward"] = http.post(f"{base_url}/reward", json={"reward": "x"}).status_code
        with suppress(openai.BadRequestError):
            ask(base_url, list(problem.messages), n=2)
        ask(base_url, list(problem.messages))

    play(run, "7")
    assert codes == {
        "models": "policy",
        "completions": 404,
        "no such episode": 404,
        "outside": 404,
        "foreign name": 403,
        "bad reward": 400,
    }


# ---- how an episode ends


def exits(problem, base_url, api_key):
    raise SystemExit("enough")


async def exits_async(problem, base_url, api_key):
    raise SystemExit("enough")


@pytest.mark.parametrize("run", [exits, exits_async])
def test_an_agent_that_fails_costs_its_own_episode(run):
    with raising(AgentFailed, match="SystemExit: enough"):
        play(run)
    answer = lambda problem, url, key: len(ask(url, list(problem.messages)).content)  # noqa: E731
    assert play(answer, "7")[0][1].reward == 1.0  # and nobody else's


def test_an_agent_that_asks_for_nothing_is_an_error():
    with raising(AgentFailed, match="without asking"):
        play(lambda problem, base_url, api_key: 1.0)


def test_episode_out_of_time_ends_its_agent_and_leaves_nothing():
    told, ended = [], []

    async def slow(problem, base_url, api_key):
        try:
            async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as api:
                await api.chat.completions.create(model="policy", messages=problem.messages)
                await asyncio.sleep(1000)
        finally:
            ended.append(True)

    async def driver():
        env = AgentDrivenEnv(slow)
        await env.reset(PROBLEM)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await env.step("7")
        assert not ended
        await env.close()
        assert ended == [True]  # closing waits for an async agent
        await env.close()  # and may be repeated

    def blocked(problem, base_url, api_key):
        try:
            ask(base_url, list(problem.messages))
        except openai.APIStatusError as error:
            retry = error.response.headers["x-should-retry"]
            told.append((error.status_code, retry, error.message))
            raise

    asyncio.run_coroutine_threadsafe(driver(), environment_loop()).result()
    play(blocked)  # closed while it waits for the model
    assert eventually(lambda: told)
    assert told == [(503, "false", "Error code: 503 - " + told[0][2].partition(" - ")[2])]
    assert "is over" in told[0][2]
    assert not the_server().sessions
    assert eventually(lambda: not [t for t in threading.enumerate() if t.name == "environment"])


def test_run_that_names_no_function_is_a_user_error(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("run = 3\nran = lambda problem, base_url, api_key: 1.0\n")
    for spec, words in (
        (f"{mine}:runs", "no 'runs'"),
        (f"{mine}:run", "no function"),
        ("x", "loaded"),
    ):
        with pytest.raises(UserError, match=words):
            AgentEnv(run=spec)
    AgentEnv(run=f"{mine}:ran")


def test_the_example_answers_checks_itself_and_is_scored():
    env = AgentEnv(run=f"{EXAMPLE}:run")
    chat, check, last = env_steps.play(env, PROBLEM, "It is 8.", "It is 7.")
    assert chat == list(PROBLEM.messages) and [m["role"] for m in check.messages] == ["user"]
    assert (last.done, last.reward, last.parts) == (True, 1.0, {"right_at_once": 0.0})


# ---- in a rollout


PARAMS = SamplingParams(max_new_tokens=40, temperature=0.9, stop_token_ids=(91, *range(30)))


def chatty(problem, base_url, api_key, talk=ChatTalk, stream=False):
    """Three turns; what it says depends on what the model said; the reward is the length of
    that."""
    own, said = talk(base_url, *problem.messages), 0
    for _ in range(3):
        text, *_ = own.ask(stream=stream)
        said += len(text)
        own.say(str(len(text)))
    return {"reward": said / 10, "parts": {"said": said}}


@pytest.mark.parametrize(("talk", "stream"), [(ChatTalk, False), (ResponsesTalk, True)])
def test_training_step_with_an_agent_is_exactly_on_policy(talk, stream, tmp_path):
    run = partial(chatty, talk=talk, stream=stream)
    episodes = env_steps.step_with_agent(tmp_path, run, PARAMS)
    assert len(episodes) == 6 and max(e.num_turns for e in episodes) == 3
    for episode in episodes:
        said = [m["content"] for m in episode.messages if m["role"] == "assistant"]
        changes = np.flatnonzero(np.diff(episode.loss_mask.astype(int))) + 1
        sampled = np.split(episode.tokens, changes)[1::2]
        assert said == [
            str(turn[: len(text.strip("[]").split())])
            for turn, text in zip(sampled, said, strict=True)
        ]
        heard = [m["content"] for m in episode.messages[1::2]]
        assert heard == [str(len(text)) for text in said[: len(heard)]]
        if episode.stop_reason == "stop":
            total = sum(map(len, said))
            assert episode.env_rewards == {"env": total / 10, "said": total}
            assert episode.reward == episode.env_rewards["env"] > 0
    assert any(episode.stop_reason == "stop" for episode in episodes)


def test_order_of_concurrent_agents_changes_no_episode():
    def played(concurrency):
        engine = engine_of(exact_model("qwen3"), max_batch=8)
        limits = EnvConfig(concurrency=concurrency, timeout_s=WAIT_S)
        return run_episodes(
            new_groups(PROBLEMS[:4], 8, ("test",)),
            engine=engine,
            renderer=DigitRenderer(),
            envs=EnvPool(make=lambda: AgentDrivenEnv(chatty), limits=limits),
            sampling=PARAMS,
        )

    assert repr(played(32)) == repr(played(5))
    assert not the_server().sessions
