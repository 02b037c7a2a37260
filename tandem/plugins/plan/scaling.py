"""Communication and time of an update over a mesh of GPUs, by arithmetic over the shapes.

Formulas are of what trainer/parallel does; results/scaling.md has them in words, with their checks
against published numbers. H, E and L are query heads, head size and layers; bytes are those that
one rank sends. GPUs are those of their vendor's data sheets, and the shares of them that a plan
assumes; nothing is measured. They know no run.
"""

from dataclasses import dataclass
from math import prod
from operator import itemgetter
from typing import Any

import numpy as np

from tandem.config.parallel import DIMENSIONS, Parallel
from tandem.model.config_file import head_size, is_sparse
from tandem.plugins.plan.shards import FLOAT32, Work, layer_parameters, part_of

# ---------------------------------------------------------------- GPUs, by their vendor's numbers

GB, TERA = 1e9, 1e12


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU in a node of eight. Rates are of one GPU and in one direction."""

    name: str
    flops: float  # FLOP/s of dense products in bfloat16
    memory: float  # bytes
    nvlink: float  # bytes/s to the others of its node
    network: float  # bytes/s to other nodes
    source: str
    node: int = 8  # GPUs of a node


# Data sheets give products with sparsity, twice those of dense matrices, and NVLink both ways,
# twice one way. Networks are those of the vendor's own systems, one adapter a GPU.
GPUS = {  # name, FLOP/s, bytes, NVLink, network, source
    "a100": Gpu(
        *("A100 80GB SXM", 312 * TERA, 80 * GB, 300 * GB, 25 * GB),
        "NVIDIA A100 data sheet; DGX A100: 8 x 200 Gb/s",
    ),
    "h100": Gpu(
        *("H100 SXM", 989 * TERA, 80 * GB, 450 * GB, 50 * GB),
        "NVIDIA H100 data sheet; DGX H100: 8 x 400 Gb/s",
    ),
    "h200": Gpu(
        *("H200 SXM", 989 * TERA, 141 * GB, 450 * GB, 50 * GB),
        "NVIDIA H200 data sheet; DGX H200: 8 x 400 Gb/s",
    ),
    "b200": Gpu(
        *("B200 SXM", 2250 * TERA, 180 * GB, 900 * GB, 50 * GB),
        "NVIDIA DGX B200 data sheet, an eighth of it; 8 x 400 Gb/s",
    ),
}


# Shares of the vendor's numbers that a plan counts on: of the FLOP/s in training, of NVLink and
# network, of the GPU's memory; the rest of that is for passing tensors and fragments.
PRODUCTS, LINKS, MEMORY = 0.4, 0.8, 0.9
ASSUMED = (
    f"{PRODUCTS:.0%} of peak FLOP/s in training, {LINKS:.0%} of the links, {MEMORY:.0%} of memory; "
    "no latencies, work evenly divided, gathers of weights behind the products"
)


# ---------------------------------------------------------------- communication and time

WEIGHTS = ("data", "expert", "context")  # dimensions whose ranks have copies of the weights


def communication(work: Work, mesh: Parallel) -> dict[str, float]:
    """Return the bytes that a rank sends in an update, by dimension: of weights those of the first
    stage, of states those of one between two others, if there is one.

    data, gradients: weights are gathered for each microbatch, layers twice and the root once, and
    float32 gradients are reduced and scattered once: together 3 M (W - 1) / W of M bytes where all
    is gathered twice in float32 (Zhao et al., arXiv 2304.11277, section 3.2; ZeRO, arXiv
    1910.02054, section 7.2.2).
    replicas: of HSDP, their gradients' sum.
    tensor: two sums a layer, forward and backward (Shoeybi et al. 2019, arXiv 1909.08053, section
    3).
    context: all-to-alls of q, k, v and the output, forward and backward (Ulysses, Jacobs et al.
    2023, arXiv 2309.14509, section 3.2).
    expert: each token to its experts and back (Lepikhin et al. 2020, arXiv 2006.16668, section 3).
    pipeline: the states forward, their gradients backward (Narayanan et al., arXiv 2104.04473,
    section 3.2); the first and the last stage send one of both.
    A checkpointed layer sends what its forward pass sends once more.
    """
    shape, width, count = work.shape, work.dtype.itemsize, work.microbatches(mesh)
    part, layers = part_of(shape, mesh, 0), -(-shape.num_hidden_layers // mesh.pipeline)
    rows = work.tokens(mesh) / mesh.context  # of a rank, in all microbatches
    passes = 3 if work.checkpointing else 2
    states = rows * shape.hidden_size * width
    heads = 2 * (shape.num_attention_heads + shape.num_key_value_heads) * head_size(shape)
    sparse = sum(is_sparse(shape, number) for number in range(layers))
    chosen = shape.num_experts_per_tok if sparse else 0
    shards = mesh.shard or mesh.replicas
    copies = mesh.replicas // shards
    trained = FLOAT32 * work.model.trained / work.model.count
    dense = width * count * (2 * part.dense - part.root)
    experts = width * count * 2 * part.experts
    owners = shards if mesh.shard else mesh.data * mesh.context
    return {
        "data": dense * _others(shards) + experts * _others(owners),
        "gradients": trained * (part.dense * _others(shards) + part.experts * _others(owners)),
        "replicas": 2 * trained * part.held(mesh) * _others(copies),
        "tensor": passes * layers * 2 * 2 * states * _others(mesh.tensor),
        "context": passes * layers * rows * heads * width / mesh.tensor * _others(mesh.context),
        "expert": passes * sparse * 2 * chosen * states * _others(mesh.expert),
        "pipeline": min(2, mesh.pipeline - 1) * states,
    }


def _others(size: int) -> float:
    """Return the share of a group's data that lies with its other ranks."""
    return (size - 1) / size


