"""A long run under faults: every ~20 s something is killed, stopped, filled up or slowed down.

    python -m chaos.soak 90        that many seconds, for a trial; the section itself takes LENGTH_S

A real `tandem train`: multi-turn, dynamic sampling, staleness 1, two rollout workers, tools that
are slow and sometimes fail, in a folder on a small disk of its own. The harness draws the faults by
seed, starts the same command again when the driver has ended, and measures memory and descriptors
of driver and workers. For the last part of the run the driver is left alive, so that one of its
lives is long.

Right is: every fault fired and was got over; at least EFFECTIVE of the steps that were computed
count in the end (a step that was under way when the driver ended is one that was computed); memory
and descriptors of every long life are flat; and the weights, the metrics and the episodes of every
step are those of a run that nobody disturbed, made afterwards without workers and with quick tools,
which change no bit. Which texts a tool fails for is in the texts, so that both runs see it. A
reward worker that is killed costs the episode that it scores its reward, by contract; so here only
their template is killed.
"""

import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from chaos.results import Result
from tandem.runtime.processes import Process, descendants, started_at
from tests.support.faults import small_disk
from tests.support.runs import prepare

LENGTH_S = 30 * 60.0
EVERY_S = 20.0
DRIVER_SPARED_FROM = 0.6  # of the length: from there on the driver is left alive
SAMPLE_S, WARM_S, LONG_S = 5.0, 60.0, 120.0
FLAT, FLAT_MB, FLAT_FILES = 0.02, 8.0, 2  # of the first third's median, at least
EFFECTIVE = 0.9
PATIENCE_S = 120.0  # for a driver to notice a fault, on a busy machine
STALL_S = 30.0  # a stopped worker is replaced after at most half of that
DISK = "400m"
DRIVER_FAULTS = ("kill -9 of the driver", "SIGTERM of the driver", "disk full for a moment")
OTHER_FAULTS = (
    "kill -9 of a rollout worker",
    "SIGSTOP of a rollout worker",
    "crash of a rollout worker",
    "kill -9 of the rollout workers' fork server",
    "kill -9 of the reward workers' template",
    "slow tools for a moment",
)
ROLLOUT, REWARD = "tandem.rollout_workers.worker", "tandem.rewards.worker"
# As tests/support/runs.py has it, with calls that take longer, and far longer while the harness
# says so.
ENVIRONMENT = """
import asyncio, os
from pathlib import Path
from tandem.types import Env, Observation

HERE = Path(__file__).parent

class Chat(Env):
    turns = 0

    async def step(self, text):
        self.turns += 1
        if not (HERE / "quick").exists():
            await asyncio.sleep(os.urandom(1)[0] / 700)
        if (HERE / "slow").exists():
            (HERE / "was-slow").touch()
            await asyncio.sleep(1.5)
        if sum(map(ord, text)) % 37 == 3:
            raise ValueError("a tool that failed")
        return Observation(
            messages=[{"role": "user", "content": f"{text[:8]}?"}], done=self.turns == 3,
            reward=float(sum(map(ord, text)) % 2), penalty=0.1 * (len(text) % 2),
        )
"""


def section(length_s: float = LENGTH_S, every_s: float = EVERY_S, seed: int = 6) -> list[Result]:
    """Run the soak; smaller numbers are for trials."""
    with tempfile.TemporaryDirectory() as place, small_disk(Path(place) / "disk", DISK) as own_disk:
        soak = Soak(Path(place), own_disk, random.Random(seed))
        try:
            results = soak.run(length_s, every_s)
        finally:
            soak.process.kill()
            soak.process.wait()
    for result in results:
        print(result, flush=True)
    return results


@dataclass
class Life:
    """One process: samples of (MiB, descriptors), after it has warmed up."""

    name: str
    samples: list[tuple[float, int]] = field(default_factory=list)

    def thirds(self, column: int) -> tuple[float, float]:
        """Compute the (first, last) third's median of a column."""
        values = [sample[column] for sample in self.samples]
        third = len(values) // 3
        return statistics.median(values[:third]), statistics.median(values[-third:])

    def growth(self) -> str:
        """Describe what has grown, or ""."""
        (mb, last_mb), (files, last_files) = self.thirds(0), self.thirds(1)
        grown = ""
        if last_mb > mb + max(FLAT * mb, FLAT_MB):
            grown = f"{self.name}: {mb:.0f} -> {last_mb:.0f} MiB"
        if last_files > files + FLAT_FILES:
            grown += f" {self.name}: {files:.0f} -> {last_files:.0f} descriptors"
        return grown


