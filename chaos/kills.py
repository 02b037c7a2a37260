"""Chaos for whole runs: kill -9 of the driver at random moments, then the same command again; and
the files compared byte by byte.

    lane (adopts orphans)                         driver: a fork of a process with Tandem imported
    ---------------------                         ------------------------------------------------
    an undisturbed run gives bytes and seconds    leads a session; SIGUSR2 writes its stacks
    at a moment uniform over these seconds:
      SIGUSR2, stacks: the phases under way
      SIGKILL, to the driver or to its group      its workers and helper processes end by themselves
    within LEAVE_S no process of it lives
    the same command; every other run is killed a second time; then it ends
    same bytes, nothing half written; begun with one thread count, and gone on with another one

Right is: weights, optimizer, metrics, ledger, every file of episodes and the exported model are
those of the undisturbed run. A kill counts when the exit code of a process that was alive is -9.

    python -m chaos.kills 2      two runs of each kind
"""

import ctypes
import faulthandler
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess as Fork
from pathlib import Path

import numpy as np

from chaos.results import Case, Result, tally
from tandem.runtime.processes import ZOMBIE, Process, catches, descendants
from tests.support.runs import Forks, end_with_parent, fingerprint, output, prepare

ROOT = Path(__file__).parents[1]
RUNS = 25  # killed, of each kind
LANES = 1  # kinds at a time; a run has as many threads as there are cores
SEED = 0
STEPS = 5
SHORT = ["run.save_every=2", "eval.every=3"]
# in turns, where a run begins and where it goes on
THREADS = ([], ["run.threads=1"], ["run.threads=2"])
LEAVE_S = 5.0  # for what a killed driver leaves to end by itself
HANG_S = 300.0  # a run of seconds that takes so long hangs
TRIES = 8  # moments drawn until one strikes a live run

# What is killed: (kind of tests/support/runs.py, overrides), one after the other.
MIXES: dict[str, list[tuple[str, list[str]]]] = {
    "one-step-off": [("one-step-off", []), ("one-step-off", ["rl.correction=decoupled"])],
    "partial rollouts": [("partial", [])],
    "sync": [("train", [])],
    "multi-turn": [("multi-turn", []), ("multi-turn", []), ("multi-turn, two steps off", [])],
}
# A thread is in the first phase of which its stack has a line; one that is in none waits, or is not
# the run's.
PHASES = (
    ("save", r'checkpoint\.py", line \d+ in (run|_snapshot)'),
    ("journal written", r"in write_episodes|journal\.py\", line \d+ in _write"),
    ("journal read", r'journal\.py", line \d+ in (read|_read|clean)'),
    ("eval", r"rollout/evaluate\.py"),
    ("sync", r"in (publish|sync_to|apply)\b"),
    ("learn", r"tandem/trainer/\w+\.py|in learn_step\b"),
    ("metrics row", r'train_loop\.py", line \d+ in _log\b'),
    ("resume", r"in (resumable|load_checkpoint)\b"),
    ("rollout", r"tandem/rollout/\w+\.py"),
    ("export", r"in export\w*"),
    ("start", r"tandem/(jobs|config)/\w+\.py"),
)
_PR_SET_CHILD_SUBREAPER = 36


def section(runs: int = RUNS, lanes: int = LANES) -> list[Result]:
    """Kill runs of every mix; one lane is this process, which then adopts orphans."""
    if lanes == 1:
        return [lane(name, runs) for name in MIXES]
    with ProcessPoolExecutor(
        lanes, multiprocessing.get_context("fork"), initializer=end_with_parent
    ) as pool:
        return list(pool.map(partial(lane, runs=runs), MIXES))


def lane(name: str, runs: int) -> Result:
    """Make all runs of a mix, one after the other."""
    with tempfile.TemporaryDirectory() as place:
        killer = Killer(name, Path(place))
        row = tally(
            f"kill -9 of the driver at a random moment: {name}", killer.cases(runs), at_least=runs
        )
    return replace(row, note=f"{killer.summary()}{'; ' * bool(row.note)}{row.note}")


@dataclass(frozen=True, kw_only=True)
class Undisturbed:
    """An undisturbed run: its command, its bytes, and how long it took."""

    command: list[str]
    bytes: dict[str, str]
    seconds: float


