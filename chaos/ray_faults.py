"""Chaos for a run on a Ray cluster of this machine: a process or a node is killed with SIGKILL at a
random moment, seen from outside.

    harness                                   driver `tandem train cluster.nodes=...` and its nodes
    -------                                   -------------------------------------------------
    a random pause, then a victim of the kind:
      actor         a rollout worker          ->  its process
      node          one with such a worker    ->  its raylet, which takes its workers with it
      reward        a process of the driver's pool of reward workers
      reward actor  a reward worker on a node ->  its process
      env actor     an env worker on a node   ->  its process, with the episodes that it holds
      rank          one of two trainer ranks, which Ray has started, or the driver
      unit          a storage unit of TransferQueue, or its controller

Of the first five the run heals: the loss is noticed (status.json, log.txt, another process in its
place), the next fault follows, and the run ends by itself. The last two end it, within STOP_S and
with an error that names the culprit, unless that is the driver; the same command goes on, to the
next fault. Right is the end with the bytes of a run without Ray that nobody disturbed. A hang is a
failure at HANG_S.

The first node is the driver's and is not killed: that kills the run, as a dead driver does.

    python -m chaos.ray_faults 2 [KIND ...]      two faults of each kind, or of these
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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos.results import Case, Result, tally
from tandem.run_folder.status import read_status
from tandem.runtime.processes import Process, descendants, started_at
from tests.support.runs import fingerprint, prepare, run

FAULTS = 20  # of each kind
RUNS = 60  # at most, of a kind
STEPS = 20
SEED = 0
SHORT = ["run.save_every=5", "eval.every=0", "rollout.restarts=100", "run.stall_s=120"]
NODES = ["cluster.nodes=2", "rollout.workers=2", "reward.workers=2"]
ACTORS = [*NODES, "cluster.reward_workers=2"]
RANKS = ["parallel.data=2", "run.threads=1", "run.steps=8"]
# the environment of tests/support/runs.py
STOPS = 'rollout.stop=["a", "e", "1", "x", "Z"]'
ENV = ["env.name=FOLDER/env.py:Chat", "reward.function=env", STOPS]
QUEUE = [*RANKS, "stream.kind=transfer_queue", "cluster.nodes=1", "rollout.workers=1"]
# slow enough that a killed worker has a call in flight
REWARD = """
import time

def score(problem, completion):
    time.sleep(0.02)
    return float(sum(map(ord, completion)) % 2)
"""
PAUSE_S = 3.0  # at most, before a fault
NOTICE_S = 90.0  # for a loss to be noticed
STOP_S = 150.0  # for a run to end that cannot heal; run.stall_s is 120
HANG_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of fault. faults: in one run, at most; culprit: what the error of a run names that
    cannot heal; "" for one that heals."""

    options: Sequence[str]
    faults: int
    culprit: str = ""

    @property
    def base(self) -> str:
        """The run without Ray that has the same bits, in BASES."""
        return "ranks" if self.culprit else "env" if ENV[0] in self.options else ""


BASES = {"": [], "ranks": RANKS, "env": ENV}
KINDS = {
    "actor": Kind(options=NODES, faults=4),
    "node": Kind(options=[*ACTORS, "cluster.nodes=3"], faults=2),
    "reward": Kind(options=NODES, faults=4),
    "reward actor": Kind(options=ACTORS, faults=4),
    "env actor": Kind(options=[*NODES, *ENV, "cluster.env_workers=2"], faults=4),
    "rank": Kind(options=[*QUEUE, "cluster.trainers=ray"], faults=4, culprit="rank 1"),
    "unit": Kind(options=QUEUE, faults=4, culprit="TransferQueue"),
}


def _placed(options: Sequence[str], folder: Path) -> list[str]:
    return [option.replace("FOLDER", str(folder)) for option in options]


def healing() -> list[Result]:
    """Kill FAULTS of each kind of which a run heals."""
    return section(kinds=[name for name, kind in KINDS.items() if not kind.culprit])


def ending() -> list[Result]:
    """Kill FAULTS of each kind that ends a run, which the same command resumes."""
    return section(kinds=[name for name, kind in KINDS.items() if kind.culprit])


