"""Models that are trained: gradients accumulate over microbatches, one optimizer step follows, and
NaN never reaches a weight."""

import math
from dataclasses import dataclass, field

from torch import Tensor

from tandem.model.load import ExactModel
from tandem.rl.losses import Metrics
from tandem.runtime import watchdog
from tandem.train.optimizer import Optimizer
from tandem.types import Microbatch


@dataclass(frozen=True)
class Learner:
    """A model with its optimizer: the policy, the critic, or a model that learns from fixed
    data."""

    model: ExactModel
    optimizer: Optimizer

    def load(
        self, weights: dict[str, Tensor], moments: dict[str, Tensor], optimizer_steps: int
    ) -> None:
        """Take up what a checkpoint holds. Raises UserError if it is another model's."""
        self.model.load_weights(weights)
        self.optimizer.load_weights(weights)
        self.optimizer.load_state(moments, optimizer_steps)


@dataclass
class Update:
    """One optimizer step of a learner, microbatch by microbatch."""

    learner: Learner
    sums: Metrics = field(default_factory=dict)
    num_loss_tokens: int = 0
    finite: bool = True

    def backward(self, batch: Microbatch, loss: Tensor, metrics: Metrics) -> None:
        """Add the gradient of a microbatch's loss. metrics: sums over its tokens or pairs."""
        watchdog.heartbeat()
        self.finite &= math.isfinite(float(loss.detach()))
        loss.backward()  # type: ignore[no-untyped-call]
        self.num_loss_tokens += len(batch.targets)
        for name, part in metrics.items():
            self.sums[name] = self.sums.get(name, 0.0) + part

    def step(self, *, count: int = 0) -> Metrics:
        """Step the optimizer; return means over `count` things, by default the loss tokens.

        If a loss or a gradient is not finite, no weight changes, and "bad/loss" or "bad/gradient"
        says so.
        """
        step = self.learner.optimizer.update(skip=not self.finite)
        bad = {"bad/gradient": 1.0} if self.finite and step["skipped_updates"] else {}
        return {
            **{name: part / (count or self.num_loss_tokens) for name, part in self.sums.items()},
            "num_loss_tokens": self.num_loss_tokens,
            **step,
            **(bad if self.finite else {"bad/loss": 1.0}),
        }
