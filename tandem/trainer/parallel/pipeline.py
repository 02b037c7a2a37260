"""Pipeline parallelism: each process runs a stage, some neighbouring layers of the model, in the
order 1F1B (Narayanan et al. 2021, arXiv 2104.04473, section 2.2.1).

    stage 0   F0 F1 .. B0 F2 B1 F3 B2 .. B3     F: hidden states [T, D] go to the next stage
    stage 1      F0 B0 F1 B1 F2 B2 F3 B3        B: their gradients go to the stage before

So a stage keeps the activations of at most as many microbatches as there are stages from it on. The
stages cut the list of layers and nothing else: states, gradients and their sums over microbatches
have the bits of one process. One sum is in another order: a tied embedding is in the first and in
the last stage, and gets the gradients of all its look-ups and then those of the head, where one
process adds both microbatch by microbatch.

A frozen model that the loss runs beside its own (a teacher) goes through the same stages with it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tandem.model.forward import batch_states
from tandem.model.load import ExactModel
from tandem.model.onednn import padded_rows
from tandem.rl.losses import Metrics
from tandem.runtime import watchdog
from tandem.trainer.parallel.data import reduce_gradients
from tandem.trainer.parallel.mesh import Group
from tandem.trainer.ranks import Compute, Totals, backward_one
from tandem.types import Array, Microbatch

# One name for all that neighbours exchange: one may wait for states while the other one waits for
# their gradients, and both are in step.
STATES = "hidden states or their gradients"


@dataclass(frozen=True)
class Stage:
    """The part of one model that this process runs. The number of a stage is its rank in the
    pipeline's group."""

    model: ExactModel
    group: Group
    dtype: torch.dtype  # of the weights that run, and so of hidden states
    tied: str  # name of the embedding, if it is the head of another stage too

    @property
    def before(self) -> int | None:
        """The stage that sends hidden states to this one."""
        return self.group.rank - 1 if self.group.rank else None

    @property
    def after(self) -> int | None:
        """The stage that hidden states go to."""
        return self.group.rank + 1 if self.group.rank + 1 < self.group.size else None

    def empty_states(self, batch: Microbatch) -> Tensor:
        """Make a tensor for the hidden states of a microbatch."""
        shape = (
            padded_rows(len(self.model.row_parts.rows(batch)[0]), self.dtype),
            self.model.config.hidden_size,
        )
        return torch.empty(shape, dtype=self.dtype, device=self.group.device)

    def sum_tied(self, gradient: Tensor) -> Tensor:
        """Add the gradients of the tied embedding in the first and in the last stage."""
        other = torch.empty_like(gradient)
        peer = self.group.size - 1 if self.before is None else 0
        self.group.send_and_receive(peer, [gradient], [other], "gradient of the tied embedding")
        return gradient + other if self.before is None else other + gradient


def keep_stage(model: ExactModel, group: Group, dtype: torch.dtype) -> Stage:
    """Free the parts of a model that other stages run; names stay those of the whole model.

    The first stage has the embedding, the last one the final norm and the head. dtype: of the
    weights that run.
    """
    inner, stage, last = model.module.model, group.rank, group.size - 1
    tied = model.head.weight is inner.embed_tokens.weight
    # equally many layers; the first stages have one more if need be, as the last has the head
    few, more = divmod(len(inner.layers), group.size)
    first = stage * few + min(stage, more)
    own = range(first, first + few + (stage < more))
    for number in range(len(inner.layers)):
        if number not in own:
            delattr(inner.layers, str(number))  # the others keep their names
    if stage != last:
        _free(inner.norm, dtype)
    if stage != last and not (tied and stage == 0):
        _free(model.head, dtype)
    if stage != 0 and not (tied and stage == last):
        _free(inner.embed_tokens, dtype)
    model.list_weights()
    return make_stage(model, group, dtype, tied)


def make_stage(model: ExactModel, group: Group, dtype: torch.dtype, tied: bool) -> Stage:
    """Make the stage of a model whose other parts other processes have. tied: the head's weight is
    the embedding."""
    # NCCL wants all of a group in its first communication
    group.sum(torch.zeros(1, device=group.device), "stages")
    outer = tied and group.size > 1 and group.rank in (0, group.size - 1)
    return Stage(model, group, dtype, "model.embed_tokens.weight" if outer else "")


