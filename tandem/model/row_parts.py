"""The rows of a microbatch that a process computes: here all of them. trainer/parallel/context.py
divides them among several processes."""

from torch import Tensor

from tandem.model.attention import Plan
from tandem.types import Array, Microbatch


class RowParts:
    """One process that computes every row and predicts every target."""

    def rows(self, batch: Microbatch) -> tuple[Array, Array]:
        """Return tokens and positions, int64 [T], of the rows that this process computes."""
        return batch.tokens, batch.positions

    def targets(self, batch: Microbatch) -> tuple[slice | Array, Array]:
        """Return which targets this process predicts, n of N, and the places int64 [n] of the rows
        that predict them among those that it computes."""
        return slice(None), batch.rows

    def plan(self, plan: Plan) -> Plan:
        """Return the attention of this process's rows over all rows. plan: that of all rows."""
        return plan

    def gather(self, values: Tensor, batch: Microbatch) -> Tensor:
        """Return the values [N] of all targets, from those of this process's targets, [n]."""
        return values


WHOLE = RowParts()
