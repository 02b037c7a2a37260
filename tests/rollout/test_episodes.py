"""Episodes: what is appended to what, what ends them, what a bad environment costs, and that P1
holds across turns."""

import asyncio
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tandem.engine.engine import Engine
from tandem.envs.calls import environment_loop
from tandem.envs.observations import malformed_thinking
from tandem.runtime.errors import UserError
from tandem.types import Env, Observation, Request, SamplingParams
from tests.support.playing import PROBLEMS, Counting, TurnEngine, play, user
from tests.support.scripted import said
from tests.support.tiny import exact_model
from tests.support.waiting import WAIT_S, eventually

ROOT = Path(__file__).parent.parent.parent


class PatientEngine(TurnEngine):
    """Ends the first request that it gets, and no other."""

    def step(self):
        tickets, self._tickets = self._tickets[:1], []
        if not self.requests:
            self._tickets = tickets
            return super().step()
        return []


def test_turn_appends_and_answers_of_the_world_carry_no_loss():
    engine = TurnEngine()
    [[episode]] = play(Counting, engine)
    assert [r.prompt.tolist() for r in engine.requests] == [
        [90, 0],
        [90, 0, 7, 91, 90, 1],
        [90, 0, 7, 91, 90, 1, 7, 91, 90, 2],
    ]
    assert episode.tokens.tolist() == [90, 0, 7, 91, 90, 1, 7, 91, 90, 2, 7, 91]
    assert episode.loss_mask.astype(int).tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1]
    assert episode.weight_versions.tolist() == [-1, -1, 4, 4, -1, -1, 4, 4, -1, -1, 4, 4]
    assert episode.engine_logprobs.tolist() == np.where(episode.loss_mask, -0.25, 0.0).tolist()
    # of the second turn
    assert episode.penalties.tolist() == [0, 0, 0, 0, 0, 0, 0.5, 0.5, 0, 0, 0, 0]
    said = [m["content"] for m in episode.messages]
    assert said == ["2", "1", "6", "2", "10"] and episode.text == "10" and episode.num_turns == 3
    assert episode.env_rewards == {"env": 1.5, "turns": 3.0}
    assert (episode.stop_reason, episode.num_prompt_tokens) == ("stop", 2)


def test_turns_draw_from_one_key_without_repeating_a_position():
    engine = TurnEngine()
    play(Counting, engine, problems=PROBLEMS[:2], group_size=2)
    by_key = {}
    for request in engine.requests:
        by_key.setdefault(request.key, []).append(request.num_sampled)
    assert list(by_key.values()) == [[0, 2, 4]] * 4


@pytest.mark.parametrize("concurrency", [1, 3, 512])
def test_single_turns_pause_and_end_whatever_the_concurrency(concurrency):
    """In an engine that answers some at a time."""

    class Some(TurnEngine):
        def step(self):
            held, self._tickets = self._tickets[2:], self._tickets[:2]
            ended = super().step()
            self._tickets = held
            most.append(len(held) + len(ended))
            return ended

        def generate(self, requests):
            for request, answer in zip(requests, super().generate(requests), strict=True):
                assert request.max_tokens_now == 3
                reason = "paused" if request.prompt[1] == 2 else "stop"
                yield replace(answer, stop_reason=reason)

    def ended(row, episode):
        seen.append((row, episode.sample_index))

    most, seen = [], []
    how = {"token_budget": 3, "concurrency": concurrency, "on_end": ended}
    groups = play(Env, Some(), problems=PROBLEMS, group_size=2, **how)
    ends = [[episode.stop_reason for episode in group] for group in groups]
    assert ends == [["stop"] * 2] * 2 + [["paused"] * 2, ["stop"] * 2]
    assert sorted(seen) == [(row, sample) for row in (0, 1, 3) for sample in (0, 1)]
    assert max(most) == min(concurrency, 8)


def test_stop_token_not_sampled_is_read_before_the_next_turn():
    class StringStop(TurnEngine):
        def generate(self, requests):
            return [said([7], "7") for _ in requests]

    [[episode]] = play(lambda: Counting(2), StringStop())
    assert episode.tokens.tolist() == [90, 0, 7, 91, 90, 1, 7]
    assert episode.loss_mask.astype(int).tolist() == [0, 0, 1, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("limits", "engine", "stop_reason", "turns"),
    [
        ({"max_turns": 2}, TurnEngine(), "turns", 2),
        # 2 + 2 + 2 + 2, and no room for an answer and a third turn
        ({"max_tokens": 9}, TurnEngine(), "tokens", 2),
        ({}, TurnEngine(stop_reason="length"), "length", 1),
        # truncated by the episode's limit
        ({"max_tokens": 4}, TurnEngine(stop_reason="length"), "tokens", 1),
        ({}, TurnEngine(), "stop", 3),
    ],
)
def test_episode_ends_with_its_reason(limits, engine, stop_reason, turns):
    [[episode]] = play(Counting, engine, **limits)
    assert (episode.stop_reason, episode.num_turns, episode.masked) == (stop_reason, turns, False)
    longest = max(r.params.max_new_tokens + len(r.prompt) for r in engine.requests)
    assert max(longest, len(episode.tokens)) <= limits.get("max_tokens", 512)


