"""Environments written for verifiers up to 0.2, unchanged: modules with `load_environment`. Skipped
where it is absent."""

import asyncio

import pytest

from tandem.envs.agent.run import AgentFailed, agents_loop
from tandem.envs.agent.server import the_server
from tandem.plugins.verifiers.env import VerifiersEnv, rows
from tandem.runtime.errors import UserError
from tandem.types import Problem
from tests.support.waiting import WAIT_S, eventually

SINGLE = """
import verifiers as vf
from datasets import Dataset

def load_environment(num=3, weight=2.0):
    def right(completion, answer):
        return float(completion[-1]["content"] == answer)

    def length(completion):
        return float(len(completion[-1]["content"]))

    rows = [{"question": str(n), "answer": str(n + 1)} for n in range(num)]
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(rows), system_prompt="8", rubric=vf.Rubric(funcs=[right, length], weights=[weight, 0.0])
    )
"""

TOOLS = '''
import verifiers as vf
from datasets import Dataset

def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)

def load_environment():
    def used(completion):
        return float(sum(m["role"] == "tool" for m in completion))

    return vf.ToolEnv(dataset=Dataset.from_list([{"question": "3 and 4", "answer": "7"}]), tools=[add], rubric=vf.Rubric([used]))
'''


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory):
    pytest.importorskip("verifiers.envs")
    folder = tmp_path_factory.mktemp("site")
    (folder / "tandem_single.py").write_text(SINGLE)
    (folder / "tandem_tooled.py").write_text(TOOLS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield


def problems(id, **how):
    return [
        Problem(
            uid=r["uid"],
            messages=tuple(r["prompt"]),
            answer=r["answer"],
            metadata={k: r[k] for k in ("task", "task_hash")},
        )
        for r in rows(id, **how)
    ]


def play(env, problem, *texts):
    async def driver():
        try:
            async with asyncio.timeout(WAIT_S):
                return [await env.reset(problem), *[await env.step(text) for text in texts]]
        finally:
            await env.close()

    return asyncio.run(driver())


def test_the_rows_of_an_environment_are_those_of_its_dataset():
    two, last = rows("tandem-single", limit=2), problems("tandem-single", args={"num": 5})[-1]
    assert [(row["uid"], row["answer"], row["prompt"][-1]["content"]) for row in two] == [
        ("tandem-single/0", "1", "0"),
        ("tandem-single/1", "2", "1"),
    ]
    assert last.uid == "tandem-single/4"


@pytest.mark.parametrize(("said", "right"), [("2", 1.0), ("17", 0.0)])
def test_a_single_turn_is_scored_by_its_own_rubric(said, right):
    chat, last = play(
        VerifiersEnv("tandem-single", args={"weight": 3.0}),
        problems("tandem-single", args={"weight": 3.0})[1],
        said,
    )
    assert chat == [{"role": "system", "content": "8"}, {"role": "user", "content": "1"}]
    assert (last.done, last.reward) == (True, 3 * right)
    assert (last.parts["right"], last.parts["length"]) == (right, float(len(said)))


def test_tools_of_an_environment_are_shown_and_called():
    [problem] = problems("tandem-tooled")
    env = VerifiersEnv("tandem-tooled")
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
    chat, heard, last = play(env, problem, call, "7")
    assert chat == [{"role": "user", "content": "3 and 4"}]
    assert [tool["function"]["name"] for tool in env.tools] == ["add"]
    assert heard.messages == [{"role": "tool", "content": "7"}] and (last.done, last.reward) == (
        True,
        1.0,
    )


def test_an_episode_that_is_cut_short_ends_its_environment():
    env, before = VerifiersEnv("tandem-single"), the_server().sessions

    async def driver():
        await env.reset(problems("tandem-single")[0])
        await env.close()

    asyncio.run(driver())
    assert the_server().sessions == before
    assert eventually(lambda: all(task.done() for task in asyncio.all_tasks(agents_loop())))


def test_a_changed_task_and_mistakes_are_user_errors():
    [first, *_] = problems("tandem-single")
    for metadata, words in (
        ({"task": 0, "task_hash": "x"}, "another than when"),
        ({"task": 9, "task_hash": "x"}, "has 3 tasks"),
    ):
        with pytest.raises(AgentFailed, match=words):
            play(
                VerifiersEnv("tandem-single"),
                Problem(uid="p", messages=first.messages, answer="", metadata=metadata),
            )
    for options in (
        {"id": "no-such-package"},
        {"id": "json"},
        {"id": "tandem-single", "args": {"nothing": 1}},
    ):
        with pytest.raises(UserError, match="cannot load"):
            VerifiersEnv(**options)
    with pytest.raises(UserError, match="only args"):
        VerifiersEnv("tandem-single", env={"agent": {}})
