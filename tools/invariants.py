"""`make invariants`: the long proofs of P1 and P2; results in docs/invariants.md.

P1: random schedules on five architectures, before and after optimizer steps; the largest gap between engine and policy.
P2: a small GRPO run killed with SIGKILL at ten random moments, then finished; its bytes against an undisturbed run's.
"""

import sys
import tempfile
from datetime import date
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import machine  # noqa: E402

from tandem.train.optimizer import Optimizer  # noqa: E402
from tests.invariants.kills import fingerprint, interrupted, prepare, run  # noqa: E402
from tests.invariants.parity import CONFIGS, engine_for, largest_gap, random_model, random_requests  # noqa: E402

SCHEDULES = 40  # for each architecture
KILLS = 10


def main() -> int:
    lines = ["# Invariants", "", f"Written by `make invariants`. Machine: {machine.describe()}; {date.today()}.", ""]
    lines += ["## P1: engine = policy", ""]
    lines += ["| architecture | schedules | sampled tokens | largest log-prob gap |", "|---|---|---|---|"]
    gaps = {name: parity(name) for name in CONFIGS}
    lines += [f"| {name} | {SCHEDULES} | {tokens:,} | {gap} |" for name, (tokens, gap) in gaps.items()]
    hits, equal = kills()
    lines += ["", "## P2: killed = never stopped", ""]
    lines += [
        f"{hits} of {KILLS} `kill -9` at random moments hit a live run of 12 steps (the others came after its end);"
    ]
    lines += [
        f"weights, optimizer, metrics, episodes and exported model of the finished run: {'equal' if equal else 'DIFFERENT'}.",
        "",
    ]
    (ROOT / "docs" / "invariants.md").write_text("\n".join(lines))
    print("\n".join(lines))
    return int(not equal or any(gap for _, gap in gaps.values()))


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


def kills() -> tuple[int, bool]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        command = prepare(folder)
        _, seconds = run(command, folder / "undisturbed")
        moments = (np.random.default_rng(7).uniform(0.35, 0.9, KILLS) * seconds).tolist()
        hits = interrupted(command, folder / "killed", moments)
        return hits, fingerprint(folder / "killed") == fingerprint(folder / "undisturbed")


if __name__ == "__main__":
    sys.exit(main())
