"""Packing of samples into microbatches without padding, evenly filled; samples of a group share one
copy of their prompt's rows.

A prompt is trained once for its group and not once for each sample: exact, because a response
attends to the same keys at the same positions. Values of loss tokens (log-probs, advantages,
weights) are kept as one array a sample, in the order of its loss tokens, or one array a microbatch,
in the order of its targets; `join` and `split` turn one into the other.
Knows no model and no loss.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import numpy as np

from tandem.types import Array, Microbatch, Sample

Cluster = list[int]  # samples that share a prefix, by number


def pack(
    samples: Sequence[Sample],
    tokens_per_microbatch: int,
    *,
    keep_groups: bool = False,
    shares: int = 1,
) -> list[Microbatch]:
    """Pack samples into as few microbatches as the token budget allows, of nearly equal size, each
    in the order of its samples.

    shares: how many processes share them; each gets as many. keep_groups: keep the samples of a
    group in one microbatch; otherwise a group larger than the budget is split. A sample larger than
    the budget gets a microbatch of its own. Raises ValueError for a sample without a token after
    its prefix, or with loss on a token that nothing predicts.
    """
    for sample in samples:
        start = max(sample.prefix, 1)
        if len(sample.tokens) <= sample.prefix or sample.loss_mask[:start].any():
            raise ValueError(
                f"sample of group {sample.group}: {len(sample.tokens)} tokens, "
                f"prefix {sample.prefix}, loss before {start}"
            )
    clusters = list(_clusters(samples, tokens_per_microbatch, keep_groups))
    # input rows: the prefix once, then each sample's own tokens but the last, which nothing follows
    prefixes = [samples[cluster[0]].prefix for cluster in clusters]
    sizes = [
        prefix + sum(len(samples[i].tokens) - 1 - prefix for i in cluster)
        for prefix, cluster in zip(prefixes, clusters, strict=True)
    ]
    return [
        _microbatch(samples, [clusters[c] for c in sorted(members)])
        for members in _balance(sizes, tokens_per_microbatch, shares)
    ]


def join(
    batches: Sequence[Microbatch], columns: Sequence[Array] | Mapping[int, Array]
) -> list[Array]:
    """Join arrays of samples to arrays of microbatches."""
    return [np.concatenate([columns[i] for i in batch.samples]) for batch in batches]


def split(batches: Sequence[Microbatch], columns: Sequence[Array]) -> dict[int, Array]:
    """Split arrays of microbatches into arrays of samples, under the samples' numbers."""
    result: dict[int, Array] = {}
    for batch, column in zip(batches, columns, strict=True):
        ends = np.cumsum(np.bincount(batch.sequences, minlength=len(batch.samples)))[:-1]
        result |= dict(zip(batch.samples.tolist(), np.split(column, ends), strict=True))
    return result


def _clusters(samples: Sequence[Sample], budget: int, keep_groups: bool) -> Iterator[Cluster]:
    """Yield neighbours of one group that share a prefix, to the experts of its rows, and fit the
    budget together, or must stay together."""

    def shared(i: int) -> tuple[int, int, bytes]:
        prefix = samples[i].prefix
        return samples[i].group, prefix, samples[i].experts[:prefix].tobytes()

    for _, members in groupby(range(len(samples)), key=shared):
        cluster: Cluster = []
        rows = 0
        for i in members:
            own = len(samples[i].tokens) - 1 - samples[i].prefix
            if cluster and not keep_groups and (not samples[i].prefix or rows + own > budget):
                yield cluster
                cluster, rows = [], 0
            rows += own if cluster else own + samples[i].prefix
            cluster.append(i)
        yield cluster


def _balance(sizes: Sequence[int], budget: int, shares: int) -> list[list[int]]:
    """Fill bins of at most the budget, the largest first, each into the emptiest bin; return the
    places of the sizes in each. Their number is a multiple of `shares`, if there are so many
    sizes."""
    if not sizes:
        return []
    fitting = [size for size in sizes if size <= budget]
    count = len(sizes) - len(fitting) + -(-sum(fitting) // budget)
    count += -count % shares
    largest_first = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    while True:
        bins: list[list[int]] = [[] for _ in range(count)]
        filled = [0] * count
        for i in largest_first:
            emptiest = filled.index(min(filled))
            bins[emptiest].append(i)
            filled[emptiest] += sizes[i]
        if all(
            rows <= budget or len(members) == 1 for rows, members in zip(filled, bins, strict=True)
        ):
            return sorted(sorted(members) for members in bins if members)
        count += shares


def _microbatch(samples: Sequence[Sample], clusters: Sequence[Cluster]) -> Microbatch:
    tokens, positions, segments, rows, targets, experts = ([] for _ in range(6))  # type: ignore[var-annotated]
    first = 0
    for cluster in clusters:
        prefix, prefix_first = samples[cluster[0]].prefix, first
        if prefix:
            tokens.append(samples[cluster[0]].tokens[:prefix])
            experts.append(samples[cluster[0]].experts[:prefix])
            positions.append(np.arange(prefix))
            segments.append((first, prefix, 0, 0))
            first += prefix
        for sample in (samples[i] for i in cluster):
            own = len(sample.tokens) - 1 - prefix
            if own:
                tokens.append(sample.tokens[prefix:-1])
                experts.append(sample.experts[prefix:])
                positions.append(np.arange(prefix, prefix + own))
                segments.append((first, own, prefix_first, prefix))
            places = np.flatnonzero(sample.loss_mask)
            before = places - 1
            rows.append(np.where(before < prefix, prefix_first + before, first + before - prefix))
            targets.append(sample.tokens[places])
            first += own
    return Microbatch(
        tokens=np.concatenate(tokens),
        positions=np.concatenate(positions),
        segments=np.array(segments, np.int64),
        rows=np.concatenate(rows),
        targets=np.concatenate(targets),
        samples=np.concatenate(clusters),
        sequences=np.repeat(np.arange(len(targets)), [len(t) for t in targets]),
        experts=np.concatenate(experts),
    )
