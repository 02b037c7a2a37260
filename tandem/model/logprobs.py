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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.model.activations import soft_cap
from tandem.model.kernels import kernels_of
from tandem.types import SamplingDistribution

CHUNK_BYTES = 1 << 25  # logits held at once
GPU_CHUNK_BYTES = 1 << 30  # on a GPU, where they may be float32: 1,789 rows of 150,000 tokens


@dataclass(frozen=True, slots=True)
class SeenTokens:
    """Pairs of N predictions and the tokens before them: tokens[i] comes before prediction rows[i].

    Both are int64 [M].
    """

    rows: Tensor
    tokens: Tensor


# Makes the pairs of predictions start .. stop - 1 once their chunk is computed.
SeenBefore = Callable[[int, int], SeenTokens]


def penalize(logits: Tensor, penalty: float, seen: SeenTokens) -> Tensor:
    """Apply the repetition penalty (Keskar et al. 2019, section 4.1) to logits [N, V] in place.

    The positive logit of a token seen before is divided by the penalty, a negative one multiplied.
    Returns the slope d out / d in [M].
    """
    values = logits[seen.rows, seen.tokens]
    slope = torch.where(values > 0, 1.0 / penalty, penalty)
    logits[seen.rows, seen.tokens] = torch.where(values > 0, values / penalty, values * penalty)
    return slope


UNNAMED = -1e30  # the logit of an id without a token: probability 0, and no NaN in an entropy


def mask_unnamed(logits: Tensor, sampling: SamplingDistribution, forced: Tensor | None) -> None:
    """Take ids without a token out of logits [N, V], in place, but those of `forced` int64 [N]: an
    engine without this mask (vLLM, another server) may have sampled them."""
    if 0 < sampling.vocabulary < logits.shape[-1]:
        kept = None if forced is None else (1, forced[:, None], logits.gather(1, forced[:, None]))
        logits[:, sampling.vocabulary :] = UNNAMED
        if kept is not None:
            logits.scatter_(*kept)


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
    mask_unnamed(logits, sampling, forced)
    kernels = kernels_of(logits)
    logprobs = kernels.log_softmax(logits, sampling.temperature or 1.0)
    if not is_filtered(sampling):
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


def is_filtered(sampling: SamplingDistribution) -> bool:
    """Return whether a distribution keeps only some tokens."""
    filtered = sampling.top_k or sampling.top_p < 1.0 or sampling.min_p
    return sampling.temperature != 0.0 and bool(filtered)


def as_summed(logits: Tensor, sampling: SamplingDistribution) -> Tensor:
    """Return logits [N, V] in the type that engine and trainer both sum: another has other bits."""
    direct = kernels_of(logits).draw is not None and sampling.repetition_penalty == 1.0
    return logits if direct and not is_filtered(sampling) else logits.float()


class Head(NamedTuple):
    """Hidden states [N, D], the output projection [V, D] with its pack and its bias [V], and the
    soft cap of its logits, 0 without one."""

    hidden: Tensor
    weight: Tensor
    packed: Tensor
    bias: Tensor | None = None
    softcap: float = 0.0

    def logits(self, rows: slice) -> Tensor:
        """Compute the projection of some rows [n, V], without the soft cap."""
        return kernels_of(self.hidden).matmul(self.hidden[rows], self.packed, self.bias)


def token_logprobs(
    head: Head,
    targets: Tensor,
    sampling: SamplingDistribution,
    seen: SeenBefore | None = None,
    expected: Tensor | None = None,
    entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute (log-probs [N], entropies [N]) of targets int64 [N] after hidden states [N, D].

    Both are float32, in nats and differentiable.

    seen: needed with a repetition penalty.
    expected: float32 [N], the gradient that the log-probs will receive, if the loss knows it
        beforehand. The gradients are then made while the logits are at hand. If another gradient
        arrives, the backward pass computes the logits again.
    entropy: whether to compute it, in three passes over the logits; it is zero otherwise.
    """
    call = _Call(targets, sampling, seen, expected, entropy)
    return _TokenLogprobs.apply(head.hidden, head.weight, head.bias, head, call)  # type: ignore[no-any-return]


class _Call(NamedTuple):
    """Arguments of `token_logprobs`."""

    targets: Tensor
    sampling: SamplingDistribution
    seen: SeenBefore | None
    expected: Tensor | None
    entropy: bool


class _TokenLogprobs(torch.autograd.Function):
    """Autograd function over hidden states; its backward repeats the logits unless `expected`
    held."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head, call: _Call
    ) -> tuple[Tensor, Tensor]:
        count, expected = len(call.targets), call.expected
        logprobs, entropy = (hidden.new_zeros(count, dtype=torch.float32) for _ in range(2))
        wanted = ctx.needs_input_grad[:3] if expected is not None else [False] * 3
        grads = _Gradients(head, wanted)
        for rows in chunks(count, weight):
            chunk = _Chunk(head, call, rows)
            logprobs[rows], entropies = chunk.values()
            if entropies is not None:
                entropy[rows] = entropies
            if expected is not None and any(wanted):
                grads.add(rows, chunk.slope(entropy[rows], expected[rows, None], None))
            del chunk  # before the next logits are computed
        made = grads.hidden, grads.weight, grads.bias
        ctx.save_for_backward(hidden, weight, head.packed, bias, entropy, *made)
        ctx.softcap, ctx.call = head.softcap, call
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *above: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, packed, bias, entropy, *made = ctx.saved_tensors
        call, expected = ctx.call, ctx.call.expected
        is_known = expected is not None and above[0] is not None and above[1] is None
        if is_known and torch.equal(above[0], expected):  # type: ignore[arg-type]
            return *made, None, None
        head = Head(hidden, weight, packed, bias, ctx.softcap)
        grads = _Gradients(head, ctx.needs_input_grad)
        for rows in chunks(len(call.targets), weight):
            chunk = _Chunk(head, call, rows)
            slope = chunk.slope(
                entropy[rows], *(None if grad is None else grad[rows, None] for grad in above)
            )
            grads.add(rows, slope)
            del chunk, slope
        return grads.hidden, grads.weight, grads.bias, None, None


