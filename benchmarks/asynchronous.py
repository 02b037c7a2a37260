"""Throughput of asynchronous rollouts where the reward is slow: whole runs of `tandem train`, one
pinned thread for each process.

    python benchmarks/asynchronous.py [STEPS [ROUNDS]]        default: 12 steps, 3 rounds; writes results/asynchronous.json

A tiny model, problems and sizes (recipes/demo.toml: 64 prompts x 8 samples, 32 tokens), with
random weights, which fill every completion, and a reward that waits as for a remote judge: it
sleeps and uses no processor. One judge answers one episode after the other; in a step it takes half
of the seconds that generation takes, as a run without waiting measures them first on one thread.
Two judges:

    each       every answer takes its share of that time; answers come while other episodes are still generated
    together   the judge answers the whole batch at once, at the end: nothing of its time overlaps generation

Four loops, alternating: sync with one thread on one core and with two threads on two; async with
staleness 1 and 2, the trainer on one core and a rollout worker on the other. The driver process
scores, keeps the journal and plays environments, so this work is on the trainer's core. Samples a
second are by the wall clock between rows of metrics.jsonl, saves and hashes included, without the
first two steps.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT)]

import machine  # noqa: E402

from tandem.model.tiny import make_tiny  # noqa: E402
from tandem.plugins.tasks import algebra  # noqa: E402
from tandem.runtime.disk import write_rows  # noqa: E402
from tandem.runtime.processes import descendants  # noqa: E402

STEPS, ROUNDS, SKIPPED, SAMPLES = 12, 3, 2, 512
SHARE = 0.5  # of the generation time that scoring takes
LOOPS = {  # name: (threads and cores of the driver, overrides)
    "sync, 1 thread": (1, []),
    "sync, 2 threads": (2, []),
    "async, staleness 1": (1, ["rollout.staleness=1", "rollout.workers=1"]),
    "async, staleness 2": (1, ["rollout.staleness=2", "rollout.workers=1"]),
}
JUDGES = ("each", "together")
# Half of the texts of a random model are rewarded for nothing, so that there is something to learn
# from.
REWARD = """
import time
calls = 0

def score(problem, completion):
    global calls
    calls += 1
    if {together}:
        if calls % {samples} == 0:
            time.sleep({seconds})
    else:
        time.sleep({seconds} / {samples})
    return float(sum(map(ord, completion)) % 2)