def _free(module: nn.Module, dtype: torch.dtype) -> None:
    """Free the weights of a module, which still tell device and type."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            delattr(part, name)
            setattr(part, name, parameter.new_empty(0, dtype=dtype))


# ---- passes


class Pass(NamedTuple):
    """A pass of a stage over a microbatch."""

    is_forward: bool
    number: int  # of the microbatch


def schedule(stage: int, num_stages: int, num_microbatches: int) -> list[Pass]:
    """Return the passes of a stage in their order, 1F1B."""
    ahead = min(num_stages - stage - 1, num_microbatches)
    order = [Pass(True, number) for number in range(ahead)]
    for number in range(ahead, num_microbatches):
        order += [Pass(True, number), Pass(False, number - ahead)]
    return order + [Pass(False, n) for n in range(num_microbatches - ahead, num_microbatches)]


@torch.no_grad()
def run_forward(stage: Stage, batches: Sequence[Microbatch], compute: Compute) -> list[Array]:
    """Return the values of microbatches, of the last stage; of others nothing."""
    found = []
    for batch in batches:
        watchdog.heartbeat()
        entering = [] if stage.before is None else [stage.empty_states(batch)]
        _exchange(stage, None, [], stage.before, entering)
        with _entering([stage], entering):
            if stage.after is None:
                found.append(compute(batch).numpy())
                continue
            leaving = batch_states(stage.model, batch)
        _exchange(stage, stage.after, [leaving], None, [])
    return found


class Backward:
    """The passes of a stage that add the gradients of microbatches.

    stages: of the model that learns, and of frozen models that the loss runs too; batches: each
    with whether it counts, as `loss` is told.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        batches: Sequence[tuple[bool, Microbatch]],
        loss: Callable[[Microbatch, bool], tuple[Tensor, Metrics]],
    ):
        self.stages, self.stage, self.batches, self.loss = stages, stages[0], batches, loss
        self.totals = Totals()
        self._entered: dict[int, Tensor] = {}  # by microbatch, from its forward pass on
        self._left: dict[int, Tensor] = {}  # states, or the loss
        self._metrics: dict[int, Metrics] = {}

    def run(self) -> Totals:
        """Run all passes; return the totals of the last stage, of others nothing."""
        stage, group = self.stage, self.stage.group
        order = schedule(group.rank, group.size, len(self.batches))
        received = self._pass_on(None, [], order[0])
        for done, following in zip(order, [*order[1:], None], strict=True):
            watchdog.heartbeat()
            run = self._forward if done.is_forward else self._backward
            sent = run(done.number, received)
            to = stage.after if done.is_forward else stage.before
            received = self._pass_on(to, sent, following)
        return self.totals

    def _forward(self, number: int, entering: list[Tensor]) -> list[Tensor]:
        """Return the states that the next stage continues with, one of each model."""
        counts, batch = self.batches[number]
        if entering:
            self._entered[number] = entering[0].requires_grad_()
        with _entering(self.stages, entering):
            if self.stage.after is None:
                self._left[number], self._metrics[number] = self.loss(batch, counts)
                return []
            own = self._left[number] = batch_states(self.stage.model, batch)
            with torch.no_grad():
                return [own, *(batch_states(stage.model, batch) for stage in self.stages[1:])]

    def _backward(self, number: int, gradient: list[Tensor]) -> list[Tensor]:
        """Return the gradient of the states that entered this stage."""
        counts, batch = self.batches[number]
        reduce_gradients(self.stage.model, is_last=number == len(self.batches) - 1)
        left = self._left.pop(number)
        if gradient:
            torch.autograd.backward(left, gradient)
        elif counts:
            backward_one(self.totals, batch, left, self._metrics[number])
        else:
            (left * 0.0).backward()  # type: ignore[no-untyped-call]
        if self.stage.before is None:
            return []
        found = self._entered.pop(number).grad
        assert found is not None
        return [found]

    def _pass_on(self, to: int | None, sent: list[Tensor], following: Pass | None) -> list[Tensor]:
        """Send what a pass made, and receive what the following one needs."""
        sender, received = None, list[Tensor]()
        if following is not None:
            stages = self.stages if following.is_forward else self.stages[:1]
            sender = self.stage.before if following.is_forward else self.stage.after
            _, batch = self.batches[following.number]
            received = [stage.empty_states(batch) for stage in stages if sender is not None]
        _exchange(self.stage, to, sent, sender, received)
        return received


def _exchange(
    stage: Stage, to: int | None, sent: list[Tensor], sender: int | None, received: list[Tensor]
) -> None:
    """Send tensors to one neighbour and receive others from one; None: from or to nobody. With the
    same neighbour both happen at once, since it may do the same."""
    if to is not None and to == sender:
        stage.group.send_and_receive(to, sent, received, STATES)
        return
    if to is not None:
        stage.group.send_and_receive(to, sent, [], STATES)
    if sender is not None:
        stage.group.send_and_receive(sender, [], received, STATES)


@contextmanager
def _entering(stages: Sequence[Stage], states: Sequence[Tensor]) -> Iterator[None]:
    """Let the models start from the states of the stage before, one of each model."""
    for stage, entering in zip(stages, states, strict=False):
        stage.model.entering = entering
    try:
        yield
    finally:
        for stage in stages:
            stage.model.entering = None
