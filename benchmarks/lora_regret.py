"""`make lora-regret`: adapters of rank 1, 8 and 32 beside full training, each at its best learning
rate ("LoRA Without Regret", Thinking Machines 2025): supervised, on chats of one new habit.

    python benchmarks/lora_regret.py [MODEL STEPS]      e.g. runs/smollm2/model 20

Without MODEL: a tiny model of 0.9M parameters, trained on chats half of which skip the working; the
new habit is to show it always. Rows of other models stay in results/lora_regret.json.
"""

import json
import shutil
import sys
from datetime import date
from pathlib import Path

import machine
import numpy as np

import tandem
from tandem.api.session import Datum
from tandem.model.auto_rate import auto_learning_rate
from tandem.model.tiny import make_tiny
from tandem.plugins.offline.loss_mask import training_samples
from tandem.plugins.tasks.algebra import warm_start
from tandem.runtime.rng import permutation

RUNS = Path(__file__).parent.parent / "runs" / "lora_regret"
RESULTS = RUNS.parents[1] / "results" / "lora_regret.json"
RATES, BATCH = (1e-4, 3e-4, 1e-3, 3e-3), 16  # of full training; adapters: ten times
TINY = ["tiny Qwen3, 0.9M parameters", "60"]
HEAD = """# LoRA without regret

`make lora-regret`. Held-out loss in nats a token after some steps of 16 chats with a new habit, by learning rate. Adapters: every linear of
the layers, alpha 32. "auto" is what `learning_rate = "auto"` takes, which was fitted to models of a thousand times as many parameters.
"""


def main() -> None:
    name, steps = sys.argv[1:] or TINY
    model, losses = base() if name == TINY[0] else name, {}
    for rank in (0, 1, 8, 32):
        session = tandem.Session(model, **({"lora.rank": rank, "lora.alpha": 32.0} if rank else {}))
        shutil.rmtree(RUNS / f"start-{rank}", ignore_errors=True)
        start = session.save(RUNS / f"start-{rank}")
        train, test = (chats(session, seed, 512 // seed**2, 0.0) for seed in (1, 2))
        before, losses[rank] = session.forward(data(test))["loss"], {}
        for rate in (rate * (10 if rank else 1) for rate in RATES):
            session.load(start)
            learn(session, train, int(steps), rate)
            losses[rank][f"{rate:g}"] = session.forward(data(test))["loss"]
            print(rank, losses[rank], flush=True)
    about = f"{steps} steps. Before: {before:.4f}. {machine.describe()}; {date.today()}."
    lines = [f"## {name}", "", about, ""]
    lines += ["| | best | at | auto | each |", "|---|---|---|---|---|"]
    for rank, found in losses.items():
        best, auto = min(found, key=found.get), auto_learning_rate(model, adapters=rank > 0)
        each = ", ".join(f"{value:.4f} at {rate}" for rate, value in found.items())
        kind = [f"rank {rank}" if rank else "full", f"{found[best]:.4f}", best, f"{auto:g}", each]
        lines.append(f"| {' | '.join(kind)} |")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results[name] = "\n".join([*lines, ""])
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text("\n".join([HEAD, *results.values()]))


def base() -> str:
    make_tiny(RUNS / "tiny")
    session = tandem.Session(RUNS / "tiny")
    learn(session, chats(session, 0, 4096, 0.5), 250, 4e-3)
    return str(session.export(RUNS / "base"))


def chats(session: tandem.Session, seed: int, count: int, careless: float) -> list:
    rows = warm_start(count, seed, difficulty=1, careless=careless)
    return training_samples(session.renderer, [row["messages"] for row in rows], loss="assistant")


def data(samples: list) -> list[Datum]:
    total = sum(mask.sum() for _, mask in samples)
    weighted = [(tokens, (mask / total).astype(np.float32)) for tokens, mask in samples]
    return [Datum(tokens=t, weights=w, advantages=w, logprobs=w) for t, w in weighted]


def learn(session: tandem.Session, samples: list, steps: int, rate: float) -> None:
    for step in range(steps):
        at = permutation(len(samples), "lora regret", step)[:BATCH]
        session.forward_backward(data([samples[i] for i in at]))
        session.optim_step(rate)


if __name__ == "__main__":
    main()