@dataclass
class Killer:
    """The runs of one mix.

    phases: how often each was under way when a driver was killed; second_kills: of a run.
    """

    name: str
    place: Path
    kills: int = 0
    second_kills: int = 0
    phases: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.forks, self.standing = adopting_forks()

    def cases(self, runs: int) -> Iterator[Case]:
        mix = MIXES[self.name]
        undisturbed = [
            self.undisturbed(number, kind, changes) for number, (kind, changes) in enumerate(mix)
        ]
        for number in range(runs):
            start = time.monotonic()
            fired, wrong = self.case(number, undisturbed[number % len(mix)])
            seconds = time.monotonic() - start
            print(
                f"{self.name} {number + 1} of {runs}, {seconds:.0f} s: {wrong or 'equal'}",
                flush=True,
            )
            yield fired, wrong and f"{self.name}, run {number}: {wrong}"

    def summary(self) -> str:
        under_way = ", ".join(f"{phase} {count}" for phase, count in self.phases.most_common())
        return (
            f"{self.kills} kills, {self.second_kills} of them second ones; under way: {under_way}"
        )

    def undisturbed(self, number: int, kind: str, changes: Sequence[str]) -> Undisturbed:
        """Run twice; the first run fills the caches of the system."""
        inputs = self.place / f"inputs_{number}"
        inputs.mkdir()
        command = [*prepare(inputs, steps=STEPS, command=kind), *SHORT, *changes]
        for folder in (inputs / "first", inputs / "whole"):
            start = time.monotonic()
            wrong = ended(self.forks.start(command, folder), folder) or left(self.standing, folder)
            if wrong:
                raise RuntimeError(f"{kind}, undisturbed: {wrong}")
        seconds = time.monotonic() - start
        print(f"{self.name}: {kind} {' '.join(changes)} takes {seconds:.1f} s", flush=True)
        return Undisturbed(command=command, bytes=fingerprint(folder), seconds=seconds)

    def case(self, number: int, whole: Undisturbed) -> Case:
        """Kill a run once or twice, then let it end."""
        random = np.random.default_rng([SEED, *self.name.encode(), number])
        folder = self.place / f"run_{number}"
        try:
            first, then = (
                replace(whole, command=[*whole.command, *THREADS[(number + n) % 3]]) for n in (0, 1)
            )
            for _ in range(TRIES):
                if self.kill(
                    first, folder, random.uniform(0, whole.seconds), group=number % 2 == 0
                ):
                    break
                shutil.rmtree(folder)  # it had ended before
            else:
                return False, f"no kill within {whole.seconds:.1f} s struck a live run"
            wrong = left(self.standing, None)
            if number % 2 and not wrong:
                self.second_kills += self.kill(
                    then, folder, random.uniform(0, whole.seconds), group=number % 4 == 1
                )
                wrong = left(self.standing, None)
            wrong = wrong or ended(self.forks.start(then.command, folder), folder)
            return True, wrong or left(self.standing, folder) or differs(
                whole.bytes, fingerprint(folder)
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def kill(self, whole: Undisturbed, folder: Path, after_s: float, group: bool) -> bool:
        """Start a run and kill it after so many seconds; False if it ended before."""
        stacks = self.place / "stacks"
        stacks.write_text("")
        run = self.forks.start(whole.command, folder, _lead_session, str(stacks))
        run.join(after_s)
        if run.exitcode is not None:
            if run.exitcode != 0:
                raise RuntimeError(
                    f"{self.name}: exit code {run.exitcode} before it was killed\n"
                    f"{output(folder)[-2000:]}"
                )
            return False
        leads = _ask_for_stacks(run.pid or 0, stacks)
        with suppress(ProcessLookupError):
            (os.killpg if group and leads else os.kill)(run.pid or 0, signal.SIGKILL)
        run.join(HANG_S)
        if run.exitcode != -signal.SIGKILL:
            return False
        self.kills += 1
        self.phases.update(phases_of(stacks.read_text()))
        return True


def left(standing: Sequence[int], folder: Path | None) -> str:
    """Describe what is left: processes besides those of before, and half files of an ended run."""
    until = time.monotonic() + LEAVE_S
    while (alive := _alive(standing)) and time.monotonic() < until:
        time.sleep(0.02)
    if alive:
        processes = "; ".join(process.describe().strip() for process in alive)
        return f"alive after {LEAVE_S:g} s: {processes}"
    files = (
        []
        if folder is None
        else [path for path in folder.rglob("*") if re.match(r"\.tmp|part_", path.name)]
    )
    return f"left: {', '.join(path.name for path in files)}" * bool(files)


def _alive(standing: Sequence[int]) -> list[Process]:
    ours = descendants(os.getpid(), standing)
    for process in ours:
        if process.state == ZOMBIE and process.parent == os.getpid():
            with suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)
    return [process for process in ours if process.state != ZOMBIE]


def adopting_forks() -> tuple[Forks, list[int]]:
    """Start a fork server; returns it and the processes that stay.

    Orphans of a run become this process's children.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.environ |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    forks = Forks()
    forkserver.ensure_running()
    return forks, [process.pid for process in descendants(os.getpid())]


def differs(expected: dict[str, str], found: dict[str, str]) -> str:
    names = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
    return (
        f"other bytes than the undisturbed run's: {', '.join(sorted(names)[:6])}" if names else ""
    )


def phases_of(stacks: str) -> set[str]:
    """Name the phases of a process by its stacks, innermost call first; "start" without any."""
    found = set()
    for stack in re.split(r"\n\s*\n", stacks):
        found |= {next((phase for phase, line in PHASES if re.search(line, stack)), "")}
    return found - {""} or {"elsewhere" if stacks else "start"}


def _lead_session(stacks: str) -> None:
    """Prepare the driver: it leads a session, and SIGUSR2 writes its stacks to the file."""
    os.setsid()
    file = os.open(stacks, os.O_WRONLY | os.O_APPEND)
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)


def _ask_for_stacks(pid: int, stacks: Path) -> bool:
    """Have the stacks written, in about a millisecond; False if it does not lead a session yet."""
    if not catches(pid, signal.SIGUSR2):
        return False
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR2)
    until = time.monotonic() + 0.2
    while not stacks.stat().st_size and time.monotonic() < until:
        time.sleep(0.001)
    time.sleep(0.002)
    return True


def ended(run: Fork, folder: Path) -> str:
    """Wait for the end of a run that nobody disturbs; return what is wrong with it."""
    run.join(HANG_S)
    if run.exitcode == 0:
        return ""
    run.kill()
    problem = "it hangs" if run.exitcode is None else f"exit code {run.exitcode}"
    return f"{problem}: {output(folder)[-1500:]}"


if __name__ == "__main__":
    for result in section(int(sys.argv[1]), lanes=1):
        print(result)