class _Gradients:
    """The wanted gradients of hidden states [N, D], output projection [V, D] and bias [V], by
    chunks. wanted: of each of them."""

    def __init__(self, head: Head, wanted: Sequence[bool]):
        hidden, weight, _, bias, _ = self.head = head
        self.hidden = torch.empty_like(hidden) if wanted[0] else None
        self.weight = torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None
        self.bias = torch.zeros_like(bias) if bias is not None and wanted[2] else None

    def add(self, rows: slice, slope: Tensor) -> None:
        """Add the part of these rows. slope: d loss / d logits of the projection, [n, V]."""
        kernels = kernels_of(slope)
        if self.bias is not None:
            self.bias += slope.sum(0)
        if self.hidden is not None:
            self.hidden[rows] = kernels.gradient_product(slope, self.head.weight)
        if self.weight is not None:
            kernels.weight_gradient(slope, self.head.hidden[rows], self.weight)


class _Chunk:
    """Some rows, with a table [n, V] of their log-probs; where kernels are fused, the table holds
    the penalized logits instead."""

    def __init__(self, head: Head, call: _Call, rows: slice):
        self.targets, self.with_entropy = call.targets[rows], call.entropy
        self.sampling = sampling = call.sampling
        # from the logits that are sampled from back to the projection's, slopes change in place
        self._backwards: list[Callable[[Tensor], Any]] = []
        logits = as_summed(head.logits(rows), sampling)
        kernels = kernels_of(logits)
        self._fused = kernels.fused and not is_filtered(sampling)
        self._in_place = self._fused and kernels.draw is not None
        if head.softcap:
            logits = soft_cap(logits.float(), head.softcap)
            bend = (logits / head.softcap).square_().neg_().add_(1.0)
            self._backwards.append(lambda slope: slope.mul_(bend))
        if sampling.repetition_penalty != 1.0:
            assert call.seen is not None, "a repetition penalty needs the tokens seen before"
            tokens = call.seen(rows.start, rows.stop)
            factor = penalize(logits, sampling.repetition_penalty, tokens)
            at = tokens.rows, tokens.tokens
            self._backwards.insert(0, lambda slope: slope.index_put_(at, slope[at] * factor))
        mask_unnamed(logits, sampling, self.targets)
        self.table = logits if self._fused else log_distribution(logits, sampling, self.targets)

    def values(self) -> tuple[Tensor, Tensor | None]:
        """Compute (log-probs of the targets, entropies) [n]."""
        table, targets, entropy = self.table, self.targets, self.with_entropy
        if self._fused:
            temperature = self.sampling.temperature or 1.0
            return kernels_of(table).target_logprobs(table, targets, temperature, entropy=entropy)
        logprobs = table.gather(1, targets[:, None])[:, 0]
        return logprobs, -row_sums(table.clamp_min(-1e4).mul_(table.exp())) if entropy else None

    def slope(self, entropy: Tensor, above: Tensor | None, above_entropy: Tensor | None) -> Tensor:
        """Compute d loss / d logits of the projection [n, V] from the gradients [n, 1] of log-probs
        and entropy; the table is overwritten.

        d logprob = onehot - p and d entropy = -p (log p + entropy) on the kept set, 0 outside it.
        """
        table, targets, sampling = self.table, self.targets, self.sampling
        if self._fused:
            grads = above, above_entropy
            kernels, temperature = kernels_of(table), sampling.temperature or 1.0
            slope = kernels.logprob_slope(table, targets, temperature, *grads)
        else:
            if above_entropy is None:
                slope = table.exp_().mul_(-above)  # type: ignore[operator]
            else:
                probs = table.exp()
                slope = table.clamp_min_(-1e4).add_(entropy[:, None]).mul_(-above_entropy)
                slope = (slope if above is None else slope.sub_(above)).mul_(probs)
            if above is not None:
                slope.scatter_add_(1, targets[:, None], above)
        if not self._in_place and sampling.temperature not in (0.0, 1.0):
            slope.div_(sampling.temperature)
        for step in self._backwards:
            step(slope)
        return slope


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
