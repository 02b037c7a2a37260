"""Meshes that do not fit a model, refused before its weights are loaded: one function a dimension.

This file imports no torch.
"""

from math import gcd
from typing import Any

from tandem.config.parallel import Parallel
from tandem.model.config_file import has_experts, is_sparse
from tandem.runtime.errors import UserError
from tandem.runtime.place import Place


def check_mesh(parallel: Parallel, shape: Any, where: str = "model.path") -> None:
    """Raise UserError if the mesh cannot divide a model of this transformers config. where: the key
    that names the model."""
    _check_tensor(parallel.tensor, shape, where)
    _check_pipeline(parallel, shape, where)
    _check_context(parallel, shape, where)
    _check_expert(parallel, shape, where)


def own_gpu(device: str, place: Place, count: int) -> int:
    """Return the number of the GPU of a process: each of a machine has its own.

    device: model.device; count: the GPUs that the process sees, which under Slurm may be its own
    alone (--gpus-per-task=1). Raises UserError if there are fewer GPUs than processes, or the
    config names a single one.
    """
    if place.by_slurm and count == 1 and ":" not in device:
        return 0
    local_size = place.local_size
    if local_size > count or ":" in device:
        raise UserError(
            "each process of a machine needs a GPU of its own",
            where=f"model.device = {device}",
            found=f"{local_size} processes and {count} GPUs" if local_size > count else "one GPU",
            expected="model.device=cuda, and as many GPUs as processes",
            next="start fewer processes on a machine, or set model.device=cpu",
        )
    return place.local_rank


def _check_tensor(size: int, shape: Any, where: str) -> None:
    counts = {
        "attention heads": shape.num_attention_heads,
        "key/value heads": shape.num_key_value_heads,
    }
    sparse = [is_sparse(shape, number) for number in range(shape.num_hidden_layers)]
    if not all(sparse):
        counts["inner features"] = shape.intermediate_size
    if any(sparse):
        counts["experts"] = shape.num_experts
    uneven = [f"{count} {name}" for name, count in counts.items() if count % size]
    if uneven:
        raise UserError(
            "the processes of a layer cannot have equal parts of it",
            where=f"parallel.tensor = {size}, {where}",
            found=", ".join(uneven),
            expected=f"multiples of {size}",
            next=_largest("tensor", size, gcd(*counts.values())),
        )


def _largest(dimension: str, size: int, count: int) -> str:
    """Name the largest size of a dimension, no larger than the one that was wished, that divides a
    count."""
    found = next(n for n in range(min(size, count), 0, -1) if count % n == 0)
    return f"set parallel.{dimension}={found}"


def _check_pipeline(parallel: Parallel, shape: Any, where: str) -> None:
    """Raise UserError if a stage of the pipeline would have no layer."""
    layers = shape.num_hidden_layers
    if parallel.pipeline > layers:
        raise UserError(
            "the model has fewer layers than the pipeline has stages",
            where=f"parallel.pipeline = {parallel.pipeline}, {where}",
            found=f"{parallel.pipeline} stages for {layers} layers",
            expected="at least one layer a stage",
            next=f"set parallel.pipeline={layers} or less",
        )


def _check_context(parallel: Parallel, shape: Any, where: str) -> None:
    """Check the key/value heads: there are fewest of them, and they divide the query heads."""
    heads, size = shape.num_key_value_heads // parallel.tensor, parallel.context
    if heads % size:
        of_a_layer = f" in each of {parallel.tensor} parts of a layer" * (parallel.tensor > 1)
        raise UserError(
            "the processes of a context cannot have equal shares of the attention heads",
            where=f"parallel.context = {size}, {where}",
            found=f"{heads} key/value heads{of_a_layer}",
            expected=f"a multiple of {size}",
            next=_largest("context", size, heads),
        )


def _check_expert(parallel: Parallel, shape: Any, where: str) -> None:
    size, sparse = parallel.expert, has_experts(shape)
    # a teacher or a critic may be dense
    if size == 1 or (not sparse and where != "model.path"):
        return
    if not sparse or shape.num_experts % (size * parallel.tensor):
        raise UserError(
            "the processes of a mesh cannot have equal parts of the experts",
            where=f"parallel.expert = {size}, {where}",
            found=f"{shape.num_experts} experts" if sparse else "a model without experts",
            expected=f"a multiple of parallel.expert x parallel.tensor = {size * parallel.tensor}",
            next=_largest("expert", size, shape.num_experts // parallel.tensor if sparse else 1),
        )
