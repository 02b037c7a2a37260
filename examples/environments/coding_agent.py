"""A coding agent: mini-swe-agent runs the model's commands in a folder of its own, and the reward
is whether the answer lies there at the end."""

import tempfile
from pathlib import Path

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.openrouter_model import OpenRouterModel

PROMPTS = {
    "system_template": "Solve the task with bash. Write the answer to answer.txt, and then "
    "`echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT`.",
    "instance_template": "{{task}}",
}


# env.name = "agent", env.options.run = "examples/environments/coding_agent.py:run"
def run(problem, base_url, api_key):
    model = OpenRouterModel(model_name="policy", cost_tracking="ignore_errors")
    model._api_url = f"{base_url}/chat/completions"
    # it forgets a turn without a call, so one of these ends the episode
    limits = {"step_limit": 10, "max_consecutive_format_errors": 1}
    with tempfile.TemporaryDirectory() as folder:
        # commands are not confined here; minisweagent.environments.extra.bubblewrap does that
        agent = DefaultAgent(model, LocalEnvironment(cwd=folder), **PROMPTS, **limits)
        agent.run(problem.messages[-1]["content"])
        answer = Path(folder, "answer.txt")
        return float(answer.exists() and answer.read_text().strip() == problem.answer)
