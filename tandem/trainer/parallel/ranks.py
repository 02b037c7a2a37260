"""The passes of a model over the processes of a mesh, as trainer/ranks.py asks for them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tandem.model.boxes import Box
from tandem.model.load import ExactModel
from tandem.rl.losses import Metrics
from tandem.trainer.parallel.context import divide_rows
from tandem.trainer.parallel.data import free_gathered, shard_model
from tandem.trainer.parallel.expert import divide_experts
from tandem.trainer.parallel.mesh import MICROBATCHES, RESULTS, Mesh
from tandem.trainer.parallel.pieces import Pieces, box_of, local
from tandem.trainer.parallel.pipeline import Backward, Stage, keep_stage, run_forward
from tandem.trainer.parallel.processes import Processes
from tandem.trainer.parallel.tensor import divide_layers, sum_gradients
from tandem.trainer.ranks import ALONE, Compute, Loss, Ranks, Totals
from tandem.types import Array, Microbatch


class ParallelRanks(Ranks):
    """Several processes: each runs its share of the microbatches.

    All of them run as many passes, because each gathers weights from the others: one without a
    microbatch left runs the first one again, and its result does not count.
    """

    lockstep = True

    def __init__(self, mesh: Mesh, processes: Processes | Ranks = ALONE):
        self.mesh, self.microbatches = mesh, mesh.group(*MICROBATCHES)
        self.results = mesh.group(*RESULTS)
        self.shares, self.processes = self.microbatches.size, processes
        self.rank, self.size = mesh.rank, mesh.world.size
        self._divided: dict[ExactModel, Divided] = {}
        self._published = set[ExactModel]()

    def order(self, name: str, **arguments: Any) -> None:
        if self.rank == 0:
            self.processes.order(name, **arguments)

    def post(self, key: str, value: Any) -> None:
        self.processes.post(key, value)

    def where(self) -> list[tuple[str, int]]:
        return self.processes.where()

    def take(self, key: str) -> Any:
        return self.processes.take(key)

    def divide(self, model: ExactModel, dtype: torch.dtype) -> ExactModel:
        """Divide a model among the processes, in place; return it. Parts of FSDP are float32: what
        the optimizer steps. dtype: of the weights that run."""
        outer: dict[str, Box] = {}
        stage = keep_stage(model, self.mesh.group("pipeline"), dtype)
        partial = divide_layers(model, self.mesh.group("tensor"), outer)
        divide_experts(model, self.mesh.group("expert"), outer)
        divide_rows(model, self.mesh, dtype)
        shard_model(model, self.mesh, dtype)
        named = dict(model.module.named_parameters())
        boxes = {name: box_of(p, outer.get(name)) for name, p in named.items()}
        # on the same memory; what FSDP does not divide stays the same parameter, because a
        # linear's pack is renewed by its version
        parts = {
            name: nn.Parameter(local(p.data), p.requires_grad) if isinstance(p.data, DTensor) else p
            for name, p in named.items()
        }
        self.keep(stage, named, parts, boxes, partial)
        model.list_weights()
        return model

    def running_dtype(self, model: ExactModel) -> torch.dtype:
        return self._divided[model].stage.dtype

    def keep(
        self,
        stage: Stage,
        parameters: dict[str, nn.Parameter],
        parts: dict[str, nn.Parameter],
        boxes: Mapping[str, Box],
        partial: Sequence[str] = (),
    ) -> None:
        """Keep what is known of a divided model: as in `Divided`, and the boxes of its parts."""
        own = [name for name, part in parts.items() if part.requires_grad]
        trained = sorted(set().union(*self.mesh.world.gather(own, "trained weights")))
        pieces = Pieces(boxes, self.mesh.world, stage.dtype)
        self._divided[stage.model] = Divided(stage, parameters, parts, pieces, partial, trained)

    def load_weights(self, model: ExactModel, weights: Mapping[str, Tensor]) -> None:
        pass  # the optimizer, whose load follows, steps the very memory of the parts

    def parts(self, model: ExactModel) -> Mapping[str, Tensor]:
        return self._divided[model].parts

    def trainable(self, model: ExactModel) -> dict[str, nn.Parameter]:
        parts = self._divided[model].parts
        return {name: part for name, part in parts.items() if part.requires_grad}

    def pieces(self, model: ExactModel) -> Pieces:
        return self._divided[model].pieces

    def publish(self, model: ExactModel, whole: ExactModel | None) -> None:
        """Copy a divided model's weights into a whole one, which rank 0 has; after the first time
        those that are trained. All processes call it."""
        divided = self._divided[model]
        names = divided.trained if model in self._published else None
        self._published.add(model)
        targets = {} if whole is None else dict(whole.module.named_parameters())
        with torch.no_grad():
            dtype, pieces = divided.stage.dtype, divided.pieces
            for name, box, part in pieces.collect_parts(divided.parts, names, dtype):
                targets[name][box.slices] = part

    def forward(
        self, model: ExactModel, microbatches: Sequence[Microbatch], compute: Compute
    ) -> list[Array]:
        batches = [batch for _, batch in self._own(microbatches)]
        shares = self.gather(run_forward(self._divided[model].stage, batches, compute))
        free_gathered(model)
        return [
            shares[number % self.shares][number // self.shares]
            for number in range(len(microbatches))
        ]

    def backward(
        self,
        model: ExactModel,
        microbatches: Sequence[Microbatch],
        loss: Loss,
        frozen: Sequence[ExactModel] = (),
    ) -> Totals:
        divided = self._divided[model]
        stages = [divided.stage, *(self._divided[other].stage for other in frozen)]

        def marked(batch: Microbatch, counts: bool) -> tuple[Tensor, Metrics]:
            self.idle = not counts
            return loss(batch)

        totals = Backward(stages, self._own(microbatches), marked).run()
        for other in frozen:
            free_gathered(other)
        self.take_gradients(model)
        result = Totals()
        for part in self.gather(totals):
            result.add(part.num_loss_tokens, part.finite, part.metrics)
        return result

    def take_gradients(self, model: ExactModel) -> None:
        """Give the gradients of a backward pass to the parts that the optimizer steps."""
        divided = self._divided[model]
        for name, parameter in divided.parameters.items():
            if parameter.grad is not None and parameter is not divided.parts[name]:
                divided.parts[name].grad = local(parameter.grad)
                parameter.grad = None
        sum_gradients([divided.parts[name] for name in divided.partial], self.mesh.group("tensor"))
        self.sum_tied(divided)

    def sum_tied(self, divided: "Divided") -> None:
        """Add up the gradients of an embedding that is the head of another stage."""
        if (tied := divided.parts.get(divided.stage.tied)) is not None and tied.requires_grad:
            assert tied.grad is not None
            tied.grad = divided.stage.sum_tied(tied.grad)

    def own(self, microbatches: Sequence[Microbatch]) -> Sequence[Microbatch]:
        return [batch for _, batch in self._own(microbatches)]

    def wait_for_all(self) -> None:
        self.mesh.world.gather(None, "all processes")

    def gather(self, value: Any) -> list[Any]:
        # of a pipeline, the last stage has the results
        return self.results.gather(value, "results of microbatches")[-self.shares :]

    def _own(self, microbatches: Sequence[Microbatch]) -> list[tuple[bool, Microbatch]]:
        """Return the microbatches of this process, each with whether it counts."""
        own = list(microbatches[self.microbatches.rank :: self.shares])
        most = -(-len(microbatches) // self.shares)
        idle = list(microbatches[:1]) * (most - len(own))
        return [(True, batch) for batch in own] + [(False, batch) for batch in idle]


@dataclass(frozen=True)
class Divided:
    """A divided model, by names."""

    stage: Stage
    parameters: dict[str, nn.Parameter]  # of the module
    parts: dict[str, nn.Parameter]  # what of them this process holds; the same memory
    pieces: Pieces
    partial: Sequence[str]  # whose gradients are yet to be summed over `tensor`
    trained: Sequence[str]  # of all processes
