"""Runs that are interrupted: Ctrl-C and SIGTERM at random moments, a second one, a second run on a
folder, a killed one.

Right is: exit code 130 within EXIT_S, nothing left behind (no process, so no port; no temporary
file, no shared memory, no half file in the run folder), the newest checkpoint is the last step in
metrics.jsonl (or the one after it, where its evaluation was cut), and the same command
ends with the bits of a run that was left alone. A signal that comes before the first step is done
may find no checkpoint.

Runs are forks of a process that has imported Tandem, each a session of its own as behind a
terminal: Ctrl-C goes to all of it, SIGTERM to the run alone. Rollout workers and reward workers are
processes of their own, as always.
"""

import multiprocessing
import os
import random
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

from chaos.leftovers import processes_with, shared_memory
from chaos.results import Case, Result, tally
from tandem.run_folder.checkpoint import find_damage
from tandem.run_folder.metrics import read_metrics
from tandem.runtime.signals import AGAIN_S, EXIT_S
from tests.support.faults import memory_folder
from tests.support.runs import fingerprint, prepare

SIGNALS = 20  # of each kind of run
TWO_RUNS = 20
TWO_SIGNALS = 20
STEPS = 12
GIVE_UP_S = 300.0
ENDS_S = 30.0  # for what ends by itself with its parent, on a busy machine
# from the second signal to the end, on a busy machine; without it, this run needs EXIT_S
AT_ONCE_S = 8.0
MARK = "TANDEM_LEAVING"  # in the environment of all that a run starts
# Evaluations take long enough to be struck, too.
EVAL = ["eval.samples=16"]
AHEAD = ["rollout.staleness=1", "rollout.workers=1"]
KINDS = {  # name: what of kills.KINDS, and more overrides
    "sync": ("train", EVAL),
    "async with a worker": ("train", [*AHEAD, "rl.correction=decoupled"]),
    "multi-turn": ("multi-turn", []),
}
# A tool that cannot be interrupted and never answers, in a thread that the interpreter waits for at
# its own end.
HANGING = """
import asyncio, threading
from tandem.types import Env

class Chat(Env):
    async def step(self, text):
        threading.Thread(target=threading.Event().wait, daemon=False).start()
        print("hanging", flush=True)
        await asyncio.sleep(600)
"""


def section(
    signals: int = SIGNALS,
    two_runs: int = TWO_RUNS,
    two_signals: int = TWO_SIGNALS,
    kinds: tuple[str, ...] = tuple(KINDS),
) -> list[Result]:
    """Interrupt runs of each kind; smaller numbers are for trials."""
    rng, results = random.Random(6), []
    with memory_folder() as folder:
        for kind in kinds:
            (place := folder / kind.replace(" ", "-")).mkdir()
            runs = InterruptedRuns(place, kind)
            for what, count, cases in (
                ("Ctrl-C or SIGTERM at a random moment", signals, runs.signalled(signals, rng)),
                (
                    "a second run on the folder; then kill -9, and the lock is taken over",
                    two_runs,
                    runs.doubled(two_runs),
                ),
                (
                    "a second Ctrl-C while the first hangs",
                    two_signals,
                    runs.signalled_twice(two_signals),
                ),
            ):
                row = tally(f"{kind}: {what}", cases, at_least=count)
                results.append(runs.with_notes(row))
                print(results[-1], flush=True)
    return results


class Started:
    """A run, its output, and its folder for temporary files. Nothing of it may outlive it."""

    def __init__(self, command: list[str], folder: Path):
        self.folder, self.mark = folder, f"{folder}/{time.monotonic_ns()}"
        self.temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix="temporary-"))
        self.out = self.temporary.with_suffix(".out")
        self.shared = shared_memory()
        self.process: BaseProcess = _context().Process(
            target=_run, args=(command, folder, self.out, self.temporary, self.mark)
        )
        self.process.start()

    @property
    def rows(self) -> int:
        return _rows(self.folder)

    def output(self) -> str:
        return self.out.read_text(errors="replace") if self.out.exists() else ""

    def send(self, number: int) -> None:
        """Send SIGINT to the session, as a terminal does, and another signal to the process."""
        with suppress(ProcessLookupError):
            (os.killpg if number == signal.SIGINT else os.kill)(self._pid, number)

    def wait_for(self, holds: Callable[[], bool]) -> bool:
        """Wait for a condition; False if the run ends before."""
        until = time.monotonic() + GIVE_UP_S
        while not holds() and self.process.is_alive() and time.monotonic() < until:
            time.sleep(0.005)
        return self.process.is_alive() and holds()

    def end(self) -> int | None:
        self.process.join(GIVE_UP_S)
        self.process.kill()
        self.process.join()
        return self.process.exitcode

    def left(self, killed: bool = False) -> list[str]:
        """List what is there a while after the end, and kill processes.

        A half file of a killed run is left to the next start.
        """
        until = time.monotonic() + ENDS_S
        while True:  # the semaphores of other tests come and go
            alive, shared = processes_with(f"{MARK}={self.mark}"), shared_memory() - self.shared
            if not (alive or shared) or time.monotonic() > until:
                break
            time.sleep(0.02)
        for process in alive:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        halves = [] if killed else list(self.folder.rglob(".tmp-*"))
        files = [path.name for path in [*self.temporary.iterdir(), *halves]]
        return [*(f"process {process.pid}" for process in alive), *files, *sorted(shared)]

    @property
    def _pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid


