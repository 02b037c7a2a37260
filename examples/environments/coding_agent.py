"""A coding agent: mini-swe-agent runs the model's commands in a folder of its own, and the reward
is what it has left there."""

import tempfile
from pathlib import Path

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.openrouter_model import OpenRouterModel

SYSTEM = "You solve tasks with bash. Write the answer to answer.txt."


# env.name = "agent", env.options.run = "examples/environments/coding_agent.py:run"
def run(problem, base_url, api_key, system=SYSTEM, **options):
    model = OpenRouterModel(model_name="policy", cost_tracking="ignore_errors", **options)
    model._api_url = f"{base_url}/chat/completions"
    with tempfile.TemporaryDirectory() as folder:
        # LocalEnvironment runs commands unprotected; extra.bubblewrap has a sandbox
        world = LocalEnvironment(cwd=folder)
        agent = DefaultAgent(
            model, world, system_template=system, instance_template="{{task}}", step_limit=3
        )
        agent.run(problem.messages[-1]["content"])
        answer = Path(folder, "answer.txt")
        return float(answer.exists() and answer.read_text().strip() == problem.answer)
