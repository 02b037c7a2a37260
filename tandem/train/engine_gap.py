"""The gap between the trainer and a rollout engine of other kernels, or of a model that is not
exact: measured on the tokens of each step before its first update, with a bound that stops the run.
vLLM's workers are held to the same bound after every sync (engine/sync_check.py), with
rollout.staleness too.

Another order of additions gives the same log-prob to some 1e-6 nats in the mean in float32, and to
some 1e-2 in bfloat16, whose logits are that coarse. A model that is not the trainer's gives another
one at once: weights of an older version, or a tied head that the engine did not build again from
new embeddings. Knows no engine.
"""

import math

import numpy as np
import torch

from tandem.config.schema import Config
from tandem.runtime.errors import UserError
from tandem.train.batch import TrainBatch
from tandem.train.learner import Learner
from tandem.types import Row

# Bounds of the mean gap, nats a token, without rl.max_logprob_error: far above rounding (float32:
# docs/cluster.md; bfloat16 spaces logits of 8 to 16 by 0.06), far below another model's.
MAX_MEAN = {torch.float32: 1e-3, torch.bfloat16: 5e-2}


def engine_gap(batch: TrainBatch, config: Config, policy: Learner, version: int) -> Row:
    """Return "logprob_gap_mean", nats: the mean difference of engine and policy on the tokens that
    weights `version` sampled, before an update; {} without such tokens, or with Tandem's engine,
    the trainer's own weights and an exact model.

    Tokens of older weights are left out, as updates have moved the policy since; with
    rollout.staleness these are all after the first steps. Raises UserError if the mean is above
    log(rl.max_logprob_error), or MAX_MEAN without it.
    """
    same_bits = config.weights.delta != "int8" and not policy.model.exactness.gap
    if (config.rollout.engine == "tandem" and same_bits) or not batch.recomputed:
        return {}
    fresh = [e.weight_versions[e.loss_mask] == version for e in batch.episodes]
    columns = zip(batch.recomputed, batch.engine, fresh, strict=True)
    gaps = np.concatenate([np.abs(policy - engine)[own] for policy, engine, own in columns])
    if not len(gaps):
        return {}
    mean = float(gaps.mean(dtype=np.float64))
    if mean > (limit := gap_limit(config, policy.dtype)):
        raise _too_far(config, policy, version, mean, float(gaps.max()), limit)
    return {"logprob_gap_mean": mean}


def gap_limit(config: Config, dtype: torch.dtype) -> float:
    """Return the bound of the mean gap of weights of that type, nats."""
    bound = config.rl.max_logprob_error
    return math.log(bound) if bound else MAX_MEAN[dtype]


def _too_far(
    config: Config, policy: Learner, version: int, mean: float, largest: float, limit: float
) -> UserError:
    causes = (
        "stale weights, a tied head that the engine did not process again after an update, or a "
        "sampling setting that it defines otherwise"
    )
    if policy.model.exactness.gap and config.rollout.engine == "tandem":
        causes = "steps of transformers' cache that are far from its whole pass"
    return UserError(
        "the rollout engine does not run the trainer's model",
        where=f"tokens sampled by weights {version}, rollout.engine = {config.rollout.engine}"
        + ", weights.delta = int8" * (config.weights.delta == "int8"),
        found=f"log-probs that differ by {mean:.3g} nats in the mean, {largest:.3g} at most",
        expected=f"at most {limit:.3g} in the mean: other kernels, the same weights",
        next=f"the cause is {causes}; nothing was trained on these tokens; if it is only rounding, "
        "set rl.max_logprob_error",
    )
