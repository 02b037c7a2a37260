"""Checks of an update before it moves a weight: the right tensors are trained, with the gradient of
the algorithm."""

import torch
from torch import Tensor

from tandem.model.load import ExactModel
from tandem.runtime.errors import InvariantError
from tandem.train.learner import Learner


def require_frozen(reference: ExactModel, policy: Learner) -> None:
    """Raise InvariantError if the reference shares a tensor with the policy's optimizer: its KL
    would stay 0 for ever."""
    adapter = reference.adapter_weights()
    written = {p.data_ptr() for p in policy.model.trainable().values()}
    shared = [
        n
        for n, w in reference.named_weights().items()
        if n not in adapter and w.data_ptr() in written
    ]
    if shared:
        raise InvariantError(
            "the reference would be trained with the policy",
            where=shared[0],
            found="one tensor for both",
            expected="frozen weights of its own (or adapters, which it leaves out)",
            next="report this",
        )


def require_gradient(expected: Tensor, on_policy: Tensor, found: Tensor) -> None:
    """Raise InvariantError if the gradient at an on-policy token's log-prob is not its advantage
    times its weight in the update."""
    if found.isfinite().all() and not torch.allclose(
        found[on_policy], expected[on_policy], rtol=1e-4, atol=0.0
    ):
        worst = int((found - expected).abs().mul(on_policy).argmax())
        raise InvariantError(
            "the gradient of the loss is not that of the algorithm",
            where=f"token {worst} of a first update",
            found=f"{float(found[worst]):.4g}",
            expected=f"{float(expected[worst]):.4g}: advantage x weight",
            next="report this; no weight was touched",
        )
