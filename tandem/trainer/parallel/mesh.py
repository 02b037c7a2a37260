"""The trainer's processes as a mesh, and the collectives between them.

Ranks are numbered with the dimensions of config/parallel.py in their order, the last one fastest,
so the processes of one layer (tensor) are neighbours. Each collective is announced under a name
before it begins, so that a process which does not come to it can be named (processes.py). Sums are
made in the order of the ranks, element by element: their bits depend on the mesh alone, not on the
transport."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tandem.config.parallel import DIMENSIONS, Parallel
from tandem.model.linear import sum_in_order
from tandem.types import Array

# Called with the name of a collective and the ranks of its processes, around it.
Announce = Callable[[str, Sequence[int]], AbstractContextManager[None]]


@dataclass(frozen=True)
class Group:
    """Processes that communicate. Every method is a collective of all of them.

    ranks: their numbers among all processes, in order.
    """

    name: str
    group: dist.ProcessGroup
    rank: int  # of this process in the group
    ranks: Sequence[int]
    device: torch.device
    announce: Announce

    @property
    def size(self) -> int:
        return len(self.ranks)

    def sum(self, tensor: Tensor, what: str) -> Tensor:
        """Sum a tensor over the group, in rank order; all get the same bits."""
        if self.size == 1:
            return tensor
        flat = tensor.reshape(-1)
        length = -(-flat.numel() // self.size)
        padded = torch.nn.functional.pad(flat, (0, length * self.size - flat.numel()))
        part = self.reduce_scatter(padded, what)
        whole = torch.empty_like(padded)
        with self.announce(what, self.ranks):
            dist.all_gather_single(whole, part, group=self.group)
        return whole.resize_(tensor.shape)  # no view: FSDP2 warns of views that a module returns

    def reduce_scatter(self, flat: Tensor, what: str) -> Tensor:
        """Sum a tensor [size * n] over the group in rank order; each process gets its part [n]. The
        sum is made in float32 and rounded once."""
        return sum_in_order(self.exchange(flat.reshape(self.size, -1), what).unbind())

    def exchange(
        self,
        rows: Tensor,
        what: str,
        sent: Sequence[int] | None = None,
        received: Sequence[int] | None = None,
    ) -> Tensor:
        """Send sent[i] of the rows [n, ...] to process i of the group, one behind the other; return
        what they sent here, received[i] rows of process i, in rank order. None: equally many."""
        rows = rows.contiguous()
        found = rows.new_empty(len(rows) if received is None else sum(received), *rows.shape[1:])
        with self.announce(what, self.ranks):
            dist.all_to_all_single(found, rows, received, sent, group=self.group)
        return found

    def all_to_all(self, parts: Sequence[Tensor], received: Sequence[Tensor], what: str) -> None:
        """Send parts[i] to process i of the group, and receive its part into received[i]."""
        sent, back = ([part.numel() for part in side] for side in (parts, received))
        flat = torch.cat([part.reshape(-1) for part in parts])
        for part, found in zip(
            received, self.exchange(flat, what, sent, back).split(back), strict=True
        ):
            part.copy_(found.view(part.shape))

    def send_and_receive(
        self, peer: int, sent: Sequence[Tensor], received: Sequence[Tensor], what: str
    ) -> None:
        """Send tensors to process `peer` of the group and receive others from it, at once, so that
        neither waits for the other to begin. Process `peer` may do both in two calls."""
        rank = self.ranks[peer]
        parts = [tensor.detach().contiguous() for tensor in sent]
        transfers = [dist.P2POp(dist.isend, part, rank, self.group) for part in parts]
        transfers += [dist.P2POp(dist.irecv, tensor, rank, self.group) for tensor in received]
        with self.announce(what, sorted([self.ranks[self.rank], rank])):
            for work in dist.batch_isend_irecv(transfers):
                work.wait()

    def gather(self, value: Any, what: str) -> list[Any]:
        """Return the values of all processes, in rank order. They are pickled: use it between
        processes of one run only."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        with self.announce(what, self.ranks):
            dist.all_gather_object(found, value, group=self.group)
        return found


class Exchange(torch.autograd.Function):
    """Group.exchange; gradients go the same ways back."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        group: Group,
        what: str,
        sent: Sequence[int] | None = None,
        received: Sequence[int] | None = None,
    ) -> Tensor:
        ctx.call = group, f"gradients of {what}", received, sent
        return group.exchange(rows, what, sent, received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        group, what, sent, received = ctx.call
        return group.exchange(grads[0], what, sent, received), None, None, None, None


@dataclass(frozen=True)
class Mesh:
    """The mesh and its groups, as one of its processes sees them."""

    config: Parallel
    rank: int  # of this process among all
    device: torch.device
    groups: dict[tuple[str, ...], Group]  # by the dimensions in which its processes differ
    shards: Group  # processes that hold one copy of the weights without experts together
    replicas: Group  # processes that hold the same part of it
    alone: Group  # this process

    def group(self, *dimensions: str) -> Group:
        """Return the group of processes that differ from this one in these dimensions only."""
        return self.groups[dimensions]

    @property
    def world(self) -> Group:
        return self.groups[DIMENSIONS]


WEIGHTS, EXPERTS = ("data", "expert", "context"), ("data", "context")
MICROBATCHES = ("data", "expert")
RESULTS = ("pipeline", *MICROBATCHES)
# Groups that are used: of all, of each dimension, those that train different microbatches, these
# with all stages, and those with a copy of the same weights, or of the same experts.
GROUPS = (DIMENSIONS, *((name,) for name in DIMENSIONS), MICROBATCHES, RESULTS, WEIGHTS, EXPERTS)


def make_mesh(
    config: Parallel, device: torch.device, announce: Announce, stall_s: float = 300.0
) -> Mesh:
    """Make the mesh of an initialized torch.distributed. Every process calls it. stall_s: as
    run.stall_s, after which those who do not come to a collective are named; it fails later."""
    sizes = [getattr(config, name) for name in DIMENSIONS]
    numbers = np.arange(prod(sizes)).reshape(sizes)
    timeout = timedelta(seconds=60 + 2 * stall_s)
    rank = dist.get_rank()

    made: dict[tuple[int, ...], dist.ProcessGroup] = {}  # by members: equal ones share one

    def own(name: str, rows: Array) -> Group:
        """Make the group of the row of ranks [n, size] that has this process. The others do not
        take part: its members alone wait for each other and connect."""
        [row] = (row for row in rows.tolist() if rank in row)
        if (members := tuple(row)) not in made:
            made[members] = dist.new_group(row, timeout=timeout, use_local_synchronization=True)
        return Group(name, made[members], row.index(rank), row, device, announce)

    def rows(dimensions: Sequence[str]) -> Array:
        inside = [DIMENSIONS.index(name) for name in dimensions]
        outside = [axis for axis in range(len(sizes)) if axis not in inside]
        return numbers.transpose(*outside, *inside).reshape(-1, prod(sizes[i] for i in inside))

    groups = {dims: own(" x ".join(dims), rows(dims)) for dims in dict.fromkeys(GROUPS)}
    alone = own("alone", numbers.reshape(-1, 1))
    if not config.shard:
        return Mesh(config, rank, device, groups, groups[WEIGHTS], alone, alone)
    parts = rows(WEIGHTS).reshape(-1, config.replicas // config.shard, config.shard)
    shards = own("shards", parts.reshape(-1, config.shard))
    replicas = own("replicas", parts.transpose(0, 2, 1).reshape(-1, parts.shape[1]))
    return Mesh(config, rank, device, groups, shards, replicas, alone)
