"""results/scaling.md: formulas in words, plans of public models, checks, and what was measured."""

import json
from pathlib import Path

import torch
from scaling_checks import checks
from scaling_models import QWEN3, model_of

from tandem.config.parallel import DIMENSIONS, Parallel
from tandem.config.schema import Config
from tandem.model.placement import Placement
from tandem.plugins.plan.footprint import Footprint, Sizes
from tandem.plugins.plan.meshes import plans, smallest
from tandem.plugins.plan.scaling import ASSUMED, GPUS
from tandem.plugins.plan.shards import parameters

ROOT = Path(__file__).parent.parent
JSON, PAGE = ROOT / "results" / "scaling.json", ROOT / "results" / "scaling.md"
GPU, COUNTS, GIB = GPUS["h200"], (1, 8, 64, 512), 2**30
PROMPT, NEW = 256, 512
CONFIG = {
    "rl": {"prompts_per_step": 512, "group_size": 8},
    "rollout": {"max_new_tokens": NEW, "cache_mb": 32768, "max_batch": 512},
    "train": {"tokens_per_microbatch": 8192, "activation_checkpointing": True},
}

FORMULAS = """\
# Scaling

Written by `make scaling` (`benchmarks/scaling.py`); raw numbers in scaling.json. Time, memory and
communication of a step on a mesh of GPUs by arithmetic, as `tandem plan RECIPE --gpus 64` prints them for a
recipe of yours. No GPU has run Tandem's meshes: tables of GPUs are plans, and say so.

## Formulas

In code: `tandem/plugins/plan/shards.py` (memory), `tandem/plugins/plan/scaling.py` (communication, time),
`tandem/plugins/plan/meshes.py` (which meshes are possible), `tandem/plugins/plan/scaling.py` (GPUs, from their vendor's data sheets).
W is the shards (data x expert x context, or `parallel.shard`), t, c, p, e the sizes of tensor, context, pipeline and expert,
m the microbatches of a rank, M the bytes of a rank's weights.

**Memory of a rank** (ZeRO, arXiv 1910.02054, section 3.1; FSDP, arXiv 2304.11277, section 3.2.1)

| what | bytes |
|---|---|
| weights and masters | 4 P / (t p W) as float32 parts; bf16 weights only of the two layers and the root that are gathered |
| moments | 8 P / (t p W), of what Muon steps 4 |
| gradients | 4 P / (t p W) and those of two layers and the root; with m > 1 they add up undivided: 4 P / (t p) |
| experts | as above with e of t p e and shards data x context |
| activations | those of one microbatch (`tandem/plugins/plan/shards.py`) with tokens / c, heads and inner features / t, layers / p; the first stage keeps min(m, p) of them (arXiv 2104.04473, section 2.2.1) |
| engine | rank 0 holds a whole copy of the policy's weights, and the cache |
| while loading | each model is whole in bf16 on each rank before it is divided, a layer of it in float32, beside the models before it |

The operators of the activations are those that run on a CPU; fused kernels keep less.

**Bytes that a rank sends in an update**

| dimension | bytes | source |
|---|---|---|
| data (FSDP2) | m times M (W-1)/W for the layers twice and the root once, in bf16; gradients once, in float32: 3 M (W-1)/W where m = 1 and all is of one type | arXiv 2304.11277, section 3.2; 1910.02054, section 7.2.2 |
| replicas (HSDP) | 2 M/W (R-1)/R of float32 gradients, R replicas | arXiv 2304.11277, section 3.2.2 |
| tensor | two sums of the states a layer, forward and backward, each 2 (t-1)/t of them | arXiv 1909.08053, section 3 |
| context (Ulysses) | all-to-alls of q, k, v and the output, forward and backward, each (c-1)/c of a rank's part | arXiv 2309.14509, section 3.2 |
| expert | each token to its experts and back, forward and backward, (e-1)/e of them | arXiv 2006.16668, section 3 |
| pipeline | states forward, their gradients backward | arXiv 2104.04473, section 3.2 |

A checkpointed layer runs forward once more, and sends so much more. Within a node of 8 a rank has NVLink's rate. Over nodes a
gather is a ring, and has the adapters of all k ranks of the group in a node. An all-to-all has a rank's own one, for what leaves the
node, (n-k)/(n-1) of it with n ranks. Reductions are all-to-alls, since they sum in rank order; a sum (tensor, replicas) is half
a reduction and half a gather. Megatron's ranks of data hold all of a rank's weights and their state; that its gradients are
summed twice as long is not counted.

**Time of an update** = products (6 FLOPs a parameter and token, 4 where it is frozen (LoRA), arXiv 2001.08361, section 2.1; 6 H E x length of causal attention in
a layer, arXiv 2204.02311, appendix B; of layers a forward pass more with checkpointing; of the largest stage) + messages that are waited for. Gathers of weights and
reductions of gradients hide behind the products, but for one layer's. All of it x (m + p - 1) / m, as a pipeline is idle for
(p - 1) / (m + p - 1) of the time (arXiv 1811.06965, section 2.3).

Assumed, and printed with each plan: {assumed}.

| GPU | dense bf16 | memory | NVLink, one way | network a GPU | source |
|---|---|---|---|---|---|
"""


