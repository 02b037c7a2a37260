r"""The built-in reward functions, each by itself; `answer` has a file of its own, `judge` needs a
server."""

from contextlib import ExitStack

import pytest

from tandem.plugins.graders import rewards
from tandem.plugins.graders.judge import judge
from tandem.plugins.tasks.countdown import value_of
from tandem.rewards import builtin
from tandem.rewards.builtin import NOTHING, last_json
from tandem.rewards.load import load
from tandem.rewards.parts import BadFunction, BadValue, read_value
from tandem.rewards.pool import RewardPool
from tandem.types import Attempt, Problem
from tests.support.json_server import JsonServer
from tests.support.scoring import scores_of
from tests.support.waiting import WAIT_S


def problem(answer="", **metadata):
    messages = ({"role": "user", "content": "What?"},)
    return Problem(uid="p", messages=messages, answer=answer, metadata=metadata)


def test_exact_compares_the_whole_completion():
    assert builtin.exact(problem("Yes"), " Yes\n") == 1.0
    assert builtin.exact(problem("Yes"), "Yes.") == 0.0
    assert builtin.exact(problem("Yes"), "yes") == 0.0
    assert builtin.exact(problem("Yes"), "yes", casefold=True) == 1.0
    assert builtin.exact(problem("Yes"), " Yes", strip=False) == 0.0


NUMERIC = [
    ("3.14", "Answer: 3.141", {"tolerance": 0.01}, 1.0),
    ("3.14", "Answer: 3.151", {"tolerance": 0.01}, 0.0),
    # the tolerance is 0.3, not the float just below it
    ("0.3", "Answer: 0.6", {"tolerance": 0.3}, 1.0),
    ("200", "it is 202", {"relative": 0.01}, 1.0),
    ("-200", "it is -202.1", {"relative": 0.01}, 0.0),
    ("0.5", "50%", {}, 1.0),
    ("1/3", "1/3", {}, 1.0),
    ("1/3", "0.3333", {"tolerance": 1e-4}, 1.0),
    ("5", "first 4, then 5 apples.", {}, 1.0),
    ("5", "Answer: about 5 apples", {}, 1.0),
    ("5", "Answer: 4. Or 5?", {}, 0.0),
    ("5", "no number", {}, 0.0),
    ("5", "x5", {}, 0.0),
    ("1000", "so 1,000", {}, 1.0),
    ("5", "Answer: nan", {"tolerance": 1e9}, 0.0),
]


@pytest.mark.parametrize(("truth", "text", "options", "reward"), NUMERIC)
def test_numeric_allows_a_tolerance(truth, text, options, reward):
    assert rewards.numeric(problem(truth), text, **options) == reward


@pytest.mark.parametrize(
    ("name", "truth", "metadata", "found"),
    [
        ("numeric", "five", {}, "'five' of problem 'p' is not a number"),
        ("countdown", "24", {}, "numbers None and target '24'"),
        ("countdown", "24", {"numbers": ["x"]}, r"numbers \['x'\] and target '24'"),
    ],
)
def test_a_row_that_cannot_be_scored_is_named(name, truth, metadata, found):
    with pytest.raises(BadValue, match=found):
        builtin.find(name)(problem(truth, **metadata), "Answer: 5")


THOUGHTS = [
    ("<think>\nso {}\n</think>\n\nIt is probably another.", 0.0),
    ("<think>{}\nlet me check again with", 0.0),
    ("so {}\n</think>\n\nIt is probably another.", 0.0),
    ("<think>It is another.</think>{}", 1.0),
    ("It is another.</think>{}", 1.0),
    ("{}", 1.0),
    ("analysisso {}", 0.0),
    ("analysisIt is another.assistantfinal{}", 1.0),
    ("<|channel|>analysis<|message|>No.assistant<|channel|>final<|message|>{}", 1.0),
    ("<|channel>thought\nNo.<channel|>{}", 1.0),
]
SAID = [
    ("answer", "5", "Answer: 5"),
    ("numeric", "5", "Answer: 5"),
    ("choice", "B", "Answer: B"),
    ("exact", "B", "B"),
    ("countdown", "24", "Answer: (1+5)*4"),
    ("json_schema", "", '{"a": 1}'),
]


