"""Chaos for runs of several ranks: kill -9 of one at a random moment, then the same command again;
and the files compared byte by byte.

    python -m chaos.rank_kills 6      six kills
"""

import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from chaos.kills import adopting_forks, differs, ended, left
from chaos.results import Case, Result, tally
from tandem.runtime.processes import descendants, started_at
from tests.support.runs import fingerprint, prepare

KILLS, RANKS, SEED = 20, 2, 0
END_S = 10.0  # for the other ranks to end by themselves
SETTINGS = [f"parallel.data={RANKS}", "run.save_every=1", "eval.every=3", "run.threads=1"]
TRIES = 4  # moments drawn until one strikes a live run


def section(kills: int = KILLS) -> list[Result]:
    """Kill each rank in turns."""
    with tempfile.TemporaryDirectory() as place:
        run = Killer(Path(place))
        row = tally(
            f"kill -9 of one of {RANKS} ranks at a random moment", run.cases(kills), at_least=kills
        )
    steps = ", ".join(f"{count} at step {step}" for step, count in sorted(run.steps.items()))
    return [replace(row, note=f"{steps}{'; ' * bool(row.note)}{row.note}")]


class Killer:
    """Runs that are killed, and one that is not; steps: those done at the kills."""

    def __init__(self, place: Path):
        self.place, self.steps = place, Counter[int]()
        self.command = [*prepare(place, steps=5), *SETTINGS]

    def cases(self, kills: int) -> Iterator[Case]:
        self.forks, self.standing = adopting_forks()
        for name in ("first", "whole"):  # the first one fills the caches of the system
            folder, began = self.place / name, time.monotonic()
            if wrong := self.end(folder):
                raise RuntimeError(wrong)
        seconds = time.monotonic() - began
        print(f"a run takes {seconds:.1f} s", flush=True)
        whole = fingerprint(folder)
        for number in range(kills):
            case = self.case(number, seconds, whole)
            print(f"{number + 1} of {kills}: {case[1] or 'equal'}", flush=True)
            yield case

    def case(self, number: int, seconds: float, whole: dict[str, str]) -> Case:
        """Kill a rank of a run, and let the same command end it."""
        random = np.random.default_rng([SEED, number])
        folder, rank = self.place / f"run_{number}", number % RANKS
        for _ in range(TRIES):
            run = self.forks.start(self.command, folder)
            run.join(random.uniform(0.1, 1) * seconds)
            if run.is_alive() and rank_pid(run.pid or 0, rank) is not None:
                break
            run.kill()
            run.join()
        else:
            return False, f"run {number}: no kill struck"
        metrics = folder / "metrics.jsonl"
        self.steps[metrics.read_bytes().count(b"\n") - 1 if metrics.exists() else -1] += 1
        wrong = kill_rank(run.pid or 0, rank, END_S)
        run.join()
        wrong = wrong or self.end(folder) or differs(whole, fingerprint(folder))
        return True, wrong and f"run {number}: {wrong}"

    def end(self, folder: Path) -> str:
        """Let the command end a run; return what is wrong with it, or left behind."""
        return ended(self.forks.start(self.command, folder), folder) or left(self.standing, folder)


def rank_pid(driver: int, rank: int) -> int | None:
    """The pid of a rank of a run, by its rank 0; None if it has not begun or has ended."""
    if rank == 0:
        return driver
    for process in descendants(driver):
        with suppress(OSError):
            environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            if process.parent == driver and f"RANK={rank}".encode() in environment:
                return process.pid
    return None


def kill_rank(driver: int, rank: int, end_s: float) -> str:
    """Kill a rank of a run of two with SIGKILL; return what is wrong with the end of the other,
    which has end_s for it. driver: the pid of rank 0."""
    pids = {n: pid for n in (0, 1) if (pid := rank_pid(driver, n)) is not None}
    if rank not in pids:
        return f"rank {rank} was not there"
    os.kill(pids[rank], signal.SIGKILL)
    until = time.monotonic() + end_s
    while alive := [n for n, pid in pids.items() if started_at(pid)]:
        if time.monotonic() > until:
            return f"ranks {alive} live {end_s:g} s after rank {rank} was killed"
        time.sleep(0.05)
    return ""


if __name__ == "__main__":
    for result in section(int(sys.argv[1])):
        print(result)
