"""Chaos for rollout workers: killed, stopped, crashed or babbling while they start, sync, idle or
serve, in real runs.

    driver (a fork; Struck takes the place of Workers)    two worker processes (faulty_worker.py)
    --------------------------------------------------    ---------------------------------------
    the next fault of the plan is due when a worker is    SIGKILL, SIGSTOP,
      in its state; the state is exact, as the driver's   SIGHUP: an exception,
      own thread looks and strikes                    ->  SIGALRM: garbage
    step() waits until the loss was noticed: a witness
    the next fault

Right is: the bytes of a run without workers that nobody disturbed (kills.fingerprint), and every
token sampled by the weights whose turn it was. It does not test what workers say to each other, nor
one fault during the recovery from another, unless chance has it: a worker that is struck while it
starts is mostly one that replaces another.

    python -m chaos.workers 4      four faults in each schedule
"""

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from chaos.faulty_worker import faulty_hosts
from chaos.kills import adopting_forks, differs, ended, left
from chaos.results import Case, Result, tally
from tandem.rollout_workers.pool import WAIT_S, WorkerProcess, Workers
from tandem.run_folder.episode_files import read_episodes
from tandem.runtime.processes import catches
from tests.support.runs import fingerprint, prepare

FAULTS = 17  # in each schedule: each way in each state, and one more
A_RUN = 6  # faults in one run
STEPS = 12
SEED = 0
SHORT = ["run.save_every=4", "eval.every=6", "rollout.restarts=1000"]
# of the runs in turns; the undisturbed one has the default
THREADS = ([], ["run.threads=1"], ["run.threads=2"])
STRUCK = ["rollout.workers=2", "run.stall_s=12"]  # a worker is silent after 6 s

# kinds of kills.py
SCHEDULES = {"staleness 0": "train", "staleness 1": "one-step-off", "partial rollouts": "partial"}
STATES = ("starting", "syncing", "idle", "serving")
WAYS = {  # name: the signal, and what the driver says when it has noticed
    "killed": (signal.SIGKILL, "it was ended by SIGKILL"),
    "stopped": (signal.SIGSTOP, "no sign of life"),
    "crashed": (signal.SIGHUP, "it ended with exit code 1"),
    "babbling": (signal.SIGALRM, "it wrote what is no"),
}

Fault = tuple[str, str]  # state, way


def section(faults: int = FAULTS) -> list[Result]:
    with tempfile.TemporaryDirectory() as place:
        striker = Striker(Path(place))
        return [striker.row(name, faults) for name in SCHEDULES]


