"""Per-token estimators of KL(policy || reference), nats (John Schulman, "Approximating KL
divergence", 2020)."""

from typing import Literal

from torch import Tensor


def kl_estimate(
    kind: Literal["k1", "k2", "k3"], policy_logprobs: Tensor, reference_logprobs: Tensor
) -> Tensor:
    """Estimate the KL at each token, float32 [N] -> [N]; exactly 0 if the two are equal.

    With d = policy - reference, at tokens that the policy sampled:
    k1 = d                 unbiased. As a loss its gradient is zero in expectation; in the reward it
                           is the right one.
    k2 = d^2 / 2           biased. As a loss its gradient is that of each token's own KL.
    k3 = exp(-d) - 1 + d   unbiased, never negative. As a loss its gradient is that of
                           KL(reference || policy).

    d of k3 is bounded to 20 nats, as beyond them exp overflows float32; outside there is no
    gradient. k2 and k3 in the reward give a gradient that can point away from the reference
    (tests/rl/test_expectation.py).
    """
    d = policy_logprobs - reference_logprobs
    match kind:
        case "k1":
            return d
        case "k2":
            return d * d / 2
        case "k3":
            d = d.clamp(-20.0, 20.0)
            return (-d).expm1() + d
