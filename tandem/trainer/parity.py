"""Checks that the engine that samples and the trainer compute the same log-probs.

    ExactCheck     the same model code: equal to the last bit, else the run stops (P1)
    MeasuredGap    other kernels, or a model that is not exact: the mean gap on a step's own tokens
                   is measured before its first update, and has a bound that stops the run
    NoCheck        the operators of this machine differ, or the trainer's are others: a correction
                   weighs the ratio, and nothing is promised

The engine's object chooses (`RolloutBackend.parity`). Another order of additions gives the
same log-prob to some 1e-6 nats in the mean in float32, and to some 1e-2 in bfloat16, whose logits
are that coarse. A model that is not the trainer's gives another one at once: weights of an older
version, or a tied head that the engine did not build again from new embeddings. Knows no engine.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from tandem.config.schema import Config
from tandem.runtime.errors import InvariantError, UserError
from tandem.trainer.batch import TrainBatch
from tandem.trainer.learner import Learner
from tandem.types import Generate, Row

# Bounds of the mean gap, nats a token, without rl.max_logprob_error: far above rounding (float32:
# docs/guide/cluster.md; bfloat16 spaces logits of 8 to 16 by 0.06), far below another model's.
MAX_MEAN = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
OTHER_KERNELS = (
    "stale weights, a tied head that the engine did not process again after an update, or a "
    "sampling setting that it defines otherwise"
)
STEPS_OF_CACHE = "steps of transformers' cache that are far from its whole pass"


class NoCheck:
    """Nothing is known of the two, so nothing is checked. It implements types.ParityCheck."""

    exact = False

    def after_rollout(self, engine: Generate, step: int) -> Row:
        return {}

    def before_update(self, batch: TrainBatch, policy: Learner, version: int) -> Row:
        return {}


class ExactCheck(NoCheck):
    """Engine and trainer agree bit for bit here (P1), so any log-prob gap is an error."""

    exact = True

    def after_rollout(self, engine: Generate, step: int) -> Row:
        """Raise InvariantError if the trainer's packed pass gives a completion other log-probs than
        the engine that has just sampled it, while the engine still runs those weights.

        The first update of a step compares the tokens of its own weights, and no others.
        """
        gap = engine.logprob_gap()
        if gap != 0.0:
            raise InvariantError(
                "engine and trainer do not agree on a completion just sampled",
                where=f"rollouts of step {step + 1}",
                found=f"log-probs that differ by {gap:.3g} nats",
                expected="exactly 0 (P1): one model code",
                next="tandem doctor, and report this; the last checkpoint and the journal are as "
                "they were",
            )
        return {}


@dataclass(frozen=True)
class MeasuredGap(NoCheck):
    """The gap is measured. where: the setting that makes it; causes: of one above the limit."""

    config: Config
    where: str
    causes: str = OTHER_KERNELS

    def after_rollout(self, engine: Generate, step: int) -> Row:
        """Return "sync_logprob_gap", nats: that of the engine to the weights that it got last."""
        return {"sync_logprob_gap": engine.logprob_gap()}

    def before_update(self, batch: TrainBatch, policy: Learner, version: int) -> Row:
        """Return "logprob_gap_mean", nats: the mean difference of engine and policy on the tokens
        that weights `version` sampled; {} without such tokens.

        Tokens of older weights are left out, as updates have moved the policy since; with
        rollout.staleness these are all after the first steps. Raises UserError above the limit.
        """
        if not batch.recomputed:
            return {}
        fresh = [e.weight_versions[e.loss_mask] == version for e in batch.episodes]
        columns = zip(batch.recomputed, batch.engine, fresh, strict=True)
        gaps = np.concatenate([np.abs(policy - engine)[own] for policy, engine, own in columns])
        if not len(gaps):
            return {}
        mean, dtype = float(gaps.mean(dtype=np.float64)), policy.ranks.running_dtype(policy.model)
        limit = gap_limit(self.config, dtype)
        if mean > limit:
            raise UserError(
                "the rollout engine does not run the trainer's model",
                where=f"tokens sampled by weights {version}, {self.where}",
                found=f"log-probs that differ by {mean:.3g} nats in the mean, {gaps.max():.3g} at "
                "most",
                expected=f"at most {limit:.3g} in the mean: other kernels, the same weights",
                next=f"the cause is {self.causes}; nothing was trained on these tokens; if it is "
                "only rounding, set rl.max_logprob_error",
            )
        return {"logprob_gap_mean": mean}


def gap_limit(config: Config, dtype: torch.dtype) -> float:
    """Return the bound of the mean gap of weights of that type, nats."""
    bound = config.rl.max_logprob_error
    return math.log(bound) if bound else MAX_MEAN[dtype]