def test_a_prompt_longer_than_an_episode_names_the_key():
    [[episode]] = play(Counting, TurnEngine(), max_tokens=2)
    assert episode.env_error.endswith("at most 2 (env.max_tokens, or the engine's)")


STEPS = {  # what a step answers or raises
    "raise": ValueError("it broke"),
    "own timeout": TimeoutError("the tool's own"),
    "silent": Observation(),
    "an error that cannot be written": ValueError("\ud800"),
    "parts without names": Observation(done=True, parts={1: 1.0}),
    "refused by the template": Observation(messages=user("not a digit")),
}


def fails(failure):
    """An environment that fails in the episode of problem p1 only."""

    made = iter(range(99))

    class Failing(Counting):
        def __init__(self):
            super().__init__()
            if failure == "constructor" and next(made) == 1:  # made in the order of the problems
                raise OSError("too many open files")

        async def reset(self, problem):
            self.bad = problem.uid == "p1"
            if self.bad and failure == "reset":
                raise KeyError("lost")
            return problem.messages if not (self.bad and failure == "chat") else "no chat"

        async def step(self, text):
            if not self.bad:
                return await super().step(text)
            if failure == "cancelled":
                await asyncio.wait_for(self.never(), None)
            answer = STEPS.get(failure, "text")
            if isinstance(answer, Exception):
                raise answer
            return answer

        async def never(self):
            raise asyncio.CancelledError

    return Failing


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        ("reset", "KeyError: 'lost'"),
        ("chat", "reset returned 'str no chat'"),
        ("raise", "ValueError: it broke"),
        ("constructor", "OSError: too many open files"),
        ("an error that cannot be written", "ValueError: ?"),
        ("parts without names", "parts that are no names"),
        ("cancelled", "CancelledError"),
        ("refused by the template", "no digits"),
        ("own timeout", "TimeoutError: the tool's own"),
        ("silent", "messages none"),
        ("text", "expected an Observation"),
    ],
)
def test_failing_environment_costs_its_own_episode_only(failure, error):
    found = play(fails(failure), TurnEngine(), problems=PROBLEMS[:3])
    untouched = play(Counting, TurnEngine(), problems=PROBLEMS[:3])
    assert repr([found[0], found[2]]) == repr([untouched[0], untouched[2]])
    [bad] = found[1]
    assert bad.stop_reason == "error" and error in bad.env_error
    assert bad.masked and not bad.trainable
    [[zeroed]] = play(fails(failure), TurnEngine(), problems=PROBLEMS[:3], on_error="zero")[1:2]
    sampled = failure not in ("reset", "chat", "constructor")
    assert not zeroed.masked and zeroed.trainable == sampled


# what no environment takes on the busiest machine; for those that should, the clock is set forward
LIMIT_S = 30.0


@pytest.fixture
def skip():
    """Sets the clock of the environments' loop forward."""
    loop, ahead = environment_loop(), 0.0

    def skip(seconds):
        nonlocal ahead
        ahead += seconds
        loop.call_soon_threadsafe(lambda: None)  # it looks at its clock

    loop.time = lambda: time.monotonic() + ahead
    yield skip
    del loop.time


def play_three(make, over):
    """Play an episode of each of three problems; `over` gets the rows of those that have ended."""
    limits = {"timeout_s": LIMIT_S, "on_end": lambda row, episode: over.append(row)}
    return play(make, TurnEngine(), problems=PROBLEMS[:3], **limits)


def test_environment_that_takes_too_long_is_left_behind(skip):
    """It takes its time when the others have ended."""
    over = []

    class Slow(Counting):
        async def reset(self, problem):
            self.slow = problem.uid == "p1"
            return problem.messages

        async def step(self, text):
            if self.slow:
                while len(over) < 2:
                    await asyncio.sleep(0.001)
                skip(LIMIT_S)
                await asyncio.sleep(3600)
            return await super().step(text)

    [first], [second], [third] = play_three(Slow, over)
    assert [e.stop_reason for e in (first, second, third)] == ["stop", "time", "stop"]
    assert "30.0 s" in second.env_error


def test_thread_that_never_returns_holds_up_nobody(skip):
    forever, over = threading.Event(), []

    class Stuck(Counting):
        def step(self, text):
            if self.uid == "p1":
                assert eventually(lambda: len(over) == 2)
                skip(LIMIT_S)
                forever.wait()
            return Observation(done=True)

        async def reset(self, problem):
            self.uid = problem.uid
            return problem.messages

    assert [e.stop_reason for [e] in play_three(Stuck, over)] == ["stop", "time", "stop"]
    forever.set()


