"""Memory by arithmetic over the shapes: what autograd keeps of a microbatch, and a rank in a mesh.

Of a mesh the formulas are of what trainer/parallel does; results/scaling.md has them in words, with
their checks against published numbers. Bytes are of one rank. They know no run.

What autograd keeps is that of the operators of model/layers.py and model/logprobs.py on a CPU;
fused kernels keep less. Of transformers' dense layers (model/general.py) it is a bound; of their
experts it is not, which keep up to twice as much. D, H, K and E are hidden size, query heads,
key/value heads and head size.
"""

import copy
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch

from tandem.config.parallel import Parallel
from tandem.model.config_file import head_size, heads_of, inner_size, is_sparse, kv_heads_of
from tandem.model.onednn import padded_rows
from tandem.model.paths import divisible
from tandem.trainer.optimizer import BUCKET

FLOAT32, INT64 = 4, 8  # bytes


def activation_bytes(
    shape: Any, tokens: int, dtype: torch.dtype, *, checkpointing: bool, head: bool = True
) -> int:
    """Return the most bytes kept at once of so many tokens, all of which carry loss.

    shape: the transformers config. With checkpointing those are the layers' inputs and one layer,
    which is run again. head: the output projection is trained, so the log-probs keep its gradient.
    """
    outer = outer_bytes(shape, tokens, dtype, head=head)
    return layers_bytes(shape, tokens, dtype, checkpointing=checkpointing) + outer


def layers_bytes(
    shape: Any, tokens: int, dtype: torch.dtype, *, checkpointing: bool, microbatches: int = 1
) -> int:
    """Return the bytes of so many tokens in the layers; microbatches: those whose backward pass is
    to come."""
    width, layers = dtype.itemsize, shape.num_hidden_layers
    each = [_layer_bytes(shape, number, width, whole=checkpointing) for number in range(layers)]
    inputs = layers * width * shape.hidden_size
    kept = microbatches * inputs + max(each) if checkpointing else microbatches * sum(each)
    return int(padded_rows(tokens, dtype) * kept)


def outer_bytes(shape: Any, tokens: int, dtype: torch.dtype, *, head: bool = True) -> int:
    """Return the bytes of so many tokens outside of the layers: the rotation, the last norm, the
    states before the output projection with their gradient, log-probs and indices."""
    width, vocabulary = dtype.itemsize, FLOAT32 * shape.vocab_size * shape.hidden_size * head
    rotation, states = 2 * width * head_size(shape), 2 * width * shape.hidden_size
    norm = _norm_bytes(shape.hidden_size, width if divisible(shape) else 2 * FLOAT32)
    each = rotation + norm + states + 2 * FLOAT32 + 3 * INT64
    return int(padded_rows(tokens, dtype) * each + vocabulary)


def _layer_bytes(shape: Any, number: int, width: int, *, whole: bool) -> int:
    """Return bytes of a token in a layer. whole: with what its backward pass would make again
    (`made_again`)."""
    hidden, size = shape.hidden_size, head_size(shape)
    query, keys = heads_of(shape) * size, kv_heads_of(shape) * size
    if not divisible(shape):  # a bound of dense layers: operators differ from model to model
        return int(width * (13 * hidden + 2 * (query + keys) + 4 * inner_size(shape)))
    rotated, values, attended = query + keys, keys, query
    kept = 2 * _norm_bytes(hidden, width) + width * (whole * hidden + rotated + values + attended)
    if shape.model_type.startswith("qwen3"):  # norms of queries and keys, which keep their input
        heads = shape.num_attention_heads + shape.num_key_value_heads
        kept += heads * _norm_bytes(size, width)
    if is_sparse(shape, number):
        # of each of its experts the input, gate and up, their product, the value, also weighted
        chosen = shape.num_experts_per_tok
        expert = width * (2 * hidden + 3 * shape.moe_intermediate_size) + FLOAT32 * hidden
        indices = INT64 * 2 + FLOAT32 * 2
        kept += width * hidden + FLOAT32 * shape.num_experts + chosen * (expert + indices)
        return int(kept)
    return int(kept + width * (whole * hidden + (2 + whole) * shape.intermediate_size))


