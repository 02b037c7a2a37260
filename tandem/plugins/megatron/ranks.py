"""The passes of models that Megatron-Core runs, over the processes of a mesh.

Weights, optimizer state and checkpoints are boxes of the Hugging Face weights, as in
train/parallel; Megatron divides heads, features, vocabulary (tensor) and experts, and builds the
layers of a stage. Stages take turns as in train/parallel/pipeline.py, and rows are divided as in
its context.py. Gradients are summed over the processes that have the same weights here, in rank
order.
"""

import torch

from tandem.model.load import ExactModel, weight_conversions
from tandem.plugins.megatron import core
from tandem.plugins.megatron.model import MegatronModel
from tandem.plugins.megatron.weights import Place, find_slots
from tandem.train.parallel.context import divide_rows
from tandem.train.parallel.mesh import EXPERTS, WEIGHTS, Mesh
from tandem.train.parallel.pipeline import make_stage
from tandem.train.parallel.processes import Processes
from tandem.train.parallel.ranks import ParallelRanks


class MegatronRanks(ParallelRanks):
    """Processes whose models are Megatron's."""

    def __init__(self, mesh: Mesh, processes: Processes | None = None):
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
