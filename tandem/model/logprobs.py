"""Log-probabilities of tokens under their sampling distribution, defined once for engine and
trainer.

The engine calls `log_distribution` on the rows it decodes. The trainer calls `token_logprobs`,
which runs the same function chunk by chunk and never holds [N, V]. Equal logits therefore give
equal log-probs, with repetition penalty, temperature, top-k, top-p and min-p. This file knows no
batches or losses.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tandem.model.activations import soft_cap
from tandem.model.kernels import kernels_of
from tandem.model.onednn import gradient_product, weight_gradient
from tandem.types import SamplingDistribution

CHUNK_BYTES = 1 << 25  # logits held at once
GPU_CHUNK_BYTES = 1 << 29  # on a GPU, which few rows leave idle


@dataclass(frozen=True, slots=True)
class SeenTokens:
    """Pairs of N predictions and the tokens before them: tokens[i] comes before prediction rows[i].

    Both are int64 [M].
    """

    rows: Tensor
    tokens: Tensor


# Makes the pairs of predictions start .. stop - 1 once their chunk is computed.
SeenBefore = Callable[[int, int], SeenTokens]
# What turns slopes [n, V] of the logits that are sampled from, in place, into those of the output
# projection's, one after the other.
Backwards = list[Callable[[Tensor], Any]]


def penalize(logits: Tensor, penalty: float, seen: SeenTokens) -> Tensor:
    """Apply the repetition penalty (Keskar et al. 2019, section 4.1) to logits [N, V] in place.

    The positive logit of a token seen before is divided by the penalty, a negative one multiplied.
    Returns the slope d out / d in [M].
    """
    values = logits[seen.rows, seen.tokens]
    slope = torch.where(values > 0, 1.0 / penalty, penalty)
    logits[seen.rows, seen.tokens] = torch.where(values > 0, values / penalty, values * penalty)
    return slope


def log_distribution(
    logits: Tensor, sampling: SamplingDistribution, forced: Tensor | None = None
) -> Tensor:
    """Turn penalized logits [N, V] into log-probs [N, V] after temperature, top-k, top-p and min-p.

    Filtered tokens get -inf. forced int64 [N] names tokens that pass the filters in any case. The
    engine never needs it, because it sampled from the kept set. The trainer does after an update
    has moved a sampled token out of the set: the ratio stays finite, and unbiased on the first
    pass, whose sets are equal. Ties at the edge are all kept, so no sort order matters. A row's
    bits depend on that row only: log_softmax works row by row, unlike logsumexp of a single row.
    """
    kernels = kernels_of(logits)
    logprobs = kernels.log_softmax(logits, sampling.temperature or 1.0)
    if not _is_filtered(sampling):
        return logprobs
    keep = torch.ones_like(logprobs, dtype=torch.bool)
    if 0 < sampling.top_k < logprobs.shape[-1]:
        keep &= logprobs >= logprobs.topk(sampling.top_k, -1).values[:, -1:]
    if sampling.top_p < 1.0:
        least = max(sampling.top_p, torch.finfo(logprobs.dtype).tiny)  # 0 would keep nothing
        keep &= logprobs >= kernels.top_p_edge(logprobs.masked_fill(~keep, float("-inf")), least)
    if sampling.min_p:
        keep &= logprobs >= logprobs.amax(-1, keepdim=True) + math.log(sampling.min_p)
    if forced is not None:
        keep.scatter_(1, forced[:, None], True)
    return kernels.log_softmax(logprobs.masked_fill(~keep, float("-inf")), 1.0)


def _is_filtered(sampling: SamplingDistribution) -> bool:
    filtered = sampling.top_k or sampling.top_p < 1.0 or sampling.min_p
    return sampling.temperature != 0.0 and bool(filtered)


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    packed: Tensor,
    targets: Tensor,
    sampling: SamplingDistribution,
    seen: SeenBefore | None = None,
    expected: Tensor | None = None,
    entropy: bool = True,
    bias: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Compute (log-probs [N], entropies [N]) of targets int64 [N] after hidden states [N, D].

    Both are float32, in nats and differentiable.

    weight: the output projection [V, D]; packed: its pack.
    seen: needed with a repetition penalty.
    expected: float32 [N], the gradient that the log-probs will receive, if the loss knows it
        beforehand. The gradients are then made while the logits are at hand. If another gradient
        arrives, the backward pass computes the logits again.
    entropy: whether to compute it, in three passes over the logits; it is zero otherwise.
    bias, softcap: of the output projection, [V], and of its logits (`soft_cap`), 0 without one.
    """
    options = sampling, seen, expected, entropy, bias, softcap
    return _TokenLogprobs.apply(hidden, weight, packed, targets, *options)  # type: ignore[no-any-return]