def rate(mesh: Parallel, dimension: str, gpu: Gpu) -> float:
    """Return the bytes/s of a rank in the group of a dimension of `communication`.

    Within a node that is NVLink's. Gathers over nodes use the adapters of all k ranks that the
    group has in a node, since each ring leaves by another one. Of an all-to-all what stays in the
    node does not pass them; gradients are reduced by one, each in rank order. A sum is half an
    all-to-all and half a gather.
    """
    axes = WEIGHTS if dimension in ("data", "gradients", "replicas") else (dimension,)
    sizes = [getattr(mesh, name) for name in DIMENSIONS]
    numbers = np.arange(prod(sizes)).reshape(sizes)
    group = numbers[tuple(slice(None) if name in axes else 0 for name in DIMENSIONS)].reshape(-1)
    if dimension in ("data", "gradients") and mesh.shard:
        group = group[: mesh.shard]
    if dimension == "replicas":
        group = group[:: mesh.shard or len(group)]
    near, size = int((group < gpu.node).sum()), len(group)
    if near == size:
        return gpu.nvlink
    ring = min(gpu.nvlink, gpu.network * near)
    exchange = min(gpu.nvlink, gpu.network * (size - 1) / (size - near))
    match dimension:
        case "data":
            return ring
        case "tensor" | "replicas":
            return 2 / (1 / ring + 1 / exchange)
        case "pipeline":
            return gpu.network
        case _:
            return exchange


def flops_per_token(
    shape: Any, length: float, *, adapters: int = 0, again: bool = False
) -> tuple[float, float]:
    """Return the FLOPs of a token, forward and backward, in a layer on average, and in the head.

    They are 6 a parameter that it meets (Kaplan et al. 2020, arXiv 2001.08361, section 2.1), a
    third each for the outputs, the gradients of inputs and those of weights, which frozen ones have
    not; and of causal attention 6 H E times the length (Chowdhery et al. 2022, arXiv 2204.02311,
    appendix B, of which the mask leaves half). adapters: parameters of LoRA, beside frozen weights;
    again: layers run forward twice (checkpointing).
    """
    layers, each_way = shape.num_hidden_layers, 2.0
    each = [layer_parameters(shape, number) for number in range(layers)]
    met = sum(layer.divided for layer in each)
    for number, layer in enumerate(each):
        if is_sparse(shape, number):
            routed = layer.experts * shape.num_experts_per_tok / shape.num_experts
            met += int(routed) + shape.hidden_size * shape.num_experts
    passes = (2 if adapters else 3) + again
    attention = (3 + again) * each_way * length * shape.num_attention_heads * head_size(shape)
    products = each_way * (passes * met + (3 + again) * adapters) / layers
    head = each_way * (2 if adapters else 3) * shape.vocab_size * shape.hidden_size
    return products + attention, head


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of an update: products, messages that they wait for by dimension, idle stages."""

    products: float
    waits: dict[str, float]
    bubble: float

    @property
    def total(self) -> float:
        return self.products + sum(self.waits.values()) + self.bubble

    @property
    def communication(self) -> float:
        """Return the share of communication."""
        return sum(self.waits.values()) / self.total

    @property
    def bound(self) -> str:
        """Name what takes most."""
        parts = {**self.waits, "products": self.products, "bubble": self.bubble}
        return max(parts.items(), key=itemgetter(1))[0]


def update_time(work: Work, mesh: Parallel, gpu: Gpu) -> Times:
    """Return the time of an update.

    Gathers of weights and reductions of gradients hide behind the products but for those of one
    layer (Zhao et al., arXiv 2304.11277, section 3.3); other messages are waited for. A pipeline
    of p stages is idle for (p - 1) / (m + p - 1) of m microbatches (Huang et al. 2019,
    arXiv 1811.06965, section 2.3); its slowest stage has the head.
    """
    layers = -(-work.shape.num_hidden_layers // mesh.pipeline)  # of the largest stage
    layer, head = flops_per_token(
        work.shape, work.length, adapters=work.model.adapters, again=work.checkpointing
    )
    stage = layer * layers / mesh.tensor + head
    products = work.tokens(mesh) / mesh.context * stage / (gpu.flops * PRODUCTS)
    waits = {
        name: sent / (rate(mesh, name, gpu) * LINKS)
        for name, sent in communication(work, mesh).items()
    }
    behind = waits["data"] + waits["gradients"]
    hidden = min(behind * (1 - 1 / layers), products)
    for name in ("data", "gradients"):
        waits[name] *= 1 - hidden / behind if behind else 1.0
    passes = products + sum(seconds for name, seconds in waits.items() if name != "replicas")
    bubble = passes * (mesh.pipeline - 1) / work.microbatches(mesh)
    return Times(products=products, waits=waits, bubble=bubble)
