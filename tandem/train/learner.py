"""A model that is trained: gradients accumulate over microbatches, one optimizer step follows, and
NaN never reaches it."""

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from tandem.model.load import ExactModel
from tandem.rl.losses import Metrics
from tandem.runtime import watchdog
from tandem.train.optimizer import Optimizer
from tandem.types import Microbatch

# of the microbatch with that number: scalar, sums
Loss = Callable[[int, Microbatch], tuple[Tensor, Metrics]]


class Learner:
    """A model with its optimizer: the policy, the critic, or whatever is fitted to fixed data."""

    def __init__(self, model: ExactModel, optimizer: Optimizer):
        self.model, self.optimizer = model, optimizer

    def update(self, batches: Sequence[Microbatch], loss: Loss, *, count: int = 0) -> Metrics:
        """One optimizer step over all batches; metrics are means over `count` things, by default
        the loss tokens.

        A loss or a gradient that is not finite changes no weight; "bad/loss" or "bad/gradient" says
        so.
        """
        sums: Metrics = {}
        finite = True
        for index, batch in enumerate(batches):
            watchdog.beat()
            value, metrics = loss(index, batch)
            finite &= math.isfinite(float(value.detach()))
            value.backward()  # type: ignore[no-untyped-call]
            for name, part in metrics.items():
                sums[name] = sums.get(name, 0.0) + part
        tokens = sum(len(b.targets) for b in batches)
        step = self.optimizer.update(skip=not finite)
        bad = {"bad/gradient": 1.0} if finite and step["skipped_updates"] else {}
        return {
            **{name: part / (count or tokens) for name, part in sums.items()},
            "num_loss_tokens": tokens,
            **step,
            **(bad if finite else {"bad/loss": 1.0}),
        }
