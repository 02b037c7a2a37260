"""Check of an engine of other kernels after every sync, before it samples: it scores a fixed
sequence by its new weights, and the trainer has scored it by those that it published.

    trainer   publish(v): make_probe, beside the weights
    worker    apply(v):   load, then check_probe by its own engine

It needs no tokens that the trainer's newest weights sampled, so it also holds with
rollout.staleness. The sequence is random tokens: wrong weights show on any.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from tandem.runtime.errors import UserError
from tandem.runtime.rng import permutation
from tandem.types import Array

LENGTH = 64  # tokens of the sequence

# Scores int64 [n] token ids: the log-probs of all but the first, float32 [n - 1], nats.
ScoreTokens = Callable[[Array], Array]
Probe = dict[str, Any]  # JSON: "tokens", "logprobs" of all but the first, "limit" of their mean gap


def make_probe(score: ScoreTokens, vocabulary: int, longest: int, limit: float) -> Probe:
    """Score the sequence by the trainer's model. longest: tokens of a sequence; limit: nats."""
    tokens = permutation(vocabulary, "probe")[: min(LENGTH, longest - 1)]
    return {"tokens": tokens.tolist(), "logprobs": score(tokens).tolist(), "limit": limit}


def check_probe(score: ScoreTokens, probe: Probe, version: int) -> float:
    """Return the mean difference of an engine's log-probs from those of the probe, nats. Raises
    UserError if it is above the limit."""
    logprobs = score(np.array(probe["tokens"], np.int64))
    gap = float(np.abs(logprobs - np.array(probe["logprobs"])).mean())
    if not gap <= probe["limit"]:
        raise UserError(
            "the rollout engine does not run the trainer's model",
            where=f"after the sync of weights {version}",
            found=f"log-probs of a fixed sequence that differ by {gap:.3g} nats in the mean",
            expected=f"at most {probe['limit']:.3g}: other kernels, the same weights",
            next="the cause is stale weights, or a tied head that the engine did not process again "
            "after an update; no token was sampled with them; if it is only rounding, set "
            "rl.max_logprob_error",
        )
    return gap