def _norm_bytes(features: int, width: int) -> int:
    return width * features + FLOAT32


# ---------------------------------------------------------------- a rank of a mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model without its storage: parameters, and bytes that it takes less than AdamW in its
    type."""

    shape: Any  # transformers config
    count: int  # parameters
    adapters: int = 0  # parameters of LoRA; 0: all weights are trained
    momentum: int = 0  # parameters that Muon steps, which has one moment where AdamW has two
    saved_in_8bit: int = 0  # bytes that moments of 8 bits save
    saved_in_base: int = 0  # bytes that lora.base saves

    @property
    def trained(self) -> int:
        """Parameters that are trained, if it is."""
        return self.adapters or self.count

    @property
    def moments(self) -> int:
        """Bytes of the moments of all that is trained."""
        return 8 * self.trained - 4 * self.momentum - self.saved_in_8bit


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Updates of one step. A cluster is tokens that are trained together (a prompt and its samples,
    a chat); it stays on one rank."""

    model: Model
    dtype: torch.dtype  # of the weights that run
    clusters: int  # in an update
    cluster: int  # tokens of one
    length: float  # tokens of a sequence
    microbatch: int  # tokens at most, but for a larger cluster
    checkpointing: bool = False
    offload: bool = False  # the optimizer's state is in host memory
    megatron: bool = False  # whose ranks of data keep all weights and their optimizer's state
    updates: int = 1

    @property
    def shape(self) -> Any:
        return self.model.shape

    def tokens(self, mesh: Parallel) -> int:
        """Return the tokens of a rank in an update, those of the ranks of one share together."""
        return ceil(self.clusters / (mesh.data * mesh.expert)) * self.cluster

    def microbatches(self, mesh: Parallel) -> int:
        return max(1, ceil(self.tokens(mesh) / max(self.microbatch, self.cluster)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Parameters of a layer, by what divides them."""

    divided: int  # products, by tensor
    experts: int  # all of them, by expert and tensor
    copied: int  # norms and router, by neither


def layer_parameters(shape: Any, number: int) -> Layer:
    """Count the parameters of a layer."""
    hidden, size = shape.hidden_size, head_size(shape)
    query, keys = shape.num_attention_heads * size, shape.num_key_value_heads * size
    divided, copied = 2 * hidden * (query + keys), 2 * hidden
    if shape.model_type == "qwen2" or getattr(shape, "attention_bias", False):
        divided += query + 2 * keys
        copied += hidden * (shape.model_type != "qwen2")
    if shape.model_type.startswith("qwen3"):
        copied += 2 * size
    if is_sparse(shape, number):
        experts = 3 * hidden * shape.moe_intermediate_size * shape.num_experts
        return Layer(divided=divided, experts=experts, copied=copied + hidden * shape.num_experts)
    if getattr(shape, "mlp_bias", False):
        divided, copied = divided + 2 * shape.intermediate_size, copied + hidden
    divided += 3 * hidden * shape.intermediate_size
    return Layer(divided=divided, experts=0, copied=copied)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Parameters of a pipeline stage as one tensor and expert rank runs them, before FSDP."""

    dense: float  # of its layers and its root: all but experts
    experts: float
    layer: float  # the largest layer, with its experts
    root: int  # embedding, final norm and head

    @property
    def whole(self) -> float:
        return self.dense + self.experts

    def held(self, mesh: Parallel) -> float:
        """Count what FSDP leaves a rank of it: experts have no copies over the expert ranks."""
        shards = mesh.shard or mesh.replicas
        experts = shards if mesh.shard else mesh.data * mesh.context
        return self.dense / shards + self.experts / experts


def part_of(shape: Any, mesh: Parallel, stage: int) -> Part:
    """Count the parameters of a stage, of uneven ones the largest. Tied embeddings are in the first
    stage and in the last one."""
    each = -(-shape.num_hidden_layers // mesh.pipeline)
    first, last = stage == 0, stage == mesh.pipeline - 1
    layers = [layer_parameters(shape, stage * each + number) for number in range(each)]
    vocabulary, tied = shape.vocab_size * shape.hidden_size, shape.tie_word_embeddings
    root = vocabulary * first + shape.hidden_size * last
    root += vocabulary * (last and not (tied and first))
    dense = [layer.divided / mesh.tensor + layer.copied for layer in layers]
    experts = [layer.experts / (mesh.tensor * mesh.expert) for layer in layers]
    largest = max(a + b for a, b in zip(dense, experts, strict=True))
    return Part(dense=sum(dense) + root, experts=sum(experts), layer=largest, root=root)


def memory(work: Work, mesh: Parallel) -> dict[str, int]:
    """Return the bytes of a rank of the stage that needs most.

    16 bytes a parameter as in ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054, section 3.1), with
    float32 gradients 18; FSDP divides them by the shards, beside the layers that are gathered (Zhao
    et al. 2023, arXiv 2304.11277, section 3.2.1): the one that runs, the next one and the root. Of
    several microbatches gradients add up undivided until the last one (section 3.3.4).
    """
    stages = [_stage_memory(work, mesh, stage) for stage in {0, mesh.pipeline - 1}]
    return max(stages, key=lambda rows: sum(rows.values()))


def _stage_memory(work: Work, mesh: Parallel, stage: int) -> dict[str, int]:
    divided, width = mesh.replicas > 1 and not work.megatron, work.dtype.itemsize
    model = work.model
    if mesh.processes == 1:  # of any architecture
        part = Part(dense=model.count, experts=0, layer=0, root=0)
    else:
        part = part_of(work.shape, mesh, stage)
    held = part.held(mesh) if divided else part.whole
    passing = 2 * part.layer + part.root if divided else 0.0
    share = model.adapters / model.count if model.adapters else 1.0
    is_master = divided or (width == FLOAT32 and not work.megatron)
    masters = 0.0 if is_master else FLOAT32 * share * held
    muon, saved = model.momentum / model.count, model.saved_in_8bit / model.count
    moments, momentum = (8 * share * (1 - muon) - saved) * held, 4 * muon * held
    gradients = FLOAT32 * share * (held + passing)
    if divided and work.microbatches(mesh) > 1:
        gradients = FLOAT32 * share * part.whole
    rows = {"weights": (FLOAT32 if divided else width) * held, "gathered layers": width * passing}
    if work.offload:
        rows["optimizer's share"] = min(12 * BUCKET, masters + moments)
    else:
        rows |= {"masters": masters, "Adam moments": moments, "Muon momentum": momentum}
    rows |= {"gradients": gradients, "activations": _activations(work, mesh, stage)}
    return {name: round(size) for name, size in rows.items()}


def largest_layer(shape: Any) -> int:
    """Count the parameters of the largest layer, with its experts."""
    return round(part_of(shape, Parallel(), 0).layer)


def parameters(shape: Any) -> int:
    """Count the parameters of a model."""
    return round(part_of(shape, Parallel(), 0).whole)


def _activations(work: Work, mesh: Parallel, stage: int) -> int:
    """Return the bytes that wait for a backward pass: of 1F1B's first stage those of as many
    microbatches as there are stages (Narayanan et al. 2021, arXiv 2104.04473, section 2.2.1)."""
    tokens = -(-work.microbatch // mesh.context)
    open_ = min(work.microbatches(mesh), mesh.pipeline - stage)
    layers = layers_bytes(
        _local_shape(work.shape, mesh),
        tokens,
        work.dtype,
        checkpointing=work.checkpointing,
        microbatches=open_,
    )
    if stage < mesh.pipeline - 1:
        return layers
    return layers + outer_bytes(work.shape, tokens, work.dtype, head=not work.model.adapters)


def _local_shape(shape: Any, mesh: Parallel) -> Any:
    """Return the shape of a stage as a tensor rank runs it; norms and inputs are whole."""
    if mesh.tensor == mesh.pipeline == 1:
        return shape
    local = copy.copy(shape)
    local.head_dim = head_size(shape)
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        setattr(local, name, getattr(shape, name) // mesh.tensor)
    if shape.model_type == "qwen3_moe":
        local.moe_intermediate_size = shape.moe_intermediate_size // mesh.tensor
    local.num_hidden_layers = -(-shape.num_hidden_layers // mesh.pipeline)
    return local
