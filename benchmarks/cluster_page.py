"""results/cluster.md: the table of each section, from results/cluster.json."""

import json
from pathlib import Path

ROOT = Path(__file__).parent.parent
JSON, PAGE = ROOT / "results" / "cluster.json", ROOT / "results" / "cluster.md"
Row = tuple[str, str, str]  # what was done, its result, how it was seen

HEAD = """\
# What ran of clusters

[The guide](../docs/guide/cluster.md) says how each part is used. Written by `make cluster` (`benchmarks/cluster.py`); the rows are in cluster.json. Each table is what ran on the machine that it
names, and what did not. A row that says "by hand" was run by its commands one by one, and not by that program.
"""
TEXTS = {
    "ray": "## Ray\n",
    "stream": "## TransferQueue\n",
    "weights": "## Transports of weights\n",
    "delta": "## Deltas in training\n",
    "vllm": "## vLLM rollouts\n",
    "smollm2": """\
## SmolLM2 with vLLM's rollouts

`recipes/smollm2.toml` with `rollout.engine=vllm rollout.workers=1 rl.correction=tis`: GRPO without a warm start, 64 completions a step, new
weights after each, microbatches of 512 tokens.
""",
    "model": """\
## Many replicas, by simulation

`benchmarks/cluster_model.py` drives the pool's own dispatcher on a virtual clock, with `rollout.staleness` + 1 steps rolled out at once
([durability.md](../docs/concepts/durability.md)). No replica runs: each
has 64 slots at 50 tokens/s, loads weights in 5 s, and gets 64 episodes a step; the trainer takes as long for a step as full replicas do for
its tokens. Lengths are log-normal (median 2,000, sigma 0.7, at most 16,000 tokens): a stated distribution, fitted to no recorded run. The
driver's seconds are real, of the dispatcher and of the messages of a completion of 2,000 tokens.

- What keeps slots empty is that a worker has one version at a time: a straggler holds the other slots of its own replica, and work that
  a replica has begun is not handed on. An engine that samples two versions at once would fill them.
- Dispatch goes over all workers at each message, so it grows with their number; the messages (JSON, base64) do not. Workers indexed by version
  would move the first, arrays as bytes the second. Fewer, larger replicas have the same effect.
""",
}


def write_page() -> None:
    """Write the page; a section without text has its table alone."""
    results = json.loads(JSON.read_text())
    lines = [HEAD]
    for name in [*TEXTS, *(other for other in results if other not in TEXTS)]:
        lines.append(TEXTS.get(name, f"## {name}\n"))
        lines += table(results[name]) if name in results else ["Not run here yet.", ""]
    PAGE.write_text("\n".join(lines).rstrip() + "\n")


def table(section: dict) -> list[str]:
    rows = [f"| {what} | {result} | {how} |" for what, result, how in section["rows"]]
    place = f"{section['machine']}, {section['date']}"
    return [f"Measured: {place}.", "", "| what | result | how |", "|---|---|---|", *rows, ""]
