"""Data parallelism: each weight is held in parts by the processes that have a copy of it (FSDP2,
Zhao et al. 2023, arXiv 2304.11277).

A layer's weights are gathered before it runs and freed behind it, in the forward pass and again in
the backward pass; gradients are summed in rank order, and each process keeps its part. The parts
are float32 and are what the optimizer steps; bfloat16 weights are rounded when they are gathered.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor

from tandem.model.experts import ExactExperts
from tandem.model.load import ExactModel
from tandem.trainer.parallel.mesh import EXPERTS, Group, Mesh


def shard_model(model: ExactModel, mesh: Mesh, dtype: torch.dtype) -> None:
    """Divide a model's weights among the processes that have copies of them, in place. The parts
    are float32; no more than a layer is whole in float32 at a time.

    dtype: of the weights that run.
    """
    if mesh.config.replicas == 1:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        return
    for pack in model.packs():
        pack.kept = (
            False  # it would outlive the gathered weights, which no version counter tells apart
        )
    hybrid = mesh.config.shard > 0  # then there is no expert parallelism
    of_experts = (mesh.shards, mesh.replicas) if hybrid else (mesh.group(*EXPERTS), mesh.alone)
    for layer in model.module.model.layers:
        for part in layer.modules():
            if isinstance(part, ExactExperts):
                _shard(part, *of_experts, dtype)
        _shard(layer, mesh.shards, mesh.replicas, dtype)
        model.list_weights()  # its list has kept the whole ones
    _shard(model, mesh.shards, mesh.replicas, dtype, is_root=True)
    if dtype != torch.float32:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
                for weight in module.parameters():
                    weight.grad_dtype = torch.float32
                module.reshard()


def _shard(
    module: nn.Module, shards: Group, replicas: Group, dtype: torch.dtype, *, is_root: bool = False
) -> None:
    """Divide the weights of a module, but for those of sharded modules in it."""
    for parameter in module.parameters():
        if not isinstance(parameter.data, DTensor):
            parameter.data = parameter.data.float()
    sharded = fully_shard(
        module,
        mesh=DeviceMesh.from_group(shards.group, shards.device.type),
        mp_policy=MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        ),
        reshard_after_forward=not is_root,
    )
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)
    sharded.set_custom_all_gather(_Gather(shards))
    sharded.set_custom_reduce_scatter(_RankOrder(shards))
    if replicas.size > 1:

        def sum_replicas(part: Tensor) -> None:
            part.copy_(replicas.sum(part, "gradients"))

        sharded.set_all_reduce_hook(sum_replicas)


class _Allocates:
    """Communication of FSDP2 in a group."""

    def __init__(self, shards: Group):
        self.shards = shards

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Allocates, AllGather):
    """The all-gather of FSDP2, announced."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        with self.shards.announce("weights", self.shards.ranks):
            return dist.all_gather_single(output_tensor, input_tensor, group, async_op)


class _RankOrder(_Allocates, ReduceScatter):
    """The reduce-scatter of FSDP2, summed in rank order."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        output_tensor.copy_(self.shards.reduce_scatter(input_tensor, "gradients"))


def reduce_gradients(model: ExactModel, *, is_last: bool) -> None:
    """Sum gradients over the processes in the backward pass of the last microbatch only."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
        model.set_is_last_backward(is_last)


def free_gathered(model: ExactModel) -> None:
    """Free what the root has gathered and keeps for a backward pass."""
    if isinstance(model, FSDPModule):
        model.reshard()