@dataclass
class Striker:
    """Runs whose workers are struck. lost: how often the driver noticed each kind of fault."""

    place: Path
    lost: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.forks, self.standing = adopting_forks()

    def row(self, name: str, faults: int) -> Result:
        self.lost.clear()
        row = tally(
            f"a rollout worker is struck: {name}", self.cases(name, faults), at_least=faults
        )
        lost = ", ".join(f"{what} {count}" for what, count in sorted(self.lost.items()))
        return replace(row, note=f"{lost}{'; ' * bool(row.note)}{row.note}")

    def cases(self, name: str, faults: int) -> Iterator[Case]:
        inputs = self.place / name.replace(" ", "_")
        inputs.mkdir()
        command = [*prepare(inputs, steps=STEPS, command=SCHEDULES[name]), *SHORT]
        if wrong := ended(
            self.forks.start([*command, "rollout.workers=0"], inputs / "whole"), inputs / "whole"
        ):
            raise RuntimeError(f"{name}, undisturbed: {wrong}")
        expected, plan = fingerprint(inputs / "whole"), planned(name, faults)
        for first in range(0, len(plan), A_RUN):
            yield from self.run(
                f"{name}, faults from {first}",
                [*command, *STRUCK, *THREADS[first // A_RUN % 3]],
                plan[first : first + A_RUN],
                expected,
            )

    def run(
        self, name: str, command: list[str], plan: list[Fault], expected: dict[str, str]
    ) -> Iterator[Case]:
        """Make one run with these faults, one after the other."""
        folder, log, start = self.place / "run", self.place / "lost.jsonl", time.monotonic()
        log.write_text("")
        wrong = ended(self.forks.start(command, folder, use_struck_workers, plan, str(log)), folder)
        wrong = (
            wrong
            or left(self.standing, folder)
            or differs(expected, fingerprint(folder))
            or stale(folder, command)
        )
        shutil.rmtree(folder, ignore_errors=True)
        losses = [json.loads(line) for line in log.read_text().splitlines()]
        print(f"{name}, {time.monotonic() - start:.0f} s: {wrong or 'equal'}", flush=True)
        for number, (state, way) in enumerate(plan):
            fired = any(loss["fault"] == number and WAYS[way][1] in loss["lost"] for loss in losses)
            what = f"{state}: {way}"
            self.lost[what] = self.lost.get(what, 0) + fired
            yield fired, wrong and f"{name}: {wrong}"


def planned(name: str, faults: int) -> list[Fault]:
    """Plan every way in every state, shuffled, as often as it takes."""
    source = random.Random(f"{SEED} {name}")
    plan: list[Fault] = []
    while len(plan) < faults:
        every = [(state, way) for state in STATES for way in WAYS]
        plan += source.sample(every, len(every))
    return plan[:faults]


def stale(folder: Path, command: Sequence[str]) -> str:
    """Describe tokens of wrong weights: version max(0, s - staleness) samples step s (from 0)."""
    staleness, partial = (
        int("rollout.staleness=1" in command),
        any("token_budget" in text for text in command),
    )
    files = sorted((folder / "episodes").glob("train_step_*.parquet"))
    for step, file in enumerate(files):
        turn = max(0, step - staleness)
        episodes = [episode.weight_versions[episode.loss_mask] for episode in read_episodes(file)]
        seen = {int(version) for versions in episodes for version in versions}
        if (max(seen) if partial else seen) != (turn if partial else {turn}):
            return f"step {step + 1} has tokens of versions {sorted(seen)}, its turn is {turn}"
        if any((np.diff(versions) < 0).any() for versions in episodes):
            return f"step {step + 1} has an episode that went on with older weights"
    return "" if len(files) == STEPS else f"{len(files)} files of episodes"


# ---- in the driver


def use_struck_workers(plan: list[Fault], log: str) -> None:
    """Give the run workers that will be struck."""
    from tandem.jobs import worker_rollouts

    Struck.plan, Struck.log, Struck.random = plan, Path(log), random.Random(len(plan))
    worker_rollouts.LocalHosts = faulty_hosts  # type: ignore[assignment]
    worker_rollouts.Workers = Struck  # type: ignore[attr-defined, misc]


class Struck(Workers):
    """Real workers, struck by a plan. log: a file of the losses."""

    plan: list[Fault]
    log: Path
    random: random.Random

    def __init__(self, *arguments: Any, **options: Any):
        self._fault = 0  # the next one
        self._struck = -1  # the process that was struck, until its loss is noticed
        self._skip = 0  # opportunities to leave out
        super().__init__(*arguments, **options)

    def step(self) -> None:
        while self._struck >= 0:
            super()._listen(WAIT_S)
        super().step()
        if not self.dispatcher.num_waiting and all(
            worker.state in ("idle", "starting") for worker in self._workers.values()
        ):
            self._strike("idle", 2)

    def _listen(self, seconds: float | None) -> None:
        self._strike("serving", 4)
        self._strike("starting", 3)
        super()._listen(seconds)

    def _sync(self, version: int, workers: Sequence[WorkerProcess]) -> None:
        super()._sync(version, workers)
        self._strike("syncing", 3)

    def _strike(self, state: str, patience: int) -> None:
        """Strike a worker in this state, if that is the next fault's, after a few opportunities."""
        if self._struck >= 0 or self._fault == len(self.plan) or self.plan[self._fault][0] != state:
            return
        number, _ = WAYS[self.plan[self._fault][1]]
        candidates = [
            worker
            for worker in self._workers.values()
            if worker.state == state and _can_receive(worker, number)
        ]
        if not candidates:
            return
        self._skip = self._skip or self.random.randint(1, patience)
        self._skip -= 1
        if not self._skip:
            self._struck = self.random.choice(candidates).pid
            os.kill(self._struck, number)

    def _lose(self, worker: WorkerProcess, reason: str) -> None:
        if worker.pid == self._struck:
            with self.log.open("a") as file:
                file.write(
                    json.dumps({"fault": self._fault, "state": worker.state, "lost": reason}) + "\n"
                )
            self._fault, self._struck = self._fault + 1, -1
        super()._lose(worker, reason)


def _can_receive(worker: WorkerProcess, number: int) -> bool:
    if number == signal.SIGSTOP:  # not the fork server, whose worker may go on without it
        return worker.pid != worker.host._server.pid  # type: ignore[attr-defined]
    return number == signal.SIGKILL or catches(worker.pid, number)


if __name__ == "__main__":
    for result in section(int(sys.argv[1])):
        print(result)
