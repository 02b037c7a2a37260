"""A coding agent of the index as it is, mini-swe-agent: it runs what a tiny random model says in
bash, and what it said is trained."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tandem.model.tool_calls import Call, write_calls
from tandem.plugins.agents.env import AgentEnv
from tandem.types import Problem, SamplingParams
from tests.support.env_steps import play, step_with_agent

pytestmark = pytest.mark.skipif(
    not (find_spec("minisweagent") and find_spec("tenacity")),
    reason="make adapters installs mini-swe-agent",
)

EXAMPLE = Path(__file__).parents[3] / "examples/environments/coding_agent.py"
PROBLEM = Problem(uid="p", messages=({"role": "user", "content": "How much is 3+4?"},), answer="7")


def bash(command):
    return write_calls([Call(name="bash", arguments={"command": command})])


def as_command(tokens):
    """Whatever is sampled is a call that appends to a file."""
    return bash(f"echo {len(tokens)} >> answer.txt; cat answer.txt | wc -l")


@pytest.fixture(autouse=True)
def quiet(tmp_path, monkeypatch):
    monkeypatch.setenv("MSWEA_GLOBAL_CONFIG_DIR", str(tmp_path / "mswea"))
    monkeypatch.setenv("MSWEA_SILENT_STARTUP", "1")
    monkeypatch.setenv("MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT", "1")


@pytest.mark.parametrize(
    ("texts", "reward"),
    [
        ((bash("echo 7 > answer.txt"), bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")), 1.0),
        ((bash("echo 8 > answer.txt"), "I am done."), 0.0),
    ],
)
def test_the_example_is_scored_by_what_its_commands_leave(texts, reward):
    chat, result, last = play(AgentEnv(run=f"{EXAMPLE}:run"), PROBLEM, *texts)
    assert chat[-1] == PROBLEM.messages[0] and (last.done, last.reward) == (True, reward)
    assert "<returncode>0</returncode>" in result.messages[0]["content"]


@pytest.mark.parametrize("api", ["chat/completions", "responses"])
def test_what_a_coding_agent_has_run_is_trained(api, tmp_path):
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.openrouter_model import OpenRouterModel
    from minisweagent.models.openrouter_response_model import OpenRouterResponseModel

    left = []

    def run(problem, base_url, api_key):
        kind = OpenRouterModel if api == "chat/completions" else OpenRouterResponseModel
        model = kind(
            model_name="policy",
            cost_tracking="ignore_errors",
            observation_template="{{output.output.strip()}}",
        )
        model._api_url = f"{base_url}/{api}"
        folder = tmp_path / base_url.split("/")[-2]
        folder.mkdir()
        texts = {"system_template": "1", "instance_template": "{{task}}"}
        agent = DefaultAgent(model, LocalEnvironment(cwd=str(folder)), **texts, step_limit=3)
        assert agent.run(problem.messages[-1]["content"])["exit_status"] == "LimitsExceeded"
        left.append([int(line) for line in (folder / "answer.txt").read_text().split()])
        return sum(left[-1]) / 27

    sampling = SamplingParams(max_new_tokens=40, temperature=0.9, stop_token_ids=tuple(range(60)))
    ended = []
    for episode in step_with_agent(tmp_path, run, sampling, as_command):
        changes = np.flatnonzero(np.diff(episode.loss_mask.astype(int))) + 1
        sampled = np.split(episode.tokens, changes)[1::2]
        turns = [m["content"] for m in episode.messages if m["role"] == "assistant"]
        if episode.stop_reason == "stop":
            assert turns == [as_command(turn[:-1]) for turn in sampled]
            assert len(turns) == 3 and [m["content"] for m in episode.messages[1::2]] == ["1", "2"]
            ended.append([len(turn) - 1 for turn in sampled])
            assert episode.reward == sum(ended[-1]) / 27
    assert sorted(ended) == sorted(left) and ended
