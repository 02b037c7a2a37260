"""Environments on a cluster: the episodes of one process, whoever dies, joins or leaves. Their
processes are real, on this machine and without Ray."""

import asyncio
import os
import signal
from contextlib import contextmanager

import pytest

from tandem.config.schema import Env as EnvConfig
from tandem.config.schema import Sandbox
from tandem.envs.calls import EnvironmentFailed, environment_loop
from tandem.envs.load import load_env
from tandem.plugins.cluster.env_actors import DEPTH, EnvActors, RemoteCaller
from tandem.runtime.errors import UserError
from tandem.workers.pool import Limits
from tests.support.node_process import Nodes
from tests.support.playing import PROBLEMS, TurnEngine, play
from tests.support.waiting import WAIT_S, eventually

# what a problem's environment does is its answer's matter, and each turn depends on all before it
ENVIRONMENT = """
import asyncio, os, signal, time
from pathlib import Path

import numpy as np

from tandem.types import Env, Observation

HERE = Path(__file__).parent

class Sums(Env):
    tools = ({"type": "function", "function": {"name": "f", "default": (1, 2)}},)

    def __init__(self, habits=()):
        self.habits, self.heard = dict(habits), []

    def reset(self, problem):
        self.habit = self.habits.get(problem.answer, "")
        if self.habit == "gate":
            while not (HERE / "gate").exists():
                time.sleep(0.01)
        return [*problem.messages, {"role": "user", "content": "8"}]

    async def step(self, text):
        self.heard.append(int(text))
        total, turn = sum(self.heard), len(self.heard)
        if turn == 2:
            match self.habit:
                case "raise":
                    raise ValueError(f"a tool that failed at {total}")
                case "nonsense":
                    return 7
                case "slow":
                    await asyncio.sleep(0.3)
                case "sleep":
                    (HERE / "asleep").touch()
                    await asyncio.sleep(600)
                case "block":
                    time.sleep(600)
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "kill once" if not (HERE / "killed").exists():
                    (HERE / "killed").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
        return Observation(
            messages=[{"role": "user", "content": str(total)}],
            done=turn == 3,
            reward=np.float32(total / 7),
            parts={"total": total / 3},
            penalty=0.1 * turn,
        )

    def close(self):
        with (HERE / "closed").open("a") as file:
            file.write("x")

def agent(problem, base_url, api_key):
    import json, urllib.request
    chat, total = list(problem.messages), 0
    for _ in range(3):
        body = json.dumps({"model": "policy", "messages": chat}).encode()
        url = f"{base_url}/chat/completions"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            reply = json.load(answer)["choices"][0]["message"]
        total += int(reply["content"])
        chat += [reply, {"role": "user", "content": str(total)}]
    return total
"""


@contextmanager
def workers(folder, most=1, name="env.py:Sums", timeout_s=WAIT_S, **options):
    """(EnvActors, Nodes, what was reported)."""
    (folder / "env.py").write_text(ENVIRONMENT)
    nodes, reports = Nodes("env"), []
    actors = EnvActors(
        nodes.spawn,
        env=EnvConfig(name=name, options=options, timeout_s=timeout_s).model_dump(),
        sandbox=Sandbox().model_dump(),
        folder=str(folder),
        most=most,
        heartbeat_s=WAIT_S,
        report=reports.append,
    )
    with actors:
        yield actors, nodes, reports


def here(folder, engine=None, timeout_s=WAIT_S, name="env.py:Sums", problems=PROBLEMS, **options):
    """The episodes of environments in this process."""
    (folder / "env.py").write_text(ENVIRONMENT)
    source, colon, attribute = name.rpartition(":")
    config = EnvConfig(name=f"{folder / source}:{attribute}" if colon else name, options=options)
    make = load_env(config, Sandbox())
    return play(make, engine or TurnEngine(), problems=problems, group_size=2, timeout_s=timeout_s)


def there(actors, engine=None, timeout_s=WAIT_S, problems=PROBLEMS):
    """The episodes of env workers."""
    return play(
        actors.make,
        engine or TurnEngine(),
        problems=problems,
        group_size=2,
        caller=RemoteCaller,
        timeout_s=timeout_s,
    )


def test_episodes_are_those_of_environments_in_one_process(tmp_path):
    habits = {"1": "raise", "2": "nonsense"}
    expected = here(tmp_path, habits=habits)
    with workers(tmp_path, habits=habits) as (actors, *_):
        found = there(actors)
        [row] = actors.status()
    assert len((tmp_path / "closed").read_text()) == 2 * sum(map(len, expected))
    # tools are JSON: a tuple in them is a list
    assert repr(found).replace("[1, 2]", "(1, 2)") == repr(expected)
    assert [group[0].stop_reason for group in found] == ["stop", "error", "error", "stop"]
    assert found[1][0].env_error.startswith("ValueError: a tool that failed at")
    assert row["role"] == "env worker 0" and row["state"] == "idle" and row["requests"] > 20


