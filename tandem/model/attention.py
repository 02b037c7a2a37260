"""Exact attention: a token's output has the same bits in a packed training pass and in decode.

Four rules make it so on a CPU, in float32 (`probe` checks them on the machine at hand). Queries,
keys and values may be bfloat16: the arithmetic is float32, and the output is rounded once.
  1. the query rows of a key/value head (new tokens x GQA group) are padded to a multiple of 4,
     keys to a multiple of 16;
  2. softmax runs over the padded row, where masked keys add exact zeros;
  3. probabilities x values are summed over blocks of 128 keys counted from position 0, because one
     long matmul splits its sum by length;
  4. the keys of queries x keys are stored by token on both sides (`query_key`), and MKL is in its
     strict mode (`numerics`).
A layer attends by the plan it is given: `PackedPlan` for packed segments,
`paged_attention.PagedPlan` in the engine. This file knows no sampling, losses or schedules.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.model.activations import soft_cap

KEY_BLOCK = 128
QUERY_BLOCK = 256
# Scores held at once: the bound of attention memory at any packed length.
BUCKET_BYTES = 1 << 26
# Padded sizes of a bucket: few enough that short segments share a batched matmul, close enough to
# waste little.
_SIZES = np.array([4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256])


def query_key(query: Tensor, keys: Tensor) -> Tensor:
    """Compute attention scores [n, K, M, L] of queries [n, K, M, E] with keys [n, K, L, E].

    Trainer and engine both pass keys stored by token; MKL multiplies keys stored by element in
    another order.
    """
    return torch.matmul(query, keys.transpose(-1, -2))


class Scoring(NamedTuple):
    """Scale, window, cap and sinks by which scores of queries and keys become probabilities."""

    scale: float
    window: int | None = None  # a query sees this many keys, its own among them; None: all before
    softcap: float = 0.0  # of scaled scores (Gemma 2)
    sinks: Tensor | None = None  # [H], score of a key without a value for each head (gpt-oss)


def weigh(scores: Tensor, mask: Tensor, scoring: Scoring) -> Tensor:
    """Turn scores [n, K, R, g, L] into probabilities, in place but for the softmax.

    mask bool [n, 1, R, 1, L] is true for hidden keys.
    """
    scores = scores.mul_(scoring.scale)
    if scoring.softcap:
        scores = soft_cap(scores, scoring.softcap)
    probs = scores.masked_fill_(mask, float("-inf")).softmax(-1)
    if scoring.sinks is None:
        return probs
    own = scoring.sinks.detach().view(scores.shape[1], -1)  # queries may be padded
    own = F.pad(own, (0, scores.shape[3] - own.shape[1]))[:, None, :, None]
    # the largest probability is one over the sum of the others' exponentials
    sink = (own - scores.amax(-1, keepdim=True)).exp_().mul_(probs.amax(-1, keepdim=True))
    return probs.div_(sink.add_(1.0))


def combine(probs: Tensor, values: Tensor) -> Tensor:
    """Sum probs [n, K, M, L] x values [n, K, L, E] by fixed key blocks (rule 3) to [n, K, M, E]."""
    out = torch.matmul(probs[..., :KEY_BLOCK], values[:, :, :KEY_BLOCK])
    for start in range(KEY_BLOCK, values.shape[2], KEY_BLOCK):
        block = slice(start, start + KEY_BLOCK)
        out += torch.matmul(probs[..., block], values[:, :, block])
    return out


def hidden_keys(positions: Tensor, keys: int, window: int | None) -> Tensor:
    """Mark the keys hidden from queries at positions int64 [n, R]: bool [n, 1, R, 1, keys].

    A query sees the keys up to its own position, with a window only the last `window` of them.
    """
    key, position = torch.arange(keys), positions[:, :, None]
    hidden = key > position
    if window is not None:
        hidden |= key <= position - window
    return hidden[:, None, :, None]


class Plan(Protocol):
    """Attention of one pass, the same for all layers: queries [T, H, E], keys and values [T, K, E]
    to [T, H, E]."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor: ...


@dataclass(kw_only=True)
class Bucket:
    """n runs of R query rows over L keys each, attended in one batched matmul. R is 1 or a multiple
    of 4, L one of 16."""

    queries: Tensor  # int64 [n, R], row of each query; padding repeats the run's last
    valid: Tensor  # bool [n * R], false for padding
    positions: Tensor  # int64 [n, R]: how many keys come before the query's own
    keys: Tensor  # int64 [n, ..., L], where a plan finds each key; those behind a query's are any
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None) -> Tensor:
        """Look up `hidden_keys` [n, 1, R, 1, L], made once for all layers."""
        if window not in self.masks:
            self.masks[window] = hidden_keys(self.positions, self.keys.shape[-1], window)
        return self.masks[window]


