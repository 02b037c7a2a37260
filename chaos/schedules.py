"""Chaos for the order of things: sleeping workers, and other numbers of them, must not change a
bit; and what order costs.

asleep      an async run, whose workers sleep between passes (odd_worker.py) and are stopped and go on at random: five times
workers     the same run inline, with 1, 2 and 4 workers; and with 1, then 4, then 2, ended by SIGTERM and kill -9
the cost    the same work against a queue that trains what ends first (unordered.py), in alternating rounds

python -m chaos.schedules 2 1      two sleeping runs, one round of the cost
"""

import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from chaos.kills import HANG_S, adopting_forks, differs, ended, left
from chaos.odd_worker import COMMAND, SLEEP_S
from chaos.results import Case, Result, tally
from chaos.unordered import time_ordered, time_unordered
from tandem.engine.worker_pool.pool import Workers
from tests.support.runs import fingerprint, output, prepare

ASLEEP = 5  # runs of each kind
ROUNDS = 3  # of ordered and unordered; the median counts
MOST = 1.10  # ordered / unordered
COUNTS = (1, 2, 4)
KINDS = ("one-step-off", "partial")  # of tests/support/runs.py
SEED = 0
STEPS = 10
SHORT = ["run.save_every=2", "eval.every=5"]
THREADS = ([], ["run.threads=1"], ["run.threads=2"])  # in turns; the inline run has the default

PASS_S = 0.004  # a worker sleeps up to so long between two passes
STOP_S, GAP_S = (0.01, 0.3), (0.05, 0.4)  # one is stopped for, and after

# The cost: texts of very different lengths, so that some groups end long before others, and updates
# about as long as rollouts.
COST_STEPS = 30
COST = [
    "run.save_every=1000",
    "eval.every=0",
    "run.threads=1",
    "rollout.workers=1",
    "rollout.max_new_tokens=48",
    'rollout.stop=["a", "e", "1"]',
    "train.learning_rate=1e-9",
    "rl.max_flat_steps=0",
]
# Whole episodes have no bar: the longest of a step have the worker to themselves, which partial
# rollouts are there to mend.
COST_SCHEDULES = {"partial rollouts": ["rollout.token_budget=12"], "whole episodes, no bar": []}


def section(asleep: int = ASLEEP, rounds: int = ROUNDS) -> list[Result]:
    with tempfile.TemporaryDirectory() as place:
        player = RolloutRunner(Path(place))
        return [
            tally(
                "workers that sleep and stop at random: the same bits",
                player.asleep(asleep),
                at_least=asleep * len(KINDS),
            ),
            tally(
                f"inline, and with {COUNTS} workers: the same bits",
                player.counts(),
                at_least=len(COUNTS),
            ),
            tally(
                "1 -> 4 -> 2 workers in a run, ended by SIGTERM and by kill -9: the same bits",
                player.changes(),
                at_least=2,
            ),
            *(player.cost(name, rounds) for name in COST_SCHEDULES),
        ]


