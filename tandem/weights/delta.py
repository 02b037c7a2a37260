"""A changed tensor as its difference from the version before, where that is shorter.

    dtype of the encoded tensor    its bytes
    ---------------------------    ---------
    uint8   elements, exact        changed elements of each BLOCK, int32; their new values; where
                                   they lie in their block, uint16
    other   the new tensor         itself

In bfloat16 most updates of RL are below the rounding of most weights, so few elements change.
Knows no transport.
"""

import numpy as np
import torch
from torch import Tensor

from tandem.types import Array
from tandem.weights.hashing import raw_bytes

BLOCK = 1 << 16  # elements, whose places in it are uint16
BITS = {2: torch.int16, 4: torch.int32}  # by bytes of an element: compared as they are, NaN and all


def encode(base: Tensor, new: Tensor) -> Tensor | None:
    """Return the shorter form of a tensor of which `base` is known; None if every bit is equal."""
    old, now = _flat_bits(base), _flat_bits(new)
    places = np.flatnonzero(old != now)
    if not len(places):
        return None
    blocks = _num_blocks(new.numel())
    if 4 * blocks + len(places) * (new.itemsize + 2) >= new.nbytes:
        return new
    counts = np.bincount(places // BLOCK, minlength=blocks).astype(np.int32)
    parts = counts, now[places], (places % BLOCK).astype(np.uint16)
    return torch.from_numpy(np.concatenate([part.view(np.uint8) for part in parts]))


def decode(base: Tensor, encoded: Tensor) -> Tensor:
    """Return a tensor from its base and what `encode` made of it, on the base's device. Raises
    RuntimeError if it is not of this base's shape."""
    if encoded.dtype != torch.uint8:
        return encoded
    changed = base.detach().clone(memory_format=torch.contiguous_format)
    bits, blocks = changed.view(-1).view(BITS[base.itemsize]), _num_blocks(base.numel())
    count = (len(encoded) - 4 * blocks) // (base.itemsize + 2)
    parts = encoded.cpu().split([4 * blocks, count * base.itemsize, count * 2])
    counts, values, low = parts[0].view(torch.int32).long(), parts[1], parts[2].view(torch.int16)
    # memory that is written again while it is read has any bytes
    if bool((counts < 0).any()) or int(counts.sum()) != count:
        raise RuntimeError("a difference of weights was overwritten while it was read")
    places = torch.arange(blocks).repeat_interleave(counts) * BLOCK + (low.long() & (BLOCK - 1))
    if count and int(places.max()) >= base.numel():
        raise RuntimeError("a difference of weights was overwritten while it was read")
    bits[places.to(base.device)] = values.view(bits.dtype).to(base.device)
    return changed


def _flat_bits(tensor: Tensor) -> Array:
    return np.frombuffer(raw_bytes(tensor), f"u{tensor.itemsize}")


def _num_blocks(numel: int) -> int:
    return -(-numel // BLOCK)
