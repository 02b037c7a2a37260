"""The processes that run a model's passes together: here one alone. trainer/parallel has several.

A pass is given all its microbatches. Who runs which of them, and which part of the model, is
decided here and nowhere else, so that algorithms are written once."""

import math
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tandem.rl.losses import Metrics
from tandem.runtime import watchdog
from tandem.trainer.optimizer import WHOLE, Whole
from tandem.types import Array, Microbatch

if TYPE_CHECKING:
    from tandem.model.load import ExactModel


# Runs the model on a microbatch; returns one value for each loss token.
Compute = Callable[[Microbatch], Tensor]
# Runs the model on a microbatch; returns its loss (scalar), and metrics as sums over tokens or
# pairs.
Loss = Callable[[Microbatch], tuple[Tensor, Metrics]]


@dataclass
class Totals:
    """Sums over the microbatches of an update."""

    metrics: Metrics = field(default_factory=dict)
    num_loss_tokens: int = 0
    finite: bool = True

    def add(self, num_loss_tokens: int, finite: bool, metrics: Metrics) -> None:
        self.finite &= finite
        self.num_loss_tokens += num_loss_tokens
        for name, part in metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + part


class Ranks:
    """One process that runs every microbatch itself."""

    shares = 1  # how many processes run different microbatches
    rank, size = 0, 1  # of this process, and their number; rank 0 drives the others
    lockstep = False  # processes wait for each other in every pass
    idle = False  # in a pass without a microbatch of its own, whose gradient is 0

    def order(self, name: str, **arguments: Any) -> None:
        """Order the other processes to do something with this one."""

    def post(self, key: str, value: Any) -> None:
        """Post a JSON value for rank 0, from any thread."""

    def take(self, key: str) -> Any:
        """Wait for a posted value, in any thread of rank 0; None if it does not come."""

    def where(self) -> list[tuple[str, int]]:
        """Return the machine and the pid of each rank."""
        return [(socket.gethostname(), os.getpid())]

    def divide(self, model: "ExactModel", dtype: torch.dtype) -> "ExactModel":
        """Divide a model among the processes, with float32 weights; return what they train.
        dtype: of the weights that run."""
        return model

    def running_dtype(self, model: "ExactModel") -> torch.dtype:
        """Return the type of the weights that run; of a divided model it need not be that of the
        parts."""
        return model.dtype

    def publish(self, model: "ExactModel", whole: "ExactModel | None") -> None:
        """Copy a divided model's weights into the whole one of rank 0."""

    def load_weights(self, model: "ExactModel", weights: Mapping[str, Tensor]) -> None:
        """Copy weights into a model; of a divided one the optimizer does it. Raises UserError if
        they are another model's."""
        model.load_weights(weights)

    def parts(self, model: "ExactModel") -> Mapping[str, Tensor]:
        """Return what this process holds of each weight, by name."""
        return model.named_weights()

    def trainable(self, model: "ExactModel") -> dict[str, nn.Parameter]:
        """Return what an optimizer of this process may change, by name."""
        return model.trainable()

    def pieces(self, model: "ExactModel") -> Whole:
        """Return the arithmetic over the whole tensors of what `trainable` names."""
        return WHOLE

    @torch.no_grad()
    def forward(
        self, model: "ExactModel", microbatches: Sequence[Microbatch], compute: Compute
    ) -> list[Array]:
        """Return the values of all microbatches, without gradients."""
        found = []
        for batch in microbatches:
            watchdog.heartbeat()
            found.append(compute(batch).numpy())
        return found

    def backward(
        self,
        model: "ExactModel",
        microbatches: Sequence[Microbatch],
        loss: Loss,
        frozen: "Sequence[ExactModel]" = (),
    ) -> Totals:
        """Add the gradients of all microbatches' losses to the model's parameters. frozen: other
        models that `loss` runs."""
        totals = Totals()
        for batch in microbatches:
            backward_one(totals, batch, *loss(batch))
        return totals

    def own(self, microbatches: Sequence[Microbatch]) -> Sequence[Microbatch]:
        """Return those of a pass's microbatches that this process runs."""
        return microbatches

    def wait_for_all(self) -> None:
        """Wait until all processes have come here."""

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes that run different microbatches, in their order."""
        return [value]


def backward_one(totals: Totals, batch: Microbatch, loss: Tensor, metrics: Metrics) -> None:
    """Add the gradient of one microbatch's loss, and count it."""
    watchdog.heartbeat()
    finite = math.isfinite(float(loss.detach()))
    loss.backward()  # type: ignore[no-untyped-call]
    totals.add(len(batch.targets), finite, metrics)


ALONE = Ranks()
