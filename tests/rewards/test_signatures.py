"""Functions written for TRL and for verl, and Tandem's own, give their rewards as they are."""

import re
import sys

import pytest

from tandem.rewards.load import load
from tandem.rewards.parts import BadFunction, BadValue
from tandem.rewards.pool import RewardPool
from tandem.runtime.errors import UserError
from tandem.types import Attempt, Problem

CHAT = Problem(
    uid="p/1",
    messages=({"role": "user", "content": "1/3?"},),
    answer="1/3",
    category="openai/gsm8k",
    metadata={"solution": r"\frac{1}{3}", "level": 2, "extra_info": {"index": 7}},
)
TURNS = (
    {"role": "assistant", "content": "a"},
    {"role": "tool", "content": "b"},
    {"role": "assistant", "content": "c"},
)
TEXT = Problem(
    uid="p/2", messages=CHAT.messages, answer="1/3", metadata=CHAT.metadata, conversational=False
)

MINE = """
import asyncio

SEEN = {}

def plain(problem, completion):
    return float(problem.answer in completion)

def whole(problem, completion, attempt):
    return {"reward": attempt.env_rewards["env"], "turns": len(attempt.messages), "cut": attempt.stop_reason == "length"}

def later(problem, completion, *, attempt):
    return float(attempt.text == completion)

def scaled(problem, completion, factor=1.0, *, offset):
    return factor * len(completion) + offset

async def slow(problem, completion):
    await asyncio.sleep(0)
    return 0.75

def trl(completions, **columns):
    SEEN.clear()
    SEEN.update(columns, completions=completions)
    return [0.5]

async def trl_later(prompts, completions, answer, **kwargs):
    await asyncio.sleep(0)
    return [float(answer[0] in completions[0][0]["content"])]

def trl_columns(completions, level):
    return [level[0] * 1.0]

def trl_skips(completions, **kwargs):
    return [None]

def trl_logs(completions, log_metric, log_extra, **kwargs):
    log_extra("column", ["x"])
    log_metric("words", len(completions[0].split()))
    return [1.0]

def trl_two(completions, **kwargs):
    return [1.0, 1.0]

def trl_float(completions, **kwargs):
    return 1.0

def trl_ids(completion_ids, **kwargs):
    return [float(sum(completion_ids[0]))]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    SEEN.update(data_source=data_source, extra_info=extra_info)
    return float(ground_truth in solution_str)

def near(data_source, solution_str, ground_truth, extra_info):
    SEEN.update(extra_info=extra_info)
    return float(abs(float(solution_str) - ground_truth) < 0.01)

def gsm8k(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0):
    return score if ground_truth in solution_str else format_score

def reward_kwargs(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return {"score": 0.5, "acc": True, "pred": "1/3", "none": None, "reward": 9}

def deepeyes(predict_str: str, ground_truth: str, extra_info=None):
    return {"score": float(predict_str == ground_truth)}

def prime(model_output, ground_truth):
    return float(model_output == ground_truth)

def swapped(response, answer):
    return float(response == answer)

def one_more(solution_str, ground_truth, extra):
    return 0.0

def openrlhf(queries, prompts, labels):
    return 0.0

def ignores(_, completion):
    return float(len(completion))

def no_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"acc": 1.0}
"""


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    file = tmp_path_factory.mktemp("rewards") / "signed.py"
    file.write_text(MINE)
    return file


@pytest.fixture
def score(mine):
    """(reward, parts) of a function of MINE, loaded as a worker does."""

    def call(name, text, problem=CHAT, attempt=None, **options):
        scorer = load(f"{mine}:{name}", options, part=name)
        talk = ({"role": "assistant", "content": text},)
        return scorer(problem, attempt or Attempt(text=text, messages=talk))

    return call


def seen():
    return sys.modules["signed"].SEEN


def test_tandems_signature_may_take_the_attempt(score):
    attempt = Attempt(text="c", messages=TURNS, stop_reason="length", env_rewards={"env": 0.5})
    assert score("plain", "it is 1/3") == (1.0, {"plain": 1.0})
    assert score("whole", "c", attempt=attempt) == (0.5, {"turns": 3.0, "cut": 1.0})
    assert score("later", "c") == (1.0, {"later": 1.0})
    assert score("slow", "c") == (0.75, {"slow": 0.75})