def section(faults: int = FAULTS, kinds: Sequence[str] = tuple(KINDS)) -> list[Result]:
    """Kill so many of each kind."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        command = [*prepare(folder, steps=STEPS), *SHORT]
        (folder / "reward.py").write_text(REWARD)
        expected = {}
        for base, options in BASES.items():
            run([*command, *_placed(options, folder)], folder / f"whole_{base}")
            expected[base] = fingerprint(folder / f"whole_{base}")
        return [
            tally(
                f"Ray: a killed {name}",
                cases(name, faults, command, folder, expected[kind.base]),
                faults,
            )
            for name, kind in KINDS.items()
            if name in kinds
        ]


def cases(
    name: str, faults: int, command: Sequence[str], folder: Path, expected: dict[str, str]
) -> Iterator[Case]:
    """Run until so many faults of a kind have fired."""
    source, done, kind = random.Random(f"{SEED} {name}"), 0, KINDS[name]
    for number in range(RUNS):
        if done == faults:
            return
        start, target = time.monotonic(), folder / f"{name.replace(' ', '_')}_{number}"
        whole = [*command, *_placed(kind.options, folder), f"run.folder={target}"]
        most = min(kind.faults, faults - done)
        if kind.culprit:
            fired, wrong = stop_some(name, most, number, whole, target, source)
        else:
            fired, wrong = strike(name, most, whole, target, source)
        if not wrong and fingerprint(target) != expected:
            wrong = "other bytes than the undisturbed run's"
        shutil.rmtree(target, ignore_errors=True)
        seconds = time.monotonic() - start
        print(
            f"{name}, run {number}, {fired} faults, {seconds:.0f} s: {wrong or 'equal'}", flush=True
        )
        done += fired
        yield from [(True, wrong and f"{name}, run {number}: {wrong}")] * fired
        if wrong and not fired:
            yield False, f"{name}, run {number}: {wrong}"
            return


def strike(
    name: str, faults: int, command: Sequence[str], target: Path, source: random.Random
) -> tuple[int, str]:
    """Make one run that heals; return how many faults were noticed in it, and what is wrong with
    its end."""
    with started(command, target) as (process, out):
        fired = 0
        while fired < faults and _wait(process, lambda: bool(_workers(target)), HANG_S):
            _wait(process, lambda: False, source.uniform(0, PAUSE_S))
            if not _kill_one(name, process, target, source):
                if process.poll() is None:
                    return fired + 1, f"a killed {name} is not noticed in {NOTICE_S:g} s"
                break
            fired += 1
        return fired, _end(process, out)


def stop_some(
    name: str, faults: int, number: int, command: Sequence[str], target: Path, source: random.Random
) -> tuple[int, str]:
    """Let faults end a run, have the same command go on after each, and then let it end by itself;
    return as `strike`. number: of the run; each victim comes in turns."""
    for fired in range(faults):
        with started(command, target) as (process, out):
            _wait(process, lambda: bool(_workers(target)), HANG_S)
            _wait(process, lambda: False, source.uniform(0, PAUSE_S))
            victims = _victims(name, process.pid, [])
            standing = descendants(process.pid)
            if process.poll() is not None or not victims:
                return fired, _end(process, out)
            os.kill(victim := victims[(number + fired) % len(victims)], signal.SIGKILL)
            wrong = _stopped(process, out, name, victim == process.pid) or _left_behind(standing)
            if wrong:
                return fired + 1, wrong
    with started(command, target) as (process, out):
        return faults, _end(process, out)


def _left_behind(standing: Sequence[Process]) -> str:
    """Wait for the end of the processes of a run that has ended; name those that live on. Removes
    the folders of their Ray, which a killed driver leaves."""
    until = time.monotonic() + STOP_S
    while alive := [p.pid for p in standing if started_at(p.pid)]:
        if time.monotonic() > until:
            return f"processes {alive} live {STOP_S:g} s after the run has ended"
        time.sleep(0.1)
    for session in re.findall(r"(\S*/ray-\w+)/session", " ".join(p.command for p in standing)):
        shutil.rmtree(session.partition("=")[2] or session, ignore_errors=True)
    return ""


def _stopped(process: subprocess.Popen[bytes], out: Any, name: str, is_driver: bool) -> str:
    """Wait for the end of a run that cannot heal; describe what is wrong with it. One whose last
    step was done may end well."""
    try:
        code = process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        return f"it hangs {STOP_S:g} s after the fault"
    said = _read(out)
    if is_driver or code == 0 or (code in (2, 3) and KINDS[name].culprit in said):
        return ""
    return f"exit code {code}, and no word of {KINDS[name].culprit}: {said[-1500:]}"


@contextmanager
def started(command: Sequence[str], target: Path) -> Iterator[tuple[subprocess.Popen[bytes], Any]]:
    """Start a run; yields its process and what it prints. It is killed afterwards."""
    with (target.parent / f"{target.name}.out").open("w+") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            start_new_session=True,
        )
        try:
            yield process, out
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _kill_one(
    name: str, process: subprocess.Popen[bytes], target: Path, source: random.Random
) -> bool:
    """Kill a victim once there is one; return whether the loss was noticed before the run ended."""
    while process.poll() is None:
        _wait(process, lambda: bool(_victims(name, process.pid, _workers(target))), NOTICE_S)
        before, victims = _losses(name, target), _victims(name, process.pid, _workers(target))
        with suppress(ProcessLookupError, IndexError):  # it left by itself meanwhile
            os.kill(source.choice(victims), signal.SIGKILL)
            break

    def is_noticed() -> bool:
        if name == "reward":  # the pool starts one for the tasks that wait
            return not set(_victims(name, process.pid, [])) <= set(victims)
        return _losses(name, target) > before

    return _wait(process, is_noticed, NOTICE_S)


def _victims(name: str, driver: int, workers: Sequence[dict[str, Any]]) -> list[int]:
    """Return the pids that a fault of a kind may kill."""
    processes = descendants(driver)
    match name:
        case "actor":
            actors = {p.pid for p in processes if "RolloutActor" in p.command}
            return [row["pid"] for row in workers if row["pid"] in actors]
        case "node":
            return [p.pid for p in processes if _is_used_node(p, {row["node"] for row in workers})]
        case "reward actor":
            return [p.pid for p in processes if "RewardWorker" in p.command]
        case "env actor":
            return [p.pid for p in processes if "EnvWorker" in p.command]
        case "rank":
            return [driver, *(p.pid for p in processes if _is_rank_1(p))]
        case "unit":
            return [p.pid for p in processes if re.search("StorageUnit|Controller", p.command)]
        case _:
            servers = {
                p.pid
                for p in processes
                if p.parent == driver and "tandem.rewards.worker" in p.command
            }
            return [p.pid for p in processes if p.parent in servers]


def _is_rank_1(process: Process) -> bool:
    """Tell whether a process is the trainer's second rank, on whatever node."""
    with suppress(OSError):
        environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        return "-m tandem train" in process.command and b"RANK=1" in environment
    return False


def _is_used_node(process: Process, used: set[str]) -> bool:
    """Tell whether a process is the raylet of one of these nodes, and not of the driver's."""
    if not process.command.split(" ")[0].endswith("raylet/raylet") or "--head" in process.command:
        return False
    at = re.search(r"--node_ip_address=(\S+)", process.command)
    return at is not None and at[1] in used


def _end(process: subprocess.Popen[bytes], out: Any) -> str:
    """Wait for the end of the run; describe what is wrong with it."""
    try:
        code = process.wait(HANG_S)
    except subprocess.TimeoutExpired:
        return "it hangs"
    return f"exit code {code}: {_read(out)[-1500:]}" if code else ""


def _read(out: Any) -> str:
    out.seek(0)
    return str(out.read())


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


def _losses(name: str, target: Path) -> int:
    """Count the losses that the run has noticed."""
    if name in ("reward actor", "env actor"):
        role = name.replace("actor", "worker")
        return len(re.findall(rf"{role} .* was lost", (target / "log.txt").read_text()))
    return sum(row["restarts"] for row in _workers(target))


if __name__ == "__main__":
    for result in section(int(sys.argv[1]), sys.argv[2:] or tuple(KINDS)):
        print(result)