def write_page() -> None:
    lines = [FORMULAS.format(assumed=ASSUMED).rstrip(), *gpus(), "", *tables(), *check_rows()]
    PAGE.write_text("\n".join([*lines, *measured()]) + "\n")


def gpus() -> list[str]:
    return [
        f"| {gpu.name} | {gpu.flops / 1e12:,.0f} TFLOP/s | {gpu.memory / 1e9:,.0f} GB "
        f"| {gpu.nvlink / 1e9:,.0f} GB/s | {gpu.network / 1e9:,.0f} GB/s | {gpu.source} |"
        for gpu in GPUS.values()
    ]


def tables() -> list[str]:
    config = Config.model_validate(CONFIG)
    lines = [
        f"## Plans of {GPU.name}",
        "",
        f"A GRPO step of {config.rl.prompts_per_step} prompts x {config.rl.group_size} samples, {PROMPT} + {NEW} tokens, one update, microbatches of "
        f"{config.train.tokens_per_microbatch:,} tokens, activation checkpointing, bf16. The fastest mesh that fits; tokens of the update by GPU.",
        "",
    ]
    for name, shape in QWEN3.items():
        lines += [f"### {name}, {parameters(shape):,} parameters", ""]
        lines += [
            "| GPUs | mesh | update | tok/s a GPU | messages | bubble | memory of rank 0 | bound by |"
        ]
        lines += ["|---|---|---|---|---|---|---|---|"]
        place = Placement(torch.device("cuda"), torch.bfloat16)
        sizes = Sizes(place=place, policy=model_of(shape))
        run = Footprint(sizes=sizes, config=config, command="train", longest=PROMPT)
        lines += [row(run, count) for count in COUNTS] + [""]
    return lines


def row(run: Footprint, count: int) -> str:
    work, found = run.work, plans(run, count, GPU)
    if not found:
        least = smallest(run, GPU)
        return (
            f"| {count} | does not fit; the smallest power of two that does: {least} | | | | | | |"
        )
    best = found[0]
    total = best.times.total
    rate = work.clusters * work.cluster / total / count
    cells = [
        str(count),
        mesh_text(best.mesh),
        f"{total:.3g} s",
        f"{rate:,.0f}",
        f"{best.times.communication:.0%}",
        f"{best.times.bubble / total:.0%}",
        f"{best.needed / GIB:.0f} GiB",
        best.times.bound,
    ]
    return f"| {' | '.join(cells)} |"


def mesh_text(mesh: Parallel) -> str:
    sizes = {name: getattr(mesh, name) for name in (*DIMENSIONS, "shard")}
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one"


def check_rows() -> list[str]:
    lines = ["## Checked against published numbers", ""]
    lines += ["| what | published | formula | ratio | why |", "|---|---|---|---|---|"]
    for check in checks():
        published, predicted = (
            f"{number(x)} {check.unit}".rstrip() for x in (check.published, check.predicted)
        )
        lines.append(
            f"| {check.what} | {published} | {predicted} | {check.ratio:.2f} | {check.text} |"
        )
    return [*lines, ""]


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def measured() -> list[str]:
    lines = ["## Measured here", ""]
    if not JSON.exists():
        return [*lines, "Not measured yet: `make scaling`."]
    result = json.loads(JSON.read_text())
    rows = result["rows"]
    count = rows["1"]["parameters"]
    lines += [f"{result['machine']}; {result['date']}.", ""]
    lines += [
        f"A random Qwen3 of {count:,} parameters in float32, 16 sequences of 256 tokens an update in microbatches of two, data parallel over gloo,",
        "one thread a process"
        + (
            ", pinned to cores of their own where there are as many."
            if rows["1"]["pinned"]
            else "."
        ),
        "State is weights, gradients and moments that the largest rank holds between two passes; bytes sent are counted by PyTorch's profiler.",
        "",
        "| processes | pinned | tok/s | state a rank | x processes | by formula | peak RSS a rank | without imports | planned | sent a rank and update | by formula |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    mib = 2**20
    for size, row in rows.items():
        own = row["peak RSS bytes"] - row["RSS bytes before the model"]
        lines.append(
            f"| {size} | {'yes' if row['pinned'] else 'no'} | {row['tokens/s']:,.0f} | {row['state bytes'] / mib:,.1f} MiB "
            f"| {int(size) * row['state bytes'] / rows['1']['state bytes']:.3f} | {row['state bytes by formula'] / mib:,.1f} MiB "
            f"| {row['peak RSS bytes'] / mib:,.0f} MiB | {own / mib:,.0f} MiB | {row['planned bytes'] / mib:,.0f} MiB | {row['sent bytes'] / mib:,.1f} MiB | {row['sent bytes by formula'] / mib:,.1f} MiB |"
        )
    lines += [
        "",
        "Peak RSS falls by less than state: gradients of several microbatches add up undivided, and activations are those of a microbatch at any size. Planned is what the formulas count of a rank; packed weights, what the allocator keeps and the measurement itself come on top.",
    ]
    return lines