class _TokenLogprobs(torch.autograd.Function):
    """Autograd function over hidden states; its backward repeats the logits unless `expected`
    held."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        packed: Tensor,
        targets: Tensor,
        sampling: SamplingDistribution,
        seen: SeenBefore | None,
        expected: Tensor | None,
        with_entropy: bool,
        bias: Tensor | None,
        softcap: float,
    ) -> tuple[Tensor, Tensor]:
        ctx.sampling, ctx.seen, ctx.softcap = sampling, seen, softcap
        logprobs, entropy = (hidden.new_zeros(len(targets), dtype=torch.float32) for _ in range(2))
        wanted = ctx.needs_input_grad if expected is not None else [False] * 9
        grads = _Gradients(hidden, weight, bias, wanted)
        for rows in chunks(len(targets), weight):
            table, backwards = _chunk_table(
                kernels_of(hidden).matmul(hidden[rows], packed, bias).float(),
                targets,
                sampling,
                seen,
                rows,
                softcap,
            )
            logprobs[rows], entropies = _values(table, targets[rows], sampling, with_entropy)
            if entropies is not None:
                entropy[rows] = entropies
            if expected is not None and any(wanted):
                parts = entropy[rows], expected[rows, None], None
                grads.add(rows, _slope(table, targets[rows], sampling, *parts), sampling, backwards)
            del table  # before the next logits are computed
        ctx.save_for_backward(
            *(hidden, weight, packed, targets, entropy, expected, bias),
            *(grads.hidden, grads.weight, grads.bias),
        )
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *above: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, packed, targets, entropy, expected, bias, *totals = ctx.saved_tensors
        if (
            expected is not None
            and above[1] is None
            and above[0] is not None
            and torch.equal(above[0], expected)
        ):
            return *totals[:2], *[None] * 6, totals[2], None
        grads = _Gradients(hidden, weight, bias, ctx.needs_input_grad)
        for rows in chunks(len(targets), weight):
            options = ctx.sampling, ctx.seen, rows, ctx.softcap
            table, backwards = _chunk_table(
                kernels_of(hidden).matmul(hidden[rows], packed, bias).float(), targets, *options
            )
            parts = (None if grad is None else grad[rows, None] for grad in above)
            slope = _slope(table, targets[rows], ctx.sampling, entropy[rows], *parts)
            grads.add(rows, slope, ctx.sampling, backwards)
            del table, slope
        return grads.hidden, grads.weight, *[None] * 6, grads.bias, None


class _Gradients:
    """The wanted gradients of hidden states [N, D], output projection [V, D] and bias [V], by
    chunks. wanted: of each argument of `_TokenLogprobs`."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Sequence[bool]):
        self.inputs = hidden, weight
        self.hidden = torch.empty_like(hidden) if wanted[0] else None
        self.weight = torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None
        self.bias = torch.zeros_like(bias) if bias is not None and wanted[8] else None

    def add(
        self, rows: slice, slope: Tensor, sampling: SamplingDistribution, backwards: Backwards
    ) -> None:
        """Add the part of these rows. slope [n, V], d loss / d tempered logits, is overwritten."""
        hidden, weight = self.inputs
        if sampling.temperature not in (0.0, 1.0):
            slope.div_(sampling.temperature)
        for step in backwards:
            step(slope)
        if self.bias is not None:
            self.bias += slope.sum(0)
        if self.hidden is not None:
            self.hidden[rows] = gradient_product(slope, weight)
        if self.weight is not None:
            weight_gradient(slope, hidden[rows], self.weight)