@pytest.mark.parametrize(("name", "truth", "said"), SAID)
def test_an_answer_counts_behind_the_thoughts_only(name, truth, said):
    function = builtin.find(name)
    row = problem(truth, numbers=[4, 1, 5], schema={"type": "object"})
    assert {text: function(row, text.replace("{}", said)) for text, _ in THOUGHTS} == dict(THOUGHTS)
    assert function(row, said, opened=True) == function(row, f"{said} <think", opened=True) == 0.0
    assert function(row, f"It is another.</think>{said}", opened=True) == 1.0
    with pytest.raises(BadFunction, match=rf"option .opened. of {name} is 1, expected bool"):
        load(name, {"opened": 1})
    assert name == "exact" or function(row, f"The tag <think> opens it. {said}") == 1.0


CHOICE = [
    ("B", "Answer: B", 1.0),
    ("B", "Answer: (B) 12 apples", 1.0),
    ("(b)", r"so \boxed{\text{B}}", 1.0),
    ("B) 12", "The (A) is wrong, so (B)", 1.0),
    ("B", "thinking\n**B**", 1.0),
    ("A", "A cat. Answer: B", 0.0),
    ("A", "A cat is here", 0.0),
    ("B", "Answer: Berlin", 0.0),
    ("B", "(A) or (B) or (C)", 0.0),
]


@pytest.mark.parametrize(("truth", "text", "reward"), CHOICE)
def test_choice_takes_the_letter_that_was_chosen(truth, text, reward):
    assert rewards.choice(problem(truth), text) == reward


def test_regex_pattern_comes_from_option_row_or_answer():
    assert builtin.regex(problem("^a+$"), "aaa") == 1.0
    assert builtin.regex(problem("x", pattern="b"), "abc") == 1.0
    assert builtin.regex(problem("x", pattern="b"), "abc", pattern="z") == 0.0
    assert builtin.regex(problem("b"), "abc", full=True) == 0.0


FORMAT = [
    ("<think>a</think> b", {}, 1.0),
    ("  <think>\na\n</think>\n\nb\n", {}, 1.0),
    ("<think>a</think>", {}, 0.0),
    ("<think>a</think>", {"rest": False}, 1.0),
    ("<think>a</think> b", {"rest": False}, 0.0),
    ("<think> </think> b", {}, 0.0),
    ("x <think>a</think> b", {}, 0.0),
    ("<think>a</think> <think>a</think> b", {}, 0.0),
    ("</think>a<think> b", {}, 0.0),
    ("a</think> b", {}, 0.0),
    ("a</think> b", {"opened": True}, 1.0),
    ("<think>a</think> b", {"opened": True}, 0.0),
    ("<think>a</think><answer>b</answer>", {"tags": ["think", "answer"], "rest": False}, 1.0),
    ("<answer>b</answer><think>a</think>", {"tags": ["think", "answer"], "rest": False}, 0.0),
    ("<think>a</think> so <answer>b</answer>", {"tags": ["think", "answer"], "rest": False}, 0.0),
    ("<think>a<answer>b</answer></think>", {"tags": ["think", "answer"], "rest": False}, 0.0),
]


@pytest.mark.parametrize(("text", "options", "reward"), FORMAT)
def test_format_wants_each_tag_once_and_in_order(text, options, reward):
    assert builtin.format_of_tags(problem(), text, **options) == reward


def test_length_falls_evenly_from_target_to_limit():
    for size, reward in {5: 1.0, 10: 1.0, 12: 0.8, 15: 0.5, 20: 0.0, 99: 0.0}.items():
        assert builtin.length(problem(), "x" * size, target=10, limit=20) == reward
    assert builtin.length(problem(), "x " * 15, target=10, limit=20, unit="words") == 0.5


