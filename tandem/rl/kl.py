"""Per-token estimators of KL(policy || reference), nats (John Schulman, "Approximating KL divergence", 2020)."""

from typing import Literal

from torch import Tensor


def kl_estimate(kind: Literal["k1", "k2", "k3"], policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """float32 [N] -> [N], exactly 0 where the two are equal.

    k1 = d (unbiased value, but its gradient as a loss is zero in expectation), k2 = d^2 / 2 (right gradient),
    k3 = exp(-d) - 1 + d (unbiased, never negative), with d = policy - reference.
    """
    d = policy_logprobs - reference_logprobs
    match kind:
        case "k1":
            return d
        case "k2":
            return d * d / 2
        case "k3":
            return (-d).expm1() + d
