"""Places of the parts of Hugging Face weights in Megatron's own weights.

Megatron keeps query, key and value rows together by group of heads, gate and up in one weight, and
each expert by itself; it pads the vocabulary. What a process holds of a Hugging Face weight is a
box of it nevertheless, so checkpoints, exports and engines see no difference.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tandem.model.boxes import Box
from tandem.model.config_file import head_size

View = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Slot:
    """The place where Megatron keeps a process's part of a Hugging Face weight.

    sources: Megatron's parameters, of which `view` picks what belongs to the part, in order.
    """

    box: Box
    sources: Sequence[nn.Parameter]
    view: View
    is_expert: bool = False
    of_own_heads: bool = False  # its gradients are those of a process's own heads only

    def read(self, of: Callable[[nn.Parameter], Tensor]) -> Tensor:
        """Read the part, float32 [box.shape], from what `of` gives for each of Megatron's
        parameters."""
        parts = [self.view(of(source)).float().flatten() for source in self.sources]
        return torch.cat(parts).view(self.box.shape)

    @torch.no_grad()
    def write(self, part: Tensor) -> None:
        """Write a part into Megatron's parameters."""
        rows = part.reshape(len(self.sources), -1)
        for source, row in zip(self.sources, rows, strict=True):
            target = self.view(source)
            target.copy_(row.view(target.shape))


@dataclass(frozen=True)
class Place:
    """The place of a process in the dimensions that divide weights: (its number, their size)."""

    tensor: tuple[int, int]
    expert: tuple[int, int]


def _all(t: Tensor) -> Tensor:
    return t


def _rows(start: int, stop: int, t: Tensor) -> Tensor:
    return t[start:stop]


def _heads(sizes: tuple[int, int, int], start: int, stop: int, t: Tensor) -> Tensor:
    """Pick heads start .. stop - 1 of each group of query, key and value heads. sizes: groups,
    heads of one, rows of a head."""
    groups, heads, rows = sizes
    return t.view(groups, heads, rows, -1)[:, start:stop]


# In a layer: Hugging Face's name, Megatron's name, the axis that tensor parallelism divides.
PLAIN = (
    ("input_layernorm.weight", "input_layernorm.weight", None),
    ("self_attn.q_norm.weight", "self_attention.q_layernorm.weight", None),
    ("self_attn.k_norm.weight", "self_attention.k_layernorm.weight", None),
    ("self_attn.o_proj.weight", "self_attention.linear_proj.weight", 1),
    ("post_attention_layernorm.weight", "pre_mlp_layernorm.weight", None),
    ("mlp.down_proj.weight", "mlp.linear_fc2.weight", 1),
    ("mlp.gate.weight", "mlp.router.weight", None),
)
OF_A_HEAD = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")


def find_slots(
    module: Any, config: Any, shapes: dict[str, torch.Size], at: Place
) -> dict[str, Slot]:
    """Find the slots of a process, by Hugging Face name. shapes: of the whole weights.

    Raises ValueError if a weight of either side has no partner.
    """
    own = dict(module.named_parameters())
    slots = dict(_outer_slots(own, shapes, at))
    for number, layer in enumerate(module.decoder.layers):
        inner = f"decoder.layers.{number}."
        parts = {n.removeprefix(inner): p for n, p in own.items() if n.startswith(inner)}
        outer = f"model.layers.{layer.layer_number - 1}."
        whole = {n.removeprefix(outer): s for n, s in shapes.items() if n.startswith(outer)}
        found = dict(_layer_slots(parts, whole, config, at))
        slots |= {outer + name: slot for name, slot in found.items()}
        if missing := whole.keys() - found.keys():
            raise ValueError(f"Megatron's layer has no place for {sorted(missing)}")
    used = {id(source) for slot in slots.values() for source in slot.sources}
    if unused := [name for name, p in own.items() if id(p) not in used]:
        raise ValueError(f"the model has no weights for Megatron's {unused}")
    return slots


def _outer_slots(
    own: dict[str, nn.Parameter], shapes: dict[str, torch.Size], at: Place
) -> Iterator[tuple[str, Slot]]:
    """Yield the slots of embedding, last norm and head."""
    embedding = "model.embed_tokens.weight"
    head = "lm_head.weight" if "lm_head.weight" in shapes else embedding
    for name, source in (
        (embedding, "embedding.word_embeddings.weight"),
        (head, "output_layer.weight"),  # of a tied one only in the last of several stages
    ):
        if source in own:
            vocabulary, width = shapes[name]
            rows = len(own[source])
            start = min(at.tensor[0] * rows, vocabulary)
            real = min(rows, vocabulary - start)  # the others pad the vocabulary
            box = Box((start, 0), (real, width), (vocabulary, width))
            yield name, Slot(box, [own[source]], partial(_rows, 0, real))
    if "decoder.final_layernorm.weight" in own:
        box = _box(shapes["model.norm.weight"], None, at.tensor)
        yield "model.norm.weight", Slot(box, [own["decoder.final_layernorm.weight"]], _all)


def _layer_slots(
    parts: dict[str, nn.Parameter], shapes: dict[str, torch.Size], config: Any, at: Place
) -> Iterator[tuple[str, Slot]]:
    for name, source, axis in PLAIN:
        if name in shapes and source in parts:
            box = _box(shapes[name], axis, at.tensor)
            yield name, Slot(box, [parts[source]], _all, of_own_heads=name in OF_A_HEAD)
    group = config.num_attention_heads // config.num_key_value_heads
    sizes = config.num_key_value_heads // at.tensor[1], group + 2, head_size(config)
    for part, (start, stop) in zip("qkv", ((0, group), (group, -1), (-1, None)), strict=True):
        for kind in ("weight", "bias"):
            name, source = f"self_attn.{part}_proj.{kind}", f"self_attention.linear_qkv.{kind}"
            if name in shapes and source in parts:
                box, view = _box(shapes[name], 0, at.tensor), partial(_heads, sizes, start, stop)
                yield name, Slot(box, [parts[source]], view)
    inner = config.intermediate_size // at.tensor[1]
    for name, start in (("mlp.gate_proj.weight", 0), ("mlp.up_proj.weight", inner)):
        if name in shapes:
            box, view = _box(shapes[name], 0, at.tensor), partial(_rows, start, start + inner)
            yield name, Slot(box, [parts["mlp.linear_fc1.weight"]], view)
    for name, linear in (("gate_up_proj", "linear_fc1"), ("down_proj", "linear_fc2")):
        if (name := f"mlp.experts.{name}") in shapes:
            box = _box(shapes[name], 0, at.expert)
            of_experts = (
                f"mlp.experts.local_experts.{i}.{linear}.weight" for i in range(box.shape[0])
            )
            yield name, Slot(box, [parts[n] for n in of_experts], _all, is_expert=True)


def _box(whole: Sequence[int], axis: int | None, place: tuple[int, int]) -> Box:
    """Return the box of one of `size` equal parts along an axis; None: all of the tensor."""
    number, size = place
    shape, start = list(whole), [0] * len(whole)
    if axis is not None:
        shape[axis] //= size
        start[axis] = number * shape[axis]
    return Box(tuple(start), tuple(shape), tuple(whole))
