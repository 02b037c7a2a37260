"""`make invariants`: the long proofs of P1, P2 and P3; results in results/invariants.json, and
results/invariants.md from it.

    make invariants                        every section
    make invariants only="cells kills"     these; the results of the others stay as they are

lives    P1: random lives of an engine (lives.py); the largest gap between engine and policy
soak     many requests through a small cache
parity   P1: random batches on five architectures before and after optimizer steps
cells    P1 and P3 under the libraries' own switches, in processes of their own: the probe's word against what is so
variants the same for bfloat16 weights and models of the general path
meshes   optimizer steps by the processes of meshes against those of one process
kills    P2 and P3: runs killed with SIGKILL at a random moment, and finished with other threads, cores and workers

A section's results name the processor that they were found on. Exit code 1 where a bar is missed.
"""

import json
import os
import sys
import tempfile
import time
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import machine  # noqa: E402
from invariants_cells import cells_table, try_cells, try_variants, variants_table  # noqa: E402
from lives import Schedule, schedules  # noqa: E402
from lives import run as live  # noqa: E402
from mesh_steps import MESHES, compare  # noqa: E402
from mesh_steps import MODELS as MESH_MODELS  # noqa: E402

from tandem.config.parallel import Parallel  # noqa: E402
from tandem.engine.engine import Engine  # noqa: E402
from tandem.engine.page_cache import PageCache  # noqa: E402
from tandem.runtime import numerics  # noqa: E402
from tandem.types import Request, SamplingParams  # noqa: E402
from tests.support.parity import CONFIGS, VOCABULARY, parity_of_model, random_model, words  # noqa: E402
from tests.support.runs import fingerprint, prepare, run  # noqa: E402

JSON, PAGE = ROOT / "results" / "invariants.json", ROOT / "results" / "invariants.md"
LIVES = 1000
SOAK = 10_000  # requests
SCHEDULES = 40  # for each architecture
MOST_CHANGE = 1e-3  # as in tests/trainer/test_meshes.py, which says why
KILLS, STEPS = 5, 6  # of each kind, in the order of MOVES; of a run
KINDS = (
    "train",
    "sft",
    "rm",
    "distill",
    "dapo, curriculum",
    "ppo, lora",
    "multi-turn",
    "one-step-off",
    "dapo, bfloat16, lora, two sources, one step off",
    "multi-turn, lora, partial",
)
# Where a run begins, and where it goes on after its kill: (before the command line, overrides).
ONE_CORE = ("taskset", "-c", "0")
MOVES: list[tuple[tuple[tuple[str, ...], list[str]], tuple[tuple[str, ...], list[str]]]] = [
    (((), []), ((), [])),
    (((), []), (ONE_CORE, [])),
    ((ONE_CORE, []), ((), [])),
    (((), ["run.threads=1"]), ((), ["run.threads=2"])),
    (((), ["run.threads=2"]), (ONE_CORE, ["run.threads=1"])),
]
WORKERS = (0, 1, 2)  # in turns, of kinds with rollouts ahead

Found = dict[str, Any]


