"""`tandem try` and `tandem rollout --keep`: what a user does with a reward, an environment and a
data set before training."""

import json

import pytest

from tandem.config.schema import Data
from tandem.data.problems import read_problems
from tests.support.home import invoke, mistake, output_of

ROWS = [{"prompt": f"{n} + 1?", "answer": str(n + 1), "uid": f"q{n}", "level": n} for n in range(4)]
ENVIRONMENT = '''
import random
from tandem.types import Env, Observation

class Echo(Env):
    """Says back what it hears; the third turn ends it, worth its length."""
    def __init__(self, turns: int = 3):
        self.turns, self.heard = turns, []

    def step(self, text):
        self.heard.append(text)
        if len(self.heard) == self.turns:
            letters = len("".join(self.heard))
            return Observation(done=True, reward=float(len(text)), parts={"letters": letters})
        messages = [{"role": "user", "content": f"you said {text}"}]
        return Observation(messages=messages, penalty=0.5 * (text == "bad"))

class Random(Env):
    def reset(self, problem):
        return [*problem.messages, {"role": "user", "content": str(random.random())}]

class Broken(Env):
    def step(self, text):
        raise ValueError("no such luck")
'''


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "my_env.py").write_text(ENVIRONMENT)
    (tmp_path / "my_reward.py").write_text(
        "def score(problem, completion):\n"
        "    return {'right': float(problem.answer in completion), 'short': 0.5}\n"
    )
    return path


def tried(*arguments):
    return output_of("try", *arguments)


def test_a_reward_function_is_tried_on_typed_answers(home, data, tmp_path):
    how = ["--data", data, "--rows", 2, "--answer", "it is 1", "--answer", "7"]
    output = tried(f"{tmp_path}/my_reward.py:score", *how)
    assert "reward 1.5 (right 1, short 0.5)" in output
    assert "reward 0.5 (right 0, short 0.5)" in output
    assert output.count("\n1 turn, ended by stop") == 2 and output.count("user: 1 + 1?") == 1
    with_model = tried(f"{tmp_path}/my_reward.py:score", *how, "--model", home / "model")
    assert "reward 1.5 (right 1, short 0.5)" in with_model


def test_an_environment_is_played_by_hand_turn_by_turn(data, tmp_path):
    how = [f"{tmp_path}/my_env.py:Echo", "--data", data, "--rows", 1, "--answer", "a"]
    output = tried(*how, "--answer", "bad", "--answer", "word")
    assert "reward 4 (env 4, letters 8)" in output and "user: you said bad" in output
    assert "penalty: 0.5 on 4 tokens" in output and "3 turns, ended by stop" in output
    assert "\n1 turn, " in tried(*how, "env.options.turns=1")


def test_a_model_plays_an_environment(home, data, tmp_path):
    how = ["--model", home / "model", "--rows", 2, "rollout.max_new_tokens=4", "env.max_turns=2"]
    output = tried(f"{tmp_path}/my_env.py:Echo", "--data", data, *how)
    assert output.count(", ended by") == 2 and output.count("assistant: ") >= 2


def test_mistakes_are_told_before_anything_is_played(data, tmp_path):
    env, reward = f"{tmp_path}/my_env.py", f"{tmp_path}/my_reward.py"
    how = ["--data", data, "--answer", "a"]
    assert "there are no more answers" in mistake("try", f"{env}:Echo", *how)
    assert "no training problems are named" in mistake("try", f"{reward}:score", *how[2:])
    assert "no_such" in mistake("try", f"{reward}:no_such", *how)
    unknown = mistake("try", f"{env}:Echo", "env.options.steps=1", *how)
    assert "unexpected keyword argument 'steps'" in unknown


def test_keep_writes_a_data_file_that_reads_back(home, tmp_path):
    out, reward = tmp_path / "episodes.jsonl", tmp_path / "by_row.py"
    reward.write_text("def score(problem, completion):\n    return int(problem.answer) % 3 / 2\n")
    command = ["rollout", home / "recipe.toml", f"reward.function={reward}:score", "--out", out]
    assert "no problem has a mean reward" in mistake(*command, "--keep", "0.6:0.9")
    # the episodes are there: nothing is generated again
    result = invoke(*command, "--keep", "0.5:0.5")
    assert result.exit_code == 0 and "complete, nothing to do" in result.output, result.output
    problems = read_problems(str(home / "data/train.jsonl"), Data(), key="data.train")
    kept = read_problems(str(tmp_path / "episodes.kept.jsonl"), Data(), key="data.train")
    wanted = [p for p in problems if int(p.answer) % 3 == 1]
    assert [(p.uid, p.messages, p.answer, p.category) for p in kept] == [
        (p.uid, p.messages, p.answer, p.category) for p in wanted
    ]
    assert {p.metadata["mean_reward"] for p in kept} == {0.5} and 0 < len(kept) < len(problems)
    assert f"kept {len(kept)} of {len(problems)} problems" in " ".join(result.output.split())


@pytest.mark.parametrize("text", ["0.2", "a:b", "0.8:0.2", ":", "nan:1"])
def test_a_range_that_is_none_is_refused(text, home):
    assert "range of mean rewards cannot be read" in mistake(
        "rollout", home / "recipe.toml", "--keep", text
    )