class PackedPlan:
    """Attention of packed segments (types.Microbatch.segments): causal, and over the prefix."""

    def __init__(self, segments: np.ndarray, *, group: int, kv_heads: int):
        self._segments, self._heads = segments, group * kv_heads
        self._before: list[Tensor] = []  # `_rows_before` for a lag of 1, 2 and so on

    @cached_property
    def buckets(self) -> list[Bucket]:
        first, rows, prefix_first, prefix = self._segments.T

        def rows_of(segments: np.ndarray, key: np.ndarray) -> np.ndarray:
            before, own = prefix[segments, None], first[segments, None]
            last = own + rows[segments, None] - 1
            found = np.minimum(own + key - before, last)
            return np.where(key < before, prefix_first[segments, None] + key, found)

        return buckets_of(first, prefix, rows, rows_of, self._heads)

    def earlier(self, layer: int, x: Tensor, count: int) -> list[Tensor]:
        """Return what x [T, D] was 1 to `count` tokens before each row in its sequence, [T, D]
        each, and zeros before a sequence's first token."""
        for lag in range(len(self._before) + 1, count + 1):
            counts = self._segments[:, 1]
            first, _, prefix_first, prefix = self._segments.repeat(counts, 0).T
            place = np.arange(len(first)) - (np.cumsum(counts) - counts).repeat(counts)
            own, shared = place - lag, prefix + place - lag
            found = np.full(len(x), -1)
            found[first + place] = np.where(
                own >= 0, first + own, np.where(shared >= 0, prefix_first + shared, -1)
            )
            self._before.append(torch.from_numpy(found))
        return [picked(x, rows) for rows in self._before[:count]]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        if torch.is_grad_enabled():
            return _PackedAttention.apply(q, k, v, scoring.sinks, self, scoring)  # type: ignore[no-any-return]
        return self.forward(q, k, v, scoring)[0]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the output [T, H, E], zeros in rows of no segment, and what `backward` takes."""

        def read(bucket: Bucket) -> tuple[Tensor, Tensor]:
            keys, values = (_gather(t.float(), bucket.keys, k.shape[1]) for t in (k, v))
            return keys, values

        return attend(q, self.buckets, scoring, read), None

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, above: Tensor, kept: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Compute the gradients of q, k, v and sinks from the output's. Probabilities are computed
        again, bucket by bucket."""
        kind, (q, k, v, above) = above.dtype, (t.float() for t in (q, k, v, above))
        totals = torch.zeros(q.shape), torch.zeros(k.shape), torch.zeros(v.shape)
        grad_sinks = None if scoring.sinks is None else torch.zeros_like(scoring.sinks)
        for bucket in self.buckets:
            _bucket_backward(bucket, (q, k, v), above, totals, scoring, grad_sinks)
        grad_q, grad_k, grad_v = (total.to(kind) for total in totals)
        return grad_q, grad_k, grad_v, grad_sinks


def picked(x: Tensor, rows: Tensor) -> Tensor:
    """Pick rows of x [T, D] by number, int64 [N], to [N, D]; zeros for -1."""
    return x.index_select(0, rows.clamp(min=0)).masked_fill(rows[:, None] < 0, 0.0)


