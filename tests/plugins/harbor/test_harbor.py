"""Tasks in Harbor's folders, played in bubblewrap, where it works, and by a program `docker`."""

import os
import runpy
import subprocess
import tarfile
from base64 import b64encode
from io import BytesIO
from pathlib import Path

import pytest

from tandem.config.episodes import Sandbox
from tandem.model.tool_calls import Call, write_calls
from tandem.plugins.graders.sandbox.protocol import open_sandbox
from tandem.plugins.harbor import HarborEnv, _has_docker, rows
from tandem.runtime.errors import UserError
from tandem.types import Problem
from tests.support.env_steps import play, step_in

TEST = """#!/bin/bash
cmp -s /app/sum.txt <(echo 7) && right=1 || right=0
echo $right > /logs/verifier/reward.txt
"""
NAMED = """
echo "{\\"reward\\": 0.5, \\"files\\": $(ls /app | wc -l)}" > /logs/verifier/reward.json
"""


@pytest.fixture
def sandbox(monkeypatch):
    try:
        open_sandbox(Sandbox())
    except UserError as error:
        pytest.skip(str(error))
    monkeypatch.setattr("tandem.plugins.harbor._has_docker", lambda: False)


BESIDE = TEST.replace("/app", "$here/app").replace("/logs", "$here/logs")
BESIDE = BESIDE.replace("cmp", "here=${BASH_SOURCE%/tests/*}\ncmp", 1)


