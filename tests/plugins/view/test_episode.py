"""One episode: the advantage is shown where the rewards of its group alone decide it, and tool
calls are apart from the text around them."""

import json

import numpy as np
import pytest

from tandem.plugins.view.episode import read_episode, read_step
from tandem.plugins.view.episodes import EpisodeTable
from tandem.plugins.view.runs import Run
from tests.support.viewing import add_step, group, make_run

PENALIZED = {"penalties": np.float32([0, 0, 0, 0, 0.5])}


@pytest.mark.parametrize(
    ("rl", "command", "fields", "shown"),
    [
        ({"advantage": "grpo_no_std"}, "train", {}, 0.5),
        ({"advantage": "rloo"}, "train", {}, 1.0),
        ({"advantage": "rloo", "kl_in": "reward", "kl_coef": 0.0}, "train", {}, 1.0),
        ({"advantage": "rloo", "kl_in": "loss", "kl_coef": 0.1}, "train", {}, 1.0),
        (
            {"advantage": "rloo", "kl_in": "reward", "kl_coef": 0.1, "kl_estimator": "k1"},
            "train",
            {},
            None,
        ),
        ({"algorithm": "reinforce_pp_baseline"}, "train", {}, None),  # whitened over the step
        ({"advantage": "gdpo"}, "train", {}, None),
        ({"advantage": "ema"}, "train", {}, None),
        ({"advantage": "my.py:mine"}, "train", {}, None),
        ({"advantage": "rloo"}, "distill", {}, None),
        ({"advantage": "rloo"}, "train", PENALIZED, None),
        ({"advantage": "rloo"}, "train", {"outcome": "unfinished"}, None),
    ],
)
def test_an_advantage_is_shown_where_rewards_alone_decide_it(tmp_path, rl, command, fields, shown):
    reward = {"function": ["boxed", "format"]} if rl.get("advantage") == "gdpo" else {}
    folder = make_run(tmp_path / "run", command=command, rl=rl, reward=reward)
    add_step(folder, 1, [group("a", ["x", "y"], [1.0, 0.0], **fields)])
    found = read_episode(Run(folder, "run"), "train", 1, 0)
    sampled = found["tokens"]["sampled"]
    painted = [shown if one else None for one in sampled]
    assert found["advantage"] == shown
    assert found["tokens"].get("advantage") == (None if shown is None else painted)
    step = read_step(Run(folder, "run"), EpisodeTable(folder / "episodes"), 1)
    assert [one["advantage"] for one in step["groups"][0]["attempts"]] == (
        [None, None] if shown is None else [shown, -shown]
    )


ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ANSWERS = ({"role": "tool", "name": "add", "content": "3"}, {"role": "tool", "content": "error"})


def shown_turns(folder, text, *, tools=(ADD,), format="auto", env="tools", message=None):
    """The messages of an attempt that calls tools, as the page has them."""
    options = {"tools": ["calculator"], "format": format} if env == "tools" else {}
    run = make_run(
        folder / "run", env={"name": env, "options": options}, reward={"function": "env"}
    )
    turn = message or {"role": "assistant", "content": text}
    last = {"role": "assistant", "content": "It is 3."}
    add_step(run, 1, [group("a", [text], [1.0], messages=(turn, *ANSWERS, last), tools=tools)])
    return read_episode(Run(run, "run"), "train", 1, 0)["conversation"]


@pytest.mark.parametrize(
    ("format", "call"),
    [
        ("auto", '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call>'),
        ("llama3", '{"name": "add", "parameters": {"a": 1, "b": "x"}}'),
        ("pythonic", "[add(a=1, b='x')]"),
    ],
)
def test_a_call_in_a_text_has_name_arguments_and_result(tmp_path, format, call):
    before = "" if format == "pythonic" else "Let me see.\n" * (format == "auto")
    tools = (ADD,) * (format == "auto")  # a named format needs no names
    asked, turn, *results, last = shown_turns(tmp_path, before + call, tools=tools, format=format)
    assert turn["calls"] == [{"name": "add", "arguments": {"a": 1, "b": "x"}}]
    assert turn["text"].strip() == before.strip() and turn["sampled"]
    assert [message["result_of"] for message in results] == ["add", ""]
    assert last["calls"] == [] and last["text"] == last["content"] and "calls" not in asked


def test_a_structured_call_is_taken_as_it_is_and_names_its_result(tmp_path):
    functions = [{"name": "add", "arguments": {"a": 1}}, {"name": "sub", "arguments": {}}]
    calls = [{"type": "function", "function": one} for one in functions]
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    _, shown, first, second, _ = shown_turns(tmp_path, "x", env="agent", message=turn)
    assert (shown["calls"], shown["text"]) == (functions, "")
    assert (first["result_of"], second["result_of"]) == ("add", "sub")


def test_a_call_that_cannot_be_read_stays_in_the_text_with_its_reason(tmp_path):
    text = "So:\n<tool_call>\n{oops\n</tool_call>"
    turn = shown_turns(tmp_path, text)[1]
    assert turn["text"] == text and turn["calls"][0]["bad"]


def test_without_an_environment_that_reads_calls_a_text_stays_as_it_is(tmp_path):
    text = json.dumps({"name": "add", "parameters": {}}) + "<tool_call>{}</tool_call>"
    run = make_run(tmp_path / "run")
    add_step(run, 1, [group("a", [text], [1.0])])
    [_, turn] = read_episode(Run(run, "run"), "train", 1, 0)["conversation"]
    assert turn["calls"] == [] and turn["text"] == text
