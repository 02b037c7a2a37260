"""The key/value cache: contiguous slots of equal capacity, live sequences always in the first ones.

Keeping live slots in front lets decode read the cache as a view; a sequence that ends costs one slot copy.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tandem.errors import UserError
from tandem.model.attention import CachePlan, PackedPlan
from tandem.model.load import ExactModel

BLOCK = 16


class KVCache:
    """Room for `slots` sequences of `capacity` tokens: one tensor [layers, 2, slots, K, capacity, E], float32."""

    def __init__(self, model: ExactModel, slots: int, capacity: int):
        _, self.kv_heads, self.head_size = model.heads
        self.slots, self.capacity = slots, capacity
        # zeros, not empty: masked keys are multiplied by probability 0, which must not meet a NaN
        self.data = torch.zeros(model.config.num_hidden_layers, 2, slots, self.kv_heads, capacity, self.head_size)
        self.keys, self.values = list(self.data[:, 0].unbind()), list(self.data[:, 1].unbind())

    def move(self, source: int, target: int, length: int) -> None:
        self.data[:, :, target, :, :length] = self.data[:, :, source, :, :length]

    def decode_plan(self, positions: np.ndarray) -> CachePlan:
        return CachePlan(self.keys, self.values, torch.from_numpy(positions))


def bytes_per_token(model: ExactModel) -> int:
    _, kv_heads, size = model.heads
    return int(model.config.num_hidden_layers) * 2 * kv_heads * size * 4


def slots_within(model: ExactModel, budget: int, capacity: int) -> int:
    """How many sequences of capacity tokens the budget in bytes holds; UserError when not one."""
    needed = bytes_per_token(model) * capacity
    if needed > budget:
        raise UserError("the key/value cache cannot hold one sequence", where="rollout.cache_mb",
                        found=f"{budget >> 20} MiB", expected=f"at least {-(-needed >> 20)} MiB for {capacity} tokens",
                        next="raise rollout.cache_mb, or lower rollout.max_new_tokens")  # fmt: skip
    return budget // needed


class PrefillPlan(PackedPlan):
    """Packed attention over new prompts that also leaves their keys and values in the cache.

    lengths: rows of each prompt, in packed order; slots: for each prompt, the slots that share it.
    """

    def __init__(self, cache: KVCache, lengths: Sequence[int], slots: Sequence[Sequence[int]], group: int):
        firsts = np.cumsum([0, *lengths[:-1]])
        nothing = np.zeros(len(lengths), np.int64)
        super().__init__(np.stack([firsts, lengths, nothing, nothing], 1), group=group, kv_heads=cache.kv_heads)
        self.cache = cache
        copies = [
            (first, length, slot)
            for first, length, members in zip(firsts, lengths, slots, strict=True)
            for slot in members
        ]
        self.rows = torch.from_numpy(np.concatenate([np.arange(first, first + length) for first, length, _ in copies]))
        places = [_places(cache, slot, length) for _, length, slot in copies]
        self.places = torch.from_numpy(np.concatenate(places).reshape(-1))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        for new, store in ((k, self.cache.keys[layer]), (v, self.cache.values[layer])):
            rows = new.index_select(0, self.rows).view(-1, self.cache.head_size)
            store.view(-1, self.cache.head_size).index_copy_(0, self.places, rows)
        return super().attend(layer, q, k, v, scale, window)


def _places(cache: KVCache, slot: int, length: int) -> np.ndarray:
    """int64 [length, K]: rows of the cache seen as [slots * K * capacity, E]."""
    head = slot * cache.kv_heads + np.arange(cache.kv_heads)
    return head[None] * cache.capacity + np.arange(length)[:, None]
