"""Gradients of packed attention (tandem/model/attention.py)."""

import numpy as np
import torch

from tandem.model.attention import KEPT_BYTES, PackedPlan

HEADS, KV_HEADS, SIZE, ROWS = 4, 2, 16, 30


def test_gradient_is_the_same_whether_probabilities_were_kept_or_computed_again():
    few, many = 3, 400  # segments; their probabilities in bytes, with padded rows and keys
    assert few * HEADS * 32 * 32 * 4 <= KEPT_BYTES < many * HEADS * 32 * 32 * 4
    random = torch.Generator().manual_seed(0)
    rows = [torch.randn(many * ROWS, heads, SIZE, generator=random) for heads in (4, 2, 2, 4)]

    gradients = gradients_of(few, *rows)

    for kept, again in zip(gradients, gradients_of(many, *rows), strict=True):
        assert kept.abs().sum() > 0
        assert torch.equal(kept, again[: few * ROWS])


def gradients_of(segments, *rows):
    """Compute the gradients of queries, keys and values [T, heads, SIZE] of the first segments."""
    q, k, v, above = (t[: segments * ROWS].clone() for t in rows)
    firsts = np.arange(segments) * ROWS
    plan = PackedPlan(
        np.stack([firsts, np.full(segments, ROWS), 0 * firsts, 0 * firsts], 1),
        group=HEADS // KV_HEADS,
        kv_heads=KV_HEADS,
    )
    leaves = [t.requires_grad_() for t in (q, k, v)]
    plan.attend(0, *leaves, SIZE**-0.5, None).backward(above)
    return [t.grad for t in leaves]
