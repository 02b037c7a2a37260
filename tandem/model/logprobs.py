"""Log-probabilities of tokens under the distribution they are sampled from, one definition for
engine and trainer.

The engine calls `log_distribution` on the rows it decodes; the trainer calls `token_logprobs`,
which goes through the same function chunk by chunk and never holds [N, V]. Equal logits therefore
give equal log-probs, repetition penalty, temperature, top-k, top-p and min-p included.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tandem.model.linear import multiply
from tandem.types import SamplingParams

CHUNK_BYTES = 1 << 25  # logits held at once


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDistribution:
    """How logits become the distribution sampled from: repetition penalty, temperature, top-k,
    top-p, min-p, in this order.

    Temperature 0 is greedy: its log-probs are those at temperature 1 without the filters, which
    would leave one token. Example: Filter(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0,
    repetition_penalty=1.0)
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @staticmethod
    def of(params: SamplingParams) -> "SamplingDistribution":
        return SamplingDistribution(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
        )


@dataclass(frozen=True, slots=True)
class SeenTokens:
    """The tokens before each of N predictions, as pairs: tokens[i] comes before prediction rows[i];
    both int64 [M]."""

    rows: Tensor
    tokens: Tensor


# of predictions start .. stop - 1, made when they are computed
SeenBefore = Callable[[int, int], SeenTokens]


def penalize(logits: Tensor, penalty: float, seen: SeenTokens) -> Tensor:
    """Repetition penalty (Keskar et al. 2019, section 4.1) on logits [N, V], in place; returns its
    slope [M].

    A positive logit of a token seen before is divided by it, a negative one multiplied. The slope
    is d out / d in.
    """
    values = logits[seen.rows, seen.tokens]
    slope = torch.where(values > 0, 1.0 / penalty, penalty)
    logits[seen.rows, seen.tokens] = torch.where(values > 0, values / penalty, values * penalty)
    return slope


def log_distribution(
    logits: Tensor, how: SamplingDistribution, forced: Tensor | None = None
) -> Tensor:
    """Logits [N, V], penalized already -> log-probs [N, V] after temperature, top-k, top-p, min-p;
    filtered ones -inf.

    forced int64 [N]: tokens kept whatever the filters say. The engine never needs it (what it
    sampled was kept); the trainer does, after an update has moved a sampled token out of the set:
    its ratio stays finite and unbiased on the first pass, where the sets are equal. Ties at the
    edge are all kept, so no sort order can matter. A row's bits depend on that row only:
    log_softmax works row by row, unlike logsumexp of a single row.
    """
    logprobs = (logits if how.temperature in (0.0, 1.0) else logits / how.temperature).log_softmax(
        -1
    )
    if how.temperature == 0.0 or (not how.top_k and how.top_p >= 1.0 and not how.min_p):
        return logprobs
    keep = torch.ones_like(logprobs, dtype=torch.bool)
    if 0 < how.top_k < logprobs.shape[-1]:
        keep &= logprobs >= logprobs.topk(how.top_k, -1).values[:, -1:]
    if how.top_p < 1.0:
        keep &= logprobs >= _top_p_edge(logprobs.masked_fill(~keep, float("-inf")), how.top_p)
    if how.min_p:
        keep &= logprobs >= logprobs.amax(-1, keepdim=True) + math.log(how.min_p)
    if forced is not None:
        keep.scatter_(1, forced[:, None], True)
    return logprobs.masked_fill(~keep, float("-inf")).log_softmax(-1)


def _top_p_edge(logprobs: Tensor, top_p: float) -> Tensor:
    """[N, 1]: the smallest log-prob inside the least set of likeliest tokens whose share reaches
    top_p."""
    ranked = logprobs.sort(-1, descending=True).values
    probs = ranked.softmax(-1)
    before = probs.cumsum(-1) - probs
    return ranked.masked_fill(before >= top_p, float("inf")).amin(-1, keepdim=True)


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    packed: Tensor,
    targets: Tensor,
    how: SamplingDistribution,
    seen: SeenBefore | None = None,
    expected: Tensor | None = None,
    entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """(log-probs float32 [N], entropy float32 [N], both nats) of targets int64 [N] after hidden
    states [N, D].

    The entropy is left at zero unless it is asked for: it takes three passes over the logits.

    weight [V, D] is the output projection and packed its pack; seen is needed with a repetition
    penalty. Both are differentiable. expected float32 [N] is the gradient that the log-probs are
    going to receive, where the loss tells it beforehand: the gradients are then made with the
    logits at hand, and the backward pass has nothing to compute again. If another one arrives, the
    backward pass computes it as ever.
    """
    return _TokenLogprobs.apply(hidden, weight, packed, targets, how, seen, expected, entropy)  # type: ignore[no-any-return]


