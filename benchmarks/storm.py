"""Rewards in a storm: a tenth of the samples is hostile, and three in eighty hang until their
deadline. What is left of the throughput?

    python benchmarks/storm.py [--samples 10000] [--cost-ms 5] [--timeout-s 1] [--workers 16]
                               [--rounds 2] [--write]

A clean round scores `samples` harmless ones, each `cost-ms` of processor time; a storm round the
same with every tenth replaced by one of eight harms in turn. Rounds alternate in one pool; the
medians are compared:

    throughput   samples a second, until the last score of the round, its last timeouts included
    clean ones   harmless samples a second, until the last score of a harmless one

Processes and memory (of this process and of the pool's) are compared after a first storm and after
the last. The exit status is 1 where a process is left or, with the samples and the time of BAR,
less than KEPT of the throughput is kept or memory grows by GROWN or more. --write adds the row to
results/storm.json.
"""

import argparse
import json
import statistics
import sys
import time
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

import machine

from tandem.rewards.pool import RewardPool
from tandem.types import Attempt, Problem

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results" / "storm.json"
FUNCTIONS = ("answer", f"{Path(__file__).with_name('storm_reward.py')}:reward")
HARMS = ("power", "factorial", "loop", "allocate", "nan", "wrong length", "exception", "100 MB")
FACTORIAL = r"\boxed{\frac{3000000!}{2999999!}}"
BAR = (10_000, 1.0)  # samples, timeout_s: with another timeout_s the last timeouts weigh otherwise
KEPT, GROWN = 0.8, 0.05
LONG = "x" * (100 * 2**20) + "Answer: 3"


def main() -> int:
    args = arguments()
    with RewardPool(FUNCTIONS, timeout_s=args.timeout_s, workers=args.workers) as pool:
        # what a storm takes once, it has taken now
        score(pool, samples(args.samples, args.cost_ms, hostile=True))
        before = footprint()
        rounds = [
            (
                score(pool, samples(args.samples, args.cost_ms, False)),
                score(pool, samples(args.samples, args.cost_ms, True)),
            )
            for _ in range(args.rounds)
        ]
        after = footprint()
        failures = pool.failures
    row = {
        **vars(args),
        **summary(rounds, args.samples),
        "before": before,
        "after": after,
        "failures": failures,
    }
    row |= {"left": processes(), "machine": machine.describe(), "date": str(date.today())}
    print(json.dumps(row, indent=1))
    if args.write:
        rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
        RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, [*rows, row])) + "\n]\n")
    missed = misses(row)
    if missed:
        print(f"missed: {', '.join(missed)}", file=sys.stderr)
    return int(bool(missed))


def misses(row: dict[str, Any]) -> list[str]:
    """The targets that this row does not reach."""
    # this process, the fork server and the workers; the last ones killed are not replaced at once
    extra = max(row["after"]["processes"] - 2 - row["workers"], len(row["left"]) - 1)
    found = [f"{extra} processes leaked"] if extra > 0 else []
    if (row["samples"], row["timeout_s"]) != BAR:
        return found
    if row["throughput_kept"] < KEPT:
        found.append(f"{row['throughput_kept']:.0%} of the throughput kept, expected {KEPT:.0%}")
    grown = row["after"]["memory_mb"] / row["before"]["memory_mb"] - 1
    if grown >= GROWN:
        found.append(f"memory grew by {grown:.1%}, expected less than {GROWN:.0%}")
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--cost-ms", type=float, default=5.0)
    parser.add_argument("--timeout-s", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--write", action="store_true")
    return parser.parse_args()


def samples(count: int, cost_ms: float, hostile: bool) -> list[tuple[Problem, str, bool]]:
    """(problem, text, harmless)"""
    harmless, metadata = "so 3. Answer: 3", {"cost_s": cost_ms / 1000}
    number = Problem(
        uid="number",
        messages=({"role": "user", "content": "1+2?"},),
        answer="3",
        metadata=metadata,
        conversational=False,
    )
    formula = Problem(
        uid="formula",
        messages=number.messages,
        answer="x+1",
        metadata=metadata,
        conversational=False,
    )
    found: list[tuple[Problem, str, bool]] = []
    for index in range(count):
        match HARMS[index // 10 % len(HARMS)] if hostile and index % 10 == 0 else "none":
            case "none":
                found.append((number, harmless, True))
            case "factorial":
                found.append((formula, FACTORIAL, False))
            case "100 MB":
                found.append((number, LONG, False))
            case harm:
                found.append((number, f"Answer: 3 harm: {harm}", False))
    return found


def score(pool: RewardPool, items: list[tuple[Problem, str, bool]]) -> tuple[float, float]:
    """Seconds until the last score, and until the last one of a harmless sample. Those keep their
    reward."""
    ends: list[float] = []
    start = time.perf_counter()
    futures = [pool.submit(problem, Attempt(text=text)) for problem, text, _ in items]
    for future, (_, _, harmless) in zip(futures, items, strict=True):
        if harmless:
            future.add_done_callback(lambda _: ends.append(time.perf_counter()))
    scores = [future.result() for future in futures]
    end = time.perf_counter()
    spoiled = [
        score for score, item in zip(scores, items, strict=True) if item[2] and score.reward != 1.5
    ]
    assert not spoiled, f"{len(spoiled)} harmless samples lost their reward, e.g. {spoiled[0]}"
    return end - start, max(ends) - start


def summary(
    rounds: list[tuple[tuple[float, float], tuple[float, float]]], count: int
) -> dict[str, float]:
    clean_s = statistics.median(clean[0] for clean, _ in rounds)
    storm_s = statistics.median(storm[0] for _, storm in rounds)
    harmless_s = statistics.median(storm[1] for _, storm in rounds)
    harmless = count - len(range(0, count, 10))
    return {
        "clean_per_s": count / clean_s,
        "storm_per_s": count / storm_s,
        "throughput_kept": clean_s / storm_s,
        "clean_ones_kept": (harmless / harmless_s) / (count / clean_s),
    }


def processes() -> list[int]:
    """Return this process and its descendants, zombies included."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    found = [int(Path("/proc/self").readlink().name)]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def footprint() -> dict[str, float]:
    """Processes, and their proportional memory in MB, when they are at rest."""
    time.sleep(0.5)
    there, lines = processes(), list[str]()
    for pid in there:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            lines += Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return {
        "processes": len(there),
        "memory_mb": sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024,
    }


if __name__ == "__main__":
    raise SystemExit(main())
