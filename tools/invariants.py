"""`make invariants`: the long proofs of P1 and P2; results in docs/invariants.md.

P1: random lives of an engine (tests/invariants/schedules.py), and random batches on five architectures before and after
optimizer steps; the largest gap between engine and policy.
P2: small runs killed with SIGKILL at a random moment, then finished; their bytes against an undisturbed run's.
"""

import os
import sys
import tempfile
from collections import Counter
from datetime import date
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import machine  # noqa: E402

from tandem.engine.engine import Engine  # noqa: E402
from tandem.engine.pages import PageCache  # noqa: E402
from tandem.train.optimizer import Optimizer  # noqa: E402
from tandem.types import Request, SamplingParams  # noqa: E402
from tests.invariants.kills import fingerprint, interrupted, prepare, run  # noqa: E402
from tests.invariants.parity import (  # noqa: E402
    CONFIGS,
    VOCABULARY,
    engine_for,
    largest_gap,
    random_model,
    random_requests,
    words,
)
from tests.invariants.schedules import Schedule, schedules  # noqa: E402
from tests.invariants.schedules import run as live  # noqa: E402

LIVES = 1000
SOAK = 10_000  # requests
SCHEDULES = 40  # for each architecture
KILLS = {"train": 10, "sft": 4, "dpo": 4, "rm": 4, "distill": 4, "dapo, curriculum": 6, "ema": 4, "ppo, lora": 6,
         "multi-turn": 8}  # fmt: skip


def main() -> int:
    lines = ["# Invariants", "", f"Written by `make invariants`. Machine: {machine.describe()}; {date.today()}.", ""]
    lines += ["## P1: engine = policy", ""]
    worst, happened = lives()
    lines += [
        f"{LIVES:,} random schedules (arrivals, chunks, prefix hits, forks, preemptions, growing conversations, weight"
    ]
    lines += [
        "updates, cancellations, every sampling setting); each token against the policy under its own weights, requests"
    ]
    lines += ["against themselves alone. Of what happened in them:", "", "| what | times |", "|---|---|"]
    lines += [f"| {what} | {count:,.0f} |" for what, count in sorted(happened.items())]
    lines += [f"| **largest log-prob gap** | **{worst}** |", ""]
    in_use, before, after = soak()
    lines += [
        f"{SOAK:,} requests through a cache of 12 pages: {in_use} pages in use at the end; resident memory {before:.0f} MiB"
    ]
    lines += [f"after the first tenth, {after:.0f} MiB after the last.", ""]
    lines += ["Batches before and after optimizer steps, prompts to 1,800 tokens:", ""]
    lines += ["| architecture | schedules | sampled tokens | largest log-prob gap |", "|---|---|---|---|"]
    gaps = {name: parity(name) for name in CONFIGS}
    lines += [f"| {name} | {SCHEDULES} | {tokens:,} | {gap} |" for name, (tokens, gap) in gaps.items()]
    lines += [
        "",
        "## P2: killed = never stopped",
        "",
        "A run of 12 steps, killed once with `kill -9` at a random moment and started again by the",
    ]
    lines += ["same command; equal: weights, optimizer, metrics, episodes and exported model, byte for byte.", ""]
    lines += ["| command | killed | equal |", "|---|---|---|"]
    results = [(command, *kills(command, count)) for command, count in KILLS.items()]
    lines += [f"| {command} | {hits} | {equal} |" for command, hits, equal in results]
    lines += [""]
    (ROOT / "docs" / "invariants.md").write_text("\n".join(lines))
    print("\n".join(lines))
    return int(
        any(equal < KILLS[command] for command, _, equal in results)
        or worst != 0
        or in_use
        or after > 1.05 * before
        or not all(happened.values())
        or any(gap != 0 for _, gap in gaps.values())
    )


def lives() -> tuple[float, Counter]:
    """(largest gap, what happened) in LIVES schedules; a failing one is shrunk and printed by hypothesis."""
    gaps, happened = [0.0], Counter()

    @given(schedules())
    @settings(
        max_examples=LIVES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    def play(schedule: Schedule) -> None:
        gap, tokens, seen = live(schedule)
        gaps.append(gap)
        happened.update(seen, schedules=1)
        happened["sampled tokens"] += tokens
        assert gap == 0.0

    play()
    return max(gaps), happened


def soak() -> tuple[int, float, float]:
    """(pages in use at the end, resident MiB after a tenth of the requests, after all)"""
    model, rng = random_model("qwen3"), np.random.default_rng(0)
    engine = Engine(model, words, cache_bytes=12 * PageCache(model, 1 << 24).page_bytes, max_batch=16)
    memory = []
    for _ in range(10):
        for start in range(0, SOAK // 10, 100):
            requests = [
                Request(
                    key=start + n, prompt=rng.integers(0, VOCABULARY, int(rng.integers(1, 300))).astype(np.int64),
                    params=SamplingParams(max_new_tokens=int(rng.integers(1, 9))),
                )
                for n in range(100)
            ]  # fmt: skip
            engine.generate(requests)
        memory.append(resident_mib())
    return int(engine.stats()["pages_in_use"]), memory[0], memory[-1]


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def parity(name: str) -> tuple[int, float]:
    model = random_model(name)
    optimizer = Optimizer(
        dict(model.module.named_parameters()), learning_rate=1e-3, schedule="constant", warmup_steps=0, total_steps=9,
        weight_decay=0.0, betas=(0.9, 0.95), max_grad_norm=1.0,
    )  # fmt: skip
    tokens, worst = 0, 0.0
    for number in range(SCHEDULES):
        rng = np.random.default_rng(number)
        longest = 1800 if number % 10 == 9 else 200
        requests = random_requests(rng, prompts=int(rng.integers(1, 9)), longest=longest, group=int(rng.integers(1, 5)))
        completions = engine_for(model, max_batch=int(rng.integers(1, 40))).generate(requests)
        tokens += sum(len(c.tokens) for c in completions)
        worst = max(worst, largest_gap(model, requests, completions, int(rng.integers(100, 4000)), gradients=True))
        optimizer.update()
    return tokens, worst


def kills(command: str, count: int) -> tuple[int, int]:
    """(kills that hit, runs whose every byte is that of the undisturbed run)"""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        arguments = prepare(folder, command=command)
        _, seconds = run(arguments, folder / "undisturbed")
        expected = fingerprint(folder / "undisturbed")
        rng = np.random.default_rng(7)
        tries = hits = equal = 0
        while hits < count:  # a moment after the run's end is drawn again
            tries += 1
            if interrupted(arguments, folder / str(tries), [rng.uniform(0.3, 0.9) * seconds]):
                hits += 1
                equal += fingerprint(folder / str(tries)) == expected
        return hits, equal


if __name__ == "__main__":
    sys.exit(main())