class InterruptedRuns:
    """Runs of one kind, interrupted in every way. right: the bits of an undisturbed run."""

    def __init__(self, folder: Path, kind: str, steps: int = STEPS):
        self.folder = folder
        name, changes = KINDS[kind]
        self.command = [*prepare(folder, steps=steps, command=name), *changes]
        (folder / "hanging.py").write_text(HANGING)
        start = time.monotonic()
        inline = ["rollout.workers=0"] if AHEAD[0] in changes else []  # the same bits, sooner
        whole = Started([*self.command, *inline], folder / "whole")
        code = whole.end()
        left = whole.left()
        assert code == 0 and not left, f"exit code {code}, left {left}\n{whole.output()}"
        self.seconds, self.right = time.monotonic() - start, fingerprint(folder / "whole")
        self._number, self._notes = 0, dict[str, float]()

    def with_notes(self, result: Result) -> Result:
        notes, self._notes = (
            "; ".join(f"{name} {value:g}" for name, value in self._notes.items()),
            {},
        )
        fields = {name: getattr(result, name) for name in Result.__slots__}
        return Result(**{**fields, "note": "; ".join(filter(None, [notes, result.note]))})

    # ---- one signal

    def signalled(self, count: int, rng: random.Random) -> Iterator[Case]:
        for number in range(count):
            yield self.one_signal((signal.SIGINT, signal.SIGTERM)[number % 2], rng)

    def one_signal(self, number: int, rng: random.Random) -> Case:
        """Signal a run at a random moment; if it is over before, try an earlier moment."""
        moment = rng.uniform(0.1, 0.9) * self.seconds
        for attempt in range(5):
            run = Started(self.command, self._next())
            until = time.monotonic() + moment * 0.7**attempt
            in_time = run.wait_for(partial(_is_past, until))
            if in_time:
                return self._after(run, number)
            run.end()
            run.left()
        return False, "the run was always over before its signal"

    def signal_after(self, rows: int, number: int) -> Case:
        """Signal a run once it has that many rows."""
        run = Started(self.command, self._next())
        if not run.wait_for(lambda: run.rows >= rows):
            return False, f"over before it had {rows} rows: {run.output()[-1500:]}"
        return self._after(run, number)

    def _after(self, run: Started, number: int) -> Case:
        sent = time.monotonic()
        run.send(number)
        code, seconds = run.end(), time.monotonic() - sent
        if code == 0:  # it came after the last step's end, where nothing is left to interrupt
            self._count("came too late")
            return True, "" if self._same(
                run
            ) and not run.left() else f"{run.folder}: over, and wrong"
        rows, saved = run.rows, newest(run.folder)
        self._count("before the first step", rows == 0)
        self._count("in an evaluation", 0 < rows == saved)
        self._count("steps lost", max(0, rows - 1 - max(saved, 0)))
        self._notes["longest exit, s"] = round(
            max(self._notes.get("longest exit, s", 0.0), seconds), 1
        )
        problems = [
            f"exit code {code}: {run.output()[-1500:]}" * (code != 130),
            f"{seconds:.1f} s" * (seconds > EXIT_S + 1),
            left_by(run),
            ""
            if saved in (rows - 1, rows) or (rows <= 1 and saved <= 0)
            else f"checkpoint {saved} after {rows} rows",
            self._resumed(run.folder),
        ]
        return True, _case(f"{signal.Signals(number).name} after {rows} rows", problems)

    def _resumed(self, folder: Path) -> str:
        run = Started(self.command, folder)
        if (code := run.end()) != 0:
            return f"the same command ended with {code}: {run.output()[-1500:]}"
        if halves := [path.name for path in folder.rglob(".tmp-*")]:
            return f"half files are left after a resume: {halves}"
        return (
            ""
            if self._same(run)
            else f"resumed, other bits: {different(fingerprint(folder), self.right)}"
        )

    def _same(self, run: Started) -> bool:
        return fingerprint(run.folder) == self.right

    # ---- two runs, and a kill

    def doubled(self, count: int) -> Iterator[Case]:
        return (self.one_double() for _ in range(count))

    def one_double(self) -> Case:
        first = Started(self.command, self._next())
        if not first.wait_for(lambda: first.rows > 2):
            return False, f"the first run ended: {first.output()[-1500:]}"
        # it holds its lock, and does not end before the second run has asked
        first.send(signal.SIGSTOP)
        second = Started(self.command, first.folder)
        code, told = second.end(), second.output()
        named = re.search(rf"the run folder is in use.*pid {first.process.pid} on", told, re.S)
        alive = first.process.is_alive()
        first.send(signal.SIGKILL)
        first.end()
        problems = [
            f"the second run ended with {code}" * (code != 2),
            f"it does not name the first, {first.process.pid}: {told[-1500:]}" * (not named),
            left_by(first, killed=True),
            left_by(second, killed=True),
            self._resumed(first.folder),
            "the lock was not taken over"
            * (
                f"took over the lock of a run that was killed: pid {first.process.pid}"
                not in self._log(first)
            ),
        ]
        return alive, _case("two runs", problems)

    def _log(self, run: Started) -> str:
        return (run.folder / "log.txt").read_text()

    # ---- two signals

    def signalled_twice(self, count: int) -> Iterator[Case]:
        return (
            self.two_signals((signal.SIGINT, signal.SIGTERM)[number % 2]) for number in range(count)
        )

    def two_signals(self, number: int) -> Case:
        """Signal twice a run that the first signal cannot end: a thread of the user's own hangs."""
        hanging = [f"env.name={self.folder / 'hanging.py'}:Chat", "reward.function=env"]
        run = Started([*self.command, *hanging], self._next())
        run.wait_for(lambda: "hanging" in run.output())
        run.send(number)
        time.sleep(10 * AGAIN_S)
        waiting = run.process.is_alive()
        sent = time.monotonic()
        run.send(number)
        code, seconds = run.end(), time.monotonic() - sent
        self._notes["longest exit, s"] = round(
            max(self._notes.get("longest exit, s", 0.0), seconds), 2
        )
        problems = [
            f"exit code {code}: {run.output()[-1500:]}" * (code != 130),
            f"{seconds:.1f} s" * (seconds > AT_ONCE_S),
            left_by(run),
        ]
        return waiting and "a second signal" in run.output(), _case("two signals", problems)

    def _next(self) -> Path:
        self._number += 1
        return self.folder / f"run-{self._number}"

    def _count(self, name: str, more: float = 1) -> None:
        if more:
            self._notes[name] = self._notes.get(name, 0) + more


