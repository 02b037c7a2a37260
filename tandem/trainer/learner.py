"""Models that are trained: gradients accumulate over microbatches, one optimizer step follows, and
NaN never reaches a weight."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from tandem.model.boxes import Box
from tandem.model.config_file import has_experts
from tandem.rl.losses import Metrics
from tandem.trainer.optimizer import Optimizer
from tandem.trainer.ranks import ALONE, Loss, Ranks
from tandem.types import Microbatch

if TYPE_CHECKING:
    from tandem.model.load import ExactModel


@dataclass(frozen=True)
class Learner:
    """A model with its optimizer: the policy, the critic, or one that learns from fixed data."""

    model: "ExactModel"
    optimizer: Optimizer
    ranks: Ranks = ALONE  # the processes that run it
    name: str = "policy"
    # of rank 0, if the model is divided: a whole one, which engines run and exports hold
    copy: "ExactModel | None" = None
    router_aux_loss_coef: float = 0.0  # of a mixture of experts

    @property
    def whole(self) -> "ExactModel":
        """The whole model, as of the last `publish`."""
        return self.copy or self.model

    def publish(self) -> None:
        """Bring the whole model up to date, on rank 0."""
        self.ranks.order("publish", learner=self.name)
        self.ranks.publish(self.model, self.copy)

    def saved(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the weights and moments that this process saves, by name."""
        weights, moments = self.optimizer.weights(), self.optimizer.state()
        counted = self.optimizer.whole.counted
        return (
            {name: weight for name, weight in weights.items() if counted(name)},
            {key: moment for key, moment in moments.items() if counted(key.partition(".")[2])},
        )

    def boxes(self) -> tuple[dict[str, Box], dict[str, Box]] | None:
        """Return which parts of weights and moments this process holds; None: all of each."""
        if (own := self.optimizer.whole.own) is None:
            return None
        boxes, moments = {name: own[name] for name in self.optimizer.parameters}, dict[str, Box]()
        for name, box in boxes.items():
            moments |= self.optimizer.moment_boxes(name, box)
        return boxes, moments

    def load(
        self, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor], optimizer_steps: int
    ) -> None:
        """Take up what a checkpoint holds, of a divided model the parts of `boxes`. Raises
        UserError if it is another model's."""
        self.ranks.load_weights(self.model, weights)
        self.optimizer.load_weights(weights)
        self.optimizer.load_state(moments, optimizer_steps)

    def update(
        self,
        microbatches: Sequence[Microbatch],
        loss: Loss,
        *,
        count: int = 0,
        frozen: "Sequence[ExactModel]" = (),
    ) -> Metrics:
        """Make one optimizer step on the sum of the microbatches' losses; return means over `count`
        things, by default the loss tokens. frozen: other models that `loss` runs.

        If a loss or a gradient is not finite, no weight changes, and "bad/loss" or "bad/gradient"
        says so.
        """
        divisor = count or sum(len(batch.targets) for batch in microbatches)
        if has_experts(self.model.config):
            from tandem.trainer.routing import observe_routers

            coef = self.router_aux_loss_coef
            loss = observe_routers(self.model, loss, microbatches, divisor, coef)
        totals = self.ranks.backward(self.model, microbatches, loss, frozen)
        step = self.optimizer.update(skip=not totals.finite)
        bad = {"bad/gradient": 1.0} if totals.finite and step["skipped_updates"] else {}
        return {
            **{name: part / divisor for name, part in totals.metrics.items()},
            "num_loss_tokens": totals.num_loss_tokens,
            **step,
            **(bad if totals.finite else {"bad/loss": 1.0}),
        }
