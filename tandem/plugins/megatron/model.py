"""A Megatron model as algorithms see it: an ExactModel whose layers Megatron runs.

It has the same weights, by the same names; its log-probs agree with the exact model's to rounding,
not to the last bit.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tandem.model.attention import Plan
from tandem.model.expert_choices import ExpertChoices
from tandem.model.kernels import Kernels, kernels_of
from tandem.model.linear import PackedWeight
from tandem.model.load import ExactModel, weight_conversions
from tandem.model.onednn import padded_rows
from tandem.model.row_parts import WHOLE
from tandem.plugins.megatron import core
from tandem.plugins.megatron.weights import Place, Slot, find_slots
from tandem.trainer.parallel.context import divide_rows
from tandem.trainer.parallel.mesh import EXPERTS, WEIGHTS, Group, Mesh
from tandem.trainer.parallel.pipeline import make_stage
from tandem.trainer.parallel.processes import Processes
from tandem.trainer.parallel.ranks import ParallelRanks
from tandem.trainer.ranks import ALONE, Ranks

T = TypeVar("T")


@dataclass
class WholeHead:
    """The output projection [V, D] of all processes that divide the vocabulary, while a pass
    runs."""

    pack: PackedWeight
    gathered: Tensor | None = None
    bias: None = None

    @property
    def weight(self) -> Tensor:
        assert self.gathered is not None, "the head is gathered inside of a pass only"
        return self.gathered


class MegatronModel(ExactModel):
    """Runs a GPTModel, and keeps its weights as `parts`: float32 boxes of the Hugging Face weights,
    which the optimizer steps. They are copied into Megatron's own before a pass, if they have
    changed."""

    def __init__(
        self,
        module: Any,
        slots: dict[str, Slot],
        config: Any,
        rotary_frequencies: Tensor,
        tensor: Group,
        expert: Group,
    ):
        nn.Module.__init__(self)
        self.rotary_frequencies = rotary_frequencies  # float32 [E / 2], radians a position
        self.module, self.config, self.lora = module, config, None
        self.slots, self.tensor = slots, tensor
        # with whom Megatron communicates in its layers; the config refuses both together
        self.peers = expert if expert.size > 1 else tensor
        self.adapted, self.row_parts, self.entering = {}, WHOLE, None
        self.head: Any = WholeHead(PackedWeight())
        self.head.pack.kept = False  # it would outlive the gathered weight
        self.checkpointing, self.splits = False, 1  # Megatron's layers do both themselves
        self.parts = {
            name: nn.Parameter(torch.empty(slot.box.shape, device=tensor.device), True)
            for name, slot in slots.items()
        }
        self._seen = -1

    def forward(self, compute: Callable[[], T]) -> T:
        self._fill()
        if not self.module.post_process:
            return compute()
        weight = self.module.output_layer.weight
        if weight is None:
            weight = self.module.shared_embedding_or_output_weight()
        self.head.gathered = (
            weight if self.tensor.size == 1 else _Gather.apply(weight, self.tensor)
        )[: self.config.vocab_size]
        try:
            return compute()
        finally:
            self.head.gathered = None

    def hidden(
        self, tokens: Tensor, positions: Tensor, plan: Plan, choices: ExpertChoices | None = None
    ) -> Tensor:
        """Compute the last hidden states [T, D] of tokens and positions, int64 [T]. choices: none;
        Megatron's routers choose themselves."""
        decoder, x, peers = self.module.decoder, None, self.peers
        turns = positions.to(self.device)[:, None].float() * self.rotary_frequencies
        angles = torch.cat((turns, turns), -1)[:, None, None]
        with peers.announce("Megatron's layers", peers.ranks) if peers.size > 1 else nullcontext():
            if self.entering is None:
                x = self.module.embedding(input_ids=tokens[None].to(self.device), position_ids=None)
            else:
                decoder.set_input_tensor(self.entering[: len(tokens), None])
            x = decoder(
                hidden_states=x, attention_mask=None, rotary_pos_emb=angles, attention_bias=plan
            )
        return x[:, 0]

    def states(
        self, tokens: Tensor, positions: Tensor, plan: Plan, choices: ExpertChoices | None = None
    ) -> Tensor:
        """Compute the states [T', D] of all layers but those of later stages. Megatron has no
        padding; it is zero."""
        x, rows = self.hidden(tokens, positions, plan, choices), len(tokens)
        return F.pad(x, (0, 0, 0, padded_rows(rows, self.dtype) - rows))

    def packed_plan(self, segments: Any) -> Plan:
        heads, kv_heads, _ = (count // self.tensor.size for count in self.heads)
        return self.kernels.packed_plan(segments, self.device, heads, kv_heads)

    @property
    def kernels(self) -> Kernels:
        return kernels_of(next(self.module.parameters()))

    @torch.no_grad()
    def _fill(self) -> None:
        """Copy the parts into Megatron's weights, if they have changed."""
        version = self.changes()
        if version != self._seen:
            for name, slot in self.slots.items():
                slot.write(self.parts[name])
            self._seen = version

    def changes(self) -> int:
        """Return a version counter of the parts, which grows with every change in place."""
        return sum(part._version for part in self.parts.values())

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take up whole weights by their Hugging Face names."""
        for name, part in self.parts.items():
            part.copy_(weights[name][self.slots[name].box.slices])

    def named_weights(self) -> dict[str, Tensor]:
        """Return this process's parts of the weights, by their Hugging Face names."""
        return {name: part.detach() for name, part in self.parts.items()}

    def trainable(self) -> dict[str, nn.Parameter]:
        return dict(self.parts)

    def adapter_weights(self) -> dict[str, Tensor]:
        return {}

    def adapter_off(self) -> AbstractContextManager[None]:
        return nullcontext()

    def packs(self) -> list[PackedWeight]:
        return []

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.module.parameters()).dtype


