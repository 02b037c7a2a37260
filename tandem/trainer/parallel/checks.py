"""Meshes that do not fit a model, refused before its weights are loaded.

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
    tensor, layers = parallel.tensor, shape.num_hidden_layers
    sparse = [is_sparse(shape, number) for number in range(layers)]
    experts = shape.num_experts if has_experts(shape) else 1
    heads = shape.num_key_value_heads
    of_a_layer = {"attention heads": shape.num_attention_heads, "key/value heads": heads}
    of_a_layer |= {} if all(sparse) else {"inner features": shape.intermediate_size}
    of_a_layer |= {"experts": experts} if any(sparse) else {}
    _require_equal("tensor", tensor, where, of_a_layer)
    if parallel.pipeline > layers:
        raise UserError(
            "the model has fewer layers than the pipeline has stages",
            where=f"parallel.pipeline = {parallel.pipeline}, {where}",
            found=f"{parallel.pipeline} stages for {layers} layers",
            expected="at least one layer a stage",
            next=f"set parallel.pipeline={layers} or less",
        )
    # key/value heads: there are fewest of them, and they divide the query heads
    part = f" in each of {tensor} parts of a layer" * (tensor > 1)
    _require_equal("context", parallel.context, where, {f"key/value heads{part}": heads // tensor})
    if has_experts(shape) or where == "model.path":  # a teacher or a critic may be dense
        name = f"experts{part}" if has_experts(shape) else "expert, as the model is dense"
        _require_equal("expert", parallel.expert, where, {name: experts // tensor or 1})


def _require_equal(dimension: str, size: int, where: str, counts: dict[str, int]) -> None:
    """Raise UserError unless each count is a multiple of the size of a dimension."""
    if uneven := [f"{count} {name}" for name, count in counts.items() if count % size]:
        common = gcd(*counts.values())
        largest = next(n for n in range(min(size, common), 0, -1) if common % n == 0)
        raise UserError(
            "the processes of a mesh cannot have equal shares of the model",
            where=f"parallel.{dimension} = {size}, {where}",
            found=", ".join(uneven),
            expected=f"multiples of {size}",
            next=f"set parallel.{dimension}={largest}",
        )


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