def test_async_method_that_blocks_ends_the_rollout_and_is_named():
    """In a process of its own, as the loop is lost."""
    code = """
import time
from tests.support.playing import Counting, TurnEngine, play

class Blocks(Counting):
    async def step(self, text):
        time.sleep(100)

play(Blocks, TurnEngine(), timeout_s=1.0)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S
    )
    assert "blocks the event loop" in result.stderr and "<string>:7, step" in result.stderr


def test_opening_chat_and_tools_of_the_environment_are_kept():
    class Opening(Counting):
        tools = ({"type": "function", "function": {"name": "f"}},)

        async def reset(self, problem):
            return [*problem.messages, *user("8")]

    [[episode]] = play(lambda: Opening(1), TurnEngine())
    assert episode.tokens[:4].tolist() == [90, 0, 90, 8] and episode.tools == Opening.tools
    assert [m["content"] for m in episode.chat(PROBLEMS[0])] == ["0", "8", "4"]
    [[plain]] = play(Env, TurnEngine())
    assert (plain.opening, plain.tools, plain.env_rewards) == ((), (), {})
    assert len(plain.chat(PROBLEMS[0])) == 2


def test_environment_is_closed_however_its_episode_ended():
    closed = []

    def made(failure):
        class Closing(fails(failure)):
            def close(self):
                closed.append(failure)
                raise RuntimeError("closing fails too, and changes nothing")

        return Closing

    for failure in ("raise", "reset", "fine"):
        play(made(failure), TurnEngine(), problems=PROBLEMS[:2])
    assert closed == ["raise"] * 2 + ["reset"] * 2 + ["fine"] * 2


def test_episodes_of_a_problem_that_begin_differently_raise():
    number = iter(range(9))

    class Random(Env):
        async def reset(self, problem):
            return user(str(next(number)))

    with pytest.raises(UserError, match="begin differently"):
        play(Random, TurnEngine(), group_size=2)


def test_error_of_the_engine_ends_the_rollout_and_cancels():
    class Broken(TurnEngine):
        def generate(self, requests):
            raise UserError("the cache burst")

    with pytest.raises(UserError, match="the cache burst"):
        play(Counting, Broken())

    engine = PatientEngine()

    def late(row, episode):
        raise UserError("the scorer is gone")

    with pytest.raises(UserError, match="the scorer is gone"):
        play(Env, engine, problems=PROBLEMS[:2], on_end=late)
    assert [ticket.request.prompt.tolist() for ticket in engine.cancelled] == [[90, 1]]


def test_thinking_tags_are_one_pair_in_order():
    sound = ("plain", "<think>a</think>b", "a</think>b")
    odd = ("<think>a", "</think><think>", "<think><think></think>", "<think></think></think>")
    assert not any(map(malformed_thinking, sound)) and all(map(malformed_thinking, odd))
    assert malformed_thinking("<think>a</think><think>b</think>")


# ---- with the real engine


class Chatty(Env):
    """Answers by what it heard, after a while that differs from episode to episode, for four
    turns."""

    def __init__(self):
        self.turns = 0

    async def step(self, text):
        self.turns += 1
        digits = "".join(c for c in text if c.isdigit())
        await asyncio.sleep(int(digits[:1] or 0) / 2000)
        return Observation(messages=user(digits[-3:] + str(self.turns)), done=self.turns == 4)


def real_engine(model, **sizes):
    sizes = {"cache_bytes": 1 << 24, "max_batch": 8, **sizes}
    return Engine(model, lambda tokens: str(tokens.tolist()), **sizes)


def real_episodes(model, engine, **limits):
    sampling = SamplingParams(max_new_tokens=12, temperature=0.9, stop_token_ids=(91, *range(30)))
    return play(Chatty, engine, problems=PROBLEMS, group_size=3, sampling=sampling, **limits)


def test_draws_of_a_turn_go_on_where_the_turn_before_ended():
    """A completion in one request, and as two turns without anything between them."""
    engine, prompt = real_engine(exact_model("qwen3")), np.array([90, 0])

    def sampled(prompt, count, num_sampled):
        params = SamplingParams(max_new_tokens=count)
        ticket = engine.submit(
            Request(key=7, prompt=prompt, params=params, num_sampled=num_sampled)
        )
        while ticket.completion is None:
            engine.step()
        return ticket.completion.tokens

    whole = sampled(prompt, 8, num_sampled=0)
    for done in (1, 5):
        rest = sampled(np.concatenate([prompt, whole[:done]]), 8 - done, num_sampled=done)
        assert rest.tolist() == whole[done:].tolist()


def test_episodes_do_not_depend_on_batch_or_concurrency():
    model = exact_model("qwen3")
    whole = real_episodes(model, real_engine(model))
    for sizes, limits in (
        ({"max_batch": 2, "chunk_tokens": 1}, {}),
        ({}, {"concurrency": 3}),
        ({}, {"concurrency": 1}),
    ):
        assert repr(real_episodes(model, real_engine(model, **sizes), **limits)) == repr(whole)
