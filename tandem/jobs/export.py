"""A divided model as a Hugging Face directory: each rank puts the tensors of one file together and
writes it. None holds the whole model.

    rank r   model-0000r-of-0000N.safetensors, about 1/N of the bytes
    rank 0   model.safetensors.index.json, when all have written
"""

import json
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from tandem.model.linear import Adapter, Part
from tandem.model.load import ExactModel
from tandem.model.stock import INDEX
from tandem.run_folder.shards import not_written
from tandem.runtime.disk import disk_errors, os_error
from tandem.runtime.errors import UserError
from tandem.trainer.learner import Learner

_FACTORS = ("lora_A.weight", "lora_B.weight")


def save_weights(learner: Learner, folder: Path) -> None:
    """Write the weights of a divided model into a folder, on all ranks.

    Raises UserError on rank 0 if one of them cannot write its file.
    """
    ranks, shares = learner.ranks, divide(learner.ranks.shapes(learner.model), learner.ranks.size)
    own: dict[str, Tensor] = {}
    for rank, names in enumerate(shares):
        own |= ranks.collect(learner.model, names, to=rank)
    names = [f"model-{n:05d}-of-{len(shares):05d}.safetensors" for n in range(1, len(shares) + 1)]
    found: dict[str, int] | UserError = {}
    if own:
        found = _save(learner.whole, merge(learner.model, own), folder / names[ranks.rank])
    results = ranks.gather_all(found)
    if ranks.rank > 0:
        return
    for rank, result in enumerate(results):
        if isinstance(result, UserError):
            raise not_written(rank, vars(result))
    files = dict(zip(names, results, strict=False))
    index = {  # as transformers reads it
        "metadata": {"total_size": sum(sum(sizes.values()) for sizes in files.values())},
        "weight_map": {name: file for file, sizes in files.items() for name in sizes},
    }
    text = json.dumps(index, indent=2, sort_keys=True)
    (folder / INDEX).write_text(text + "\n", encoding="utf-8")


def weights_saver(learner: Learner) -> Callable[[Path], None]:
    """Return what has all ranks write a divided model's weights into a folder."""

    def save(folder: Path) -> None:
        learner.ranks.order("export", learner=learner.name, folder=str(folder.absolute()))
        save_weights(learner, folder)

    return save


def divide(shapes: Mapping[str, Sequence[int]], ranks: int) -> list[list[str]]:
    """Divide names of weights into shares of about the same size, at most one for
    each rank; a weight's adapter is in its share."""
    units = [
        [name, *(factor for factor in _factors(name) if factor in shapes)]
        for name in shapes
        if not name.endswith(_FACTORS)
    ]
    total, start, shares = sum(map(prod, shapes.values())), 0, dict[int, list[str]]()
    for unit in units:
        shares.setdefault(start * ranks // total, []).extend(unit)
        start += sum(prod(shapes[name]) for name in unit)
    return list(shares.values())


def merge(model: ExactModel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Merge the adapter's factors among weights into theirs; return the others by plain names."""
    merged = {}
    for name, weight in weights.items():
        a, b = _factors(name)
        if a in weights and model.lora is not None:
            adapter = Adapter(weights[a], weights[b], model.lora.alpha / model.lora.rank)
            merged[name] = Part(weight, None, adapter).merged()
        elif not name.endswith(_FACTORS):
            merged[name] = weight
    return merged


def _factors(name: str) -> list[str]:
    return [name.removesuffix("weight") + factor for factor in _FACTORS]


def _save(model: ExactModel, weights: dict[str, Tensor], file: Path) -> dict[str, int] | UserError:
    """Write some of a model's plain weights as transformers would; return the bytes of each tensor,
    or the error of the disk."""
    from transformers.core_model_loading import revert_weight_conversion

    named = revert_weight_conversion(model.module, weights)
    try:
        with disk_errors(file):
            try:
                tensors = {n: t.contiguous() for n, t in named.items()}
                save_file(tensors, file, metadata={"format": "pt"})
            except SafetensorError as error:
                raise os_error(error, file) or error from None
    except UserError as error:
        return error
    return {name: tensor.numel() * tensor.element_size() for name, tensor in named.items()}