@dataclass
class Count:
    """Counts of one kind of fault."""

    injected: int = 0
    witnessed: int = 0
    survived: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


class Soak:
    """One run under faults, from its first start to its last end."""

    def __init__(self, place: Path, own_disk: bool, rng: random.Random):
        self.place, self.own_disk, self.rng = place, own_disk, rng
        self.folder, self.out = place / "disk" / "run", place / "out.txt"
        command = prepare(place, steps=1_000_000, command="multi-turn")
        (place / "soak_env.py").write_text(ENVIRONMENT)
        self.command = [
            *command,
            f"env.name={place / 'soak_env.py'}:Chat",
            "run.save_every=2",
            "eval.data=",
            "rollout.staleness=1",
            f"run.stall_s={STALL_S}",
            "env.timeout_s=20",
            "rollout.restarts=100000",
            "rl.max_gen_batches=50",
            "train.learning_rate=1e-6",  # one that has learned it all has no groups
        ]
        self.counts = {name: Count() for name in (*DRIVER_FAULTS, *OTHER_FAULTS)}
        self.lives: dict[int, Life] = {}
        self.first_seen: dict[int, float] = {}
        self.computed = self.deaths = self.seen = 0
        self.next_sample = 0.0
        self.start()

    # ---- the driver

    def start(self) -> None:
        """Start the same command."""
        self.process = self._popen(self.folder, "rollout.workers=2")

    def _popen(self, folder: Path, *more: str) -> subprocess.Popen[bytes]:
        env = {**os.environ, "HF_HUB_OFFLINE": "1"}
        command = [*self.command, *more, f"run.folder={folder}"]
        with self.out.open("ab") as out:
            return subprocess.Popen(
                command, env=env, stdout=out, stderr=out, start_new_session=True
            )

    @property
    def rows(self) -> int:
        return rows(self.folder / "metrics.jsonl")

    def wait_for_end(self) -> int:
        """Wait for the driver's end and count the step under way; returns the exit code."""
        code = self.process.wait(PATIENCE_S)
        self.count_rows()
        self.computed += 1
        self.deaths += 1
        return code

    def restart(self) -> str:
        """Start again and wait for a step more than before; return what is wrong, or ""."""
        before = self.rows
        self.start()
        return self.until(lambda: self.rows > before, "a new step")

    def count_rows(self) -> None:
        """Count new rows; a start cuts off those of the steps that it computes again."""
        count = self.rows
        self.computed += max(0, count - self.seen)
        self.seen = count

    def log(self) -> str:
        path = self.folder / "log.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    # ---- time

    def pass_time(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(0.05)
            self.look()

    def until(self, holds: Callable[[], object], what: str) -> str:
        """Wait for a condition; return what is wrong if it never holds, or ""."""
        end = time.monotonic() + PATIENCE_S
        while not holds():
            if time.monotonic() > end:
                return f"no {what} within {PATIENCE_S:.0f} s"
            if self.process.poll() is not None:
                code = self.process.returncode
                return f"the driver ended with {code} before {what}: {tail(self.out)}"
            time.sleep(0.05)
            self.look()
        return ""

    def look(self) -> None:
        """Count new rows, and now and then sample every process."""
        self.count_rows()
        if time.monotonic() < self.next_sample:
            return
        self.next_sample = time.monotonic() + SAMPLE_S
        workers = [("worker", worker.pid) for worker in self.workers()]
        for name, pid in [("driver", self.process.pid), *workers]:
            born = self.first_seen.setdefault(pid, time.monotonic())
            if time.monotonic() - born > WARM_S and (sample := usage(pid)):
                self.lives.setdefault(pid, Life(f"{name} {pid}")).samples.append(sample)

    def fork_servers(self, module: str) -> list[Process]:
        """List the driver's own children of a module; they fork the workers."""
        return self.living(module, {self.process.pid})

    def workers(self) -> list[Process]:
        return self.living(ROLLOUT, {server.pid for server in self.fork_servers(ROLLOUT)})

    def living(self, module: str, parents: set[int]) -> list[Process]:
        return [
            process
            for process in descendants(self.process.pid)
            if process.parent in parents
            and module in process.command
            and process.state not in "ZTt"
        ]

    # ---- faults

    def run(self, length_s: float, every_s: float) -> list[Result]:
        problem = self.until(lambda: self.rows > 2, "a first step")
        if problem:
            raise RuntimeError(problem)
        start = time.monotonic()
        while (passed := time.monotonic() - start) < length_s and not problem:
            name = self.draw(passed / length_s)
            begun = time.monotonic()
            problem = self.strike(name)
            print(f"{passed:5.0f} s, {self.rows} rows: {name}: {problem or 'got over'}", flush=True)
            self.pass_time(
                max(1.0, every_s * self.rng.uniform(0.6, 1.4) - (time.monotonic() - begun))
            )
        seconds = time.monotonic() - start
        self.process.send_signal(signal.SIGTERM)
        code = self.wait_for_end()
        self.computed -= 1  # nothing was under way that a fault has cost
        steps = self.rows - 1
        print(
            f"{problem}\n{seconds:.0f} s, {steps} steps, {self.deaths - 1} ends of the driver; "
            "now the same run undisturbed",
            flush=True,
        )
        return [
            *self.results(),
            self.effective(steps, seconds, problem),
            self.flat(),
            self.same(steps, code),
        ]

    def draw(self, passed: float) -> str:
        """Draw a fault of the kind seen least, a third of them the driver's until it is spared."""
        names: tuple[str, ...] = (
            DRIVER_FAULTS
            if passed < DRIVER_SPARED_FROM and self.rng.random() < 1 / 3
            else OTHER_FAULTS
        )
        if not self.own_disk:
            names = tuple(name for name in names if "disk" not in name)
        fewest = min(self.counts[name].injected for name in names)
        return self.rng.choice([name for name in names if self.counts[name].injected == fewest])

    def strike(self, name: str) -> str:
        count, begun = self.counts[name], time.monotonic()
        count.injected += 1
        fired, problem = {
            "kill -9 of the driver": lambda: self.end_driver(signal.SIGKILL, -signal.SIGKILL),
            "SIGTERM of the driver": lambda: self.end_driver(signal.SIGTERM, 130),
            "disk full for a moment": self.fill,
            "kill -9 of a rollout worker": lambda: self.strike_worker(signal.SIGKILL),
            "SIGSTOP of a rollout worker": lambda: self.strike_worker(signal.SIGSTOP),
            "crash of a rollout worker": lambda: self.strike_worker(signal.SIGSEGV),
            "kill -9 of the rollout workers' fork server": lambda: self.strike_server(ROLLOUT),
            "kill -9 of the reward workers' template": lambda: self.strike_server(REWARD),
            "slow tools for a moment": self.slow,
        }[name]()
        count.witnessed += fired
        count.survived += not problem
        count.seconds += time.monotonic() - begun
        count.problems += [problem] * bool(problem)
        return problem

    def end_driver(self, number: int, expected: int) -> tuple[bool, str]:
        self.process.send_signal(number)
        code = self.wait_for_end()
        wrong = f"exit code {code}: {tail(self.out)}; " if code != expected else ""
        return True, wrong + self.restart()

    def fill(self) -> tuple[bool, str]:
        """Fill the disk: the run must stop with an error, and go on once there is room."""
        filler = self.place / "disk" / "filler"
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 20))
        with suppress(OSError), filler.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(64))
        try:
            code = self.wait_for_end()
        except subprocess.TimeoutExpired:
            return False, f"the driver did not end: {tail(self.out)}"
        finally:
            filler.unlink()
        fired = "No space left" in tail(self.out) or "disk" in tail(self.out)
        return fired, (
            f"exit code {code}: {tail(self.out)}; " if code != 2 else ""
        ) + self.restart()

    def strike_worker(self, number: int) -> tuple[bool, str]:
        if problem := self.until(self.workers, "a rollout worker"):
            return False, problem
        victim, rows_before = self.rng.choice(self.workers()).pid, self.rows
        os.kill(victim, number)
        lost = self.until(
            lambda: f"(process {victim}) was lost" in self.log(), f"report of the loss of {victim}"
        )
        return not lost, lost or self.until(lambda: self.rows > rows_before + 1, "a new step")

    def strike_server(self, module: str) -> tuple[bool, str]:
        if problem := self.until(lambda: self.fork_servers(module), "a fork server"):
            return False, problem
        victim, rows_before = self.fork_servers(module)[0].pid, self.rows
        os.kill(victim, signal.SIGKILL)
        gone = self.until(lambda: not started_at(victim), "end of the fork server")
        return not gone, gone or self.until(lambda: self.rows > rows_before + 1, "a new step")

    def slow(self) -> tuple[bool, str]:
        (self.place / "was-slow").unlink(missing_ok=True)
        (self.place / "slow").touch()
        seen = self.until((self.place / "was-slow").exists, "a slow tool")
        self.pass_time(3.0)
        (self.place / "slow").unlink()
        rows_before = self.rows
        return not seen, seen or self.until(lambda: self.rows > rows_before, "a new step")

    # ---- the end

    def results(self) -> list[Result]:
        return [
            Result(
                what=name,
                injected=count.injected,
                witnessed=count.witnessed,
                survived=count.survived,
                expected=count.injected,
                seconds=count.seconds,
                note="; ".join(count.problems[:2]),
            )
            for name, count in self.counts.items()
            if count.injected
        ]

    def effective(self, steps: int, seconds: float, problem: str) -> Result:
        share = steps / max(self.computed, 1)
        note = (
            f"{steps} of {self.computed} steps that were computed: {share:.1%}; "
            f"{self.deaths - 1} ends of the driver"
        )
        return Result(
            what=f"steps that count in the end, at least {EFFECTIVE:.0%}",
            injected=1,
            witnessed=1,
            survived=int(share >= EFFECTIVE and not problem),
            expected=1,
            seconds=seconds,
            note=f"{note} {problem}".strip(),
        )

    def flat(self) -> Result:
        """Check that every long life is flat; the note has the longest ones."""
        long = [
            life for life in self.lives.values() if len(life.samples) * SAMPLE_S >= LONG_S - WARM_S
        ]
        wrong = [growth for life in long if (growth := life.growth())]
        notes = []
        for name in ("driver", "worker"):
            lives = [life for life in long if life.name.startswith(name)]
            if lives:
                longest = max(lives, key=lambda life: len(life.samples))
                (mb, last_mb), (files, last_files) = longest.thirds(0), longest.thirds(1)
                seconds = len(longest.samples) * SAMPLE_S + WARM_S
                notes += [
                    f"{name} of {seconds:.0f} s: {mb:.0f} -> {last_mb:.0f} MiB, "
                    f"{files:g} -> {last_files:g} descriptors"
                ]
        return Result(
            what=f"lives of more than {LONG_S:.0f} s: memory and descriptors flat",
            injected=len(long),
            witnessed=len(long),
            survived=len(long) - len(wrong),
            expected=max(1, len(long)),
            seconds=0.0,
            note="; ".join(notes + wrong[:3]),
        )

    def same(self, steps: int, code: int) -> Result:
        """Make the same steps undisturbed, and compare ledger and metrics row by row."""
        start, undisturbed = time.monotonic(), self.place / "whole"
        (self.place / "quick").touch()
        process = self._popen(undisturbed)
        while rows(undisturbed / "metrics.jsonl") < steps + 1 and process.poll() is None:
            time.sleep(0.2)
        process.kill()
        process.wait()
        wrong = [f"the last SIGTERM gave {code}"] * (code != 130)
        for name in ("ledger.jsonl", "metrics.jsonl"):
            mine, theirs = (
                (folder / name).read_bytes().splitlines() for folder in (self.folder, undisturbed)
            )
            part = next((n for n in range(steps + 1) if mine[n : n + 1] != theirs[n : n + 1]), None)
            wrong += [] if part is None else [f"{name} differs from line {part + 1} on"]
        failed = (self.folder / "metrics.jsonl").read_text().count('"env_errors"')
        return Result(
            what=f"{steps} steps, bit by bit those of an undisturbed run",
            injected=1,
            witnessed=int(steps > 0 and failed > 0),
            survived=int(not wrong),
            expected=1,
            seconds=time.monotonic() - start,
            note="; ".join([f"tools failed in {failed} of them", *wrong]),
        )


def rows(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def tail(path: Path) -> str:
    return path.read_text(errors="replace")[-1500:]


def usage(pid: int) -> tuple[float, int] | None:
    """Measure (resident MiB, descriptors); None if the process has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20), len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:  # it has ended
        return None


if __name__ == "__main__":
    section(float(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else EVERY_S)
