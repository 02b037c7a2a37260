"""The guessing game, programs in the sandbox, and the environments that the documentation shows."""

import asyncio
import shutil
from pathlib import Path

import pytest

from tandem.config.schema import Env as EnvConfig
from tandem.config.schema import Sandbox
from tandem.envs.load import load_env
from tandem.envs.tools import ToolUnavailable
from tandem.model.tool_calls import Call, write_calls
from tandem.plugins.graders.python_env import PythonEnv, fenced_code
from tandem.plugins.tasks.guess import GuessTheNumber
from tandem.runtime.user_code import load_user_object
from tandem.types import Problem
from tests.support.env_steps import play
from tests.support.waiting import WAIT_S, given_time

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "environments"
needs_bubblewrap = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="bubblewrap is not installed"
)


def problem(answer, **metadata):
    question = {"role": "user", "content": "?"}
    return Problem(uid="game/1", messages=(question,), answer=str(answer), metadata=metadata)


def said(observations):
    return [message["content"] for observation in observations for message in observation.messages]


# ---------------------------------------------------------------- guess


def test_a_guess_is_answered_until_the_number_is_found():
    chat, *turns = play(
        GuessTheNumber(), problem(6, low=1, high=15), "8", "I take 4!", "Between 4 and 8: 6"
    )
    assert chat == problem(6).messages
    assert said(turns) == ["lower", "higher"]
    assert [turn.done for turn in turns] == [False, False, True]
    assert (turns[-1].reward, turns[-1].parts) == (1.0, {"turns": 3.0, "bad_guesses": 0.0})
    assert [turn.reward for turn in turns[:-1]] == [0.0, 0.0]


@pytest.mark.parametrize("low, high", [(1, 1), (1, 2), (1, 15), (1, 16), (-7, 24)])
def test_halving_finds_the_number_within_the_default_limit(low, high):
    def halve(number):
        env, a, b = GuessTheNumber(), low, high
        play(env, problem(number, low=low, high=high))
        while True:
            guess = (a + b) // 2
            observation = asyncio.run(env.step(str(guess)))
            if observation.done:
                return observation.reward
            a, b = (guess + 1, b) if said([observation]) == ["higher"] else (a, guess - 1)

    assert [halve(number) for number in range(low, high + 1)] == [1.0] * (high - low + 1)


@pytest.mark.parametrize("text", ["", "nine", "9.5", "9" * 30])
def test_a_turn_without_a_whole_number_is_told_so_and_counts(text):
    env = GuessTheNumber(limit=2, invalid_guess_penalty=0.5)
    _, turn, last = play(env, problem(9, low=1, high=100), text, text)
    assert said([turn]) == ["a number?"]
    assert (turn.penalty, last.penalty, last.done, last.reward) == (0.5, 0.5, True, 0.0)
    assert last.parts == {"turns": 2.0, "bad_guesses": 2.0}


def test_a_problem_without_a_range_fails():
    for metadata in ({}, {"low": 1}, {"low": 1, "high": "9"}):
        with pytest.raises(ValueError, match="`low` and `high`"):
            play(GuessTheNumber(), problem(9, **metadata))


# ---------------------------------------------------------------- python


def block(code):
    return f"I compute.\n```python\n{code}\n```\nLet us see."


def test_fenced_blocks_of_python_are_one_program():
    assert fenced_code(block("x = 1") + "\n```py\nprint(x)\n```") == "x = 1\n\nprint(x)\n"
    for none in ("print(1)", "```\nprint(1)\n```", "```json\n{}\n```", "```python\nprint(1)"):
        assert fenced_code(none) == ""


@needs_bubblewrap
def test_code_is_run_and_its_output_read_in_either_form():
    env = PythonEnv(seconds=WAIT_S)
    called = write_calls([Call(name="python", arguments={"code": "print(6 * 7)\n"})])
    _, *turns = play(env, problem(42), block("print(6 * 7)"), called, block("1 / 0"), "Answer: 42")
    assert [dict(turn.messages[0]) for turn in turns[:2]] == [
        {"role": "user", "content": "```output\n42\n```"},
        {"role": "tool", "name": "python", "content": "42"},
    ]
    assert "ZeroDivisionError: division by zero" in turns[2].messages[0]["content"]
    assert [turn.done for turn in turns] == [False, False, False, True]
    assert turns[-1].parts == {"tool_calls": 1.0, "bad_calls": 0.0, "runs": 3.0, "failed_runs": 1.0}


@needs_bubblewrap
def test_a_turn_with_a_call_does_not_run_its_fenced_block():
    called = write_calls([Call(name="python", arguments={"code": "print(1)"})])
    _, turn = play(PythonEnv(seconds=WAIT_S), problem(1), block("print(2)") + called)
    assert said([turn]) == ["1"]


@needs_bubblewrap
def test_a_hanging_program_is_stopped_and_the_model_told():
    program = block("print('a', flush=True)\nwhile True: pass")
    turns = given_time(
        lambda seconds: play(PythonEnv(seconds=seconds), problem(1), program)[1],
        lambda t: "a" in said([t])[0],
        0.3,
    )
    assert said(turns)[-1] == "```output\na\n(stopped: timeout)\n```"
    assert {turn.parts["failed_runs"] for turn in turns} == {1.0}


def test_a_sandbox_that_does_not_answer_costs_the_episode():
    env = PythonEnv(sandbox=Sandbox(url="http://127.0.0.1:9"))
    called = write_calls([Call(name="python", arguments={"code": "1"})])
    for text in (block("1"), called):
        with pytest.raises(ToolUnavailable, match="no answer from the sandbox"):
            play(env, problem(1), text)


# ---------------------------------------------------------------- what the documentation shows


def own_env(name):
    return load_env(EnvConfig(name=str(EXAMPLES / name)), Sandbox())()


def test_the_reward_of_the_documentation():
    score = load_user_object(str(EXAMPLES / "reward.py:score"), key="reward.function")
    assert score(problem(42), "It is 42") == 1 - 0.008
    assert score(problem(42), "") == 0.0


def test_the_environment_of_the_documentation():
    chat, *turns = play(own_env("hangman.py:Hangman"), problem("tree"), "t", "e", "x", "R")
    assert [message["content"] for message in chat] == ["?", "____"]
    assert said(turns) == ["t___", "t_ee", "t_ee"]
    assert (turns[-1].done, turns[-1].reward) == (True, 1.0)
    chat, *turns = play(own_env("hangman.py:Hangman"), problem("tree"), *"abcdfgh")
    assert [(turn.done, turn.reward) for turn in turns] == [(False, 0.0)] * 6 + [(True, 0.0)]


def test_the_tool_task_of_the_documentation():
    task = problem("", prices={"tea": 3.5, "bun": 1.25}, wanted=["tea", "bun", "bun"])

    def turn(name, **arguments):
        return write_calls([Call(name=name, arguments=arguments)])

    shopping = [
        turn("price", item="tea") + turn("price", item="buns"),
        turn("calculator", expression="3.5 + 2 * 1.25"),
    ]
    chat, *turns = play(own_env("shop.py:Shop"), task, *shopping, turn("pay", amount=6.0))
    assert chat[-1]["content"] == "Buy tea, bun, bun"
    assert said(turns) == ["3.5", "error: KeyError: 'buns'", "6", "null"]
    assert (turns[-1].done, turns[-1].reward) == (True, 1.0)
    for text in (turn("pay", amount=5), "No, thanks."):
        _, end = play(own_env("shop.py:Shop"), task, text)
        assert (end.done, end.reward) == (True, 0.0)
