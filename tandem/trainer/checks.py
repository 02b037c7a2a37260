"""Checks of an update before it moves a weight: the right tensors are trained, with the gradient of
the algorithm."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tandem.runtime.errors import InvariantError
from tandem.trainer.learner import Learner
from tandem.types import Array, Episode

if TYPE_CHECKING:
    from tandem.model.load import ExactModel


def require_frozen(reference: "ExactModel", policy: Learner) -> None:
    """Raise InvariantError if the reference shares a tensor with the policy's optimizer: its KL
    would stay 0 for ever."""
    ranks, adapter = policy.ranks, reference.adapter_weights()
    written = {p.data_ptr() for p in ranks.trainable(policy.model).values() if p.numel()}
    shared = [
        name
        for name, part in ranks.parts(reference).items()
        if name not in adapter and part.numel() and part.data_ptr() in written
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


def require_experts(episode: Episode) -> Array:
    """Return the experts of an episode's tokens; raise InvariantError if it has not those of all
    but the last."""
    if len(episode.experts) != len(episode.tokens) - 1:
        raise InvariantError(
            "an episode has not the experts that its engine chose",
            where=f"problem {episode.uid}, sample {episode.sample_index} (rl.router_replay)",
            found=f"those of {len(episode.experts)} tokens",
            expected=f"{len(episode.tokens) - 1}: all but the last",
            next="report this; no weight was touched",
        )
    return episode.experts


def require_own_experts(changed: Tensor) -> None:
    """Raise InvariantError if engine and trainer chose different experts for fresh tokens. changed:
    the share of each token's choices that differ, float32 [N]."""
    if changed.any():
        raise InvariantError(
            "engine and trainer do not choose the same experts for tokens just sampled",
            where="first update of a step (rl.router_replay)",
            found=f"other choices for {int((changed > 0).sum())} of {len(changed)} tokens",
            expected="the same: one model code, one set of weights (P1)",
            next="tandem doctor, and report this; no weight was touched",
        )