class _TokenLogprobs(torch.autograd.Function):
    """Saves the hidden states; the backward pass computes each chunk's logits again, one matmul
    more, unless `expected` held."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        packed: Tensor,
        targets: Tensor,
        how: SamplingDistribution,
        seen: SeenBefore | None,
        expected: Tensor | None,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.how, ctx.seen = how, seen
        logprobs, entropy = (hidden.new_zeros(len(targets), dtype=torch.float32) for _ in range(2))
        wanted = ctx.needs_input_grad if expected is not None else (False, False)
        grads = _Gradients(hidden, weight, wanted)
        for rows in chunks(len(targets), weight.shape[0]):
            logits = multiply(hidden[rows], packed).float()
            penalized = _penalize(logits, how, seen, rows)
            table = log_distribution(logits, how, targets[rows])
            logprobs[rows] = table.gather(1, targets[rows, None])[:, 0]
            if with_entropy:
                entropy[rows] = -row_sums(table.exp() * table.clamp_min(-1e4))
            if expected is not None and any(wanted):
                grads.add(
                    rows,
                    _slope(table, targets[rows], entropy[rows], expected[rows, None], None),
                    how,
                    penalized,
                )
        ctx.save_for_backward(
            hidden, weight, packed, targets, entropy, expected, grads.hidden, grads.weight
        )
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *above: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, packed, targets, entropy, expected, grad_hidden, grad_weight = (
            ctx.saved_tensors
        )
        if (
            expected is not None
            and above[1] is None
            and above[0] is not None
            and torch.equal(above[0], expected)
        ):
            return grad_hidden, grad_weight, *[None] * 6
        grads = _Gradients(hidden, weight, ctx.needs_input_grad)
        for rows in chunks(len(targets), weight.shape[0]):
            logits = multiply(hidden[rows], packed).float()
            penalized = _penalize(logits, ctx.how, ctx.seen, rows)
            table = log_distribution(logits, ctx.how, targets[rows])
            slope = _slope(
                table,
                targets[rows],
                entropy[rows],
                *(None if g is None else g[rows, None] for g in above),
            )
            grads.add(rows, slope, ctx.how, penalized)
        return grads.hidden, grads.weight, *[None] * 6


class _Gradients:
    """Those of the hidden states [N, D] and of the output projection [V, D], as far as wanted,
    chunk by chunk."""

    def __init__(self, hidden: Tensor, weight: Tensor, wanted: Sequence[bool]):
        self.inputs = hidden, weight
        self.hidden = torch.empty_like(hidden) if wanted[0] else None
        self.weight = torch.zeros_like(weight) if wanted[1] else None

    def add(
        self,
        rows: slice,
        slope: Tensor,
        how: SamplingDistribution,
        penalized: tuple[SeenTokens, Tensor] | None,
    ) -> None:
        """slope [n, V]: d loss / d tempered logits of these rows; it is used up."""
        hidden, weight = self.inputs
        if how.temperature not in (0.0, 1.0):
            slope.div_(how.temperature)
        if penalized is not None:
            seen, factor = penalized
            slope[seen.rows, seen.tokens] = slope[seen.rows, seen.tokens] * factor
        if self.hidden is not None:
            self.hidden[rows] = slope @ weight
        if self.weight is not None:
            self.weight.addmm_(slope.t(), hidden[rows])


def _slope(
    table: Tensor,
    targets: Tensor,
    entropy: Tensor,
    above: Tensor | None,
    above_entropy: Tensor | None,
) -> Tensor:
    """d loss / d tempered logits [N, V], from the gradients [N, 1] of the log-probs and of the
    entropy.

    d logprob = onehot - p and d entropy = -p (log p + entropy) on the kept set, 0 outside it.
    """
    if above_entropy is None:
        slope = table.exp_().mul_(-above)  # type: ignore[operator]
    else:
        probs = table.exp()
        slope = table.clamp_min_(-1e4).add_(entropy[:, None]).mul_(-above_entropy)
        slope = (slope if above is None else slope.sub_(above)).mul_(probs)
    return slope if above is None else slope.scatter_add_(1, targets[:, None], above)


def _penalize(
    logits: Tensor, how: SamplingDistribution, seen: SeenBefore | None, rows: slice
) -> tuple[SeenTokens, Tensor] | None:
    if how.repetition_penalty == 1.0:
        return None
    assert seen is not None, "a repetition penalty needs the tokens seen before"
    part = seen(rows.start, rows.stop)
    return part, penalize(logits, how.repetition_penalty, part)


def row_sums(table: Tensor) -> Tensor:
    """[n] of [n, V]. A single row would be summed by all threads, in an order that depends on their
    number."""
    return table.sum(-1) if len(table) > 1 else table.expand(2, -1).sum(-1)[:1]


def chunks(rows: int, vocabulary: int) -> list[slice]:
    """Runs of rows whose logits [n, V] fit CHUNK_BYTES."""
    size = max(16, CHUNK_BYTES // (4 * vocabulary))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