def test_env_and_reward_model_are_what_is_known_already():
    attempt = Attempt(text="x", env_rewards={"env": 0.5, "turns": 3.0, "reward_model": -2.0})
    with RewardPool(["env", "reward_model"], timeout_s=30.0, weights=[1.0, 0.1]) as pool:
        score, bare = (pool.submit(problem(), a).result() for a in (attempt, Attempt(text="x")))
    assert score.reward == 0.5 + 0.1 * -2.0
    assert score.parts == {"env": 0.5, "reward_model": -2.0, "turns": 3.0}
    assert bare.error == "env: this environment gives no reward: set env.name"


countdown = builtin.find("countdown")
COUNTDOWN = [
    ("<answer>(1 + 5) * 4</answer>", 1.0),
    ("Answer: (1+5)×4 = 24", 1.0),
    (r"\boxed{(1 + 5) \times 4}", 1.0),
    ("<answer>1+5</answer> no <answer>4*(5+1)</answer>", 1.0),
    ("Answer: 4*5+4", 0.0),  # 4 twice
    ("Answer: 24", 0.0),
    ("Answer: 1*4*6", 0.0),
    ("Answer: (1+5)*4*1", 0.0),
    ("Answer: (1+5)*4 = 25", 1.0),  # what is right of = is a remark
    ("Answer: 5*5-1**4", 0.0),
    ("Answer: -(1-5)*4", 0.0),
    ("Answer: __import__('os')", 0.0),
    ("(1 + 5) * 4", 0.0),
    ("Answer: 4/(1-5/5)", 0.0),
    ("Answer: " + "(" * 90 + "1" + ")" * 90, 0.0),
    ("Answer:", 0.0),
]


@pytest.mark.parametrize(("text", "reward"), COUNTDOWN)
def test_countdown_wants_the_target_from_each_number_once(text, reward):
    assert countdown(problem("24", numbers=[4, 1, 5]), text) == reward
    assert countdown(problem("", nums=[4, 1, 5], target=24), text) == reward


def test_countdown_may_leave_numbers_out_where_that_is_allowed():
    task, some = problem("24", numbers=[6, 4, 9]), "Answer: 6*4"
    assert [countdown(task, some, use_all=whole) for whole in (True, False)] == [0.0, 1.0]
    assert countdown(problem("24", numbers=[6, 4]), "Answer: 4*(3+3)", use_all=False) == 0.0


def test_nothing_of_an_expression_is_evaluated_by_python():
    texts = "9**9**9**9; 1 if 1 else 1; [1]*10**9; 1e9; 1.0; 0x10; 1_0; 1//2; a; 1,2; True; "
    assert [value_of(text) for text in texts.split("; ")] == [None] * 12
    assert value_of("1/3 + 1/3 + 1/3") == (1, [1, 3, 1, 3, 1, 3])


def test_code_is_scored_in_a_worker_like_the_others():
    task = problem(tests=[{"input": "2\n", "output": "4\n"}, {"input": "3\n", "output": "6\n"}])
    options = {"sandbox": {"run_untrusted_code_without_isolation": True}}
    options |= {"timeout_s": WAIT_S, "test_timeout_s": WAIT_S}
    with RewardPool("code", timeout_s=3 * WAIT_S, options={"code": options}) as pool:
        texts = ("```python\nprint(2 * int(input()))\n```", "print(4)", "no program")
        scores = scores_of(pool, task, texts)
    assert [(score.reward, score.error) for score in scores] == [(1.0, ""), (0.5, ""), (0.0, "")]


# ---------------------------------------------------------------- JSON

LAST = [
    ('{"a": 1}', {"a": 1}),
    ('first {"a": 1} then {"a": {"b": [2]}}.', {"a": {"b": [2]}}),
    ('```json\n{"a": 1}\n```\nas you {see}', {"a": 1}),
    ("[1, 2", NOTHING),
    ("7", 7),
    ("{not json} [1]", [1]),
    ("NaN", NOTHING),
    ('{"a": NaN}', NOTHING),
    ("[" * 5000, NOTHING),
    ("", NOTHING),
]


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize(("text", "value"), LAST)
def test_the_last_json_value_of_a_text_is_found(text, value):
    assert last_json(text) == value