def test_options_are_keyword_arguments_and_a_wrong_name_is_told(score):
    assert score("scaled", "abc", offset=1, factor=0.5) == (2.5, {"scaled": 2.5})
    takes = r"scaled takes \(problem, completion, factor, offset\), expected"
    for options in ({"offset": 1, "facto": 2}, {}):
        with pytest.raises(BadFunction, match=takes):
            score("scaled", "abc", **options)
    with pytest.raises(BadFunction, match=r"trl_columns takes \(completions, level\)"):
        score("trl_columns", "abc", tolerance=1)


def test_options_of_a_function_that_is_not_used_are_a_user_error():
    with pytest.raises(UserError) as error:
        RewardPool("answer", options={"numeric": {"tolerance": 0.1}})
    assert (error.value.where, error.value.expected) == ("reward.options.numeric", "answer")


@pytest.mark.parametrize(
    ("name", "options", "found"),
    [
        ("numeric", {"tolerence": 0.1}, "options tolerence"),
        ("numeric", {"tolerance": "0.1"}, "option 'tolerance' of numeric is '0.1', expected float"),
        ("exact", {"strip": 1}, "option 'strip' of exact is 1, expected bool"),
        ("format", {"tags": "think"}, "option 'tags' of format is 'think', expected list"),
        ("length", {"target": 10, "limit": True}, "option 'limit' of length is True, expected int"),
        ("length", {"target": 10, "limit": 5}, "expected 0 <= target < limit"),
        ("regex", {"pattern": "("}, "is no pattern: missing )"),
        ("judge", {"model": "m"}, "expected (problem, completion)"),
        ("judge", {"model": "m", "base_url": "localhost"}, "expected http://"),
    ],
)
def test_wrong_options_of_a_built_in_are_refused(name, options, found):
    with pytest.raises(BadFunction, match=re.escape(found)):
        load(name, options)


@pytest.mark.parametrize(
    "name", ["anser", "no/such/file.py:score", "no_such_module:score", "json:nothing", ""]
)
def test_a_function_that_does_not_exist_is_refused(name):
    with pytest.raises((BadFunction, UserError, ModuleNotFoundError)):
        load(name, {})


# ---------------------------------------------------------------- TRL


def test_trl_functions_get_messages_or_text_as_the_prompt_was(score):
    assert score("trl", "so 1/3") == (0.5, {"trl": 0.5})
    assert seen()["completions"] == [[{"role": "assistant", "content": "so 1/3"}]]
    assert seen()["prompts"] == [[{"role": "user", "content": "1/3?"}]]
    assert (seen()["answer"], seen()["level"]) == (["1/3"], [2])
    assert seen()["solution"] == [r"\frac{1}{3}"]
    score("trl", "so 1/3", problem=TEXT)
    assert (seen()["completions"], seen()["prompts"]) == (["so 1/3"], ["1/3?"])


def test_trl_functions_get_the_whole_chat_behind_the_prompt(score):
    score("trl", "c", attempt=Attempt(text="c", messages=TURNS))
    assert seen()["completions"] == [list(TURNS)]


@pytest.mark.parametrize(("metadata", "answer"), [({}, "7"), ({"raw_answer": 3, "a": 1}, 3)])
def test_trl_functions_get_the_rows_own_answer_once_and_as_solution(score, metadata, answer):
    problem = Problem(uid="p", messages=CHAT.messages, answer=str(answer), metadata=metadata)
    score("trl", "x", problem=problem)
    assert (seen()["answer"], seen()["solution"]) == ([answer], [answer])
    assert seen().get("a") == ([1] if metadata else None) and "raw_answer" not in seen()


def test_trl_functions_may_be_async_or_name_their_columns(score):
    assert score("trl_later", "so 1/3")[0] == 1.0
    assert score("trl_columns", "x")[0] == 2.0
    with pytest.raises(BadValue, match="'level'; the columns are answer, solution, prompts"):
        score("trl_columns", "x", problem=Problem(uid="p", messages=CHAT.messages, answer="7"))