class KillingEngine(TurnEngine):
    """Kills a process while all episodes wait for their second turn."""

    kill = None

    def generate(self, requests):
        if self.kill is not None and all(len(request.prompt) > 8 for request in requests):
            os.kill(self.kill(), signal.SIGKILL)
            self.kill = None
        return super().generate(requests)


@pytest.mark.parametrize("when", ["in a step", "between two"])
def test_killed_worker_changes_no_episode(tmp_path, when):
    habits = {"3": "kill once"} if when == "in a step" else {}
    with workers(tmp_path, habits=habits) as (actors, nodes, reports):
        engine = KillingEngine()
        if when == "between two":
            engine.kill = lambda: nodes.hosts[0].pid
        found = there(actors, engine)
    (tmp_path / "killed").touch()
    assert repr(found).replace("[1, 2]", "(1, 2)") == repr(here(tmp_path, habits=habits))
    assert all(episode.stop_reason == "stop" for group in found for episode in group)
    assert len(nodes.hosts) == 2 and len(reports) == 1 and "was lost while" in reports[0]


def test_environment_that_kills_its_workers_costs_its_own_episode(tmp_path):
    """Others have calls under way whenever it kills."""
    expected = here(tmp_path)
    habits = {"0": "slow", "1": "slow", "2": "slow", "3": "kill"}
    with workers(tmp_path, habits=habits) as (actors, nodes, _):
        *fine, [killer] = play(
            actors.make, TurnEngine(), problems=PROBLEMS, caller=RemoteCaller, timeout_s=WAIT_S
        )
    assert killer.env_error == "worker died: it was ended by SIGKILL"
    assert killer.masked and len(nodes.hosts) >= Limits().losses
    found = repr([group[0] for group in fine]).replace("[1, 2]", "(1, 2)")
    assert found == repr([group[0] for group in expected[:3]])


def test_late_environment_ends_its_episode_as_in_one_process(tmp_path):
    """The time of an episode is the environment's own: its worker takes longer to start."""
    habits = {"1": "sleep"}
    (tmp_path / "slow.py").write_text("import time; time.sleep(1.5)\nfrom env import Sums\n")
    with workers(tmp_path, name="slow.py:Sums", timeout_s=1.0, habits=habits) as (actors, *_):
        found = there(actors, timeout_s=1.0, problems=PROBLEMS[:2])
    expected = here(tmp_path, timeout_s=1.0, problems=PROBLEMS[:2], habits=habits)
    assert repr(found).replace("[1, 2]", "(1, 2)") == repr(expected)
    assert found[1][0].stop_reason == "time" and "took more than 1.0 s" in found[1][0].env_error


def test_agent_plays_in_a_worker_as_in_one_process(tmp_path):
    expected = here(tmp_path, name="agent", run=f"{tmp_path / 'env.py'}:agent")
    with workers(tmp_path, name="agent", run="env.py:agent") as (actors, *_):
        found = there(actors)
    assert repr(found) == repr(expected)
    assert all(episode.env_rewards["env"] > 0 for group in found for episode in group)


def test_environment_that_blocks_a_workers_loop_is_named(tmp_path):
    with (
        workers(tmp_path, timeout_s=1.0, habits={"0": "block"}) as (actors, *_),
        pytest.raises(UserError, match="blocks the event loop") as caught,
    ):
        there(actors, timeout_s=1.0)
    assert "step, env worker 0" in caught.value.where.replace("\n", " ")


def test_environment_that_a_node_lacks_is_a_users_error(tmp_path):
    with (
        workers(tmp_path, name="nowhere.py:Sums") as (actors, *_),
        pytest.raises(UserError, match="nowhere") as caught,
    ):
        there(actors)
    assert "env worker 0" in caught.value.where


@pytest.mark.parametrize("begun", [True, False])
def test_closing_an_environment_ends_its_step(tmp_path, begun):
    with workers(tmp_path, name="env:Sums", habits={"0": "sleep"}) as (actors, *_):
        env, loop = actors.make(), environment_loop()

        def call(method, *arguments):
            return asyncio.run_coroutine_threadsafe(method(*arguments), loop)

        for method, argument in ((env.reset, PROBLEMS[0]), (env.step, "1")):
            call(method, argument).result(WAIT_S)
        sleeping = call(env.step, "2")
        assert not begun or eventually((tmp_path / "asleep").exists)
        call(env.close).result(WAIT_S)
        with pytest.raises(EnvironmentFailed, match="the episode is over"):
            sleeping.result(WAIT_S)
    assert (tmp_path / "closed").read_text() == "x"


def test_worker_joins_when_episodes_wait(tmp_path):
    loop = environment_loop()
    with workers(tmp_path, most=2, habits={"0": "gate"}) as (actors, *_):
        envs = [actors.make() for _ in range(DEPTH + 1)]
        begun = [asyncio.run_coroutine_threadsafe(e.reset(PROBLEMS[0]), loop) for e in envs]
        assert eventually(lambda: [row["state"] for row in actors.status()] == 2 * ["serving"])
        (tmp_path / "gate").touch()
        assert all(future.result(WAIT_S) for future in begun)
