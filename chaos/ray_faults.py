"""Chaos for a run on a Ray cluster of this machine: a rollout actor, a node or a reward worker is
killed with SIGKILL at a random moment, seen from outside.

    harness                                   driver `tandem train cluster.nodes=3` and its nodes
    -------                                   -------------------------------------------------
    a random pause, then a victim of the kind:
      actor   a worker of status.json     ->  its process
      node    one that has a worker       ->  its raylet, which takes its workers with it
      reward  a process of the pool       ->  the process
    wait until the loss is noticed: a restart in status.json; another reward worker in its place
    the next fault, or the next run when this one has ended

Right is: the run ends by itself, with the bytes of a run in one process that nobody disturbed. The
first node is the driver's and is not killed: that kills the run, as a dead driver does (kills.py).

    python -m chaos.ray_faults 2      two faults of each kind
"""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from chaos.results import Case, Result, tally
from tandem.run_folder.status import read_status
from tandem.runtime.processes import descendants
from tests.support.runs import fingerprint, prepare, run

FAULTS = 20  # of each kind
A_RUN = {"actor": 4, "node": 2, "reward": 4}  # faults in one run, at most
RUNS = 60  # at most, of a kind
STEPS = 30
SEED = 0
SHORT = ["run.save_every=10", "eval.every=10", "rollout.restarts=100", "run.stall_s=120"]
CLUSTER = ["cluster.nodes=3", "rollout.workers=2", "reward.workers=2"]
PAUSE_S = 3.0  # at most, between two faults
NOTICE_S = 90.0  # for a loss to be noticed
HANG_S = 600.0


def section(faults: int = FAULTS) -> list[Result]:
    """Kill so many of each kind."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        command = [*prepare(folder, steps=STEPS), *SHORT]
        run(command, folder / "whole")
        expected = fingerprint(folder / "whole")
        return [
            tally(f"Ray: a killed {kind}", cases(kind, faults, command, folder, expected), faults)
            for kind in A_RUN
        ]


def cases(
    kind: str, faults: int, command: Sequence[str], folder: Path, expected: dict[str, str]
) -> Iterator[Case]:
    """Run until so many faults of a kind have fired."""
    source, done = random.Random(f"{SEED} {kind}"), 0
    for number in range(RUNS):
        if done == faults:
            return
        start, target = time.monotonic(), folder / f"{kind}_{number}"
        fired, wrong = strike(kind, min(A_RUN[kind], faults - done), command, target, source)
        if not wrong and fingerprint(target) != expected:
            wrong = "other bytes than the undisturbed run's"
        shutil.rmtree(target, ignore_errors=True)
        seconds = time.monotonic() - start
        print(
            f"{kind}, run {number}, {fired} faults, {seconds:.0f} s: {wrong or 'equal'}", flush=True
        )
        done += fired
        yield from [(True, wrong and f"{kind}, run {number}: {wrong}")] * fired
        if wrong and not fired:
            yield False, f"{kind}, run {number}: {wrong}"
            return


def strike(
    kind: str, faults: int, command: Sequence[str], target: Path, source: random.Random
) -> tuple[int, str]:
    """Make one run; return how many faults were noticed in it, and what is wrong with its end."""
    with (target.parent / f"{target.name}.out").open("w+") as out:
        process = subprocess.Popen(
            [*command, *CLUSTER, f"run.folder={target}"],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            start_new_session=True,
        )
        try:
            fired = 0
            while fired < faults and _wait(process, lambda: bool(_workers(target)), HANG_S):
                _wait(process, lambda: False, source.uniform(0, PAUSE_S))
                if not _kill_one(kind, process, target, source):
                    break
                fired += 1
            return fired, _end(process, out)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _kill_one(
    kind: str, process: subprocess.Popen[bytes], target: Path, source: random.Random
) -> bool:
    """Kill a victim; return whether the loss was noticed before the run ended."""
    before = _restarts(target)
    victims = _victims(kind, process.pid, _workers(target))
    if not victims:
        return False
    try:
        os.kill(source.choice(victims), signal.SIGKILL)
    except ProcessLookupError:  # it left by itself meanwhile
        return False

    def is_noticed() -> bool:
        if kind == "reward":  # the pool starts one for the tasks that wait
            return not set(_victims(kind, process.pid, [])) <= set(victims)
        return _restarts(target) > before

    return _wait(process, is_noticed, NOTICE_S)


def _victims(kind: str, driver: int, workers: Sequence[dict[str, Any]]) -> list[int]:
    """Return the pids that a fault of a kind may kill."""
    processes = descendants(driver)
    match kind:
        case "actor":
            actors = {p.pid for p in processes if "RolloutActor" in p.command}
            return [row["pid"] for row in workers if row["pid"] in actors]
        case "node":
            used = {row["node"] for row in workers}
            raylets = [p for p in processes if p.command.split(" ")[0].endswith("raylet/raylet")]
            return [
                p.pid
                for p in raylets
                if "--head" not in p.command
                and (at := re.search(r"--node_ip_address=(\S+)", p.command))
                and at[1] in used
            ]
        case _:
            servers = {p.pid for p in processes if "tandem.rewards.pool.fork_server" in p.command}
            return [p.pid for p in processes if p.parent in servers]


def _end(process: subprocess.Popen[bytes], out: Any) -> str:
    """Wait for the end of the run; describe what is wrong with it."""
    try:
        code = process.wait(HANG_S)
    except subprocess.TimeoutExpired:
        return "it hangs"
    out.seek(0)
    return f"exit code {code}: {out.read()[-1500:]}" if code else ""


def _wait(process: subprocess.Popen[bytes], condition: Any, seconds: float) -> bool:
    """Wait for the condition; False if it does not come in time, or the run ends first."""
    until = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.02)
    return False


def _workers(target: Path) -> list[dict[str, Any]]:
    status = read_status(target) if target.exists() else None
    rows = [] if status is None else status["processes"]
    return [row for row in rows if row["role"].startswith("rollout worker")]


def _restarts(target: Path) -> int:
    return sum(row["restarts"] for row in _workers(target))


if __name__ == "__main__":
    for result in section(int(sys.argv[1])):
        print(result)