def test_a_trl_function_that_does_not_apply_adds_nothing(score, mine):
    assert score("trl_skips", "x") is None
    with RewardPool([f"{mine}:trl_skips", "answer"], timeout_s=30.0) as pool:
        both = pool.submit(CHAT, Attempt(text="Answer: 1/3")).result()
    with RewardPool(f"{mine}:trl_skips", timeout_s=30.0) as pool:
        alone = pool.submit(CHAT, Attempt(text="Answer: 1/3")).result()
    assert (both.reward, both.parts, both.error) == (1.0, {"answer": 1.0}, "")
    assert (alone.reward, alone.parts, alone.error) == (0.0, {}, "")


def test_what_a_trl_function_logs_as_metric_is_a_part(score):
    assert score("trl_logs", "two words", problem=TEXT) == (1.0, {"words": 2.0, "trl_logs": 1.0})


@pytest.mark.parametrize(("name", "found"), [("trl_two", "2 values"), ("trl_float", "a float")])
def test_a_trl_function_with_a_wrong_number_of_rewards_fails(score, name, found):
    with pytest.raises(BadValue, match=f"one reward for one completion, found {found}"):
        score(name, "x")


def test_a_trl_function_gets_the_token_ids_of_the_completion(score, mine):
    attempt = Attempt(text="x", tokens=(5, 9, 2))
    assert score("trl_ids", "x", attempt=attempt) == (16.0, {"trl_ids": 16.0})
    with RewardPool(f"{mine}:trl_ids", timeout_s=30.0) as pool:
        assert pool.submit(CHAT, attempt).result().reward == 16.0


def test_trls_own_reward_functions_give_what_they_give_in_trl():
    pytest.importorskip("trl.rewards")
    names = "accuracy_reward", "think_format_reward", "reasoning_accuracy_reward"
    functions = [f"trl.rewards:{name}" for name in names]
    texts = {
        r"<think>x</think> \boxed{\frac{1}{3}}": (1.0, 1.0, 1.0),
        r"\boxed{\frac{1}{2}}": (0.0, 0.0, 0.0),
        r"no box": (0.0, 0.0, 0.0),
    }
    with RewardPool(functions, timeout_s=60.0) as pool:
        futures = {text: pool.submit(CHAT, Attempt(text=text)) for text in texts}
        scores = {text: future.result() for text, future in futures.items()}
    assert {text: score.error for text, score in scores.items()} == dict.fromkeys(texts, "")
    assert {text: tuple(score.parts.values()) for text, score in scores.items()} == texts


# ---------------------------------------------------------------- names


def test_verls_other_names_for_the_completion_and_an_underscore_are_known(score):
    for name in ("deepeyes", "prime"):
        assert (score(name, "1/3")[0], score(name, "1/2")[0]) == (1.0, 0.0)
    assert score("ignores", "abc")[0] == 3.0


@pytest.mark.parametrize("name", ["swapped", "openrlhf", "one_more"])
def test_unknown_parameter_names_are_refused(score, name):
    with pytest.raises(BadFunction, match=rf"{name} takes \(.*\), expected \("):
        score(name, "1/3")


# ---------------------------------------------------------------- verl


def test_verls_signature_gets_its_four_arguments(score):
    assert score("compute_score", "so 1/3") == (1.0, {"compute_score": 1.0})
    assert (seen()["data_source"], seen()["extra_info"]) == ("openai/gsm8k", {"index": 7})
    plain = Problem(uid="p", messages=CHAT.messages, answer="1/3", metadata={"level": 2})
    score("compute_score", "so 1/3", problem=plain)
    # rows that are not verl's have no column of that name
    assert seen()["extra_info"] == {"level": 2}


def test_verls_functions_get_the_rows_own_answer_once(score):
    metadata = {"raw_answer": 0.5, "level": 2}
    problem = Problem(uid="p", messages=CHAT.messages, answer="0.5", metadata=metadata)
    assert score("near", "0.501", problem=problem) == (1.0, {"near": 1.0})
    assert seen()["extra_info"] == {"level": 2}


def test_verls_score_functions_may_take_less_and_have_options(score):
    assert score("gsm8k", "so 1/3")[0] == 1.0
    assert score("gsm8k", "so 1/2", format_score=0.1)[0] == 0.1


def test_verls_dict_gives_score_as_reward_and_numbers_as_parts(score):
    assert score("reward_kwargs", "x") == (0.5, {"acc": 1.0})
    with pytest.raises(BadValue, match="expected a dict with `score`, found acc"):
        score("no_score", "x")