AGE = {"age": {"type": "integer", "minimum": 0}}
SCHEMA = {"type": "object", "properties": AGE, "required": ["age"]}


def test_json_schema_validates_the_last_json_value():
    pytest.importorskip("jsonschema")
    score = builtin.find("json_schema")
    assert score(problem(schema=SCHEMA), 'so {"age": 3}') == 1.0
    assert score(problem(schema=SCHEMA), 'so {"age": -3}') == 0.0
    assert score(problem(schema=SCHEMA), "so") == 0.0
    assert score(problem(), '{"age": 3}', schema=SCHEMA) == 1.0
    with pytest.raises(BadValue, match="has no `schema`"):
        score(problem(), "{}")
    with pytest.raises(BadFunction, match="the option is no schema"):
        load("json_schema", {"schema": {"type": "objekt"}})


# ---------------------------------------------------------------- the judge


class Judge(JsonServer):
    """An OpenAI-compatible server that says what it is told: texts, or HTTP statuses."""

    def __init__(self, *replies):
        super().__init__(self.reply)
        self.replies, self.url = list(replies), f"{self.url}/v1"

    def reply(self, path, body):
        said = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        status, text = (said, "busy") if isinstance(said, int) else (200, said)
        return status, {"choices": [{"message": {"role": "assistant", "content": text}}]}


@pytest.fixture
def server():
    with ExitStack() as made:
        yield lambda *replies: made.enter_context(Judge(*replies))


def ask(server, text="so 3", **options):
    return judge(problem("3"), text, base_url=server.url, model="m", pause_s=0.01, **options)


REPLIES = [
    ("Fine. Score: 0.5", {}, 0.5),
    ("Score: 1\nno, **Score:** 0", {}, 0.0),
    ("Score: 7", {"scale": 10.0}, 0.7),
    ("Verdict: yes", {}, 1.0),
    ('{"score": 0.25}', {}, 0.25),
    ("verdict = Incorrect", {}, 0.0),
]


@pytest.mark.parametrize(("reply", "options", "score"), REPLIES)
def test_the_last_score_of_the_judge_is_the_reward(server, reply, options, score):
    assert ask(server(reply), **options) == score


def test_the_judge_gets_question_reference_answer_and_key(server, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    one = server("Score: 1")
    how = {"template": "{question}|{answer}|{completion}|{scale}", "scale": 10.0}
    ask(one, text="{answer} {scale}", api_key_env="MY_KEY", **how)
    ask(one, api_key_env="NOT_SET")
    [asked] = one.requests[0]["messages"]
    assert asked == {"role": "user", "content": "What?|3|{answer} {scale}|10"}
    assert (one.requests[0]["model"], one.requests[0]["temperature"]) == ("m", 0.0)
    assert [(path, headers["Authorization"]) for path, headers, _ in one.asked] == [
        ("/v1/chat/completions", "Bearer secret"),
        ("/v1/chat/completions", None),
    ]


def test_a_busy_judge_and_one_without_a_score_are_asked_again(server):
    one = server(503, 429, "no idea", "Score: 1")
    assert ask(one) == 1.0
    assert len(one.requests) == 4


def test_a_judge_that_never_answers_is_a_failure_that_says_why(server):
    one = server(503)
    with pytest.raises(BadValue, match="gave no score in 3 requests: HTTP 503"):
        ask(one, retries=2)
    assert len(one.requests) == 3
    with pytest.raises(BadValue, match="a score of 2 is not from 0 to 1"):
        ask(server("Score: 2"), retries=0)


def test_a_judge_that_refuses_is_not_asked_again(server):
    one = server(401)
    with pytest.raises(BadValue, match="the judge refused: HTTP 401"):
        ask(one)
    assert len(one.requests) == 1


def test_parts_are_added_up_in_their_order_by_every_python():
    """sum() of Python 3.12 and later makes 1.0 of these."""
    parts = {"a": 1e16, "b": 1.0, "c": -1e16}
    assert read_value(parts, "") == (0.0, parts)
