"""Context parallelism: the rows of a microbatch are divided among processes (Ulysses, Jacobs et al.
2023, arXiv 2309.14509).

    rank 0 of 2                                   rank 1 of 2
    rows 0 .. n - 1: embedding, norms, linears    rows n .. 2n - 1: the same
      queries, keys, values [n, H + 2K, E]  <--->   of its rows
    all rows of the first half of the heads       all rows of the second half
      outputs [2n, H / 2, E]                <--->   of its heads
    rows 0 .. n - 1: output projection, MLP       rows n .. 2n - 1: the same

All of them are given the same microbatch. Each computes the log-probs of the targets that its rows
predict; `gather` brings those of all to each, so each computes the same loss, and takes only its
own slice of the gradient back. What it adds to the gradient of a weight is thus a sum over its own
rows, and FSDP (data.py) sums over data, expert and context alike: no token counts twice.

Forward bits are those of one process, since the bits of a row do not depend on other rows, nor
those of a head on other heads. Gradients of activations differ by the backward products, which are
not row-invariant, and gradients of weights by the order in which rows are summed: within n rows,
then over processes in rank order. Each is the error of a sum of T terms, as between two sizes of a
microbatch: 1e-7 of a float32 gradient's size is found in the tests.

Memory: attention keeps all rows of 1 / C of the heads, and everything else T / C rows of all
features (rounded up as linears want), so each process keeps 1 / C of the activations, and a second
copy of its values. A layer sends 2H + 2K heads of its own rows forward and as many back: less, the
more processes there are, where ring attention sends the same. Targets are not balanced: those whose
rows predict many compute many rows of the vocabulary. This file knows no loss.
"""

import numpy as np
import torch
from torch import Tensor

from tandem.model.attention import Plan, Scoring
from tandem.model.load import ExactModel
from tandem.model.onednn import padded_rows
from tandem.model.row_parts import RowParts
from tandem.trainer.parallel.mesh import Exchange, Group, Mesh
from tandem.types import Array, Microbatch


def divide_rows(model: ExactModel, mesh: Mesh, dtype: torch.dtype) -> None:
    """Let the model compute the rows of this process alone. dtype: of the weights that run."""
    if mesh.config.context > 1:
        model.row_parts = ContextParts(mesh.group("context"), dtype)


class ContextParts(RowParts):
    """Equal contiguous runs of a microbatch's rows, one a process; the last ones end in padding."""

    def __init__(self, group: Group, dtype: torch.dtype):
        self.group, self.dtype = group, dtype

    def rows(self, batch: Microbatch) -> tuple[Array, Array]:
        count = self._count(batch)
        start, padding = self.group.rank * count, self.group.size * count - len(batch.tokens)
        own = slice(start, start + count)
        return np.pad(batch.tokens, (0, padding))[own], np.pad(batch.positions, (0, padding))[own]

    def targets(self, batch: Microbatch) -> tuple[Array, Array]:
        owners, places = np.divmod(batch.rows, self._count(batch))
        own = np.flatnonzero(owners == self.group.rank)
        return own, places[own]

    def plan(self, plan: Plan) -> Plan:
        return ContextPlan(plan, self.group)

    def gather(self, values: Tensor, batch: Microbatch) -> Tensor:
        """Return the values [N] of all targets, from each process's [n]. Every process computes the
        same loss of them, so the gradient of its own is a slice and no sum."""
        group, owners = self.group, batch.rows // self._count(batch)
        counts = np.bincount(owners, minlength=group.size).tolist()
        sent, own = [len(values)] * group.size, values.detach().repeat(group.size)
        found = group.exchange(own, "values of targets", sent, counts)
        places = torch.from_numpy(np.argsort(owners, kind="stable")).to(values.device)
        whole = values.new_empty(len(owners)).index_copy_(0, places, found)
        return whole.index_copy(0, places.split(counts)[group.rank], values)

    def _count(self, batch: Microbatch) -> int:
        """Count the rows of a process: at least one, so that each has a gradient of each weight."""
        return padded_rows(-(-len(batch.tokens) // self.group.size), self.dtype)


class ContextPlan:
    """Attention of all rows by the processes of a group, each for its share of the heads."""

    def __init__(self, plan: Plan, group: Group):
        self.whole, self.group = plan, group

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """Attend q [n, H, E], k and v [n, K, E] of this process's rows to [n, H, E]."""
        shares = [heads.unflatten(1, (self.group.size, -1)) for heads in (q, k, v)]
        sent = torch.cat(shares, 2).transpose(0, 1)  # [C, n, (H + 2K) / C, E]
        received = Exchange.apply(sent, self.group, "attention heads").flatten(0, 1)
        q, k, v = received.split([share.shape[2] for share in shares], 1)
        out = self.whole.attend(layer, q, k, v, scoring)  # [C * n, H / C, E]
        back = Exchange.apply(
            out.unflatten(0, (self.group.size, -1)), self.group, "outputs of attention heads"
        )
        return back.transpose(0, 1).flatten(1, 2)  # type: ignore[no-any-return]
