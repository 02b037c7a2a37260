"""Environments written for verifiers, unchanged: packages as its hub has them. Skipped
where it is absent."""

import asyncio
import threading

import pytest

from tandem.config.schema import Env as EnvConfig
from tandem.plugins.agents.chat import ChatRequest, Reply, chat_completion
from tandem.plugins.agents.env import AgentFailed, agents_loop
from tandem.plugins.agents.server import the_server
from tandem.plugins.agents.verifiers import VerifiersEnv, host_of, rows
from tandem.rollout.env_pool import EnvPool
from tandem.rollout.episode_builder import new_groups
from tandem.rollout.episodes import run_episodes
from tandem.runtime.errors import UserError
from tandem.types import Problem, SamplingParams
from tests.support.env_steps import play
from tests.support.json_server import JsonServer
from tests.support.scripted import DigitRenderer, ScriptedEngine, said
from tests.support.waiting import WAIT_S, eventually

# As `vf-init` lays a package out; the first is a plain taskset, the second brings tools, the third
# an Env of its own.
SUMS = """
import verifiers.v1 as vf

class SumsData(vf.TaskData):
    answer: str

class SumsTask(vf.Task[SumsData]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.nodes[-1].message.content == self.data.answer)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.nodes[-1].message.content))

class SumsConfig(vf.TasksetConfig):
    num_tasks: int = 3

class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    def load(self):
        for n in range(self.config.num_tasks):
            yield SumsTask(SumsData(prompt=f"{n}", system_prompt="8", answer=str(n + 1)), self.config.task)

__all__ = ["SumsTaskset"]
"""

TOOLS = """
import verifiers.v1 as vf
from tandem_tools.tool import AddToolset

class ToolsTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()

class ToolsTask(vf.Task[vf.TaskData, vf.State, ToolsTaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [AddToolset(config.tools)]

    @vf.reward
    async def used(self, trace: vf.Trace) -> float:
        return float(sum(node.message.role == "tool" for node in trace.nodes))

class ToolsConfig(vf.TasksetConfig):
    task: ToolsTaskConfig = ToolsTaskConfig()

class ToolsTaskset(vf.Taskset[ToolsTask, ToolsConfig]):
    def load(self):
        yield ToolsTask(vf.TaskData(prompt=[{"role": "user", "content": "add 3 and 4"}]), self.config.task)

__all__ = ["ToolsTaskset"]
"""

TOOL = '''
import verifiers.v1 as vf

class AddToolset(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "math"

    @vf.tool
    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

if __name__ == "__main__":
    AddToolset.run()
'''

TALK = '''
import verifiers.v1 as vf

class TalkTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)

class TalkTaskset(vf.Taskset[TalkTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        while True:
            yield TalkTask(vf.TaskData(prompt=None), self.config.task)

class TalkConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()

class TalkHarness(vf.Harness[vf.HarnessConfig]):
    """Runs its loop in process, which the interface allows."""
    NEEDS_CONTAINER = EXECUTES_CODE = False
    SUPPORTS_RESUME = APPENDS_SYSTEM_PROMPT = True

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        from openai import AsyncOpenAI
        from verifiers.v1.dialects.chat import message_to_wire
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as api:
            await api.chat.completions.create(model=ctx.model, messages=[message_to_wire(m) for m in data.prompt])
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

class TalkEnv(vf.Env[TalkConfig]):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as talk:
            for word in ("1", "2", "3"):
                await talk.turn(word)

    async def finalize(self, task, episode):
        episode.traces[0].record_metric("finalized", 1.0)

__all__ = ["TalkTaskset", "TalkEnv", "TalkHarness"]
'''


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory):
    """The packages, where Python finds them; the tools' server, a process of its own, finds them
    too."""
    pytest.importorskip("verifiers.v1")
    folder = tmp_path_factory.mktemp("site")
    for name, files in {
        "tandem_sums": {"__init__": SUMS},
        "tandem_talk": {"__init__": TALK},
        "tandem_chat": {"__init__": TALK.replace(', "TalkHarness"]', "]")},
        "tandem_tools": {"__init__": TOOLS, "tool": TOOL},
    }.items():
        (folder / name).mkdir()
        for module, text in files.items():
            (folder / name / f"{module}.py").write_text(text)
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(folder))
    patch.setenv("PYTHONPATH", str(folder))
    yield
    patch.undo()


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


def test_the_tasks_of_an_environment_are_rows():
    assert list(rows("tandem-sums", limit=2)) == [
        {
            "uid": f"tandem-sums/{n}",
            "answer": f"{n + 1}",
            "task": n,
            "task_hash": problem.metadata["task_hash"],
            "prompt": [{"role": "system", "content": "8"}, {"role": "user", "content": f"{n}"}],
        }
        for n, problem in enumerate(problems("tandem-sums")[:2])
    ]
    assert len(problems("tandem-sums", args={"num_tasks": 5})) == 5
    assert [row["prompt"][0]["content"] for row in rows("tandem-talk", limit=1)] == [
        "(task 0 of tandem-talk)"
    ]
    with pytest.raises(UserError, match="never end"):
        list(rows("tandem-talk"))