def main(only: list[str]) -> int:
    if unknown := sorted(set(only) - SECTIONS.keys()):
        print(f"unknown section: {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
        return 2
    numerics.prepare()
    missed = []
    for name, (section, _) in SECTIONS.items():
        if only and name not in only:
            continue
        start = time.monotonic()
        found = section()
        keep(name, found, time.monotonic() - start)
        missed += [name] * (not found["met"])
        PAGE.write_text(page())
        print("\n".join(SECTIONS[name][1](everything()[name])), flush=True)
    print(f"missed: {', '.join(missed)}" if missed else "every bar is met")
    return int(bool(missed))


def keep(name: str, found: Found, seconds: float) -> None:
    entry = {
        "machine": machine.describe(),
        "date": str(date.today()),
        "seconds": round(seconds),
        **found,
    }
    JSON.write_text(json.dumps({**everything(), name: entry}, indent=1, ensure_ascii=False) + "\n")


def everything() -> dict[str, Found]:
    return json.loads(JSON.read_text()) if JSON.exists() else {}


def page() -> str:
    told = everything()
    lines = [
        "# Invariants",
        "",
        "Written by `make invariants`, section by section (tools/invariants.py).",
    ]
    for name, (_, table) in SECTIONS.items():
        if name in told:
            lines += ["", *table(told[name])]
            lines += ["", f"{told[name]['machine']}; {told[name]['date']}."]
    return "\n".join(lines) + "\n"


# P1: engine = policy
# ------------------------------------------------------------------------------------------------


def lives() -> Found:
    """LIVES schedules; a failing one is shrunk and printed by hypothesis."""
    gaps, happened = [0.0], Counter()

    @given(schedules())
    @settings(
        max_examples=LIVES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def play(schedule: Schedule) -> None:
        gap, tokens, seen = live(schedule)
        gaps.append(gap)
        happened.update(seen, schedules=1)
        happened["sampled tokens"] += tokens
        assert gap == 0.0

    play()
    return {
        "gap": max(gaps),
        "happened": dict(happened),
        "met": max(gaps) == 0.0 and all(happened.values()),
    }


def lives_table(found: Found) -> list[str]:
    return [
        "## Lives of an engine",
        "",
        f"{LIVES:,} random schedules (arrivals, chunks, prefix hits, forks, preemptions, growing conversations, weight",
        "updates, cancellations, every sampling setting); each token against the policy under its own weights, requests",
        "against themselves alone. Of what happened in them:",
        "",
        "| what | times |",
        "|---|---|",
        *(f"| {what} | {count:,.0f} |" for what, count in sorted(found["happened"].items())),
        f"| **largest log-prob gap** | **{found['gap']}** |",
    ]


def soak() -> Found:
    model, rng = random_model("qwen3"), np.random.default_rng(0)
    engine = Engine(
        model, words, cache_bytes=12 * PageCache(model, 1 << 24).page_bytes, max_batch=16
    )
    memory = []
    for _ in range(10):
        for start in range(0, SOAK // 10, 100):
            requests = [
                Request(
                    key=start + n,
                    prompt=rng.integers(0, VOCABULARY, int(rng.integers(1, 300))).astype(np.int64),
                    params=SamplingParams(max_new_tokens=int(rng.integers(1, 9))),
                )
                for n in range(100)
            ]
            engine.generate(requests)
        memory.append(resident_mib())
    in_use = int(engine.stats()["pages_in_use"])
    met = not in_use and memory[-1] <= 1.05 * memory[0]
    return {"pages_in_use": in_use, "first_mib": memory[0], "last_mib": memory[-1], "met": met}


def soak_table(found: Found) -> list[str]:
    return [
        "## A small cache",
        "",
        f"{SOAK:,} requests through a cache of 12 pages: {found['pages_in_use']} pages in use at the end; resident memory "
        f"{found['first_mib']:.0f} MiB",
        f"after the first tenth, {found['last_mib']:.0f} MiB after the last.",
    ]


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def parity() -> Found:
    rows = {
        f"{name}, {dtype}": parity_of_model(
            random_model(name, dtype=getattr(torch, dtype)), SCHEDULES
        )
        for dtype in ("float32", "bfloat16")
        for name in CONFIGS
    }
    return {"rows": rows, "met": all(gap == 0.0 for _, gap in rows.values())}


def parity_table(found: Found) -> list[str]:
    return [
        "## Before and after optimizer steps",
        "",
        "Random batches, prompts to 1,800 tokens.",
        "",
        "| architecture | schedules | sampled tokens | largest log-prob gap |",
        "|---|---|---|---|",
        *(
            f"| {name} | {SCHEDULES} | {tokens:,} | {gap} |"
            for name, (tokens, gap) in found["rows"].items()
        ),
    ]


# Several processes
# ------------------------------------------------------------------------------------------------


def meshes() -> Found:
    rows, met = {}, True
    for sizes in MESHES:
        rows[Parallel(**sizes).mesh] = found = compare(sizes)
        exact = sizes.keys() == {"data"}
        for equal, change in filter(None, found.values()):
            met &= equal and (change == 0.0 if exact else change <= MOST_CHANGE)
        print(f"{sizes}: {found}", flush=True)
    return {"rows": rows, "met": met}


def meshes_table(found: Found) -> list[str]:
    def told(result: tuple[bool, float] | None) -> str:
        if result is None:
            return "does not divide it"
        equal, change = result
        weights = f"{change:.1e}" if change else "0"
        return weights if equal else f"**other log-probs**, {weights}"

    return [
        "## Steps of several processes",
        "",
        "Two optimizer steps against those of one process that accumulates the same shares: the largest difference of",
        f"a weight, relative to what the steps have changed in it; 0: the same bits, which `data` alone must have. The bar is {MOST_CHANGE:g}",
        "for the others, whose gradients are sums in another order. All have the log-probs of one process to the bit, with `tensor` of one",
        "that sums in as many parts.",
        "",
        f"| mesh | {' | '.join(MESH_MODELS)} |",
        "|---|---|---|---|",
        *(
            f"| {mesh} | {' | '.join(told(row[name]) for name in MESH_MODELS)} |"
            for mesh, row in found["rows"].items()
        ),
    ]


# P2 and P3: killed = never stopped, wherever it goes on
# -------------------------------------------------------------


def kills() -> Found:
    rows = {kind: kills_of(kind) for kind in KINDS}
    return {"rows": rows, "met": all(hits == equal == KILLS for hits, equal in rows.values())}


def kills_of(kind: str) -> tuple[int, int]:
    """(kills that hit, runs whose every byte is that of the undisturbed run)"""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        arguments = prepare(folder, steps=STEPS, command=kind)
        ahead = "rollout.workers=1" in arguments
        _, seconds = run(arguments, folder / "undisturbed")
        expected, rng = fingerprint(folder / "undisturbed"), np.random.default_rng(7)
        tries = hits = equal = 0
        while hits < KILLS:  # a moment after the run's end is drawn again
            tries += 1
            killed = folder / str(tries)
            moment, halves = rng.uniform(0.3, 0.9) * seconds, MOVES[hits % len(MOVES)]
            (first, second) = (
                (
                    [*arguments, *how, *[f"rollout.workers={WORKERS[(hits + half) % 3]}"] * ahead],
                    before,
                )
                for half, (before, how) in enumerate(halves)
            )
            code, took = run(first[0], killed, moment, place=first[1])
            if code == 0:
                seconds = min(seconds, took)
                continue
            run(second[0], killed, place=second[1])
            hits += 1
            equal += fingerprint(killed) == expected
            print(f"{kind}: {hits} kills, {equal} equal", flush=True)
        return hits, equal


def kills_table(found: Found) -> list[str]:
    return [
        "## Killed = never stopped, with other threads, cores and workers",
        "",
        f"A run of {STEPS} steps with the default number of threads, against runs that were killed once with `kill -9` at a",
        "random moment and went on by the same command; equal: weights, optimizer, metrics, ledger, episodes and exported",
        "model, byte for byte. The five kills of a kind: begun and gone on with all cores; begun with all, gone on with one",
        "(`taskset`); the other way round; begun with one thread, gone on with two; begun with two, gone on with one thread on",
        "one core. With rollouts ahead, also begun and gone on with 0, 1 and 2 rollout workers.",
        "",
        "| kind of run | killed | equal |",
        "|---|---|---|",
        *(f"| {kind} | {hits} | {equal} |" for kind, (hits, equal) in found["rows"].items()),
    ]


SECTIONS = {
    "lives": (lives, lives_table),
    "soak": (soak, soak_table),
    "parity": (parity, parity_table),
    "meshes": (meshes, meshes_table),
    "cells": (try_cells, cells_table),
    "variants": (try_variants, variants_table),
    "kills": (kills, kills_table),
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