def write_task(folder, *, dockerfile="FROM ubuntu:24.04\nWORKDIR /app\nCOPY in.txt .\n", test=TEST):
    for name, text in {
        "task.toml": '[verifier]\ntimeout_sec = 30\n[environment]\ndocker_image = "a"\ngpus = 0\n',
        "instruction.md": "Write the sum of /app/in.txt to /app/sum.txt.",
        "environment/Dockerfile": dockerfile,
        "environment/in.txt": "3\n4\n",
        "tests/test.sh": test,
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def problem_of(row):
    messages = ({"role": "user", "content": row["prompt"]},)
    return Problem(uid=row["uid"], messages=messages, answer="", metadata={"task": row["task"]})


def bash(command):
    return write_calls([Call(name="bash", arguments={"command": command})])


def test_files_stay_from_command_to_command_and_the_tests_give_the_reward(tmp_path, sandbox):
    [row] = rows(str(write_task(tmp_path / "sum")))
    assert row["prompt"].startswith("Write the sum")
    _, *heard, last = play(
        HarborEnv(seconds=2.0),
        problem_of(row),
        bash("pwd; cat in.txt"),
        bash("echo $((3 + 4)) > sum.txt; touch /root/x; false"),
        bash("cat sum.txt; find /root /tests -mindepth 1; ls /solution"),
        bash("echo no > sum.txt; touch slow; sleep 60"),
        # it is undone before the tests
        bash("mkdir /logs/verifier; tee /logs/verifier/reward.json /tests/test.sh <<< 1"),
        "Done.",
    )
    said = [one.messages[0]["content"] for one in heard]
    assert said[:2] == ["/app\n3\n4", "(exit code 1)"]
    assert said[2].startswith("7\n/root/x\nls: ") and said[2].endswith("(exit code 2)")
    assert said[3] == "(exit code 124)" and said[4] == "1"
    # the command that was stopped had written its files
    assert (last.done, last.reward) == (True, 0.0)
    assert last.parts == {"tool_calls": 5.0, "bad_calls": 0.0, "reward": 0.0}


def test_tests_may_name_rewards_and_no_result_is_an_error(tmp_path, sandbox):
    [row] = rows(str(write_task(tmp_path / "named", test=NAMED)))
    _, last = play(HarborEnv(), problem_of(row), "Done.")
    assert (last.reward, last.parts["files"]) == (0.5, 1.0)
    [row] = rows(str(write_task(tmp_path / "sum", test="echo 1")))
    with pytest.raises(RuntimeError, match="leave no reward"):
        play(HarborEnv(), problem_of(row), "Done.")
    [row] = rows(str(write_task(tmp_path / "none", test="echo {} > /logs/verifier/reward.json")))
    with pytest.raises(RuntimeError, match=r"leave no reward: \{}"):
        play(HarborEnv(), problem_of(row), "Done.")


class ForgingEnv(HarborEnv):
    """An episode whose files are a forged tar, as a process can write it to the run's stdout."""

    async def reset(self, problem):
        packed, messages = BytesIO(), await super().reset(problem)
        links = {"app/x": "/tests", "app/y": "../logs", "tmp/z": "."}
        entries = [(name, tarfile.SYMTYPE, to, 0, 0o777) for name, to in links.items()]
        entries += [(name, tarfile.REGTYPE, "", 2, 0o444) for name in FORGED]
        entries += [(n, tarfile.DIRTYPE, "", 0, 0o555) for n in ("logs/verifier", "logs", "tmp")]
        with tarfile.open(fileobj=packed, mode="w:gz") as tar:
            for name, *fields in entries:
                info = tarfile.TarInfo(name)
                info.type, info.linkname, info.size, info.mode = fields
                tar.addfile(info, BytesIO(b"9\n"))
        self._files = b64encode(packed.getvalue()).decode()
        return messages


FORGED = ["tests/test.sh", "tests/more", "app/x/more", "/tests/more", "logs/verifier/reward.json"]
FORGED += ["app/y/verifier/reward.json", "app/forged", "tmp/.tandem/command", "tmp/z/.tandem"]


def test_a_forged_tar_replaces_neither_the_tests_nor_their_reward(tmp_path, sandbox):
    test = "ls -A /tests /app/forged | wc -w > /logs/verifier/reward.txt"
    [row] = rows(str(write_task(tmp_path / "sum", test=test)))
    _, last = play(ForgingEnv(), problem_of(row), "Done.")
    assert last.reward == 3  # /app/forged, /tests: and test.sh


@pytest.mark.parametrize(
    ("dockerfile", "found"),
    [
        ("FROM a\nRUN apt-get \\\n  install x\n", "RUN apt-get"),
        ("FROM a\nCOPY in.txt /etc/\n", "/etc/in.txt"),
        ("FROM a\nCOPY in.txt /tests/\n", "/tests/in.txt"),
        ("FROM a\nCOPY --from=b x /app\n", "COPY --from"),
        ("FROM a\nCOPY ../task.toml /app\n", "task.toml"),
        ("FROM a\nCOPY out.txt /app\n", "out.txt"),
    ],
)
def test_a_task_that_needs_a_container_is_refused(dockerfile, found, tmp_path, sandbox):
    write_task(tmp_path / "sum", dockerfile=dockerfile)
    row = {"uid": "sum", "prompt": "?", "task": str(tmp_path / "sum")}
    with pytest.raises(UserError, match=found):
        play(HarborEnv(), problem_of(row), "Done.")


def test_a_step_with_tasks_is_exactly_on_policy(tmp_path, sandbox):
    for name in "abcde":
        write_task(tmp_path / "tasks" / name)
    problems = [problem_of(row) for row in rows(str(tmp_path / "tasks"))]

    def words(number):
        return bash("seq 7 7 > sum.txt") if number % 2 else "Done."

    episodes = step_in(tmp_path, HarborEnv, words, problems)
    rewards = {
        bool(e.env_rewards["tool_calls"]): e.reward for e in episodes if e.stop_reason == "stop"
    }
    assert rewards == {True: 1.0, False: 0.0}
    # an example's report reads what a run leaves
    report = runpy.run_path(str(Path(__file__).parents[3] / "examples/tool_tasks.py"))
    means = report["held_out"](next(tmp_path.glob("*.parquet")))
    calls = [episode.env_rewards["tool_calls"] for episode in episodes]
    assert means["tool_calls"] == sum(calls) / len(calls) > 0


@pytest.fixture
def docker(tmp_path, monkeypatch):
    """The program `docker` of this folder, whose container is another; yields what it was asked."""
    monkeypatch.setenv("PATH", str(Path(__file__).parent), prepend=os.pathsep)
    monkeypatch.setenv("CONTAINER", str(tmp_path))
    _has_docker.cache_clear()
    yield lambda: " ".join(line.split()[0] for line in (tmp_path / "log").open())
    _has_docker.cache_clear()


def test_where_docker_answers_it_builds_and_runs_a_task(tmp_path, docker):
    [row] = rows(str(write_task(tmp_path / "sum", dockerfile="FROM a\nRUN x\n", test=BESIDE)))
    _, *heard, last = play(
        HarborEnv(seconds=2),
        problem_of(row),
        bash("cat in.txt; echo 7 > sum.txt; exit 3"),
        bash("cat sum.txt; sleep 60"),
        # what a command leaves beside the tests is no test
        bash("mkdir -p /tests /logs/verifier; tee /tests/test.sh /logs/verifier/reward.json <<< 1"),
        "Done.",
    )
    said = [one.messages[0]["content"] for one in heard]
    assert said == ["3\n4\n(exit code 3)", "7\n(exit code 124)", "1"] and last.reward == 1.0
    assert docker() == "version build run exec exec exec restart exec rm"


def test_a_real_engine_keeps_a_task_apart_and_its_reward_from_forgers(tmp_path):
    if subprocess.call("docker image inspect ubuntu:24.04 > /dev/null 2>&1", shell=True):
        pytest.skip("no docker engine here has the image ubuntu:24.04")
    before = subprocess.check_output(["docker", "ps", "-aq"])
    dockerfile = "FROM ubuntu:24.04\nRUN echo made > /etc/x\nWORKDIR /app\nCOPY in.txt .\n"
    [row] = rows(str(write_task(tmp_path / "sum", dockerfile=f"{dockerfile}ENTRYPOINT false")))
    forge = "echo 1 | tee /logs/verifier/reward.json /tests/test.sh"
    _, *heard, last = play(
        HarborEnv(seconds=2),
        problem_of(row),
        bash("cat in.txt /etc/x; ls /sys/class/net; echo 8 > sum.txt"),
        bash("cat sum.txt; sleep 60"),
        bash(f"while true; do {forge}; done &> /dev/null & disown; yes | head -c 99999"),
        bash(f"mkdir -p /tests /logs/verifier; {forge}"),
        "Done.",
    )
    said = [one.messages[0]["content"] for one in heard]
    assert said[:2] == ["3\n4\nmade\nlo", "8\n(exit code 124)"] and said[3] == "1"
    assert said[2].endswith("more characters)") and (last.done, last.reward) == (True, 0.0)
    assert subprocess.check_output(["docker", "ps", "-aq"]) == before