@pytest.mark.parametrize(("said", "right"), [("2", 1.0), ("17", 0.0)])
def test_a_plain_taskset_is_asked_and_scored_by_itself(said, right):
    chat, last = play(VerifiersEnv("tandem-sums"), problems("tandem-sums")[1], said)
    assert chat == [{"role": "system", "content": "8"}, {"role": "user", "content": "1"}]
    parts = {"right": 2 * right, "length": float(len(said))}
    assert (last.done, last.reward, last.parts) == (True, 2 * right, parts)


def test_tools_of_an_environment_are_called_in_its_own_server():
    [problem] = problems("tandem-tools")
    env = VerifiersEnv("tandem-tools")
    call = '<tool_call>\n{"name": "math_add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
    chat, heard, unknown, last = play(env, problem, call, call.replace("math_add", "sub"), "7")
    assert chat == [{"role": "user", "content": "add 3 and 4"}]
    assert [tool["function"]["name"] for tool in env.tools] == ["math_add"]
    assert heard.messages == [{"role": "tool", "content": "7"}]
    assert unknown.messages == [{"role": "tool", "content": "error: unknown tool 'sub'"}]
    assert (last.done, last.reward) == (True, 2.0)


@pytest.mark.parametrize("id", ["tandem-talk", "tandem-chat"])
def test_a_verifiers_program_leads_the_conversation(id):
    [problem] = problems(id, limit=1)
    chat, first, second, last = play(VerifiersEnv(id), problem, "a", "b", "c")
    assert [m["content"] for m in (*chat, *first.messages, *second.messages)] == ["1", "2", "3"]
    assert (last.done, last.reward, last.parts) == (True, 3.0, {"turns": 3.0, "finalized": 1.0})


class Successor(ScriptedEngine):
    """Says the last digit that it has read plus one; to the first task something wrong."""

    def generate(self, requests):
        lasts = [int(r.prompt[-1]) for r in requests]
        return [said([last + 1, 91], str(last + 1 if last else 5)) for last in lasts]


def test_a_rollout_plays_tasks_at_once_and_ends_what_they_share():
    world = EnvPool(make=lambda: VerifiersEnv("tandem-sums"), limits=EnvConfig(timeout_s=WAIT_S))
    for _ in range(2):  # what is shared starts again
        groups = run_episodes(
            new_groups(problems("tandem-sums"), 4, ("test",)),
            engine=Successor(),
            renderer=DigitRenderer(),
            envs=world,
            sampling=SamplingParams(max_new_tokens=5, stop_token_ids=(91,)),
        )
        rewards = [[e.env_rewards["env"] for e in group] for group in groups]
        assert rewards == [[0.0] * 4, [2.0] * 4, [2.0] * 4]
        for e in (e for group in groups for e in group):
            assert e.tokens.tolist()[:4] == [90, 8, 90, int(e.uid[-1])]
    assert not the_server().sessions
    assert eventually(lambda: all(task.done() for task in asyncio.all_tasks(agents_loop())))


def test_an_episode_that_is_cut_short_ends_its_environment():
    play(VerifiersEnv("tandem-sums"), problems("tandem-sums")[0])
    assert eventually(lambda: all(task.done() for task in asyncio.all_tasks(agents_loop())))
    assert eventually(lambda: not [t for t in threading.enumerate() if t.name == "agent"])


def test_a_task_changed_since_the_data_is_not_played():
    [first, *_] = problems("tandem-sums")
    for metadata, words in (
        ({"task": 0, "task_hash": "x"}, "another than when"),
        ({"task": 9, "task_hash": "x"}, "has 3 tasks"),
    ):
        other = Problem(uid="p", messages=first.messages, answer="", metadata=metadata)
        with pytest.raises(AgentFailed, match=words):
            play(VerifiersEnv("tandem-sums"), other)
    with pytest.raises(UserError, match="names no task"):
        play(VerifiersEnv("tandem-sums"), Problem(uid="p", messages=first.messages, answer=""))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"id": "no-such-package"}, "no such environment"),
        ({"id": "json"}, "no such environment"),
        ({"id": "tandem-sums", "args": {"num_tasks": "many"}}, "refuses the configuration"),
        ({"id": "tandem-sums", "args": {"nothing": 1}}, "refuses the configuration"),
    ],
)
def test_a_missing_environment_is_a_user_error_at_once(options, words):
    with pytest.raises(UserError, match=words):
        VerifiersEnv(**options)


def test_no_key_of_the_user_is_sent_along(monkeypatch):
    for name in ("PRIME_API_KEY", "OPENAI_API_KEY", "PRIME_TEAM_ID"):
        monkeypatch.setenv(name, "secret")

    def answer(path, body):
        return 200, chat_completion(Reply(text="1", content="1"), ChatRequest.model_validate(body))

    with JsonServer(answer) as server:
        play_at = host_of("tandem-sums").play(problems("tandem-sums")[0], f"{server.url}/v1", "")
        verdict = asyncio.run_coroutine_threadsafe(play_at, agents_loop()).result(WAIT_S)
    assert verdict["reward"] == 2.0
    assert server.asked and "secret" not in str([str(headers) for _, headers, _ in server.asked])