def newest(folder: Path) -> int:
    """Read the step of the newest checkpoint, which must be undamaged; -1 if there is none."""
    paths = sorted((folder / "checkpoints").glob("step_*"))
    if paths and (damage := find_damage(paths[-1])):
        raise AssertionError(f"{paths[-1]}: {damage}")
    return int(paths[-1].name.removeprefix("step_")) if paths else -1


def _is_past(moment: float) -> bool:
    return time.monotonic() > moment


def left_by(run: Started, killed: bool = False) -> str:
    left = run.left(killed)
    return f"left {left}" if left else ""


def different(one: dict[str, str], other: dict[str, str]) -> list[str]:
    return sorted(name for name in {**one, **other} if one.get(name) != other.get(name))[:5]


def _case(what: str, problems: list[str]) -> str:
    wrong = "; ".join(filter(None, problems))
    return f"{what}: {wrong}" if wrong else ""


def _rows(folder: Path) -> int:
    return len(read_metrics(folder)) if (folder / "metrics.jsonl").exists() else 0


# ---- the process that is forked


def _context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    # what a run imports late, pandas by way of pyarrow among it; a module that is not there is
    # passed over
    late = [
        "transformers.models.qwen3.modeling_qwen3",
        "transformers.models.auto.modeling_auto",
        "pandas",
    ]
    context.set_forkserver_preload(["tandem.cli.train", *late])
    return context


def _run(command: list[str], folder: Path, out: Path, temporary: Path, mark: str) -> None:
    """Run the command line in a session of its own."""
    import sys

    from tandem.cli.main import run as entry

    os.setsid()
    with out.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update({MARK: mark, "TMPDIR": str(temporary), "HF_HUB_OFFLINE": "1"})
    tempfile.tempdir = None  # so that TMPDIR is looked up again
    sys.argv = ["tandem", *command[3:], f"run.folder={folder}"]
    entry()