"""


def main(steps: int, rounds: int) -> int:
    if (share := machine.others_cpu_share()) > 0.10:
        print(
            f"error: other processes use {share:.0%} of the CPU\n  expected: at most 10%",
            file=sys.stderr,
        )
        return 2
    with tempfile.TemporaryDirectory() as place:
        results = measure(Path(place), steps, rounds)
    about = {
        "machine": machine.describe(),
        "date": str(date.today()),
        "steps": steps,
        "rounds": rounds,
    }
    (ROOT / "results" / "asynchronous.json").write_text(
        json.dumps({**about, **results}, indent=1) + "\n"
    )
    return 0


def measure(folder: Path, steps: int, rounds: int) -> dict:
    write_rows(folder / "data" / "train.jsonl", algebra.rows("train", 400, seed=0, difficulty=1))
    make_tiny(folder / "model")
    write_reward(folder, 0.0, "each")
    free = run(folder, "sync, 1 thread", steps)
    seconds = SHARE * free["rollout_s"]
    print(
        f"generation takes {free['rollout_s']:.2f} s a step, so scoring takes {seconds:.2f} s; {free}",
        flush=True,
    )
    rows = {}
    for judge in JUDGES:
        write_reward(folder, seconds, judge)
        runs = [
            {name: told(judge, name, run(folder, name, steps)) for name in LOOPS}
            for _ in range(rounds)
        ]
        rows[judge] = {name: medians([each[name] for each in runs]) for name in LOOPS}
        for name, row in rows[judge].items():
            for base in ("sync, 1 thread", "sync, 2 threads"):
                row[f"ratio to {base}"] = row["samples_per_s"] / rows[judge][base]["samples_per_s"]
            print(f"{judge}: {name}: {row}", flush=True)
    return {"without waiting": free, "scoring_s": seconds, "rows": rows}


def write_reward(folder: Path, seconds: float, judge: str) -> None:
    text = REWARD.format(seconds=seconds, samples=SAMPLES, together=judge == "together")
    (folder / "reward.py").write_text(text)


def told(judge: str, name: str, row: dict[str, float]) -> dict[str, float]:
    print(f"{judge}: {name}: {row['samples_per_s']:.0f} samples/s", flush=True)
    return row


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def run(folder: Path, name: str, steps: int) -> dict[str, float]:
    """Samples a second and median seconds of the parts of a step, of one whole run."""
    threads, overrides = LOOPS[name]
    with tempfile.TemporaryDirectory(dir=folder) as place:
        command = [
            sys.executable,
            "-m",
            "tandem",
            "train",
            str(ROOT / "recipes" / "demo.toml"),
            "eval.data=",
            f"data.train={folder / 'data' / 'train.jsonl'}",
            f"model.path={folder / 'model'}",
            f"run.folder={place}/run",
            f"run.steps={steps}",
            f"run.save_every={steps}",
            f"run.threads={threads}",
            f"reward.function={folder / 'reward.py'}:score",
            *overrides,
        ]
        env = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        with (Path(place) / "out.txt").open("w") as out:
            process = subprocess.Popen(
                command, env=env, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT
            )
        try:
            os.sched_setaffinity(process.pid, range(threads))
            spent = watch(
                process,
                Path(place) / "run" / "metrics.jsonl",
                steps,
                pinned="rollout.workers=1" in overrides,
            )
        finally:
            process.kill()  # nothing, where it has ended
            code = process.wait()
        if code:
            raise SystemExit(
                f"{' '.join(command)} failed:\n{(Path(place) / 'out.txt').read_text()[-3000:]}"
            )
        parts = [
            json.loads(line)
            for line in (Path(place) / "run" / "timings.jsonl").read_text().splitlines()
        ]
    parts = parts[-(steps - SKIPPED) :]
    names = [
        n
        for n in ("rollout_s", "reward_s", "journal_s", "learn_s", "sync_s", "wait_s")
        if n in parts[0]
    ]
    return {
        "samples_per_s": SAMPLES / spent["step_s"],
        **spent,
        **{n: statistics.median(part[n] for part in parts) for n in names},
    }


def watch(
    process: subprocess.Popen[bytes], metrics: Path, steps: int, *, pinned: bool
) -> dict[str, float]:
    """Seconds a step, by the clock and by processor, after the skipped ones; the rollout worker is
    put on the other core."""
    seen: dict[int, dict[str, float]] = {}
    while process.poll() is None:
        time.sleep(0.01)
        # that of step 0 comes first
        rows = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if rows not in seen:
            seen[rows] = {"step_s": time.perf_counter(), **processor_s(process.pid)}
        if pinned and not rows:
            pin(process.pid)
    first = min(rows for rows in seen if rows > SKIPPED)
    return {
        name: (seen[steps + 1][name] - seen[first][name]) / (steps + 1 - first)
        for name in seen[first]
    }


def processor_s(driver: int) -> dict[str, float]:
    """Return the processor seconds so far: of the driver, of its main thread (the trainer), and of
    the rollout worker."""
    workers = [p.pid for p in descendants(driver) if "tandem.rollout_workers.worker" in p.command]
    return {
        "driver_cpu_s": cpu_s(f"/proc/{driver}/stat"),
        "trainer_cpu_s": cpu_s(f"/proc/{driver}/task/{driver}/stat"),
        "worker_cpu_s": sum(cpu_s(f"/proc/{worker}/stat") for worker in workers),
    }


def cpu_s(path: str) -> float:
    fields = Path(path).read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def pin(driver: int) -> None:
    for worker in [p for p in descendants(driver) if "tandem.rollout_workers.worker" in p.command]:
        for thread in Path(f"/proc/{worker.pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {1})


if __name__ == "__main__":
    sys.exit(main(int((sys.argv[1:] or [STEPS])[0]), int((sys.argv[2:] or [ROUNDS])[0])))