def buckets_of(
    first: np.ndarray,
    start: np.ndarray,
    rows: np.ndarray,
    keys_of: Callable[[np.ndarray, np.ndarray], np.ndarray],
    heads: int,
    copied: int = 0,
    single: int = 4,
) -> list[Bucket]:
    """Group runs of query rows, of at most QUERY_BLOCK each, by padded rows and keys.

    first, start, rows: int64 [S], each sequence's first row, its position, and how many rows there
    are. keys_of: finds keys by sequences int64 [n] and positions int64 [L], of which some may be
    behind the last one. copied: numbers of a key that count as much as scores; single: rows that a
    single one is padded to.
    """
    members: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
    for sequence, (place, count) in enumerate(zip(start.tolist(), rows.tolist(), strict=True)):
        for at in range(0, count, QUERY_BLOCK):
            own = min(QUERY_BLOCK, count - at)
            size = ladder(own, 4) if own > 1 else single, ladder(place + at + own, 16)
            members[size].append((sequence, at, own))
    buckets = []
    for (padded, keys), runs in sorted(members.items()):
        limit = max(1, BUCKET_BYTES // (4 * keys * (heads * padded + copied)))
        for i in range(0, len(runs), limit):
            sequences, at, count = np.array(runs[i : i + limit]).T
            row = np.arange(padded)
            query = at[:, None] + np.minimum(row, count[:, None] - 1)
            buckets.append(
                Bucket(
                    queries=torch.from_numpy(first[sequences, None] + query),
                    valid=torch.from_numpy((row < count[:, None]).reshape(-1)),
                    positions=torch.from_numpy(start[sequences, None] + query),
                    keys=torch.from_numpy(keys_of(sequences, np.arange(keys))),
                )
            )
    return buckets


def ladder(size: int, multiple: int) -> int:
    """Round size up to one of few padded sizes, a multiple of `multiple`."""
    padded = _SIZES[np.searchsorted(_SIZES, size)] if size <= _SIZES[-1] else size + -size % 128
    return int(padded + -padded % multiple)


def _gather(t: Tensor, index: Tensor, heads: int) -> Tensor:
    """Pick rows of t [T, heads * g, E] by index [n, R] into [n, heads, R * g, E], contiguous."""
    split = t.index_select(0, index.reshape(-1)).view(*index.shape, heads, -1, t.shape[-1])
    return split.transpose(1, 2).reshape(len(index), heads, -1, t.shape[-1]).contiguous()


def _rows_first(t: Tensor, run: int, heads: int) -> Tensor:
    """Reorder [n, K, R * g, E] to [n * R, H, E], as `_gather` found rows."""
    n, kv_heads, _, width = t.shape
    split = t.reshape(n, kv_heads, run, heads // kv_heads, width)
    return split.transpose(1, 2).reshape(-1, heads, width)


def _probabilities(q: Tensor, k: Tensor, bucket: Bucket, scoring: Scoring) -> Tensor:
    n, kv_heads, rows, _ = q.shape
    split = query_key(q, k).view(n, kv_heads, bucket.queries.shape[1], -1, k.shape[2])
    return weigh(split, bucket.mask(scoring.window), scoring).view(n, kv_heads, rows, -1)


def attend(
    q: Tensor,
    buckets: list[Bucket],
    scoring: Scoring,
    read: Callable[[Bucket], tuple[Tensor, Tensor]],
) -> Tensor:
    """Attend q [T, H, E] to [T, H, E]; rows in no bucket, which are padding, are zero. read: gives
    a bucket's keys and values, float32 [n, K, L, E]."""
    dtype, q = q.dtype, q.float()
    out = torch.zeros(q.shape)
    for bucket in buckets:
        keys, values = read(bucket)
        query = _gather(q, bucket.queries, keys.shape[1])
        tile = F.pad(query, (0, 0, 0, -query.shape[2] % 4))  # of a single row
        probs = _probabilities(tile, keys, bucket, scoring)
        rows = combine(probs, values)[:, :, : query.shape[2]]
        rows = _rows_first(rows, bucket.queries.shape[1], q.shape[1])
        out.index_copy_(0, bucket.queries.reshape(-1)[bucket.valid], rows[bucket.valid])
    return out.to(dtype)


class _PackedAttention(torch.autograd.Function):
    """Autograd function over q, k, v and sinks, by a plan's `forward` and `backward`."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        plan: PackedPlan,
        scoring: Scoring,
    ) -> Tensor:
        out, kept = plan.forward(q, k, v, scoring)
        ctx.save_for_backward(q, k, v, sinks, kept)
        ctx.plan, ctx.scoring = plan, scoring._replace(sinks=None)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, kept = ctx.saved_tensors
        scoring = ctx.scoring._replace(sinks=sinks)
        return *ctx.plan.backward(q, k, v, scoring, grads[0], kept), None, None


def _bucket_backward(
    bucket: Bucket,
    saved: tuple[Tensor, Tensor, Tensor],
    grad: Tensor,
    out: tuple[Tensor, Tensor, Tensor],
    scoring: Scoring,
    grad_sinks: Tensor | None,
) -> None:
    (q, k, v), (grad_q, grad_k, grad_v) = saved, out
    heads, kv_heads = q.shape[1], k.shape[1]
    query = _gather(q, bucket.queries, kv_heads)
    key, value = (_gather(t, bucket.keys, kv_heads) for t in (k, v))
    above = _gather(grad, bucket.queries, kv_heads)
    padding = ~bucket.valid.view(bucket.queries.shape)
    above.view(*above.shape[:2], padding.shape[1], -1).masked_fill_(padding[:, None, :, None], 0.0)
    probs = _probabilities(query, key, bucket, scoring)
    grad_scores = torch.matmul(above, value.transpose(-1, -2))
    mean = (grad_scores * probs).sum(-1, keepdim=True)
    grad_scores -= mean
    grad_scores.mul_(probs).mul_(scoring.scale)
    if cap := scoring.softcap:
        capped = soft_cap(query_key(query, key).mul_(scoring.scale), cap).div_(cap)
        grad_scores.mul_(capped.square_().neg_().add_(1.0))
    if grad_sinks is not None:  # each has the rest of a row's probability
        lost = mean[..., 0] * (probs.sum(-1) - 1.0)
        by_head = lost.view(*lost.shape[:2], padding.shape[1], -1).sum((0, 2))
        grad_sinks += by_head.view(-1)
    rows = _rows_first(torch.matmul(grad_scores, key), bucket.queries.shape[1], heads)
    grad_q.index_copy_(0, bucket.queries.reshape(-1)[bucket.valid], rows[bucket.valid])
    index = bucket.keys.reshape(-1)
    for total, part in (
        (grad_k, torch.matmul(grad_scores.transpose(-1, -2), query)),
        (grad_v, torch.matmul(probs.transpose(-1, -2), above)),
    ):
        total.index_add_(0, index, part.transpose(1, 2).reshape(-1, kv_heads, k.shape[-1]))