def _fused(table: Tensor, sampling: SamplingDistribution) -> bool:
    """Tell whether kernels read logits in place of a table of log-probs."""
    return kernels_of(table).fused and not _is_filtered(sampling)


def _values(
    table: Tensor, targets: Tensor, sampling: SamplingDistribution, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute (log-probs of targets, entropies) [n] from a table of `_chunk_table`."""
    if _fused(table, sampling):
        temperature = sampling.temperature or 1.0
        return kernels_of(table).target_logprobs(table, targets, temperature, entropy=with_entropy)
    logprobs = table.gather(1, targets[:, None])[:, 0]
    return logprobs, -row_sums(table.clamp_min(-1e4).mul_(table.exp())) if with_entropy else None


def _slope(
    table: Tensor,
    targets: Tensor,
    sampling: SamplingDistribution,
    entropy: Tensor,
    above: Tensor | None,
    above_entropy: Tensor | None,
) -> Tensor:
    """Compute d loss / d tempered logits [N, V] from the gradients [N, 1] of log-probs and entropy.

    d logprob = onehot - p and d entropy = -p (log p + entropy) on the kept set, 0 outside it.
    """
    if _fused(table, sampling):
        temperature = sampling.temperature or 1.0
        return kernels_of(table).logprob_slope(table, targets, temperature, above, above_entropy)
    if above_entropy is None:
        slope = table.exp_().mul_(-above)  # type: ignore[operator]
    else:
        probs = table.exp()
        slope = table.clamp_min_(-1e4).add_(entropy[:, None]).mul_(-above_entropy)
        slope = (slope if above is None else slope.sub_(above)).mul_(probs)
    return slope if above is None else slope.scatter_add_(1, targets[:, None], above)


def _chunk_table(
    logits: Tensor,
    targets: Tensor,
    sampling: SamplingDistribution,
    seen: SeenBefore | None,
    rows: slice,
    softcap: float,
) -> tuple[Tensor, Backwards]:
    """Compute log-probs [n, V] of these rows from the output projection's [n, V], and how slopes
    come back through soft cap and repetition penalty.

    Where kernels are fused, the table holds the penalized logits instead.
    """
    backwards: Backwards = []
    if softcap:
        logits = soft_cap(logits, softcap)
        bend = (logits / softcap).square_().neg_().add_(1.0)
        backwards.append(lambda slope: slope.mul_(bend))
    if sampling.repetition_penalty != 1.0:
        assert seen is not None, "a repetition penalty needs the tokens seen before"
        tokens = seen(rows.start, rows.stop)
        factor = penalize(logits, sampling.repetition_penalty, tokens)
        backwards.insert(0, partial(_scale_seen, tokens, factor))
    if _fused(logits, sampling):
        return logits, backwards
    return log_distribution(logits, sampling, targets[rows]), backwards


def _scale_seen(seen: SeenTokens, factor: Tensor, slope: Tensor) -> None:
    slope[seen.rows, seen.tokens] = slope[seen.rows, seen.tokens] * factor


def row_sums(table: Tensor) -> Tensor:
    """Sum each row of [n, V] in an order that does not depend on the thread count.

    A single row alone would be split among all threads.
    """
    return table.sum(-1) if len(table) > 1 else table.expand(2, -1).sum(-1)[:1]


def chunks(rows: int, weight: Tensor) -> list[slice]:
    """Split rows into runs whose logits [n, V] fit CHUNK_BYTES, or a GPU's, where the output
    projection [V, D] is on one."""
    size = max(16, (GPU_CHUNK_BYTES if weight.is_cuda else CHUNK_BYTES) // (4 * len(weight)))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
