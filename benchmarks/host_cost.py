"""Host time of an engine step that runs ahead of a GPU: passes are stubs, everything else is real.

    python benchmarks/host_cost.py [SEQUENCES ...] [--keep]

Prints one JSON line for each kind of batch: CPU milliseconds a step, the median of 100 steps. --keep:
also into results/host_cost.json, of which `benchmarks/gpu.py` makes a table of results/gpu.md.
"""

import json
import statistics
import sys
import time
from datetime import date
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from machine import describe, others_cpu_share
from transformers import AutoModelForCausalLM, Qwen3Config

from tandem.engine.engine import Engine
from tandem.engine.graphs import HostCopy
from tandem.engine.lookahead import Lookahead
from tandem.model.load import make_exact
from tandem.model.tiny import make_tokenizer
from tandem.model.tokenizer import decode_text
from tandem.plugins.triton.shared_splits import split_tiles
from tandem.runtime.rng import address
from tandem.types import Request, SamplingParams

# shortest and longest prompt, samples of each, stop strings, fewest new tokens (the most are 400);
# where fewest is 1, sequences end, and others that wait take their places
KINDS = {
    "equal": (512, 513, 1, (), 400),
    "mixed": (100, 600, 1, (), 400),
    "mixed, 8 samples": (100, 600, 8, (), 400),
    "mixed, a stop string": (100, 600, 1, ("###",), 400),
    "mixed, others wait": (100, 600, 1, (), 1),
}
STEPS = 100
TOKEN = 20  # that each step samples: "+"
KEPT = Path(__file__).parent.parent / "results" / "host_cost.json"
SIZES = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 32, "head_dim": 16}
SIZES |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


class StubModel:
    """A model whose passes return zeros at once."""

    def __init__(self):
        config = Qwen3Config(**SIZES, max_position_embeddings=4096, tie_word_embeddings=True)
        made = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        model = make_exact(made.eval())
        self.config, self.head, self.heads = model.config, model.head, model.heads
        self.window, self.device, self.changes = model.window, model.device, model.changes
        self.kernels = SimpleNamespace(shared_tiles=self.shared_tiles, runs_ahead=False)

    def shared_tiles(self, runs, heads, keys):
        return split_tiles(runs.table, runs.starts, 128, 64 // (heads // keys.shape[1]))

    def paged_plan(self, keys, values, runs):
        return None

    def hidden(self, tokens, positions, plan, choices):
        return torch.zeros(len(tokens), SIZES["hidden_size"])


def engine_ahead(model, sequences: int) -> Engine:
    """Make an engine that runs ahead, whose device steps return TOKEN for each row."""
    decode = partial(decode_text, make_tokenizer())
    engine = Engine(model, decode, cache_bytes=1 << 28, max_batch=sequences)
    engine.lookahead = Lookahead(model, engine.cache, sequences, None)
    engine.lookahead._step.run = lambda live, *others: HostCopy(
        torch.full((live,), TOKEN), torch.zeros(live)
    )
    return engine


def measure(model, sequences: int, kind: str) -> dict[str, float | int | str]:
    shortest, longest, samples, stop, fewest = KINDS[kind]
    engine, rng, submitted = engine_ahead(model, sequences), np.random.default_rng(0), []
    for number in range(sequences if fewest == 400 else 3 * sequences):
        if number % samples == 0:
            prompt = rng.integers(0, 32, int(rng.integers(shortest, longest)))
        most = int(rng.integers(fewest, 401))
        params = SamplingParams(max_new_tokens=most, stop=stop, stop_token_ids=(2, 3))
        request = Request(key=address("host", number), prompt=prompt, params=params)
        submitted.append(engine.submit(request))
    while sum(bool(sequence.tokens) for sequence in submitted) < sequences:
        engine.step()
    times = []
    for _ in range(STEPS):
        before = time.thread_time()
        engine.step()
        times.append(1e3 * (time.thread_time() - before))
    mean = sum(times) / STEPS
    row = {"median_ms": round(statistics.median(times), 3), "mean_ms": round(mean, 3)}
    return {"sequences": sequences, "lengths": kind, **row}


def main() -> None:
    torch.set_num_threads(1)
    model, rows = StubModel(), []
    counts = [int(word) for word in sys.argv[1:] if word != "--keep"] or [1, 64, 256]
    for sequences in counts:
        for kind in KINDS:
            rows.append(measure(model, sequences, kind))
            print(json.dumps(rows[-1]), flush=True)
    if "--keep" in sys.argv:
        busy = f"{describe()}, of which others had {others_cpu_share():.0%} right after"
        found = {"machine": busy, "date": str(date.today()), "rows": rows}
        KEPT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
