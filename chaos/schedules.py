"""Chaos for schedules: sleeping workers, and other numbers of them, must not change a bit; and what
order costs.

sleeps      async runs whose workers sleep between passes (faulty_worker.py), and are stopped and
            go on at random
workers     the same run inline, with 1, 2 and 4 workers; and with 1, then 4, then 2, ended by
            SIGTERM and kill -9
cost        the same work against a queue that trains what ends first (unordered.py), in
            alternating rounds

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

from chaos.faulty_worker import SLEEP_S, faulty_hosts
from chaos.kills import HANG_S, adopting_forks, differs, ended, left
from chaos.results import Case, Result, tally
from chaos.unordered import measure_ordered, measure_unordered
from tandem.rollout_workers.pool import Workers
from tests.support.runs import fingerprint, output, prepare

SLEEPING = 5  # runs of each kind
ROUNDS = 3  # of ordered and unordered; the median counts
MOST_RATIO = 1.10  # ordered / unordered
WORKERS = (1, 2, 4)
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
# Of whole episodes the longest of a step hold their worker, and the other one goes on with the next
# step.
COST_SCHEDULES = {
    "partial rollouts": ["rollout.token_budget=12"],
    "whole episodes": ["rollout.workers=2"],
}


def section(sleeping: int = SLEEPING, rounds: int = ROUNDS) -> list[Result]:
    with tempfile.TemporaryDirectory() as place:
        schedules = Schedules(Path(place))
        return [
            tally(
                "workers that sleep and stop at random: the same bits",
                schedules.sleeping(sleeping),
                at_least=sleeping * len(KINDS),
            ),
            tally(
                f"inline, and with {WORKERS} workers: the same bits",
                schedules.worker_counts(),
                at_least=len(WORKERS),
            ),
            tally(
                "1 -> 4 -> 2 workers in a run, ended by SIGTERM and by kill -9: the same bits",
                schedules.changing_workers(),
                at_least=2,
            ),
            *(schedules.cost(name, rounds) for name in COST_SCHEDULES),
        ]


@dataclass
class Schedules:
    """Runs of the same command on other schedules, in a folder."""

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
        """Make a run to its end; return what is wrong with it."""
        start, folder = time.monotonic(), self.place / f"{kind} {name}"
        wrong = ended(
            self.forks.start([*self.commands[kind], *changes], folder, first, *args), folder
        )
        print(f"{kind} {name}, {time.monotonic() - start:.0f} s: {wrong or 'ended'}", flush=True)
        return wrong or left(self.standing, folder)

    def differs(self, kind: str, name: str) -> str:
        return differs(self.expected[kind], fingerprint(self.place / f"{kind} {name}"))

    def sleeping(self, runs: int) -> Iterator[Case]:
        """Make runs with other sleeps each; all must equal the inline run."""
        for kind, number in product(KINDS, range(runs)):
            stops, name = self.place / "stops", f"sleeping {number}"
            stops.write_bytes(b"")
            wrong = self.finish(
                kind,
                name,
                "rollout.workers=2",
                *THREADS[number % 3],
                first=use_disturbed_workers,
                args=(number, str(stops)),
            )
            yield bool(stops.stat().st_size), wrong or self.differs(kind, name)

    def worker_counts(self) -> Iterator[Case]:
        for number, count in enumerate(WORKERS):
            name = f"with {count}"
            wrong = self.finish(KINDS[0], name, f"rollout.workers={count}", *THREADS[number])
            yield True, wrong or self.differs(KINDS[0], name)

    def changing_workers(self) -> Iterator[Case]:
        """End a run twice, at random rows of the metrics, the ends in either order."""
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
        """Start a run and signal it at that row of its metrics; return whether it still ran."""
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
        """Measure ordered and unordered in turns, for the same work."""
        start, ratios, rounds_text = time.perf_counter(), list[float](), list[str]()
        for number in range(rounds):
            order = [measure_ordered, measure_unordered]
            pair = order if number % 2 else order[::-1]
            seen = {first: self.timed(name, first) for first in pair}
            (ordered, tokens), (unordered, others) = seen[measure_ordered], seen[measure_unordered]
            ratios.append(ordered / tokens / (unordered / others))
            rounds_text.append(
                f"{ordered:.2f} s for {tokens:,} tokens, {unordered:.2f} s for {others:,}"
            )
        ratio = statistics.median(ratios)
        each = ", ".join(f"{r:.3f}" for r in sorted(ratios))
        note = (
            f"seconds a token, ordered / unordered: median {ratio:.3f} of {each} "
            f"({'; '.join(rounds_text)})"
        )
        return Result(
            what=f"ordered at most {MOST_RATIO:.2f} times the time of an unordered queue: {name}",
            injected=rounds,
            witnessed=rounds,
            survived=int(ratio <= MOST_RATIO),
            expected=1,
            seconds=time.perf_counter() - start,
            note=note,
        )

    def timed(self, name: str, first: Any) -> tuple[float, int]:
        """Measure (seconds, tokens) of a run with sleeping workers; unordered ones never pause."""
        inputs, folder, file = self.place / "cost", self.place / "timed", self.place / "seconds"
        inputs.mkdir(exist_ok=True)
        pauses = first is not measure_unordered
        changes = [c for c in COST_SCHEDULES[name] if pauses or "token_budget" not in c]
        command = [*prepare(inputs, steps=COST_STEPS, command="one-step-off"), *COST, *changes]
        if wrong := ended(
            self.forks.start(command, folder, use_sleeping_workers, first, str(file)), folder
        ):
            raise RuntimeError(wrong)
        shutil.rmtree(folder)
        seen = json.loads(file.read_text())
        print(
            f"{name}, {first.__name__}: {seen['seconds']:.2f} s, {seen['tokens']} tokens",
            flush=True,
        )
        return seen["seconds"], seen["tokens"]


# ---- in the driver


def use_disturbed_workers(seed: int, stops: str) -> None:
    """Give the run workers that sleep between passes, and are stopped and go on."""
    from tandem.jobs import worker_rollouts

    os.environ[SLEEP_S] = str(PASS_S)
    Disturbed.random, Disturbed.stops = random.Random(seed), Path(stops)
    worker_rollouts.LocalHosts = faulty_hosts  # type: ignore[assignment]
    worker_rollouts.Workers = Disturbed  # type: ignore[attr-defined, misc]


def use_sleeping_workers(measure: Any, file: str) -> None:
    """Give the run workers that sleep between passes, and measure it."""
    from tandem.jobs import worker_rollouts

    os.environ[SLEEP_S] = str(PASS_S)
    worker_rollouts.LocalHosts = faulty_hosts  # type: ignore[assignment]
    measure(file)


class Disturbed(Workers):
    """Workers that sleep, and a thread that stops one after the other for a while.

    stops: a file that gets a byte for each stop.
    """

    random: random.Random
    stops: Path

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        threading.Thread(target=self._disturb, daemon=True).start()

    def _disturb(self) -> None:
        while not self._over:
            time.sleep(self.random.uniform(*GAP_S))
            up = [
                worker
                for worker in list(self._workers.values())
                if worker.state in ("idle", "syncing", "serving")
            ]
            if up and not self._over:
                self._stop(self.random.choice(up).pid)

    def _stop(self, pid: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(self.random.uniform(*STOP_S))
            os.kill(pid, signal.SIGCONT)
            with self.stops.open("ab") as file:
                file.write(b".")


if __name__ == "__main__":
    for result in section(int(sys.argv[1]), int(sys.argv[2])):
        print(result)