@dataclass
class RolloutRunner:
    place: Path

    def __post_init__(self) -> None:
        self.forks, self.standing = adopting_forks()
        self.random = np.random.default_rng(SEED)
        self.commands: dict[str, list[str]] = {}
        self.expected: dict[str, dict[str, str]] = {}
        for kind in KINDS:
            inputs = self.place / f"inputs {kind}"
            inputs.mkdir()
            self.commands[kind] = [*prepare(inputs, steps=STEPS, command=kind), *SHORT]
            if wrong := self.finish(kind, "inline", "rollout.workers=0"):
                raise RuntimeError(wrong)
            self.expected[kind] = fingerprint(self.place / f"{kind} inline")

    def finish(
        self, kind: str, name: str, *changes: str, first: Any = None, args: tuple[Any, ...] = ()
    ) -> str:
        """A run to its end; what is wrong with it."""
        start, folder = time.monotonic(), self.place / f"{kind} {name}"
        wrong = ended(
            self.forks.start([*self.commands[kind], *changes], folder, first, *args), folder
        )
        print(f"{kind} {name}, {time.monotonic() - start:.0f} s: {wrong or 'ended'}", flush=True)
        return wrong or left(self.standing, folder)

    def differs(self, kind: str, name: str) -> str:
        return differs(self.expected[kind], fingerprint(self.place / f"{kind} {name}"))

    def asleep(self, runs: int) -> Iterator[Case]:
        """Each with other sleeps, and the inline run's equal; so they are each other's."""
        for kind, number in product(KINDS, range(runs)):
            told, name = self.place / "told", f"asleep {number}"
            told.write_bytes(b"")
            wrong = self.finish(
                kind,
                name,
                "rollout.workers=2",
                *THREADS[number % 3],
                first=be_disturbed,
                args=(number, str(told)),
            )
            yield bool(told.stat().st_size), wrong or self.differs(kind, name)

    def counts(self) -> Iterator[Case]:
        for number, count in enumerate(COUNTS):
            name = f"with {count}"
            wrong = self.finish(KINDS[0], name, f"rollout.workers={count}", *THREADS[number])
            yield True, wrong or self.differs(KINDS[0], name)

    def changes(self) -> Iterator[Case]:
        """Ended twice, at random rows of the metrics; the ends in either order."""
        for kind, ends in zip(
            KINDS, [(signal.SIGTERM, signal.SIGKILL), (signal.SIGKILL, signal.SIGTERM)], strict=True
        ):
            fired = True
            rows = sorted(self.random.choice(np.arange(2, STEPS), 2, replace=False).tolist())
            for number, (count, row, end) in enumerate(zip((1, 4), rows, ends, strict=True)):
                fired = (
                    self.end_at(row, end, kind, f"rollout.workers={count}", *THREADS[number])
                    and fired
                )
            wrong = self.finish(kind, "changing", "rollout.workers=2")
            yield fired, wrong or self.differs(kind, "changing")

    def end_at(self, row: int, number: int, kind: str, *changes: str) -> bool:
        """Start it, and signal it when its metrics have that many rows; whether it was under
        way."""
        folder = self.place / f"{kind} changing"
        run, metrics = (
            self.forks.start([*self.commands[kind], *changes], folder),
            folder / "metrics.jsonl",
        )
        until = time.monotonic() + HANG_S
        while run.is_alive() and time.monotonic() < until:
            if metrics.exists() and metrics.read_bytes().count(b"\n") >= row:
                os.kill(run.pid or 0, number)
                break
            time.sleep(0.002)
        run.join(HANG_S)
        if run.exitcode not in (-signal.SIGKILL, 130):
            run.kill()
            print(f"exit code {run.exitcode}: {output(folder)[-1500:]}", flush=True)
        return run.exitcode == (-signal.SIGKILL if number == signal.SIGKILL else 130)

    def cost(self, name: str, rounds: int) -> Result:
        """Ordered and unordered in turns; equal work is a check on the comparison."""
        start, ratios, told = time.perf_counter(), list[float](), list[str]()
        for number in range(rounds):
            pair = [time_ordered, time_unordered] if number % 2 else [time_unordered, time_ordered]
            seen = {first: self.timed(name, first) for first in pair}
            (ordered, tokens), (unordered, others) = seen[time_ordered], seen[time_unordered]
            ratios.append(ordered / tokens / (unordered / others))
            told.append(f"{ordered:.2f} s for {tokens:,} tokens, {unordered:.2f} s for {others:,}")
        ratio = statistics.median(ratios)
        each = ", ".join(f"{r:.3f}" for r in sorted(ratios))
        note = f"seconds a token, ordered / unordered: median {ratio:.3f} of {each} ({'; '.join(told)})"
        return Result(
            what=f"ordered at most {MOST:.2f} times the time of an unordered queue: {name}",
            injected=rounds,
            witnessed=rounds,
            survived=int(ratio <= MOST),
            expected=int("no bar" not in name),
            seconds=time.perf_counter() - start,
            note=note,
        )

    def timed(self, name: str, first: Any) -> tuple[float, int]:
        """(seconds, tokens) of a run, both with sleeping workers. An unordered queue has whole
        episodes always."""
        inputs, folder, told = self.place / "cost", self.place / "timed", self.place / "seconds"
        inputs.mkdir(exist_ok=True)
        changes = [] if first is time_unordered else COST_SCHEDULES[name]
        command = [*prepare(inputs, steps=COST_STEPS, command="one-step-off"), *COST, *changes]
        if wrong := ended(
            self.forks.start(command, folder, timed_asleep, first, str(told)), folder
        ):
            raise RuntimeError(wrong)
        shutil.rmtree(folder)
        seen = json.loads(told.read_text())
        print(
            f"{name}, {first.__name__}: {seen['seconds']:.2f} s, {seen['tokens']} tokens",
            flush=True,
        )
        return seen["seconds"], seen["tokens"]


# In the driver
# -------------------------------------------------------------------------------------------------------


def be_disturbed(seed: int, told: str) -> None:
    """Before the run: its workers will sleep between passes, and be stopped and go on."""
    from tandem.jobs.commands import parts

    os.environ[SLEEP_S] = str(PASS_S)
    Disturbed.random, Disturbed.told = random.Random(seed), Path(told)
    parts.Workers = Disturbed  # type: ignore[attr-defined, misc]


def timed_asleep(first: Any, told: str) -> None:
    from tandem.jobs.commands import parts

    os.environ[SLEEP_S] = str(PASS_S)
    parts.Workers = Odd  # type: ignore[attr-defined, misc]
    first(told)


class Odd(Workers):
    """Workers by odd_worker.py."""

    def __init__(self, **how: Any):
        super().__init__(**{**how, "command": COMMAND})


class Disturbed(Odd):
    """And a thread that stops them for a while, one after the other; it writes a byte for each that
    was under way."""

    random: random.Random
    told: Path

    def __init__(self, **how: Any):
        super().__init__(**how)
        threading.Thread(target=self._disturb, daemon=True).start()

    def _disturb(self) -> None:
        while not self._closed:
            time.sleep(self.random.uniform(*GAP_S))
            up = [
                worker for worker in self.status() if worker.state in ("idle", "syncing", "serving")
            ]
            if up and not self._closed:
                self._stop(self.random.choice(up).pid)

    def _stop(self, pid: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(self.random.uniform(*STOP_S))
            os.kill(pid, signal.SIGCONT)
            with self.told.open("ab") as file:
                file.write(b".")


if __name__ == "__main__":
    for result in section(int(sys.argv[1]), int(sys.argv[2])):
        print(result)
