"""The digest that a device computes: every bit and every place of a tensor counts, in any parts."""

import numpy as np
import pytest
import torch
import xxhash

from tandem.weights import hashing
from tandem.weights.hashing import device_digest

MASK = (1 << 64) - 1


def mixed(word):
    """SplitMix64's finish, by Python's integers."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & MASK
    return word ^ (word >> 31)


def by_formula(tensor):
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    words = np.frombuffer(data + bytes(-len(data) % 8), "<u8").tolist()
    found = [mixed(w ^ mixed((i + 1) * 0x9E3779B97F4A7C15 & MASK)) for i, w in enumerate(words)]
    sums = sum(found) & MASK, sum(m * (2 * i + 1) for i, m in enumerate(found)) & MASK
    digest = xxhash.xxh3_128(f"{tensor.dtype} {list(tensor.shape)} ".encode())
    digest.update(b"".join(s.to_bytes(8, "little") for s in sums))
    return digest.hexdigest()


@pytest.mark.parametrize("shape", [(), (0,), (3,), (5, 7), (64,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_it_is_the_formula_in_parts_of_any_size(shape, dtype, monkeypatch):
    tensor = torch.randn(shape).mul(50).to(dtype)
    assert device_digest(tensor) == by_formula(tensor)
    monkeypatch.setattr(hashing, "WORDS", 4)
    assert device_digest(tensor) == by_formula(tensor)


def test_every_bit_and_every_place_counts():
    tensor = torch.randn(9)
    digests = {device_digest(tensor), device_digest(tensor.view(3, 3))}
    for bit in range(8 * tensor.nbytes):
        other = tensor.clone()
        other.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
        digests.add(device_digest(other))
    for a in range(9):
        for b in range(a):
            order = list(range(9))
            order[a], order[b] = b, a
            digests.add(device_digest(tensor[order]))
    assert len(digests) == 2 + 8 * tensor.nbytes + 36
    nan = torch.full((2,), float("nan"))
    assert device_digest(nan) == device_digest(nan.clone()) != device_digest(-nan)
    assert device_digest(tensor.view(3, 3).t()) == device_digest(tensor.view(3, 3).t().contiguous())
