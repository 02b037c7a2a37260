"""Expert parallelism: the processes of a group hold different experts of each layer, and a token is
computed where its expert is (GShard, Lepikhin et al. 2020, arXiv 2006.16668, section 3.2, but
without a capacity: every row is computed, and none is padding).

The processes train different microbatches. Each sends the rows of its tokens, grouped by expert, to
the processes of their experts, and gets the outputs back; the backward pass sends gradients the
same ways in reverse. An expert computes the rows of all processes as one product. As a row's output
does not depend on other rows, and each token's outputs are summed in the order of its experts'
numbers as before, a forward pass has the bits of one process's. The gradients of a product of
more rows have other last bits.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from tandem.model.boxes import Box, whole_box
from tandem.model.experts import ExactExperts, Expert, Output
from tandem.model.load import ExactModel
from tandem.trainer.parallel.mesh import Exchange, Group


def divide_experts(model: ExactModel, group: Group, boxes: dict[str, Box]) -> None:
    """Divide the experts of every layer among a group, in place.

    boxes: the part of each weight that this process has, by name; those of experts are written into
    it. A layer whose experts other processes have too (tensor.py) is divided further.
    """
    if group.size == 1:
        return
    for module, experts in model.module.named_modules():
        if not isinstance(experts, ExactExperts):
            continue
        for name, weight in experts.named_parameters(module):
            box = boxes.get(name) or whole_box(weight.shape)
            boxes[name] = box.cut(0, group.rank, group.size)
            weight.data = weight.data.chunk(group.size)[group.rank].clone()
        experts.expert_packs = experts.expert_packs[: len(experts.gate_up_proj)]
        experts.dispatch = partial(_dispatch, group)


def _dispatch(group: Group, experts: Sequence[Expert], x: Tensor, chosen: Tensor) -> list[Output]:
    """Run the experts of a group's processes. Every call is a collective of the group, also for a
    process whose experts nobody has chosen."""
    count, k, flat = group.size * len(experts), chosen.shape[1], chosen.flatten()
    here = torch.where((flat >= 0) & (flat < count))[0]  # of this group's experts
    order = here[flat[here].argsort(stable=True)]  # places in `chosen`, by expert
    counts = torch.bincount(flat[here], minlength=count)
    own = counts.view(group.size, -1)
    # int64 [senders, experts], of rows for this process's
    theirs = group.exchange(own, "counts of experts' rows")
    sent, received = own.sum(1).tolist(), theirs.sum(1).tolist()
    rows = x.repeat_interleave(k, 0)[order]
    rows = Exchange.apply(rows, group, "rows for experts", sent, received)
    results = _run_grouped(experts, rows, theirs)
    values = Exchange.apply(results, group, "outputs of experts", received, sent)
    sizes = counts.tolist()
    columns = (order // k, order % k, values)
    parts = zip(*(column.split(sizes) for column in columns), strict=True)
    # the first one also without a row, so that every backward pass comes to the collectives
    return [part for number, part in enumerate(parts) if sizes[number] or not number]


def _run_grouped(experts: Sequence[Expert], rows: Tensor, counts: Tensor) -> Tensor:
    """Run each expert once on its rows of all senders. counts: int64 [senders, experts], of rows
    [n, D], which come by sender and then by expert; the outputs come in the same order."""
    numbers = torch.arange(len(experts), device=rows.device).repeat(len(counts))
    by_expert = numbers.repeat_interleave(counts.flatten()).argsort(stable=True)
    parts = rows[by_expert].split(counts.sum(0).tolist())
    # the first one also without a row, so that there are gradients of the weights, which processes
    # sum
    results = [
        expert(part)
        for number, (expert, part) in enumerate(zip(experts, parts, strict=True))
        if len(part) or not number
    ]
    return torch.cat(results)[by_expert.argsort()]