class _Gather(torch.autograd.Function):
    """All of the group compute the same loss from the whole weight, so each has the whole gradient
    of its rows."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, group: Group) -> Tensor:
        ctx.rows, ctx.rank = len(weight), group.rank
        whole = weight.new_empty(len(weight) * group.size, weight.shape[1])
        with group.announce("output projection", group.ranks):
            dist.all_gather_into_tensor(whole, weight.detach().contiguous(), group=group.group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0][ctx.rank * ctx.rows : (ctx.rank + 1) * ctx.rows], None


class MegatronRanks(ParallelRanks):
    """Processes whose models are Megatron's.

    Weights, optimizer state and checkpoints are boxes of the Hugging Face weights, as in
    trainer/parallel; Megatron divides heads, features, vocabulary (tensor) and experts, and builds
    the layers of a stage. Stages take turns as in trainer/parallel/pipeline.py, and rows are
    divided as in its context.py. Gradients are summed over the processes that have the same weights
    here, in rank order.
    """

    def __init__(self, mesh: Mesh, processes: Processes | Ranks = ALONE):
        super().__init__(mesh, processes)
        core.start(mesh.config)

    def divide(self, model: ExactModel, dtype: torch.dtype) -> ExactModel:
        """Return Megatron's model with this process's part of an exact model's weights."""
        config, mesh, whole = model.config, self.mesh, model.named_weights()
        module = core.build(config, mesh, dtype, model.checkpointing)
        tensor, expert = mesh.group("tensor"), mesh.group("expert")
        place = Place((tensor.rank, tensor.size), (expert.rank, expert.size))
        shapes = {name: weight.shape for name, weight in whole.items()}
        slots = find_slots(module, config, shapes, place)
        # an export by its process has the names of the exact model's
        module._weight_conversions = weight_conversions(model.module)
        for parameter in module.parameters():
            parameter.data.zero_()  # rows that pad the vocabulary stay so
            parameter.grad_dtype = torch.float32
        rotary = model.module.model.rotary_emb
        divided = MegatronModel(module, slots, config, rotary.inv_freq, tensor, expert)
        divided.load_weights(whole)
        divide_rows(divided, mesh, dtype)
        stage = make_stage(divided, mesh.group("pipeline"), dtype, config.tie_word_embeddings)
        self.keep(stage, {}, divided.parts, {name: slot.box for name, slot in slots.items()})
        return divided

    def take_gradients(self, model: ExactModel) -> None:
        """Sum the gradients of the processes that hold the same part, and give them to the
        parts."""
        assert isinstance(model, MegatronModel)
        zeros = {p: torch.zeros_like(p) for p in model.module.parameters() if p.grad is None}
        for name, slot in model.slots.items():
            gradient = slot.read(lambda p: zeros[p] if p.grad is None else p.grad)
            if slot.of_own_heads:
                gradient = self.mesh.group("tensor").sum(gradient, name)
            dimensions = EXPERTS if slot.is_expert else WEIGHTS
            model.parts[name].grad = self.mesh.group(*dimensions).sum(gradient, name)
        for parameter in model.module.parameters():
            parameter.grad = None
        self.sum_tied(self._divided[model])
